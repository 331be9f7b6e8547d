"""One training run: the loop, and what happens between its turns."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.batch_groups import are_small
from runner.data.wait_timer import SAMPLE_SECS, NullWaitTimer, WaitTimer
from runner.estimator.checkpointing import RunCheckpoints
from runner.estimator.context import EstimatorContext
from runner.estimator.loop_boundary import Boundary, Grouping, LoopLength
from runner.estimator.nan_loss import NanPolicy
from runner.estimator.train_log import TrainLog
from runner.estimator.train_setup import TrainSetup
from runner.hooks.hook import WhenDue
from runner.programs.train_loop import LoopResult
from runner.tf_private import graphs
from runner.tracing.numeric_checks import NotFiniteError
from runner.types import StepRequest, StepResult

_log = logging.getLogger(__name__)


class TrainingRun:
    """One call of `Estimator.train`, as hooks see it. Each worker has one, and all call the same methods in the same
    order.

    Args:
      target: train until this global step; infinite: until the data ends or a hook stops the run.
      after_save: called with this run after each checkpoint, to evaluate it. The checkpoint may not be durable yet;
        `wait_for_checkpoint` waits for it.

    Attributes:
      examples: number of examples trained on by this run.
      secs: seconds in loops, without saves and evaluations.
      stop_reason: why the run ends at the next boundary; None: it continues.
      interrupted: the run ends without waiting for evaluations, because it was asked to.
    """

    def __init__(
        self,
        context: EstimatorContext,
        setup: TrainSetup,
        checkpoints: RunCheckpoints,
        log: TrainLog,
        *,
        target: float,
        after_save: Sequence[Callable[[TrainingRun], None]] = (),
    ) -> None:
        self.model_dir = context.model_dir
        self.examples, self.secs = 0, 0.0
        self.stop_reason: str | None = None
        self.interrupted = False
        self._context, self._setup, self._checkpoints, self._log = context, setup, checkpoints, log
        self._nan = NanPolicy(context, setup, checkpoints)
        self._target, self._after_save = target, after_save
        self._step = self._first_step = setup.model.store.global_step
        self._advance = 1  # added to the global step by each step; two optimizers that share it add 2
        self._next = Boundary(0, False, None, False)
        self._length = LoopLength(1 if self._nan.needs_single_steps else setup.config.steps_per_loop)
        self._always_splits = False
        self._saves_here = False  # by the cadence, whether or not the run is asked to stop
        setup.session_hooks.session.take_batch = self._take_batch
        # The chief decides the length of loops, and so when to take a sample.
        is_timed = context.is_chief and setup.input.pipeline.is_timeable and setup.program.loops_in_graph
        self._wait = WaitTimer() if is_timed else NullWaitTimer()
        self._iterator: Any = setup.input.iterator
        self._grouping = Grouping(self._can_group)
        self._is_grouped = False  # the loop that is taken now

    @property
    def global_step(self) -> int:
        return self._step

    @property
    def _records_in_loops(self) -> bool:
        """Whether loops continue through steps with summaries: no hook looks at them, and each step counts one."""
        program, session_hooks = self._setup.program, self._setup.session_hooks
        return program.records_in_loops and session_hooks.is_empty and self._advance == 1 and self._log.has_summaries

    @property
    def goes_on(self) -> bool:
        """Whether to take a further step, as far as this process knows."""
        return self._step < self._target and self.stop_reason is None

    @property
    def steps_per_sec(self) -> float:
        return (self._step - self._first_step) / self.secs if self.secs else 0.0

    @property
    def input_bound(self) -> float | None:
        """The share of step time spent waiting for input, from 0 to 1, by samples; None: there was no sample."""
        return self._wait.share

    @property
    def learning_rate(self) -> float:
        """The learning rate that the optimizer keeps in a variable. A new value holds from the next step; workers set
        it together.

        Raises:
          ValueError: it is not a variable; the message says how to make it one.
        """
        setup = self._setup
        return float(setup.model.store[setup.program.rate_variable].numpy())

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        setup = self._setup
        setup.model.values_of = None
        setup.model.assign({setup.program.rate_variable: rate})

    def request_stop(self, reason: str = "a hook requested it") -> None:
        self.stop_reason = self.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """End the run like `request_stop`, but leave out what follows the save: evaluations and exports."""
        self.request_stop(reason)
        self.interrupted = True

    def run(self) -> None:
        """Train.

                begin log, listeners and hooks; a new run saves
                while step < target and no stop is requested:
                    call before_step of the hooks that were called last
                    take steps up to the next boundary (save, summary, hook, end of data, target)
                        log; at a NaN: stop, or roll back
                    call after_step of the hooks that are due
                    agree with the other workers: stop, length of the next loop, save
                    if a save is due: listeners, checkpoint, evaluations
                save
                end listeners, hooks and log

        Raises:
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite; the message names the step.
          ValueError: the step does not advance the global step.
        """
        hooks = self._setup.hooks
        due = [WhenDue(hook) for hook in hooks]
        self._setup.model.is_trained = True
        try:
            self._begin()
            self._agree()
            while self._step < self._target and self._next.stop_reason is None:
                for hook in due:
                    hook.before_step(self, self._step)
                result = self._take_steps(self._next.num_steps)
                if result.num_steps:  # no step was taken if the data had ended
                    for hook in due:
                        hook.after_step(self, result)
                self._checkpoints.poll()
                graphs.drop_scalars()  # one of each step that was written to an event file
                # A clock, a signal or a hook of one worker concerns all: a worker that acts alone leaves the others
                # waiting in a collective. After a rollback the checkpoint of this step exists already.
                self._saves_here = self._agree(
                    saves=self._checkpoints.is_due(result) and self._step == result.last_step
                )
                if self._saves_here:
                    self._save(asynchronous=self.goes_on)  # no training runs beside the last save
                    self._agree()  # a listener or an evaluation may have requested a stop
            self._end()
        except Exception as error:
            self._checkpoints.settle_before(error)
            if isinstance(error, NotFiniteError):
                error.add_note(
                    f"at step {self._step + 1}; the last checkpoint is of step {self._checkpoints.saved_step}"
                )
            raise
        finally:
            self._setup.model.show_weights()
            self._setup.model.is_trained = False
            self._context.journal.took("train", self.secs)
            self._setup.session_hooks.close()
            for hook in hooks:
                if hasattr(hook, "close"):  # a hook need not derive from Hook
                    hook.close(self)

    def save(self) -> str:
        """Write a checkpoint of this step and return its path; it is then the latest. Workers call it together."""
        path = self._save(asynchronous=False)
        self.wait_for_checkpoint()
        return path

    def wait_for_checkpoint(self) -> None:
        """Return when the last checkpoint is durable on all workers, which call this together.

        Raises:
          The error with which the checkpoint failed.
        """
        self._checkpoints.wait()

    # --- the phases of a run ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        program, session_hooks, collectives = self._setup.program, self._setup.session_hooks, self._context.collectives
        self._log.begin(None if math.isinf(self._target) else int(self._target))
        # The chief's hooks split the loops of all workers, because all must call the same functions.
        self._always_splits = collectives.num_workers > 1 and collectives.any(not session_hooks.is_empty)
        random_ops = program.trace.kernel_random_ops()
        if random_ops:
            _log.warning(
                "model_fn draws random numbers whose state is not in checkpoints (%s), so a resumed run differs from "
                "an undisturbed one. Use Keras layers or tf.random.stateless_*.",
                ", ".join(random_ops[:3]) + (", ..." if len(random_ops) > 3 else ""),
            )
        self._checkpoints.tell_listeners("begin")
        session_hooks.begin(self.request_stop)
        for hook in self._setup.hooks:
            hook.begin(self)
        remaining = self._setup.input.remaining_steps
        if remaining is not None and remaining <= 0:  # more epochs were trained than are asked for now
            self.request_stop("the training input ended")
        self._checkpoints.begin(self._step, self._extra())

    def _agree(self, *, saves: bool = False) -> bool:
        """Agree with the other workers on what is next. Return whether to save."""
        found = Boundary(self._num_steps(), saves, self.stop_reason, self.interrupted)
        self._next = found.agreed(self._context.collectives)
        self.stop_reason, self.interrupted = self._next.stop_reason, self._next.interrupted
        return self._next.saves

    def _num_steps(self) -> int:
        """Return the number of steps of the next loop, which ends at the next boundary of any cadence."""
        cadences = [
            self._checkpoints.every,
            self._setup.session_hooks,
            *(hook.every for hook in self._setup.hooks if hasattr(hook, "every")),
        ]
        logged = self._log.steps_until_due(self._step, in_loops=self._records_in_loops)
        steps = min(self._target - self._step, logged, *(cadence.steps_until_due(self._step) for cadence in cadences))
        sampled = self._wait.steps_to_sample(self.secs)
        length = self._length.next(-(-steps // self._advance))
        return max(1, min(length, sampled) if sampled else length)

    def _take_steps(self, num_steps: int) -> StepResult:
        """Run one loop; its last step carries the summaries and the fetches of hooks that are due."""
        program = self._setup.program
        self._setup.model.show_weights()  # undo what an evaluation has shown, as before a save
        is_sampled = self._wait.steps_to_sample(self.secs) > 0
        self._iterator = self._setup.input.iterator
        if is_sampled:
            self._iterator = self._wait.timed(self._iterator)
        self._is_grouped = not is_sampled and self._grouping.is_due(
            num_steps, self._length.secs_per_step, min(self._target - self._step, self._setup.input.remaining)
        )
        first, started = self._step + 1, time.perf_counter()
        before = self._step
        self._setup.model.values_of = None
        last_step = self._step + num_steps * self._advance
        summaries = self._log.are_summaries_due(self._step, last_step)
        request = StepRequest()
        with self._data_may_end():
            request = self._setup.session_hooks.request(last_step)
        if self._setup.input.position.ended and not request:
            num_steps, summaries = 0, False  # a hook asked for a batch after the last one
        # Only the step that hooks look at pays for their fetches.
        splits = (summaries and not self._records_in_loops) or request or self._always_splits
        num_plain = num_steps - 1 if splits else num_steps
        parts: list[LoopResult] = []
        if self._records_in_loops:
            parts.append(self._loop_with_records(num_steps))
        elif num_plain:
            parts.append(self._loop(StepRequest(), num_plain, summaries=False))
        is_whole = not parts or (parts[0].num_steps == num_plain and self._nan.accepts(parts[0].losses))
        recorded = self._loop(request, 1, summaries=summaries) if num_plain < num_steps and is_whole else None
        if recorded is not None:
            parts.append(recorded)
        taken = sum(part.num_steps for part in parts)
        self._count(parts, taken)
        result = StepResult(
            first_step=first,
            last_step=self._step,
            losses=np.concatenate([part.losses for part in parts] or [np.zeros(0)]),
            examples=sum(part.examples for part in parts),
            secs=time.perf_counter() - started,
        )
        # A sample of very short steps is slowed by the cost of timing them, so it does not count as speed.
        is_short = is_sampled and self._length.next(math.inf) > num_steps and result.secs < SAMPLE_SECS
        if not is_short:
            self._length.took(taken, result.secs)
        self.examples += result.examples
        self.secs += result.secs
        if recorded is not None and recorded.num_steps:
            # Order of the fetches: metrics, summaries, then those of hooks.
            values = [value[-1] for value in recorded.values[min(1, len(program.scalars.metrics)) :]]
            num_summaries = program.num_summary_values if summaries else 0
            if summaries:
                self._log.summaries(values[:num_summaries], self._step)
            if request:
                with self._data_may_end():
                    self._setup.session_hooks.after_run(values[num_summaries:])
        for place, record in parts[0].records if parts else ():
            self._log.summaries(record, before + (place + 1) * self._advance)
        if result.num_steps:
            metrics = [part.values[0] for part in parts if part.num_steps] if program.scalars.metrics else []
            rows = np.concatenate(metrics) if metrics else np.zeros([taken, 0])
            self._log.note(result, rows, logs_speed=not is_short)
            if is_sampled:
                self._note_wait(self._wait.took(taken, result.secs, self.secs))
        if self._nan.check(self, result, self._advance):
            self._step = self._setup.model.store.global_step
        return result

    def _can_group(self) -> bool:
        """Report whether loops may read batches in groups. Also builds such a loop, so that its first use is not
        slow.
        """
        program, pipeline = self._setup.program, self._setup.input.pipeline
        elements = (self._step - self._first_step) // self._advance * pipeline.division.elements_per_step
        rows = self.examples / max(1, elements)
        is_possible = program.can_group and are_small(pipeline.element_spec, rows) and pipeline.may_read_ahead
        if is_possible and not self._nan.needs_place:
            loop = program.grouped_recording_loop if self._records_in_loops else program.grouped_loop
            loop.prepare(self._setup.input.iterator)
            return True
        return False

    def _loop(self, request: StepRequest, num_steps: int, *, summaries: bool) -> LoopResult:
        program, train_input = self._setup.program, self._setup.input
        may_end = train_input.may_end_within(num_steps)
        if self._is_grouped and not (request or summaries):
            return self._taken(program.grouped_loop(self._iterator, num_steps, may_end=may_end))
        loop = program.loop(request, summaries=summaries)
        return self._taken(loop(self._iterator, num_steps, may_end=may_end, values=request.values))

    def _take_batch(self, request: StepRequest) -> Sequence[Any]:
        """Return the values that a hook runs by itself on the next batch; this is not a step.

        Raises:
          tf.errors.OutOfRangeError: there is no further batch, as in a session.
        """
        loop, train_input = self._setup.program.part(request), self._setup.input
        self._setup.model.values_of = None
        while True:
            result = loop(train_input.iterator, 1, may_end=train_input.may_end_within(1), values=request.values)
            if train_input.advance(result):
                self.request_stop("the training input ended")
            if result.num_steps:
                self.examples += result.examples
                return [value[-1] for value in result.values]
            if train_input.position.ended:
                raise tf.errors.OutOfRangeError(None, None, "the training input has ended, but a hook asks for a batch")

    @contextlib.contextmanager
    def _data_may_end(self) -> Iterator[None]:
        """End training if a hook asks for a batch after the last one, as tf.estimator does."""
        try:
            yield
        except tf.errors.OutOfRangeError:
            if not self._setup.input.position.ended:
                raise

    def _loop_with_records(self, num_steps: int) -> LoopResult:
        program, train_input = self._setup.program, self._setup.input
        loop = program.grouped_recording_loop if self._is_grouped else program.recording_loop
        schedule, may_end = self._log.schedule(self._step, num_steps), train_input.may_end_within(num_steps)
        return self._taken(loop.take(self._iterator, num_steps, schedule, may_end=may_end))

    def _taken(self, result: LoopResult) -> LoopResult:
        """Note what a loop has read, and return its result with the losses summed over all workers."""
        program, train_input = self._setup.program, self._setup.input
        if program.has_local_losses:
            losses = np.asarray(self._context.collectives.sum(result.losses), result.losses.dtype)
            result = dataclasses.replace(result, losses=losses)
        if train_input.advance(result):
            self.request_stop("the training input ended")
        return result

    def _note_wait(self, share: float | None) -> None:
        if share is not None:
            self._context.journal.metrics(self._step, {"train/input_bound": share})

    def _count(self, parts: Sequence[LoopResult], taken: int) -> None:
        """Read the global step, and find what a step adds to it."""
        before, self._step = self._step, self._setup.model.store.global_step
        if not taken:
            return
        repeated = sum(part.repeated_steps for part in parts)
        if repeated:  # only the global step shows how many of them a lost worker had taken
            self._log.repeated(self._step, repeated, (self._step - before) // self._advance - taken)
            return
        self._advance = max(1, (self._step - before) // taken)
        if self._step == before and self._setup.program.loss_scale is not None:
            self._nan.check_loss_scale(self._step)
        elif self._step == before:
            raise ValueError(
                f"{taken} steps left global_step at {self._step}. train_op must advance it: "
                "optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())."
            )

    def _save(self, *, asynchronous: bool) -> str:
        self._setup.model.show_weights()  # a hook may have begun to predict with another checkpoint
        path = self._checkpoints.save(self, self._extra(), asynchronous=asynchronous)
        calls = self._after_save if not self._next.interrupted else ()
        with self._setup.program.kept_metrics.set_aside() if calls else contextlib.nullcontext():
            for call in calls:
                call(self)
        return path

    def _extra(self) -> dict[str, Any]:
        """Return what a checkpoint of this step holds beside the variables."""
        position = self._setup.input.position
        # Whether an undisturbed run evaluates here; a resumed run makes up for a missing evaluation only then.
        is_end = not self.interrupted or self._step >= self._target or position.ended
        is_evaluated = self._step > self._first_step and (self._saves_here or is_end)
        return {"input": position.as_extra(), "evaluate": is_evaluated, "rollbacks": self._nan.rollbacks}

    def _end(self) -> None:
        if self._step == self._first_step:
            _log.warning("No step was taken: the training input is empty, or a hook stopped training at once.")
        if self._step != self._checkpoints.saved_step:
            self.save()
        elif self._setup.input.position.ended:
            # The same values again, now at the end of the data.
            self._checkpoints.write(self._step, self._extra(), asynchronous=False, is_evaluated=True)
        self.wait_for_checkpoint()
        self._checkpoints.tell_listeners("end", self._step)
        if not self._setup.session_hooks.is_empty:
            self._setup.session_hooks.end()
            self._setup.model.values_of = None  # assignments in a hook's `end` are not in the last checkpoint
        for hook in self._setup.hooks:
            hook.end(self)
        self._log.end()
        self._context.collectives.sum([])  # no worker leaves while another still needs it
