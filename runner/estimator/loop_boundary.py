"""Decisions at the end of a loop of steps: the length of the next loop, and what all workers do next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from runner.data.wait_timer import SHORT_STEP_SECS, WaitTimer
from runner.distribute.collectives import Collectives

# Long enough that Python's overhead per loop is small, short enough to answer signals and clocks soon.
_LOOP_SECS = 1.0
_GROWTH = 10

_GROUPED_STEP_SECS = 0.0005
_GROUPED_LOOP_STEPS = 500
_GROUPED_STEPS = 10_000


class LoopLength:
    """Steps per loop: a fixed number, or growing until a loop takes about `secs`.

    Args:
      fixed: the number of steps; None: automatic.
      secs: target duration of a loop in seconds.
      num_bytes: the largest size of the results of a loop.

    Attributes:
      secs_per_step: duration of a step of the last loop; infinite before the first loop.
    """

    def __init__(self, fixed: int | None, secs: float = _LOOP_SECS, num_bytes: float = math.inf) -> None:
        self._fixed = fixed
        self._secs = secs
        self._num_bytes = num_bytes
        self._fitting = math.inf  # the number of steps whose results have so many bytes
        self.secs_per_step = math.inf
        self._steps = fixed or 1

    def next(self, limit: float) -> int:
        """Return the number of steps of the next loop, at most `limit`."""
        return int(min(self._steps, limit, self._fitting))

    def took(self, num_steps: int, secs: float, num_bytes: int = 0) -> None:
        """Note that a loop took `num_steps` in `secs`, with results of `num_bytes`."""
        if num_steps:
            self.secs_per_step = secs / num_steps
            self._fitting = max(1.0, self._num_bytes * num_steps / max(1, num_bytes))
        if self._fixed is None and num_steps:
            fitting = max(1, int(self._secs * num_steps / max(secs, 1e-9)))
            self._steps = min(fitting, self._steps * _GROWTH)


@dataclasses.dataclass(frozen=True)
class NextLoop:
    """How the next loop is run.

    Attributes:
      num_steps: its number of steps.
      is_sampled: a timing iterator measures how long each step waits for its batch.
      in_groups: the loop reads its batches in groups.
    """

    num_steps: int
    is_sampled: bool
    in_groups: bool


class Pace:
    """Decides how loops are run: their length, which of them read batches in groups, and which are timed.

    Long loops of short steps read their batches in groups (`BatchGroups`), which saves about 15 us per step. Building
    the first such loop takes 0.1 to 0.3 s, so it is built only if enough steps remain.

    Args:
      length: the length of loops.
      can_group: reports whether model and input allow groups; called once, when the first such loop is due.
      wait: times the wait for batches.

    Attributes:
      secs: seconds in loops, without saves and evaluations.
      first_steps, first_secs: steps and seconds of the first loop that took steps, which also traces and compiles.
    """

    def __init__(self, length: LoopLength, can_group: Callable[[], bool], wait: WaitTimer) -> None:
        self._length = length
        self._ask = can_group
        self.wait = wait
        self._can_group: bool | None = None
        self.secs = 0.0
        self.first_steps = 0
        self.first_secs = 0.0

    def num_steps(self, limit: float) -> int:
        """Return the number of steps of the next loop, at least one and at most `limit`."""
        sampled = self.wait.steps_to_sample(self.secs)
        length = self._length.next(limit)
        return max(1, min(length, sampled) if sampled else length)

    def next_loop(self, num_steps: int, remaining: float) -> NextLoop:
        """Return how a loop of `num_steps` is run; `remaining` is the number of steps to the end of the run."""
        is_sampled = self.wait.steps_to_sample(self.secs) > 0
        is_long = num_steps >= _GROUPED_LOOP_STEPS and self._length.secs_per_step <= _GROUPED_STEP_SECS
        gains = is_long and not is_sampled
        if gains and self._can_group is None and remaining >= _GROUPED_STEPS:
            self._can_group = self._ask()
        return NextLoop(num_steps, is_sampled, in_groups=gains and bool(self._can_group))

    def took(self, loop: NextLoop, num_steps: int, secs: float) -> tuple[bool, float | None]:
        """Note that `loop` took `num_steps` in `secs`.

        Returns:
          (whether the loop's speed is typical of the run, the share of time that was spent waiting for input). The
          share is None unless the loop completes a sample.
        """
        self.secs += secs
        if not self.first_steps:
            self.first_steps = num_steps
            self.first_secs += secs
        is_cut_short = loop.is_sampled and self._length.next(math.inf) > loop.num_steps
        # Timing slows short steps, so the speed of a sample of them is not that of other loops.
        is_typical = not (is_cut_short and secs < num_steps * SHORT_STEP_SECS)
        if is_typical:
            self._length.took(num_steps, secs)
        share = None
        if loop.is_sampled and num_steps:
            share = self.wait.took(num_steps, secs, self.secs)
        return is_typical, share


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The wishes of one worker at the end of a loop; `agreed` returns what all workers do next.

    Attributes:
      num_steps: length of the next loop. The chief decides.
      saves: whether a checkpoint is due. The chief decides.
      stop_reason: why training ends here; None: it continues. Any worker may end it.
      interrupted: training ends at once, without evaluations, because the process was asked to stop. Any worker may end
        it.
    """

    num_steps: int
    saves: bool
    stop_reason: str | None
    interrupted: bool

    def agreed(self, collectives: Collectives) -> Boundary:
        """Return what all workers do next; they agree by one sum over all of them, so all must call this together."""
        # A place for each worker, because a sum tells only from its place which worker asked.
        stops = [0.0] * collectives.num_workers
        stops[collectives.worker_index] = float(self.stop_reason is not None)
        chief = float(collectives.is_chief)
        # The chief alone decides about length and save, so the sum over all workers is its value.
        mine = [chief * self.num_steps, chief * self.saves, float(self.interrupted), *stops]
        num_steps, saves, interrupted, *stops = collectives.sum(mine)
        reason = self.stop_reason
        if reason is None and any(stops):
            first = next(worker for worker, count in enumerate(stops) if count)
            who = f"worker {first}" if first else "the chief"
            reason = f"{who} asked to stop"
        return Boundary(int(num_steps), bool(saves), reason, bool(interrupted))
