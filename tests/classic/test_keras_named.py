"""The optimizers of premade estimators: the updates of Keras 2, and what becomes of optimizers of other families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner.classic.keras2_optimizers import SGD, Adagrad, Adam, Ftrl, KerasNamed, RMSprop
from runner.classic.optimizers import optimizer_of, v1_optimizer_of
from tests.support.messages import Messages

tf_keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")
legacy = tf_keras.optimizers.legacy
v1 = tf.compat.v1

CASES: dict[str, tuple[Callable[..., KerasNamed], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (SGD, legacy.SGD, {"learning_rate": 0.1, "decay": 0.3}),
    "momentum": (SGD, legacy.SGD, {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (Adagrad, legacy.Adagrad, {"learning_rate": 0.1}),
    "adam": (Adam, legacy.Adam, {"learning_rate": 0.1, "epsilon": 1e-3}),
    "rmsprop": (RMSprop, legacy.RMSprop, {"learning_rate": 0.1, "rho": 0.8}),
    "rmsprop-momentum": (RMSprop, legacy.RMSprop, {"learning_rate": 0.1, "momentum": 0.5}),
    "ftrl": (Ftrl, legacy.Ftrl, {"learning_rate": 0.1, "l1_regularization_strength": 0.01, "beta": 0.2}),
}


def trained(optimizer: Any, counter: tf.Variable, apply: Callable[..., Any]) -> list[np.ndarray]:
    """A table with sparse gradients (two of one row) and a vector, after four updates."""
    table, vector = tf.Variable(tf.ones([4, 2]), name="table"), tf.Variable([1.0, -1.0], name="vector")
    for step in range(4):
        sparse = tf.IndexedSlices(tf.constant([[1.0, 2.0], [0.5, -1.0], [0.3, 0.1]]) * (step + 1), [0, step, 0], [4, 2])
        apply(optimizer, [(sparse, table), (tf.constant([0.2, -0.4]) * (step + 1), vector)], counter)
    return [table.numpy(), vector.numpy()]


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_keras_2(name: str) -> None:
    ours, theirs, settings = CASES[name]
    counter = tf.Variable(0, dtype=tf.int64)
    optimizer = ours(**settings)
    optimizer.count_by(counter)
    found = trained(optimizer, counter, lambda one, pairs, step: one.apply_gradients(pairs, global_step=step))
    expected = trained(theirs(**settings), counter, lambda one, pairs, step: one.apply_gradients(pairs))
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=2e-6)
    assert counter.numpy() == 4


@pytest.mark.parametrize(
    ("given", "kind", "settings"),
    [
        ("Adam", Adam, {"learning_rate": 0.001}),
        (lambda: legacy.Adam(0.3), Adam, {"learning_rate": 0.3}),
        (legacy.RMSprop(0.3, momentum=0.2), RMSprop, {"momentum": 0.2}),
        (tf_keras.optimizers.Adagrad(0.3), Adagrad, {"learning_rate": 0.3}),
        (keras.optimizers.SGD(0.3, momentum=0.5), SGD, {"learning_rate": 0.3, "momentum": 0.5}),
        (keras.optimizers.Ftrl(0.3), Ftrl, {"learning_rate": 0.3}),
    ],
)
def test_optimizers_of_keras_train_as_they_did_in_tf_estimator(given: Any, kind: Any, settings: Any) -> None:
    found: Any = optimizer_of(given)
    assert type(found) is kind
    assert found.get_name() == kind.__name__
    assert {name: found._settings[name] for name in settings} == pytest.approx(settings, rel=1e-6)


def test_a_schedule_is_asked_at_each_step() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = optimizer_of(keras.optimizers.SGD(schedule))
    counter = tf.Variable(0, dtype=tf.int64)
    optimizer.count_by(counter)
    variable = tf.Variable(0.0)
    for expected in (-0.5, -0.75, -0.875):
        optimizer.apply_gradients([(tf.constant(1.0), variable)], global_step=counter)
        assert variable.numpy() == pytest.approx(expected)


def test_what_an_old_optimizer_cannot_do_is_left_to_the_new_one(messages: Messages) -> None:
    def given() -> Any:
        return keras.optimizers.Adam(0.1, clipnorm=1.0)

    keras.utils.clear_session()
    found: Any = optimizer_of(given)
    assert type(found) is keras.optimizers.Adam and found.name == "adam"
    with messages.raised(ValueError):
        optimizer_of(given())


def test_a_rate_that_is_a_tensor_of_the_graph_is_taken_as_it_is() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        counter, variable = v1.Variable(4, dtype=tf.int64), v1.Variable(0.0)
        rate = v1.train.exponential_decay(0.8, counter, 2, 0.5)
        optimizer = optimizer_of(lambda: legacy.SGD(rate))
        optimizer.count_by(counter)
        value = optimizer.rate(variable)
        session.run(v1.global_variables_initializer())
        assert session.run(value) == pytest.approx(0.2)


def test_an_optimizer_of_v1_is_copied_for_it_keeps_slots() -> None:
    given = v1.train.AdamOptimizer(0.1)
    assert optimizer_of(given) is not given
    assert type(v1_optimizer_of("RMSProp", 0.1)) is v1.train.RMSPropOptimizer


@pytest.mark.parametrize("given", ["adam", 3])
def test_what_is_no_optimizer_is_refused(given: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        optimizer_of(given)
