"""What is known, from the graph, of a tensor of one replica: is it the same on all, or what of its batch is in it?

A variable of the model must have one value on all replicas. So what is written to it must be the same on all of them,
or it must be made from sums and means over the examples of the replica's batch: then these are summed over the
replicas, and what follows from them is computed once more. A value of which neither is known cannot be written.

Only operations whose effect on the rows of a batch is known count as keeping them apart (`_RULES`): what is not known
is a replica's own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.tf_private.graphs import nodes_called_by
from runner.tf_private.random_ops import GENERATOR_RANDOM, KERNEL_RANDOM


class Kind(enum.Enum):
    """What is known of a tensor of one replica."""

    SAME = "the same on all replicas"
    ROWS = "its first axis is that of the replica's batch; a row depends on one example, and on means over the batch"
    COLUMNS = "a transposed matrix of ROWS"
    SHAPE = "the shape of ROWS"
    MEAN = "a mean over the rows of the replica's batch"
    SUM = "a sum over the rows of the replica's batch, or their number"
    OF_MEANS = "computed from MEAN and SAME alone"
    OF_SUMS = "computed from MEAN, SUM and SAME alone"
    OWN = "anything else: known to this replica alone"


_REDUCED = frozenset({Kind.MEAN, Kind.SUM, Kind.OF_MEANS, Kind.OF_SUMS})
_OF_ROWS = frozenset({Kind.ROWS, Kind.COLUMNS, Kind.SHAPE})
_OF_MEANS = frozenset({Kind.SAME, Kind.MEAN, Kind.OF_MEANS})

# Operations whose outputs depend on more than their inputs.
_HIDDEN_INPUTS = frozenset(
    {"PyFunc", "PyFuncStateless", "EagerPyFunc", "IteratorGetNext", "IteratorGetNextAsOptional", "QueueDequeueV2",
     "QueueDequeueManyV2", "QueueDequeueUpToV2", "ReaderReadV2", "Timestamp", *GENERATOR_RANDOM, *KERNEL_RANDOM}
)  # fmt: skip

Kinds = Sequence[Kind]


class ReplicaValues:
    """The kinds of the tensors of one traced step.

    Args:
      batch: the features and labels of all local replicas, the flat inputs of the step.
      counts: int64 `[local replicas]`, the numbers of their examples.
      own_states: ids of the handles of variables that each replica has for itself.
    """

    def __init__(self, batch: Sequence[tf.Tensor], counts: tf.Tensor, own_states: Container[int]) -> None:
        self._kinds: dict[Any, Kind] = {counts.ref(): Kind.SUM}
        for tensor in batch:
            self._kinds[tensor.ref()] = Kind.ROWS if tensor.shape.rank else Kind.OWN
        self._own_states = own_states
        self._captures: dict[int, dict[int, tf.Tensor]] = {}

    def are_same(self, values: Any) -> None:
        """Note that the tensors in `values`, a structure, are the same on all replicas: they are sums over all."""
        self._set_kind(values, Kind.SAME)

    def are_own(self, values: Any) -> None:
        """Note that the tensors in `values`, a structure, are known to their replica alone."""
        self._set_kind(values, Kind.OWN)

    def _set_kind(self, values: Any, kind: Kind) -> None:
        for tensor in tf.nest.flatten(values, expand_composites=True):
            if isinstance(tensor, tf.Tensor):
                self._kinds[tensor.ref()] = kind

    def kind(self, value: Any) -> Kind:
        """Return what is known of a value: a tensor, or a constant of Python. IndexedSlices are SAME or OWN."""
        kinds = []
        for part in tf.nest.flatten(value, expand_composites=True):
            if isinstance(part, tf.Tensor):
                kinds.append(self._kind_of(part))
        if _are_all(kinds, Kind.SAME):
            return Kind.SAME
        return kinds[0] if isinstance(value, tf.Tensor) else Kind.OWN

    def reduced_parts(self, value: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """Return what a tensor of one of the kinds from MEAN to OF_SUMS is computed from.

        Returns:
          (the tensors of kind MEAN and SUM, the operations from these to `value`). The order is the same for the value
          of another replica.
        """
        leaves: dict[Any, tf.Tensor] = {}
        between: dict[tf.Operation, None] = {}
        stack = [value]
        while stack:
            tensor = stack.pop()
            kind = self._kind_of(tensor)
            if kind in (Kind.MEAN, Kind.SUM):
                leaves[tensor.ref()] = tensor
            elif kind is not Kind.SAME and tensor.op not in between:
                between[tensor.op] = None
                stack += tensor.op.inputs
        return list(leaves.values()), list(between)

    def _kind_of(self, tensor: tf.Tensor) -> Kind:
        """Return the kind of a tensor, after those of all that it is computed from."""
        # A stack in place of recursion: a deep model has more operations in a row than Python has calls.
        stack = [tensor]
        while stack:
            last = stack[-1]
            if last.ref() in self._kinds:
                stack.pop()
                continue
            waiting = [source for source in self._sources(last) if source.ref() not in self._kinds]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            for output, kind in zip(last.op.outputs, self._kinds_of_outputs(last), strict=True):
                self._kinds.setdefault(output.ref(), kind)
        return self._kinds[tensor.ref()]

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return the inputs of a tensor's operation; for a placeholder of a function, the tensor outside of it."""
        outer = self._captured(tensor)
        if hasattr(outer, "op"):
            return [outer]
        return list(tensor.op.inputs)

    def _captured(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Return the tensor outside of its function that a placeholder stands for; None: it is no such placeholder."""
        graph = tensor.graph
        if tensor.op.type != "Placeholder" or not hasattr(graph, "captures"):
            return None
        known = self._captures.setdefault(id(graph), {})
        if id(tensor) not in known:
            for outer, inner in graph.captures:
                known[id(inner)] = outer
        return known.get(id(tensor))

    def _kinds_of_outputs(self, tensor: tf.Tensor) -> Kinds:
        """Return the kinds of all outputs of the operation that computes a tensor."""
        operation = tensor.op
        outer = self._captured(tensor)
        if outer is not None:
            return [self._kind_of_captured(outer)]
        number = len(operation.outputs)
        if operation.type in _HIDDEN_INPUTS:
            return [Kind.OWN] * number
        if operation.type == "Placeholder":
            # An argument of a function is known to nobody here; what a hook feeds is one value for all replicas.
            is_argument = any(tensor is argument for argument in getattr(operation.graph, "inputs", ()))
            return [Kind.OWN] if is_argument else [Kind.SAME]
        kinds = [self._kinds[source.ref()] for source in operation.inputs]
        if _is_seed(operation):
            return [Kind.OWN] * number
        if not _are_all(kinds, Kind.SAME):
            return _by_rule(operation, kinds)
        if operation.op_def.is_stateful and _has_hidden_inputs(operation):
            return [Kind.OWN] * number
        return [Kind.SAME] * number

    def _kind_of_captured(self, outer: Any) -> Kind:
        if hasattr(outer, "op"):  # of the graph around
            return self._kinds[outer.ref()]
        return Kind.OWN if id(outer) in self._own_states else Kind.SAME


def _are_all(kinds: Kinds, *allowed: Kind) -> bool:
    return set(kinds).issubset(allowed)


def _by_rule(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """Return the kinds of the outputs, of which not all inputs are SAME."""
    number = len(operation.outputs)
    if operation.type in _RULES:
        return _RULES[operation.type](operation, kinds)
    if _OF_ROWS.isdisjoint(kinds):
        return [_without_rows(operation, kinds)] * number
    keeps_rows_apart = _KEEPS_ROWS.get(operation.type)
    if keeps_rows_apart is not None and keeps_rows_apart(operation, kinds):
        return [Kind.ROWS] * number
    return [Kind.OWN] * number


def _is_seed(operation: tf.Operation) -> bool:
    """Report whether the operation makes seeds of random numbers: see tracing/random_state.py, which names them."""
    return operation.name.partition("/")[0].startswith("runner_random")


def _has_hidden_inputs(operation: tf.Operation) -> bool:
    """Report whether a function that the operation calls draws random numbers of its own, or calls Python."""
    return any(node.op in _HIDDEN_INPUTS for node in nodes_called_by(operation))


def _without_rows(operation: tf.Operation, kinds: Kinds) -> Kind:
    """Return the kind of a value that is computed from no rows."""
    # It is computed a second time, from the sums over all replicas, by a copy of the operation.
    can_be_copied = not operation.op_def.is_stateful and not nodes_called_by(operation)
    if not can_be_copied or not _are_all(kinds, Kind.SAME, *_REDUCED):
        return Kind.OWN
    if _are_all(kinds, *_OF_MEANS):
        return Kind.OF_MEANS
    return Kind.OF_SUMS


# --- is each row of the result computed from the same row of the inputs? ----------------------------------------------


def _elementwise(operation: tf.Operation, kinds: Kinds) -> bool:
    """Each number of the result depends on those at its place, after broadcasting."""
    rank = operation.outputs[0].shape.rank
    if rank is None:
        return False
    for tensor, kind in zip(operation.inputs, kinds, strict=True):
        if kind is Kind.ROWS:
            chooses_whole_rows = operation.type == "Select" and tensor.shape.rank == 1
            has_its_place = tensor.shape.rank == rank or chooses_whole_rows
        else:
            has_its_place = kind in _OF_MEANS and _is_for_all_rows(tensor, rank)
        if not has_its_place:
            return False
    return True


def _is_for_all_rows(tensor: tf.Tensor, rank: int) -> bool:
    """Report whether a tensor, broadcast to `rank`, is the same for each row."""
    own = tensor.shape.rank
    if own is None:
        return False
    is_one_row = own > 0 and tensor.shape[0] == 1
    return own < rank or (own == rank and is_one_row)


def _by_row(operation: tf.Operation, kinds: Kinds) -> bool:
    """The first input has the rows, and the others are for all of them."""
    return kinds[0] is Kind.ROWS and _are_all(kinds[1:], *_OF_MEANS)


def _of_rows(operation: tf.Operation, kinds: Kinds) -> bool:
    """All inputs have the rows."""
    return _are_all(kinds, Kind.ROWS)


def _along_last_axis(operation: tf.Operation, kinds: Kinds) -> bool:
    rank = operation.inputs[0].shape.rank
    return rank is not None and rank > 1 and _by_row(operation, kinds)


def _batch_matmul(operation: tf.Operation, kinds: Kinds) -> bool:
    """A product of matrices for each row."""
    ranks = [tensor.shape.rank or 0 for tensor in operation.inputs]
    most = max(ranks)
    for tensor, kind, rank in zip(operation.inputs, kinds, ranks, strict=True):
        is_matrix_of_row = kind is Kind.ROWS and rank == most > 2
        is_for_all = kind in _OF_MEANS and (rank == 2 or _is_for_all_rows(tensor, most))
        if not is_matrix_of_row and not is_for_all:
            return False
    return True


def _along_axis(place: int) -> Callable[[tf.Operation, Kinds], bool]:
    """Return the rule of an operation that works along the axes that its input number `place` names."""

    def rule(operation: tf.Operation, kinds: Kinds) -> bool:
        of_data = list(kinds)
        del of_data[place]
        inputs = list(operation.inputs)
        axes = inputs.pop(place)
        has_rows = of_data[0] is Kind.ROWS and _are_all(of_data[1:], Kind.SAME)
        return has_rows and _leaves_rows(axes, inputs[0].shape.rank)

    return rule


def _concatenation(operation: tf.Operation, kinds: Kinds) -> bool:
    rank = operation.inputs[0].shape.rank
    return _are_all(kinds[:-1], Kind.ROWS) and _leaves_rows(operation.inputs[-1], rank)


def _stack(operation: tf.Operation, kinds: Kinds) -> bool:
    """Pack and Unpack."""
    rank = operation.inputs[0].shape.rank
    if rank is None or not _of_rows(operation, kinds):
        return False
    most = rank + 1 if operation.type == "Pack" else rank
    return operation.get_attr("axis") % most != 0


def _reshape(operation: tf.Operation, kinds: Kinds) -> bool:
    """Each row becomes one or several: the order of the numbers stays."""
    before = operation.inputs[0].shape
    after = operation.outputs[0].shape
    if kinds[0] is not Kind.ROWS or not before.rank or not after.rank:
        return False
    of_row = before[1:].num_elements()
    of_new_row = after[1:].num_elements()
    if not of_row or not of_new_row:
        return False
    return of_row % of_new_row == 0


def _expand_dims(operation: tf.Operation, kinds: Kinds) -> bool:
    rank = operation.inputs[0].shape.rank
    return rank is not None and kinds[0] is Kind.ROWS and _leaves_rows(operation.inputs[1], rank + 1)


def _squeeze(operation: tf.Operation, kinds: Kinds) -> bool:
    rank = operation.inputs[0].shape.rank
    axes = operation.get_attr("squeeze_dims")
    if kinds[0] is not Kind.ROWS or rank is None or not axes:  # no axes: all of size 1, which the first may be
        return False
    return all(axis % rank for axis in axes)


def _slice(operation: tf.Operation, kinds: Kinds) -> bool:
    begin = tf.get_static_value(operation.inputs[1])
    size = tf.get_static_value(operation.inputs[2])
    if kinds[0] is not Kind.ROWS or begin is None or size is None:
        return False
    return bool(begin[0] == 0 and size[0] == -1)


def _pad(operation: tf.Operation, kinds: Kinds) -> bool:
    paddings = tf.get_static_value(operation.inputs[1])
    return kinds[0] is Kind.ROWS and paddings is not None and not paddings[0].any()


def _tile(operation: tf.Operation, kinds: Kinds) -> bool:
    multiples = tf.get_static_value(operation.inputs[1], partial=True)
    return kinds[0] is Kind.ROWS and multiples is not None and multiples[0] == 1


def _gather(operation: tf.Operation, kinds: Kinds) -> bool:
    """A row of a table for each example, or parts of each row."""
    table, indices = kinds[:2]
    axis: Any = 0
    if operation.type == "GatherV2":
        axis = tf.get_static_value(operation.inputs[2])
    if axis is None:
        return False
    if table is not Kind.ROWS:
        return table in _OF_MEANS and indices is Kind.ROWS and axis == 0
    if indices is Kind.ROWS:
        return bool(operation.get_attr("batch_dims") > 0)
    return indices is Kind.SAME and axis > 0


def _one_hot(operation: tf.Operation, kinds: Kinds) -> bool:
    return operation.get_attr("axis") != 0 and _by_row(operation, kinds)


def _lookup(operation: tf.Operation, kinds: Kinds) -> bool:
    return list(kinds) == [Kind.SAME, Kind.ROWS, Kind.SAME]


def _leaves_rows(axes: tf.Tensor, rank: int | None) -> bool:
    """Report whether the first axis is not among those that a tensor names."""
    named = tf.get_static_value(axes)
    if named is None or rank is None:
        return False
    return all(axis % rank for axis in named.ravel())


# --- operations whose result is no row, or not only -------------------------------------------------------------------


def _each_of_its_own(operation: tf.Operation, kinds: Kinds) -> Kinds:
    return kinds


def _identity(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """Identity and Cast: also the shape of a batch stays one."""
    if kinds[0] in _OF_ROWS:
        return [kinds[0]]
    return [_without_rows(operation, kinds)]


def _reduction(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """Along other axes than the first, a reduction keeps the rows. Along the first, Mean and Sum give a MEAN or SUM of
    them; a Max, or a reduction along axes that are not known, is the replica's own.
    """
    if kinds[0] is Kind.SHAPE and operation.type == "Prod":
        return [Kind.SUM]  # the number of examples, times the size of one
    if kinds[0] is not Kind.ROWS:
        return [_without_rows(operation, kinds)]
    axes = operation.inputs[1]
    if _leaves_rows(axes, operation.inputs[0].shape.rank):
        return [Kind.ROWS]
    if tf.get_static_value(axes) is None:
        return [Kind.OWN]  # the first axis may be among them
    kind_of_total = {"Mean": Kind.MEAN, "Sum": Kind.SUM}
    return [kind_of_total.get(operation.type, Kind.OWN)]


def _matmul(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """The product of rows and a matrix that all replicas have keeps the rows; that of columns and rows is a SUM."""
    is_transposed = operation.get_attr("transpose_a")
    # In the product of columns and rows, the numbers of all examples are added up.
    columns = Kind.ROWS if is_transposed else Kind.COLUMNS
    rows = Kind.COLUMNS if operation.get_attr("transpose_b") else Kind.ROWS
    if list(kinds) == [columns, rows]:
        return [Kind.SUM]
    if not is_transposed and _by_row(operation, kinds):
        return [Kind.ROWS]
    return [_without_rows(operation, kinds)]


def _einsum(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """The letter of the rows is the first of each input that has them, and in no other place."""
    inputs, _, output = operation.get_attr("equation").decode().partition("->")
    rows: set[str] = set()
    others = ""
    for letters, kind in zip(inputs.split(","), kinds, strict=True):
        if kind is Kind.ROWS:
            rows.add(letters[:1])
            others += letters[1:]
        elif kind in _OF_MEANS:
            others += letters
        else:
            return [_without_rows(operation, kinds)]
    if len(rows) != 1:
        return [_without_rows(operation, kinds)]
    (row,) = rows
    if not row.isalpha() or row in others or row in output[1:]:
        return [Kind.OWN]
    return [Kind.ROWS] if output.startswith(row) else [Kind.SUM]


def _transpose(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """A matrix of rows becomes one of columns, and back. Else the first axis must stay the first."""
    order = tf.get_static_value(operation.inputs[1])
    if kinds[0] not in (Kind.ROWS, Kind.COLUMNS):
        return [_without_rows(operation, kinds)]
    if order is None:
        return [Kind.OWN]
    if list(order) == [1, 0]:
        return [Kind.COLUMNS] if kinds[0] is Kind.ROWS else [Kind.ROWS]
    if order[0] == 0 and kinds[0] is Kind.ROWS:
        return [Kind.ROWS]
    return [Kind.OWN]


def _strided_slice(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """A slice of a batch keeps the rows if it takes all of them, in their order. A shape is sliced for a size."""
    begin = tf.get_static_value(operation.inputs[1])
    end = tf.get_static_value(operation.inputs[2])
    strides = tf.get_static_value(operation.inputs[3])
    if begin is None or end is None or strides is None:
        return [Kind.OWN]
    # A mask has a bit for each part of the index `[begin:end:stride, ...]`. These have that of the first part.
    masks_of_first = [name for name in _MASKS if operation.get_attr(name) & 1]
    if kinds[0] is Kind.SHAPE:
        return [_part_of_shape(begin, end, masks_of_first)]
    if kinds[0] is not Kind.ROWS:
        return [_without_rows(operation, kinds)]
    if "ellipsis_mask" in masks_of_first:  # `[..., 0]` has all rows if the ellipsis stands for the first axis
        num_new_axes = operation.get_attr("new_axis_mask").bit_count()
        num_named_axes = len(begin) - 1 - num_new_axes
        rank = operation.inputs[0].shape.rank
        is_whole = rank is not None and rank > num_named_axes
    else:
        is_whole = masks_of_first == ["begin_mask", "end_mask"] and strides[0] == 1
    return [Kind.ROWS] if is_whole else [Kind.OWN]


_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _part_of_shape(begin: np.ndarray, end: np.ndarray, masks_of_first: Sequence[str]) -> Kind:
    """Return the kind of a slice of the shape of a batch: the number of examples, sizes of one example, or both."""
    first = 0 if "begin_mask" in masks_of_first else begin[0]
    if first > 0:
        return Kind.SAME
    if first < 0:
        return Kind.OWN
    is_one = "shrink_axis_mask" in masks_of_first or ("end_mask" not in masks_of_first and end[0] == 1)
    return Kind.SUM if is_one else Kind.SHAPE


def _fused_batch_norm(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """Outputs: the normalised batch, its mean and variance, and what the gradient needs."""
    number = len(operation.outputs)
    if not _by_row(operation, kinds):
        return [Kind.OWN] * number
    if not operation.get_attr("is_training"):
        return [Kind.ROWS, *[Kind.OWN] * (number - 1)]
    return [Kind.ROWS, Kind.MEAN, Kind.MEAN, *[Kind.OWN] * (number - 3)]


def _sum_at_places(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """Rows added up, each at a place of its own among a fixed number."""
    if list(kinds) == [Kind.ROWS, Kind.ROWS, Kind.SAME]:
        return [Kind.SUM]
    return [_without_rows(operation, kinds)]


def _shape(operation: tf.Operation, kinds: Kinds) -> Kinds:
    kind_of_shape = {Kind.ROWS: Kind.SHAPE, Kind.OWN: Kind.OWN, Kind.COLUMNS: Kind.OWN}
    return [kind_of_shape.get(kind, Kind.SAME) for kind in kinds]


def _size(operation: tf.Operation, kinds: Kinds) -> Kinds:
    kind_of_size = {Kind.ROWS: Kind.SUM, Kind.COLUMNS: Kind.SUM, Kind.OWN: Kind.OWN}
    return [kind_of_size.get(kinds[0], Kind.SAME)]


def _sum_of_squares(operation: tf.Operation, kinds: Kinds) -> Kinds:
    if kinds[0] is Kind.ROWS:
        return [Kind.SUM]
    return [_without_rows(operation, kinds)]


def _shapes_side_by_side(operation: tf.Operation, kinds: Kinds) -> Kinds:
    if kinds[0] is Kind.SHAPE and _are_all(kinds[1:], Kind.SAME):
        return [Kind.SHAPE]
    if _concatenation(operation, kinds):
        return [Kind.ROWS]
    return [_without_rows(operation, kinds)]


def _of_shape(operation: tf.Operation, kinds: Kinds) -> Kinds:
    """What has the shape of a batch: one number in all places, or random numbers, other ones in each row."""
    if operation.type == "Fill" and kinds[1] not in _OF_MEANS:
        return [_without_rows(operation, kinds)]
    is_shape_of_batch = kinds[0] in (Kind.SHAPE, Kind.SUM, Kind.OF_SUMS)
    if is_shape_of_batch and operation.outputs[0].shape.rank:
        return [Kind.ROWS]
    return [Kind.OWN]


_KEEPS_ROWS: dict[str, Callable[[tf.Operation, Kinds], bool]] = {}
"""Type of an operation -> whether it keeps rows apart, given the kinds of its inputs; other types do not."""

_RULES: dict[str, Callable[[tf.Operation, Kinds], Kinds]] = {}
"""Type of an operation -> the kinds of its outputs, given those of its inputs, of which not all are SAME."""


def _keep_rows(rule: Callable[[tf.Operation, Kinds], bool], types: str) -> None:
    _KEEPS_ROWS.update(dict.fromkeys(types.split(), rule))


def _have_kinds(rule: Callable[[tf.Operation, Kinds], Kinds], types: str) -> None:
    _RULES.update(dict.fromkeys(types.split(), rule))


_keep_rows(
    _elementwise,
    "StopGradient PreventGradient CheckNumerics ZerosLike OnesLike Neg Abs Sign Square Sqrt Rsqrt Reciprocal Inv "
    "Exp Expm1 Log Log1p Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Sigmoid Erf Erfc Erfinv Lgamma Digamma Floor "
    "Ceil Round Rint Relu Relu6 LeakyRelu Elu Selu Softplus Softsign IsNan IsInf IsFinite LogicalNot LogicalAnd "
    "LogicalOr Add AddV2 AddN Sub Mul RealDiv Div DivNoNan MulNoNan FloorDiv FloorMod Mod Pow Atan2 Xlogy Xdivy "
    "Maximum Minimum SquaredDifference Equal NotEqual Greater GreaterEqual Less LessEqual ApproximateEqual Select "
    "SelectV2 ClipByValue Bucketize StringToNumber StringToHashBucketFast StringToHashBucketStrong "
    "StringToHashBucket AsString StringLower StringUpper StringStrip StringJoin RegexReplace StaticRegexReplace "
    "StringLength",
)
_keep_rows(
    _by_row,
    "BiasAdd Conv Conv1D Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPool3D AvgPool AvgPool3D LRN "
    "ResizeBilinear ResizeNearestNeighbor ResizeBicubic DepthToSpace SpaceToDepth ExtractImagePatches DecodeRaw "
    "InTopKV2",
)
_keep_rows(_of_rows, "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits InTopK")
_keep_rows(_along_last_axis, "Softmax LogSoftmax TopKV2")
_keep_rows(_batch_matmul, "BatchMatMul BatchMatMulV2 BatchMatMulV3")
_keep_rows(_along_axis(-1), "ArgMax ArgMin Cumsum Cumprod ReverseV2 SplitV")
_keep_rows(_along_axis(0), "Split")
_keep_rows(_stack, "Pack Unpack")
_keep_rows(_reshape, "Reshape")
_keep_rows(_expand_dims, "ExpandDims")
_keep_rows(_squeeze, "Squeeze")
_keep_rows(_slice, "Slice")
_keep_rows(_pad, "Pad PadV2 MirrorPad")
_keep_rows(_tile, "Tile")
_keep_rows(_gather, "GatherV2 ResourceGather")
_keep_rows(_one_hot, "OneHot")
_keep_rows(_lookup, "LookupTableFindV2")

_have_kinds(_identity, "Identity Cast")
_have_kinds(_each_of_its_own, "IdentityN")
_have_kinds(_reduction, "Mean Sum Max Min Prod All Any EuclideanNorm")
_have_kinds(_matmul, "MatMul")
_have_kinds(_einsum, "Einsum")
_have_kinds(_transpose, "Transpose")
_have_kinds(_strided_slice, "StridedSlice")
_have_kinds(_shapes_side_by_side, "ConcatV2")
_have_kinds(_sum_of_squares, "L2Loss")
_have_kinds(_sum_at_places, "UnsortedSegmentSum ScatterNd")
_have_kinds(_fused_batch_norm, "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
_have_kinds(_shape, "Shape ShapeN")
_have_kinds(_size, "Size")
_have_kinds(_of_shape, "Fill StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2")
