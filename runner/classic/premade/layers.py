"""The layers of premade estimators: functions whose tf.compat.v1 variables have the names of tf.estimator.

These are not Keras layers, because Keras 3 has no feature columns and would give the variables other names.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private import feature_columns
from runner.tf_private.tf_estimator import static_size

v1 = tf.compat.v1


def sorted_columns(columns: Any, what: str = "feature_columns") -> list[Any]:
    """Return feature columns sorted by name, the order in which their values are concatenated.

    Args:
      columns: a feature column, several, or a dict of them.
      what: name of the argument that has them, for messages.

    Raises:
      ValueError: there are none, two have the same name, or one is not a feature column.
    """
    columns = list(columns.values()) if isinstance(columns, Mapping) else _as_list(columns)
    no_columns = [column for column in columns if not hasattr(column, "parse_example_spec")]
    if no_columns:
        raise ValueError(f"{what}: {no_columns[0]!r} is not a feature column; make one with tf.feature_column.*.")
    if not columns:
        raise ValueError(f"{what} is empty: the model needs at least one feature column.")
    names = [column.name for column in columns]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{what}: several columns have the name {', '.join(repeated)}; each must have its own.")
    return sorted(columns, key=lambda column: column.name)


def dense_features(features: Any, columns: Any, *, scope: str) -> tf.Tensor:
    """Return the values of all columns, concatenated: float32 `[batch, sum of the columns' sizes]`.

    Args:
      features: name -> tensor `[batch, ...]`, dense or sparse.
      columns: dense columns: numeric, bucketized, indicators, embeddings, shared embeddings.
      scope: variables are named `<scope>/<column>/embedding_weights`.

    Raises:
      ValueError: a column is not dense, or features are not a dict.
    """
    features = checked_features(features)
    columns = sorted_columns(columns)
    state = _variables_in(scope)
    cache = feature_columns.cache_of(features)
    parts = []
    for column in columns:
        if not isinstance(column, feature_columns.DenseColumn):
            raise ValueError(
                f"the column {column.name!r} is categorical, but a network needs dense columns. "
                "Put tf.feature_column.embedding_column or indicator_column around it."
            )
        column.create_state(state)
        values = column.get_dense_tensor(cache, state)
        parts.append(tf.reshape(values, [tf.shape(values)[0], column.variable_shape.num_elements()]))
    return tf.concat(parts, -1)


def linear_sum(
    features: Any, columns: Any, *, units: int, scope: str, sparse_combiner: str
) -> tuple[tf.Tensor, list[tf.Variable]]:
    """Return (logits, variables) of a linear model: float32 `[batch, units]`, and the weights of each column followed
    by the bias.

    Args:
      features: name -> tensor `[batch, ...]`, dense or sparse.
      columns: dense and categorical columns.
      units: number of logits.
      scope: variables are named `<scope>/<column>/weights` and `<scope>/bias_weights`, and start from 0.
      sparse_combiner: how to combine the weights of several values of a categorical column: sum, mean or sqrtn.
    """
    features = checked_features(features)
    columns = sorted_columns(columns)
    state = _variables_in(scope)
    cache = feature_columns.cache_of(features)
    sums = []
    weights = []
    for column in columns:
        column.create_state(state)
        is_categorical = hasattr(column, "num_buckets")
        size = column.num_buckets if is_categorical else column.variable_shape.num_elements()
        weight = state.create_variable(
            column, "weights", shape=(size, units), dtype=tf.float32, initializer=v1.zeros_initializer()
        )
        weights.append(weight)
        if is_categorical:
            sums.append(_combined_weights(column.get_sparse_tensors(cache, state), weight, sparse_combiner))
        else:
            values = column.get_dense_tensor(cache, state)
            sums.append(tf.matmul(tf.reshape(values, [tf.shape(values)[0], size]), weight))
    bias = variable(f"{scope}/bias_weights", [units], v1.zeros_initializer())
    return tf.nn.bias_add(tf.add_n(sums), bias), [*weights, bias]


def dense(x: tf.Tensor, units: int, *, scope: str, activation: Callable[[tf.Tensor], tf.Tensor] | None = None) -> Any:
    """Return the output of a dense layer, float32 `[batch, units]`.

    Args:
      x: float32 `[batch, inputs]`.
      units: size of the output.
      scope: the variables are `<scope>/kernel` and `<scope>/bias`.
      activation: applied to the output; None: no activation.
    """
    kernel = variable(f"{scope}/kernel", [static_size(x, -1), units], v1.glorot_uniform_initializer())
    bias = variable(f"{scope}/bias", [units], v1.zeros_initializer())
    y = tf.nn.bias_add(tf.matmul(x, kernel), bias)
    return y if activation is None else activation(y)


def batch_norm(x: tf.Tensor, *, scope: str, training: bool, momentum: float = 0.999) -> tuple[tf.Tensor, list[Any]]:
    """Return (normalized `x`, operations that update the moving averages).

    Args:
      x: float32 `[batch, units]`.
      scope: the variables are `<scope>/gamma`, `beta`, `moving_mean` and `moving_variance`.
      training: normalize by the mean and variance of the batch; False: by the moving averages, without updates.
      momentum: share of the old value in a moving average.
    """
    size = [static_size(x, -1)]
    gamma = tf.convert_to_tensor(variable(f"{scope}/gamma", size, v1.ones_initializer()))
    beta = tf.convert_to_tensor(variable(f"{scope}/beta", size, v1.zeros_initializer()))
    # As in tf.layers, moving averages are not divided into parts.
    with divided_by(None):
        make_average = functools.partial(variable, trainable=False, aggregation=tf.VariableAggregation.MEAN)
        moving_mean = make_average(f"{scope}/moving_mean", size, v1.zeros_initializer())
        moving_variance = make_average(f"{scope}/moving_variance", size, v1.ones_initializer())
    updates: list[Any] = []
    mean = tf.convert_to_tensor(moving_mean)
    variance = tf.convert_to_tensor(moving_variance)
    if training:
        mean, variance = tf.nn.moments(x, [0])
        for average, value_of_batch in ((moving_mean, mean), (moving_variance, variance)):
            updates.append(average.assign(average * momentum + value_of_batch * (1 - momentum)))
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3), updates


def variable(name: str, shape: Sequence[Any], initializer: Any, *, dtype: Any = tf.float32, **more: Any) -> Any:
    """Return the variable `name` in the current variable scope, as v1.get_variable does with the arguments `more`."""
    scope, _, last = name.rpartition("/")
    with v1.variable_scope(scope, auxiliary_name_scope=False):
        return v1.get_variable(last, shape, dtype, initializer, use_resource=True, **more)


@contextlib.contextmanager
def divided_by(partitioner: Any) -> Iterator[None]:
    """Let `partitioner` divide variables into parts, as in v1.get_variable, inside this context; None: nothing does."""
    with v1.variable_scope(v1.get_variable_scope(), auxiliary_name_scope=False) as scope:
        scope.set_partitioner(partitioner)
        yield


def forget_shared_embeddings(*columns: Any) -> None:
    """Reset shared embedding columns, which would otherwise keep the variables of an earlier trace. A model_fn calls
    this before it uses its columns.
    """
    for columns_of_part in columns:
        feature_columns.forget_shared_embeddings(_as_list(columns_of_part))


def checked_features(features: Any) -> Mapping[str, Any]:
    """Return `features` if they are a dict, which feature columns need.

    Raises:
      ValueError: they are not a dict.
    """
    if not isinstance(features, Mapping):
        raise ValueError(
            f"features are a {type(features).__name__}, but feature columns need a dict of tensors. Let the input "
            "function return a dict with each column's key, such as {'age': tensor}."
        )
    return features


def activation_of(activation: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return an activation function.

    Args:
      activation: the function; the name of a function in tf.nn; or None, for the identity.

    Raises:
      ValueError: tf.nn has no function of that name.
    """
    if callable(activation):
        return activation
    if activation is None:
        return tf.identity
    function = getattr(tf.nn, str(activation), None)
    if function is None:
        raise ValueError(
            f"activation_fn={activation!r} is unknown. Give a function, or the name of one in tf.nn such as 'relu'."
        )
    return function


def _variables_in(scope: str) -> feature_columns.Columns:
    """Return an object with which feature columns make their variables, under `<scope>/<column>/`."""

    def make(column: Any, name: str, *, shape: Any, **arguments: Any) -> Any:
        column_name = re.sub(r"[^A-Za-z0-9_.\-]", "_", column.name)
        full_name = f"{scope}/{column_name}/{name}"
        return variable(full_name, shape, arguments.pop("initializer", None), **arguments)

    return feature_columns.Columns(make)


def _combined_weights(id_tensors: Any, weight: Any, sparse_combiner: str) -> tf.Tensor:
    """Return the weights of each example's ids, combined: float `[batch, units]`.

    Args:
      id_tensors: the ids of a categorical column, `id_tensor`, and their weights, `weight_tensor`, which may be None.
      weight: the variable, `[ids, units]`.
      sparse_combiner: as in `linear_sum`.
    """
    ids = tf.sparse.reshape(id_tensors.id_tensor, [tf.shape(id_tensors.id_tensor)[0], -1])
    weights = id_tensors.weight_tensor
    if weights is not None:
        weights = tf.sparse.reshape(weights, [tf.shape(weights)[0], -1])
    return tf.nn.safe_embedding_lookup_sparse(weight, ids, sparse_weights=weights, combiner=sparse_combiner)


def _as_list(columns: Any) -> list[Any]:
    if hasattr(columns, "parse_example_spec"):
        return [columns]
    return list(columns or ())
