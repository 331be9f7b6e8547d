"""The graph beside checkpoints: what TensorFlow 1's tools do with it gives the numbers of the Estimator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format

import runner
from runner.classic import run_config as classic

v1 = tf.compat.v1


def model_fn(features: Any, labels: Any, mode: str, params: Mapping[str, Any], config: Any) -> Any:
    x = tf.identity(features["x"], name="features_x")
    table = v1.get_variable("table", [6, 2], partitioner=v1.fixed_size_partitioner(2))
    kernel = v1.get_variable("dense/kernel", [2, 1])
    hidden = tf.matmul(x, kernel) + tf.reduce_sum(tf.nn.embedding_lookup(table, [0, 3]))
    output = tf.cond(tf.reduce_sum(hidden) > 0, lambda: 2 * hidden, lambda: hidden)
    predictions = tf.nn.sigmoid(output, name="probabilities")
    v1.add_to_collection("outputs", predictions)
    if mode == runner.ModeKeys.PREDICT:
        return runner.EstimatorSpec(mode, predictions=predictions)
    loss = tf.reduce_mean((output - labels) ** 2)
    train_op = v1.train.AdamOptimizer(0.1).minimize(loss, v1.train.get_global_step())
    return runner.EstimatorSpec(mode, loss=loss, train_op=train_op)


X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)


def input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(({"x": X}, X[:, :1])).batch(4).repeat()


@pytest.mark.parametrize("replicas", [1, 2])
def test_its_meta_graph_restores_and_predicts_as_the_estimator_does(replicas: int, tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{one}" for one in range(replicas)]) if replicas > 1 else None
    config = classic.RunConfig(str(tmp_path), 1, save_checkpoints_steps=2, train_distribute=strategy)
    estimator = runner.Estimator(model_fn, config=config)
    estimator.train(input_fn, steps=5)
    files = [tmp_path / f"model.ckpt-{step}.meta" for step in (0, 2, 4, 5)]
    assert sorted(tmp_path.glob("*.meta")) == files
    assert len({file.stat().st_ino for file in files}) == 1, "written once, linked afterwards"
    nodes = text_format.Parse((tmp_path / "graph.pbtxt").read_text(), v1.GraphDef()).node
    assert {"features_x", "probabilities", "dense/kernel"} <= {node.name for node in nodes}

    predicted = np.stack(list(estimator.predict(lambda: tf.data.Dataset.from_tensors({"x": X[:4]}))))
    with tf.Graph().as_default(), v1.Session() as session:
        saver = v1.train.import_meta_graph(f"{tmp_path}/model.ckpt-5.meta")
        session.run(v1.global_variables_initializer())
        saver.restore(session, f"{tmp_path}/model.ckpt-5")
        feeds = {"features_x:0": X[:4]}
        (found,) = session.run(v1.get_collection("outputs"), feeds)
        assert session.run(v1.train.get_global_step()) == 5
        whole = {one.name for one in v1.global_variables()}
        assert {"dense/kernel:0", "table/part_0:0", "table/part_1/Adam_1:0", "global_step:0"} <= whole
        assert len(v1.get_collection("train_op")) == 1
        frozen = v1.graph_util.convert_variables_to_constants(session, session.graph_def, ["probabilities"])
    np.testing.assert_array_equal(found, predicted)
    with tf.Graph().as_default() as graph, v1.Session() as session:
        tf.graph_util.import_graph_def(frozen, name="")
        assert not [one for one in graph.get_operations() if one.type == "VarHandleOp"]
        np.testing.assert_array_equal(session.run("probabilities:0", feeds), predicted)


@pytest.mark.slow
@pytest.mark.processes
def test_freeze_graph_reads_it(tmp_path: Path) -> None:
    runner.Estimator(model_fn, config=classic.RunConfig(str(tmp_path), 1)).train(input_fn, steps=2)
    out = tmp_path / "frozen.pb"
    flags = {
        "input_meta_graph": tmp_path / "model.ckpt-2.meta", "input_binary": True,
        "input_checkpoint": tmp_path / "model.ckpt-2", "output_node_names": "probabilities", "output_graph": out,
    }  # fmt: skip
    argv = [sys.executable, "-m", "tensorflow.python.tools.freeze_graph"]
    subprocess.run([*argv, *(f"--{name}={value}" for name, value in flags.items())], check=True, timeout=240)
    frozen = v1.GraphDef.FromString(out.read_bytes())
    kernel = next(node for node in frozen.node if node.name == "dense/kernel")
    value = tf.make_ndarray(kernel.attr["value"].tensor)
    np.testing.assert_array_equal(value, tf.train.load_variable(str(tmp_path), "dense/kernel"))


def test_its_train_op_takes_the_step_of_the_estimator(tmp_path: Path) -> None:
    estimator = runner.Estimator(model_fn, config=classic.RunConfig(str(tmp_path), 1))
    estimator.train(input_fn, steps=1)
    with tf.Graph().as_default() as graph, v1.Session() as session:
        v1.train.import_meta_graph(f"{tmp_path}/model.ckpt-1.meta").restore(session, f"{tmp_path}/model.ckpt-1")
        inputs = [one.outputs[0] for one in graph.get_operations() if one.type == "Placeholder"]
        batch = iter([X[4:], X[4:, :1]])
        feeds: dict[Any, Any] = {one: next(batch) for one in inputs if one.dtype == tf.float32}
        feeds |= {"runner/part:0": 0, "runner/counts:0": [4], "runner/global_count:0": 4}
        session.run(v1.get_collection("train_op"), feeds)
        after = session.run("dense/kernel/Read/ReadVariableOp:0")
    estimator.train(input_fn, steps=1)
    np.testing.assert_allclose(after, estimator.get_variable_value("dense/kernel"), rtol=1e-6)


def test_no_graph_is_written_where_none_is_asked_for(tmp_path: Path) -> None:
    for number, config in enumerate([runner.RunConfig(), classic.RunConfig(checkpoint_save_graph_def=False)]):
        folder = tmp_path / str(number)
        runner.Estimator(model_fn, folder, config=config).train(input_fn, steps=1)
        assert not {"graph.pbtxt", "model.ckpt-1.meta"} & {*os.listdir(folder)}
        assert (folder / "model.ckpt-1.index").exists()


def test_a_checkpoint_and_its_graph_expire_together_and_a_lost_graph_is_written_anew(tmp_path: Path) -> None:
    config = classic.RunConfig(str(tmp_path), 1, save_checkpoints_steps=1, keep_checkpoint_max=2)

    class Loses(tf.compat.v1.train.CheckpointSaverListener):
        def after_save(self, session: Any, global_step_value: int) -> None:
            if global_step_value == 2:
                (tmp_path / "model.ckpt-2.meta").unlink()

    runner.Estimator(model_fn, config=config).train(input_fn, steps=4, saving_listeners=[Loses()])
    assert {file.name for file in tmp_path.glob("*.meta")} == {"model.ckpt-3.meta", "model.ckpt-4.meta"}
    assert tf.train.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/model.ckpt-4"
