"""Heads, and a batch for each.

`python tests/support/head_cases.py > tests/data/head_reference.json` in an interpreter with TensorFlow 2.15.1 made what
tests/classic/heads/test_heads.py expects of them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tensorflow as tf

WEIGHTS = np.array([0.5, 2.0, 1.0, 0.0, 1.5], np.float32)
LOGITS = np.array(
    [[0.3, -1.2, 2.0], [-0.7, 0.4, 0.1], [1.5, 1.5, -0.5], [0.0, -2.0, 0.6], [2.2, 0.9, -1.1]], np.float32
)


def cases(heads: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Name -> (head, logits, labels). Args: heads: tf.estimator, of 2.15 or of the runner."""
    one = LOGITS[:, :1]
    return {
        "binary": (heads.BinaryClassHead(), one, [0, 1, 1, 0, 1]),
        "binary_all": (
            heads.BinaryClassHead("w", [0.25, 0.9], ["no", "yes"], name="h"),
            one,
            ["no", "yes", "yes", "no", "yes"],
        ),
        "binary_loss_fn": (
            heads.BinaryClassHead(loss_fn=lambda labels, logits: tf.abs(labels - logits), loss_reduction="sum"),
            one,
            [[0], [1], [1], [0], [1]],
        ),
        "multi_class": (heads.MultiClassHead(3), LOGITS, [2, 1, 0, 1, 0]),
        "multi_class_all": (
            heads.MultiClassHead(3, "w", ["a", "b", "c"], loss_reduction="sum"),
            LOGITS,
            ["c", "b", "a", "b", "a"],
        ),
        "multi_label": (
            heads.MultiLabelHead(3, "w", [0.4], classes_for_class_based_metrics=[0, 2], name="m"),
            LOGITS,
            [[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]],
        ),
        "regression": (heads.RegressionHead(3, "w"), LOGITS, LOGITS * 0.5 + 1),
        "poisson": (heads.PoissonRegressionHead(), one, [1.0, 0.0, 4.0, 2.0, 9.0]),
        "logistic": (heads.LogisticRegressionHead("w"), one, [0.1, 0.5, 1.0, 0.0, 0.7]),
        "multi": (
            heads.MultiHead([heads.BinaryClassHead(name="p"), heads.RegressionHead(2, name="q")], [1.0, 0.5]),
            LOGITS,
            {"p": np.array([0, 1, 1, 0, 1]), "q": LOGITS[:, 1:] * 2},
        ),
    }


def measured(head: Any, logits: Any, labels: Any) -> dict[str, Any]:
    """Loss, predictions and metrics: those after the batch, and once more its first three examples.

    MultiHead sees the batch alone: in eager mode that of 2.15 forgot what its heads had measured.
    """

    is_dict = isinstance(labels, dict)

    def batch(examples: slice) -> tuple[Any, Any, Any]:
        parts = (
            {key: tf.constant(value)[examples] for key, value in labels.items()} if isinstance(labels, dict) else None
        )
        return {"w": WEIGHTS[examples]}, tf.constant(logits)[examples], parts or tf.constant(labels)[examples]

    features, first_logits, first_labels = batch(slice(None))
    regularization = [tf.constant(0.25), tf.constant(0.5)]
    metrics = head.metrics(regularization)
    for examples in (slice(None),) if is_dict else (slice(None), slice(0, 3)):
        some_features, some_logits, some_labels = batch(examples)
        metrics = head.update_metrics(
            metrics, some_features, some_logits, some_labels, regularization_losses=regularization
        )
    predictions = head.predictions(first_logits)
    return {
        "loss": float(head.loss(first_labels, first_logits, features)),
        "predictions": {str(key): _plain(value.numpy()) for key, value in predictions.items()},
        "metrics": {name: float(metric.result()) for name, metric in sorted(metrics.items())},
    }


def _plain(value: np.ndarray) -> Any:
    if value.dtype == object:
        return [[one.decode() for one in row] for row in value]
    return np.round(value.astype(float), 6).tolist()


if __name__ == "__main__":
    print(json.dumps({name: measured(*case) for name, case in cases(tf.estimator).items()}))
