"""Run all cases of a script in rounds, and print tables of their times. Not a script."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Mapping[str, Sequence["Times"]]
"""Name of a row -> its times in each round, per step or per example."""

Case = Callable[[], dict[str, "Times"]]
"""Runs once; the rows that it gives."""


@dataclass(frozen=True)
class Times:
    """Wall-clock seconds, and CPU seconds of all threads of this process."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Times:
        return cls(time.perf_counter(), time.process_time())

    def __add__(self, other: Times) -> Times:
        return Times(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Times) -> Times:
        return Times(self.wall - other.wall, self.cpu - other.cpu)

    def __truediv__(self, count: float) -> Times:
        return Times(self.wall / count, self.cpu / count)


@dataclass(frozen=True)
class Ratio:
    """The ratio of two rows' times in each round. A slow moment of the machine slows both.

    Attributes:
      promise: the largest allowed value; None: none is promised.
    """

    row: str
    of: str
    promise: float | None = None


def timed(name: str, count: float, run: Callable[[], Any]) -> Case:
    """Return a case of one row: `run`, which does `count` steps or examples."""

    def case() -> dict[str, Times]:
        started = Times.now()
        run()
        return {name: (Times.now() - started) / count}

    return case


def arguments(doc: str | None, rounds: int, **counts: tuple[int, int, str]) -> argparse.Namespace:
    """Parse the command line, --rounds, --tiny, and `--<name>` for each of `counts`, and print where this runs.

    Args:
      doc: the help text.
      rounds: default number of rounds.
      counts: name -> (default, value with --tiny, help).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--tiny", action="store_true", help="as few steps as possible: shows that the script works")
    for name, (default, tiny, text) in counts.items():
        parser.add_argument(f"--{name}", type=int, help=f"{text}; default: {default}, with --tiny {tiny}")
    parsed = parser.parse_args()
    for name, (default, tiny, _) in counts.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, tiny if parsed.tiny else default)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns because each case makes a function
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, ", end="")
    print(f"{parsed.rounds} rounds; medians, and of ratios in each round", flush=True)
    return parsed


def measure(cases: Sequence[Case], rounds: int) -> dict[str, list[Times]]:
    """Return row name -> times of each round. A first round, which traces and fills caches, is not counted."""
    rows: dict[str, list[Times]] = {}
    for number in range(rounds + 1):
        for case in cases:
            for row, times in case().items():
                if number:
                    rows.setdefault(row, []).append(times)
    return rows


def show(title: str, rows: Rows, ratios: Sequence[Ratio], unit: str = "us") -> None:
    """Print two tables: of times, in microseconds or seconds ("s"), with rates per second; and of ratios, with their
    promises.
    """
    width, in_unit = max(len(name) for name in (title, *rows)) + 2, {"us": 1e6, "s": 1.0}[unit]
    print(f"\n{title:{width}}{f'wall {unit}':>10}{'min':>10}{'max':>10}{f'CPU {unit}':>10}{'min':>10}{'1/s':>12}")
    for name, times in rows.items():
        wall, cpu = ([in_unit * getattr(one, kind) for one in times] for kind in ("wall", "cpu"))
        middle = statistics.median(wall)
        print(f"{name:{width}}{middle:10.2f}{min(wall):10.2f}{max(wall):10.2f}", end="")
        print(f"{statistics.median(cpu):10.2f}{min(cpu):10.2f}{in_unit / middle:12,.{0 if unit == 'us' else 2}f}")
    width = max((len(_name(ratio)) for ratio in ratios), default=0) + 2
    print(f"\n{'ratio':{width}}{'wall':>8}{'min':>8}{'max':>8}{'CPU':>8}{'promise':>12}")
    for ratio in ratios:
        wall, cpu = (_ratios(rows, ratio, kind) for kind in ("wall", "cpu"))
        promise = "" if ratio.promise is None else f"<= {ratio.promise:g}"
        print(f"{_name(ratio):{width}}{statistics.median(wall):8.2f}{min(wall):8.2f}{max(wall):8.2f}", end="")
        print(f"{statistics.median(cpu):8.2f}{promise:>12}", flush=True)


def _name(ratio: Ratio) -> str:
    return f"{ratio.row} / {ratio.of}"


def _ratios(rows: Rows, ratio: Ratio, kind: str) -> list[float]:
    pairs = zip(rows[ratio.row], rows[ratio.of], strict=True)
    return [getattr(row, kind) / getattr(of, kind) for row, of in pairs]
