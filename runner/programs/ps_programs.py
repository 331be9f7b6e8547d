"""strategy=parameter_server: training steps and evaluation that a coordinator requests from its workers.

One request is for a range of successive batches.
"""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.data.ps_ranges import PsDataset, RangeIterator
from runner.distribute.collectives import collectives_of
from runner.programs.evaluate import EvalProgram, EvalResult, on_host
from runner.programs.program import ModelToTrace
from runner.programs.train_loop import NUM_EXAMPLES, LoopResult, Outputs, Step, Steps, empty_arrays, written_at
from runner.tf_private import parameter_server
from runner.tracing.graph_operations import needed, operations

_log = logging.getLogger(__name__)

# A request costs about 2 ms, so the work of one request should take much longer than that.
_SHORTEST_SECS = 0.1
_REQUESTS_PER_WORKER = 4

_NEXT = -1  # in place of the number of a range's first element: the one that comes next on that worker


class Coordinator:
    """The workers of a ParameterServerStrategy, and the requests to them."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.workers = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
        self._collectives = collectives_of(strategy)
        self.num_workers = len(parameter_server.tasks_of(strategy)["worker"])
        # This list grows by the arguments of each request that is repeated because its worker was lost.
        self._repeated_arguments = parameter_server.repeated_requests(self.workers)
        parameter_server.say_losses_in_a_line(_log)

    def run(
        self, function: Callable[..., Any], all_arguments: Sequence[tuple[Any, ...]]
    ) -> tuple[list[Any], list[int]]:
        """Run a function on the workers, once for each entry of `all_arguments`.

        If a worker is lost, another worker repeats its request.

        Args:
          function: a tf.function.
          all_arguments: the arguments of each call.

        Returns:
          (results in the order of `all_arguments`, as host values; indices of the requests that were repeated because
          their worker was lost).

        Raises:
          PeerLost: a parameter server was lost, and with it the variables.
        """
        self._repeated_arguments.clear()  # it has the requests of earlier calls, too
        with self._collectives.noticing_lost_peers():
            results = [self.workers.schedule(function, args=arguments) for arguments in all_arguments]
            self.workers.join()  # raises an error of a request only when no request runs any more
            values = [result.fetch() for result in results]
        # By identity, because two requests may have equal arguments.
        lost = {id(arguments) for arguments in self._repeated_arguments}
        repeated = [index for index, arguments in enumerate(all_arguments) if id(arguments) in lost]
        return values, repeated


class Requests:
    """Requests to the workers for ranges of batches; each range is processed exactly once.

    Args:
      coordinator: the workers.
      of_range: the work for a range, called in the graph with an iterator over (number, element), the number of the
        first element (negative: the next one) and the number of elements. It returns a dict that includes the facts
        that `over_range` returns.
      of_element: the work for one element that is sent with the request; called in the graph with the element and its
        number. It returns the same as `of_range`.
    """

    def __init__(
        self, coordinator: Coordinator, of_range: Callable[..., dict[str, Any]], of_element: Callable[..., Any]
    ) -> None:
        self._coordinator = coordinator
        self._of_range = tf.function(of_range, autograph=False)
        self._of_element = tf.function(of_element, autograph=False)
        self._step_secs = 0.0  # seconds per step of one worker, measured at the last `take`
        self.repeated_steps = 0
        """Number of steps of the last `take` that were requested again because their worker was lost."""

    def take(self, iterator: RangeIterator, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
        """Return the workers' results for the next `num_steps` batches, or for the remaining ones.

        Returns:
          (results of the ranges in the order of the data, whether there is no further batch).
        """
        started = time.perf_counter()
        self.repeated_steps = 0
        if iterator.workers is None:
            first, elements = iterator.elements(num_steps)
            results = self._request_elements(elements, first)
            ended = len(elements) < num_steps
        elif iterator.dataset.is_divided:
            results, ended = self._take_from_their_own(iterator, num_steps)
        else:
            results, ended = self._take_in_ranges(iterator, num_steps)
        taken = _steps_taken(results)
        if taken:
            self._step_secs = (time.perf_counter() - started) * self._coordinator.num_workers / taken
        return results, ended

    def _take_in_ranges(self, iterator: RangeIterator, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
        """Take steps on data that is the same for all workers; each range goes to any of them."""
        ranges = iterator.take(num_steps, self._steps_per_request(num_steps))
        results_of_ranges = self._request_ranges(iterator, ranges)
        for result in results_of_ranges:
            iterator.end = max(iterator.end, int(result["end"]))
        results: list[dict[str, Any]] = []
        ended = False
        for (first, count), result in zip(ranges, results_of_ranges, strict=True):
            results.append(result)
            taken = int(result["taken"])
            if taken == count or result["stopped"]:
                continue
            if result["ended"] and first + taken >= iterator.end:  # the data ends inside this range
                ended = True
                continue
            # The range is not complete: its worker was lost, and the worker that repeated the request had already read
            # past the range.
            elements = iterator.read_again(first + taken, count - taken)
            results += self._request_elements(elements, first + taken)
            ended |= len(elements) < count - taken
        return results, ended

    def _take_from_their_own(self, iterator: RangeIterator, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
        """Take steps on the workers' own data; each range goes to any worker that is free and has data left."""
        results: list[dict[str, Any]] = []
        num_workers = self._coordinator.num_workers
        remaining = num_steps
        is_stopped = False
        while remaining > 0 and len(iterator.ended) < num_workers and not is_stopped:
            ranges = iterator.take(remaining, self._steps_per_request(remaining))
            answers = self._request_ranges(iterator, [(_NEXT, count) for _, count in ranges])
            for result in answers:
                if result["ended"]:
                    iterator.ended.add(int(result["worker"]))
                if result["stopped"]:
                    is_stopped = True
            results += answers
            remaining -= _steps_taken(answers)
        return results, len(iterator.ended) == num_workers

    def _request_ranges(self, iterator: RangeIterator, ranges: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Make one request for each range (number of its first element, number of elements)."""
        requests = [(iterator.workers, tf.constant(first, tf.int64), tf.constant(count)) for first, count in ranges]
        results, repeated = self._coordinator.run(self._of_range, requests)
        for index in repeated:
            _, count = ranges[index]
            self.repeated_steps += count
        return results

    def _request_elements(self, elements: Sequence[Any], first: int) -> list[dict[str, Any]]:
        """Make one request for each element, and send the element with it."""
        requests = [(element, tf.constant(number, tf.int64)) for number, element in enumerate(elements, first)]
        results, repeated = self._coordinator.run(self._of_element, requests)
        self.repeated_steps += len(repeated)
        return results

    def _steps_per_request(self, num_steps: int) -> int:
        """Return the number of steps per request.

        Each worker gets several requests, so that a slow worker does not delay the others. But a request should take
        long compared to the overhead of a request.
        """
        workers = self._coordinator.num_workers
        for_several_requests = math.ceil(num_steps / (workers * _REQUESTS_PER_WORKER))
        for_long_requests = math.ceil(_SHORTEST_SECS / self._step_secs) if self._step_secs else 1
        most = math.ceil(num_steps / workers)  # with more, a worker would get none
        return max(1, min(max(for_several_requests, for_long_requests), most))


def _steps_taken(results: Sequence[dict[str, Any]]) -> int:
    return sum(int(result["taken"]) for result in results)


def over_range(
    iterator: Any,
    first: tf.Tensor,
    count: tf.Tensor,
    step: Callable[..., tuple[tf.Tensor, Sequence[Any]]],
    state: Sequence[Any],
) -> tuple[list[Any], dict[str, tf.Tensor]]:
    """Take up to `count` steps on the elements from number `first` on. Runs in the graph, on a worker.

    Args:
      iterator: an iterator over (number, element).
      first: int64 scalar; _NEXT: start at the next element.
      count: int64 scalar.
      step: called with an element, the number of steps before it and the state; returns (whether to continue, new
        state).
      state: the initial state, a structure of tensors.

    Returns:
      (last state, facts). The facts are scalars: `taken`: number of steps taken, 0 if the iterator is already past the
      first element; `ended`: whether the data has no further element; `end`: number after that of the last element
      read; `stopped`: whether a step ended the range early; `worker`: index of the worker.
    """

    def skip(optional: Any, end: tf.Tensor) -> tuple[Any, tf.Tensor]:
        del end
        following = iterator.get_next_as_optional()
        number, _ = optional.get_value()
        return following, number + 1

    before = (iterator.get_next_as_optional(), tf.constant(0, tf.int64))
    optional, end = tf.while_loop(lambda optional, _: _is_before(first, optional), skip, before)
    is_after_first = optional.has_value() & ~_is_before(first + 1, optional)
    # The iterator cannot go back: no step is taken then.
    passed = (first >= 0) & is_after_first

    def running(taken: tf.Tensor, end: tf.Tensor, optional: Any, goes_on: tf.Tensor, *_: Any) -> tf.Tensor:
        return (taken < count) & goes_on & optional.has_value() & ~passed

    def body(taken: tf.Tensor, _: tf.Tensor, optional: Any, goes_on: tf.Tensor, *state: Any) -> Any:
        number, element = optional.get_value()
        goes_on, new = step(element, taken, *state)
        # Nothing is read after the last step: the element would be missing in the worker's next range.
        more = tf.cond(taken + 1 < count, iterator.get_next_as_optional, lambda: optional)
        return (taken + 1, number + 1, more, goes_on, *new)

    start = (tf.constant(0), end, optional, tf.constant(True), *state)
    taken, end, optional, goes_on, *last = tf.while_loop(running, body, start)
    worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    return last, {"taken": taken, "end": end, "ended": ~optional.has_value(), "stopped": ~goes_on, "worker": worker}


def of_one_element() -> dict[str, tf.Tensor]:
    """Return the facts that `over_range` would return, for a request that contains its one element."""
    return {"taken": tf.constant(1), "stopped": tf.constant(False)}


def _is_before(first: tf.Tensor, optional: Any) -> tf.Tensor:
    """Report whether there is an element (number, element), and its number is below `first`: bool scalar."""

    def is_number_before() -> tf.Tensor:
        number, _ = optional.get_value()
        return number < first

    return tf.cond(optional.has_value(), is_number_before, lambda: tf.constant(False))


# --- programs ---------------------------------------------------------------------------------------------------


class RangeLoop:
    """A loop of training steps, called like train_loop.Loop, whose steps the workers take.

    Each worker gets ranges of batches, which it reads from its own copy of the data. Results are in the order of the
    data.
    """

    def __init__(self, step: Step, pipeline: InputPipeline, *, coordinator: Coordinator, stop_at_nan: bool) -> None:
        self._step = step
        self._pipeline = pipeline
        self._stop_at_nan = stop_at_nan
        self._specs = {**step.specs, "num_examples": NUM_EXAMPLES}
        self._requests = Requests(coordinator, self._range, self._element)

    def __call__(self, iterator: RangeIterator, plan: Steps) -> LoopResult:
        """Take steps, and return when all of them are done.

        Raises:
          ValueError: hooks feed placeholders.
        """
        if plan.values:
            raise ValueError(
                "A hook feeds a placeholder (SessionRunArgs(feed_dict=...)). With parameter servers, other processes "
                "take the steps, and hooks cannot feed them. Pass the values through input_fn."
            )
        results, ended = self._requests.take(iterator, plan.number)
        outputs = _join(results, self._specs)
        losses = outputs.pop("loss")
        examples = outputs.pop("num_examples")
        # A loss that is not finite ended its range. It must end the loop, so it becomes the last of the losses.
        if self._stop_at_nan:
            finite_first = np.argsort(~np.isfinite(losses), kind="stable")
            losses = losses[finite_first]
            examples = examples[finite_first]
        steps_of = collections.Counter[int]()
        for result in results:
            if "worker" in result:  # else the element was sent with the request, which any worker took
                steps_of[int(result["worker"])] += int(result["taken"])
        repeated = self._requests.repeated_steps
        return LoopResult(len(losses), losses, examples, outputs, ended, repeated, steps_of_workers=steps_of)

    # --- what a worker does ---------------------------------------------------------------------------------------

    def _element(self, element: Any, number: tf.Tensor) -> dict[str, Any]:
        del number
        stacked = tf.nest.map_structure(lambda value: value[None], self._take(element, None))
        return {**of_one_element(), "stacked": stacked}

    def _range(self, iterator: Any, first: tf.Tensor, count: tf.Tensor) -> dict[str, Any]:
        """Take up to `count` steps from batch `first`; none if the iterator is past it or has ended."""

        def step(element: Any, taken: tf.Tensor, arrays: Outputs) -> Any:
            outputs = self._take(element, iterator)
            is_fine = tf.math.is_finite(outputs["loss"]) if self._stop_at_nan else tf.constant(True)
            return is_fine, (written_at(taken, arrays, outputs),)

        (arrays,), facts = over_range(iterator, first, count, step, (empty_arrays(self._specs, count),))
        stacked = tf.nest.map_structure(lambda array: array.stack(), arrays)
        return {**facts, "stacked": stacked}

    def _take(self, element: Any, iterator: Any) -> Outputs:
        """Take one step; return its outputs, and its number of examples among them. A worker has one replica."""
        batches, count = self._pipeline.division.replica_batches(element, iterator)
        return {**self._step.take(batches, count, ()), "num_examples": batches[0].count}


def _join(results: Sequence[dict[str, Any]], specs: Outputs) -> dict[str, Any]:
    """Return each output of all steps as one array, `[steps, ...]`."""
    taken = [int(result["taken"]) for result in results]

    def join(spec: tf.TensorSpec, *stacked: Any) -> np.ndarray:
        if not stacked:
            return np.zeros([0, *spec.shape], spec.dtype.as_numpy_dtype)
        return np.concatenate([np.asarray(part)[:steps] for part, steps in zip(stacked, taken, strict=True)])

    of_requests = [result["stacked"] for result in results]
    outputs: dict[str, Any] = tf.nest.map_structure(join, specs, *of_requests)
    return outputs


class RangeEvaluation(EvalProgram):
    """Evaluation like EvalProgram, but on workers; a model that workers cannot evaluate is evaluated in this process.

    The variables stay on their servers. Each request starts with empty metrics of its own and returns their state,
    which is merged with that of the others. So a request whose worker is lost has changed nothing and can be repeated,
    and each example counts exactly once.
    """

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline, coordinator: Coordinator) -> None:
        super().__init__(model, pipeline, on_workers=True)
        self._coordinator = coordinator
        store = model.store
        sums, updates = self._sums_and_updates(0)
        running = set(needed(self.trace.graph, operations([*tf.nest.flatten(sums), *updates])))
        # Name -> handle of each variable in which a metric keeps state. A request is fed handles of new variables
        # instead.
        self._handles: dict[str, tf.Tensor] = {}
        for handle, name in self.trace.handles(replica=0):
            if handle.op in running and store.specs[name].local:
                self._handles[name] = handle
        self._why_not_on_workers = self.why_one_replica
        if self.changes_model:
            self._why_not_on_workers = (
                "model_fn may write to variables of the model, or to any in a branch, a loop or a nested function"
            )
        self._logged_reasons: set[str] = set()
        self._state: Mapping[str, Any] | None = None
        if self._why_not_on_workers is None:
            self._evaluate_batch = self._build_replica_function(0, feeds=list(self._handles.values()))
            self._initial = {name: store.initial_value(name).numpy() for name in self._handles}
            self._requests = Requests(coordinator, self._range, self._element)

    def iterate(self, dataset: tf.data.Dataset, *, in_loops: bool) -> Any:
        reason = self._why_not_on_workers if in_loops else "a hook looks at each batch"
        if reason is None:
            return RangeIterator(PsDataset([dataset], self._coordinator.workers))
        if reason not in self._logged_reasons:
            _log.info("The coordinator evaluates the model itself, without the workers: %s.", reason)
        self._logged_reasons.add(reason)
        return super().iterate(dataset, in_loops=in_loops)

    def reset(self) -> None:
        super().reset()
        self._state = None

    def run(self, iterator: Any, first_step: int, max_steps: int) -> EvalResult:
        if self._why_not_on_workers is not None:
            return super().run(iterator, first_step, max_steps)
        results, ended = self._requests.take(iterator, max_steps)
        sums = dict(self._so_far.sums)
        examples = 0
        for result in results:
            for name, (more, more_weight) in on_host(result["sums"]).items():
                total, weight = sums[name]
                sums[name] = (total + more, weight + more_weight)
            self._merge_state(result["state"])
            examples += int(result["examples"])
        return self._update_result(sums, examples, ended)

    def _merge_state(self, state: Mapping[str, Any]) -> None:
        """Merge the state of the metrics after a request with that of the earlier ones."""
        parts = [state] if self._state is None else [self._state, state]
        stacked: dict[str, np.ndarray] = {}
        for name in state:
            stacked[name] = np.stack([part[name] for part in parts])
        self._state = self._kept_metrics.merged(stacked)

    def values(self) -> dict[str, Any]:
        for name, value in (self._state or {}).items():
            variable = self._store[name]
            variable.assign(tf.cast(value, variable.dtype))
        return super().values()

    # --- what a worker does ---------------------------------------------------------------------------------------

    def _element(self, element: Any, number: tf.Tensor) -> dict[str, Any]:
        handles = self._make_metrics()
        zero_sums = self._start_from(self._zero_result)
        counted, _ = self._add_step([self._evaluate_batch], None, element, number, zero_sums, *handles)
        return {**of_one_element(), **self._results(counted, handles)}

    def _range(self, iterator: Any, first: tf.Tensor, count: tf.Tensor) -> dict[str, Any]:
        """Evaluate up to `count` batches from number `first` on; none if the iterator is already past that batch."""
        handles = self._make_metrics()

        def step(element: Any, taken: tf.Tensor, *before: Any) -> tuple[tf.Tensor, Any]:
            number = first + tf.cast(taken, tf.int64)
            goes_on = tf.constant(True)
            counted, _ = self._add_step([self._evaluate_batch], iterator, element, number, before, *handles)
            return goes_on, counted

        counted, facts = over_range(iterator, first, count, step, self._start_from(self._zero_result))
        return {**facts, **self._results(counted, handles)}

    def _make_metrics(self) -> list[tf.Tensor]:
        """Create new variables on the worker for the metrics, and return their handles in the order of `_handles`."""
        handles = []
        for initial in self._initial.values():
            handle = parameter_server.anonymous_variable(initial.shape, initial.dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.convert_to_tensor(initial))
            handles.append(handle)
        return handles

    def _results(self, counted: Sequence[Any], handles: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Return the results of a request: (examples, sums) as `counted`, and the state of the metrics."""
        examples, sums = counted
        # The metrics are read only when the last batch has been added to them.
        with tf.control_dependencies(tf.nest.flatten(counted)):
            state: dict[str, tf.Tensor] = {}
            for (name, initial), handle in zip(self._initial.items(), handles, strict=True):
                state[name] = tf.raw_ops.ReadVariableOp(resource=handle, dtype=initial.dtype)
        return {"examples": examples, "sums": sums, "state": state}
