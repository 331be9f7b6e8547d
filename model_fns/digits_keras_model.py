"""The digits classifier as a compiled keras.Model, which model_fn returns and the runner trains."""

from __future__ import annotations

import keras
import tensorflow as tf

from runner import Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, params: Params) -> keras.Model:
    """Return a compiled model.

    Args:
      features: `image` float32 `[batch, 8, 8, 1]` in 0..1; others are ignored.
      labels: int64 `[batch]`, 0..9; not used here, since the runner passes them to the compiled loss.
      params: width, learning_rate.
    """
    image = keras.Input(features["image"].shape[1:], name="image")  # the runner passes the feature with this name
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
