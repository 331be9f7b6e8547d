"""A gang of workers that train together, started by tests: `python -m tests.support.gang <folder> <case> ...` is one of
them.

Each case is a function of tests/support/worker_cases.py. What it returns on each worker is written to
`<folder>/<case>.<worker>.npz`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.distribute.local_cluster import free_ports

ROOT = Path(__file__).parents[2]

DIES_AT = 11
"""The step at which the case `dying` kills a worker."""

WAY_SECS = 0.15
"""Seconds that a message takes on `slow_way`."""

SILENT_SECS = 250.0
"""Workers of which none begins another case for so long hang."""


def write_lines(folder: Path) -> None:
    """Five files of ids in `folder/lines`, one of seven ids in `folder/line`."""
    for name in ("line", "lines"):
        (folder / name).mkdir(parents=True)
    (folder / "line" / "0.txt").write_text("".join(f"{id}\n" for id in range(7)))
    files = [range(5 * number, 5 * number + 3 + number % 3) for number in range(5)]
    for number, ids in enumerate(files):
        (folder / "lines" / f"{number}.txt").write_text("".join(f"{id}\n" for id in ids))


def environments(num_workers: int) -> list[dict[str, str]]:
    """The TF_CONFIG of each worker, the chief first."""
    chief, *others = [f"127.0.0.1:{port}" for port in free_ports(num_workers)]
    cluster = {"chief": [chief], "worker": others}
    tasks = [{"type": "chief", "index": 0}, *({"type": "worker", "index": i} for i in range(num_workers - 1))]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


@contextlib.contextmanager
def slow_way(server: str) -> Iterator[str]:
    """Another address of `server`: what it sends arrives WAY_SECS later, and if its process ends before that, never."""
    host, port = server.split(":")
    begun = concurrent.futures.Future[tuple[str, Callable[[], object]]]()

    async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter, secs: float) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                asyncio.get_running_loop().call_later(secs, sink.write, data)
        sink.transport.abort()

    async def connect(from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(host, int(port))
        except OSError:  # the server is not there yet: the client tries again
            to_client.transport.abort()
            return
        await asyncio.gather(forward(from_client, to_server, 0), forward(from_server, to_client, WAY_SECS))

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(connect, "127.0.0.1", 0) as listens:
            address = f"127.0.0.1:{listens.sockets[0].getsockname()[1]}"
            begun.set_result((address, lambda: loop.call_soon_threadsafe(ended.set)))
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, end = begun.result(60)
    try:
        yield address
    finally:
        end()
        thread.join()


class Forked:
    """A process that begins with TensorFlow imported, which takes 4 s otherwise; asked what a Popen is asked."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tensorflow", "keras"])
        self._process = context.Process(target=function, args=arguments, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _ends_within(worker: subprocess.Popen[bytes] | Forked, secs: float) -> bool:
    try:
        worker.wait(secs)
    except subprocess.TimeoutExpired:
        return False
    return True


def _work(folder: str, cases: Sequence[str], place: Mapping[str, str], said: str) -> None:
    """The life of a worker that was forked."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)
    os.environ.update(place)
    main(folder, cases)


class Gang:
    """Processes that run the same cases.

    Args:
      prefix: a command that each worker is started by, in a process that imports TensorFlow itself.
      places: what each worker finds in its environment; None: they reach each other directly.
    """

    def __init__(
        self,
        num_workers: int,
        folder: Path,
        cases: Sequence[str],
        prefix: Sequence[str] = (),
        places: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.workers: list[subprocess.Popen[bytes] | Forked] = []
        for worker, place in enumerate(places or environments(num_workers)):
            if not prefix:
                self.workers.append(Forked(_work, str(folder), cases, place, str(self._said_by(worker))))
                continue
            command = [*prefix, sys.executable, "-m", "tests.support.gang", str(folder), *cases]
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONFAULTHANDLER": "1", **place}
            with self._said_by(worker).open("w") as output:
                started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self.workers.append(started)

    def wait(self) -> list[int]:
        """The exit codes; of a worker that hangs, that of SIGABRT, and its output says where it was."""
        said = 0
        for worker in self.workers:
            while not _ends_within(worker, SILENT_SECS):
                before, said = said, self._size_of_output()
                if said == before:
                    worker.send_signal(signal.SIGABRT)
        return [worker.wait() for worker in self.workers]

    def _size_of_output(self) -> int:
        """It grows with each case, as long as no worker hangs."""
        return sum(self._said_by(worker).stat().st_size for worker in range(len(self.workers)))

    def output(self, worker: int) -> str:
        """What that worker has said so far."""
        return self._said_by(worker).read_text()

    def _said_by(self, worker: int) -> Path:
        return self.folder / f"said.{worker}"

    def finished(self) -> Gang:
        """Waits until all cases are through. Raises: AssertionError: a worker failed."""
        codes = self.wait()
        assert not any(codes), "\n".join(f"--- worker {i}: {code}\n{self.output(i)}" for i, code in enumerate(codes))
        return self

    def results(self, case: str) -> list[dict[str, Any]]:
        """What the case returned, by worker."""
        return [
            dict(np.load(self.folder / f"{case}.{worker}.npz", allow_pickle=True))
            for worker in range(len(self.workers))
        ]


def main(folder: str, cases: Sequence[str]) -> None:
    from tests.support import worker_cases  # makes the strategy

    for case in cases:
        result = worker_cases.run(case, Path(folder))
        np.savez(Path(folder) / f"{case}.{worker_cases.WORKER}.npz", **result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
