"""A model of one weight that learns y = 2x, whose numbers can be checked by hand, and what tests read back of it."""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, build_strategy

v1 = tf.compat.v1


def line(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Classic. params: `start` (0) and `learning_rate` (0.01)."""
    start = v1.constant_initializer(params.get("start", 0.0))
    predictions = features * v1.get_variable("weight", [], initializer=start)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"y": predictions, "x": features})
    loss = tf.reduce_mean(tf.square(predictions - labels), name="my_loss")
    optimizer = v1.train.MomentumOptimizer(params.get("learning_rate", 0.01), 0.0)
    train_op = optimizer.minimize(loss, v1.train.get_global_step())
    error = v1.metrics.mean_absolute_error(labels, predictions)
    return EstimatorSpec(mode, predictions, loss, train_op, eval_metric_ops={"mae": error})


@functools.cache
def mirrored() -> tf.distribute.Strategy:
    """Two replicas. One object for all tests, and no collectives: those of two MirroredStrategies share their keys."""
    strategy = build_strategy("mirrored", virtual_devices=2)
    assert strategy is not None
    return strategy


class Weight(keras.layers.Layer):
    """x -> weight * x."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(), initializer="zeros", name="weight")

    def call(self, features: Any) -> Any:
        return features * self.weight


def native_line(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """The same with a Keras layer, a loss per example and `optimizer=`."""
    predictions = Weight(name="line")(features)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"y": predictions, "x": features})
    loss = tf.square(predictions - labels)
    optimizer = keras.optimizers.SGD(params.get("learning_rate", 0.01))
    metrics = {"mae": tf.abs(predictions - labels)}
    return EstimatorSpec(mode, predictions, loss, optimizer=optimizer, eval_metric_ops=metrics)


LINES: dict[str, Callable[..., EstimatorSpec]] = {"native": native_line, "classic": line}


def points(num_examples: int = 8, batch_size: int = 2, *, repeat: bool = False) -> Callable[[], tf.data.Dataset]:
    """An input function: x = 1, 2, .. and y = 2x, in order."""

    def input_fn() -> tf.data.Dataset:
        x = np.arange(1, num_examples + 1, dtype=np.float32)
        dataset = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(batch_size)
        return dataset.repeat() if repeat else dataset

    return input_fn


class Event(NamedTuple):
    """A value in an event file."""

    step: int
    tag: str
    value: Any


def read_events(folder: Any) -> list[Event]:
    """What TensorBoard finds in the event files of `folder`, in order; scalars as floats, other tensors as arrays."""
    found = []
    for path in sorted(glob.glob(os.path.join(folder, "events.out.tfevents.*")), key=_by_number):
        for event in v1.train.summary_iterator(path):
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor) if value.HasField("tensor") else np.asarray(value.simple_value)
                is_scalar = array.ndim == 0 and array.dtype != object
                found.append(Event(event.step, value.tag, float(array) if is_scalar else array))
    return found


def _by_number(path: str) -> list[Any]:
    """Sort key: names of event files end with seconds and a running number."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def steps_of(folder: Any, tag: str) -> list[int]:
    """The steps at which `tag` was written, in order."""
    return [event.step for event in read_events(folder) if event.tag == tag]
