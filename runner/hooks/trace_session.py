"""The `session` that SessionRunHooks, listeners and a Scaffold get; its `run` runs parts of a traced step."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.hooks.session_restores import SessionRestore, reads_of
from runner.model_log import logging_to
from runner.system.suggestions import did_you_mean
from runner.tf_private import v1 as v1_bridge
from runner.tracing.trace import Trace
from runner.tracing.variable_store import GLOBAL_STEP, LocalVariable
from runner.types import IteratorInitializer, StepRequest

IndexedSlicesValue = collections.namedtuple("IndexedSlicesValue", "values indices dense_shape", defaults=[None])
"""The value that a session gave for `tf.IndexedSlices`."""


def flat_fetches(fetches: Any) -> list[Any]:
    """Return the leaves of `fetches` in the order of its structure.

    `tf.nest` would sort a dict by its keys, which fails here: hooks use tensors as keys.
    """
    members = _members(fetches)
    if members is None:
        return [fetches]
    flat: list[Any] = []
    for member in members:
        flat += flat_fetches(member)
    return flat


def packed_fetches(fetches: Any, values: Iterator[Any]) -> Any:
    """Return the structure of `fetches` with its leaves replaced by the next of `values`, in the order of
    `flat_fetches`.
    """
    members = _members(fetches)
    if members is None:
        return next(values)
    packed = [packed_fetches(member, values) for member in members]
    kind = type(fetches)
    if isinstance(fetches, Mapping):
        return _packed_mapping(fetches, packed)
    if isinstance(fetches, list):
        return packed
    if kind is tuple:
        return tuple(packed)
    return kind(*packed)


def _packed_mapping(fetches: Mapping[Any, Any], packed: Sequence[Any]) -> Any:
    pairs = list(zip(fetches, packed, strict=True))
    if isinstance(fetches, collections.defaultdict):
        return collections.defaultdict(fetches.default_factory, pairs)
    mapping: Any = {}
    if issubclass(type(fetches), dict):
        mapping = type(fetches)()
    mapping.update(pairs)
    return mapping


def _members(fetches: Any) -> list[Any] | None:
    """Return the elements of a list, tuple, mapping or attrs object; None for anything else."""
    if isinstance(fetches, Mapping):
        return list(fetches.values())
    if isinstance(fetches, list | tuple):
        return list(fetches)
    attributes = getattr(type(fetches), "__attrs_attrs__", None)
    if attributes is None:
        return None
    return [getattr(fetches, attribute.name) for attribute in attributes]


def flat_parts(fetch: Any) -> list[Any]:
    """Return the dense tensors of a sparse or ragged tensor or of IndexedSlices; for anything else, `[fetch]`."""
    composite = _take_apart(fetch)
    if composite is None:
        return [fetch]
    _, parts = composite
    flat: list[Any] = []
    for part in parts:
        flat += flat_parts(part)
    return flat


def value_of(fetch: Any, values: Iterator[Any]) -> Any:
    """Return what a session returns for `fetch`, built from the next values: one for each of its `flat_parts`."""
    composite = _take_apart(fetch)
    if composite is None:
        return next(values)
    make_value, parts = composite
    return make_value(*[value_of(part, values) for part in parts])


def values_of_elements(elements: Iterable[Any], values: Iterator[Any]) -> list[Any]:
    """Return the value of each tensor or operation: of a tensor the next of `values`, of an operation None."""
    found: list[Any] = []
    for element in elements:
        if isinstance(element, tf.Operation):
            found.append(None)
        else:
            found.append(next(values))
    return found


def flat_feeds(key: Any, value: Any) -> list[tuple[Any, Any]]:
    """Return (placeholder, value) pairs for one entry of a feed_dict.

    A sparse placeholder is fed with a tuple: indices int64 `[n, rank]`, values `[n]` and shape int64 `[rank]`.
    """
    if not isinstance(key, tf.SparseTensor):
        return [(key, value)]
    placeholders = (key.indices, key.values, key.dense_shape)
    if isinstance(value, tf.SparseTensor):
        value = (value.indices, value.values, value.dense_shape)
    return list(zip(placeholders, value, strict=True))


def _is_key_of(key: Any, placeholder: tf.Tensor) -> bool:
    """Report whether `key` of a feed_dict is the placeholder or its name."""
    return key is placeholder or (isinstance(key, str) and key == placeholder.name)


def fed_value(placeholder: tf.Tensor, value: Any) -> tf.Tensor:
    """Return the value fed for a placeholder as an eager tensor of its dtype.

    Raises:
      ValueError: the value does not fit the placeholder's shape.
    """
    array = np.asarray(value, placeholder.dtype.as_numpy_dtype)
    if not placeholder.shape.is_compatible_with(array.shape):
        raise ValueError(
            f"Cannot feed value of shape {array.shape} for Tensor {placeholder.name!r}, which has shape "
            f"{placeholder.shape}."
        )
    with tf.init_scope():
        return tf.constant(array, placeholder.dtype)


def _take_apart(fetch: Any) -> tuple[Callable[..., Any], list[Any]] | None:
    """Return (constructor of the fetched value, its arguments as tensors), such as of a SparseTensor; None for a plain
    tensor.
    """
    if isinstance(fetch, tf.SparseTensor):
        return v1.SparseTensorValue, [fetch.indices, fetch.values, fetch.dense_shape]
    if isinstance(fetch, tf.RaggedTensor):
        return v1.ragged.RaggedTensorValue, [fetch.values, fetch.row_splits]
    if not isinstance(fetch, tf.IndexedSlices):
        return None
    parts = [fetch.values, fetch.indices, fetch.dense_shape]
    return IndexedSlicesValue, [part for part in parts if part is not None]


v1 = tf.compat.v1

# What follows the name of a variable in the name of the tensor with its value, in a TensorFlow 1 graph.
_VALUE_SUFFIX = re.compile(r"(/read|/Read/ReadVariableOp)?(:0)?$")
_OF_REPLICA = re.compile(r"(^|/)replica_\d+/")


class NotInGraphError(ValueError, KeyError):
    """Nothing in the graph has a name: a session raised ValueError, `LoggingTensorHook` KeyError."""

    __str__ = ValueError.__str__


class TraceSession(v1_bridge.ActsAsSession):
    """Runs what hooks request between steps, and finds the tensors and operations that hooks fetch in a step.

    Args:
      trace: the trace of model_fn.
      operators: makes the context for code that belongs to model_fn; see `ModelFn.operators`.
      before_write: called before something is run that may write to a variable.
    """

    def __init__(
        self,
        trace: Trace,
        operators: Callable[[], contextlib.AbstractContextManager[None]],
        before_write: Callable[[], None],
    ) -> None:
        self._trace = trace
        self._operators = operators
        self._before_write = before_write
        self._take_batch: Callable[[StepRequest], Sequence[Any]] | None = None
        self._hooked: Any = None
        self._is_ending = False
        # All by ids. The objects are held, too, or are in the graph, so that no id is used again.
        self._reads: dict[int, tuple[Any, tf.Tensor]] = {}  # variable -> (itself, its value)
        self._functions: dict[Any, tuple[Any, Callable[..., Any]]] = {}  # (elements, placeholders) -> what runs them
        self._last: dict[int, Any] = {}  # element -> its value in the last step
        self._has_stepped = False
        self._placeholders: dict[int, list[tf.Tensor]] = {}  # placeholder -> those of all replicas
        self._writes: dict[tuple[int, ...], bool] = {}  # elements -> whether they change a variable

    def begin(self, hooked: Any, take_batch: Callable[[StepRequest], Sequence[Any]] | None = None) -> None:
        """Note whose hooks get this session.

        Args:
          hooked: the run whose hooks are called, for `runner.log`.
          take_batch: runs a request on the next batch of the input and returns the values of its tensors. None:
            requests that depend on a batch cannot be run.
        """
        self._hooked = hooked
        self._take_batch = take_batch

    def end(self) -> None:
        """Note that hooks are called for the last time: what they fetch from now on has the values of the last step."""
        self._is_ending = True

    @property
    def graph(self) -> Any:
        return self._trace.graph

    def as_default(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the default session that `Tensor.eval()` and `Operation.run()` look for."""
        return tf.compat.v1.Session.as_default(self)  # it uses no attribute that only a real session has

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the context in which hooks are called: the traced graph is the default graph, with model_fn's
        operators.
        """
        with self.graph.as_default(), self._operators(), logging_to(self._hooked):
            yield

    def remember(self, elements: Sequence[Any], values: Sequence[Any]) -> None:
        """Keep the values of the last recorded step for hooks that ask again at the end; of an operation, None."""
        self._has_stepped = True
        self._last = {id(element): value for element, value in zip(elements, values, strict=True)}

    def elements(self, fetches: Any) -> list[Any]:
        """Return the tensors and operations of `fetches` as a flat list; a variable means its value before the step.

        If one of them may write to a variable, announce that with `begin_to_write`.
        """
        elements: list[Any] = []
        for fetch in flat_fetches(fetches):
            elements += [self.element(part) for part in flat_parts(fetch)]
        key = tuple(map(id, elements))  # the graph holds them
        if key not in self._writes:
            self._writes[key] = self._trace.changes_variables(elements)
        if self._writes[key]:
            self.begin_to_write()
        return elements

    def begin_to_write(self) -> None:
        """Announce that a variable is about to change."""
        with tf.init_scope():
            self._before_write()

    def packed(self, fetches: Any, values: Iterator[Any]) -> Any:
        """Return the structure `fetches`, with each element replaced by its value from `values`."""
        with self._operators():  # `fetches` may be a dict with tensors as keys
            values_of_fetches = [value_of(fetch, values) for fetch in flat_fetches(fetches)]
            return packed_fetches(fetches, iter(values_of_fetches))

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        """Return the values of `fetches`; assignments take effect. Fetches that depend on a batch use the next one.

        Args:
          fetches: tensors, operations, variables or names of them, in any structure.
          feed_dict: a placeholder made by model_fn or a hook, or its name -> a value of its shape and dtype.
          options, run_metadata: ignored.

        Returns:
          NumPy values in the structure of `fetches`; None for an operation.

        Raises:
          ValueError: a fetch depends on a batch and none can be taken, a name does not exist, or a tensor that is not a
            placeholder is fed.
          tf.errors.OutOfRangeError: there is no further batch.
        """
        del options, run_metadata
        fed = self._initialize_iterators(fetches, feed_dict or {})
        elements = self.elements(fetches)
        feeds = self.feeds(fed)
        # Hooks are called with the traced graph as default; this call must not become an operation of that graph.
        with tf.init_scope():
            if not self._trace.needs_inputs(elements):
                values = iter(self._run_alone(elements, feeds))
            elif self._is_ending and self._are_known(elements):
                # There may be no further batch, so hooks that ask again at the end get the values of the last step.
                return self.packed(fetches, iter([self._last[id(element)] for element in elements]))
            elif self._take_batch is None:
                raise ValueError(
                    f"session.run({fetches!r}) depends on a batch, but there is none before the hooks of a run. "
                    "Request the fetches in before_run of a hook: SessionRunArgs(fetches)."
                )
            else:
                placeholders = [placeholder for placeholder, _ in feeds]
                request = StepRequest(elements, placeholders, [value for _, value in feeds])
                values = iter(self._take_batch(request))
        return self.packed(fetches, iter(values_of_elements(elements, values)))

    def _are_known(self, elements: Sequence[Any]) -> bool:
        """Report whether all elements had a value in the last step."""
        return all(self._last.get(id(element)) is not None for element in elements)

    def _run_alone(self, elements: Sequence[Any], feeds: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> list[Any]:
        """Run operations and return the values of tensors that depend on no batch.

        Assignments of values from a checkpoint run in parts. For anything else a function is built once, because a hook
        may run it after each step.
        """
        placeholders = [placeholder for placeholder, _ in feeds]
        given = [value for _, value in feeds]
        key = (tuple(map(id, elements)), tuple(map(id, placeholders)))
        if key not in self._functions:
            reads = reads_of(elements)
            if reads:
                self._restore(reads, feeds)
                return []
            tensors = [element for element in elements if not isinstance(element, tf.Operation)]
            function = self._trace.function(tensors, elements, with_inputs=False, feeds=placeholders)
            self._functions[key] = (elements, function)
        _, function = self._functions[key]
        return [value.numpy() for value in function(*given)]

    def _restore(
        self, reads: Mapping[tf.Operation, Sequence[tf.Tensor]], feeds: Sequence[tuple[tf.Tensor, tf.Tensor]]
    ) -> None:
        """Run assignments of values from checkpoints, in parts of bounded size. Args: reads: as in SessionRestore."""
        placeholders = [placeholder for placeholder, _ in feeds]
        given = [value for _, value in feeds]
        restore = SessionRestore(reads, lambda tensors: self._run_alone(tensors, feeds))
        for part, pairs in restore.parts():
            # Feed what is read, so that the operations that read all values at once do not run.
            tensors_read = [tensor for tensor, _ in pairs]
            function = self._trace.function([], part, with_inputs=False, feeds=[*placeholders, *tensors_read])
            function(*given, *[value for _, value in pairs])
            del pairs  # before the next part is read

    def feeds(self, fed: Iterable[tuple[Any, Any]]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Return (placeholder, value) for every replica, given what a hook feeds to the first replica.

        Args:
          fed: the items of a feed_dict: a placeholder of the first replica, or its name, and a value.

        Raises:
          ValueError: a key is not a placeholder, or its value has another shape.
        """
        found = []
        for whole_key, whole_value in fed:
            for key, value in flat_feeds(whole_key, whole_value):
                tensor = self._find_placeholder(key)
                constant = fed_value(tensor, value)
                found += [(placeholder, constant) for placeholder in self._of_all_replicas(tensor)]
        return found

    def _initialize_iterators(self, fetches: Any, feed_dict: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """Set the variables that stand for the placeholders of the input function, if `fetches` contain an iterator's
        initializer.

        Returns:
          The feeds of other placeholders, as (key, value).

        Raises:
          ValueError: steps have been taken, or a placeholder is not fed.
        """
        initializers = [fetch for fetch in flat_fetches(fetches) if isinstance(fetch, IteratorInitializer)]
        if initializers and self._has_stepped:
            raise ValueError(
                "session.run(iterator.initializer) in a hook after the first step is not possible: it would restart "
                "the data, whose position is part of the checkpoint. Use dataset.repeat()."
            )
        other_feeds = list(feed_dict.items())
        for initializer in initializers:
            for placeholder, variable in initializer.placeholders:
                values = [value for key, value in feed_dict.items() if _is_key_of(key, placeholder)]
                if not values:
                    raise ValueError(
                        f"You must feed a value for placeholder tensor {placeholder.op.name!r} with dtype "
                        f"{placeholder.dtype.name} and shape {placeholder.shape}, from which input_fn builds its "
                        "dataset: session.run(iterator.initializer, feed_dict={placeholder: value})."
                    )
                with tf.init_scope():
                    variable.assign(fed_value(placeholder, values[0]))
                other_feeds = [(key, value) for key, value in other_feeds if not _is_key_of(key, placeholder)]
        return other_feeds

    def element(self, fetch: Any) -> Any:
        """Return the tensor or operation that `fetch` is or names.

        Raises:
          ValueError: nothing has that name.
        """
        if isinstance(fetch, bytes):
            fetch = fetch.decode()
        if isinstance(fetch, str):
            return self._find_by_name(fetch)
        if isinstance(fetch, IteratorInitializer):
            with self.graph.as_default():
                return tf.no_op()
        fetch = self._variable_of_keras(fetch)
        if isinstance(fetch, LocalVariable):
            fetch = fetch.values[0]  # the first replica's, like any other fetch
        if hasattr(type(fetch), "read_value"):  # a variable, of TensorFlow or of a strategy
            if id(fetch) not in self._reads:
                with self.graph.as_default():
                    self._reads[id(fetch)] = (fetch, fetch.read_value())
            _, value = self._reads[id(fetch)]
            return value
        if isinstance(fetch, tf.distribute.DistributedValues):
            # An assignment to all copies of a variable: return the operation that depends on the copies' assignments.
            return fetch.values[0]
        if not isinstance(fetch, tf.Operation | tf.Tensor):
            raise TypeError(f"{fetch!r} cannot be fetched: it is not a tensor, an operation, a variable or a name.")
        return fetch

    def _variable_of_keras(self, fetch: Any) -> Any:
        """Return the TensorFlow variable that Keras requested for a `keras.Variable`; anything else as it is."""
        if fetch is None:
            return None
        for variable, owner in self._trace.requested.requests.values():
            if owner is fetch:
                return variable
        return fetch

    def tensor(self, fetch: Any) -> Any:
        """Return the tensor of `element`. An operation's name means its first output, as in a LoggingTensorHook."""
        element = self.element(fetch)
        if isinstance(element, tf.Operation) and element.outputs:
            return element.outputs[0]
        return element

    def _find_by_name(self, name: str) -> Any:
        """Return the tensor or operation of that name, or the value of a variable that is named as in TensorFlow 1.

        Raises:
          NotInGraphError: there is none.
        """
        try:
            # The graph's own method: that of classic code finds a variable's handle where a hook wants its value.
            return type(self.graph).as_graph_element(self.graph, name)
        except (KeyError, ValueError):
            variables = {name: variable for name, (variable, _) in self._trace.requested.requests.items()}
            variables[GLOBAL_STEP] = v1.train.get_global_step(self.graph)
            variable = variables.get(_VALUE_SUFFIX.sub("", name))
            if variable is not None:
                return self.element(variable)
        known = list(variables)
        for operation in self._trace.operations:
            known += [tensor.name for tensor in operation.outputs]
        raise NotInGraphError(
            f"A hook requests {name!r}, but model_fn made no tensor or variable of that name."
            f"{did_you_mean(name, known, n=3)}"
            ' Name one: tf.identity(tensor, name="...").'
        )

    def _find_placeholder(self, key: Any) -> Any:
        """Return the placeholder of model_fn or a hook that a key of a feed_dict is or names.

        Raises:
          TypeError: nothing has that name, as a session says it.
          ValueError: it is no placeholder, or is the input of the step.
        """
        try:
            tensor = self.tensor(key)
        except NotInGraphError as error:
            raise TypeError(f"feed_dict={{{key!r}: ...}} in a hook: {error}") from None
        operation = getattr(tensor, "op", None)
        is_placeholder = operation is not None and operation.type.startswith("Placeholder")
        if not is_placeholder or any(tensor is part_of_input for part_of_input in self._trace.inputs):
            raise ValueError(
                f"feed_dict={{{key!r}: ...}} in a hook: only placeholders made by model_fn or a hook can be fed; the "
                "input of a step comes from input_fn."
            )
        return tensor

    def _of_all_replicas(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Return the placeholders that model_fn made on all replicas, given that of the first; a hook makes only one.

        They have the same name, except for the scope of the replica.
        """
        if id(tensor) not in self._placeholders:
            name = _OF_REPLICA.sub(r"\1", tensor.name)
            placeholders = [operation for operation in self._trace.operations if operation.type == tensor.op.type]
            outputs_of_same_name = []
            for placeholder in placeholders:
                output = placeholder.outputs[0]
                if _OF_REPLICA.sub(r"\1", output.name) == name:
                    outputs_of_same_name.append(output)
            # What a hook made is not among the operations of the trace.
            is_of_model_fn = any(output is tensor for output in outputs_of_same_name)
            if not is_of_model_fn:
                outputs_of_same_name = [tensor]
            self._placeholders[id(tensor)] = outputs_of_same_name
        return self._placeholders[id(tensor)]
