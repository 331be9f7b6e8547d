"""Moving averages of the weights: their values, who evaluates them, and what a checkpoint holds of them."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from runner import Estimator, EstimatorSpec, EvalSpec, RunConfig, ServingInputReceiver, TrainSpec, train_and_evaluate
from tests.support.messages import Messages
from tests.support.models import STYLES, eval_input, strategies, train_input
from tests.support.tiers import slow_but

v1 = tf.compat.v1

STRATEGIES = strategies()
AVERAGE = "/ExponentialMovingAverage"


def estimator(style: str, model_dir: Path, strategy: str = "default", **config: Any) -> Estimator:
    config = {"ema_decay": 0.9, "tf_random_seed": 5, "train_distribute": STRATEGIES[strategy], **config}
    return Estimator(STYLES[style], model_dir, RunConfig(**config))


def values_of(trainer: Estimator) -> dict[str, np.ndarray]:
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


@pytest.mark.parametrize("style", STYLES)
def test_averages_are_those_of_the_weights_of_each_step(style: str, tmp_path: Path) -> None:
    trainer = estimator(style, tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=None)
    trainer.train(train_input(16, dtype="float64"), steps=5)
    kernels = [name for name in trainer.get_variable_names() if name.endswith("kernel")]
    assert len(kernels) == 2
    for name in kernels:
        average = None
        for step in range(6):
            weight = tf.train.load_variable(str(tmp_path / f"model.ckpt-{step}"), name)
            average = weight if average is None else 0.9 * average + 0.1 * weight
            found = tf.train.load_variable(str(tmp_path / f"model.ckpt-{step}"), name + AVERAGE)
            np.testing.assert_allclose(found, average, rtol=1e-12)


@pytest.mark.parametrize("style", slow_but(STYLES, "classic"))
def test_averages_are_equal_on_every_strategy_and_change_nothing_else(style: str, tmp_path: Path) -> None:
    expected = values_of(estimator(style, tmp_path / "default").train(train_input(6, 19, "float64"), steps=12))
    without = values_of(
        estimator(style, tmp_path / "without", ema_decay=None).train(train_input(6, 19, "float64"), steps=12)
    )
    assert {name for name in expected if AVERAGE not in name} == set(without)
    for name, value in without.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    for strategy in ("mirrored", "central_storage"):
        found = values_of(
            estimator(style, tmp_path / strategy, strategy).train(train_input(6, 19, "float64"), steps=12)
        )
        assert list(found) == list(expected)
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-12, err_msg=f"{strategy} {name}")


@pytest.mark.parametrize("strategy", slow_but(["default", "mirrored", "central_storage"], "mirrored"))
def test_a_resumed_run_has_the_averages_of_the_undisturbed_one(strategy: str, tmp_path: Path) -> None:
    expected = values_of(estimator("native", tmp_path / "whole", strategy).train(train_input(16), steps=8))
    for _ in range(2):
        found = estimator("native", tmp_path / "halves", strategy).train(train_input(16), steps=4)
    for name, value in values_of(found).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def plain(trainer: Estimator, averages: bool, tmp_path: Path) -> Estimator:
    """An Estimator without averages whose weights are `trainer`'s, or its averages, in a checkpoint of its own."""
    values = values_of(trainer)
    weights = {name: values[name + AVERAGE] if averages and name + AVERAGE in values else value
               for name, value in values.items() if AVERAGE not in name}  # fmt: skip
    folder = tmp_path / f"plain-{averages}"
    folder.mkdir()
    tf.raw_ops.SaveV2(
        prefix=str(folder / "model.ckpt-12"),
        tensor_names=list(weights),
        shape_and_slices=[""] * len(weights),
        tensors=list(weights.values()),
    )
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-12"\n')
    return estimator("native", folder, ema_decay=None)


@pytest.mark.parametrize(
    ("strategy", "how"),
    slow_but(
        itertools.product(["default", "mirrored"], ["same", "eval_distribute", "another process"]),
        ("mirrored", "same"), ("default", "eval_distribute"), ("default", "another process"),
    ),
)  # fmt: skip
def test_evaluation_and_prediction_use_the_averages(
    strategy: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    config = {"eval_distribute": STRATEGIES["one_device"]} if how == "eval_distribute" else {}
    trainer = estimator("native", tmp_path / "run", strategy, **config).train(train_input(16), steps=12)
    if how == "another process":
        trainer = estimator("native", tmp_path / "run", strategy)
    caplog.set_level(logging.INFO, "runner")
    found = trainer.evaluate(eval_input(8))
    (record,) = [one for one in caplog.records if "ema_decay" in one.getMessage()]
    messages.same(record.levelname, record.getMessage())
    expected = plain(trainer, averages=True, tmp_path=tmp_path)
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in expected.evaluate(eval_input(8)).items()}
    assert found["loss"] != pytest.approx(plain(trainer, False, tmp_path).evaluate(eval_input(8))["loss"], rel=1e-2)
    predicted = [one["y"] for one in trainer.predict(eval_input(8))]
    np.testing.assert_allclose(predicted, [one["y"] for one in expected.predict(eval_input(8))], rtol=1e-5)


def test_evaluations_between_steps_and_a_prediction_left_alone_do_not_touch_training(tmp_path: Path) -> None:
    expected = values_of(estimator("native", tmp_path / "alone").train(train_input(16), steps=8))
    trainer = estimator("native", tmp_path / "evaluated", save_checkpoints_steps=2)
    same = train_input(16)  # it has no end: a further call goes on with it
    train_and_evaluate(trainer, TrainSpec(same, max_steps=4), EvalSpec(eval_input(8)))
    begun = trainer.predict(eval_input(8))
    first = next(begun)
    trainer.evaluate(eval_input(8))
    again = list(trainer.predict(eval_input(8)))
    np.testing.assert_array_equal(first["y"], again[0]["y"])
    np.testing.assert_array_equal([one["y"] for one in begun], [one["y"] for one in again[1:]])
    begun = trainer.predict(eval_input(8))
    next(begun)
    trainer.train(same, max_steps=8)
    for name, value in values_of(trainer).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)


def test_a_checkpoint_without_averages_says_so_when_they_are_to_be_evaluated(
    tmp_path: Path, messages: Messages
) -> None:
    estimator("native", tmp_path, ema_decay=None).train(train_input(16), steps=1)
    with messages.raised(ValueError):
        estimator("native", tmp_path).evaluate(eval_input(8))


def test_a_run_that_goes_on_with_averages_it_did_not_have_begins_them_at_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    estimator("native", tmp_path, ema_decay=None).train(train_input(16), steps=4)
    before = tf.train.load_variable(str(tmp_path), "dense/kernel")
    caplog.set_level(logging.INFO, "runner")
    trainer = estimator("native", tmp_path, precision="mixed_float16").train(train_input(16), steps=1)
    (record,) = [one for one in caplog.records if AVERAGE in one.getMessage()]
    messages.same(record.levelname, record.getMessage())
    values = values_of(trainer)
    np.testing.assert_allclose(values["dense/kernel" + AVERAGE], 0.9 * before + 0.1 * values["dense/kernel"], rtol=1e-5)
    assert values["loss_scale/dynamic_scale"] == 2**15 and values["global_step"] == 5


# --- an optimizer that keeps averages itself ----------------------------------------------------------------------


def of_optimizer(family: Any, model_dir: Path, strategy: str = "default", **config: Any) -> Estimator:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        predictions = family.layers.Dense(1, kernel_initializer="ones", name="dense")(features["x"])
        if mode == "infer":
            return EstimatorSpec(mode, predictions={"y": predictions})
        loss = tf.square(predictions - labels)[:, 0]
        # As most model_fns have it: only who trains knows the optimizer.
        optimizer = family.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5) if mode == "train" else None
        return EstimatorSpec(mode, loss=loss, predictions={"y": predictions}, optimizer=optimizer)

    config = {"tf_random_seed": 5, "train_distribute": STRATEGIES[strategy], **config}
    return Estimator(model_fn, model_dir, RunConfig(**config))


X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)


def rows(batch: int = 8) -> Any:
    labels = (X @ [[1.0], [2.0], [3.0]]).astype(np.float32)
    return lambda: tf.data.Dataset.from_tensor_slices(({"x": X}, labels)).batch(batch)


def of_weights(trainer: Estimator, step: int, *, averaged: bool = False) -> np.ndarray:
    """The predictions of the weights, or of their averages, of a checkpoint."""
    checkpoint = tf.train.load_checkpoint(f"{trainer.model_dir}/model.ckpt-{step}")
    names = [name for name in trainer.get_variable_names() if "average" in name]
    kernel, bias = (
        next(name for name in names if part in name) if averaged else f"dense/{part}" for part in ("kernel", "bias")
    )
    return X @ checkpoint.get_tensor(kernel).astype(np.float64) + checkpoint.get_tensor(bias)


FAMILIES = {"keras": keras, "tf_keras": tf_keras}


@pytest.mark.parametrize(
    ("family", "strategy"), slow_but(itertools.product(FAMILIES, ["default", "mirrored"]), ("keras", "mirrored"))
)
def test_averages_of_the_optimizer_are_shown_and_training_goes_on_with_the_weights(
    family: str, strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    caplog.set_level(logging.INFO, "runner")
    trainer = of_optimizer(FAMILIES[family], tmp_path / "run", strategy, save_checkpoints_steps=1)
    per_replica = 8 if strategy == "default" else 4
    trainer.train(rows(per_replica))
    expected = of_weights(trainer, 3, averaged=True)
    assert not np.allclose(expected, of_weights(trainer, 3), rtol=1e-3)
    for one in (trainer, of_optimizer(FAMILIES[family], tmp_path / "run", strategy)):  # the second knows nothing
        predicted = [row["y"] for row in one.predict(rows())]
        np.testing.assert_allclose(predicted, expected, rtol=1e-5)
        loss = np.mean((expected - X @ [[1.0], [2.0], [3.0]]) ** 2)
        assert one.evaluate(rows())["loss"] == pytest.approx(loss, rel=1e-5)
    messages.logged(caplog, "use_ema")

    def receiver() -> ServingInputReceiver:
        features = {"x": v1.placeholder(tf.float32, [None, 3], name="x")}
        return ServingInputReceiver(features, features)

    served = tf.saved_model.load(os.fsdecode(trainer.export_saved_model(tmp_path / "served", receiver)))
    answered = served.signatures["serving_default"](x=tf.constant(X))["y"].numpy()
    np.testing.assert_allclose(answered, expected, rtol=1e-5)
    # Between the two halves of this run are evaluations, predictions and an export.
    trainer.train(rows(per_replica))
    whole = of_optimizer(FAMILIES[family], tmp_path / "whole", strategy)
    whole.train(lambda: rows(per_replica)().repeat(2))
    found, undisturbed = values_of(trainer), values_of(whole)
    for name, value in undisturbed.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_before_the_first_step_the_weights_are_shown(tmp_path: Path) -> None:
    trainer = of_optimizer(keras, tmp_path).train(rows())
    first = str(tmp_path / "model.ckpt-0")
    predicted = [row["y"] for row in trainer.predict(rows(), checkpoint_path=first)]
    np.testing.assert_allclose(predicted, X @ np.ones([3, 1]), rtol=1e-5)


def test_two_kinds_of_averages_are_refused(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        of_optimizer(keras, tmp_path, ema_decay=0.9).train(rows())
