"""The example of TensorFlow 2's guide on distributed training with Estimator, as it was typed and as it printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

GUIDE = """
import runner.classic
import tensorflow as tf
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
from runner.distribute.strategy import split_cpu
split_cpu(2)

mirrored_strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
config = tf.estimator.RunConfig(
    train_distribute=mirrored_strategy, eval_distribute=mirrored_strategy)
regressor = tf.estimator.LinearRegressor(
    feature_columns=[tf.feature_column.numeric_column('feats')],
    optimizer='SGD',
    config=config)

def input_fn():
  dataset = tf.data.Dataset.from_tensors(({"feats":[1.]}, [1.]))
  return dataset.repeat(1000).batch(10)
regressor.train(input_fn=input_fn, steps=10)
print(regressor.evaluate(input_fn=input_fn, steps=10))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_example_of_the_guide_of_tensorflow_2_runs_as_a_script(tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    script.write_text(GUIDE)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    found = eval(ran.stdout.splitlines()[-1], {"np": np})  # a dict of NumPy's scalars, as the guide prints it
    assert set(found) == {"average_loss", "label/mean", "loss", "prediction/mean", "global_step"}
    assert found["global_step"] == 10 and found["label/mean"] == 1.0
    # What the guide shows: 10 steps, of two batches each, of half of the distance each time.
    assert found["loss"] == found["average_loss"] == pytest.approx(1.4210855e-14, rel=1e-6, abs=0)
    assert found["prediction/mean"] == pytest.approx(0.99999988, rel=1e-7)
    assert "Loss for final step: 2.877698e-13." in ran.stderr
    for line in (
        "loss = 1, step = 1",
        "Saving checkpoints for 10 into",
        "Saving dict for global step 10: average_loss",
    ):
        assert line in ran.stderr
