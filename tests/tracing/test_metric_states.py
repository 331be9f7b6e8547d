"""Metrics with a state on several replicas: merged where the runner knows how, else computed by one replica."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tf_slim import metrics as contrib

from runner import Estimator, EstimatorSpec, Input, ModeKeys, RunConfig, build_strategy
from tests.support.line import mirrored
from tests.support.measured import summarised_values
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1

NUMBERS = np.random.RandomState(7).randn(13, 2)
"""Of one sign in parts, so that a sum of maxima is not the maximum."""


class Largest(keras.metrics.Metric):
    """Keeps a maximum, without `merge_state`."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.maximum(self.largest.value, tf.cast(tf.reduce_max(values), tf.float32)))

    def result(self) -> Any:
        return tf.convert_to_tensor(self.largest)


class MergedLargest(Largest):
    def merge_state(self, metrics: Any) -> None:
        for one in metrics:
            self.largest.assign(tf.maximum(self.largest.value, one.largest.value))


def updated(metric: Any, values: Any) -> Any:
    metric.update_state(values)
    return metric


def narrow(values: Any) -> Any:
    return tf.cast(values, tf.float32)


def largest_of_v1(values: Any) -> Any:
    largest = v1.get_variable(
        "largest", [], tf.float64, v1.zeros_initializer(), trainable=False, collections=[v1.GraphKeys.LOCAL_VARIABLES]
    )
    return largest, largest.assign(tf.maximum(largest, tf.reduce_max(values)))


MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "merge_state": lambda x, y: updated(MergedLargest(), x),
    "covariance": lambda x, y: contrib.streaming_covariance(narrow(x), narrow(y)),
    "pearson": lambda x, y: contrib.streaming_pearson_correlation(narrow(x), narrow(y)),
    "weighted_covariance": lambda x, y: contrib.streaming_covariance(narrow(x), narrow(y), tf.abs(narrow(x)) + 0.5),
    "mean": lambda x, y: v1.metrics.mean(x, tf.abs(y)),
    "root": lambda x, y: v1.metrics.root_mean_squared_error(x, y),
    # 0.5 an example, which bfloat16 adds up exactly
    "halves": lambda x, y: updated(keras.metrics.Sum(dtype="bfloat16"), tf.ones_like(x) / 2),
}
ALONE: dict[str, Callable[[Any, Any], Any]] = {
    "keras_largest": lambda x, y: updated(Largest(), x),
    "largest": lambda x, y: largest_of_v1(x),
    "in_a_branch": lambda x, y: in_a_branch(x),
}


def in_a_branch(values: Any) -> Any:
    count = v1.get_variable(
        "count", [], tf.float64, v1.zeros_initializer(), trainable=False, collections=[v1.GraphKeys.LOCAL_VARIABLES]
    )
    return count, tf.cond(values[0] > 0, lambda: count.assign_add(1.0), lambda: tf.identity(count))


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    weight = v1.get_variable("weight", [], tf.float64, v1.ones_initializer())
    x, y = weight * features[:, 0], features[:, 1]
    return EstimatorSpec(
        mode,
        loss=tf.square(x),
        optimizer=keras.optimizers.SGD(0.0),
        eval_metric_ops={name: metric(x, y) for name, metric in params["metrics"].items()},
    )


def rows(batch_size: int | None = 4) -> Input:
    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((NUMBERS, NUMBERS[:, 0])).batch(batch_size or 4)

    return Input(input_fn, params={}, batch_size=batch_size)


def evaluated(strategy: Any, metrics: Any, folder: Path) -> dict[str, Any]:
    config = RunConfig(train_distribute=strategy, train_metrics=True, log_step_count_steps=1)
    estimator = Estimator(model_fn, folder, config, {"metrics": metrics}).train(rows(), max_steps=3)
    return estimator.evaluate(rows())


def test_states_that_the_runner_can_merge_have_the_values_of_one_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = evaluated(None, MERGED, tmp_path / "one")
    caplog.set_level(logging.INFO)
    two = evaluated(mirrored(), MERGED, tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-6)
    assert "One replica" not in caplog.text and "Not reported" not in caplog.text
    for name in MERGED:
        of_one, of_two = (summarised_values(tmp_path / folder, f"train/{name}") for folder in ("one", "two"))
        assert list(of_one) == [1, 2, 3]
        assert of_two == pytest.approx(of_one, rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(["mirrored", "central_storage"], "mirrored"))
def test_any_other_state_is_evaluated_by_one_replica_and_not_reported_in_training(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    metrics = {**ALONE, "mean": MERGED["mean"]}
    one = evaluated(None, metrics, tmp_path / "one")
    assert "Not reported" not in caplog.text
    two = evaluated(build_strategy(strategy, devices=["CPU:0", "CPU:1"]), metrics, tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-6)
    assert ("One replica" in caplog.text) == (strategy == "mirrored")  # the other always evaluates on one
    for name in ALONE:
        warned = [record.getMessage() for record in caplog.records if f"{name!r}" in record.getMessage()]
        assert sum("Not reported in training" in text for text in warned) == 1
        assert not summarised_values(tmp_path / "two", f"train/{name}")
    assert list(summarised_values(tmp_path / "two", "train/mean")) == [1, 2, 3]


@pytest.mark.parametrize("metric", [keras.metrics.Mean, Largest, lambda: keras.metrics.Accuracy(name="other")])
def test_a_keras_metric_that_model_fn_has_not_updated_is_refused(
    metric: Any, tmp_path: Path, messages: Messages
) -> None:
    """As in tf.estimator 2.15: its value would be that of no examples."""
    metrics = {"updated": lambda x, y: updated(keras.metrics.Mean(), x), "idle": lambda x, y: metric()}
    with messages.raised(ValueError):
        evaluated(None, metrics, tmp_path)


def test_a_metric_that_writes_to_the_model_leaves_no_trace(tmp_path: Path) -> None:
    def keeping_last(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        last = v1.get_variable("last", [], tf.float64, v1.zeros_initializer(), trainable=False)
        weight = v1.get_variable("weight", [], tf.float64, v1.ones_initializer())
        metrics = {"last": (last.read_value(), last.assign(labels[-1]))} if mode == ModeKeys.EVAL else {}
        loss = tf.square(weight * labels)
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.0), eval_metric_ops=metrics)

    for strategy in (None, mirrored()):
        folder = tmp_path / str(strategy is None)
        estimator = Estimator(keeping_last, folder, RunConfig(train_distribute=strategy)).train(rows(), max_steps=1)
        assert [estimator.evaluate(rows())["last"] for _ in range(2)] == [NUMBERS[-1, 0]] * 2
        assert estimator.train(rows(), steps=1).get_variable_value("last") == 0.0


def drawn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    weight = v1.get_variable("weight", [], tf.float64, v1.ones_initializer())
    noise = tf.random.uniform([tf.shape(features)[0]], dtype=tf.float64)
    dropped = keras.layers.Dropout(0.5, dtype="float64")(tf.ones([tf.shape(features)[0], 1], tf.float64), training=True)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"noise": noise, "dropped": dropped[:, 0]})
    metrics = {"noise": noise, "dropped": dropped[:, 0]}
    optimizer = keras.optimizers.SGD(0.0)
    return EstimatorSpec(mode, loss=weight * features[:, 0], optimizer=optimizer, eval_metric_ops=metrics)


@pytest.mark.parametrize("batch_size", slow_but([2, None], 2))
def test_random_numbers_of_eval_and_predict_are_those_of_the_batch(batch_size: int | None, tmp_path: Path) -> None:
    numbers: list[Any] = []
    for strategy in (None, mirrored()):
        config = RunConfig(train_distribute=strategy)
        estimator = Estimator(drawn, tmp_path / str(strategy is None), config).train(rows(4), max_steps=1)
        values = estimator.evaluate(rows(batch_size))
        predicted = [(one["noise"], one["dropped"]) for one in estimator.predict(rows(batch_size))]
        numbers.append((values["noise"], values["dropped"], predicted))
    assert numbers[0][0] == pytest.approx(numbers[1][0], rel=1e-12)
    assert numbers[0][1] == pytest.approx(numbers[1][1], rel=1e-12)
    assert numbers[0][2] == numbers[1][2]
    assert len({noise for noise, _ in numbers[0][2]}) == 13 and {drop for _, drop in numbers[0][2]} == {0.0, 2.0}


def test_an_evaluation_that_does_not_fit_names_the_key_and_a_smaller_value(tmp_path: Path) -> None:
    def huge(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("weight", [], tf.float64, v1.ones_initializer())
        loss = weight * features[:, 0]
        if mode == ModeKeys.EVAL:
            rows = tf.cast(tf.shape(features)[0], tf.int64)
            loss += tf.reduce_sum(tf.cast(tf.random.uniform([rows * 2**40]), tf.float64))
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.0))

    estimator = Estimator(huge, tmp_path, RunConfig(train_distribute=mirrored())).train(rows(), max_steps=1)
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        estimator.evaluate(rows())
    assert "input.eval.batch_size=2" in "\n".join(caught.value.__notes__)
