"""What layers add to the loss, and what they keep of the batch, on several replicas: each counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from tests.support.line import mirrored
from tests.support.models import data
from tests.support.tiers import slow_but

v1 = tf.compat.v1

RATE, L2 = 0.0625, 0.25
"""Exact in float32, in which Keras keeps a learning rate."""


def in_order(num_examples: int = 19) -> tf.data.Dataset:
    """Batches of 6, the last of what is left: of 19 one example, so that a replica has none."""
    return tf.data.Dataset.from_tensor_slices(data(num_examples, "float64")).batch(6)


def joined(num_examples: int = 19) -> Callable[..., tf.data.Dataset]:
    """As `in_order`, for the runner to divide over replicas."""
    return lambda: in_order(num_examples)


def by_keras(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    layer = keras.layers.Dense(
        1, use_bias=False, name="line", kernel_initializer="zeros", kernel_regularizer=keras.regularizers.L2(L2)
    )
    loss = tf.square(layer(features) - labels)[:, 0] + tf.add_n(layer.losses)
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(RATE))


def by_keras_scalar(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    spec = by_keras(features, labels, mode)
    return spec._replace(loss=tf.reduce_mean(spec.loss))


def by_keras_model(features: Any, labels: Any, mode: str) -> keras.Model:
    regularizer = keras.regularizers.L2(L2)
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", kernel_regularizer=regularizer)
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(RATE), loss="mse")
    return model


def l2(kernel: tf.Tensor) -> tf.Tensor:
    return tf.cast(
        L2 * tf.reduce_sum(kernel * kernel), tf.float32
    )  # tf.compat.v1.losses are float32, whatever comes in


def by_v1(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    kernel = v1.get_variable("line/kernel", [4, 1], tf.float64, v1.zeros_initializer(), regularizer=l2)
    v1.losses.mean_squared_error(labels, features @ kernel)
    loss = v1.losses.get_total_loss()
    train_op = v1.train.GradientDescentOptimizer(RATE).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, loss=loss, train_op=train_op)


def by_v1_collection(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    spec = by_v1(features, labels, mode)
    kernel = v1.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)[0]
    error = tf.reduce_mean(tf.square(features @ kernel - labels))
    loss = tf.cast(error, tf.float32) + tf.add_n(v1.get_collection(v1.GraphKeys.REGULARIZATION_LOSSES))
    train_op = v1.train.GradientDescentOptimizer(RATE).minimize(loss, v1.train.get_global_step())
    return spec._replace(loss=loss, train_op=train_op)


def ridge() -> np.ndarray:
    """The weights that an epoch of `in_order` comes to, by hand."""
    weights = np.zeros([4, 1])
    for features, labels in in_order().as_numpy_iterator():
        error = features @ weights - labels
        weights -= RATE * (2 * features.T @ error / len(features) + 2 * L2 * weights)
    return weights


@pytest.fixture
def in_float64() -> Any:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize("replicas", slow_but([1, 2], 2))
@pytest.mark.parametrize("model_fn", [by_keras, by_keras_scalar, by_keras_model, by_v1, by_v1_collection])
def test_an_l2_loss_is_counted_once(
    model_fn: Callable[..., Any], replicas: int, in_float64: Any, tmp_path: Path
) -> None:
    strategy = mirrored() if replicas == 2 else None
    trainer = Estimator(model_fn, tmp_path, RunConfig(train_distribute=strategy))
    trainer.train(Input(joined(), batch_size=6))
    assert trainer.get_variable_value("global_step") == 4
    (name,) = (name for name in trainer.get_variable_names() if name.endswith("kernel"))
    tolerance = 1e-5 if model_fn in (by_v1, by_v1_collection) else 1e-10
    np.testing.assert_allclose(trainer.get_variable_value(name), ridge(), rtol=tolerance)


def normalised(synchronized: bool) -> Callable[..., EstimatorSpec]:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layer = keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.75, name="norm")
        hidden = layer(features, training=mode == "train")
        predictions = keras.layers.Dense(1, name="line")(tf.tanh(hidden))
        return EstimatorSpec(
            mode, loss=tf.square(predictions - labels)[:, 0], optimizer=keras.optimizers.SGD(RATE, momentum=0.5)
        )

    return model_fn


def trained(model_fn: Callable[..., Any], model_dir: Path, num_examples: int, strategy: Any) -> dict[str, np.ndarray]:
    trainer = Estimator(model_fn, model_dir, RunConfig(train_distribute=strategy, tf_random_seed=4))
    trainer.train(Input(joined(num_examples), batch_size=6))
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


@pytest.mark.parametrize("num_examples", slow_but([24, 21, 19], 19))
def test_synchronized_batch_normalization_equals_one_device(num_examples: int, in_float64: Any, tmp_path: Path) -> None:
    expected = trained(normalised(synchronized=False), tmp_path / "a", num_examples, None)
    found = trained(normalised(synchronized=True), tmp_path / "b", num_examples, mirrored())
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("num_examples", "shares"), [(6, [3, 3]), (3, [2, 1]), (1, [1])])
def test_plain_batch_normalization_keeps_the_mean_over_examples_of_each_replicas_statistics(
    num_examples: int, shares: list[int], in_float64: Any, tmp_path: Path
) -> None:
    features = data(num_examples, "float64")[0]
    parts = np.split(features, np.cumsum(shares)[:-1])
    weights = np.array(shares) / num_examples
    mean = sum(weight * part.mean(0) for weight, part in zip(weights, parts, strict=True))
    variance = sum(weight * part.var(0) for weight, part in zip(weights, parts, strict=True))
    found = trained(normalised(synchronized=False), tmp_path, num_examples, mirrored())
    np.testing.assert_allclose(found["norm/moving_mean"], 0.25 * mean, rtol=1e-10)
    np.testing.assert_allclose(found["norm/moving_variance"], 0.75 + 0.25 * variance, rtol=1e-10)
