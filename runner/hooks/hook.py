"""Hooks: what happens beside the loop, and how often."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from runner.types import StepResult

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Every:
    """A cadence. Python runs once per loop of many steps, so a cadence is *crossed*, not met.

    Attributes:
      steps: due at each multiple of so many global steps; the loop ends there.
      secs: due at the first end of a loop after so many seconds.
      offset: the steps count from here, and not from 0: 1 has 1, 1 + steps, 1 + 2 * steps.
    """

    steps: int | None = None
    secs: float | None = None
    offset: int = 0

    def due(self, before: int, after: int, elapsed_secs: float = 0.0) -> bool:
        """Report whether the steps from `before` to `after`, `elapsed_secs` after it was due last, make it due."""
        if self.steps and (after - self.offset) // self.steps > (before - self.offset) // self.steps:
            return True
        return self.secs is not None and elapsed_secs >= self.secs

    def steps_until_due(self, step: int) -> float:
        """Return the steps from `step` to where it is due next; infinite for a cadence in seconds or none."""
        return self.steps - (step - self.offset) % self.steps if self.steps else math.inf


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

    Without a cadence, `before_step` and `after_step` are called once per loop, whose steps StepResult holds. A subclass
    that sets `every` is called when that is due, with all steps since it was called last: `Every(steps=50)` at the
    global steps 50, 100, ... What comes after the last of them is not handed on; `end` is called at the end.
    """

    every: Every = Every()

    def begin(self, run: Run) -> None:
        """Before the first step, or before an evaluation or prediction; variables hold their values."""

    def before_step(self, run: Run, step: int) -> None:
        """Before a loop, the first one after `after_step`; `step` is the global step so far."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """After a loop, where the cadence is due."""

    def after_batches(self, run: Run, examples: int) -> None:
        """In an evaluation or prediction, after some of its batches; `examples` are those seen so far."""

    def end(self, run: Run) -> None:
        """After the last checkpoint, or after the evaluation or prediction; not called when that failed."""

    def close(self, run: Run) -> None:
        """After training, however it ended: the place to give back what would outlive it. It does not raise."""


class WhenDue:
    """Calls a hook of training when its cadence is due, or after each loop where it has none."""

    def __init__(self, hook: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._hook, self._clock = hook, clock
        self._results: list[StepResult] = []
        self._called_at: float | None = None

    def before_step(self, run: Run, step: int) -> None:
        if self._called_at is None:
            self._called_at = self._clock()
        if not self._results:
            self._hook.before_step(run, step)

    def after_step(self, run: Run, result: StepResult) -> None:
        assert self._called_at is not None
        every, now = getattr(self._hook, "every", Every()), self._clock()
        self._results.append(result)
        has_cadence = every.steps or every.secs is not None
        if not has_cadence or every.due(result.first_step - 1, result.last_step, now - self._called_at):
            results, self._results, self._called_at = self._results, [], now
            self._hook.after_step(run, _joined(results))


def _joined(results: Sequence[StepResult]) -> StepResult:
    """Return one result of the steps of several loops, the oldest first."""
    if len(results) == 1:
        return results[0]
    return StepResult(
        first_step=results[0].first_step,
        last_step=results[-1].last_step,
        losses=np.concatenate([one.losses for one in results]),
        examples=sum(one.examples for one in results),
        secs=sum(one.secs for one in results),
        values={name: np.concatenate([one.values[name] for one in results]) for name in results[0].values},
    )


class TimeLimit(Hook):
    """Ends training, with a checkpoint, so many seconds after its first step began (`train.max_secs`).

    It is looked at between loops, which take about a second. A run that is started again has the time anew.
    """

    def __init__(self, secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._secs, self._clock = secs, clock
        self._began = 0.0

    def begin(self, run: Run) -> None:
        self._began = self._clock()

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._clock() - self._began >= self._secs:
            _log.info("train.max_secs=%g: training ends at step %d.", self._secs, result.last_step)
            run.request_stop(f"train.max_secs={self._secs:g}")
