"""One run of training: the loop, and what happens between its turns."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoints import CheckpointWriter, Reader
from runner.hooks import Every
from runner.inputs import Feed
from runner.journal import Journal, NullJournal
from runner.position import Position, state_is_exact
from runner.precision import LossScale
from runner.preparation import Preparation
from runner.report import Progress, format_bytes
from runner.saving import Saved, Saver
from runner.snapshots import Snapshot
from runner.steps import LoopResult
from runner.types import StepResult

_log = logging.getLogger(__name__)

# A loop that takes this long costs little in Python and still answers signals and clocks soon enough.
_LOOP_SECS = 1.0
_GROWTH = 10

MAX_ROLLBACKS = 3
"""How often a run goes back to its last checkpoint because of a loss that is not finite."""


class NanLossError(tf.compat.v1.train.NanLossDuringTrainingError):
    """A loss that is not finite; as tf.estimator's error, with the step and what became NaN in its text."""

    def __str__(self) -> str:
        return str(self.args[0])


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


class TrainingRun:
    """One call of `Estimator.train`, as hooks see it.

    Args:
      target: train until this global step; infinite: until the data ends or a hook stops.
      listeners: checkpoint listeners, called around each save.
      after_save: called after each checkpoint, with this run: evaluations. It may still be on its way to the disk;
        `wait_for_checkpoint` waits for it.
    """

    def __init__(
        self,
        preparation: Preparation,
        *,
        target: float,
        checkpoints: CheckpointWriter,
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
        self._config, self._summary_writer = config, summary_writer
        self._saver, self._announced = Saver(checkpoints), False
        self._journal, self._progress = journal, progress
        self._hooks, self._session_hooks, self._listeners = preparation.hooks, preparation.session_hooks, listeners
        self._target, self._after_save = target, after_save
        self._fail_at_nan = preparation.overrides.stop_at_nan is not False  # else training ends without an error
        self._step = self._first_step = self._model.store.global_step
        self._advance = 1
        self._length = LoopLength(config.steps_per_loop)
        self._save_every = Every(config.save_checkpoints_steps, config.save_checkpoints_secs)
        self._summary_every = Every(config.save_summary_steps or None)
        self._writes_loss = "loss" not in program.summary_names  # a model_fn may write its own
        self._saved_step: int | None = None
        self._latest = preparation.latest  # path of the checkpoint to go back to
        self._rollbacks = 0 if self._latest is None else int(Reader(self._latest).extra().get("rollbacks") or 0)
        self._saves_here = False  # by its cadence, whether or not somebody asks it to stop
        self._saved_at = time.monotonic()
        self._remaining = _remaining_steps(feed, position)
        self._resumed = position.elements > 0
        self._state_is_exact = state_is_exact(feed.dataset)

    @property
    def global_step(self) -> int:
        return self._step

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

            begin hooks
            while step < target and nobody stops:
                loop: up to the next boundary (save, summary, hook, end of data, target)
                log; stop at NaN
                after_step of hooks
                save, when due
            save
            end hooks

        Raises:
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite; it names the step.
          ValueError: the step does not advance the global step.
        """
        try:
            self._begin(save_first=save_first)
            while self._step < self._target and self.stop_reason is None:
                num_steps = self._num_steps()
                for hook in self._hooks:
                    hook.before_step(self, self._step)
                result = self._take(num_steps)
                if result.num_steps:  # none, when the loop found nothing but the end of the data
                    for hook in self._hooks:
                        hook.after_step(self, result)
                now = time.monotonic()
                self._tell(self._saver.poll())
                due = self._save_every.due(result.first_step - 1, result.last_step, now - self._saved_at)
                self._saves_here = due and self._step == result.last_step  # else it went back
                if self._saves_here:
                    self._save(asynchronous=self._may_write_beside)
            self._end()
        except Exception as error:
            self._wait_quietly(error)
            raise
        finally:
            self._journal.took("train", self.secs)
            for hook in self._hooks:
                if hasattr(hook, "close"):
                    hook.close(self)

    def save(self) -> str:
        """Writes a checkpoint of this step, the latest when this returns. Its path."""
        path = self._save(asynchronous=False)
        self.wait_for_checkpoint()
        return path

    def wait_for_checkpoint(self) -> None:
        """Returns when the last checkpoint is durable. Raises: what went wrong while it was written."""
        self._tell(self._saver.poll())
        if self._saver.is_busy:
            with self._journal.phase("save"):
                saved = self._saver.wait()
            self._tell(saved)

    @property
    def _may_write_beside(self) -> bool:
        """Whether training goes on after this step, and nobody waits for its checkpoint."""
        goes_on = self._step < self._target and self.stop_reason is None
        return goes_on and not self._listeners and self._config.save_checkpoints_asynchronously

    def _save(self, *, asynchronous: bool) -> str:
        session = self._session_hooks.session
        for listener in self._listeners:
            listener.before_save(session, self._step)
        path = self._write_checkpoint(asynchronous=asynchronous, announced=True)
        for listener in self._listeners:
            if listener.after_save(session, self._step):
                self.request_stop(f"{type(listener).__name__} requested it")
        for call in self._after_save if not self.interrupted else ():
            call(self)
        return path

    def _write_checkpoint(self, *, asynchronous: bool, announced: bool = False, is_evaluated: bool = False) -> str:
        """Returns when the values are copied or, where it is not asynchronous, when the checkpoint is durable."""
        self.wait_for_checkpoint()  # one at a time
        extra: dict[str, Any] = {"input": self._position.as_extra(), "evaluate": self._is_evaluated_here()}
        extra["rollbacks"] = self._rollbacks
        snapshot = Snapshot(self._step, self._model.values(), extra)
        iterators = {self._config.cluster.worker_index: self._iterator} if self._state_is_exact else {}
        self._announced = announced
        with self._journal.phase("save"):
            path = self._saver.begin(snapshot, iterators, asynchronous=asynchronous, is_evaluated=is_evaluated)
        self._model.has_values_of(path)
        self._saved_step, self._saved_at, self._latest = self._step, time.monotonic(), path
        self._tell(self._saver.poll())
        return path

    def _tell(self, saved: Saved | None) -> None:
        """Notes a checkpoint that has become durable."""
        if saved is None or not self._announced:
            return
        self._journal.event("checkpoint", **saved.facts)
        waited = saved.copy_secs + saved.input_secs
        _log.info(
            "Saved %s: %s in %.2f s%s",
            os.path.basename(saved.path),
            format_bytes(saved.bytes),
            waited + saved.write_secs,
            f"; training waited for {waited:.3f} s of it" if saved.asynchronous else "",
        )

    def _wait_quietly(self, error: Exception) -> None:
        """Lets the checkpoint that is under way become durable before `error` is raised."""
        try:
            self.wait_for_checkpoint()
        except Exception as other:
            error.add_note(f"and the last checkpoint was not written: {other}")

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
        self._session_hooks.begin()
        for hook in self._hooks:
            hook.begin(self)
        for listener in self._listeners:
            listener.begin()
        if self._remaining is not None and self._remaining <= 0:  # fewer passes are asked for than were made
            self.request_stop("the training input ended")
        if save_first:
            self._write_checkpoint(asynchronous=self._config.save_checkpoints_asynchronously)
        self._saved_step, self._saved_at = self._step, time.monotonic()

    def _end(self) -> None:
        if self._step == self._first_step:
            _log.warning("No step was taken: the training input is empty, or a hook stopped at once.")
        if self._step != self._saved_step:
            self.save()
        elif self._position.ended:
            # The same values, at the end of the data.
            self._write_checkpoint(asynchronous=False, is_evaluated=True)
        self.wait_for_checkpoint()
        self._session_hooks.end()
        for hook in self._hooks:
            hook.end(self)
        for listener in self._listeners:
            listener.end(self._session_hooks.session, self._step)
        self._summary_writer.flush()

    def _num_steps(self) -> int:
        """Steps of the next loop: it ends at the next boundary of any cadence."""
        boundaries = [self._save_every, *(hook.every for hook in self._hooks if hasattr(hook, "every"))]
        boundaries += [self._session_hooks.every]
        if self._program.has_summaries:
            boundaries.append(self._summary_every)
        steps = min(self._target - self._step, *(every.steps_until_due(self._step) for every in boundaries))
        # An update may advance the global step by more than one (two optimizers that share it).
        return max(1, self._length.next(-(-steps // self._advance)))

    def _take(self, num_steps: int) -> StepResult:
        """Runs one loop; the last of its steps carries summaries and the fetches of hooks where they are due."""
        first, started = self._step + 1, time.perf_counter()
        self._model.has_new_values()
        last_step = self._step + num_steps * self._advance
        summaries = self._program.has_summaries and self._summaries_due(last_step)
        fetches = self._session_hooks.fetches(last_step)
        parts, recorded = [], None
        num_plain = num_steps - 1 if summaries or fetches else num_steps
        if num_plain:
            parts.append(self._loop((), num_plain, summaries=False))
        if num_plain < num_steps and (not parts or self._is_whole(parts[0], num_plain)):
            parts.append(recorded := self._loop(fetches, 1, summaries=summaries))
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
            self._hand_out(recorded, result, summaries=summaries, fetched=bool(fetches))
        self._record(result)
        self._stop_at_nan(result)
        return result

    def _loop(self, fetches: Any, num_steps: int, *, summaries: bool) -> LoopResult:
        loop = self._program.loop(fetches, summaries=summaries)
        may_end = self._remaining is None or self._remaining < num_steps
        result = loop(self._iterator, num_steps, may_end=may_end)
        self._position.elements += result.num_steps * self._feed.elements_per_step
        if self._remaining is not None:
            self._remaining -= result.num_steps
            self._position.ended = self._remaining <= 0
        counts_passes = self._position.num_epochs is not None
        if result.data_ended and not result.num_steps and self._resumed and not counts_passes:
            # It was read to its end, which nobody could know before: from its beginning, as a new call would.
            self._iterator, self._position = iter(self._feed.dataset), Position(self._position.source)
        elif result.data_ended or self._position.ended:
            self._position.ended = True
            self.request_stop("the training input ended")
        self._resumed = False
        return result

    def _count(self, parts: Sequence[LoopResult], taken: int) -> None:
        before, self._step = self._step, self._model.store.global_step
        if not taken:
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
        with self._summary_writer.as_default():
            for proto in values[:num_protos]:
                tf.summary.experimental.write_raw_pb(proto, step=result.last_step)
        if fetched:
            self._session_hooks.after_run(values[num_protos:])

    # --- what is told of it -----------------------------------------------------------------------------------

    def _record(self, result: StepResult) -> None:
        if not result.num_steps:
            return
        if result.first_step == self._first_step + 1:  # whoever started the run knows how long that took
            self._journal.event("first_step", step=result.first_step)
        steps_per_sec = result.num_steps / result.secs
        examples_per_sec = result.examples / result.secs
        steps = np.linspace(result.first_step, result.last_step, result.num_steps).round().astype(int)
        for step, loss in self._at(self._config.log_step_count_steps, steps, result.losses):
            values: Mapping[str, float] = {"train/loss": loss}
            if step + (self._config.log_step_count_steps or 0) > result.last_step:
                values = {
                    **values,
                    "train/steps_per_sec": steps_per_sec,
                    "train/examples_per_sec": examples_per_sec,
                }
            self._journal.metrics(step, values)
        with self._summary_writer.as_default():
            for step, loss in self._at(self._config.save_summary_steps, steps, result.losses):
                scalars = {"global_step/sec": steps_per_sec} | ({"loss": loss} if self._writes_loss else {})
                # One proto for both: tf.summary.scalar takes 0.12 ms for each.
                proto = tf.compat.v1.Summary(
                    value=[{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
                )
                tf.summary.experimental.write_raw_pb(proto.SerializeToString(), step=step)
        self._progress.update(self._step, float(result.losses[-1]), steps_per_sec, examples_per_sec)

    def _at(self, every: int | None, steps: np.ndarray, losses: np.ndarray) -> list[tuple[int, float]]:
        """(step, loss) at each multiple of `every`, and at the first step of the run."""
        if not every:
            return []
        chosen = (steps % every == 0) | (steps == self._first_step + 1)
        return [(int(step), float(loss)) for step, loss in zip(steps[chosen], losses[chosen], strict=True)]

    def _summaries_due(self, last_step: int) -> bool:
        if self._summary_every.steps is None:
            return False
        return self._summary_every.due(self._step, last_step) or self._step == self._first_step

    def _is_whole(self, part: LoopResult, num_steps: int) -> bool:
        """Whether a loop took all its steps, and training goes on after them."""
        return part.num_steps == num_steps and (self._config.nan == "ignore" or math.isfinite(part.losses[-1]))

    def _stop_without_scale(self, scale: LossScale) -> None:
        """After steps that were all left out, as their gradients were not finite."""
        if scale.is_exhausted:
            raise NanLossError(
                f"no loss scale makes the gradients finite at step {self._step + 1} (train.precision=mixed_float16): "
                f"they are not finite by themselves. The last checkpoint is of step {self._saved_step}."
            )

    def _stop_at_nan(self, result: StepResult) -> None:
        if self._config.nan == "ignore" or not result.num_steps or math.isfinite(result.losses[-1]):
            return
        names = self._model.not_finite()
        held = (
            f"After it these variables hold values that are not finite: {', '.join(names)}."
            if names
            else ("All variables are still finite.")
        )
        self._journal.event("nan", step=self._step, loss=str(result.losses[-1]), variables=names)
        if self._config.nan == "rollback" and self._rollbacks < MAX_ROLLBACKS:
            self._roll_back(result)
            return
        if not self._fail_at_nan:
            _log.warning("The loss became %s at step %d. %s", result.losses[-1], self._step, held)
            self.request_stop("the loss is not finite")
            return
        raise NanLossError(
            f"the loss became {result.losses[-1]} at step {self._step}. {held} "
            f"The last checkpoint is of step {self._saved_step}; train.nan=ignore (RunConfig(nan='ignore')) trains on."
            + (f" It was gone back to {self._rollbacks} times already." if self._rollbacks else "")
        )

    def _roll_back(self, result: StepResult) -> None:
        """Gives the variables the values of the last checkpoint; the input goes on after the bad batch.

        A run that is resumed does the same: it comes to the bad batch again, and the count is in the checkpoint.
        """
        assert self._latest is not None
        self.wait_for_checkpoint()
        self._rollbacks += 1
        self._model.restore(self._latest)
        self._step = self._model.store.global_step
        self._journal.event("rollback", step=result.last_step, back_to=self._step, count=self._rollbacks)
        _log.warning(
            "The loss became %s at step %d: back to step %d, and on with the batches that follow the bad one "
            "(rollback %d of at most %d).",
            result.losses[-1], result.last_step, self._step, self._rollbacks, MAX_ROLLBACKS,
        )  # fmt: skip


def _remaining_steps(feed: Feed, position: Position) -> float | None:
    steps = feed.remaining_steps()
    return None if steps is None else steps - position.elements // feed.elements_per_step
