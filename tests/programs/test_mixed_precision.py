"""What layers compute in: the policy of Keras 3 around model_fn, and the loss scale of mixed_float16."""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from tests.support.line import line, points
from tests.support.messages import Messages
from tests.support.models import STYLES, data, eval_input, native, strategies, train_input
from tests.support.tiers import slow_but

STRATEGIES = strategies()
ALL = ("default", "mirrored", "central_storage")
SCALE, COUNTER = "loss_scale/dynamic_scale", "loss_scale/step_counter"


class Recorded:
    """What the layers of a model computed in."""

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}
        self.policies: list[str] = []

    def model_fn(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """As tests.support.models.native, with layers that are given no dtype."""
        hidden = keras.layers.Dense(8, activation="tanh")(features)
        predictions = keras.layers.Dense(1)(hidden)
        self.dtypes[mode] = tf.as_dtype(predictions.dtype).name
        self.policies.append(keras.config.dtype_policy().name)
        if mode == "infer":
            return EstimatorSpec(mode, predictions={"y": predictions, "x": features})
        loss = keras.losses.MeanSquaredError(reduction=None)(labels, predictions)
        return EstimatorSpec(mode, {"y": predictions}, loss, optimizer=keras.optimizers.SGD(0.03, momentum=0.5))


def values_of(trainer: Estimator) -> dict[str, np.ndarray]:
    return {name: trainer.get_variable_value(name) for name in trainer.get_variable_names()}


@pytest.mark.parametrize(
    ("precision", "strategy"),
    slow_but(
        itertools.product(["mixed_bfloat16", "mixed_float16"], ALL),
        ("mixed_float16", "mirrored"),
    ),
)  # fmt: skip
def test_layers_compute_in_half_and_all_the_rest_is_in_float32(precision: str, strategy: str, tmp_path: Path) -> None:
    before = keras.config.dtype_policy()
    seen = Recorded()
    found = {}
    for name in ("float32", precision):
        config = RunConfig(precision=name, tf_random_seed=5, train_distribute=STRATEGIES[strategy])
        trainer = Estimator(seen.model_fn, tmp_path / name, config)
        trainer.train(train_input(6, 19), steps=40)
        found[name] = trainer.evaluate(eval_input(8))["loss"]
        (first, *_) = trainer.predict(eval_input(8))
        assert first["y"].dtype == np.float32
    assert set(seen.dtypes.values()) == {precision.removeprefix("mixed_")} and len(seen.dtypes) == 3
    floats = {value.dtype for value in values_of(trainer).values()} - {np.dtype("int64"), np.dtype("int32")}
    assert floats == {np.dtype("float32")}
    start = np.mean(data(22)[1] ** 2)
    assert found["float32"] < 0.2 * start
    assert found[precision] == pytest.approx(found["float32"], rel=0.25)  # float16 leaves steps out at first
    assert keras.config.dtype_policy() is before


def test_no_other_thread_sees_the_policy(tmp_path: Path) -> None:
    seen: list[str] = []

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        def look() -> None:
            seen.append(keras.config.dtype_policy().name)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return native(features, labels, mode)

    Estimator(model_fn, tmp_path, RunConfig(precision="mixed_bfloat16")).train(train_input(16), steps=1)
    assert set(seen) == {"float32"}


@pytest.mark.parametrize("style", ["native", "classic"])
def test_half_precision_that_nothing_uses_is_said(
    style: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    """These layers are given their dtype, or are none of Keras."""
    caplog.set_level(logging.WARNING, "runner")
    Estimator(STYLES[style], tmp_path, RunConfig(precision="mixed_bfloat16")).train(train_input(16), steps=1)
    messages.logged(caplog, "train.precision")


@pytest.mark.parametrize("strategy", slow_but(ALL, "default", "mirrored"))
def test_a_scaled_loss_in_float32_comes_to_what_the_loss_comes_to(strategy: str, tmp_path: Path) -> None:
    """A power of two scales without rounding, so nothing but sums over replicas may differ."""
    found = []
    for precision in ("float32", "mixed_float16"):
        config = RunConfig(precision=precision, tf_random_seed=5, train_distribute=STRATEGIES[strategy])
        found.append(
            values_of(Estimator(native, tmp_path / precision, config).train(train_input(6, 19, "float64"), steps=12))
        )
    expected, scaled = found
    assert scaled.pop(SCALE) == 2**15 and scaled.pop(COUNTER) == 12
    for name, value in scaled.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)


def overflowing(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Its gradient, scaled by 2^15, is no number of float16; by 2^12 it is."""
    predictions = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)(features)
    loss = tf.reduce_mean(16 * keras.losses.MeanSquaredError(reduction=None)(labels, predictions))
    return EstimatorSpec(mode, predictions, loss, optimizer=keras.optimizers.SGD(0.0))


def ones(num_examples: int = 4) -> tf.data.Dataset:
    return (
        tf.data.Dataset.from_tensor_slices((np.ones([num_examples, 1]), np.zeros([num_examples, 1]))).batch(4).repeat()
    )


@pytest.mark.parametrize(
    ("strategy", "parts"),
    slow_but(itertools.product(ALL, [1, 2]), ("default", 1), ("mirrored", 2), ("central_storage", 1)),
)
def test_a_step_whose_gradient_is_not_finite_is_no_update(strategy: str, parts: int, tmp_path: Path) -> None:
    config = RunConfig(
        precision="mixed_float16",
        train_distribute=STRATEGIES[strategy],
        gradient_accumulation=parts,
        steps_per_loop=2,
        ema_decay=0.5,
    )
    trainer = Estimator(overflowing, tmp_path, config)
    run = trainer.train_run(ones, max_steps=5)
    assert run is not None and run.global_step == 5
    values = values_of(trainer)
    skipped = int(15 - np.log2(values[SCALE]))
    # In turn: each replica has a batch of 4 of the function's own.
    replicas = 1 if strategy == "default" else 2
    assert 1 <= skipped <= 8 and run.examples == 4 * replicas * (5 + skipped)
    assert values["global_step"] == 5 and values["sgd/iteration"] == 5 and values[COUNTER] == 5
    assert values["dense/kernel"] == 1 and values["dense/kernel/ExponentialMovingAverage"] == 1


def test_a_gradient_that_no_scale_makes_finite_ends_the_run(tmp_path: Path, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        predictions = keras.layers.Dense(1)(features)
        loss = tf.reduce_mean(tf.sqrt(0 * tf.cast(predictions, tf.float32)))  # 0, with the gradient 0 x infinity
        return EstimatorSpec(mode, predictions, loss, optimizer=keras.optimizers.SGD(0.1))

    trainer = Estimator(model_fn, tmp_path, RunConfig(precision="mixed_float16"))
    with messages.raised(tf.compat.v1.train.NanLossDuringTrainingError):
        trainer.train(ones, max_steps=5)


def test_the_scale_doubles_after_two_thousand_updates_in_a_row(tmp_path: Path) -> None:
    trainer = Estimator(native, tmp_path, RunConfig(precision="mixed_float16")).train(train_input(16), steps=2003)
    values = values_of(trainer)
    assert values[SCALE] == 2**16 and values[COUNTER] == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(ALL, "mirrored"))
def test_a_resumed_run_has_the_scale_and_the_bits_of_the_undisturbed_one(strategy: str, tmp_path: Path) -> None:
    def trained(folder: str, steps: int) -> dict[str, np.ndarray]:
        config = RunConfig(precision="mixed_float16", train_distribute=STRATEGIES[strategy], gradient_accumulation=2)
        trainer = Estimator(overflowing, tmp_path / folder, config)
        trainer.train(ones, max_steps=steps)
        return values_of(trainer)

    expected = trained("whole", 6)
    trained("parts", 1), trained("parts", 4)
    for name, value in trained("parts", 6).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert expected[SCALE] < 2**15


def test_a_compiled_model_of_keras_trains_with_the_runners_loss_scale(tmp_path: Path) -> None:
    """compile() puts a LossScaleOptimizer around the optimizer under this policy; what is in it is applied."""

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.03, momentum=0.5), loss="mse")
        return model

    trainer = Estimator(model_fn, tmp_path, RunConfig(precision="mixed_float16", tf_random_seed=5))
    trainer.train(train_input(6, 19), steps=40)
    assert trainer.evaluate(eval_input(8))["loss"] < 0.2 * np.mean(data(22)[1] ** 2)
    assert "sgd/iteration" in trainer.get_variable_names() and SCALE in trainer.get_variable_names()


def test_float16_is_refused_for_a_train_op_and_bfloat16_is_not(tmp_path: Path, messages: Messages) -> None:
    Estimator(line, tmp_path / "b", RunConfig(precision="mixed_bfloat16"), {}).train(points(), steps=1)
    with messages.raised(ValueError):
        Estimator(line, tmp_path / "f", RunConfig(precision="mixed_float16"), {}).train(points(), steps=1)
