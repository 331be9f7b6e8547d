"""Limit how often a run is restarted after the loss of a task, and log all restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint_files import layout
from runner.config.schema import ClusterConfig
from runner.launch.gang import GangResult
from runner.system.console import counted
from runner.tracking.journal import OF_RESTARTS, Journal, journal_path

LONGEST_SECS = 30.0
GLANCE_SECS = 0.1


def pause_secs(number: int) -> float:
    """Return the seconds to wait before restart `number` (from 1) without progress: 0, 1, 2, 4, ... at most 30."""
    if number <= 1:
        return 0.0
    return min(LONGEST_SECS, 2.0 ** (number - 2))


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
      lost_workers: for each worker without which the run goes on: time, step, reason, left (the number of workers).
    """

    model_dir: Path
    limit: int
    stops: Sequence[int] = ()
    say: Callable[[str], None] = print
    name: str = ""
    total: int = 0
    last: str | None = None
    lost_workers: list[dict[str, Any]] = field(default_factory=list, init=False)
    _in_a_row: int = field(default=0, init=False)
    _step_at_last_restart: int | None = field(default=None, init=False)

    def allow(self, ending: GangResult, *, alone: bool = False) -> bool:
        """Report whether the lost tasks are to be started again, after a pause; log and note the restart.

        Args:
          ending: how the tasks ended.
          alone: only the lost task is started again; the others continue.
        """
        step = latest_step(self.model_dir)
        if step != self._step_at_last_restart:  # there is a newer checkpoint: the run has made progress
            self._in_a_row = 0
        if self.stops or not self.limit:
            return False
        if self._in_a_row >= self.limit:
            self.say(
                f"runner: {ending.reason}; all restarts (cluster.max_restarts={self.limit}) were used without progress"
            )
            return False
        self._step_at_last_restart = step
        self._in_a_row += 1
        what = f"all tasks are started again from {_describe_step(step)}"
        if alone:
            what = "only this task is started again"
        self._note(ending, step, f"{what} (restart {self._in_a_row} of {self.limit})")
        until = time.monotonic() + pause_secs(self._in_a_row)
        while not self.stops and time.monotonic() < until:
            time.sleep(GLANCE_SECS)
        return not self.stops

    def go_on_without(self, ending: GangResult, settings: ClusterConfig) -> None:
        """Log and note that all tasks start again with one worker less; they have all restarts anew.

        Args:
          ending: how the tasks ended.
          settings: the cluster's settings in the next start.
        """
        step = latest_step(self.model_dir)
        left = settings.num_workers
        self._in_a_row = 0
        loss = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "step": step or 0,
            "reason": ending.reason,
            "left": left,
        }
        self.lost_workers.append(loss)
        what = f"the run goes on from {_describe_step(step)} with one worker less: {counted(left, 'worker')} left"
        self._note(ending, step, f"{what} (cluster.min_workers={settings.min_workers})", workers=left)

    def go_on_in_parts(self, ending: GangResult, number: int) -> None:
        """Log and note that all tasks start again with smaller micro-batches. Such restarts have no limit: each has
        more micro-batches than the one before.

        Args:
          ending: how the tasks ended.
          number: the number of micro-batches of the next start.
        """
        step = latest_step(self.model_dir)
        what = f"all tasks are started again from {_describe_step(step)} with train.gradient_accumulation={number}"
        self._note(ending, step, what, gradient_accumulation=number)

    def _note(self, ending: GangResult, step: int | None, what: str, **settings: int) -> None:
        """Log and note a restart.

        Args:
          ending: how the tasks ended.
          step: the step from which they go on; None: from the beginning.
          what: what happens, in words.
          settings: what changes with this restart: name -> value, which is also a metric `run/<name>`.
        """
        self.total += 1
        self.last = f"{ending.reason}; {what}"
        self.say(f"runner: {self.last}")
        # supervisor-worker-1; supervisor for the chief's, whose name is ''.
        role = f"supervisor-{self.name}".replace(":", "-").rstrip("-")
        journal = Journal(journal_path(self.model_dir, role))
        journal.event("restart", task=ending.place.name, reason=ending.reason, step=step, number=self.total, **settings)
        values = {"restarts": self.total, **settings}
        metrics = {f"{OF_RESTARTS}{name}": value for name, value in values.items()}
        journal.metrics(step or 0, metrics)
        journal.close()


def _describe_step(step: int | None) -> str:
    if step is None:
        return "its beginning"
    return f"step {step}"


def latest_step(model_dir: Path) -> int | None:
    """Return the step from which a run would resume; None: from its beginning."""
    path = layout.latest_checkpoint(model_dir)
    if path is None:
        return None
    return layout.step_of(path)
