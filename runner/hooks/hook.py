"""Native hooks: user code that a run calls between loops of steps, and the cadence of these calls."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from runner.types import StepResult

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Every:
    """A cadence in steps or seconds.

    A loop takes many steps per call, so a cadence may be passed without being hit exactly; it is then due.

    Attributes:
      steps: due at each multiple of this number of global steps; a loop ends there. None: not by steps.
      secs: due at the first end of a loop after this number of seconds. None: not by time.
      offset: the multiples are counted from this step instead of 0: with offset 1 they are 1, 1 + steps, 1 + 2 * steps.
    """

    steps: int | None = None
    secs: float | None = None
    offset: int = 0

    def due(self, before: int, after: int, elapsed_secs: float = 0.0) -> bool:
        """Report whether the cadence became due between two global steps.

        Args:
          before: the first step.
          after: the second step.
          elapsed_secs: seconds since the cadence was last due.
        """
        if self.steps:
            multiples_before = (before - self.offset) // self.steps
            multiples_after = (after - self.offset) // self.steps
            if multiples_after > multiples_before:
                return True
        return self.secs is not None and elapsed_secs >= self.secs

    def steps_until_due(self, step: int) -> float:
        """Return the number of steps from `step` to the next step at which the cadence is due; infinite without
        `steps`.
        """
        if not self.steps:
            return math.inf
        steps_since = (step - self.offset) % self.steps
        return self.steps - steps_since


class Run(Protocol):
    """The training run, as hooks see it."""

    @property
    def model_dir(self) -> str: ...

    @property
    def global_step(self) -> int: ...

    @property
    def interrupted(self) -> bool:
        """Report whether a worker was asked to stop at once. After a loop, all workers have the same value."""

    def log(self, values: Mapping[str, Any], *, on_progress: bool = False) -> None:
        """Record numbers, images and figures at the global step, as `runner.log` does in a hook."""

    def request_stop(self, reason: str = ...) -> None:
        """End training after this loop, with a checkpoint."""

    def interrupt(self, reason: str) -> None:
        """End training like `request_stop`, but without the evaluations; an evaluation that is running is abandoned."""


class Interrupted(Exception):
    """An evaluation or a prediction ended before it had seen all examples, so it has no result."""


@dataclasses.dataclass(frozen=True)
class PassContext:
    """An evaluation or a prediction, as hooks see it: one pass over data at one global step."""

    model_dir: str
    global_step: int
    interrupted: bool = False
    log: Callable[..., None] = lambda values, on_progress=False: None

    def request_stop(self, reason: str = "") -> None:
        """Raise RuntimeError: only training can be stopped."""
        raise RuntimeError(
            f"request_stop({reason!r}): only training can be stopped. Limit an evaluation with evaluate(steps=...)."
        )

    def interrupt(self, reason: str) -> None:
        """End the evaluation or prediction without a result.

        Raises:
          Interrupted: always.
        """
        raise Interrupted(reason)


class Hook:
    """Base class of native hooks; override the methods that you need.

    Without a cadence, `before_step` and `after_step` are called once per loop, and their StepResult has the steps of
    the loop. A subclass with a cadence sets `every`: with `Every(steps=50)`, it is called at the global steps 50, 100,
    ..., with all steps since its last call. Steps after the last call are not reported to `after_step`; only `end` is
    called.

    A subclass that sets `fetches` gets values of the examples, in evaluations and in training; see `after_examples`.
    """

    every: Every = Every()
    fetches: Sequence[str] = ()
    """What `after_examples` gets: `predictions`, `labels` or `features`, or an item of one that is a dict, such as
    `predictions/probabilities`."""

    def begin(self, run: Run) -> None:
        """Called before the first step, or before an evaluation or prediction, when variables already have their
        values.
        """

    def before_step(self, run: Run, step: int) -> None:
        """Called before the first loop, and before the first loop after each `after_step`.

        Args:
          run: the run.
          step: the current global step.
        """

    def after_step(self, run: Run, result: StepResult) -> None:
        """Called after a loop if the cadence is due; `result.losses` is `[steps]`."""

    def after_examples(self, run: Run, values: Mapping[str, np.ndarray]) -> None:
        """Called with the values that `fetches` names: after each batch of an evaluation, and after each training step
        that is a multiple of `train.log_steps`; not in predictions. Of several workers, only the chief calls it.

        The rows are the examples of all replicas and workers, in the order of the input and each once: in an evaluation
        those of one batch of each replica, in training those of the global batch of step `run.global_step`.

        Args:
          run: the run.
          values: name -> NumPy array `[examples, ...]` for each name in `fetches`; strings are bytes, of dtype object.
        """

    def after_batches(self, run: Run, examples: int) -> None:
        """Called after some batches of an evaluation or prediction; `examples` have been seen so far."""

    def end(self, run: Run) -> None:
        """Called after the last checkpoint, or after an evaluation or prediction; not called if these failed."""

    def close(self, run: Run) -> None:
        """Called after training, however it ended, to release resources. Must not raise."""


class WhenDue:
    """Calls a training hook when its cadence is due; a hook without a cadence is called after each loop."""

    def __init__(self, hook: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._hook = hook
        self._clock = clock
        self._results: list[StepResult] = []
        self._called_at: float | None = None

    def before_step(self, run: Run, step: int) -> None:
        if self._called_at is None:
            self._called_at = self._clock()
        if not self._results:
            self._hook.before_step(run, step)

    def after_step(self, run: Run, result: StepResult) -> None:
        assert self._called_at is not None
        every = getattr(self._hook, "every", Every())
        now = self._clock()
        self._results.append(result)
        has_cadence = every.steps or every.secs is not None
        if has_cadence and not every.due(result.first_step - 1, result.last_step, now - self._called_at):
            return
        results = self._results
        self._results = []
        self._called_at = now
        self._hook.after_step(run, _join(results))


def _join(results: Sequence[StepResult]) -> StepResult:
    """Return one result for the steps of several loops, oldest first."""
    if len(results) == 1:
        return results[0]
    values: dict[str, np.ndarray] = {}
    for name in results[0].values:
        values[name] = np.concatenate([result.values[name] for result in results])
    return StepResult(
        first_step=results[0].first_step,
        last_step=results[-1].last_step,
        losses=np.concatenate([result.losses for result in results]),
        examples=sum(result.examples for result in results),
        secs=sum(result.secs for result in results),
        values=values,
    )


class TimeLimit(Hook):
    """Ends training, with a checkpoint, a number of seconds after its first step began (`train.max_secs`).

    The time is checked between loops, which take about a second. A restarted run gets the full time again.
    """

    def __init__(self, secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._secs = secs
        self._clock = clock
        self._began = 0.0

    def begin(self, run: Run) -> None:
        self._began = self._clock()

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._clock() - self._began >= self._secs:
            _log.info("train.max_secs=%g has passed: training ends at step %d.", self._secs, result.last_step)
            run.request_stop(f"train.max_secs={self._secs:g}")
