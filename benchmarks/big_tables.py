"""Milliseconds per step of tables of many rows: a script of tf.estimator in two processes, on TensorFlow 2.15 and on
ours, and our native step in one process and on `mirrored`.

    python benchmarks/big_tables.py [--rounds 3] [--steps 400]

A table of [rows, 64], of which a step looks 2,048 rows up, over both workers, and SGD. A step's work is the same
however many rows there are. The script is first_step/table_script.py; it measures itself, from a first loop to the
last, so imports, traces and checkpoints do not count. TensorFlow 2.15 is that of `make golden`, or of the Python that
RUNNER_GOLDEN_PYTHON names. Without it only ours is measured.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _estimators import training
from _processes import HERE, environment
from _rounds import Case, Ratio, Times, arguments, show

import runner
from runner.distribute.local_cluster import free_ports
from runner.distribute.strategy import split_cpu

SCRIPT = str(HERE / "first_step" / "table_script.py")
RATE = re.compile(r"^steps per second: (\S+)$", re.MULTILINE)
IDS, WIDTH = 2048, 64


def two_workers(command: list[str], rows: int, lookup: str, steps: int) -> Times | str:
    """Return the time of a step of the chief, or the last words of a script that failed."""
    chief, worker = (f"127.0.0.1:{port}" for port in free_ports(2))
    tasks = {"chief": [chief], "worker": [worker]}

    def env(kind: str) -> dict[str, str]:
        return {**environment(), "TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": kind, "index": 0}})}

    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [*command, SCRIPT, str(rows), lookup, str(steps), folder],
                env=env(kind),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for kind in ("worker", "chief")
        ]  # fmt: skip
        try:
            out, errors = started[1].communicate(timeout=900)
        finally:
            for one in started:
                one.kill()
                one.wait()
    found = RATE.search(out)
    if found is None:
        return errors[-3000:]
    return Times(1 / float(found[1]), float("nan"))


def native(rows: int, strategy: str, steps: int) -> Case:
    def model_fn(features: Any, labels: Any, mode: str) -> runner.EstimatorSpec:
        found = keras.layers.Embedding(rows, WIDTH)(features)
        loss = tf.square(tf.reduce_sum(found, 1) - labels)
        return runner.EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01))

    def input_fn() -> tf.data.Dataset:
        rng = np.random.RandomState(0)
        ids, labels = rng.randint(0, rows, [16, IDS]), rng.randn(16, IDS).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((ids, labels)).repeat().prefetch(2)

    devices = None if strategy == "default" else ["CPU:0", "CPU:1"]
    config = runner.RunConfig(train_distribute=runner.build_strategy(strategy, devices=devices))
    data = runner.Input(input_fn, params={}, batch_size=IDS)
    return training(f"{strategy}, {rows:,} rows", model_fn, data, steps, grown=max(2, steps // 10), config=config)


def main() -> None:
    parsed = arguments(__doc__, 3, steps=(400, 20, "steps of one round"))
    other = Path(os.environ.get("RUNNER_GOLDEN_PYTHON", HERE.parent / ".venv-2.15" / "bin" / "python"))
    commands = {"ours": [sys.executable, "-m", "runner.classic"]}
    if other.exists() and not parsed.tiny:
        commands["2.15"] = [str(other)]
    else:
        print(f"TensorFlow 2.15 is not measured: --tiny, or there is no {other} (make golden).")
    sizes = [2000] if parsed.tiny else [20_000, 200_000, 1_000_000]
    cells = [(rows, "ids") for rows in sizes] + [(sizes[-1] if parsed.tiny else 200_000, "column")]
    split_cpu(2)
    cases = [native(rows, strategy, parsed.steps) for rows in sizes for strategy in ("default", "mirrored")]
    rows: dict[str, list[Times]] = {}
    for number in range(parsed.rounds + 1):
        for case in cases:
            for name, times in case().items():
                if number and not name.endswith("whole call"):  # the first round traces
                    rows.setdefault(name, []).append(times)
        for size, lookup in cells if number else ():
            for name, command in commands.items():
                cell = f"{name}, multi_worker(2), {size:,} {lookup}"
                took = two_workers(command, size, lookup, parsed.steps)
                if isinstance(took, Times):
                    rows.setdefault(cell, []).append(took)
                # 2.15 fails by design where steps look different numbers of distinct ids up, as columns do: its
                # collective keeps the shape of the first step.
                elif name == "2.15" and "Shape mismatch in the collective" in took:
                    print(f"{cell}: fails, {took[took.index('Shape mismatch') :].splitlines()[0]}")
                else:
                    raise SystemExit(f"{cell}: {took}")
    first, last = f"{sizes[0]:,}", f"{sizes[-1]:,}"
    ratios = [
        Ratio(f"ours, multi_worker(2), {size:,} {lookup}", f"2.15, multi_worker(2), {size:,} {lookup}", 1.0)
        for size, lookup in cells
        if f"2.15, multi_worker(2), {size:,} {lookup}" in rows
    ]
    ratios += [Ratio(f"{one}, {last} rows", f"{one}, {first} rows", 1.25) for one in ("default", "mirrored")]
    ratios.append(Ratio(f"ours, multi_worker(2), {last} ids", f"ours, multi_worker(2), {first} ids", 1.25))
    show("a step of a table", rows, ratios)


if __name__ == "__main__":
    main()
