"""What training asks of its evaluations; the evaluator, a process that follows the checkpoints, and its counterpart in
training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from runner.checkpoint import reader, retention
from runner.checkpoint.integrity import DamagedCheckpointsError
from runner.checkpoint_files import layout, manifest
from runner.config.settings.metric_rules import EarlyStopping
from runner.distribute.errors import tells_of_a_lost_peer
from runner.estimator.early_stopping import HISTORIES, MetricHistory
from runner.estimator.estimator import Estimator
from runner.estimator.specs import TrainingResult
from runner.estimator.train_loop import TrainingRun
from runner.hooks.hook import Hook, Interrupted, Run
from runner.tracking.run_end import TrainingStatus, read_ending, remove_ending, write_ending
from runner.types import StepResult

_log = logging.getLogger(__name__)

LOOK_SECS = 1.0
"""Seconds between two looks of the chief at the evaluator's decision, which is in one small file."""

POLL_SECS = 0.5
"""Seconds between two looks of the evaluator for a new checkpoint, and for the end of training."""


class Evaluations(Hook):
    """The evaluations of a run, as training sees them; this base class makes none.

    Args:
      estimator: the Estimator that trains.

    Attributes:
      metrics: name of the evaluation -> its last metrics, of evaluations that this process makes.
      stopped_early: the reason why training ended early; None: it did not.
    """

    def __init__(self, estimator: Estimator) -> None:
        self.metrics: dict[str, Mapping[str, Any]] = {}
        self.stopped_early: str | None = None
        self._estimator = estimator
        self._collectives = estimator.collectives

    @property
    def exported_paths(self) -> Sequence[str]:
        return ()

    def have_ended(self, max_steps: int | None) -> bool:
        """Report whether the run was stopped early at its latest checkpoint, before it resumes from there. All workers
        must call this together.
        """
        latest = self._estimator.agreed_checkpoint()
        step = -1 if latest is None else reader.checkpoint_step(latest)
        is_last = max_steps is not None and step >= max_steps
        self.resume(step, latest, is_last=is_last)
        self.stopped_early = self._collectives.broadcast_text(self.stopped_early or "") or None
        return self.stopped_early is not None

    def resume(self, step: int, path: str | None, *, is_last: bool) -> None:
        """Prepare for a run that begins at `step`, -1 for a new one.

        Args:
          step: the step of the latest checkpoint.
          path: that checkpoint; None: there is none.
          is_last: it is the run's last, which `evaluate_last` evaluates.
        """

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the evaluations before it, values that JSON can hold."""
        return {}

    def after_save(self, run: TrainingRun) -> None:
        """Evaluate the checkpoint that was just written, if an evaluation is due."""

    def evaluate_last(self, step: int) -> bool:
        """Evaluate and export the last checkpoint, unless that has been done.

        Args:
          step: the step of the last checkpoint.

        Returns:
          False if a hook ended an evaluation early, else True.
        """
        return True

    def _stop_early(self, reason: str | None, step: int, run: Run | None) -> None:
        """End training at `step`, once, if there is a reason; `run` None: it has not begun."""
        if reason is None or self.stopped_early is not None:
            return
        self.stopped_early = reason
        self._estimator.announce("stopped_early", f"stopped early: {reason}", step=step)
        if run is not None:
            run.request_stop(f"stopped early: {reason}")


class RemoteEvaluation(Evaluations):
    """The evaluations of a run that a separate evaluator process makes.

    Only the chief reads the evaluator's decision to stop early; it tells the other workers. The evaluator finds the
    checkpoints itself, and evaluates the last one once training has ended.

    Args:
      estimator: the Estimator that trains.
      rule: the rule of early stopping.
    """

    def __init__(self, estimator: Estimator, rule: EarlyStopping) -> None:
        super().__init__(estimator)
        self._rule = rule
        self._looked = -float("inf")

    def resume(self, step: int, path: str | None, *, is_last: bool) -> None:
        if path is not None and not is_last:
            self._stop_if_decided(step, None)

    def facts(self) -> dict[str, Any]:
        if self._rule.metric is None:
            return {}
        history = MetricHistory(self._rule, self._estimator.model_dir)
        return {HISTORIES: {self._rule.file: history.contents()}}

    def begin(self, run: Run) -> None:
        self._stop_if_decided(run.global_step, run)

    def after_step(self, run: Run, result: StepResult) -> None:
        self._stop_if_decided(run.global_step, run)

    def _stop_if_decided(self, step: int, run: Run | None) -> None:
        """End training, which is at `step`, if the evaluator's file says so. It is read at most every LOOK_SECS."""
        needs_decision = self._estimator.config.is_chief and self._rule.metric is not None
        is_early = time.monotonic() - self._looked < LOOK_SECS
        if needs_decision and not is_early:
            self._looked = time.monotonic()
            history = MetricHistory(self._rule, self._estimator.model_dir)
            self._stop_early(history.decided(step), step, run)


def tell_ending(estimator: Estimator, train: Callable[[], TrainingResult]) -> TrainingResult:
    """Run `train`, return its result, and write to model_dir how training ended, for processes that wait for its end.

    Only the chief writes this. After a PeerLost nothing is written, because the supervisor restarts all processes, or
    itself reports that it does not.
    """
    config = estimator.config
    if not config.is_chief:
        return train()
    if not config.generation and (config.place.tasks or config.has_evaluator):
        os.makedirs(estimator.model_dir, exist_ok=True)  # a failure before the first checkpoint is noted, too
    # Before the first step, so that no other process takes the end of an earlier start for the end of this one.
    remove_ending(estimator.model_dir)
    try:
        result = train()
    except BaseException as error:  # also KeyboardInterrupt and SystemExit
        if not tells_of_a_lost_peer(error, config.place):
            status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
            with contextlib.suppress(OSError):  # perhaps the disk is full; the first error is the one to raise
                _write_ending(estimator, status)
        raise
    if result.interrupted:
        _write_ending(estimator, "interrupted")
    elif result.stopped_early:
        _write_ending(estimator, "stopped_early")
    else:
        _write_ending(estimator, "finished")
    return result


def _write_ending(estimator: Estimator, status: str) -> None:
    latest = layout.read_state(estimator.model_dir).latest
    step = layout.step_of(latest or "") or 0
    write_ending(estimator.model_dir, status, step, estimator.config.generation)


class Abandoned(Interrupted):
    """Training failed or was interrupted, so the evaluation that is running was ended; it is no longer needed."""


class EvaluationsOfCheckpoints(Protocol):
    """The evaluations of a run, as its evaluator sees them."""

    def is_due(self) -> bool:
        """Report whether a new checkpoint would be evaluated now."""

    def of_checkpoint(self, path: str, *, is_last: bool) -> Sequence[Callable[[], None]]:
        """Return what remains to be done for the checkpoint `path`, as functions to call.

        Args:
          path: the checkpoint.
          is_last: training has ended, so everything is to be done that is not done yet; False: only what is due now.
        """


class TrainingWatch(Hook):
    """Watches, in the evaluator process, how training ends. As a hook, it ends an evaluation that is no longer needed.

    Args:
      model_dir: the folder of the run.
      generation: number of the start of the run to which this process belongs; the status of an earlier start is
        ignored. 0: starts are not counted. Then a status that exists at the beginning is ignored unless it is
        "complete", because training resumes after any other.
    """

    def __init__(self, model_dir: str | os.PathLike[str], generation: int = 0) -> None:
        self._model_dir = model_dir
        self._generation = generation
        before = read_ending(model_dir)
        is_stale = generation == 0 and not before.is_complete
        self._stale = before if is_stale else None
        self._looked = time.monotonic()

    def ending(self) -> TrainingStatus:
        """Return how training has ended, or that it continues."""
        status = read_ending(self._model_dir, self._generation)
        return TrainingStatus() if status == self._stale else status

    def after_batches(self, run: Run, examples: int) -> None:
        if time.monotonic() - self._looked < POLL_SECS:
            return
        self._looked = time.monotonic()
        ending = self.ending()
        if ending.is_over and not ending.is_complete:
            was_interrupted = ending.status == "interrupted"
            raise Abandoned("training was interrupted" if was_interrupted else "training failed")


class CheckpointFollower:
    """Evaluates the checkpoints of `model_dir`, the newest first, while another process writes and removes them.

    Args:
      model_dir: the folder of the run.
      watch: reports whether training has ended.
      evaluations: the evaluations to make.
      latest: returns the path of the newest undamaged checkpoint; None: there is none yet.
      wait: called with a number of seconds between two looks; an error that it raises ends the evaluator.
    """

    def __init__(
        self,
        model_dir: str,
        watch: TrainingWatch,
        evaluations: EvaluationsOfCheckpoints,
        latest: Callable[[], str | None],
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model_dir = model_dir
        self._watch = watch
        self._evaluations = evaluations
        self._latest = latest
        self._wait = wait
        self._has_waited = False

    def run(self) -> TrainingStatus:
        """Evaluate until training has ended.

                while training continues:
                    evaluate the newest checkpoint if that is due
                    wait
                evaluate the last checkpoint, unless training failed or was interrupted

        Raises:
          DamagedCheckpointsError: training has ended, and every checkpoint is damaged.
        """
        retention.release(self._model_dir)  # left by an evaluator that was killed
        while True:
            # Read the status before looking for a checkpoint: if training has ended, the last checkpoint exists
            # already.
            ending = self._watch.ending()
            if ending.is_over and not ending.is_complete:
                return ending
            if ending.is_over or self._evaluations.is_due():
                is_done = self._evaluate_newest(is_last=ending.is_over)
                if ending.is_over and is_done:
                    return ending
            self._wait(POLL_SECS)

    def _evaluate_newest(self, *, is_last: bool) -> bool:
        """Evaluate the newest checkpoint. Return False if there is none yet, or if it was removed meanwhile.

        Args:
          is_last: training has ended. If there is no checkpoint, none will come, so True is returned.
        """
        path = self._newest(is_last=is_last)
        if path is None:
            if not self._has_waited:
                _log.info("Waiting for the first checkpoint in %s.", self._model_dir)
            self._has_waited = True
            return is_last
        # Before `of_checkpoint`, which also reads the checkpoint and may fail because the chief removes it.
        before = manifest.fingerprint(path)
        try:
            due = self._evaluations.of_checkpoint(path, is_last=is_last)
            with retention.lease(path) if due else contextlib.nullcontext():
                for evaluate in due:
                    evaluate()
        except Abandoned:  # this evaluation only, because training failed; a subclass of Interrupted, so it comes first
            return False
        except Interrupted:
            raise
        except Exception:
            # The chief may have removed the checkpoint before it saw the lease, or may be writing the same step again.
            if manifest.fingerprint(path) == before:
                raise
            _log.warning("%s was removed while it was read, so it is not evaluated.", os.path.basename(path))
            return False
        return True

    def _newest(self, *, is_last: bool) -> str | None:
        try:
            return self._latest()
        except DamagedCheckpointsError:
            if is_last:
                raise
            return None  # no checkpoint, or the only one is being rewritten
