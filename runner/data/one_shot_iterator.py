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

from runner.tf_private import v1
from runner.tf_private.random_ops import KERNEL_RANDOM
from runner.tracing.graph_operations import has_effect


def call(fn: Callable[[], Any], name: str, *, training: bool) -> Any:
    """What `fn` returns; where that is made of elements of v1 iterators, a dataset of what it makes of each.

    In training, tensors that are drawn at random (or read, or come from Python) are a dataset without end, too: a graph
    of TF 1 drew them anew for each step.

    Args:
      name: of the input function, for messages.

    Raises:
      ValueError: it takes several elements of one iterator for one batch.
    """
    taken: list[_Iterator] = []

    def take_first(iterator: _Iterator) -> Any:
        taken.append(iterator)
        return next(iter(iterator.dataset))

    with v1.iterators_made_by(lambda dataset: _Iterator(dataset, take_first)):
        result = fn()
    if isinstance(result, tf.data.Dataset):
        return result
    if not taken:
        return _drawn(fn) if training and _may_change(fn, result) else result
    if len({id(iterator) for iterator in taken}) < len(taken):
        raise ValueError(
            f"{name} calls get_next() twice on one iterator. Call it once and use its tensors, or return the "
            "tf.data.Dataset itself."
        )
    datasets = tuple(iterator.dataset for iterator in taken)

    @tf.autograph.experimental.do_not_convert
    def rest(*elements: Any) -> Any:
        remaining = iter(elements)
        with v1.iterators_made_by(lambda dataset: _Iterator(dataset, lambda iterator: next(remaining))):
            made = fn()
        return tuple(made) if isinstance(made, list) else made

    return tf.data.Dataset.zip(datasets).map(rest)


def _may_change(fn: Callable[[], Any], result: Any) -> bool:
    """Whether the tensors that `fn` returned would be others in the next step of a session."""
    if not any(tf.is_tensor(leaf) for leaf in tf.nest.flatten(result, expand_composites=True)):
        return False
    try:
        graph = tf.function(lambda: tf.nest.flatten(fn()), autograph=False).get_concrete_function().graph
    except Exception:  # what only runs eagerly gives what it gave
        return False
    return any(has_effect(operation) or operation.type in KERNEL_RANDOM for operation in graph.get_operations())


def _drawn(fn: Callable[[], Any]) -> tf.data.Dataset:
    @tf.autograph.experimental.do_not_convert
    def draw(_: Any) -> Any:
        made = fn()
        return tuple(made) if isinstance(made, list) else made

    return tf.data.Dataset.from_tensors(0).repeat().map(draw)


class _Iterator:
    """Stands for a v1 iterator; `take` gives its element.

    Attributes:
      initializer: what a graph had to run; here there is nothing to do.
    """

    def __init__(self, dataset: tf.data.Dataset, take: Callable[[_Iterator], Any]) -> None:
        self.dataset, self._take = dataset, take
        self.initializer = tf.group()
        self.element_spec = dataset.element_spec

    def get_next(self, name: str | None = None) -> Any:
        return self._take(self)

    __next__ = get_next
