"""Values that model_fn reports of a training step: `runner.log`."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

_log = logging.getLogger(__name__)


class LoggedValues:
    """The values that one replica's model_fn logs. Tensors of the traced graph.

    Args:
      graph: that is traced; None: model_fn runs eagerly.

    Attributes:
      values: by name, in the order of the calls.
      on_progress: names of those that the progress line shows.
    """

    def __init__(self, graph: Any) -> None:
        self.values: dict[str, tf.Tensor] = {}
        self.on_progress: list[str] = []
        self._graph = graph

    def add(self, name: str, value: Any, *, on_progress: bool) -> None:
        """Add a value. Raises: ValueError: it cannot be reported."""
        shown = f"runner.log({{{name!r}: ...}})"
        if not isinstance(name, str) or not name.strip("/ "):
            raise ValueError(f"{shown}: a name is text, such as 'accuracy'.")
        if name in self.values:
            raise ValueError(f"{shown}: model_fn logs this name twice in one step. Give the second one another name.")
        tensor = tf.convert_to_tensor(value)
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise ValueError(f"{shown}: a {tensor.dtype.name} is no number. Log floats, integers or booleans.")
        if not self._is_of_model_fn(tensor):
            raise ValueError(
                f"{shown}: it is called in a branch, a loop or a tf.function inside model_fn, whose values stay there. "
                "Return the value from it, and log it in model_fn itself."
            )
        self.values[name] = tensor
        if on_progress:
            self.on_progress.append(name)

    def _is_of_model_fn(self, tensor: tf.Tensor) -> bool:
        """Report whether model_fn itself has made `tensor`, and logs it."""
        if self._graph is None:
            return tf.executing_eagerly()
        return tf.compat.v1.get_default_graph() is self._graph is getattr(tensor, "graph", None)


_logged: contextvars.ContextVar[LoggedValues | None] = contextvars.ContextVar("logged", default=None)


def log(values: Mapping[str, Any], *, on_progress: bool = False) -> None:
    """Report values of a training step, from inside model_fn.

    They are `train/<name>` in the journal, MLflow and TensorBoard, at the steps at which the loss is logged
    (`train.log_steps`): the value of that step, as the loss is. In EVAL and PREDICT the call does nothing.

    Args:
      values: by name; a scalar of the replica's batch, which counts for its examples, or one number an example. Over
        replicas and workers it is the mean over all examples.
      on_progress: the progress line shows them, too.

    Raises:
      ValueError: a name is logged twice in a step, a value is no number, or it is made in a branch, a loop or a
        tf.function inside model_fn.
    """
    found = _logged.get()
    if found is None:
        if not tf.inside_function():
            _log.warning("runner.log(%s) has no effect here: it is for model_fn.", ", ".join(map(repr, values)))
        return
    for name, value in values.items():
        found.add(name, value, on_progress=on_progress)


@contextlib.contextmanager
def logging_values() -> Iterator[LoggedValues]:
    """Note in what is yielded what model_fn logs meanwhile, in this thread and graph."""
    values = LoggedValues(None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())
    token = _logged.set(values)
    try:
        yield values
    finally:
        _logged.reset(token)
