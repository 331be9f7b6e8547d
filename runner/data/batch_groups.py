"""Read the next elements of an iterator in groups, so that a loop of very short steps waits only once for several of
them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from runner.data.dataset_adapter import none_spec
from runner.tf_private.datasets import as_it_is, map_in_caller

GROUP_SIZE = 16
"""Elements per group. Each `get_next` wakes another thread, which then wakes the loop. This takes nearly half of the
CPU time of a tiny step. Groups of 4 save half of that, groups of 16 almost all (TensorFlow 2.21)."""

MAX_GROUP_BYTES = 1 << 20
"""Largest size of a group in bytes. Up to three groups are in memory: the current one and two more."""

_TEXT_BYTES = 256


class Group(NamedTuple):
    """The elements of several consecutive steps, as tensors of a graph.

    Attributes:
      optionals: variant `[n]`, a `tf.experimental.Optional` for each element.
      count: int32 scalar. The first `count` optionals have a value: all n, unless the data ends in this group.
      spec: spec of an element.
      per_step: elements that a step takes; the last step of the data may have fewer.
    """

    optionals: tf.Tensor
    count: tf.Tensor
    spec: Any
    per_step: int

    @property
    def num_steps(self) -> tf.Tensor:
        """The number of steps that have at least one element, an int32 scalar."""
        if self.per_step == 1:
            return self.count
        return (self.count + self.per_step - 1) // self.per_step  # rounded up

    @property
    def is_last(self) -> tf.Tensor:
        """Whether the data ends in this group, so that at least one of its steps has no element; a bool scalar."""
        return self.num_steps < tf.size(self.optionals) // self.per_step

    def elements_of(self, step: tf.Tensor) -> StepElements:
        """Return an iterator over the elements of step `step` of the group: an int32 scalar from 0 to num_steps - 1."""
        if self.per_step == 1:
            return StepElements(self, step)
        return StepElements(self, step * self.per_step)


class StepElements:
    """Iterates over the elements of one step of a group. Graph code uses it like a tf.data iterator.

    Args:
      group: the group.
      first: index of the step's first element in the group, an int32 scalar.
    """

    def __init__(self, group: Group, first: tf.Tensor) -> None:
        self._group = group
        self._next = first

    def __next__(self) -> Any:
        return self.get_next_as_optional().get_value()

    def get_next_as_optional(self) -> Any:
        """Return the next element as a `tf.experimental.Optional`, which has no value after the end of the data."""
        variant = self._group.optionals[self._next]
        self._next = self._next + 1
        spec = tf.OptionalSpec(self._group.spec)
        return tf.nest.pack_sequence_as(spec, [variant], expand_composites=True)


class BatchGroups:
    """Reads the elements of the next `num_steps` steps in full groups of GROUP_SIZE, and those left over in groups of
    one step. For use in graphs.

    A thread reads the next group while steps run on the current one, but never reads beyond the elements of
    `num_steps` steps. After the last group, `iterator` is where as many calls of `get_next` would have left it. So
    groups have no state that must be saved between two loops.

    The thread that waits for a group also reads it (`map_in_caller`), so no thread of TensorFlow's pool is blocked.

    Args:
      iterator: iterator over the training data.
      num_steps: integer scalar.
      per_step: elements that a step takes.
    """

    def __init__(self, iterator: tf.data.Iterator, num_steps: tf.Tensor, per_step: int = 1) -> None:
        self._spec = iterator.element_spec
        self._per_step = per_step
        steps_per_group = max(1, GROUP_SIZE // per_step)
        num_steps = tf.cast(num_steps, tf.int64)
        with tf.device("CPU:0"):
            full_groups = _build_groups(iterator, num_steps // steps_per_group, steps_per_group * per_step)
            groups_of_one_step = _build_groups(iterator, num_steps % steps_per_group, per_step)
            groups = full_groups.concatenate(groups_of_one_step).prefetch(1)
            self._groups = iter(groups.with_options(as_it_is()))

    def get_next(self) -> Group:
        """Return the next group, which has no element if the data has ended. The graph operation raises
        OutOfRangeError after the last group.
        """
        with tf.device("CPU:0"):
            optionals, count = next(self._groups)
            return Group(optionals, count, self._spec, self._per_step)


def _build_groups(iterator: tf.data.Iterator, number: tf.Tensor, size: int) -> tf.data.Dataset:
    """Return a dataset of the next `number` groups of `size` elements of `iterator`, as (optionals, count)."""

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)
    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        optionals = [iterator.get_next_as_optional() for _ in range(size)]
        variants = [tf.nest.flatten(optional, expand_composites=True)[0] for optional in optionals]
        have_value = [optional.has_value() for optional in optionals]
        count = tf.reduce_sum(tf.cast(have_value, tf.int32))
        return tf.stack(variants), count

    spec = (tf.TensorSpec([size], tf.variant), tf.TensorSpec([], tf.int32))
    variant = map_in_caller(tf.data.Dataset.range(number), read)
    return tf.data.experimental.from_variant(variant, spec)


def are_small(element_spec: Any, rows: float) -> bool:
    """Report whether a group of GROUP_SIZE elements is known to fit into MAX_GROUP_BYTES.

    Returns False if the spec does not show the size: unknown ranks or dimensions, sparse and ragged tensors.

    Args:
      element_spec: spec of an element.
      rows: average number of rows of an element, used if the spec does not state it.
    """
    total = 0.0
    for spec in map(none_spec, tf.nest.flatten(element_spec)):
        if spec is None:
            continue
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            return False
        dimensions: list[Any] = list(spec.shape)
        if dimensions and dimensions[0] is None:
            dimensions[0] = rows
        if None in dimensions:
            return False
        bytes_of_value = spec.dtype.size or _TEXT_BYTES
        if spec.dtype == tf.string:
            bytes_of_value = _TEXT_BYTES
        total += bytes_of_value * math.prod(dimensions)
    return GROUP_SIZE * total <= MAX_GROUP_BYTES
