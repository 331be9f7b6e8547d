"""Heads of classifiers in which each example has exactly one class: of two, or of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.classic.heads import base, checks, metrics
from runner.export.outputs import ClassificationOutput, RegressionOutput

v1 = tf.compat.v1

_MEAN = "sum_over_batch_size"


class BinaryClassHead(base.HeadOfOne):
    """A head for two classes: one logit, and sigmoid cross entropy as the loss.

    Labels are `[batch]` or `[batch, 1]`: numbers from 0 to 1, or entries of `label_vocabulary`. Logits are float
    `[batch, ..., 1]`.

    Args:
      weight_column: key of a feature, or a numeric_column, with the weight of each example in loss and metrics; None:
        all examples have weight 1.
      thresholds: also report accuracy, precision and recall at each of these probabilities; None: at none.
      label_vocabulary: the labels in the order of their ids; None: labels are ids.
      loss_reduction: how the losses of a batch become one, such as tf.keras.losses.Reduction.SUM_OVER_BATCH_SIZE (the
        mean over examples) or SUM.
      loss_fn: called with labels and logits, and with features if it takes them; returns float `[batch, 1]`. None:
        sigmoid cross entropy.
      name: suffix of the metrics' names; None: no suffix.

    Raises:
      ValueError: an argument is not allowed.
    """

    _prediction_keys = (
        "logits", "logistic", "probabilities", "class_ids", "classes", "all_class_ids", "all_classes",
    )  # fmt: skip

    def __init__(
        self,
        weight_column: Any = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        loss_reduction: str = _MEAN,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(1, weight_column, loss_reduction, loss_fn, name)
        checks.check_vocabulary(label_vocabulary, 2)
        self._thresholds = checks.check_thresholds(thresholds)
        self._label_vocabulary = label_vocabulary

    def _labels(self, labels: Any, logits: tf.Tensor) -> tf.Tensor:
        labels = checks.checked_labels(labels, logits, 1)
        if self._label_vocabulary is not None:
            labels = base.ids_of_labels(labels, self._label_vocabulary, "BinaryClassHead")
        if labels.dtype == tf.string:
            raise ValueError("BinaryClassHead: labels are strings. Give it their label_vocabulary.")
        return checks.checked_range(tf.cast(labels, logits.dtype), 2)

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)

    def _prediction(self, key: str, logits: tf.Tensor) -> tf.Tensor:
        if key == "logits":
            return logits
        if key == "logistic":
            return tf.sigmoid(logits)
        # The softmax of (0, logit) is (1 - p, p) with p = sigmoid(logit).
        logits_of_classes = tf.concat([tf.zeros_like(logits), logits], axis=-1)
        return _prediction_of_classes(key, logits_of_classes, 2, self._label_vocabulary)

    def _metrics(self) -> metrics.Metrics:
        found: metrics.Metrics = {
            "accuracy": (metrics.mean, lambda labels, logits: (tf.equal(*_labels_and_classes(labels, logits)),)),
            "precision": (metrics.precision, _labels_and_classes),
            "recall": (metrics.recall, _labels_and_classes),
            "prediction/mean": (metrics.mean, lambda labels, logits: (tf.sigmoid(logits),)),
            "label/mean": (metrics.mean, lambda labels, logits: (labels,)),
            "accuracy_baseline": (metrics.baseline, lambda labels, logits: (labels,)),
            "auc": (metrics.area, metrics.with_probabilities),
        }
        if not self._is_v1:
            found["auc_precision_recall"] = metrics.area_of_precision, metrics.with_probabilities
        return found | metrics.metrics_at(self._thresholds)

    def _v1_metrics(self, labels: tf.Tensor, logits: tf.Tensor, weights: tf.Tensor | None) -> dict[str, Any]:
        if not self._is_v1:
            return {}
        # The metric of TF 1 connects the points of the curve by straight lines; that of Keras interpolates differently.
        return {"auc_precision_recall": v1.metrics.auc(labels, tf.sigmoid(logits), weights, curve="PR")}

    def export_outputs(self, predictions: Mapping[Any, tf.Tensor]) -> dict[str, Any]:
        classified = _classified(predictions, 2, self._label_vocabulary)
        regression = RegressionOutput(value=predictions["logistic"])
        return {**base.exported(predictions, classification=classified), "regression": regression}


class MultiClassHead(base.HeadOfOne):
    """A head for three or more classes, of which each example has one: softmax cross entropy as the loss.

    Labels are `[batch]` or `[batch, 1]`: integers from 0 to n_classes - 1, or entries of `label_vocabulary`. Logits are
    float `[batch, ..., n_classes]`.

    Args:
      n_classes: number of classes, at least 3; use BinaryClassHead for two.
      weight_column: as in BinaryClassHead.
      label_vocabulary: as in BinaryClassHead.
      loss_reduction: as in BinaryClassHead.
      loss_fn: as in BinaryClassHead; None: softmax cross entropy.
      name: as in BinaryClassHead.

    Raises:
      ValueError: an argument is not allowed.
    """

    _prediction_keys = ("logits", "probabilities", "class_ids", "classes", "all_class_ids", "all_classes")

    def __init__(
        self,
        n_classes: int,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        loss_reduction: str = _MEAN,
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        if n_classes is None or n_classes <= 2:
            raise ValueError(
                f"MultiClassHead(n_classes={n_classes}): must be more than 2. Use BinaryClassHead for two classes."
            )
        super().__init__(n_classes, weight_column, loss_reduction, loss_fn, name)
        checks.check_vocabulary(label_vocabulary, n_classes)
        self._label_vocabulary = label_vocabulary

    def _labels(self, labels: Any, logits: tf.Tensor) -> tf.Tensor:
        labels = checks.checked_labels(labels, logits, 1)
        if self._label_vocabulary is not None:
            return base.ids_of_labels(labels, self._label_vocabulary, "MultiClassHead")
        if not labels.dtype.is_integer:
            raise ValueError(
                f"MultiClassHead: labels are {labels.dtype.name}; they must be integers from 0 to "
                f"{self.logits_dimension - 1}, or entries of label_vocabulary."
            )
        return checks.checked_range(labels, self.logits_dimension)

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.squeeze(labels, -1), logits=logits)
        return tf.expand_dims(losses, -1)

    def _prediction(self, key: str, logits: tf.Tensor) -> tf.Tensor:
        if key == "logits":
            return logits
        return _prediction_of_classes(key, logits, self.logits_dimension, self._label_vocabulary)

    def _metrics(self) -> metrics.Metrics:
        def is_right(labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor]:
            predicted = tf.expand_dims(tf.argmax(logits, -1), -1)
            return (tf.equal(tf.cast(labels, tf.int64), predicted),)

        return {"accuracy": (metrics.mean, is_right)}

    def export_outputs(self, predictions: Mapping[Any, tf.Tensor]) -> dict[str, Any]:
        classified = _classified(predictions, self.logits_dimension, self._label_vocabulary)
        return base.exported(predictions, classification=classified)


def binary_or_multi_class_head(
    n_classes: int, weight_column: Any, label_vocabulary: Sequence[Any] | None, loss_reduction: str = _MEAN
) -> base.Head:
    """Return the head of a classifier with `n_classes`."""
    if n_classes == 2:
        return BinaryClassHead(weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction)
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)


def _labels_and_classes(labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return (labels, predicted classes: 0 or 1 in the dtype of the labels)."""
    return labels, tf.cast(logits > 0, labels.dtype)  # for a logit of 0, the prediction is 0, like argmax's


def _prediction_of_classes(
    key: str, logits: tf.Tensor, num_classes: int, label_vocabulary: Sequence[Any] | None
) -> tf.Tensor:
    """Return the prediction `key` (a key of `_prediction_keys`) for logits `[batch, ..., num_classes]`."""
    if key == "probabilities":
        return tf.nn.softmax(logits)
    if key == "all_class_ids":
        return base.repeated_for_each_example(tf.range(num_classes), logits)
    if key == "all_classes":
        return base.repeated_for_each_example(base.names_of_classes(num_classes, label_vocabulary), logits)
    class_ids = tf.expand_dims(tf.argmax(logits, -1), -1)
    if key == "class_ids":
        return class_ids
    if label_vocabulary is None:
        return tf.strings.as_string(class_ids)
    return tf.gather(base.names_of_classes(num_classes, label_vocabulary), class_ids)


def _classified(
    predictions: Mapping[Any, tf.Tensor], num_classes: int, label_vocabulary: Sequence[Any] | None
) -> ClassificationOutput:
    names = base.repeated_for_each_example(base.names_of_classes(num_classes, label_vocabulary), predictions["logits"])
    return ClassificationOutput(scores=predictions["probabilities"], classes=names)
