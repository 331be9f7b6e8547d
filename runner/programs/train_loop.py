"""The loop around a training step: many steps in one graph call, whose results the host reads at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.data.batch_groups import BatchGroups
from runner.data.inputs import InputPipeline
from runner.data.replica_batches import ReplicaBatch
from runner.tf_private import graphs
from runner.tracing import numeric_checks, xla


class Step(NamedTuple):
    """One step in a graph.

    Attributes:
      take: (batches of the replicas, number of examples, values of the placeholders) -> [loss, fetches...].
      specs: TensorSpecs of the result of `take`.
    """

    take: Callable[[Sequence[ReplicaBatch], tf.Tensor, Sequence[tf.Tensor]], list[tf.Tensor]]
    specs: Sequence[tf.TensorSpec]


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """The result of one call of a loop, as host values.

    Attributes:
      num_steps: number of steps taken; fewer than requested if the data ended or a loss was not finite.
      losses: floats `[num_steps]`.
      examples: number of examples of those steps, over all replicas of all workers.
      values: the other fetches, each `[num_steps, ...]`.
      data_ended: the input has no further element.
      records: for each step with summaries: (number of steps of this call before it, its other fetches).
      repeated_steps: number of steps that a coordinator requested again because a worker was lost.
    """

    num_steps: int
    losses: Any
    examples: int
    values: Any
    data_ended: bool
    repeated_steps: int = 0
    records: Sequence[tuple[int, Sequence[Any]]] = ()


class Schedule(NamedTuple):
    """The steps of one loop call that write summaries: `number` of them, equally spaced, the first after `first`."""

    first: int
    every: int
    number: int

    @property
    def places(self) -> Sequence[int]:
        """The numbers of steps before each of them."""
        return range(self.first, self.first + self.number * self.every, self.every)


NO_RECORDS = Schedule(0, 1, 0)

State = Sequence[Any]
"""(steps taken: int32, examples: int64, whether the loop goes on: bool, then what a part of the loop adds)."""


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
      recorded: a step with summaries; it returns the outputs of `step` first. None: no step writes summaries.
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
        self._step, self._recorded, self._pipeline = step, recorded, pipeline
        self._stop_at_nan, self._in_groups = stop_at_nan, in_groups
        self._num_shared = len(step.specs)
        # All iterations use the same key for a collective (TensorFlow 2.21). With train_op=, nothing in an iteration
        # waits for the previous one, so it could start the collective while it still runs; then workers hang.
        self._parallel_iterations = 1 if meets_others else 10
        self._bounded = tf.function(functools.partial(self._run, may_end=False), autograph=False)
        self._ending = tf.function(functools.partial(self._run, may_end=True), autograph=False)

    def __call__(
        self,
        iterator: Any,
        num_steps: int,
        *,
        may_end: bool,
        schedule: Schedule = NO_RECORDS,
        values: Sequence[tf.Tensor] = (),
    ) -> LoopResult:
        """Take up to `num_steps` steps.

        Args:
          iterator: iterator over the input.
          num_steps: the largest number of steps.
          may_end: the input may end before `num_steps`; checking for its end makes each step a little slower.
          schedule: the steps that write summaries, if the loop has such steps.
          values: values of the placeholders that the steps are fed.
        """
        run = self._ending if may_end and not self._in_groups else self._bounded  # groups always say where data ends
        try:
            with self._pipeline.reading(), graphs.optimised_once(), xla.explained(), numeric_checks.explained():
                result = run(iterator, tf.constant(num_steps), tf.constant(schedule), tuple(values))
        except tf.errors.OutOfRangeError:
            if not self._pipeline.division.ends_together:
                raise
            return LoopResult(0, np.zeros(0), 0, [], data_ended=True)  # no replica has any example
        taken, found = int(result["taken"]), [value.numpy() for value in result["stacked"]]
        losses, *steps = (value[:taken] for value in found[: self._num_shared])
        is_fine = not (self._stop_at_nan and taken and not np.isfinite(losses[-1]))
        data_ended = is_fine and not bool(result["goes_on"])
        if data_ended and self._in_groups and not may_end:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        records = [
            (place, [value[number] for value in found[self._num_shared :]])
            for number, place in enumerate(schedule.places)
            if place < taken
        ]
        return LoopResult(taken, losses, int(result["examples"]), steps, data_ended, records=records)

    def trace(self, iterator: Any) -> None:
        """Build the loop for iterators like this one, without taking a step."""
        self._bounded.get_concrete_function(iterator, tf.TensorSpec([], tf.int32), tf.TensorSpec([3], tf.int32), ())

    def prepare(self, iterator: Any) -> None:
        """Trace the loop and let TensorFlow optimize it, without taking a step or reading data."""
        self(iterator, 0, may_end=True)

    def _run(
        self, iterator: Any, num_steps: tf.Tensor, schedule: tf.Tensor, values: Sequence[tf.Tensor], *, may_end: bool
    ) -> dict[str, Any]:
        specs: Sequence[tf.TensorSpec] = self._step.specs
        state: State = (tf.constant(0), tf.constant(0, tf.int64), tf.constant(True))
        sizes, take = [num_steps] * len(specs), functools.partial(self._plain, values)
        if self._recorded is not None:
            first, every, number = tf.unstack(schedule)
            take = functools.partial(self._with_records, take, every)
            specs = self._recorded.specs
            sizes += [number] * (len(specs) - len(sizes))
            state = (*state, tf.where(number > 0, first, num_steps), tf.constant(0))
        num_before = len(state)
        empty = (
            tf.TensorArray(spec.dtype, size, element_shape=spec.shape) for spec, size in zip(specs, sizes, strict=True)
        )
        state = (*state, *empty)
        if self._in_groups:
            state = self._over_groups(iterator, num_steps, take, state)
        else:
            state = take(Source(lambda _: iterator, may_end), num_steps, state)
        taken, examples, goes_on, arrays = *state[:3], state[num_before:]
        counts = [taken] * self._num_shared + [state[num_before - 1]] * (len(specs) - self._num_shared)
        stacked = [_stacked(*each) for each in zip(arrays, specs, counts, strict=True)]
        return {"taken": taken, "examples": examples, "goes_on": goes_on, "stacked": stacked}

    def _over_groups(self, iterator: Any, num_steps: tf.Tensor, take: Callable[..., State], state: State) -> State:
        """Take the steps of all groups; `take` takes those of one group, called like `_plain`."""
        groups = BatchGroups(iterator, num_steps, self._pipeline.division.elements_per_step)

        def body(first: tf.Tensor, *state: Any) -> State:
            group = groups.get_next()
            source = Source(lambda taken: group.elements_of(taken - first), may_end=False)
            taken, examples, goes_on, *others = take(source, first + group.num_steps, (first, *state))
            return (taken, examples, goes_on & ~group.is_last, *others)

        return _while_before(num_steps, body, state)

    def _with_records(
        self, plain: Callable[..., State], every: tf.Tensor, source: Source, end: tf.Tensor, state: State
    ) -> State:
        """Take steps up to the step `end`, and those that are due with summaries.

        Args:
          plain: takes steps without summaries.
          every: number of steps from one with summaries to the next.
          source, end: as in `_plain`.
          state: as in `_plain`, with two more numbers before the arrays: of steps before the next one with summaries,
            and of those with summaries so far.
        """
        shared = self._num_shared

        def body(taken: tf.Tensor, examples: tf.Tensor, goes_on: tf.Tensor, *others: Any) -> State:
            due, number, *arrays = others
            before = plain(source, tf.minimum(due, end), (taken, examples, goes_on, *arrays[:shared]))

            def write(arrays: Sequence[Any], taken: tf.Tensor, outputs: Sequence[tf.Tensor]) -> list[Any]:
                own = _written(arrays[shared:], number, outputs[shared:])
                return [*_written(arrays[:shared], taken, outputs[:shared]), *own]

            def record() -> State:
                take = self._body(self._recorded, source, (), write)
                taken, examples, goes_on, *after = take(*before, *arrays[shared:])
                is_taken = taken - before[0]  # 0 if the data ended
                return (taken, examples, goes_on, due + every * is_taken, number + is_taken, *after)

            is_due = (before[0] == due) & (before[0] < end) & before[2]
            return tf.cond(is_due, record, lambda: (*before[:3], due, number, *before[3:], *arrays[shared:]))

        return _while_before(end, body, state)

    def _plain(self, values: Sequence[tf.Tensor], source: Source, end: tf.Tensor, state: State) -> State:
        """Take steps without summaries up to the step `end`, and return the state after them.

        Args:
          values: values of the placeholders that the steps are fed.
          source: the batches.
          end: number of steps of the loop after the last of them.
          state: (steps taken, examples, whether the loop goes on, *arrays of the outputs).
        """
        return _while_before(end, self._body(self._step, source, values, _written), state, self._parallel_iterations)

    def _body(
        self, step: Any, source: Source, values: Sequence[tf.Tensor], write: Callable[..., list[Any]]
    ) -> Callable[..., State]:
        """Return the body of a loop: one step on the next element; `write` puts its outputs into the arrays."""
        division = self._pipeline.division

        def body(taken: tf.Tensor, examples: tf.Tensor, goes_on: tf.Tensor, *arrays: Any) -> State:
            del goes_on
            iterator = source.elements_of(taken)

            def at_end() -> State:
                return (taken, examples, tf.constant(False), *arrays)

            def on(element: Any) -> State:
                batches, count = division.replica_batches(element, iterator)

                def take() -> State:
                    outputs = step.take(batches, count, values)
                    fine = tf.math.is_finite(outputs[0]) if self._stop_at_nan else tf.constant(True)
                    return (taken + 1, examples + count, fine, *write(arrays, taken, outputs))

                return tf.cond(count > 0, take, at_end) if division.ends_together else take()

            if not source.may_end or division.ends_together:
                return on(next(iterator))
            element = iterator.get_next_as_optional()
            return tf.cond(element.has_value(), lambda: on(element.get_value()), at_end)

        return body


class SplitLoop:
    """A loop whose last step is another one, which writes summaries or has fetches of hooks; called like `Loop`.

    The last step is taken in a call of its own. Used where one graph cannot hold both steps.

    Args:
      plain: returns the loop over the other steps.
      last: the loop over the last step; its outputs begin with those of `plain`.
      num_shared: number of the values that `plain` returns.
      stop_at_nan: the last step is not taken after a loss that is not finite.
    """

    def __init__(self, plain: Callable[[], Any], last: Any, num_shared: int, *, stop_at_nan: bool) -> None:
        self._plain, self._last, self._num_shared, self._stop_at_nan = plain, last, num_shared, stop_at_nan

    def __call__(
        self,
        iterator: Any,
        num_steps: int,
        *,
        may_end: bool,
        schedule: Schedule = NO_RECORDS,
        values: Sequence[tf.Tensor] = (),
    ) -> LoopResult:
        """Take up to `num_steps` steps; the last one is recorded, whatever `schedule` says."""
        parts: list[LoopResult] = []
        if num_steps > 1:
            parts.append(self._plain()(iterator, num_steps - 1, may_end=may_end))
            is_fine = not self._stop_at_nan or np.isfinite(parts[0].losses).all()
            if parts[0].num_steps < num_steps - 1 or not is_fine:
                return parts[0]
        last = self._last(iterator, min(num_steps, 1), may_end=may_end, values=values)
        shared, own = last.values[: self._num_shared], last.values[self._num_shared :]
        records = [(num_steps - 1, [value[0] for value in own])] if last.num_steps else []
        parts.append(dataclasses.replace(last, values=shared, records=records))
        taken = [part for part in parts if part.num_steps]
        return LoopResult(
            sum(part.num_steps for part in parts),
            np.concatenate([part.losses for part in parts]),
            sum(part.examples for part in parts),
            [np.concatenate(some) for some in zip(*(part.values for part in taken), strict=True)],
            last.data_ended,
            sum(part.repeated_steps for part in parts),
            records,
        )


def _while_before(end: tf.Tensor, body: Callable[..., State], state: State, parallel_iterations: int = 1) -> State:
    """Run `body` until `end` steps have been taken, or until the loop does not go on."""
    after: State = tf.while_loop(
        lambda taken, _, goes_on, *__: (taken < end) & goes_on, body, state, parallel_iterations=parallel_iterations
    )
    return after


def _written(arrays: Sequence[Any], taken: tf.Tensor, outputs: Sequence[tf.Tensor]) -> list[Any]:
    return [array.write(taken, value) for array, value in zip(arrays, outputs, strict=True)]


def _stacked(array: tf.TensorArray, spec: tf.TensorSpec, taken: tf.Tensor) -> tf.Tensor:
    """Return the values of the steps, `[steps, ...]`; an empty array if no step was taken."""
    if spec.shape.is_fully_defined():
        return array.stack()
    nothing = tf.zeros([0, *(size or 0 for size in spec.shape.as_list())] if spec.shape.rank else [0], spec.dtype)
    return tf.cond(taken > 0, array.stack, lambda: nothing)
