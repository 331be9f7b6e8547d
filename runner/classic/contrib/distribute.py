"""`tf.contrib.distribute`: the strategies of tf.distribute, made from the arguments of TensorFlow 1.15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def MirroredStrategy(  # a class in tf.contrib
    devices: Sequence[str] | None = None,
    num_gpus: int | None = None,
    num_gpus_per_worker: int | None = None,
    cross_device_ops: Any = None,
    auto_shard_dataset: bool = False,
    cross_tower_ops: Any = None,
) -> tf.distribute.Strategy:
    """Return `tf.distribute.MirroredStrategy`.

    Args:
      devices: names of devices; None: all GPUs.
      num_gpus: use the first N GPUs, instead of `devices`; 0: the CPU.
      num_gpus_per_worker: the same, used if num_gpus is None.
      cross_device_ops: a `tf.distribute.CrossDeviceOps`; None: TensorFlow's default.
      auto_shard_dataset: ignored; the runner divides the input.
      cross_tower_ops: former name of cross_device_ops.

    Raises:
      ValueError: both devices and a number of GPUs are given.
    """
    del auto_shard_dataset
    number = num_gpus if num_gpus is not None else num_gpus_per_worker
    if devices is not None and number is not None:
        raise ValueError("Must only specify one of `devices` and `num_gpus`.")
    if number is not None:
        devices = [f"/gpu:{index}" for index in range(number)] or ["/cpu:0"]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops or cross_tower_ops)


def CollectiveAllReduceStrategy(num_gpus_per_worker: int = 0) -> tf.distribute.Strategy:
    """Return `tf.distribute.MultiWorkerMirroredStrategy`, which uses all GPUs of each worker."""
    del num_gpus_per_worker
    return tf.distribute.MultiWorkerMirroredStrategy()


def TPUStrategy(
    tpu_cluster_resolver: Any = None, steps_per_run: int | None = None, device_assignment: Any = None, **kwargs: Any
) -> tf.distribute.Strategy:
    """Return `tf.distribute.TPUStrategy`. `steps_per_run` is ignored; use RunConfig(steps_per_loop=)."""
    del steps_per_run, kwargs
    return tf.distribute.TPUStrategy(tpu_cluster_resolver, device_assignment)


def AllReduceCrossDeviceOps(all_reduce_alg: str = "nccl", num_packs: int = 1, **kwargs: Any) -> Any:
    """Return `tf.distribute.HierarchicalCopyAllReduce` for "hierarchical_copy", else `tf.distribute.NcclAllReduce`."""
    del kwargs
    if all_reduce_alg == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce(num_packs)
    return tf.distribute.NcclAllReduce(num_packs)
