"""Estimators that add the logits of a linear model and of a network: wide and deep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from runner.classic.estimator import Estimator
from runner.classic.heads_base import Head
from runner.classic.heads_classes import binary_or_multi_class_head
from runner.classic.heads_regression import regression_head
from runner.classic.premade import V2, Deep, Wide, combined_model_fn
from runner.classic.premade_linear import ModelDir


class DNNLinearCombinedEstimator(Estimator):
    """A linear model and a network with any head; each has an optimizer of its own.

    Args:
      linear_feature_columns, dnn_feature_columns: one may be empty; that part is then not there.
      linear_optimizer: as in LinearEstimator; by name its learning rate is the smaller of 0.005 and
        1 / sqrt(number of columns).
      dnn_optimizer: as in DNNEstimator; by name its learning rate is 0.001.
      Others: see LinearEstimator and DNNEstimator.

    Raises: ValueError: neither has columns.
    """

    def __init__(
        self,
        head: Head,
        model_dir: ModelDir = None,
        linear_feature_columns: Any = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Any = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Any = tf.nn.relu,
        dnn_dropout: float | None = None,
        config: Any = None,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        *,
        warm_start_from: Any = None,
    ) -> None:
        wide = Wide(linear_feature_columns, linear_sparse_combiner)
        deep = Deep(dnn_hidden_units or (), dnn_feature_columns, dnn_activation_fn, dnn_dropout, batch_norm)
        model_fn = combined_model_fn(head, wide, linear_optimizer, deep, dnn_optimizer, V2)
        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """A linear model and a network for two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see DNNLinearCombinedEstimator.
    """

    def __init__(
        self,
        model_dir: ModelDir = None,
        linear_feature_columns: Any = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Any = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Any = tf.nn.relu,
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer, dnn_hidden_units,
            dnn_activation_fn, dnn_dropout, config, batch_norm, linear_sparse_combiner,
            warm_start_from=warm_start_from,
        )  # fmt: skip


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """A linear model and a network for numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see DNNLinearCombinedEstimator.
    """

    def __init__(
        self,
        model_dir: ModelDir = None,
        linear_feature_columns: Any = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Any = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Any = tf.nn.relu,
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            regression_head(label_dimension, weight_column, loss_reduction),
            model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer, dnn_hidden_units,
            dnn_activation_fn, dnn_dropout, config, batch_norm, linear_sparse_combiner,
            warm_start_from=warm_start_from,
        )  # fmt: skip
