"""One seed, the same draws each time; and compiled loops stay, as long as nothing eager would draw on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from runner import Estimator, RunConfig
from runner.tf_private import random_ops
from runner.tracing.random_state import seeded
from tests.support.models import eval_input, native, train_input

v1 = tf.compat.v1


@tf.function
def drawing(x: tf.Tensor) -> tf.Tensor:
    return x + tf.random.normal(tf.shape(x))


@tf.function
def calling(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x[0] > 0, lambda: drawing(x), lambda: x)


def elements(dataset: tf.data.Dataset) -> np.ndarray:
    return np.stack([element.numpy() for element in dataset])


numbers = tf.data.Dataset.range(8)
DRAWS: dict[str, Callable[[], Any]] = {
    "an operation": lambda: tf.random.normal([4]),
    "an operation with a seed": lambda: tf.random.uniform([4], seed=3),
    "a raw operation": lambda: tf.raw_ops.RandomUniform(shape=[4], dtype=tf.float32, seed=3, seed2=4),
    "dropout": lambda: tf.nn.dropout(tf.ones([16]), 0.5),
    "a sampler of candidates": lambda: tf.random.uniform_candidate_sampler([[1]], 1, 3, True, 1000, seed=2)[0],
    "a crop": lambda: tf.image.sample_distorted_bounding_box([50, 50, 3], tf.zeros([1, 0, 4]), seed=2,
                                                             use_image_if_no_bounding_boxes=True)[0],
    "a pool": lambda: tf.nn.fractional_max_pool(tf.reshape(tf.range(144.0), [1, 12, 12, 1]), 1.44, seed=3)[1],
    "a function": lambda: drawing(tf.ones([4])),
    "a function that calls one in a branch": lambda: calling(tf.ones([4])),
    "a shuffle": lambda: elements(numbers.shuffle(8)),
    "a map": lambda: elements(numbers.map(lambda _: tf.random.uniform([]))),
    "a map of a function": lambda: elements(numbers.map(lambda _: drawing(tf.ones([2])))),
    "a generator": lambda: elements(tf.data.Dataset.from_generator(
        lambda: (tf.random.uniform([]) for _ in range(3)), output_signature=tf.TensorSpec([]))),
    "Python and NumPy": lambda: np.random.rand(3),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_draws_are_those_of_set_seed_each_time(draw: Callable[[], Any]) -> None:
    def drawn(seed: int) -> np.ndarray:
        with seeded(seed):
            return np.asarray(draw())

    np.random.seed(3)
    tf.random.set_seed(3)
    expected = np.asarray(draw())
    for _ in range(3):
        np.testing.assert_array_equal(drawn(3), expected)
    drawn(4)
    np.testing.assert_array_equal(drawn(3), expected)


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds with which kernels were thrown away."""
    found: list[int] = []
    drop = context.Context._set_global_seed

    def noted(self: Any, seed: int) -> None:
        found.append(seed)
        drop(self, seed)

    monkeypatch.setattr(context.Context, "_set_global_seed", noted)
    return found


def test_evaluations_leave_the_training_loop_as_it_is(drops: list[int], tmp_path: Path) -> None:
    estimator = Estimator(native, tmp_path, RunConfig(tf_random_seed=3))
    for _ in range(2):
        estimator.train(train_input(8), steps=2)
        estimator.evaluate(eval_input(8))
    drops.clear()
    for _ in range(3):
        estimator.train(train_input(8), steps=2)
        estimator.evaluate(eval_input(8))
        list(estimator.predict(eval_input(8)))
    assert drops == []


def test_an_input_that_draws_eagerly_starts_again_at_each_evaluation(drops: list[int], tmp_path: Path) -> None:
    def input_fn() -> tf.data.Dataset:
        features = tf.random.normal([16, 4])
        return tf.data.Dataset.from_tensor_slices((features, tf.reduce_sum(features, 1, keepdims=True))).batch(8)

    estimator = Estimator(native, tmp_path, RunConfig(tf_random_seed=3))
    estimator.train(input_fn, steps=2)
    losses = {estimator.evaluate(input_fn)["loss"] for _ in range(3)}
    assert len(losses) == 1
    assert len(drops) >= 3


def test_kernels_that_nobody_uses_are_thrown_away_after_a_while(drops: list[int]) -> None:
    tf.random.set_seed(1)
    with seeded(1):  # whatever other tests have drawn
        pass
    drops.clear()
    for _ in range(2 * random_ops._Watch.KEPT + 2):
        with seeded(1):
            pass
    assert len(drops) == 2


def test_a_function_that_another_thread_deletes_meanwhile_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a dataset are when its iterator is deleted, in a thread of its own."""
    tf.random.set_seed(1)
    with seeded(1):
        pass
    function = tf.function(lambda x: x + 1, autograph=False)
    function(tf.constant(1))
    asked: list[bytes] = []

    def deleted(self: Any, name: bytes) -> Any:
        asked.append(name)
        raise tf.errors.NotFoundError(None, None, f"Unable to find FunctionDef with name: {name!r}")

    monkeypatch.setattr(context.Context, "get_function_def", deleted)
    with seeded(1):
        pass
    assert asked
