"""Collect the scalars and images that model_fn summarizes, as tensors.

TensorFlow writes summaries only in the first replica, so the values of the other replicas must be collected when they
call `scalar` or `image`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import summary_ops_v2
from tensorflow.python.summary import summary

from runner.tf_private.replaced import all_replaced, replaced

v1 = tf.compat.v1

# Names of TensorBoard's plugins.
_SCALARS = "scalars"
_IMAGES = "images"


@dataclasses.dataclass(frozen=True)
class SummaryScalar:
    """One call of `tf.summary.scalar` or `tf.compat.v1.summary.scalar` in one replica. Tensors are of the traced graph.

    Attributes:
      key: identifies the call in all replicas and processes, independent of name scopes.
      value: scalar, in the dtype that model_fn gave.
      operation: TensorFlow's operation: for v1 the one with the serialized summary, else one that waits for the write;
        None if TensorFlow made none, as in all replicas but the first.
      tag: the name in TensorBoard.
      metadata: serialized SummaryMetadata; empty for v1.
      condition: bool scalar, whether it is written (`tf.summary.record_if`); None: always.
      step: int64 scalar, the step that model_fn gave; None: the current step.
    """

    key: str
    value: tf.Tensor
    operation: tf.Operation | None
    tag: str
    metadata: bytes = b""
    condition: tf.Tensor | None = None
    step: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class SummaryImage:
    """One call of `tf.summary.image` that writes. Tensors are of the traced graph.

    Attributes:
      tag: the name in TensorBoard.
      value: string scalar, a serialized vector of strings: width, height, then a PNG per image; "" if it is not
        written.
    """

    tag: str
    value: tf.Tensor


class Collector:
    """The scalars and images that model_fn summarizes in one replica; its subclasses collect them.

    Args:
      writer: the `tf.summary` writer of the run; summaries that model_fn writes to other writers are not collected.
        None: this replica has no writer.

    Attributes:
      protos: serialized v1 summaries other than scalars, of an eager step.
      has_others: an eager step had `tf.summary` calls other than scalars.
    """

    def __init__(self, writer: Any) -> None:
        self.scalars: list[SummaryScalar] = []
        self.images: list[SummaryImage] = []
        self.protos: list[Any] = []
        self.has_others = False
        self._writer = writer
        self._step = tf.summary.experimental.get_step()
        self._numbers: collections.Counter[str] = collections.Counter()

    def _own_step(self, step: Any) -> tf.Tensor | None:
        """Return the step that model_fn set, by argument or `set_step`; None: it set none."""
        around = tf.summary.experimental.get_step()
        if step is None and around is not self._step:
            step = around
        if step is None:
            return None
        return tf.cast(step, tf.int64)

    def _key(self, kind: str, name: str) -> str:
        """Return the key of the next call with this name; numbers distinguish calls with the same name."""
        call = f"{kind} {name}"
        self._numbers[call] += 1
        return f"{call} {self._numbers[call]}"


class TraceCollector(Collector):
    """Collects in a traced graph. Summaries in a branch, a loop or a function of it are not collected."""

    def __init__(self, graph: Any, writer: Any) -> None:
        super().__init__(writer)
        self._graph = graph
        self._handle = getattr(writer, "_resource", None)

    def note_v1(self, name: str, family: str | None, value: Any, proto: tf.Tensor) -> None:
        """Record a call of `tf.compat.v1.summary.scalar` that returned `proto`, a string scalar."""
        if v1.get_default_graph() is not self._graph:
            return
        full_name = f"{family}/{name}" if family else name
        key = self._key("v1", full_name)
        if proto.op.type == "ScalarSummary":
            tag = tf.get_static_value(proto.op.inputs[0]).item().decode()
            self.scalars.append(SummaryScalar(key, proto.op.inputs[1], proto.op, tag))
        else:
            self.scalars.append(SummaryScalar(key, tf.convert_to_tensor(value), None, name))

    def write(self, own: Any, tag: str, tensor: Any, step: Any, metadata: Any, name: str | None) -> Any:
        """Do the same as `tf.summary.write`, which is `own`, and record scalars and images that it writes."""
        plugin = _plugin_of(metadata)
        is_traced = v1.get_default_graph() is self._graph
        images = None
        if plugin == _IMAGES and callable(tensor) and is_traced:
            images = tensor()  # encoded here, outside of the branch that writes them
        written = own(tag, tensor, step, metadata, name)
        if not is_traced or not tf.is_tensor(written):
            return written
        branch = _branch_around(written.op)
        write = branch  # the operation that writes: the branch as a whole
        condition = None
        if branch is None:
            write = _write_before(written.op)
        else:
            condition = branch.inputs[0]
        is_ours = write is not None and self._is_ours(write)
        if images is not None and is_ours:
            self._add_image(tag, images, condition)
        if plugin == _SCALARS and tf.is_tensor(tensor):
            value = tensor
            if tensor.op.type == "Cast":
                value = tensor.op.inputs[0]  # undo TensorFlow's cast to float32
            key = self._key("v2", re.sub(r"(^|/)replica_\d+/", r"\1", tag))
            if write is None:
                self.scalars.append(SummaryScalar(key, value, None, tag))
            elif is_ours:
                data = metadata.SerializeToString()
                own_step = self._own_step(step)
                self.scalars.append(SummaryScalar(key, value, written.op, tag, data, condition, own_step))
        return written

    def _add_image(self, tag: str, images: tf.Tensor, condition: tf.Tensor | None) -> None:
        value = tf.io.serialize_tensor(images)
        if condition is not None:
            value = tf.where(condition, value, "")
        self.images.append(SummaryImage(tag, value))

    def _is_ours(self, write: tf.Operation) -> bool:
        """Report whether an operation, or a branch, writes to the writer of the run."""
        inputs = {tensor.name for tensor in write.inputs}
        return any(inner.name in inputs and outer is self._handle for outer, inner in self._graph.captures)


def _branch_around(operation: tf.Operation) -> tf.Operation | None:
    """Return the `tf.cond` in which a summary is written, from the operation that `tf.summary.write` returns; None: it
    is written whatever the step.
    """
    if operation.type.endswith("If"):
        return operation
    for tensor in operation.inputs:
        if tensor.op.type.endswith("If"):
            return tensor.op
    return None


def _write_before(operation: tf.Operation) -> tf.Operation | None:
    """Return the write for which an operation waits; None: there is none, as in all replicas but the first."""
    for waited_for in operation.control_inputs:
        if waited_for.type == "WriteSummary":
            return waited_for
    return None


class EagerCollector(Collector):
    """Collects what an eagerly run model_fn summarizes; values are eager tensors.

    Private: `summary_ops_v2._summary_state.writer`, the default writer; since 2.0. When it moves: scalars that model_fn
    writes to other writers are collected as well.

    Args:
      writer: as in Collector.
      writes: write summaries of `tf.summary` other than scalars at once; False: do not write them.
    """

    def __init__(self, writer: Any, *, writes: bool) -> None:
        super().__init__(writer)
        self._writes = writes
        self._protos_of_scalars: list[Any] = []

    def find_protos(self) -> None:
        """Record the v1 summaries that model_fn made; they are in a graph collection."""
        protos = v1.get_collection(v1.GraphKeys.SUMMARIES)
        of_scalars = {id(proto) for proto in self._protos_of_scalars}  # `==` of tensors compares their values
        self.protos = [proto for proto in protos if id(proto) not in of_scalars]

    def note_v1(self, name: str, family: str | None, value: Any, proto: Any) -> None:
        """Record a call of `tf.compat.v1.summary.scalar` that returned `proto`, a string scalar."""
        if tf.executing_eagerly():
            self._protos_of_scalars.append(proto)
            (written,) = v1.Summary.FromString(proto.numpy()).value
            key = self._key("v1", written.tag)
            self.scalars.append(SummaryScalar(key, tf.convert_to_tensor(value), None, written.tag))

    def write(self, own: Any, tag: str, tensor: Any, step: Any, metadata: Any, name: str | None) -> Any:
        """Record scalars of the run without writing them; for others do the same as `own`."""
        state = getattr(summary_ops_v2, "_summary_state", None)
        plugin = _plugin_of(metadata)
        if not tf.executing_eagerly() or getattr(state, "writer", self._writer) is not self._writer:
            return own(tag, tensor, step, metadata, name)
        is_recorded = tf.cast(tf.summary.should_record_summaries(), tf.bool)
        if plugin == _SCALARS:
            data = metadata.SerializeToString()
            key = self._key("v2", tag)
            self.scalars.append(SummaryScalar(key, tensor, None, tag, data, is_recorded, self._own_step(step)))
            return is_recorded
        self.has_others = True
        if plugin == _IMAGES and is_recorded and callable(tensor):
            tensor = tensor()
            self.images.append(SummaryImage(tag, tf.io.serialize_tensor(tensor)))
        if not self._writes:
            return is_recorded
        return own(tag, tensor, step, metadata, name)


def _plugin_of(metadata: Any) -> str:
    if not hasattr(metadata, "plugin_data"):
        return ""
    return str(metadata.plugin_data.plugin_name)


class _OfThread(threading.local):
    collector: TraceCollector | EagerCollector | None = None


_of_thread = _OfThread()


def is_collecting() -> bool:
    """Report whether scalars are being collected in this thread."""
    return _of_thread.collector is not None


@contextlib.contextmanager
def collecting(writer: Any) -> Iterator[Collector]:
    """Yield a Collector of the scalars and images that model_fn summarizes in this thread inside this context."""
    collector = TraceCollector(v1.get_default_graph(), writer)
    with replaced(_of_thread, "collector", collector):
        yield collector


@contextlib.contextmanager
def collecting_eagerly(writer: Any, *, writes: bool) -> Iterator[EagerCollector]:
    """Yield an EagerCollector of what an eagerly run model_fn summarizes inside this context; it is complete at the
    end.
    """
    collector = EagerCollector(writer, writes=writes)
    with summaries_noted(), replaced(_of_thread, "collector", collector):
        yield collector
        collector.find_protos()


def summaries_noted() -> contextlib.AbstractContextManager[None]:
    """Make TensorFlow's summary functions report to the Collector of their thread inside this context.

    Replaced are `tf.compat.v1.summary.scalar`, also as `tensorflow.python.summary.summary.scalar`, and
    `tf.summary.write`, which `tf.summary.scalar` calls last (as `tf.compat.v2.summary.write`, in TensorBoard's
    package). Calls of a v1 `scalar` that was imported by name earlier are not seen; as in TensorFlow, the first
    replica's value is written.
    """
    own_v1 = summary.scalar
    own_write = tf.summary.write

    def scalar(name: str, tensor: Any, collections: Any = None, family: str | None = None) -> Any:
        proto = own_v1(name, tensor, collections, family)
        collector = _of_thread.collector
        if collector is not None:
            collector.note_v1(name, family, tensor, proto)
        return proto

    def write(tag: str, tensor: Any, step: Any = None, metadata: Any = None, name: str | None = None) -> Any:
        collector = _of_thread.collector
        if collector is None:
            return own_write(tag, tensor, step, metadata, name)
        return collector.write(own_write, tag, tensor, step, metadata, name)

    return all_replaced(
        (summary, "scalar", scalar),
        (v1.summary, "scalar", scalar),
        (tf.summary, "write", write),
        (tf.compat.v2.summary, "write", write),
    )
