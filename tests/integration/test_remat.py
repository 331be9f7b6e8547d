"""`keras.RematScope` in a model_fn: less memory at the peak of a step, and the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH, DEPTH, BATCH = 128, 32, 8192

# The peak of a process only grows. So what should need less comes first: without an effect the later ones add nothing.
TRAIN = f"""
import contextlib, json, tempfile
import keras
import numpy as np
import tensorflow as tf
from runner import Estimator, EstimatorSpec, RunConfig

x = np.random.RandomState(0).randn({BATCH}, {WIDTH}).astype("float32")
found = []
for remat in ("full", "activations", None):
    def model_fn(features, labels, mode):
        net = features
        with keras.RematScope(mode=remat) if remat else contextlib.nullcontext():
            for _ in range({DEPTH}):
                net = keras.layers.Dense({WIDTH}, activation="gelu")(net)
        loss = tf.square(keras.layers.Dense(1)(net)[:, 0] - labels)
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01))

    estimator = Estimator(model_fn, tempfile.mkdtemp(), RunConfig(tf_random_seed=1, tensorboard=False))
    estimator.train(lambda: tf.data.Dataset.from_tensors((x, x[:, 0])).repeat(), steps=2)
    # Not ru_maxrss, which begins with the memory of the process that started this one.
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
    found.append((peak, estimator.get_variable_value("dense/kernel").tolist()))
print(json.dumps(found))
"""


@pytest.mark.slow  # 15 s of CPU
def test_a_remat_scope_needs_less_memory_and_comes_to_the_same_numbers(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (full, of_full), (activations, of_activations), (none, of_none) = json.loads(ran.stdout.splitlines()[-1])
    assert of_full == of_activations == of_none
    outputs = 4 * BATCH * WIDTH * DEPTH / 2**20  # MB of what one kind of tensor needs, kept for all layers
    assert activations - full > outputs / 2 and none - activations > outputs / 2, (full, activations, none, outputs)
