"""Private names of `tf.compat.v1`: what its optimizers and hooks were given, and what its losses end with. As in
runner/bridge.py, each says since when it is there, and tests/test_bridge.py fails when it moves.

Tested with TensorFlow 2.21. When a hook keeps its arguments elsewhere: read them there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.losses import losses_impl
from tensorflow.python.summary import summary

v1 = tf.compat.v1


def scale_rate_of_v1(optimizer: Any, factor: tf.Tensor) -> bool:
    """Makes a `tf.compat.v1.train` optimizer multiply its learning rate; False where that is not found.

    Private: `_learning_rate` (`_lr` in Adam), a number, tensor or function, of which `_prepare` makes a tensor in
    `apply_gradients`; unchanged since TF 1. The optimizer is good for this one trace afterwards.
    """
    name = next((name for name in ("_learning_rate", "_lr") if hasattr(optimizer, name)), None)
    if name is None:
        return False
    rate = getattr(optimizer, name)
    value = tf.convert_to_tensor(rate() if callable(rate) else rate)
    setattr(optimizer, name, value * tf.cast(factor, value.dtype))
    return True


def logging_cadence(hook: Any) -> int | None:
    """Steps between the lines of a LoggingTensorHook; None when it goes by the clock or logs only at the end.

    Private: `LoggingTensorHook._timer` and `SecondOrStepTimer._every_steps`, both unchanged since TF 1.4.
    """
    steps: int | None = getattr(hook._timer, "_every_steps", None)
    return steps


def tensors_logged_at_end(hook: Any) -> Any:
    """The tensors of a LoggingTensorHook(at_end=True); None for others. Private: `_log_at_end`, `_current_tensors`."""
    return hook._current_tensors if hook._log_at_end else None


def skip_iterations(hook: Any, num_iterations: int) -> None:
    """Tells a LoggingTensorHook of iterations that ran in one loop. Private: its counter, `_iter_count`."""
    hook._iter_count += num_iterations


def settings_of_hook(hook: Any) -> dict[str, Any] | None:
    """What one of TensorFlow's own training hooks was constructed with, for the runner to do; None for others.

    Private: the attributes in which these hooks keep their arguments, unchanged since TF 1.4. A subclass may do
    more, so only the classes themselves count.
    """
    kind = type(hook)
    if kind is v1.train.StopAtStepHook:
        return {"num_steps": hook._num_steps} if hook._num_steps is not None else {"last_step": hook._last_step}
    if kind is v1.train.StepCounterHook:
        return {}
    if kind is v1.train.GlobalStepWaiterHook:
        return {"notes": ("GlobalStepWaiterHook has no effect: workers take their steps together.",)}
    if kind is v1.train.NanTensorHook:
        return {"stop_at_nan": hook._fail_on_nan_loss}
    if kind is v1.train.SummarySaverHook:
        note = f"SummarySaverHook(output_dir={hook._output_dir!r}): all summaries of model_fn are written to model_dir."
        return {"summary_steps": hook._timer._every_steps, "notes": (note,) if hook._output_dir else ()}
    if kind is v1.train.CheckpointSaverHook:
        timer = hook._timer
        return {
            "save_steps": timer._every_steps,
            "save_secs": timer._every_secs,
            "listeners": tuple(hook._listeners),
        }
    return None


@contextlib.contextmanager
def iterators_made_by(build: Callable[[Any], Any]) -> Iterator[None]:
    """Meanwhile `make_one_shot_iterator` and `make_initializable_iterator` of a dataset give what `build` makes of it.

    Private: `DatasetV1._make_one_shot_iterator` and `_make_initializable_iterator`, which the methods and the functions
    of `tf.compat.v1.data` call, and which every dataset inherits. When they move: replace the public ones.
    """
    kind = v1.data.Dataset
    names = ("_make_one_shot_iterator", "_make_initializable_iterator")
    before = {name: getattr(kind, name) for name in names}

    def make(self: Any, shared_name: str | None = None) -> Any:
        return build(self)

    for name in names:
        setattr(kind, name, make)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


@contextlib.contextmanager
def summaries_of_v1() -> Iterator[None]:
    """While model_fn is called, `tf.compat.v1.summary` gives serialised summaries, which are in SUMMARIES.

    TensorFlow 2.21 makes operations of TensorFlow 2 of them where there is a writer: `merge_all()` is then None.
    Private: `summary._should_invoke_v2_op`, since 2.9. When it moves: they go to the writer, and hooks find none.
    """
    name, own = "_should_invoke_v2_op", summary._should_invoke_v2_op
    setattr(summary, name, lambda: False)
    try:
        yield
    finally:
        setattr(summary, name, own)


@contextlib.contextmanager
def weighted_losses_by(build: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile `tf.compat.v1.losses` take the loss of a batch from `build`, which gets TensorFlow's function first.

    Private: `losses_impl.compute_weighted_loss`, which is `tf.compat.v1.losses.compute_weighted_loss` and what the
    others of that module end with; unchanged since TF 1.0. When it moves: its users get what each replica finds alone.
    """
    own = losses_impl.compute_weighted_loss

    @functools.wraps(own)
    def compute_weighted_loss(*args: Any, **kwargs: Any) -> Any:
        return build(own, *args, **kwargs)

    places = (losses_impl, v1.losses)
    for place in places:
        place.compute_weighted_loss = compute_weighted_loss
    try:
        yield
    finally:
        for place in places:
            place.compute_weighted_loss = own
