"""Microseconds per training step of a tiny MLP: the Estimator, a hand-written tf.function loop, and Keras `fit`.

    python benchmarks/tiny_step.py [--rounds 9] [--steps 20000]

A 16-16-1 MLP, batch 32, SGD, on one CPU device, all from the same tf.data pipeline. At this size only overhead is
measured. Each round runs every case once, under the same load; the tables have the medians of the rounds, and of the
ratios in each round.

The hand-written loop does the same work as the Estimator in each step: `tf.range` inside the graph, a raw iterator, the
losses of all steps stacked and read once. There are three versions: with raw variables, the lower limit, without and
with two metrics (sums and counts in its own variables); and with the Keras layers, optimizer and metrics of the native
model_fn (`optimizer=`), which shows what these cost in any loop. The classic model_fn has `train_op=` and
`get_variable`.

The Estimator runs with default settings (steps per loop, logging, summaries, NaN stop, checkpoints). Rows measure the
time from one loop to the next, with all Python work in between, once loops have grown; "whole call" is one
`train(steps=...)`, including its setup, the short first loops and the checkpoint at the end. The two metrics are Keras
metrics that model_fn updates at every step, or two `tf.summary.scalar`, written every 100 steps within the loop.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _estimators import training
from _rounds import Case, Ratio, arguments, measure, show, timed

import runner

v1 = tf.compat.v1

LEARNING_RATE = 0.01

FLOOR = "by hand, raw variables"
NATIVE = "ours, native"
CLASSIC = "ours, classic"
KERAS = "by hand, Keras layers and SGD"
TWO = "two metrics"


def input_fn() -> tf.data.Dataset:
    random = np.random.default_rng(1)
    features = random.normal(size=(64, 32, 16)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, features.sum(-1, keepdims=True) / 16)).repeat()


# --- the peers ------------------------------------------------------------------------------------------------------


def hand_written_loop(steps: int, *, with_metrics: bool) -> Case:
    """Return the case of the lower limit: raw variables, gradients by tape, assign_sub."""
    random = tf.random.Generator.from_seed(1)
    hidden, output = tf.Variable(random.normal([16, 16])), tf.Variable(random.normal([16, 1]))
    variables = [hidden, tf.Variable(tf.zeros([16])), output, tf.Variable(tf.zeros([1]))]
    sums = [tf.Variable(tf.zeros([])) for _ in range(4)] if with_metrics else []

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        w1, b1, w2, b2 = variables
        with tf.GradientTape() as tape:
            # bias_add, because TensorFlow fuses it with the product; `+` costs 5 microseconds more.
            predictions = tf.nn.bias_add(tf.matmul(tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w1), b1)), w2), b2)
            loss = tf.reduce_mean(tf.math.squared_difference(predictions, y))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        _count(sums, [tf.abs(predictions - y), tf.math.squared_difference(predictions, y)] if sums else [])
        return loss

    return _looped(f"{FLOOR}, {TWO}" if with_metrics else FLOOR, step, steps)


def _count(sums: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Add each of `values` to its two of `sums`: their sum and their number."""
    for total, count, value in zip(sums[::2], sums[1::2], values, strict=True):
        total.assign_add(tf.reduce_sum(value))
        count.assign_add(tf.cast(tf.size(value), tf.float32))


def hand_written_keras_loop(steps: int, *, with_metrics: bool) -> Case:
    """Return the case of the same loop with Keras layers and a Keras optimizer."""
    model, optimizer = keras_model(), keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    metrics = keras_metrics() if with_metrics else []

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            predictions = model(x)
            loss = tf.reduce_mean(tf.math.squared_difference(predictions, y))
        optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        for metric in metrics:
            metric.update_state(y, predictions)
        return loss

    return _looped(f"{KERAS}, {TWO}" if with_metrics else KERAS, step, steps)


def _looped(name: str, step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], steps: int) -> Case:
    @tf.function
    def loop(iterator: Any, num_steps: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, num_steps, element_shape=[])
        for i in tf.range(num_steps):
            x, y = next(iterator)
            losses = losses.write(i, step(x, y))
        return losses.stack()

    iterator = iter(input_fn())

    def run() -> None:
        assert np.isfinite(loop(iterator, tf.constant(steps)).numpy()).all()

    return timed(name, steps, run)


def keras_fit(steps: int, steps_per_execution: int) -> Case:
    model = keras_model()
    model.compile(
        keras.optimizers.SGD(LEARNING_RATE), loss="mean_squared_error", steps_per_execution=steps_per_execution
    )
    dataset = input_fn()
    return timed(
        fit_name(steps_per_execution), steps, lambda: model.fit(dataset, steps_per_epoch=steps, epochs=1, verbose=0)
    )


def fit_name(steps_per_execution: int) -> str:
    return f"Keras fit, steps_per_execution={steps_per_execution}"


def keras_metrics() -> list[keras.metrics.Metric]:
    return [keras.metrics.MeanAbsoluteError(), keras.metrics.MeanSquaredError()]


def keras_model() -> keras.Model:
    return keras.Sequential([keras.Input([16]), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])


# --- ours -----------------------------------------------------------------------------------------------------------


def native_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    return _native_spec(_keras_predictions(features), labels, mode)


def _keras_predictions(features: tf.Tensor) -> tf.Tensor:
    hidden = keras.layers.Dense(16, activation="relu")(features)
    return keras.layers.Dense(1)(hidden)


def _native_spec(predictions: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    loss = tf.reduce_mean(tf.math.squared_difference(predictions, labels))
    return runner.EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(LEARNING_RATE))


def classic_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    hidden = tf.nn.relu(_dense(features, 16, "hidden"))
    predictions = _dense(hidden, 1, "output")
    loss = tf.reduce_mean(tf.math.squared_difference(predictions, labels))
    optimizer = v1.train.GradientDescentOptimizer(LEARNING_RATE)
    return runner.EstimatorSpec(
        mode, loss=loss, train_op=optimizer.minimize(loss, v1.train.get_or_create_global_step())
    )


def _dense(inputs: tf.Tensor, units: int, name: str) -> tf.Tensor:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [inputs.shape[-1], units])
        bias = v1.get_variable("bias", [units], initializer=v1.zeros_initializer())
        return tf.nn.bias_add(tf.matmul(inputs, kernel), bias)


def with_keras_metrics(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    """Like native_model_fn, with two metrics that are updated at each step."""
    predictions = _keras_predictions(features)
    for metric in keras_metrics():
        metric.update_state(labels, predictions)
    return _native_spec(predictions, labels, mode)


def with_summaries(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    """Like native_model_fn, with two metrics of the steps at which summaries are written."""
    predictions = _keras_predictions(features)
    tf.summary.scalar("mean_absolute_error", tf.reduce_mean(tf.abs(predictions - labels)))
    tf.summary.scalar("mean_squared_error", tf.reduce_mean(tf.math.squared_difference(predictions, labels)))
    return _native_spec(predictions, labels, mode)


# --- the tables -----------------------------------------------------------------------------------------------------


def ratios() -> list[Ratio]:
    metrics, summaries = f"{NATIVE}, {TWO}", f"{NATIVE}, two summaries"
    return [
        Ratio(metrics, FLOOR, promise=1.25),
        Ratio(metrics, f"{FLOOR}, {TWO}", promise=1.25),
        Ratio(metrics, f"{KERAS}, {TWO}"),
        Ratio(summaries, FLOOR, promise=1.25),
        Ratio(summaries, NATIVE, promise=1.1),
        Ratio(NATIVE, FLOOR, promise=1.25),
        Ratio(CLASSIC, FLOOR, promise=1.25),
        *(Ratio(NATIVE, fit_name(number)) for number in (1, 50, 1000)),
        *(Ratio(f"{row}, whole call", FLOOR) for row in (metrics, NATIVE, CLASSIC)),
    ]


def main() -> None:
    parsed = arguments(__doc__, 9, steps=(20_000, 200, "steps of one round, for the cases that are fast"))
    warnings.filterwarnings("ignore", message=".*shuffle=True.*")  # Keras warns so for any dataset
    steps = parsed.steps
    cases = [
        hand_written_loop(steps, with_metrics=False),
        training(f"{NATIVE}, {TWO}", with_keras_metrics, input_fn, steps),
        hand_written_loop(steps, with_metrics=True),
        training(NATIVE, native_model_fn, input_fn, steps),
        hand_written_keras_loop(steps, with_metrics=False),
        training(CLASSIC, classic_model_fn, input_fn, steps),
        hand_written_keras_loop(steps, with_metrics=True),
        training(f"{NATIVE}, two summaries", with_summaries, input_fn, steps),
        keras_fit(max(1, steps // 20), 1),
        keras_fit(max(50, steps // 4), 50),
        keras_fit(max(1000, steps // 2), 1000),
    ]
    show(f"a step of a tiny MLP, {steps} steps a round", measure(cases, parsed.rounds), ratios())


if __name__ == "__main__":
    main()
