"""A small classifier for 8x8 images: Keras 3 layers made inside model_fn, and an optimizer that the runner applies."""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params

NUM_CLASSES = 10


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Classify images.

    Args:
      features: `image` float32 `[batch, 8, 8, 1]` in 0..1.
      labels: int64 `[batch]`, 0..9.
      mode: one of ModeKeys.
      params: network (conv or mlp), width, learning_rate, decay_steps (None: constant learning rate), label_smoothing.
    """
    images = tf.reshape(features["image"], [-1, 8, 8, 1])
    logits = _network(images, params, training=mode == ModeKeys.TRAIN)
    classes = tf.argmax(logits, axis=1)
    predictions = {"class": classes, "probabilities": tf.nn.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)

    smoothing = params.label_smoothing if mode == ModeKeys.TRAIN else 0.0
    targets = tf.one_hot(labels, NUM_CLASSES) * (1.0 - smoothing) + smoothing / NUM_CLASSES
    losses = tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits)  # per example
    correct = tf.cast(tf.equal(classes, tf.cast(labels, tf.int64)), tf.float32)
    return EstimatorSpec(
        mode,
        predictions=predictions,
        loss=losses,
        optimizer=keras.optimizers.Adam(_learning_rate(params)) if mode == ModeKeys.TRAIN else None,
        eval_metric_ops={"accuracy": correct},
    )


def _network(images: tf.Tensor, params: Params, training: bool) -> tf.Tensor:
    """Return logits `[batch, 10]`."""
    x = images
    if params.network == "conv":
        x = keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1")(x)
        x = keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="conv2")(x)
        x = keras.layers.MaxPooling2D(2)(x)
    elif params.network != "mlp":
        raise ValueError(f"model.params.network={params.network!r} is not one of conv, mlp.")
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(params.width, activation="relu", name="hidden")(x)
    return keras.layers.Dense(NUM_CLASSES, name="logits")(x)


def _learning_rate(params: Params) -> float | keras.optimizers.schedules.LearningRateSchedule:
    if params.decay_steps is None:
        return params.learning_rate
    return keras.optimizers.schedules.CosineDecay(params.learning_rate, params.decay_steps)
