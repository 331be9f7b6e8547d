"""scikit-learn's breast cancer data (Wisconsin): 569 tumours, 30 measurements each, a fifth held out for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from input_fns._batches import batches_of_arrays


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return batches of (features, labels int64 `[batch]`: 1 if the tumour is benign).

    Features: `mean_radius`, `mean_texture`, `worst_area` and 27 more, float32 `[batch]`, each in its own unit; `all`,
    float32 `[batch, 30]`, standardized to mean 0 and deviation 1 over the training part; `id`, int64 `[batch]`.

    TRAIN shuffles its part anew each epoch and never ends; EVAL and PREDICT are one pass of the held-out part, by id.
    PREDICT has no labels. The split is stratified.

    Args:
      num_epochs: number of passes in TRAIN (train.max_epochs); None: no limit.

    Params:
      batch_size: examples per batch.
      shuffle_seed: null: the run's seed, or 0.
      eval_fraction: share of the examples that is held out, 0.2.
      split_seed: seed of the split, 0.
    """
    data = load_breast_cancer()
    ids = np.arange(len(data.target), dtype=np.int64)
    train, held_out = train_test_split(
        ids, test_size=params.get("eval_fraction", 0.2), random_state=params.get("split_seed", 0), stratify=data.target
    )
    rows = np.sort(train if mode == "train" else held_out)
    scaled = (data.data - data.data[train].mean(axis=0)) / data.data[train].std(axis=0)
    names = [str(name).replace(" ", "_") for name in data.feature_names]
    features = {name: data.data[rows, column].astype(np.float32) for column, name in enumerate(names)}
    features |= {"all": scaled[rows].astype(np.float32), "id": rows}
    arrays = features if mode == "infer" else (features, data.target[rows].astype(np.int64))
    return batches_of_arrays(arrays, len(rows), mode, params, config, num_epochs)
