"""`run.debug=nan`: find the operation of a step that computed the first value that is not finite.

Each part of a trace that runs also computes, for every floating-point tensor used in it, whether the tensor is finite,
infinite or has a NaN. The step fails if a value that is not finite reaches the loss or changes a variable. The cause is
then found by going back from there to an operation whose inputs were all finite. A mask of -inf, or a NaN that
`tf.where` drops, is therefore not an error.

`tf.debugging.enable_check_numerics` (TensorFlow 2.21) fails at any such value, does not see the operations of gradients
inside `wrap_function`, and names an operation after the first bad one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.system.user_frames import Frame, user_frames
from runner.tracing.graph_operations import changes_state
from runner.types import WeightedLabels

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_MARK = "runner/numeric_checks"
_FINITE = "0"
_KINDS = {"1": "an infinite value", "2": "NaN"}

_numbers = itertools.count()


class NotFiniteError(tf.compat.v1.train.NanLossDuringTrainingError):
    """A value that is not finite reached the loss or a variable; the message names the operation that computed it."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass(eq=False)
class _Checked:
    """The tensors of a part of a trace that are checked.

    Attributes:
      tensors: all of them, in program order.
      roots: those that must be finite.
      inputs: placeholder of an input -> what a user calls it, such as `features['income']`.
      number: by which the error of a check names them.
    """

    tensors: Sequence[tf.Tensor]
    roots: Sequence[tf.Tensor]
    inputs: Mapping[tf.Operation, str]
    number: int = dataclasses.field(default_factory=lambda: next(_numbers))


class NumericChecks:
    """The checks in the graph of one trace.

    Args:
      graph: the graph.
      inputs: the flat inputs of its replicas, in turn, and then other integers.
      replica_spec: the specs (features, labels or None) of the inputs of one replica.
    """

    def __init__(self, graph: Any, inputs: Sequence[tf.Tensor], replica_spec: tuple[Any, Any]) -> None:
        self._graph = graph
        features, labels = replica_spec
        names = [*_names_of(features, "features"), *_names_of(labels, "labels")]
        operations = [tensor.op for tensor in inputs]
        self._inputs = dict(zip(operations, itertools.cycle(names), strict=False))
        self._made: list[_Checked] = []

    def add_checks(self, running: Sequence[tf.Operation], fetches: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Add operations to the graph that fail if a value in a part of the trace is not finite, and return those that
        must run.

        Args:
          running: all operations of the part.
          fetches: tensors that the part returns.
        """
        used: list[tf.Tensor] = []
        written: list[tf.Tensor] = []
        for operation in running:
            used += operation.inputs
            if changes_state(operation):
                written += operation.inputs
        tensors = {tensor.ref(): tensor for tensor in (*used, *fetches) if tensor.dtype in _FLOATS}
        roots = [tensor for tensor in (*fetches, *written) if tensor.ref() in tensors]
        if not roots:
            return []
        # In program order, because `_error_of` names the first operation that had finite inputs.
        order = {operation: index for index, operation in enumerate(running)}
        in_order = sorted(tensors.values(), key=lambda tensor: order.get(tensor.op, 0))
        checked = _Checked(in_order, roots, self._inputs)
        self._made.append(checked)  # `_known` holds it only as long as this does
        _known[checked.number] = checked
        with self._graph.as_default(), tf.name_scope(_MARK):
            states = {tensor.ref(): _state(tensor) for tensor in checked.tensors}
            is_fine = tf.reduce_all([tf.equal(states[tensor.ref()], 0) for tensor in roots])
            digits = tf.strings.as_string(tf.stack(list(states.values())))
            data = [f"{_MARK} {checked.number} ", tf.strings.reduce_join(digits)]
            return [tf.raw_ops.Assert(condition=is_fine, data=data, summarize=1)]


def _names_of(spec: Any, name: str) -> list[str]:
    """Return what a user calls each tensor of a structure, such as `features['income']`, in the order of tf.nest."""
    names: list[str] = []
    if isinstance(spec, Mapping):
        for key in sorted(spec):
            names += _names_of(spec[key], f"{name}[{key!r}]")
    elif isinstance(spec, WeightedLabels):
        names += _names_of(spec.labels, name)
        names += _names_of(spec.sample_weight, "sample_weight")
    elif isinstance(spec, tuple | list):
        for index, part in enumerate(spec):
            names += _names_of(part, f"{name}[{index}]")
    else:
        # A sparse tensor consists of three.
        tensors = [part for part in tf.nest.flatten(spec, expand_composites=True) if part is not None]
        names += [name] * len(tensors)
    return names


_known: weakref.WeakValueDictionary[int, _Checked] = weakref.WeakValueDictionary()


def _state(tensor: tf.Tensor) -> tf.Tensor:
    """Return an int scalar: 0 all finite, 1 some infinite, 2 some NaN."""
    with tf.device(tensor.device):
        has_nan = tf.reduce_any(tf.math.is_nan(tensor))
        is_finite = tf.reduce_all(tf.math.is_finite(tensor))
        return tf.where(has_nan, 2, tf.where(is_finite, 0, 1))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Name the operation, and the user's line that made it, in the error of a check that fails in this context.

    Raises:
      NotFiniteError: a check failed.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        match = re.search(rf"\[{_MARK} (\d+) \] \[([012]+)\]", str(error))
        if match is None:
            raise
        number, states = match.groups()
        checked = _known.get(int(number))
        if checked is None:
            raise
        raise _error_of(checked, states) from None


def _error_of(checked: _Checked, states: str) -> NotFiniteError:
    """Return the error that names the operation whose inputs were finite and whose output was not."""
    kinds = {tensor.ref(): kind for tensor, kind in zip(checked.tensors, states, strict=True)}
    first = _first_not_finite(checked, kinds)
    operation = first.op
    what = _KINDS[kinds[first.ref()]]
    if operation.type == "Placeholder":
        name = checked.inputs.get(operation, operation.name)
        return NotFiniteError(f"the input contains {what}: {name}, {first.dtype.name} {first.shape}.")
    inputs = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in operation.inputs) or "none"
    error = NotFiniteError(
        f"operation {operation.name!r} ({operation.type}) made {what} from finite inputs ({inputs})."
    )
    source = _made_by_user(operation)
    if source is None:
        return error
    if source is operation:
        error.add_note("made")
    else:
        error.add_note(f"a part of the gradient of {source.name!r} ({source.type}), made")
    for frame in _frames_of(source):
        error.add_note(f"in {frame}")
    return error


def _first_not_finite(checked: _Checked, kinds: Mapping[Any, str]) -> tf.Tensor:
    """Return the first tensor, in program order, that leads to a bad root and was made from finite inputs.

    Args:
      checked: the tensors.
      kinds: reference of each tensor -> its state, as `_state` returns it.
    """
    origins: list[tf.Tensor] = []
    seen = set[Any]()
    stack = [tensor for tensor in checked.roots if kinds[tensor.ref()] != _FINITE]
    while stack:
        tensor = stack.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        bad_inputs = [source for source in tensor.op.inputs if kinds.get(source.ref(), _FINITE) != _FINITE]
        stack += bad_inputs
        if not bad_inputs:
            origins.append(tensor)
    indices = {tensor.ref(): index for index, tensor in enumerate(checked.tensors)}
    return min(origins, key=lambda tensor: indices[tensor.ref()])


def _made_by_user(operation: tf.Operation) -> tf.Operation | None:
    """Return the operation, or the nearest one before it, that a line of the user's code made.

    Gradients are made by the runner or by `minimize`, so their own lines do not help; the differentiated operation's
    line does.
    """
    seen = {operation}
    queue = [operation]
    for candidate in queue:
        if not _is_indirect(candidate):
            return candidate
        before = dict.fromkeys(tensor.op for tensor in candidate.inputs if tensor.op not in seen)
        # One input comes from the differentiated operation, the other from the gradient of the operation after it.
        queue += sorted(before, key=_is_indirect)
        seen.update(before)
    return operation if _frames_of(operation) else None


def _is_indirect(operation: tf.Operation) -> bool:
    """Report whether no line of the user's code made the operation, or one did by asking for a gradient."""
    return _is_gradient(operation) or not _frames_of(operation)


def _is_gradient(operation: tf.Operation) -> bool:
    """Report whether tf.gradients or a tape created the operation, judging by the names of its scopes."""
    return re.search(r"(^|/)(gradients(_\d+)?|gradient_tape)/", operation.name) is not None


def _frames_of(operation: tf.Operation) -> list[Frame]:
    return user_frames(operation.traceback or ())
