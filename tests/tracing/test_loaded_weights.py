"""Weights that model_fn loads, from a file or from arrays, are what training goes on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from tests.support.tiers import slow_but

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
STEPS, RATE = 5, 0.1


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()


def make() -> keras.Model:
    layers = [keras.layers.Dense(3, name="hidden"), keras.layers.BatchNormalization(name="norm")]
    return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1, name="out")], name="net")


def saved(folder: Path) -> keras.Model:
    """A model that has been saved in each of Keras's formats."""
    keras.utils.set_random_seed(3)
    model = make()
    model.set_weights([value + 0.25 for value in model.get_weights()])  # no initializer gives these
    model.save(folder / "model.keras")
    model.save(folder / "model.h5")
    model.save_weights(folder / "model.weights.h5")
    return model


def load_keras(folder: Path, values: Any) -> keras.Model:
    return keras.models.load_model(folder / "model.keras")


def load_h5(folder: Path, values: Any) -> keras.Model:
    return keras.models.load_model(folder / "model.h5", compile=False)


def load_weights(folder: Path, values: Any) -> keras.Model:
    model = make()
    model.load_weights(folder / "model.weights.h5")
    return model


def set_weights(folder: Path, values: Any) -> keras.Model:
    model = make()
    model.set_weights(values)
    return model


def trained_by_hand(model: keras.Model) -> list[np.ndarray]:
    optimizer = keras.optimizers.SGD(RATE)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X, training=True) - Y))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    return model.get_weights()


def check(run: Estimator, model: keras.Model) -> None:
    """The run has the values of `model` after STEPS steps by hand."""
    for weight, expected in zip(model.weights, trained_by_hand(model), strict=True):
        name = "/".join(weight.path.split("/")[-2:])  # a file keeps the name of the whole model, or not
        (name,) = (one for one in run.get_variable_names() if one in (name, f"net/{name}"))
        np.testing.assert_allclose(run.get_variable_value(name), expected, rtol=1e-4, atol=1e-5, err_msg=name)


def estimator(folder: Path, load: Callable[..., Any], values: Any, strategy: Any = None, **settings: Any) -> Estimator:
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> EstimatorSpec:
        prediction = load(folder, values)(features, training=mode == "train")
        loss = tf.reduce_mean(tf.square(prediction - labels), axis=1)
        return EstimatorSpec(mode, prediction, loss, optimizer=keras.optimizers.SGD(RATE))

    config = RunConfig(train_distribute=strategy, tensorboard=False, **settings)
    return Estimator(model_fn, folder / "run", config)


@pytest.mark.parametrize("load", slow_but([load_keras, load_h5, load_weights, set_weights], load_keras, set_weights))
def test_training_goes_on_from_loaded_weights(load: Callable[..., keras.Model], tmp_path: Path) -> None:
    model = saved(tmp_path)
    values = model.get_weights()
    run = estimator(tmp_path, load, values)
    run.train(data, max_steps=2)
    run = estimator(tmp_path, load, values)  # resumes: the checkpoint counts, and not the file
    run.train(data, max_steps=STEPS)
    check(run, model)


@pytest.mark.parametrize("how", ["mirrored", "eager"])
def test_loaded_weights_are_trained_on_replicas_and_eagerly(how: str, tmp_path: Path) -> None:
    def without_norm(folder: Path, values: Any) -> keras.Model:
        model = keras.models.load_model(folder / "model.keras", compile=False)
        return keras.Sequential([model.layers[0], model.layers[2]])

    model = saved(tmp_path)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if how == "mirrored" else None
    run = estimator(tmp_path, without_norm, None, strategy, **({"eager": True} if how == "eager" else {}))
    run.train(data, max_steps=STEPS)
    check(run, keras.Sequential([model.layers[0], model.layers[2]]))


@pytest.mark.parametrize("how", ["one replica", "mirrored", "eager"])
def test_what_a_layer_adapts_to_in_training_is_in_the_checkpoint(how: str, tmp_path: Path) -> None:
    def adapting(folder: Path, scale: Any) -> Any:
        layer = keras.layers.Normalization(name="scale")
        if scale is not None:
            layer.adapt(scale * X)
        # Not in a Sequential: its name would be in that of the variables where the layer is not built by `adapt`.
        return lambda features, training: keras.layers.Dense(1)(layer(features))

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if how == "mirrored" else None
    settings = {"eager": True} if how == "eager" else {}
    estimator(tmp_path, adapting, 3.0, strategy, **settings).train(data, max_steps=2)
    resumed = estimator(tmp_path, adapting, 99.0, strategy, **settings).train(data, max_steps=4)
    np.testing.assert_allclose(resumed.get_variable_value("scale/mean"), 3 * X.mean(0), rtol=1e-5)
    (kernel,) = (name for name in resumed.get_variable_names() if name.endswith("dense/kernel"))
    (bias,) = (name for name in resumed.get_variable_names() if name.endswith("dense/bias"))
    scaled = (X - 3 * X.mean(0)) / (3 * X.std(0))
    expected = scaled @ resumed.get_variable_value(kernel) + resumed.get_variable_value(bias)
    # No training data where it evaluates.
    found = estimator(tmp_path, adapting, None).evaluate(lambda: tf.data.Dataset.from_tensors((X, Y)))
    assert found["loss"] == pytest.approx(np.mean((expected - Y) ** 2), rel=1e-4)


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)

    def wider(folder: Path, values: Any) -> keras.Model:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(5), keras.layers.Dense(1)])
        model.set_weights([np.ones([4, 3]), np.ones([3]), np.ones([3, 1]), np.ones([1])])
        return model

    with pytest.raises(ValueError, match=r"\(4, 5\) is not compatible with provided weight shape \(4, 3\)"):
        estimator(tmp_path, wider, None).train(data, max_steps=1)


def test_two_copies_of_a_file_have_weights_of_their_own(tmp_path: Path) -> None:
    """Both have the paths of the file. The second's are numbered from 1, as all that come twice in TensorFlow."""

    def both(folder: Path, values: Any) -> Any:
        first = keras.models.load_model(folder / "model.keras", compile=False)
        second = keras.models.load_model(folder / "model.keras", compile=False)
        return lambda features, training: first(features, training=training) + 2 * second(features, training=training)

    model = saved(tmp_path)
    run = estimator(tmp_path, both, None).train(data, max_steps=1)
    before = model.layers[0].kernel.numpy()
    first, second = (run.get_variable_value(f"hidden/kernel{end}") for end in ("", "_1"))
    np.testing.assert_allclose(second - before, 2 * (first - before), rtol=1e-3, atol=1e-6)
    assert np.abs(first - before).max() > 0.01
