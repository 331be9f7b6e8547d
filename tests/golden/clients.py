"""Pipelines of public libraries on Estimator, as their users write them, on tf.estimator 2.15 and on the runner.

`python -m tests.golden.clients FOLDER NAME ...` trains, evaluates, predicts and exports each case in FOLDER and leaves
`NAME.json`. On the runner, `import runner.classic` comes first. The libraries are those of requirements/clients.txt.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

if importlib.util.find_spec("hydra"):  # not TensorFlow 2.15's
    import runner.classic  # noqa: F401  (tf.estimator)

import numpy as np
import tensorflow as tf

from tests.golden import runs

v1 = tf.compat.v1
ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")

STEPS = 6
# TensorFlow Ranking draws the order of documents with equal scores, in each metric anew, and its estimators have no
# seed: where all ReLUs of a layer are off, as some first weights have it, no two runs of one TensorFlow agree.
NO_TIES = tf.nn.tanh


class Case(NamedTuple):
    """A pipeline.

    Args:
      train: the input_fn of training, `evaluate` and `predict` those of the others.
      receiver: a serving_input_receiver_fn, if it is exported.
      request: what its export is asked.
    """

    estimator: Any
    train: Callable[..., Any]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any] | None = None
    receiver: Callable[[], Any] | None = None
    request: Any = None


def config(**more: Any) -> Any:
    return tf.estimator.RunConfig(tf_random_seed=1, keep_checkpoint_max=None, save_summary_steps=2, **more)


# TensorFlow Ranking: lists of documents of a query, in ELWC.


def elwc() -> list[bytes]:
    """Twelve lists of three to five documents, serialised ExampleListWithContext."""

    def example(**values: Any) -> bytes:
        features = {
            key: tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(value))) for key, value in values.items()
        }
        return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())

    def field(number: int, message: bytes) -> bytes:
        assert len(message) < 1 << 14
        size = bytes([len(message) & 127 | 128, len(message) >> 7])
        return bytes([number << 3 | 2]) + size + message

    random, lists = np.random.default_rng(3), []
    for _ in range(12):
        taste = random.normal(size=2)
        documents = random.normal(size=[random.integers(3, 6), 2])
        relevance = np.clip(np.round(documents @ taste) + 1, 0, 4)
        weights = random.uniform(0.5, 2, len(documents))
        found = b"".join(
            field(1, example(x=one, z=one[:1] ** 2, relevance=[label], weight=[weight]))
            for one, label, weight in zip(documents, relevance, weights, strict=True)
        )
        lists.append(found + field(2, example(taste=taste)))
    return lists


def columns() -> tuple[dict[str, Any], dict[str, Any]]:
    """Feature columns of the query and of a document."""
    numeric = functools.partial(tf.feature_column.numeric_column, default_value=0.0)  # of documents that fill up a list
    return {"taste": numeric("taste", [2])}, {"x": numeric("x", [2]), "z": numeric("z", [1])}


def ranking_input(folder: Path, epochs: int | None = None, labels: bool = True, heads: bool = False) -> Any:
    import tensorflow_ranking as tfr

    path = folder / "lists.tfrecord"
    if not path.exists():
        with tf.io.TFRecordWriter(str(path)) as writer:
            for one in elwc():
                writer.write(one)
    context, example = columns()
    example |= {key: tf.feature_column.numeric_column(key, default_value=-1) for key in ("relevance", "weight")}

    def input_fn() -> Any:
        dataset = tfr.data.build_ranking_dataset(
            str(path), tfr.data.ELWC, 4, tf.feature_column.make_parse_example_spec(context.values()),
            tf.feature_column.make_parse_example_spec(example.values()), list_size=5, num_epochs=epochs, shuffle=False,
        )  # fmt: skip

        def split(features: dict[str, Any]) -> Any:
            relevance = tf.squeeze(features.pop("relevance"), 2)
            features["weight"] = tf.squeeze(features["weight"], 2)
            if not labels:
                return features
            return features, {"one": relevance, "two": tf.minimum(relevance, 1)} if heads else relevance

        return dataset.map(split)

    return input_fn


def ranking_case(folder: Path, estimator: Any, **options: Any) -> Case:
    import tensorflow_ranking as tfr

    context, example = columns()
    receiver = tfr.data.build_ranking_serving_input_receiver_fn(
        tfr.data.ELWC, tf.feature_column.make_parse_example_spec(context.values()),
        tf.feature_column.make_parse_example_spec(example.values()),
    )  # fmt: skip
    train, evaluate = ranking_input(folder, **options), ranking_input(folder, 1, **options)
    return Case(estimator, train, evaluate, ranking_input(folder, 1, False), receiver, elwc())


def groupwise(folder: Path, two_heads: bool = False) -> Case:
    import tensorflow_ranking as tfr

    context, example = columns()

    def transform(features: Any, mode: str) -> Any:
        return tfr.feature.encode_listwise_features(features, context, example, mode=mode, scope="transform")

    def score(context_features: Any, group_features: Any, mode: str, params: Any, config: Any) -> Any:
        parts = [v1.layers.flatten(context_features["taste"])]
        parts += [v1.layers.flatten(group_features[name]) for name in sorted(example)]
        hidden = v1.layers.dense(tf.concat(parts, 1), 8, tf.nn.tanh)
        hidden = v1.layers.batch_normalization(hidden, training=mode == "train", momentum=0.9)
        logits = v1.layers.dense(hidden, 2 if two_heads else 1)
        return {"one": logits[:, :1], "two": logits[:, 1:]} if two_heads else logits

    def train_op(loss: Any) -> Any:
        updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        minimize = v1.train.AdagradOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        return tf.group(minimize, *updates)

    key = tfr.metrics.RankingMetricKey
    metrics = {
        f"metric/{name}_{topn}": tfr.metrics.make_ranking_metric_fn(name, topn=topn)
        for name in (key.NDCG, key.MRR, key.MAP, key.PRECISION, key.DCG)
        for topn in (2, None)
    } | {"metric/arp": tfr.metrics.make_ranking_metric_fn(key.ARP, weights_feature_name="weight")}

    def head(loss: str, name: str | None = None) -> Any:
        loss_fn = tfr.losses.make_loss_fn(loss, weights_feature_name="weight")
        return tfr.head.create_ranking_head(loss_fn, metrics, train_op_fn=train_op, name=name)

    heads = head("softmax_loss")
    if two_heads:
        both = [head("pairwise_logistic_loss", "one"), head("mean_squared_loss", "two")]
        heads = tfr.head.create_multi_ranking_head(both, [1.0, 0.5])
    model_fn = tfr.model.make_groupwise_ranking_fn(score, 1, heads, transform)
    return ranking_case(
        folder, tf.estimator.Estimator(model_fn, str(folder), config()), **({"heads": True} if two_heads else {})
    )


def dnn_ranking(folder: Path, loss: str) -> Case:
    import tensorflow_ranking as tfr

    context, example = columns()
    estimator = tfr.estimator.make_dnn_ranking_estimator(
        example, [8, 4], context, learning_rate=0.1, loss=loss, activation_fn=NO_TIES, use_batch_norm=True,
        batch_norm_moment=0.9, model_dir=str(folder), listwise_inference=True,
    )  # fmt: skip
    return ranking_case(folder, estimator)


def gam_ranking(folder: Path) -> Case:
    import tensorflow_ranking as tfr

    context, example = columns()
    estimator = tfr.estimator.make_gam_ranking_estimator(
        example, [4], context, [4], optimizer=v1.train.GradientDescentOptimizer(0.2), activation_fn=NO_TIES,
        model_dir=str(folder), listwise_inference=True,
    )  # fmt: skip
    return ranking_case(folder, estimator)


def built_ranking(folder: Path) -> Case:
    import tensorflow_ranking as tfr

    context, example = columns()

    def score(context_features: Any, example_features: Any, mode: str) -> Any:
        return v1.layers.dense(tf.concat([example_features[name] for name in sorted(example)], 1), 1)

    class Builder(tfr.estimator.EstimatorBuilder):
        def _eval_metric_fns(self) -> dict[str, Any]:
            own = tfr.metrics.make_ranking_metric_fn(tfr.metrics.RankingMetricKey.MAP, topn=2)
            return {**super()._eval_metric_fns(), "metric/map": own}

    hparams = {
        "checkpoint_secs": 120, "num_checkpoints": 100, "listwise_inference": True, "model_dir": str(folder),
        "loss": "softmax_loss:0.7,approx_mrr_loss:0.3", "loss_weights_feature_name": "weight",
        "metric_weights_feature_name": "weight", "learning_rate": 0.1,
    }  # fmt: skip
    return ranking_case(folder, Builder(context, example, score, hparams=hparams).make_estimator())


def keras_ranking(folder: Path, network: str) -> Case:
    import tensorflow_ranking as tfr

    context, example = columns()
    if network == "dnn":
        net = tfr.keras.canned.DNNRankingNetwork(context, example, [8], tf.nn.relu, batch_norm_moment=0.9, dropout=0.0)
    else:
        net = tfr.keras.canned.GAMRankingNetwork(
            context, example, example_hidden_layer_dims=[4], context_hidden_layer_dims=[4], activation=tf.nn.relu,
            use_batch_norm=False, dropout=0.0,
        )  # fmt: skip
    model = tfr.keras.model.create_keras_model(
        net, tfr.keras.losses.get("softmax_loss"), tfr.keras.metrics.default_keras_metrics(),
        tf.keras.optimizers.legacy.Adagrad(0.1), None, 5,
    )  # fmt: skip
    estimator = tfr.keras.estimator.model_to_estimator(model, str(folder), config(), weights_feature_name="weight")
    return ranking_case(folder, estimator)


# TF-GAN: points on a line from noise.


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def generator(inputs: Any, mode: str = "train") -> Any:
    hidden = v1.layers.dense(inputs, 6, tf.nn.relu)
    return v1.layers.dense(v1.layers.batch_normalization(hidden, training=mode == "train", momentum=0.9), 2)


def discriminator(data: Any, conditioning: Any, mode: str = "train") -> Any:
    return v1.layers.dense(v1.layers.dense(data, 6, tf.nn.leaky_relu), 1)


def gan_input(labels: bool = True, steps: int = 40) -> Callable[..., Any]:
    def input_fn(params: Any = None) -> Any:
        z, real = noise(1, 8 * steps, 3), noise(2, 8 * steps, 1) * np.array([1, 2], np.float32)
        return tf.data.Dataset.from_tensor_slices((z, real) if labels else z).batch(8, drop_remainder=True)

    return input_fn


def gan_receiver() -> Any:
    given = v1.placeholder(tf.float32, [None, 3], "noise")
    return tf.estimator.export.TensorServingInputReceiver(given, {"noise": given})


def gan_case(estimator: Any, exported: bool = True) -> Case:
    inputs = gan_input(), gan_input(steps=3), gan_input(False, 2)
    return Case(estimator, *inputs, *((gan_receiver, noise(4, 5, 3)) if exported else ()))


def gan(folder: Path, losses: str = "wasserstein", joint: bool = False, **more: Any) -> Case:
    import tensorflow_gan as tfgan

    def metrics(model: Any) -> dict[str, Any]:
        return {"spread": v1.metrics.mean(tf.math.reduce_std(model.generated_data, 0))}

    hooks = tfgan.get_joint_train_hooks() if joint else tfgan.get_sequential_train_hooks(tfgan.GANTrainSteps(1, 2))
    estimator = tfgan.estimator.GANEstimator(
        str(folder), generator, discriminator, getattr(tfgan.losses, losses + "_generator_loss"),
        getattr(tfgan.losses, losses + "_discriminator_loss"), v1.train.AdamOptimizer(0.01, 0.5),
        functools.partial(v1.train.AdamOptimizer, 0.02, 0.5), hooks, metrics,
        tfgan.estimator.SummaryType.VARIABLES, config=config(), **more,
    )  # fmt: skip
    return gan_case(estimator)


def tpu_gan(folder: Path, joint: bool) -> Case:
    import tensorflow_gan as tfgan

    loss = tfgan.losses
    estimator = tfgan.estimator.TPUGANEstimator(
        generator, discriminator, loss.modified_generator_loss, loss.modified_discriminator_loss,
        v1.train.AdamOptimizer(0.01), v1.train.AdamOptimizer(0.02), joint_train=joint, use_tpu=False, eval_on_tpu=False,
        train_batch_size=4, eval_batch_size=8, predict_batch_size=8, export_to_tpu=False,
        gan_train_steps=tfgan.GANTrainSteps(1, 2 if joint else 1),
        config=v1.estimator.tpu.RunConfig(model_dir=str(folder), tf_random_seed=1, keep_checkpoint_max=None),
    )  # fmt: skip
    return gan_case(estimator)


def star_gan(folder: Path) -> Case:
    import tensorflow_gan as tfgan

    def generate(data: Any, domain: Any, mode: str) -> Any:
        return v1.layers.dense(tf.concat([data, domain], 1), 2, tf.nn.tanh)

    def discriminate(data: Any, domains: int, mode: str) -> Any:
        hidden = v1.layers.dense(data, 6, tf.nn.leaky_relu)
        return v1.layers.dense(hidden, 1), v1.layers.dense(hidden, domains)

    # The penalty of gradients would draw random numbers.
    loss = functools.partial(tfgan.stargan_loss, gradient_penalty_weight=None)

    def input_fn(labels: bool = True, steps: int = 40) -> Any:
        domain = np.eye(3, dtype=np.float32)[np.random.default_rng(6).integers(0, 3, 8 * steps)]
        pair = noise(5, 8 * steps, 2), domain
        given = pair if labels else (pair, domain)  # of a pair, predict takes the first
        return tf.data.Dataset.from_tensor_slices(given).batch(8, drop_remainder=True)

    estimator = tfgan.estimator.StarGANEstimator(
        str(folder), generate, discriminate, loss, v1.train.AdamOptimizer(0.01), v1.train.AdamOptimizer(0.02),
        config=config(),
    )  # fmt: skip
    part = functools.partial
    return Case(estimator, input_fn, part(input_fn, steps=3), part(input_fn, False, 2))


def latent_gan(folder: Path) -> Case:
    import tensorflow_gan as tfgan

    start = folder.with_name("gan_wasserstein")  # trained before

    def loss(model: Any, features: Any, labels: Any, add_summaries: bool) -> Any:
        return tf.reduce_mean(tf.abs(model.generated_data - labels)) - 0.1 * tf.reduce_mean(
            model.discriminator_gen_outputs
        )

    params = {"batch_size": 8, "z_shape": [3], "add_summaries": True, "input_clip": 2.0, "learning_rate": 0.05}
    estimator = tfgan.estimator.get_latent_gan_estimator(
        generator, discriminator, loss, v1.train.AdamOptimizer, params, config(model_dir=str(folder)), str(start)
    )
    return Case(estimator, gan_input(), gan_input(steps=3))  # predict has no labels, which it needs


# DeepCTR: clicks from sparse and dense columns.


def clicks(size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(7)
    features: dict[str, np.ndarray] = {f"c{i}": random.integers(0, 5 + i, size) for i in range(3)}
    features |= {"d": random.normal(size=[size]).astype(np.float32)}
    return features, (features["c0"] + features["c1"] > 4).astype(np.float32)


def ctr(
    folder: Path,
    name: str,
    linear: bool = True,
    dense: bool = True,
    batch_size: int = 16,
    replicas: int = 1,
    **more: Any,
) -> Case:
    from deepctr import estimator as models
    from deepctr.estimator.inputs import input_fn_tfrecord

    column = tf.feature_column
    categories = [column.categorical_column_with_identity(f"c{i}", 5 + i) for i in range(3)]
    deep = [column.embedding_column(one, 4) for one in categories]
    deep += [column.numeric_column("d")] if dense else []
    parts = [[*categories, column.numeric_column("d")]] if linear else []
    if name not in ("AFM",):
        more = {"dnn_hidden_units": (8, 4), **more}
    several = {}
    if replicas > 1:
        several["train_distribute"] = tf.distribute.MirroredStrategy([f"/cpu:{index}" for index in range(replicas)])
    made = getattr(models, name + "Estimator")(*parts, deep, model_dir=str(folder), config=config(**several), **more)

    path = folder.with_name("clicks.tfrecord")
    features, labels = clicks(160)
    if not path.exists():
        with tf.io.TFRecordWriter(str(path)) as writer:
            for at, label in enumerate(labels):
                int64 = lambda value: tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))  # noqa: E731
                floats = lambda value: tf.train.Feature(float_list=tf.train.FloatList(value=[value]))  # noqa: E731
                one = {key: (floats if key == "d" else int64)(value[at]) for key, value in features.items()}
                example = tf.train.Example(features=tf.train.Features(feature={**one, "label": floats(label)}))
                writer.write(example.SerializeToString())
    spec: dict[str, Any] = {f"c{i}": tf.io.FixedLenFeature(1, tf.int64) for i in range(3)}
    spec |= {"d": tf.io.FixedLenFeature(1, tf.float32), "label": tf.io.FixedLenFeature(1, tf.float32)}

    def read(epochs: int, size: int = 16) -> Any:
        return input_fn_tfrecord(str(path), spec, "label", size, epochs, shuffle_factor=0)

    del spec["label"]
    receiver = tf.estimator.export.build_parsing_serving_input_receiver_fn(spec)
    spec["label"] = tf.io.FixedLenFeature(1, tf.float32)
    request = [bytes(one) for one in tf.data.TFRecordDataset(str(path)).take(5).as_numpy_iterator()]
    return Case(made, read(3, batch_size), read(1), read(1), receiver, request)


def ctr_of_frame(folder: Path) -> Case:
    import pandas as pd
    from deepctr.estimator.inputs import input_fn_pandas

    features, labels = clicks(160)
    frame = pd.DataFrame({**features, "label": labels})
    case = ctr(folder, "WDL", task="regression")
    return case._replace(
        train=input_fn_pandas(frame, list(features), "label", 16, 3),
        evaluate=input_fn_pandas(frame, list(features), "label", 16),
        predict=input_fn_pandas(frame, list(features), None, 16),
    )  # fmt: skip


LOSSES = (
    "pairwise_hinge_loss", "pairwise_mse_loss", "softmax_loss", "poly_one_softmax_loss", "unique_softmax_loss",
    "sigmoid_cross_entropy_loss", "approx_ndcg_loss", "approx_mrr_loss", "neural_sort_ndcg_loss", "list_mle_loss",
)  # fmt: skip
CTR: Mapping[str, dict[str, Any]] = {
    "DeepFM": {"dnn_use_bn": True}, "xDeepFM": {"cin_layer_size": (4, 4)}, "DCN": {}, "WDL": {}, "NFM": {},
    "AutoInt": {"att_embedding_size": 4}, "FiBiNET": {}, "PNN": {"linear": False, "use_outter": True}, "FwFM": {},
    "CCPM": {"dense": False, "conv_kernel_width": (2, 2)}, "FNN": {}, "AFM": {"dense": False}, "DeepFEFM": {},
}  # fmt: skip
CASES: dict[str, Callable[[Path], Case]] = {
    "groupwise": groupwise,
    "groupwise_two_heads": functools.partial(groupwise, two_heads=True),
    **{f"dnn_{one}": functools.partial(dnn_ranking, loss=one) for one in LOSSES},
    "gam": gam_ranking,
    "built": built_ranking,
    "keras_dnn": functools.partial(keras_ranking, network="dnn"),
    "keras_gam": functools.partial(keras_ranking, network="gam"),
    "gan_wasserstein": gan,
    **{f"gan_{one}": functools.partial(gan, losses=one, joint=True) for one in ("modified", "least_squares")},
    "tpu_gan": functools.partial(tpu_gan, joint=False),
    "tpu_gan_joint": functools.partial(tpu_gan, joint=True),
    "star_gan": star_gan,
    "latent_gan": latent_gan,
    **{f"ctr_{name}": functools.partial(ctr, name=name, **more) for name, more in CTR.items()},
    "ctr_of_frame": ctr_of_frame,
}


ON_REPLICAS: dict[str, tuple[Callable[[Path], Case], Callable[[Path], Case]]] = {
    f"ctr_{name}": (
        functools.partial(ctr, name=name, replicas=2, **more),
        functools.partial(ctr, name=name, batch_size=32, **more),
    )
    for name, more in CTR.items()
    if name in ("xDeepFM", "WDL", "AutoInt", "FwFM")
}
"""Case -> it on two replicas, and on one device, which gets the batches of both as one.

Not among them: the BatchNormalization of DeepFM has the statistics of the replica's own batch; losses of TensorFlow
Ranking are divided by sums of weights of the replica's own lists; TF-GAN does not find the update operations of a
second replica; compiled losses of tf.keras refuse a strategy.
"""

DRAW = {
    "star_gan": "predictions",  # draws the domains to train for
    "dnn_list_mle_loss": "predictions",  # draws the order of documents with equal labels
    # In 2.15 the two updates of a step's moving variance race: three runs, three values. Training does not read it.
    "tpu_gan": "predictions|losses",
    "tpu_gan_joint": "predictions|losses",
}
"""Case that draws numbers, other ones in each TensorFlow -> which results can be compared; predictions are of the first
checkpoint.
"""
OF_PANDAS = ("ctr_of_frame",)  # which the environment of TensorFlow 2.15 does not have


def flat(found: Any, name: str = "") -> dict[str, np.ndarray]:
    """Path -> numbers of nested dicts and lists of dicts."""
    if isinstance(found, list) and found and isinstance(found[0], Mapping):
        found = dict(enumerate(found))
    if not isinstance(found, Mapping):
        return {name: np.asarray(found, np.float64)}
    return {path: one for key, value in found.items() for path, one in flat(value, f"{name}/{key}").items()}


def came_to(name: str, folder: Path, make: Callable[[Path], Case]) -> dict[str, Any]:
    """What the case comes to in the folder `name` of `folder`: losses, metrics, predictions, answers of the export."""
    case, losses = make(folder / name), runs.Losses()
    case.estimator.train(case.train, hooks=[losses], max_steps=STEPS)
    found: dict[str, Any] = {"losses": losses.seen, "metrics": case.estimator.evaluate(case.evaluate)}
    if case.predict:
        first = str(folder / name / "model.ckpt-0") if name in DRAW else None
        found["predictions"] = list(case.estimator.predict(case.predict, checkpoint_path=first))
    if case.receiver:
        path = case.estimator.export_saved_model(str(folder / (name + "-export")), case.receiver)
        for key, answer in tf.saved_model.load(path.decode()).signatures.items():
            (argument,) = answer.structured_input_signature[1]
            found[f"exported {key}"] = answer(**{argument: tf.constant(case.request)})
    return {path: value.tolist() for path, value in flat(found).items()}


def main(folder: Path, *names: str) -> None:
    """Leave of each case `<name>.json`, or `<name>.error`."""
    if not hasattr(inspect, "getargspec"):  # TF-GAN calls it; Python 3.11 has dropped it
        inspect.getargspec = lambda function: ArgSpec(*inspect.getfullargspec(function)[:4])  # type: ignore[attr-defined]
    if not CASES.keys() >= set(names):  # those on replicas; the others are compared with 2.15, on one device there
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    cases = dict(CASES)
    for name, pair in ON_REPLICAS.items():
        cases |= zip((f"{name}_on_two", f"{name}_on_one"), pair, strict=True)
    for name in names or CASES:
        (folder / name).mkdir(exist_ok=True)
        try:
            runs.leave(folder / (name + ".json"), came_to(name, folder, cases[name]))
        except Exception:
            (folder / (name + ".error")).write_text(traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
