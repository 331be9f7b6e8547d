"""A model whose preprocessing layers learn from arrays inside model_fn, and its data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from runner import EstimatorSpec

_DRAW = np.random.default_rng(0)
WORDS = np.array(["ant", "bee", "cat", "dog", "ant", "bee", "ant"] * 4)
INTEGERS = np.array([5, 7, 9, 5, 5, 7, 1] * 4)
TEXTS = np.array(["the cat sat", "a dog ran", "the the ant", "x"] * 7)
NUMBERS = _DRAW.normal(size=28).astype(np.float32)
LABELS = _DRAW.normal(size=(28, 1)).astype(np.float32)
COLUMNS = {"word": WORDS, "integer": INTEGERS, "text": TEXTS, "number": NUMBERS}


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Params: words: what the first layer learns from; in_init_scope: the layers are made and adapted there."""
    with tf.init_scope() if params.get("in_init_scope") else contextlib.nullcontext():
        word = layers.StringLookup(output_mode="one_hot")
        word.adapt(params.get("words", WORDS))
        integer = layers.IntegerLookup(output_mode="one_hot")
        integer.adapt(INTEGERS)
        text = layers.TextVectorization(output_mode="multi_hot")
        text.adapt(TEXTS)
        bins = layers.Discretization(num_bins=4, output_mode="one_hot")
        bins.adapt(NUMBERS)
        normal = layers.Normalization(axis=None)
        normal.adapt(NUMBERS)
    columns = [
        word(features["word"]), integer(features["integer"]), text(features["text"]), bins(features["number"]),
        normal(features["number"])[:, None],
    ]  # fmt: skip
    inner = layers.Concatenate()([tf.cast(column, tf.float32) for column in columns])
    predictions = layers.Dense(1, kernel_initializer="zeros")(inner)
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"y": predictions})
    loss = tf.square(predictions - labels)[:, 0]
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))


def batches(size: int, epochs: int = 1) -> Callable[[], tf.data.Dataset]:
    return lambda: tf.data.Dataset.from_tensor_slices((COLUMNS, LABELS)).repeat(epochs).batch(size)
