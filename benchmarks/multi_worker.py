"""Microseconds per step of the tiny MLP in two processes: the Estimator, and two loops written by hand.

    python benchmarks/multi_worker.py [--rounds 7] [--steps 1500]

Model and data are those of tiny_step.py: a global batch of 32, of which each of two processes on this host takes 16,
with MultiWorkerMirroredStrategy. Both loops are a `tf.range` in the graph around `strategy.run` of one step, with the
Keras layers and optimizer of the native model_fn, and one collective per step, for the gradients. They differ in the
source of batches: a raw tf.data iterator in each process, which takes its rows, or the iterator of
`experimental_distribute_dataset`. Their losses are this process's part, summed once after the loop; those of the native
model_fn are of the global batch, and are summed together with the gradients.

A process can have only one such strategy, so all cases share it, in the same order in both processes. The numbers are
the chief's. The rows of a collective alone are of one number, for which TensorFlow's ring sends one message to each
process, and of as many numbers as the model has gradients, for which it sends two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from _estimators import training
from _rounds import Case, Ratio, arguments, measure, show, timed
from replicas import GLOBAL_BATCH, build_step
from tiny_step import classic_model_fn, input_fn, native_model_fn

import runner
from runner.distribute.cluster import Cluster
from runner.distribute.local_cluster import free_ports
from runner.distribute.tf_config import read_tf_config
from runner.programs.train import TrainProgram

NUM_WORKERS = 2
POLL_SECS = 0.1
RAW, DISTRIBUTED, ALONE = "raw iterator", "distribute_dataset", "one collective and nothing else"
NUM_GRADIENTS = 16 * 16 + 16 + 16 + 1
OF_GRADIENTS = f"one collective of {NUM_GRADIENTS} numbers"
NATIVE, CLASSIC = "ours, native", "ours, classic"
UNTIMED = "ours, native, steps not timed"


# --- one worker -----------------------------------------------------------------------------------------------------


def raw_iterator_loop(strategy: tf.distribute.Strategy, steps: int, worker: int) -> Case:
    step = build_step(strategy)
    rows = GLOBAL_BATCH // NUM_WORKERS
    mine = slice(worker * rows, (worker + 1) * rows)

    def one(iterator: Any) -> Any:
        x, y = next(iterator)
        return strategy.run(step, args=(x[mine], y[mine]))

    return _looped(RAW, strategy, one, iter(input_fn()), steps)


def distributed_loop(strategy: tf.distribute.Strategy, steps: int) -> Case:
    step = build_step(strategy)

    def one(iterator: Any) -> Any:
        return strategy.run(step, args=next(iterator))

    return _looped(DISTRIBUTED, strategy, one, iter(strategy.experimental_distribute_dataset(input_fn())), steps)


def collective_alone(name: str, strategy: tf.distribute.Strategy, steps: int, value: tf.Tensor) -> Case:
    def one(iterator: Any) -> Any:
        mine = next(iterator)

        def of_replica() -> tf.Tensor:
            # identity puts the value on the replica's device
            total = tf.distribute.get_replica_context().all_reduce(_SUM, tf.identity(mine))
            return total if value.shape.rank == 0 else total[0]

        return strategy.run(of_replica)

    return _looped(name, strategy, one, iter(tf.data.Dataset.from_tensors(value).repeat()), steps)


def _looped(name: str, strategy: tf.distribute.Strategy, one: Callable[[Any], Any], iterator: Any, steps: int) -> Case:
    @tf.function
    def loop(iterator: Any, num_steps: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, num_steps, element_shape=[])
        for i in tf.range(num_steps):
            losses = losses.write(i, one(iterator))
        return strategy.reduce(_SUM, strategy.run(losses.stack), axis=None)

    def run() -> None:
        assert np.isfinite(loop(iterator, tf.constant(steps)).numpy()).all()

    return timed(name, steps, run)


def ours(
    name: str, strategy: tf.distribute.Strategy, cluster: Cluster, model_fn: Callable[..., Any], steps: int
) -> Case:
    config = runner.RunConfig(train_distribute=strategy, cluster=cluster)
    data, model_dir = runner.Input(input_fn, batch_size=GLOBAL_BATCH), Path(tempfile.gettempdir()) / name
    return training(name, model_fn, data, steps, grown=min(1000, steps // 10), config=config, model_dir=model_dir)


_SUM = tf.distribute.ReduceOp.SUM


def without_step_times(case: Case) -> Case:
    """Return a case whose workers do not measure what their own part of a step takes."""

    def run() -> Any:
        with mock.patch.object(TrainProgram, "_measure_sent_at", return_value=[]):
            return case()

    return run


def work(parsed: Any) -> None:
    strategy = runner.build_strategy("multi_worker")
    assert strategy is not None
    cluster = read_tf_config(os.environ["TF_CONFIG"])
    steps = parsed.steps
    cases = [
        collective_alone(ALONE, strategy, steps, tf.constant(1.0)),
        collective_alone(OF_GRADIENTS, strategy, steps, tf.ones([NUM_GRADIENTS])),
        raw_iterator_loop(strategy, steps, cluster.worker_index),
        ours(NATIVE, strategy, cluster, native_model_fn, steps),
        without_step_times(ours(UNTIMED, strategy, cluster, native_model_fn, steps)),
        distributed_loop(strategy, steps),
        ours(CLASSIC, strategy, cluster, classic_model_fn, steps),
    ]
    rows = measure(cases, parsed.rounds)
    promises = {RAW: 1.02, DISTRIBUTED: 0.85, ALONE: 1.35, OF_GRADIENTS: None}
    ratios = [Ratio(kind, peer, promise) for kind in (NATIVE, CLASSIC) for peer, promise in promises.items()]
    ratios.append(Ratio(NATIVE, UNTIMED, 1.01))
    if cluster.is_chief:
        show(f"a step of a tiny MLP, {NUM_WORKERS} processes", rows, ratios)


# --- the processes --------------------------------------------------------------------------------------------------


def start_workers(shared: str) -> None:
    """Run this script as each of the workers; the chief's output is printed.

    Args:
      shared: the workers' directory for temporary files.
    """
    chief, *others = [f"127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)]
    cluster = {"chief": [chief], "worker": others}
    tasks = [{"type": "chief", "index": 0}, *({"type": "worker", "index": index} for index in range(len(others)))]
    workers = []
    for task in tasks:
        env = {**os.environ, "TMPDIR": shared, "TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
        stdout = None if task["type"] == "chief" else subprocess.DEVNULL
        workers.append(subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=stdout))
    codes: list[int | None] = [None]
    try:
        while None in codes and not any(codes):  # if one fails, the other waits forever
            time.sleep(POLL_SECS)
            codes = [worker.poll() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(codes):
        sys.exit(f"exit codes of the workers: {codes}")


def main() -> None:
    if "TF_CONFIG" in os.environ:
        work(arguments(__doc__, 7, steps=(1500, 100, "steps of one round")))
    else:
        with tempfile.TemporaryDirectory() as shared:
            start_workers(shared)


if __name__ == "__main__":
    main()
