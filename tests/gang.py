"""A gang of workers that train together, started by tests: `python -m tests.gang <folder> <case> ...` is one of them.

Each case is a function of tests/worker_cases.py. What it returns on each worker is written to
`<folder>/<case>.<worker>.npz`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.local_cluster import free_ports

ROOT = Path(__file__).parent.parent

DIES_AT = 11
"""The step at which the case `dying` kills a worker."""


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


class Gang:
    """Processes that run the same cases.

    Args:
      options: further environment variables of all workers.
      prefix: a command that each worker is started by, with `{worker}` in it.
    """

    def __init__(
        self,
        num_workers: int,
        folder: Path,
        cases: Sequence[str],
        options: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.workers, self._outputs = [], []
        for worker, place in enumerate(environments(num_workers)):
            command = [one.format(worker=worker) for one in prefix]
            command += [sys.executable, "-m", "tests.gang", str(folder), *cases]
            environment = {
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONFAULTHANDLER": "1",
                **(options or {}),
                **place,
            }
            output = tempfile.TemporaryFile("w+")
            self._outputs.append(output)
            self.workers.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )

    def wait(self, timeout: float = 270) -> list[int]:
        """The exit codes; of a worker that does not end, that of SIGABRT, and its output says where it was."""
        end = time.monotonic() + timeout
        for worker in self.workers:
            try:
                worker.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.send_signal(signal.SIGABRT)
                worker.wait()
        return [worker.returncode for worker in self.workers]

    def output(self, worker: int) -> str:
        """What that worker has said so far."""
        self._outputs[worker].seek(0)
        return self._outputs[worker].read()

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
    from tests import worker_cases  # makes the strategy

    for case in cases:
        result = worker_cases.run(case, Path(folder))
        np.savez(Path(folder) / f"{case}.{worker_cases.WORKER}.npz", **result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
