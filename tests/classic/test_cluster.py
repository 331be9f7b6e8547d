"""A script of tf.estimator, started once for each task of TF_CONFIG, as clusters start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from runner.distribute.local_cluster import free_ports
from runner.tracking.run_end import read_ending
from tests.support.gang import environments
from tests.support.messages import Messages

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

MAKE_CONFIG
classifier = tf.estimator.Estimator(model_fn=model_fn, model_dir="run", config=config)
result, exports = tf.estimator.train_and_evaluate(
    classifier,
    train_spec=tf.estimator.TrainSpec(input_fn=input_fn, max_steps=20, saving_listeners=[Listener()]),
    eval_spec=tf.estimator.EvalSpec(input_fn=input_fn))
direct = classifier.evaluate(input_fn, name="direct")
print("DIRECT", direct == result, classifier.latest_checkpoint())
print("RESULT", config.task_type, config.task_id, config.is_chief, result["global_step"], result["loss"] < 0.5, exports)
"""

WORKERS = """
strategy = tf.distribute.MultiWorkerMirroredStrategy()
config = tf.estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=10, save_summary_steps=0)
"""


def run_in_each(
    folder: Path, command: Sequence[str], places: Sequence[Mapping[str, str]]
) -> tuple[list[int], list[tuple[str, str]]]:
    """Return the exit code of each task, and what it printed and logged."""
    tasks = [
        subprocess.Popen(
            command, cwd=folder, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for env in places
    ]
    try:
        said = [task.communicate(timeout=240) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    return [task.returncode for task in tasks], said


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_train_save_and_evaluate(tmp_path: Path) -> None:
    """tf.estimator left eval_spec and saving_listeners out without an evaluator, and wrote no checkpoint without
    summaries; each worker but the chief wrote a copy of all of it, and could be behind with the latest checkpoint; it
    refused to evaluate by itself."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("MAKE_CONFIG", WORKERS))
    codes, said = run_in_each(tmp_path, [sys.executable, "script.py"], environments(2))
    assert codes == [0, 0], said
    direct = "DIRECT True run/model.ckpt-20"
    assert said[0][0].splitlines() == ["SAVED 0", "SAVED 10", "SAVED 20", direct, "RESULT chief 0 True 20 True []"]
    assert said[1][0].splitlines() == [direct, "RESULT worker 0 False 20 True []"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.ckpt-10.index", "model.ckpt-20.index", "eval"} <= names
    assert [name for name in names if name.startswith("tmp_worker")] == []


SERVERS = """
# As TensorFlow's guide does it in each task; the server makes none, as where the chief alone has one.
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = None if resolver.task_type == "ps" else tf.distribute.ParameterServerStrategy(resolver)
config = tf.estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=10, save_summary_steps=0)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_parameter_servers_of_a_script_with_the_cluster_of_the_guide(tmp_path: Path, messages: Messages) -> None:
    """No chief, so worker 0 coordinates; and an evaluator that nobody but itself knows of. Each came to hang, or ended
    with "Could not start gRPC server"."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("MAKE_CONFIG", SERVERS).partition("direct =")[0] + RESULT)
    ports = free_ports(3)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:2]], "ps": [f"127.0.0.1:{ports[2]}"]}
    places = [("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
    texts = [json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}) for kind, index in places]
    command = [sys.executable, "-m", "runner.classic", "script.py"]
    codes, said = run_in_each(tmp_path, command, [{"TF_CONFIG": text} for text in texts])
    assert codes == [0, 0, 0, 0], said
    saved = [f"SAVED {step}" for step in (0, 10, 20)]
    assert [output.splitlines() for output, _ in said] == [
        [*saved, "RESULT chief 0 20 True"],
        ["RESULT worker 0 None"],
        ["RESULT ps 0 None"],
        ["RESULT evaluator 0 20 True"],
    ]
    (line,) = (line for line in said[3][1].splitlines() if "TF_CONFIG" in line)
    messages.same("stderr", line)
    assert read_ending(tmp_path / "run").status == "finished"


RESULT = """
found = (result["global_step"], result["loss"] < 0.5) if result else [None]
print("RESULT", config.task_type, config.task_id, *found)
"""
