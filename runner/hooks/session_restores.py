"""Operations of a graph that assign values of checkpoints, such as those of a `tf.compat.v1.train.Saver`.

A session would run them all at once. The values of all variables would then exist twice: in the variables, and in the
tensors that `RestoreV2` has read. `TraceSession` runs them in parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private.tensor_bundle import in_parts, read_entries, size_of

READ = "RestoreV2"


class SessionRestore:
    """Some assignments that do not depend on each other, and what they read from checkpoints.

    Args:
      reads: assignment -> outputs of `RestoreV2` that it assigns.
      evaluate: returns the values of tensors: the path of a checkpoint, keys and slices.
    """

    def __init__(
        self,
        reads: Mapping[tf.Operation, Sequence[tf.Tensor]],
        evaluate: Callable[[Sequence[tf.Tensor]], Sequence[Any]],
    ) -> None:
        self._reads = reads
        # Operation `RestoreV2` -> the values of its inputs: (path, keys, slices).
        self._inputs: dict[tf.Operation, Sequence[Any]] = {}
        for tensors in reads.values():
            for tensor in tensors:
                if tensor.op not in self._inputs:
                    self._inputs[tensor.op] = evaluate(list(tensor.op.inputs))

    def parts(self) -> Iterator[tuple[list[tf.Operation], list[tuple[tf.Tensor, tf.Tensor]]]]:
        """Yield assignments, in parts of bounded size, with the values of the tensors that they assign."""
        for part in in_parts(self._reads, self._size_of):
            yield part, self._read(part)

    def _read(self, part: Iterable[tf.Operation]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Return (tensor, its value) for each tensor that the assignments of a part read."""
        tensors: dict[int, tf.Tensor] = {}
        for assignment in part:
            for tensor in self._reads[assignment]:
                tensors[id(tensor)] = tensor
        values: list[tuple[tf.Tensor, tf.Tensor]] = []
        for operation, (path, keys, slices) in self._inputs.items():
            wanted = [tensor for tensor in tensors.values() if tensor.op is operation]
            entries = []
            for tensor in wanted:
                index = tensor.value_index
                entries.append((keys[index], slices[index], tensor.dtype))
            values += zip(wanted, read_entries(path.decode(), "CPU:0", entries), strict=True)
        return values

    def _size_of(self, assignment: tf.Operation) -> int:
        """Return the bytes that an assignment reads; a slice counts as the whole tensor."""
        total = 0
        for tensor in self._reads[assignment]:
            path, keys, _ = self._inputs[tensor.op]
            key = keys[tensor.value_index].decode()
            shape = _shapes(path.decode()).get(key, ())
            total += size_of(shape, tensor.dtype)
        return total


@functools.lru_cache(maxsize=1)
def _shapes(path: str) -> Mapping[str, Sequence[int]]:
    shapes: Mapping[str, Sequence[int]] = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    return shapes


def reads_of(fetched: Sequence[Any]) -> dict[tf.Operation, list[tf.Tensor]]:
    """Return assignment -> the tensors read from a checkpoint that it assigns; {} if `fetched` cannot run in parts.

    Args:
      fetched: tensors and operations of a graph. Only groups of operations can run in parts: their order is free.
    """
    found: dict[tf.Operation, list[tf.Tensor]] = {}
    for operation in _members(fetched):
        read = _read_by(operation)
        if read is None:
            return {}
        found[operation] = read
    return found if any(found.values()) else {}


def _members(fetched: Sequence[Any]) -> list[tf.Operation]:
    """Return the operations in `fetched`, with each `tf.group` replaced by its members; [] if a tensor is fetched."""
    members: list[tf.Operation] = []
    seen = set[tf.Operation]()
    stack = list(fetched)
    while stack:
        operation = stack.pop()
        if not isinstance(operation, tf.Operation):
            return []
        if operation in seen:
            continue
        seen.add(operation)
        if operation.type == "NoOp":
            stack += operation.control_inputs
        else:
            members.append(operation)
    return members


def _read_by(operation: tf.Operation) -> list[tf.Tensor] | None:
    """Return the tensors of checkpoints on which `operation` depends; None: it also depends on an operation with state,
    which must not run once per part.
    """
    read: dict[int, tf.Tensor] = {}
    seen = {operation}
    stack = [operation]
    while stack:
        current = stack.pop()
        has_state = current.op_def.is_stateful and current.type != "VarHandleOp"  # a handle is only a name
        if has_state and current is not operation:
            return None
        inputs: list[tf.Operation] = []
        for tensor in current.inputs:
            if tensor.op.type == READ:
                read[id(tensor)] = tensor
            else:
                inputs.append(tensor.op)
        inputs += current.control_inputs
        for source in inputs:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return list(read.values())
