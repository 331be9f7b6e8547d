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
from runner.tracing.graph_operations import CALLS, has_effect

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
        _check([_Replica.of(each) for each in roots], roots[0][0].graph.get_operations())

    def function_of_part(self, part: graphs.Part) -> Callable[..., list[tf.Tensor]]:
        """Return the part as a function in stages, like `graphs.function_of_part`. Its fetches include all roots."""
        # computed anew, because control dependencies have been added since
        replicas = [_Replica.of(each) for each in self._roots]
        before = set().union(*(replica.before for replica in replicas))
        compiled = [replica.compiled - before for replica in replicas]
        after = set(part.running) - before.union(*compiled)
        fed = {tensor.op for tensor in part.feeds}
        groups = [_in_order(part.running, group, fed) for group in (before, *compiled, after)]
        used = [_used_by(group) for group in groups]
        stages: list[_Stage] = []
        given = {tensor.ref() for tensor in part.feeds}
        for number, group in enumerate(groups):
            later = {tensor.ref() for tensor in part.fetches}.union(*used[number + 1 :])
            outputs = [one for op in group for one in op.outputs if one.ref() in later - given]
            given.update(one.ref() for one in outputs)
            by_xla = 0 < number <= len(replicas)
            device = _device_of(group) if by_xla else None
            inputs = [ref.deref() for ref in used[number]]
            effects = [operation for operation in group if has_effect(operation)]
            with graphs.control_inputs_within(group):
                stage = graphs.Part(part.graph, group, inputs, outputs, effects)
                function = graphs.function_of_part(stage, by_xla=by_xla)
            stages.append(_Stage(function, inputs, outputs, device))
        return functools.partial(_run, stages, part.feeds, part.fetches)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A function of some operations, from the values of `inputs` to those of `outputs`, tensors of the graph."""

    function: Callable[..., list[tf.Tensor]]
    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    device: str | None


def _run(stages: Sequence[_Stage], feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor], *values: Any) -> Any:
    known = {tensor.ref(): value for tensor, value in zip(feeds, values, strict=True)}
    for stage in stages:
        with tf.device(stage.device):
            results = stage.function(*(known[tensor.ref()] for tensor in stage.inputs))
        known |= {tensor.ref(): value for tensor, value in zip(stage.outputs, results, strict=True)}
    return [known[tensor.ref()] for tensor in fetches]


def _in_order(
    running: Sequence[tf.Operation], group: Collection[tf.Operation], fed: Collection[tf.Operation]
) -> list[tf.Operation]:
    """Return `group` with operations that may be in several stages at no cost: constants, and captured handles."""
    free = {op for op in running if not op.inputs and not op.op_def.is_stateful and op not in fed and op.outputs}
    own = {tensor.op for op in group for tensor in op.inputs if tensor.op in free}
    return [op for op in running if (op in group or op in own) and op not in fed]


def _used_by(group: Sequence[tf.Operation]) -> list[Any]:
    """Return references of the tensors that `group` takes from outside, in order."""
    own = set(group)
    return list(dict.fromkeys(tensor.ref() for op in group for tensor in op.inputs if tensor.op not in own))


def _device_of(group: Sequence[tf.Operation]) -> str | None:
    """Return the device on which most of the group is placed; None: any."""
    ((device, _), *_) = collections.Counter(op.device for op in group).most_common(1) or [("", 0)]
    return device or None


# --- the compiled part of a replica ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Replica:
    """The operations that the roots of one replica need.

    Attributes:
      of_model: those that depend on the value of a variable of the model.
    """

    before: set[tf.Operation]
    compiled: set[tf.Operation]
    of_model: set[tf.Operation]

    @classmethod
    def of(cls, roots: Sequence[tf.Tensor]) -> _Replica:
        all_needed = _ancestors([tensor.op for tensor in roots])
        before = _ancestors([op for op in all_needed if _is_stateful(op)])
        before |= {op for op in all_needed if op.type in _SOURCES}
        return cls(before, all_needed - before, _of_model(before | all_needed))


def _ancestors(operations: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Return the operations and all that they depend on; control dependencies count only for stateful operations."""
    found, stack = set(), list(operations)
    while stack:
        operation = stack.pop()
        if operation not in found:
            found.add(operation)
            stack += [tensor.op for tensor in operation.inputs]
            stack += operation.control_inputs if _is_stateful(operation) else ()
    return found


def _is_stateful(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful or any(tensor.dtype == tf.resource for tensor in operation.inputs)


def _of_model(operations: Collection[tf.Operation]) -> set[tf.Operation]:
    found: set[tf.Operation] = set()
    stack = [op for op in operations if _reads_a_number(op)]
    while stack:
        operation = stack.pop()
        if operation in operations and operation not in found:
            found.add(operation)
            stack += [user for tensor in operation.outputs for user in tensor.consumers()]
    return found


def _reads_a_number(operation: tf.Operation) -> bool:
    from_resource = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    return from_resource and any(tensor.dtype.is_floating for tensor in operation.outputs)


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
        lines = [line for line in error.message.splitlines() if line.strip()]
        reason = next((line for line in lines if "XLA" in line or "compil" in line), lines[0])
        raise ValueError(
            f"train.jit=true: XLA cannot compile the gradients of this model: {reason.strip()} Set train.jit=false."
        ) from error


def _check(replicas: Sequence[_Replica], program: Sequence[tf.Operation]) -> None:
    """Check that XLA can compile the replicas.

    Args:
      program: all operations in program order.

    Raises:
      ValueError: the first operation that cannot be compiled, and the reason.
    """
    for operation in program:
        having = [replica for replica in replicas if operation in replica.before or operation in replica.compiled]
        reasons = [_reason_against(operation, replica) for replica in having]
        if sum(operation in replica.compiled and operation in replica.of_model for replica in having) > 1:
            reasons.append("two replicas compute with its value, as in a synchronized BatchNormalization")
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            raise ValueError(
                f"train.jit=true: {operation.type} {operation.name!r} cannot be compiled, but the loss depends on it: "
                f"{reason}. Replace it in model_fn, or set train.jit=false."
            )


def _reason_against(operation: tf.Operation, replica: _Replica) -> str | None:
    has_resource = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    if operation.type in CALLS and has_resource:
        return "it is a loop, a branch or a function that uses variables (a recurrent layer can be unrolled)"
    if _is_stateful(operation) and any(tensor.op in replica.of_model for tensor in operation.inputs):
        return "it has state, and waits for a value that the model computes: the model would be compiled in pieces"
    if has_resource or operation.type in _SOURCES:
        return None
    kind = "GPU" if "GPU" in operation.device else "CPU"
    return None if operation.type in graphs.operations_of_xla(kind) else "XLA does not know this operation"
