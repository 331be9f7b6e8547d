"""Division of the examples of one step over the replicas, in graph operations."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.data.dataset_adapter import none_spec
from runner.data.shared_stream import Stream
from runner.types import Features, Labels


class ReplicaBatch(NamedTuple):
    """The examples of one replica in one step.

    Attributes:
      features: structure of tensors as the input function returned it, each `[count, ...]`, or `[1 or more, ...]` if
        count is 0.
      labels: like `features`; None if the input has no labels.
      count: int64 scalar, the number of real examples. 0: the rows are a placeholder that must not count anywhere. A
        replica never gets a batch without rows: its mean loss would be NaN, even with weight 0.
    """

    features: Features
    labels: Labels
    count: tf.Tensor


Batches = tuple[tuple[ReplicaBatch, ...], tf.Tensor]


class Division(abc.ABC):
    """Base class: divides the elements of a dataset over the replicas.

    Attributes:
      ends_together: the data ends with a step without examples on all workers, and the iterator never ends.
      elements_per_step: number of elements that one step reads; the last step may read fewer.
    """

    ends_together: bool = False

    @property
    def elements_per_step(self) -> int:
        return 1

    @abc.abstractmethod
    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """Return (batches, number of examples): the batches of this process's replicas, in replica order, and an int64
        scalar, the real examples of this step over all replicas of all processes.

        Called in the graph, once per step.

        Args:
          element: the first element of the step, already read from `iterator`; tensors `[batch, ...]`.
          iterator: the dataset's iterator. If each replica gets its own element, more elements are read from it. These
            reads must not be pruned from the graph, even if their values are unused.
        """

    def replica_spec(self, element_spec: Any) -> Any:
        """Return the element spec (a structure of TensorSpecs and None) of one replica's batch."""
        return element_spec


@dataclasses.dataclass(frozen=True)
class SplitRows(Division):
    """Divides each element, which is a global batch, into one part of consecutive rows per replica.

    The parts are in replica order and as even as possible, larger ones first: 5 rows over 2 replicas give 3 and 2. A
    replica without rows gets row 0 with count 0.

    Attributes:
      first: index, over all replicas, of this process's first replica.
      num_replicas: number of replicas of this process.
      total: number of replicas of all processes, which all see the same elements.
    """

    first: int
    num_replicas: int
    total: int

    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """Return slices `[rows of the replica, ...]` of `element`. If there is only one replica, return `element`
        itself.
        """
        if self.total == 1:
            batch = _replica_batch(element)
            return (batch,), batch.count
        rows = num_rows(element)
        # A static batch size that divides evenly costs one aligned, copy-free slice per tensor.
        static_rows = _static_rows(element)
        if static_rows is not None and static_rows % self.total == 0:
            size = static_rows // self.total
            count = tf.constant(size, tf.int64)
            starts = [(self.first + replica) * size for replica in range(self.num_replicas)]
            parts = [_aligned_rows(element, start, start + size) for start in starts]
            return tuple(_replica_batch(part, count) for part in parts), rows
        batches = []
        for start, end, count in self._bounds(rows):
            part = _rows_between(element, start, end)
            batches.append(_replica_batch(part, count))
        return tuple(batches), rows

    def _bounds(self, rows: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """Return (first row, row after the last, examples to count) of each replica: int64 `[1]`, `[1]` and scalar."""
        replica = tf.range(self.first, self.first + self.num_replicas, dtype=tf.int64)
        starts, ends, counts = _even_parts(rows, replica, self.total)
        # `[1]` vectors, because a slice takes them directly; it would pack scalars into vectors (4 us more per step).
        split = functools.partial(tf.split, num_or_size_splits=self.num_replicas)
        return list(zip(split(starts), split(ends), tf.unstack(counts), strict=True))

    def replica_spec(self, element_spec: Any) -> Any:
        """Return the specs of one replica's part. The leading dimension is divided by `total` if it is static and
        divides evenly; else it is None.
        """
        return part_spec(element_spec, self.total)


@dataclasses.dataclass(frozen=True)
class RoundRobin(Division):
    """Gives each replica an element of its own as its batch, in replica order.

    At the end of the data, replicas without an element get the step's first one again, with count 0.

    Attributes:
      first, num_replicas: as in SplitRows.
      total: number of replicas of all processes among which the batches are dealt.
      endless: the data is known not to end, so the graph need not test for its end.
      reads_all: the dataset has the batches of all replicas, and this process reads and drops those of other processes.
        So in training every process reads the same elements, all agree where the data ends, and one iterator state fits
        any number of processes. False: the dataset has only the batches of this process's replicas.
    """

    first: int
    num_replicas: int
    total: int
    endless: bool = False
    reads_all: bool = True

    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """Give `element` to the first replica and read an element for each other replica from `iterator`."""
        batches_of_step = [_replica_batch(element)]
        for _ in range(1, self.elements_per_step):
            if self.endless:
                batches_of_step.append(_replica_batch(next(iterator)))
            else:
                batches_of_step.append(_next_or_placeholder(iterator.get_next_as_optional(), element))
        # Of all replicas' batches, those of this process; else all that were read are its own.
        first = self.first if self.reads_all else 0
        return tuple(batches_of_step[first : first + self.num_replicas]), _sum_counts(batches_of_step)

    @property
    def elements_per_step(self) -> int:
        return self.total if self.reads_all else self.num_replicas

    def first_batch(self, step: tf.Tensor) -> tf.Tensor:
        """Return the number, in the whole input, of the batch that this process's first replica gets in a step; those
        of its other replicas follow. An int64 scalar, like `step`.
        """
        return step * self.total + self.first

    def share(self, num_batches: int) -> int:
        """Return how many of the first `num_batches` batches of the whole input this process gets."""
        replicas = range(self.first, self.first + self.num_replicas)
        return sum(len(range(replica, num_batches, self.total)) for replica in replicas)

    def own(self, dataset: tf.data.Dataset, stream: Stream) -> tf.data.Dataset:
        """Return, of a dataset of all replicas' batches, those of this process's replicas; `stream` notes the first of
        all.
        """
        if self.reads_all or self.num_replicas == self.total:
            return dataset
        plain = tf.autograph.experimental.do_not_convert
        last = self.first + self.num_replicas

        def is_own(number: tf.Tensor, *_: Any) -> tf.Tensor:
            return (number % self.total >= self.first) & (number % self.total < last)

        def note_first(number: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
            stream.remember(element, when=number == 0)
            return number, element

        numbered = dataset.enumerate().map(plain(note_first))
        return numbered.filter(plain(is_own)).map(plain(lambda _, element: element))


@dataclasses.dataclass(frozen=True)
class PerWorker(Division):
    """Gives each replica of a worker the next element of the worker's own data.

    Attributes:
      num_replicas: number of replicas of this process.
      sum_over_workers: sums a tensor over all workers in the graph; a collective operation.
      full_count: examples per step over all workers if all batches are full and the data is endless. None: the examples
        of each step are counted.
      ends_together: the workers' data ends at different steps. The last part of each element then says whether the
        element is real (`sharding.train_division`).
    """

    num_replicas: int
    sum_over_workers: Callable[[tf.Tensor], tf.Tensor]
    full_count: int | None
    ends_together: bool

    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """Give `element` to the first replica and read one more element from `iterator` for each other replica."""
        others = [next(iterator) for _ in range(1, self.num_replicas)]
        batches = tuple(self._read_mark(read) for read in (element, *others))
        if self.full_count is not None:
            return batches, tf.constant(self.full_count, tf.int64)
        return batches, self.sum_over_workers(_sum_counts(batches))

    def _read_mark(self, element: tuple[Any, ...]) -> ReplicaBatch:
        """Return an element as a batch, which counts nothing if the element's mark says that it is a placeholder."""
        if not self.ends_together:
            return _replica_batch(element)
        *parts, is_real = element
        count = num_rows(parts) * tf.cast(is_real, tf.int64)
        return _replica_batch(tuple(parts), count)

    def replica_spec(self, element_spec: Any) -> Any:
        """Return `element_spec` without the last part of a marked element, which says whether it is real."""
        if self.ends_together:
            return element_spec[:-1]
        return element_spec

    @property
    def elements_per_step(self) -> int:
        return self.num_replicas


def full_rows(element_spec: Any) -> int | None:
    """Return the static leading dimension common to all tensors; None if a tensor has none, or is sparse or ragged."""
    return _static_rows(tf.nest.map_structure(none_spec, element_spec))


def any_rows(element_spec: Any) -> Any:
    """Return `element_spec` with None as the leading dimension of each spec; scalars are unchanged."""

    def without(spec: Any) -> Any:
        if not spec.shape.rank:
            return spec
        shape = tf.TensorShape([None]).concatenate(spec.shape[1:])
        return _with_shape(spec, shape)

    return _map_leaves(without, tf.nest.map_structure(none_spec, element_spec))


def micro_batch_of(batch: ReplicaBatch, index: tf.Tensor, num_micro_batches: int) -> ReplicaBatch:
    """Return micro-batch `index`, which has consecutive rows of a replica's batch.

    The sizes of micro-batches differ by at most one, larger ones first. A micro-batch without rows gets row 0 with
    count 0. Scalars are in every micro-batch, unchanged.

    Args:
      batch: the replica's batch, tensors `[count, ...]`.
      index: int64 scalar from 0 to num_micro_batches - 1.
      num_micro_batches: number of micro-batches of the batch.
    """
    start, end, count = _even_parts(batch.count, index, num_micro_batches)

    def sliced(leaf: Any) -> Any:
        if leaf.shape.rank == 0:
            return leaf
        part = _slice(leaf, start[None], end[None])
        if isinstance(leaf, tf.Tensor):
            part.set_shape(part_shape(leaf.shape, num_micro_batches))
        return part

    features = _map_leaves(sliced, batch.features)
    labels = _map_leaves(sliced, batch.labels)
    return ReplicaBatch(features, labels, count)


def micro_batch_counts(batch: ReplicaBatch, num_micro_batches: int) -> tf.Tensor:
    """Return the numbers of examples of all micro-batches, int64 `[num_micro_batches]`."""
    indices = tf.range(num_micro_batches, dtype=tf.int64)
    _, _, counts = _even_parts(batch.count, indices, num_micro_batches)
    return counts


def _even_parts(rows: tf.Tensor, index: tf.Tensor, num_parts: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return (first row, row after the last, rows to count) of part `index`: int64, shaped like `index`.

    The sizes differ by at most one, larger ones first. A part without rows gets row 0 and counts none.
    """
    smaller_count = rows // num_parts
    num_larger_parts = rows - smaller_count * num_parts
    # A part without rows starts at row 0 and has one row, which does not count.
    count = smaller_count + tf.cast(index < num_larger_parts, tf.int64)
    start = (index * smaller_count + tf.minimum(index, num_larger_parts)) * tf.minimum(count, 1)
    return start, start + tf.maximum(count, 1), count


def part_spec(specs: Any, num_parts: int) -> Any:
    """Return the specs (a structure of TensorSpecs and None) of one of `num_parts` even parts of a batch."""
    if num_parts == 1:
        return specs
    return _map_leaves(lambda spec: _with_shape(spec, part_shape(spec.shape, num_parts)), specs)


def part_shape(shape: tf.TensorShape, num_parts: int) -> tf.TensorShape:
    """Return the shape of one of `num_parts` even parts of a batch of `shape`. Its leading dimension is None unless it
    is static and divides evenly.
    """
    if shape.rank in (None, 0):
        return shape
    rows = shape[0]
    rows_of_part = None
    if rows is not None and rows % num_parts == 0:
        rows_of_part = rows // num_parts
    return tf.TensorShape([rows_of_part]) + shape[1:]


def num_rows(element: Any) -> tf.Tensor:
    """Return the number of examples of a batch, an int64 scalar: its leading dimension, or 1 if all its tensors are
    scalars.
    """
    leaves = [leaf for leaf in tf.nest.flatten(element) if leaf is not None]
    # A scalar beside batched tensors, such as a flag, says nothing about the number of rows.
    leaf = next((leaf for leaf in leaves if leaf.shape.rank != 0), None)
    if leaf is None:
        return tf.constant(1, tf.int64)
    if leaf.shape.rank is not None and leaf.shape[0] is not None:
        return tf.constant(leaf.shape[0], tf.int64)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    shape = tf.shape(leaf, out_type=tf.int64)
    if leaf.shape.rank is None:  # it may be a scalar
        shape = tf.concat([shape, [1]], 0)
    return shape[0]


def _sum_counts(batches: Sequence[ReplicaBatch]) -> tf.Tensor:
    if len(batches) == 1:
        return batches[0].count
    return tf.add_n([batch.count for batch in batches])


def _replica_batch(element: tuple[Any, ...], count: tf.Tensor | None = None) -> ReplicaBatch:
    """Return an element as a replica's batch with `count` real examples; None: all its rows are real."""
    features = element[0]
    labels = element[1] if len(element) > 1 else None
    if count is None:
        count = num_rows(element)
    return ReplicaBatch(features, labels, count)


def _next_or_placeholder(optional: Any, element: tuple[Any, ...]) -> ReplicaBatch:
    """Return the next element as a batch, or `element` with count 0 if there is none."""

    def read() -> tuple[Any, tf.Tensor]:
        following = optional.get_value()
        return following, num_rows(following)

    def stand_in() -> tuple[Any, tf.Tensor]:
        return element, tf.constant(0, tf.int64)

    found, count = tf.cond(optional.has_value(), read, stand_in)
    return _replica_batch(found, count)


def _static_rows(element: Any) -> int | None:
    """Return the static leading dimension of all dense tensors; None if one has none, or is sparse or ragged."""
    sizes = set()
    for leaf in tf.nest.flatten(element):
        if leaf is None:
            continue
        if isinstance(leaf, tf.Tensor | tf.TensorSpec) and leaf.shape.rank:
            sizes.add(leaf.shape[0])
        else:
            sizes.add(None)
    if len(sizes) != 1:
        return None
    return sizes.pop()


def _aligned_rows(element: Any, start: int, end: int) -> Any:
    """Return rows `start` to `end` of each tensor of a batch."""
    return _map_leaves(lambda leaf: leaf[start:end], element)


def _rows_between(element: Any, start: tf.Tensor, end: tf.Tensor) -> Any:
    """Return rows `start` to `end` of each tensor of a batch; both bounds are int64 `[1]`."""
    return _map_leaves(lambda leaf: _slice(leaf, start, end), element)


def _slice(leaf: Any, start: tf.Tensor, end: tf.Tensor) -> Any:
    """Return rows `start` to `end` of `leaf`; both bounds are int64 `[1]`."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[start[0] : end[0]]
    if not isinstance(leaf, tf.SparseTensor):
        return tf.strided_slice(leaf, start, end)
    rest = leaf.dense_shape[1:]
    begin = tf.concat([start, tf.zeros_like(rest)], 0)
    size = tf.concat([end - start, rest], 0)
    return tf.sparse.slice(leaf, begin, size)


def _with_shape(spec: Any, shape: tf.TensorShape) -> Any:
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype, spec.name)


def _map_leaves(fn: Any, nest: Any) -> Any:
    """Apply `fn` to every tensor or spec of a structure; None stays None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else fn(leaf), nest)
