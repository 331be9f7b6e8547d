"""The loop around a training step: many steps in one graph call, whose results the host reads at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.data.batch_groups import BatchGroups, Group
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


class Loop:
    """`for _ in range(n)` around a training step inside one graph; the host reads the results once.

    Args:
      step: the step.
      pipeline: the training input.
      stop_at_nan: end after the first step whose loss is not finite.
      meets_others: the step has collectives with other processes.
    """

    def __init__(self, step: Step, pipeline: InputPipeline, *, stop_at_nan: bool, meets_others: bool) -> None:
        self._step, self._pipeline, self._stop_at_nan = step, pipeline, stop_at_nan
        # All iterations use the same key for a collective (TensorFlow 2.21). With train_op=, nothing in an iteration
        # waits for the previous one, so it could start the collective while it still runs; then workers hang.
        self._parallel_iterations = 1 if meets_others else 10
        self._bounded = tf.function(functools.partial(self._run, ends=False), autograph=False)
        self._ending = tf.function(functools.partial(self._run, ends=True), autograph=False)

    def __call__(self, iterator: Any, num_steps: int, *, may_end: bool, values: Sequence[tf.Tensor] = ()) -> LoopResult:
        """Take up to `num_steps` steps.

        Args:
          iterator: iterator over the input.
          num_steps: the largest number of steps.
          may_end: the input may end before `num_steps`; checking for its end makes each step a little slower.
          values: values of the placeholders that the steps are fed.
        """
        run = self._ending if may_end else self._bounded
        try:
            with self._pipeline.reading(), graphs.optimised_once(), xla.explained(), numeric_checks.explained():
                result = run(iterator, tf.constant(num_steps), tuple(values))
        except tf.errors.OutOfRangeError:
            if not self._pipeline.division.ends_together:
                raise
            return LoopResult(0, np.zeros(0), 0, [], data_ended=True)  # no replica has any example
        taken = int(result["taken"])
        losses, *values = (value.numpy()[:taken] for value in result["stacked"])
        return LoopResult(taken, losses, int(result["examples"]), values, data_ended=bool(result["ended"]))

    def trace(self, iterator: Any) -> None:
        """Build the loop for iterators like this one, without taking a step."""
        self._bounded.get_concrete_function(iterator, tf.TensorSpec([], tf.int32), ())

    def _run(self, iterator: Any, num_steps: tf.Tensor, values: Sequence[tf.Tensor], *, ends: bool) -> dict[str, Any]:
        taken, examples, ended, _, *arrays = tf.while_loop(
            functools.partial(_running, num_steps),
            self._body(self._step, iterator, values, _written, ends=ends),
            (*_start(), *_arrays(self._step.specs, num_steps)),
            parallel_iterations=self._parallel_iterations,
        )
        stacked = [_stacked(array, spec, taken) for array, spec in zip(arrays, self._step.specs, strict=True)]
        return {"taken": taken, "examples": examples, "ended": ended, "stacked": stacked}

    def _body(
        self,
        taken_step: Step,
        iterator: Any,
        values: Sequence[tf.Tensor],
        write: Callable[..., list[Any]],
        *,
        ends: bool,
    ) -> Callable[..., Any]:
        """Return the body of a loop: one step on the next element; `write` puts its outputs into the arrays."""

        def at_end(taken: tf.Tensor, examples: tf.Tensor, fine: tf.Tensor, arrays: Sequence[Any]) -> Any:
            return (taken, examples, tf.constant(True), fine, *arrays)

        def step(element: Any, taken: tf.Tensor, examples: tf.Tensor, fine: tf.Tensor, arrays: Sequence[Any]) -> Any:
            batches, count = self._pipeline.division.replica_batches(element, iterator)

            def take() -> Any:
                outputs = taken_step.take(batches, count, values)
                fine = tf.math.is_finite(outputs[0]) if self._stop_at_nan else tf.constant(True)
                written = write(arrays, taken, outputs)
                return (taken + 1, examples + count, tf.constant(False), fine, *written)

            if not self._pipeline.division.ends_together:
                return take()
            return tf.cond(count > 0, take, lambda: at_end(taken, examples, fine, arrays))

        def body(taken: tf.Tensor, examples: tf.Tensor, _: tf.Tensor, fine: tf.Tensor, *arrays: Any) -> Any:
            if not ends or self._pipeline.division.ends_together:
                return step(next(iterator), taken, examples, fine, arrays)
            element = iterator.get_next_as_optional()
            return tf.cond(
                element.has_value(),
                lambda: step(element.get_value(), taken, examples, fine, arrays),
                lambda: at_end(taken, examples, fine, arrays),
            )

        return body


class RecordingLoop(Loop):
    """A loop in which some steps write summaries: an outer loop over these steps, with inner loops over the steps
    between.

    A separate graph call for a step with summaries, with a read by the host before and after it, took 3.7 ms.

    Args:
      step: a step without summaries.
      recorded: a step with summaries; it returns the outputs of `step` first.
      pipeline, stop_at_nan: as in Loop.
    """

    def __init__(self, step: Step, recorded: Step, pipeline: InputPipeline, *, stop_at_nan: bool) -> None:
        super().__init__(step, pipeline, stop_at_nan=stop_at_nan, meets_others=False)
        self._recorded = recorded
        self._num_shared = len(step.specs)

    def take(self, iterator: Any, num_steps: int, schedule: Schedule, *, may_end: bool) -> LoopResult:
        """Take up to `num_steps` steps, of which those in `schedule` write summaries."""
        result = self(iterator, num_steps, may_end=may_end, values=[tf.constant(schedule)])
        values, found = result.values[: self._num_shared - 1], result.values[self._num_shared - 1 :]  # no losses
        places = [schedule.first + number * schedule.every for number in range(schedule.number)]
        records = [
            (place, [value[number] for value in found])
            for number, place in enumerate(places)
            if place < result.num_steps
        ]
        return dataclasses.replace(result, values=values, records=records)

    def _run(self, iterator: Any, num_steps: tf.Tensor, values: Sequence[tf.Tensor], *, ends: bool) -> dict[str, Any]:
        every, due, arrays = self._start_of(values[0], num_steps)
        is_running = functools.partial(_running, num_steps)

        def body(due: tf.Tensor, number: tf.Tensor, *state: Any) -> Any:
            plain, others = state[: 4 + self._num_shared], state[4 + self._num_shared :]
            plain = tf.while_loop(
                lambda taken, *rest: is_running(taken, *rest) & (taken < due),
                self._body(self._step, iterator, (), _written, ends=ends),
                plain,
                parallel_iterations=self._parallel_iterations,
            )
            record = self._body(self._recorded, iterator, (), self._writer_of(number), ends=ends)
            state = tf.cond(is_running(*plain), lambda: record(*plain, *others), lambda: (*plain, *others))
            return (due + every, number + 1, *state)

        _, _, taken, examples, ended, _, *arrays = tf.while_loop(
            lambda due, number, *state: is_running(*state),
            body,
            (due, tf.constant(0), *_start(), *arrays),
            parallel_iterations=1,
        )
        return {"taken": taken, "examples": examples, "ended": ended, "stacked": [array.stack() for array in arrays]}

    def _start_of(self, schedule: tf.Tensor, num_steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Sequence[Any]]:
        """Return (steps between two steps with summaries, number of steps before the first of them, empty arrays)."""
        first, every, count = tf.unstack(schedule, 3)
        arrays = _arrays(self._step.specs, num_steps) + _arrays(self._recorded.specs[self._num_shared :], count)
        return every, tf.where(count > 0, first, num_steps), arrays

    def _writer_of(self, number: tf.Tensor) -> Callable[..., list[Any]]:
        """Return a function that writes the outputs of a step with summaries; these steps are numbered from 0."""

        def write(arrays: Sequence[Any], taken: tf.Tensor, outputs: Sequence[tf.Tensor]) -> list[Any]:
            shared = self._num_shared
            others = _written(arrays[shared:], number, outputs[shared:])
            return [*_written(arrays[:shared], taken, outputs[:shared]), *others]

        return write


class GroupedLoop(Loop):
    """A loop that reads batches in groups, for steps that are shorter than the wait for one batch; see `BatchGroups`.

    It takes the same steps as Loop, and reads only batches on which it takes a step, with two exceptions. After a loss
    that is not finite, further batches may have been read. And if a batch cannot be read, no step is taken on any batch
    of its group. The run fails in both cases.

    Use it only if all replicas belong to one process and the data does not depend on the steps.
    """

    def __init__(self, step: Step, pipeline: InputPipeline, *, stop_at_nan: bool) -> None:
        super().__init__(step, pipeline, stop_at_nan=stop_at_nan, meets_others=False)

    def __call__(self, iterator: Any, num_steps: int, *, may_end: bool, values: Sequence[tf.Tensor] = ()) -> LoopResult:
        """Take up to `num_steps` steps, like Loop."""
        result = super().__call__(iterator, num_steps, may_end=True, values=values)  # both values need the same graph
        if result.data_ended and not may_end:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return result

    def prepare(self, iterator: Any) -> None:
        """Trace the loop and let TensorFlow optimize it, without taking a step or reading data."""
        self(iterator, 0, may_end=True)

    def _run(self, iterator: Any, num_steps: tf.Tensor, values: Sequence[tf.Tensor], *, ends: bool) -> dict[str, Any]:
        def take(group: Group, first: tf.Tensor, *state: Any) -> Any:
            return self._plain_steps(group, first, first + group.num_steps, (first, *state))

        taken, examples, ended, _, *arrays = self._over_groups(
            iterator, num_steps, take, _arrays(self._step.specs, num_steps)
        )
        stacked = [_stacked(array, spec, taken) for array, spec in zip(arrays, self._step.specs, strict=True)]
        return {"taken": taken, "examples": examples, "ended": ended, "stacked": stacked}

    def _over_groups(
        self, iterator: Any, num_steps: tf.Tensor, take: Callable[..., Any], others: Sequence[Any]
    ) -> Sequence[Any]:
        """Take the steps of all groups.

        Args:
          iterator: iterator over the input.
          num_steps: the largest number of steps.
          take: takes the steps of one group: (group, number of steps before it, examples, whether the loss is finite,
            *others) -> (steps taken, examples, whether the loss is finite, *others).
          others: the state that `take` gets with the first group.

        Returns:
          (steps taken, examples, whether the data ended, whether the loss is finite, *others).
        """
        groups = BatchGroups(iterator, num_steps, self._pipeline.division.elements_per_step)

        def body(first: tf.Tensor, examples: tf.Tensor, ended: tf.Tensor, fine: tf.Tensor, *others: Any) -> Any:
            group = groups.get_next()
            taken, examples, fine, *others = take(group, first, examples, fine, *others)
            return (taken, examples, group.is_last & fine, fine, *others)

        start = (*_start(), *others)
        state: Sequence[Any] = tf.while_loop(functools.partial(_running, num_steps), body, start, parallel_iterations=1)
        return state

    def _plain_steps(self, group: Group, first: tf.Tensor, end: tf.Tensor, state: Sequence[Any]) -> Sequence[Any]:
        """Take steps without summaries on a group, up to the step `end`, and return the state after them.

        Args:
          first: number of steps before the group.
          state: (steps taken, examples, whether the loss is finite, *arrays).
        """

        def step(taken: tf.Tensor, examples: tf.Tensor, fine: tf.Tensor, *arrays: Any) -> Any:
            return self._step_of(group, first, self._step, _written, (taken, examples, fine, *arrays))

        after: Sequence[Any] = tf.while_loop(
            lambda taken, examples, fine, *_: (taken < end) & fine,
            step,
            state,
            parallel_iterations=self._parallel_iterations,
        )
        return after

    def _step_of(
        self, group: Group, first: tf.Tensor, step: Step, write: Callable[..., list[Any]], state: Sequence[Any]
    ) -> Sequence[Any]:
        """Take one step on the next batch of a group, and return the state after it.

        Args:
          group, first, state: as in `_plain_steps`.
          step, write: as in `_body`.
        """
        taken, examples, fine, *arrays = state
        take = self._body(step, group.elements_of(taken - first), (), write, ends=False)
        taken, examples, _, fine, *arrays = take(taken, examples, tf.constant(False), fine, *arrays)
        return (taken, examples, fine, *arrays)


class GroupedRecordingLoop(GroupedLoop, RecordingLoop):
    """A loop that reads batches in groups and of which some steps write summaries."""

    def __init__(self, step: Step, recorded: Step, pipeline: InputPipeline, *, stop_at_nan: bool) -> None:
        RecordingLoop.__init__(self, step, recorded, pipeline, stop_at_nan=stop_at_nan)

    def prepare(self, iterator: Any) -> None:
        """Trace the loop and let TensorFlow optimize it, without taking a step or reading data."""
        self.take(iterator, 0, Schedule(0, 1, 0), may_end=True)

    def _run(self, iterator: Any, num_steps: tf.Tensor, values: Sequence[tf.Tensor], *, ends: bool) -> dict[str, Any]:
        every, due, arrays = self._start_of(values[0], num_steps)

        def take(group: Group, first: tf.Tensor, *state: Any) -> Any:
            last = first + group.num_steps

            def to_summaries(
                taken: tf.Tensor, examples: tf.Tensor, fine: tf.Tensor, due: tf.Tensor, number: tf.Tensor, *arrays: Any
            ) -> Any:
                others = arrays[self._num_shared :]
                state = (taken, examples, fine, *arrays[: self._num_shared])
                taken, examples, fine, *plain = self._plain_steps(group, first, tf.minimum(due, last), state)

                def record() -> Any:
                    state = (taken, examples, fine, *plain, *others)
                    after = self._step_of(group, first, self._recorded, self._writer_of(number), state)
                    return (*after[:3], due + every, number + 1, *after[3:])

                is_due = (taken == due) & (taken < last) & fine
                return tf.cond(is_due, record, lambda: (taken, examples, fine, due, number, *plain, *others))

            return tf.while_loop(
                lambda taken, examples, fine, *_: (taken < last) & fine,
                to_summaries,
                (first, *state),
                parallel_iterations=1,
            )

        start = (due, tf.constant(0), *arrays)
        taken, examples, ended, _, _, number, *arrays = self._over_groups(iterator, num_steps, take, start)
        counts = [taken] * self._num_shared + [number] * (len(arrays) - self._num_shared)
        stacked = [_stacked(*each) for each in zip(arrays, self._recorded.specs, counts, strict=True)]
        return {"taken": taken, "examples": examples, "ended": ended, "stacked": stacked}


def _arrays(specs: Sequence[tf.TensorSpec], size: tf.Tensor) -> tuple[tf.TensorArray, ...]:
    return tuple(tf.TensorArray(spec.dtype, size, element_shape=spec.shape) for spec in specs)


def _written(arrays: Sequence[Any], taken: tf.Tensor, outputs: Sequence[tf.Tensor]) -> list[Any]:
    return [array.write(taken, value) for array, value in zip(arrays, outputs, strict=True)]


def _stacked(array: tf.TensorArray, spec: tf.TensorSpec, taken: tf.Tensor) -> tf.Tensor:
    """Return the values of the steps, `[steps, ...]`; an empty array if no step was taken."""
    if spec.shape.is_fully_defined():
        return array.stack()
    nothing = tf.zeros([0, *(size or 0 for size in spec.shape.as_list())] if spec.shape.rank else [0], spec.dtype)
    return tf.cond(taken > 0, array.stack, lambda: nothing)


def _running(
    num_steps: tf.Tensor, taken: tf.Tensor, examples: tf.Tensor, ended: tf.Tensor, fine: tf.Tensor, *_: Any
) -> tf.Tensor:
    return (taken < num_steps) & fine & ~ended


def _start() -> tuple[tf.Tensor, ...]:
    """Return (steps taken, examples, whether the data ended, whether the loss is finite) before the first step."""
    return tf.constant(0), tf.constant(0, tf.int64), tf.constant(False), tf.constant(True)
