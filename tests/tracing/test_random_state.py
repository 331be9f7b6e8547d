"""What a model_fn draws: from the seed, the operation, the step and the replica, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from tests.integration.test_exactness import LossRecorder
from tests.support.line import mirrored
from tests.support.tiers import slow_but

v1 = tf.compat.v1
Draw = Callable[[], tf.Tensor]


def drawing(draw: Draw) -> Callable[..., EstimatorSpec]:
    """A classic model_fn whose loss is the mean of what it draws, and whose prediction is what it drew."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        drawn = tf.cast(draw(), tf.float32)
        loss = tf.reduce_mean(drawn) + 0.0 * tf.reduce_sum(v1.get_variable("weight", []))
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        rows = tf.repeat(tf.reshape(drawn, [1, -1]), tf.shape(features)[0], 0)
        metrics = {"drawn": v1.metrics.mean(drawn)}
        return EstimatorSpec(mode, {"drawn": rows}, loss, train_op, eval_metric_ops=metrics)

    return model_fn


def four_rows(params: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((tf.ones([4, 1]), tf.ones([4]))).repeat(params["batches"])


def rows(batches: int = -1) -> Input:
    return Input(four_rows, params={"batches": batches}, batch_size=4)


def estimator(draw: Draw, model_dir: Any, strategy: Any = None, seed: int = 3) -> Estimator:
    return Estimator(drawing(draw), model_dir, RunConfig(train_distribute=strategy, tf_random_seed=seed))


def losses(draw: Draw, model_dir: Any, steps: int, **config: Any) -> list[float]:
    recorder = LossRecorder()
    estimator(draw, model_dir, **config).train(rows(), hooks=[recorder], steps=steps)
    return np.concatenate(recorder.losses).tolist()


def looping() -> tf.Tensor:
    """Three draws in a loop of a loop."""
    inner = lambda j, total: (j + 1, total + tf.random.uniform([], maxval=1.0))  # noqa: E731
    outer = lambda i, total: (i + 1, 10 * tf.while_loop(lambda j, _: j < 1, inner, [0, total])[1])  # noqa: E731
    return tf.while_loop(lambda i, _: i < 3, outer, [0, 0.0])[1]


def until_drawn() -> tf.Tensor:
    """The number of draws below 0.8 in a row, at most 200."""
    number = tf.while_loop(lambda i: tf.random.uniform([]) < 0.8, lambda i: i + 1, [0], maximum_iterations=200)
    return tf.cast(number, tf.float32)


@tf.function
def of_a_module() -> tf.Tensor:
    return tf.random.uniform([3])


def calling() -> tf.Tensor:
    return tf.reduce_sum(of_a_module()) + 2.0 * tf.reduce_sum(of_a_module())


OUTSIDE = tf.random.Generator.from_seed(1)


def branching() -> tf.Tensor:
    return tf.cond(tf.random.uniform([]) > 0.5, lambda: tf.random.uniform([]), lambda: -tf.random.normal([]))


DRAWS: dict[str, Draw] = {
    "uniform": lambda: tf.random.uniform([3]),
    "integers": lambda: tf.random.uniform([3], maxval=1000, dtype=tf.int32),
    "normal": lambda: tf.random.normal([3]),
    "truncated": lambda: tf.random.truncated_normal([3]),
    "shuffle": lambda: tf.random.shuffle(tf.range(100.0))[:3],
    "categorical": lambda: tf.random.categorical(tf.zeros([2, 100]), 3),
    "multinomial": lambda: v1.multinomial(tf.zeros([2, 100]), 3),
    "gamma": lambda: tf.random.gamma([3], [0.5, 1.5]),
    "poisson": lambda: tf.random.poisson([3], [10.0, 1000.0]),
    "dropout": lambda: tf.nn.dropout(tf.range(1.0, 60.0), 0.5),
    "v1-dropout": lambda: v1.nn.dropout(tf.range(1.0, 60.0), keep_prob=0.5),
    "loop": looping,
    "function": calling,
    "branch": branching,
    "image": lambda: tf.image.random_crop(tf.reshape(tf.range(10_000.0), [100, 100]), [2, 2]),
}


@pytest.mark.parametrize("name", slow_but(DRAWS, "dropout", "branch", "loop"))
def test_a_resumed_run_draws_what_an_undisturbed_one_draws(name: str, tmp_path: Path, caplog: Any) -> None:
    undisturbed = losses(DRAWS[name], tmp_path / "a", 5)
    with caplog.at_level(logging.WARNING, "runner"):
        first = losses(DRAWS[name], tmp_path / "b", 2)
        assert first + losses(DRAWS[name], tmp_path / "b", 3) == undisturbed
    assert len(set(undisturbed)) == 5, "each step draws anew"
    assert "differs from an undisturbed" not in caplog.text
    assert losses(DRAWS[name], tmp_path / "c", 5, seed=4) != undisturbed


def test_the_condition_of_a_loop_draws_anew_in_each_iteration(tmp_path: Path) -> None:
    numbers = losses(until_drawn, tmp_path / "a", 6)
    assert 1 < max(numbers) < 200 and len(set(numbers)) > 2
    assert losses(until_drawn, tmp_path / "b", 2) + losses(until_drawn, tmp_path / "b", 4) == numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["dropout", "function", "branch"], "branch"))
def test_replicas_draw_their_own_and_resume_draws_the_same(name: str, tmp_path: Path) -> None:
    undisturbed = losses(DRAWS[name], tmp_path / "a", 4, strategy=mirrored())
    first = losses(DRAWS[name], tmp_path / "b", 1, strategy=mirrored())
    assert first + losses(DRAWS[name], tmp_path / "b", 3, strategy=mirrored()) == undisturbed
    trained = estimator(DRAWS[name], tmp_path / "b", mirrored())
    assert trained.evaluate(rows(3)) == trained.evaluate(rows(3))
    predicted = np.stack([one["drawn"] for one in trained.predict(rows(2))])
    np.testing.assert_array_equal(predicted, np.stack([one["drawn"] for one in trained.predict(rows(2))]))
    # Each of two batches of four goes to a replica, and draws once for its examples.
    assert len(np.unique(predicted, axis=0)) == 2


def test_evaluation_and_prediction_draw_anew_for_each_batch_and_the_same_at_each_call(tmp_path: Path) -> None:
    trained = estimator(DRAWS["normal"], tmp_path)
    trained.train(rows(), steps=1)
    assert (
        trained.evaluate(rows(3))["drawn"] == trained.evaluate(rows(3))["drawn"] != trained.evaluate(rows(1))["drawn"]
    )
    predicted = np.stack([one["drawn"] for one in trained.predict(rows(3))])
    np.testing.assert_array_equal(predicted, np.stack([one["drawn"] for one in trained.predict(rows(3))]))
    assert len(np.unique(predicted, axis=0)) == 3
    trained.train(rows(), steps=1)
    np.testing.assert_array_equal(predicted, np.stack([one["drawn"] for one in trained.predict(rows(3))]))


def one_of_each() -> tf.Tensor:
    """[mean, deviation, smallest, largest] of 10,000 draws from every sampler."""
    wide = [100, 100]
    drawn = [
        tf.random.uniform(wide, -1.0, 3.0),
        tf.cast(tf.random.uniform(wide, 2, 12, tf.int64), tf.float32),
        tf.random.normal(wide, 1.0, 2.0),
        tf.random.truncated_normal(wide),
        tf.cast(tf.random.categorical(tf.math.log([[0.2, 0.8]]), 10_000), tf.float32),
        tf.random.gamma([10_000], 2.0, 4.0),
        tf.random.poisson([10_000], 3.0),
        tf.nn.dropout(tf.ones(wide), 0.25),
        tf.random.shuffle(tf.range(10_000.0)),
        tf.random.gamma([5_000], [1.0, 9.0])[:, 1],
    ]
    facts = (tf.reduce_mean, tf.math.reduce_std, tf.reduce_min, tf.reduce_max)
    return tf.stack([tf.stack([fact(one) for fact in facts]) for one in drawn])


def test_distributions_are_those_of_tensorflow(tmp_path: Path) -> None:
    trained = estimator(one_of_each, tmp_path)
    trained.train(rows(), steps=1)
    found = next(iter(trained.predict(rows(1))))["drawn"].reshape(-1, 4)
    expected = [
        (1.0, 4 / 12**0.5), (6.5, 8.25**0.5), (1.0, 2.0), (0.0, 0.88), (0.8, 0.4), (0.5, 2**0.5 / 4), (3.0, 3**0.5),
        (1.0, (1 / 0.75 - 1) ** 0.5), (4999.5, 2886.75), (9.0, 3.0),
    ]  # fmt: skip
    for (mean, deviation, _, _), (expected_mean, expected_deviation) in zip(found, expected, strict=True):
        assert mean == pytest.approx(expected_mean, abs=6 * expected_deviation / 70)
        assert deviation == pytest.approx(expected_deviation, rel=0.05)
    assert -1 <= found[0][2] < -0.99 and 2.99 < found[0][3] < 3 and (found[1][2], found[1][3]) == (2, 11)
    assert -2 <= found[3][2] and found[3][3] <= 2 and (found[8][2], found[8][3]) == (0, 9999)


def test_seeds_of_operations_are_heeded(tmp_path: Path) -> None:
    def pairs() -> tf.Tensor:
        given = [tf.random.uniform([2], seed=7), tf.random.uniform([2], seed=7), tf.random.uniform([2], seed=8)]
        return tf.stack([*given, tf.random.uniform([2]), tf.random.uniform([2])])

    trained = estimator(pairs, tmp_path)
    trained.train(rows(), steps=1)
    drawn = next(iter(trained.predict(rows(1))))["drawn"].reshape(5, 2)
    np.testing.assert_array_equal(drawn[0], drawn[1])  # as in TensorFlow: to shuffle two tensors alike
    assert len(np.unique(drawn, axis=0)) == 4


def test_gradients_flow_through_dropout_and_gamma(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("weight", [200], initializer=v1.ones_initializer())
        alpha = v1.get_variable("alpha", [], initializer=v1.constant_initializer(3.0))
        block = tf.function(lambda x: tf.nn.dropout(x, 0.5))
        dropped = block(weight)
        looped = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, tf.nn.dropout(x, 0.5)), [0, weight])[1]
        loss = tf.reduce_sum(dropped) + 10.0 * tf.reduce_sum(looped) + tf.reduce_mean(tf.random.gamma([100], alpha))
        train_op = v1.train.GradientDescentOptimizer(1.0).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    trained = Estimator(model_fn, tmp_path)
    trained.train(rows(), steps=1)
    moved = 1.0 - trained.get_variable_value("weight")
    assert set(np.unique(moved)) == {0.0, 2.0, 40.0, 42.0}
    assert 0.4 < np.mean(moved % 10 == 2) < 0.6 and 0.15 < np.mean(moved >= 40) < 0.35
    assert trained.get_variable_value("alpha") == pytest.approx(2.0, abs=0.3)


def test_an_initial_value_that_is_drawn_in_model_fn_does_not_depend_on_the_strategy(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = tf.Variable(tf.random.normal([3]), name="weight")
        loss = tf.reduce_sum(tf.square(weight)) * tf.reduce_mean(features)
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    found = []
    for strategy in (None, mirrored()):
        trained = Estimator(model_fn, tmp_path / str(strategy is None), RunConfig(train_distribute=strategy))
        found.append(trained.train(rows(), steps=1).get_variable_value("weight"))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "draw"),
    [
        ("raw_ops", lambda: tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32)),
        ("vectorized_map", lambda: tf.vectorized_map(lambda x: x + tf.random.uniform([]), tf.zeros([5]))),
        ("candidates", lambda: tf.random.log_uniform_candidate_sampler([[1]], 1, 4, True, 99)[0]),
        ("generator from outside", lambda: OUTSIDE.uniform([2])),
        ("in a function", lambda: tf.function(lambda: tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32))()),
    ],
)
def test_what_has_no_stateless_counterpart_is_told_of_at_the_start(
    kind: str, draw: Draw, tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        drawn = losses(draw, tmp_path, 3)
    assert len(set(drawn)) == 3
    said = [record.message for record in caplog.records if "a resumed run differs from" in record.message]
    assert len(said) == 1, kind


def test_rows_of_a_vectorized_map_draw_their_own(tmp_path: Path) -> None:
    trained = estimator(lambda: tf.vectorized_map(lambda x: x + tf.random.uniform([]), tf.zeros([5])), tmp_path)
    trained.train(rows(), steps=1)
    assert len(np.unique(next(iter(trained.predict(rows(1))))["drawn"])) == 5


def test_a_generator_is_a_variable_that_evaluation_leaves_alone(tmp_path: Path) -> None:
    def draw() -> tf.Tensor:
        return tf.random.Generator.from_seed(1).uniform([3])

    undisturbed = losses(draw, tmp_path / "a", 5)
    first = losses(draw, tmp_path / "b", 2)
    trained, recorder = estimator(draw, tmp_path / "b"), LossRecorder()
    assert trained.evaluate(rows(3)) == trained.evaluate(rows(3))
    list(trained.predict(rows(3)))
    trained.train(rows(), hooks=[recorder], steps=3)
    assert first + np.concatenate(recorder.losses).tolist() == undisturbed
    assert len(set(undisturbed)) == 5


def test_a_function_that_was_traced_before_draws_the_same(tmp_path: Path) -> None:
    warm = losses(DRAWS["function"], tmp_path / "a", 3)
    global of_a_module
    before, of_a_module = of_a_module, tf.function(of_a_module.python_function)
    try:
        assert losses(DRAWS["function"], tmp_path / "b", 3) == warm
    finally:
        of_a_module = before


def test_the_parts_of_an_update_may_draw_their_own(tmp_path: Path) -> None:
    trace = estimator(DRAWS["loop"], tmp_path, mirrored()).prepare(rows()).program.trace
    draw = trace.wrapped.prune(list(trace.inputs), [output.loss for output in trace.outputs])
    batch = [tf.zeros(one.shape, one.dtype) for one in trace.inputs[:-3]]
    weights = [tf.constant([2, 2], tf.int64), tf.constant(4, tf.int64)]
    drawn = [draw(*batch, tf.constant(n, tf.int64), *weights) for n in (0, 1, 0)]
    found = [[float(loss) for loss in losses] for losses in drawn]
    assert found[0] == found[2] and len({*found[0], *found[1]}) == 4


def test_outside_of_a_run_nothing_changes(tmp_path: Path) -> None:
    losses(DRAWS["function"], tmp_path, 1)
    drawn = np.concatenate([of_a_module().numpy() for _ in range(3)])
    assert len(np.unique(drawn)) == 9
    traced = tf.function(lambda: tf.random.uniform([])).get_concrete_function()
    assert "RandomUniform" in {operation.type for operation in traced.graph.get_operations()}


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_each_part_of_an_update_draws_its_own(precision: str, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("weight", [200], initializer=v1.zeros_initializer())
        loss = tf.reduce_sum(tf.nn.dropout(weight + 1.0, 0.5)) * tf.ones_like(labels)
        return EstimatorSpec(mode, loss=loss, optimizer=v1.train.GradientDescentOptimizer(1.0))

    trained = Estimator(model_fn, tmp_path, RunConfig(gradient_accumulation=2, precision=precision))
    trained.train(rows(), steps=1)
    assert set(np.unique(-trained.get_variable_value("weight"))) == {0.0, 1.0, 2.0}
