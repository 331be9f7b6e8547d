"""Operations of a traced graph: which of them have an effect, and in which order they run."""

from __future__ import annotations

import collections
import linecache
import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner.distribute.gradient_calls import writes_in
from runner.tf_private.graphs import nodes_called_by
from runner.tf_private.random_ops import KERNEL_RANDOM
from runner.tf_private.variables import copies_of

_READS = frozenset(
    {"Identity", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)

# Stateful operations that call a function.
CALLS = frozenset({"If", "While", "Case", "StatefulPartitionedCall"})

# Marked stateful, but without an effect of their own.
_SOURCES = frozenset({"VarHandleOp", "Placeholder", "PlaceholderWithDefault", "HashTableV2", "SummaryWriter"})


def operations(values: Iterable[Any]) -> list[tf.Operation]:
    """Return the operations of tensors, operations and values that convert to tensors (an update may be a variable)."""
    found: dict[tf.Operation, None] = {}
    for value in tf.nest.flatten(list(values), expand_composites=True):
        operation = value if isinstance(value, tf.Operation) else getattr(value, "op", None)
        if isinstance(operation, tf.Operation):
            found[operation] = None
    return list(found)


def changes_state(operation: tf.Operation) -> bool:
    """Report whether the operation does something to a resource other than reading it."""
    return operation.type not in _READS and uses_resource(operation)


def uses_resource(operation: tf.Operation) -> bool:
    """Report whether an input of the operation is a variable, a table or another resource."""
    return any(tensor.dtype == tf.resource for tensor in operation.inputs)


def has_effect(operation: tf.Operation) -> bool:
    """Report whether tf.function would run the operation for its effect: it is stateful and more than a source of
    values.
    """
    is_without_effect = operation.type in _READS or operation.type in _SOURCES or operation.type in KERNEL_RANDOM
    return operation.op_def.is_stateful and not is_without_effect


_TABLE_WRITES = frozenset({"LookupTableInsertV2", "LookupTableRemoveV2"})


def table_writes(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Return those of `operations` that add to a lookup table or remove from it, or call a function that does."""
    found = []
    for operation in operations:
        if not changes_state(operation):  # most of them, whose definitions take long to read
            continue
        kinds = {node.op for node in nodes_called_by(operation)}
        kinds.add(operation.type)
        if kinds & _TABLE_WRITES:
            found.append(operation)
    return found


def needed(
    graph: Any, fetched: Iterable[tf.Operation], given: Container[tf.Operation] = frozenset()
) -> list[tf.Operation]:
    """Return the operations that `fetched` depend on, themselves included, in program order.

    Args:
      given: operations that need not run, because their outputs are fed.
    """
    running = set[tf.Operation]()
    stack = list(fetched)
    while stack:
        operation = stack.pop()
        if operation not in running and operation not in given:
            running.add(operation)
            stack += [tensor.op for tensor in operation.inputs]
            stack += operation.control_inputs
    return [operation for operation in graph.get_operations() if operation in running]


def sent_first(running: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Return the operations whose results this process sends first: the inputs of collectives that depend on no other
    collective. They run without waiting for another process.

    Args:
      running: operations in program order.
    """
    after_collective: set[tf.Operation] = set()  # collectives, and operations that depend on one
    sent = []
    for operation in running:
        input_operations = [tensor.op for tensor in operation.inputs]
        is_late = not after_collective.isdisjoint(input_operations)
        is_collective = operation.type.startswith("Collective")
        if is_collective and not is_late:
            sent.append(input_operations[0])  # the value; other inputs are its keys and sizes
        if is_collective or is_late:
            after_collective.add(operation)
    return list(dict.fromkeys(sent))


def handles(variable: Any, replica: int | None = None) -> list[Any]:
    """Return the handles of a variable, one for each copy or part; with `replica`, only that of this local replica."""
    copies = copies_of(variable)
    if replica is not None and len(copies) > 1:
        copies = [copies[replica]]
    return [copy.handle for copy in copies]


def captured(graph: Any, variables: Iterable[Any], replica: int | None = None) -> set[str]:
    """Return the names of the tensors that stand for the handles of `variables` in the graph."""
    wanted = set[int]()
    for variable in variables:
        wanted.update(map(id, handles(variable, replica)))
    return {internal.name for external, internal in graph.captures if id(external) in wanted}


def may_write(graph: Any, variables: Iterable[Any], elements: Iterable[Any]) -> bool:
    """Report whether an operation that `elements` need writes to one of `variables`, or may do so in a branch."""
    running = needed(graph, operations(elements))
    return any(writes_in(running, captured(graph, variables)))


def program_order(graph: Any, running: Iterable[tf.Operation]) -> dict[tf.Operation, list[tf.Operation]]:
    """Return the control inputs by which `running` run in program order, variable by variable: operation -> those
    that must run before it. A read waits for the last write, a write for the last write and for all reads since.

    Args:
      running: operations in program order. Only these are connected, so nothing else is pulled in. The order of
        creation is topological, so there are no cycles.
    """
    resources: dict[str, int] = {}  # name of the tensor that stands for a handle in the graph -> id of the handle
    for external, internal in graph.captures:
        if internal.dtype == tf.resource:
            resources[internal.name] = id(external)
    edges: dict[tf.Operation, list[tf.Operation]] = {}
    last_write: dict[int, tf.Operation] = {}
    reads: dict[int, list[tf.Operation]] = collections.defaultdict(list)
    for operation in running:
        used = {resources[tensor.name] for tensor in operation.inputs if tensor.name in resources}
        predecessors = set[tf.Operation]()
        for resource in used:
            if resource in last_write:
                predecessors.add(last_write[resource])
            if operation.type in _READS:
                reads[resource].append(operation)
            else:
                predecessors.update(reads.pop(resource, ()))
                last_write[resource] = operation
        predecessors -= {operation, *operation.control_inputs}
        if predecessors:
            edges[operation] = sorted(predecessors, key=lambda other: other.name)
    return edges


def user_line_of(operation: tf.Operation | None) -> str:
    """Return the line of the user's code that made an operation, as ' (model.py, line 3: ...)'."""
    if operation is None:
        return ""
    packages = (os.path.dirname(tf.__file__), str(Path(__file__).parents[1]))
    user_frames = []
    for frame in operation.traceback:
        is_of_package = frame.filename.startswith(packages) or "site-packages" in frame.filename
        if not is_of_package:
            user_frames.append(frame)
    if not user_frames:
        return ""
    frame = user_frames[-1]
    line = frame.line or linecache.getline(frame.filename, frame.lineno).strip()
    return f" ({frame.filename}, line {frame.lineno}: {line})"
