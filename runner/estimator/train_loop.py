"""One training run: the loop, and the work between two loops of steps."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.batch_groups import are_small
from runner.data.inputs import EmptyInputError, why_empty
from runner.data.wait_timer import WaitTimer
from runner.estimator.checkpointing import RunCheckpoints
from runner.estimator.context import EstimatorContext
from runner.estimator.loop_boundary import Boundary, LoopLength, Pace
from runner.estimator.nan_loss import NanPolicy
from runner.estimator.train_log import TrainLog
from runner.estimator.train_setup import TrainSetup
from runner.hooks.hook import WhenDue
from runner.model_fn import ModeKeys
from runner.programs.ema import AVERAGES
from runner.programs.train_loop import LoopResult, Steps
from runner.tf_private import graphs
from runner.tracing.adapted_layers import ADAPTED
from runner.tracing.numeric_checks import NotFiniteError
from runner.types import StepRequest, StepResult

_log = logging.getLogger(__name__)


class TrainingRun:
    """One call of `Estimator.train`, as hooks see it. All workers call the same methods in the same order.

    Args:
      context: the Estimator's settings.
      setup: the training setup.
      checkpoints: writes the run's checkpoints.
      log: writes the run's log.
      target: train until this global step; infinite: until the data ends or a hook stops the run.
      after_save: functions that are called with this run after each checkpoint, to evaluate it. The checkpoint may not
        be durable yet; `wait_for_checkpoint` waits for it.
      facts: returns what each checkpoint stores beside the variables, values that JSON can hold.

    Attributes:
      examples: number of examples trained on by this run.
      stop_reason: why the run ends after this loop; None: it continues.
      interrupted: the run ends without evaluations, because it was asked to stop.
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
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.model_dir = context.model_dir
        self.examples = 0
        self.stop_reason: str | None = None
        self.interrupted = False
        self._context, self._setup, self._checkpoints, self._log = context, setup, checkpoints, log
        self._nan = NanPolicy(context, setup, checkpoints)
        self._target, self._after_save, self._facts = target, after_save, facts
        self._step = self._first_step = setup.model.store.global_step
        self._advance = 1  # the number that a step adds to the global step; two optimizers that share it add 2
        self._next = Boundary(0, False, None, False)
        self._always_splits = False
        self._is_end_saved = False  # whether the last checkpoint says that the data has ended
        self._saves_here = False  # whether the cadence asks for a save at this step, even if the run is asked to stop
        setup.session_hooks.session.take_batch, setup.session_hooks.session.hooked = self._take_batch, self
        # Only the chief measures the wait for input, because it decides the length of loops.
        is_timed = context.is_chief and setup.input.pipeline.is_timeable and setup.program.loops_in_graph
        length = LoopLength(1 if self._nan.needs_single_steps else setup.config.steps_per_loop)
        self._pace = Pace(length, self._can_group, WaitTimer(is_on=is_timed))

    @property
    def global_step(self) -> int:
        return self._step

    @property
    def _records_in_loops(self) -> bool:
        """Report whether loops continue through steps with summaries.

        They do if no session hook is set, and each step adds one to the global step.
        """
        program, session_hooks = self._setup.program, self._setup.session_hooks
        return program.records_in_loops and session_hooks.is_empty and self._advance == 1 and self._log.has_summaries

    @property
    def goes_on(self) -> bool:
        """Report whether a further step is to be taken, as far as this process knows; after `_agree`, all know."""
        return self._step < self._target and self.stop_reason is None

    @property
    def ended_early(self) -> str | None:
        """The reason why the run ended before its last step, if that was the end of the input; None: it was not.

        A run without a last step, or for a number of passes (max_epochs), is meant to end with its input.
        """
        position = self._setup.input.position
        if not position.ended or position.num_epochs or not self._step < self._target < math.inf:
            return None
        return (
            f"the training input ended at step {self._step} of {int(self._target)}. To train on, call .repeat() in the "
            "input function; for a number of passes over the input, set train.max_epochs."
        )

    @property
    def steps_per_sec(self) -> float:
        """The speed without the first loop, which traces the graph, as the screen shows it; of a run that has taken
        only that loop, its speed; 0: no step was taken.
        """
        steps, secs = self._step - self._first_step, self._pace.secs
        later_steps = steps - self._pace.first_steps * self._advance
        if later_steps > 0:
            steps, secs = later_steps, secs - self._pace.first_secs
        return steps / secs if secs else 0.0

    @property
    def input_bound(self) -> float | None:
        """The share of step time spent waiting for input, from 0 to 1; None: it was not measured."""
        return self._pace.wait.share

    @property
    def learning_rate(self) -> float:
        """The learning rate, if the optimizer keeps it in a variable. A rate that is set holds from the next step on.

        All workers must set it together.

        Raises:
          ValueError: the rate is not in a variable; the message says how to put it there.
        """
        setup = self._setup
        return float(setup.model.store[setup.program.rate_variable].numpy())

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        setup = self._setup
        setup.model.values_of = None
        setup.model.assign({setup.program.rate_variable: rate})

    def log(self, values: Mapping[str, Any], *, on_progress: bool = False) -> None:
        self._log.of_hooks.write(self._step, values, on_progress=on_progress)

    def request_stop(self, reason: str = "a hook requested it") -> None:
        self.stop_reason = self.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """End the run like `request_stop`, but without the evaluations and exports after the last save."""
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
                    if a save is due, or training ends: listeners, checkpoint, evaluations
                        at a NaN in the variables: stop, or roll back, and train on
                end listeners, hooks and log

        Raises:
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite, or variables became non-finite; the
            message names the step.
          ValueError: the step does not advance the global step.
          EmptyInputError: no step was taken, because the training input has no examples.
        """
        hooks = self._setup.hooks
        due = [WhenDue(hook) for hook in hooks]
        # From now on perhaps no checkpoint has the values, so an evaluation keeps them in memory.
        self._setup.model.is_trained = True
        try:
            self._begin()
            self._agree()
            while self.goes_on:
                for hook in due:
                    hook.before_step(self, self._step)
                result = self._take_steps(self._next.num_steps)
                self._setup.input.pipeline.stream.check_once()
                if result.num_steps:  # no step was taken if the data had ended
                    for hook in due:
                        hook.after_step(self, result)
                self._checkpoints.poll()
                graphs.drop_scalars()  # one of each step that was written to an event file
                # A clock, a signal or a hook of one worker concerns all workers: if one acted alone, the others would
                # wait in a collective forever. After a rollback, the checkpoint of this step exists already.
                self._saves_here = self._agree(
                    saves=self._checkpoints.is_due(result) and self._step == result.last_step
                )
                if self._saves_here or (not self.goes_on and self._step != self._checkpoints.saved_step):
                    # No training follows the last save, so it need not be asynchronous.
                    self._save(asynchronous=self.goes_on)
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
            self._context.journal.took("train", self._pace.secs)
            self._setup.session_hooks.close()
            for hook in hooks:
                if hasattr(hook, "close"):  # absent in hooks that do not derive from Hook
                    hook.close(self)
            self._log.end()  # a hook's `close` may have logged

    def save(self) -> str:
        """Write a checkpoint of this step, which becomes the latest, and return its path. All workers must call this
        together.

        If variables have become non-finite, nothing is written: the run fails, or goes back to the last checkpoint
        (train.nan), whose path is returned.

        Raises:
          tf.compat.v1.train.NanLossDuringTrainingError: variables have become non-finite.
        """
        path = self._save(asynchronous=False)
        self.wait_for_checkpoint()
        return path

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is durable on all workers. All workers must call this together.

        Raises:
          The error because of which the checkpoint could not be written.
        """
        self._checkpoints.wait()

    # --- the phases of a run ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        program, session_hooks, collectives = self._setup.program, self._setup.session_hooks, self._context.collectives
        self._log.begin(None if math.isinf(self._target) else int(self._target))
        # If the chief has session hooks, they split the loops of all workers, because all must run the same functions.
        self._always_splits = collectives.num_workers > 1 and collectives.any(not session_hooks.is_empty)
        random_ops = program.trace.kernel_random_ops()
        if random_ops:
            _log.warning(
                "model_fn draws random numbers whose state is not in checkpoints (%s), so a resumed run differs from "
                "an undisturbed one. Use Keras layers or tf.random.stateless_*.",
                ", ".join(random_ops[:3]) + (", ..." if len(random_ops) > 3 else ""),
            )
        # In a session their variables are the graph's own: saved with the model, and restored with it.
        with self._setup.model.extended(program, self._setup.latest):
            self._checkpoints.tell_listeners("begin")
            session_hooks.begin()
        session_hooks.start(self.request_stop)
        for hook in self._setup.hooks:
            hook.begin(self)
        if self._setup.input.remaining_steps <= 0:  # the run was trained for more epochs than max_epochs is now
            self.request_stop("the training input ended")
        self._nan.begin()
        # After the hooks: their `begin` may assign variables, and the first checkpoint has what training starts from.
        self._checkpoints.begin(self._step, self._extra())

    def _agree(self, *, saves: bool = False) -> bool:
        """Agree with the other workers on what to do next, and return whether to save."""
        boundary = Boundary(self._num_steps(), saves, self.stop_reason, self.interrupted)
        self._next = boundary.agreed(self._context.collectives)
        self.stop_reason, self.interrupted = self._next.stop_reason, self._next.interrupted
        return self._next.saves

    def _num_steps(self) -> int:
        """Return the number of steps of the next loop, which ends where the next save, log, hook or other cadence is
        due.
        """
        cadences = [
            self._checkpoints.every,
            self._setup.session_hooks,
            *(hook.every for hook in self._setup.hooks if hasattr(hook, "every")),
        ]
        logged = self._log.steps_until_due(self._step, in_loops=self._records_in_loops)
        steps = min(self._target - self._step, logged, *(cadence.steps_until_due(self._step) for cadence in cadences))
        return self._pace.num_steps(-(-steps // self._advance))  # rounded up: the loop must reach what is due

    def _take_steps(self, num_steps: int) -> StepResult:
        """Run one loop; write the summaries of its steps, and pass to session hooks what its last step fetches."""
        model, program, train_input = self._setup.model, self._setup.program, self._setup.input
        hooks, before, started = self._setup.session_hooks, self._step, time.perf_counter()
        model.show_weights()  # an evaluation may have loaded other values
        model.values_of = None
        request = StepRequest()
        with self._data_may_end():
            request = hooks.request(before + num_steps * self._advance)
        if train_input.ended and not request:
            num_steps = 0  # a hook asked for a batch after the last one, so no step is taken
        plan = self._pace.next_loop(num_steps, min(self._target - before, train_input.remaining_steps))
        schedule = self._log.schedule(before, num_steps, self._advance, in_loops=self._records_in_loops)
        records = self._records_in_loops or schedule.number > 0
        loop = program.loop(request, records=records, in_groups=plan.in_groups, splits=self._always_splits)
        iterator = self._pace.wait.timed(train_input.iterator) if plan.is_sampled else train_input.iterator
        taken = loop(iterator, Steps(num_steps, train_input.may_end_within(num_steps), schedule, request.values))
        if train_input.advance(taken.num_steps, taken.examples, taken.data_ended, taken.repeated_steps):
            self.request_stop("the training input ended")
        losses = self._context.collectives.sum(taken.losses) if program.has_local_losses else taken.losses
        self._count(taken)
        result = StepResult(
            first_step=before + 1,
            last_step=self._step,
            losses=np.asarray(losses, taken.losses.dtype),  # the sum over workers is in float64
            examples=taken.examples,
            secs=time.perf_counter() - started,
        )
        self.examples += taken.examples
        logs_speed, share = self._pace.took(plan, taken.num_steps, result.secs)
        for place, outputs in taken.records:
            if records:
                self._log.summaries(outputs, before + (place + 1) * self._advance)
            if request:
                with self._data_may_end():
                    hooks.after_run(outputs.get("fetches", ()))
        if taken.num_steps:
            rows = taken.values.get("metrics", np.zeros([taken.num_steps, 0]))
            self._log.note(result, rows, logs_speed=logs_speed)
        if share is not None:
            self._context.journal.metrics(self._step, {"train/input_bound": share})
        # After the log, so that the journal has the loss because of which the run ends or goes back.
        if self._nan.check(self, result, self._advance):
            self._step = model.store.global_step
        return result

    def _can_group(self) -> bool:
        """Report whether loops may read batches in groups; if so, build such a loop, to make its first use fast."""
        program, pipeline = self._setup.program, self._setup.input.pipeline
        elements = (self._step - self._first_step) // self._advance * pipeline.division.elements_per_step
        rows = self.examples / max(1, elements)
        is_possible = program.can_group and are_small(pipeline.element_spec, rows) and pipeline.may_read_ahead
        if is_possible and not self._nan.needs_place:
            program.loop(records=self._records_in_loops, in_groups=True).prepare(self._setup.input.iterator)
            return True
        return False

    def _take_batch(self, request: StepRequest) -> Sequence[Any]:
        """Run what a hook requests on the next batch, which is no step, and return the values.

        Raises:
          tf.errors.OutOfRangeError: there is no further batch; a session would raise the same.
        """
        loop, train_input = self._setup.program.part(request), self._setup.input
        self._setup.model.values_of = None
        while True:
            result = loop(train_input.iterator, Steps(1, train_input.may_end_within(1), values=request.values))
            if train_input.advance(result.num_steps, result.examples, result.data_ended, result.repeated_steps):
                self.request_stop("the training input ended")
            if result.num_steps:
                self.examples += result.examples
                return [value[-1] for value in result.values["fetches"]]
            if train_input.ended:
                raise tf.errors.OutOfRangeError(None, None, "the training input has ended, but a hook asks for a batch")

    @contextlib.contextmanager
    def _data_may_end(self) -> Iterator[None]:
        """End training if a hook asks for a batch after the last one, as tf.estimator does."""
        try:
            yield
        except tf.errors.OutOfRangeError:
            if not self._setup.input.ended:
                raise

    def _count(self, result: LoopResult) -> None:
        """Read the global step, and compute the number that a step adds to it."""
        before, self._step, taken = self._step, self._setup.model.store.global_step, result.num_steps
        if not taken:
            return
        if result.repeated_steps:  # the lost worker may have taken some of them; only the global step shows how many
            self._log.repeated(self._step, result.repeated_steps, (self._step - before) // self._advance - taken)
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
        self._setup.input.pipeline.stream.check()  # before a checkpoint holds what came of another order
        self._setup.model.show_weights()  # a hook may have loaded another checkpoint, to predict with it
        path = self._checkpoints.save(self, self._extra(), self._nan.accepts_values, asynchronous=asynchronous)
        if path is None:
            self._step = self._setup.model.store.global_step
            return str(self._checkpoints.latest)
        self._is_end_saved = self._setup.input.ended
        calls = self._after_save if not self._next.interrupted else ()
        with self._setup.program.kept_metrics.set_aside() if calls else contextlib.nullcontext():
            for call in calls:
                call(self)
        return path

    def _extra(self) -> dict[str, Any]:
        """Return the facts that a checkpoint of this step stores beside the variables."""
        train_input = self._setup.input
        # "evaluate": whether an undisturbed run evaluates at this step. Only then does a resumed run make up for a
        # missing evaluation.
        is_end = not self.interrupted or self._step >= self._target or train_input.ended
        is_evaluated = self._step > self._first_step and (self._saves_here or is_end)
        extra: dict[str, Any] = {"input": train_input.as_extra(), "evaluate": is_evaluated}
        extra["rollbacks"] = self._nan.rollbacks
        extra.update(self._facts())
        if self._setup.model.store.adapted:
            extra[ADAPTED] = self._setup.model.store.adapted
        if self._setup.program.averages and self._step:  # those of Keras are 0 before the first step
            extra[AVERAGES] = self._setup.program.averages
        return extra

    def _refuse_empty_input(self) -> None:
        """Raise EmptyInputError if no worker has read an example, and that is why no step was taken."""
        collectives, train_input = self._context.collectives, self._setup.input
        (empty,) = collectives.sum([float(train_input.is_empty)])
        if empty == collectives.num_workers and not self.interrupted:
            raise EmptyInputError(f"training: {why_empty(train_input.pipeline, ModeKeys.TRAIN, collectives)}")

    def _end(self) -> None:
        if self._step == self._first_step:
            # Before the checkpoint says that the data has ended: the same command then reads the mended input.
            self._refuse_empty_input()
            _log.warning("No step was taken: a hook stopped training at once, or the training input was at its end.")
        if self.ended_early is not None and self._context.is_chief:
            _log.warning("Stopped early: %s", self.ended_early)
        if self._setup.input.ended and not self._is_end_saved:
            # Write the same values again: the checkpoint must say that the data has ended.
            self._checkpoints.write(self._step, self._extra(), asynchronous=False, is_evaluated=True)
        self.wait_for_checkpoint()
        self._checkpoints.tell_listeners("end", self._step)
        if not self._setup.session_hooks.is_empty:
            self._setup.session_hooks.end()
            self._setup.model.values_of = None  # a hook's `end` may have assigned values that the last checkpoint lacks
        for hook in self._setup.hooks:
            hook.end(self)
