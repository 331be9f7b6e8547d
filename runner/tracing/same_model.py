"""Whether all workers have traced the same model, which they ask each other before they make its variables.

A model_fn that goes through a set makes its variables in another order in each process, since Python's hashes of texts
differ. Their names (`dense`, `dense_1`) and shapes may be the same all the same, and the workers would add up the
gradients of different tables. So they compare for what each variable is used: a digest of the graph that leads to it.

A digest covers types of operations, their attributes and constants: axes, rates, the texts to which a feature is
compared. It does not cover what differs between processes that compute the same: names, paths, tokens of Python
functions, seeds, the last digits of numbers, what an operation only passes on (a print), sums in another order, and all
that no variable of the model depends on (summaries).

In the step of all local replicas they then compare their messages: the operations of type "Collective...", by which
workers sum values or gather them. All workers must run the same ones in the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.distribute.collectives import Collectives
from runner.tf_private.graphs import nodes_called_by
from runner.tf_private.random_ops import KERNEL_RANDOM
from runner.tracing.graph_operations import user_line_of

_PASSING_ON = frozenset({"Identity", "IdentityN", "Print", "CheckNumerics", "CheckNumericsV2", "EnsureShape"})
"""Types of operations that only pass values on: output n has the value of input n."""
_SUMS = frozenset({"Add", "AddV2", "AddN"})
_COMMUTATIVE = frozenset({"Mul", "Maximum", "Minimum"})
_TEXT_ATTRIBUTES = frozenset({"padding", "data_format", "equation", "mode", "merge_op", "reduction"})
"""Attributes with a text that says what an operation computes. Others are names, paths and tokens."""
_REMEDIES = (
    "A set, or what is made of one, has another order in each process: go through sorted(...) in its place, or set the "
    "environment variable PYTHONHASHSEED to the same number on all workers. Files, environment variables and versions "
    "of packages can differ, too."
)
_SEEDS = frozenset({"seed", "key", "counter", "alg"})
"""The names that TensorFlow gives to the inputs of a random operation that choose its numbers. They may differ between
workers."""
_MAX_STEPS_BACK = 10
"""Largest number of operations from a collective operation back to the one that a line of the user's code made."""
_MAX_FLOATS = 16
"""Largest number of floats in a constant that counts as a part of the graph: rates, weights of losses. The last digits
of tables that NumPy computes (positions, windows) may differ between processors.
"""


class WorkersDifferError(ValueError):
    """Raised on all workers when they would train different models.

    Attributes:
      is_clear: True: the text says enough, so no traceback is shown.
    """

    is_clear = True


@dataclasses.dataclass(frozen=True)
class GraphVariable:
    """A variable of the model in the graph of a step.

    Attributes:
      described: its name, shape and dtype.
      is_trainable: whether it is trained.
      handles: names of the tensors that stand for its handles.
    """

    described: str
    is_trainable: bool
    handles: Collection[str]


@dataclasses.dataclass(frozen=True)
class VariableUse:
    """What a worker compares of one variable.

    Attributes:
      described: its name, shape and dtype.
      is_trainable: whether it is trained.
      first_use: digest of the first operation that computes with it; '': none does.
      updates: digests of the operations that write to it.
    """

    described: str
    is_trainable: bool
    first_use: str
    updates: Sequence[str]


def check_same_model(uses: Sequence[VariableUse], collectives: Collectives) -> None:
    """Check that all workers found the same uses. All workers must call this together.

    Args:
      uses: the variables of the model in the order in which this worker makes them.
      collectives: communication between the workers.

    Raises:
      WorkersDifferError: another worker found others.
    """
    found = [dataclasses.astuple(use) for use in uses]
    other = _find_other_worker(found, collectives)
    if other is not None:
        difference = _describe_difference(other)
        raise WorkersDifferError(
            f"model_fn builds another model on worker {other.number} than on worker 0, the chief: {difference}. The "
            f"workers would add up what belongs to different variables. {_REMEDIES}"
        )


def check_same_messages(messages: Sequence[tuple[str, str]], collectives: Collectives) -> None:
    """Check that the steps of all workers have the same messages in the same order. All workers must call this
    together.

    Args:
      messages: as `messages_of` returns them.
      collectives: communication between the workers.

    Raises:
      WorkersDifferError: another worker has other messages.
    """
    other = _find_other_worker(messages, collectives)
    if other is None:
        return
    number = 0
    for (_, digest_of_chief), (_, digest_of_worker) in zip(other.of_chief, other.of_worker, strict=False):
        if digest_of_chief != digest_of_worker:
            break
        number += 1
    lines = set[str]()
    for messages_of_one in (other.of_chief, other.of_worker):
        if number < len(messages_of_one):  # one of the two workers may have fewer messages
            line, _ = messages_of_one[number]
            lines.add(line)
    raise WorkersDifferError(
        f"model_fn adds up values over the workers in another order on worker {other.number} than on worker 0, the "
        f"chief: number {number} is another{' or '.join(sorted(lines))}. {_REMEDIES}"
    )


class _DifferingWorker(NamedTuple):
    """A worker that has found something else than the chief.

    Attributes:
      number: index of the worker.
      of_chief: what the chief has found.
      of_worker: what the worker has found.
    """

    number: int
    of_chief: list[Any]
    of_worker: list[Any]


def _find_other_worker(found: Sequence[Any], collectives: Collectives) -> _DifferingWorker | None:
    """Return the first worker that has found something else than the chief; None: all have found the same. All workers
    must call this together.

    Args:
      found: what this worker has found; texts, numbers and lists of them.
    """
    texts = collectives.differing_texts(json.dumps(found))
    for worker, of_worker in enumerate(texts):
        if of_worker != texts[0]:
            return _DifferingWorker(worker, json.loads(texts[0]), json.loads(of_worker))
    return None


def uses_of(
    graph: Any,
    inputs: Iterable[tf.Tensor],
    variables: Sequence[GraphVariable],
    writes: Sequence[tf.Operation],
) -> list[VariableUse]:
    """Return the use of each variable in the graph of a training step, in the order of `variables`.

    Args:
      graph: the graph.
      inputs: the inputs of the step, in order.
      variables: the variables in the order in which they are made.
      writes: the operations that write to them.
    """
    structure = _Structure(inputs, variables)
    # Writes to other variables are left out: the state of a metric in training may differ between workers.
    of_model = [write for write in writes if structure.variables_of(write)]
    structure.add_all(graph, of_model)
    updates: dict[int, list[str]] = {}
    for write in of_model:
        for index in structure.variables_of(write):
            updates.setdefault(index, []).append(f"{structure.digest_of(write):x}")
    uses = []
    for index, variable in enumerate(variables):
        first_use = structure.first_uses.get(index)
        digest = "" if first_use is None else f"{first_use:x}"
        updates_of_variable = sorted(updates.get(index, []))
        uses.append(VariableUse(variable.described, variable.is_trainable, digest, updates_of_variable))
    return uses


def messages_of(graph: Any, inputs: Iterable[tf.Tensor], variables: Sequence[GraphVariable]) -> list[tuple[str, str]]:
    """Return (line of the user's code, digest) of each collective operation in the step of all local replicas, in
    program order.

    Args:
      graph: the graph of all local replicas.
      inputs: the inputs of the step, in order.
      variables: the variables in the order in which they are made.
    """
    collectives = [operation for operation in graph.get_operations() if operation.type.startswith("Collective")]
    structure = _Structure(inputs, variables, with_constants=False)  # the index of a replica is such a constant
    structure.add_all(graph, collectives)
    messages = []
    for operation in collectives:
        messages.append((_find_line_of_value(operation), f"{structure.digest_of(operation):x}"))
    return messages


def _find_line_of_value(collective: tf.Operation) -> str:
    """Return the line of the user's code that computes the value which a collective operation sums or gathers.

    Collective operations are added by the thread that called `train`, so their own stack shows the line of that call.
    Go back along first inputs to the first operation with another line: the user's.
    """
    line_of_train_call = user_line_of(collective)
    operation = collective
    for _ in range(_MAX_STEPS_BACK):
        if not operation.inputs:
            break
        operation = operation.inputs[0].op
        line = user_line_of(operation)
        if line not in ("", line_of_train_call):
            return line
    return line_of_train_call


class _Structure:
    """Digests of the operations of a graph, each of which covers all that leads to it.

    Args:
      inputs: the inputs of the step, in order.
      variables: the variables in the order in which they are made.
      with_constants: the values of constants are a part of what an operation computes.

    Attributes:
      first_uses: index of a variable -> digest of the first operation that computes with the variable and something
        else.
    """

    def __init__(
        self, inputs: Iterable[tf.Tensor], variables: Iterable[GraphVariable], *, with_constants: bool = True
    ) -> None:
        self._with_constants = with_constants
        self.first_uses: dict[int, int] = {}
        self._digests_of_operations: dict[str, int] = {}  # name of an operation -> digest
        self._digests: dict[str, int] = {}  # name of a tensor -> digest
        self._totals: dict[str, int] = {}  # name of the result of a sum -> sum of the digests of its summands
        self._indices_by_handle: dict[str, int] = {}  # name of a variable's handle -> index of the variable
        self._indices_by_value: dict[str, int] = {}  # name of a tensor with a variable's value -> index of the variable
        self._constants = set[str]()
        for number, tensor in enumerate(inputs):
            self._digests[tensor.name] = _digest_of(("input", number))
        for index, variable in enumerate(variables):
            for name in variable.handles:
                self._indices_by_handle[name] = index
                self._digests[name] = _digest_of(("variable", index))

    def variables_of(self, operation: tf.Operation) -> set[int]:
        """Return the indices of the variables whose handles are inputs of the operation."""
        indices = set[int]()
        for tensor in operation.inputs:
            if tensor.name in self._indices_by_handle:
                indices.add(self._indices_by_handle[tensor.name])
        return indices

    def add_all(self, graph: Any, wanted: Iterable[tf.Operation]) -> None:
        """Compute the digests of `wanted`, operations of the graph, and of all operations from which values flow into
        them.
        """
        needed_names = _needed_by(wanted)
        for operation in graph.get_operations():
            if operation.name in needed_names:
                self._add(operation)

    def digest_of(self, operation: tf.Operation) -> int:
        return self._digests_of_operations[operation.name]

    def _add(self, operation: tf.Operation) -> None:
        input_names = [tensor.name for tensor in operation.inputs]
        if operation.type in _PASSING_ON or _undoes_a_broadcast(operation):
            self._pass_on(input_names, operation)
        elif operation.type in _SUMS:
            self._add_sum(input_names, operation)
        else:
            self._add_computation(input_names, operation)
        self._mark_first_uses(input_names, operation)

    def _pass_on(self, input_names: Sequence[str], operation: tf.Operation) -> None:
        self._digests_of_operations[operation.name] = self._digests.get(input_names[0], 0)
        for output, name in zip(operation.outputs, input_names, strict=False):
            self._digests[output.name] = self._digests.get(name, 0)
            if name in self._totals:
                self._totals[output.name] = self._totals[name]

    def _add_sum(self, input_names: Sequence[str], operation: tf.Operation) -> None:
        total = 0
        for name in input_names:
            # If an input is a sum itself, add its summands: (a + b) + c and a + (b + c) get the same digest.
            total += self._totals.get(name, self._digests.get(name, 0))
        total %= 2**64
        (output,) = operation.outputs
        digest = _digest_of(("sum", total))
        self._totals[output.name] = total
        self._digests_of_operations[operation.name] = digest
        self._digests[output.name] = digest

    def _add_computation(self, input_names: Sequence[str], operation: tf.Operation) -> None:
        if _is_random(operation.type):
            input_names = _without_seeds(input_names, operation)
        digests_of_inputs = [self._digests.get(name, 0) for name in input_names]
        if operation.type in _COMMUTATIVE:
            digests_of_inputs.sort()
        attributes = _attributes(operation, with_constants=self._with_constants)
        digest = _digest_of((operation.type, digests_of_inputs, attributes))
        self._digests_of_operations[operation.name] = digest
        for number, output in enumerate(operation.outputs):
            # The placeholder of a step's input, or of a handle, keeps the digest from `__init__`.
            self._digests.setdefault(output.name, _digest_of((digest, number)))

    def _mark_first_uses(self, input_names: Sequence[str], operation: tf.Operation) -> None:
        """Record the operation as the first use of the variables with which it computes, if they have none yet.

        An operation with one variable and otherwise only constants as inputs (a cast, a transpose) is no use: its
        outputs stand for the variable in the operations that follow.
        """
        if operation.type == "Const":
            self._constants.update(output.name for output in operation.outputs)
            return
        indices = set[int]()
        other_inputs = set[str]()
        for name in input_names:
            index = self._indices_by_value.get(name, self._indices_by_handle.get(name))
            if index is not None:
                indices.add(index)
            elif name not in self._constants:
                other_inputs.add(name)
        is_of_one_variable = len(indices) == 1 and not other_inputs
        for index in indices:
            if is_of_one_variable:
                for output in operation.outputs:
                    self._indices_by_value[output.name] = index
            else:
                self.first_uses.setdefault(index, self._digests_of_operations[operation.name])


def _needed_by(wanted: Iterable[tf.Operation]) -> set[str]:
    """Return the names of operations from which values flow into `wanted`, those included."""
    found = set[str]()
    waiting = list(wanted)
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found.add(operation.name)
            for tensor in operation.inputs:
                waiting.append(tensor.op)
    return found


def _undoes_a_broadcast(operation: tf.Operation) -> bool:
    """Report whether the operation belongs to the gradient of a broadcast, and only changes the shape. There is one for
    each addition that a value has passed through, so their number depends on the order of a sum.
    """
    if operation.type not in ("Sum", "Reshape"):
        return False
    _, axes_or_shape = operation.inputs
    return axes_or_shape.op.type in ("BroadcastGradientArgs", "Shape")


def _is_random(kind: str) -> bool:
    # Random operations with a seed as input are called Stateless..., and so are three operations that call functions.
    is_stateless = kind.startswith("Stateless") and kind not in ("StatelessIf", "StatelessWhile", "StatelessCase")
    return is_stateless or kind in KERNEL_RANDOM


def _without_seeds(input_names: Sequence[str], operation: tf.Operation) -> list[str]:
    """Return the names of the inputs of a random operation that are no seeds: its shape, the parameters of its
    distribution, what it draws from.
    """
    kept: list[str] = []
    for name, definition in zip(input_names, operation.op_def.input_arg, strict=True):
        if definition.name not in _SEEDS:
            kept.append(name)
    return kept


def _attributes(operation: tf.Operation, *, with_constants: bool) -> list[Any]:
    """Return what the attributes of an operation, and the functions that it calls, say about what it computes."""
    found: list[Any] = []
    for name, value in sorted(operation.node_def.attr.items()):
        if name.startswith("_"):  # what TensorFlow notes for itself, such as a device or a colocation
            continue
        kind = value.WhichOneof("value")
        is_number = kind in ("i", "b", "f", "type") and name not in ("seed", "seed2")
        if is_number or name in _TEXT_ATTRIBUTES:
            found += [name, getattr(value, kind)]
        elif kind == "list":
            numbers = value.list
            found += [name, list(numbers.i), list(numbers.b), list(numbers.f), list(numbers.type)]
        elif kind == "tensor" and with_constants:
            found.append(_values_of(operation))
    # Only types: the names of functions and of their nodes may differ between processes.
    found += sorted(node.op for node in nodes_called_by(operation))
    return found


def _values_of(constant: tf.Operation) -> list[Any]:
    """Return the values of a constant as far as all workers must have the same: integers, truth values, texts that are
    no paths, and three digits of a few floats.
    """
    (output,) = constant.outputs
    dtype = output.dtype
    is_table = dtype.is_floating and output.shape.num_elements() > _MAX_FLOATS
    if is_table:
        return []
    value = tf.get_static_value(output)
    if value is None:
        return []
    if dtype.is_integer or dtype.is_bool:
        return value.ravel().tolist()
    if dtype.is_floating:
        return [f"{float(number):.3g}" for number in value.ravel()]
    if dtype == tf.string:
        return [text for text in np.ravel(value).tolist() if b"/" not in text]
    return []


def _digest_of(facts: Any) -> int:
    """Return a number of 64 bits for a text, or for texts and numbers in lists and tuples."""
    # Not Python's `hash`, which differs in each process.
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _describe_difference(other: _DifferingWorker) -> str:
    """Return in words what is different about the first variable that differs."""
    pairs = []
    for of_chief, of_worker in zip(other.of_chief, other.of_worker, strict=False):
        pairs.append((VariableUse(*of_chief), VariableUse(*of_worker)))
    for number, (on_chief, on_worker) in enumerate(pairs):
        if on_chief.described != on_worker.described:
            described_on_worker = f"{on_worker.described} on worker {other.number}"
            return f"variable number {number} is {on_chief.described} on the chief and {described_on_worker}"
        if on_chief.is_trainable != on_worker.is_trainable:
            return f"{on_chief.described} is trained on one of them only"
    # Trained variables first: another one may be used by the update alone, whose digest depends on all variables, so it
    # also differs where the cause is elsewhere.
    for on_chief, on_worker in pairs:
        if on_chief.is_trainable and on_chief.first_use != on_worker.first_use:
            return f"{on_chief.described} is used for something else there"
    for on_chief, on_worker in pairs:
        if on_chief != on_worker:
            return f"{on_chief.described} is updated by another computation there"
    return f"it has {len(other.of_worker)} variables there, and {len(other.of_chief)} on the chief"
