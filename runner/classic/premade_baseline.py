"""Estimators that look at no feature: what every other one has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.classic.estimator import Estimator
from runner.classic.heads_base import Head
from runner.classic.heads_classes import binary_or_multi_class_head
from runner.classic.heads_regression import regression_head
from runner.classic.premade import V2, baseline_model_fn
from runner.classic.premade_linear import ModelDir


class BaselineEstimator(Estimator):
    """Predicts the same for every example, with any head.

    Args:
      optimizer: a name (Adagrad, Adam, Ftrl, RMSProp, SGD; learning rate 0.3), an optimizer, or a function that makes
        one.
      Others: see Estimator.
    """

    def __init__(self, head: Head, model_dir: ModelDir = None, optimizer: Any = "Ftrl", config: Any = None) -> None:
        super().__init__(baseline_model_fn(head, optimizer, V2), model_dir, config)


class BaselineClassifier(BaselineEstimator):
    """Predicts the frequency of each class. Args: see BaselineEstimator, BinaryClassHead and MultiClassHead."""

    def __init__(
        self,
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        loss_reduction: str = "sum_over_batch_size",
    ) -> None:
        head = binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


class BaselineRegressor(BaselineEstimator):
    """Predicts the mean of the labels. Args: see BaselineEstimator and RegressionHead."""

    def __init__(
        self,
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Ftrl",
        config: Any = None,
        loss_reduction: str = "sum_over_batch_size",
    ) -> None:
        super().__init__(regression_head(label_dimension, weight_column, loss_reduction), model_dir, optimizer, config)
