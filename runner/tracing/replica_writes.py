"""What model_fn writes to a variable, on several replicas: the same everywhere, or merged exactly, or refused.

A value that is the same on all replicas is written by each to its own copy. A value that is computed from sums and
means over the replica's batch becomes that of the global batch: the sums and means are reduced, and what follows from
them is computed from the results. A request for the variable that says how to aggregate (`aggregation=`) is trusted.
Anything else is refused by name, as tf.estimator refused every write without `aggregation=`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.gradient_calls import writes_in
from runner.distribute.reductions import Reductions
from runner.distribute.replica_values import Kind, ReplicaValues
from runner.tf_private.cluster import writes_of_replicas
from runner.tf_private.replaced import replaced
from runner.tracing.graph_operations import captured, table_writes, user_line_of

v1 = tf.compat.v1
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_OF_OTHER_REPLICA = re.compile(r"(^|/)replica_[1-9]\d*/")
"""In the name of an operation that was made for a replica beside the first one, and not for all of them."""
_MERGED = (Kind.MEAN, Kind.SUM, Kind.OF_MEANS, Kind.OF_SUMS)


class WriteError(ValueError):
    """Raised when model_fn writes to a variable what would differ between replicas.

    Attributes:
      is_clear: True: the text says enough, so no traceback is shown.
    """

    is_clear = True


class ReplicaWrites:
    """The writes of model_fn to variables during one trace of all local replicas.

    Args:
      strategy: the strategy.
      reductions: its reductions.
      values: what is known of the tensors of the trace.
      says_how_to_aggregate: variable -> whether the request for it says what becomes of the values of several replicas.
      graph: the graph of the step.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        reductions: Reductions,
        values: ReplicaValues,
        says_how_to_aggregate: Callable[[Any], bool],
        graph: Any,
    ) -> None:
        self._strategy = strategy
        self._reductions = reductions
        self._values = values
        self._says_how_to_aggregate = says_how_to_aggregate
        self._graph = graph

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Decide inside this context, by `_merge`, what is written to variables of the model."""
        extended = self._strategy.extended
        reduce_to = extended.reduce_to

        def reduce_write(op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
            reduce_as_asked = functools.partial(reduce_to, op, value, destinations, options)
            # `assign_moving_average` asks for the mean over replicas, whatever the value is.
            is_write = op == tf.distribute.ReduceOp.MEAN and isinstance(destinations, tf.Variable)
            if is_write:
                return self._merge(value, destinations, reduce_as_asked)
            return reduce_as_asked()

        apply_gradients = v1.train.Optimizer.apply_gradients

        def apply_in_branch(optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            # In a branch replicas cannot meet to sum gradients; these are the same on all, so there is nothing to sum.
            if self._writes_its_own([gradient for gradient, _ in pairs]):
                kwargs["skip_gradients_aggregation"] = True
            return apply_gradients(optimizer, pairs, *args, **kwargs)

        with (
            replaced(extended, "reduce_to", reduce_write),
            replaced(v1.train.Optimizer, "apply_gradients", apply_in_branch),
            writes_of_replicas(self._merge, self._writes_its_own),
        ):
            yield

    def _writes_its_own(self, value: Any) -> bool:
        """Report whether a value is written where replicas cannot meet, in a branch or loop, and is the same on all."""
        graph = v1.get_default_graph()
        if graph is self._graph:
            return False
        # A tf.function is traced once for all replicas, so what it writes would be written to one copy.
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        return graph is self._graph and self._values.kind(value) is Kind.SAME

    def _merge(self, value: Any, variable: Any, aggregate: Callable[[], Any]) -> Any:
        """Return what is written to all copies of a variable.

        Args:
          value: the values of the local replicas.
          variable: the variable.
          aggregate: returns what TensorFlow makes of these values by the aggregation of the variable.

        Raises:
          WriteError: the values depend on the batches of the replicas, and it is not known how they become one.
        """
        if self._says_how_to_aggregate(variable):
            merged = aggregate()
            self._values.are_same(self._strategy.experimental_local_results(merged))
            return merged
        of_replicas = self._strategy.experimental_local_results(value)
        kinds = {self._values.kind(tensor) for tensor in of_replicas}
        if kinds == {Kind.SAME}:
            return value
        is_known = len(kinds) == 1 and kinds.issubset(_MERGED)
        if not is_known:
            name, _, _ = variable.name.partition(":")
            raise WriteError(_refusal(name, getattr(of_replicas[-1], "op", None)))
        return self._compute_again(of_replicas)

    def check(self, names: Mapping[str, str], *, has_one_copy: bool) -> None:
        """Check that all writes of the trace write the same on all replicas, also those that no variable was asked for:
        operations of `tf.raw_ops`, the scatter functions of TensorFlow 1, branches.

        Args:
          names: the name of the tensor that stands for the handle of a copy of a variable -> name of the variable.
          has_one_copy: all replicas have the same copy of each variable.

        Raises:
          WriteError: one does not.
        """
        for write in table_writes(self._graph.get_operations()):
            raise WriteError(
                f"model_fn changes a lookup table{user_line_of(write)}, and what a table holds is not merged over "
                "replicas. Train on one replica, or keep the values in a variable."
            )
        for write in writes_in(self._graph.get_operations(), names.keys()):
            variables = [names[tensor.name] for tensor in write.inputs if tensor.name in names]
            if has_one_copy and _OF_OTHER_REPLICA.search(write.name):
                raise WriteError(
                    f"model_fn writes to a slice of the variable {variables[0]!r}, or by tf.raw_ops"
                    f"{user_line_of(write)}. With central_storage all replicas have one copy, to which they would do "
                    "so one after the other. Assign the whole variable, or train with strategy=mirrored."
                )
            written = [tensor for tensor in write.inputs if tensor.dtype != tf.resource]
            if write.type in _BRANCHES:
                written = written[:1]  # the condition; what is written was checked where it was written
            for tensor in written:
                if self._values.kind(tensor) is not Kind.SAME:
                    raise WriteError(_refusal(variables[0], write))

    def _compute_again(self, of_replicas: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the value for the global batch, given the value on each local replica.

        The sums and means over a replica's batch from which the value is computed are reduced over replicas. The
        operations that follow are then copied, with the results as their inputs.
        """
        parts = [self._values.reduced_parts(tensor) for tensor in of_replicas]
        leaves_of_replicas = [leaves for leaves, _ in parts]
        # A sum or mean of the first replica -> its value over all replicas.
        totals: dict[Any, tf.Tensor] = {}
        for leaves in zip(*leaves_of_replicas, strict=True):
            of_first = leaves[0]
            is_sum = self._values.kind(of_first) is Kind.SUM
            op = tf.distribute.ReduceOp.SUM if is_sum else tf.distribute.ReduceOp.MEAN
            totals[of_first.ref()] = self._reductions.over_replicas(op, leaves)
        self._values.are_same(list(totals.values()))
        value = of_replicas[0]
        _, between = parts[0]
        if not between:
            return totals[value.ref()]
        merged = _compute_from(totals, value, between)
        self._values.are_same(merged)
        return merged


def check_variables_of_others(graph: Any, others: Sequence[Any]) -> None:
    """Check that model_fn does not write to variables that were made outside of it: all replicas have the same one.

    Raises:
      WriteError: it does.
    """
    for variable in others:
        name, _, _ = variable.name.partition(":")
        for write in writes_in(graph.get_operations(), captured(graph, [variable])):
            raise WriteError(
                f"model_fn writes to the variable {name!r}, which was made outside of it"
                f"{user_line_of(write)}: each replica would do so. Make the variable inside model_fn."
            )


def _compute_from(replaced_by: Mapping[Any, tf.Tensor], value: tf.Tensor, between: Sequence[tf.Operation]) -> tf.Tensor:
    """Return `value`, computed by a copy of the operations `between` from other tensors.

    Args:
      replaced_by: reference of a tensor -> the tensor to use in its place.
      value: the tensor, an output of one of these operations.
      between: the operations to copy.
    """
    outputs = set[Any]()
    for operation in between:
        outputs.update(output.ref() for output in operation.outputs)
    definition = v1.GraphDef()
    inputs_from_outside: dict[str, tf.Tensor] = {}
    definition.versions.CopyFrom(value.graph.graph_def_versions)
    for operation in between:
        node = definition.node.add()
        node.CopyFrom(operation.node_def)
        del node.input[:]
        node.attr.pop("_class", None)
        for number, tensor in enumerate(operation.inputs):
            name = tensor.name
            if tensor.ref() not in outputs:
                name = f"{operation.name}_input_{number}:0"
                inputs_from_outside[name] = replaced_by.get(tensor.ref(), tensor)
            node.input.append(name)
    (merged,) = tf.graph_util.import_graph_def(definition, inputs_from_outside, [value.name], "over_replicas")
    return merged


def _refusal(name: str, operation: tf.Operation | None) -> str:
    """Return the message about a write to the variable `name` that is refused; `operation` tells the user's line."""
    line = user_line_of(operation)
    return (
        f"model_fn writes to the variable {name!r} what depends on the batch of one replica{line}, and "
        "the runner does not know how the values of several replicas become one. "
        "If it is a sum over examples, request the variable with aggregation=tf.VariableAggregation.SUM; if a mean, "
        "with MEAN; if it is the same on all replicas, with ONLY_FIRST_REPLICA. Else compute it from "
        "runner.all_gather(tensor), which has the examples of all replicas, or train on one replica."
    )
