"""Configure the devices of this process before TensorFlow uses them, and describe them."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import tensorflow as tf

from runner.config.schema import ConfigError, EvalStrategyConfig, RunSettings
from runner.system import memory
from runner.system.console import counted

_log = logging.getLogger(__name__)


def configure_devices(run: RunSettings) -> None:
    """Configure GPU memory and numbers of threads as `run` says.

    Must be called before a user's module is imported, because TensorFlow ignores these settings once it has used a
    device. Settings that are null in `run` keep the value that TensorFlow, or a script, gave them.

    Args:
      run: the group `run` of the config.

    Raises:
      ConfigError: TensorFlow has already used a device, with other settings.
    """
    threading = tf.config.threading
    if run.inter_op_threads is not None:
        _set("run.inter_op_threads", threading.set_inter_op_parallelism_threads, run.inter_op_threads)
    if run.intra_op_threads is not None:
        _set("run.intra_op_threads", threading.set_intra_op_parallelism_threads, run.intra_op_threads)
    if run.memory_growth:
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            _log.warning("run.memory_growth=true has no effect: TensorFlow sees no GPU here.")
        for gpu in gpus:
            _set("run.memory_growth", tf.config.experimental.set_memory_growth, gpu, True)


def _set(key: str, setter: Any, *values: Any) -> None:
    try:
        setter(*values)
    except RuntimeError as error:  # "... cannot be modified after initialization"
        value = str(values[-1]).lower()
        raise ConfigError(
            f"{key}={value} comes too late: this process has already used TensorFlow, which reads the setting only "
            f"before its first tensor. Run in a separate process (run.inline=false), or unset {key}."
        ) from error


def session_config() -> tf.compat.v1.ConfigProto:
    """Return this process's settings of threads and GPU memory in the form that a TensorFlow server takes.

    A server does not use the process's settings unless it is given them.
    """
    gpus = tf.config.list_physical_devices("GPU")
    grows = any(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
    threading = tf.config.threading
    # 0 stands for one thread for each core.
    inter_op_threads = threading.get_inter_op_parallelism_threads() or len(os.sched_getaffinity(0))
    return tf.compat.v1.ConfigProto(
        # In TensorFlow 2.21 (GrpcEagerServiceImpl::EnqueueHandler) a coordinator's request holds a thread until the
        # function that it calls has ended. The operations of that function need the others.
        inter_op_parallelism_threads=inter_op_threads + 1,
        intra_op_parallelism_threads=threading.get_intra_op_parallelism_threads(),
        gpu_options=tf.compat.v1.GPUOptions(allow_growth=grows),
    )


def peak_memory() -> dict[str, int]:
    """Return the largest memory in bytes that this process has used so far: `process` is what of it was resident,
    `GPU:<number>` what TensorFlow had allocated there. What is not known is left out.
    """
    peaks = {}
    resident = memory.peak_memory()
    if resident is not None:
        peaks["process"] = resident
    for gpu in tf.config.list_logical_devices("GPU"):  # of a CPU, TensorFlow does not know it
        name = gpu.name.rpartition("device:")[2]
        with contextlib.suppress(ValueError, tf.errors.OpError):
            peaks[name] = int(tf.config.experimental.get_memory_info(name)["peak"])
    return peaks


def describe_devices(strategy: EvalStrategyConfig, replicas: int) -> str:
    """Return the devices that compute, for a message: `CPU, 2 cores`, or `2 x NVIDIA H200`.

    The names are those of this process's devices; other workers are assumed to have the same devices.
    """
    names_a_cpu = any("cpu" in device.lower() for device in strategy.devices or ())
    is_on_cpu = strategy.virtual_devices or names_a_cpu
    if not is_on_cpu:
        for kind in ("TPU", "GPU"):
            if not tf.config.list_logical_devices(kind):
                continue
            devices = tf.config.get_visible_devices(kind)
            if devices:
                name = tf.config.experimental.get_device_details(devices[0]).get("device_name", kind)
                return f"{replicas} x {name}"
    num_cores = len(os.sched_getaffinity(0))
    return f"CPU, {counted(num_cores, 'core')}"
