"""One dataset, read by all workers of a coordinator: ranges of batches are handed out, each of them once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "GeneratorDataset")


@dataclasses.dataclass(frozen=True)
class Spread:
    """A dataset of which every worker has a copy; as a Feed uses it in place of a tf.data.Dataset.

    Attributes:
      dataset: the coordinator's own.
      coordinator: of the workers.
      skipped: elements before the first one that is handed out.
    """

    dataset: tf.data.Dataset
    coordinator: tf.distribute.experimental.coordinator.ClusterCoordinator
    skipped: int = 0

    @property
    def element_spec(self) -> Any:
        """Of one element, as it was: what counts the elements is not seen."""
        return self.dataset.element_spec

    def cardinality(self) -> tf.Tensor:
        """Elements of the dataset, those that were skipped included."""
        return self.dataset.cardinality()

    def skip(self, count: int) -> Spread:
        """The same without its first `count` elements."""
        return dataclasses.replace(self, skipped=self.skipped + count)

    def __iter__(self) -> Ranges:
        return Ranges(self)

    def graph(self) -> tf.Tensor:
        """The dataset as a graph, from which another process makes it: string scalar."""
        ignore = tf.data.experimental.ExternalStatePolicy.IGNORE.value  # what is random may differ between workers
        variant = tf.data.experimental.to_variant(self.dataset)
        return tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore)

    def from_graph(self, graph: tf.Tensor) -> tf.data.Dataset:
        """A new dataset, whose shuffles begin anew; after those that were skipped."""
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
        return tf.data.experimental.from_variant(variant, self.element_spec).skip(self.skipped)


class Ranges:
    """An iterator over a Spread: hands out ranges of its elements.

    Attributes:
      position: the next element that nobody was given.
      workers: an iterator of (number, element) a worker; None where only this process can read the data.
    """

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.position = 0
        self.reason, self._graph = _why_here(spread)
        self.workers: Any = None
        self._here: Iterator[Any] = iter(())
        if self.reason is None:
            self.workers = iter(spread.coordinator.create_per_worker_dataset(self._numbered))
        else:
            self._here = iter(spread.dataset.skip(spread.skipped))

    def _numbered(self) -> tf.data.Dataset:
        return self.spread.from_graph(self._graph).enumerate()

    def __iter__(self) -> Ranges:
        return self

    def __next__(self) -> tuple[int, int]:
        """The range of the next element alone."""
        return self.take(1, 1)[0]

    def take(self, count: int, each: int) -> list[tuple[int, int]]:
        """Hands out the next `count` elements: (first, number) of ranges of at most `each`."""
        ends = [*range(self.position, self.position + count, each), self.position + count]
        self.position += count
        return [(first, end - first) for first, end in itertools.pairwise(ends)]

    def elements(self, count: int) -> list[Any]:
        """The next elements, read here; fewer where the data ends."""
        return list(itertools.islice(self._here, count))

    def read_again(self, first: int, count: int) -> Iterator[Any]:
        """Elements that were handed out before, read here from the beginning."""
        return iter(self.spread.from_graph(self._graph).skip(first).take(count))


def _why_here(spread: Spread) -> tuple[str | None, Any]:
    """(why workers cannot read the data by themselves, None; or None, the dataset as a graph)."""
    try:
        graph = spread.graph()
    except tf.errors.OpError as error:
        return error.message.partition("\n")[0], None
    definition = tf.compat.v1.GraphDef.FromString(graph.numpy())
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    python = next((node.op for node in nodes if node.op in _PYTHON), None)
    return (None, graph) if python is None else (f"it runs Python code ({python})", None)
