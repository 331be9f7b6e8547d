"""Premade estimators: the names, numbers and arguments of tf.estimator 2.15; its checkpoints go on."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.eager import context

from runner import Hook, Input, RunConfig
from runner.classic import inputs
from runner.classic.estimator import add_metrics
from runner.classic.premade import logits
from runner.tracing import trace_step
from tests.support import premade_cases
from tests.support.line import read_events
from tests.support.messages import Messages
from tests.support.models import strategies
from tests.support.tiers import slow_but

v1, fc = tf.compat.v1, tf.feature_column
REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "premade_reference.json").read_text())
V1, V2 = v1.estimator, tf.estimator
CASES = premade_cases.cases(V2, V1)


class Losses(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.losses += [float(loss) for loss in np.ravel(result.losses)]


def start(model_dir: Path, reference: dict[str, Any]) -> None:
    """Writes what 2.15 began with."""

    def value(name: str, shape: list[int], dtype: str) -> np.ndarray:
        if name in reference["start"]:
            return np.asarray(reference["start"][name], dtype)
        full = 0.1 if name.endswith(("accumulator", "Adagrad", "Ftrl")) else float(name.endswith("moving_variance"))
        return premade_cases.first_value(name, np.full(shape, full, dtype))

    variables = reference["variables"]
    premade_cases.write_first_checkpoint(model_dir, {name: value(name, *spec) for name, spec in variables.items()})


@pytest.mark.parametrize("name", slow_but(REFERENCE["cases"], "combined"))
def test_a_checkpoint_of_2_15_continues_with_its_numbers(name: str, tmp_path: Path) -> None:
    make, label = CASES[name]
    expected = REFERENCE["cases"][name]
    start(tmp_path, expected)
    estimator, seen = make(model_dir=str(tmp_path), config=RunConfig()), Losses()
    estimator.train(premade_cases.input_fn(label), steps=premade_cases.STEPS, hooks=[seen])
    assert estimator.get_variable_names() == sorted(expected["variables"])
    assert seen.losses == pytest.approx(expected["losses"], rel=1e-5)
    sums = {one: float(np.abs(estimator.get_variable_value(one)).sum()) for one in expected["sums"]}
    assert sums == pytest.approx(expected["sums"], rel=1e-5, abs=1e-6)
    metrics = estimator.evaluate(premade_cases.input_fn(label, repeat=1))
    assert metrics == pytest.approx(expected["metrics"], rel=1e-5)
    prediction = next(estimator.predict(premade_cases.input_fn(label, repeat=1)))
    assert list(prediction) == list(expected["prediction"])
    for key, wanted in expected["prediction"].items():
        found = premade_cases.plain(prediction[key])
        assert found == (wanted if isinstance(wanted[0], str) else pytest.approx(wanted, abs=1e-5))


def test_arguments_are_those_of_2_15() -> None:
    found = premade_cases.arguments(V2, V1)
    for name, expected in REFERENCE["arguments"].items():
        assert found[name][: len(expected)] == expected, name
        assert set(found[name]) - set(expected) <= {"warm_start_from"}, name  # 2.15 had it for all but some


def test_each_optimizer_reports_one_learning_rate(tmp_path: Path) -> None:
    estimator = V2.DNNRegressor([2], [fc.numeric_column("age")], str(tmp_path), config=RunConfig(save_summary_steps=1))
    estimator.train(premade_cases.input_fn("number"), steps=1)
    found = {event.tag: event.value for event in read_events(tmp_path) if "rate" in event.tag}
    assert found == {"train/learning_rate": pytest.approx(0.001)}


@pytest.mark.slow
@pytest.mark.parametrize(("linear_optimizer", "scope"), [("Ftrl", "Ftrl"), ("SGD", "SGD_1")])
def test_wide_and_deep_does_not_depend_on_the_replicas(linear_optimizer: str, scope: str, tmp_path: Path) -> None:
    cities = fc.categorical_column_with_vocabulary_list("city", ["a", "b"])
    words = fc.categorical_column_with_vocabulary_list("word", ["v", "w"])
    with tf.Graph().as_default():  # TensorFlow makes them in no other place
        shared = fc.shared_embeddings([cities, words], 2)
    found = {}
    for name in ("default", "mirrored"):
        estimator = V2.DNNLinearCombinedClassifier(
            str(tmp_path / name), [cities], linear_optimizer, [fc.numeric_column("x", shape=(2,)), *shared], "SGD", [4],
            config=RunConfig(train_distribute=strategies()[name], tf_random_seed=5), weight_column="w",
        )  # fmt: skip
        estimator.train(Input(of_19, params={}, batch_size=6))
        found[name] = {one: estimator.get_variable_value(one) for one in estimator.get_variable_names()}
    values = found["default"]
    assert list(values) == list(found["mirrored"])
    for one, value in values.items():
        np.testing.assert_allclose(found["mirrored"][one], value, rtol=1e-5, atol=1e-7, err_msg=one)
    assert values[f"training/{scope}/iter"] == values["global_step"] == 8
    first = tf.train.load_checkpoint(str(tmp_path / "default" / "model.ckpt-0"))
    shared_value = values["city_word_shared_embedding"]
    assert np.any(shared_value != first.get_tensor("city_word_shared_embedding"))  # 2.15 left it as it was


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DNNClassifier", "LinearRegressor"])
def test_sums_over_a_batch_do_not_depend_on_the_replicas(kind: str, tmp_path: Path) -> None:
    """Those of tf.compat.v1.estimator sum. 2.15 summed over replicas, too, but only reported the first one's loss."""
    x = [fc.numeric_column("x", shape=(2,)), fc.numeric_column("age", normalizer_fn=lambda years: years / 60.0)]
    found = {}
    for name in ("default", "mirrored"):
        config = RunConfig(train_distribute=strategies()[name], tf_random_seed=5)
        layers, optimizer = [[4]] if kind == "DNNClassifier" else [], v1.train.GradientDescentOptimizer(0.02)
        estimator, seen = (
            getattr(V1, kind)(
                *layers, x, model_dir=str(tmp_path / name), weight_column="w", optimizer=optimizer, config=config
            ),
            Losses(),
        )
        estimator.train(Input(of_19, params={}, batch_size=6), hooks=[seen])
        found[name] = {one: estimator.get_variable_value(one) for one in estimator.get_variable_names()}
        metrics = estimator.evaluate(Input(of_19, params={}, batch_size=6))
        found[name] |= {"losses": np.array(seen.losses), **metrics}
        weights = 2 * premade_cases.data()["w"][:19].sum()
        assert metrics["loss"] == pytest.approx(metrics["average_loss"] * weights / 8, rel=1e-6)
    assert len(found["default"]["losses"]) == 8
    for one, value in found["default"].items():
        np.testing.assert_allclose(found["mirrored"][one], value, rtol=1e-6, atol=1e-7, err_msg=one)


def of_19(params: Any) -> tf.data.Dataset:
    """Two epochs of 19 examples: the last batch of each has one."""
    dataset = premade_cases.input_fn("two", repeat=1, batch_size=1)().unbatch().take(19)
    return dataset.batch(params["batch_size"]).repeat(2)


@pytest.mark.parametrize("scope", slow_but(["linear/", "dnn/", ""], "dnn/", ""))
def test_hooks_find_losses_of_v1_by_the_names_that_they_had(scope: str, tmp_path: Path) -> None:
    """As the wide & deep sample of TensorFlow's models logs them; of four examples the sum is four times the mean."""
    columns = [fc.numeric_column("x")]
    make = {
        "linear/": lambda: V1.LinearRegressor(columns, tmp_path),
        "dnn/": lambda: V1.DNNRegressor([2], columns, tmp_path),
        "": lambda: V1.DNNLinearCombinedRegressor(tmp_path, columns, "Ftrl", columns, "Adagrad", [2]),
    }
    seen: list[dict[str, float]] = []

    class Fetches(tf.estimator.SessionRunHook):
        def before_run(self, context: Any) -> Any:
            return v1.train.SessionRunArgs(
                {"mean": f"{scope}head/truediv:0", "sum": f"{scope}head/weighted_loss/Sum:0"}
            )

        def after_run(self, context: Any, values: Any) -> None:
            seen.append(values.results)

    losses = Losses()
    data = tf.data.Dataset.from_tensors(({"x": [[1.0], [2.0], [3.0], [4.0]]}, [[2.0], [4.0], [6.0], [8.0]]))
    make[scope]().train(lambda: data, [Fetches(), losses], steps=1)
    assert seen[0]["sum"] == losses.losses[0] > 0
    assert seen[0]["mean"] == pytest.approx(losses.losses[0] / 4, rel=1e-6)


def test_a_baseline_comes_to_the_mean_of_the_labels(tmp_path: Path) -> None:
    estimator = V2.BaselineRegressor(str(tmp_path), optimizer=keras.optimizers.SGD(0.5), config=RunConfig())
    estimator.train(premade_cases.input_fn("number", batch_size=24), steps=60)
    mean = float(premade_cases.data()["number"].mean())
    assert estimator.get_variable_value("baseline/bias") == pytest.approx([mean], rel=1e-5)


def test_baselines_of_classes_and_of_a_head_come_to_the_frequencies_of_the_labels(tmp_path: Path) -> None:
    labels = premade_cases.data()["three"]
    expected = np.bincount(labels, minlength=3) / labels.size
    make = {
        "classifier": lambda **kw: V2.BaselineClassifier(n_classes=3, **kw),
        "estimator": lambda **kw: V2.BaselineEstimator(V2.MultiClassHead(3), **kw),
    }
    for name, of in make.items():
        optimizer = keras.optimizers.SGD(1.0)
        estimator = of(model_dir=str(tmp_path / name), optimizer=optimizer, config=RunConfig(tensorboard=False))
        estimator.train(premade_cases.input_fn("three", batch_size=24), steps=150)
        prediction = next(estimator.predict(premade_cases.input_fn("three", repeat=1)))
        np.testing.assert_allclose(prediction["probabilities"], expected, atol=1e-3)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trained DNNClassifier with dropout and names of classes."""
    deep, _ = premade_cases.columns()
    estimator = V2.DNNClassifier(
        [4], deep, tmp_path_factory.mktemp("dnn"), label_vocabulary=["no", "yes"], dropout=0.5, activation_fn="tanh",
        config=RunConfig(),
    )  # fmt: skip
    return estimator.train(with_names, steps=2)


def with_names() -> tf.data.Dataset:
    names = tf.constant(["no", "yes"])
    return premade_cases.input_fn("two", repeat=1)().map(lambda features, label: (features, tf.gather(names, label)))


@pytest.mark.slow
def test_added_metrics_come_with_those_of_the_head(classifier: Any, messages: Messages) -> None:
    def more(features: Any, predictions: Any) -> dict[str, Any]:
        return {
            "mean_age": v1.metrics.mean(features["age"]),
            "classes": tf.cast(predictions["class_ids"][:, 0], tf.float32),
        }

    plain, found = classifier.evaluate(with_names), add_metrics(classifier, more).evaluate(with_names)
    assert found["mean_age"] == pytest.approx(premade_cases.data()["age"].mean(), rel=1e-6)
    assert {name: found[name] for name in plain} == pytest.approx(plain)
    with messages.raised(ValueError):
        add_metrics(classifier, lambda logits: {})
    bound = functools.partial(
        lambda features, scale, **more: {"b": v1.metrics.mean(scale * features["age"])}, scale=2.0
    )
    assert "b" in add_metrics(classifier, bound).evaluate(with_names)


def test_an_exported_classifier_gives_scores_of_named_classes(classifier: Any, tmp_path: Path) -> None:
    from runner.export.receivers import build_parsing_serving_input_receiver_fn

    deep, _ = premade_cases.columns()
    receiver_fn = build_parsing_serving_input_receiver_fn(fc.make_parse_example_spec(deep))
    path = classifier.export_saved_model(str(tmp_path), receiver_fn).decode()
    signatures = tf.saved_model.load(path).signatures
    assert sorted(signatures) == ["classification", "predict", "regression", "serving_default"]
    feature = tf.train.Feature
    example = tf.train.Example(
        features=tf.train.Features(
            feature={
                "x": feature(float_list=tf.train.FloatList(value=[1.0, 2.0])),
                "age": feature(float_list=tf.train.FloatList(value=[30.0])),
                "city": feature(bytes_list=tf.train.BytesList(value=[b"a"])),
                "word": feature(bytes_list=tf.train.BytesList(value=[b"u"])),
            }
        )
    )
    found = signatures["serving_default"](tf.constant([example.SerializeToString()]))
    assert found["classes"].numpy().tolist() == [[b"no", b"yes"]]
    assert float(tf.reduce_sum(found["scores"])) == pytest.approx(1.0)


# --- parts --------------------------------------------------------------------------------------------------------


def test_logit_functions_are_called_with_what_they_take(messages: Messages) -> None:
    assert float(logits.call_logit_fn(lambda features, mode: features * 2, tf.constant(2.0), "train", {}, None)) == 4.0
    with messages.raised(ValueError):
        logits.call_logit_fn(lambda features: None, tf.constant(2.0), "train", {}, None)


def test_parse_specs_hold_features_label_and_weight(messages: Messages) -> None:
    x = fc.numeric_column("x", shape=(2,))
    spec = inputs.classifier_parse_example_spec([x], "y", label_default=0, weight_column="w")
    assert list(spec) == ["x", "y", "w"]
    assert spec["y"] == tf.io.FixedLenFeature((1,), tf.int64, 0)
    spec = inputs.regressor_parse_example_spec([x], "y", label_dimension=3)
    assert spec["y"] == tf.io.FixedLenFeature((3,), tf.float32, None)
    with messages.raised(ValueError):
        inputs.regressor_parse_example_spec([x], "x")


@pytest.mark.parametrize(
    "make",
    [
        lambda: V2.DNNLinearCombinedRegressor(),
        lambda: V2.DNNLinearCombinedRegressor(dnn_feature_columns=[fc.numeric_column("x")]),
        lambda: logits.dnn_logit_fn_builder(1, [2], [fc.categorical_column_with_identity("c", 3)])(
            {"c": tf.constant([[1]])}, "train"
        ),
        lambda: logits.linear_logit_fn_builder(1, [fc.numeric_column("x")] * 2)({"x": tf.zeros([2])}),
        lambda: logits.linear_logit_fn_builder(1, [fc.numeric_column("x")])(tf.zeros([2, 1])),
        lambda: logits.linear_logit_fn_builder(1, ["x"])({"x": tf.zeros([2])}),
        lambda: logits.dnn_logit_fn_builder(1.0, [2], []),  # type: ignore[arg-type]
    ],
    ids=[
        "no columns", "no hidden units", "a categorical column", "two of a name", "no dict", "no column",
        "units of a float",
    ],
)  # fmt: skip
def test_what_cannot_be_built_says_what_to_change(make: Callable[[], Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        make()


class Variables(tf.compat.v1.train.SessionRunHook):
    """Keeps the names of all variables with their sizes along axis 0, and what it fetches of some by name."""

    def __init__(self, *fetched: str) -> None:
        self.fetched = fetched

    def begin(self) -> None:
        self.found = {one.name: (one.shape.as_list() or [0])[0] for one in v1.global_variables()}

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(list(self.fetched))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values = run_values.results


def test_variables_of_v1_are_parts_as_in_tf_estimator(tmp_path: Path) -> None:
    """The names and sizes are those of TensorFlow 2.15."""

    def divided(shape: Any, dtype: Any) -> list[int]:
        return [4, 1] if shape[0] == 8 else [1] * len(shape)

    hook = Variables("linear/linear_model/c/weights/part_3:0", "dnn/logits/bias/part_0:0")
    column = fc.categorical_column_with_hash_bucket("c", 8)
    estimator = V1.DNNLinearCombinedClassifier(
        str(tmp_path), linear_feature_columns=[column], dnn_feature_columns=[fc.embedding_column(column, 2)],
        dnn_hidden_units=[3], input_layer_partitioner=divided, batch_norm=True, config=RunConfig(),
    )  # fmt: skip
    features, labels = {"c": np.array([["a"], ["b"]])}, np.array([[0], [1]])
    estimator.train(lambda: tf.data.Dataset.from_tensors((features, labels)).repeat(2), hooks=[hook])

    slots = {"dnn": ["Adagrad"], "linear": ["Ftrl", "Ftrl_1"]}
    table, bn = (
        "dnn/input_from_feature_columns/input_layer/c_embedding/embedding_weights",
        "dnn/hiddenlayer_0/batchnorm_0",
    )
    parts = {f"{name}/part_{number}": 2 for name in (table, "linear/linear_model/c/weights") for number in range(4)}
    parts |= {"dnn/hiddenlayer_0/kernel/part_0": 2, "dnn/hiddenlayer_0/bias/part_0": 3, f"{bn}/gamma/part_0": 3}
    parts |= {f"{bn}/beta/part_0": 3, "dnn/logits/kernel/part_0": 3, "dnn/logits/bias/part_0": 1}
    parts |= {"linear/linear_model/bias_weights/part_0": 1}
    of_slots = {f"{name}/{slot}": size for name, size in parts.items() for slot in slots[name.partition("/")[0]]}
    others = {f"{bn}/moving_mean": 3, f"{bn}/moving_variance": 3, "global_step": 0}
    assert hook.found == {f"{name}:0": size for name, size in {**parts, **of_slots, **others}.items()}
    assert [value.shape for value in hook.values] == [(2, 1), (1,)]
    assert estimator.get_variable_value(table).shape == (8, 2)
    assert np.isfinite(estimator.evaluate(lambda: tf.data.Dataset.from_tensors((features, labels)))["loss"])


class KeywordsAlone(tf.compat.v1.train.GradientDescentOptimizer):
    """A user's optimizer, whose `minimize` takes keywords alone, and notes them."""

    def __init__(self) -> None:
        super().__init__(0.1)

    def minimize(self, loss: Any, **keywords: Any) -> Any:
        GIVEN.append(sorted(keywords))
        return super().minimize(loss, **keywords)


GIVEN: list[list[str]] = []


def scaled_loss(labels: Any, logits: Any) -> Any:
    with v1.variable_scope("", reuse=v1.AUTO_REUSE):
        scale = v1.get_variable("scale", [], initializer=v1.constant_initializer(1.5))
    return tf.square(labels - scale * logits)


@pytest.mark.parametrize(
    ("make", "keywords", "scale", "weight"),
    [
        (lambda head, optimizer, **args: V1.LinearEstimator(head, optimizer=optimizer, **args),
         ["global_step"], 1.536552906036377, 0.646576),
        (lambda head, optimizer, feature_columns: V1.DNNLinearCombinedEstimator(
            head, linear_feature_columns=feature_columns, linear_optimizer=optimizer), ["var_list"], 1.5, 0.666),
    ],
    ids=["plain", "combined"],
)  # fmt: skip
def test_v1_calls_an_own_optimizer_as_2_15_did_which_trains_what_it_trained(
    make: Callable[..., Any], keywords: list[str], scale: float, weight: float
) -> None:
    """The numbers are those of TensorFlow 2.15, with its own head. A plain model trains a variable of the loss, too."""
    canned = importlib.import_module("tensorflow_estimator.python.estimator.canned.head")
    GIVEN.clear()
    head = canned._regression_head(loss_fn=scaled_loss)
    estimator = make(head, KeywordsAlone(), feature_columns=[fc.numeric_column("x")])
    estimator.train(lambda: tf.data.Dataset.from_tensors(({"x": [[1.0]]}, [[2.0]])).repeat(), steps=3)
    assert GIVEN == [keywords]
    (of_loss,) = [name for name in estimator.get_variable_names() if "scale" in name]
    (of_column,) = [name for name in estimator.get_variable_names() if "x/w" in name]
    assert float(estimator.get_variable_value(of_loss)) == pytest.approx(scale, rel=1e-6)
    assert float(estimator.get_variable_value(of_column).item()) == pytest.approx(weight, rel=1e-6)
    assert estimator.get_variable_value("global_step") == 3


class OwnSGD(tf_keras.optimizers.legacy.SGD):
    """A class of the user's own."""


@pytest.mark.parametrize("kind", [tf_keras.optimizers.legacy.SGD, OwnSGD])
def test_the_iterations_of_the_optimizer_that_was_given_are_the_global_step_after_each_training(kind: Any) -> None:
    optimizer = kind(0.1)
    estimator = V2.LinearRegressor([fc.numeric_column("x")], optimizer=optimizer)
    for steps in (3, 6):
        estimator.train(lambda: tf.data.Dataset.from_tensors(({"x": [[1.0]]}, [[2.0]])).repeat(), steps=3)
        assert optimizer.iterations.name == "global_step:0" and int(optimizer.iterations) == steps
        assert estimator.get_variable_value(optimizer.iterations.name) == steps
        assert "training/SGD/iter" not in estimator.get_variable_names()


@pytest.mark.slow
def test_lookups_read_only_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grappler would join a lookup into a read of the whole table, which a variable with sparse updates copies."""
    words = tf.feature_column.categorical_column_with_hash_bucket("word", 50)

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(({"word": [["a", "b"], ["b", ""], ["c", "a"]]}, [[1], [0], [1]])).repeat(4)

    found: list[dict[str, np.ndarray]] = []
    for reads_rows in (False, True):
        if reads_rows:
            monkeypatch.undo()
        else:
            monkeypatch.setattr(trace_step, "lookups_of_rows", contextlib.nullcontext)
        model = tf.estimator.DNNLinearCombinedClassifier(
            str(tmp_path / str(reads_rows)),
            linear_feature_columns=[words],
            dnn_feature_columns=[tf.feature_column.embedding_column(words, 2)],
            dnn_hidden_units=[3],
            config=tf.estimator.RunConfig(tf_random_seed=1),
        )
        eager = context.context()
        eager.enable_run_metadata()
        model.train(input_fn)
        metrics = model.evaluate(input_fn)
        graphs = [part for one in eager.export_run_metadata().function_graphs for part in one.partition_graphs]
        eager.disable_run_metadata()
        whole = [node for graph in graphs for node in graph.node if "SimplifyEmbeddingLookup" in node.name]
        assert bool(whole) != reads_rows
        found.append({name: model.get_variable_value(name) for name in model.get_variable_names()} | metrics)
    for name, value in found[0].items():
        np.testing.assert_array_equal(value, found[1][name], err_msg=name)
