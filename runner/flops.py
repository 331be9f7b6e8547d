"""Floating-point operations of a traced step, as TensorFlow's profiler counts them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.operations import CALLS, needed, operations
from runner.traced import Trace

v1 = tf.compat.v1

# The profiler counts these where it knows their shapes; one that it leaves out makes the sum worthless.
_HEAVY = frozenset(
    {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv2DBackpropInput",
     "Conv2DBackpropFilter", "Conv3D", "DepthwiseConv2dNative"}
)  # fmt: skip

# TensorFlow 2.21 has no rule for these, nor does it look into functions.
_NOT_COUNTED = CALLS | {
    "PartitionedCall", "StatelessIf", "StatelessWhile", "StatelessCase", "Einsum", "SparseMatMul",
    "SparseTensorDenseMatMul", "DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter",
    "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2", "CudnnRNN", "CudnnRNNV3", "FFT", "FFT2D", "RFFT", "Cholesky",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flops:
    """What a step costs.

    Attributes:
      forward: from the inputs to the loss, on one replica; None: a shape is not known.
      step: all of the traced step, on the replicas of this process.
      not_counted: types of operations that are left out of both, though they may cost much.
    """

    forward: int | None
    step: int | None
    not_counted: Sequence[str] = ()


def count_flops(trace: Trace, loss: tf.Tensor, batch_size: int | None) -> Flops:
    """The operations of one step on batches of a known size.

    Args:
      loss: of the first replica.
      batch_size: examples of one replica, which take the place of an unknown first dimension of the inputs.
    """
    graph = _with_known_shapes(trace, batch_size)
    with _quiet():
        options = v1.profiler.ProfileOptionBuilder(v1.profiler.ProfileOptionBuilder.float_operation())
        found = v1.profiler.profile(graph, cmd="scope", options=options.with_empty_output().build())
    costs: dict[str, int] = {}
    stack = [] if found is None else [found]
    while stack:
        node = stack.pop()
        costs[node.name] = node.float_ops
        stack += node.children
    forward = {operation.name for operation in needed(trace.graph, operations([loss]))}
    everything = {operation.name for operation in graph.get_operations()}
    return Flops(
        forward=_sum(graph, costs, forward),
        step=_sum(graph, costs, everything),
        not_counted=sorted({operation.type for operation in graph.get_operations()} & _NOT_COUNTED),
    )


def _sum(graph: tf.Graph, costs: dict[str, int], names: set[str]) -> int | None:
    for operation in graph.get_operations():
        if operation.name in names and operation.type in _HEAVY:
            tensors = [*operation.inputs, *operation.outputs]
            if not all(tensor.shape.is_fully_defined() for tensor in tensors):
                return None
    return sum(cost for name, cost in costs.items() if name in names)


def _with_known_shapes(trace: Trace, batch_size: int | None) -> tf.Graph:
    """A copy of the trace whose inputs have their size, so that TensorFlow infers all shapes anew."""
    definition = trace.graph.as_graph_def()
    inputs = {tensor.op.name for tensor in trace.inputs}
    variables = trace.captured_variables()
    for node in definition.node:
        if node.name in inputs and batch_size is not None and node.attr["shape"].shape.dim:
            first = node.attr["shape"].shape.dim[0]
            first.size = batch_size if first.size == -1 else first.size
        elif node.name in variables:  # the shape behind a handle is no part of a placeholder
            _make_handle(node, variables[node.name])
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(definition, name="")
    return graph


def _make_handle(node: Any, variable: tf.TensorSpec) -> None:
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].type = variable.dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler warns of its own deprecated calls, and tells of shapes on stderr."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
