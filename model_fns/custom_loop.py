"""The loop of TensorFlow's guide "Writing a training loop from scratch" as a model_fn, which describes one step of
it.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params

tf1 = tf.compat.v1


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Classify images with a gradient tape and a Keras optimizer that are called by hand.

    Args:
      features: `image` float32 `[batch, 64]` in 0..1.
      labels: int64 `[batch]`, 0..9.
      mode: one of ModeKeys.
      params: width, learning_rate, momentum.
    """
    x = features["image"]
    model = keras.Sequential(
        [
            keras.layers.Dense(params.width, activation="relu", name="dense_1"),
            keras.layers.Dense(params.width, activation="relu", name="dense_2"),
            keras.layers.Dense(10, name="predictions"),
        ]
    )
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"class": tf.argmax(model(x), axis=1)})

    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    with tf.GradientTape() as tape:
        logits = model(x, training=mode == ModeKeys.TRAIN)
        loss = loss_fn(labels, logits)
    accuracy.update_state(labels, logits)
    train_op = None
    if mode == ModeKeys.TRAIN:
        optimizer = keras.optimizers.SGD(params.learning_rate, params.momentum)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        train_op = tf1.assign_add(tf1.train.get_global_step(), 1)
    return EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={"accuracy": accuracy})
