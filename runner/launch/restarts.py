"""Limit how often a run is restarted after the loss of a task, and log restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.checkpoint import layout
from runner.launch.gang import GangResult
from runner.tracking.journal import Journal, journal_path

LONGEST_SECS = 30.0
GLANCE_SECS = 0.1
METRIC = "run/restarts"


def pause_secs(number: int) -> float:
    """Return the seconds to wait before restart `number` (from 1) without progress: 0, 1, 2, 4, ... at most 30."""
    return 0.0 if number <= 1 else min(LONGEST_SECS, 2.0 ** (number - 2))


@dataclass
class Restarts:
    """The restarts of one run.

    At most `limit` restarts may follow one another without a newer checkpoint. So a run of weeks survives any number of
    losses, but a run that fails again and again at the same step ends.

    Attributes:
      limit: the limit; 0: a loss ends the run.
      name: name of the task, in a supervisor other than the chief's; '': in the chief's.
      total: number of restarts so far.
      last: the message about the last restart; None if there was none.
    """

    model_dir: Path
    limit: int
    stops: Sequence[int] = ()
    say: Callable[[str], None] = print
    name: str = ""
    total: int = 0
    last: str | None = None
    _in_a_row: int = field(default=0, init=False)
    _step: int | None = field(default=None, init=False)

    def allow(self, ending: GangResult, *, alone: bool = False) -> bool:
        """Report whether the lost tasks are to be started again, after a pause; log and note the restart.

        Args:
          ending: how the tasks ended.
          alone: only the lost task is started again; the others continue.
        """
        step = latest_step(self.model_dir)
        self._in_a_row = 0 if step != self._step else self._in_a_row
        if self.stops or not self.limit:
            return False
        if self._in_a_row >= self.limit:
            self.say(
                f"runner: {ending.reason}; all restarts (cluster.max_restarts={self.limit}) were used without progress"
            )
            return False
        self._step = step
        self._in_a_row += 1
        self.total += 1
        place = "its beginning" if step is None else f"step {step}"
        what = "only this task is started again" if alone else f"all tasks are started again from {place}"
        number = f"restart {self._in_a_row} of {self.limit}"
        self.last = f"{ending.reason}; {what} ({number})"
        self.say(f"runner: {self.last}")
        self._note(ending, step)
        until = time.monotonic() + pause_secs(self._in_a_row)
        while not self.stops and time.monotonic() < until:
            time.sleep(GLANCE_SECS)
        return not self.stops

    def _note(self, ending: GangResult, step: int | None) -> None:
        journal = Journal(journal_path(self.model_dir, f"supervisor-{self.name}".replace(":", "-").rstrip("-")))
        journal.event("restart", task=ending.place.name, reason=ending.reason, step=step, number=self.total)
        journal.metrics(step or 0, {METRIC: self.total})
        journal.close()


def latest_step(model_dir: Path) -> int | None:
    """Return the step from which a run would resume; None: from its beginning."""
    path = layout.latest_checkpoint(model_dir)
    return None if path is None else layout.step_of(path)
