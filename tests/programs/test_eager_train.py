"""run.eager: model_fn runs with values, and comes to the numbers of the graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import runner
from runner import Estimator, EstimatorSpec, Input, ModeKeys, RunConfig
from runner.config import parsing
from runner.config.schema import ConfigError
from tests.config.test_config import composed
from tests.support.jobs import noted, results, run
from tests.support.line import read_events
from tests.support.messages import Messages

HERE = "tests.programs.test_eager_train"
v1 = tf.compat.v1
SEEN: list[Any] = []


def rows(params: Any) -> tf.data.Dataset:
    generator = np.random.default_rng(3)
    x = generator.normal(size=[20, 4]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(4).repeat()


def layers(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Dense layers with BatchNormalization and two kinds of dropout; a schedule for Adam. In float64."""
    training = mode == ModeKeys.TRAIN
    hidden = keras.layers.Dense(8, "relu", dtype="float64")(tf.cast(features, tf.float64))
    hidden = keras.layers.BatchNormalization(dtype="float64")(hidden, training=training)
    hidden = keras.layers.Dropout(0.3, dtype="float64")(hidden, training=training)
    hidden = v1.nn.dropout(hidden, rate=0.2) if training else hidden
    predicted = keras.layers.Dense(1, dtype="float64")(hidden)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predicted)
    if training and params.get("look"):
        SEEN.append(float(predicted.numpy().mean()))
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)
    labels = tf.cast(labels, tf.float64)
    return EstimatorSpec(mode, predicted, tf.square(predicted - labels)[:, 0], optimizer=keras.optimizers.Adam(rate))


def variables(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """v1 variables in scopes, a v1 optimizer with slots."""
    with v1.variable_scope("net"):
        kernel = v1.get_variable("kernel", [4, 1])
        bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
    predicted = features @ kernel + bias
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predicted)
    loss = v1.losses.mean_squared_error(labels, predicted)
    return EstimatorSpec(mode, predicted, loss, optimizer=v1.train.MomentumOptimizer(0.05, 0.9))


def classic(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    spec = variables(features, labels, mode, params)
    train_op = spec.optimizer.minimize(spec.loss, v1.train.get_global_step())
    return EstimatorSpec(mode, spec.predictions, spec.loss, train_op)


def reporting(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Reports in all ways that there are: metrics, runner.log, summaries of both kinds, images."""
    predicted = keras.layers.Dense(1, dtype="float64", name="dense")(tf.cast(features, tf.float64))
    error = tf.abs(predicted - tf.cast(labels, tf.float64))[:, 0]
    kept = keras.metrics.Mean(name="kept")
    kept.update_state(error)
    if mode == ModeKeys.TRAIN:
        runner.log({"largest": tf.reduce_max(error)}, on_progress=True)
        tf.summary.scalar("now", tf.reduce_min(error))
        with tf.summary.record_if(False):
            tf.summary.scalar("never", 1.0)
        v1.summary.scalar("of_v1", tf.reduce_sum(error))
        v1.summary.histogram("errors", error)
        tf.summary.image("picture", tf.zeros([1, 4, 4, 1]) + tf.reduce_min(tf.nn.sigmoid(tf.cast(error, tf.float32))))
        tf.summary.histogram("spread", error)
    metrics = {"error": error, "kept": kept}
    optimizer = keras.optimizers.Adam(0.05) if params.get("rate") is None else v1.train.MomentumOptimizer(0.05, 0.5)
    return EstimatorSpec(mode, predicted, tf.square(error), optimizer=optimizer, eval_metric_ops=metrics)


def wrong(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    broken = tf.matmul(features, tf.ones([3, 1]))
    return EstimatorSpec(mode, broken, tf.reduce_mean(broken), optimizer=keras.optimizers.SGD(0.1))


def broken_into(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    if mode == ModeKeys.TRAIN:
        breakpoint()
    return variables(features, labels, mode, params)


OPTIONS = {"clip_global_norm": 0.5, "ema_decay": 0.9, "warmup_steps": 3}


def values_after(folder: Path, model_fn: Any, steps: list[int], **config: Any) -> dict[str, np.ndarray]:
    estimator = Estimator(model_fn, folder, RunConfig(tf_random_seed=5, tensorboard=False, **config), {"look": False})
    for step in steps:
        estimator.train(Input(rows, params={}, shuffle_seed=None), max_steps=step)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


@pytest.mark.parametrize(
    ("model_fn", "settings"),
    [
        (layers, {}), (variables, {}), (variables, OPTIONS), pytest.param(layers, OPTIONS, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_the_graph(model_fn: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    graph = values_after(tmp_path / "graph", model_fn, [7], **settings)
    eager = values_after(tmp_path / "eager", model_fn, [7], eager=True, **settings)
    assert set(eager) == set(graph) and eager["global_step"] == 7
    for name, value in graph.items():
        np.testing.assert_allclose(eager[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    if not settings:
        values_after(tmp_path / "turns", model_fn, [3], eager=True)
        turns = values_after(tmp_path / "turns", model_fn, [7])
        for name, value in graph.items():
            np.testing.assert_allclose(turns[name], value, rtol=1e-6, atol=1e-6, err_msg=f"resumed in a graph: {name}")


def test_model_fn_sees_values_once_a_step_and_once_before(tmp_path: Path) -> None:
    SEEN.clear()
    settings = (f"model.fn={HERE}.layers", f"input.train.fn={HERE}.rows", "input.train.batch_size=4")
    assert run(tmp_path, *settings, "+model.params.look=true", "run.eager=true", "input.eval=null") == 0
    assert results(tmp_path)[0]["global_step"] == 4 and len(SEEN) == 5 and np.isfinite(SEEN).all()
    assert SEEN[0] == SEEN[1] != SEEN[2], "the step that makes the variables leaves them as they were"


def test_it_trains_and_evaluates(tmp_path: Path) -> None:
    settings = (f"model.fn={HERE}.layers", f"input.train.fn={HERE}.rows", "input.train.batch_size=4")
    evaluated = (f"input.eval.fn={HERE}.rows", "eval.steps=2", "input.eval.batch_size=4")
    metrics = []
    for name, eager in (("eager", "true"), ("graph", "false")):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, *settings, *evaluated, f"run.eager={eager}", "checkpoint.save_steps=2") == 0
        metrics.append(results(tmp_path / name)[0]["metrics"]["eval/loss"])
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


@pytest.mark.parametrize("rate", [None, pytest.param("v1", marks=pytest.mark.slow)])
def test_it_reports_what_the_graph_reports(rate: str | None, tmp_path: Path) -> None:
    settings: tuple[str, ...] = (
        f"model.fn={HERE}.reporting", f"input.train.fn={HERE}.rows", "input.train.batch_size=4", "input.eval=null",
        "train.log_steps=2", "train.summary_steps=3", "train.log_gradient_norm=true", "train.max_steps=6",
        "tracking.tensorboard=true", "train.warmup_steps=3",
    )  # fmt: skip
    settings = settings if rate is None else (*settings, "+model.params.rate=v1")
    found: dict[str, Any] = {}
    for name, eager in (("eager", "true"), ("graph", "false")):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, *settings, f"run.eager={eager}") == 0
        points: dict[tuple[int, str], float] = {}
        for line in noted(tmp_path / name):
            points |= {(line["step"], key): value for key, value in line.get("metrics", {}).items()}
        written = [one for one in read_events(tmp_path / name / "run") if "/sec" not in one.tag]
        found[name] = (
            {key: value for key, value in points.items() if "per_sec" not in key[1]},
            {(one.step, one.tag): one.value for one in written if isinstance(one.value, float)},
            sorted((one.step, one.tag) for one in written),
        )
    names = {name for _, name in found["eager"][0]}
    assert names == {f"train/{name}" for name in (
        "loss", "error", "kept", "largest", "now", "of_v1", "learning_rate", "gradient_norm")}  # fmt: skip
    assert found["eager"][0] == pytest.approx(found["graph"][0], rel=1e-5)
    assert found["eager"][1] == pytest.approx(found["graph"][1], rel=1e-5)
    assert found["eager"][2] == found["graph"][2]
    assert {(3, "picture"), (6, "spread"), (6, "errors")} < set(found["eager"][2])


def logging_late(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    spec = variables(features, labels, mode, params)
    step = v1.train.get_global_step()
    if mode == ModeKeys.TRAIN and tf.executing_eagerly() and step.numpy() == 2:
        runner.log({"late": 1.0})
    return spec


def test_what_only_a_later_step_logs_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    values_after(tmp_path, logging_late, [4], eager=True)
    messages.logged(caplog, "late")
    assert "outside" not in caplog.text


def test_data_that_ends_ends_training(tmp_path: Path) -> None:
    features, labels = next(iter(rows({})))
    estimator = Estimator(variables, tmp_path, RunConfig(eager=True), {})
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((features, labels)).batch(3))
    assert estimator.get_variable_value("global_step") == 2


def test_a_shape_error_names_the_line_with_the_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = (f"model.fn={HERE}.wrong", f"input.train.fn={HERE}.rows", "input.train.batch_size=4", "run.eager=true")
    assert run(tmp_path, *settings) == 2
    said = capsys.readouterr().err
    (frame,) = [text for text in said.splitlines() if ", in wrong: " in text]
    messages.same("line", frame)
    assert "[4,4]" in said


def test_a_train_op_is_refused_with_what_to_use_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = (f"model.fn={HERE}.classic", f"input.train.fn={HERE}.rows", "input.train.batch_size=4", "run.eager=true")
    assert run(tmp_path, *settings) == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if "run.eager" in text]
    messages.same("exit 2", said)


def test_a_debugger_sees_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Any] = []

    def look() -> None:
        kernels.append(sys._getframe(1).f_locals["features"].numpy().shape)

    monkeypatch.setattr(sys, "breakpointhook", look)
    settings = (f"model.fn={HERE}.broken_into", f"input.train.fn={HERE}.rows", "input.train.batch_size=4")
    assert run(tmp_path, *settings, "run.eager=true", "input.eval=null", "train.max_steps=2") == 0
    assert kernels == [(4, 4)] * 3


@pytest.mark.parametrize(
    "override",
    [
        "strategy=mirrored",
        "train.jit=true",
        "train.gradient_accumulation=2",
        "train.precision=mixed_bfloat16",
        "run.debug=nan",
    ],
    ids=str,
)
def test_what_needs_a_graph_is_refused(override: str, messages: Messages) -> None:
    with messages.raised(ConfigError):
        parsing.parse(composed(["run.eager=true", override]))
