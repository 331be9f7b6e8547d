"""Training beside an evaluator process: its early stop is obeyed here, and it is told how training ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from runner import checkpoints, manifest
from runner.early_stopping import EarlyStopping, Watched
from runner.ending import remove_ending, write_ending
from runner.errors import tells_of_a_lost_peer
from runner.estimator import Estimator
from runner.exports import Exports
from runner.hooks import Hook, Interrupted, Run
from runner.loop import TrainingRun
from runner.types import StepResult

LOOK_SECS = 1.0
"""How often the chief looks whether the evaluator has found something; a look reads one small file."""


class EvaluatedElsewhere(Hook):
    """What a process that trains does beside an evaluator. Only the chief looks and tells; the others do as it does.

    Attributes:
      metrics: none: the evaluator has them.
      stopped_early: why training ended; None: it did not.
      exports: none: the evaluator exports.
    """

    def __init__(self, estimator: Estimator, rule: EarlyStopping) -> None:
        self.metrics: Mapping[str, Mapping[str, Any]] = {}
        self.stopped_early: str | None = None
        self.exports = Exports(estimator)
        self._estimator, self._rule = estimator, rule
        self._is_chief = estimator.config.is_chief
        self._is_interrupted = False
        self._looked = -float("inf")

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tells the evaluator how its body ended; before it, that training goes on.

        Who lost a peer is silent: its supervisor starts all of them again, or says that it will not.
        """
        if not self._is_chief:
            yield
            return
        remove_ending(self._estimator.model_dir)
        try:
            yield
        except BaseException as error:
            if tells_of_a_lost_peer(error, self._estimator.config.cluster):
                raise
            with contextlib.suppress(OSError):  # the disk is full, perhaps: the first error is the one to raise
                self._tell("interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
            raise
        self._tell("interrupted" if self._is_interrupted else "stopped_early" if self.stopped_early else "finished")

    def have_ended(self, max_steps: int | None) -> bool:
        """Whether the run was stopped early before. All workers ask together."""
        latest = self._estimator.agreed_checkpoint()
        step = -1 if latest is None else checkpoints.checkpoint_step(latest)
        if self._is_chief and latest is not None and (max_steps is None or step < max_steps):
            self._look(step)
        self.stopped_early = self._estimator.agreement.text_of_chief(self.stopped_early or "") or None
        return self.stopped_early is not None

    def begin(self, run: Run) -> None:
        self._heed(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        self._heed(run)

    def after_save(self, run: TrainingRun) -> None:
        """The evaluator sees the checkpoint by itself."""

    def end(self, run: Run) -> None:
        assert isinstance(run, TrainingRun)
        self._is_interrupted = run.interrupted

    def evaluate_last(self, step: int) -> bool:
        """The evaluator does that when it is told of the end."""
        return True

    def _heed(self, run: Run) -> None:
        if self._is_chief and self._look(run.global_step):
            run.request_stop(f"stopped early: {self.stopped_early}")

    def _look(self, step: int) -> bool:
        """Whether the evaluator has found by now that training, which has come to `step`, is to end."""
        if self._rule.metric is None or self.stopped_early or time.monotonic() - self._looked < LOOK_SECS:
            return False
        self._looked = time.monotonic()
        self.stopped_early = Watched(self._rule, self._estimator.model_dir).decided(step)
        if self.stopped_early is None:
            return False
        self._estimator.announce("stopped_early", f"stopped early: {self.stopped_early}", step=step)
        return True

    def _tell(self, status: str) -> None:
        model_dir = self._estimator.model_dir
        latest = manifest.read_state(model_dir).latest
        step = manifest.step_of(latest or "") or 0
        write_ending(model_dir, status, step, self._estimator.config.generation)
