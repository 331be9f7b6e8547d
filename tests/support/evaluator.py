"""The evaluator process of tests/integration/test_roles.py: `python -m tests.support.evaluator`. Each line of its input
names a run to follow; it answers with what `train_and_evaluate` returned. One process for all tests saves 5 s each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from runner import EarlyStopping, Estimator, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from runner.distribute.cluster import Cluster
from runner.run_config import KeepBest
from tests.estimator.test_early_stopping import around_six
from tests.support.journal import journal_of
from tests.support.line import points

# What its TF_CONFIG would say: among others, and yet alone with all examples.
PLACE = Cluster("evaluator", 0, {"chief": ["host:1"], "worker": ["host:2", "host:3"]})
BEST = KeepBest("eval/distance")


def evaluator(folder: Path, **config: Any) -> Estimator:
    """An Estimator that only evaluates."""
    journal = journal_of(folder, "evaluator")
    return Estimator(around_six, folder, RunConfig(cluster=PLACE, keep_best=BEST, **config), journal=journal)


def untuned(input_fn: Callable[[], tf.data.Dataset]) -> Callable[[], tf.data.Dataset]:
    """`input_fn` without autotuning: the thread for that may sleep for a minute while its iterator is to be deleted."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return lambda: input_fn().with_options(options)


def specs(*, patience: int | None = None, endless: bool = False, **settings: Any) -> tuple[TrainSpec, EvalSpec]:
    """What both processes give to `train_and_evaluate`. Args: endless: the evaluation never ends by itself."""
    rule = EarlyStopping() if patience is None else EarlyStopping("eval/distance", patience_evals=patience)
    train = TrainSpec(untuned(points(repeat=True)), early_stopping=rule)
    # Of unknown size: one that is known to have no end is refused.
    input_fn = (lambda: points(repeat=True)().filter(lambda *_: True)) if endless else points()
    return train, EvalSpec(input_fn, **settings)


def main() -> None:
    for line in sys.stdin:
        case = json.loads(line)
        follower = evaluator(Path(case["folder"]), generation=case["generation"])
        result = train_and_evaluate(follower, *specs(**case["specs"]))
        facts = {"metrics": result.metrics.get("", {}), "step": result.global_step, "early": result.stopped_early}
        print(json.dumps({**facts, "checkpoint": result.checkpoint}), flush=True)


if __name__ == "__main__":
    main()
