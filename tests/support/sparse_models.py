"""Model_fns whose gradients are sparse: they look some rows of a table up, as many as the batch has examples."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner import EstimatorSpec

v1 = tf.compat.v1


def embedding(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    table = v1.get_variable("table", [50, 3], tf.float64, v1.random_normal_initializer())
    rows = tf.nn.embedding_lookup(table, tf.cast(tf.abs(features[:, 0]) * 20, tf.int32) % 50)
    loss = tf.square(tf.reduce_sum(rows, 1) - labels[:, 0])
    return EstimatorSpec(mode, loss=loss, optimizer=v1.train.AdagradOptimizer(0.1))


def classic_embedding(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    loss = tf.reduce_mean(embedding(features, labels, mode).loss)
    optimizer = v1.train.AdagradOptimizer(0.1)
    return EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, v1.train.get_global_step()))
