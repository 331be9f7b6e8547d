"""Convert the result of an input function to a dataset of (features,) or (features, labels), and check its shapes.

Of (features, labels, sample_weight), the last two become one part, `WeightedLabels`.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private import v1
from runner.tf_private.datasets import without_state
from runner.tf_private.graphs import GraphFromHere, Part, function_of_part
from runner.tf_private.random_ops import KERNEL_RANDOM, noticing_draws
from runner.tf_private.tf_estimator import operators_of_tf1
from runner.tf_private.variables import uninitialized_variable
from runner.tracing.graph_operations import has_effect, needed, operations
from runner.types import IteratorInitializer, WeightedLabels

_log = logging.getLogger(__name__)


def as_dataset(result: Any, name: str, *, endless: bool) -> tf.data.Dataset:
    """Return `result` of the input function `name` as a dataset of (features,) or (features, labels).

    Tensors are one batch.

    Args:
      result: a tf.data.Dataset; or (features, labels), with or without a third part, sample_weight, or features as
        tensors or arrays `[batch, ...]` of any dtype.
      name: the input function's name, for messages.
      endless: every step gets this batch, as in TRAIN, and as in all modes of a session; False: it is read once.

    Returns:
      A dataset whose elements are tuples of one or two structures of tensors, with the shapes that were given.

    Raises:
      ValueError: `result` is something else, or a tuple that is not (features, labels).
      TypeError: `result` is a generator.
    """
    if isinstance(result, tf.data.Dataset):
        return _normalise(result, name)
    if isinstance(result, tuple | list):
        if len(result) not in (2, 3):
            raise ValueError(
                f"{name} returned a {type(result).__name__} of {len(result)}. Return (features, labels), or features "
                "alone: a tensor or a dict of tensors."
            )
        result = tuple(result)
    is_generator = hasattr(result, "__next__") and not tf.is_tensor(result)
    if result is None or callable(result) or is_generator:
        kind = TypeError if is_generator else ValueError
        raise kind(
            f"{name} returned {_with_article(result)}. Return a tf.data.Dataset, (features, labels), or features. Wrap "
            "a generator in tf.data.Dataset.from_generator."
        )
    if all(leaf is None for leaf in tf.nest.flatten(result)):
        raise ValueError(f"{name} returned no tensors: {result!r}.")
    try:
        dataset = tf.data.Dataset.from_tensors(result)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} returned {_with_article(result)}, which cannot be converted to tensors: {error}"
        ) from error
    if endless:
        _log.warning("%s returned tensors, not a tf.data.Dataset: every step has the same examples.", name)
        dataset = dataset.repeat()
    return _normalise(dataset, name)


def check_batches(element_spec: Any, name: str, setting: str, expected: int | None, *, is_dataset: bool = True) -> None:
    """Check that the elements of a dataset are batches of the right size, as far as their static shapes are known.

    Args:
      element_spec: spec of an element of `as_dataset`'s dataset: TensorSpecs `[batch, ...]`.
      name: the input function's name.
      setting: the setting as the user wrote it, such as `input.train.batch_size=100`.
      expected: the size that all batches must have, params["batch_size"]; None: any size.
      is_dataset: the function returned a dataset; False: it returned tensors, which are one batch.

    Raises:
      ValueError: an element has no rows to divide, its tensors have different numbers of rows, or this number is not
        `expected`. The message says what to change.
    """
    leaves = tensors(element_spec)
    for leaf, spec in leaves:
        if not isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec | tf.RaggedTensorSpec):
            raise ValueError(
                f"{setting} divides tensors by rows, but {leaf} of {name} is a {type(spec).__name__}, which has none. "
                "Return tensors, or set batch_size=null."
            )
        if spec.shape.rank == 0:
            raise ValueError(
                f"{setting}, but {name} returns single examples: {leaf} is a scalar. Add "
                '.batch(params["batch_size"]), or set batch_size=null if each element is the batch of one replica.'
            )
    sizes = {}
    for leaf, spec in leaves:
        if spec.shape.rank and spec.shape[0] is not None:
            sizes[leaf] = spec.shape[0]
    if len(set(sizes.values())) > 1:
        different = ", ".join(f"{leaf} {size}" for leaf, size in sizes.items())
        raise ValueError(
            f"the tensors in a batch of {name} have different numbers of rows: {different}. Each tensor must have one "
            "row per example."
        )
    size = next(iter(sizes.values()), None)
    if expected is None or size is None or size == expected:
        return
    if not is_dataset:
        raise ValueError(
            f"{setting}, but {name} returned tensors of {size} rows, which are one batch: every step would train on "
            f"all {size}. For batches of {expected} return tf.data.Dataset.from_tensor_slices(...)"
            '.batch(params["batch_size"]); to train on all rows at once set batch_size=null.'
        )
    raise ValueError(
        f'{setting}, but {name} returns batches of {size}, although params["batch_size"]={expected}. Write '
        f'.batch(params["batch_size"]), or set batch_size=null to keep batches of {size}.'
    )


def tensors(element_spec: Any) -> list[tuple[str, Any]]:
    """Return (name as a user would write it, spec) of each tensor of an element."""
    leaves = _list_leaves("features", element_spec[0])
    if len(element_spec) > 1:
        leaves += _list_leaves("labels", element_spec[1])
    return leaves


def none_spec(spec: Any) -> Any:
    """Return `spec`; None if it is the spec that tf.data uses for None, whose type has no public name."""
    if spec is None or spec.is_compatible_with(None):
        return None
    return spec


# --- what tf.data changes or refuses: lists, values that are no tensors, keys without an order ------------------------


class _List(dict[int, Any]):
    """A list of tensors, index -> tensor, since tf.data keeps dicts of any type."""


class _Keyed(dict["_Key", Any]):
    """Stands for a dict whose keys have no order, such as "a" and 0. tf.data sorts keys, so this dict has _Keys."""


class _Constant(dict["_Key", Any]):
    """Stands for a value without tensors, which is the `original` of its only key. The item of the key is a stand-in,
    because tf.data needs a tensor.
    """


class _Key(str):
    """A key that tf.data can sort and hash. It stands for the key or value `original`.

    Keys sort by `place`, the number of a key in its dict.
    """

    original: Any

    def __new__(cls, original: Any, place: int = 0) -> _Key:
        key = super().__new__(cls, f"{place:04}: {original!r}")
        key.original = original
        return key


def _keep_constant(value: Any) -> _Constant:
    return _Constant({_Key(value): 0})


def keeping_values(result: Any) -> Any:
    """Return the result of an input function in a form in which tf.data keeps its lists of tensors and its values that
    are no tensors, as in a session. `as_given` converts features or labels of this form back.
    """

    def keep(value: Any) -> Any:
        """Return a part of the result in that form."""
        if isinstance(value, _PLAIN):
            return _keep_constant(value)
        if isinstance(value, list):
            items = _List(enumerate(map(keep, value)))
        else:
            items = _map_items(value, keep)
        if isinstance(value, dict | list | tuple):
            # All of a structure without tensors is one constant.
            parts = items.values() if isinstance(items, dict) else items
            if all(part is None or isinstance(part, _Constant) for part in parts):
                return _keep_constant(value)
        if isinstance(value, dict) and _have_no_order(value):
            keyed = _Keyed()
            for place, (key, item) in enumerate(items.items()):
                keyed[_Key(key, place)] = item
            return keyed
        return items

    if result is None:
        return _keep_constant(None)
    if not isinstance(result, tuple | list):
        return keep(result)
    features, *rest = map(keep, result)  # (features, labels) may be a list, too
    if features is None:  # features must not be left out; labels of None may be
        features = _keep_constant(None)
    return (features, *rest)


def _have_no_order(keys: Iterable[Any]) -> bool:
    """Report whether some keys are text and others are not."""
    are_text = {isinstance(key, str) for key in keys}
    return len(are_text) > 1


_PLAIN = (bool, int, float, complex, str, bytes)


def as_given(structure: Any) -> Any:
    """Return features or labels, or their specs, with the lists, values and keys that the input function returned."""
    if isinstance(structure, _Constant):
        return next(iter(structure)).original
    items = _map_items(structure, as_given)
    if isinstance(items, _Keyed):
        return {key.original: item for key, item in items.items()}
    if isinstance(items, _List):
        return list(items.values())
    return items


def _map_items(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a dict or tuple with `function` applied to each item; any other value unchanged."""
    if isinstance(value, dict):
        items = copy.copy(value)  # of the same type, in the same order
        items.update({name: function(item) for name, item in value.items()})
        return items
    if isinstance(value, tuple):
        parts = tuple(map(function, value))
        is_named_tuple = hasattr(value, "_fields")
        return type(value)(*parts) if is_named_tuple else parts
    return value


def _normalise(dataset: tf.data.Dataset, name: str) -> tf.data.Dataset:
    """Return a dataset whose elements are (features,) or (features, labels), from a dataset of features, (features,
    None), (features, labels), or (features, labels, sample_weight).

    Raises:
      ValueError: the elements of the dataset of the function `name` have other parts, or no tensors.
    """
    # tf.data short-circuits maps that only pass on their arguments: they cost nothing measurable.
    # Not `dataset.map`: that of a TensorFlow 1 dataset loses the cardinality.
    mapped = tf.data.Dataset.map
    spec = dataset.element_spec
    if not isinstance(spec, tuple):
        dataset = mapped(dataset, lambda features: (features,))
    elif len(spec) == 3:
        dataset = mapped(dataset, lambda features, *weighted: (features, WeightedLabels(*weighted)))
    elif len(spec) != 2:
        raise ValueError(
            f"the dataset of {name} has elements of {len(spec)} parts. Elements must be (features, labels), or "
            "features alone: a tensor or a dict of tensors. Put several features into one dict."
        )
    elif not tf.nest.is_nested(spec[1]) and none_spec(spec[1]) is None:
        dataset = mapped(dataset, lambda features, labels: (features,))
    if not tensors(dataset.element_spec):
        raise ValueError(f"{name} returned a dataset without tensors: its elements are {spec}.")
    return dataset


def _list_leaves(name: str, spec: Any) -> list[tuple[str, Any]]:
    """Return what `tensors` does for a part of an element whose name is `name`."""
    leaves: list[tuple[str, Any]] = []
    if isinstance(spec, WeightedLabels):
        leaves += _list_leaves(name, spec.labels)
        leaves += _list_leaves("sample_weight", spec.sample_weight)
    elif isinstance(spec, Mapping):
        for key, value in spec.items():
            leaves += _list_leaves(f"{name}[{key!r}]", value)
    elif isinstance(spec, tuple | list):
        for position, value in enumerate(spec):
            leaves += _list_leaves(f"{name}[{position}]", value)
    elif none_spec(spec) is not None:
        leaves.append((name, spec))
    return leaves


def _with_article(value: Any) -> str:
    if value is None:
        return "None"
    name = "function" if inspect.isfunction(value) else type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{article} {name}"


# --- input functions that end in `make_one_shot_iterator().get_next()`, or in `tf.train.batch` ------------------------


def call_input_fn(
    fn: Callable[[], Any], name: str, *, training: bool, as_in_session: bool = False, graph_seed: int | None = None
) -> Any:
    """Call the input function `fn` and return its result. If `fn` calls `get_next` on a v1 iterator, return a dataset
    instead: for each element of the iterator, what `fn` computes from it.

    In a TensorFlow 1 graph, the tensors of `get_next` had new values in each step, and so had all tensors that an input
    function computed from them. Here the function runs eagerly up to its first `get_next`, which returns a placeholder.
    The rest of the function is traced as a graph and becomes the function of a `Dataset.map` over the datasets of its
    iterators. As a dataset, the data has an end, can be divided over workers, and has a position that a checkpoint can
    hold. An element of a queue is taken in the same way (`InputGraph.take`).

    Tensors that are random or made by Python had new values in each step, too. In a session the first such operation
    begins the graph, and what the function returns becomes an endless dataset. So it does in other training, where the
    function is called twice, and tensors read from a file count as well.

    Args:
      fn: the input function with its arguments bound.
      name: its name, for messages.
      training: the mode is TRAIN.
      as_in_session: model_fn is one of tf.estimator: tensors are a batch for each step, without end, and lists and
        Python's values stay what they are (`as_given`).
      graph_seed: the seed of the graph in a session, as a script gives it; None: it gives none.

    Returns:
      A tf.data.Dataset, or the structure of tensors or arrays that `fn` returned.

    Raises:
      ValueError: `fn` takes several elements of one iterator for one batch.
    """
    graph_from_here = GraphFromHere()
    graph = InputGraph(graph_from_here, name, as_in_session=as_in_session, seed=graph_seed)
    # A draw is an operation that is random or runs Python. In a session, the first one takes an element of this dataset
    # as `get_next` takes one of an iterator: the graph begins there, and all that follows is computed in each step.
    one_per_step = tf.data.Dataset.from_tensors(0).repeat()
    taking_draws: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if as_in_session:
        taking_draws = noticing_draws(lambda: graph.take_of(one_per_step))
    context_token = _under_way.set(graph)
    try:
        with graph_from_here, _take_from_iterators(graph, are_first=True), taking_draws:
            result = fn()
    except _LateIterator:  # a dataset made in the graph cannot be read outside of it
        graph.is_closed = True
        return _call_twice(fn, name)
    except Exception as error:
        if _NO_PLACEHOLDER in str(error):  # the function makes a placeholder before its first element
            return _build_fed_by_hooks(fn, graph)
        if not graph.begins_with(one_per_step) or graph.reads_queues:
            raise
        # What follows a draw may need eager tensors, so the function is called once more below, without a graph.
        result = one_per_step
    finally:
        _under_way.reset(context_token)
    if isinstance(result, tf.data.Dataset):
        # A dataset that is made of a draw has one draw for all its elements, and cannot be in a graph.
        if graph.begins_with(one_per_step):
            return keeping_values(fn())
        return result
    if graph.has_begun:
        return graph.dataset(result)
    if as_in_session:
        return keeping_values(result)
    if training and _may_change(fn, result):
        return _draw_each_step(fn)
    return result


def calls_input_fn(*, in_session: bool = False) -> bool:
    """Report whether an input function is being called; with `in_session`, one whose tensors are those of a session."""
    graph = _under_way.get()
    return graph is not None and (not in_session or graph.as_in_session)


def input_graph() -> InputGraph:
    """Return the graph of the input function that is being called in a session, which begins here if it has not."""
    graph = _under_way.get()
    assert graph is not None
    graph.begin()
    return graph


@dataclasses.dataclass(eq=False)
class Taken:
    """An element that an input function takes in each step of a session: of an iterator, or of a queue.

    Attributes:
      inputs: placeholders of the element, flat.
      dataset: returns the dataset of these elements; called when the input function has returned.
      sources: what an element of that dataset is computed from.
      of: the iterator or dataset from which the element is taken; None: a queue.
      is_used: the batch depends on it. In a session nothing else runs.
    """

    inputs: Sequence[tf.Tensor]
    dataset: Callable[[], tf.data.Dataset]
    sources: Sequence[Taken] = ()
    of: Any = None
    is_used: bool = False

    def is_of(self, operations: Collection[tf.Operation]) -> bool:
        """Report whether the placeholders are among these operations."""
        return any(tensor.op in operations for tensor in self.inputs)


class InputGraph:
    """What an input function computes in a session from the elements that it takes in each step.

    Args:
      rest: the graph of what follows the first such element.
      name: the input function's name, for messages.
      as_in_session: as in `call_input_fn`.
      seed: `graph_seed` of `call_input_fn`.

    Attributes:
      taken: the elements, in order.
      is_closed: the function is called again, without a graph.
    """

    is_closed = False

    def __init__(self, rest: GraphFromHere, name: str, *, as_in_session: bool = False, seed: int | None = None) -> None:
        self._rest = rest
        self.name = name
        self.as_in_session = as_in_session
        self.seed = seed
        self.taken: list[Taken] = []

    @property
    def has_begun(self) -> bool:
        """Whether operations are no longer eager."""
        return self._rest.graph is not None

    @property
    def reads_queues(self) -> bool:
        """Whether an element was taken from a queue."""
        return any(taken.of is None for taken in self.taken)

    def begin(self) -> None:
        """Make operations from here on operations of the graph.

        Raises:
          ValueError: the function is called without a graph.
        """
        if self.is_closed:
            raise ValueError(_QUEUES_AND_ITERATORS.format(self.name))
        self._rest.begin()

    def begins_with(self, dataset: tf.data.Dataset) -> bool:
        """Report whether the first element was taken of this dataset."""
        return bool(self.taken) and self.taken[0].of is dataset

    def take_of(self, dataset: tf.data.Dataset) -> Any:
        """Return the next element of a dataset, as placeholders."""
        return self.take(dataset.element_spec, functools.partial(_itself, dataset), of=dataset)

    def take(
        self,
        spec: Any,
        dataset: Callable[[], tf.data.Dataset],
        sources: Sequence[Taken] = (),
        of: Any = None,
    ) -> Any:
        """Return an element of `spec`, as placeholders; the other arguments are those of `Taken`."""
        element = self._rest.placeholders(spec)
        inputs = tf.nest.flatten(element, expand_composites=True)
        self.taken.append(Taken(inputs, dataset, sources, of))
        return element

    def sources(self, result: Any) -> list[Taken]:
        """Return those of `taken` from which the tensors of `result` are computed.

        Raises:
          ValueError: they are taken from a queue that nothing fills.
        """
        running = set(self._list_running(result))
        for operation in running:
            if operation.type.startswith(("QueueDequeue", "ReaderRead")):
                raise ValueError(
                    f"{self.name}: {operation.name} ({operation.type}) waits for a queue that no QueueRunner fills "
                    "here. Return a tf.data.Dataset."
                )
        return [taken for taken in self.taken if taken.is_of(running)]

    def computed(self, result: Any, sources: Sequence[Taken], *, num_threads: int = 1) -> tf.data.Dataset:
        """Return the dataset of `result`, computed from the elements of `sources`; endless if there are no sources.

        Args:
          result: tensors in a structure that tf.data keeps as it is (`keeping_values`).
          sources: the taken elements on which `result` depends.
          num_threads: how many elements may be computed at a time, unless that changes them.
        """
        elements = tf.data.Dataset.from_tensors(0).repeat()
        if sources:
            elements = tf.data.Dataset.zip(tuple(source.dataset() for source in sources))
        running = self._list_running(result)
        function = self._build_function(result, sources, running)
        # Several threads would change the order of stateful operations, such as random ones.
        if num_threads == 1 or any(operation.op_def.is_stateful for operation in running):
            return elements.map(function)
        return elements.map(function, num_parallel_calls=num_threads, deterministic=True)

    def dataset(self, result: Any) -> tf.data.Dataset:
        """Return the dataset of what the input function returned.

        Raises:
          ValueError: an element that is taken once would be needed twice.
        """
        result = keeping_values(result)
        sources = self.sources(result)
        self._check_taken_once(sources)
        return self.computed(result, sources)

    def made(self, variant: tf.Tensor, element_spec: Any) -> tf.data.Dataset:
        """Return, for use outside of the graph, the dataset that the graph makes as its tensor `variant`."""
        graph = self._rest.graph
        (value,) = function_of_part(Part(graph, needed(graph, [variant.op]), [], [variant]))()
        return tf.data.experimental.from_variant(value, element_spec)

    def _check_taken_once(self, sources: Sequence[Taken]) -> None:
        """Check that the batch needs each element once, and mark the elements that it needs as used.

        Args:
          sources: the elements from which the batch is computed; theirs are followed as well.

        Raises:
          ValueError: an iterator gives two elements to a batch, or an element of a queue is in two batches.
        """
        iterators = [taken.of for taken in self.taken if isinstance(taken.of, _Iterator)]
        if _has_one_twice(iterators):
            raise ValueError(_TWICE.format(self.name))
        needed_elements = list(sources)
        followed_sources = set[int]()  # the places of one queue share its sources
        for taken in needed_elements:  # the loop itself adds elements to the list
            if taken.is_used:
                raise ValueError(
                    f"{self.name} uses the tensors of one read or dequeue in two batches. Each batch would read "
                    "elements of its own, and what belongs together would be separated: put all tensors into one "
                    "batch, tf.train.batch([image, label], ...)."
                )
            taken.is_used = True
            if id(taken.sources) not in followed_sources:
                followed_sources.add(id(taken.sources))
                needed_elements += taken.sources

    def _computed_leaves(self, result: Any) -> list[Any]:
        """Return the tensors of `result` that the graph computes; the others are eager tensors, arrays or the like."""
        leaves = tf.nest.flatten(result, expand_composites=True)
        return [leaf for leaf in leaves if getattr(leaf, "graph", None) is self._rest.graph]

    def _list_running(self, result: Any) -> list[tf.Operation]:
        return needed(self._rest.graph, operations(self._computed_leaves(result)))

    def _build_function(
        self, result: Any, sources: Sequence[Taken], running: Sequence[tf.Operation]
    ) -> Callable[..., Any]:
        """Return a function from the values of `sources` to `result`; it computes only what `result` depends on."""
        placeholders: list[tf.Tensor] = []
        for source in sources:
            placeholders += source.inputs
        placeholder_ids = set(map(id, placeholders))
        leaves_of_result = tf.nest.flatten(result, expand_composites=True)
        computed_leaves = [leaf for leaf in self._computed_leaves(result) if id(leaf) not in placeholder_ids]
        # Without any, nothing has to run: `result` has only elements as they were taken, and eager tensors.
        compute: Callable[..., list[tf.Tensor]] = lambda *values: []  # noqa: E731
        if computed_leaves:
            compute = function_of_part(Part(self._rest.graph, running, placeholders, computed_leaves))

        @tf.autograph.experimental.do_not_convert
        def function(*elements: Any) -> Any:
            values: list[Any] = []
            if placeholders:  # without inputs, the argument is an element of `from_tensors(0)`, which nothing needs
                values = tf.nest.flatten(elements, expand_composites=True)
            value_of = dict(zip(map(id, placeholders), values, strict=True))
            value_of |= zip(map(id, computed_leaves), compute(*values), strict=True)
            leaves = [value_of.get(id(leaf), leaf) for leaf in leaves_of_result]
            return tf.nest.pack_sequence_as(result, leaves, expand_composites=True)

        return function


_under_way: contextvars.ContextVar[InputGraph | None] = contextvars.ContextVar("input_fn", default=None)
_NO_PLACEHOLDER = "placeholder() is not compatible with eager execution"


def _build_fed_by_hooks(fn: Callable[[], Any], eager_graph: InputGraph) -> tf.data.Dataset:
    """Call an input function that builds its dataset from placeholders, and return the dataset. A hook feeds the
    placeholders once per run, when it runs the iterator's initializer.

    The whole function is called in a graph, in which variables replace the placeholders. The hook's values are assigned
    to these variables, and the dataset is built from them when its first element is requested. Before that, an
    iterator over the dataset has no state to restore.

    Raises:
      ValueError: no iterator of the function depends on its placeholders.
    """
    name = eager_graph.name
    # As in TensorFlow 1, tensors can be keys of a dict here: placeholders are those of `feed_dict`.
    with GraphFromHere() as graph_from_here, operators_of_tf1(dimensions=False):
        graph = InputGraph(graph_from_here, name, as_in_session=eager_graph.as_in_session, seed=eager_graph.seed)
        graph.begin()
        context_token = _under_way.set(graph)
        try:
            with _take_from_iterators(graph):
                result = fn()
        finally:
            _under_way.reset(context_token)
        elements = [taken for taken in graph.taken if isinstance(taken.of, _Iterator)]
        variants = [tf.data.experimental.to_variant(taken.of.dataset) for taken in elements]
    if not elements or isinstance(result, tf.data.Dataset):
        raise ValueError(
            f"{name} makes placeholders that cannot be fed, since it returns no element of an initializable iterator. "
            "Build the dataset from the arrays; or return dataset.make_initializable_iterator().get_next() and let a "
            "hook call session.run(iterator.initializer, feed_dict=...)."
        )
    for taken, variant in zip(elements, variants, strict=True):
        dataset = _build_of_what_is_fed(graph_from_here, taken.of, variant)
        taken.dataset = functools.partial(_itself, dataset)
    return graph.dataset(result)


def _build_of_what_is_fed(graph_from_here: GraphFromHere, iterator: _Iterator, variant: tf.Tensor) -> tf.data.Dataset:
    """Return a dataset that is built when its first element is requested, from the values that a hook has fed.

    The initializer of `iterator` gets the placeholders, and the variables that take their values.

    Args:
      graph_from_here: the context with the graph of the input function.
      iterator: the iterator that the function made.
      variant: the tensor of the iterator's dataset in that graph.
    """
    running = needed(graph_from_here.graph, [variant.op])
    # The graph has placeholders for captured eager tensors, too. Nobody feeds these.
    captured_ids = {id(internal) for _, internal in graph_from_here.graph.captures}
    placeholders = [operation.outputs[0] for operation in running if operation.type == "Placeholder"]
    fed = [placeholder for placeholder in placeholders if id(placeholder) not in captured_ids]
    variables = []
    for placeholder in fed:
        variable = uninitialized_variable(placeholder.op.name, placeholder.shape, placeholder.dtype, False)
        variables.append(variable)
    iterator.initializer.placeholders = list(zip(fed, variables, strict=True))
    compute = function_of_part(Part(graph_from_here.graph, running, fed, [variant]))

    @tf.autograph.experimental.do_not_convert
    def make(_: Any) -> tf.data.Dataset:
        (variant_made,) = compute(*(variable.read_value() for variable in variables))
        return tf.data.experimental.from_variant(variant_made, iterator.element_spec)

    return without_state(tf.data.Dataset.from_tensors(0).flat_map(make))


class _LateIterator(Exception):
    """Raised when an input function makes an iterator after it called `get_next` on another one, or drew."""


def _call_twice(fn: Callable[[], Any], name: str) -> tf.data.Dataset:
    """Return the dataset of an input function that makes an iterator after it called `get_next` on another one.

    The function is called once eagerly, to find the datasets over which it iterates, and once inside a `Dataset.map`
    over these datasets.
    """
    iterators: list[_Iterator] = []

    def first_element(iterator: _Iterator) -> Any:
        iterators.append(iterator)
        return next(iter(iterator.dataset))

    with _replace_iterators(first_element):
        fn()
    if _has_one_twice(iterators):
        raise ValueError(_TWICE.format(name))

    @tf.autograph.experimental.do_not_convert
    def rest(*elements: Any) -> Any:
        remaining = iter(elements)
        with _replace_iterators(lambda iterator: next(remaining)):
            return keeping_values(fn())

    return tf.data.Dataset.zip(tuple(iterator.dataset for iterator in iterators)).map(rest)


def _has_one_twice(iterators: Sequence[_Iterator]) -> bool:
    """Report whether an iterator is among `iterators` more than once."""
    return len(set(map(id, iterators))) < len(iterators)


def _take_from_iterators(graph: InputGraph, *, are_first: bool = False) -> contextlib.AbstractContextManager[None]:
    """Let `graph` take the elements of v1 iterators inside this context.

    Args:
      graph: the graph.
      are_first: raise _LateIterator if an iterator is made after an element of another one was taken.
    """

    def take(iterator: _Iterator) -> Any:
        dataset = iterator.dataset
        # Once the function has read a queue, its datasets are part of the graph, and `made` builds them outside of it.
        if not graph.reads_queues:
            return graph.take(iterator.element_spec, functools.partial(_itself, dataset), of=iterator)
        variant = tf.data.experimental.to_variant(dataset)
        return graph.take(
            iterator.element_spec, functools.partial(graph.made, variant, dataset.element_spec), of=iterator
        )

    return _replace_iterators(take, lambda: are_first and graph.has_begun and not graph.reads_queues)


def _replace_iterators(
    take: Callable[[_Iterator], Any], is_late: Callable[[], bool] = lambda: False
) -> contextlib.AbstractContextManager[None]:
    """Replace v1 iterators inside this context by ones whose `get_next` calls `take`; raise _LateIterator where one
    `is_late`.
    """

    def build(dataset: tf.data.Dataset) -> _Iterator:
        if is_late():
            raise _LateIterator
        return _Iterator(dataset, take)

    return v1.iterators_made_by(build)


def _itself(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


_QUEUES_AND_ITERATORS = (
    "{} reads from a queue after two iterators. Read from queues before the second iterator, or return a "
    "tf.data.Dataset."
)
_TWICE = (
    "{} calls get_next() twice on one iterator. Call it once and use its tensors, or return the tf.data.Dataset itself."
)


def _may_change(fn: Callable[[], Any], result: Any) -> bool:
    """Report whether the tensors that `fn` returned would have other values in the next step of a session."""
    leaves = tf.nest.flatten(result, expand_composites=True)
    if not any(tf.is_tensor(leaf) for leaf in leaves):
        return False
    try:
        graph = tf.function(lambda: tf.nest.flatten(fn()), autograph=False).get_concrete_function().graph
    except Exception:  # a function that only runs eagerly returned constants
        return False
    return any(has_effect(operation) or operation.type in KERNEL_RANDOM for operation in graph.get_operations())


def _draw_each_step(fn: Callable[[], Any]) -> tf.data.Dataset:
    """Return an endless dataset, each of whose elements is what another call of `fn` returns."""

    @tf.autograph.experimental.do_not_convert
    def draw(_: Any) -> Any:
        returned = fn()
        if isinstance(returned, list):  # (features, labels)
            return tuple(returned)
        return returned

    return tf.data.Dataset.from_tensors(0).repeat().map(draw)


class _Iterator:
    """Replaces a v1 iterator while an input function is called.

    Args:
      dataset: the dataset of the iterator.
      take: called with this object; returns the element for `get_next`.

    Attributes:
      initializer: stands for the operation that initializes the iterator in TensorFlow 1; it only receives fed values.
    """

    def __init__(self, dataset: tf.data.Dataset, take: Callable[[_Iterator], Any]) -> None:
        self.dataset = dataset
        self._take = take
        self.initializer = IteratorInitializer()
        self.element_spec = dataset.element_spec

    def get_next(self, name: str | None = None) -> Any:
        return self._take(self)

    __next__ = get_next
