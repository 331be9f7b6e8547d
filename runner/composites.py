"""Sparse and ragged tensors and IndexedSlices as hooks fetch and feed them: in the tensors that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

v1 = tf.compat.v1


class IndexedSlicesValue(NamedTuple):
    """What a session gave for `tf.IndexedSlices`."""

    values: Any
    indices: Any
    dense_shape: Any


def flat_parts(fetch: Any) -> list[Any]:
    """The tensors of a sparse or ragged tensor, or of IndexedSlices; of anything else itself."""
    made = _made_of(fetch)
    return [fetch] if made is None else [one for part in made[1] for one in flat_parts(part)]


def value_of(fetch: Any, values: Iterator[Any]) -> Any:
    """What a session gives for `fetch`, whose `flat_parts` have the next of `values`."""
    made = _made_of(fetch)
    if made is None:
        return next(values)
    kind, parts = made
    return kind(*(value_of(part, values) for part in parts))


def flat_feeds(key: Any, value: Any) -> list[tuple[Any, Any]]:
    """(placeholder, value) of what is fed for `key`: for a sparse one a tuple of indices, values and shape."""
    if not isinstance(key, tf.SparseTensor):
        return [(key, value)]
    given = (value.indices, value.values, value.dense_shape) if isinstance(value, tf.SparseTensor) else value
    return list(zip((key.indices, key.values, key.dense_shape), given, strict=True))


def _made_of(fetch: Any) -> tuple[Callable[..., Any], list[Any]] | None:
    """(what makes its value, what of)."""
    if isinstance(fetch, tf.SparseTensor):
        return v1.SparseTensorValue, [fetch.indices, fetch.values, fetch.dense_shape]
    if isinstance(fetch, tf.RaggedTensor):
        return v1.ragged.RaggedTensorValue, [fetch.values, fetch.row_splits]
    if not isinstance(fetch, tf.IndexedSlices):
        return None
    if fetch.dense_shape is None:
        return lambda values, indices: IndexedSlicesValue(values, indices, None), [fetch.values, fetch.indices]
    return IndexedSlicesValue, [fetch.values, fetch.indices, fetch.dense_shape]
