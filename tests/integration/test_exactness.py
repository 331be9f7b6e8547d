"""Evaluations, predictions and weighted losses do not depend on the strategy; tests/exactness has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from tests.support.models import STYLES, classic, data, eval_input, native, strategies, train_input

STRATEGIES = strategies()
REPLICATED = ["one_device", "mirrored", "central_storage"]


def estimator(style: str, strategy: str, model_dir: Path, **config: Any) -> Estimator:
    return Estimator(
        STYLES[style],
        model_dir=model_dir,
        config=RunConfig(train_distribute=STRATEGIES[strategy], tf_random_seed=11, **config),
    )


class LossRecorder:
    """Keeps every loss of a run."""

    def __init__(self) -> None:
        self.losses: list[np.ndarray] = []

    def begin(self, run: Any) -> None: ...

    def before_step(self, run: Any, step: int) -> None: ...

    def after_step(self, run: Any, result: Any) -> None:
        self.losses.append(result.losses)

    def end(self, run: Any) -> None: ...


def relative(a: Any, b: Any) -> float:
    return float(np.max(np.abs(np.asarray(a, np.float64) - b)) / max(np.max(np.abs(b)), 1e-30))


@pytest.fixture(scope="module")
def evaluators(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Estimator]:
    """By style and strategy, all of a style on copies of one checkpoint (written by the default strategy)."""
    found = {}
    for style in STYLES:
        model_dir = tmp_path_factory.mktemp(style)
        estimator(style, "default", model_dir).train(train_input(16), steps=10)
        for strategy in STRATEGIES:
            found[style, strategy] = estimator(style, strategy, model_dir)
    return found


def test_evaluation_count_is_exact_for_every_metric_form(tmp_path: Path) -> None:
    v1 = tf.compat.v1

    def counting(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = classic(features, labels, mode)
        if mode != "eval":
            return spec
        ones = tf.ones_like(labels)[:, 0]
        keras_count = keras.metrics.Sum(name="keras")
        keras_count.update_state(ones)
        total = v1.get_variable("count", [], collections=[v1.GraphKeys.LOCAL_VARIABLES], trainable=False,
                                initializer=v1.zeros_initializer(), aggregation=tf.VariableAggregation.SUM,
                                synchronization=tf.VariableSynchronization.ON_READ)  # fmt: skip
        v1_count = (total, v1.assign_add(total, tf.reduce_sum(ones)))
        return spec._replace(
            eval_metric_ops={"keras": keras_count, "v1": v1_count, "mean": tf.cast(labels[:, 0], tf.float64)}
        )

    trainer = Estimator(counting, tmp_path, RunConfig(train_distribute=STRATEGIES["mirrored"]))
    trainer.train(train_input(10), steps=1)
    labels = np.concatenate([y for _, y in eval_input(22).fn(params={"batch_size": 22})])
    for batch_size in (10, 4, 22, 1, 7):
        for _ in range(2):
            found = trainer.evaluate(eval_input(batch_size))
            assert found["keras"] == 22 and found["v1"] == 22, batch_size
            assert found["mean"] == pytest.approx(labels.mean(dtype=np.float64), rel=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_predictions_come_in_the_order_of_the_input(style: str, evaluators: dict[tuple[str, str], Estimator]) -> None:
    expected = list(evaluators[style, "default"].predict(eval_input(22)))
    for strategy in REPLICATED:
        for batch_size in (5, 22):
            found = list(evaluators[style, strategy].predict(eval_input(batch_size)))
            assert len(found) == 22
            for one, other in zip(found, expected, strict=True):
                tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@pytest.mark.parametrize("strategy", REPLICATED)
def test_batches_of_the_functions_own_are_taken_in_turn(
    strategy: str, evaluators: dict[tuple[str, str], Estimator]
) -> None:
    """As in tf.estimator: without a batch_size, each replica takes a whole batch; an odd one is left at the end."""

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data(22)).batch(5)  # 5, 5, 5, 5, 2

    expected = evaluators["classic", "default"].evaluate(eval_input(22))
    evaluator = evaluators["classic", strategy]
    assert evaluator.evaluate(input_fn) == {k: pytest.approx(v, rel=1e-5) for k, v in expected.items()}
    predictions = [one["x"] for one in evaluator.predict(input_fn)]
    np.testing.assert_array_equal(predictions, data(22)[0])


def test_loss_weight_is_the_denominator_of_the_loss(tmp_path: Path) -> None:
    """Masked tokens: replicas hold different numbers of real ones, and the mean is over those of all replicas."""

    def masked(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = native(features, labels, mode)
        mask = tf.cast(labels > 0, labels.dtype)
        loss = (tf.square(spec.predictions["y"] - labels) * mask)[:, 0]
        if params["scalar"]:
            loss = tf.math.divide_no_nan(tf.reduce_sum(loss), tf.reduce_sum(mask))
        return EstimatorSpec(mode, loss=loss, loss_weight=mask, optimizer=spec.optimizer)

    results = {}
    for strategy in ("default", "mirrored"):
        for scalar in (False, True):
            trainer = Estimator(
                masked,
                tmp_path / f"{strategy}-{scalar}",
                RunConfig(train_distribute=STRATEGIES[strategy]),
                params={"scalar": scalar},
            )
            trainer.train(train_input(6, num_examples=11, dtype="float64"), steps=20)
            results[strategy, scalar] = trainer.get_variable_value("dense/kernel")
            evaluated = trainer.evaluate(eval_input(6, dtype="float64"))["loss"]
            assert evaluated == pytest.approx(trainer.evaluate(eval_input(22, dtype="float64"))["loss"], rel=1e-12)
    for key, value in results.items():
        assert relative(value, results["default", False]) <= 1e-10, key
