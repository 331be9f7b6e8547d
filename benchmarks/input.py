"""Examples per second of training a model that computes nothing, compared with reading the bare dataset.

    python benchmarks/input.py [--rounds 9] [--steps 10000]

It shows how much of an input pipeline's speed reaches the training step. Two pipelines with batches of 128: "batches in
memory" only returns existing batches; "shuffled images" shuffles, casts and scales 28x28 images one by one, in
parallel, and prefetches. The dataset is read by `Dataset.reduce`, which stays within TensorFlow; by a Python loop; and
by a raw iterator in a `tf.while_loop` that adds up what it reads, the least that any training loop does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _estimators import training
from _rounds import Case, Ratio, arguments, measure, show, timed

import runner

BATCH = 128


def batches_in_memory() -> tf.data.Dataset:
    features = np.random.default_rng(1).normal(size=(64, BATCH, 32)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(features).repeat()


def shuffled_images() -> tf.data.Dataset:
    images = np.random.default_rng(1).integers(256, size=(8192, 28, 28), dtype=np.uint8)

    def scaled(image: tf.Tensor) -> tf.Tensor:
        return tf.cast(image, tf.float32) / 255.0

    dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(2048, seed=1).repeat()
    return dataset.map(scaled, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH, drop_remainder=True).prefetch(4)


PIPELINES: dict[str, tuple[Callable[[], tf.data.Dataset], int]] = {
    "batches in memory": (batches_in_memory, 1),
    "shuffled images": (shuffled_images, 10),
}
"""Name -> its input_fn, and by how much fewer steps are taken."""


def model_fn(features: tf.Tensor, mode: str) -> runner.EstimatorSpec:
    """Return the spec of a model with one variable that only reads the batch."""
    scale = tf.compat.v1.get_variable("scale", [], initializer=tf.compat.v1.zeros_initializer())
    loss = scale * tf.reduce_sum(features)
    return runner.EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(1e-9))


def python_drain(dataset: tf.data.Dataset, steps: int) -> None:
    for _ in dataset.take(steps):
        pass


def reduce_drain(dataset: tf.data.Dataset, steps: int) -> None:
    dataset.take(steps).reduce(np.int64(0), lambda count, _: count + 1).numpy()


def loop_drain(dataset: tf.data.Dataset, steps: int) -> Callable[[], Any]:
    @tf.function
    def loop(iterator: Any) -> tf.Tensor:
        total = tf.constant(0.0)
        for _ in tf.range(steps):
            total += tf.reduce_sum(next(iterator))
        return total

    iterator = iter(dataset)
    return lambda: loop(iterator).numpy()


def ours(name: str, input_fn: Callable[[], tf.data.Dataset], steps: int) -> Case:
    trained = training(name, model_fn, input_fn, steps, grown=100)
    return lambda: {row: times / BATCH for row, times in trained().items()}  # per example, not per step


def cases_of(name: str, steps: int) -> list[Case]:
    input_fn, fewer = PIPELINES[name]
    steps = max(20, steps // fewer)
    dataset = input_fn()
    return [
        timed(f"{name}, Dataset.reduce", steps * BATCH, lambda: reduce_drain(dataset, steps)),
        ours(f"{name}, ours", input_fn, steps),
        timed(f"{name}, raw iterator in a loop", steps * BATCH, loop_drain(dataset, steps)),
        timed(f"{name}, Python loop", steps * BATCH, lambda: python_drain(dataset, steps)),
    ]


def main() -> None:
    parsed = arguments(__doc__, 9, steps=(10_000, 20, "steps of one round, for the pipeline that is fast"))
    cases = [case for name in PIPELINES for case in cases_of(name, parsed.steps)]
    drains = ("Dataset.reduce", "raw iterator in a loop", "Python loop")
    ratios = [Ratio(f"{name}, ours", f"{name}, {drain}") for name in PIPELINES for drain in drains]
    show("an example of the input", measure(cases, parsed.rounds), ratios)


if __name__ == "__main__":
    main()
