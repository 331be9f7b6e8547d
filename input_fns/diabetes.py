"""scikit-learn's diabetes data: ten measurements of 442 patients, and the progression of the disease after a year."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from input_fns._batches import batches_of_arrays


def input_fn(mode: str, params: Mapping[str, Any], config: Any = None) -> tf.data.Dataset:
    """Return batches of ({"measurements": float32 `[batch, 10]`, "id": int64 `[batch]`}, progression float32
    `[batch]`).

    Measurements are age, sex, body mass index, blood pressure and six blood serum values, each in its own unit. The
    progression of the disease is a number from 25 to 346.

    TRAIN shuffles its part anew each epoch and never ends; EVAL and PREDICT are one pass of the held-out fifth, by id.
    PREDICT has no labels.

    Params:
      batch_size: examples per batch.
      shuffle_seed: null: the run's seed, or 0.
    """
    rows, measurements, progression = read(held_out=mode != "train")
    features = {"measurements": measurements, "id": rows}
    arrays = features if mode == "infer" else (features, progression)
    return batches_of_arrays(arrays, len(rows), mode, params, config)


def read(held_out: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids `[n]`, measurements `[n, 10]`, progression `[n]`) of one part, which is the same in every process."""
    data = load_diabetes(scaled=False)
    rows = train_test_split(np.arange(len(data.target), dtype=np.int64), test_size=0.2, random_state=0)[held_out]
    rows = np.sort(rows)
    return rows, data.data[rows].astype(np.float32), data.target[rows].astype(np.float32)
