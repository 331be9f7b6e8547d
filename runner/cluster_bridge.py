"""Private names of TensorFlow that clusters need; for all others it is `runner.bridge`.

Written against TensorFlow 2.21. Each entry says what it is for and what to do when the name moves;
`tests/test_bridge.py` fails first, and by name, when one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# CollectiveAllReduceExtended: see `cpus_of_worker`.
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

__all__ = ["cpus_of_worker"]


@contextlib.contextmanager
def cpus_of_worker(count: int) -> Iterator[None]:
    """A MultiWorkerMirroredStrategy that is built meanwhile, where there is no GPU, has so many replicas in a process:
    its logical CPUs. TensorFlow itself takes the first one alone.

    Private: `CollectiveAllReduceExtended._initialize_local_devices`, which names them. When it moves: refuse
    strategy.virtual_devices with strategy=multi_worker.
    """
    original = CollectiveAllReduceExtended._initialize_local_devices

    def devices(self: Any, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        found, kind = original(self, cluster_resolver, worker_device)
        if kind != "CPU":
            return found, kind
        return tuple(f"{worker_device}/device:CPU:{index}" for index in range(count)), kind

    CollectiveAllReduceExtended._initialize_local_devices = devices
    try:
        yield
    finally:
        CollectiveAllReduceExtended._initialize_local_devices = original
