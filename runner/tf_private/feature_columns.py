"""Parts of feature columns without a public name in TensorFlow 2.21, needed because Keras 3 has no DenseFeatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

# The building blocks of feature layers, exported for Keras.
# When they move: they are in tensorflow.python.feature_column.feature_column_v2.
_fc = tf.__internal__.feature_column

DenseColumn = _fc.DenseColumn


class Columns(_fc.StateManager):  # type: ignore[name-defined]
    """The variables and tables of feature columns in one call of a model_fn.

    Args:
      make: called with (column, name of the variable) and the arguments of `tf.compat.v1.get_variable`.
    """

    def __init__(self, make: Any) -> None:
        super().__init__(layer=None, trainable=True)
        self._make = make
        self._made: dict[tuple[Any, str], Any] = {}

    def create_variable(self, feature_column: Any, name: str, shape: Any, **kwargs: Any) -> Any:
        wanted = ("dtype", "trainable", "initializer")
        arguments = {key: value for key, value in kwargs.items() if key in wanted and value is not None}
        self._made[feature_column, name] = self._make(feature_column, name, shape=shape, **arguments)
        return self._made[feature_column, name]

    def get_variable(self, feature_column: Any, name: str) -> Any:
        return self._made[feature_column, name]


def cache_of(features: Mapping[str, Any]) -> Any:
    """Return a cache that transforms each feature (name -> tensor `[batch, ...]`) once for all columns."""
    return _fc.FeatureTransformationCache(features)


def dense_tensor(column: Any, features: Mapping[str, Any]) -> tf.Tensor:
    """Return the values of a column without variables, float `[batch, ...]`."""
    return column.get_dense_tensor(cache_of(features), None)


def forget_shared_embeddings(columns: Any) -> None:
    """Make columns of `shared_embeddings` request their variable again, as each replica must do in each trace.

    Private: `SharedEmbeddingColumnCreator._embedding_weights`, which caches it by graph. When it moves: leave this out;
    a second replica then requests one variable fewer, and variable names no longer match.
    """
    for column in columns:
        creator = getattr(column, "shared_embedding_column_creator", None)
        if creator is not None:
            creator._embedding_weights.clear()
