"""Partitioned variables, over parameter servers or by a v1 partitioner: where the parts are, and what is saved."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.errors import OF_A_LOST_PEER
from runner.tf_private import parameter_server, tensor_bundle
from runner.tf_private.variables import VariablePart, copies_of, refill, share_on_read
from runner.tracing.variable_request import VariableSpec

Entry = tuple[str, str, tf.DType]
"""(key of a tensor in a checkpoint, slice of its rows, dtype)."""

Rows = tuple[int, int]
"""(first row of a part, row after the last one of the part)."""


class PartitionedVariable:
    """The parts of one variable in order, used in its place to read, write and save.

    Args:
      parts: part name -> variable.
      axis: the axis along which it is partitioned.

    Attributes:
      sizes: sizes of the parts along the axis.
    """

    def __init__(self, parts: Mapping[str, tf.Variable], axis: int = 0) -> None:
        self.names = tuple(parts)
        self.parts = tuple(parts.values())
        self.dtype = self.parts[0].dtype
        self.axis = axis
        self.sizes = [int(part.shape[axis]) for part in self.parts]
        shape = self.parts[0].shape.as_list()
        self.shape = tf.TensorShape([*shape[:axis], sum(self.sizes), *shape[axis + 1 :]])


class UnreadableVariableError(RuntimeError):
    """A checkpoint was damaged or removed while its variables were read.

    Attributes:
      is_clear: True: the text says enough, so no traceback is shown.
    """

    is_clear = True

    def __init__(self, path: str, keys: Sequence[str], error: tf.errors.OpError) -> None:
        named = ", ".join(map(repr, keys))
        why = error.message.partition(" [Op:")[0].rpartition("}} ")[2]
        super().__init__(
            f"{named} in checkpoint {path} cannot be read: {type(error).__name__}: {why}. It was "
            "damaged or removed. Run the command again to use the newest undamaged checkpoint, or name another one. "
            "No training step was taken with the variables that had been read."
        )


LARGE = 1 << 20
"""Size in bytes from which copying a variable costs more than the operation that avoids the copy."""


def assign(variable: Any, value: Any) -> None:
    """Assign a value to a variable.

    Args:
      variable: a variable or PartitionedVariable.
      value: a tensor or array of its shape; for a PartitionedVariable also a tuple with the value of each part.
    """
    if not isinstance(variable, PartitionedVariable):
        with _on_device_of(variable):
            if size_of(variable) >= LARGE:
                share_on_read(variable)  # otherwise the variable would copy the value instead of using its buffer
            variable.assign(value)
        return
    if not isinstance(value, tuple):
        value = tf.split(value, variable.sizes, variable.axis)
    for part, value_of_part in zip(variable.parts, value, strict=True):
        assign(part, value_of_part)


def update(variable: Any, places: np.ndarray, values: tf.Tensor) -> None:
    """Set slices of a variable on all its copies, without its whole value.

    Args:
      variable: a variable or PartitionedVariable.
      places: int64 `[n, k]`, the first k indices of each slice.
      values: `[n, ...]` of the variable's dtype.
    """
    if not isinstance(variable, PartitionedVariable):
        for copy in copies_of(variable):
            with tf.device(copy.device):
                tf.raw_ops.ResourceScatterNdUpdate(ref=copy.handle, indices=places, updates=values)
        return
    axis = variable.axis - places.shape[1] + 1  # that of `values` along which the variable is partitioned
    if axis > 0:  # it is partitioned along an axis inside the slices, so each part has its share of every slice
        for part, values_of_part in zip(variable.parts, tf.split(values, variable.sizes, axis), strict=True):
            update(part, places, values_of_part)
        return
    start = 0  # index of the part's first row in the whole variable
    for part, size in zip(variable.parts, variable.sizes, strict=True):
        index_in_part = places[:, variable.axis] - start
        (in_this_part,) = np.nonzero((index_in_part >= 0) & (index_in_part < size))
        places_in_part = places[in_this_part].copy()
        places_in_part[:, variable.axis] = index_in_part[in_this_part]
        update(part, places_in_part, tf.gather(values, in_this_part))
        start += size


def value_of(variable: Any) -> Any:
    """Return the value of a variable, a tensor of its shape. A value on a parameter server stays there.

    For a variable partitioned by rows, return a tuple with the value of each part.
    """
    if isinstance(variable, PartitionedVariable):
        values = tuple(value_of(part) for part in variable.parts)
        if variable.axis == 0:
            return values
        with _on_device_of(variable.parts[0]):
            return tf.concat(values, variable.axis)
    with _on_device_of(variable):
        if size_of(variable) >= LARGE:
            share_on_read(variable)
        return variable.read_value()


def size_of(variable: Any) -> int:
    """Return the size of a variable, or of a spec, in bytes; 0 if TensorFlow does not know it."""
    num_elements = variable.shape.num_elements() or 0
    return int(num_elements * variable.dtype.size)


def _on_device_of(variable: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the device scope for operations on a variable, so that its value is not sent elsewhere."""
    if not tensor_bundle.is_far(variable):
        return contextlib.nullcontext()
    return tf.device(variable.device)


def part_name(name: str, number: int) -> str:
    """Return the name of part `number` of the variable `name`."""
    return f"{name}/part_{number}"


def folded(
    variables: Mapping[str, tf.Variable], parts: Mapping[str, VariablePart]
) -> dict[str, tf.Variable | PartitionedVariable]:
    """Return `variables` with the parts of each partitioned variable joined under its whole name.

    An optimizer keeps state for each part. State with a row for each row of the part is a part, too.

    Args:
      variables: name -> variable.
      parts: name of a part -> its whole, its number and its axis.
    """
    rows = {name: variables[name].shape[:1] for name in parts}
    patterns = {name: _pattern(name) for name in parts}

    def part_of(name: str, variable: tf.Variable) -> str | None:
        """Return the part that the variable is, or whose state it is; None: no part."""
        if name in parts:
            return name
        for part, pattern in patterns.items():
            if pattern.search(name) and variable.shape[:1] == rows[part]:
                return part
        return None

    joined: dict[str, Any] = {}
    names_of_parts: dict[str, dict[int, str]] = {}  # name of a whole -> number of a part -> its name
    axes: dict[str, int] = {}
    for name, variable in variables.items():
        part = part_of(name, variable)
        if part is None:
            joined[name] = variable
            continue
        whole = _of_whole(name, patterns[part], parts[part].whole)
        joined[whole] = None  # its place in the order
        axes[whole] = parts[part].axis
        names_of_parts.setdefault(whole, {})[parts[part].number] = name
    for whole, names in names_of_parts.items():
        in_order = {names[number]: variables[names[number]] for number in sorted(names)}
        joined[whole] = PartitionedVariable(in_order, axes[whole])
    return joined


def specs_of(saved: Mapping[str, Any], specs: Mapping[str, VariableSpec]) -> dict[str, VariableSpec]:
    """Return name -> spec of each variable of `saved`; for a PartitionedVariable, what its parts share.

    Args:
      saved: name -> variable or PartitionedVariable.
      specs: name -> spec, parts included.
    """
    found: dict[str, VariableSpec] = {}
    for name, variable in saved.items():
        if isinstance(variable, PartitionedVariable):
            found[name] = dataclasses.replace(specs[variable.names[0]], name=name, shape=variable.shape)
        else:
            found[name] = specs[name]
    return found


def restore(path: str, variables: Mapping[str, Any], entry: Callable[[str], tuple[str, tf.DType]]) -> None:
    """Load variables from the checkpoint `path` in parts of bounded size.

    Values of variables on a parameter server are read there.

    Args:
      path: path of the checkpoint.
      variables: name -> variable or PartitionedVariable.
      entry: returns (key, dtype) of a name in the checkpoint.

    Raises:
      UnreadableVariableError: a value cannot be read; some variables already have their new values, others do not.
    """
    wanted: dict[str, list[tuple[Any, Entry]]] = {}  # device that reads -> (variable, what it gets)
    for name, variable in variables.items():
        key, dtype = entry(name)
        parts: list[Any] = [variable]
        rows = [""]
        # Reading rows of a tensor that is stored whole reads all of it, so do it once per server, not once per
        # part of each variable.
        if isinstance(variable, PartitionedVariable) and tensor_bundle.is_far(variable.parts[0]):
            parts = list(variable.parts)
            rows = tensor_bundle.slice_specs([part.shape for part in parts], variable.axis)
        for part, rows_of_part in zip(parts, rows, strict=True):
            device = part.device if tensor_bundle.is_far(part) else "CPU:0"
            wanted.setdefault(device, []).append((part, (key, rows_of_part, dtype)))
    for device, pairs in wanted.items():
        for together in tensor_bundle.in_parts(pairs, lambda pair: size_of(pair[0])):
            _restore_together(path, device, together)


def _restore_together(path: str, device: str, pairs: Sequence[tuple[Any, Entry]]) -> None:
    """Load variables by one read. Raises: UnreadableVariableError.

    Args:
      path: path of the checkpoint.
      device: the device that reads.
      pairs: (variable, its entry).
    """
    read = functools.partial(_read, path, device, [entry for _, entry in pairs])
    variable, (_, _, dtype) = pairs[0]
    is_whole = not isinstance(variable, PartitionedVariable) and dtype == variable.dtype
    if is_whole and size_of(variable) > tensor_bundle.PART_BYTES:  # alone; free it before the next one is read
        refill(variable, read)
        return
    values = read()
    for variable, (_, _, dtype) in pairs:
        value: Any = values.pop(0)
        if dtype != variable.dtype:
            value = value.numpy()  # `assign` converts an array to the variable's dtype, but not a tensor
        assign(variable, value)


def _read(path: str, device: str, entries: Sequence[Entry]) -> list[tf.Tensor]:
    """Read entries like `read_entries`. Raises: UnreadableVariableError."""
    try:
        return tensor_bundle.read_entries(path, device, entries)
    except tf.errors.OpError as error:
        # The file is not at fault: the server that was to read it is gone, or there is no memory.
        if type(error).__name__ in OF_A_LOST_PEER or isinstance(error, tf.errors.ResourceExhaustedError):
            raise
        unreadable = entries
        if len(entries) > 1:
            # TensorFlow names the file and not the tensor. If each can be read now, name all.
            alone = [entry for entry in entries if not _is_readable(path, device, entry)]
            unreadable = alone or entries
        raise UnreadableVariableError(path, [key for key, _, _ in unreadable], error) from error


def _is_readable(path: str, device: str, entry: Entry) -> bool:
    try:
        tensor_bundle.read_entries(path, device, [entry])
    except tf.errors.OpError:
        return False
    return True


def _pattern(part: str) -> re.Pattern[str]:
    """Return the expression that finds `part` in a name, also in Keras' form, with underscores and ":0" at the end."""
    own_form = re.escape(part)
    form_of_keras = re.escape(part.replace("/", "_")) + "_0"
    return re.compile(rf"(?<![^/_])(?:{own_form}|{form_of_keras})(?!\d)")


def _of_whole(name: str, pattern: re.Pattern[str], whole: str) -> str:
    """Return `name` with that of the whole variable in place of the part's, each in the same form."""

    def replace(match: re.Match[str]) -> str:
        is_in_keras = "/part_" not in match[0]
        return whole.replace("/", "_") if is_in_keras else whole

    return pattern.sub(replace, name)


def part_specs(spec: VariableSpec, rows: Sequence[Rows]) -> list[VariableSpec]:
    """Return the specs of the parts of a partitioned variable; `rows` are those of each part."""
    specs = []
    for number, (first, end) in enumerate(rows):
        part = dataclasses.replace(
            spec,
            name=part_name(spec.name, number),
            shape=tf.TensorShape([end - first]).concatenate(spec.shape[1:]),
            initial=rows_of(spec.initial, spec.shape, first, end),
        )
        specs.append(part)
    return specs


def rows_of(initial: Any, shape: tf.TensorShape, first: int, end: int) -> Callable[[], Any]:
    """Return a function that returns rows `first` to `end` of an initial value, `[end - first, ...]`.

    Keras and get_variable bind the shape to an initializer. It is called with the part's shape, so the whole value is
    never in memory. Any other initial value is computed whole on the server of the part, and cut.
    """
    part = tf.TensorShape([end - first]).concatenate(shape[1:])
    if isinstance(initial, functools.partial):
        if initial.args and _is_shape(initial.args[0], shape):
            return functools.partial(initial.func, part.as_list(), *initial.args[1:], **initial.keywords)
        if _is_shape(initial.keywords.get("shape"), shape):
            keywords = {**initial.keywords, "shape": part.as_list()}
            return functools.partial(initial.func, *initial.args, **keywords)
    if callable(initial):
        return lambda: tf.convert_to_tensor(initial())[first:end]
    return lambda: initial[first:end]


def _is_shape(value: Any, shape: tf.TensorShape) -> bool:
    return isinstance(value, tuple | list | tf.TensorShape) and tf.TensorShape(value) == shape


# --- servers and numbers of parts ----------------------------------------------------------------------------------


class Unpartitioned:
    """The placement without parameter servers: no variable is partitioned."""

    def parts(self, spec: VariableSpec) -> Sequence[Rows]:
        """Return the rows of each part of a variable; an empty sequence: it is not partitioned."""
        return ()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a step is traced."""
        return contextlib.nullcontext()


class ParameterServers:
    """The placement on parameter servers.

    A variable is placed on the server with the fewest bytes, and the optimizer state of a weight on the weight's
    server.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self._partitioner: Callable[..., Any] | None = parameter_server.partitioner_of(strategy)
        num_servers = len(parameter_server.tasks_of(strategy)["ps"])
        # Device of a server -> bytes of the variables placed there so far.
        self._bytes = {f"/job:ps/task:{number}/device:CPU:0": 0 for number in range(num_servers)}
        # Name of a weight -> (its shape, the device of its server).
        self._weights: dict[str, tuple[tf.TensorShape, str]] = {}
        parameter_server.traced_before_scheduled(strategy)

    def parts(self, spec: VariableSpec) -> Sequence[Rows]:
        """Return the rows of each part by the strategy's partitioner, along the first dimension.

        Only weights are partitioned. Parts that a v1 partitioner of the model made are not partitioned again: the model
        knows each of them by name.
        """
        if _V1_PART.search(spec.name):
            return ()
        has_rows = bool(spec.shape.rank) and spec.shape.is_fully_defined()
        if self._partitioner is None or not spec.trainable or not has_rows:
            return ()
        num_rows = int(spec.shape[0])
        num_parts_along = self._partitioner(shape=spec.shape, dtype=spec.dtype)
        num_parts = min(int(num_parts_along[0]), num_rows)
        if num_parts <= 1:
            return ()
        # The first parts have one row more, where the rows do not divide evenly.
        rows_per_part, extra = divmod(num_rows, num_parts)
        ends = [rows_per_part * number + min(number, extra) for number in range(1, num_parts + 1)]
        starts = [0, *ends[:-1]]
        return list(zip(starts, ends, strict=True))

    def variable(self, spec: VariableSpec) -> tf.Variable:
        """Make the variable on its server, uninitialized, and count its bytes there."""
        device = self._beside(spec)
        if device is None:
            device = min(self._bytes, key=self._bytes.__getitem__)
        size = spec.shape.num_elements() or 1
        self._bytes[device] += size * (spec.dtype.size or 1)
        if spec.trainable:
            self._weights[spec.name] = (spec.shape, device)
        return parameter_server.variable_on(
            device, self.strategy, spec.name, spec.shape, spec.dtype, trainable=spec.trainable
        )

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which to trace a step with remote variables that other workers write."""
        return parameter_server.remote_variables()

    def _beside(self, spec: VariableSpec) -> str | None:
        """Return the device of the weights whose optimizer state `spec` is; None: it is no optimizer state.

        Optimizer state is recognized by its name and shape.
        """
        if spec.trainable:
            return None
        name_of_state = _flat(spec.name)
        weights = []
        for name, (shape, _) in self._weights.items():
            if shape == spec.shape and _flat(name) in name_of_state:
                weights.append(name)
        if not weights:
            return None
        # The longest name: 'out/kernel' is found in a state of 'layout/kernel', too.
        _, device = self._weights[max(weights, key=len)]
        return device


_V1_PART = re.compile(r"/part_\d+$")


def _flat(name: str) -> str:
    """Return `name` in the form in which Keras uses it in slot names: with underscores."""
    return re.sub(r"\W", "_", name)
