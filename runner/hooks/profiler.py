"""`run.profile`: TensorFlow's profiler around some steps of a run, for xprof or TensorBoard."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner.config.settings.step_range import StepRange
from runner.hooks.hook import Every, Hook, Run
from runner.system.console import relative
from runner.types import StepResult

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Around(Every):
    """A cadence by which loops end before the first step of `range` and after its last one."""

    range: StepRange = StepRange(1, 1)

    def due(self, before: int, after: int, elapsed_secs: float = 0.0) -> bool:
        return any(before < edge <= after for edge in self._edges)

    def steps_until_due(self, step: int) -> float:
        return min((edge - step for edge in self._edges if edge > step), default=math.inf)

    @property
    def _edges(self) -> tuple[int, int]:
        return self.range.first - 1, self.range.last


class Profiling(Hook):
    """Profiles the steps `steps` into `<model_dir>/plugins/profile`, once.

    It is the last hook of a run that is called, so the profile contains the work of the other hooks between two loops,
    and saves and evaluations between its first and its last step. If the profiler does not start or cannot write, a
    warning is logged and training continues.

    Args:
      steps: the steps to profile.
      announce: `Estimator.announce`, which shows a text to the user and notes an event with fields in the journal.
      profiler: an object with `start(folder)` and `stop()`; by default TensorFlow's profiler.
    """

    def __init__(
        self, steps: StepRange, announce: Callable[..., None], profiler: Any = tf.profiler.experimental
    ) -> None:
        self.every = Around(range=steps)
        self._steps = steps
        self._announce = announce
        self._profiler = profiler
        self._run_began_at = 0
        self._is_running = False
        self._was_tried = False
        self._profiled: StepRange | None = None
        self._profiles_before: set[tuple[int, Path]] = set()  # those in the folder when the profiler started

    def begin(self, run: Run) -> None:
        self._run_began_at = run.global_step

    def before_step(self, run: Run, step: int) -> None:
        is_in_range = self._steps.first <= step + 1 <= self._steps.last
        if self._was_tried or not is_in_range:
            return
        self._was_tried = True
        self._profiles_before = _profiles(run.model_dir)
        try:
            self._profiler.start(run.model_dir)
            self._is_running = True
        except (tf.errors.OpError, OSError, RuntimeError) as error:
            _log.warning("run.profile=%s: the profiler did not start: %s", self._steps, error)

    def after_step(self, run: Run, result: StepResult) -> None:
        if not self._is_running:
            return
        first = result.first_step
        if self._profiled is not None:
            # With train.nan=rollback the run may have taken some steps twice.
            first = min(first, self._profiled.first)
        self._profiled = StepRange(first, result.last_step)
        if result.last_step >= self._steps.last:
            self._stop(run)

    def end(self, run: Run) -> None:
        if self._is_running:
            self._stop(run)
        elif not self._was_tried:
            if self._run_began_at >= self._steps.last:
                reason = f"it resumed at step {self._run_began_at}"
            else:
                reason = f"it ended at step {run.global_step}"
            text = f"run.profile={self._steps}: no profile, because this run took none of these steps; {reason}."
            self._announce("profile", text, path=None)

    def close(self, run: Run) -> None:
        if self._is_running:
            self._stop(run)

    def _stop(self, run: Run) -> None:
        self._is_running = False
        try:
            self._profiler.stop()
        except (tf.errors.OpError, OSError, RuntimeError) as error:
            _log.warning("run.profile=%s: the profile was not written: %s", self._steps, error)
            return
        profiled = self._profiled
        newest = max(_profiles(run.model_dir) - self._profiles_before, default=None)
        if profiled is None or newest is None:  # the first loop failed
            return
        _, file = newest
        folder = file.parent
        what = f"step {profiled}" if profiled.first == profiled.last else f"steps {profiled}"
        if profiled != self._steps:
            what = f"{what} (requested: run.profile={self._steps})"
        text = (
            f"Profiled {what}: {relative(folder)}. To look at it: pip install xprof, then "
            f"xprof --logdir {relative(Path(run.model_dir))}"
        )
        self._announce("profile", text, first_step=profiled.first, last_step=profiled.last, path=str(folder))


def _profiles(model_dir: str) -> set[tuple[int, Path]]:
    """Return (time of writing, file) of each profile in `model_dir`.

    The time is needed because two profiles written within one second have the same name.
    """
    files = Path(model_dir, "plugins", "profile").glob("*/*.xplane.pb")
    return {(file.stat().st_mtime_ns, file) for file in files}
