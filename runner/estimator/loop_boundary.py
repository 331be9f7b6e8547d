"""The end of a loop of steps: the length of the next one, and what all workers do next."""

from __future__ import annotations

import dataclasses

from runner.distribute.collectives import Collectives

# Long enough that Python's overhead per loop is small, short enough to answer signals and clocks soon.
_LOOP_SECS = 1.0
_GROWTH = 10


class LoopLength:
    """Steps per loop: a fixed number, or growing until a loop takes about `secs`.

    Args:
      fixed: the number of steps; None: automatic.
      secs: target duration of a loop in seconds.
    """

    def __init__(self, fixed: int | None, secs: float = _LOOP_SECS) -> None:
        self._fixed, self._secs = fixed, secs
        self._steps = fixed or 1

    def next(self, limit: float) -> int:
        """Return the number of steps of the next loop, at most `limit`."""
        return int(min(self._steps, limit))

    def took(self, num_steps: int, secs: float) -> None:
        if self._fixed is None and num_steps:
            fitting = max(1, int(self._secs * num_steps / max(secs, 1e-9)))
            self._steps = min(fitting, self._steps * _GROWTH)


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The state of one worker at the end of a loop; after `agreed`, what all workers do next.

    Attributes:
      num_steps: length of the next loop. The chief decides.
      saves: whether a checkpoint is due. The chief decides.
      stop_reason: why training ends here; None: it continues. Any worker decides.
      interrupted: training ends at once, without evaluations, because it was asked to. Any worker decides.
    """

    num_steps: int
    saves: bool
    stop_reason: str | None
    interrupted: bool

    def agreed(self, collectives: Collectives) -> Boundary:
        """Agree with the other workers by one sum over all of them."""
        asked = [0.0] * collectives.num_workers
        asked[collectives.worker_index] = float(self.stop_reason is not None)
        chief = float(collectives.is_chief)
        mine = [chief * self.num_steps, chief * self.saves, float(self.interrupted), *asked]
        num_steps, saves, interrupted, *asked = collectives.sum(mine)
        reason = self.stop_reason
        if reason is None and any(asked):
            first = next(worker for worker, count in enumerate(asked) if count)
            reason = f"{f'worker {first}' if first else 'the chief'} asked to stop"
        return Boundary(int(num_steps), bool(saves), reason, bool(interrupted))
