"""One worker of a MultiWorkerMirroredStrategy that takes training steps; started by test_multi_worker.py.

Usage: python -m tests.multi_worker_steps <style> <file for the result>, with TF_CONFIG in the environment.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import tensorflow as tf

# Before anything else of TensorFlow runs: "Collective ops must be configured at program startup".
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()

from runner.inputs import build_feed  # noqa: E402
from runner.model_fn import ModelFn  # noqa: E402
from runner.run_config import RunConfig  # noqa: E402
from runner.seeds import seeded  # noqa: E402
from runner.steps import TrainProgram  # noqa: E402
from runner.types import Params  # noqa: E402
from runner.variables import VariableStore  # noqa: E402
from tests.models import STYLES, train_input  # noqa: E402


def main(style: str, result: str) -> None:
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    config = RunConfig()
    with seeded(config.seed):
        feed = build_feed(
            train_input(8, dtype="float64"),
            mode="train",
            params={},
            config=config,
            num_replicas=1,
            worker_index=worker,
            num_workers=2,
        )
    store = VariableStore(STRATEGY, config.seed)
    model_fn = ModelFn(STYLES[style], Params({}), config)
    # A worker sees its part of the loss only; agreeing on NaN is the cluster's business.
    program = TrainProgram(store, model_fn, feed, config, summary_writer=None, stop_at_nan=False)
    taken = program.loop()(iter(feed.dataset), 20, may_end=False)
    values = {name: variable.numpy() for name, variable in store.saved.items()}
    np.savez(result, losses=taken.losses, examples=taken.examples, **values)


if __name__ == "__main__":
    main(*sys.argv[1:])
