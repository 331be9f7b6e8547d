"""`runner.log`: values of a training step that a model_fn reports."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

_log = logging.getLogger(__name__)


class LoggedValues:
    """The tensors that one replica's model_fn logs.

    Args:
      graph: the graph that is traced; None: model_fn runs eagerly.

    Attributes:
      values: name -> tensor, in the order of the calls.
      on_progress: the names that the progress line shows.
    """

    def __init__(self, graph: Any) -> None:
        self.values: dict[str, tf.Tensor] = {}
        self.on_progress: list[str] = []
        self._graph = graph

    def add(self, name: str, value: Any, *, on_progress: bool) -> None:
        """Add one value.

        Args:
          name: its name in the journal, without `train/`.
          value: a number or a numeric or bool tensor, a scalar or `[batch]`.
          on_progress: show it on the progress line, too.

        Raises:
          ValueError: the name is not text or is in use, or the value is not a number or comes from another graph.
        """
        shown = f"runner.log({{{name!r}: ...}})"
        if not isinstance(name, str) or not name.strip("/ "):
            raise ValueError(f"{shown}: the name must be a string, such as 'accuracy'.")
        if name in self.values:
            raise ValueError(f"{shown}: model_fn logs this name twice in one step. Rename one of them.")
        tensor = tf.convert_to_tensor(value)
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise ValueError(f"{shown}: a {tensor.dtype.name} is not a number. Log floats, integers or booleans.")
        if not self._is_of_model_fn(tensor):
            raise ValueError(
                f"{shown}: it is called in a branch, a loop or a tf.function inside model_fn, whose tensors cannot be "
                "used outside. Return the value from there, and log it in model_fn itself."
            )
        self.values[name] = tensor
        if on_progress:
            self.on_progress.append(name)

    def _is_of_model_fn(self, tensor: tf.Tensor) -> bool:
        """Report whether `tensor` belongs to the graph of model_fn itself, not to a function inside it."""
        if self._graph is None:
            return tf.executing_eagerly()
        return tf.compat.v1.get_default_graph() is self._graph is getattr(tensor, "graph", None)


_logged: contextvars.ContextVar[LoggedValues | None] = contextvars.ContextVar("logged", default=None)


def log(values: Mapping[str, Any], *, on_progress: bool = False) -> None:
    """Report values of a training step, from inside model_fn.

    They appear as `train/<name>` in the journal, MLflow and TensorBoard at the steps at which the loss is logged
    (`train.log_steps`), with the value of that step. In EVAL and PREDICT the call does nothing.

    Args:
      values: name -> a numeric or bool tensor: a scalar, which counts for all examples of the replica's batch, or
        `[batch]`, one number per example. The mean over all examples of the global batch is reported.
      on_progress: also show them on the progress line.

    Raises:
      ValueError: a name is logged twice in a step, a value is not a number, or it is computed in a branch, a loop or a
        tf.function inside model_fn.
    """
    found = _logged.get()
    if found is None:
        if not tf.inside_function():
            _log.warning("runner.log(%s) has no effect outside model_fn.", ", ".join(map(repr, values)))
        return
    for name, value in values.items():
        found.add(name, value, on_progress=on_progress)


@contextlib.contextmanager
def logging_values() -> Iterator[LoggedValues]:
    """Yield the values that model_fn logs inside this context, in this thread and graph."""
    values = LoggedValues(None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())
    token = _logged.set(values)
    try:
        yield values
    finally:
        _logged.reset(token)
