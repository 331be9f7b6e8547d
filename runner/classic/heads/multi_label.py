"""The head of classifiers in which an example may have several classes at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.classic.heads import base, checks, metrics
from runner.export.outputs import ClassificationOutput


class MultiLabelHead(base.HeadOfOne):
    """A head for examples with any number of classes: the loss is the mean over classes of sigmoid cross entropy.

    Labels are 0 and 1, `[batch, n_classes]`; or a SparseTensor with the classes of each example: ids, or entries of
    `label_vocabulary`. Logits are float `[batch, ..., n_classes]`.

    Args:
      n_classes: number of classes, at least 2.
      weight_column: as in BinaryClassHead.
      thresholds: as in BinaryClassHead; the metrics are over all classes.
      label_vocabulary: as in BinaryClassHead.
      loss_reduction: as in BinaryClassHead.
      loss_fn: as in BinaryClassHead; None: the mean over classes of sigmoid cross entropy.
      classes_for_class_based_metrics: ids or names of classes for which AUC and mean probability are also reported.
      name: as in BinaryClassHead.

    Raises:
      ValueError: an argument is not allowed.
    """

    _prediction_keys = ("logits", "probabilities", "classes")

    def __init__(
        self,
        n_classes: int,
        weight_column: Any = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[Any] | None = None,
        loss_reduction: str = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        classes_for_class_based_metrics: Sequence[Any] | None = None,
        name: str | None = None,
    ) -> None:
        if n_classes is None or n_classes < 2:
            raise ValueError(f"MultiLabelHead(n_classes={n_classes}): must be at least 2.")
        super().__init__(n_classes, weight_column, loss_reduction, loss_fn, name)
        checks.check_vocabulary(label_vocabulary, n_classes)
        self._thresholds = checks.check_thresholds(thresholds)
        self._label_vocabulary = label_vocabulary
        self._measured_classes = _ids_of_classes(classes_for_class_based_metrics or (), n_classes, label_vocabulary)

    def _labels(self, labels: Any, logits: tf.Tensor) -> tf.Tensor:
        if isinstance(labels, tf.sparse.SparseTensor):
            labels = self._indicators(labels)
        labels = checks.checked_labels(labels, logits, self.logits_dimension)
        return checks.checked_range(labels, 2, "labels (1: the example has the class)")

    def _indicators(self, labels: tf.sparse.SparseTensor) -> tf.Tensor:
        """Return sparse classes of examples as 0 and 1, int64 `[batch, n_classes]`."""
        values = labels.values
        if values.dtype == tf.string:
            values = base.ids_of_labels(values, self._label_vocabulary or (), "MultiLabelHead")
        elif not values.dtype.is_integer:
            raise ValueError(f"MultiLabelHead: sparse labels must be integers or strings, not {values.dtype.name}.")
        values = checks.checked_range(values, self.logits_dimension)
        ids = tf.sparse.SparseTensor(labels.indices, values, labels.dense_shape)
        return tf.cast(tf.sparse.to_indicator(ids, self.logits_dimension), tf.int64)

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(labels, logits.dtype), logits=logits)
        return tf.reduce_mean(losses, axis=-1, keepdims=True)

    def _prediction(self, key: str, logits: tf.Tensor) -> tf.Tensor:
        if key == "logits":
            return logits
        if key == "probabilities":
            return tf.sigmoid(logits)
        names = base.names_of_classes(self.logits_dimension, self._label_vocabulary)
        return base.repeated_for_each_example(names, logits)

    def _metrics(self) -> metrics.Metrics:
        found: metrics.Metrics = {
            "auc": (metrics.area, metrics.with_probabilities),
            "auc_precision_recall": (metrics.area_of_precision, metrics.with_probabilities),
        }
        found |= metrics.metrics_at(self._thresholds)
        names = self._label_vocabulary
        for class_id in self._measured_classes:
            suffix = f"class{class_id}" if names is None else str(names[class_id])
            values_of_class = functools.partial(_values_of_class, class_id)
            found[f"probability_mean/{suffix}"] = metrics.mean, functools.partial(values_of_class, first=1)
            found[f"auc/{suffix}"] = metrics.area, values_of_class
            found[f"auc_precision_recall/{suffix}"] = metrics.area_of_precision, values_of_class
        return found

    def export_outputs(self, predictions: Mapping[Any, tf.Tensor]) -> dict[str, Any]:
        classified = ClassificationOutput(scores=predictions["probabilities"], classes=predictions["classes"])
        return base.exported(predictions, classification=classified)


def _values_of_class(class_id: int, labels: tf.Tensor, logits: tf.Tensor, first: int = 0) -> tuple[tf.Tensor, ...]:
    """Return (labels, probabilities) of class `class_id`; with first=1 only (probabilities,)."""
    values_of_all = metrics.with_probabilities(labels, logits)
    return tuple(values[..., class_id : class_id + 1] for values in values_of_all[first:])


def _ids_of_classes(classes: Sequence[Any], num_classes: int, label_vocabulary: Sequence[Any] | None) -> list[int]:
    """Return the ids of `classes`, which are ids or names in the vocabulary.

    Raises:
      ValueError: there is no such class.
    """
    names = list(label_vocabulary or ())
    given = f"classes_for_class_based_metrics={list(classes)}"
    unknown = [name for name in classes if isinstance(name, str) and name not in names]
    if unknown:
        raise ValueError(f"{given}: {unknown} are not in label_vocabulary={names}.")
    ids = []
    for name_or_id in classes:
        ids.append(names.index(name_or_id) if isinstance(name_or_id, str) else int(name_or_id))
    if any(not 0 <= class_id < num_classes for class_id in ids):
        raise ValueError(f"{given}: ids must be from 0 to {num_classes - 1}.")
    return ids
