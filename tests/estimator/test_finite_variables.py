"""A checkpoint whose variables became non-finite never becomes the newest; train.nan says what follows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Hook, Input, RunConfig
from runner.run_config import WarmStart
from tests.support import jobs
from tests.support.journal import events_in, journal_of
from tests.support.line import mirrored
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1
HERE = "tests.estimator.test_finite_variables"
NanError = v1.train.NanLossDuringTrainingError

NUMBERS = np.random.RandomState(0).rand(80, 2).astype(np.float32)
SAVING: dict[str, dict[str, Any]] = {"at once": {"save_checkpoints_asynchronously": False}, "asynchronous": {}}


def customers(params: Any) -> tf.data.Dataset:
    """Forty batches of two; the income is NaN in those numbered params.bad (from 1), those in params.without are
    left out.
    """
    ages, incomes = NUMBERS.T.copy()
    incomes[2 * np.array(params.get("bad", [7]), int) - 1] = np.nan
    without = np.array(params.get("without", ()), int) - 1
    rows = np.delete(np.arange(80).reshape(40, 2), without, axis=0).reshape(-1)
    features = {"age": ages[rows], "income": incomes[rows]}
    return tf.data.Dataset.from_tensor_slices((features, NUMBERS.sum(1)[rows])).batch(2)


def normalized(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """BatchNorm and relu: the averages become NaN, but the loss stays finite, as relu makes 0 of NaN where TensorFlow
    fuses it with the layer before it.
    """
    inputs = tf.stack([features["age"], features["income"]], 1)
    hidden = keras.layers.BatchNormalization(name="norm")(inputs, training=mode == "train")
    hidden = tf.where(hidden > 0, hidden, 0.0)
    predictions = keras.layers.Dense(1, name="dense")(hidden)[:, 0]
    return EstimatorSpec(mode, predictions, tf.square(predictions - labels), optimizer=keras.optimizers.SGD(0.01))


def trainer(folder: Path, model_fn: Any = normalized, **config: Any) -> Estimator:
    settings = RunConfig(**{"save_checkpoints_steps": 5, **config})
    return Estimator(model_fn, folder, settings, journal=journal_of(folder))


def train(folder: Path, steps: int = 20, bad: Sequence[int] = (7,), hooks: Any = (), **config: Any) -> dict[str, Any]:
    without = config.pop("without", ())
    data = Input(customers, params={"bad": bad, "without": without}, batch_size=2)
    estimator = trainer(folder, **config).train(data, list(hooks), max_steps=steps)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def newest(folder: Path) -> tuple[int, bool]:
    """The step of the newest checkpoint, and whether it is finite."""
    reader = tf.train.load_checkpoint(str(folder))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    floats = [value for value in values.values() if getattr(value, "dtype", None) == np.float32]
    return int(values["global_step"]), all(np.isfinite(value).all() for value in floats)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return events_in(folder, kind)


@pytest.mark.parametrize("saving", list(SAVING))
@pytest.mark.parametrize("strategy", [None, mirrored()], ids=["default", "mirrored"])
def test_it_is_not_saved_and_ends_the_run(strategy: Any, saving: str, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(NanError):
        train(tmp_path, train_distribute=strategy, **SAVING[saving])
    assert newest(tmp_path) == (5, True)
    (noted,) = events_in(tmp_path, "nan")
    assert noted["step"] == 10 and noted["variables"][0] == "norm/gamma"


def test_the_last_save_counts_too(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(NanError):
        train(tmp_path, save_checkpoints_steps=None)
    assert newest(tmp_path) == (0, True)


def test_on_the_command_line_it_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = (f"model.fn={HERE}.normalized", f"input.train.fn={HERE}.customers", "input.eval=null")
    assert jobs.run(tmp_path, *settings, "checkpoint.save_steps=5", "train.max_steps=20") == 1
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("runner: ")]
    messages.same("exit 1", said)
    assert newest(tmp_path / "run") == (5, True)
    assert jobs.run(tmp_path, *settings, "train.max_steps=20", "run.debug=nan") == 1
    for text in capsys.readouterr().err.splitlines():
        if text.startswith("runner: ") or "at step" in text:
            messages.same("exit 1", text)


def test_an_input_of_the_second_replica_and_a_label_have_their_names(tmp_path: Path, messages: Messages) -> None:
    x, zeros = np.array([1.0, 2.0, 3.0, np.nan], np.float32), np.zeros(4, np.float32)
    elements = [({"b": (zeros, zeros), "a": zeros}, (x,)), ({"b": (zeros, x), "a": zeros}, (zeros,))]

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = tf.reduce_mean(v1.get_variable("w", []) * (features["a"] + features["b"][1]) + labels[0])
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))

    for number, element in enumerate(elements):
        data = Input(
            lambda params: tf.data.Dataset.from_tensor_slices(params["element"]).batch(4), {"element": element}, 4
        )
        estimator = trainer(tmp_path / str(number), model_fn, check_numerics=True, train_distribute=mirrored())
        with messages.raised(NanError):
            estimator.train(data, max_steps=1)


@pytest.mark.parametrize("saving", slow_but(SAVING, "asynchronous"))
@pytest.mark.parametrize("strategy", [None, mirrored()], ids=["default", "mirrored"])
def test_rollback_goes_on_from_the_last_checkpoint(
    strategy: Any, saving: str, tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    settings: dict[str, Any] = {"train_distribute": strategy, "nan": "rollback", **SAVING[saving]}
    with caplog.at_level(logging.WARNING, "runner"):
        found = train(tmp_path / "a", **settings)
    rolled = [(line["step"], line["back_to"]) for line in events_in(tmp_path / "a", "rollback")]
    assert rolled == [(10, 5)] and newest(tmp_path / "a") == (20, True)
    messages.logged(caplog)
    expected = train(tmp_path / "b", without=[6, 7, 8, 9, 10], **settings)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_after_a_rollback_at_the_last_save_training_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nan": "rollback", "save_checkpoints_steps": None}
    found = train(tmp_path / "a", **settings)
    expected = train(tmp_path / "b", without=range(1, 21), **settings)
    assert found["global_step"] == 20 and not events_in(tmp_path / "b", "rollback")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_resumed_run_goes_back_at_the_same_step(tmp_path: Path) -> None:
    class Killer(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            if result.last_step >= 7:
                raise KeyboardInterrupt

    expected = train(tmp_path / "a", nan="rollback", steps_per_loop=1)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", nan="rollback", steps_per_loop=1, hooks=[Killer()])
    found = train(tmp_path / "b", nan="rollback", steps_per_loop=1)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_it_fails_after_three_rollbacks(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(NanError):
        train(tmp_path, bad=range(7, 40), nan="rollback")
    assert newest(tmp_path) == (5, True)


def test_ignore_saves_them_and_a_later_run_takes_them_as_they_are(tmp_path: Path) -> None:
    train(tmp_path, nan="ignore")
    assert newest(tmp_path) == (20, False)
    train(tmp_path, steps=30)
    assert newest(tmp_path) == (30, False)


def test_a_warm_start_may_have_them(tmp_path: Path) -> None:
    train(tmp_path / "a", nan="ignore")
    train(tmp_path / "b", steps=5, bad=[], warm_start=WarmStart(str(tmp_path / "a"), include=[".*"]))
    assert newest(tmp_path / "b") == (5, False)


def test_a_hook_that_does_not_fail_ends_training_with_the_last_finite_checkpoint(
    tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        train(tmp_path, hooks=[v1.train.NanTensorHook(None, fail_on_nan_loss=False)])
    assert newest(tmp_path) == (5, True)
    messages.logged(caplog, "finite")


def steps_to(values: Sequence[float]) -> Any:
    """A model whose variable `best` takes these values after steps 1, 2, ...; `mask` is -inf, `large` overflows."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        step = v1.train.get_global_step()
        best = v1.get_variable("best", [], initializer=v1.constant_initializer(np.inf), trainable=False)
        v1.get_variable("mask", [2], initializer=v1.constant_initializer([0.0, -np.inf]), trainable=False)
        v1.get_variable("large", [2], initializer=v1.constant_initializer(1e30), trainable=False)
        loss = tf.reduce_mean(tf.square(v1.get_variable("w", []) * features - labels))
        with tf.control_dependencies([best.assign(tf.gather(tf.constant(values, tf.float32), step))]):
            train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def test_what_began_non_finite_is_no_error_until_it_was_finite(tmp_path: Path, messages: Messages) -> None:
    def ones() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((tf.ones([2]), tf.ones([2]))).repeat()

    infinite = float("inf")
    model_fn = steps_to([infinite, infinite, 3.0, 2.0, infinite, infinite])
    for steps in (1, 4):  # the second run takes up the infinite value of a checkpoint
        trainer(tmp_path, model_fn, save_checkpoints_steps=1).train(ones, max_steps=steps)
    with messages.raised(NanError):
        trainer(tmp_path, model_fn, save_checkpoints_steps=1).train(ones, max_steps=6)


def test_the_message_of_a_nan_loss_says_how_to_find_its_origin(tmp_path: Path, messages: Messages) -> None:
    def bad() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((tf.fill([2], np.nan), tf.ones([2]))).repeat()

    with messages.raised(NanError):
        trainer(tmp_path, steps_to([1.0])).train(bad, max_steps=3)
