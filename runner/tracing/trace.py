"""A traced step, from which the part that computes the fetches is cut out and run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.model_fn import user_code
from runner.tf_private import graphs
from runner.tf_private.feature_columns import naming_repeated_tokens
from runner.tf_private.random_ops import GENERATOR_RANDOM, KERNEL_RANDOM
from runner.tracing.graph_operations import (
    CALLS,
    captured,
    changes_state,
    handles,
    has_effect,
    may_write,
    needed,
    operations,
    program_order,
    table_writes,
)
from runner.tracing.numeric_checks import NumericChecks
from runner.tracing.variable_store import GLOBAL_STEP, RequestedVariables, VariableStore


@dataclasses.dataclass(frozen=True)
class ReplicaCall:
    """The result of one call of a replica's function.

    This class is opaque to tf.nest, so that strategy.run returns Python objects unflattened.

    Attributes:
      output: the return value. Its `initial_feeds`, if any, are values for placeholders that variables start from.
      collections: the graph collections after the call.
    """

    output: Any
    collections: dict[Any, list[Any]]


class Trace:
    """One traced step, before it is decided which part of it runs.

    Args:
      wrapped: the traced graph, as `wrap_function` returns it.
      calls: the result of the call of each local replica.
      requested: the variables that the step uses.
      call_time_values: see `graphs.collect_call_time_values`.

    Attributes:
      wrapped, requested: as the arguments.
      inputs: the flat input tensors, in the order of the signature.
      outputs: the return values of the replica function, one per local replica.
      collections: the graph collections after the first replica.
      operations: operations of the step in program order, without those that hooks add later.
      checks: checks of a function for values that are not finite; None: no checks.
      one_replica: the trace of one replica by which the variables of this one were found; itself if there is no other.
      of_hooks: names of the variables that hooks have requested; the trace can then not be used a second time.
    """

    def __init__(
        self,
        wrapped: Any,
        calls: Sequence[ReplicaCall],
        requested: RequestedVariables,
        call_time_values: Sequence[graphs.CallTimeValue] = (),
    ) -> None:
        self.wrapped = wrapped
        self.graph = wrapped.graph
        self.requested = requested
        # TensorFlow lists the captured variables and tables after the arguments.
        self.inputs = wrapped.inputs[: len(wrapped.inputs) - len(wrapped.captured_inputs)]
        self.outputs = [call.output for call in calls]
        self.checks: NumericChecks | None = None
        self.one_replica = self
        self.of_hooks: set[str] = set()
        self._call_time_values = call_time_values
        self.operations: Sequence[tf.Operation] = self.graph.get_operations()
        self.collections = calls[0].collections
        for key, members in self.collections.items():  # hooks look into the collections in begin()
            self.graph.get_collection_ref(key)[:] = members
        fill_tables: list[tf.Operation] = []
        for call in calls:
            for initializer in call.collections.get(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, ()):
                if initializer is not None:  # None: the table was made and filled under init_scope
                    fill_tables.append(initializer)
        if fill_tables:
            with user_code(), naming_repeated_tokens(fill_tables):
                self.function([], fill_tables, with_inputs=False)()

    @contextlib.contextmanager
    def extended(self, store: VariableStore) -> Iterator[None]:
        """Add what hooks build inside this context to the graph; `store` gets the variables that they request."""
        known = set(self.requested.requests)
        # New collections also outside of the graph, at the eager level: there TensorFlow 1 makes moving averages, and
        # would find those of earlier hooks.
        discovering = store.discovering(self.requested, of_hook=True)
        with graphs.fresh_collections(), self.graph.as_default(), discovering as new:
            yield

        def evaluate(initial: Any) -> Any:
            with self.graph.as_default():
                if callable(initial):
                    initial = initial()
                tensor = tf.convert_to_tensor(initial)
            return self.function(tensor, with_inputs=False)()

        if new:
            store.materialise(new, evaluate, on_one_device=True)
        self.of_hooks = set(self.requested.requests) - known
        store.reset_local(self.of_hooks)

    @functools.cached_property
    def may_write_in_branches(self) -> bool:
        """Report whether a branch, loop or nested function uses variables, so that its writes cannot be pruned.

        Also if a tf.random.Generator draws, whose writes cannot be pruned either.
        """
        draws = any(operation.type in GENERATOR_RANDOM for operation in self.graph.get_operations())
        return draws or any(self._calls_with(self.requested.keras_variables()))

    def _operations_using(
        self, names: Collection[str], is_wanted: Callable[[tf.Operation], bool]
    ) -> list[tf.Operation]:
        """Return the operations of the step that `is_wanted` accepts and that have one of these tensors as input."""
        found = []
        for operation in self.operations:
            if is_wanted(operation) and any(tensor.name in names for tensor in operation.inputs):
                found.append(operation)
        return found

    def handles(self, replica: int) -> list[tuple[tf.Tensor, str]]:
        """Return (placeholder, name of the variable for whose copy on this local replica it stands in the graph)."""
        names: dict[int, str] = {}
        for name, (variable, _) in self.requested.requests.items():
            for handle in handles(variable, replica):
                names[id(handle)] = name
        return [(inner, names[id(outer)]) for outer, inner in self.graph.captures if id(outer) in names]

    def updates_of(self, replica: int, running: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Return those of `running` that use this local replica's copy of a variable of the model."""
        names = captured(self.graph, self.requested.variables, replica)
        among = set(running)
        return self._operations_using(names, among.__contains__)

    def changes_variables(self, elements: Iterable[Any]) -> bool:
        """Report whether an operation that `elements` need may write to a variable of model_fn or a hook."""
        return may_write(self.graph, self.requested.variables, elements)

    def _calls_with(self, variables: Sequence[Any]) -> list[tf.Operation]:
        """Return the branches, loops and calls of functions that get the handles of `variables`."""
        return self._operations_using(captured(self.graph, variables), lambda operation: operation.type in CALLS)

    def all_effects(self) -> list[tf.Operation]:
        """Return everything that a tf.function would run: each operation with an effect, in program order."""
        return [operation for operation in self.operations if has_effect(operation)]

    def writes_of_keras(self, *, metrics_only: bool = False, replica: int | None = None) -> list[tf.Operation]:
        """Return the assignments that Keras layers and metrics make by themselves, without returning an operation to
        fetch.

        Args:
          metrics_only: only those of metrics, because evaluation must not update BatchNorm.
          replica: only writes to this local replica's copy of each variable; None: all.
        """
        variables = self.requested.keras_variables(metrics_only=metrics_only)
        names = captured(self.graph, variables, replica)
        writes = self._operations_using(names, lambda operation: graphs.is_assignment(operation.type))
        if metrics_only:
            return writes
        writes += self._calls_with(variables)  # layers and optimizers that write inside a branch
        writes += [operation for operation in self.requested.keras.written if changes_state(operation)]
        return list(dict.fromkeys(writes))

    def variables_of_others(self, store: VariableStore) -> list[Any]:
        """Return the variables that model_fn uses, but did not request from `store`: those made outside of it."""
        own_handles = set[int]()
        for variable in (store[GLOBAL_STEP], *self.requested.variables):
            own_handles.update(map(id, handles(variable)))
        others = []
        for variable in self.graph.variables:
            is_of_others = own_handles.isdisjoint(map(id, handles(variable)))
            # The state of a tf.random.Generator is told of by `kernel_random_ops`.
            if is_of_others and not variable.name.startswith("StateVar"):
                others.append(variable)
        return sorted(others, key=lambda variable: variable.name)

    def table_writes(self) -> list[tf.Operation]:
        """Return the operations that change a lookup table, whose contents are in no checkpoint."""
        return table_writes(self.operations)

    def kernel_random_ops(self) -> list[str]:
        """Return the names of random operations with state in a kernel, which is not in checkpoints.

        Almost all such operations become stateless (runner/tracing/random_state.py). Exceptions are those of tf.raw_ops
        and tf.vectorized_map, candidate samplers and similar, and a tf.random.Generator made outside of model_fn.
        """
        all_operations = self.graph.get_operations()
        nodes: list[Any] = [(operation.type, operation.name) for operation in all_operations]
        if any(operation.type in (*CALLS, "PartitionedCall") for operation in all_operations):
            library = self.graph.as_graph_def().library
            for function in library.function:
                nodes += [(node.op, node.name) for node in function.node_def]
        found = [name for kind, name in nodes if kind in KERNEL_RANDOM]
        # The state of a tf.random.Generator is in a variable: in checkpoints only if the store made it.
        own_handles = captured(self.graph, self.requested.variables)
        for operation in all_operations:
            if operation.type in GENERATOR_RANDOM and operation.inputs[0].name not in own_handles:
                found.append(operation.name)
        return found

    def function(
        self,
        fetches: Any,
        effects: Iterable[Any] = (),
        *,
        with_inputs: bool = True,
        feeds: Sequence[tf.Tensor] = (),
        build: Callable[..., Callable[..., list[tf.Tensor]]] = graphs.function_of_part,
    ) -> Callable[..., Any]:
        """Return the part of the trace that `fetches` and `effects` need, as a function.

        Args:
          fetches: a structure of tensors, which the function returns.
          effects: tensors and operations that must run, even if their value is not used.
          with_inputs: False: a function without arguments; `fetches` must then not depend on the inputs.
          feeds: placeholders of the trace that are further arguments, after the inputs; or other tensors, whose
            operations then do not run.
          build: makes the function, like `graphs.function_of_part`.

        Raises:
          ValueError: the part needs a placeholder of model_fn that is not among `feeds`.
        """
        effect_operations = operations(effects)
        flat_fetches = tf.nest.flatten(fetches, expand_composites=True)
        tensors = [tensor for tensor in flat_fetches if tensor is not None]
        arguments = [*self.inputs, *feeds] if with_inputs else list(feeds)
        fed = {tensor.op for tensor in feeds if not tensor.op.type.startswith("Placeholder")}
        running = needed(self.graph, [*effect_operations, *operations(tensors)], fed)
        if self.checks is not None:
            effect_operations += self.checks.add_checks(running, tensors)
            running = needed(self.graph, [*effect_operations, *operations(tensors)], fed)
        # Values that are computed at each call, such as the keys of collectives. The key of a collective that does not
        # run is not drawn: workers may call this a different number of times (each evaluates in loops of its own
        # length), and would then count keys differently, and wait for each other forever.
        call_time_values = [value for value in self._call_time_values if value.placeholder.op in running]
        arguments += [value.placeholder for value in call_time_values]
        self._check_fed(running, arguments)
        order: Mapping[tf.Operation, list[tf.Operation]] = {}
        if effect_operations:
            order = program_order(self.graph, self._put_reads_first(running))
        with graphs.control_inputs(order):
            part = build(graphs.Part(self.graph, running, arguments, tensors, effect_operations))

        def call(*inputs: tf.Tensor) -> Any:
            captured_now = [value.capture() for value in call_time_values]
            values = iter(part(*inputs, *captured_now))
            fetched = []
            for tensor in flat_fetches:
                value = None if tensor is None else next(values)
                fetched.append(value)
            return tf.nest.pack_sequence_as(fetches, fetched, expand_composites=True)

        return call

    def _put_reads_first(self, running: Sequence[tf.Operation]) -> Sequence[tf.Operation]:
        """Return `running` with the variable reads of hooks moved to the front.

        In a session such a read waits for nothing and returns the value before the step; TensorFlow's own hooks rely on
        that for the global step.
        """
        of_hooks = set(self.graph.get_operations()[len(self.operations) :])
        reads: list[tf.Operation] = []
        others: list[tf.Operation] = []
        for operation in running:
            is_read_of_hook = operation in of_hooks and operation.type == "ReadVariableOp"
            if is_read_of_hook and not operation.control_inputs:
                reads.append(operation)
            else:
                others.append(operation)
        return reads + others

    def _check_fed(self, running: Iterable[tf.Operation], arguments: Iterable[tf.Tensor]) -> None:
        """Check that each placeholder of model_fn in `running` is one of `arguments`.

        Raises:
          ValueError: one is not.
        """
        fed = {tensor.op for tensor in (*arguments, *self.inputs)}
        fed |= {inner.op for _, inner in self.graph.captures}
        for operation in running:
            if operation.type == "Placeholder" and operation not in fed:
                tensor = operation.outputs[0]
                raise ValueError(
                    f"You must feed a value for placeholder tensor {operation.name!r} with dtype {tensor.dtype.name} "
                    f"and shape {tensor.shape}: model_fn made it, but nothing feeds it. Feed it at each step from a "
                    f"hook's before_run with SessionRunArgs(feed_dict={{{tensor.name!r}: value}}), or use "
                    "tf.compat.v1.placeholder_with_default."
                )

    def needs_inputs(self, fetches: Any) -> bool:
        """Report whether a value depends on the step's inputs, and so on a batch."""
        inputs = {tensor.op for tensor in self.inputs}
        return not inputs.isdisjoint(needed(self.graph, operations([fetches])))
