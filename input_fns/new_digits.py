"""A few images of the digits 5 to 9, for a model that starts from one of 0 to 4, which this module trains once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from input_fns._batches import batches_of_arrays


def input_fn(mode: str, params: Mapping[str, Any], config: Any = None) -> tf.data.Dataset:
    """Return batches of ({"image": float32 `[batch, 8, 8, 1]` in 0..1, "id": int64 `[batch]`}, labels int64 `[batch]`,
    5..9).

    TRAIN shuffles its few examples anew each epoch and never ends; EVAL and PREDICT are one pass of the other 700, by
    id. PREDICT has no labels.

    Params:
      batch_size: examples per batch.
      shuffle_seed: null: the run's seed, or 0.
      examples_per_class: images of each digit in TRAIN, up to 30.
      pretrained: path of the Keras model of 0 to 4; TRAIN makes it if it does not exist.
    """
    if mode == "train":
        pretrain(Path(params["pretrained"]))
    images, labels = _read(5, 9)
    ids = np.arange(len(labels), dtype=np.int64)
    by_class = [ids[labels == digit] for digit in range(5, 10)]
    parts = [of[: params["examples_per_class"]] if mode == "train" else of[30:] for of in by_class]
    rows = np.sort(np.concatenate(parts))
    features = {"image": images[rows], "id": rows}
    arrays = features if mode == "infer" else (features, labels[rows])
    return batches_of_arrays(arrays, len(rows), mode, params, config)


def pretrain(path: Path) -> None:
    """Train a classifier of 0 to 4 and write its `.keras` file, unless it exists. It stands for a model from a hub."""
    if path.exists():
        return
    seed = keras.random.SeedGenerator(0)  # separate, so that the run's random numbers are unchanged
    kernel = keras.initializers.GlorotUniform(seed)
    layers = [
        keras.layers.Conv2D(32, 3, padding="same", activation="relu", kernel_initializer=kernel, name="conv1"),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu", kernel_initializer=kernel, name="conv2"),
        keras.layers.MaxPooling2D(2, name="pool"),
        keras.layers.Flatten(name="flat"),
        keras.layers.Dense(64, activation="relu", kernel_initializer=kernel, name="hidden"),
        keras.layers.Dense(5, kernel_initializer=kernel, name="logits"),
    ]
    model = keras.Sequential([keras.Input([8, 8, 1]), *layers], name="digits_0_to_4")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    images, labels = _read(0, 4)
    model.fit(images, labels, batch_size=32, epochs=10, shuffle=False, verbose=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    # atomic, since several processes may do this at once
    unfinished = path.with_name(f"unfinished_{os.getpid()}.keras")
    model.save(unfinished)
    unfinished.replace(path)


def _read(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (images `[n, 8, 8, 1]`, labels `[n]`) of the digits from `first` to `last`."""
    data = load_digits()
    rows = (first <= data.target) & (data.target <= last)
    return (data.images[rows, :, :, None] / 16.0).astype(np.float32), data.target[rows].astype(np.int64)
