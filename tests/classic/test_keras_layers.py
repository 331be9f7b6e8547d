"""Models of tf_keras that are made inside a model_fn; the numbers are those that tf.estimator 2.15.1 gave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, ModeKeys, RunConfig

keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")
v1 = tf.compat.v1

RNG = np.random.RandomState(0)
X, Y = RNG.randn(16, 4).astype(np.float32), RNG.randn(16, 1).astype(np.float32)


def dense(units: int, inputs: int, seed: int, **more: Any) -> Any:
    value = np.random.RandomState(seed).randn(inputs, units).astype(np.float32)
    return keras.layers.Dense(units, kernel_initializer=lambda shape, dtype=None, **_: tf.constant(value), **more)


def sequential() -> Any:
    first = dense(3, 4, 1, input_shape=(4,), activation="relu")
    return keras.Sequential([first, keras.layers.BatchNormalization(), dense(1, 3, 2)])


def functional() -> Any:
    inputs = keras.Input([4])
    hidden = keras.layers.BatchNormalization()(dense(3, 4, 1, activation="tanh")(inputs))
    return keras.Model(inputs, dense(1, 3, 2)(tf.nn.relu(hidden) * 2.0 + 0.5))


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """As the guides of TensorFlow 2 wrote it: the model, its updates, an optimizer whose iterations are the step."""
    model = params["make"]()
    predictions = model(features, training=mode == ModeKeys.TRAIN)
    loss = keras.losses.MeanSquaredError(keras.losses.Reduction.SUM)(labels, predictions) * (1.0 / 4)
    error = keras.metrics.MeanAbsoluteError(name="mae")
    error.update_state(labels, predictions)
    train_op = None
    if mode == ModeKeys.TRAIN:
        optimizer = keras.optimizers.legacy.Adam(0.1)
        optimizer.iterations = v1.train.get_or_create_global_step()
        updates = [*model.get_updates_for(None), *model.get_updates_for(features)]
        train_op = tf.group(*optimizer.get_updates(loss, model.trainable_variables), *updates)
    return EstimatorSpec(mode, {"p": predictions}, loss, train_op, eval_metric_ops={"mae": error})


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


@pytest.mark.parametrize(("make", "loss", "mae", "moving_mean"), [
    (sequential, 6.341104, 1.9388511, [0.055184945, 0.03419178, 0.0453412]),
    (functional, 1.250057, 0.8996963, [-0.00036947476, 0.006129437, 0.0015513398]),
])  # fmt: skip
def test_models_of_layers_train_as_in_tf_estimator(
    make: Callable[[], Any], loss: float, mae: float, moving_mean: list[float], tmp_path: Path
) -> None:
    estimator = Estimator(model_fn, tmp_path, RunConfig(tensorboard=False), {"make": make}).train(data)
    for _ in range(2):  # a metric of Keras begins anew each time
        found = estimator.evaluate(data)
        assert (found["loss"], found["mae"]) == pytest.approx((loss, mae), rel=1e-6)
    np.testing.assert_allclose(estimator.get_variable_value("batch_normalization/moving_mean"), moving_mean, rtol=1e-5)
    layers = ["batch_normalization/beta", "batch_normalization/gamma", "dense/bias", "dense/kernel", "dense_1/bias"]
    weights = [*layers, "dense_1/kernel"]
    assert {*estimator.get_variable_names()} == {
        *weights, *(f"Adam/{name}/{slot}" for name in weights for slot in "mv"), "global_step",
        "batch_normalization/moving_mean", "batch_normalization/moving_variance",
        "Adam/beta_1", "Adam/beta_2", "Adam/decay", "Adam/learning_rate",
    }  # fmt: skip


def test_they_train_on_two_replicas(tmp_path: Path) -> None:
    config = RunConfig(train_distribute=tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]), tensorboard=False)
    estimator = Estimator(model_fn, tmp_path, config, {"make": functional}).train(data)
    assert estimator.get_variable_value("global_step") == 2
    assert np.isfinite(estimator.evaluate(data)["mae"])


class Largest(keras.metrics.Mean):  # type: ignore[name-defined]
    """A metric of a user's own: the mean of each example's largest error."""

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> Any:
        return super().update_state(tf.reduce_max(tf.abs(labels - predictions), 1), sample_weight)


@pytest.mark.parametrize(
    "strategy", [None, tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])], ids=["default", "mirrored"]
)
def test_a_metric_class_of_a_users_own_is_updated_in_model_fn(strategy: Any, tmp_path: Path) -> None:
    def own(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        metric, step = Largest(name="largest"), v1.train.get_or_create_global_step()
        metric.update_state(labels, features[:, :1])
        return EstimatorSpec(
            mode, loss=tf.reduce_mean(features), train_op=step.assign_add(1), eval_metric_ops={"largest": metric}
        )

    estimator = Estimator(own, tmp_path, RunConfig(eval_distribute=strategy))
    estimator.train(data, steps=1)
    expected = np.abs(X[:, :1] - Y).mean()
    for _ in range(2):
        assert estimator.evaluate(data)["largest"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, v1.train.GradientDescentOptimizer])
def test_frozen_layers_are_not_trained_by_optimizer(optimizer: Any, tmp_path: Path) -> None:
    """Frozen as they are made, or before model_fn ends."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        made, later = dense(3, 4, 1, name="made", trainable=False), dense(3, 3, 2, name="later")
        predictions = dense(1, 3, 3, name="free")(later(made(features)))
        later.trainable = False
        return EstimatorSpec(mode, loss=tf.reduce_mean(tf.square(predictions - labels)), optimizer=optimizer(0.1))

    Estimator(model_fn, tmp_path, RunConfig(tensorboard=False)).train(data, steps=1)
    first, last = (tf.train.load_checkpoint(str(tmp_path / f"model.ckpt-{step}")) for step in (0, 1))
    names = [f"{layer}/{weight}" for layer in ("made", "later", "free") for weight in ("kernel", "bias")]
    changed = {name for name in names if np.any(first.get_tensor(name) != last.get_tensor(name))}
    assert changed == {"free/kernel", "free/bias"}
