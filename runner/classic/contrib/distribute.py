"""`tf.contrib.distribute`: strategies under the arguments that they had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def MirroredStrategy(  # it was a class
    devices: Sequence[str] | None = None,
    num_gpus: int | None = None,
    num_gpus_per_worker: int | None = None,
    cross_device_ops: Any = None,
    auto_shard_dataset: bool = False,
    cross_tower_ops: Any = None,
) -> tf.distribute.Strategy:
    """Return `tf.distribute.MirroredStrategy`.

    Args:
      num_gpus, num_gpus_per_worker: the first so many GPUs; None: all.
      auto_shard_dataset: the runner divides the input by itself.
    """
    del auto_shard_dataset
    number = num_gpus if num_gpus is not None else num_gpus_per_worker
    if devices is not None and number is not None:
        raise ValueError("Must only specify one of `devices` and `num_gpus`.")
    if number is not None:
        devices = [f"/gpu:{index}" for index in range(number)] or ["/cpu:0"]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops or cross_tower_ops)


def CollectiveAllReduceStrategy(num_gpus_per_worker: int = 0) -> tf.distribute.Strategy:
    """Return `tf.distribute.MultiWorkerMirroredStrategy`, which takes the GPUs that a worker has."""
    del num_gpus_per_worker
    return tf.distribute.MultiWorkerMirroredStrategy()


def TPUStrategy(
    tpu_cluster_resolver: Any = None, steps_per_run: int | None = None, device_assignment: Any = None, **kwargs: Any
) -> tf.distribute.Strategy:
    """Return `tf.distribute.TPUStrategy`; RunConfig(steps_per_loop=) is what `steps_per_run` was."""
    del steps_per_run, kwargs
    return tf.distribute.TPUStrategy(tpu_cluster_resolver, device_assignment)


def AllReduceCrossDeviceOps(all_reduce_alg: str = "nccl", num_packs: int = 1, **kwargs: Any) -> Any:
    """Return `tf.distribute.NcclAllReduce`, or `HierarchicalCopyAllReduce`."""
    del kwargs
    hierarchical = all_reduce_alg == "hierarchical_copy"
    return (tf.distribute.HierarchicalCopyAllReduce if hierarchical else tf.distribute.NcclAllReduce)(num_packs)
