"""A script of tf.estimator, started once for each task of TF_CONFIG, as clusters start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gang import environments

SCRIPT = """
import runner.classic
import tensorflow as tf

def input_fn(mode, input_context=None):
  x = tf.random.stateless_uniform([48, 2], [1, 2])
  dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, :1] - 2 * x[:, 1:]))
  if input_context:
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
  if mode == tf.estimator.ModeKeys.TRAIN:
    dataset = dataset.repeat()
  return dataset.batch(4)

def model_fn(features, labels, mode):
  y = tf.compat.v1.layers.dense(features["x"], 1)
  loss = tf.compat.v1.losses.mean_squared_error(labels, y)
  train_op = tf.compat.v1.train.GradientDescentOptimizer(0.2).minimize(
      loss, tf.compat.v1.train.get_or_create_global_step())
  return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

class Listener(tf.estimator.CheckpointSaverListener):
  def after_save(self, session, global_step):
    print("SAVED", global_step)

strategy = tf.distribute.MultiWorkerMirroredStrategy()
config = tf.estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=10, save_summary_steps=0)
classifier = tf.estimator.Estimator(model_fn=model_fn, model_dir="run", config=config)
result, exports = tf.estimator.train_and_evaluate(
    classifier,
    train_spec=tf.estimator.TrainSpec(input_fn=input_fn, max_steps=20, saving_listeners=[Listener()]),
    eval_spec=tf.estimator.EvalSpec(input_fn=input_fn))
direct = classifier.evaluate(input_fn, name="direct")
print("DIRECT", direct == result, classifier.latest_checkpoint())
print("RESULT", config.task_type, config.task_id, config.is_chief, result["global_step"], result["loss"] < 0.5, exports)
"""


@pytest.mark.processes
@pytest.mark.alone
def test_two_workers_train_save_and_evaluate(tmp_path: Path) -> None:
    """tf.estimator left eval_spec and saving_listeners out without an evaluator, and wrote no checkpoint without
    summaries; each worker but the chief wrote a copy of all of it, and could be behind with the latest checkpoint; it
    refused to evaluate by itself."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    tasks = [
        subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for env in environments(2)
    ]
    try:
        said = [task.communicate(timeout=240) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], said
    direct = "DIRECT True run/model.ckpt-20"
    assert said[0][0].splitlines() == ["SAVED 0", "SAVED 10", "SAVED 20", direct, "RESULT chief 0 True 20 True []"]
    assert said[1][0].splitlines() == [direct, "RESULT worker 0 False 20 True []"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.ckpt-10.index", "model.ckpt-20.index", "eval"} <= names
    assert [name for name in names if name.startswith("tmp_worker")] == []
