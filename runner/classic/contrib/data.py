"""What `tf.contrib.data` had, and `tf.data.experimental` of TensorFlow 1.15 had not; and tables of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner.tf_private import tf_estimator

v1 = tf.compat.v1

tables = tf_estimator.lookup_tables()
"""`tf.contrib.lookup`, which had moved into TensorFlow before contrib went."""

Apply = Callable[[Any], Any]
"""Takes a dataset and returns one, for `dataset.apply`."""


def batch_and_drop_remainder(batch_size: Any) -> Apply:
    """Return `dataset.batch(batch_size, drop_remainder=True)`."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


def padded_batch_and_drop_remainder(batch_size: Any, padded_shapes: Any, padding_values: Any = None) -> Apply:
    """Return `dataset.padded_batch(..., drop_remainder=True)`."""
    return lambda dataset: dataset.padded_batch(batch_size, padded_shapes, padding_values, drop_remainder=True)


def sloppy_interleave(map_func: Callable[..., Any], cycle_length: int, block_length: int = 1) -> Apply:
    """Return `parallel_interleave(sloppy=True)`."""
    return v1.data.experimental.parallel_interleave(map_func, cycle_length, block_length, sloppy=True)


def assert_element_shape(expected_shapes: Any) -> Apply:
    """Return a dataset whose elements are checked to have shapes, which are then known."""
    return lambda dataset: dataset.map(
        lambda *element: tf.nest.map_structure(
            tf.ensure_shape, element[0] if len(element) == 1 else element, expected_shapes
        )
    )
