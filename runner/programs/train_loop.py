"""The loop around a training step: many steps in one graph call, whose results the host reads at once."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.data.batch_groups import BatchGroups
from runner.data.inputs import InputPipeline
from runner.data.replica_batches import PerWorker, ReplicaBatch
from runner.tf_private import graphs
from runner.tracing import numeric_checks, xla

Outputs = Mapping[str, Any]
"""What a step returns: `loss`, `metrics` if there are any; `scalars`, `protos` and `images` of a step with summaries;
`fetches` of session hooks, `examples` that native hooks fetch, and TIMES. Each is a tensor or a list of tensors; a name
without any is left out."""


TIMES = "times"
"""The output of a step of several processes that says what this process did without the others: four moments, in
seconds since the epoch.

  asked: the loop asked for the next batch.
  received: the batches of this process were there.
  counted: the number of examples of the global batch was known, for which a worker may have to wait for the others.
  sent: all was computed that the first collectives of the step send.

A step itself returns only `sent`, a scalar; the loop adds the others before it.
"""

TIMES_SPEC = tf.TensorSpec([4], tf.float64)


def own_secs(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (seconds for which this process waited for its input, seconds for which it computed up to its first
    collectives), float64 `[steps]` each.

    Args:
      moments: TIMES of the steps, float64 `[steps, 4]`. They are subtracted here and not in the graph, where each
        operation adds to the time of a tiny step.
    """
    asked, received, counted, sent = moments.T
    return received - asked, sent - counted


class Step(NamedTuple):
    """One step in a graph.

    Attributes:
      take: (batches of the replicas, number of examples, values of the placeholders) -> outputs.
      specs: TensorSpecs of the outputs.
    """

    take: Callable[[Sequence[ReplicaBatch], tf.Tensor, Sequence[tf.Tensor]], Outputs]
    specs: Outputs


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """The result of one call of a loop, as host values.

    Attributes:
      num_steps: number of steps taken; fewer than requested if the data ended or a loss was not finite.
      losses: floats `[num_steps]`.
      examples: int64 `[num_steps]`, number of examples of each step, over all replicas of all workers.
      values: the other outputs that each step has, `[num_steps, ...]`.
      data_ended: the input has no further element.
      records: for each step with summaries or fetches: (number of steps of this call before it, those outputs).
      repeated_steps: number of steps that a coordinator requested again because a worker was lost.
      steps_of_workers: index of a worker -> number of these steps that it took for a coordinator, as far as known.
    """

    num_steps: int
    losses: Any
    examples: np.ndarray
    values: Outputs
    data_ended: bool
    repeated_steps: int = 0
    records: Sequence[tuple[int, Outputs]] = ()
    steps_of_workers: Mapping[int, int] = dataclasses.field(default_factory=dict)


class Schedule(NamedTuple):
    """The steps of one loop call that write summaries: `number` of them, equally spaced, the first after `first`."""

    first: int
    every: int
    number: int

    @property
    def places(self) -> Sequence[int]:
        """The number of steps of the loop call before each of these steps."""
        return range(self.first, self.first + self.number * self.every, self.every)


NO_RECORDS = Schedule(0, 1, 0)


class Steps(NamedTuple):
    """The steps that one call of a loop takes.

    Attributes:
      number: the largest number of steps.
      may_end: the input may end before; checking for its end makes each step a little slower.
      schedule: the steps that write summaries, if the loop has such steps.
      values: values of the placeholders that the steps are fed.
    """

    number: int
    may_end: bool
    schedule: Schedule = NO_RECORDS
    values: Sequence[tf.Tensor] = ()


State = Sequence[Any]
"""(steps taken: int32 scalar, whether the loop goes on: bool scalar, arrays of the outputs of each step; then, in a
loop with summaries, what `_take_with_records` adds).
"""

NUM_EXAMPLES = tf.TensorSpec([], tf.int64)
"""The spec of a step's number of examples, which a loop returns beside the outputs of the step, as `num_examples`."""


class Source(NamedTuple):
    """The batches of some steps.

    Attributes:
      elements_of: returns an iterator over the elements of a step, given the number of steps before it in the loop.
      may_end: the iterator may end before the last of these steps.
    """

    elements_of: Callable[[tf.Tensor], Any]
    may_end: bool


class Loop:
    """`for _ in range(n)` around a training step inside one graph; the host reads the results once.

    It is composed of one to three loops, one inside the other:

        for each group of batches:                      if `in_groups`
            for each step with summaries in the group:  if `recorded`
                for each step before it: step
                recorded

    A separate graph call for a step with summaries, with a read by the host before and after it, took 3.7 ms. Groups
    are for steps that are shorter than the wait for one batch; see `BatchGroups`. A loop with groups takes the same
    steps, and reads only batches on which it takes a step, with two exceptions. After a loss that is not finite,
    further batches may have been read. And if a batch cannot be read, no step is taken on any batch of its group. The
    run fails in both cases.

    Args:
      step: the step.
      pipeline: the training input.
      stop_at_nan: end after the first step whose loss is not finite.
      recorded: a step with summaries, which has the outputs of `step` and more. None: no step writes summaries.
      in_groups: read batches in groups; only if all replicas belong to one process and the data does not depend on the
        steps.
      meets_others: the step has collectives with other processes.
    """

    def __init__(
        self,
        step: Step,
        pipeline: InputPipeline,
        *,
        stop_at_nan: bool,
        recorded: Step | None = None,
        in_groups: bool = False,
        meets_others: bool = False,
    ) -> None:
        self._step = step
        self._recorded = recorded
        self._pipeline = pipeline
        self._stop_at_nan = stop_at_nan
        self._in_groups = in_groups
        self._is_timed = TIMES in step.specs
        # All iterations use the same key for a collective (TensorFlow 2.21). With train_op=, nothing in an iteration
        # waits for the previous one, so it could start the collective while it still runs; then workers hang.
        self._parallel_iterations = 1 if meets_others else 10
        # Two graph functions: without and with a check for the end of the input before each step. See Steps.may_end.
        self._bounded = tf.function(functools.partial(self._run, may_end=False), autograph=False)
        self._ending = tf.function(functools.partial(self._run, may_end=True), autograph=False)

    def __call__(self, iterator: Any, plan: Steps) -> LoopResult:
        """Take the steps of `plan`, on the batches of an iterator over the input."""
        # A loop over groups always notices the end of the data, so it has no slower variant.
        run = self._ending if plan.may_end and not self._in_groups else self._bounded
        try:
            with self._pipeline.reading(), graphs.optimised_once(), xla.explained(), numeric_checks.explained():
                result = run(iterator, tf.constant(plan.number), tf.constant(plan.schedule), tuple(plan.values))
        except tf.errors.OutOfRangeError:
            if not self._pipeline.division.ends_together:
                raise
            return LoopResult(0, np.zeros(0), np.zeros(0, np.int64), {}, data_ended=True)  # no replica has any example
        taken = int(result["taken"])
        steps = tf.nest.map_structure(lambda value: value.numpy()[:taken], result["steps"])
        recorded = tf.nest.map_structure(lambda value: value.numpy(), result["records"])
        losses = steps.pop("loss")
        # The loop also ends at a loss that is not finite, which is not the end of the data.
        is_at_nan = self._stop_at_nan and taken > 0 and not np.isfinite(losses[-1])
        data_ended = not is_at_nan and not bool(result["goes_on"])
        # Without groups, `next(iterator)` in the graph raises the same.
        if data_ended and self._in_groups and not plan.may_end:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        records: list[tuple[int, Outputs]] = []
        for number, place in enumerate(plan.schedule.places):
            if place < taken:
                records.append((place, tf.nest.map_structure(operator.itemgetter(number), recorded)))
        return LoopResult(taken, losses, steps.pop("num_examples"), steps, data_ended, records=records)

    def prepare(self, iterator: Any) -> None:
        """Trace the loop and let TensorFlow optimize it, without taking a step or reading data."""
        self(iterator, Steps(0, may_end=True))

    def _run(
        self, iterator: Any, num_steps: tf.Tensor, schedule: tf.Tensor, values: Sequence[tf.Tensor], *, may_end: bool
    ) -> dict[str, Any]:
        """Take up to `num_steps` steps, in the graph.

        Args:
          iterator: iterator over the elements of the input.
          num_steps: int32 scalar.
          schedule: int32 `[3]`, the members of a Schedule.
          values: values of the placeholders that the steps are fed.
          may_end: the input may end before the last step.

        Returns:
          `taken` and `goes_on` as in State; `steps`: name -> output of each step, `[num_steps, ...]`; `records`: name
          -> output of each step with summaries, of those that the other steps do not have.
        """
        steps = {**self._step.specs, "num_examples": NUM_EXAMPLES}
        record_specs: Outputs = {}
        state: State = (tf.constant(0), tf.constant(True), empty_arrays(steps, num_steps))
        take: Callable[..., State] = functools.partial(self._take_plain, values)
        if self._recorded is not None:
            first, every, num_records = tf.unstack(schedule)
            take = functools.partial(self._take_with_records, take, every)
            record_specs = {name: spec for name, spec in self._recorded.specs.items() if name not in steps}
            # Without a step with summaries, the next one is due after the last step.
            next_record = tf.where(num_records > 0, first, num_steps)
            state = (*state, next_record, tf.constant(0), empty_arrays(record_specs, num_records))
        if self._in_groups:
            state = self._take_groups(iterator, num_steps, take, state)
        else:
            state = take(Source(lambda _: iterator, may_end), num_steps, state)
        taken, goes_on, arrays, *record_state = state
        stacked = _stack(arrays, steps, taken)
        records: Outputs = {}
        if self._recorded is not None:
            _, num_records, record_arrays = record_state
            records = _stack(record_arrays, record_specs, num_records)
        return {"taken": taken, "goes_on": goes_on, "steps": stacked, "records": records}

    def _take_groups(self, iterator: Any, num_steps: tf.Tensor, take: Callable[..., State], state: State) -> State:
        """Take the steps of all groups; `take` takes those of one group, called like `_take_plain`."""
        groups = BatchGroups(iterator, num_steps, self._pipeline.division.elements_per_step)

        def body(first: tf.Tensor, *state: Any) -> State:
            group = groups.get_next()
            source = Source(lambda taken: group.elements_of(taken - first), may_end=False)
            taken, goes_on, *others = take(source, first + group.num_steps, (first, *state))
            return (taken, goes_on & ~group.is_last, *others)

        return _while_before(num_steps, body, state)

    def _take_with_records(
        self, plain: Callable[..., State], every: tf.Tensor, source: Source, end: tf.Tensor, state: State
    ) -> State:
        """Take steps up to the step `end`, and those that are due with summaries.

        Args:
          plain: takes steps without summaries.
          every: number of steps from one with summaries to the next.
          source, end: as in `_take_plain`.
          state: as in `_take_plain`, and then: number of steps before the next step with summaries, number of steps
            with summaries so far, arrays of the outputs that only steps with summaries have.
        """

        def body(*state: Any) -> State:
            *plain_state, next_record, num_records, record_arrays = state
            before = plain(source, tf.minimum(next_record, end), plain_state)

            def record() -> State:
                take = self._build_body(self._recorded, source, (), num_records)
                *plain_after, record_arrays_after = take(*before, record_arrays)
                is_taken = plain_after[0] - before[0]  # 0 if the data ended
                return (*plain_after, next_record + every * is_taken, num_records + is_taken, record_arrays_after)

            taken, goes_on, _ = before
            is_record_next = (taken == next_record) & (taken < end) & goes_on
            return tf.cond(is_record_next, record, lambda: (*before, next_record, num_records, record_arrays))

        return _while_before(end, body, state)

    def _take_plain(self, values: Sequence[tf.Tensor], source: Source, end: tf.Tensor, state: State) -> State:
        """Take steps without summaries up to the step `end`, and return the state after them.

        Args:
          values: values of the placeholders that the steps are fed.
          source: the batches.
          end: number of steps of the loop after the last of them.
          state: (steps taken, whether the loop goes on, arrays of the outputs).
        """
        return _while_before(end, self._build_body(self._step, source, values), state, self._parallel_iterations)

    def _build_body(
        self, step: Any, source: Source, values: Sequence[tf.Tensor], *places: tf.Tensor
    ) -> Callable[..., State]:
        """Return the body of a loop: one step on the next element.

        The body gets (steps taken, whether the loop goes on, arrays of the outputs of each step, further arrays). It
        writes the step's outputs into the first arrays at the number of steps taken, and into further arrays at
        `places`, one place for each.
        """
        division = self._pipeline.division

        def body(taken: tf.Tensor, goes_on: tf.Tensor, *arrays: Any) -> State:
            del goes_on
            iterator = source.elements_of(taken)
            # The moments of TIMES, as lists of one tensor, or of none if the step is not timed. Nothing but timestamps
            # is added to the step, and no number depends on one.
            asked: list[tf.Tensor] = []
            if self._is_timed:
                asked.append(tf.timestamp())

            def at_end() -> State:
                return (taken, tf.constant(False), *arrays)

            def step_on(element: Any) -> State:
                """Take the step. With `ends_together`, one without any example is the end of the data and not taken."""
                # Once in a loop: in each step of a tiny model it took 4 % of the time.
                self._pipeline.stream.remember(element, when=taken == 0)
                batches, count = division.replica_batches(element, iterator)
                received: list[tf.Tensor] = []
                counted: list[tf.Tensor] = []
                if self._is_timed:
                    received.append(now_after(batches))
                    # With `PerWorker` the count is a sum over the workers, which waits for the input of all of them.
                    counted = [now_after(count)] if isinstance(division, PerWorker) else received

                def take() -> State:
                    # TensorFlow 2.21 runs operations that are ready at the same time in several threads: if the step
                    # did not wait for this timestamp, a step of a tiny model would take 2 % more CPU time.
                    with tf.control_dependencies(received):
                        outputs = {**step.take(batches, count, values), "num_examples": count}
                    if self._is_timed:
                        outputs[TIMES] = tf.stack([*asked, *received, *counted, outputs[TIMES]])
                    is_fine = tf.math.is_finite(outputs["loss"]) if self._stop_at_nan else tf.constant(True)
                    written: list[Outputs] = []
                    for place, arrays_there in zip((taken, *places), arrays, strict=True):
                        written.append(written_at(place, arrays_there, outputs))
                    return (taken + 1, is_fine, *written)

                if division.ends_together:
                    return tf.cond(count > 0, take, at_end)
                return take()

            if not source.may_end or division.ends_together:
                with tf.control_dependencies(asked):
                    element = next(iterator)
                return step_on(element)
            with tf.control_dependencies(asked):
                element = iterator.get_next_as_optional()
            return tf.cond(element.has_value(), lambda: step_on(element.get_value()), at_end)

        return body


_OF_EACH_STEP = ("metrics", TIMES)
"""Outputs that each step has, with or without summaries and fetches."""


class SplitLoop:
    """A loop whose last step is another one, which writes summaries or has fetches of hooks; called like `Loop`.

    The last step is taken in a call of its own. Used where one graph cannot hold both steps.

    Args:
      plain: returns the loop over the other steps.
      last: the loop over the last step.
      stop_at_nan: the last step is not taken after a loss that is not finite.
    """

    def __init__(self, plain: Callable[[], Any], last: Any, *, stop_at_nan: bool) -> None:
        self._plain = plain
        self._last = last
        self._stop_at_nan = stop_at_nan

    def __call__(self, iterator: Any, plan: Steps) -> LoopResult:
        """Take the steps of `plan`; the last one is recorded, whatever their schedule says."""
        parts: list[LoopResult] = []  # of the steps before the last one, if there are any, and of the last one
        num_before = plan.number - 1
        if num_before > 0:
            parts.append(self._plain()(iterator, Steps(num_before, plan.may_end)))
            is_fine = not self._stop_at_nan or np.isfinite(parts[0].losses).all()
            if parts[0].num_steps < num_before or not is_fine:
                return parts[0]
        last = self._last(iterator, plan._replace(number=min(plan.number, 1)))
        parts.append(last)
        records: list[tuple[int, Outputs]] = []
        if last.num_steps:
            recorded = {name: value for name, value in last.values.items() if name not in _OF_EACH_STEP}
            records.append((num_before, tf.nest.map_structure(operator.itemgetter(0), recorded)))
        values: dict[str, Any] = {}
        for name in _OF_EACH_STEP:
            # A part without steps may lack outputs that the other part has.
            found = [part.values[name] for part in parts if part.num_steps and name in part.values]
            if found:
                values[name] = np.concatenate(found)
        losses = np.concatenate([part.losses for part in parts])
        examples = np.concatenate([part.examples for part in parts])
        num_steps = sum(part.num_steps for part in parts)
        repeated_steps = sum(part.repeated_steps for part in parts)
        return LoopResult(num_steps, losses, examples, values, last.data_ended, repeated_steps, records)


def now_after(values: Any) -> tf.Tensor:
    """Return the time at which all of `values` are there, in the graph: float64 scalar, seconds."""
    tensors = [value for value in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(value)]
    with tf.control_dependencies(tensors):
        return tf.timestamp()


def _while_before(end: tf.Tensor, body: Callable[..., State], state: State, parallel_iterations: int = 1) -> State:
    """Run `body` until `end` steps have been taken, or until the loop does not go on."""
    after: State = tf.while_loop(
        lambda taken, goes_on, *_: (taken < end) & goes_on, body, state, parallel_iterations=parallel_iterations
    )
    return after


def empty_arrays(specs: Outputs, size: tf.Tensor) -> Outputs:
    """Return an array for each output."""
    return tf.nest.map_structure(lambda spec: tf.TensorArray(spec.dtype, size, element_shape=spec.shape), specs)


def written_at(place: tf.Tensor, arrays: Outputs, outputs: Outputs) -> Outputs:
    """Return the arrays after those outputs that they are for have been written to `place`."""
    chosen = {name: outputs[name] for name in arrays}
    return tf.nest.map_structure(lambda array, value: array.write(place, value), arrays, chosen)


def _stack(arrays: Outputs, specs: Outputs, taken: tf.Tensor) -> Outputs:
    """Return the outputs of the steps, `[steps, ...]`; empty if no step was taken."""

    def stack(array: tf.TensorArray, spec: tf.TensorSpec) -> tf.Tensor:
        if spec.shape.is_fully_defined():
            return array.stack()
        # TensorFlow cannot stack an array without elements if their shape is not fully known.
        shape = [0]
        if spec.shape.rank is not None:
            shape += [size or 0 for size in spec.shape.as_list()]  # 0 in place of a size that is not known
        nothing = tf.zeros(shape, spec.dtype)
        return tf.cond(taken > 0, array.stack, lambda: nothing)

    return tf.nest.map_structure(stack, arrays, specs)
