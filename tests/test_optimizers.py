"""Every optimizer family comes to the numbers of one device on two replicas, sparse gradients included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from tests.models import strategies, train_input

tf_keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")
v1 = tf.compat.v1
STRATEGIES = strategies()

NATIVE: dict[str, Callable[[], Any]] = {
    "keras-sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
    "keras-adam": lambda: keras.optimizers.Adam(0.01),
    # Clips inside the optimizer: it must see the global gradient.
    "keras-adamw-clipnorm": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.1),
    "keras-ema": lambda: keras.optimizers.SGD(0.1, use_ema=True),
    "v1-adam": lambda: v1.train.AdamOptimizer(0.01),
    "v1-sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "tf_keras-adam": lambda: tf_keras.optimizers.Adam(0.01),
    "tf_keras-legacy-sgd": lambda: tf_keras.optimizers.legacy.SGD(0.1),
}
CLASSIC: dict[str, Callable[[], Any]] = {
    "v1-sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "v1-adam": lambda: v1.train.AdamOptimizer(0.01),
    "v1-ftrl": lambda: v1.train.FtrlOptimizer(0.1),
}


def buckets(features: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.abs(features[:, 0]) * 3, tf.int32) % 7


def native(optimizer: Callable[[], Any]) -> Callable[..., EstimatorSpec]:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        embedded = keras.layers.Embedding(7, 3, dtype="float64")(buckets(features))
        predictions = keras.layers.Dense(1, dtype="float64")(tf.concat([embedded, features], 1))
        return EstimatorSpec(mode, predictions, tf.square(predictions - labels)[:, 0], optimizer=optimizer())

    return model_fn


def classic(optimizer: Callable[[], Any]) -> Callable[..., EstimatorSpec]:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        table = v1.get_variable("table", [7, 3], tf.float64)
        embedded = tf.nn.embedding_lookup(table, buckets(features))
        predictions = tf.concat([embedded, features], 1) @ v1.get_variable("kernel", [7, 1], tf.float64)
        loss = tf.reduce_mean(tf.square(predictions - labels))
        train_op = optimizer().minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, predictions, loss, train_op)

    return model_fn


CASES = {
    **{f"native-{name}": native(optimizer) for name, optimizer in NATIVE.items()},
    **{f"classic-{name}": classic(optimizer) for name, optimizer in CLASSIC.items()},
}


def trained(model_fn: Callable[..., Any], strategy: str, model_dir: Path) -> dict[str, np.ndarray]:
    trainer = Estimator(model_fn, model_dir, RunConfig(train_distribute=STRATEGIES[strategy], tf_random_seed=5))
    # 19 examples in batches of 6: the last of an epoch has one, so that a replica has none.
    trainer.train(train_input(6, num_examples=19, dtype="float64"), steps=12)
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_equal_one_device(case: str, tmp_path: Path) -> None:
    expected = trained(CASES[case], "default", tmp_path / "default")
    for strategy in ("mirrored", "central_storage"):
        if case == "native-tf_keras-legacy-sgd" and strategy == "central_storage":
            continue  # tf_keras itself refuses: see below
        found = trained(CASES[case], strategy, tmp_path / strategy)
        assert list(found) == list(expected)
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-12, err_msg=f"{strategy} {name}")


def test_what_tf_keras_cannot_do_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(
        NotImplementedError, match="not supported for ParameterServerStrategy and CentralStorageStrategy"
    ):
        trained(CASES["native-tf_keras-legacy-sgd"], "central_storage", tmp_path)


def test_something_that_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it is a Keras 3, tf_keras or tf.compat.v1.train optimizer"):
        trained(native(lambda: "adam"), "default", tmp_path)
