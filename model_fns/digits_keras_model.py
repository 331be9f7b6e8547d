"""The digits classifier as a compiled keras.Model: model_fn returns it, and the runner trains it."""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, params: Params) -> keras.Model:
    """A compiled model.

    Args:
      features: `image` float32 [batch, 8, 8, 1] in 0..1; others are not used.
      labels: int64 [batch], 0..9; the runner brings them to the loss that is compiled.
      params: width, learning_rate.
    """
    image = keras.Input(features["image"].shape[1:], name="image")  # the runner picks this feature by its name
    x = keras.layers.Flatten()(image)
    x = keras.layers.Dense(params.width, activation="relu", name="hidden")(x)
    logits = keras.layers.Dense(10, name="logits")(x)
    model = keras.Model(image, logits)
    model.compile(
        optimizer=keras.optimizers.Adam(params.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model
