"""Whether workers that divide the examples of one stream read it in one order.

With `shard=examples` each worker reads all of the data and takes its rows of each batch. If the order differs between
them (arrays made from a set, a shuffle by NumPy without a seed), some examples are read twice and others not at all.
So each notes a digest of a batch that it has read, the first of each loop of steps, and they compare these.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.data.dataset_adapter import tensors
from runner.distribute.collectives import Collectives
from runner.tracing.same_model import WorkersDifferError

_log = logging.getLogger(__name__)

_SAMPLED = 16
"""Number of values of each row that a digest covers."""
_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
_FACTOR = 0x5851F42D4C957F2D
"""Odd, of 63 bits: the multiplier of Knuth's MMIX generator."""


class Component(NamedTuple):
    """What a worker knows of one tensor of the batch that it has noted.

    Attributes:
      name: its place in the element.
      digest: covers the values and the order of the rows.
      tells_the_order: it holds integers or texts, and not the same in all rows: what augmentation seldom changes.
    """

    name: str
    digest: int
    tells_the_order: bool


class Stream:
    """What this process reads. This base class is for data that no other worker reads."""

    def remember(self, element: Any, when: tf.Tensor) -> None:
        """Note a batch, in the graph that reads it, if the bool scalar `when` is true."""

    def check(self) -> None:
        """Compare the batch that was noted last. All workers must call this together.

        Raises:
          WorkersDifferError: another worker has read other examples, or in another order.
        """

    def check_once(self) -> None:
        """As `check`, but only the first time that it is called."""


NOT_SHARED = Stream()


class SharedStream(Stream):
    """A stream that all workers read.

    Args:
      element_spec: the spec of a batch.
      name: the input function's name, for messages.
      block: the part of the config that the input is in, for messages.
      collectives: communication between the workers.
      why_not_repeatable: returns why the order may differ, in words; None: no reason is known.
      draws: returns whether a function of the dataset draws random numbers, so that values may differ.
    """

    def __init__(
        self,
        element_spec: Any,
        name: str,
        block: str,
        collectives: Collectives,
        why_not_repeatable: Callable[[], str | None],
        draws: Callable[[], bool],
    ) -> None:
        self._name = name
        self._block = block
        self._collectives = collectives
        self._why_not_repeatable = why_not_repeatable
        self._draws = draws
        names = {id(spec): place for place, spec in tensors(element_spec)}
        hashed = filter(_is_hashed, tf.nest.flatten(element_spec))
        self._specs = [(names[id(spec)], spec) for spec in hashed]
        self._has_warned = False
        self._is_checked = False
        with tf.init_scope(), tf.device("CPU:0"):
            # int64 [tensors, 2]: the digest of each tensor, and whether its rows differ.
            self._noted = tf.Variable(tf.zeros([len(self._specs), 2], tf.int64), trainable=False)

    def remember(self, element: Any, when: tf.Tensor) -> None:
        if not self._specs:  # all of it is ragged or sparse
            return

        def assign() -> None:
            with tf.device("CPU:0"):
                hashed = filter(_is_hashed, tf.nest.flatten(element))
                digests = [_digest(value) for value in hashed]
                self._noted.assign(tf.stack(digests), read_value=False)

        tf.cond(when, assign, lambda: None)

    def check_once(self) -> None:
        if not self._is_checked:
            self.check()

    def check(self) -> None:
        self._is_checked = True
        own = json.dumps(self._list_components())
        components_of_workers = [json.loads(text) for text in self._collectives.differing_texts(own)]
        for worker, components in enumerate(components_of_workers):
            self._compare(worker, components_of_workers[0], components)

    def _list_components(self) -> list[Component]:
        found = []
        noted = self._noted.numpy().tolist()
        for (where, spec), (digest, differs) in zip(self._specs, noted, strict=True):
            tells = bool(differs) and (spec.dtype.is_integer or spec.dtype == tf.string)
            found.append(Component(where, digest, tells))
        return found

    def _compare(self, worker: int, of_chief: Sequence[Sequence[Any]], of_worker: Sequence[Sequence[Any]]) -> None:
        """Compare what the chief and another worker have read. Warn once if nothing shows the order of the examples.

        Args:
          worker: the index of the other worker.
          of_chief, of_worker: for each tensor the values of its Component.

        Raises:
          WorkersDifferError: the order of the examples differs.
        """
        differing = []
        have_one_order = False
        for chiefs_values, workers_values in zip(of_chief, of_worker, strict=True):
            component = Component(*chiefs_values)
            if component != Component(*workers_values):
                differing.append(component.name)
            elif component.tells_the_order:
                have_one_order = True
        # Values may differ by augmentation. A tensor of equal integers or texts shows that the order is the same.
        if not differing or have_one_order:
            return
        listed = ", ".join(differing)
        why = ""
        reason = self._why_not_repeatable()
        if reason:
            why = f" ({reason})"
        if self._draws():
            # The values differ by what is drawn, so they do not tell whether the order differs, too.
            if not self._has_warned and self._collectives.is_chief:
                _log.warning(
                    "%s.shard=examples: workers read other values of %s%s, and no tensor of %s shows whether they "
                    "read the examples in one order. If not, some are read twice and others never.",
                    self._block, listed, why, self._name,
                )  # fmt: skip
            self._has_warned = True
            return
        raise WorkersDifferError(
            f"{self._block}.shard=examples: worker {worker} reads other examples than worker 0, the chief, or in "
            f"another order: {listed} of the same batch differs{why}. So some examples are read twice and others "
            f"never. Make {self._name} return one order in all processes: a seed for every shuffle, "
            "np.random.default_rng(seed), sorted(...) around a set or a listing; or divide the data by "
            "input_context with shard=input_fn, or by files."
        )


def _is_hashed(value: Any) -> bool:
    """Report whether a tensor or its spec is of values that can be compared; a ragged or sparse one is not."""
    if not isinstance(value, tf.Tensor | tf.TensorSpec):
        return False
    dtype = value.dtype
    return bool(dtype in (tf.string, tf.bool) or dtype.is_integer or dtype.is_floating)


def _digest(value: tf.Tensor) -> tf.Tensor:
    """Return int64 `[2]`: a digest of the rows of a tensor in their order, and whether the rows differ."""
    is_scalar = value.shape.rank == 0
    num_rows = 1 if is_scalar else tf.shape(value)[0]
    width = tf.size(value) // tf.maximum(num_rows, 1)  # not -1, which no reshape of 0 rows can infer
    rows = tf.reshape(value, [num_rows, width])
    stride = tf.maximum(1, tf.shape(rows)[1] // _SAMPLED)
    integers = _as_integers(rows[:, ::stride])
    row_digests = tf.reduce_sum(integers * _odd_factors(tf.shape(integers)[1]), 1)
    digest = tf.reduce_sum(row_digests * _odd_factors(tf.shape(row_digests)[0]))
    rows_differ = tf.reduce_any(row_digests != row_digests[:1])
    return tf.stack([digest, tf.cast(rows_differ, tf.int64)])


def _as_integers(values: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(values, np.iinfo(np.int64).max)
    if values.dtype.is_floating:
        values = tf.bitcast(values, _BITS[values.dtype.size])
    return tf.cast(values, tf.int64)


def _odd_factors(number: tf.Tensor) -> tf.Tensor:
    """Return int64 `[number]`, odd numbers that are all different."""
    odd_numbers = 2 * tf.range(number, dtype=tf.int64) + 1
    return odd_numbers * tf.constant(_FACTOR, tf.int64)
