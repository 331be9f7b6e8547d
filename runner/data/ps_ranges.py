"""The training data of a parameter server cluster: the coordinator hands each range of batches to one worker."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private import datasets

# A mark in resource names. Each time a dataset is opened, a number of the same length replaces it: the serialized graph
# also holds the lengths of its texts.
_OPENING = "@" * 20
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "GeneratorDataset")


@dataclasses.dataclass(frozen=True)
class PsDataset:
    """The training data of a parameter server cluster. Its InputPipeline has a PsDataset in place of a tf.data.Dataset.

    Attributes:
      datasets: one dataset, of which every worker has a copy; or one for each worker if each reads its own data.
      coordinator: the ClusterCoordinator, which creates the workers' iterators.
      skipped: number of elements to skip at the beginning, summed over all workers.
    """

    datasets: Sequence[tf.data.Dataset]
    coordinator: tf.distribute.experimental.coordinator.ClusterCoordinator
    skipped: int = 0

    @property
    def is_divided(self) -> bool:
        """Whether each worker reads its own data."""
        return len(self.datasets) > 1

    @property
    def element_spec(self) -> Any:
        """The spec of one element, as the input function returned it."""
        return self.datasets[0].element_spec

    def cardinality(self) -> tf.Tensor:
        """Return the number of elements including skipped ones, or a negative constant of tf.data: an int64 scalar."""
        found = [int(dataset.cardinality()) for dataset in self.datasets]
        number = min(found)  # negative: tf.data's INFINITE_CARDINALITY or UNKNOWN_CARDINALITY
        if number >= 0:
            number = sum(found)
        return tf.constant(number, tf.int64)

    def skip(self, count: int) -> PsDataset:
        """Return the same data without its first `count` elements. If each worker reads its own data, each skips an
        equal part of them.
        """
        return dataclasses.replace(self, skipped=self.skipped + count)

    def from_graph(self, graph: tf.Tensor) -> tf.data.Dataset:
        """Return a new dataset that begins after the skipped elements and whose shuffles start afresh.

        Args:
          graph: string `[pieces]`, the result of `_graph_of`.
        """
        microsecs = tf.cast(tf.timestamp() * 1e6, tf.int64)
        opening = tf.strings.as_string(microsecs, width=len(_OPENING), fill="0")
        # The pieces of the graph, joined by a number that is new for each opening; see `_graph_of`.
        named = graph[0] + tf.strings.reduce_join(opening + graph[1:])
        variant = tf.raw_ops.DatasetFromGraph(graph_def=named)
        dataset = tf.data.experimental.from_variant(variant, self.element_spec)
        if not self.skipped:
            return dataset
        return dataset.skip(self.skipped // len(self.datasets))


class RangeIterator:
    """Goes over a PsDataset and hands out ranges of its elements.

    Attributes:
      dataset: the data.
      reason: why the coordinator reads the data instead of the workers; None: the workers read it.
      workers: the coordinator's per-worker iterator over (number of the element, element); None if it reads the data.
      ended: the workers whose own data has ended.
      end: 1 + the largest number of an element that a worker has read: the size of the data once a worker has reached
        its end.
    """

    def __init__(self, dataset: PsDataset) -> None:
        self.dataset = dataset
        self.ended: set[int] = set()
        self.end = 0
        self._position = 0
        self.reason, self._graphs = _why_read_here(dataset)
        self.workers: Any = None
        self._here: Iterator[Any] = iter(())
        if self.reason is None:
            self.workers = iter(dataset.coordinator.create_per_worker_dataset(self._build_numbered))
        else:
            # This process reads the elements, and hands them out itself.
            self._here = itertools.chain.from_iterable(part.skip(dataset.skipped) for part in dataset.datasets)

    @tf.autograph.experimental.do_not_convert  # AutoGraph would take 0.9 s and find nothing to convert
    def _build_numbered(self) -> tf.data.Dataset:
        """Return the dataset that one worker reads; it is traced once for all workers."""
        graph = self._graphs[0]
        if self.dataset.is_divided:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            graph = tf.ragged.stack(self._graphs)[worker]  # ragged: the numbers of pieces may differ
        return self.dataset.from_graph(graph).enumerate()

    def take(self, count: int, each: int) -> list[tuple[int, int]]:
        """Hand out the next `count` elements and return them as ranges (first, count) of at most `each` elements."""
        first = self._position
        self._position += count
        bounds = [*range(first, self._position, each), self._position]
        return [(start, end - start) for start, end in itertools.pairwise(bounds)]

    def elements(self, count: int) -> tuple[int, list[Any]]:
        """Read the next `count` elements, or as many as are left, in this process.

        Returns:
          (number of the first element, list of the elements).
        """
        first = self._position
        found = list(itertools.islice(self._here, count))
        self._position += len(found)
        return first, found

    def read_again(self, first: int, count: int) -> list[Any]:
        """Return `count` elements from number `first` on, which were handed out before. This process reads the data
        again from its beginning.
        """
        return list(self.dataset.from_graph(self._graphs[0]).skip(first).take(count))


def _why_read_here(data: PsDataset) -> tuple[str | None, list[tf.Tensor]]:
    """Return (the reason why workers cannot read the data themselves, []), or (None, the datasets as graphs)."""
    if not data.is_divided:
        # A range is one of numbers, so each number must be the same element in the copies of all workers.
        reason = datasets.why_without_a_seed(data.datasets[0])
        if reason is not None:
            return reason, []
    try:
        copied = data.datasets if data.is_divided else [in_order(data.datasets[0])]
        definitions = [_graph_def_of(dataset) for dataset in copied]
    except tf.errors.OpError as error:
        return error.message.partition("\n")[0], []
    for definition in definitions:
        for node in _nodes_of(definition):
            if node.op in _PYTHON:
                return f"it runs Python code ({node.op})", []
            if not data.is_divided and "deterministic" in node.attr:
                node.attr["deterministic"].s = b"true"  # whatever the user's argument says
    return None, [_graph_of(definition) for definition in definitions]


def _nodes_of(definition: Any) -> Iterator[Any]:
    """Yield the nodes of a GraphDef and of its functions."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset whose elements do not overtake each other, but for stages with an argument that says so."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _graph_def_of(dataset: tf.data.Dataset) -> Any:
    """Return a dataset as a GraphDef. Raises: OpError: it cannot be serialized."""
    ignore = tf.data.experimental.ExternalStatePolicy.IGNORE.value  # random elements may differ between workers
    variant = tf.data.experimental.to_variant(dataset)
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore)
    return tf.compat.v1.GraphDef.FromString(graph.numpy())


def _graph_of(definition: Any) -> tf.Tensor:
    """Return the serialized graph of a dataset as strings `[pieces]`. `PsDataset.from_graph` joins them with a number
    that is new each time.

    The number becomes part of the names of the resources that count a shuffle's epochs. Under an unchanged name, these
    counters would continue where the previous dataset of this graph left them in the process. A restarted worker would
    then read another order than the others.
    """
    for node in definition.node:
        if "value" not in node.attr:  # to ask for one that is missing adds it
            continue
        for handle in node.attr["value"].tensor.resource_handle_val:
            handle.name += f"/{_OPENING}"
    return tf.constant(definition.SerializeToString().split(_OPENING.encode()))
