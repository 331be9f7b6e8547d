"""scikit-learn's wine data: 178 wines of three growers, 13 measurements of each. Change it to read your own data."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_wine

from runner import Params

EVAL_FRACTION = 0.2


def input_fn(mode: str, params: Params) -> tf.data.Dataset:
    """Return batches of (features, labels) for one mode; only features in "infer".

    Features: `x`, float32 `[batch, 13]`, each measurement standardized to mean 0 and deviation 1. Labels: int64
    `[batch]`.

    Args:
      mode: "train", "eval" or "infer".
      params: batch_size, and shuffle_seed in training; from conf/experiment/wine.yaml.
    """
    data = load_wine()
    order = np.random.default_rng(0).permutation(len(data.target))  # the same split in every process and every run
    num_eval = int(EVAL_FRACTION * len(order))
    held_out, train = order[:num_eval], order[num_eval:]
    # Standardize by the training examples only: evaluation data must not influence training.
    scaled = (data.data - data.data[train].mean(axis=0)) / data.data[train].std(axis=0)
    rows = train if mode == "train" else held_out
    features, labels = {"x": scaled[rows].astype(np.float32)}, data.target[rows].astype(np.int64)
    if mode == "infer":
        return tf.data.Dataset.from_tensor_slices(features).batch(params.batch_size)
    examples = tf.data.Dataset.from_tensor_slices((features, labels))
    if mode == "train":
        examples = examples.shuffle(len(rows), seed=params.shuffle_seed).repeat()
    return examples.batch(params.batch_size)
