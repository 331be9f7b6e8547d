"""The metrics of heads: those of Keras, in float64, so that no order and no strategy shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras  # before any trace: the runner watches what metrics of Keras write
import tensorflow as tf


class _Baseline(keras.metrics.Mean):
    """The accuracy of always predicting the more frequent one of the labels 0 and 1."""

    def result(self) -> Any:
        frequency = super().result()
        return tf.maximum(frequency, 1 - frequency)


def mean(name: str) -> Any:
    return keras.metrics.Mean(name=_keras_name(name), dtype="float64")


def baseline(name: str) -> Any:
    return _Baseline(name=_keras_name(name), dtype="float64")


def precision(name: str, threshold: float = 0.5) -> Any:
    return keras.metrics.Precision(name=_keras_name(name), thresholds=threshold, dtype="float64")


def recall(name: str, threshold: float = 0.5) -> Any:
    return keras.metrics.Recall(name=_keras_name(name), thresholds=threshold, dtype="float64")


def area(name: str, curve: str = "ROC") -> Any:
    return keras.metrics.AUC(name=_keras_name(name), curve=curve, dtype="float64")


def area_of_precision(name: str) -> Any:
    return area(name, "PR")


def metrics_at(thresholds: Sequence[float]) -> dict[str, Callable[[str], Any]]:
    """Return name -> what makes the metric, for accuracy, precision and recall at each threshold."""
    made: dict[str, Callable[[str], Any]] = {}
    for threshold in thresholds:
        made[_at("accuracy", threshold)] = mean
        made[_at("precision", threshold)] = functools.partial(precision, threshold=threshold)
        made[_at("recall", threshold)] = functools.partial(recall, threshold=threshold)
    return made


def measured_at(
    thresholds: Sequence[float], labels: tf.Tensor, probabilities: tf.Tensor
) -> dict[str, tuple[tf.Tensor, ...]]:
    """Return name -> what the metrics of `metrics_at` are updated with."""
    found: dict[str, tuple[tf.Tensor, ...]] = {}
    for threshold in thresholds:
        right = tf.equal(tf.cast(labels, tf.float64), tf.cast(probabilities > threshold, tf.float64))
        found[_at("accuracy", threshold)] = (right,)
        found[_at("precision", threshold)] = found[_at("recall", threshold)] = (labels, probabilities)
    return found


def _at(metric: str, threshold: float) -> str:
    return f"{metric}/positive_threshold_{threshold:g}"


def add(metric: Any, *values: tf.Tensor, weights: tf.Tensor | None) -> None:
    """Add each element of a batch to a metric."""
    flat = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in values]
    if weights is not None:
        weights = tf.reshape(tf.cast(weights, tf.float64) * tf.ones_like(values[0], tf.float64), [-1])
    metric.update_state(*flat, sample_weight=weights)


def _keras_name(name: str) -> str:
    return name.replace("/", "_")
