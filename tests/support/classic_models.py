"""A model of TF 1 and its data, which several tests of the classic API train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import runner.classic  # noqa: F401


def dense(features: Any, labels: Any, mode: str, params: Any = None, config: Any = None) -> Any:
    """Two layers of tf.layers, a v1 optimizer, a v1 metric; everything is built before the look at `mode`."""
    hidden = tf.layers.dense(features["x"], 4, activation=tf.nn.tanh)
    y = tf.layers.dense(hidden, 1, name="out")
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"y": y})
    loss = tf.losses.mean_squared_error(labels, y)
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    metrics = {"mae": tf.metrics.mean_absolute_error(labels, y)}
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def data(num_examples: int = 32) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Features `x` `[n, 2]` and labels `[n, 1]`, always the same."""
    x = np.random.RandomState(0).rand(num_examples, 2).astype(np.float32)
    return {"x": x}, x[:, :1] - 2 * x[:, 1:]


def batches(num_batches: int | None = None, size: int = 8) -> Callable[[], tf.data.Dataset]:
    """An input function: so many batches; None: without end."""

    def input_fn() -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(data()).repeat().batch(size)
        return dataset if num_batches is None else dataset.take(num_batches)

    return input_fn
