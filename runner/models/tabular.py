"""The model functions of `model=linear`, `model=dnn` and `model=wide_deep`, made from the premade estimators."""

# Do not move this module: conf/model/{linear,dnn,wide_deep}.yaml and the config.yaml of runs name its functions.
# Those of older runs name runner.classic.tabular.

from __future__ import annotations

from typing import Any

from runner.classic.estimator_spec import EstimatorSpec
from runner.classic.heads.base import Head
from runner.classic.heads.classification import binary_or_multi_class_head
from runner.classic.heads.regression import RegressionHead
from runner.classic.optimizers import optimizer_of
from runner.classic.premade.logits import Deep, Wide
from runner.classic.premade.model_fns import V2, combined_model_fn, dnn_model_fn, linear_model_fn
from runner.models.column_specs import Columns
from runner.types import Params


def linear(features: Any, labels: Any, mode: str, params: Params) -> EstimatorSpec:
    """Return the EstimatorSpec of a linear model on feature columns.

    Args:
      features: name -> tensor `[batch, ...]`.
      labels: `[batch]` or `[batch, 1]` classes, or `[batch, label_dimension]` numbers; None in PREDICT.
      mode: one of ModeKeys.
      params: columns (see `Columns`), wide (names of the columns to use; None: all), n_classes (None: regression of
        label_dimension numbers), weight_column, label_vocabulary, optimizer, learning_rate, sparse_combiner.
    """
    wide = Wide(Columns(params.columns).chosen(params.wide, "model.params.wide"), params.sparse_combiner)
    optimizer = optimizer_of(params.optimizer, params.learning_rate)
    return linear_model_fn(_head(params), wide, optimizer, V2)(features, labels, mode)


def dnn(features: Any, labels: Any, mode: str, params: Params) -> EstimatorSpec:
    """Return the EstimatorSpec of a network on feature columns.

    Args:
      features: as in `linear`.
      labels: as in `linear`.
      mode: as in `linear`.
      params: as in `linear`, but with deep instead of wide, and without sparse_combiner; also hidden_units, activation,
        dropout and batch_norm.
    """
    optimizer = optimizer_of(params.optimizer, params.learning_rate)
    return dnn_model_fn(_head(params), _deep(params, Columns(params.columns)), optimizer, V2)(features, labels, mode)


def wide_deep(features: Any, labels: Any, mode: str, params: Params) -> EstimatorSpec:
    """Return the EstimatorSpec of a linear model and a network whose logits are added.

    Args:
      features: as in `linear`.
      labels: as in `linear`.
      mode: as in `linear`.
      params: as in `linear` and `dnn`, but with wide_optimizer, wide_learning_rate, deep_optimizer and
        deep_learning_rate instead of optimizer and learning_rate.
    """
    columns = Columns(params.columns)
    wide = Wide(columns.chosen(params.wide, "model.params.wide"), params.sparse_combiner)
    wide_optimizer = optimizer_of(params.wide_optimizer, params.wide_learning_rate)
    deep_optimizer = optimizer_of(params.deep_optimizer, params.deep_learning_rate)
    model_fn = combined_model_fn(_head(params), wide, wide_optimizer, _deep(params, columns), deep_optimizer, V2)
    return model_fn(features, labels, mode)


def _deep(params: Params, columns: Columns) -> Deep:
    chosen = columns.chosen(params.deep, "model.params.deep")
    return Deep(list(params.hidden_units), chosen, params.activation, params.dropout, params.batch_norm)


def _head(params: Params) -> Head:
    if params.n_classes is None:
        return RegressionHead(params.label_dimension, params.weight_column)
    return binary_or_multi_class_head(params.n_classes, params.weight_column, params.label_vocabulary)
