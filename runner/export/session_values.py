"""Values of variables in a session: those of a new model, or those that a user's saver restored."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.tf_private.tensor_bundle import in_parts
from runner.tracing.partitioned_variable import size_of
from runner.tracing.variable_request import VariableSpec

v1 = tf.compat.v1


class Piece(NamedTuple):
    """A variable of a graph: a whole variable of the model, or one part of a variable that a v1 partitioner divided.

    Attributes:
      variable: the tf.Variable.
      initializer: the operation that assigns the initial value, or its name.
      initial_value: the tensor that `initializer` assigns, or its name.
    """

    variable: Any
    initializer: Any
    initial_value: Any


class SessionValues:
    """The variables of a graph, and a session that holds their values until `close`.

    Args:
      graph: graph of the variables; operations that read them are added to it.
      pieces: variable name -> the variable, or its parts in order.
      specs: variable name -> spec of the whole variable.
    """

    def __init__(
        self, graph: tf.Graph, pieces: Mapping[str, Sequence[Piece]], specs: Mapping[str, VariableSpec]
    ) -> None:
        self._pieces = pieces
        self._specs = specs
        self._reads: dict[str, list[tf.Tensor]] = {}
        with graph.as_default():
            for name, parts in pieces.items():
                self._reads[name] = [piece.variable.read_value() for piece in parts]
        # The session only computes initial values and passes values on, so it needs no GPU.
        on_cpu = v1.ConfigProto(device_count={"GPU": 0}, allow_soft_placement=True)
        self.session = v1.Session(graph=graph, config=on_cpu)

    def initialize(self) -> None:
        """Set all variables to their initial values, in one run because initial values may share random numbers."""
        initializers: list[Any] = []
        for parts in self._pieces.values():
            initializers += [piece.initializer for piece in parts]
        self.session.run(initializers)

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Set variables, one after the other, to `values`: name -> array of the whole variable."""
        for name, value in values.items():
            parts = self._pieces[name]
            values_of_parts = [value]
            if len(parts) > 1:
                axis = self._divided_axis(name)
                ends = np.cumsum([piece.variable.shape[axis] for piece in parts])
                values_of_parts = np.split(value, ends[:-1], axis)
            fed = {piece.initial_value: part for piece, part in zip(parts, values_of_parts, strict=True)}
            self.session.run([piece.initializer for piece in parts], fed)

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Return name -> value of the whole variable."""
        found = self.session.run({name: self._reads[name] for name in names})
        values: dict[str, Any] = {}
        for name, parts in found.items():
            values[name] = parts[0] if len(parts) == 1 else np.concatenate(parts, self._divided_axis(name))
        return values

    def size_of(self, name: str) -> int:
        """Return the size of a variable in bytes; 0 if its shape is not known."""
        return size_of(self._specs[name])

    def close(self) -> None:
        """Close the session and free the values."""
        self.session.close()

    def _divided_axis(self, name: str) -> int:
        """Return the axis along which a variable is divided."""
        first_part = self._pieces[name][0].variable.shape
        whole = self._specs[name].shape
        return next(axis for axis, size in enumerate(whole) if first_part[axis] != size)


def read_in_parts(owners: Mapping[str, SessionValues], held: contextlib.ExitStack) -> Iterator[dict[str, Any]]:
    """Yield the values of variables in parts of bounded size, each a dict name -> array.

    Args:
      owners: variable name -> the SessionValues that hold it. Variables with the same SessionValues are adjacent.
      held: the context managers to exit when the generator ends.
    """
    with held:
        for _, names in itertools.groupby(owners, lambda name: id(owners[name])):
            for part in in_parts(names, lambda name: owners[name].size_of(name)):
                yield owners[part[0]].read(part)  # nothing here keeps the values
