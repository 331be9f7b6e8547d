"""Losses of `tf.compat.v1.losses` and Keras: those of a batch, however its examples and their weights are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.summary import summary

from runner import Estimator, EstimatorSpec, RunConfig
from tests.classic.premade.test_premade import Losses
from tests.support.models import strategies
from tests.support.tiers import slow_but
from tests.support.weighted_models import Loss, Reduction, by, by_learnt_weights, model_of, of_two, weighted_input

v1 = tf.compat.v1
STRATEGIES = strategies()


@pytest.mark.parametrize(
    "loss_of",
    [by(Reduction.MEAN), by(Reduction.SUM), by(Reduction.SUM_OVER_BATCH_SIZE), by_learnt_weights, of_two],
    ids=["mean", "sum", "over batch size", "learnt weights", "two losses"],
)
def test_a_step_over_two_replicas_is_that_of_one_device(loss_of: Loss, tmp_path: Path) -> None:
    found = {}
    for name in ("default", "mirrored"):
        config = RunConfig(train_distribute=STRATEGIES[name], tensorboard=False)
        trainer = Estimator(model_of(loss_of), tmp_path / name, config)
        trainer.train(weighted_input(), hooks=[seen := Losses()])
        found[name] = {one: trainer.get_variable_value(one) for one in trainer.get_variable_names()}
        found[name]["losses"] = np.array(seen.losses)
    for one, value in found["default"].items():
        np.testing.assert_allclose(found["mirrored"][one], value, rtol=1e-5, err_msg=one)  # float32
    assert len(found["default"]["losses"]) == 4


def two_outputs(features: Any, labels: Any) -> keras.Model:
    """A compiled model with a sum, a mean by weights, weights of both, a penalty and a loss that a layer adds."""
    x, dense = keras.Input([4]), {"activation": "tanh", "kernel_initializer": keras.initializers.Constant(0.3)}
    hidden = keras.layers.Dense(3, kernel_regularizer="l2", **dense)(x)
    hidden = keras.layers.ActivityRegularization(l2=0.01)(hidden)
    model = keras.Model(x, {name: keras.layers.Dense(1, name=name, **dense)(hidden) for name in ("a", "b")})
    kinds = {"a": keras.losses.MeanSquaredError("sum"), "b": keras.losses.Huber(reduction="mean_with_sample_weight")}
    model.compile(keras.optimizers.SGD(0.05), loss=kinds, loss_weights={"a": 0.25, "b": 2.0})
    return model


@pytest.mark.slow
def test_a_compiled_model_adds_up_its_losses_but_not_its_penalties(tmp_path: Path) -> None:
    def fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        model = two_outputs(features, labels)
        predicted, weights = model(features["x"]), {"a": None, "b": features["w"]}
        loss = model.compute_loss(y={"a": labels, "b": labels}, y_pred=predicted, sample_weight=weights)
        return EstimatorSpec(mode, loss=loss, optimizer=model.optimizer)

    found = {}
    for name, strategy, parts in (("whole", "default", 1), ("replicas", "mirrored", 1), ("parts", "mirrored", 3)):
        config = RunConfig(train_distribute=STRATEGIES[strategy], tensorboard=False, gradient_accumulation=parts)
        trainer = Estimator(fn, tmp_path / name, config).train(weighted_input(), hooks=[seen := Losses()])
        found[name] = {one: trainer.get_variable_value(one) for one in trainer.get_variable_names()}
        found[name]["losses"] = np.array(seen.losses)
    for name in ("replicas", "parts"):
        assert set(found[name]) == set(found["whole"])
        for one, value in found["whole"].items():
            np.testing.assert_allclose(found[name][one], value, rtol=1e-5, err_msg=f"{name} {one}")


@pytest.mark.parametrize("reduction", slow_but(["sum", "mean_with_sample_weight"], "sum"))
def test_a_scaled_loss_on_two_replicas_is_that_of_one_device(reduction: str, tmp_path: Path) -> None:
    """With mixed_float16 the gradients of a replica are a program of their own."""

    def fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        y = keras.layers.Dense(1, kernel_initializer="ones")(features["x"])
        loss = keras.losses.MeanSquaredError(reduction)(labels, y, features["w"])
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.01))

    found = {}
    for name in ("default", "mirrored"):
        config = RunConfig(train_distribute=STRATEGIES[name], tensorboard=False, precision="mixed_float16")
        Estimator(fn, tmp_path / name, config).train(weighted_input(), hooks=[seen := Losses()], steps=2)
        found[name] = seen.losses
    np.testing.assert_allclose(found["mirrored"], found["default"], rtol=2e-3)


def test_weights_in_a_branch_are_of_the_replica_alone(tmp_path: Path) -> None:
    def in_a_branch(labels: tf.Tensor, y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        mean = by(Reduction.MEAN)
        return tf.cond(tf.reduce_sum(y) > 1e9, lambda: 0.0, lambda: mean(labels, y, weights))

    config = RunConfig(train_distribute=STRATEGIES["mirrored"], tensorboard=False)
    trainer = Estimator(model_of(in_a_branch), tmp_path, config).train(weighted_input(), steps=1)
    assert trainer.get_variable_value("global_step") == 1


@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.MEAN])
def test_an_evaluation_takes_batches_as_the_input_gives_them(reduction: str, tmp_path: Path) -> None:
    """Each is one replica's, so nothing is divided."""
    Estimator(model_of(by(reduction)), tmp_path, RunConfig(tensorboard=False)).train(weighted_input(), steps=1)
    source = weighted_input().fn
    found = {
        name: Estimator(model_of(by(reduction)), tmp_path, RunConfig(train_distribute=STRATEGIES[name])).evaluate(
            lambda: source({"batch_size": 3})
        )
        for name in ("default", "mirrored")
    }
    assert found["mirrored"] == pytest.approx(found["default"], rel=1e-6)


def test_the_functions_of_tensorflow_are_its_own_again(tmp_path: Path) -> None:
    before, invokes_v2 = v1.losses.compute_weighted_loss, summary._should_invoke_v2_op
    seen = []

    def loss_of(labels: tf.Tensor, y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        seen.append(v1.losses.compute_weighted_loss)
        return by(Reduction.MEAN)(labels, y, weights)

    trainer = Estimator(model_of(loss_of), tmp_path, RunConfig(train_distribute=STRATEGIES["mirrored"]))
    trainer.train(weighted_input(), steps=1)
    trainer.evaluate(weighted_input())
    assert before not in seen
    assert v1.losses.compute_weighted_loss is before
    assert summary._should_invoke_v2_op is invokes_v2
