"""How the examples of one step are divided over the replicas. In graph; nothing here reads or batches."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.data.dataset_adapter import none_spec
from runner.types import Features, Labels


class ReplicaBatch(NamedTuple):
    """What one replica gets in one step.

    Attributes:
      features: the nest that the input function gave, `[count, ...]`; `[1 or more, ...]` where count is 0.
      labels: like features; None where the input has none.
      count: int64 scalar, the real examples in it. 0: a placeholder, which must not count anywhere (no replica is
        given an empty batch: a mean over nothing is NaN, and 0 x NaN is NaN).
    """

    features: Features
    labels: Labels
    count: tf.Tensor


Batches = tuple[tuple[ReplicaBatch, ...], tf.Tensor]


class Division(abc.ABC):
    """One way to divide the elements of a dataset over the replicas.

    Attributes:
      ends_together: the end of the data is a step of no examples on all workers, and no end of the iterator.
      divides_batches: several replicas get examples of one batch of the input function.
      elements_per_step: elements of the dataset that one step reads, the last one perhaps fewer.
    """

    ends_together: bool = False

    @property
    def divides_batches(self) -> bool:
        return False

    @property
    def elements_per_step(self) -> int:
        return 1

    @abc.abstractmethod
    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """Return the batches of this process's replicas, in replica order, and how many examples the step has.

        Called in graph, once a step. The number is an int64 scalar: real examples over all replicas of all processes.

        Args:
          element: the first element of the step, which the caller pulled from `iterator`.
          iterator: of the dataset; more is pulled from it where the replicas take batches in turn. These pulls must not
            be pruned, even where their value is not used.
        """

    def replica_spec(self, element_spec: Any) -> Any:
        """Return `element_spec` (a nest of TensorSpecs and None) as one replica sees it."""
        return element_spec


@dataclasses.dataclass(frozen=True)
class SplitRows(Division):
    """Each element is a global batch; every replica gets a run of its rows.

    The rows are contiguous, in replica order and as even as can be, the longer runs first: 5 rows over 2 are 3 + 2.
    A replica for which none is left gets row 0, count 0.

    Attributes:
      first: which of all replicas is the first of this process.
      num_replicas: replicas of this process.
      total: replicas of all processes, which see the same element each.
    """

    first: int
    num_replicas: int
    total: int

    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """Return slices of `element`; with one replica the element as it is and no op but its count."""
        if self.total == 1:
            batch = _replica_batch(element)
            return (batch,), batch.count
        rows = num_rows(element)
        # The clearest case first: a batch with a static size that divides costs one aligned (copy-free) slice a tensor.
        static = _static_rows(element)
        if static is not None and static % self.total == 0:
            size = static // self.total
            count = tf.constant(size, tf.int64)
            starts = [(self.first + i) * size for i in range(self.num_replicas)]
            batches = [_replica_batch(_map_leaves(lambda x, s=s: x[s : s + size], element), count) for s in starts]
        else:
            batches = [
                _replica_batch(_map_leaves(lambda x, s=start, e=end: _slice(x, s, e), element), count)
                for start, end, count in self._bounds(rows)
            ]
        return tuple(batches), rows

    def _bounds(self, rows: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
        """(first row, row after the last, examples to count) of each replica: int64 `[1]`, `[1]` and scalar."""
        replica = tf.range(self.first, self.first + self.num_replicas, dtype=tf.int64)
        starts, ends, counts = _even_parts(rows, replica, self.total)
        # As [1] vectors a slice takes them as they are; from scalars each slice would pack its own (4 us a step more).
        split = functools.partial(tf.split, num_or_size_splits=self.num_replicas)
        return list(zip(split(starts), split(ends), tf.unstack(counts), strict=True))

    def replica_spec(self, element_spec: Any) -> Any:
        """The specs with the leading dimension divided where it is static and divides, else None."""
        return part_spec(element_spec, self.total)

    @property
    def divides_batches(self) -> bool:
        return self.total > 1


@dataclasses.dataclass(frozen=True)
class RoundRobin(Division):
    """Each element is one replica's batch; the replicas take them in replica order.

    At the end of the data those without one get the step's first element again, count 0.

    Attributes:
      first, num_replicas: as in SplitRows.
      total: replicas that take from this data. Those of other processes are taken and dropped: each of them
        goes through the same data, so all agree where it ends, and one iterator state serves any number of processes.
      endless: the data is known not to end, which saves the test.
    """

    first: int
    num_replicas: int
    total: int
    endless: bool = False

    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """`element` is that of replica 0; pulls `total - 1` more from `iterator`."""
        every = [_replica_batch(element)]
        for _ in range(1, self.total):
            if self.endless:
                every.append(_replica_batch(next(iterator)))
            else:
                every.append(_next_or_placeholder(iterator.get_next_as_optional(), element))
        last = self.first + self.num_replicas
        return tuple(every[self.first : last]), _total(every)

    @property
    def elements_per_step(self) -> int:
        return self.total


@dataclasses.dataclass(frozen=True)
class PerWorker(Division):
    """Each worker has data of its own; an element is the batch of one of its replicas, which take them in turn.

    Attributes:
      num_replicas: of this process.
      sum_over_workers: of a tensor, in graph; all workers take part in it.
      full_count: examples of each step over all workers, where all batches are full and nobody comes to an end. None:
        they are added up in each step.
      ends_together: workers come to their end at different steps. The elements then say in a last part whether they are
        real (`sharding.train_division`).
    """

    num_replicas: int
    sum_over_workers: Callable[[tf.Tensor], tf.Tensor]
    full_count: int | None
    ends_together: bool

    def replica_batches(self, element: tuple[Any, ...], iterator: Any) -> Batches:
        """`element` is that of the first replica; pulls one more for each other replica from `iterator`."""
        elements = [element, *(next(iterator) for _ in range(1, self.num_replicas))]
        batches = tuple(self._marked_batch(one) for one in elements)
        if self.full_count is not None:
            return batches, tf.constant(self.full_count, tf.int64)
        return batches, self.sum_over_workers(_total(batches))

    def _marked_batch(self, element: tuple[Any, ...]) -> ReplicaBatch:
        if not self.ends_together:
            return _replica_batch(element)
        *parts, is_real = element
        return _replica_batch(tuple(parts), num_rows(parts) * tf.cast(is_real, tf.int64))

    def replica_spec(self, element_spec: Any) -> Any:
        """The specs as they are, without that of what says whether an element is real."""
        return element_spec[:-1] if self.ends_together else element_spec

    @property
    def elements_per_step(self) -> int:
        return self.num_replicas


def full_rows(element_spec: Any) -> int | None:
    """The leading dimension that all parts of an element state; None where one does not, or is sparse or ragged."""
    return _static_rows(tf.nest.map_structure(none_spec, element_spec))


def any_rows(element_spec: Any) -> Any:
    """`element_spec` without the leading dimensions."""

    def without(spec: Any) -> Any:
        return spec if not spec.shape.rank else _with_shape(spec, tf.TensorShape([None]).concatenate(spec.shape[1:]))

    return _map_leaves(without, tf.nest.map_structure(none_spec, element_spec))


def micro_batch_of(batch: ReplicaBatch, index: tf.Tensor, num_micro_batches: int) -> ReplicaBatch:
    """Return micro-batch `index` of `num_micro_batches` of a replica's batch: consecutive rows, sizes that differ by
    one at most, the longer ones first.

    A part for which no row is left has row 0 and count 0. Scalars are in every part as they are.
    """
    start, end, count = _even_parts(batch.count, index, num_micro_batches)

    def sliced(leaf: Any) -> Any:
        if leaf.shape.rank == 0:
            return leaf
        part = _slice(leaf, start[None], end[None])
        if isinstance(leaf, tf.Tensor):
            part.set_shape(part_shape(leaf.shape, num_micro_batches))
        return part

    features, labels = _map_leaves(sliced, batch.features), _map_leaves(sliced, batch.labels)
    return ReplicaBatch(features, labels, count)


def _even_parts(rows: tf.Tensor, index: tf.Tensor, num_parts: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return (first row, row after the last, rows to count) of the part `index`: int64, shaped like `index`.

    Sizes differ by one at most, the longer ones first. A part for which no row is left is row 0, and counts none.
    """
    each = rows // num_parts
    extra = rows - each * num_parts
    count = each + tf.cast(index < extra, tf.int64)
    start = (index * each + tf.minimum(index, extra)) * tf.minimum(count, 1)
    return start, start + tf.maximum(count, 1), count


def part_spec(specs: Any, num_parts: int) -> Any:
    """Return a nest of TensorSpecs and None as each of the even parts sees it."""
    if num_parts == 1:
        return specs
    return _map_leaves(lambda spec: _with_shape(spec, part_shape(spec.shape, num_parts)), specs)


def part_shape(shape: tf.TensorShape, num_parts: int) -> tf.TensorShape:
    """Return `shape` with its leading dimension divided where it is static and divides, else None."""
    if shape.rank in (None, 0):
        return shape
    rows = shape[0]
    return tf.TensorShape([rows // num_parts if rows is not None and rows % num_parts == 0 else None]) + shape[1:]


def num_rows(element: Any) -> tf.Tensor:
    """The examples of a batch, an int64 scalar: its leading dimension, or 1 where every tensor of it is a scalar."""
    leaves = [leaf for leaf in tf.nest.flatten(element) if leaf is not None]
    # A scalar beside batched tensors (a flag, say) does not tell the number of rows.
    leaf = next((leaf for leaf in leaves if leaf.shape.rank != 0), None)
    if leaf is None:
        return tf.constant(1, tf.int64)
    if leaf.shape.rank is not None and leaf.shape[0] is not None:
        return tf.constant(leaf.shape[0], tf.int64)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def _total(batches: Sequence[ReplicaBatch]) -> tf.Tensor:
    return tf.add_n([batch.count for batch in batches]) if len(batches) > 1 else batches[0].count


def _replica_batch(element: tuple[Any, ...], count: tf.Tensor | None = None) -> ReplicaBatch:
    """Return an element as the batch of a replica. Args: count: of its real examples; None: all its rows."""
    return ReplicaBatch(
        element[0], element[1] if len(element) > 1 else None, num_rows(element) if count is None else count
    )


def _next_or_placeholder(optional: Any, element: tuple[Any, ...]) -> ReplicaBatch:
    def real() -> tuple[Any, tf.Tensor]:
        pulled = optional.get_value()
        return pulled, num_rows(pulled)

    pulled, count = tf.cond(optional.has_value(), real, lambda: (element, tf.constant(0, tf.int64)))
    return _replica_batch(pulled, count)


def _static_rows(element: Any) -> int | None:
    """The leading dimension that all dense tensors state; None where one does not, or is sparse or ragged."""
    rows = {
        leaf.shape[0] if isinstance(leaf, tf.Tensor | tf.TensorSpec) and leaf.shape.rank else None
        for leaf in tf.nest.flatten(element)
        if leaf is not None
    }
    return rows.pop() if len(rows) == 1 else None


def _slice(leaf: Any, start: tf.Tensor, end: tf.Tensor) -> Any:
    """The rows of `leaf` from `start` up to `end`, both int64 `[1]`."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[start[0] : end[0]]
    if not isinstance(leaf, tf.SparseTensor):
        return tf.strided_slice(leaf, start, end)
    rest = leaf.dense_shape[1:]
    return tf.sparse.slice(leaf, tf.concat([start, tf.zeros_like(rest)], 0), tf.concat([end - start, rest], 0))


def _with_shape(spec: Any, shape: tf.TensorShape) -> Any:
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype, spec.name)


def _map_leaves(fn: Any, nest: Any) -> Any:
    """`fn` of every tensor or spec; None stays None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else fn(leaf), nest)
