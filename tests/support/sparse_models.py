"""Model_fns whose gradients are sparse: they look some rows of a table up, as many as the batch has examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from runner import EstimatorSpec
from runner.classic.contrib.opt import LazyAdamOptimizer

v1 = tf.compat.v1

ROWS = 16_500
"""Rows of two float64, so many that they travel between processes instead of the whole table."""

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.01),
    "momentum": lambda: v1.train.MomentumOptimizer(0.01, 0.5),
    "nesterov": lambda: v1.train.MomentumOptimizer(0.01, 0.5, use_nesterov=True),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.01),
    "adagrad_da": lambda: v1.train.AdagradDAOptimizer(0.01, v1.train.get_global_step()),
    "adadelta": lambda: v1.train.AdadeltaOptimizer(0.01),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
    "lazy_adam": lambda: LazyAdamOptimizer(0.01),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.01, l1_regularization_strength=0.1),
    "rms_prop": lambda: v1.train.RMSPropOptimizer(0.01, centered=True),
    "proximal_sgd": lambda: v1.train.ProximalGradientDescentOptimizer(0.01, l1_regularization_strength=0.1),
    "proximal_adagrad": lambda: v1.train.ProximalAdagradOptimizer(0.01, l2_regularization_strength=0.1),
}
"""Those of tf.compat.v1 that update by rows, and contrib's."""


def ids_of(features: tf.Tensor, number: int = 7) -> tf.Tensor:
    """Return int64 `[batch]`, of which many are the same."""
    return tf.cast(tf.abs(features[:, 0]) * 3, tf.int64) % number * (ROWS // number)


def each_optimizer(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    return _with(tuple(OPTIMIZERS), features, labels, mode)


def three_optimizers(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A part of each_optimizer: where gradients are added up before the optimizer sees them, its kind says nothing."""
    return _with(("sgd", "adagrad", "lazy_adam"), features, labels, mode)


def _with(optimizers: Sequence[str], features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A table for each of `optimizers`, three more that are looked up in other ways, and a dense kernel."""
    ids, normal = ids_of(features), v1.random_normal_initializer()
    tables = {
        name: v1.get_variable(name, [ROWS, 2], tf.float64, normal) for name in (*optimizers, "twice", "column", "tied")
    }
    found = [tf.nn.embedding_lookup(tables[name], ids) for name in (*optimizers, "twice", "tied")]
    found.append(tf.gather(tables["twice"], ids_of(features[:, 1:], 5)))
    sparse_ids = tf.RaggedTensor.from_row_lengths(tf.repeat(ids, ids % 3), ids % 3).to_sparse()  # some have none
    found.append(v1.nn.safe_embedding_lookup_sparse(tables["column"], sparse_ids, combiner="mean"))
    kernel = v1.get_variable("kernel", [4, 1], tf.float64, normal)
    predictions = features @ kernel + tf.reduce_sum(tf.add_n(found), 1, keepdims=True)
    loss = tf.reduce_mean((predictions - labels) ** 2) + 1e-3 * tf.reduce_mean(tables["tied"] ** 2)
    of_tables = {name: [tables[name]] for name in optimizers} | {"sgd": [tables["sgd"], tables["column"], kernel]}
    of_tables["adagrad"] += [tables["twice"], tables["tied"]]
    updates = [OPTIMIZERS[name]().minimize(loss, var_list=of_tables[name]) for name in optimizers]
    with tf.control_dependencies(updates):
        return EstimatorSpec(mode, loss=loss, train_op=v1.train.get_global_step().assign_add(1))


def native_lazy_adam(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Layers of Keras 3, and an optimizer of contrib that updates only the rows that were looked up."""
    found = keras.layers.Embedding(ROWS, 2, dtype="float64")(ids_of(features))
    predictions = keras.layers.Dense(1, dtype="float64")(tf.concat([found, features], 1))
    return EstimatorSpec(mode, loss=tf.square(predictions - labels)[:, 0], optimizer=LazyAdamOptimizer(0.01))


def most_rows(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Every other step looks most of a table up, once or twice, and the others a few rows of it."""
    table = v1.get_variable("table", [ROWS, 2], tf.float64, v1.random_normal_initializer())
    number = tf.where(v1.train.get_global_step() % 2 == 0, ROWS - 10, 5)
    ids = tf.concat([tf.range(number), tf.range(number // 2)], 0)
    rows = tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 0)
    predictions = tf.reduce_sum(features[:, :2] * rows / ROWS, 1)
    optimizer = LazyAdamOptimizer(0.01)
    return EstimatorSpec(mode, loss=tf.square(predictions - labels[:, 0]), optimizer=optimizer)


def embedding(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    table = v1.get_variable("table", [50, 3], tf.float64, v1.random_normal_initializer())
    rows = tf.nn.embedding_lookup(table, tf.cast(tf.abs(features[:, 0]) * 20, tf.int32) % 50)
    loss = tf.square(tf.reduce_sum(rows, 1) - labels[:, 0])
    return EstimatorSpec(mode, loss=loss, optimizer=v1.train.AdagradOptimizer(0.1))


@tf.custom_gradient
def _hidden(values: tf.Tensor) -> Any:
    """Return `values`, whose gradient has a shape that is known only in a step."""
    return tf.identity(values), lambda gradient: v1.placeholder_with_default(gradient, None)


def of_unknown_shape(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    kernel = v1.get_variable("kernel", [4, 1], tf.float64, v1.random_normal_initializer())
    loss = tf.square(tf.reduce_sum(features @ _hidden(kernel), 1) - labels[:, 0])
    return EstimatorSpec(mode, loss=loss, optimizer=v1.train.GradientDescentOptimizer(0.1))


def classic_embedding(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    loss = tf.reduce_mean(embedding(features, labels, mode).loss)
    optimizer = v1.train.AdagradOptimizer(0.1)
    return EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, v1.train.get_global_step()))


SUMMED = (embedding, classic_embedding, native_lazy_adam, three_optimizers, of_unknown_shape)
"""Models whose gradients several workers add up."""
