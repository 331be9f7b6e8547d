"""`runner.log`: values of a training step that a model_fn reports, and values that hooks report at a step."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import threading
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import tensorflow as tf

from runner.tf_private.replaced import replaced
from runner.tracking.artifacts import current

_log = logging.getLogger(__name__)


class LoggedValues:
    """The tensors that one replica's model_fn logs, in the graph that is traced now, or eagerly.

    Attributes:
      values: name -> tensor, in the order of the calls.
      on_progress: the names that the progress line shows.
    """

    def __init__(self) -> None:
        self.values: dict[str, tf.Tensor] = {}
        self.on_progress: list[str] = []
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def log(self, values: Mapping[str, Any], *, on_progress: bool = False) -> None:
        """Add values.

        Args:
          values: name in the journal, without `train/` -> a number or a numeric or bool tensor, a scalar or `[batch]`.
          on_progress: show them on the progress line, too.

        Raises:
          ValueError: a name is not text or is in use, or a value is not a number or comes from another graph.
        """
        for name, value in values.items():
            call = _call(name)
            if name in self.values:
                raise ValueError(f"{call}: model_fn logs this name twice in one step. Rename one of them.")
            tensor = tf.convert_to_tensor(value)
            if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
                raise ValueError(f"{call}: a {tensor.dtype.name} is not a number. Log floats, integers or booleans.")
            if not self._is_of_model_fn(tensor):
                raise ValueError(
                    f"{call}: it is called in a branch, a loop or a tf.function inside model_fn, whose tensors cannot "
                    "be used outside. Return the value from there, and log it in model_fn itself."
                )
            self.values[name] = tensor
            if on_progress:
                self.on_progress.append(name)

    def _is_of_model_fn(self, tensor: tf.Tensor) -> bool:
        """Report whether `tensor` belongs to the graph of model_fn itself, not to a function inside it."""
        if self._graph is None:
            return tf.executing_eagerly()
        return tf.compat.v1.get_default_graph() is self._graph is getattr(tensor, "graph", None)


@dataclasses.dataclass(frozen=True)
class StepLog:
    """Writes what hooks log at a step: to the journal, from which trackers get it, and to an event file.

    Attributes:
      prefix: precedes the names: train, eval, eval_<name> or predict.
      metrics: writes numbers of a step to the journal.
      writer: returns the EventWriter of the event file; called when something is written.
      reported_names: names that the run itself reports, with or without the prefix.
      is_on: False: nothing is written, as in a worker other than the chief.
      shown: name -> its last number, for the progress line.
      steps: name -> the last step at which it was logged.
    """

    prefix: str
    metrics: Callable[[int, Mapping[str, float]], None]
    writer: Callable[[], Any]
    reported_names: Set[str]
    is_on: bool
    shown: dict[str, float] = dataclasses.field(default_factory=dict)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)

    def write(self, step: int, values: Mapping[str, Any], *, on_progress: bool = False) -> None:
        """Write values of `step`, each name once.

        Args:
          step: the global step.
          values, on_progress: as in `runner.log` in a hook.

        Raises:
          ValueError: a name is not text or is in use, or a value is neither a number nor an image nor a figure.
        """
        if not self.is_on:
            return
        summary = tf.compat.v1.Summary()
        artifacts = current()
        for name, value in values.items():
            call = _call(name)
            full_name = f"{self.prefix}/{name}"
            if not self.reported_names.isdisjoint((name, full_name)):
                raise ValueError(f"{call}: the run itself reports {full_name}. Rename it.")
            if self.steps.get(name) == step:
                _log.warning("%s is left out: this name was logged at step %d before. Rename it.", call, step)
                continue
            self.steps[name] = step
            # In TensorBoard, the values of an evaluation need no prefix: their event file is in a folder of that name.
            tag = full_name if self.prefix == "train" else name
            event = summary.value.add(tag=tag)
            number_or_png = _number_or_png(call, value)
            if isinstance(number_or_png, float):
                event.simple_value = number_or_png
                self.metrics(step, {full_name: number_or_png})
                if on_progress:
                    self.shown[name] = number_or_png
                continue
            # The header of a PNG has its size.
            event.image.width = int.from_bytes(number_or_png[16:20], "big")
            event.image.height = int.from_bytes(number_or_png[20:24], "big")
            event.image.encoded_image_string = number_or_png
            if artifacts is not None:
                artifacts.image(full_name, number_or_png, step)
        if summary.value:
            self.writer().add_summary(summary, step)


def _call(name: Any) -> str:
    """Return how the call that logs `name` is shown in messages.

    Raises:
      ValueError: the name is not text.
    """
    call = f"runner.log({{{name!r}: ...}})"
    if not isinstance(name, str) or not name.strip("/ "):
        raise ValueError(f"{call}: the name must be a string, such as 'accuracy'.")
    return call


def _number_or_png(call: str, value: Any) -> float | bytes:
    """Return a scalar as a float, and an image or a figure as PNG.

    Raises:
      ValueError: `value` is none of these; the message begins with `call`.
    """
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png")
        return file.getvalue()
    with tf.init_scope():  # session hooks are called with the traced graph as default
        known = None if tf.is_symbolic_tensor(value) else value  # a tensor of the graph has no value here
        array = np.asarray(known)
        dtype = tf.as_dtype(array.dtype)
        is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
        if is_number and not array.ndim:
            return float(array)
        pixels = array[..., None] if array.ndim == 2 else array
        has_channels = pixels.ndim == 3 and pixels.shape[-1] <= 4
        if has_channels and (dtype.is_floating or dtype == tf.uint8):
            image = tf.image.convert_image_dtype(pixels, tf.uint8, saturate=True)
            return bytes(tf.io.encode_png(image).numpy())
    raise ValueError(
        f"{call}: a {type(value).__name__} of {array.dtype.name}{list(array.shape)} is not a scalar, a figure of "
        "matplotlib, or an image: [height, width] or [height, width, channels], uint8 or floats from 0 to 1."
    )


class _OfThread(threading.local):
    logs: Any = None
    """What `runner.log` reports to: the LoggedValues of model_fn, or the run that calls a hook."""


_of_thread = _OfThread()


def log(values: Mapping[str, Any], *, on_progress: bool = False) -> None:
    """Report values of a step, from inside model_fn or a hook.

    In model_fn they are tensors of a training step, and appear as `train/<name>` in the journal, MLflow and TensorBoard
    at the steps at which the loss is logged (`train.log_steps`), with the value of that step. In EVAL and PREDICT the
    call does nothing.

    In a method of a hook the call is `run.log(values)`: they are recorded at once, at the run's global step, as
    `train/<name>`, in an evaluation `eval/<name>` or `eval_<evaluation>/<name>`, in a prediction `predict/<name>`. In
    a cluster, those of the chief and an evaluator are recorded.

    Args:
      values: in model_fn, name -> a numeric or bool tensor: a scalar, which counts for all examples of the replica's
        batch, or `[batch]`, one number per example. The mean over all examples of the global batch is reported. In a
        hook, name -> a number; an image, `[height, width]` or `[height, width, channels]`, uint8 or floats from 0 to 1;
        or a figure of matplotlib.
      on_progress: also show them on the progress line.

    Raises:
      ValueError: a name is logged twice in a step of model_fn, is reported by the run itself, a value is of another
        kind, or it is computed in a branch, a loop or a tf.function inside model_fn.
    """
    found = _of_thread.logs
    if found is not None:
        found.log(values, on_progress=on_progress)
    elif not tf.inside_function():
        _log.warning("runner.log(%s) has no effect outside model_fn and hooks.", ", ".join(map(repr, values)))


def logging_to(logs: Any) -> contextlib.AbstractContextManager[None]:
    """Let `runner.log` report to `logs` inside this context, in this thread; None: to nothing."""
    return replaced(_of_thread, "logs", logs)
