"""Estimators that are a network over their feature columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from runner.classic.estimator import Estimator
from runner.classic.heads_base import Head
from runner.classic.heads_classes import binary_or_multi_class_head
from runner.classic.heads_regression import regression_head
from runner.classic.premade import V2, Deep, dnn_model_fn
from runner.classic.premade_linear import ModelDir


class DNNEstimator(Estimator):
    """A network with any head.

    Args:
      head: what is done with the logits.
      hidden_units: sizes of the hidden layers.
      feature_columns: dense ones; embedding_column or indicator_column make categorical ones dense.
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.001, of SGD 0.01), an optimizer, or a
        function that makes one.
      activation_fn: of the hidden layers: a function, or the name of one of tf.nn.
      dropout: in training, the share of the units of each hidden layer that is left out.
      batch_norm: the values of each hidden layer are normalised over the batch.
      Others: see Estimator.
    """

    def __init__(
        self,
        head: Head,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: ModelDir = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = tf.nn.relu,
        dropout: float | None = None,
        config: Any = None,
        warm_start_from: Any = None,
        batch_norm: bool = False,
    ) -> None:
        deep = Deep(hidden_units, feature_columns, activation_fn, dropout, batch_norm)
        super().__init__(dnn_model_fn(head, deep, optimizer, V2), model_dir, config, warm_start_from=warm_start_from)


class DNNClassifier(DNNEstimator):
    """A network for two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see DNNEstimator.
    """

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
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(
            head, hidden_units, feature_columns, model_dir, optimizer,
            activation_fn, dropout, config, warm_start_from, batch_norm,
        )  # fmt: skip


class DNNRegressor(DNNEstimator):
    """A network for numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see DNNEstimator.
    """

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
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        head = regression_head(label_dimension, weight_column, loss_reduction)
        super().__init__(
            head, hidden_units, feature_columns, model_dir, optimizer,
            activation_fn, dropout, config, warm_start_from, batch_norm,
        )  # fmt: skip
