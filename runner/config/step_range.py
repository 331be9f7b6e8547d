"""Some steps of a run, as a person writes them: 100-110."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRange:
    """The global steps `first` to `last`, both of them included; the first step of all is 1.

    Raises:
      ValueError: there are no such steps.
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
    """The steps that `text` names: `100-110`, or one of them: `100`.

    Raises:
      ValueError: it names none; the reason, without `text`.
    """
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    if found is None:
        raise ValueError("steps are written as 100-110, or 100 for one")
    return StepRange(int(found[1]), int(found[2] or found[1]))
