"""A small convolutional network for colour images, with random augmentation of the training images."""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params

NUM_CLASSES = 3


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Classify images.

    Args:
      features: `image` float32 `[batch, 32, 32, 3]` in 0..1.
      labels: int64 `[batch]`, 0..2.
      mode: one of ModeKeys.
      params: augment, filters, dropout, learning_rate, decay_steps.
    """
    images, is_training = features["image"], mode == ModeKeys.TRAIN
    if is_training and params.augment:
        images = _augmented(images)
        tf.summary.image("augmented", _rows(features["image"], images))

    logits = _network(images, params, is_training)
    classes = tf.argmax(logits, axis=1)
    predictions = {"class": classes, "probabilities": tf.nn.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # per example
    rate = keras.optimizers.schedules.CosineDecay(params.learning_rate, params.decay_steps)
    return EstimatorSpec(
        mode,
        predictions=predictions,
        loss=losses,
        optimizer=keras.optimizers.Adam(rate) if is_training else None,
        eval_metric_ops={"accuracy": tf.cast(tf.equal(classes, labels), tf.float32)},
    )


def _augmented(images: tf.Tensor) -> tf.Tensor:
    """Return each image with a random flip, crop, brightness and contrast.

    The random numbers depend only on run.seed and the step, so a resumed run draws the same ones as an uninterrupted
    one.

    Args:
      images: float32 `[batch, height, width, 3]`.
    """
    batch, height, width, _ = tf.unstack(tf.shape(images))
    size = tf.random.uniform([batch, 1], 0.7, 1.0)
    corner = tf.random.uniform([batch, 2]) * (1.0 - size)
    parts = tf.concat([corner, corner + size], axis=1)  # top, left, bottom, right, in 0..1
    images = tf.image.crop_and_resize(images, parts, tf.range(batch), [height, width])
    images = tf.image.random_flip_left_right(images)
    mean = tf.reduce_mean(images, axis=[1, 2, 3], keepdims=True)
    contrast = tf.random.uniform([batch, 1, 1, 1], 0.6, 1.4)
    brightness = tf.random.uniform([batch, 1, 1, 1], -0.2, 0.2)
    return tf.clip_by_value((images - mean) * contrast + mean + brightness, 0.0, 1.0)


def _network(images: tf.Tensor, params: Params, training: bool) -> tf.Tensor:
    """Return logits `[batch, 3]`."""
    x = images
    for i, filters in enumerate([params.filters, 2 * params.filters, 4 * params.filters]):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=f"conv{i}")(x)
        x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dropout(params.dropout)(x, training=training)
    return keras.layers.Dense(NUM_CLASSES, name="logits")(x)


def _rows(*batches: tf.Tensor) -> tf.Tensor:
    """Return one picture `[1, height, width, 3]`: a row of ten images from each batch, framed and twice as large."""
    framed = [tf.pad(images[:10], [[0, 0], [2, 2], [2, 2], [0, 0]], constant_values=1.0) for images in batches]
    rows = [tf.reshape(tf.transpose(images, [1, 0, 2, 3]), [images.shape[1], -1, 3]) for images in framed]
    picture = tf.concat(rows, axis=0)[None]
    return tf.image.resize(picture, 2 * tf.shape(picture)[1:3], "nearest")
