"""Keras 3 during a trace: the owners of variables, the writes of optimizers, and their sums over replicas."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from runner.tf_private.legacy_keras import keras_2_of_graphs
from runner.tf_private.parameter_server import lookup_by_rows
from runner.tf_private.replaced import all_replaced, replaced
from runner.tf_private.variables import begin_with

v1 = tf.compat.v1

_Replacement = tuple[Any, str, Any]
"""(owner, name, new) of an attribute, as `all_replaced` takes it."""


class _Owners(threading.local):
    """The `keras.Variable` that is creating a tf.Variable in this thread, or None.

    Attributes:
      are_loaded: weights are being read from a file or set from arrays in this thread.
    """

    variable: Any = None
    are_loaded: bool = False


class KerasTrace:
    """The record of what Keras 3 did during one trace.

    Attributes:
      written: operations by which Keras optimizers write variables; the optimizers return no update op.
      reduce: called by Keras optimizers with a list of (gradient, variable) pairs, instead of summing over replicas.
      owners: the current owner of new variables.
      tf_keras_layers: name of a variable that a layer of tf_keras made -> that layer, which may be frozen later.
    """

    def __init__(self, reduce: Callable[[list[Any]], list[Any]] | None = None) -> None:
        self.written: list[tf.Operation] = []
        self.reduce = reduce
        self.owners = _Owners()
        self.tf_keras_layers: dict[str, Any] = {}


@contextlib.contextmanager
def keras_trace(
    traced: Any,
    reduce: Callable[[list[Any]], list[Any]] | None = None,
    seeds: Callable[[], tf.Tensor | None] | None = None,
) -> Iterator[KerasTrace]:
    """Watch Keras 3 during a trace of the graph `traced`, with fresh name counters and seed generators.

    Does nothing if Keras 3 has not been imported before the trace.

    Args:
      traced: the graph.
      reduce: replaces the sum of gradients over replicas; None: Keras's own.
      seeds: returns the next seed of a seed generator, int64 `[2]`, in place of its state; None, or if it returns None:
        its state, which each draw advances.

    Public: `Optimizer.assign*`, the methods by which all Keras optimizers write; `vocabulary_size` of the layers of a
    vocabulary: Keras asks the table, which is empty until the initializers of a graph have run; `quantize`, which reads
    values.

    Private, in Keras 3.15 and in the development version of 3.16, which moved the modules of the backend:
    - `keras.Variable._initialize`: Keras passes only the short name to tf.Variable, but checkpoints need its `path`.
    - `keras.Variable._initialize_with_initializer`: hides the shape of the variable from its creators.
    - `Optimizer._all_reduce_sum_gradients`: the sum of gradients over replicas; `_clip_gradients`, before it, and
      `_backend_apply_gradients`, which calls that and knows the variables.
    - `global_state.GLOBAL_STATE_TRACKER`: what `keras.utils.clear_session` replaces. It is put back afterwards, so that
      the caller's own models keep their state.
    - `_token_start_index` of the layers of a vocabulary: the number of indices before its words.
    - `losses.loss.scale_loss_for_distribution`: divides each scalar loss by the number of replicas, for optimizers that
      sum. The runner weights gradients itself and needs the loss unscaled.
    - `numpy.take` of the backend, which keras.ops calls for an Embedding, with `_value` and `_maybe_autocast` of a
      variable: it reads the whole variable. After an update by rows, TensorFlow copies a variable at each such read.
    - `saving_lib._load_state` and `legacy_h5_format._set_weights`: `load_model` and `load_weights` call them, and they
      set variables by `Variable.assign`, as `set_weights` and `Normalization.adapt` do. Values that model_fn loads
      become initial values; an assignment in the step would undo all training so far.
    """
    trace = KerasTrace(reduce)
    with keras_2_of_graphs(is_eager_outside=False), _watching_tf_keras(trace, traced):
        watching: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if "keras" in sys.modules:
            watching = _watching_keras_3(trace, traced, seeds)
        with watching:
            yield trace


def _watching_tf_keras(trace: KerasTrace, traced: Any) -> contextlib.AbstractContextManager[None]:
    """Note the writes of tf_keras's optimizers and sum their gradients, as for those of Keras 3; note which layer has
    made each variable.

    Private, in tf_keras 2.21: `_compute_current_learning_rate`, `_apply_weight_decay` and
    `_distributed_apply_gradients_fn`, which write variables and return no operation for it; `_aggregate_gradients` of
    the legacy optimizers, which sums gradients; `base_layer_v1`, with the layers of graphs. When they move: see what
    `apply_gradients` and `add_weight` call.
    """
    if "tf_keras" not in sys.modules:
        return contextlib.nullcontext()
    tf_keras: Any = sys.modules["tf_keras"]
    kind = tf_keras.optimizers.Optimizer
    legacy = tf_keras.optimizers.legacy.Optimizer
    layers_of_graphs: Any = importlib.import_module("tf_keras.src.engine.base_layer_v1")

    def noting_layer(add_weight: Callable[..., Any]) -> Callable[..., Any]:
        def add(self: Any, *args: Any, **kwargs: Any) -> Any:
            variable = add_weight(self, *args, **kwargs)
            trace.tf_keras_layers[variable.name.partition(":")[0]] = self
            return variable

        return add

    replacements: list[_Replacement] = []
    for layer in (tf_keras.layers.Layer, layers_of_graphs.Layer):
        replacements.append((layer, "add_weight", noting_layer(layer.add_weight)))
    replacements.append((kind, "aggregate_gradients", _reduced(kind.aggregate_gradients, trace)))
    replacements.append((legacy, "_aggregate_gradients", _reduced(legacy._aggregate_gradients, trace)))
    for name in ("_compute_current_learning_rate", "_apply_weight_decay", "_distributed_apply_gradients_fn"):
        replacements.append((kind, name, _noting_writes(getattr(kind, name), trace, traced)))
    return all_replaced(*replacements)


def _noting_writes(method: Callable[..., Any], trace: KerasTrace, traced: Any) -> Callable[..., Any]:
    """Return `method`, of an optimizer, so that it also adds the operations that it makes to `trace.written`."""

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = v1.get_default_graph()
        first = len(graph.get_operations())
        returned = method(self, *args, **kwargs)
        if graph is traced:  # not in the body of a branch, which runs as a whole
            trace.written.extend(graph.get_operations()[first:])
        return returned

    return write


def _reduced(own: Callable[..., Any], trace: KerasTrace) -> Callable[..., Any]:
    """Return the method of an optimizer that sums (gradient, variable) pairs over replicas: `reduce`, or its own."""
    reduce = trace.reduce
    if reduce is None:
        return own
    return lambda self, pairs: reduce(list(pairs))


def _watching_keras_3(
    trace: KerasTrace, traced: Any, seeds: Callable[[], tf.Tensor | None] | None
) -> contextlib.AbstractContextManager[None]:
    from keras.src.backend.common import global_state
    from keras.src.losses import loss as keras_loss

    # A list for each subject. No attribute is in two of them, so their order means nothing.
    return all_replaced(
        *_refusing_quantization(),
        *_noting_owners(trace),
        *_loading_initial_values(trace),
        *_layers_of_traces(),
        *_optimizers_of_traces(trace, traced),
        *_seeds_of_replicas(seeds),
        (keras_loss, "scale_loss_for_distribution", lambda value: value),
        (keras_loss, "unscale_loss_for_distribution", lambda value: value),
        (global_state, "GLOBAL_STATE_TRACKER", threading.local()),
    )


def _noting_owners(trace: KerasTrace) -> list[_Replacement]:
    """Return replacements by which `trace.owners` has the `keras.Variable` that is creating a tf.Variable, and by which
    its initializer shows its shape.
    """
    from keras import Variable

    initialize = Variable._initialize

    def owned_initialize(self: Any, value: Any) -> None:
        with replaced(trace.owners, "variable", self):
            initialize(self, value)

    def initialize_with_shape(self: Any, initializer: Any) -> None:
        """Like Keras's, but the initializer is a partial that shows the shape: a partitioned variable is initialized
        by parts.
        """
        self._initialize(functools.partial(initializer, self._shape, dtype=self._dtype))

    return [
        (Variable, "_initialize", owned_initialize),
        (Variable, "_initialize_with_initializer", initialize_with_shape),
    ]


def _loading_initial_values(trace: KerasTrace) -> list[_Replacement]:
    """Return replacements that make values which model_fn loads, from a file or from arrays, the initial values of
    variables.
    """
    from keras import Variable
    from keras import layers as keras_layers
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    assign = Variable.assign

    def assign_or_begin(self: Any, value: Any) -> Any:
        # `are_loaded` is set while one of the functions below runs. A tensor of the graph is no initial value.
        if not trace.owners.are_loaded or tf.is_tensor(value):
            return assign(self, value)
        value = np.asarray(value)
        if value.shape != tuple(self.shape):
            raise ValueError(f"{self.path} has shape {tuple(self.shape)}, but the loaded value has {value.shape}.")
        begin_with(self._value, value)
        return value

    def loading(function: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            with replaced(trace.owners, "are_loaded", True):
                return function(*args, **kwargs)

        return load

    return [
        (Variable, "assign", assign_or_begin),
        (saving_lib, "_load_state", loading(saving_lib._load_state)),
        (legacy_h5_format, "_set_weights", loading(legacy_h5_format._set_weights)),
        (keras_layers.Layer, "set_weights", loading(keras_layers.Layer.set_weights)),
        (keras_layers.Normalization, "adapt", loading(keras_layers.Normalization.adapt)),
    ]


def _layers_of_traces() -> list[_Replacement]:
    """Return replacements that make layers of vocabularies and BatchNormalization right in a graph, and an Embedding
    fast.
    """
    from keras import Variable
    from keras import layers as keras_layers
    from keras.src import backend

    keras_numpy = getattr(backend, "ops", backend).numpy  # Keras 3.15 has no `ops` there
    take = keras_numpy.take
    size_of_table = keras_layers.StringLookup.vocabulary_size  # of the base class of both layers
    add_weight = keras_layers.BatchNormalization.add_weight

    def vocabulary_size(self: Any) -> Any:
        """Return the size as a number: the width of a one-hot encoding must be known in the graph of an export."""
        keys = getattr(self.lookup_table._initializer, "_keys", None)
        if keys is None:  # the table is filled from a file
            return size_of_table(self)
        return keys.shape[0] + self._token_start_index()

    def take_rows(x: Any, indices: Any, axis: int | None = None) -> Any:
        """Return rows of a variable without reading the others."""
        is_lookup = axis == 0 and isinstance(x, Variable) and isinstance(indices, tf.Tensor | tf.RaggedTensor)
        # `_value` is None before the variable is initialized, and a stateless scope keeps values of its own.
        if not is_lookup or x._value is None or backend.in_stateless_scope():
            return take(x, indices, axis)

        def rows(ids: tf.Tensor) -> tf.Tensor:
            is_from_end = ids < 0
            num_rows = tf.cast(x.shape[0], ids.dtype)
            return lookup_by_rows(x._value, tf.where(is_from_end, ids + num_rows, ids))

        return x._maybe_autocast(tf.ragged.map_flat_values(rows, indices))

    def add_statistic(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a weight of BatchNormalization: what it writes to its statistics is a mean, as tf_keras says itself."""
        if not kwargs.get("trainable", True):
            kwargs = {"aggregation": "mean", **kwargs}
        return add_weight(self, *args, **kwargs)

    return [
        (keras_layers.StringLookup, "vocabulary_size", vocabulary_size),
        (keras_layers.IntegerLookup, "vocabulary_size", vocabulary_size),
        (keras_numpy, "take", take_rows),
        (keras_layers.BatchNormalization, "add_weight", add_statistic),
    ]


def _seeds_of_replicas(seeds: Callable[[], tf.Tensor | None] | None) -> list[_Replacement]:
    """Return a replacement by which seed generators draw from `seeds`, or by which their seeds differ between replicas.

    Args:
      seeds: returns a seed, or None if the generator is to draw it itself; None: all generators draw theirs.
    """
    from keras import random as keras_random

    next_seed = keras_random.SeedGenerator.next

    def next_of_replica(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a different seed in each replica: with the same one, dropout would drop the same units in all of
        them.
        """
        if seeds is not None:
            drawn = seeds()
            if drawn is not None:
                return tf.cast(drawn, self.state.dtype)
        seed = next_seed(self, *args, **kwargs)
        replica = None
        context = tf.distribute.get_replica_context()
        if context is not None:
            replica = tf.get_static_value(context.replica_id_in_sync_group)
        if not replica:  # the first replica, or it is not known
            return seed
        return seed + np.array([replica, 0], seed.dtype.as_numpy_dtype)

    return [(keras_random.SeedGenerator, "next", next_of_replica)]


def _optimizers_of_traces(trace: KerasTrace, traced: Any) -> list[_Replacement]:
    """Return replacements that note the writes of optimizers, and sum and clip their gradients as in Keras 2."""
    from keras.optimizers import Optimizer

    apply = Optimizer._backend_apply_gradients
    clip = Optimizer._clip_gradients
    reduce = _reduced(Optimizer._all_reduce_sum_gradients, trace)
    applied = threading.local()  # what an optimizer is applied to, in the thread of each replica

    def apply_noting_variables(self: Any, grads: Any, trainable_variables: Any) -> None:
        applied.variables = trainable_variables
        frequency = self.ema_overwrite_frequency
        # Keras would overwrite in a branch, where replicas cannot meet.
        with replaced(self, "ema_overwrite_frequency", None):
            apply(self, grads, trainable_variables)
        if self.use_ema and frequency:
            _overwrite_with_averages(self, (self.iterations + 1) % frequency == 0)

    def clip_sums(self: Any, grads: Any) -> Any:
        """Return the sums over replicas, clipped as in Keras 2. In Keras 3 each replica clips its own gradients."""
        pairs = list(zip(grads, applied.variables, strict=True))
        summed = reduce(self, pairs)
        return clip(self, [gradient for gradient, _ in summed])

    replacements: list[_Replacement] = [
        (Optimizer, "_backend_apply_gradients", apply_noting_variables),
        (Optimizer, "_clip_gradients", clip_sums),
        (Optimizer, "_all_reduce_sum_gradients", lambda self, pairs: pairs),  # `clip_sums` has done it
    ]
    for name in ("assign", "assign_add", "assign_sub"):
        replacements.append((Optimizer, name, _noting_writes(getattr(Optimizer, name), trace, traced)))
    return replacements


def _refusing_quantization() -> list[_Replacement]:
    """Return replacements that refuse `quantize` of models and layers in model_fn, unless weights stay as they are."""
    from keras import Model
    from keras import layers as keras_layers

    def unless_float8(quantize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(quantize)
        def refuse(self: Any, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
            if mode == "float8":  # whose layers keep their weights, and get scales
                return quantize(self, mode, *args, **kwargs)
            what = kwargs.get("config") if mode is None else mode
            raise ValueError(
                f"{self.name}.quantize({what!r}) in model_fn: it makes weights of the values of others, which model_fn "
                "has only while a step runs. Quantize the model in a script, save it, and let model_fn return "
                "keras.models.load_model(file, compile=False), compiled."
            )

        return refuse

    replacements: list[_Replacement] = [(Model, "quantize", unless_float8(Model.quantize))]
    for kind in vars(keras_layers).values():
        # The `quantize` of the base class Layer only raises an error for layers that have none.
        if isinstance(kind, type) and kind is not keras_layers.Layer and "quantize" in vars(kind):
            replacements.append((kind, "quantize", unless_float8(vars(kind)["quantize"])))
    return replacements


def _overwrite_with_averages(optimizer: Any, is_due: tf.Tensor) -> None:
    """Set the weights on all replicas to the moving averages that an optimizer of Keras keeps of them, if it is due."""

    def overwrite(variable: Any, average: Any, is_due: tf.Tensor) -> Any:
        return variable.assign(tf.where(is_due, average, variable), read_value=False)

    def overwrite_all(strategy: tf.distribute.Strategy, is_due: Any) -> None:
        averages = optimizer._model_variables_moving_average
        for weight, average in zip(optimizer._trainable_variables, averages, strict=True):
            if average is None:
                continue
            variable = weight.value if hasattr(weight, "path") else weight  # it may be a tf.Variable
            strategy.extended.update(variable, overwrite, args=(average.value, is_due), group=False)

    tf.distribute.get_replica_context().merge_call(overwrite_all, args=(is_due,))


_LOSSES = {
    "keras": ("losses.loss", "reduce_values", "apply_mask"),
    "tf_keras": ("utils.losses_utils", "reduce_weighted_loss", "apply_valid_mask"),
}
"""Package -> module with its losses, name of the function that reduces them, of the one that makes weights of a mask.
"""


def losses_by(reduce: Callable[..., Any], mask: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let `reduce` reduce the losses of Keras 3 and tf_keras, if they have been imported, and `mask` make weights from
    a mask; their first argument is Keras's own function.

    Private: `losses.loss.reduce_values` (Keras 3.15) and `losses_utils.reduce_weighted_loss` (tf_keras 2.21), which
    each `Loss` calls last, with losses that are already multiplied by their weights. When they move: sums, and means by
    weights, are those of each replica. `losses.loss.apply_mask` and `losses_utils.apply_valid_mask`, which make the
    weights of what is not masked so that a mean over all elements is one over these. When they move: such means are
    those of each replica.
    """
    replacements = []
    for package, (module, reduces, masks) in _LOSSES.items():
        if package in sys.modules:
            home = importlib.import_module(f"{package}.src.{module}")
            replacements.append((home, reduces, functools.partial(reduce, getattr(home, reduces))))
            replacements.append((home, masks, functools.partial(mask, getattr(home, masks))))
    return all_replaced(*replacements)
