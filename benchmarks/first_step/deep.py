"""A model of many layers, to measure how tracing grows with them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import runner

NUM_HIDDEN = 120


def layers() -> list[keras.layers.Layer]:
    """Return the layers, for a model_fn and a bare script."""
    hidden = [keras.layers.Dense(64, activation="relu", name=f"hidden_{i}") for i in range(NUM_HIDDEN)]
    return [keras.layers.Flatten(), *hidden, keras.layers.Dense(10, name="logits")]


def loss_of(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the loss of each example, float `[batch]`."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def model_fn(features: dict[str, tf.Tensor], labels: Any, mode: str) -> runner.EstimatorSpec:
    """Classify the digits with more layers than they need."""
    x = features["image"]
    for layer in layers():
        x = layer(x)
    return runner.EstimatorSpec(mode, predictions=x, loss=loss_of(x, labels), optimizer=keras.optimizers.Adam(0.001))
