"""Seconds from the death of a process of a cluster to the next step, compared with a cold start.

    python benchmarks/recovery.py [--rounds 2] [--settle 20]

Each case is a run of `python -m runner` on the digits with two workers on this host, which saves every 50 steps. A cold
start is from the command to the end of the first step. Some seconds and a checkpoint later, the worker that is not the
chief gets SIGKILL.

multi_worker: all processes restart from the checkpoint. Recovery is from the signal to the end of their first step;
"until all have ended" is the part of it before they are started.

parameter_server: the other processes train on, and the worker is restarted. "Its speed is back" is from the signal to
the end of the first later loop whose speed is at least 0.8 times the median before. "Is back" is the time until the
worker serves again. If there are fewer cores than processes, the remaining ones may be as fast at once.

CPU seconds are those of all processes of the run during that time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from _processes import cpu_of_tree, environment, kill
from _rounds import Ratio, Times, arguments, show

from runner.tracking.journal import journal_path, read_journal

LIMIT_SECS = 120.0
POLL_SECS = 0.02
FAST_ENOUGH = 0.8
SETTINGS = [
    "command=train", "tracking=none", "model.params.network=mlp", "train.max_steps=100000000", "train.log_steps=50",
    "checkpoint.save_steps=50", "cluster.num_workers=2", "cluster.max_restarts=3", "run.progress=off",
]  # fmt: skip
COLD, RESTART, RECOVERY = "cold start", "until all have ended", "recovery"
ASYNC_COLD, ASYNC_BACK, ASYNC_FAST = "parameter_server, cold start", "its worker is back", "its speed is back"


class Run:
    """A run of the runner, observed through its journals."""

    def __init__(self, process: psutil.Popen, model_dir: Path) -> None:
        self._process, self._model_dir = process, model_dir

    def events(self, role: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the events that task 0 of `role` has noted since then."""
        return [line for line in read_journal(journal_path(self._model_dir, role))[0] if line["time"] > since]

    def wait(self, role: str, is_it: Callable[[dict[str, Any]], bool], since: float) -> dict[str, Any]:
        """Wait for the first such event and return it."""
        return self.until(lambda: next(filter(is_it, self.events(role, since)), None))

    def until(self, found: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Wait until `found` returns something other than None, and return that."""
        end = time.monotonic() + LIMIT_SECS
        while time.monotonic() < end and self._process.poll() is None:
            event = found()
            if event is not None:
                return event
            time.sleep(POLL_SECS)
        raise RuntimeError(f"it did not come: {(self._model_dir / 'said').read_text()}")

    def passed(self, event: dict[str, Any], since: Times) -> Times:
        """Return the times from `since` (seconds since 1970) to the event, which has just been noted."""
        return Times(event["time"], cpu_of_tree(self._process)) - since

    def now(self) -> Times:
        return Times(time.time(), cpu_of_tree(self._process))


@contextmanager
def started(*overrides: str) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "said", "wb") as said:
        argv = [sys.executable, "-m", "runner", *SETTINGS, *overrides, f"model_dir={directory}"]
        process = psutil.Popen(argv, env=environment(), stdout=said, stderr=subprocess.STDOUT, cwd=directory)
        try:
            yield Run(process, Path(directory))
        finally:
            kill(process)


def is_event(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda line: line.get("event") == name


def lose_worker(run: Run, settle_secs: float) -> Times:
    """Kill the worker when training has settled, just after a checkpoint, and return when."""
    time.sleep(settle_secs)
    run.wait("chief", is_event("checkpoint"), since=time.time())
    pid = run.events("worker")[0]["pid"]
    before = run.now()
    os.kill(pid, 9)
    return before


def multi_worker(settle_secs: float) -> list[Times]:
    """Return the times of a cold start, of recovery until the restart, and of the whole recovery."""
    begun = time.time()
    with started("strategy=multi_worker") as run:
        cold = run.passed(run.wait("chief", is_event("first_step"), begun), Times(begun))
        lost = lose_worker(run, settle_secs)
        restart = run.passed(run.wait("supervisor", is_event("restart"), lost.wall), lost)
        again = run.passed(run.wait("chief", is_event("first_step"), lost.wall), lost)
        return [cold, restart, again]


def parameter_server(settle_secs: float) -> dict[str, Times]:
    begun = time.time()
    with started("strategy=parameter_server", "cluster.num_ps=1") as run:
        cold = run.passed(run.wait("chief", is_event("first_step"), begun), Times(begun))
        lost = lose_worker(run, settle_secs)
        enough = FAST_ENOUGH * statistics.median(speed for at, speed in speeds(run, 0.0) if at <= lost.wall)
        finders = {
            ASYNC_BACK: lambda: next(filter(is_event("joined"), run.events("worker", lost.wall)), None),
            ASYNC_FAST: lambda: next(({"time": at} for at, speed in speeds(run, lost.wall) if speed >= enough), None),
        }
        found = {ASYNC_COLD: cold}

        def has_both() -> dict[str, Times] | None:
            for name, find in finders.items():
                event = None if name in found else find()
                if event is not None:
                    found[name] = run.passed(event, lost)
            return found if len(found) == 1 + len(finders) else None

        return run.until(has_both)


def speeds(run: Run, since: float) -> list[tuple[float, float]]:
    """Return (end, steps per second) of each loop that began since then."""
    told = [line for line in run.events("chief", since) if "train/steps_per_sec" in line.get("metrics", ())]
    found = [(line["time"], line["metrics"]["train/steps_per_sec"]) for line in told]
    return found[1:]  # the first loop began before


def main() -> None:
    parsed = arguments(__doc__, 2, settle=(20, 10, "seconds from the first step to the loss"))
    rows: dict[str, list[Times]] = {}
    for number in range(parsed.rounds):
        found = dict(zip((COLD, RESTART, RECOVERY), multi_worker(parsed.settle), strict=True))
        found |= parameter_server(parsed.settle)
        print(f"round {number}:", ", ".join(f"{name} {times.wall:.1f} s" for name, times in found.items()), flush=True)
        for name, times in found.items():
            rows.setdefault(name, []).append(times)
    show(
        "multi_worker, a worker is killed", rows, [Ratio(RECOVERY, COLD, 1.2), Ratio(ASYNC_BACK, ASYNC_COLD)], unit="s"
    )


if __name__ == "__main__":
    main()
