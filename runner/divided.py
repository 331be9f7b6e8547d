"""Variables that are divided by rows over parameter servers: what is saved of them under one name."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from runner import bundles


class Divided:
    """The parts of one variable, in the order of their rows, where one variable is read, written or saved.

    Args:
      parts: by their names.
    """

    def __init__(self, parts: Mapping[str, tf.Variable]) -> None:
        self.names, self.parts = tuple(parts), tuple(parts.values())
        self.dtype = self.parts[0].dtype
        self.shape = tf.TensorShape([sum(self.sizes)]).concatenate(self.parts[0].shape[1:])

    @property
    def sizes(self) -> list[int]:
        """Rows of each part."""
        return [int(part.shape[0]) for part in self.parts]


def assign(variable: Any, value: Any) -> None:
    """Gives a variable a value: a tensor or array; for a Divided also a tuple, one of each part."""
    if not isinstance(variable, Divided):
        with _where(variable):
            variable.assign(value)
        return
    if not isinstance(value, tuple):
        ends = [sum(variable.sizes[: number + 1]) for number in range(len(variable.parts))]
        value = tuple(value[end - size : end] for size, end in zip(variable.sizes, ends, strict=True))
    for part, rows in zip(variable.parts, value, strict=True):
        assign(part, rows)


def value_of(variable: Any) -> Any:
    """The value of a variable; of a Divided a tuple, one of each part. On a parameter server it stays there."""
    if isinstance(variable, Divided):
        return tuple(value_of(part) for part in variable.parts)
    with _where(variable):
        return variable.read_value()


def _where(variable: Any) -> contextlib.AbstractContextManager[Any]:
    """Where an operation on a variable is to run, so that its value goes nowhere else."""
    return tf.device(variable.device) if bundles.is_far(variable) else contextlib.nullcontext()


def part_name(name: str, number: int) -> str:
    """Name of a part of the variable `name`."""
    return f"{name}/part_{number}"


def folded(
    variables: Mapping[str, tf.Variable], parts: Mapping[str, tuple[str, int]]
) -> dict[str, tf.Variable | Divided]:
    """`variables`, with those that are parts of one under the name that it has where it is whole.

    An optimizer keeps state for each part; where that has a row for each row of the part, it is a part, too.

    Args:
      parts: name of a part -> the name of the whole, and which part it is.
    """
    found: dict[str, Any] = {}
    rows = {name: variables[name].shape[:1] for name in parts}
    patterns = {name: _pattern(name) for name in parts}
    for name, variable in variables.items():
        matches = (
            part for part, pattern in patterns.items() if pattern.search(name) and variable.shape[:1] == rows[part]
        )
        part = next(matches, None)
        if part is None:
            found[name] = variable
        else:
            whole, number = parts[part]
            found.setdefault(_of_whole(name, patterns[part], whole), {})[number] = name
    return {
        name: Divided({one[number]: variables[one[number]] for number in sorted(one)}) if isinstance(one, dict) else one
        for name, one in found.items()
    }


def read_on_servers(path: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> what `assign` of each variable takes, from the checkpoint `path`: read on the servers, where it stays."""
    by_place: dict[str, list[tuple[str, int, str, tf.DType]]] = {}
    for name, variable in variables.items():
        parts = variable.parts if isinstance(variable, Divided) else [variable]
        rows = bundles.slice_specs([part.shape for part in parts]) if isinstance(variable, Divided) else [""]
        for number, part in enumerate(parts):
            by_place.setdefault(part.device, []).append((name, number, rows[number], part.dtype))
    read: dict[str, dict[int, tf.Tensor]] = {name: {} for name in variables}
    for place, wanted in by_place.items():
        values = bundles.read_entries(path, place, [(name, rows, dtype) for name, _, rows, dtype in wanted])
        for (name, number, _, _), value in zip(wanted, values, strict=True):
            read[name][number] = value
    return {
        name: tuple(read[name][number] for number in sorted(read[name])) if isinstance(one, Divided) else read[name][0]
        for name, one in variables.items()
    }


def _pattern(part: str) -> re.Pattern[str]:
    """Finds `part` in a name, also as Keras writes it: with underscores, and ":0" at its end."""
    return re.compile(rf"(?<![^/_])(?:{re.escape(part)}|{re.escape(re.sub('/', '_', part))}_0)(?!\d)")


def _of_whole(name: str, pattern: re.Pattern[str], whole: str) -> str:
    return pattern.sub(lambda match: whole if "/part_" in match[0] else re.sub("/", "_", whole), name)


def rows_of(initial: Any, shape: tf.TensorShape, first: int, end: int) -> Callable[[], Any]:
    """What gives rows `first` to `end` of an initial value.

    Keras and get_variable bind the shape to an initializer: that is called for the shape of the part, and the whole is
    in nobody's memory. Anything else is computed whole, on the server of the part, and cut.
    """
    part = tf.TensorShape([end - first]).concatenate(shape[1:])
    if isinstance(initial, functools.partial):
        if initial.args and _is_shape(initial.args[0], shape):
            return functools.partial(initial.func, part.as_list(), *initial.args[1:], **initial.keywords)
        if _is_shape(initial.keywords.get("shape"), shape):
            return functools.partial(initial.func, *initial.args, **{**initial.keywords, "shape": part.as_list()})
    if callable(initial):
        return lambda: tf.convert_to_tensor(initial())[first:end]
    return lambda: initial[first:end]


def _is_shape(value: Any, shape: tf.TensorShape) -> bool:
    return isinstance(value, tuple | list | tf.TensorShape) and tf.TensorShape(value) == shape
