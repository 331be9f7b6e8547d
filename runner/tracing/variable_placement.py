"""Where the variables of a model live, and in how many parts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private import parameter_server
from runner.tracing.variable_request import VariableSpec

Rows = tuple[int, int]
"""First row of a part, and the row after its last."""


class Unpartitioned:
    """Nothing is partitioned: every strategy without parameter servers."""

    def parts(self, spec: VariableSpec) -> Sequence[Rows]:
        """The rows of each part of a variable; empty: it stays whole."""
        return ()

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """While a step is traced."""
        return contextlib.nullcontext()


class ParameterServers:
    """Parameter servers: a variable goes to the one with the least bytes, state of an optimizer beside its weights."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self._partitioner: Callable[..., Any] | None = parameter_server.partitioner_of(strategy)
        self._bytes = {
            f"/job:ps/task:{n}/device:CPU:0": 0 for n in range(len(parameter_server.tasks_of(strategy)["ps"]))
        }
        self._homes: dict[str, tuple[tf.TensorShape, str]] = {}
        parameter_server.traced_before_scheduled(strategy)

    def parts(self, spec: VariableSpec) -> Sequence[Rows]:
        """As the strategy's partitioner wants it, along the first dimension; only weights are partitioned."""
        if self._partitioner is None or not spec.trainable or not spec.shape.rank or not spec.shape.is_fully_defined():
            return ()
        rows = int(spec.shape[0])
        number = min(int(self._partitioner(shape=spec.shape, dtype=spec.dtype)[0]), rows)
        if number <= 1:
            return ()
        each, extra = divmod(rows, number)
        ends = [each * (part + 1) + min(part + 1, extra) for part in range(number)]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def variable(self, spec: VariableSpec) -> tf.Variable:
        """The variable on its server, without a value."""
        device = self._beside(spec) or min(self._bytes, key=self._bytes.__getitem__)
        size = spec.shape.num_elements() or 1
        self._bytes[device] += size * (spec.dtype.size or 1)
        if spec.trainable:
            self._homes[spec.name] = spec.shape, device
        return parameter_server.variable_on(
            device, self.strategy, spec.name, spec.shape, spec.dtype, trainable=spec.trainable
        )

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """While a step is traced: what it does to variables suits that they are far away and that others write them."""
        return parameter_server.remote_variables()

    def _beside(self, spec: VariableSpec) -> str | None:
        """Where the weights are that `spec` is the optimizer's state of, by its name and shape."""
        flat = _flat(spec.name)
        found = [name for name, (shape, _) in self._homes.items() if shape == spec.shape and _flat(name) in flat]
        return self._homes[max(found, key=len)][1] if found and not spec.trainable else None


def _flat(name: str) -> str:
    """Keras writes the name of the weights with underscores into the names of their slots."""
    return re.sub(r"\W", "_", name)
