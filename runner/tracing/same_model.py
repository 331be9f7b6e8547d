"""Whether all workers have traced the same model, which they ask each other before they make its variables.

A model_fn that goes through a set makes its variables in another order in each process, since Python's hashes of texts
differ. Their names (`dense`, `dense_1`) and shapes may be the same all the same, and the workers would add up the
gradients of different tables. So they compare for what each variable is used: a digest of the graph that leads to it.

A digest covers types of operations, their attributes and small integer constants such as axes. It does not cover what
differs between processes that compute the same: names, paths, tokens of Python functions, seeds, what an operation only
passes on (a print), sums in another order, and all that no variable of the model depends on (summaries).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.distribute.collectives import Collectives
from runner.tf_private.graphs import nodes_called_by
from runner.tf_private.random_ops import KERNEL_RANDOM
from runner.tracing.graph_operations import user_line_of

_PASSING_ON = frozenset({"Identity", "IdentityN", "Print", "CheckNumerics", "CheckNumericsV2", "EnsureShape"})
"""Types of operations whose outputs are their first inputs."""
_SUMS = frozenset({"Add", "AddV2", "AddN"})
_IN_ANY_ORDER = frozenset({"Mul", "Maximum", "Minimum"})
_WORDS = frozenset({"padding", "data_format", "equation", "mode", "merge_op", "reduction"})
"""Attributes with a text that says what an operation computes. Others are names, paths and tokens."""
_CURES = (
    "A set, or what is made of one, has another order in each process: go through sorted(...) in its place, or set the "
    "environment variable PYTHONHASHSEED to the same number on all workers. Files, environment variables and versions "
    "of packages can differ, too."
)
_MOST_BEFORE = 10
"""Largest number of operations between a value of the user's and the message that takes it to other workers."""
_MOST_INTEGERS = 16
"""Largest number of integers in a constant that counts as a part of the graph: axes, shapes, indices of columns."""


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
            f"workers would add up what belongs to different variables. {_CURES}"
        )


def check_same_messages(messages: Sequence[tuple[str, str]], collectives: Collectives) -> None:
    """Check that all workers send each other the same messages in the same order. All workers must call this together.

    Args:
      messages: as `messages_of` returns them.
      collectives: communication between the workers.

    Raises:
      WorkersDifferError: another worker sends others.
    """
    other = _find_other_worker(messages, collectives)
    if other is None:
        return
    place = 0
    for (_, digest_of_chief), (_, digest_of_worker) in zip(other.of_chief, other.of_worker, strict=False):
        if digest_of_chief != digest_of_worker:
            break
        place += 1
    lines = set[str]()
    for sent in (other.of_chief, other.of_worker):
        if place < len(sent):  # else it sends fewer
            line, _ = sent[place]
            lines.add(line)
    raise WorkersDifferError(
        f"model_fn adds up values over the workers in another order on worker {other.number} than on worker 0, the "
        f"chief: number {place} is another{' or '.join(sorted(lines))}. {_CURES}"
    )


class _Other(NamedTuple):
    """A worker that has found something else than the chief."""

    number: int
    of_chief: list[Any]
    of_worker: list[Any]


def _find_other_worker(found: Sequence[Any], collectives: Collectives) -> _Other | None:
    """Return the first worker that has found something else than the chief; None: all have found the same.

    Args:
      found: what this worker has found; texts, numbers and lists of them.
    """
    texts = collectives.differing_texts(json.dumps(found))
    for worker, of_worker in enumerate(texts):
        if of_worker != texts[0]:
            return _Other(worker, json.loads(texts[0]), json.loads(of_worker))
    return None


def uses_of(
    graph: Any,
    inputs: Iterable[tf.Tensor],
    variables: Sequence[GraphVariable],
    writes: Sequence[tf.Operation],
) -> list[VariableUse]:
    """Return the uses of variables in the graph of a training step.

    Args:
      graph: the graph.
      inputs: the inputs of the step, in order.
      variables: the variables in the order in which they are made.
      writes: the operations that write to them.
    """
    structure = _Structure(inputs, variables)
    # Not those of a metric in training: they may differ.
    of_model = [write for write in writes if structure.places_of(write)]
    structure.add_all(graph, of_model)
    updates: dict[int, list[str]] = {}
    for write in of_model:
        for place in structure.places_of(write):
            updates.setdefault(place, []).append(f"{structure.of_operation(write):x}")
    uses = []
    for place, variable in enumerate(variables):
        first_use = structure.first_uses.get(place)
        digest = "" if first_use is None else f"{first_use:x}"
        updates_of_variable = sorted(updates.get(place, []))
        uses.append(VariableUse(variable.described, variable.is_trainable, digest, updates_of_variable))
    return uses


def messages_of(graph: Any, inputs: Iterable[tf.Tensor], variables: Sequence[GraphVariable]) -> list[tuple[str, str]]:
    """Return (line of the user's code, digest) of each value that the step of all local replicas sends to the other
    workers, in program order.

    Args:
      graph: the graph of all local replicas.
      inputs: the inputs of the step, in order.
      variables: the variables in the order in which they are made.
    """
    sends = [operation for operation in graph.get_operations() if operation.type.startswith("Collective")]
    structure = _Structure(inputs, variables, with_integers=False)  # the number of a replica is one
    structure.add_all(graph, sends)
    messages = []
    for operation in sends:
        messages.append((_find_line_of_value(operation), f"{structure.of_operation(operation):x}"))
    return messages


def _find_line_of_value(send: tf.Operation) -> str:
    """Return the line of the user's code that computes what is sent. Who sends is the thread that called `train`."""
    of_caller = user_line_of(send)
    operation = send
    for _ in range(_MOST_BEFORE):
        if not operation.inputs:
            break
        operation = operation.inputs[0].op
        line = user_line_of(operation)
        if line not in ("", of_caller):
            return line
    return of_caller


class _Structure:
    """Digests of the operations of a graph, each of which covers all that leads to it.

    Args:
      inputs: the inputs of the step, in order.
      variables: the variables in the order in which they are made.
      with_integers: small constants of integers are a part of what an operation computes.

    Attributes:
      first_uses: place -> digest of the first operation that computes with the variable and something else.
    """

    def __init__(
        self, inputs: Iterable[tf.Tensor], variables: Iterable[GraphVariable], *, with_integers: bool = True
    ) -> None:
        self._with_integers = with_integers
        self._places: dict[str, int] = {}  # tensor with the handle of a variable, by name -> the variable's place
        self.first_uses: dict[int, int] = {}
        self._digests: dict[str, int] = {}  # of tensors, by name
        self._values: dict[str, int] = {}  # tensor with the value of a variable, by name -> the variable's place
        self._sums: dict[str, int] = {}  # of what a sum adds up, by the name of its tensor
        self._operations: dict[str, int] = {}
        self._constants = set[str]()
        for number, tensor in enumerate(inputs):
            self._digests[tensor.name] = _digest_of(("input", number))
        for place, variable in enumerate(variables):
            for name in variable.handles:
                self._places[name] = place
                self._digests[name] = _digest_of(("variable", place))

    def places_of(self, operation: tf.Operation) -> set[int]:
        """Return the places of the variables whose handles the operation has."""
        places = set[int]()
        for tensor in operation.inputs:
            if tensor.name in self._places:
                places.add(self._places[tensor.name])
        return places

    def add_all(self, graph: Any, wanted: Iterable[tf.Operation]) -> None:
        """Compute the digests of operations of the graph."""
        is_needed = _needed_by(wanted)
        for operation in graph.get_operations():
            if operation.name in is_needed:
                self._add(operation)

    def of_operation(self, operation: tf.Operation) -> int:
        return self._operations[operation.name]

    def _add(self, operation: tf.Operation) -> None:
        inputs = [tensor.name for tensor in operation.inputs]
        if operation.type in _PASSING_ON or _undoes_a_broadcast(operation):
            self._pass_on(inputs, operation)
        elif operation.type in _SUMS:
            self._add_sum(inputs, operation)
        else:
            self._add_computation(inputs, operation)
        self._mark_first_uses(inputs, operation)

    def _pass_on(self, inputs: Sequence[str], operation: tf.Operation) -> None:
        self._operations[operation.name] = self._digests.get(inputs[0], 0)
        for output, name in zip(operation.outputs, inputs, strict=False):
            self._digests[output.name] = self._digests.get(name, 0)
            if name in self._sums:
                self._sums[output.name] = self._sums[name]

    def _add_sum(self, inputs: Sequence[str], operation: tf.Operation) -> None:
        total = 0
        for name in inputs:
            # What is added to a sum is one of its summands, so that the order in which they are added does not matter.
            total += self._sums.get(name, self._digests.get(name, 0))
        total %= 2**64
        (output,) = operation.outputs
        digest = _digest_of(("sum", total))
        self._sums[output.name] = total
        self._operations[operation.name] = digest
        self._digests[output.name] = digest

    def _add_computation(self, inputs: Sequence[str], operation: tf.Operation) -> None:
        of_inputs = [self._digests.get(name, 0) for name in inputs]
        if operation.type in _IN_ANY_ORDER:
            of_inputs.sort()
        if _is_random(operation.type):
            of_inputs.clear()  # seeds
        attributes = _attributes(operation, with_integers=self._with_integers)
        digest = _digest_of((operation.type, of_inputs, attributes))
        self._operations[operation.name] = digest
        for number, output in enumerate(operation.outputs):
            # An input has its digest already.
            self._digests.setdefault(output.name, _digest_of((digest, number)))

    def _mark_first_uses(self, inputs: Sequence[str], operation: tf.Operation) -> None:
        """Record of which variables the operation is the first use. One of constants and a single variable (its cast,
        its transpose) is none: what it returns stands for the variable.
        """
        if operation.type == "Const":
            self._constants.update(output.name for output in operation.outputs)
            return
        places = set[int]()
        others = set[str]()
        for name in inputs:
            place = self._values.get(name, self._places.get(name))
            if place is not None:
                places.add(place)
            elif name not in self._constants:
                others.add(name)
        is_of_one_variable = len(places) == 1 and not others
        for place in places:
            if is_of_one_variable:
                for output in operation.outputs:
                    self._values[output.name] = place
            else:
                self.first_uses.setdefault(place, self._operations[operation.name])


def _needed_by(writes: Iterable[tf.Operation]) -> set[str]:
    """Return the names of operations from which values flow into `writes`, themselves included."""
    found = set[str]()
    waiting = list(writes)
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
    _, by = operation.inputs
    return by.op.type in ("BroadcastGradientArgs", "Shape")


def _is_random(kind: str) -> bool:
    is_stateless = kind.startswith("Stateless") and kind not in ("StatelessIf", "StatelessWhile", "StatelessCase")
    return is_stateless or kind in KERNEL_RANDOM


def _attributes(operation: tf.Operation, *, with_integers: bool) -> list[Any]:
    """Return what the attributes of an operation say about what it computes."""
    found: list[Any] = []
    for name, value in sorted(operation.node_def.attr.items()):
        kind = value.WhichOneof("value")
        is_number = kind in ("i", "b", "f", "type") and name not in ("seed", "seed2")
        if name.startswith("_"):
            continue
        if is_number or name in _WORDS:
            found += [name, getattr(value, kind)]
        elif kind == "list":
            numbers = value.list
            found += [name, list(numbers.i), list(numbers.b), list(numbers.f), list(numbers.type)]
        elif kind == "tensor" and with_integers:
            found.append(_integers(operation))
    found += sorted(node.op for node in nodes_called_by(operation))
    return found


def _integers(constant: tf.Operation) -> list[int]:
    """Return the values of a constant with a few integers; [] for another."""
    (output,) = constant.outputs
    is_small = output.dtype.is_integer and output.shape.num_elements() <= _MOST_INTEGERS
    if not is_small:
        return []
    value = tf.get_static_value(output)
    if value is None:
        return []
    return value.ravel().tolist()


def _digest_of(facts: Any) -> int:
    """Return a number of 64 bits for a text, or for texts and numbers in lists and tuples."""
    # Not Python's `hash`, which differs in each process.
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _describe_difference(other: _Other) -> str:
    """Return in words what is different about the first variable that differs."""
    pairs = []
    for of_chief, of_worker in zip(other.of_chief, other.of_worker, strict=False):
        pairs.append((VariableUse(*of_chief), VariableUse(*of_worker)))
    for place, (on_chief, there) in enumerate(pairs):
        if on_chief.described != there.described:
            on_worker = f"{there.described} on worker {other.number}"
            return f"variable number {place} is {on_chief.described} on the chief and {on_worker}"
        if on_chief.is_trainable != there.is_trainable:
            return f"{on_chief.described} is trained on one of them only"
    # A variable that is not trained may be used by the update alone, which depends on all others.
    for on_chief, there in pairs:
        if on_chief.is_trainable and on_chief.first_use != there.first_use:
            return f"{on_chief.described} is used for something else there"
    for on_chief, there in pairs:
        if on_chief != there:
            return f"{on_chief.described} is updated by another computation there"
    return f"it has {len(other.of_worker)} variables there, and {len(other.of_chief)} on the chief"
