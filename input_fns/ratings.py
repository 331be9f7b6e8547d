"""Synthetic ratings of items by users, whose best possible error is known; a tenth is held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from input_fns._batches import batches_of_arrays


def input_fn(mode: str, params: Mapping[str, Any], config: Any = None) -> tf.data.Dataset:
    """Return batches of ({"user": int64 `[batch]`, "item": int64 `[batch]`}, rating float32 `[batch]`).

    A rating is 3.5 + bias of the user + bias of the item + dot product of their taste vectors + noise. Noise cannot be
    predicted, so no model has a root mean squared error below params.noise. As in real shops, a few items have most of
    the ratings.

    TRAIN shuffles its part anew each epoch and never ends; EVAL and PREDICT are one pass of the held-out part. PREDICT
    has no labels.

    Params:
      batch_size: ratings per batch.
      shuffle_seed: null: the run's seed, or 0.
      num_users, num_items, ratings_per_user: sizes of the data.
      rank: length of the taste vectors.
      noise: standard deviation of the noise.
      data_seed: seed of the data.
    """
    users, items, ratings = _ratings(params)
    is_held_out = np.arange(len(ratings)) % 10 == 0
    rows = np.flatnonzero(~is_held_out if mode == "train" else is_held_out)
    features = {"user": users[rows], "item": items[rows]}
    arrays = features if mode == "infer" else (features, ratings[rows])
    return batches_of_arrays(arrays, len(rows), mode, params, config)


def _ratings(params: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (users `[n]`, items `[n]`, ratings `[n]`), the same in every process."""
    num_users, num_items, rank = params["num_users"], params["num_items"], params["rank"]
    random = np.random.default_rng(params["data_seed"])
    of_users, of_items = random.normal(size=[num_users, rank + 1]), random.normal(size=[num_items, rank + 1])
    users = np.repeat(np.arange(num_users), params["ratings_per_user"])
    popularity = 1.0 / np.arange(10, 10 + num_items)
    items = random.choice(num_items, len(users), p=popularity / popularity.sum())
    habits = 0.5 * (of_users[users, 0] + of_items[items, 0])
    tastes = (of_users[users, 1:] * of_items[items, 1:]).sum(axis=1) / np.sqrt(rank)
    ratings = 3.5 + habits + tastes + params["noise"] * random.normal(size=len(users))
    order = random.permutation(len(users))
    return users[order], items[order], ratings[order].astype(np.float32)
