"""Premade estimators, data and first values for each.

`python tests/support/premade_cases.py > tests/data/premade_reference.json` in an interpreter with TensorFlow 2.15.1
made what tests/classic/premade/test_premade.py expects of them: names of the variables, losses of 6 steps, metrics and
one prediction.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

STEPS = 6


def data() -> dict[str, np.ndarray]:
    """24 examples: features, and labels of three kinds."""
    rng = np.random.RandomState(3)
    x = rng.randn(24, 2).astype(np.float32)
    return {
        "x": x,
        "age": (rng.rand(24) * 60).astype(np.float32),
        "city": np.array([b"a", b"b", b"c", b"z"])[rng.randint(0, 4, 24)],
        "word": np.array([b"u", b"v", b"w"])[rng.randint(0, 3, 24)],
        "w": (rng.rand(24) + 0.5).astype(np.float32),
        "two": (x[:, 0] + 0.3 * rng.randn(24) > 0).astype(np.int64),
        "three": rng.randint(0, 3, 24),
        "number": (x @ [1.0, -2.0] + 0.1 * rng.randn(24)).astype(np.float32),
    }


def input_fn(label: str, repeat: int | None = None, batch_size: int = 8) -> Callable[[], tf.data.Dataset]:
    """Batches in order. Args: repeat: None: without end."""

    def fn() -> tf.data.Dataset:
        features = data()
        labels = features[label]
        features = {key: features[key] for key in ("x", "age", "city", "word", "w")}
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(batch_size).repeat(repeat)

    return fn


def columns() -> tuple[list[Any], list[Any]]:
    """(of a network, of a linear model)."""
    fc = tf.feature_column
    x = fc.numeric_column("x", shape=(2,))
    bucket = fc.bucketized_column(fc.numeric_column("age"), [20.0, 40.0])
    city = fc.categorical_column_with_vocabulary_list("city", ["a", "b", "c"], num_oov_buckets=1)
    word = fc.categorical_column_with_hash_bucket("word", 5)
    deep = [
        x,
        fc.numeric_column("age", normalizer_fn=lambda years: years / 60.0),
        fc.embedding_column(city, 2),
        fc.indicator_column(word),
    ]
    wide = [x, bucket, city, fc.crossed_column([bucket, "city"], 7), fc.weighted_categorical_column(word, "w")]
    return deep, wide


def cases(v2: Any, v1: Any) -> Mapping[str, tuple[Callable[..., Any], str]]:
    """Name -> (makes the estimator of `model_dir` and `config`, label).

    Args: v2: tf.estimator, or what stands for it; v1: tf.compat.v1.estimator.
    """
    deep, wide = columns()
    return {
        "linear": (lambda **kw: v2.LinearRegressor(wide, **kw), "number"),
        "dnn": (
            lambda **kw: v2.DNNClassifier([4], deep, weight_column="w", optimizer="Adam", batch_norm=True, **kw),
            "two",
        ),
        "combined": (
            lambda **kw: v2.DNNLinearCombinedRegressor(
                linear_feature_columns=wide, linear_optimizer="Adam",
                dnn_feature_columns=deep, dnn_optimizer="Adam", dnn_hidden_units=[4], **kw,
            ),
            "number",
        ),
        "dnn_regressor": (lambda **kw: v2.DNNRegressor([4], deep, optimizer="Adam", **kw), "number"),
        "linear_estimator": (lambda **kw: v2.LinearEstimator(v2.RegressionHead(), wide, **kw), "number"),
        "dnn_estimator": (lambda **kw: v2.DNNEstimator(v2.BinaryClassHead("w"), [4], deep, **kw), "two"),
        "combined_estimator": (
            lambda **kw: v2.DNNLinearCombinedEstimator(
                v2.MultiClassHead(3), linear_feature_columns=wide, dnn_feature_columns=deep, dnn_hidden_units=[4], **kw
            ),
            "three",
        ),
        "v1_baseline": (lambda **kw: v1.BaselineClassifier(n_classes=3, **kw), "three"),
        "v1_linear": (lambda **kw: v1.LinearClassifier(wide, optimizer="Adam", **kw), "two"),
        "v1_dnn": (lambda **kw: v1.DNNClassifier([4, 3], deep, n_classes=3, **kw), "three"),
    }  # fmt: skip


def first_value(name: str, found: np.ndarray) -> np.ndarray:
    """What a variable begins with: weights a wave that depends on the name, all else what it began with anyhow."""
    if not name.endswith(("kernel", "weights", "gamma")):
        return found
    wave = np.sin(np.arange(found.size) * 1.7 + len(name)) * 0.5
    return wave.reshape(found.shape).astype(found.dtype)


def write_first_checkpoint(model_dir: Path, values: Mapping[str, np.ndarray]) -> None:
    """`model.ckpt-0` with these values."""
    model_dir.mkdir(parents=True, exist_ok=True)
    names = list(values)
    tf.raw_ops.SaveV2(
        prefix=str(model_dir / "model.ckpt-0"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(values[name]) for name in names],
    )
    (model_dir / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')


def _reference(make: Callable[..., Any], label: str, folder: Path) -> dict[str, Any]:
    """As 2.15 has it."""
    config = tf.estimator.RunConfig(save_summary_steps=1)
    make(model_dir=str(folder / "names"), config=config).train(input_fn(label), steps=1)
    reader = tf.train.load_checkpoint(str(folder / "names" / "model.ckpt-0"))
    first = {name: reader.get_tensor(name) for name in sorted(reader.get_variable_to_shape_map())}
    write_first_checkpoint(folder / "run", {name: first_value(name, value) for name, value in first.items()})
    estimator = make(model_dir=str(folder / "run"), config=config)
    estimator.train(input_fn(label), steps=STEPS)
    losses = [
        float(value.simple_value)
        for file in sorted(os.listdir(folder / "run"))
        if file.startswith("events")
        for event in tf.compat.v1.train.summary_iterator(str(folder / "run" / file))
        for value in event.summary.value
        if value.tag == "loss"
    ]
    metrics = estimator.evaluate(input_fn(label, repeat=1))
    prediction = next(estimator.predict(input_fn(label, repeat=1)))
    return {
        "variables": {name: [list(value.shape), str(value.dtype)] for name, value in first.items()},
        "start": {name: value.tolist() for name, value in first.items() if value.ndim == 0},
        "losses": losses,
        "sums": {name: float(np.abs(estimator.get_variable_value(name)).sum()) for name in first},
        "metrics": {name: float(value) for name, value in metrics.items()},
        "prediction": {key: plain(value) for key, value in prediction.items()},
    }


def plain(value: np.ndarray) -> Any:
    return [one.decode() for one in value] if value.dtype == object else np.round(value.astype(float), 6).tolist()


def arguments(v2: Any, v1: Any) -> dict[str, list[str]]:
    """`tf.estimator.DNNClassifier` -> names of its arguments, in order, for every premade estimator and head."""
    kinds = ("Classifier", "Estimator", "Regressor")
    premade = [f"{model}{kind}" for model in ("Baseline", "DNN", "DNNLinearCombined", "Linear") for kind in kinds]
    heads = [f"{kind}Head" for kind in ("BinaryClass", "LogisticRegression", "MultiClass", "Multi", "MultiLabel")]
    heads += ["PoissonRegressionHead", "RegressionHead"]
    found = {f"{module}.{name}": getattr(api, name) for module, api in (("v2", v2), ("v1", v1)) for name in premade}
    found |= {f"v2.{name}": getattr(v2, name) for name in heads}
    return {name: list(inspect.signature(kind.__init__).parameters)[1:] for name, kind in found.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = {
            name: _reference(*case, Path(made, name))
            for name, case in cases(tf.estimator, tf.compat.v1.estimator).items()
        }
    print(json.dumps({"arguments": arguments(tf.estimator, tf.compat.v1.estimator), "cases": found}))
