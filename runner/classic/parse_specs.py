"""What tf.io.parse_example needs to know to read the features, label and weight of a premade estimator."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def classifier_parse_example_spec(
    feature_columns: Any,
    label_key: str,
    label_dtype: tf.DType = tf.int64,
    label_default: Any = None,
    weight_column: Any = None,
) -> dict[str, Any]:
    """Key -> how it is read, for a classifier.

    Args:
      label_dtype: int64 for ids, string for entries of a vocabulary.
      label_default: of examples without one; None: they are an error.
      weight_column: key of a feature, or numeric_column.

    Raises: ValueError: label or weight is a feature, too.
    """
    return _spec(feature_columns, label_key, (1,), label_dtype, label_default, weight_column)


def regressor_parse_example_spec(
    feature_columns: Any,
    label_key: str,
    label_dtype: tf.DType = tf.float32,
    label_default: Any = None,
    label_dimension: int = 1,
    weight_column: Any = None,
) -> dict[str, Any]:
    """Key -> how it is read, for a regressor. Args: see `classifier_parse_example_spec` and RegressionHead."""
    return _spec(feature_columns, label_key, (label_dimension,), label_dtype, label_default, weight_column)


def _spec(
    feature_columns: Any, label_key: str, shape: tuple[int, ...], dtype: tf.DType, default: Any, weight_column: Any
) -> dict[str, Any]:
    spec: dict[str, Any] = dict(tf.feature_column.make_parse_example_spec(feature_columns))
    _check_new(spec, label_key, "label_key")
    spec[label_key] = tf.io.FixedLenFeature(shape, dtype, default)
    if weight_column is None:
        return spec
    if isinstance(weight_column, str):
        weight_column = tf.feature_column.numeric_column(weight_column)
    if not hasattr(weight_column, "normalizer_fn"):
        raise ValueError(f"weight_column is a key or a numeric_column, not {type(weight_column).__name__}.")
    _check_new(spec, weight_column.key, "weight_column")
    return {**spec, **weight_column.parse_example_spec}


def _check_new(spec: dict[str, Any], key: str, what: str) -> None:
    if key in spec:
        raise ValueError(f"{what}={key!r} is read as a feature already: {', '.join(spec)}.")
