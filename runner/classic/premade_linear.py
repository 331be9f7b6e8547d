"""Estimators that are linear in their feature columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from runner.classic.estimator import Estimator
from runner.classic.heads_base import Head
from runner.classic.heads_classes import binary_or_multi_class_head
from runner.classic.heads_regression import regression_head
from runner.classic.premade import V2, Wide, linear_model_fn

ModelDir = str | os.PathLike[str] | None


class LinearEstimator(Estimator):
    """A linear model with any head.

    Args:
      head: what is done with the logits.
      feature_columns: dense and categorical ones.
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.2), an optimizer, or a function that makes
        one; None: Ftrl with the smaller of 0.2 and 1 / sqrt(number of columns).
      sparse_combiner: how the weights of several values of a categorical column are joined: sum, mean, sqrtn.
      Others: see Estimator.
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Any,
        model_dir: ModelDir = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        sparse_combiner: str = "sum",
        warm_start_from: Any = None,
    ) -> None:
        wide = Wide(feature_columns, sparse_combiner)
        super().__init__(linear_model_fn(head, wide, optimizer, V2), model_dir, config, warm_start_from=warm_start_from)


class LinearClassifier(LinearEstimator):
    """A linear model of two or more classes.

    Args:
      n_classes, weight_column, label_vocabulary, loss_reduction: see BinaryClassHead and MultiClassHead.
      Others: see LinearEstimator.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from)


class LinearRegressor(LinearEstimator):
    """A linear model of numbers.

    Args:
      label_dimension, weight_column, loss_reduction: see RegressionHead.
      Others: see LinearEstimator.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
    ) -> None:
        head = regression_head(label_dimension, weight_column, loss_reduction)
        super().__init__(head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from)
