"""Make batches from epochs of examples, for the shipped input functions.

Each epoch is shuffled with its own seed, computed from the run's seed and the number of the epoch. This is because
`Dataset.shuffle` with `reshuffle_each_iteration` keeps the seed of the next epoch in the iterator, and the usual
`shuffle().batch().repeat()` loses it if it is saved after the last, smaller batch of an epoch (TensorFlow 2.21): a
resumed run then repeats the order of the first epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Epoch = Any
"""The number of an epoch of TRAIN, an int64 scalar; None for the one ordered pass of EVAL and PREDICT."""


def batched(
    read_epoch: Callable[[Epoch], tf.data.Dataset], mode: str, params: Mapping[str, Any], num_epochs: int | None = None
) -> tf.data.Dataset:
    """Return a dataset of batches: infinite in TRAIN, one pass in EVAL and PREDICT.

    Args:
      read_epoch: returns the ordered examples of an Epoch.
      mode: train, eval or infer.
      params: batch_size and batch_across_epochs are read. batch_across_epochs=False: the last batch of an epoch may be
        smaller, so that an epoch is a whole number of steps. True: it is filled from the next epoch. Either way every
        example comes exactly once per epoch.
      num_epochs: number of passes in TRAIN; None: no limit.
    """
    size = _batch_size(params)
    if mode != "train":
        return read_epoch(None).batch(size)
    epochs = tf.data.Dataset.range(num_epochs or np.iinfo(np.int64).max)
    if params.get("batch_across_epochs"):
        batches = epochs.flat_map(read_epoch).batch(size)
    else:
        batches = epochs.flat_map(lambda epoch: read_epoch(epoch).batch(size))
    if num_epochs is not None:
        return batches
    return batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def batches_of_arrays(
    arrays: Any,
    num_rows: int,
    mode: str,
    params: Mapping[str, Any],
    config: Any,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return a dataset of batches from a nest of arrays in memory, each `[num_rows, ...]`; the other arguments are
    as in `batched`.
    """
    # Shuffle and batch row numbers, not rows: one gather per batch is faster, and a checkpoint holds two numbers.
    rows = np.arange(num_rows, dtype=np.int64)
    seed = seed_of(params, config)
    tensors = tf.nest.map_structure(tf.constant, arrays)

    def read_epoch(epoch: Epoch) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(rows if epoch is None else shuffled(rows, seed, epoch))

    def gather(batch: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, batch), tensors)

    batches = batched(read_epoch, mode, params, num_epochs)
    # Two in parallel halve the time of a small batch, from 100 to 55 us on two cores.
    # Not AUTOTUNE, whose buffer grows during the whole run, and every checkpoint contains it.
    return batches.map(gather, num_parallel_calls=2, deterministic=True).prefetch(8)


def shuffled(values: Any, seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return `values`, `[n]`, in an order that depends only on the seed and the epoch."""
    return tf.random.experimental.stateless_shuffle(values, tf.stack([seed, epoch]), alg="philox")


def seed_of(params: Mapping[str, Any], config: Any) -> int:
    """Return params.shuffle_seed, or the run's seed, or 0, so that the order is the same in every process and after
    a restart.
    """
    seed = params.get("shuffle_seed")
    seed = getattr(config, "tf_random_seed", None) if seed is None else seed
    return 0 if seed is None else int(seed)


def _batch_size(params: Mapping[str, Any]) -> int:
    size = params.get("batch_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"this input function needs a batch size, got {size!r}. Set input.<train|eval>.batch_size.")
    return size
