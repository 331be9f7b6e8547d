"""The metrics of heads: Keras metrics in float64, so that results do not depend on order or strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras  # import before any trace, because the runner watches the writes of Keras metrics
import tensorflow as tf

Metrics = dict[str, tuple[Callable[[str], Any], Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, ...]]]]
"""Name -> (name -> Keras metric, (labels, logits) -> the two arguments of its update, which have the same shape)."""


class _Baseline(keras.metrics.Mean):
    """The accuracy of always predicting the more frequent one of the labels 0 and 1."""

    def result(self) -> Any:
        frequency = super().result()
        return tf.maximum(frequency, 1 - frequency)


def _maker(kind: Callable[..., Any], **settings: Any) -> Callable[[str], Any]:
    """Return a function that makes a metric of this kind from a name."""

    def make(name: str) -> Any:
        return kind(name=name.replace("/", "_"), dtype="float64", **settings)

    return make


mean, baseline = _maker(keras.metrics.Mean), _maker(_Baseline)
precision, recall = _maker(keras.metrics.Precision, thresholds=0.5), _maker(keras.metrics.Recall, thresholds=0.5)
# Keras sums areas in float32, so two replicas differ from one by 1e-7. All other metrics are float64.
area, area_of_precision = _maker(keras.metrics.AUC, curve="ROC"), _maker(keras.metrics.AUC, curve="PR")


def with_probabilities(labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the labels, and the probabilities of independent logits; both keep their shapes."""
    return labels, tf.sigmoid(logits)


def metrics_at(thresholds: Sequence[float]) -> Metrics:
    """Return accuracy, precision and recall at each threshold of the probabilities."""
    found: Metrics = {}
    for threshold in thresholds:
        at = f"positive_threshold_{threshold:g}"
        found[f"accuracy/{at}"] = mean, functools.partial(_right_at, threshold)
        found[f"precision/{at}"] = _maker(keras.metrics.Precision, thresholds=threshold), with_probabilities
        found[f"recall/{at}"] = _maker(keras.metrics.Recall, thresholds=threshold), with_probabilities
    return found


def _right_at(threshold: float, labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor]:
    return (tf.equal(tf.cast(labels, tf.float64), tf.cast(tf.sigmoid(logits) > threshold, tf.float64)),)


def add(metric: Any, *values: tf.Tensor, weights: tf.Tensor | None) -> None:
    """Add each element of a batch, with `weights` of the same shape, to a metric."""
    flat = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in values]
    if weights is not None:
        weights = tf.reshape(tf.cast(weights, tf.float64) * tf.ones_like(values[0], tf.float64), [-1])
    metric.update_state(*flat, sample_weight=weights)
