"""The contents of a checkpoint, and copies of them in memory that training does not change."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from runner.tf_private import tensor_bundle

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint. The tensors must not change while they are written.

    Attributes:
      step: the global step.
      tensors: variable name -> tensor or array of its shape and dtype, or a tuple of the variable's slices along axis
        0.
      extra: the runner's own state: values that JSON can hold.
    """

    step: int
    tensors: Mapping[str, Any]
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The total size of the tensors in bytes."""
        parts = tf.nest.flatten(list(self.tensors.values()))
        return sum(map(_size_of, parts))


class SnapshotMemory:
    """Holds one copy of a snapshot's values, in buffers that the next copy reuses.

    TensorFlow could copy on write instead: the tensor that `read_value` returned shares the variable's buffer, and the
    next step allocates a new buffer for each variable that it updates. The step after a save would then be slower. A
    copy into reused memory is faster than one into new memory (256 MB on a virtual machine: 17 ms instead of 30 ms to
    1.3 s), and does not depend on how each kernel treats a shared buffer. It costs memory for one copy of the variables
    during training. Variables on a parameter server are copied on that server.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], tf.Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy of `snapshot`. It overwrites the previous copy."""
        tensors: dict[str, Any] = {}
        for name, value in snapshot.tensors.items():
            parts = tf.nest.flatten(value)
            copies = [self._copy_part((name, number), part) for number, part in enumerate(parts)]
            tensors[name] = tf.nest.pack_sequence_as(value, copies)
        return dataclasses.replace(snapshot, tensors=tensors)

    def missing(self, snapshot: Snapshot) -> int:
        """Return how many bytes of this host's memory a copy of `snapshot` needs, in addition to the buffers held here.

        Variables on a parameter server are copied on that server and count as 0.
        """
        missing = 0
        for name, value in snapshot.tensors.items():
            for number, part in enumerate(tf.nest.flatten(value)):
                has_buffer = (name, number) in self._buffers
                if not has_buffer and not tensor_bundle.is_far(part):
                    missing += _size_of(part)
        return missing

    def _copy_part(self, key: tuple[str, int], value: Any) -> tf.Tensor:
        """Return a copy of a tensor, where it is: in this host's memory, in the buffer of `key`, or on its server."""
        if tensor_bundle.is_far(value):
            with tf.init_scope(), tf.device(value.device):
                return tf.raw_ops.DeepCopy(x=value)
        with tf.init_scope(), tf.device("CPU:0"):
            tensor = tf.convert_to_tensor(value)
            if "CPU" not in tensor.device:
                return tf.identity(tensor)  # into the host's memory
            buffer = self._buffers.get(key)
            source = _view_memory(tensor)
            # Of a dtype without a view (strings), each copy is a new tensor.
            if buffer is None or source is None or not _is_alike(buffer, tensor):
                buffer = tf.raw_ops.DeepCopy(x=tensor)
                self._buffers[key] = buffer
                return buffer
        target = _view_memory(buffer)
        assert target is not None
        # The buffer may be overwritten: only this object and the writer of the last snapshot have ever used its tensor.
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)
        return buffer


def _is_alike(buffer: tf.Tensor, tensor: tf.Tensor) -> bool:
    """Report whether the value of `tensor` fits into `buffer`."""
    return bool(buffer.shape == tensor.shape and buffer.dtype == tensor.dtype)


def _size_of(tensor: Any) -> int:
    return tensor_bundle.size_of(tensor.shape, tf.as_dtype(tensor.dtype))


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of float tensors, or tuples of slices, with values that are not finite.

    Each save asks. A sum of squares reads the values once and writes nothing, which takes half the time of is_finite.
    The squares of finite values may overflow, so a sum that is not finite is only a suspicion.
    """
    floats: list[tuple[str, tf.Tensor]] = []
    for name, value in tensors.items():
        for part in tf.nest.flatten(value):
            if part.dtype in _FLOATS:
                floats.append((name, part))
    # All sums are started before the first is awaited, so that servers compute at the same time.
    sums = [_compute_where_it_is(_sum_of_squares, part) for _, part in floats]
    # Of these few, is_finite tells whether a value or only the sum is not finite.
    suspects = [named for named, total in zip(floats, sums, strict=True) if not math.isfinite(total)]
    names = [name for name, part in suspects if not _compute_where_it_is(_are_all_finite, part)]
    return list(dict.fromkeys(names))


def _are_all_finite(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(value))


def _sum_of_squares(value: tf.Tensor) -> Any:
    # NumPy is twice as fast for small values, but slow for float16.
    is_here = "CPU" in value.device and not tensor_bundle.is_far(value)
    if is_here and value.dtype in (tf.float32, tf.float64):
        view = _view_memory(value)
        if view is not None:
            return np.vdot(view, view)
    return tf.nn.l2_loss(value)


def _compute_where_it_is(function: Callable[[tf.Tensor], Any], value: tf.Tensor) -> Any:
    """Return `function(value)`. A parameter server computes it itself and does not send the value."""
    if not tensor_bundle.is_far(value):
        return function(value)
    with tf.device(value.device):
        return function(value)


def _view_memory(tensor: tf.Tensor) -> np.ndarray | None:
    """Return an array that shares the memory of a tensor on this host; None for dtypes of which NumPy has no view
    (strings, bfloat16).
    """
    try:
        return np.asarray(memoryview(tensor))
    except (BufferError, TypeError, ValueError):
        return None
