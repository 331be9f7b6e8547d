"""Strategies by name: from the options of the config to objects of tf.distribute."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.config import user_code
from runner.config.schema import PACKED_OPS, ConfigError
from runner.distribute import tpu
from runner.tf_private import cluster

_log = logging.getLogger(__name__)

_CROSS_DEVICE_OPS = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
}


def split_cpu(virtual_devices: int | None) -> None:
    """Split this host's CPU into logical devices, to try out a strategy without accelerators.

    Must be called before TensorFlow uses a device.

    Args:
      virtual_devices: the number of logical devices; None or 1: the CPU is not split.

    Raises:
      ConfigError: TensorFlow has been initialized with another number.
    """
    if virtual_devices is None or virtual_devices == 1:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical_devices = [tf.config.LogicalDeviceConfiguration()] * virtual_devices
    try:
        tf.config.set_logical_device_configuration(cpu, logical_devices)
    except RuntimeError as error:  # "Virtual devices cannot be modified after being initialized"
        raise ConfigError(
            f"virtual_devices={virtual_devices} comes too late: TensorFlow is already in use, and splits the CPU only "
            "before its first tensor. If a module of yours creates a tensor, variable or layer when it is imported, "
            "move that into model_fn or input_fn; or unset virtual_devices."
        ) from error


def build_strategy(
    name: str,
    *,
    devices: Sequence[str] | None = None,
    num_gpus: int | None = None,
    virtual_devices: int | None = None,
    cross_device_ops: str = "auto",
    num_packs: int = 1,
    communication: str = "auto",
    timeout_secs: float | None = None,
    bytes_per_pack: int = 0,
    address: str | None = None,
    zone: str | None = None,
    project: str | None = None,
) -> tf.distribute.Strategy | None:
    """Build the strategy that the config names.

    Args:
      name: default, one_device, mirrored, central_storage, multi_worker or tpu. multi_worker needs TF_CONFIG in the
        environment, and the function then returns when all workers have connected.
      devices: TensorFlow's device names ("GPU:0", "CPU:1"); None: all GPUs, or the virtual CPUs if there is no GPU.
      num_gpus: use only the first N GPUs; None: all.
      virtual_devices: see `split_cpu`.
      cross_device_ops: auto (by the devices), nccl, hierarchical_copy, reduction_to_one_device, or the dotted name of a
        class (mirrored).
      num_packs: number of packs in which nccl and hierarchical_copy transfer gradients.
      communication: auto, ring or nccl: how the processes of multi_worker exchange gradients.
      timeout_secs: timeout of a collective of multi_worker; None: no timeout, because heartbeats detect lost peers.
      bytes_per_pack: approximate size of multi_worker's gradient messages; 0: TensorFlow decides.
      address: address of a TPU: grpc://host:port, a name, or "local" for a TPU of this machine; None: taken from the
        environment.
      zone, project: zone and project of a TPU given by name; None: those of this Google Cloud machine.

    Returns:
      The strategy; None for TensorFlow's default.

    Raises:
      ValueError: the name, a device or cross_device_ops does not exist; the message lists those that do.
    """
    _check_known("name", name, ("default", "one_device", "mirrored", "central_storage", "multi_worker", "tpu"))
    _check_known("communication", communication, ("auto", "ring", "nccl"))
    if "." not in cross_device_ops:
        _check_known("cross_device_ops", cross_device_ops, ("auto", *_CROSS_DEVICE_OPS))
    split_cpu(virtual_devices)
    if name == "tpu":
        return _connect_tpu(address, zone, project)
    if name == "default":
        return None
    if name == "multi_worker":  # before listing the devices, which starts TensorFlow's runtime
        options = _communication_options(communication, bytes_per_pack, timeout_secs)
        with cluster.cpus_of_worker(virtual_devices or 1):
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    chosen = list(devices) if devices else _choose_devices(num_gpus, virtual_devices)
    _check_devices(chosen)
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy(chosen[0])
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(chosen, _cross_device_ops(cross_device_ops, num_packs, chosen))
    return tf.distribute.experimental.CentralStorageStrategy(chosen, parameter_device="/cpu:0")


def _communication_options(
    communication: str, bytes_per_pack: int, timeout_secs: float | None
) -> tf.distribute.experimental.CommunicationOptions:
    if communication == "nccl" and not tf.config.list_physical_devices("GPU"):
        raise ConfigError("strategy.communication=nccl needs GPUs, but TensorFlow sees none here. Use ring or auto.")
    implementation = tf.distribute.experimental.CommunicationImplementation[communication.upper()]
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_secs, implementation=implementation
    )


def _connect_tpu(address: str | None, zone: str | None, project: str | None) -> tf.distribute.Strategy:
    """Connect to the TPU, initialize it and build its strategy, in the order of TensorFlow's TPU guide."""
    found, said_by = tpu.find_tpu(os.environ, address)
    tpu.check_reachable(found, zone, project, os.environ)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(found, zone, project)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"strategy=tpu: {found!r} ({said_by}) is not a usable TPU: {reason}") from error
    return tf.distribute.TPUStrategy(resolver)


def _cross_device_ops(name: str, num_packs: int, devices: Sequence[str]) -> tf.distribute.CrossDeviceOps | None:
    """Return what sums gradients over the devices of a MirroredStrategy; None: TensorFlow decides.

    Warns of settings that have no effect with one device.

    Args:
      name, num_packs: as in `build_strategy`.
      devices: the devices of the strategy.

    Raises:
      ConfigError: the settings do not fit together, or do not fit the devices.
    """
    are_cpus = ["cpu" in device.lower() for device in devices]
    if num_packs != 1 and name not in PACKED_OPS:
        raise ConfigError(
            f"strategy.num_packs={num_packs} has no effect with strategy.cross_device_ops={name}. Use "
            f"cross_device_ops={' or '.join(PACKED_OPS)}."
        )
    if name == "nccl" and any(are_cpus):
        raise ConfigError(
            f"strategy.cross_device_ops=nccl needs GPUs, but the devices are {', '.join(devices)}. "
            "Use auto, reduction_to_one_device or hierarchical_copy."
        )
    if "." in name:
        ops: Any = user_code.load("strategy.cross_device_ops", name, "CrossDeviceOps")()
        if not isinstance(ops, tf.distribute.CrossDeviceOps):
            raise ConfigError(f"strategy.cross_device_ops={name} is not a tf.distribute.CrossDeviceOps.")
        return ops
    if name != "auto" and len(devices) == 1:
        packs = f" and strategy.num_packs={num_packs}" if num_packs != 1 else ""
        _log.warning(
            "strategy.cross_device_ops=%s%s has no effect with one device (%s).",
            name, packs, devices[0],
        )  # fmt: skip
    if name == "auto":
        # TensorFlow's default, collectives, takes 1.5x as long on two CPUs (340 us per step instead of 230).
        return tf.distribute.ReductionToOneDevice() if all(are_cpus) else None
    if name == "reduction_to_one_device":
        return tf.distribute.ReductionToOneDevice()
    return _CROSS_DEVICE_OPS[name](num_packs=num_packs)


def _choose_devices(num_gpus: int | None, virtual_devices: int | None) -> list[str]:
    """Return all GPUs, or the first `num_gpus` of them; without a GPU, the logical CPUs."""
    num_found = sum(name.startswith("/device:GPU:") for name in _own_devices())
    gpus = [f"/gpu:{index}" for index in range(num_found)]
    if num_gpus is not None:
        if num_gpus > num_found:
            raise ValueError(f"strategy.num_gpus={num_gpus}, but TensorFlow sees {num_found} GPUs here.")
        gpus = gpus[:num_gpus]
    if gpus:
        return gpus
    return [f"/cpu:{index}" for index in range(virtual_devices or 1)]


def _check_known(setting: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"strategy.{setting}={value!r} is not known. Use one of: {', '.join(known)}.")


def _check_devices(devices: Sequence[str]) -> None:
    known = _own_devices()
    known_short = {name.removeprefix("/device:").lower() for name in known}
    for device in devices:
        short = device.lower().removeprefix("/").removeprefix("device:")
        if short not in known_short:
            raise ValueError(f"strategy.devices: there is no device {device!r}. TensorFlow sees: {', '.join(known)}.")


def check_devices_of(argument: str, strategy: Any) -> None:
    """Check that this process has the devices of a strategy that a program built. TensorFlow 2.21 builds one of missing
    devices, and waits without an end in its first step.

    Args:
      argument: the argument of RunConfig that holds it.
      strategy: the strategy; anything else is not checked, nor is one that finds its devices itself or whose devices
        other processes have.

    Raises:
      ValueError: a device does not exist.
    """
    central = tf.distribute.experimental.CentralStorageStrategy
    if not isinstance(strategy, tf.distribute.MirroredStrategy | tf.distribute.OneDeviceStrategy | central):
        return
    known = [name.removeprefix("/device:") for name in _own_devices()]
    asked = []
    for device in strategy.extended.worker_devices:
        spec = tf.DeviceSpec.from_string(device)
        asked.append(f"{spec.device_type}:{spec.device_index or 0}")
    if not set(asked) <= set(known):
        raise ValueError(
            f"RunConfig({argument}={type(strategy).__name__}): its devices are {', '.join(asked)}, but TensorFlow sees "
            f"only {', '.join(known)} here. Name devices that exist, or use tf.distribute.MirroredStrategy(): it takes "
            "all GPUs, and without any the CPU."
        )


def _own_devices() -> list[str]:
    """Return the devices of this process, in the form `/device:CPU:0`.

    In a cluster TensorFlow prefixes a device's name with the task, and a coordinator also sees other tasks' devices.
    """
    # Derive the task's prefix from the first CPU, where tf.distribute takes it from, too.
    first_cpu = tf.config.list_logical_devices("CPU")[0]
    task = first_cpu.name.rpartition("/device:")[0]
    own = []
    for device in tf.config.list_logical_devices():
        if device.name.startswith(f"{task}/device:"):
            own.append(device.name.removeprefix(task))
    return own


MIN_PART_BYTES = 256 << 10
"""Smallest size in bytes of a variable's part with strategy.partitioner=min_size."""


def build_parameter_server(
    tasks: Mapping[str, Sequence[str]], partitioner: str | None = None
) -> tf.distribute.experimental.ParameterServerStrategy:
    """Build the strategy for the coordinator of `tasks`; return when all workers and servers have connected.

    Args:
      tasks: chief (this process), worker and ps -> addresses.
      partitioner: how to partition variables over servers: min_size (parts of at least 256 KiB, at most one per
        server), fixed_shards (one part per server); None: variables are not partitioned.
    """
    cluster_tasks = {task_type: list(tasks[task_type]) for task_type in ("chief", "worker", "ps") if task_type in tasks}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster_tasks), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    variable_partitioner = _build_partitioner(partitioner, len(tasks["ps"]))
    return tf.distribute.experimental.ParameterServerStrategy(resolver, variable_partitioner)


def _build_partitioner(name: str | None, num_servers: int) -> Any:
    partitioners = tf.distribute.experimental.partitioners
    if name == "min_size":
        return partitioners.MinSizePartitioner(MIN_PART_BYTES, max_shards=num_servers)
    if name == "fixed_shards":
        return partitioners.FixedShardsPartitioner(num_servers)
    return None


def is_parameter_server(strategy: tf.distribute.Strategy | None) -> bool:
    """Report whether the strategy has parameter servers; then a coordinator requests training steps from workers."""
    return isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
