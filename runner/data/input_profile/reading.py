"""Read an input by itself, and count what comes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.input_profile import timing
from runner.data.iterators import iterate
from runner.data.replica_batches import num_rows

READ_ERRORS = (tf.errors.OpError, TypeError, ValueError)
"""What an input raises when it is traced or read. What the `check` of a `Reading` raises is not among these errors."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """What was read in some seconds."""

    elements: int
    examples: int
    num_bytes: int
    secs: float


class Reading:
    """A dataset while it is read.

    Args:
      dataset: a dataset of batches, read again and again.
      check: called often; raises an exception if the work is to end.
      counts_elements_only: the elements may have any structure: neither examples nor bytes are counted.
    """

    def __init__(self, dataset: tf.data.Dataset, check: Callable[[], None], counts_elements_only: bool = False) -> None:
        if int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
            dataset = dataset.repeat()
        with tf.device("CPU:0"):
            self.iterator = iterate(dataset)
        self._check = check
        self._num_per_call = 1
        self._read = _build_reader(self.iterator, counts_elements_only)

    def read(self, secs: float) -> Speed:
        """Read for about `secs` seconds.

        Raises:
          OutOfRangeError: there are no elements.
        """
        total = np.zeros([3], np.int64)
        began = time.perf_counter()
        while True:
            self._check()
            before = time.perf_counter()
            total += self._read(tf.constant(self._num_per_call, tf.int64)).numpy()
            now = time.perf_counter()
            call_secs = now - before
            if now - began >= secs:
                elements, examples, num_bytes = map(int, total)
                return Speed(elements, examples, num_bytes, now - began)
            if call_secs < timing.CALL_SECS / 2:
                self._num_per_call *= 2
            elif call_secs > timing.CALL_SECS * 2:
                self._num_per_call = max(1, self._num_per_call // 2)

    def tuned(self) -> list[tuple[str, str, float]]:
        """Return (name of the stage, name of its parameter, value) of each value that AUTOTUNE has chosen so far."""
        try:
            nodes = tf.data.experimental.get_model_proto(self.iterator).nodes
        except tf.errors.OpError:  # autotune.enabled=false
            return []
        found = []
        for number in sorted(nodes, reverse=True):
            for parameter in nodes[number].parameters:
                if parameter.tunable:
                    found.append((nodes[number].name, parameter.name, parameter.state_value))
        return list(dict.fromkeys(found))


def _build_reader(iterator: Any, counts_elements_only: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function of a number of elements that reads so many of them and returns what it has read: int64 `[3]`,
    (elements, examples, bytes).
    """

    def read_one(left: tf.Tensor, total: tf.Tensor) -> Any:
        element = iterator.get_next()
        counted = tf.constant([1, 0, 0], tf.int64)
        if not counts_elements_only:
            counted = tf.stack([tf.constant(1, tf.int64), num_rows(element), _num_bytes(element)])
        return left - 1, total + counted

    def is_any_left(left: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return left > 0

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
    def read(number: tf.Tensor) -> tf.Tensor:
        start = (number, tf.zeros([3], tf.int64))
        # One element after the other, as the loop of steps reads them.
        _, total = tf.while_loop(is_any_left, read_one, start, parallel_iterations=1)
        return total

    return read


def _num_bytes(element: Any) -> tf.Tensor:
    """Return the size of an element in bytes, an int64 scalar: its numbers and texts, without variants."""
    sizes = [tf.constant(0, tf.int64)]
    for leaf in tf.nest.flatten(element, expand_composites=True):
        if leaf is None or leaf.dtype == tf.variant:
            continue
        if leaf.dtype == tf.string:
            lengths = tf.cast(tf.strings.length(leaf), tf.int64)
            sizes.append(tf.reduce_sum(lengths))
        else:
            sizes.append(tf.size(leaf, tf.int64) * leaf.dtype.size)
    return tf.add_n(sizes)
