"""What the workers of tests/gang.py do: each case is a function of a folder that all of them share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner.strategy import build_strategy

# Before anything else of TensorFlow runs: "Collective ops must be configured at program startup".
STRATEGY = build_strategy("multi_worker", virtual_devices=int(os.environ.get("REPLICAS", "1")))

from runner import Estimator, EstimatorSpec, EvalSpec, Input, RunConfig, TrainSpec, train_and_evaluate  # noqa: E402
from runner.cluster import Cluster  # noqa: E402
from runner.hooks import Hook, Run  # noqa: E402
from runner.types import StepResult  # noqa: E402
from tests.models import STYLES, eval_input, train_input  # noqa: E402

CLUSTER = Cluster.from_tf_config(os.environ["TF_CONFIG"])
WORKER, NUM_WORKERS = CLUSTER.worker_index, CLUSTER.num_workers

_CASES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def case(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    _CASES[function.__name__] = function
    return function


def run(name: str, folder: Path) -> dict[str, Any]:
    print(f"=== {name} {time.monotonic():.1f}", flush=True)
    return _CASES[name](folder / name)


def config(**changes: Any) -> RunConfig:
    return RunConfig(train_distribute=STRATEGY, cluster=CLUSTER, **changes)


def variables(estimator: Estimator) -> dict[str, np.ndarray]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


class Seen(Hook):
    """Records the losses and the number of examples of each loop."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.examples: list[int] = []
        self.reason: str | None = None

    def after_step(self, run: Run, result: StepResult) -> None:
        self.losses += [float(loss) for loss in result.losses]
        self.examples.append(result.examples)

    def end(self, run: Any) -> None:
        self.reason = run.stop_reason


def trained(folder: Path, style: str, **changes: Any) -> dict[str, Any]:
    estimator = Estimator(STYLES[style], folder, config(save_checkpoints_steps=7, **changes))
    seen = Seen()
    result = train_and_evaluate(
        estimator,
        TrainSpec(train_input(8, dtype="float64"), max_steps=20, hooks=[seen]),
        EvalSpec(eval_input(8, dtype="float64")),
    )
    return {
        **variables(estimator),
        "losses": seen.losses,
        "examples": result.examples,
        **{f"eval/{name}": value for name, value in result.metrics[""].items()},
    }


@case
def native(folder: Path) -> dict[str, Any]:
    return trained(folder, "native")


@case
def classic(folder: Path) -> dict[str, Any]:
    return trained(folder, "classic")


# --- data of each worker's own ----------------------------------------------------------------------------------------


def own(folder: Path, counts: list[int], batch: int, **changes: Any) -> dict[str, Any]:
    """Trains on `counts[worker]` examples of worker, the ids in order; returns what each step saw."""
    ids = np.arange(sum(counts), dtype=np.float64)
    starts = np.cumsum([0, *counts])

    def input_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        mine = ids
        if input_context.num_input_pipelines > 1:
            worker = input_context.input_pipeline_id
            mine = ids[starts[worker] : starts[worker + 1]]
        return tf.data.Dataset.from_tensor_slices((mine[:, None], mine[:, None])).batch(batch)

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = tf.compat.v1.get_variable("w", [], tf.float64, tf.compat.v1.zeros_initializer())
        loss = (features[:, 0] + 1) * (1 + 0 * weight) + 1 / (features[:, 0] - 1000) * 0
        return EstimatorSpec(mode, loss=loss, optimizer=tf.compat.v1.train.GradientDescentOptimizer(0.0))

    seen = Seen()
    estimator = Estimator(model_fn, folder, config(steps_per_loop=1, **changes))
    run = estimator.train_run(Input(input_fn, shard="input_fn"), hooks=[seen])
    assert run is not None
    return {"losses": seen.losses, "counts": seen.examples, "reason": seen.reason, "step": run.global_step}


@case
def uneven(folder: Path) -> dict[str, Any]:
    """7 and 2 examples, in batches of 2."""
    return own(folder, [7, 2, 5][:NUM_WORKERS], 2)


@case
def without_data(folder: Path) -> dict[str, Any]:
    """The first worker has nothing at all."""
    return own(folder, [0, 5, 3][:NUM_WORKERS], 2)


@case
def nothing_at_all(folder: Path) -> dict[str, Any]:
    return own(folder, [0] * NUM_WORKERS, 2)
