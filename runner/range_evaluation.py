"""Evaluation on the workers of a coordinator: each counts some of the batches, and returns what it counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner import ps_bridge
from runner.coordinator import Coordinator, Requests, of_one_element, over_range
from runner.inference import EvalProgram, EvalResult, Sums, added, in_float64, on_host
from runner.inputs import Feed
from runner.operations import needed, operations
from runner.spread import Ranges, Spread
from runner.steps import ModelCall, step_inputs
from runner.variables import VariableStore

_log = logging.getLogger(__name__)


class RangeEvaluation(EvalProgram):
    """As EvalProgram, on workers. What does not go there runs here, on variables that stay on their servers.

    A request begins with metrics of its own, which are empty, and returns what is in them: a request that is lost with
    its worker has left nothing behind, and is made once more. So each example counts once, whatever is lost.
    """

    def __init__(self, store: VariableStore, model_call: ModelCall, feed: Feed, coordinator: Coordinator) -> None:
        super().__init__(store, model_call, feed, on_workers=True)
        self._coordinator = coordinator
        fetches, updates = self._fetched(0)
        running = set(needed(self.trace.graph, operations([*tf.nest.flatten(fetches), *updates])))
        own = {name: asked for name, (asked, _) in self.trace.served.requests.items() if store.specs[name].local}
        captured = {name: self.trace.handle_of(variable) for name, variable in own.items()}
        self._handles = {
            name: handle for name, handle in captured.items() if handle is not None and handle.op in running
        }
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
        return iter(Spread([dataset], self._coordinator.workers))

    def reset(self) -> None:
        super().reset()
        self._counted = {}

    def run(self, iterator: Any, max_steps: int, sums: Sums) -> EvalResult:
        if not isinstance(iterator, Ranges):
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
        shares = self._feed.shares(element, None)
        sums = self._sums(element, shares, handles)
        return {**of_one_element(), "examples": shares[0].count, "sums": sums, "counted": self._read(handles)}

    def _range(self, iterator: Any, first: tf.Tensor, count: tf.Tensor) -> dict[str, Any]:
        """Up to `count` batches from number `first` on; none where the iterator has passed it, or there is none."""
        handles = self._own_metrics(first)
        zero = tf.constant(0, tf.float64)
        nothing = {name: (zero, zero) for name in self.sum_names}

        def step(element: Any, taken: tf.Tensor, examples: tf.Tensor, *flat: tf.Tensor) -> Any:
            del taken
            shares = self._feed.shares(element, iterator)
            batch = tf.nest.flatten(self._sums(element, shares, handles))
            return tf.constant(True), (examples + shares[0].count, *map(tf.add, flat, batch))

        start = (tf.constant(0, tf.int64), *tf.nest.flatten(nothing))
        (examples, *flat), facts = over_range(iterator, first, count, step, start)
        sums = tf.nest.pack_sequence_as(nothing, flat)
        with tf.control_dependencies([examples]):
            return {**facts, "examples": examples, "sums": sums, "counted": self._read(handles)}

    def _sums(self, element: Any, shares: Any, handles: Sequence[tf.Tensor]) -> Any:
        inputs = step_inputs(shares, self._feed.global_count(element, shares))
        return in_float64(self._batch(*inputs, *handles))

    def _own_metrics(self, number: tf.Tensor) -> list[tf.Tensor]:
        """Handles of new variables on the worker, in the order of `_handles`; the count of batches is at `number`."""
        handles = []
        for name, initial in self._initial.items():
            handle = ps_bridge.anonymous_variable(initial.shape, initial.dtype)
            value = number if name == self._counter else tf.constant(initial)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            handles.append(handle)
        return handles

    def _read(self, handles: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        named = zip(self._initial, handles, strict=True)
        return {
            name: tf.raw_ops.ReadVariableOp(resource=handle, dtype=self._initial[name].dtype)
            for name, handle in named
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
