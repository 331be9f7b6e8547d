"""Compute logits from features: the parts of premade estimators, and functions for users' own models."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from runner.classic import summaries
from runner.classic.premade import layers
from runner.model_fn import ModeKeys

v1 = tf.compat.v1

LogitFn = Callable[..., tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Deep:
    """The network of a model. The fields are the arguments of `dnn_logit_fn_builder`."""

    hidden_units: Sequence[int]
    feature_columns: Any
    activation_fn: Any = tf.nn.relu
    dropout: float | None = None
    batch_norm: bool = False
    input_layer_partitioner: Any = None
    name: ClassVar = "dnn"

    def logits(self, features: Any, mode: str, units: int, scope: str = "") -> tf.Tensor:
        """Return the network's float logits `[batch, units]`.

        Args:
          features: name -> tensor `[batch, ...]`.
          mode: one of ModeKeys.
          units: number of logits.
          scope: prefix of the variables' names, such as `dnn/`.
        """
        training = mode == ModeKeys.TRAIN
        activation = layers.activation_of(self.activation_fn)
        inputs = f"{scope}input_from_feature_columns/input_layer"
        with layers.divided_by(self.input_layer_partitioner or v1.get_variable_scope().partitioner):
            x = layers.dense_features(features, self.feature_columns, scope=inputs)
        for number, size in enumerate(self.hidden_units):
            name = f"{scope}hiddenlayer_{number}"
            x = layers.dense(x, int(size), scope=name, activation=activation)
            if self.dropout is not None and training:
                x = tf.nn.dropout(x, rate=self.dropout)
            if self.batch_norm:
                x, updates = layers.batch_norm(x, scope=f"{name}/batchnorm_{number}", training=training)
                for update in updates:
                    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
            summarise(x, name)
        logits = layers.dense(x, units, scope=f"{scope}logits")
        summarise(logits, f"{scope}logits")
        return logits


@dataclasses.dataclass(frozen=True)
class Wide:
    """The linear part of a model. The fields are the arguments of `linear_logit_fn_builder`."""

    feature_columns: Any
    sparse_combiner: str = "sum"
    partitioner: Any = None
    name: ClassVar = "linear"

    def logits(self, features: Any, mode: str, units: int, scope: str = "") -> tf.Tensor:
        """Return the float logits of the linear part, `[batch, units]`. Arguments are as in `Deep.logits`."""
        with layers.divided_by(self.partitioner or v1.get_variable_scope().partitioner):
            logits, variables = layers.linear_sum(
                features, self.feature_columns, units=units, scope=f"{scope}linear_model",
                sparse_combiner=self.sparse_combiner,
            )  # fmt: skip
        *weights, bias = map(tf.convert_to_tensor, variables)
        if units > 1:
            summaries.histogram("bias", bias)
        else:
            summaries.scalar("bias", bias[0])
        all_weights = tf.concat([tf.reshape(weight, [-1]) for weight in weights], 0)
        summaries.scalar("fraction_of_zero_weights", tf.math.zero_fraction(all_weights))
        return logits


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The only part of a baseline model: a bias, which does not depend on the features."""

    feature_columns: Any = ()
    name: ClassVar = ""

    def logits(self, features: Any, mode: str, units: int, scope: str = "") -> tf.Tensor:
        bias = layers.variable("baseline/bias", [units], v1.zeros_initializer())
        feature = next(iter(features.values())) if isinstance(features, Mapping) else features
        return bias * tf.ones([tf.shape(feature, out_type=tf.int32)[0], units])


def call_logit_fn(logit_fn: Callable[..., Any], features: Any, mode: str, params: Any, config: Any) -> Any:
    """Call a user's logit_fn with those of features, mode, params and config that it declares, and return its result:
    logits `[batch, units]`, or a dict of them.

    Raises:
      ValueError: the function returned something else.
    """
    available = {"features": features, "mode": mode, "params": params, "config": config}
    parameters = inspect.signature(logit_fn).parameters
    result = logit_fn(**{name: value for name, value in available.items() if name in parameters})
    if not tf.is_tensor(result) and not isinstance(result, Mapping):
        name = getattr(logit_fn, "__name__", type(logit_fn).__name__)
        raise ValueError(f"{name} returned {type(result).__name__}, but must return a tensor or a dict of tensors.")
    return result


def dnn_logit_fn_builder(
    units: int,
    hidden_units: Sequence[int],
    feature_columns: Any,
    activation_fn: Any = tf.nn.relu,
    dropout: float | None = None,
    input_layer_partitioner: Any = None,
    batch_norm: bool = False,
) -> LogitFn:
    """Return a function (features, mode) -> float logits `[batch, units]`, a network over feature columns.

    The function makes variables in the current variable scope. With batch_norm, it adds the updates of moving averages
    to the collection UPDATE_OPS.

    Args:
      units: number of logits.
      hidden_units: sizes of the hidden layers.
      feature_columns: dense feature columns.
      activation_fn: activation of the hidden layers: a function, or the name of one in tf.nn.
      dropout: probability with which units of a hidden layer are dropped in training; None: no dropout.
      input_layer_partitioner: divides the variables of the input layer, such as embeddings; None: as outside.
      batch_norm: normalize the values of each hidden layer over the batch, after the activation.
    """
    _check_units(units)
    deep = Deep(hidden_units, feature_columns, activation_fn, dropout, batch_norm, input_layer_partitioner)

    def dnn_logit_fn(features: Any, mode: str) -> tf.Tensor:
        layers.forget_shared_embeddings(feature_columns)
        return deep.logits(features, mode, units)

    return dnn_logit_fn


def linear_logit_fn_builder(units: int, feature_columns: Any, sparse_combiner: str = "sum") -> LogitFn:
    """Return a function (features) -> float logits `[batch, units]`, a linear model of feature columns.

    Args:
      units: number of logits.
      feature_columns: dense and categorical feature columns.
      sparse_combiner: how to combine the weights of several values of a categorical column: sum, mean or sqrtn.
    """
    _check_units(units)
    wide = Wide(feature_columns, sparse_combiner)

    def linear_logit_fn(features: Any) -> tf.Tensor:
        layers.forget_shared_embeddings(feature_columns)
        return wide.logits(features, ModeKeys.PREDICT, units)

    return linear_logit_fn


def summarise(values: tf.Tensor, name: str) -> None:
    """Write the summaries of a layer's values that tf.estimator wrote: the fraction of zeros, and a histogram."""
    summaries.scalar(f"{name}/fraction_of_zero_values", tf.math.zero_fraction(values))
    summaries.histogram(f"{name}/activation", values)


def _check_units(units: int) -> None:
    if not isinstance(units, int) or units < 1:
        raise ValueError(f"units={units!r} must be a positive int, the logits_dimension of the head.")
