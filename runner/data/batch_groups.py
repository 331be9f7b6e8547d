"""Read the next elements of an iterator in groups, so that a loop of very short steps waits only once for several of
them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from runner.data.dataset_adapter import none_spec
from runner.tf_private.datasets import as_it_is, map_in_caller

GROUP_SIZE = 16
"""Elements per group. Each `get_next` wakes another thread, which wakes the loop again: nearly half of the CPU time of
a tiny step. Groups of 4 save half of that, groups of 16 almost all (TensorFlow 2.21)."""

MAX_GROUP_BYTES = 1 << 20
"""Largest group. Up to three are in memory: the current one and two more."""

_TEXT_BYTES = 256


class Group(NamedTuple):
    """Some elements of an iterator, as tensors of a graph.

    Attributes:
      optionals: the elements, variants of `tf.experimental.Optional` `[n]`.
      count: int64 scalar, how many of them have a value, the first ones; all of them until the data ends.
      spec: spec of an element.
    """

    optionals: tf.Tensor
    count: tf.Tensor
    spec: Any

    @property
    def is_last(self) -> tf.Tensor:
        """Whether the data has ended, a bool scalar."""
        return self.count < tf.size(self.optionals)

    def element(self, index: tf.Tensor) -> Any:
        """Return the element at `index`, an integer scalar below `count`."""
        optional = tf.OptionalSpec(self.spec)
        return tf.nest.pack_sequence_as(optional, [self.optionals[index]], expand_composites=True).get_value()


class BatchGroups:
    """The next `number` elements of `iterator`, in groups of GROUP_SIZE, and the rest one by one. For graphs.

    A thread reads the next group while steps are taken on the current one, but never more than `number` elements in
    all. After the last group, `iterator` is where `number` calls of `get_next` would leave it. So between two loops no
    state of groups must be saved.

    That thread reads a group by plain calls (`map_in_caller`), so it blocks no thread of TensorFlow's pool.
    """

    def __init__(self, iterator: tf.data.Iterator, number: tf.Tensor) -> None:
        self._spec = iterator.element_spec
        number = tf.cast(number, tf.int64)
        with tf.device("CPU:0"):
            full = _read(iterator, number // GROUP_SIZE, GROUP_SIZE)
            rest = _read(iterator, number % GROUP_SIZE, 1)
            self._groups = iter(full.concatenate(rest).prefetch(1).with_options(as_it_is()))

    def get_next(self) -> Group:
        """Return the next group, which may have no element. In the graph, it raises OutOfRangeError after the last
        group.
        """
        with tf.device("CPU:0"):
            optionals, count = next(self._groups)
            return Group(optionals, count, self._spec)


def _read(iterator: tf.data.Iterator, number: tf.Tensor, size: int) -> tf.data.Dataset:
    """Return a dataset of the next `number` groups of `size` elements of `iterator`, as (optionals, count)."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        optionals = [iterator.get_next_as_optional() for _ in range(size)]
        variants = [tf.nest.flatten(one, expand_composites=True)[0] for one in optionals]
        count = tf.reduce_sum(tf.cast([one.has_value() for one in optionals], tf.int32))
        return tf.stack(variants), count

    spec = (tf.TensorSpec([size], tf.variant), tf.TensorSpec([], tf.int32))
    types, shapes = [one.dtype for one in spec], [one.shape for one in spec]
    variant = map_in_caller(tf.data.Dataset.range(number), read, types, shapes)
    return tf.data.experimental.from_variant(variant, spec)


def are_small(element_spec: Any, rows: float) -> bool:
    """Report whether groups of elements need little memory, as far as the spec tells.

    Args:
      element_spec: spec of an element.
      rows: average number of rows of an element, used if the spec does not state it.
    """
    total = 0.0
    for spec in filter(None, map(none_spec, tf.nest.flatten(element_spec))):
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            return False
        dims = [rows if place == 0 and size is None else size for place, size in enumerate(spec.shape)]
        if None in dims:
            return False
        size = float(_TEXT_BYTES if spec.dtype == tf.string else spec.dtype.size or _TEXT_BYTES)
        for dim in dims:
            size *= dim
        total += size
    return GROUP_SIZE * total <= MAX_GROUP_BYTES
