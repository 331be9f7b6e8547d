"""A program of TensorFlow 1 that is full of tf.contrib runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tf_slim", reason="the extra 'classic' brings it")

SCRIPT = """
import numpy as np
import tensorflow as tf
import tensorflow.contrib.slim as slim
from tensorflow.contrib import layers
from tensorflow.contrib.training import HParams

hparams = HParams(units=3, rate=0.1).parse("rate=0.5")

def model_fn(features, labels, mode, params):
  with slim.arg_scope([slim.fully_connected], normalizer_fn=slim.batch_norm):
    with slim.arg_scope([slim.batch_norm], is_training=mode == tf.estimator.ModeKeys.TRAIN):
      net = slim.fully_connected(features["x"], params.units, scope="fc")
  y = layers.fully_connected(net, net.shape[-1].value - 2, activation_fn=None, scope="y")
  if mode == tf.estimator.ModeKeys.PREDICT:
    return tf.estimator.EstimatorSpec(mode, predictions={"y": y})
  slim.losses.mean_squared_error(y, labels)
  loss = slim.losses.get_total_loss()
  optimizer = tf.contrib.estimator.clip_gradients_by_norm(tf.train.AdagradOptimizer(params.rate), 5.0)
  return tf.estimator.EstimatorSpec(
      mode, loss=loss, train_op=slim.learning.create_train_op(loss, optimizer),
      eval_metric_ops={"mae": tf.contrib.metrics.streaming_mean_absolute_error(y, labels)})

def input_fn():
  x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
  dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, 2 * x))
  return dataset.apply(tf.contrib.data.shuffle_and_repeat(16, 2)).apply(tf.contrib.data.batch_and_drop_remainder(8))

def main(argv):
  estimator = tf.estimator.Estimator(model_fn, "model", params=hparams)
  estimator.train(input_fn)
  print(estimator.get_variable_names())
  print(sorted(estimator.evaluate(input_fn)))

if __name__ == "__main__":
  tf.app.run()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_of_slim_trains_and_evaluates(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "-m", "runner.classic", "old.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    variables = ["fc/BatchNorm/beta", "fc/weights", "y/biases", "y/weights"]
    moving = ["fc/BatchNorm/moving_mean", "fc/BatchNorm/moving_variance"]
    names = sorted([*variables, *(f"{name}/Adagrad" for name in variables), *moving, "global_step"])
    assert ran.stdout.splitlines() == [str(names), "['global_step', 'loss', 'mae']"]
