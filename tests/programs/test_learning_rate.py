"""The learning rate on several replicas, and on the way to its value."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.programs.learning_rate import in_words
from tests.support.line import read_events
from tests.support.messages import Messages
from tests.support.models import data, strategies, train_input
from tests.support.tiers import slow_but

tf_keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")
v1 = tf.compat.v1
STRATEGIES = strategies()
STEPS = 6


class Slope(keras.layers.Layer):
    """One weight."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(), initializer="zeros", name="weight", dtype="float64")

    def call(self, features: Any) -> Any:
        return self.weight + 0 * tf.reduce_sum(features, 1)


def rates(optimizer: Callable[[], Any], model_dir: Path, strategy: str = "default", **config: Any) -> list[float]:
    """The learning rate of each of the first updates: how far a weight with the gradient -1 moves."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        return EstimatorSpec(mode, loss=-Slope(name="line")(features), optimizer=optimizer())

    run_config = RunConfig(
        train_distribute=STRATEGIES[strategy], save_checkpoints_steps=1, keep_checkpoint_max=None, **config
    )
    trainer = Estimator(model_fn, model_dir, run_config)
    trainer.train(train_input(4, dtype="float64"), steps=STEPS)
    weights = [
        float(tf.train.load_variable(f"{model_dir}/model.ckpt-{step}", "line/weight")) for step in range(STEPS + 1)
    ]
    return list(np.diff(weights))


FLAT: dict[str, Callable[[], Any]] = {
    "keras": lambda: keras.optimizers.SGD(0.1),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.1),
    "v1": lambda: v1.train.GradientDescentOptimizer(0.1),
    "v1-tensor": lambda: v1.train.MomentumOptimizer(tf.constant(0.1, tf.float64), 0.0),
}


@pytest.mark.parametrize(
    ("family", "strategy"),
    slow_but(
        itertools.product(FLAT, ["mirrored", "central_storage"]),
        *((family, "mirrored") for family in FLAT), ("keras", "central_storage"),
    ),
)  # fmt: skip
def test_the_rate_is_multiplied_by_the_replicas_or_their_root(family: str, strategy: str, tmp_path: Path) -> None:
    for scaling, expected in (("linear", 0.2), ("sqrt", 0.1 * 2**0.5)):
        found = rates(FLAT[family], tmp_path / scaling, strategy, learning_rate_scaling=scaling)
        np.testing.assert_allclose(found, [expected] * STEPS, rtol=1e-6)


@pytest.mark.parametrize("family", FLAT)
def test_warm_up_leads_from_the_rate_as_written_to_the_scaled_one(family: str, tmp_path: Path) -> None:
    found = rates(FLAT[family], tmp_path, "mirrored", learning_rate_scaling="linear", warmup_steps=4)
    np.testing.assert_allclose(found, [0.1, 0.125, 0.15, 0.175, 0.2, 0.2], rtol=1e-6)


@pytest.mark.parametrize("family", FLAT)
def test_warm_up_alone_leads_from_zero_to_the_rate(family: str, tmp_path: Path) -> None:
    found = rates(FLAT[family], tmp_path, warmup_steps=4)
    np.testing.assert_allclose(found, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-6)


def test_what_a_schedule_says_is_multiplied(tmp_path: Path) -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.2])  # 0.2 from the third update on
    found = rates(
        lambda: keras.optimizers.SGD(schedule), tmp_path, "mirrored", learning_rate_scaling="linear", warmup_steps=4
    )
    expected = np.array([0.1, 0.1, 0.2, 0.2, 0.2, 0.2]) * [1, 1.25, 1.5, 1.75, 2, 2]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def replicas() -> int:
    in_context: int = tf.distribute.get_replica_context().num_replicas_in_sync
    assert tf.distribute.get_strategy().num_replicas_in_sync == in_context
    return in_context


BY_REPLICAS: dict[str, Callable[[], Any]] = {
    "keras": lambda: keras.optimizers.SGD(0.1 * replicas()),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.1 * replicas()),
    "v1": lambda: v1.train.GradientDescentOptimizer(0.1 * replicas()),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1 * replicas(), 1, 1.0)),
}


@pytest.mark.parametrize("family", BY_REPLICAS)
def test_model_fn_sees_the_replicas_of_the_run_whenever_it_is_called(family: str, tmp_path: Path) -> None:
    for strategy, expected in (("default", 0.1), ("mirrored", 0.2)):
        np.testing.assert_allclose(rates(BY_REPLICAS[family], tmp_path / strategy, strategy), [expected] * STEPS, 1e-6)


def test_an_initial_value_made_of_the_number_of_replicas_is_that_of_the_run(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        number = tf.constant(replicas(), tf.float64)
        v1.Variable(number, name="value", trainable=False)
        v1.get_variable("constant", initializer=float(replicas()), trainable=False)
        there = tf.distribute.has_strategy(), v1.distribute.has_strategy(), tf.compat.v2.distribute.has_strategy()
        v1.get_variable("there", initializer=float(sum(there)), trainable=False)
        loss = Slope(name="line")(features)
        if mode == "eval":  # by the same replicas
            return EstimatorSpec(mode, loss=loss, eval_metric_ops={"replicas": v1.metrics.mean(replicas())})
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))

    trainer = Estimator(model_fn, tmp_path, RunConfig(train_distribute=STRATEGIES["mirrored"]))
    trainer.train(train_input(4, dtype="float64"), steps=1)
    assert [trainer.get_variable_value(name) for name in ("value", "constant")] == [2.0, 2.0]
    assert trainer.get_variable_value("there") == 3.0
    assert trainer.evaluate(train_input(4, dtype="float64"), steps=1)["replicas"] == 2.0
    alone = Estimator(model_fn, tmp_path / "alone", RunConfig()).train(train_input(4, dtype="float64"), steps=1)
    assert alone.get_variable_value("there") == 0.0


def test_one_replica_has_nothing_to_scale_which_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    caplog.set_level(logging.INFO, "runner")
    found = rates(FLAT["keras"], tmp_path, learning_rate_scaling="linear", warmup_steps=4)
    np.testing.assert_allclose(found, [0.1] * STEPS, rtol=1e-6)
    (record,) = [one for one in caplog.records if "train.warmup_steps" in one.getMessage()]
    messages.same(record.levelname, record.getMessage())


def test_what_becomes_of_the_rate_is_said(messages: Messages) -> None:
    on_two = RunConfig(train_distribute=STRATEGIES["mirrored"], learning_rate_scaling="sqrt", warmup_steps=100)
    for config in (on_two, RunConfig(warmup_steps=100)):
        messages.same("words", str(in_words(config)))
    assert in_words(RunConfig()) is None


def test_an_optimizer_without_a_rate_to_scale_is_refused_with_the_reason(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        rates(lambda: tf_keras.optimizers.legacy.SGD(0.1), tmp_path, warmup_steps=4)


def test_a_run_that_resumes_goes_on_with_its_warm_up(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        return EstimatorSpec(mode, loss=-Slope(name="line")(features), optimizer=keras.optimizers.SGD(0.1))

    for _ in range(2):
        trainer = Estimator(model_fn, tmp_path, RunConfig(warmup_steps=4))
        trainer.train(train_input(4, dtype="float64"), steps=3)
    assert trainer.get_variable_value("line/weight") == pytest.approx(0.025 + 0.05 + 0.075 + 3 * 0.1)


# --- schedules of tf_keras ----------------------------------------------------------------------------------------


SCHEDULED: dict[str, Callable[[], Any]] = {
    "exponential": lambda: tf_keras.optimizers.SGD(schedules().ExponentialDecay(0.1, 2, 0.5), 0.5),
    "piecewise": lambda: tf_keras.optimizers.SGD(
        schedules().PiecewiseConstantDecay([2], [0.1, 0.05]), weight_decay=0.1
    ),
    "cosine": lambda: tf_keras.optimizers.Adam(schedules().CosineDecay(0.1, 5)),
    "legacy": lambda: tf_keras.optimizers.legacy.SGD(schedules().ExponentialDecay(0.1, 2, 0.5), 0.5),
}


def schedules() -> Any:
    return tf_keras.optimizers.schedules


def by_tf_keras(optimizer: Any, steps: int) -> tuple[np.ndarray, list[float]]:
    """The weights that a plain loop comes to, and its rates."""
    x, y = data(4, "float64")
    weights, rate = tf.Variable(np.ones((4, 1))), optimizer.learning_rate
    found = []
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - y))
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        found.append(float(rate(step) if callable(rate) else rate))
    return weights.numpy(), found


@pytest.mark.parametrize(
    ("name", "style", "strategy"),
    [
        *((name, "native", "default") for name in SCHEDULED),
        ("cosine", "native", "mirrored"), ("piecewise", "classic", "mirrored"), ("exponential", "classic", "default"),
        ("exponential", "native", "central_storage"), ("legacy", "native", "mirrored"),
        ("legacy", "classic", "default"),
    ],
)  # fmt: skip
def test_a_schedule_of_tf_keras_has_its_rates_also_after_a_resume(
    name: str, style: str, strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weights = v1.get_variable("weights", [4, 1], tf.float64, v1.ones_initializer())
        losses, optimizer = tf.square(features @ weights - labels)[:, 0], SCHEDULED[name]()
        if style == "native":
            return EstimatorSpec(mode, loss=losses, optimizer=optimizer)
        loss, step = tf.reduce_mean(losses), v1.train.get_global_step()
        updated = optimizer.apply_gradients(zip(tf.gradients(loss, [weights]), [weights], strict=True))
        return EstimatorSpec(mode, loss=loss, train_op=tf.group(updated, step.assign_add(1)))

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data(4, "float64")).batch(4).repeat()

    expected, rates_of_tf_keras = by_tf_keras(SCHEDULED[name](), 5)
    for max_steps in (3, 5):
        config = RunConfig(train_distribute=STRATEGIES[strategy], log_step_count_steps=1)
        trainer = Estimator(model_fn, tmp_path, config)
        trainer.train(Input(input_fn, params={}, batch_size=4), max_steps=max_steps)
    np.testing.assert_allclose(trainer.get_variable_value("weights"), expected, rtol=1e-6)
    assert "current_learning_rate:" not in caplog.text
    reported = {event.step: event.value for event in read_events(tmp_path) if event.tag == "train/learning_rate"}
    if style == "native":  # new optimizers of tf_keras tell nobody the rate of a train_op
        assert [reported[step] for step in range(1, 6)] == pytest.approx(rates_of_tf_keras, rel=1e-6)
