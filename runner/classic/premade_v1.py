"""The premade estimators of tf.compat.v1.estimator: v1 optimizers, losses summed over the batch.

Their checkpoints have other names than those of tf.estimator. The arguments `partitioner` and `input_layer_partitioner`
have no effect, and say so: the strategy places variables (`strategy.partitioner`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from runner.classic.estimator import Estimator
from runner.classic.heads_base import Head
from runner.classic.heads_classes import binary_or_multi_class_head
from runner.classic.heads_regression import regression_head
from runner.classic.premade import (
    V1,
    Deep,
    Wide,
    baseline_model_fn,
    combined_model_fn,
    dnn_model_fn,
    linear_model_fn,
)
from runner.classic.premade_linear import ModelDir

_SUM = tf.compat.v1.losses.Reduction.SUM
_log = logging.getLogger(__name__)


class LinearEstimator(Estimator):
    """Args: see runner.classic.premade_linear; a name as the optimizer means one of tf.compat.v1.train."""

    def __init__(
        self,
        head: Head,
        feature_columns: Any,
        model_dir: ModelDir = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        partitioner: Any = None,
        sparse_combiner: str = "sum",
        warm_start_from: Any = None,
    ) -> None:
        _say_without_effect("partitioner", partitioner)
        model_fn = linear_model_fn(head, Wide(feature_columns, sparse_combiner), optimizer, V1)
        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class LinearClassifier(LinearEstimator):
    def __init__(
        self,
        feature_columns: Any,
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        partitioner: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = _SUM,
        sparse_combiner: str = "sum",
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, partitioner, sparse_combiner, warm_start_from
        )


class LinearRegressor(LinearEstimator):
    def __init__(
        self,
        feature_columns: Any,
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        partitioner: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = _SUM,
        sparse_combiner: str = "sum",
    ) -> None:
        head = regression_head(label_dimension, weight_column, loss_reduction)
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, partitioner, sparse_combiner, warm_start_from
        )


class DNNEstimator(Estimator):
    """Args: see runner.classic.premade_dnn; a name as the optimizer means one of tf.compat.v1.train, rate 0.05."""

    def __init__(
        self,
        head: Head,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: ModelDir = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = tf.nn.relu,
        dropout: float | None = None,
        input_layer_partitioner: Any = None,
        config: Any = None,
        warm_start_from: Any = None,
        batch_norm: bool = False,
    ) -> None:
        _say_without_effect("input_layer_partitioner", input_layer_partitioner)
        deep = Deep(hidden_units, feature_columns, activation_fn, dropout, batch_norm)
        super().__init__(dnn_model_fn(head, deep, optimizer, V1), model_dir, config, warm_start_from=warm_start_from)


class DNNClassifier(DNNEstimator):
    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = tf.nn.relu,
        dropout: float | None = None,
        input_layer_partitioner: Any = None,
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = _SUM,
        batch_norm: bool = False,
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(
            head, hidden_units, feature_columns, model_dir, optimizer,
            activation_fn, dropout, input_layer_partitioner, config, warm_start_from, batch_norm,
        )  # fmt: skip


class DNNRegressor(DNNEstimator):
    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = tf.nn.relu,
        dropout: float | None = None,
        input_layer_partitioner: Any = None,
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = _SUM,
        batch_norm: bool = False,
    ) -> None:
        head = regression_head(label_dimension, weight_column, loss_reduction)
        super().__init__(
            head, hidden_units, feature_columns, model_dir, optimizer,
            activation_fn, dropout, input_layer_partitioner, config, warm_start_from, batch_norm,
        )  # fmt: skip


class DNNLinearCombinedEstimator(Estimator):
    """Args: see runner.classic.premade_combined; a name as an optimizer means one of tf.compat.v1.train."""

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
        input_layer_partitioner: Any = None,
        config: Any = None,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        *,
        warm_start_from: Any = None,
    ) -> None:
        _say_without_effect("input_layer_partitioner", input_layer_partitioner)
        wide = Wide(linear_feature_columns, linear_sparse_combiner)
        deep = Deep(dnn_hidden_units or (), dnn_feature_columns, dnn_activation_fn, dnn_dropout, batch_norm)
        model_fn = combined_model_fn(head, wide, linear_optimizer, deep, dnn_optimizer, V1)
        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
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
        input_layer_partitioner: Any = None,
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = _SUM,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer, dnn_hidden_units,
            dnn_activation_fn, dnn_dropout, input_layer_partitioner, config, batch_norm, linear_sparse_combiner,
            warm_start_from=warm_start_from,
        )  # fmt: skip


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
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
        input_layer_partitioner: Any = None,
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = _SUM,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        super().__init__(
            regression_head(label_dimension, weight_column, loss_reduction),
            model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer, dnn_hidden_units,
            dnn_activation_fn, dnn_dropout, input_layer_partitioner, config, batch_norm, linear_sparse_combiner,
            warm_start_from=warm_start_from,
        )  # fmt: skip


class BaselineEstimator(Estimator):
    """Args: see runner.classic.premade_baseline; a name as the optimizer means one of tf.compat.v1.train."""

    def __init__(self, head: Head, model_dir: ModelDir = None, optimizer: Any = "Ftrl", config: Any = None) -> None:
        super().__init__(baseline_model_fn(head, optimizer, V1), model_dir, config)


class BaselineClassifier(BaselineEstimator):
    def __init__(
        self,
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        loss_reduction: str = _SUM,
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


class BaselineRegressor(BaselineEstimator):
    def __init__(
        self,
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        loss_reduction: str = _SUM,
    ) -> None:
        super().__init__(regression_head(label_dimension, weight_column, loss_reduction), model_dir, optimizer, config)


def _say_without_effect(name: str, value: Any) -> None:
    if value is not None:
        _log.warning("%s has no effect: the strategy places variables, see strategy.partitioner.", name)
