"""The names of `tf.contrib.layers` that tf_slim lacks: embeddings of sequences, and contrib's feature columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tf_slim.ops import variables

v1 = tf.compat.v1
columns = v1.feature_column


def embed_sequence(
    ids: Any,
    vocab_size: int | None = None,
    embed_dim: int | None = None,
    unique: bool = False,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
    scope: Any = None,
    reuse: Any = None,
) -> tf.Tensor:
    """Return the embeddings of `ids`, float `[..., embed_dim]`. The variable is `EmbedSequence/embeddings`.

    As in TensorFlow 1.15, contrib/layers/python/layers/encoders.py.

    Args:
      ids: integers `[...]`.
      vocab_size: number of rows of the variable; optional if the variable is reused.
      embed_dim: number of columns of the variable; optional if the variable is reused.
      unique: ignored.
      initializer: as in `tf.get_variable`.
      regularizer: as in `tf.get_variable`.
      trainable: as in `tf.get_variable`.
      scope: as in `tf.variable_scope`.
      reuse: as in `tf.variable_scope`.

    Raises:
      ValueError: the shape is missing and the variable is not reused.
    """
    del unique
    if not (reuse or (vocab_size and embed_dim)):
        raise ValueError(
            f"Must specify vocab size and embedding dimension when not reusing. Got {vocab_size=}, {embed_dim=}."
        )
    with v1.variable_scope(scope, "EmbedSequence", [ids], reuse=reuse):
        has_shape = vocab_size is not None and embed_dim is not None
        embeddings = variables.model_variable(
            "embeddings",
            shape=[vocab_size, embed_dim] if has_shape else None,
            initializer=initializer,
            regularizer=regularizer,
            trainable=trainable,
        )
        return tf.nn.embedding_lookup(embeddings, ids)


def bow_encoder(
    ids: Any,
    vocab_size: int,
    embed_dim: int,
    sparse_lookup: bool = True,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
    scope: Any = None,
    reuse: Any = None,
) -> tf.Tensor:
    """Return the mean embedding of each row of ids, float `[batch, embed_dim]`. The variable is
    `bow_encoder/embeddings`.

    As in TensorFlow 1.15, contrib/layers/python/layers/encoders.py.

    Args:
      ids: integers `[batch, length]`, dense or sparse; id 0 is padding.
      vocab_size, embed_dim: shape of the variable.
      sparse_lookup: leave padding out of the mean; False: take the mean over the whole row.
      initializer, regularizer, trainable, scope, reuse: as in `embed_sequence`.

    Raises:
      TypeError: ids are sparse and sparse_lookup is False.
    """
    with v1.variable_scope(scope, "bow_encoder", [ids], reuse=reuse):
        embeddings = variables.model_variable(
            "embeddings", shape=[vocab_size, embed_dim], initializer=initializer, regularizer=regularizer,
            trainable=trainable,
        )  # fmt: skip
        if sparse_lookup:
            sparse = ids if isinstance(ids, tf.sparse.SparseTensor) else tf.sparse.from_dense(ids)
            return v1.nn.safe_embedding_lookup_sparse([embeddings], sparse, combiner="mean", default_id=0)
        if isinstance(ids, tf.sparse.SparseTensor):
            raise TypeError(f"bow_encoder(sparse_lookup=False): ids must be a dense tensor, not {ids}.")
        return tf.reduce_mean(tf.nn.embedding_lookup(embeddings, ids), axis=1)


# --- feature columns --------------------------------------------------------------------------------------------------


def real_valued_column(
    column_name: str,
    dimension: int | None = 1,
    default_value: Any = None,
    dtype: Any = tf.float32,
    normalizer: Callable[[Any], Any] | None = None,
) -> Any:
    """Return `tf.feature_column.numeric_column`."""
    if dimension is None:
        raise ValueError(
            f"real_valued_column({column_name!r}, dimension=None): varying lengths are not supported; give a number."
        )
    return columns.numeric_column(column_name, (dimension,), default_value, dtype, normalizer)


def sparse_column_with_hash_bucket(
    column_name: str, hash_bucket_size: int, combiner: str = "sum", dtype: Any = tf.string
) -> Any:
    """Return `tf.feature_column.categorical_column_with_hash_bucket`; it uses the same hash as tf.contrib's."""
    return _with_checked_combiner(
        columns.categorical_column_with_hash_bucket(column_name, hash_bucket_size, dtype), combiner
    )


def sparse_column_with_keys(
    column_name: str, keys: Sequence[Any], default_value: int = -1, combiner: str = "sum", dtype: Any = tf.string
) -> Any:
    """Return `tf.feature_column.categorical_column_with_vocabulary_list`."""
    column = columns.categorical_column_with_vocabulary_list(column_name, tuple(keys), dtype, default_value)
    return _with_checked_combiner(column, combiner)


def sparse_column_with_vocabulary_file(
    column_name: str,
    vocabulary_file: str,
    num_oov_buckets: int = 0,
    vocab_size: int | None = None,
    default_value: int = -1,
    combiner: str = "sum",
    dtype: Any = tf.string,
) -> Any:
    """Return `tf.feature_column.categorical_column_with_vocabulary_file`."""
    default = None if num_oov_buckets else default_value
    column = columns.categorical_column_with_vocabulary_file(
        column_name, vocabulary_file, vocab_size, num_oov_buckets, default, dtype
    )
    return _with_checked_combiner(column, combiner)


def sparse_column_with_integerized_feature(
    column_name: str, bucket_size: int, combiner: str = "sum", dtype: Any = tf.int64
) -> Any:
    """Return `tf.feature_column.categorical_column_with_identity`, which requires ids below `bucket_size`."""
    del dtype  # integers of any type are cast
    return _with_checked_combiner(columns.categorical_column_with_identity(column_name, bucket_size), combiner)


def weighted_sparse_column(sparse_id_column: Any, weight_column_name: str, dtype: Any = tf.float32) -> Any:
    """Return `tf.feature_column.weighted_categorical_column`."""
    return columns.weighted_categorical_column(sparse_id_column, weight_column_name, dtype)


def crossed_column(
    columns_to_cross: Iterable[Any] | None = None, hash_bucket_size: int = 0, combiner: str = "sum",
    hash_key: int | None = None, columns: Iterable[Any] | None = None,
) -> Any:  # fmt: skip
    """Return `tf.feature_column.crossed_column`.

    As in tf.contrib, a column of words or ids is crossed by its raw feature. Bucket numbers depend on the given order
    of the columns; tf.contrib first sorted them by class and name.
    """
    features_or_columns = [getattr(column, "key", column) for column in (columns_to_cross or columns or ())]
    crossed = v1.feature_column.crossed_column(features_or_columns, hash_bucket_size, hash_key)
    return _with_checked_combiner(crossed, combiner)


def one_hot_column(sparse_id_column: Any) -> Any:
    """Return `tf.feature_column.indicator_column`."""
    return columns.indicator_column(sparse_id_column)


def embedding_column(
    sparse_id_column: Any, dimension: int, combiner: str = "mean", initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return `tf.feature_column.embedding_column`.

    As in TensorFlow 1.15's contrib/layers, initial values have the standard deviation 1 / sqrt(number of ids); that of
    tf.feature_column is 1 / sqrt(dimension).
    """
    if initializer is None:
        initializer = v1.truncated_normal_initializer(0.0, 1 / float(sparse_id_column.num_buckets) ** 0.5)
    return columns.embedding_column(sparse_id_column, dimension, combiner, initializer, *args, **kwargs)


def _with_checked_combiner(column: Any, combiner: str) -> Any:
    """Return `column` unchanged if `combiner` is "sum": columns of tf.feature_column have no combiner of their own."""
    if combiner != "sum":
        raise ValueError(
            f"combiner={combiner!r} is not supported for this column of tf.contrib.layers: pass it to "
            "embedding_column, or as sparse_combiner= to tf.estimator.LinearClassifier."
        )
    return column
