"""One run of training: the loop, and what happens between its turns."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runner.agreement import Agreement
from runner.boundary import Boundary, LoopLength
from runner.checkpoints import Reader
from runner.hooks import Every
from runner.inputs import Feed
from runner.iterators import iterate
from runner.journal import Journal, NullJournal
from runner.nan_loss import MAX_ROLLBACKS, NanLoss, NanLossError, first_nan
from runner.position import Position
from runner.precision import LossScale
from runner.preparation import Preparation
from runner.record import Record
from runner.report import Progress
from runner.run_checkpoints import RunCheckpoints
from runner.saving import Saving
from runner.step_loop import LoopResult
from runner.types import StepRequest, StepResult

_log = logging.getLogger(__name__)


class TrainingRun:
    """One call of `Estimator.train`, as hooks see it.

    Args:
      target: train until this global step; infinite: until the data ends or a hook stops.
      agreement: of the workers that train together. Each of them has a TrainingRun, and they go through the same
        methods in the same order.
      saving: where its checkpoints go.
      listeners: checkpoint listeners, called around each save.
      after_save: called after each checkpoint, with this run: evaluations. It may still be on its way to the disk;
        `wait_for_checkpoint` waits for it.
    """

    def __init__(
        self,
        preparation: Preparation,
        *,
        target: float,
        agreement: Agreement,
        saving: Saving,
        summary_writer: Any,
        journal: Journal | NullJournal,
        progress: Progress,
        listeners: Sequence[Any],
        after_save: Sequence[Callable[[TrainingRun], None]] = (),
    ) -> None:
        config, program, feed = preparation.config, preparation.program, preparation.feed
        position = preparation.position
        assert config.model_dir is not None
        self.model_dir: str = config.model_dir
        self.examples = 0
        self.secs = 0.0
        self.stop_reason: str | None = None
        self.interrupted = False
        self._model, self._program, self._feed = preparation.model, program, feed
        self._iterator, self._position = preparation.iterator, position
        self._config, self._agreement = config, agreement
        self._journal, self._progress = journal, progress
        self._hooks, self._session_hooks, self._listeners = preparation.hooks, preparation.session_hooks, listeners
        self._target, self._after_save = target, after_save
        self._fail_at_nan = preparation.overrides.stop_at_nan is not False  # else training ends without an error
        self._step = self._first_step = self._model.store.global_step
        self._advance = 1
        self._next = Boundary(0, False, None, False)
        # To go on after the bad batch, its loop must not have gone on itself.
        ends_at_each = config.nan == "rollback" and program.has_local_losses
        self._length = LoopLength(1 if ends_at_each else config.steps_per_loop)
        save_every = Every(config.save_checkpoints_steps, config.save_checkpoints_secs)
        self._checkpoints = RunCheckpoints(saving, self._model, feed, journal, save_every, preparation.latest)
        self._summary_every = Every(config.save_summary_steps or None)
        writes_loss = "loss" not in program.summary_names
        self._record = Record(config, journal, summary_writer, progress, first_step=self._step, writes_loss=writes_loss)
        # What only the chief has, splits the loops of all: they call the same functions.
        self._has_summaries = agreement.any(program.has_summaries)
        self._always_splits = agreement.num_workers > 1 and agreement.any(not self._session_hooks.is_empty)
        latest = preparation.latest
        self._rollbacks = 0 if latest is None else int(Reader(latest).extra().get("rollbacks") or 0)
        self._saves_here = False  # by its cadence, whether or not somebody asks it to stop
        self._remaining = _remaining_steps(feed, position)
        self._resumed = position.elements > 0

    @property
    def global_step(self) -> int:
        return self._step

    @property
    def goes_on(self) -> bool:
        """Whether a further step is to be taken, as far as this process knows."""
        return self._step < self._target and self.stop_reason is None

    @property
    def steps_per_sec(self) -> float:
        return (self._step - self._first_step) / self.secs if self.secs else 0.0

    def request_stop(self, reason: str = "a hook requested it") -> None:
        self.stop_reason = self.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """As `request_stop`, by somebody who will not wait: what follows a save is left out."""
        self.request_stop(reason)
        self.interrupted = True

    def run(self, *, save_first: bool) -> None:
        """Trains.

            begin listeners and hooks; a new run saves
            while step < target and nobody stops:
                loop: up to the next boundary (save, summary, hook, end of data, target)
                log; stop at NaN
                after_step of hooks
                agree with the other workers: who stops, the next loop's length, whether to save
                save, when due
            save
            end listeners and hooks

        Raises:
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite; it names the step.
          ValueError: the step does not advance the global step.
        """
        try:
            self._begin(save_first=save_first)
            self._agree()
            while self._step < self._target and self._next.stop_reason is None:
                for hook in self._hooks:
                    hook.before_step(self, self._step)
                result = self._take(self._next.num_steps)
                if result.num_steps:  # none, when the loop found nothing but the end of the data
                    for hook in self._hooks:
                        hook.after_step(self, result)
                self._checkpoints.poll()
                self._saves_here = self._agree(saves=self._is_save_due(result))
                if self._saves_here:
                    self._save(asynchronous=self._may_write_beside)
                    self._agree()
            self._end()
        except Exception as error:
            self._checkpoints.settle_before(error)
            raise
        finally:
            self._journal.took("train", self.secs)
            self._session_hooks.close()
            for hook in self._hooks:
                if hasattr(hook, "close"):
                    hook.close(self)

    def save(self) -> str:
        """Writes a checkpoint of this step, the latest when this returns. Its path. All workers call it together."""
        path = self._save(asynchronous=False)
        self.wait_for_checkpoint()
        return path

    def wait_for_checkpoint(self) -> None:
        """Returns when the last checkpoint is durable, on all workers, which call it together.

        Raises: what went wrong while it was written.
        """
        self._checkpoints.settle()
        self._agreement.sum([])

    def _agree(self, *, saves: bool = False) -> bool:
        """Agrees with the other workers on what is next. Returns: whether that is to save."""
        found = Boundary(self._num_steps(), saves, self.stop_reason, self.interrupted)
        self._next = found.agreed(self._agreement)
        self.stop_reason, self.interrupted = self._next.stop_reason, self._next.interrupted
        return self._next.saves

    def _is_save_due(self, result: StepResult) -> bool:
        return self._checkpoints.is_due(result) and self._step == result.last_step  # else it went back

    @property
    def _may_write_beside(self) -> bool:
        """Whether training goes on after this step, and nobody waits for its checkpoint."""
        return self.goes_on and not self._listeners and self._config.save_checkpoints_asynchronously

    def _save(self, *, asynchronous: bool) -> str:
        session = self._session_hooks.session
        for listener in self._listeners:
            listener.before_save(session, self._step)
        path = self._write_checkpoint(asynchronous=asynchronous, is_told=True)
        for listener in self._listeners:
            if listener.after_save(session, self._step):
                self.request_stop(f"{type(listener).__name__} requested it")
        for call in self._after_save if not self._next.interrupted else ():
            call(self)
        return path

    def _write_checkpoint(self, *, asynchronous: bool, is_told: bool = False, is_evaluated: bool = False) -> str:
        extra = {"input": self._position.as_extra(), "evaluate": self._is_evaluated_here()}
        extra["rollbacks"] = self._rollbacks
        return self._checkpoints.write(
            self._step, extra, self._iterator, asynchronous=asynchronous, is_told=is_told, is_evaluated=is_evaluated
        )

    def _is_evaluated_here(self) -> bool:
        """Whether an undisturbed run would come to a checkpoint, and so to evaluations, at this step."""
        is_end = not self.interrupted or self._step >= self._target or self._position.ended
        return self._step > self._first_step and (self._saves_here or is_end)

    # --- the phases of a run ----------------------------------------------------------------------------------

    def _begin(self, *, save_first: bool) -> None:
        target = None if math.isinf(self._target) else int(self._target)
        self._progress.start(target, self._step)
        random_ops = self._program.trace.kernel_random_ops()
        if random_ops:
            _log.warning(
                "model_fn draws random numbers whose state no checkpoint holds (%s): a resumed run is not bitwise the "
                "undisturbed one. Keras layers and tf.random.stateless_* are.",
                ", ".join(random_ops[:3]) + (", ..." if len(random_ops) > 3 else ""),
            )
        for listener in self._listeners:
            listener.begin()
        self._session_hooks.begin()
        for hook in self._hooks:
            hook.begin(self)
        if self._remaining is not None and self._remaining <= 0:  # fewer passes are asked for than were made
            self.request_stop("the training input ended")
        self._begin_saving(is_new=save_first)
        self._checkpoints.begin(self._step)

    def _begin_saving(self, *, is_new: bool) -> None:
        """Writes the checkpoint that a new run begins with. Listeners are told of it, or of the one that the run goes
        on from, as tf.estimator's were; they stop nobody here."""
        session, reason = self._session_hooks.session, self.stop_reason
        for listener in self._listeners:
            listener.before_save(session, self._step)
        if is_new:
            self._write_checkpoint(asynchronous=self._config.save_checkpoints_asynchronously and not self._listeners)
        for listener in self._listeners:
            listener.after_save(session, self._step)
        self.stop_reason = reason

    def _end(self) -> None:
        if self._step == self._first_step:
            _log.warning("No step was taken: the training input is empty, or a hook stopped at once.")
        if self._step != self._checkpoints.saved_step:
            self.save()
        elif self._position.ended:
            # The same values, at the end of the data.
            self._write_checkpoint(asynchronous=False, is_evaluated=True)
        self.wait_for_checkpoint()
        for listener in self._listeners:
            listener.end(self._session_hooks.session, self._step)
        self._session_hooks.end()
        for hook in self._hooks:
            hook.end(self)
        self._record.end()
        self._agreement.sum([])  # nobody leaves while another still needs it

    def _num_steps(self) -> int:
        """Steps of the next loop: it ends at the next boundary of any cadence."""
        boundaries = [self._checkpoints.every, *(hook.every for hook in self._hooks if hasattr(hook, "every"))]
        if self._has_summaries:
            boundaries.append(self._summary_every)
        by_cadences = (every.steps_until_due(self._step) for every in boundaries)
        steps = min(self._target - self._step, self._session_hooks.steps_until_due(self._step), *by_cadences)
        # An update may advance the global step by more than one (two optimizers that share it).
        return max(1, self._length.next(-(-steps // self._advance)))

    def _take(self, num_steps: int) -> StepResult:
        """Runs one loop; the last of its steps carries summaries and the fetches of hooks where they are due."""
        first, started = self._step + 1, time.perf_counter()
        self._model.has_new_values()
        last_step = self._step + num_steps * self._advance
        summaries = self._has_summaries and self._summaries_due(last_step)
        request = self._session_hooks.request(last_step)
        parts, recorded = [], None
        num_plain = num_steps - 1 if summaries or request or self._always_splits else num_steps
        if num_plain:
            parts.append(self._loop(StepRequest(), num_plain, summaries=False))
        if num_plain < num_steps and (not parts or self._is_whole(parts[0], num_plain)):
            parts.append(recorded := self._loop(request, 1, summaries=summaries))
        taken = sum(part.num_steps for part in parts)
        self._count(parts, taken)
        result = StepResult(
            first_step=first,
            last_step=self._step,
            losses=np.concatenate([part.losses for part in parts]),
            examples=sum(part.examples for part in parts),
            secs=time.perf_counter() - started,
        )
        self._length.took(taken, result.secs)
        self.examples += result.examples
        self.secs += result.secs
        if recorded is not None and recorded.num_steps:
            self._hand_out(recorded, result, summaries=summaries, fetched=bool(request))
        if result.num_steps:
            self._record.note(result)
        self._stop_at_nan(result)
        return result

    def _loop(self, request: StepRequest, num_steps: int, *, summaries: bool) -> LoopResult:
        loop = self._program.loop(request, summaries=summaries)
        may_end = self._remaining is None or self._remaining < num_steps
        result = loop(self._iterator, num_steps, may_end=may_end, values=request.values)
        if self._program.has_local_losses:
            losses = np.asarray(self._agreement.sum(result.losses), result.losses.dtype)
            result = dataclasses.replace(result, losses=losses)
        self._position.elements += result.num_steps * self._feed.elements_per_step
        if self._remaining is not None:
            self._remaining -= result.num_steps
            self._position.ended = self._remaining <= 0
        counts_passes = self._position.num_epochs is not None
        if result.data_ended and not result.num_steps and self._resumed and not counts_passes:
            # It was read to its end, which nobody could know before: from its beginning, as a new call would.
            self._iterator, self._position = iterate(self._feed.dataset), Position(self._position.source)
        elif result.data_ended or self._position.ended:
            self._position.ended = True
            self.request_stop("the training input ended")
        self._resumed = False
        return result

    def _count(self, parts: Sequence[LoopResult], taken: int) -> None:
        before, self._step = self._step, self._model.store.global_step
        if not taken:
            return
        repeated = sum(part.repeated_steps for part in parts)
        if repeated:  # what a lost worker had done of them, only the global step knows
            self._record.repeated(self._step, repeated, (self._step - before) // self._advance - taken)
            return
        self._advance = max(1, (self._step - before) // taken)
        scale = self._program.loss_scale
        if self._step == before and scale is not None:
            self._stop_without_scale(scale)
        elif self._step == before:
            raise ValueError(
                f"{taken} steps left global_step at {self._step}. train_op must advance it: "
                "optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())."
            )

    def _hand_out(self, part: LoopResult, result: StepResult, *, summaries: bool, fetched: bool) -> None:
        """Gives the values of the recorded step to the event file and to the hooks that asked for them."""
        values = [value[-1] for value in part.values]
        num_protos = self._program.num_summary_protos if summaries else 0
        self._record.summaries(values[:num_protos], result.last_step)
        if fetched:
            self._session_hooks.after_run(values[num_protos:])

    def _summaries_due(self, last_step: int) -> bool:
        if self._summary_every.steps is None:
            return False
        return self._summary_every.due(self._step, last_step) or self._step == self._first_step

    def _is_whole(self, part: LoopResult, num_steps: int) -> bool:
        """Whether a loop took all its steps, and training goes on after them."""
        return part.num_steps == num_steps and (self._config.nan == "ignore" or np.isfinite(part.losses).all())

    def _stop_without_scale(self, scale: LossScale) -> None:
        """After steps that were all left out, as their gradients were not finite."""
        if scale.is_exhausted:
            raise NanLossError(
                f"no loss scale makes the gradients finite at step {self._step + 1} (train.precision=mixed_float16): "
                f"they are not finite by themselves. The last checkpoint is of step {self._checkpoints.saved_step}."
            )

    def _stop_at_nan(self, result: StepResult) -> None:
        found = None if self._config.nan == "ignore" else first_nan(result, self._advance)
        if found is None:
            return
        nan = NanLoss(*found, self._model.not_finite())
        self._journal.event("nan", step=nan.step, loss=str(nan.loss), variables=nan.variables)
        if self._config.nan == "rollback" and self._rollbacks < MAX_ROLLBACKS:
            self._roll_back(nan)
        elif self._fail_at_nan:
            raise nan.error(self._checkpoints.saved_step, self._rollbacks)
        else:
            _log.warning("The loss became %s at step %d. %s", nan.loss, nan.step, nan.held)
            self.request_stop("the loss is not finite")

    def _roll_back(self, nan: NanLoss) -> None:
        """Gives the variables the values of the last checkpoint; the input goes on after the bad batch.

        A run that is resumed does the same: it comes to the bad batch again, and the count is in the checkpoint.
        """
        latest = self._checkpoints.latest
        assert latest is not None
        self.wait_for_checkpoint()
        self._rollbacks += 1
        self._model.restore(latest)
        self._step = self._model.store.global_step
        self._journal.event("rollback", step=nan.step, back_to=self._step, count=self._rollbacks)
        _log.warning(
            "The loss became %s at step %d: back to step %d, and on with the batches that follow the bad one "
            "(rollback %d of at most %d).",
            nan.loss, nan.step, self._step, self._rollbacks, MAX_ROLLBACKS,
        )  # fmt: skip


def _remaining_steps(feed: Feed, position: Position) -> float | None:
    steps = feed.remaining_steps()
    return None if steps is None else steps - position.elements // feed.elements_per_step
