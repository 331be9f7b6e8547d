"""The penguins of the package palmerpenguins: species, island, sex and four measurements of 344 birds."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from importlib import resources
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.model_selection import train_test_split

from input_fns._batches import batches_of_arrays

CATEGORIES = ("island", "sex")
MEASUREMENTS = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")
MISSING = "NA"


def input_fn(mode: str, params: Mapping[str, Any], config: Any = None) -> tf.data.Dataset:
    """Return batches of (features `[batch]`, class int64 `[batch]`).

    Features are `island` and `sex` (strings; empty: unknown), the MEASUREMENTS (float32; NaN: unknown) and `id`
    (int64).

    TRAIN shuffles its part anew each epoch and never ends; EVAL and PREDICT are one pass of the held-out quarter.
    PREDICT has no labels.

    Params:
      species: names of the classes.
      batch_size: examples per batch.
      shuffle_seed: null: the run's seed, or 0.

    Raises:
      ValueError: the package palmerpenguins is not installed.
    """
    features, species = read(held_out=mode != "train")
    if mode == "infer":
        return batches_of_arrays(features, len(species), mode, params, config)
    # A name that is not among params.species is an error: there is no class for unknown ones.
    classes = keras.layers.StringLookup(vocabulary=params["species"], num_oov_indices=0)(species)
    return batches_of_arrays((features, classes), len(species), mode, params, config)


def read(held_out: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return (features, names of the species, each `[n]`) of one part, which is the same in every process."""
    try:
        file = resources.files("palmerpenguins") / "data" / "penguins.csv"
    except ModuleNotFoundError:
        raise ValueError("input_fns.penguins reads palmerpenguins: pip install palmerpenguins") from None
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    species = np.array([row["species"] for row in rows])
    part = train_test_split(np.arange(len(rows)), test_size=0.25, random_state=0, stratify=species)[held_out]
    part = np.sort(part)
    features = {name: np.array([row[name].replace(MISSING, "") for row in rows])[part] for name in CATEGORIES}
    features |= {
        name: np.array([row[name].replace(MISSING, "nan") for row in rows], np.float32)[part] for name in MEASUREMENTS
    }
    return {**features, "id": part.astype(np.int64)}, species[part]
