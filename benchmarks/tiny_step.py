"""Microseconds per training step of a tiny MLP: the Estimator, a hand-written tf.function loop, and Keras `fit`.

    python benchmarks/tiny_step.py [--rounds 9] [--steps 20000]

A 16-16-1 MLP, batch 32, SGD, on one CPU device, all from the same tf.data pipeline. At this size only overhead is
measured. Each round runs every case once, so that all see the same machine; the table has the median of
the rounds, and of the ratios in each round.

The hand-written loop does what the Estimator promises for each step, equal work: `tf.range` inside the graph, a raw
iterator, the loss of every step stacked and read once. It is written twice: with raw variables, the floor, and with the
same Keras layers and optimizer as the native model_fn, which is what those cost in anybody's loop.

The Estimator runs at default settings (steps per loop, logging, summaries, NaN stop, checkpoints). "steady" is the time
from one loop to the next, with all that Python does in between, once loops have grown; "whole call" is one
`train(steps=...)`, with its begin, the short first loops and the checkpoint at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import runner

v1 = tf.compat.v1

LEARNING_RATE = 0.01
# Loops shorter than this belong to the start, when the Estimator has not yet seen how long a step takes.
GROWN_LOOP = 1000

Case = Callable[[], dict[str, float]]
"""Runs once; name of a row -> seconds per step."""


def input_fn() -> tf.data.Dataset:
    random = np.random.default_rng(1)
    features = random.normal(size=(64, 32, 16)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, features.sum(-1, keepdims=True) / 16)).repeat()


# --- the peers ------------------------------------------------------------------------------------------------------


def hand_written_loop(steps: int) -> Case:
    """The floor: raw variables, gradients by tape, assign_sub."""
    random = tf.random.Generator.from_seed(1)
    hidden, output = tf.Variable(random.normal([16, 16])), tf.Variable(random.normal([16, 1]))
    variables = [hidden, tf.Variable(tf.zeros([16])), output, tf.Variable(tf.zeros([1]))]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        w1, b1, w2, b2 = variables
        with tf.GradientTape() as tape:
            # bias_add, which TensorFlow fuses with the product; `+` would cost 5 microseconds more.
            predictions = tf.nn.bias_add(tf.matmul(tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w1), b1)), w2), b2)
            loss = tf.reduce_mean(tf.math.squared_difference(predictions, y))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss

    return _looped("hand-written loop, raw variables", step, steps)


def hand_written_keras_loop(steps: int) -> Case:
    """The same loop around Keras layers and a Keras optimizer."""
    model, optimizer = keras_model(), keras.optimizers.SGD(LEARNING_RATE)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.squared_difference(model(x), y))
        optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        return loss

    return _looped("hand-written loop, Keras layers and SGD", step, steps)


def _looped(name: str, step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], steps: int) -> Case:
    @tf.function
    def loop(iterator: Any, num_steps: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, num_steps, element_shape=[])
        for i in tf.range(num_steps):
            x, y = next(iterator)
            losses = losses.write(i, step(x, y))
        return losses.stack()

    iterator = iter(input_fn())

    def run() -> dict[str, float]:
        started = time.perf_counter()
        losses = loop(iterator, tf.constant(steps)).numpy()
        secs = time.perf_counter() - started
        assert np.isfinite(losses).all()
        return {name: secs / steps}

    return run


def keras_fit(steps: int, steps_per_execution: int) -> Case:
    model = keras_model()
    model.compile(
        keras.optimizers.SGD(LEARNING_RATE), loss="mean_squared_error", steps_per_execution=steps_per_execution
    )
    dataset = input_fn()

    def run() -> dict[str, float]:
        started = time.perf_counter()
        model.fit(dataset, steps_per_epoch=steps, epochs=1, verbose=0)
        return {f"Keras fit, steps_per_execution={steps_per_execution}": (time.perf_counter() - started) / steps}

    return run


def keras_model() -> keras.Model:
    return keras.Sequential([keras.Input([16]), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])


# --- ours -----------------------------------------------------------------------------------------------------------


def native_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    hidden = keras.layers.Dense(16, activation="relu")(features)
    predictions = keras.layers.Dense(1)(hidden)
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


class Stopwatch(runner.Hook):
    """Adds up what passes from the end of one grown loop to the end of the next."""

    def __init__(self) -> None:
        self.steps = 0
        self.secs = 0.0
        self._ended = 0.0

    def after_step(self, run: Any, result: runner.StepResult) -> None:
        now = time.perf_counter()
        if result.num_steps >= GROWN_LOOP:
            self.steps += result.num_steps
            self.secs += now - self._ended
        self._ended = now


def estimator(name: str, model_fn: Callable[..., Any], steps: int) -> Case:
    trained = runner.Estimator(model_fn, tempfile.mkdtemp(prefix="tiny-step-"))

    def run() -> dict[str, float]:
        stopwatch = Stopwatch()
        started = time.perf_counter()
        trained.train(input_fn, hooks=[stopwatch], steps=steps)
        secs = time.perf_counter() - started
        return {f"Estimator, {name}": stopwatch.secs / stopwatch.steps, f"  whole call of {steps} steps": secs / steps}

    return run


# --- the table ------------------------------------------------------------------------------------------------------


def measure(cases: dict[str, Case], rounds: int) -> list[tuple[str, list[float]]]:
    """(row, seconds per step of each round), after one round that does not count."""
    rows: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for case, run in cases.items():
            for row, secs in run().items():
                if number:
                    rows.setdefault((case, row), []).append(secs)
    return [(row, secs) for (_, row), secs in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of one round, for the cases that are fast")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*shuffle=True.*")  # Keras: of any dataset
    steps = arguments.steps
    cases = {
        "raw": hand_written_loop(steps),
        "native": estimator("native (optimizer=, Keras layers and SGD)", native_model_fn, steps),
        "keras": hand_written_keras_loop(steps),
        "classic": estimator("classic (train_op=, get_variable)", classic_model_fn, steps),
        "fit 1": keras_fit(max(1, steps // 20), 1),
        "fit 50": keras_fit(max(50, steps // 4), 50),
    }
    rows = measure(cases, arguments.rounds)
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} cores, {arguments.rounds} rounds of {steps} steps, microseconds per step")
    floor = rows[0][1]
    slowest = next(secs for row, secs in rows if row.endswith("steps_per_execution=1"))
    print(f"\n{'':48} {'median':>8} {'min':>8} {'max':>8} {'x floor':>8} {'fit 1 / it':>11}")
    for row, secs in rows:
        numbers = " ".join(f"{1e6 * value:8.1f}" for value in (statistics.median(secs), min(secs), max(secs)))
        print(f"{row:48} {numbers} {_ratio(secs, floor):8.2f} {_ratio(slowest, secs):11.1f}")


def _ratio(secs: list[float], of: list[float]) -> float:
    """The median of the ratios of each round: what slows the machine for a while slows both."""
    return statistics.median(a / b for a, b in zip(secs, of, strict=True))


if __name__ == "__main__":
    main()
