"""The metrics of heads: Keras metrics in float64, so that order and strategy do not change their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras  # must be imported before a trace, in which the runner watches the writes of Keras metrics
import tensorflow as tf

from runner.classic.heads.checks import broadcast_weights

v1 = tf.compat.v1

Metrics = dict[str, tuple[Callable[[str], Any], Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, ...]]]]
"""Name -> (function from a name to a Keras metric; function from (labels, logits) to the arguments of its update)."""


class _Baseline(keras.metrics.Mean):
    """The accuracy of a model that always predicts the more frequent of the labels 0 and 1."""

    def result(self) -> Any:
        frequency = super().result()
        return tf.maximum(frequency, 1 - frequency)


def _maker(kind: Callable[..., Any], **settings: Any) -> Callable[[str], Any]:
    """Return a function from a name to a new float64 metric of class `kind` with `settings`."""

    def make(name: str) -> Any:
        return kind(name=name.replace("/", "_"), dtype="float64", **settings)

    return make


mean = _maker(keras.metrics.Mean)
baseline = _maker(_Baseline)
precision = _maker(keras.metrics.Precision, thresholds=0.5)
recall = _maker(keras.metrics.Recall, thresholds=0.5)
# Keras sums areas in float32, so two replicas differ from one by 1e-7. All other metrics are float64.
area = _maker(keras.metrics.AUC, curve="ROC")
area_of_precision = _maker(keras.metrics.AUC, curve="PR")


def with_probabilities(labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return (labels, probabilities): `labels` unchanged, and sigmoid(logits)."""
    return labels, tf.sigmoid(logits)


def metrics_at(thresholds: Sequence[float]) -> Metrics:
    """Return the metrics accuracy, precision and recall for each threshold: a probability above it predicts class 1."""
    found: Metrics = {}
    for threshold in thresholds:
        suffix = f"positive_threshold_{threshold:g}"
        found[f"accuracy/{suffix}"] = mean, functools.partial(_is_right_at, threshold)
        found[f"precision/{suffix}"] = _maker(keras.metrics.Precision, thresholds=threshold), with_probabilities
        found[f"recall/{suffix}"] = _maker(keras.metrics.Recall, thresholds=threshold), with_probabilities
    return found


def _is_right_at(threshold: float, labels: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor]:
    predicted = tf.cast(tf.sigmoid(logits) > threshold, tf.float64)
    return (tf.equal(tf.cast(labels, tf.float64), predicted),)


def add(metric: Any, *values: tf.Tensor, weights: tf.Tensor | None) -> None:
    """Update a metric with all elements of a batch. In a graph, store the operation that updates it as
    `metric.update_op`, for `in_pairs`.

    Args:
      metric: a Keras metric.
      *values: one or two tensors of the same shape, the arguments of the metric's update.
      weights: weights of a shape that broadcasts to that of `values`; None: all 1.
    """
    flat_values = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in values]
    if weights is not None:
        weights = tf.reshape(broadcast_weights(tf.cast(values[0], tf.float64), weights), [-1])
    if tf.executing_eagerly():
        metric.update_state(*flat_values, sample_weight=weights)
        return
    # `update_state` of Keras 3 returns no operation, so find the assignments that it adds to the graph.
    graph = v1.get_default_graph()
    num_before = len(graph.get_operations())
    metric.update_state(*flat_values, sample_weight=weights)
    new_operations = graph.get_operations()[num_before:]
    metric.update_op = tf.group(*[operation for operation in new_operations if operation.type.startswith("Assign")])


def in_pairs(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return `metrics` with each Keras metric that `add` has updated in a graph as a pair (value, update)."""
    pairs: dict[str, Any] = {}
    for name, metric in metrics.items():
        update = getattr(metric, "update_op", None)
        pairs[name] = metric if update is None else (metric.result(), update)
    return pairs
