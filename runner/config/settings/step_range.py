"""Ranges of global steps, written as 100-110."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRange:
    """The global steps from `first` to `last`, both included. The first step of a run is 1.

    Raises:
      ValueError: the range is empty, or begins before step 1.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError("the first step is 1")
        if self.first > self.last:
            raise ValueError(f"step {self.last} comes before step {self.first}")

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def parse_step_range(text: str) -> StepRange:
    """Return the steps that `text` names: `100-110`, or a single one: `100`.

    Raises:
      ValueError: `text` is not such a range; the message does not repeat it.
    """
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    if found is None:
        raise ValueError("steps are written as 100-110, or 100 for one")
    return StepRange(int(found[1]), int(found[2] or found[1]))
