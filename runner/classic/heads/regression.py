"""Heads that predict numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from runner.classic.heads import base, checks, metrics
from runner.export.outputs import RegressionOutput


class RegressionHead(base.HeadOfOne):
    """A head that predicts numbers, with the squared error as the loss.

    Labels are `[batch, label_dimension]`, or `[batch]` if label_dimension is 1. Logits are float
    `[batch, ..., label_dimension]`.

    Args:
      label_dimension: how many numbers to predict for an example.
      weight_column: as in BinaryClassHead; weights may also be `[batch, label_dimension]`, one per number.
      loss_reduction: as in BinaryClassHead; the mean is over all numbers of all examples.
      loss_fn: as in BinaryClassHead, but returns float `[batch, label_dimension]`; None: the squared error.
      inverse_link_fn: function from logits to predictions; None: the predictions are the logits.
      name: as in BinaryClassHead.

    Raises:
      ValueError: an argument is not allowed.
    """

    _weights_may_differ_in_one_example = True

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        inverse_link_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
        name: str | None = None,
    ) -> None:
        if label_dimension < 1:
            raise ValueError(f"RegressionHead(label_dimension={label_dimension}): must be at least 1.")
        super().__init__(label_dimension, weight_column, loss_reduction, loss_fn, name)
        self._loss_dimension = label_dimension
        self._inverse_link_fn = inverse_link_fn
        self._prediction_keys = ("predictions",) if inverse_link_fn is None else ("predictions", "logits")

    def _labels(self, labels: Any, logits: tf.Tensor) -> tf.Tensor:
        return tf.cast(checks.checked_labels(labels, logits, self.logits_dimension), logits.dtype)

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.math.squared_difference(logits, labels)

    def _prediction(self, key: str, logits: tf.Tensor) -> tf.Tensor:
        is_logits = key == "logits" or self._inverse_link_fn is None
        return logits if is_logits else self._inverse_link_fn(logits)  # type: ignore[misc]

    def _metrics(self) -> metrics.Metrics:
        return {
            "prediction/mean": (metrics.mean, lambda labels, logits: (self._prediction("predictions", logits),)),
            "label/mean": (metrics.mean, lambda labels, logits: (labels,)),
        }

    def export_outputs(self, predictions: Mapping[Any, tf.Tensor]) -> dict[str, Any]:
        return base.exported(predictions, regression=RegressionOutput(value=predictions["predictions"]))


class PoissonRegressionHead(RegressionHead):
    """A head that predicts counts. The logits are the logarithm of the rate of a Poisson distribution, and the loss is
    its negative log-likelihood.

    Args:
      label_dimension: as in RegressionHead.
      weight_column: as in RegressionHead.
      loss_reduction: as in RegressionHead.
      compute_full_loss: include the term that depends only on the labels, by Stirling's approximation.
      name: as in RegressionHead.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        compute_full_loss: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(label_dimension, weight_column, loss_reduction, inverse_link_fn=tf.exp, name=name)
        self._compute_full_loss = compute_full_loss

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.nn.log_poisson_loss(targets=labels, log_input=logits, compute_full_loss=self._compute_full_loss)


class LogisticRegressionHead(RegressionHead):
    """A head that predicts a probability: labels are from 0 to 1, and the loss is sigmoid cross entropy.

    The arguments `weight_column`, `loss_reduction` and `name` are as in RegressionHead.
    """

    def __init__(
        self, weight_column: Any = None, loss_reduction: str = "sum_over_batch_size", name: str | None = None
    ) -> None:
        super().__init__(1, weight_column, loss_reduction, inverse_link_fn=tf.sigmoid, name=name)

    def _labels(self, labels: Any, logits: tf.Tensor) -> tf.Tensor:
        return checks.checked_range(super()._labels(labels, logits), 2)

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
