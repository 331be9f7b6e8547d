"""Microseconds per training step when every step is logged: a step of 1 ms and a tiny one, with five user metrics.

    python benchmarks/tracked_step.py [--rounds 7] [--steps 3000]

Each step logs five values with `runner.log`, besides the loss and the learning rate. They go to the journal, and
another process ships it to MLflow's sqlite database, like the supervisor of a run. It is compared with the same
training that logs every 100 steps and does not compute the five values. The last table shows how far MLflow was behind
when training ended: the time of the last flush, and what it shipped.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _estimators import Stopwatch
from _rounds import Case, Ratio, Times, arguments, measure, show

import runner
from runner.tracking.journal import Journal, journal_path

SHIPS = """
import os, sys
from pathlib import Path
from runner.config.schema import TrackingConfig
from runner.tracking.journal import RUN_ENDED, RUN_STARTED, WANTS_RUN, note_of_run
from runner.tracking.shipping import Shipping, write_settings

model_dir = Path(sys.argv[1])
note_of_run(model_dir, RUN_STARTED, command="train", name="benchmark", params={}, tags={})
note_of_run(model_dir, WANTS_RUN)  # the first step is not waited for
write_settings(model_dir, TrackingConfig(uri=f"sqlite:///{model_dir}/mlflow.db"), os.environ)
shipping = Shipping(os.environ)
shipping.ship(model_dir)
sys.stdin.read()
note_of_run(model_dir, RUN_ENDED, status="finished", recorded="FINISHED", files=["learning_curves.png"])
shipping.close()
"""

NAMES = [f"metric_{number}" for number in range(5)]


def model_fn(width: int, depth: int, *, logs: bool) -> Callable[..., runner.EstimatorSpec]:
    """Return a model_fn: an MLP of `depth` layers of `width` units that logs five values or none."""

    def made(features: tf.Tensor, labels: tf.Tensor, mode: str) -> runner.EstimatorSpec:
        hidden = features
        for _ in range(depth):
            hidden = keras.layers.Dense(width, activation="relu")(hidden)
        predictions = keras.layers.Dense(1)(hidden)
        loss = tf.reduce_mean(tf.math.squared_difference(predictions, labels))
        if logs:
            runner.log({name: loss * number for number, name in enumerate(NAMES)})
        return runner.EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.001))

    return made


def input_fn() -> tf.data.Dataset:
    random = np.random.default_rng(1)
    features = random.normal(size=(64, 32, 16)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, features.sum(-1, keepdims=True) / 16)).repeat()


def case(name: str, width: int, depth: int, steps: int, *, logs: bool) -> Case:
    """Return a case with rows for a step in the steady state and, if tracked, the seconds of the last flush."""
    config = runner.RunConfig(log_step_count_steps=1 if logs else 100, save_summary_steps=None)
    estimators: list[Any] = []

    def run() -> dict[str, Times]:
        if not estimators:
            folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
            journal = Journal(journal_path(folder))
            estimator = runner.Estimator(model_fn(width, depth, logs=logs), folder, config, journal=journal)
            estimators.append((folder, estimator))
        ((folder, estimator),) = estimators
        command = [sys.executable, "-c", SHIPS, str(folder)]
        shipping = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) if logs else None
        if shipping is not None:
            time.sleep(WARM_SECS)  # warm up: import MLflow and create the database
        watch = Stopwatch(100)
        estimator.train(input_fn, hooks=[watch], steps=steps)
        # With --tiny no loop grows, so the steady state is NaN.
        rows = {name: watch.spent / watch.steps if watch.steps else Times(math.nan, math.nan)}
        if shipping is not None:
            started = Times.now()
            shipping.communicate()
            assert shipping.returncode == 0, "nothing was shipped"
            rows[f"{name}, last flush"] = Times.now() - started
        return rows

    return run


WARM_SECS = 8.0
LONG, TINY = "a step of about 1 ms", "a tiny step"


def main() -> None:
    global WARM_SECS
    parsed = arguments(__doc__, 7, steps=(3000, 20, "steps of one round"))
    WARM_SECS = 0.5 if parsed.tiny else WARM_SECS
    cases = [
        case(f"{name}, {what}", width, depth, parsed.steps, logs=logs)
        for name, width, depth in ((LONG, 384, 5), (TINY, 16, 1))
        for what, logs in (("untracked", False), ("each step tracked", True))
    ]
    rows = measure(cases, parsed.rounds)
    flushes = {name: times for name, times in rows.items() if name.endswith("last flush")}
    steps = {name: times for name, times in rows.items() if name not in flushes}
    ratios = [Ratio(f"{LONG}, each step tracked", f"{LONG}, untracked", promise=1.05)]
    ratios.append(Ratio(f"{TINY}, each step tracked", f"{TINY}, untracked"))
    show(f"{parsed.steps} steps a round, seven values a step", steps, ratios)
    show("until MLflow has all", flushes, [], "s")
    for name in (LONG, TINY):
        pair = zip(rows[f"{name}, each step tracked"], rows[f"{name}, untracked"], strict=True)
        extra = sorted(1e6 * (tracked.wall - untracked.wall) / (len(NAMES) + 2) for tracked, untracked in pair)
        print(f"{name}: {extra[len(extra) // 2]:.2f} us a value")


if __name__ == "__main__":
    main()
