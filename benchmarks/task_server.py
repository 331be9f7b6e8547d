"""Measure what the task server saves: in a sweep, in a gang, and from SIGKILL to the next step.

    python benchmarks/task_server.py [--rounds 3] [--jobs 20] [--tasks 4] [--settle 10]

Each case is `python -m runner` on the digits, with run.preload=auto and with run.preload=false. The sweep has `--jobs`
jobs of about a second; the gang has `--tasks` workers that take one step each. Both are timed from the start of the
command to its end. Recovery is from SIGKILL of the only task of a run to its next step, compared with the cold start of
the same run, from the command to the end of its first step.

CPU seconds are those of all processes of the command: prefer them on a machine with other load.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _processes import environment
from _rounds import Ratio, Times, arguments, show
from recovery import is_event, started

PRELOADS = ("auto", "false")
SETTINGS = ("tracking=none", "model.params.network=mlp", "run.progress=off")


def command(*overrides: str) -> Times:
    """Run a command that ends by itself, and return its times."""
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "said", "wb") as said:
        argv = [sys.executable, "-m", "runner", *SETTINGS, *overrides]
        before, begun = cpu_of_children(), time.perf_counter()
        subprocess.run(argv, env=environment(), stdout=said, stderr=said, cwd=directory, check=True)
        return Times(time.perf_counter() - begun, cpu_of_children() - before)


def sweep(preload: str, num_jobs: int) -> Times:
    rates = ",".join(f"{0.001 * number:g}" for number in range(1, num_jobs + 1))
    return command("-m", f"run.preload={preload}", f"model.params.learning_rate={rates}", "train.max_steps=100")


def gang(preload: str, num_tasks: int) -> Times:
    return command(
        "command=train", f"run.preload={preload}", "strategy=multi_worker", f"cluster.num_workers={num_tasks}",
        "train.max_steps=1", "input.train.batch_size=64", "model_dir=run",
    )  # fmt: skip


def recovery(preload: str, settle_secs: float) -> tuple[Times, Times]:
    """Return the times of a cold start, and of a recovery after SIGKILL."""
    begun = time.time()
    with started("strategy=default", f"run.preload={preload}") as run:
        cold = run.passed(run.wait("chief", is_event("first_step"), begun), Times(begun))
        time.sleep(settle_secs)
        run.wait("chief", is_event("checkpoint"), since=begun)
        lost = run.now()
        os.kill(run.events("chief", since=begun)[0]["pid"], 9)
        return cold, run.passed(run.wait("chief", is_event("first_step"), lost.wall), lost)


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def names(row: str) -> Sequence[str]:
    return [f"{row}, preload={preload}" for preload in PRELOADS]


def main() -> None:
    parsed = arguments(
        __doc__, 3,
        jobs=(20, 2, "jobs of the sweep"), tasks=(4, 2, "workers of the gang"),
        settle=(10, 1, "seconds from the first step to the loss"),
    )  # fmt: skip
    rows: dict[str, list[Times]] = {}
    for number in range(parsed.rounds):
        found: dict[str, Times] = {}
        for preload in PRELOADS:
            found[f"sweep, preload={preload}"] = sweep(preload, parsed.jobs)
            found[f"gang, preload={preload}"] = gang(preload, parsed.tasks)
            start, again = recovery(preload, parsed.settle)
            found |= {f"first step, preload={preload}": start, f"recovery, preload={preload}": again}
        told = ", ".join(f"{name} {times.wall:.1f} s ({times.cpu:.1f} CPU)" for name, times in found.items())
        print(f"round {number}: {told}", flush=True)
        for name, times in found.items():
            rows.setdefault(name, []).append(times)
    ratios = [
        Ratio(*names("sweep"), 0.45), Ratio(*names("gang"), 0.5),
        Ratio("recovery, preload=auto", "first step, preload=false", 0.3),
        Ratio("recovery, preload=false", "first step, preload=false"), Ratio(*names("first step")),
    ]  # fmt: skip
    show(f"{parsed.jobs} jobs, a gang of {parsed.tasks}", rows, ratios, unit="s")


if __name__ == "__main__":
    main()
