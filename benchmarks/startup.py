"""Seconds until the command line answers, and until the first training step has ended.

    python benchmarks/startup.py [--rounds 5] [--only digits] [--tiny]

The command line (`--help`, `--cfg job`) is compared with `python -c pass`. The first step of `python -m runner`, with
and without MLflow, is compared with a bare script (`first_step/bare.py`) that imports TensorFlow, reads the same data
and traces the same step; for the shipped digits model, and one of 120 layers. Each round runs every case once.

The runner's first step has ended when its journal says so; then the run is stopped. CPU seconds are those of all its
processes until then: prefer them on a machine with other load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from _processes import HERE, cpu_of_tree, environment, kill

POLL_SECS = 0.01
LIMIT_SECS = 120.0

MODELS = {"digits": [], "deep": ["model.fn=deep.model_fn"]}
"""Model -> the overrides that train it."""


@dataclass(frozen=True)
class Times:
    """Wall-clock and CPU seconds."""

    wall: float
    cpu: float


Case = Callable[[], Times]


def command(*argv: str) -> Case:
    """Return the case of a Python command that ends by itself."""

    def run() -> Times:
        before, started = _cpu_of_children(), time.perf_counter()
        subprocess.run([sys.executable, *argv], env=environment(), check=True, stdout=subprocess.DEVNULL)
        return Times(time.perf_counter() - started, _cpu_of_children() - before)

    return run


def bare(model: str) -> Case:
    """Return the case of the bare script, until the end of its step."""

    def run() -> Times:
        started = time.time()
        argv = [sys.executable, str(HERE / "first_step" / "bare.py"), model]
        done = subprocess.run(argv, env=environment(), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        ended, cpu = map(float, done.stdout.split())
        return Times(ended - started, cpu)

    return run


def runner(model: str, tracking: str, directory: Path) -> Case:
    """Return the case of the runner, until the end of the first step. All rounds share one MLflow database, like a
    user's runs.
    """

    def run() -> Times:
        model_dir = Path(tempfile.mkdtemp(dir=directory))
        argv = [sys.executable, "-m", "runner", *MODELS[model], f"model_dir={model_dir}", f"tracking={tracking}"]
        if tracking == "mlflow":
            argv.append(f"tracking.uri=sqlite:///{directory}/mlflow.db")
        with open(model_dir / "said", "wb") as said:
            started = time.time()
            process = psutil.Popen(argv, env=environment(), stdout=said, stderr=said, cwd=directory)
            try:
                return _first_step(process, model_dir, started)
            finally:
                kill(process)

    return run


def _first_step(process: psutil.Popen, model_dir: Path, started: float) -> Times:
    while time.time() < started + LIMIT_SECS and process.poll() is None:
        for line in _lines(model_dir / "events.chief-0.jsonl"):
            if "train/loss" in line.get("metrics", ()):
                return Times(line["time"] - started, cpu_of_tree(process))
        time.sleep(POLL_SECS)
    raise RuntimeError(f"no step was taken: {(model_dir / 'said').read_text()}")


def _lines(journal: Path) -> list[dict]:
    data = journal.read_bytes() if journal.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the table ------------------------------------------------------------------------------------------------------


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[Times]]:
    """Return case -> times of each round. A first round, which creates the database, is not counted."""
    times: dict[str, list[Times]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            result = run()
            if number:
                times[name].append(result)
    return times


def show(title: str, times: dict[str, list[Times]], factor: float) -> None:
    """Print a table of medians, ratios to the first case in each round, and the excess over `factor` times it."""
    above = "above it" if factor == 1 else f"above {factor} x it"
    print(f"\n{title:24}{'wall s':>8}{'min':>8}{'max':>8}{'ratio':>8}{above:>16}", end="")
    print(f"{'CPU s':>10}{'min':>8}{'max':>8}{'ratio':>8}{above:>16}")
    base = next(iter(times.values()))
    for name, rounds in times.items():
        print(f"{name:24}", end="")
        for kind, pad in (("wall", 8), ("cpu", 10)):
            values, bases = [[getattr(one, kind) for one in of] for of in (rounds, base)]
            numbers = [statistics.median(values), min(values), max(values)]
            print(f"{numbers[0]:{pad}.2f}{numbers[1]:8.2f}{numbers[2]:8.2f}", end="")
            print(f"{_median(values, bases, lambda a, b: a / b):8.2f}", end="")
            print(f"{_median(values, bases, lambda a, b: a - factor * b):16.2f}", end="")
        print()


def _median(values: Sequence[float], bases: Sequence[float], of: Callable[[float, float], float]) -> float:
    return statistics.median(map(of, values, bases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("command-line", *MODELS), help="one of the tables; default: all")
    parser.add_argument("--tiny", action="store_true", help="the digits alone: shows that the script works")
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ", end="")
    print(f"{arguments.rounds} rounds; medians of times, and of ratios and differences in each round")
    if arguments.only in (None, "command-line"):
        cases = {
            "python -c pass": command("-c", "pass"),
            "runner --help": command("-m", "runner", "--help"),
            "runner --cfg job": command("-m", "runner", "--cfg", "job"),
        }
        show("command line", measure(cases, arguments.rounds), 1)
    for model in MODELS:
        if arguments.only == model or (arguments.only is None and not (arguments.tiny and model == "deep")):
            with tempfile.TemporaryDirectory() as directory:
                cases = {
                    "bare script": bare(model),
                    "runner, tracking=none": runner(model, "none", Path(directory)),
                    "runner, tracking=mlflow": runner(model, "mlflow", Path(directory)),
                }
                show(f"first step, {model}", measure(cases, arguments.rounds), 1.1)


if __name__ == "__main__":
    main()
