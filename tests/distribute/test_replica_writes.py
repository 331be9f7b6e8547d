"""What model_fn writes by itself on several replicas: the numbers of one device, or a refusal."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import runner
from model_fns.recommender import retrieval_fn
from runner import Estimator, EstimatorSpec, Hook, Input, Params, RunConfig
from runner.checkpoint.equal_replicas import ReplicasDifferError
from tests.support.line import mirrored
from tests.support.replica_programs import (
    BATCH_SIZE,
    EQUAL,
    FIRST,
    REFUSED,
    accumulation,
    bank_of_all_rows,
    batches,
    clipped,
    linear,
    refusal,
    some,
    spec_of,
    table_of_counts,
    trained,
)

v1 = tf.compat.v1
ROOT = Path(__file__).parents[2]
Program = Callable[..., EstimatorSpec]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program], dict[str, np.ndarray]]:
    """Program -> its variables on one device."""

    @functools.cache
    def values(program: Program) -> dict[str, np.ndarray]:
        return trained(program, tmp_path_factory.mktemp(program.__name__), RunConfig())

    return values


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert set(found) == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("program", FIRST)
def test_two_replicas_come_to_the_numbers_of_one_device(program: Program, alone: Any, tmp_path: Path) -> None:
    found = trained(program, tmp_path, RunConfig(train_distribute=mirrored()), BATCH_SIZE)
    assert_equal(found, alone(program))


OF_ONE_COPY = [program for program in FIRST if program not in (accumulation, bank_of_all_rows)]
"""A variable of central storage has one copy, so it cannot be written in a branch or by slices, by each replica."""

SAVE = """
import sys
from pathlib import Path
import numpy as np
from runner import RunConfig, build_strategy
from tests.support.replica_programs import BATCH_SIZE, EQUAL, trained
folder = Path(sys.argv[1])
strategy = build_strategy(sys.argv[2], virtual_devices=3)
for program in EQUAL:
    if program.__name__ in sys.argv[3:]:
        values = trained(program, folder / program.__name__, RunConfig(train_distribute=strategy), BATCH_SIZE)
        names = [name.replace("/", "|") for name in values]
        np.savez(folder / f"{program.__name__}.npz", **dict(zip(names, values.values())))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "programs"), [("mirrored", EQUAL), ("central_storage", OF_ONE_COPY)])
def test_three_replicas_come_to_the_numbers_of_one_device(
    strategy: str, programs: Sequence[Program], alone: Any, tmp_path: Path
) -> None:
    names = [one.__name__ for one in programs]
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path), strategy, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for program in programs:
        with np.load(tmp_path / f"{program.__name__}.npz") as saved:
            found = {name.replace("|", "/"): saved[name] for name in saved.files}
        assert_equal(found, alone(program))


@pytest.mark.parametrize("program", REFUSED)
def test_what_cannot_be_merged_is_refused_with_variable_line_and_cures(program: Program, tmp_path: Path) -> None:
    said = refusal(program, tmp_path, RunConfig(train_distribute=mirrored()))
    assert repr(REFUSED[program]) in said and "replica_programs.py, line" in said
    assert "aggregation=" in said and "runner.all_gather" in said
    assert not list(tmp_path.glob("model.ckpt-*"))


def test_slices_of_the_one_copy_of_central_storage_are_refused(tmp_path: Path) -> None:
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    said = refusal(bank_of_all_rows, tmp_path, RunConfig(train_distribute=strategy))
    assert "'bank'" in said and "replica_programs.py, line" in said and "central_storage" in said


def test_a_lookup_table_that_changes_is_refused_on_replicas_and_said_to_be_lost_on_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = refusal(table_of_counts, tmp_path / "two", RunConfig(train_distribute=mirrored()))
    assert "changes a lookup table (" in said and "replica_programs.py, line" in said
    with caplog.at_level("WARNING"):
        assert refusal(table_of_counts, tmp_path / "one", RunConfig()) == ""
    assert "replica_programs.py, line" in caplog.text and "in no checkpoint" in caplog.text


def test_what_was_made_outside_of_model_fn_is_named_and_no_replica_writes_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = keras.layers.Dense(4, name="frozen", dtype="float64")
    frozen.build([None, 4])
    counter = tf.Variable(0.0, name="counter")

    def uses(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        return clipped(frozen(features), labels, mode)

    def writes(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        with tf.control_dependencies([counter.assign_add(1.0)]):
            return clipped(tf.identity(features), labels, mode)

    with caplog.at_level("WARNING"):
        assert refusal(uses, tmp_path / "two", RunConfig(train_distribute=mirrored())) == ""
    assert "(frozen/bias, frozen/kernel)" in caplog.text and "no checkpoint has them" in caplog.text
    said = refusal(writes, tmp_path / "written", RunConfig(train_distribute=mirrored()))
    assert "'counter'" in said and "test_replica_writes.py, line" in said
    assert refusal(writes, tmp_path / "one", RunConfig()) == ""


class OneCopy(Hook):
    """Changes one copy of a variable behind the runner's back."""

    def __init__(self, made: list[Any]) -> None:
        self._made = made

    def after_step(self, run: Any, result: Any) -> None:
        self._made[-1].values[1].assign_add([[1.0], [0.0], [0.0], [0.0]])


def test_variables_that_differ_between_replicas_are_named_before_a_checkpoint_has_them(tmp_path: Path) -> None:
    made: list[Any] = []

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = clipped(features, labels, mode)
        made.append(v1.trainable_variables()[0])
        return spec

    config = RunConfig(train_distribute=mirrored(), check_replicas=True, save_checkpoints_steps=2)
    estimator = Estimator(model_fn, tmp_path, config)
    inputs = Input(batches, batch_size=BATCH_SIZE)
    estimator.train(inputs, max_steps=2)
    with pytest.raises(ReplicasDifferError, match="step 4 the variable 'kernel'"):
        estimator.train(inputs, hooks=[OneCopy(made)], max_steps=6)
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-2")


def learned_weights(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A weighted mean whose weights depend on a variable: a gradient goes through their sum."""
    weights = tf.exp(tf.squeeze(features @ some("of_weight", [4, 1]), 1))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", dtype="float64")
    value = loss(labels[:, None], linear(features)[:, None], sample_weight=weights)
    return EstimatorSpec(mode, loss=value, optimizer=v1.train.GradientDescentOptimizer(0.05))


def learned_weights_classic(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    loss = learned_weights(features, labels, mode).loss
    return spec_of(mode, loss, v1.train.GradientDescentOptimizer(0.05).minimize(loss))


@pytest.mark.parametrize("program", [learned_weights, learned_weights_classic])
def test_the_gradient_through_a_sum_over_replicas_is_that_of_one_device(
    program: Program, alone: Any, tmp_path: Path
) -> None:
    """Also where replicas have different numbers of examples, as in the fourth batch."""
    assert_equal(trained(program, tmp_path, RunConfig(train_distribute=mirrored()), BATCH_SIZE), alone(program))


def test_the_gallerys_retrieval_is_that_of_one_device(tmp_path: Path) -> None:
    found = []
    for number, strategy in enumerate((None, mirrored())):
        chance = np.random.default_rng(0)
        columns = {"user": chance.integers(0, 9, 24), "item": chance.integers(0, 7, 24)}
        data = tf.data.Dataset.from_tensor_slices((columns, chance.normal(size=24).astype("float32"))).batch(8)
        params = {"num_users": 9, "num_items": 7, "dimension": 3, "mean_rating": 0.0, "learning_rate": 0.1}
        config = RunConfig(train_distribute=strategy, tf_random_seed=1)
        estimator = Estimator(retrieval_fn, tmp_path / str(number), config, params=Params(params))
        estimator.train(Input(lambda data=data: data, batch_size=8 if strategy else None))
        found.append({name: estimator.get_variable_value(name) for name in estimator.get_variable_names()})
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_global_batch_has_the_rows_of_one_process_in_their_order(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = clipped(features, labels, mode)
        whole, is_positive = runner.all_gather(labels), runner.all_gather(labels > 0)
        seen = v1.get_variable("seen", [BATCH_SIZE], tf.float64, v1.zeros_initializer(), trainable=False)
        mine = v1.get_variable("mine", [BATCH_SIZE], tf.bool, v1.zeros_initializer(), trainable=False)
        missing = BATCH_SIZE - tf.shape(whole)[0]
        updates = [seen.assign(tf.pad(whole, [[0, missing]])), mine.assign(tf.pad(is_positive, [[0, missing]]))]
        with tf.control_dependencies([spec.train_op, *updates]):
            return spec._replace(train_op=tf.no_op())

    estimator = Estimator(model_fn, tmp_path, RunConfig(train_distribute=mirrored()))
    labels = [one[1].numpy() for one in batches().take(4)]
    for step, expected in enumerate(labels, 1):  # the fourth has seven rows
        estimator.train(Input(batches, batch_size=BATCH_SIZE), max_steps=step)
        np.testing.assert_array_equal(estimator.get_variable_value("seen")[: len(expected)], expected)
        np.testing.assert_array_equal(estimator.get_variable_value("mine")[: len(expected)], expected > 0)


def gathering(tensor_of: Callable[[Any], Any]) -> Program:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        runner.all_gather(tensor_of(features))
        loss = tf.square(linear(features) - labels)
        return EstimatorSpec(mode, loss=loss, optimizer=v1.train.GradientDescentOptimizer(0.1))

    return model_fn


@pytest.mark.parametrize(
    ("tensor_of", "settings", "named"),
    [
        (tf.reduce_sum, {}, "shape ()"),
        (lambda x: tf.strings.as_string(x[:, 0]), {}, "string"),
        (lambda x: x, {"gradient_accumulation": 2}, "train.gradient_accumulation"),
    ],
    ids=["no rows", "text", "micro-batches"],
)
def test_what_cannot_be_gathered_is_refused(tensor_of: Any, settings: Any, named: str, tmp_path: Path) -> None:
    estimator = Estimator(gathering(tensor_of), tmp_path, RunConfig(train_distribute=mirrored(), **settings))
    with pytest.raises(ValueError, match=re.escape(named)):
        estimator.train(Input(batches, batch_size=BATCH_SIZE), max_steps=1)
