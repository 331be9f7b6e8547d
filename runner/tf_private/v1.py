"""Private parts of `tf.compat.v1`: arguments of optimizers and hooks, the last step of its losses, gradients in loops.

When a hook keeps its arguments elsewhere: read them there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client.session import SessionInterface
from tensorflow.python.ops import gradients_util, lookup_ops, metrics_impl
from tensorflow.python.ops.losses import losses_impl
from tensorflow.python.saved_model.model_utils import export_output
from tensorflow.python.summary import summary
from tensorflow.python.training import basic_session_run_hooks
from tensorflow.python.util.deprecation import deprecated, deprecated_arg_values, deprecated_args  # noqa: F401

from runner.tf_private.replaced import all_replaced, replaced

v1 = tf.compat.v1

SessionProfilerHook: Any = basic_session_run_hooks.ProfilerHook
"""`tf.compat.v1.train.ProfilerHook`, whose public name runner.classic replaces. When it moves: take it before that."""

ActsAsSession: Any = SessionInterface
"""Base class of objects that `tf.compat.v1.train.Saver.save` accepts as a session.

Private: `session.SessionInterface`, since TF 1.0. When it moves: use `object`; hooks can then restore but not save.
"""

export_outputs: Any = export_output
"""The module with TensorFlow's own outputs of exports. tf.estimator 2.15's source calls them, and so do libraries.

Private: `model_utils.export_output`, whose classes were public in `tf.estimator.export` until 2.15. When it moves: use
`object` as the base class of ours; what asks for TensorFlow's classes then does not accept them.
"""

lookup_tables: Any = lookup_ops
"""The module with the functions of tf.contrib.lookup, such as index_table_from_file.

Private: `lookup_ops`, where they have been since TF 1.8 without a public name. When it moves: build them from
tf.compat.v1.lookup.StaticHashTable and StaticVocabularyTable.
"""


def scale_rate_of_v1(optimizer: Any, factor: tf.Tensor) -> bool:
    """Make a v1 optimizer multiply its learning rate by a float scalar; return False if the rate is not found.

    The optimizer can only be used in this trace afterwards.

    Private: `_learning_rate` (`_lr` in Adam), a number, tensor or function, which `_prepare` converts to a tensor in
    `apply_gradients`; unchanged since TF 1.
    """
    rate = rate_of_v1(optimizer)
    if rate is not None:
        name = "_learning_rate" if hasattr(optimizer, "_learning_rate") else "_lr"
        setattr(optimizer, name, rate * tf.cast(factor, rate.dtype))
    return rate is not None


def rate_of_v1(optimizer: Any) -> tf.Tensor | None:
    """Return the learning rate of a `tf.compat.v1.train` optimizer, a float scalar; None if it is not found.

    Private: as `scale_rate_of_v1`.
    """
    rate = getattr(optimizer, "_learning_rate", getattr(optimizer, "_lr", None))
    if rate is None:
        return None
    if callable(rate):
        rate = rate()
    return tf.convert_to_tensor(rate)


def cadence_of_timer(hook: Any) -> tuple[int | None, float | None]:
    """Return (steps, seconds) between two triggers of a LoggingTensorHook or SummarySaverHook; both None: it has none.

    Private: `_timer`, and its `_every_steps` and `_every_secs`, all unchanged since TF 1.4.
    """
    timer = hook._timer
    return getattr(timer, "_every_steps", None), getattr(timer, "_every_secs", None)


def last_turn(hook: Any) -> int | None:
    """Return the hook's count (see `count_of`) at its last trigger; None: it has not triggered."""
    return hook._timer.last_triggered_step()


def is_turn(hook: Any) -> bool:
    """Report whether the hook triggers at its current `count_of`, which is not None."""
    return hook._timer.should_trigger_for_step(count_of(hook))


_COUNTS = {v1.train.LoggingTensorHook: "_iter_count", v1.train.SummarySaverHook: "_next_step"}


def count_of(hook: Any) -> int | None:
    """Return how many steps a LoggingTensorHook has seen, or the next step of a SummarySaverHook (None: its first).

    Private: `_iter_count` and `_next_step`, which they increment at each call.
    """
    return getattr(hook, _count_name(hook), None)


def set_count(hook: Any, count: int) -> None:
    """Set the count (see `count_of`) of a LoggingTensorHook or SummarySaverHook, after steps that ran without it."""
    setattr(hook, _count_name(hook), count)


def _count_name(hook: Any) -> str:
    return next(name for kind, name in _COUNTS.items() if isinstance(hook, kind))


def tensors_logged_at_end(hook: Any) -> Any:
    """Return the tensors of a LoggingTensorHook(at_end=True), else None.

    Private: `_log_at_end`, `_current_tensors`.
    """
    # Not isinstance: a mock says that it is of the class of its spec, and lacks what only objects have.
    logs_at_end = issubclass(type(hook), v1.train.LoggingTensorHook) and hook._log_at_end
    return hook._current_tensors if logs_at_end else None


def tensors_resolved(hook: Any, resolve: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Replace names and variables in a LoggingTensorHook by graph tensors, inside this context.

    Private: `_tensors`, which `begin` looks up in the graph; it refuses variables that are not in the graph.
    """
    return replaced(hook, "_tensors", {tag: resolve(tensor) for tag, tensor in hook._tensors.items()})


def writer_given(hook: Any, writer_of: Callable[[str], Any]) -> contextlib.AbstractContextManager[None]:
    """Give a SummarySaverHook without a writer the one of its folder, inside this context.

    Private: `_summary_writer` and `_output_dir`. The writer that it would make needs a session's graph, and writes
    that, too.
    """
    if hook._summary_writer is not None or not hook._output_dir:
        return contextlib.nullcontext()
    return replaced(hook, "_summary_writer", writer_of(hook._output_dir))


def settings_of_hook(hook: Any) -> dict[str, Any] | None:
    """Return the arguments of one of TensorFlow's own training hooks, which the runner replaces; None for others.

    Subclasses count as others, since they may do more; so do objects that were given methods of their own.

    Private: the attributes in which these hooks keep their arguments, unchanged since TF 1.4.
    """
    read = _SETTINGS.get(type(hook))
    if read is None:
        return None
    has_own_methods = not vars(hook).keys().isdisjoint(vars(v1.train.SessionRunHook))
    return None if has_own_methods else read(hook)


def _settings_of_stop(hook: Any) -> dict[str, Any]:
    if hook._num_steps is None:
        return {"last_step": hook._last_step}
    return {"num_steps": hook._num_steps}


def _settings_of_saver(hook: Any) -> dict[str, Any]:
    timer = hook._timer
    return {
        "save_steps": timer._every_steps,
        "save_secs": timer._every_secs,
        "listeners": tuple(hook._listeners),
    }


_NO_WAITING = "GlobalStepWaiterHook has no effect: workers take their steps together."

_SETTINGS: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    v1.train.StopAtStepHook: _settings_of_stop,
    v1.train.StepCounterHook: lambda hook: {},
    v1.train.GlobalStepWaiterHook: lambda hook: {"notes": (_NO_WAITING,)},
    v1.train.NanTensorHook: lambda hook: {"stop_at_nan": hook._fail_on_nan_loss},
    v1.train.CheckpointSaverHook: _settings_of_saver,
}


def names_in_saver(saver: Any) -> dict[str, str]:
    """Return variable name -> its key in a checkpoint, for all variables of a Saver.

    Private: `_var_list`, the constructor's argument or all variables of the graph; None if the Saver is not built yet;
    unchanged since TF 0.6. When it moves: read the inputs of the restore operation. Also `_save_slice_info` of the
    parts that a v1 partitioner made, which share the key of the whole variable; since TF 1.
    """
    variables = saver._var_list
    if isinstance(variables, Mapping):
        keyed = list(variables.items())
    else:
        keyed = [("", variable) for variable in variables or ()]
    names = {}
    for key, variable in keyed:
        is_whole = hasattr(variable, "read_value") or not isinstance(variable, Iterable)
        parts = [variable] if is_whole else variable
        for part in parts:
            if not hasattr(part, "read_value"):
                continue  # a SaveableObject, such as a table or an iterator
            info = getattr(part, "_save_slice_info", None)
            name = part.op.name if info is None else info.full_name
            names[name] = key or name
    return names


def iterators_made_by(build: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Make `build` create the one-shot and initializable iterators of datasets, inside this context.

    Private: `DatasetV1._make_one_shot_iterator` and `_make_initializable_iterator`, which every dataset inherits, and
    which its methods and the functions of `tf.compat.v1.data` call. When they move: replace the public ones.
    """

    def make(self: Any, shared_name: str | None = None) -> Any:
        return build(self)

    kind = v1.data.Dataset
    return all_replaced((kind, "_make_one_shot_iterator", make), (kind, "_make_initializable_iterator", make))


def summaries_of_v1() -> contextlib.AbstractContextManager[None]:
    """Make `tf.compat.v1.summary` return serialized summaries and collect them in SUMMARIES, inside this context.

    If there is a writer, TensorFlow 2.21 makes operations of TensorFlow 2 instead, and `merge_all()` returns None.

    Private: `summary._should_invoke_v2_op`, since 2.9. When it moves: summaries go to the writer, and hooks find none.
    """
    return replaced(summary, "_should_invoke_v2_op", lambda: False)


def weighted_losses_by(build: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let `build` compute the loss of a batch for `tf.compat.v1.losses`; its first argument is TensorFlow's function.

    Private: `losses_impl.compute_weighted_loss`, which is `tf.compat.v1.losses.compute_weighted_loss` and which the
    other losses call last; unchanged since TF 1.0. When it moves: each replica divides by its own weights.
    """
    own = losses_impl.compute_weighted_loss

    @functools.wraps(own)
    def compute_weighted_loss(*args: Any, **kwargs: Any) -> Any:
        return build(own, *args, **kwargs)

    name = "compute_weighted_loss"
    return all_replaced((losses_impl, name, compute_weighted_loss), (v1.losses, name, compute_weighted_loss))


def metrics_of_replica() -> contextlib.AbstractContextManager[None]:
    """Let `tf.compat.v1.metrics` compute a replica's value from the replica's own state, inside this context.

    TensorFlow computes it from the sum of all replicas' variables, in a merge_call. Here these are plain variables,
    which the runner merges on the host.

    Private: `metrics_impl._aggregate_across_replicas`, which each metric calls for its value; since TF 1.8. When it
    moves: such metrics fail with several replicas.
    """
    one_device = types.SimpleNamespace(extended=types.SimpleNamespace(read_var=tf.identity))

    def of_replica(collections: Any, value_of: Callable[..., Any], *states: Any) -> Any:
        value = value_of(one_device, *states)
        for name in collections or ():
            v1.add_to_collection(name, value)
        return value

    return replaced(metrics_impl, "_aggregate_across_replicas", of_replica)


def gradients_in_loops() -> contextlib.AbstractContextManager[None]:
    """Let `tf.gradients` in a loop or branch also find paths to variables outside of it, inside this context.

    In a TF 1 graph the handle of a variable is a tensor of that graph. Here it is outside of all graphs, and each
    function has its own placeholder for it. TensorFlow only looks at the innermost placeholder, to which nothing
    outside is connected, and returns None: the gradient would silently be zero.

    Private: `gradients_util._GradientsHelper`, which `tf.gradients` and the optimizers of `tf.compat.v1` call; since
    1.12. When it moves: replace `tf.compat.v1.gradients`, and `compute_gradients` of the optimizers.
    """
    own = gradients_util._GradientsHelper

    @functools.wraps(own)
    def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        xs = list(xs) if isinstance(xs, list | tuple) else [xs]
        indices: list[int] = []  # of each placeholder: the index in `xs` of its variable
        placeholders: list[tf.Tensor] = []
        for index, x in enumerate(xs):
            for placeholder in _in_functions_around(x):
                indices.append(index)
                placeholders.append(placeholder)
        gradients = own(ys, [*xs, *placeholders], *args, **kwargs)
        for index, gradient in zip(indices, gradients[len(xs) :], strict=True):
            gradients[index] = _sum(gradients[index], gradient)
        return gradients[: len(xs)]

    return replaced(gradients_util, "_GradientsHelper", helper)


def gradients_given_to(
    give: Callable[[list[Any], Sequence[Any]], list[Any]],
) -> contextlib.AbstractContextManager[None]:
    """Let `give` replace what `tf.gradients`, optimizers of TensorFlow 1 and GradientTape return, inside this context.

    Args:
      give: (gradients, with respect to what) -> the gradients that are returned.

    Public: `tf.GradientTape.gradient`. Private: as in `gradients_in_loops`.
    """
    own_helper = gradients_util._GradientsHelper
    own_gradient = tf.GradientTape.gradient
    depth = _Depth()

    @functools.wraps(own_helper)
    def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        with depth.one_more():
            gradients = own_helper(ys, xs, *args, **kwargs)
        # TensorFlow calls this function again inside a call, for its functions and composite tensors. Only the
        # outermost call replaces gradients.
        if depth.value:
            return gradients
        return give(gradients, tf.nest.flatten(xs))

    @functools.wraps(own_gradient)
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        with depth.one_more():
            gradients = own_gradient(tape, target, sources, *args, **kwargs)
        if depth.value:
            return gradients
        given = give(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, given)

    return all_replaced((gradients_util, "_GradientsHelper", helper), (tf.GradientTape, "gradient", gradient))


class _Depth(threading.local):
    value = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        self.value += 1
        try:
            yield
        finally:
            self.value -= 1


def _sum(gradient: Any, other: Any) -> Any:
    """Return the sum of two gradients of a variable, each of which may be None; None: both are."""
    if gradient is None:
        return other
    if other is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        indices = tf.concat([tf.cast(gradient.indices, tf.int64), tf.cast(other.indices, tf.int64)], 0)
        values = tf.concat([gradient.values, other.values], 0)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return tf.add_n([gradient, other])


def _in_functions_around(x: Any) -> list[tf.Tensor]:
    """Return the placeholders of the variable `x` in the functions around the traced one."""
    handle = getattr(x, "handle", None)
    graph: Any = getattr(v1.get_default_graph(), "outer_graph", None)
    placeholders: list[tf.Tensor] = []
    while hasattr(handle, "numpy") and hasattr(graph, "captures"):
        placeholders += [inside for outside, inside in graph.captures if outside is handle]
        graph = graph.outer_graph
    return placeholders
