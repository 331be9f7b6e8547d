"""Functions from features to logits: those of the premade estimators, and how a user's own is called."""

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
    """The network of a model; see `dnn_logit_fn_builder`."""

    hidden_units: Sequence[int]
    feature_columns: Any
    activation_fn: Any = tf.nn.relu
    dropout: float | None = None
    batch_norm: bool = False
    name: ClassVar = "dnn"

    def logits(self, features: Any, mode: str, units: int, scope: str = "") -> tf.Tensor:
        """Return the network's float logits `[batch, units]`.

        Args:
          features: name -> tensor `[batch, ...]`.
          scope: prefix of the variables' names, such as `dnn/`.
        """
        training = mode == ModeKeys.TRAIN
        activation = layers.activation_of(self.activation_fn)
        inputs = f"{scope}input_from_feature_columns/input_layer"
        x = layers.dense_features(features, self.feature_columns, scope=inputs)
        for number, size in enumerate(self.hidden_units):
            name = f"{scope}hiddenlayer_{number}"
            x = layers.dense(x, size, scope=name, activation=activation)
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
    """The linear part of a model; see `linear_logit_fn_builder`."""

    feature_columns: Any
    sparse_combiner: str = "sum"
    name: ClassVar = "linear"

    def logits(self, features: Any, mode: str, units: int, scope: str = "") -> tf.Tensor:
        """Return the linear part's float logits `[batch, units]`; arguments as in `Deep.logits`."""
        logits, variables = layers.linear_sum(
            features, self.feature_columns, units=units, scope=f"{scope}linear_model",
            sparse_combiner=self.sparse_combiner,
        )  # fmt: skip
        *weights, bias = map(tf.convert_to_tensor, variables)
        if units > 1:
            summaries.histogram("bias", bias)
        else:
            summaries.scalar("bias", bias[0])
        flat = tf.concat([tf.reshape(weight, [-1]) for weight in weights], 0)
        summaries.scalar("fraction_of_zero_weights", tf.math.zero_fraction(flat))
        return logits


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Logits that do not depend on the features."""

    feature_columns: Any = ()
    name: ClassVar = ""

    def logits(self, features: Any, mode: str, units: int, scope: str = "") -> tf.Tensor:
        bias = layers.variable("baseline/bias", [units], v1.zeros_initializer())
        feature = next(iter(features.values())) if isinstance(features, Mapping) else features
        return bias * tf.ones([tf.shape(feature, out_type=tf.int32)[0], units])


def call_logit_fn(logit_fn: Callable[..., Any], features: Any, mode: str, params: Any, config: Any) -> Any:
    """Return the logits of a function, a tensor `[batch, units]` or a dict of them.

    It is called with those of features, mode, params and config that it declares.

    Raises:
      ValueError: it returned something else.
    """
    available = {"features": features, "mode": mode, "params": params, "config": config}
    takes = inspect.signature(logit_fn).parameters
    result = logit_fn(**{name: value for name, value in available.items() if name in takes})
    if not tf.is_tensor(result) and not isinstance(result, Mapping):
        name = getattr(logit_fn, "__name__", type(logit_fn).__name__)
        raise ValueError(f"{name} returned {type(result).__name__}; a logit_fn returns a tensor or a dict of tensors.")
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
    """Return a function (features, mode) -> float logits `[batch, units]`: a network over feature columns.

    Its variables are in the current variable scope; the updates of moving averages are in the collection UPDATE_OPS.

    Args:
      units: number of logits.
      hidden_units: sizes of the hidden layers.
      feature_columns: dense columns.
      activation_fn: activation of the hidden layers: a function, or a name of tf.nn.
      dropout: share of the units of each hidden layer to drop in training; None: none.
      input_layer_partitioner: has no effect: the strategy places variables.
      batch_norm: normalize the values of each hidden layer over the batch, after the activation.
    """
    _check_units(units)
    deep = Deep(hidden_units, feature_columns, activation_fn, dropout, batch_norm)

    def dnn_logit_fn(features: Any, mode: str) -> tf.Tensor:
        layers.forget_shared_embeddings(feature_columns)
        return deep.logits(features, mode, units)

    return dnn_logit_fn


def linear_logit_fn_builder(units: int, feature_columns: Any, sparse_combiner: str = "sum") -> LogitFn:
    """Return a function (features) -> float logits `[batch, units]`, linear in the values of feature columns.

    Args:
      units: number of logits.
      feature_columns: dense and categorical columns.
      sparse_combiner: how to combine the weights of several values of a categorical column: sum, mean, sqrtn.
    """
    _check_units(units)
    wide = Wide(feature_columns, sparse_combiner)

    def linear_logit_fn(features: Any) -> tf.Tensor:
        layers.forget_shared_embeddings(feature_columns)
        return wide.logits(features, ModeKeys.PREDICT, units)

    return linear_logit_fn


def summarise(values: tf.Tensor, name: str) -> None:
    """Write the summaries that tf.estimator wrote of a layer's values, of any shape."""
    summaries.scalar(f"{name}/fraction_of_zero_values", tf.math.zero_fraction(values))
    summaries.histogram(f"{name}/activation", values)


def _check_units(units: int) -> None:
    if not isinstance(units, int) or units < 1:
        raise ValueError(f"units={units!r}: the logits_dimension of a head, a positive int.")
