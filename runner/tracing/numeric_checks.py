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
_KINDS = {"1": "an infinite value", "2": "NaN"}

_numbers = itertools.count()


class NotFiniteError(tf.compat.v1.train.NanLossDuringTrainingError):
    """A value that is not finite reached the loss or a variable; the message names the operation that computed it."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass(eq=False)
class _Checked:
    """The tensors of a part of a trace that are checked, those of them that must be finite, and names of inputs."""

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
        names = [*_names_of(replica_spec[0], "features"), *_names_of(replica_spec[1], "labels")]
        self._inputs = dict(zip((tensor.op for tensor in inputs), itertools.cycle(names), strict=False))
        self._made: list[_Checked] = []

    def added(self, running: Sequence[tf.Operation], fetches: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Return operations that fail if a value in a part of the trace is not finite.

        Args:
          running: all operations of the part.
          fetches: tensors that the part returns.
        """
        used = [tensor for operation in running for tensor in operation.inputs] + list(fetches)
        tensors = {tensor.ref(): tensor for tensor in used if tensor.dtype in _FLOATS}
        written = [tensor for operation in running if changes_state(operation) for tensor in operation.inputs]
        roots = [tensor for tensor in (*fetches, *written) if tensor.ref() in tensors]
        if not roots:
            return []
        # In program order, because `_error_of` names the first operation that had finite inputs.
        order = {operation: place for place, operation in enumerate(running)}
        checked = _Checked(sorted(tensors.values(), key=lambda tensor: order.get(tensor.op, 0)), roots, self._inputs)
        self._made.append(checked)  # `_known` holds it only as long as this does
        _known[checked.number] = checked
        with self._graph.as_default(), tf.name_scope(_MARK):
            states = {tensor.ref(): _state(tensor) for tensor in checked.tensors}
            is_fine = tf.reduce_all([tf.equal(states[tensor.ref()], 0) for tensor in roots])
            text = tf.strings.reduce_join(tf.strings.as_string(tf.stack(list(states.values()))))
            return [tf.raw_ops.Assert(condition=is_fine, data=[f"{_MARK} {checked.number} ", text], summarize=1)]


def _names_of(spec: Any, name: str) -> list[str]:
    """Return what a user calls each tensor of a structure, such as `features['income']`, in the order of tf.nest."""
    if isinstance(spec, Mapping):
        return [one for key in sorted(spec) for one in _names_of(spec[key], f"{name}[{key!r}]")]
    if isinstance(spec, WeightedLabels):
        return _names_of(spec.labels, name) + _names_of(spec.sample_weight, "sample_weight")
    if isinstance(spec, tuple | list):
        return [one for place, part in enumerate(spec) for one in _names_of(part, f"{name}[{place}]")]
    # A sparse tensor consists of three.
    return [name for part in tf.nest.flatten(spec, expand_composites=True) if part is not None]


_known: weakref.WeakValueDictionary[int, _Checked] = weakref.WeakValueDictionary()


def _state(tensor: tf.Tensor) -> tf.Tensor:
    """Return an int scalar: 0 all finite, 1 some infinite, 2 some NaN."""
    with tf.device(tensor.device):
        has_nan, is_finite = tf.reduce_any(tf.math.is_nan(tensor)), tf.reduce_all(tf.math.is_finite(tensor))
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
        checked = _known.get(int(match.group(1))) if match else None
        if match is None or checked is None:
            raise
        raise _error_of(checked, match.group(2)) from None


def _error_of(checked: _Checked, states: str) -> NotFiniteError:
    """Return the error that names the operation whose inputs were finite and whose output was not."""
    state = {tensor.ref(): kind for tensor, kind in zip(checked.tensors, states, strict=True)}
    places = {tensor.ref(): place for place, tensor in enumerate(checked.tensors)}
    behind, stack = {}, [tensor for tensor in checked.roots if state[tensor.ref()] != "0"]
    while stack:
        tensor = stack.pop()
        if tensor.ref() not in behind:
            bad = [one for one in tensor.op.inputs if state.get(one.ref(), "0") != "0"]
            behind[tensor.ref()] = bad
            stack += bad
    first = min((ref for ref, bad in behind.items() if not bad), key=lambda ref: places[ref]).deref()
    what, operation = _KINDS[state[first.ref()]], first.op
    if operation.type == "Placeholder":
        name = checked.inputs.get(operation, operation.name)
        return NotFiniteError(f"the input contains {what}: {name}, {first.dtype.name} {first.shape}.")
    inputs = ", ".join(f"{one.name} {one.shape}" for one in operation.inputs) or "none"
    source = _made_by_user(operation)
    error = NotFiniteError(
        f"operation {operation.name!r} ({operation.type}) made {what} from finite inputs ({inputs})."
    )
    if source is not None:
        place = "made" if source is operation else f"a part of the gradient of {source.name!r} ({source.type}), made"
        for note in (place, *(f"in {frame}" for frame in _frames_of(source))):
            error.add_note(note)
    return error


def _made_by_user(operation: tf.Operation) -> tf.Operation | None:
    """Return the operation, or the nearest one before it, that a line of the user's code made.

    Gradients are made by the runner or by `minimize`, so their own lines do not help; the differentiated operation's
    line does.
    """
    seen, queue = {operation}, [operation]
    for one in queue:
        if _frames_of(one) and not _is_gradient(one):
            return one
        before = dict.fromkeys(tensor.op for tensor in one.inputs if tensor.op not in seen)
        # One input comes from the differentiated operation, the other from the gradient of the operation after it.
        queue += sorted(before, key=lambda other: _is_gradient(other) or not _frames_of(other))
        seen.update(before)
    return operation if _frames_of(operation) else None


def _is_gradient(operation: tf.Operation) -> bool:
    """Report whether tf.gradients or a tape created the operation, judging by the names of its scopes."""
    return re.search(r"(^|/)(gradients(_\d+)?|gradient_tape)/", operation.name) is not None


def _frames_of(operation: tf.Operation) -> list[Frame]:
    return user_frames(operation.traceback or ())
