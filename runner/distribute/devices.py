"""The devices of this process: what TensorFlow is told of them before it uses one, and what they are called."""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf

from runner.config.schema import ConfigError, EvalStrategyConfig, RunSettings
from runner.system.console import counted

_log = logging.getLogger(__name__)


def configure_devices(run: RunSettings) -> None:
    """Tell TensorFlow how to take memory of GPUs and how many threads to have, as `run` says.

    Call it before a module of the user's is imported: TensorFlow takes neither once it has used a device. What `run`
    leaves open stays as it is, TensorFlow's default or what a script has set.

    Raises:
      ConfigError: TensorFlow has used a device, and what it has differs.
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
            f"{key}={value} comes too late: TensorFlow is in use already, and takes it only before its first tensor. "
            f"A process that has used TensorFlow before this run does that: start the run in one of its own "
            f"(run.inline=false), or leave {key} out."
        ) from error


def session_config() -> tf.compat.v1.ConfigProto:
    """Return what this process has set of threads and GPU memory: a server of TensorFlow does not know it by itself."""
    gpus = tf.config.list_physical_devices("GPU")
    grows = any(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
    return tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        gpu_options=tf.compat.v1.GPUOptions(allow_growth=grows),
    )


def describe_devices(strategy: EvalStrategyConfig, replicas: int) -> str:
    """Return what computes: `CPU, 2 cores`, or `2 x NVIDIA H200`.

    Those of this process are named; other workers are taken to have the same.
    """
    is_on_cpu = strategy.virtual_devices or any("cpu" in device.lower() for device in strategy.devices or ())
    for kind in () if is_on_cpu else ("TPU", "GPU"):
        devices = tf.config.list_logical_devices(kind) and tf.config.get_visible_devices(kind)
        if devices:
            name = tf.config.experimental.get_device_details(devices[0]).get("device_name", kind)
            return f"{replicas} x {name}"
    return f"CPU, {counted(len(os.sched_getaffinity(0)), 'core')}"
