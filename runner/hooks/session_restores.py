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
        operations = dict.fromkeys(tensor.op for tensors in reads.values() for tensor in tensors)
        self._places = {one: evaluate(list(one.inputs)) for one in operations}

    def parts(self) -> Iterator[tuple[list[tf.Operation], list[tuple[tf.Tensor, tf.Tensor]]]]:
        """Yield assignments, in parts of bounded size, with the values of the tensors that they assign."""
        for part in in_parts(self._reads, self._size_of):
            yield part, self._values(part)

    def _values(self, part: Iterable[tf.Operation]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        values: list[tuple[tf.Tensor, tf.Tensor]] = []
        tensors = {id(tensor): tensor for one in part for tensor in self._reads[one]}.values()
        for operation, (path, keys, slices) in self._places.items():
            mine = [tensor for tensor in tensors if tensor.op is operation]
            places = [tensor.value_index for tensor in mine]
            entries = [(keys[i], slices[i], tensor.dtype) for i, tensor in zip(places, mine, strict=True)]
            found = read_entries(path.decode(), "CPU:0", entries)
            values += zip(mine, found, strict=True)
        return values

    def _size_of(self, assignment: tf.Operation) -> int:
        """Return the bytes that an assignment reads; a slice counts as the whole tensor."""
        total = 0
        for tensor in self._reads[assignment]:
            path, keys, _ = self._places[tensor.op]
            shape = _shapes(path.decode()).get(keys[tensor.value_index].decode(), ())
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
    for one in _members(fetched):
        inner = _read_by(one)
        if inner is None:
            return {}
        found[one] = inner
    return found if any(found.values()) else {}


def _members(fetched: Sequence[Any]) -> list[tf.Operation]:
    """Return the operations in `fetched`, with each `tf.group` replaced by its members; [] if a tensor is fetched."""
    members: dict[tf.Operation, None] = {}
    seen, stack = set(), list(fetched)
    while stack:
        one = stack.pop()
        if not isinstance(one, tf.Operation):
            return []
        if one in seen:
            continue
        seen.add(one)
        if one.type == "NoOp":
            stack += one.control_inputs
        else:
            members[one] = None
    return list(members)


def _read_by(operation: tf.Operation) -> list[tf.Tensor] | None:
    """Return the tensors of checkpoints on which `operation` depends; None: it also depends on an operation with state,
    which must not run once per part.
    """
    read: dict[int, tf.Tensor] = {}
    seen, stack = {operation}, [operation]
    while stack:
        one = stack.pop()
        if one is not operation and one.op_def.is_stateful and one.type != "VarHandleOp":
            return None
        read |= {id(tensor): tensor for tensor in one.inputs if tensor.op.type == READ}
        before = [*(tensor.op for tensor in one.inputs if tensor.op.type != READ), *one.control_inputs]
        stack += [new for new in dict.fromkeys(before) if new not in seen]
        seen.update(before)
    return list(read.values())
