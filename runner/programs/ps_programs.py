"""Training steps and evaluation on the workers of a coordinator: strategy=parameter_server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.data.ps_ranges import PsDataset, RangeIterator
from runner.programs.evaluate import EvalProgram, EvalResult, Sums, added, in_float64, on_host
from runner.programs.program import ModelToTrace, read_step
from runner.programs.ps_coordinator import Coordinator, Requests, of_one_element, over_range
from runner.programs.train_loop import LoopResult, Step
from runner.tf_private import parameter_server
from runner.tracing.graph_operations import needed, operations

_log = logging.getLogger(__name__)


class RangeLoop:
    """Like train_loop.Loop, for workers that each take some of the steps.

    Each is given a range of batches, which it finds in its own copy of the data; results are in the order of the data.
    """

    def __init__(self, step: Step, pipeline: InputPipeline, coordinator: Coordinator, *, stop_at_nan: bool) -> None:
        self._step, self._pipeline, self._stop_at_nan = step, pipeline, stop_at_nan
        self._requests = Requests(coordinator, self._range, self._element)

    def __call__(
        self, iterator: RangeIterator, num_steps: int, *, may_end: bool, values: Sequence[tf.Tensor] = ()
    ) -> LoopResult:
        """Take up to `num_steps` steps, and returns when all of them are done.

        Raises: ValueError: they are to be fed `values`.
        """
        del may_end  # each range tells
        if values:
            raise ValueError(
                "SessionRunArgs(feed_dict=...) of a hook: with parameter servers steps are taken by other processes, "
                "which no hook can feed. Give the values through input_fn."
            )
        results, ended = self._requests.take(iterator, num_steps)
        losses, *fetched = _joined(results, self._step.specs)
        if self._stop_at_nan:
            losses = _finite_first(losses)
        examples = sum(int(result["examples"]) for result in results)
        return LoopResult(len(losses), losses, examples, fetched, ended, self._requests.repeated_steps)

    def trace(self, iterator: RangeIterator) -> None:
        """Build the loop, without a step."""
        self._requests.trace(iterator.spread.element_spec)

    # --- what a worker does ---------------------------------------------------------------------------------------

    def _element(self, element: Any, number: tf.Tensor) -> dict[str, Any]:
        del number
        examples, outputs = self._take(element, None)
        return {**of_one_element(), "examples": examples, "stacked": [value[None] for value in outputs]}

    def _range(self, iterator: Any, first: tf.Tensor, count: tf.Tensor) -> dict[str, Any]:
        """Up to `count` steps from batch `first` on; none where the iterator has passed it, or there is none."""
        arrays = tuple(tf.TensorArray(spec.dtype, count, element_shape=spec.shape) for spec in self._step.specs)

        def step(element: Any, taken: tf.Tensor, examples: tf.Tensor, *arrays: Any) -> Any:
            count, outputs = self._take(element, iterator)
            fine = tf.math.is_finite(outputs[0]) if self._stop_at_nan else tf.constant(True)
            written = [array.write(taken, value) for array, value in zip(arrays, outputs, strict=True)]
            return fine, (examples + count, *written)

        (examples, *written), facts = over_range(iterator, first, count, step, (tf.constant(0, tf.int64), *arrays))
        return {**facts, "examples": examples, "stacked": [array.stack() for array in written]}

    def _take(self, element: Any, iterator: Any) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """Return (the examples of a step, what it returns)."""
        batches = self._pipeline.replica_batches(element, iterator)
        return batches[0].count, self._step.take(batches, self._pipeline.global_count(element, batches), ())


def _joined(results: Sequence[dict[str, Any]], specs: Sequence[tf.TensorSpec]) -> list[np.ndarray]:
    """Return what the steps returned, stacked over all of them."""
    if not results:
        return [np.zeros([0, *spec.shape], spec.dtype.as_numpy_dtype) for spec in specs]
    taken = [int(result["taken"]) for result in results]
    return [
        np.concatenate(
            [np.asarray(result["stacked"][number])[:steps] for result, steps in zip(results, taken, strict=True)]
        )
        for number in range(len(specs))
    ]


def _finite_first(losses: np.ndarray) -> np.ndarray:
    """A loss that is not finite ended its range, and is to end the loop: it is the last one."""
    return losses[np.argsort(~np.isfinite(losses), kind="stable")]


class RangeEvaluation(EvalProgram):
    """Like EvalProgram, on workers. What does not go there runs here, on variables that stay on their servers.

    A request begins with metrics of its own, which are empty, and returns what is in them: a request that is lost with
    its worker has left nothing behind, and is made once more. So each example counts once, whatever is lost.
    """

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline, coordinator: Coordinator) -> None:
        super().__init__(model, pipeline, on_workers=True)
        self._coordinator, store = coordinator, model.store
        fetches, updates = self._fetched(0)
        running = set(needed(self.trace.graph, operations([*tf.nest.flatten(fetches), *updates])))
        own = {name: asked for name, (asked, _) in self.trace.requested.requests.items() if store.specs[name].local}
        handles = {name: self.trace.handle_of(variable) for name, variable in own.items()}
        self._handles = {name: one for name, one in handles.items() if one is not None and one.op in running}
        self._counter = self._counter_of_batches()
        self._reason = self._why_here()
        self._said: set[str] = set()
        self._counted: dict[str, Any] = {}
        if self._reason is None:
            self._check_no_collective([*updates, *tf.nest.flatten(fetches)])
            self._batch = self.trace.function(fetches, updates, feeds=list(self._handles.values()))
            self._initial = {name: store.local_value(name) for name in self._handles}
            self._requests = Requests(coordinator, self._range, self._element)

    def iterate(self, dataset: tf.data.Dataset, *, in_loops: bool) -> Any:
        reason = self._reason if in_loops else "a session hook looks at each batch"
        if reason is not None:
            if reason not in self._said:
                _log.info("The coordinator evaluates alone: %s.", reason)
            self._said.add(reason)
            return super().iterate(dataset, in_loops=in_loops)
        return iter(PsDataset([dataset], self._coordinator.workers))

    def reset(self) -> None:
        super().reset()
        self._counted = {}

    def run(self, iterator: Any, max_steps: int, sums: Sums) -> EvalResult:
        if not isinstance(iterator, RangeIterator):
            return super().run(iterator, max_steps, sums)
        results, ended = self._requests.take(iterator, max_steps)
        for result in results:
            sums = added(sums, on_host(result["sums"]))
            for name, value in result["counted"].items():
                self._counted[name] = self._counted.get(name, 0) + (_wide(value) - _wide(self._initial[name]))
        return EvalResult(sums, sum(int(result["examples"]) for result in results), ended)

    def values(self) -> dict[str, Any]:
        for name, value in self._counted.items():
            variable = self._store[name]
            variable.assign(tf.cast(_wide(self._initial[name]) + value, variable.dtype))
        return super().values()

    # --- what a worker does ---------------------------------------------------------------------------------------

    def _element(self, element: Any, number: tf.Tensor) -> dict[str, Any]:
        handles = self._own_metrics(number)
        examples, sums = self._sums(element, None, handles)
        return {**of_one_element(), "examples": examples, "sums": sums, "counted": self._read(handles)}

    def _range(self, iterator: Any, first: tf.Tensor, count: tf.Tensor) -> dict[str, Any]:
        """Up to `count` batches from number `first` on; none where the iterator has passed it, or there is none."""
        handles = self._own_metrics(first)
        zero = tf.constant(0, tf.float64)
        nothing = {name: (zero, zero) for name in self.sum_names}

        def step(element: Any, taken: tf.Tensor, examples: tf.Tensor, *flat: tf.Tensor) -> Any:
            del taken
            count, sums = self._sums(element, iterator, handles)
            return tf.constant(True), (examples + count, *map(tf.add, flat, tf.nest.flatten(sums)))

        start = (tf.constant(0, tf.int64), *tf.nest.flatten(nothing))
        (examples, *flat), facts = over_range(iterator, first, count, step, start)
        sums = tf.nest.pack_sequence_as(nothing, flat)
        with tf.control_dependencies([examples]):
            return {**facts, "examples": examples, "sums": sums, "counted": self._read(handles)}

    def _sums(self, element: Any, iterator: Any, handles: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Any]:
        """Return (the examples of a batch, their sums)."""
        batches, inputs = read_step(self._pipeline, element, iterator)
        return batches[0].count, in_float64(self._batch(*inputs, *handles))

    def _own_metrics(self, number: tf.Tensor) -> list[tf.Tensor]:
        """Handles of new variables on the worker, in the order of `_handles`; the count of batches is at `number`."""
        handles = []
        for name, initial in self._initial.items():
            handle = parameter_server.anonymous_variable(initial.shape, initial.dtype)
            value = number if name == self._counter else tf.constant(initial)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            handles.append(handle)
        return handles

    def _read(self, handles: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        return {
            name: tf.raw_ops.ReadVariableOp(resource=handle, dtype=initial.dtype)
            for (name, initial), handle in zip(self._initial.items(), handles, strict=True)
            if name != self._counter
        }

    # --- whether it goes there ------------------------------------------------------------------------------------

    def _counter_of_batches(self) -> str | None:
        """Name of what random operations go by: it begins at the number of a range's first batch."""
        counts = [count.inputs[0] for count in self.trace.batch_counts if count is not None]
        return next((name for name, handle in self._handles.items() if any(handle is one for one in counts)), None)

    def _why_here(self) -> str | None:
        """Why no worker can evaluate this; None: they can."""
        if self.trace.may_write_in_branches:
            return "model_fn may write to variables in a branch, a loop or a nested function"
        for name in self._handles:
            spec = self._store.specs[name]
            if name.startswith("_evaluation/"):
                return f"a Keras layer draws random numbers ({name.removeprefix('_evaluation/')})"
            if spec.aggregation != tf.VariableAggregation.SUM or not (spec.dtype.is_floating or spec.dtype.is_integer):
                return f"what {name!r} holds cannot be added up"
        return None


def _wide(value: Any) -> np.ndarray:
    """As wide as sums of it need."""
    array = np.asarray(value)
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)
