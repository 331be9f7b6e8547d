"""`train.jit`: XLA compiles what each replica computes, from its batch to its gradients.

The gradient program runs in three stages. *Before*: operations that read variables and other state, and what they
depend on (the ids of an embedding). *Compiled*: one stateless function per replica, from there to its loss and
gradients. *After*: other fetches and effects (moving averages, summaries), which use the values of those functions.
Sums over replicas and the update are another program (`runner.programs.gradient_accumulation`), which is not compiled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private import graphs
from runner.tracing.graph_operations import CALLS, has_effect, uses_resource

_SOURCES = ("Placeholder", "PlaceholderWithDefault")


class Gradients:
    """The gradients of a traced step, for XLA to compile.

    Args:
      roots: for each replica, the tensors to compile: its loss and gradients.

    Raises:
      ValueError: XLA cannot compile them; the message names the operation and the reason.
    """

    def __init__(self, roots: Sequence[Sequence[tf.Tensor]]) -> None:
        self._roots = roots
        program = roots[0][0].graph.get_operations()
        _check(self._replicas(), program)

    def _replicas(self) -> list[_Replica]:
        return [_Replica.of(roots_of_replica) for roots_of_replica in self._roots]

    def function_of_part(self, part: graphs.Part) -> Callable[..., list[tf.Tensor]]:
        """Return the part as a function in stages, like `graphs.function_of_part`. Its fetches include all roots."""
        replicas = self._replicas()  # computed anew, because control dependencies have been added since
        # What runs before the function of one replica is compiled in that of no other one.
        before = set[tf.Operation]()
        for replica in replicas:
            before |= replica.before
        compiled = [replica.compiled - before for replica in replicas]
        after = set(part.running).difference(before, *compiled)
        fed = {tensor.op for tensor in part.feeds}
        # The stages: before, one for each replica, after.
        groups = [_in_order(part.running, group, fed) for group in (before, *compiled, after)]
        used = [_used_by(group) for group in groups]
        fetched = {tensor.ref() for tensor in part.fetches}
        known = {tensor.ref() for tensor in part.feeds}  # feeds, and outputs of the stages so far
        stages: list[_Stage] = []
        for number, group in enumerate(groups):
            needed_later = fetched.union(*used[number + 1 :]) - known  # a constant may be known from an earlier stage
            inputs = [ref.deref() for ref in used[number]]
            outputs = [tensor for tensor in _outputs_of(group) if tensor.ref() in needed_later]
            known.update(tensor.ref() for tensor in outputs)
            is_of_replica = 0 < number <= len(replicas)
            stages.append(_make_stage(part.graph, group, inputs, outputs, by_xla=is_of_replica))
        return functools.partial(_run, stages, part.feeds, part.fetches)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A function of some operations, from the values of `inputs` to those of `outputs`, tensors of the graph."""

    function: Callable[..., list[tf.Tensor]]
    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    device: str | None


def _make_stage(
    graph: Any,
    operations: Sequence[tf.Operation],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    *,
    by_xla: bool,
) -> _Stage:
    effects = [operation for operation in operations if has_effect(operation)]
    with graphs.control_inputs_within(operations):
        part = graphs.Part(graph, operations, inputs, outputs, effects)
        function = graphs.function_of_part(part, by_xla=by_xla)
    device = _device_of(operations) if by_xla else None
    return _Stage(function, inputs, outputs, device)


def _run(stages: Sequence[_Stage], feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor], *values: Any) -> Any:
    known = {tensor.ref(): value for tensor, value in zip(feeds, values, strict=True)}
    for stage in stages:
        arguments = [known[tensor.ref()] for tensor in stage.inputs]
        with tf.device(stage.device):
            returned = stage.function(*arguments)
        for tensor, value in zip(stage.outputs, returned, strict=True):
            known[tensor.ref()] = value
    return [known[tensor.ref()] for tensor in fetches]


def _in_order(
    running: Sequence[tf.Operation], group: Collection[tf.Operation], fed: Collection[tf.Operation]
) -> list[tf.Operation]:
    """Return the operations of a stage in program order: `group`, and the constants and captured handles that it uses,
    which may be in several stages at no cost. Operations that are fed are left out.
    """
    wanted = set(group)
    for operation in group:
        wanted.update(tensor.op for tensor in operation.inputs if _is_free(tensor.op))
    return [operation for operation in running if operation in wanted and operation not in fed]


def _is_free(operation: tf.Operation) -> bool:
    """Report whether the operation has a value by itself, without state."""
    return not operation.inputs and not operation.op_def.is_stateful


def _used_by(group: Sequence[tf.Operation]) -> list[Any]:
    """Return references of the tensors that `group` takes from outside, in order."""
    own = set(group)
    used: dict[Any, None] = {}
    for operation in group:
        for tensor in operation.inputs:
            if tensor.op not in own:
                used[tensor.ref()] = None
    return list(used)


def _outputs_of(group: Sequence[tf.Operation]) -> list[tf.Tensor]:
    outputs = []
    for operation in group:
        outputs += operation.outputs
    return outputs


def _device_of(group: Sequence[tf.Operation]) -> str | None:
    """Return the device on which most of the group is placed; None: any."""
    if not group:
        return None
    devices = collections.Counter(operation.device for operation in group)
    ((device, _),) = devices.most_common(1)
    return device or None


# --- the compiled part of a replica ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Replica:
    """The operations that the roots of one replica need.

    Attributes:
      before: those with state, and all that they depend on; they run before the compiled function.
      compiled: the other operations that the roots need.
      of_model: those of both that depend on a number that a variable holds: they compute with the model.
    """

    before: set[tf.Operation]
    compiled: set[tf.Operation]
    of_model: set[tf.Operation]

    @classmethod
    def of(cls, roots: Sequence[tf.Tensor]) -> _Replica:
        all_needed = _ancestors([tensor.op for tensor in roots])
        before = _ancestors([operation for operation in all_needed if _is_stateful(operation)])
        before |= {operation for operation in all_needed if operation.type in _SOURCES}
        return cls(before, all_needed - before, _depending_on_variables(before | all_needed))


def _ancestors(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Return the operations and all that they depend on; control dependencies count only for stateful operations."""
    found = set[tf.Operation]()
    stack = list(operations)
    while stack:
        operation = stack.pop()
        if operation not in found:
            found.add(operation)
            stack += [tensor.op for tensor in operation.inputs]
            if _is_stateful(operation):
                stack += operation.control_inputs
    return found


def _is_stateful(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful or uses_resource(operation)


def _depending_on_variables(operations: Collection[tf.Operation]) -> set[tf.Operation]:
    """Return those of `operations` that depend on the value of a variable."""
    found: set[tf.Operation] = set()
    stack = [operation for operation in operations if _reads_a_number(operation)]
    while stack:
        operation = stack.pop()
        if operation in operations and operation not in found:
            found.add(operation)
            for tensor in operation.outputs:
                stack += tensor.consumers()
    return found


def _reads_a_number(operation: tf.Operation) -> bool:
    # Integers, such as the global step or states of generators, are no weights.
    return uses_resource(operation) and any(tensor.dtype.is_floating for tensor in operation.outputs)


# --- what XLA cannot compile ----------------------------------------------------------------------------------


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Convert XLA's error for a step that it cannot compile into a ValueError. XLA compiles when a shape first
    occurs.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if "tf2xla conversion failed" not in error.message:
            raise
        lines = [line.strip() for line in error.message.splitlines() if line.strip()]
        of_reason = [line for line in lines if "XLA" in line or "compil" in line]
        reason = of_reason[0] if of_reason else lines[0]
        raise ValueError(
            f"train.jit=true: XLA cannot compile the gradients of this model: {reason} Set train.jit=false."
        ) from error


def _check(replicas: Sequence[_Replica], program: Sequence[tf.Operation]) -> None:
    """Check that XLA can compile the replicas.

    Args:
      program: all operations in program order.

    Raises:
      ValueError: the first operation that cannot be compiled, and the reason.
    """
    for operation in program:
        reason = _reason_against(operation, replicas)
        if reason is not None:
            raise ValueError(
                f"train.jit=true: {operation.type} {operation.name!r} cannot be compiled, but the loss depends on it: "
                f"{reason}. Replace it in model_fn, or set train.jit=false."
            )


def _reason_against(operation: tf.Operation, replicas: Sequence[_Replica]) -> str | None:
    """Return why XLA cannot compile an operation; None: it can, or no replica needs it."""
    num_computing = 0
    for replica in replicas:
        is_compiled = operation in replica.compiled
        if not is_compiled and operation not in replica.before:
            continue
        reason = _reason_in_replica(operation, replica)
        if reason is not None:
            return reason
        if is_compiled and operation in replica.of_model:
            num_computing += 1
    # Each replica has a function of its own, and neither can use a value from inside the other.
    if num_computing > 1:
        return "two replicas compute with its value, as in a synchronized BatchNormalization"
    return None


def _reason_in_replica(operation: tf.Operation, replica: _Replica) -> str | None:
    """Return why XLA cannot compile the function of a replica that needs an operation; None: it can."""
    has_resource = uses_resource(operation)
    if operation.type in CALLS and has_resource:
        return "it is a loop, a branch or a function that uses variables (a recurrent layer can be unrolled)"
    if _is_stateful(operation) and any(tensor.op in replica.of_model for tensor in operation.inputs):
        return "it has state, and waits for a value that the model computes: the model would be compiled in pieces"
    if has_resource or operation.type in _SOURCES:  # runs before the compiled function
        return None
    kind = "GPU" if "GPU" in operation.device else "CPU"
    if operation.type not in graphs.operations_of_xla(kind):
        return "XLA does not know this operation"
    return None
