"""The end of a loop of steps: what all workers do next."""

from __future__ import annotations

import dataclasses

from runner.agreement import Agreement

# A loop that takes this long costs little in Python and still answers signals and clocks soon enough.
_LOOP_SECS = 1.0
_GROWTH = 10


class LoopLength:
    """Steps per loop: a fixed number, or growing until a loop takes about a second.

    Args:
      fixed: None for automatic.
    """

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._steps = fixed or 1

    def next(self, limit: float) -> int:
        """Steps of the next loop, at most `limit`."""
        return int(min(self._steps, limit))

    def took(self, num_steps: int, secs: float) -> None:
        if self._fixed is None and num_steps:
            fitting = max(1, int(_LOOP_SECS * num_steps / max(secs, 1e-9)))
            self._steps = min(fitting, self._steps * _GROWTH)


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What one worker finds at the end of a loop; after `agreed`, what all of them do next.

    Attributes:
      num_steps: of the next loop. The chief's counts.
      saves: whether a checkpoint is due. The chief's counts.
      stop_reason: why training ends here; None: it goes on. Anybody's counts.
      interrupted: it ends by somebody who will not wait. Anybody's counts.
    """

    num_steps: int
    saves: bool
    stop_reason: str | None
    interrupted: bool

    def agreed(self, agreement: Agreement) -> Boundary:
        """One sum over the workers."""
        asked = [0.0] * agreement.num_workers
        asked[agreement.worker_index] = float(self.stop_reason is not None)
        chief = float(agreement.is_chief)
        mine = [chief * self.num_steps, chief * self.saves, float(self.interrupted), *asked]
        num_steps, saves, interrupted, *asked = agreement.sum(mine)
        reason = self.stop_reason
        if reason is None and any(asked):
            first = next(worker for worker, count in enumerate(asked) if count)
            reason = f"{f'worker {first}' if first else 'the chief'} asked to stop"
        return Boundary(int(num_steps), bool(saves), reason, bool(interrupted))
