"""A model whose steps of training run out of memory if a replica computes too many examples at once.

TensorFlow's own error for that, ResourceExhaustedError, is what it makes of a MemoryError in an operation of the graph:
one that sees the examples of a micro-batch when the step runs.

params: `limit`, the largest number of examples, or a list of them, of which the process of rank i has the i-th, for
steps from `from_step` (0) on.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import EstimatorSpec

BATCH_SIZE = 12
SETTINGS = (
    "command=train", "model=custom", "model.fn=tests.support.memory_limits", "input=custom",
    "input.train.fn=tests.support.memory_limits", f"input.train.batch_size={BATCH_SIZE}", "input.eval=null",
    "checkpoint.save_steps=2", "checkpoint.keep_max=null", "checkpoint.asynchronous=false", "tracking=none",
    "train.max_steps=8", "run.progress=plain",
)  # fmt: skip


def model_fn(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
    """Dropout, and Adam with its slots: what goes on from a checkpoint and has other numbers is seen."""
    hidden = keras.layers.Dense(4, activation="tanh")(features)
    limit = params.get("limit", BATCH_SIZE)
    if mode == "train":
        if not isinstance(limit, int):
            limit = limit[config.global_id_in_cluster]
        hidden = keras.layers.Dropout(0.3, seed=3)(_limited(hidden, limit, params.get("from_step", 0)), training=True)
    loss = tf.square(tf.squeeze(keras.layers.Dense(1)(hidden), -1) - labels)
    if params.get("trains_itself"):
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(tf.reduce_mean(loss), tf.compat.v1.train.get_global_step())
        return EstimatorSpec(mode, loss=tf.reduce_mean(loss), train_op=train_op)
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.Adam(0.05))


def _limited(examples: tf.Tensor, limit: int, from_step: int) -> tf.Tensor:
    """Return `examples`, for which there is too little memory if they are more than `limit`."""

    def allocate(number: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        if step >= from_step and number > limit:
            raise MemoryError(f"no memory for {int(number)} examples")
        return number

    step = tf.compat.v1.train.get_global_step()
    with tf.control_dependencies([tf.py_function(allocate, [tf.shape(examples)[0], step], tf.int32)]):
        return tf.identity(examples)


def input_fn(params: Any) -> tf.data.Dataset:
    """Batches without an end, shuffled anew in each pass. params: `rows`, of a batch if there is no `batch_size`;
    `read_limit`: like `limit`, of the input itself.
    """
    rng = np.random.default_rng(7)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).shuffle(60, seed=3).repeat()
    batches = batches.batch(params.get("batch_size") or params.get("rows", BATCH_SIZE))
    limit = params.get("read_limit")
    if limit is None:
        return batches
    return batches.map(lambda features, labels: (_limited_rows(features, limit), labels))


def _limited_rows(features: tf.Tensor, limit: int) -> tf.Tensor:
    def allocate(number: tf.Tensor) -> tf.Tensor:
        if number > limit:
            raise MemoryError(f"no memory to read {int(number)} examples")
        return number

    with tf.control_dependencies([tf.py_function(allocate, [tf.shape(features)[0]], tf.int32)]):
        return tf.identity(features)
