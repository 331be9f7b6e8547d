"""The use of a host while a run trains: CPU, memory, disk, network and NVIDIA's GPUs (`tracking.system_metrics`).

Each host of a run has a journal of its own, from which the process that ships the run to MLflow takes the metrics. They
have the names of MLflow's own monitor, which its pages of a run show apart from the others.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from runner.system.standard_streams import say
from runner.tracking.journal import HOST, Journal, iterate_journal, journal_path

PERIOD = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
"""MLflow's variable with the seconds between two measurements; 10 if it is not set."""


class HostMetrics:
    """Measures this host in a thread, inside its context.

    Args:
      model_dir: the folder of the run, where its journal is.
      env: may have PERIOD.
      node: name of this host, if the run has several; then one process of a host measures it. '': the run has one host.
    """

    def __init__(self, model_dir: Path, env: Mapping[str, str], node: str = "") -> None:
        self._model_dir = model_dir
        self._period_secs = float(env.get(PERIOD) or 10.0)
        self._prefix = f"system/{node}/" if node else "system/"
        self._name = node or "here"
        self._has_ended = threading.Event()
        self._exit_stack = ExitStack()

    def __enter__(self) -> HostMetrics:
        with suppress(Timeout, OSError):  # another process of this host measures it
            lock = FileLock(self._model_dir / f".{HOST}-{self._name}.lock", thread_local=False)
            self._exit_stack.enter_context(lock.acquire(timeout=0))
            thread = threading.Thread(target=self._measure, daemon=True, name="metrics of this host")
            thread.start()
            self._exit_stack.callback(thread.join)
            self._exit_stack.callback(self._has_ended.set)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit_stack.close()

    def _measure(self) -> None:
        """In the thread: write a sample into the journal of this host once per period, until `__exit__`."""
        sample = build_sample()
        file = journal_path(self._model_dir, HOST, self._name)
        # The folder may be lost or the disk full, which the run itself reports.
        with suppress(OSError):
            last = -1  # the steps of this journal count measurements, and go on after those of an earlier start
            for line in iterate_journal(file, containing=b'"metrics"'):
                last = line["step"]
            with closing(Journal(file)) as journal:
                while not self._has_ended.wait(self._period_secs):
                    last += 1
                    values = {f"{self._prefix}{name}": value for name, value in sample().items()}
                    journal.metrics(last, values)


def build_sample() -> Callable[[], dict[str, float]]:
    """Return what measures this host: name of a metric -> its value now, or since the last call."""
    psutil.cpu_percent()  # the first call has nothing to compare with
    network_before = psutil.net_io_counters()
    gpus = _find_gpus()

    def sample() -> dict[str, float]:
        """Return what is measured now. The network's numbers count from the call of `build_sample`."""
        values = {"cpu_utilization_percentage": psutil.cpu_percent()}
        memory = psutil.virtual_memory()
        values["system_memory_usage_megabytes"] = memory.used / 1e6
        values["system_memory_usage_percentage"] = 100 * memory.used / memory.total
        disk = psutil.disk_usage(os.sep)
        values["disk_usage_percentage"] = disk.percent
        values["disk_usage_megabytes"] = disk.used / 1e6
        values["disk_available_megabytes"] = disk.free / 1e6
        network = psutil.net_io_counters()
        values["network_receive_megabytes"] = (network.bytes_recv - network_before.bytes_recv) / 1e6
        values["network_transmit_megabytes"] = (network.bytes_sent - network_before.bytes_sent) / 1e6
        for number, gpu in enumerate(gpus):
            for name, value in _measure_gpu(gpu):
                values[f"gpu_{number}_{name}"] = value
        return {name: round(value, 1) for name, value in values.items()}

    return sample


def _find_gpus() -> list[Any]:
    """Return NVIDIA's handles of the GPUs of this host; [] without the package nvidia-ml-py or the GPUs' driver, which
    is said.
    """
    try:
        import pynvml
    except ImportError as error:
        _say_unmeasured(f"{error} (pip install nvidia-ml-py)")
        return []
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        _say_unmeasured(str(error))
        return []


@functools.cache  # once in this process: a script may train many times
def _say_unmeasured(reason: str) -> None:
    say(f"tracking.system_metrics: GPUs of this host are not measured: {reason}")


def _measure_gpu(gpu: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of what can be measured of a GPU; a part of it may not, as power in a virtual machine."""
    import pynvml

    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        yield "memory_usage_percentage", 100 * memory.used / memory.total
        yield "memory_usage_megabytes", memory.used / 1e6
    with suppress(pynvml.NVMLError):
        yield "utilization_percentage", pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
    with suppress(pynvml.NVMLError):
        watts = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000
        yield "power_usage_watts", watts
        max_watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
        yield "power_usage_percentage", 100 * watts / max_watts
