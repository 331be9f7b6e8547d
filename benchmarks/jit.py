"""A step with and without `train.jit`: a tiny MLP, a chain of cheap operations on large tensors, the CNN of
cnn_step.py.

    python benchmarks/jit.py [--rounds 7] [--mlp 5000] [--chain 200] [--cnn 24]

The MLP (16-16-1, batch 32) is all overhead. The chain (32 times `tanh(x * w + b)` on 512x256 numbers) is the best case
for XLA: one pass over memory where TensorFlow makes one per operation. The CNN spends its time in convolutions. Rows
measure from the end of one loop to the end of the next, once loops have grown. The line before the tables has the time
to compile: seconds from the call of train to the end of its first step.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tempfile
import time
from collections.abc import Callable
from typing import Any

import cnn_step
import keras
import numpy as np
import tensorflow as tf
import tiny_step
from _estimators import training
from _rounds import Ratio, arguments, measure, show

import runner


def chain_input_fn() -> tf.data.Dataset:
    features = np.random.default_rng(1).normal(size=(4, 512, 256)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(features).repeat()


def chain_model_fn(features: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    x = features
    for number in range(32):
        scale = tf.compat.v1.get_variable(f"scale_{number}", [256])
        x = tf.tanh(x * scale + tf.compat.v1.get_variable(f"offset_{number}", [256]))
    return runner.EstimatorSpec(mode, loss=tf.reduce_mean(tf.square(x)), optimizer=keras.optimizers.SGD(0.01))


def first_step(model_fn: Callable[..., Any], input_fn: Any, *, jit: bool) -> float:
    started = time.perf_counter()
    runner.Estimator(model_fn, tempfile.mkdtemp(prefix="benchmark-"), runner.RunConfig(jit=jit)).train(
        input_fn, steps=1
    )
    return time.perf_counter() - started


def main() -> None:
    parsed = arguments(
        __doc__, 7, mlp=(5000, 100, "steps a round"), chain=(200, 10, "steps a round"), cnn=(24, 3, "steps a round")
    )
    models = {
        "tiny MLP": (tiny_step.native_model_fn, tiny_step.input_fn, parsed.mlp, 200),
        "chain": (chain_model_fn, chain_input_fn, parsed.chain, 10),
        "CNN": (cnn_step.model_fn, cnn_step.input_fn, parsed.cnn, 2),
    }
    for name, (model_fn, input_fn, steps, grown) in models.items():
        first_step(model_fn, input_fn, jit=False)  # warm up: work that is done once per process
        took = {jit: first_step(model_fn, input_fn, jit=jit) for jit in (False, True)}
        print(f"\n{name}: first step after {took[False]:.2f} s, with jit {took[True]:.2f} s")
        cases = [
            training(row, model_fn, input_fn, steps, grown=grown, config=runner.RunConfig(jit=jit))
            for row, jit in ((name, False), (f"{name}, jit", True))
        ]
        show(f"a step, {steps} steps a round", measure(cases, parsed.rounds), [Ratio(f"{name}, jit", name)])


if __name__ == "__main__":
    main()
