"""Runs of the same settings with other seeds repeat each other: they are ranked as one, by the mean of the metric."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from runner.system.console import format_number


class Repeat(Protocol):
    """A run, as its ranking sees it.

    Attributes:
      settings_id: what runs have in common whose settings differ in the seed at most; None: not known.
      seed: the run's seed; None: not known.
      value: its value of the metric by which it is ranked; None: it has none.
    """

    @property
    def settings_id(self) -> str | None: ...

    @property
    def seed(self) -> int | None: ...

    @property
    def value(self) -> float | None: ...


RunT = TypeVar("RunT", bound=Repeat)


@dataclass(frozen=True)
class Spread:
    """The values of a metric in runs that repeat each other; those without a value are left out."""

    values: Sequence[float]

    @property
    def mean(self) -> float | None:
        """Return the mean, which does not depend on the order of the runs; None if no run has a value."""
        if not self.values:
            return None
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation of a sample (n - 1); None of fewer than two values."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values)

    def __str__(self) -> str:
        """Return `0.71 ± 0.02`; `0.71` of one value and `-` of none."""
        if self.mean is None:
            return "-"
        if self.deviation is None:
            return format_number(self.mean)
        return f"{format_number(self.mean)} ± {self.deviation:.2g}"


@dataclass(frozen=True, eq=False)
class Repeats(Generic[RunT]):
    """All runs of the same settings, each with another seed; at least one."""

    runs: list[RunT]

    @property
    def with_value(self) -> list[RunT]:
        """Return the runs that have a value of the metric."""
        return [run for run in self.runs if run.value is not None]

    @property
    def spread(self) -> Spread:
        """Return the values of the metric by which the runs are ranked."""
        return Spread([run.value for run in self.runs if run.value is not None])

    @property
    def count(self) -> str:
        """Return the number of runs with a value: `3`, or `2 of 3` if others lack one."""
        number = len(self.with_value)
        total = len(self.runs)
        if number == total:
            return str(total)
        return f"{number} of {total}"

    def best(self, mode: str) -> RunT:
        """Return the run with the best value; the first if none has a value.

        Args:
          mode: "min" or "max", whether the smallest or the largest value is best.
        """
        sign = 1 if mode == "min" else -1
        return min(self.with_value or self.runs, key=lambda run: sign * (run.value or 0.0))


def group_repeats(runs: Iterable[RunT]) -> list[Repeats[RunT]]:
    """Return the runs in groups that repeat each other, in the order in which the groups begin.

    A run with the seed of an earlier one of the same settings is no repeat: it ran again, perhaps with other code. It
    begins a group of its own, and so does a run whose settings are not known.
    """
    groups: list[Repeats[RunT]] = []
    of_settings: dict[str, list[Repeats[RunT]]] = {}
    for run in runs:
        begun: list[Repeats[RunT]] = []
        if run.settings_id is not None:
            begun = of_settings.setdefault(run.settings_id, [])
        for group in begun:
            if all(other.seed != run.seed for other in group.runs):
                group.runs.append(run)
                break
        else:
            group = Repeats([run])
            begun.append(group)
            groups.append(group)
    return groups


def have_repeats(groups: Sequence[Repeats[RunT]]) -> bool:
    """Report whether any settings were run with more than one seed."""
    return any(len(group.runs) > 1 for group in groups)
