"""Tiny model_fns and data that several tests train: one for each style of writing a model_fn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from runner import EstimatorSpec, Hook, Input, ModeKeys

v1 = tf.compat.v1


def data(num_examples: int = 50, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Features `[n, 4]` and labels `[n, 1]`, always the same."""
    rng = np.random.RandomState(0)
    features = rng.randn(num_examples, 4)
    labels = features @ np.array([1.0, -2.0, 0.5, 3.0]) + 0.1 * rng.randn(num_examples)
    return features.astype(dtype), labels[:, None].astype(dtype)


def native(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Keras 3 layers, a loss per example, an optimizer."""
    dtype = features.dtype.name
    hidden = keras.layers.Dense(8, activation="tanh", dtype=dtype)(features)
    predictions = keras.layers.Dense(1, dtype=dtype)(hidden)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"y": predictions, "x": features})
    error = keras.metrics.MeanAbsoluteError(name="mae", dtype=dtype)
    error.update_state(labels, predictions)
    return EstimatorSpec(
        mode,
        predictions={"y": predictions},
        loss=tf.square(predictions - labels)[:, 0],
        optimizer=keras.optimizers.SGD(0.03, momentum=0.5),
        eval_metric_ops={"mae": error, "bias": (predictions - labels)[:, 0]},
    )


def classic(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """get_variable, v1 losses, metrics and optimizer; everything is built before the look at `mode`."""
    dtype = features.dtype
    with v1.variable_scope("hidden", dtype=dtype):
        kernel = v1.get_variable("kernel", [4, 8])
        bias = v1.get_variable("bias", [8], initializer=v1.zeros_initializer())
    hidden = tf.tanh(features @ kernel + bias)
    with v1.variable_scope("out", dtype=dtype):
        predictions = hidden @ v1.get_variable("kernel", [8, 1])
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"y": predictions, "x": features})
    loss = tf.reduce_mean(tf.square(predictions - labels))
    optimizer = v1.train.MomentumOptimizer(0.03, 0.5)
    train_op = optimizer.minimize(loss, v1.train.get_or_create_global_step())
    metrics = {"mae": v1.metrics.mean_absolute_error(labels, predictions), "bias": (predictions - labels)[:, 0]}
    return EstimatorSpec(mode, predictions={"y": predictions}, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def keras_model(features: Any, labels: Any, mode: str) -> keras.Model:
    """A compiled keras.Model, built inside."""
    dtype = features.dtype.name
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.03, momentum=0.5),
        loss=keras.losses.MeanSquaredError(dtype=dtype),
        metrics=[keras.metrics.MeanAbsoluteError(name="mae", dtype=dtype)],
    )
    return model


STYLES: dict[str, Callable[..., Any]] = {"native": native, "classic": classic, "keras_model": keras_model}


def train_input(batch_size: int, num_examples: int = 50, dtype: str = "float32") -> Input:
    """Shuffled epochs without end; the last batch of each is what is left."""

    def input_fn(params: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(data(num_examples, dtype))
        return dataset.shuffle(num_examples, seed=5).batch(params["batch_size"]).repeat()

    return Input(input_fn, params={}, batch_size=batch_size)


def eval_input(batch_size: int, num_examples: int = 22, dtype: str = "float32") -> Input:
    """One pass over all examples, in order."""

    def input_fn(params: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data(num_examples, dtype)).batch(params["batch_size"])

    return Input(input_fn, params={}, batch_size=batch_size)


def strategies() -> dict[str, tf.distribute.Strategy | None]:
    """The single-process strategies, over two virtual CPUs where they take several devices."""
    cpus = ["/cpu:0", "/cpu:1"]
    return {
        "default": None,
        "one_device": tf.distribute.OneDeviceStrategy("/cpu:0"),
        "mirrored": tf.distribute.MirroredStrategy(cpus),
        "central_storage": tf.distribute.experimental.CentralStorageStrategy(cpus, "/cpu:0"),
    }


def texts_beside(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """The native model, which predicts strings, too."""
    spec = native(features, labels, mode)
    return spec._replace(predictions={**spec.predictions, "text": tf.strings.as_string(labels[:, 0])})


FETCHED = ("features", "labels", "predictions/y", "predictions/text")
"""What hooks can fetch of it."""


class Rows(Hook):
    """Fetches `names` and keeps what it gets, and at which steps."""

    def __init__(self, *names: str) -> None:
        self.fetches = names
        self.steps: list[int] = []
        self.batches: list[dict[str, np.ndarray]] = []

    def after_examples(self, run: Any, values: Mapping[str, np.ndarray]) -> None:
        self.steps.append(run.global_step)
        self.batches.append(dict(values))

    def of(self, name: str) -> np.ndarray:
        return np.concatenate([batch[name] for batch in self.batches])
