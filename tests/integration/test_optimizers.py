"""Every optimizer family comes to the numbers of one device on every strategy, sparse gradients included.

`pytest -s tests/integration/test_optimizers.py` prints the largest difference for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from tests.support.messages import Messages
from tests.support.models import data, strategies
from tests.support.sparse_models import each_optimizer, native_lazy_adam
from tests.support.tiers import slow_but

tf_keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")
v1 = tf.compat.v1

STRATEGIES = strategies()

NATIVE: dict[str, Callable[[], Any]] = {
    # Clips inside the optimizer: it must see the global gradient.
    "keras-adamw-clipnorm": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.1),
    "keras-ema": lambda: keras.optimizers.SGD(0.1, use_ema=True),
    "v1-adam": lambda: v1.train.AdamOptimizer(0.01),
    "tf_keras-adam": lambda: tf_keras.optimizers.Adam(0.01),
    "tf_keras-legacy-sgd": lambda: tf_keras.optimizers.legacy.SGD(0.1),
}
"""Plain ones of Keras 3 and TensorFlow 1: tests/programs/test_optimizer_step.py and tests/exactness."""
CLASSIC: dict[str, Callable[[], Any]] = {
    "tf_keras-legacy-adam": lambda: tf_keras.optimizers.legacy.Adam(0.01),
}
"""Those of TensorFlow 1: each_optimizer has them all."""
REPLICATED = ("one_device", "mirrored", "central_storage")
EXAMPLES, STEPS = (21, 19), 16
"""In batches of 6 the last has 3 or 1: two replicas get 2 + 1 or 1 + 0, of the others 3 + 3."""


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
        made = optimizer()
        made.iterations = v1.train.get_global_step()
        return EstimatorSpec(mode, predictions, loss, made.get_updates(loss, v1.trainable_variables())[0])

    return model_fn


CASES = {
    **{f"native-{name}": native(optimizer) for name, optimizer in NATIVE.items()},
    **{f"classic-{name}": classic(optimizer) for name, optimizer in CLASSIC.items()},
    "native-lazy-adam": native_lazy_adam,
    "classic-each-of-v1": each_optimizer,
}


def shuffled(params: Any) -> tf.data.Dataset:
    """Two passes over so many EXAMPLES and so many in turn, each with what is left at its end."""
    passes = [
        tf.data.Dataset.from_tensor_slices(data(number, "float64")).shuffle(30, seed=5).batch(params["batch_size"])
        for number in EXAMPLES
    ]
    return passes[0].concatenate(passes[1]).repeat(2)


def trained(model_fn: Callable[..., Any], strategy: str, model_dir: Path) -> dict[str, np.ndarray]:
    """The variables after STEPS."""
    trainer = Estimator(model_fn, model_dir, RunConfig(train_distribute=STRATEGIES[strategy], tf_random_seed=5))
    trainer.train(Input(shuffled, params={}, batch_size=6))
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[tuple[str, str], float]]:
    """(case, strategy) -> the largest difference; printed at the end."""
    table: dict[tuple[str, str], float] = {}
    yield table
    print("\n\nmax |a - b| / max |b| over all variables, against one device without a strategy, float64")
    for (case, strategy), found in table.items():
        print(f"{case:30} {strategy:16} {found:9.1e}")


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(found - expected)) / max(np.max(np.abs(expected)), 1e-30))


QUICK = ("native-tf_keras-adam", "native-lazy-adam")


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK))
def test_every_strategy_equals_one_device(case: str, measured: Any, tmp_path: Path) -> None:
    expected = trained(CASES[case], "default", tmp_path / "default")
    assert expected["global_step"] == STEPS
    for strategy in REPLICATED:
        if strategy == "one_device" and not case.endswith("-adam"):
            continue  # the same graph: one of each family will do
        if case == "native-tf_keras-legacy-sgd" and strategy == "central_storage":
            continue  # tf_keras itself refuses: see below
        found = trained(CASES[case], strategy, tmp_path / strategy)
        assert list(found) == list(expected)
        measured[case, strategy] = max(difference(value, expected[name]) for name, value in found.items())
        assert measured[case, strategy] <= 1e-10, strategy


def test_what_tf_keras_cannot_do_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(
        NotImplementedError, match="not supported for ParameterServerStrategy and CentralStorageStrategy"
    ):
        trained(CASES["native-tf_keras-legacy-sgd"], "central_storage", tmp_path)


def test_something_that_is_no_optimizer_is_refused(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        trained(native(lambda: "adam"), "default", tmp_path)


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_two_optimizers_may_share_a_step(strategy: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight, bias = (v1.get_variable(name, [], tf.float64, v1.zeros_initializer()) for name in ("weight", "bias"))
        loss = tf.reduce_mean(tf.square(features * weight + bias - labels))
        counted = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step(), var_list=[weight])
        train_op = tf.group(counted, v1.train.AdamOptimizer(0.1).minimize(loss, var_list=[bias]))
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    def input_fn() -> tf.data.Dataset:
        x = np.arange(7.0)
        return tf.data.Dataset.from_tensor_slices((x, 2 * x + 1)).batch(4)

    found = []
    for name in ("default", strategy):
        trainer = Estimator(model_fn, tmp_path / name, RunConfig(train_distribute=STRATEGIES[name]))
        trainer.train(Input(input_fn, batch_size=4), max_epochs=1)
        found.append([trainer.get_variable_value(one) for one in ("weight", "bias", "global_step")])
    assert found[0][2] == 2
    np.testing.assert_allclose(found[1], found[0], rtol=1e-10)
