"""scikit-learn's handwritten digits: 1,797 images of 8x8, ten classes, a fifth of them held out for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from input_fns._batches import batches_of_arrays


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return batches of ({"image": float32 `[batch, 8, 8, 1]` in 0..1, "id": int64 `[batch]`}, labels int64 `[batch]`).

    TRAIN shuffles its part anew each epoch and never ends; EVAL and PREDICT are one pass of the held-out part, by id.
    PREDICT has no labels. The split is stratified: both parts have the classes in the same proportions.

    It takes no input_context: several workers divide each batch of the one pipeline, so that a step sees the same
    examples with any number of workers.

    Args:
      num_epochs: number of passes in TRAIN (train.max_epochs); None: no limit.

    Params:
      batch_size: examples per batch.
      shuffle_seed: null: the run's seed, or 0. Epochs have different orders in any case.
      eval_fraction: share of the examples that is held out, 0.2.
      split_seed: seed of the split, 0.
      flat: images as `[batch, 64]`, false.
      batch_across_epochs: fill the last batch of an epoch from the next, false.
    """
    data = load_digits()
    ids = np.arange(len(data.target), dtype=np.int64)
    train, held_out = train_test_split(
        ids, test_size=params.get("eval_fraction", 0.2), random_state=params.get("split_seed", 0), stratify=data.target
    )
    rows = np.sort(train if mode == "train" else held_out)
    images = (data.images[rows] / 16.0).astype(np.float32)
    shape = (-1, 64) if params.get("flat") else (-1, 8, 8, 1)
    features = {"image": images.reshape(shape), "id": rows}
    arrays = features if mode == "infer" else (features, data.target[rows].astype(np.int64))
    return batches_of_arrays(arrays, len(rows), mode, params, config, num_epochs)
