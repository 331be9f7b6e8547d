"""Layers and models of tf_keras (Keras 2) that are made inside a model_fn with a train_op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from runner import Estimator, EstimatorSpec, Input, RunConfig
from tests.support.models import data, strategies

v1 = tf.compat.v1
STRATEGIES = strategies()


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A functional model around a sequential one. params: `updates`."""
    inputs = tf_keras.Input([4])
    inner = tf_keras.Sequential([tf_keras.layers.BatchNormalization(momentum=0.5), tf_keras.layers.Dense(3, "tanh")])
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(inner(inputs)))
    predictions = model(features, training=mode == "train")
    loss = tf.reduce_mean(tf.square(predictions - labels))
    with tf.control_dependencies(model.get_updates_for(features) if params["updates"] else []):
        train_op = v1.train.GradientDescentOptimizer(0.0).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, {"y": predictions}, loss, train_op)


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_a_model_that_is_made_in_model_fn_has_its_updates_where_train_op_waits_for_them(
    strategy: str, tmp_path: Path
) -> None:
    found = {}
    for updates in (True, False):
        config = RunConfig(train_distribute=STRATEGIES[strategy])
        trainer = Estimator(model_fn, tmp_path / str(updates), config, {"updates": updates})
        trainer.train(Input(lambda: tf.data.Dataset.from_tensors(data(8)).unbatch().batch(8), batch_size=8), steps=1)
        found[updates] = {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}
    rows = data(8)[0]
    assert sorted(found[True]) == [
        "dense_1/bias", "dense_1/kernel", "global_step",
        *(f"sequential/batch_normalization/{name}" for name in ("beta", "gamma", "moving_mean", "moving_variance")),
        "sequential/dense/bias", "sequential/dense/kernel",
    ]  # fmt: skip
    mean = "sequential/batch_normalization/moving_mean"
    np.testing.assert_allclose(found[True][mean], rows.mean(0) * 0.5, rtol=1e-5)
    assert not np.any(found[False][mean])


def of_tensorflow(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """A model of `tensorflow.python.keras`, as libraries build them."""
    from tensorflow.python.keras import backend as K
    from tensorflow.python.keras.layers import Concatenate, Dense, Embedding, Flatten, Input, Layer
    from tensorflow.python.keras.models import Model
    from tensorflow.python.keras.regularizers import l2

    class Product(Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight("w", shape=(int(shape[-1]), 2), initializer="ones")
            super().build(shape)

        def call(self, x: Any) -> Any:
            return K.dot(x, self.w)

    x, ids = Input((4,), name="x"), Input((1,), name="ids", dtype="int32")
    rows = Flatten()(Embedding(10, 3, embeddings_initializer="ones", embeddings_regularizer=l2(1e-4), name="emb")(ids))
    hidden = Dense(2, activation="relu", kernel_initializer="ones")(Product()(Concatenate()([x, rows])))
    whole = Model([x, ids], Dense(1, kernel_initializer="ones", name="out")(hidden))
    given = Input(tensor=features["x"], name="given")
    part = Model(given, Dense(1, kernel_initializer="ones", name="wide")(given)).output
    predictions = whole([features["x"], features["ids"]]) + part
    loss = tf.reduce_mean(tf.square(predictions - labels))
    train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, {"y": predictions}, loss, train_op)


def test_functional_models_of_the_copy_of_keras_in_tensorflow_are_those_of_2_15(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    x, ids = random.randn(32, 4).astype(np.float32), random.randint(0, 10, (32, 1)).astype(np.int32)
    y = random.randint(0, 2, (32, 1)).astype(np.float32)
    data_fn = lambda: tf.data.Dataset.from_tensor_slices(({"x": x, "ids": ids}, y)).batch(8)  # noqa: E731
    trainer = Estimator(of_tensorflow, tmp_path).train(data_fn)
    assert trainer.get_variable_names() == [
        "dense/bias", "dense/kernel", "emb/embeddings", "global_step", "out/bias", "out/kernel", "product/w",
        "wide/bias", "wide/kernel",
    ]  # fmt: skip
    assert trainer.evaluate(data_fn)["loss"] == pytest.approx(2.0720184, rel=1e-6)
