"""What only a GPU can show: `make test-gpu`. Skipped where TensorFlow sees too few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

ROOT = Path(__file__).parents[2]
NUM_GPUS = len(tf.config.list_physical_devices("GPU"))
SMALL = ["model.params.network=mlp", "train.max_steps=20", "tracking=none"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="TensorFlow sees no GPU here"),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="TensorFlow sees fewer than two GPUs here")


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    """Summary of a run of the shipped digits in a process of its own, which this one's devices do not touch."""
    command = [sys.executable, "-m", "runner", *SMALL, f"model_dir={folder}", *overrides]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NVIDIA_TF32_OVERRIDE": "0"}
    ran = subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_float16_trains_with_a_loss_scale(tmp_path: Path) -> None:
    summary = train(tmp_path / "half", "train.precision=mixed_float16")
    assert summary["global_step"] == 20
    assert summary["metrics"]["eval/loss"] < 2.4  # ln 10 = 2.3: of ten classes, none is known


def test_memory_growth_of_the_config_holds_and_the_device_is_named(tmp_path: Path) -> None:
    (tmp_path / "growth.py").write_text(GROWTH)
    summary = train(tmp_path / "run", "run.memory_growth=true", "train.hooks=[{fn: growth.Growth}]")
    assert json.loads((tmp_path / "growth.json").read_text()) == [True] * NUM_GPUS
    name = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])["device_name"]
    assert summary["devices"] == f"1 x {name}"


GROWTH = """
import json
import tensorflow as tf
from runner import Hook

class Growth(Hook):
    def begin(self, run):
        gpus = tf.config.list_physical_devices("GPU")
        with open("growth.json", "w") as file:
            json.dump([tf.config.experimental.get_memory_growth(gpu) for gpu in gpus], file)
"""
GROWS = """
import tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
import runner
from tests.support.line import native_line, points
runner.Estimator(native_line, "model").train(points(repeat=True), steps=20)
assert all(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
print(tf.config.experimental.get_memory_info("GPU:0")["peak"])
"""


def test_memory_growth_that_a_script_asks_for_holds_in_training(tmp_path: Path) -> None:
    """TensorFlow refuses it once devices are in use: importing the runner must not use them."""
    command = [sys.executable, "-c", GROWS]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    assert 0 < int(ran.stdout.splitlines()[-1]) < 2**28


@needs_two
def test_two_gpus_come_to_the_numbers_of_one(tmp_path: Path) -> None:
    one = train(tmp_path / "one", "strategy=one_device", "strategy.devices=[GPU:0]")
    two = train(tmp_path / "two", "strategy=mirrored", "strategy.devices=[GPU:0,GPU:1]")
    assert two["metrics"]["eval/loss"] == pytest.approx(one["metrics"]["eval/loss"], rel=1e-3)  # Adam, float32
