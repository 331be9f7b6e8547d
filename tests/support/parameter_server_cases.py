"""A coordinator with its servers and workers, and what it is asked to do; started by test_parameter_server.py.

Usage: python -m tests.support.parameter_server_cases <folder> [slow | <case> ...]. It writes there, for each case (if
none is named, for all that are not slow; slow: for those that are), what came out: a JSON file. One cluster serves all
cases: the coordinator connects once in the life of its process.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.distribute.local_cluster import free_ports
from runner.distribute.tf_config import read_tf_config

NUM_WORKERS, NUM_PS = 2, 2

HANGS_SECS = 200.0
"""After so long a case says where each of its threads is."""


def serve_at(place: str) -> None:
    """The life of a server. Args: place: as TF_CONFIG says it."""
    from runner.distribute.grpc_server import serve, start_server

    serve(start_server(read_tf_config(place)))


class Servers:
    """The processes beside the coordinator; forked from one that has imported TensorFlow, which takes 4 s each time."""

    def __init__(self, num_workers: int = NUM_WORKERS, num_ps: int = NUM_PS) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["runner.distribute.grpc_server"])
        addresses = iter(f"127.0.0.1:{port}" for port in free_ports(1 + num_workers + num_ps))
        counts = {"chief": 1, "worker": num_workers, "ps": num_ps}
        self.tasks = {kind: [next(addresses) for _ in range(count)] for kind, count in counts.items()}
        self.processes: dict[tuple[str, int], Any] = {}
        for kind in ("worker", "ps"):
            for index in range(counts[kind]):
                self.start(kind, index)

    def start(self, kind: str, index: int) -> None:
        place = json.dumps({"cluster": self.tasks, "task": {"type": kind, "index": index}})
        self.processes[kind, index] = self._context.Process(target=serve_at, args=(place,), daemon=True)
        self.processes[kind, index].start()

    def kill(self, kind: str, index: int) -> None:
        self.processes[kind, index].kill()
        self.processes[kind, index].join()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def main(folder: Path) -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    servers = Servers()
    try:
        from tests.support import parameter_server_evaluations, parameter_server_models

        around = parameter_server_models.Surroundings(servers, folder)
        cases = {**parameter_server_evaluations.CASES, **parameter_server_models.CASES}  # the last ends the cluster
        others = parameter_server_models.SLOW_CASES
        for name in others if sys.argv[2:] == ["slow"] else sys.argv[2:] or cases:
            _run(name, {**cases, **others}[name], around, folder)
    finally:
        servers.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # TensorFlow would wait for those that are gone


def _run(name: str, case: Callable[[Any], Any], around: Any, folder: Path) -> None:
    started = time.monotonic()
    faulthandler.dump_traceback_later(HANGS_SECS)
    try:
        found = {"found": case(around)}
    except BaseException:
        found = {"error": traceback.format_exc()}
    faulthandler.cancel_dump_traceback_later()
    (folder / f"{name}.json").write_text(json.dumps({**found, "secs": time.monotonic() - started}, default=float))


def after(secs: float, do: Callable[[], None]) -> threading.Timer:
    """Does something later, beside what goes on."""
    timer = threading.Timer(secs, do)
    timer.daemon = True
    timer.start()
    return timer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
