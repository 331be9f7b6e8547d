"""Data that all workers of a coordinator read: ranges of batches are handed out, each of them once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

_OPENING = "@" * 20  # it is as long as the number that takes its place: lengths are part of what is serialized
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "GeneratorDataset")


@dataclasses.dataclass(frozen=True)
class PsDataset:
    """What workers train on; an InputPipeline has it in place of a tf.data.Dataset.

    Attributes:
      datasets: one, of which every worker has a copy; or one for each worker, where they divide the data themselves.
      coordinator: of the workers.
      skipped: elements before the first one that is handed out, those of all workers together.
    """

    datasets: Sequence[tf.data.Dataset]
    coordinator: tf.distribute.experimental.coordinator.ClusterCoordinator
    skipped: int = 0

    @property
    def is_divided(self) -> bool:
        """Whether each worker reads data of its own."""
        return len(self.datasets) > 1

    @property
    def element_spec(self) -> Any:
        """Of one element, as the input function gave it."""
        return self.datasets[0].element_spec

    def cardinality(self) -> tf.Tensor:
        """Elements of the data, those that were skipped included, as tf.data tells it."""
        found = [int(dataset.cardinality()) for dataset in self.datasets]
        special = min(found)  # infinite, unknown
        return tf.constant(special if special < 0 else sum(found), tf.int64)

    def skip(self, count: int) -> PsDataset:
        """The same without its first `count` elements; where workers have data of their own, each its part of that."""
        return dataclasses.replace(self, skipped=self.skipped + count)

    def __iter__(self) -> RangeIterator:
        return RangeIterator(self)

    def from_graph(self, graph: tf.Tensor) -> tf.data.Dataset:
        """A new dataset, whose shuffles begin anew; after those elements that were skipped.

        Args:
          graph: `[pieces]` strings, of `_graph_of`.
        """
        opening = tf.strings.as_string(tf.cast(tf.timestamp() * 1e6, tf.int64), width=len(_OPENING), fill="0")
        named = graph[0] + tf.strings.reduce_join(opening + graph[1:])
        variant = tf.raw_ops.DatasetFromGraph(graph_def=named)
        dataset = tf.data.experimental.from_variant(variant, self.element_spec)
        return dataset.skip(self.skipped // len(self.datasets)) if self.skipped else dataset


class RangeIterator:
    """An iterator over a PsDataset, which hands out ranges of its elements.

    Attributes:
      dataset: what is read.
      reason: why workers cannot read it themselves; None: they do.
      workers: of the coordinator's kind, an iterator over (number, element) for each worker.
      ended: workers whose own data has come to its end.
      end: the number after the last element that a worker has seen; where one has come to the end, that is all of them.
    """

    def __init__(self, dataset: PsDataset) -> None:
        self.dataset = dataset
        self.ended: set[int] = set()
        self.end = 0
        self._position = 0
        self.reason, self._graphs = _why_here(dataset)
        self.workers: Any = None
        self._here: Iterator[Any] = iter(())
        if self.reason is None:
            self.workers = iter(dataset.coordinator.create_per_worker_dataset(self._numbered))
        else:
            self._here = itertools.chain.from_iterable(one.skip(dataset.skipped) for one in dataset.datasets)

    def __iter__(self) -> RangeIterator:
        return self

    def __next__(self) -> tuple[int, int]:
        """The range of the next element alone."""
        return self.take(1, 1)[0]

    @tf.autograph.experimental.do_not_convert  # there is nothing in it to convert, which takes 0.9 s
    def _numbered(self) -> tf.data.Dataset:
        """What one worker reads; traced for all of them."""
        graph = self._graphs[0]
        if self.dataset.is_divided:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            graph = tf.ragged.stack(self._graphs)[worker]
        return self.dataset.from_graph(graph).enumerate()

    def take(self, count: int, each: int) -> list[tuple[int, int]]:
        """Hands out the next `count` elements: (first, number) of ranges of at most `each`."""
        ends = [*range(self._position, self._position + count, each), self._position + count]
        self._position += count
        return [(first, end - first) for first, end in itertools.pairwise(ends)]

    def elements(self, count: int) -> tuple[int, list[Any]]:
        """(the number of the first, the next elements, read here); fewer where the data ends."""
        first, found = self._position, list(itertools.islice(self._here, count))
        self._position += len(found)
        return first, found

    def read_again(self, first: int, count: int) -> list[Any]:
        """Elements that were handed out before, read here from the beginning."""
        return list(self.dataset.from_graph(self._graphs[0]).skip(first).take(count))


def _why_here(data: PsDataset) -> tuple[str | None, list[tf.Tensor]]:
    """(why workers cannot read the data by themselves, nothing), or (None, the datasets as graphs)."""
    try:
        definitions = [_definition(dataset) for dataset in data.datasets]
    except tf.errors.OpError as error:
        return error.message.partition("\n")[0], []
    for definition in definitions:
        nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
        python = next((node.op for node in nodes if node.op in _PYTHON), None)
        if python is not None:
            return f"it runs Python code ({python})", []
    return None, [_graph_of(definition) for definition in definitions]


def _definition(dataset: tf.data.Dataset) -> Any:
    ignore = tf.data.experimental.ExternalStatePolicy.IGNORE.value  # what is random may differ between workers
    variant = tf.data.experimental.to_variant(dataset)
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore)
    return tf.compat.v1.GraphDef.FromString(graph.numpy())


def _graph_of(definition: Any) -> tf.Tensor:
    """The serialized graph of a dataset, cut where a number of its opening belongs.

    The graph names the resources that count the epochs of a shuffle. Under the same name they would go on, in each
    process, where the last dataset of this graph left them: another order than that of a worker that was started again.
    """
    for node in definition.node:
        for handle in node.attr["value"].tensor.resource_handle_val if "value" in node.attr else ():
            handle.name += f"/{_OPENING}"
    return tf.constant(definition.SerializeToString().split(_OPENING.encode()))
