"""Model_fns whose losses are sums, or means by weights, and what they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from runner import EstimatorSpec, Input
from tests.support.models import data

v1 = tf.compat.v1
Reduction = v1.losses.Reduction
NUM_EXAMPLES = 19


def weighted_input(batch_size: int = 6) -> Input:
    """Batches of 6, of which the last has 1 example; half of the weights of a batch are 0."""

    def fn(params: Any) -> tf.data.Dataset:
        x, y = data(NUM_EXAMPLES)
        weights = np.maximum(0, np.sin(np.arange(NUM_EXAMPLES))).astype(np.float32)[:, None]
        return tf.data.Dataset.from_tensor_slices(({"x": x, "w": weights}, y)).batch(params["batch_size"])

    return Input(fn, params={}, batch_size=batch_size)


Loss = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


def model_of(loss_of: Loss) -> Callable[..., EstimatorSpec]:
    def fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        kernel = v1.get_variable("kernel", [4, 1], initializer=v1.constant_initializer(0.1))
        loss = loss_of(labels, features["x"] @ kernel, features["w"]) + 0.01 * tf.reduce_sum(kernel**2)
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    return fn


def by(reduction: str) -> Loss:
    return lambda labels, y, weights: v1.losses.mean_squared_error(labels, y, weights, reduction=reduction)


def by_learnt_weights(labels: tf.Tensor, y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    gate = v1.get_variable("gate", [], initializer=v1.constant_initializer(0.3))
    return v1.losses.absolute_difference(labels, y, weights + gate * y**2, reduction=Reduction.MEAN)


def of_two(labels: tf.Tensor, y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    v1.losses.huber_loss(labels, y, weights)
    v1.losses.compute_weighted_loss(tf.abs(y), weights=0.5, reduction=Reduction.SUM)
    tf.identity(v1.losses.absolute_difference(labels, y, weights, loss_collection=None), name="aside")
    return v1.losses.get_total_loss()
