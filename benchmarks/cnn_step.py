"""Milliseconds per step of a CNN that keeps every core busy: the Estimator, and a bare `tf.function` in a Python loop.

    python benchmarks/cnn_step.py [--rounds 9] [--steps 40]

Images of 32x32x3, batch 64, two convolutions of 32 and 64 filters, Adam. Computation dominates, so the Estimator's
overhead should not be visible. The bare loop calls a function of one step and reads the losses at the end. The
Estimator's row measures from the end of one loop to the end of the next, without the first loop (one step); "whole
call" includes the setup and the checkpoint at the end: read it as seconds per call.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _estimators import training
from _rounds import Case, Ratio, arguments, measure, show, timed

import runner

BARE, OURS = "bare tf.function", "ours"


def input_fn() -> tf.data.Dataset:
    random = np.random.default_rng(1)
    images = random.normal(size=(8, 64, 32, 32, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((images, random.integers(10, size=(8, 64)))).repeat().prefetch(2)


def build_layers() -> list[keras.layers.Layer]:
    return [
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]


def losses_of(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    x = features
    for layer in build_layers():
        x = layer(x)
    return runner.EstimatorSpec(mode, loss=losses_of(x, labels), optimizer=keras.optimizers.Adam(0.001))


def bare_loop(steps: int) -> Case:
    model, optimizer = keras.Sequential([keras.Input([32, 32, 3]), *build_layers()]), keras.optimizers.Adam(0.001)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(model(images), labels))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
        return loss

    iterator = iter(input_fn())

    def run() -> None:
        losses = [step(iterator) for _ in range(steps)]
        assert np.isfinite(tf.stack(losses).numpy()).all()

    return timed(BARE, steps, run)


def main() -> None:
    parsed = arguments(__doc__, 9, steps=(40, 12, "steps of one round; at least 12"))
    steps = max(12, parsed.steps)
    cases = [bare_loop(steps), training(OURS, model_fn, input_fn, steps, grown=2)]
    ratios = [Ratio(OURS, BARE, promise=1.02), Ratio(f"{OURS}, whole call", BARE)]
    show(f"a step of a CNN, {steps} steps a round", measure(cases, parsed.rounds), ratios)


if __name__ == "__main__":
    main()
