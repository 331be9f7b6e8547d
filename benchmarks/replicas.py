"""Microseconds per step of the tiny MLP on one device and on two: the Estimator, and two loops written by hand.

    python benchmarks/replicas.py [--rounds 9] [--steps 20000]

Model and data are those of tiny_step.py: a global batch of 32, on `one_device` and on `mirrored` over two virtual CPUs.
Both loops are a `tf.range` in the graph around `strategy.run` of one step, with the Keras layers and optimizer of the
native model_fn. They differ in the source of batches: a raw tf.data iterator, from which each replica takes its rows,
or the iterator of `experimental_distribute_dataset`.

On two CPUs the Estimator reduces on one device, which is faster than TensorFlow's choice; the loops do the same. The
loop over `experimental_distribute_dataset` also runs as most users would write it, with TensorFlow's choice.
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
from tiny_step import LEARNING_RATE, classic_model_fn, input_fn, keras_model, native_model_fn

import runner
from runner.distribute.strategy import split_cpu

GLOBAL_BATCH = 32
DEVICES = {"one_device": ["CPU:0"], "mirrored(2)": ["CPU:0", "CPU:1"]}
PROMISES = {("mirrored(2)", "distribute_dataset"): 0.9}


def build_step(strategy: tf.distribute.Strategy) -> Callable[[Any, Any], tf.Tensor]:
    """Return a replica's step on its rows; the sum of the results over replicas is the mean over the global batch."""
    with strategy.scope():
        model, optimizer = keras_model(), keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.math.squared_difference(model(x), y)) / GLOBAL_BATCH
        variables = model.trainable_variables
        # Keras sums gradients over replicas.
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
        return loss

    return step


def raw_iterator_loop(name: str, strategy: tf.distribute.Strategy, steps: int) -> Case:
    step = build_step(strategy)
    rows = GLOBAL_BATCH // strategy.num_replicas_in_sync

    def one(iterator: Any) -> Any:
        x, y = next(iterator)

        def replica_step() -> tf.Tensor:
            first = tf.distribute.get_replica_context().replica_id_in_sync_group * rows
            return step(x[first : first + rows], y[first : first + rows])

        return strategy.run(replica_step)

    return _looped(name, strategy, one, iter(input_fn()), steps)


def distributed_loop(name: str, strategy: tf.distribute.Strategy, steps: int) -> Case:
    step = build_step(strategy)

    def one(iterator: Any) -> Any:
        return strategy.run(step, args=next(iterator))

    return _looped(name, strategy, one, iter(strategy.experimental_distribute_dataset(input_fn())), steps)


def _looped(name: str, strategy: tf.distribute.Strategy, one: Callable[[Any], Any], iterator: Any, steps: int) -> Case:
    @tf.function
    def loop(iterator: Any, num_steps: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, num_steps, element_shape=[])
        for i in tf.range(num_steps):
            losses = losses.write(i, tf.add_n(strategy.experimental_local_results(one(iterator))))
        return losses.stack()

    def run() -> None:
        assert np.isfinite(loop(iterator, tf.constant(steps)).numpy()).all()

    return timed(name, steps, run)


def ours(name: str, strategy: tf.distribute.Strategy, model_fn: Callable[..., Any], steps: int) -> Case:
    config = runner.RunConfig(train_distribute=strategy)
    data = runner.Input(input_fn, batch_size=GLOBAL_BATCH)
    return training(name, model_fn, data, steps, grown=min(1000, steps // 5), config=config)


def cases_of(title: str, steps: int) -> list[Case]:
    name, devices = title.partition("(")[0], DEVICES[title]
    strategy = runner.build_strategy(name, devices=devices)
    cases = [
        raw_iterator_loop(f"{title}, raw iterator", strategy, steps),
        ours(f"{title}, ours, native", strategy, native_model_fn, steps),
        distributed_loop(f"{title}, distribute_dataset", strategy, steps),
        ours(f"{title}, ours, classic", strategy, classic_model_fn, steps),
    ]
    if name == "mirrored":
        default = tf.distribute.MirroredStrategy(devices)
        cases.append(distributed_loop(f"{title}, distribute_dataset, default reduction", default, steps))
    return cases


def ratios() -> list[Ratio]:
    found = [
        Ratio(f"{title}, ours, {kind}", f"{title}, {peer}", promise=PROMISES.get((title, peer)))
        for title in DEVICES
        for kind in ("native", "classic")
        for peer in ("raw iterator", "distribute_dataset")
    ]
    return [*found, Ratio("mirrored(2), ours, native", "mirrored(2), distribute_dataset, default reduction")]


def main() -> None:
    parsed = arguments(__doc__, 9, steps=(20_000, 100, "steps of one round"))  # batches come in groups from 10,000 on
    split_cpu(2)
    cases = [case for title in DEVICES for case in cases_of(title, parsed.steps)]
    show(f"a step of a tiny MLP, {parsed.steps} steps a round", measure(cases, parsed.rounds), ratios())


if __name__ == "__main__":
    main()
