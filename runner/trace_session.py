"""What v1 hooks, listeners and a Scaffold get as `session`: a traced step, pruned to what they run of it."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.composites import flat_feeds, flat_parts, value_of
from runner.traced import Trace
from runner.v1_bridge import ActsAsSession
from runner.variables import GLOBAL_STEP

v1 = tf.compat.v1

# The names that the value of a variable has in a graph of TensorFlow 1, after that of the variable.
_VALUES = re.compile(r"(/read|/Read/ReadVariableOp)?(:0)?$")
_OF_REPLICA = re.compile(r"(^|/)replica_\d+/")


class TraceSession(ActsAsSession):
    """Runs what hooks ask for between steps, and finds what they ask for in a step.

    Args:
      operators: what code that belongs to model_fn is called in; see `ModelFn.operators`.
    """

    def __init__(self, trace: Trace, operators: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._trace = trace
        self._operators = operators
        self._reads: dict[int, tuple[Any, tf.Tensor]] = {}  # with what has that id
        self._functions: dict[Any, tuple[Any, Callable[..., Any]]] = {}
        self._last: dict[int, Any] = {}
        self._fed: dict[int, list[tf.Tensor]] = {}

    @property
    def graph(self) -> Any:
        return self._trace.graph

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What hooks are called in: the graph is the default one, as in a session, and operators are those that
        model_fn had."""
        with self.graph.as_default(), self._operators():
            yield

    def remember(self, elements: Sequence[Any], values: Sequence[Any]) -> None:
        """Notes what the last recorded step gave, for hooks that ask once more at the end."""
        self._last = {id(element): value for element, value in zip(elements, values, strict=True)}

    def elements(self, fetches: Any) -> list[Any]:
        """The tensors and operations that `fetches` names, flat; a variable stands for its value before the step."""
        return [self.element(part) for fetch in tf.nest.flatten(fetches) for part in flat_parts(fetch)]

    def packed(self, fetches: Any, values: Iterator[Any]) -> Any:
        """`fetches` with the values of their elements, the next of `values`, in their places."""
        return tf.nest.pack_sequence_as(fetches, [value_of(fetch, values) for fetch in tf.nest.flatten(fetches)])

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        """The values of `fetches`. What does not depend on the input can be run; assignments take effect.

        Args:
          feed_dict: placeholder that model_fn or a hook made, or its name -> value.

        Raises:
          ValueError: a fetch depends on a batch, a name is not there, or another tensor than a placeholder is fed.
        """
        del options, run_metadata
        elements = self.elements(fetches)
        feeds = self.feeds(feed_dict or {})
        if self._trace.needs_inputs(elements):
            if all(id(element) in self._last for element in elements):
                return self.packed(fetches, (self._last[id(element)] for element in elements))
            raise ValueError(
                f"session.run({fetches!r}) in a hook depends on a batch, and between steps there is none. "
                "Ask for it in before_run: SessionRunArgs(fetches)."
            )
        with tf.init_scope():  # hooks are called with the traced graph as default, which must not call itself
            function = self._function(elements, [placeholder for placeholder, _ in feeds])
            values = iter(function(*(value for _, value in feeds)))
        flat = (None if isinstance(element, tf.Operation) else next(values).numpy() for element in elements)
        return self.packed(fetches, flat)

    def _function(self, elements: Sequence[Any], placeholders: Sequence[tf.Tensor]) -> Callable[..., Any]:
        """Made once: a hook may run the same thing after each step."""
        key = tuple(map(id, elements)), tuple(map(id, placeholders))
        if key not in self._functions:
            tensors = [element for element in elements if not isinstance(element, tf.Operation)]
            function = self._trace.function(tensors, elements, with_inputs=False, feeds=placeholders)
            self._functions[key] = elements, function
        return self._functions[key][1]

    def feeds(self, feed_dict: Mapping[Any, Any]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """(placeholder, value) of each replica, for what is fed to the first one's.

        Raises: ValueError: what is fed is no placeholder, or the value has another shape.
        """
        found = []
        for key, value in (one for fed in feed_dict.items() for one in flat_feeds(*fed)):
            tensor = self._placeholder(key)
            array = np.asarray(value, tensor.dtype.as_numpy_dtype)
            if not tensor.shape.is_compatible_with(array.shape):
                raise ValueError(
                    f"Cannot feed value of shape {array.shape} for Tensor {tensor.name!r}, which has shape "
                    f"{tensor.shape}."
                )
            with tf.init_scope():
                constant = tf.constant(array, tensor.dtype)
            found += [(one, constant) for one in self._of_all_replicas(tensor)]
        return found

    def element(self, fetch: Any) -> Any:
        """The tensor or operation that `fetch` is or names. Raises: ValueError: there is none of that name."""
        if isinstance(fetch, str | bytes):
            return self._named(fetch.decode() if isinstance(fetch, bytes) else fetch)
        fetch = self._of_keras(fetch)
        if hasattr(fetch, "read_value"):
            if id(fetch) not in self._reads:
                with self.graph.as_default():
                    self._reads[id(fetch)] = fetch, fetch.read_value()
            return self._reads[id(fetch)][1]
        if isinstance(fetch, tf.distribute.DistributedValues):
            return fetch.values[0]  # of an assignment to all copies of a variable, for which each of these waits
        return fetch

    def tensor(self, fetch: Any) -> Any:
        """As `element`; the name of an operation stands for its first output, as in a LoggingTensorHook."""
        element = self.element(fetch)
        return element.outputs[0] if isinstance(element, tf.Operation) and element.outputs else element

    def _named(self, name: str) -> Any:
        try:
            return self.graph.as_graph_element(name)
        except (KeyError, ValueError):
            variables = self._variables()
            variable = variables.get(_VALUES.sub("", name))
            if variable is not None:
                return self.element(variable)
        there = [*variables, *(tensor.name for one in self._trace.operations for tensor in one.outputs)]
        close = difflib.get_close_matches(name, there, n=3)
        raise ValueError(
            f"a hook asks for {name!r}, and model_fn made no tensor or variable of that name."
            + (f" Did you mean {' or '.join(map(repr, close))}?" if close else "")
            + ' Give it one: tf.identity(tensor, name="...").'
        )

    def _variables(self) -> dict[str, Any]:
        """Name -> variable."""
        step = v1.train.get_global_step(self.graph)
        return {**{name: asked for name, (asked, _) in self._trace.served.requests.items()}, GLOBAL_STEP: step}

    def _of_keras(self, fetch: Any) -> Any:
        """The variable that a `keras.Variable` asked for; anything else as it is."""
        return next((asked for asked, owner in self._trace.served.requests.values() if owner is fetch), fetch)

    def _placeholder(self, key: Any) -> Any:
        tensor = self.tensor(key)
        is_one = getattr(tensor, "op", None) is not None and tensor.op.type.startswith("Placeholder")
        if not is_one or any(tensor is one for one in self._trace.inputs):
            raise ValueError(
                f"feed_dict={{{key!r}: ...}} in a hook: only a placeholder that model_fn or a hook made can be fed; "
                "the step's input comes from input_fn alone."
            )
        return tensor

    def _of_all_replicas(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if id(tensor) not in self._fed:
            name = _OF_REPLICA.sub(r"\1", tensor.name)
            placeholders = [one.outputs[0] for one in self._trace.operations if one.type == tensor.op.type]
            of_model_fn = [one for one in placeholders if _OF_REPLICA.sub(r"\1", one.name) == name]
            self._fed[id(tensor)] = of_model_fn if any(one is tensor for one in of_model_fn) else [tensor]
        return self._fed[id(tensor)]
