"""A network that predicts a number from measurements in their own units, and a hook that draws the predictions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import runner
from input_fns import diabetes
from runner import EstimatorSpec, ModeKeys, Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Predict the progression of a disease.

    Args:
      features: `measurements` float32 `[batch, 10]`, each in its own unit. The model scales them, so that a served
        model accepts raw measurements.
      labels: float32 `[batch]`, the progression.
      mode: one of ModeKeys.
      params: hidden_units (of each hidden layer; []: a linear model), dropout, learning_rate, weight_decay.
    """
    _, measurements, progression = diabetes.read(held_out=False)  # from the training part only
    mean, scale = progression.mean(), progression.std()

    x = keras.layers.Normalization(mean=measurements.mean(axis=0), variance=measurements.var(axis=0))(
        features["measurements"]
    )
    for i, units in enumerate(params.hidden_units):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden{i}")(x)
        x = keras.layers.Dropout(params.dropout)(x, training=mode == ModeKeys.TRAIN)
    scaled = keras.layers.Dense(1, name="progression")(x)[:, 0]  # standardized to mean 0 and deviation 1
    predicted = mean + scale * scaled
    predictions = {"progression": predicted, "id": features["id"]}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)

    return EstimatorSpec(
        mode,
        predictions=predictions,
        loss=tf.square(scaled - (labels - mean) / scale),  # per example
        optimizer=keras.optimizers.AdamW(params.learning_rate, params.weight_decay),
        eval_metric_ops={
            "rmse": _rmse(labels, predicted),
            "baseline_rmse": _rmse(labels, tf.fill(tf.shape(labels), mean)),  # error of always predicting the mean
        },
        evaluation_hooks=[PredictedAgainstTrue()],
    )


def _rmse(labels: tf.Tensor, predicted: tf.Tensor) -> keras.Metric:
    """Return a metric: the root mean squared error over all examples of an evaluation."""
    metric = keras.metrics.RootMeanSquaredError()
    metric.update_state(labels, predicted)
    return metric


class PredictedAgainstTrue(runner.Hook):
    """Draws predicted against true values at each evaluation."""

    fetches = ("labels", "predictions/progression")

    def begin(self, run: Any) -> None:
        self._batches: list[Any] = []

    def after_examples(self, run: Any, values: Any) -> None:
        self._batches.append([values[name] for name in self.fetches])  # each float32 [examples]

    def end(self, run: Any) -> None:
        from matplotlib.figure import Figure

        if not self._batches:  # on a worker other than the chief
            return
        labels, predicted = np.concatenate(self._batches, axis=1)
        figure = Figure(figsize=(5, 5), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 350], [0, 350], color="grey", linewidth=1)
        axes.scatter(labels, predicted, s=14)
        axes.set(xlabel="progression of the disease", ylabel="predicted", xlim=(0, 350), ylim=(0, 350), aspect="equal")
        run.log({"predicted": figure})
