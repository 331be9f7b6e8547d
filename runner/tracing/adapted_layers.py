"""Layers of Keras that learn a vocabulary, or bounds of bins, from data by `adapt` inside model_fn.

model_fn is called for each trace, in several processes and again after a resume. What a layer has learnt belongs to the
model: it is learnt once, outside of the trace, by the chief; it is stored in checkpoints, and each later call of
`adapt` gives it to the layer, whatever the data.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from runner.distribute.collectives import Collectives
from runner.tf_private.replaced import all_replaced
from runner.tracing.same_model import WorkersDifferError

ADAPTED = "adapted"
"""Key of what layers have learnt in the state of a checkpoint: name of a layer -> values that JSON can hold."""

_KINDS = ("StringLookup", "IntegerLookup", "TextVectorization", "Discretization")
"""Those of `keras.layers` whose state is no variable. `Normalization` keeps its in variables, as layers do."""


@contextlib.contextmanager
def adapting_once(graph: tf.Graph | None, adapted: dict[str, Any], workers: Collectives) -> Iterator[None]:
    """Let `adapt` learn outside of the trace of `graph`, or only give the layer what has been learnt before.

    Does nothing if Keras 3 has not been imported before the trace.

    Args:
      graph: the graph in which the layers make their tables; None: model_fn runs eagerly.
      adapted: name of a layer -> what it has learnt; what is learnt is added.
      workers: those that make the same trace at the same time: the chief learns for all.

    Raises:
      ValueError: on leaving, automatic names of layers may stand for other layers than those that learnt.
    """
    if "keras" not in sys.modules:
        yield
        return
    import keras
    from keras import layers

    adapting = _Adapting(graph, adapted, workers)
    replacements = [(layers.Normalization, "adapt", adapting.in_graph(layers.Normalization.adapt))]
    for name in _KINDS:
        kind = getattr(layers, name)
        replacements.append((kind, "adapt", adapting.once(kind.adapt)))
    replacements.append((keras.Operation, "__init__", adapting.noting_unnamed(keras.Operation.__init__)))
    with all_replaced(*replacements):
        yield
    adapting.check_automatic_names()


class _LayersOfThread(threading.local):
    """Name -> layer that is adapted in this thread. Each replica of a trace has a thread, and layers of its own."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}


class _Adapting:
    """What replaces the methods `adapt` in one trace; see `adapting_once`."""

    def __init__(self, graph: tf.Graph | None, adapted: dict[str, Any], workers: Collectives) -> None:
        self._graph = graph
        self._adapted = adapted
        self._workers = workers
        self._names_before = frozenset(adapted)
        self._layers = _LayersOfThread()
        self._names: set[str] = set()  # of the layers that are adapted in this trace, in all threads
        self._unnamed: dict[int, Any] = {}  # id -> layer that was made without a name in this trace
        self._automatic_names: set[str] = set()  # those of `_names` that Keras made up

    def once(self, adapt: Callable[..., None]) -> Callable[..., None]:
        """Return the method that replaces `adapt` of a class of layers."""

        def adapt_once(layer: Any, data: Any, *args: Any, **kwargs: Any) -> None:
            self._note(layer)
            if layer.name not in self._adapted:
                learn = functools.partial(_learn_from, layer, adapt, data, *args, **kwargs)
                self._adapted[layer.name] = self._learn_on_chief(layer.name, learn)
            self.in_graph(_give)(layer, self._adapted[layer.name])

        return adapt_once

    def in_graph(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return `function`, which leaves a `tf.init_scope` of model_fn: what is made there is not of the trace."""
        graph = self._graph
        if graph is None:
            return function

        def call(*args: Any, **kwargs: Any) -> None:
            with graph.as_default():
                function(*args, **kwargs)

        return call

    def noting_unnamed(self, init: Callable[..., None]) -> Callable[..., None]:
        """Return the method that replaces `keras.Operation.__init__`, by which each layer gets its name."""
        unnamed = self._unnamed

        # With the arguments of Keras's own, by which `Operation.__new__` (Keras 3.15) makes the config of a layer.
        @functools.wraps(init)
        def init_noting(self: Any, name: str | None = None) -> None:
            init(self, name=name)
            if name is None:
                unnamed[id(self)] = self

        return init_noting

    def _note(self, layer: Any) -> None:
        """Note that a layer is adapted.

        Raises:
          ValueError: another layer with its name is adapted, too.
        """
        first = self._layers.by_name.setdefault(layer.name, layer)
        if first is not layer:
            raise ValueError(
                f"Two layers with the name {layer.name!r} are adapted, and a checkpoint keeps what a layer has learnt "
                "by its name. Give one of them another name."
            )
        self._names.add(layer.name)
        if id(layer) in self._unnamed:
            self._automatic_names.add(layer.name)

    def check_automatic_names(self) -> None:
        """Check that automatic names stand for the layers that learnt under them.

        Keras counts layers anew in each trace (`string_lookup`, `string_lookup_1`). Where a mode leaves out a layer,
        the next one gets its name, and would get its words.

        Raises:
          ValueError: with such names, this trace adapts other layers than have learnt.
        """
        for name in sorted(self._automatic_names):
            base = re.sub(r"_\d+$", "", name)
            learnt_before = _numbered(base, self._names_before)
            adapted_here = _numbered(base, self._names)
            if not learnt_before or learnt_before == adapted_here:
                continue
            for new_name in self._names - self._names_before:
                self._adapted.pop(new_name, None)  # else the next checkpoint of a run that goes on would have it
            raise ValueError(
                f"model_fn adapts {_quoted(adapted_here)} in this mode, and {_quoted(learnt_before)} learnt before. "
                "Keras numbers layers without a name in the order in which they are made, so these names may stand for "
                "other layers here. Give the layers a name= in model_fn; if the model is trained already, the names "
                "under which they learnt."
            )

    def _learn_on_chief(self, name: str, learn: Callable[[], Any]) -> Any:
        """Return what the chief's layer learns.

        Raises:
          WorkersDifferError: the chief adapts another layer.
        """
        if self._workers.num_workers == 1:
            return learn()
        mine = ""
        if self._workers.is_chief:
            mine = json.dumps([name, learn()])
        with tf.init_scope():
            name_on_chief, learnt = json.loads(self._workers.broadcast_text(mine))
        if name_on_chief != name:
            raise WorkersDifferError(
                f"model_fn of worker {self._workers.worker_index} adapts the layer {name!r} where that of the chief "
                f"adapts {name_on_chief!r}. All workers must make the same layers in the same order."
            )
        return learnt


def _numbered(base: str, names: Collection[str]) -> list[str]:
    """Return those of `names` that Keras gives to layers of one class: `base`, `base_1`, ..."""
    return sorted(name for name in names if re.fullmatch(rf"{re.escape(base)}(_\d+)?", name))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _learn_from(layer: Any, adapt: Callable[..., None], data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what a layer like `layer` learns from `data`.

    Raises:
      ValueError: the data exist only in the graph, or the layer cannot learn from them.
    """
    kind = type(layer)
    config = layer.get_config()
    config.pop("vocabulary_size", None)  # that of a layer that has learnt nothing
    if config.get("output_mode") == "tf_idf":
        raise ValueError(
            f"{kind.__name__}.adapt with output_mode='tf_idf' does not work in model_fn. Adapt such a layer in a "
            "script, and make the one in model_fn with vocabulary=[...] and idf_weights=[...]."
        )

    def learn() -> dict[str, Any]:
        twin = kind.from_config(config)
        adapt(twin, tf.nest.map_structure(_bring_outside, data), *args, **kwargs)
        return _state_of(twin)

    # In a thread of its own, in which there is neither a graph nor a strategy.
    with futures.ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(learn).result()
        except Exception as error:
            argument = "bin_boundaries" if hasattr(layer, "bin_boundaries") else "vocabulary"
            raise ValueError(
                f"{kind.__name__}.adapt of the layer {layer.name!r} in model_fn: {error} Give it arrays, or a dataset "
                f"made outside of model_fn, or make the layer with {argument}=[...]."
            ) from error


def _bring_outside(value: Any) -> Any:
    """Return a value of `adapt`'s data as one that exists outside of the graph.

    Raises:
      ValueError: it depends on the step.
    """
    tensor = value
    if isinstance(value, tf.data.Dataset):
        tensor = tf.data.experimental.to_variant(value)
    is_eager = hasattr(tensor, "numpy")
    if not tf.is_tensor(tensor) or is_eager:
        return value
    constant = tf.get_static_value(tensor)
    if constant is None:
        raise ValueError("It is given a tensor of the step, and a layer learns before the first step.")
    return constant


def _state_of(layer: Any) -> dict[str, Any]:
    if hasattr(layer, "bin_boundaries"):
        return {"bin_boundaries": np.asarray(layer.bin_boundaries).tolist()}
    vocabulary = layer.get_vocabulary(include_special_tokens=False)
    return {"vocabulary": np.asarray(vocabulary).tolist()}


def _give(layer: Any, learnt: dict[str, Any]) -> None:
    """Give a layer what was learnt, as its constructor takes it."""
    if "bin_boundaries" in learnt:
        layer.bin_boundaries = learnt["bin_boundaries"]
    else:
        layer.set_vocabulary(learnt["vocabulary"])
