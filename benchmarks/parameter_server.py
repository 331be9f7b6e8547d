"""Microseconds per update of the tiny MLP with parameter servers: the Estimator, and the loop of TensorFlow's tutorial.

    python benchmarks/parameter_server.py [--rounds 7] [--steps 2000]

Two workers and one server on this host; model and data are those of tiny_step.py, with one update per batch of 32. The
tutorial schedules one function per step, which takes a batch from the worker's iterator inside `strategy.run`. The
third row does by hand what the Estimator does: many steps in each scheduled function.

Times are wall-clock times of the whole cluster; CPU is the coordinator's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from _estimators import training
from _rounds import Case, Ratio, arguments, measure, show, timed
from tiny_step import LEARNING_RATE, classic_model_fn, input_fn, keras_model, native_model_fn

import runner
from runner.distribute.strategy import build_parameter_server

BATCH, NUM_WORKERS = 32, 2
TUTORIAL, BY_HAND = "tutorial, a step a function", "by hand, many steps a function"
SERVE = "import os; from runner.distribute.tf_config import read_tf_config; "
SERVE += "from runner.distribute.grpc_server import serve, start_server; "
SERVE += "serve(start_server(read_tf_config(os.environ['TF_CONFIG'])))"


@contextmanager
def cluster() -> Iterator[dict[str, list[str]]]:
    """Yield the addresses of a cluster whose servers and workers run inside this context."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 + NUM_WORKERS)]
    chief, ps, *workers = (f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    tasks = {"chief": [chief], "ps": [ps], "worker": workers}
    for each in sockets:
        each.close()
    processes = []
    for kind in ("ps", "worker"):
        for index in range(len(tasks[kind])):
            task = {"cluster": tasks, "task": {"type": kind, "index": index}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
            processes.append(subprocess.Popen([sys.executable, "-c", SERVE], env=environment))
    try:
        yield tasks
    finally:
        for process in processes:
            process.kill()


def by_hand(name: str, strategy: tf.distribute.Strategy, steps: int, each: int) -> Case:
    """Return the case of https://www.tensorflow.org/tutorials/distribute/parameter_server_training, with `each`
    steps in a function.
    """
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = keras_model(), keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.squared_difference(model(x), y))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
        return loss

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        loss = tf.constant(0.0)
        for _ in tf.range(each):
            loss = strategy.run(replica_step, args=next(iterator))
        return loss

    def dataset_fn() -> tf.data.Dataset:
        return strategy.distribute_datasets_from_function(lambda context: input_fn())

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))

    def run() -> None:
        for _ in range(steps // each):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()

    return timed(name, steps, run)


def ours(name: str, strategy: tf.distribute.Strategy, model_fn: Callable[..., Any], steps: int) -> Case:
    config = runner.RunConfig(train_distribute=strategy)
    data = runner.Input(input_fn, batch_size=BATCH)
    return training(name, model_fn, data, steps, grown=min(100, steps // 20), config=config)


def main() -> None:
    parsed = arguments(__doc__, 7, steps=(2000, 200, "updates of one round"))
    with cluster() as tasks:
        strategy = build_parameter_server(tasks)
        cases = [
            by_hand(TUTORIAL, strategy, parsed.steps, 1),
            ours("ours, native", strategy, native_model_fn, parsed.steps),
            by_hand(BY_HAND, strategy, parsed.steps, min(100, parsed.steps)),
            ours("ours, classic", strategy, classic_model_fn, parsed.steps),
        ]
        rows = measure(cases, parsed.rounds)
        ratios = [Ratio("ours, native", TUTORIAL, promise=0.5), Ratio("ours, classic", TUTORIAL, promise=0.5)]
        show(f"an update of a tiny MLP, {parsed.steps} a round", rows, [*ratios, Ratio("ours, native", BY_HAND)])
        sys.stdout.flush()
    os._exit(0)  # TensorFlow would log for every function that its workers are gone


if __name__ == "__main__":
    main()
