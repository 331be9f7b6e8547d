"""The names of `tf.contrib.data` that tf.data.experimental does not have, and tables of `tf.contrib.lookup`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner.tf_private.v1 import lookup_tables

Apply = Callable[[Any], Any]
"""A function from dataset to dataset, for `dataset.apply`."""


def batch_and_drop_remainder(batch_size: Any) -> Apply:
    """Return a function for `dataset.apply` that calls `dataset.batch(batch_size, drop_remainder=True)`."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


def padded_batch_and_drop_remainder(batch_size: Any, padded_shapes: Any, padding_values: Any = None) -> Apply:
    """Return a function for `dataset.apply` that calls `dataset.padded_batch(..., drop_remainder=True)`."""
    return lambda dataset: dataset.padded_batch(batch_size, padded_shapes, padding_values, drop_remainder=True)


def sloppy_interleave(map_func: Callable[..., Any], cycle_length: int, block_length: int = 1) -> Apply:
    """Return `tf.data.experimental.parallel_interleave(sloppy=True)`."""
    return tf.data.experimental.parallel_interleave(map_func, cycle_length, block_length, sloppy=True)


def assert_element_shape(expected_shapes: Any) -> Apply:
    """Return a function for `dataset.apply` that checks the shapes of elements and sets them as static shapes.

    Args:
      expected_shapes: a tf.TensorShape for each component, in the structure of the elements.
    """

    def check(*components: Any) -> Any:
        element = components[0] if len(components) == 1 else components
        return tf.nest.map_structure(tf.ensure_shape, element, expected_shapes)

    return lambda dataset: dataset.map(check)


def index_table_from_tensor(mapping: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a table from the words in `mapping` to their positions; TensorFlow calls it `vocabulary_list`."""
    return lookup_tables.index_table_from_tensor(mapping, *args, **kwargs)


def index_to_string_table_from_tensor(mapping: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a table from positions to the words in `mapping`; TensorFlow calls it `vocabulary_list`."""
    return lookup_tables.index_to_string_table_from_tensor(mapping, *args, **kwargs)
