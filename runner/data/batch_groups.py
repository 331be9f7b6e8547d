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
    """The elements of some steps, as tensors of a graph.

    Attributes:
      optionals: the elements, variants of `tf.experimental.Optional` `[n]`.
      count: int32 scalar, how many of them have a value, the first ones; all of them until the data ends.
      spec: spec of an element.
      per_step: elements of a step; the last step of the data may have fewer.
    """

    optionals: tf.Tensor
    count: tf.Tensor
    spec: Any
    per_step: int

    @property
    def num_steps(self) -> tf.Tensor:
        """The number of steps that have at least one element, an int32 scalar."""
        return self.count if self.per_step == 1 else (self.count + self.per_step - 1) // self.per_step

    @property
    def is_last(self) -> tf.Tensor:
        """Whether there is a step that the data has no element for, a bool scalar."""
        return self.num_steps < tf.size(self.optionals) // self.per_step

    def elements_of(self, step: tf.Tensor) -> StepElements:
        """Return an iterator over the elements of the step at `step`, which is below `num_steps`."""
        return StepElements(self, step if self.per_step == 1 else step * self.per_step)


class StepElements:
    """Iterates over the elements of one step of a group, in the place of the run's iterator. For graphs.

    Args:
      first: index in the group of the first element, an int32 scalar.
    """

    def __init__(self, group: Group, first: tf.Tensor) -> None:
        self._group, self._next = group, first

    def __next__(self) -> Any:
        return self.get_next_as_optional().get_value()

    def get_next_as_optional(self) -> Any:
        """Return the next element as a `tf.experimental.Optional`, which has no value after the end of the data."""
        variant = self._group.optionals[self._next]
        self._next = self._next + 1
        return tf.nest.pack_sequence_as(tf.OptionalSpec(self._group.spec), [variant], expand_composites=True)


class BatchGroups:
    """The elements of the next `num_steps` steps, in groups of GROUP_SIZE, and the rest step by step. For graphs.

    A thread reads the next group while steps are taken on the current one, but never more than those elements. After
    the last group, `iterator` is where that many calls of `get_next` would leave it. So between two loops no state of
    groups must be saved.

    The thread that waits for a group reads it by plain calls (`map_in_caller`): none of TensorFlow's pool is blocked.

    Args:
      per_step: elements that a step takes.
    """

    def __init__(self, iterator: tf.data.Iterator, num_steps: tf.Tensor, per_step: int = 1) -> None:
        self._spec, self._per_step = iterator.element_spec, per_step
        steps = max(1, GROUP_SIZE // per_step)
        num_steps = tf.cast(num_steps, tf.int64)
        with tf.device("CPU:0"):
            full = _read(iterator, num_steps // steps, steps * per_step)
            rest = _read(iterator, num_steps % steps, per_step)
            self._groups = iter(full.concatenate(rest).prefetch(1).with_options(as_it_is()))

    def get_next(self) -> Group:
        """Return the next group, which may have no element. In the graph, it raises OutOfRangeError after the last
        group.
        """
        with tf.device("CPU:0"):
            optionals, count = next(self._groups)
            return Group(optionals, count, self._spec, self._per_step)


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
