"""What a variable of a v1 graph offers, and model_fns written for it use: parts, `op.name`, other checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from tests.support.line import points
from tests.support.models import strategies
from tests.support.tiers import slow_but

v1 = tf.compat.v1
STRATEGIES = strategies()


def in_parts(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A table in three parts of rows, a matrix in two of columns, one that a partitioner leaves whole."""
    rows = v1.get_variable("table", [7, 4], partitioner=v1.fixed_size_partitioner(3))
    columns = v1.get_variable("columns", [4, 5], partitioner=v1.fixed_size_partitioner(2, axis=1))
    whole = v1.get_variable("whole", [5, 1], partitioner=v1.min_max_variable_partitioner(4))
    hidden = v1.nn.embedding_lookup(rows, tf.cast(features, tf.int32) % 7, partition_strategy="div")
    predictions = (hidden @ tf.convert_to_tensor(columns) @ tf.convert_to_tensor(whole))[:, 0]
    loss = tf.reduce_mean(tf.square(predictions - labels))
    trained = v1.train.AdamOptimizer(0.1).minimize(loss, v1.train.get_global_step())
    with tf.control_dependencies([trained]):
        train_op = v1.train.ExponentialMovingAverage(0.9).apply(list(rows))
    return EstimatorSpec(mode, {"y": predictions}, loss, train_op)


def test_parts_are_saved_under_the_name_of_the_whole_and_read_by_whoever_divides_otherwise(tmp_path: Path) -> None:
    found = {}
    for name in ("default", "mirrored"):
        trainer = Estimator(in_parts, tmp_path / name, RunConfig(train_distribute=STRATEGIES[name]))
        trainer.train(Input(points(repeat=True), batch_size=2), steps=3)
        trainer = Estimator(in_parts, tmp_path / name, trainer.config)
        trainer.train(Input(points(repeat=True), batch_size=2), steps=2)  # restored into parts
        found[name] = {one: trainer.get_variable_value(one) for one in trainer.get_variable_names()}
        assert {one: value.shape for one, value in found[name].items() if value.ndim} == {
            "columns": (4, 5), "columns/Adam": (4, 5), "columns/Adam_1": (4, 5),
            "table": (7, 4), "table/Adam": (7, 4), "table/Adam_1": (7, 4), "table/ExponentialMovingAverage": (7, 4),
            "whole": (5, 1), "whole/Adam": (5, 1), "whole/Adam_1": (5, 1),
        }  # fmt: skip
    for one, value in found["default"].items():
        np.testing.assert_allclose(found["mirrored"][one], value, rtol=1e-3, atol=1e-6, err_msg=one)

    path = trainer.latest_checkpoint()
    with tf.Graph().as_default(), v1.Session() as session:
        halves = v1.get_variable("table", [7, 4], partitioner=v1.fixed_size_partitioner(2))
        v1.train.Saver().restore(session, path)
        np.testing.assert_array_equal(session.run(tf.convert_to_tensor(halves)), found["mirrored"]["table"])


@pytest.mark.parametrize("strategy", ["default", "mirrored", "central_storage"])
def test_a_variable_tells_its_op_and_what_it_begins_with(strategy: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        with v1.variable_scope("scope"):
            weight = v1.get_variable("weight", [], initializer=v1.constant_initializer(0.5))
        twice = v1.get_variable("twice", initializer=weight.initialized_value() * 2.0)
        names.update((one.op.name, one.op.type) for one in v1.trainable_variables())
        loss = tf.reduce_mean(tf.square(features * weight + twice - labels))
        train_op = v1.train.MomentumOptimizer(0.0, 0.9).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    names: set[tuple[str, str]] = set()
    trainer = Estimator(model_fn, tmp_path, RunConfig(train_distribute=STRATEGIES[strategy]))
    trainer.train(points(), steps=1)
    assert names == {("scope/weight", "VarHandleOp"), ("twice", "VarHandleOp")}
    assert trainer.get_variable_value("twice") == 1.0
    assert trainer.get_variable_names() == [
        "global_step", "scope/weight", "scope/weight/Momentum", "twice", "twice/Momentum",
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_a_new_model_begins_with_what_init_from_checkpoint_names(strategy: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        with v1.variable_scope(params["scope"]):
            weight = v1.get_variable("weight", [], initializer=v1.constant_initializer(params["start"]))
            rows = v1.get_variable("rows", [4], partitioner=v1.fixed_size_partitioner(2))
        if params["checkpoint"]:
            v1.train.init_from_checkpoint(params["checkpoint"], {"old/": "new/"})
        loss = tf.reduce_mean(tf.square(features * weight - labels)) + tf.reduce_sum(tf.convert_to_tensor(rows))
        train_op = v1.train.GradientDescentOptimizer(0.0).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = RunConfig(train_distribute=STRATEGIES[strategy])
    old = Estimator(model_fn, tmp_path / "old", config, {"scope": "old", "start": 3.0, "checkpoint": None})
    old.train(points(), steps=1)
    params = {"scope": "new", "start": 0.0, "checkpoint": str(tmp_path / "old")}
    new = Estimator(model_fn, tmp_path / "new", config.replace(tf_random_seed=7), params)
    new.train(points(), steps=1)
    assert new.get_variable_value("new/weight") == 3.0
    np.testing.assert_array_equal(new.get_variable_value("new/rows"), old.get_variable_value("old/rows"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(STRATEGIES, "mirrored"))
def test_optimizers_keep_variables_to_their_constraints(strategy: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        constraint = {"constraint": lambda value: tf.minimum(value, params["most"])}
        if params["keras"]:
            layer = keras.layers.Layer(name="layer")
            weight = layer.add_weight(shape=(), initializer="zeros", name="weight", **constraint).value
        else:
            weight = v1.get_variable("layer/weight", [], initializer=v1.zeros_initializer(), **constraint)
        loss = tf.reduce_mean(tf.square(features * weight - labels))
        optimizer = v1.train.AdamOptimizer(0.3)
        if params["native"]:
            return EstimatorSpec(mode, loss=loss, optimizer=optimizer)
        return EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, v1.train.get_global_step()))

    config = RunConfig(train_distribute=STRATEGIES[strategy], tensorboard=False)
    for native, of_keras in itertools.product((False, True), (False, True)):
        for most in (0.5, 9.0):
            params = {"most": most, "native": native, "keras": of_keras}
            trainer = Estimator(model_fn, tmp_path / f"{native}-{of_keras}-{most}", config, params)
            weight = trainer.train(points(repeat=True), steps=4).get_variable_value("layer/weight")
            assert weight == 0.5 if most == 0.5 else weight > 1.0


def test_hooks_find_the_loss_in_the_collection_of_losses(tmp_path: Path) -> None:
    class Look(tf.compat.v1.train.SessionRunHook):
        def begin(self) -> None:
            seen.extend(v1.get_collection(v1.GraphKeys.LOSSES))

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("weight", [])
        v1.losses.mean_squared_error(labels, features * weight)
        loss = tf.identity(v1.losses.get_total_loss() + 1.0, name="mine")
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[Look()])

    seen: list[Any] = []
    Estimator(model_fn, tmp_path).train(points(), steps=1)
    assert len(seen) == 2 and seen[-1].name == "mine:0"
