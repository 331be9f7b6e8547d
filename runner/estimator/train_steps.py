"""The steps of one training run: a loop of them at a time, and what hooks run on batches between two loops."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.batch_groups import are_small
from runner.data.wait_timer import WaitTimer
from runner.estimator.context import EstimatorContext
from runner.estimator.loop_boundary import LoopLength, Pace
from runner.estimator.nan_loss import NanPolicy
from runner.estimator.train_log import TrainLog
from runner.estimator.train_setup import TrainSetup
from runner.hooks.fetches import joined
from runner.hooks.hook import Every
from runner.programs.gradient_accumulation import explaining_memory
from runner.programs.train_loop import LoopResult, Steps
from runner.types import StepRequest, StepResult


class TrainSteps:
    """Takes the steps of one training run, and knows how far it is.

    Args:
      context: the Estimator's settings.
      setup: the training setup.
      log: gets the losses, metrics and summaries of each loop.
      nan: what is done about losses that are not finite.
      request_stop: called with the reason when the input has ended.

    Attributes:
      first_step, global_step: the global step before the first step, and now.
      advance: the number that a step adds to the global step; two optimizers that share it add 2.
      examples: number of examples that were read, over all replicas of all workers.
      fetched: the values of examples that native hooks fetch of the last step, in this process; None: none are
        due, on any worker.
    """

    def __init__(
        self,
        context: EstimatorContext,
        setup: TrainSetup,
        log: TrainLog,
        nan: NanPolicy,
        request_stop: Callable[[str], None],
    ) -> None:
        self._context = context
        self._setup = setup
        self._log = log
        self._nan = nan
        self._request_stop = request_stop
        self.first_step = setup.model.store.global_step
        self.global_step = self.first_step
        self.advance = 1
        self.examples = 0
        self.fetched: Mapping[str, np.ndarray] | None = None
        self._always_splits = False
        self._names: Sequence[str] = ()
        self._fetch_every = Every()
        # Only the chief measures the wait for input, because it decides the length of loops.
        is_timed = context.is_chief and setup.input.pipeline.is_timeable and setup.program.loops_in_graph
        steps_per_loop = 1 if nan.needs_single_steps else setup.config.steps_per_loop
        self._pace = Pace(LoopLength(steps_per_loop), self._can_group, WaitTimer(is_on=is_timed))

    def begin(self, names: Sequence[str]) -> None:
        """Agree with the other workers on the kind of loops. All workers must call this together, before the first.

        Args:
          names: what native hooks fetch of each example, the same on all workers.
        """
        self._names = names
        if names:
            self._fetch_every = Every(self._setup.config.log_step_count_steps or None)
        # If the chief has session hooks, they split the loops of all workers, because all must run the same functions.
        collectives = self._context.collectives
        if collectives.num_workers > 1:
            self._always_splits = collectives.any(not self._setup.session_hooks.is_empty)

    def steps_until_due(self, step: int) -> float:
        """Return the number of steps from global step `step` to the next of which native hooks fetch values."""
        return self._fetch_every.steps_until_due(step)

    @property
    def records_in_loops(self) -> bool:
        """Report whether loops continue through steps with summaries.

        They do if no hook fetches of a step, and each step adds one to the global step.
        """
        have_fetches = bool(self._names) or not self._setup.session_hooks.is_empty
        if have_fetches or self.advance != 1:
            return False
        return self._setup.program.records_in_loops and self._log.has_summaries

    @property
    def secs(self) -> float:
        """Seconds in loops, without saves and evaluations."""
        return self._pace.secs

    @property
    def steps_per_sec(self) -> float:
        """As `TrainingRun.steps_per_sec`."""
        steps = self.global_step - self.first_step
        secs = self._pace.secs
        later_steps = steps - self._pace.first_steps * self.advance
        if later_steps > 0:
            steps = later_steps
            secs = secs - self._pace.first_secs
        return steps / secs if secs else 0.0

    @property
    def input_bound(self) -> float | None:
        """As `TrainingRun.input_bound`."""
        return self._pace.wait.share

    def number_until(self, distance: float) -> int:
        """Return the number of steps of the next loop, which reaches a global step `distance` from here at most."""
        # Rounded up: the loop must reach what is due there.
        return self._pace.num_steps(-(-distance // self.advance))

    def locate(self) -> None:
        """Read the global step: variables were restored."""
        self.global_step = self._setup.model.store.global_step

    def take(self, num_steps: int, target: float) -> StepResult:
        """Take at most `num_steps` steps in one loop, log them, and tell session hooks what its last step fetched.

        Args:
          num_steps: the largest number of steps.
          target: the global step at which training ends.

        Raises:
          ValueError: the steps did not advance the global step.
          NanLossError: the gradients are not finite with any loss scale.
        """
        model = self._setup.model
        program = self._setup.program
        train_input = self._setup.input
        session_hooks = self._setup.session_hooks
        started = time.perf_counter()
        before = self.global_step
        model.show_weights()  # an evaluation may have loaded other values, and hooks look at variables
        request = StepRequest()  # stays empty if a hook asks for a batch after the last one
        with self._data_may_end():
            request = session_hooks.request(before + num_steps * self.advance)
        if train_input.ended and not request:
            num_steps = 0  # a hook asked for a batch after the last one, so no step is taken
        if self._fetch_every.due(before, before + num_steps * self.advance):
            request = dataclasses.replace(request, names=self._names)
        plan = self._pace.next_loop(num_steps, min(target - before, train_input.remaining_steps))
        schedule = self._log.schedule(before, num_steps, self.advance, in_loops=self.records_in_loops)
        records_summaries = self.records_in_loops or schedule.number > 0
        loop = model.training_loop(
            program, request, records=records_summaries, in_groups=plan.in_groups, splits=self._always_splits
        )
        iterator = train_input.iterator
        if plan.is_sampled:
            iterator = self._pace.wait.timed(iterator)
        steps = Steps(num_steps, train_input.may_end_within(num_steps), schedule, request.values)
        taken = self._run_loop(loop, iterator, steps)
        self._note_read(taken)
        losses: Sequence[float] = taken.losses
        if program.has_local_losses:
            losses = self._context.collectives.sum(losses)
        self._note_taken(taken)
        result = StepResult(
            first_step=before + 1,
            last_step=self.global_step,
            losses=np.asarray(losses, taken.losses.dtype),  # the sum over workers is in float64
            examples=int(taken.examples.sum()),
            secs=time.perf_counter() - started,
        )
        logs_speed, share = self._pace.took(plan, taken.num_steps, result.secs)
        self.fetched = None
        for index_in_loop, outputs in taken.records:
            if records_summaries:
                self._log.summaries(outputs, before + (index_in_loop + 1) * self.advance)
            if request.names:
                # The number of examples of each local replica; then all names' values on the first replica, and so on.
                counts, *values = outputs["examples"]
                self.fetched = joined(request.names, counts.tolist(), values)
            if request.fetches:
                with self._data_may_end():
                    session_hooks.after_run(outputs.get("fetches", ()))
        if taken.num_steps:
            self._log.log_loop(result, taken, logs_speed=logs_speed)
        if share is not None:
            self._context.journal.metrics(self.global_step, {"train/input_bound": share})
        return result

    def take_batch(self, request: StepRequest) -> Sequence[Any]:
        """Run what a hook requests on the next batch, which is no step, and return the values.

        Raises:
          tf.errors.OutOfRangeError: there is no further batch; a session would raise the same.
        """
        loop = self._setup.model.part_of_step(self._setup.program, request)
        train_input = self._setup.input
        while True:
            result = loop(train_input.iterator, Steps(1, train_input.may_end_within(1), values=request.values))
            self._note_read(result)
            if result.num_steps:
                return [value[-1] for value in result.values["fetches"]]
            if train_input.ended:
                raise tf.errors.OutOfRangeError(None, None, "the training input has ended, but a hook asks for a batch")

    def _run_loop(self, loop: Callable[..., LoopResult], iterator: Any, steps: Steps) -> LoopResult:
        """Run a loop of steps. If it runs out of memory, its error says what may help."""
        config = self._setup.config
        taken = (self.global_step - self.first_step) // self.advance
        examples_of_replica = self.examples / max(1, taken) / config.num_replicas_in_sync
        with explaining_memory(config, self._setup.program.spec, self._setup.input, examples_of_replica):
            return loop(iterator, steps)

    def _can_group(self) -> bool:
        """Report whether loops may read batches in groups. If so, build such a loop, to make its first use fast."""
        program = self._setup.program
        pipeline = self._setup.input.pipeline
        num_elements = (self.global_step - self.first_step) // self.advance * pipeline.division.elements_per_step
        examples_per_element = self.examples / max(1, num_elements)
        if self._nan.needs_position_after_bad_batch or not program.can_group:
            return False
        if not are_small(pipeline.element_spec, examples_per_element) or not pipeline.may_read_ahead:
            return False
        program.loop(records=self.records_in_loops, in_groups=True).prepare(self._setup.input.iterator)
        return True

    @contextlib.contextmanager
    def _data_may_end(self) -> Iterator[None]:
        """End training if a hook asks for a batch after the last one, as tf.estimator does."""
        try:
            yield
        except tf.errors.OutOfRangeError:
            if not self._setup.input.ended:
                raise

    def _note_read(self, result: LoopResult) -> None:
        """Note what a loop has read of the input."""
        examples = int(result.examples.sum())
        has_ended = self._setup.input.advance(result.num_steps, examples, result.data_ended, result.repeated_steps)
        if has_ended:
            self._request_stop("the training input ended")
        self.examples += examples

    def _note_taken(self, result: LoopResult) -> None:
        """Read the global step after a loop, and compute the number that a step adds to it."""
        before = self.global_step
        taken = result.num_steps
        self.locate()
        if not taken:
            return
        if result.repeated_steps:
            # The lost worker may have taken some of the repeated steps before. Only the global step shows how many.
            num_taken_twice = (self.global_step - before) // self.advance - taken
            self._log.repeated(self.global_step, result.repeated_steps, num_taken_twice)
            return
        self.advance = max(1, (self.global_step - before) // taken)
        if self.global_step == before and self._setup.program.loss_scale is not None:
            self._nan.check_loss_scale(self.global_step)
        elif self.global_step == before:
            raise ValueError(
                f"{taken} steps left global_step at {self.global_step}. train_op must advance it: "
                "optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())."
            )
