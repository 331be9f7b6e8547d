"""Input functions that end in `dataset.make_one_shot_iterator().get_next()`: the dataset behind the tensors.

A graph of TF 1 gave the tensors of `get_next` new values in each step; what an input function made of them afterwards
belonged to the step, too. Here it is called twice: once eagerly, to see which datasets it takes elements of, and once
inside `Dataset.map` over these, where `get_next` gives what the map is called with. So the data has an end, a position
that a checkpoint can hold, and can be divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner import v1_bridge


def call(fn: Callable[[], Any], name: str) -> Any:
    """What `fn` returns; where that is made of elements of v1 iterators, a dataset of what it makes of each.

    Args:
      name: of the input function, for messages.

    Raises:
      ValueError: it takes several elements of one iterator for one batch.
    """
    taken: list[_Iterator] = []
    with v1_bridge.iterators_made_by(lambda dataset: _Iterator(dataset, taken)):
        result = fn()
    if not taken or isinstance(result, tf.data.Dataset):
        return result
    twice = len({id(iterator) for iterator in taken}) < len(taken)
    if twice:
        raise ValueError(
            f"{name} calls get_next() twice on one iterator. Call it once and use its tensors, or return the "
            "tf.data.Dataset itself."
        )
    datasets = tuple(iterator.dataset for iterator in taken)

    @tf.autograph.experimental.do_not_convert
    def rest(*elements: Any) -> Any:
        remaining = iter(elements)
        with v1_bridge.iterators_made_by(lambda dataset: _Replaying(dataset, remaining)):
            made = fn()
        return made if isinstance(made, tuple) else (tuple(made) if isinstance(made, list) else made)

    return tf.data.Dataset.zip(datasets).map(rest)


class _Iterator:
    """Stands for a v1 iterator; notes that an element is taken of it.

    Attributes:
      initializer: what a graph had to run; here there is nothing to do.
    """

    def __init__(self, dataset: tf.data.Dataset, taken: list[_Iterator]) -> None:
        self.dataset, self._taken = dataset, taken
        self.initializer = tf.group()
        self.element_spec = dataset.element_spec

    def get_next(self, name: str | None = None) -> Any:
        """The first element."""
        self._taken.append(self)
        return next(iter(self.dataset))

    __next__ = get_next


class _Replaying:
    """Stands for a v1 iterator inside the map: its element is what the map is called with."""

    def __init__(self, dataset: tf.data.Dataset, remaining: Any) -> None:
        self._remaining = remaining
        self.initializer = tf.group()
        self.element_spec = dataset.element_spec

    def get_next(self, name: str | None = None) -> Any:
        return next(self._remaining)

    __next__ = get_next
