"""The user code of the runs in this folder. It stays as it is: their checkpoints name its functions and lines."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import EstimatorSpec

v1 = tf.compat.v1
NUM_EXAMPLES = 23


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Keras 3 layers with dropout; Adam, so that its slots are in the checkpoint."""
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(features)
    hidden = keras.layers.Dropout(0.25)(hidden, training=mode == "train")
    prediction = keras.layers.Dense(1, name="output")(hidden)[:, 0]
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"y": prediction})
    return EstimatorSpec(
        mode,
        loss=tf.square(prediction - labels),
        optimizer=keras.optimizers.Adam(params.learning_rate),
        eval_metric_ops={"mae": tf.abs(prediction - labels)},
    )


def classic_model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """The same as code of tf.estimator has it: variables by name, tf.nn.dropout, a v1 optimizer, train_op."""
    with v1.variable_scope("hidden"):
        kernel = v1.get_variable("kernel", [3, 4], initializer=v1.glorot_uniform_initializer())
        hidden = tf.tanh(tf.matmul(features, kernel) + v1.get_variable("bias", [4]))
    if mode == "train":
        hidden = v1.nn.dropout(hidden, rate=0.25)
    with v1.variable_scope("output"):
        prediction = tf.matmul(hidden, v1.get_variable("kernel", [4, 1]))[:, 0]
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"y": prediction})
    loss = tf.reduce_mean(tf.square(prediction - labels))
    train_op = v1.train.AdamOptimizer(params.learning_rate).minimize(loss, v1.train.get_global_step())
    metrics = {"mae": v1.metrics.mean_absolute_error(labels, prediction)}
    return EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def _examples() -> tf.data.Dataset:
    features = np.sin(np.arange(3 * NUM_EXAMPLES, dtype="float32")).reshape([NUM_EXAMPLES, 3])
    return tf.data.Dataset.from_tensor_slices((features, features @ np.array([1, -2, 0.5], "float32")))


def input_fn(mode: str, params: Any) -> tf.data.Dataset:
    """23 examples in batches of 4, filled across epochs: the state of the iterator is in the checkpoint."""
    if mode == "train":
        return _examples().shuffle(NUM_EXAMPLES, seed=params.shuffle_seed).repeat().batch(params.batch_size)
    return _examples().batch(params.batch_size)


def uneven_input_fn(mode: str, params: Any) -> tf.data.Dataset:
    """23 examples in batches of 4, the last of an epoch 3: the checkpoint counts the batches that were read."""
    dataset = _examples()
    if mode == "train":
        return dataset.shuffle(NUM_EXAMPLES, seed=params.shuffle_seed).batch(params.batch_size).repeat()
    return dataset.batch(params.batch_size)
