"""Hooks: what happens beside the loop, and how often."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from runner.types import StepResult


@dataclasses.dataclass(frozen=True)
class Every:
    """A cadence. Python runs once per loop of many steps, so a cadence is *crossed*, not met.

    Attributes:
      steps: due at each multiple of so many global steps; the loop ends there.
      secs: due at the first end of a loop after so many seconds.
    """

    steps: int | None = None
    secs: float | None = None

    def due(self, before: int, after: int, elapsed_secs: float = 0.0) -> bool:
        """Report whether the steps from `before` to `after`, `elapsed_secs` after it was due last, make it due."""
        if self.steps and after // self.steps > before // self.steps:
            return True
        return self.secs is not None and elapsed_secs >= self.secs

    def steps_until_due(self, step: int) -> float:
        """Return the steps from `step` to the next multiple; infinite for a cadence in seconds or none."""
        return self.steps - step % self.steps if self.steps else math.inf


class Run(Protocol):
    """The run, as hooks see it."""

    @property
    def model_dir(self) -> str: ...

    @property
    def global_step(self) -> int: ...

    @property
    def interrupted(self) -> bool:
        """Whether somebody on any worker will not wait; the same on all workers after a loop."""

    def request_stop(self, reason: str = ...) -> None:
        """End training after this loop, with a checkpoint."""

    def interrupt(self, reason: str) -> None:
        """Like `request_stop`, for somebody who will not wait: no evaluation follows, and one under way is given up."""


class Interrupted(Exception):
    """An evaluation or a prediction was ended before it had seen all examples: it has no result."""


@dataclasses.dataclass(frozen=True)
class PassContext:
    """An evaluation or a prediction, as hooks see it: a pass over data at one global step."""

    model_dir: str
    global_step: int
    interrupted: bool = False

    def request_stop(self, reason: str = "") -> None:
        """Raises: RuntimeError: it takes all of its examples."""
        raise RuntimeError(f"request_stop({reason!r}): only training can be stopped; give evaluate(steps=).")

    def interrupt(self, reason: str) -> None:
        """Raises: Interrupted: who will not wait gets no result."""
        raise Interrupted(reason)


class Hook:
    """Base of native hooks; override what you need.

    A subclass that must see certain steps sets `every`: a loop then ends at each of them. Without it, `before_step`
    and `after_step` are called once per loop, whose steps StepResult holds.
    """

    every: Every = Every()

    def begin(self, run: Run) -> None:
        """Before the first step, or before an evaluation or prediction; variables hold their values."""

    def before_step(self, run: Run, step: int) -> None:
        """Before a loop; `step` is the global step so far."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """After a loop."""

    def after_batches(self, run: Run, examples: int) -> None:
        """In an evaluation or prediction, after some of its batches; `examples` are those seen so far."""

    def end(self, run: Run) -> None:
        """After the last checkpoint, or after the evaluation or prediction; not called when that failed."""

    def close(self, run: Run) -> None:
        """After training, however it ended: the place to give back what would outlive it. It does not raise."""
