"""Every metric of keras.metrics and of tf.compat.v1.metrics, in one evaluation.

`python -m tests.exactness.every_metric <strategy> <folder>` evaluates the model in `folder` and prints a line of JSON;
`python -m tests.exactness.every_metric --table` writes the table of docs/explanation/exactness.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, ModeKeys, RunConfig

v1 = tf.compat.v1
NUM_EXAMPLES, BATCH_SIZE, CLASSES = 23, 4, 3
PAGE = Path(__file__).parents[2] / "docs/explanation/exactness.md"
FIRST, LAST = "<!-- every metric: made by tests/exactness/every_metric.py -->", "<!-- end of every metric -->"

ONE_REPLICA: Mapping[str, str] = {}
"""Name of a metric that runs on one replica -> the write that does not add. All others are added."""

Arguments = Callable[[Mapping[str, tf.Tensor]], tuple[Any, ...]]


def numbers(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["y"], f["p"]


def vectors(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["vector"], f["other"]


def binary(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["is_true"], f["probability"]


def decided(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["is_true"], tf.cast(f["probability"] > 0.5, tf.float32)


def classes(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["class"][:, 0], f["probabilities"]


def one_hot(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return tf.one_hot(f["class"][:, 0], CLASSES), f["probabilities"]


def numbers_of_classes(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["class"], tf.argmax(f["probabilities"], 1)[:, None]


def values(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return (f["p"],)


def ranked(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["class"], f["probabilities"]


def best(f: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
    return f["class"], tf.math.top_k(f["probabilities"], 2).indices


KERAS: Mapping[str, tuple[Arguments, dict[str, Any]]] = {
    **dict.fromkeys(["Mean", "Sum"], (values, {})),
    "MeanMetricWrapper": (numbers, {"fn": lambda y, p: tf.abs(y - p)}),
    **dict.fromkeys(
        ["MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError",
         "MeanSquaredLogarithmicError", "LogCoshError", "Poisson", "Hinge", "SquaredHinge"],
        (numbers, {}),
    ),
    **dict.fromkeys(["R2Score", "CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation"], (vectors, {})),
    **dict.fromkeys(
        ["BinaryAccuracy", "BinaryCrossentropy", "AUC", "Precision", "Recall", "TruePositives", "TrueNegatives",
         "FalsePositives", "FalseNegatives"],
        (binary, {}),
    ),
    "BinaryIoU": (binary, {}),
    "PrecisionAtRecall": (binary, {"recall": 0.5}),
    "RecallAtPrecision": (binary, {"precision": 0.5}),
    "SensitivityAtSpecificity": (binary, {"specificity": 0.5}),
    "SpecificityAtSensitivity": (binary, {"sensitivity": 0.5}),
    **dict.fromkeys(
        ["CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "KLDivergence", "F1Score"], (one_hot, {})
    ),
    "FBetaScore": (one_hot, {"beta": 0.5}),
    "TopKCategoricalAccuracy": (one_hot, {"k": 2}),
    **dict.fromkeys(["SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"], (classes, {})),
    "SparseTopKCategoricalAccuracy": (classes, {"k": 2}),
    "Accuracy": (numbers_of_classes, {}),
    "MeanIoU": (numbers_of_classes, {"num_classes": CLASSES}),
    "IoU": (numbers_of_classes, {"num_classes": CLASSES, "target_class_ids": [0, 2]}),
    "OneHotIoU": (one_hot, {"num_classes": CLASSES, "target_class_ids": [0, 2]}),
    "OneHotMeanIoU": (one_hot, {"num_classes": CLASSES}),
}  # fmt: skip
"""Class of keras.metrics -> (what its update gets, arguments of the constructor)."""

THRESHOLDS: dict[str, Any] = {"thresholds": [0.25, 0.5, 0.75]}
V1: Mapping[str, tuple[Arguments, dict[str, Any]]] = {
    "mean": (values, {}),
    "mean_tensor": (lambda f: (tf.reduce_mean(f["vector"], 0),), {}),
    "percentage_below": (values, {"threshold": 0.5}),
    **dict.fromkeys(["mean_absolute_error", "mean_squared_error", "root_mean_squared_error"], (numbers, {})),
    "mean_relative_error": (lambda f: (f["y"], f["p"], 1.0 + tf.abs(f["y"])), {}),
    "mean_cosine_distance": (vectors, {"dim": 1}),
    "auc": (binary, {}),
    **dict.fromkeys(
        ["precision", "recall", "true_positives", "true_negatives", "false_positives", "false_negatives"],
        (decided, {}),
    ),
    **dict.fromkeys(
        ["precision_at_thresholds", "recall_at_thresholds", "true_positives_at_thresholds",
         "true_negatives_at_thresholds", "false_positives_at_thresholds", "false_negatives_at_thresholds"],
        (binary, THRESHOLDS),
    ),
    "sensitivity_at_specificity": (binary, {"specificity": 0.5}),
    "specificity_at_sensitivity": (binary, {"sensitivity": 0.5}),
    "accuracy": (numbers_of_classes, {}),
    **dict.fromkeys(["mean_iou", "mean_per_class_accuracy"], (numbers_of_classes, {"num_classes": CLASSES})),
    **dict.fromkeys(
        ["average_precision_at_k", "precision_at_k", "recall_at_k", "sparse_average_precision_at_k",
         "sparse_precision_at_k"],
        (ranked, {"k": 2}),
    ),
    "precision_at_top_k": (best, {}),
    "recall_at_top_k": (best, {"k": 2}),
}  # fmt: skip
"""Function of tf.compat.v1.metrics -> (its arguments, and those with names)."""


def examples() -> dict[str, np.ndarray]:
    rng = np.random.RandomState(4)
    raw = rng.rand(NUM_EXAMPLES, CLASSES)
    found = {
        "y": rng.rand(NUM_EXAMPLES, 1) + 0.1,
        "p": rng.rand(NUM_EXAMPLES, 1) + 0.1,
        "vector": rng.randn(NUM_EXAMPLES, 3),
        "other": rng.randn(NUM_EXAMPLES, 3),
        "is_true": rng.rand(NUM_EXAMPLES, 1) > 0.5,
        "probability": rng.rand(NUM_EXAMPLES, 1),
        "class": rng.randint(0, CLASSES, (NUM_EXAMPLES, 1)),
        "probabilities": raw / raw.sum(1, keepdims=True),
    }
    whole = {"class": np.int64, "is_true": np.float32}
    return {name: value.astype(whole.get(name, np.float32)) for name, value in found.items()}


def source(params: Mapping[str, Any]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(examples()).batch(params["batch_size"])


def model_fn(features: Any, mode: str) -> EstimatorSpec:
    bias = v1.get_variable("bias", [], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean(tf.square(features["y"] - bias))
    if mode == ModeKeys.TRAIN:
        step = v1.train.get_global_step()
        return EstimatorSpec(mode, loss=loss, train_op=v1.train.GradientDescentOptimizer(0.1).minimize(loss, step))
    return EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics(features))


def metrics(features: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    """Return one of each, updated."""
    found: dict[str, Any] = {}
    for name, (arguments, settings) in KERAS.items():
        metric = found[f"keras.{name}"] = getattr(keras.metrics, name)(**settings)
        metric.update_state(*arguments(features))
    for name, (arguments, settings) in V1.items():
        found[f"v1.{name}"] = getattr(v1.metrics, name)(*arguments(features), **settings)
    return found


def eval_input() -> Input:
    return Input(source, params={}, batch_size=BATCH_SIZE)


def trained(folder: Path) -> None:
    Estimator(model_fn, folder, RunConfig(tensorboard=False)).train(Input(source, params={}, batch_size=8), steps=1)


def evaluated(folder: Path, strategy: tf.distribute.Strategy | None, **settings: Any) -> dict[str, Any]:
    """Return the metrics of the model in `folder` as plain values."""
    config = RunConfig(train_distribute=strategy, tensorboard=False, **settings)
    found = Estimator(model_fn, folder, config).evaluate(eval_input())
    return {name: np.asarray(value).tolist() for name, value in found.items() if name != "global_step"}


def table() -> str:
    """Return the table of the page: what is added, and what runs on one replica."""

    def names(package: str) -> str:
        own = {"keras": KERAS, "v1": V1}[package]
        return ", ".join(f"`{name}`" for name in sorted(own) if f"{package}.{name}" not in ONE_REPLICA)

    rows = ["| metric | on several replicas |", "|---|---|"]
    rows += [f"| `keras.metrics`: {names('keras')} | sums and counts are added |"]
    rows += [f"| `tf.compat.v1.metrics`: {names('v1')} | sums and counts are added |"]
    rows += [f"| `{name}` | runs on one replica: {why} |" for name, why in sorted(ONE_REPLICA.items())]
    return "\n".join(rows)


def main() -> None:
    argument = sys.argv[1]
    if argument == "--table":
        page = PAGE.read_text()
        PAGE.write_text(f"{page[: page.index(FIRST)]}{FIRST}\n\n{table()}\n\n{page[page.index(LAST) :]}")
        return
    from runner.distribute.tf_config import read_tf_config
    from tests.exactness.product import strategy_of

    strategy = strategy_of("multi_worker")  # before anything else of TensorFlow runs
    found = evaluated(Path(argument), strategy, cluster=read_tf_config(os.environ["TF_CONFIG"]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
