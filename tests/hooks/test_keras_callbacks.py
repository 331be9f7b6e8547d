"""Callbacks of Keras in training: what they are told is what `fit` tells them; what changes training is refused."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from runner import Estimator, EstimatorSpec, EvalSpec, Input, RunConfig, TrainSpec, train_and_evaluate
from runner.config.mistakes import NotAllowed
from runner.config.settings.keras_callbacks import INSTEAD
from tests.support.command_line import CommandLine
from tests.support.line import line, mirrored, native_line, points
from tests.support.messages import Messages

_DRAW = np.random.default_rng(0)
X = _DRAW.normal(size=(50, 3)).astype(np.float32)
Y = (X @ [[1.0], [2.0], [3.0]]).astype(np.float32)
BATCH_SIZE = 8
STEPS = math.ceil(len(X) / BATCH_SIZE)  # of an epoch, the last of two examples


def network(*, normalizes: bool = False) -> Any:
    normal = keras.initializers.RandomNormal(seed=3)
    layers = [keras.Input((3,), name="x")]
    layers += [keras.layers.Dense(4, activation="tanh", kernel_initializer=normal, name="hidden")]
    layers += [keras.layers.BatchNormalization(name="norm")] if normalizes else []
    layers += [keras.layers.Dense(1, kernel_initializer=normal, name="out")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    return model


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    return network(**params)


def batches(*, repeats: bool = False) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH_SIZE)
    return dataset.repeat() if repeats else dataset


def examples(params: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(params.batch_size)


def train(folder: Path, callbacks: list[Any], *, epochs: int = 3, params: Any = None, **config: Any) -> Estimator:
    estimator = Estimator(model_fn, folder, RunConfig(**config), params=params or {})
    return estimator.train(batches, hooks=callbacks, max_epochs=epochs)


class Told(keras.callbacks.Callback):
    """Notes each call: (method, number, logs)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(("train begins", self.params["epochs"], self.params["steps"]))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch begins", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch ends", epoch, logs))

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append(("test begins",))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("test ends", logs))

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append(("train ends", logs))

    @property
    def losses(self) -> dict[int, float]:
        """Epoch -> its loss."""
        return {call[1]: call[2]["loss"] for call in self.calls if call[0] == "epoch ends"}


class ToldOfBatches(Told):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch begins", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch ends", batch, logs))


def assert_same_calls(found: list[Any], expected: list[Any]) -> None:
    assert [call[0] for call in found] == [call[0] for call in expected]
    for mine, of_fit in zip(found, expected, strict=True):
        has_logs = isinstance(of_fit[-1], dict)
        assert mine[:-1] == of_fit[:-1]
        assert mine[-1] == (pytest.approx(of_fit[-1], rel=1e-6) if has_logs else of_fit[-1])


# --- as in fit ----------------------------------------------------------------------------------------------------


def test_a_callback_is_told_what_fit_tells_it(tmp_path: Path) -> None:
    of_fit, callback = Told(), Told()
    network().fit(X, Y, BATCH_SIZE, 3, shuffle=False, callbacks=[of_fit], validation_data=(X, Y), verbose=0)
    estimator = Estimator(model_fn, tmp_path, RunConfig(save_checkpoints_steps=STEPS))
    train_and_evaluate(estimator, TrainSpec(batches, hooks=[callback], max_epochs=3), EvalSpec(batches))
    assert_same_calls(callback.calls, of_fit.calls)


def test_a_callback_of_batches_is_told_of_each(tmp_path: Path, caplog: Any, messages: Messages) -> None:
    of_fit, callback = ToldOfBatches(), ToldOfBatches()
    network().fit(X, Y, BATCH_SIZE, 2, shuffle=False, callbacks=[of_fit], verbose=0)
    train(tmp_path, [callback], epochs=2, steps_per_loop=5)
    assert_same_calls(callback.calls, of_fit.calls)
    messages.logged(caplog, "each batch")


def test_without_one_loops_stay_long(tmp_path: Path, caplog: Any) -> None:
    lengths: list[int] = []

    class Lengths:
        def after_step(self, run: Any, result: Any) -> None:
            lengths.append(result.num_steps)

        def before_step(self, run: Any, step: int) -> None: ...
        def begin(self, run: Any) -> None: ...
        def end(self, run: Any) -> None: ...

    train(tmp_path, [Lengths(), Told()], epochs=2, steps_per_loop=100, log_step_count_steps=None)
    # The last batch of an epoch is a loop of its own: it is smaller, and its loss weighs less.
    assert lengths == [STEPS - 1, 1, STEPS - 1, 1]
    assert "each batch" not in caplog.text


def test_two_replicas_tell_it_the_same(tmp_path: Path) -> None:
    alone, together = Told(), Told()
    for name, callback, strategy in (("alone", alone, None), ("together", together, mirrored())):
        estimator = Estimator(model_fn, tmp_path / name, RunConfig(train_distribute=strategy))
        estimator.train(Input(examples, batch_size=BATCH_SIZE), hooks=[callback], max_epochs=3)
    assert_same_calls(together.calls, alone.calls)


def test_an_epoch_ends_in_a_step_that_two_passes_share(tmp_path: Path) -> None:
    """Seven batches a pass, two a step."""
    callback = Told()
    train(tmp_path, [callback], train_distribute=mirrored())
    ends = [call[1] for call in callback.calls if call[0] == "epoch ends"]
    assert ends == [0, 1, 2]


def test_it_reads_rate_counter_and_weights_as_of_a_model(tmp_path: Path) -> None:
    read: dict[str, list[Any]] = {"fit": [], "here": []}

    def reader(name: str) -> Any:
        def note(epoch: int, logs: Any) -> None:
            model = callback.model
            optimizer = model.optimizer
            rate = keras.ops.convert_to_numpy(optimizer.learning_rate)
            read[name].append((float(rate), int(optimizer.iterations.numpy()), model.get_weights()))
            assert model.count_params() == sum(weight.size for weight in model.get_weights())
            assert [weight.path.partition("/")[2] for weight in model.trainable_weights][2] == "norm/gamma"
            assert not model.stop_training

        callback = keras.callbacks.LambdaCallback(on_epoch_end=note)
        return callback

    model = network(normalizes=True)
    model.fit(X, Y, BATCH_SIZE, 2, shuffle=False, callbacks=[reader("fit")], verbose=0)
    train(tmp_path, [reader("here")], epochs=2, params={"normalizes": True})
    for mine, of_fit in zip(read["here"], read["fit"], strict=True):
        assert mine[:2] == of_fit[:2]
        for weight, expected in zip(mine[2], of_fit[2], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-6)


def test_the_rate_of_a_schedule_is_that_of_the_next_step(tmp_path: Path) -> None:
    rates: list[float] = []

    def with_schedule(features: Any, labels: Any, mode: str) -> Any:
        model = network()
        model.compile(keras.optimizers.SGD(keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1.0)), "mse")
        return model

    callback: Any = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(float(callback.model.optimizer.learning_rate))
    )
    Estimator(with_schedule, tmp_path).train(batches, hooks=[callback], max_epochs=2)
    assert rates == pytest.approx([0.1 / (1 + STEPS), 0.1 / (1 + 2 * STEPS)])


def test_logs_have_the_metrics_of_training_and_of_named_evaluations(tmp_path: Path) -> None:
    callback = Told()
    estimator = Estimator(native_line, tmp_path, RunConfig(log_step_count_steps=2, save_checkpoints_steps=4))
    specs = [EvalSpec(points(), name="first"), EvalSpec(points(), at_start=True)]
    train_and_evaluate(estimator, TrainSpec(points(), hooks=[callback], max_epochs=1), specs)
    (logs,) = [call[2] for call in callback.calls if call[0] == "epoch ends"]
    assert {"loss", "mae", "val_loss", "val_mae", "val_first_loss", "val_first_mae"} <= logs.keys()
    assert logs["val_mae"] == logs["val_first_mae"] < logs["mae"]


@pytest.mark.parametrize("of", [keras, tf_keras])
def test_callbacks_of_keras_that_read_work(of: Any, tmp_path: Path) -> None:
    history, rows = of.callbacks.History(), tmp_path / "log.csv"
    seen: list[float] = []
    by_lambda = of.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    train(tmp_path / "run", [history, of.callbacks.CSVLogger(str(rows)), by_lambda])
    assert history.epoch == [0, 1, 2] and history.history["loss"] == seen
    with open(rows) as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == pytest.approx(seen)


def test_a_callback_may_come_from_model_fn_that_returns_a_train_op(tmp_path: Path) -> None:
    callback = Told()

    def with_hook(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        return EstimatorSpec(mode, spec.predictions, spec.loss, spec.train_op, training_chief_hooks=[callback])

    Estimator(with_hook, tmp_path).train(points(), max_epochs=2)
    assert list(callback.losses) == [0, 1]
    with pytest.raises(ValueError, match="train_op"):
        callback.model.get_weights()
    assert float(callback.model.optimizer.learning_rate) == pytest.approx(0.01)


# --- where a run begins and ends ----------------------------------------------------------------------------------


def test_a_run_that_goes_on_in_mid_epoch_tells_what_an_undisturbed_one_tells(tmp_path: Path) -> None:
    undisturbed, first, second = ToldOfBatches(), ToldOfBatches(), ToldOfBatches()
    train(tmp_path / "undisturbed", [undisturbed])
    stop = STEPS + 3
    Estimator(model_fn, tmp_path / "run").train(batches, hooks=[first], max_steps=stop, max_epochs=3)
    assert first.calls[-1][0] == "train ends" and list(first.losses) == [0]
    train(tmp_path / "run", [second])
    # The callback is another object, which the epoch begins for.
    assert second.calls[1:3] == [("epoch begins", 1), ("batch begins", 3)]
    rest = undisturbed.calls[undisturbed.calls.index(second.calls[3]) :]
    assert second.calls[3:] == rest and len(rest) > STEPS
    assert second.losses == {epoch: loss for epoch, loss in undisturbed.losses.items() if epoch > 0}


@pytest.mark.parametrize("repeats", [True, False])
def test_without_a_known_pass_the_run_is_one_epoch(
    repeats: bool, tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    callback = Told()
    dataset = batches(repeats=repeats)
    unknown = dataset if repeats else dataset.filter(lambda *_: True)
    Estimator(model_fn, tmp_path).train(lambda: unknown, hooks=[callback], max_steps=STEPS)
    network_of_fit = Told()
    network().fit(X, Y, BATCH_SIZE, 1, shuffle=False, callbacks=[network_of_fit], verbose=0)
    assert list(callback.losses) == [0]
    assert callback.calls[0] == ("train begins", 1, None)
    messages.logged(caplog, "one epoch", hide="<locals>.<lambda>")


def test_after_a_rollback_the_epoch_has_only_what_was_trained_on(tmp_path: Path) -> None:
    def with_nan() -> tf.data.Dataset:
        return batches().enumerate().map(lambda n, xy: (xy[0], tf.where(n == 4, math.nan, 1.0) * xy[1]))

    callback = Told()
    config = RunConfig(nan="rollback", save_checkpoints_steps=3)
    Estimator(model_fn, tmp_path, config).train(with_nan, hooks=[callback], max_epochs=1)
    assert list(callback.losses) == [0] and math.isfinite(callback.losses[0])


# --- what is refused ----------------------------------------------------------------------------------------------


def _made(of: Any, name: str) -> Any:
    """Make a callback of Keras."""
    arguments: dict[str, tuple[Any, ...]] = {
        "LearningRateScheduler": (lambda epoch: 0.1,), "ModelCheckpoint": ("x.keras",), "BackupAndRestore": ("x",),
    }  # fmt: skip
    return getattr(of.callbacks, name)(*arguments.get(name, ()))


# Orbax is not installed; a CallbackList of tf_keras is no callback.
OF_KERAS = [(keras, name) for name in INSTEAD if name != "OrbaxCheckpoint"]
OF_KERAS += [(tf_keras, name) for name in INSTEAD if hasattr(tf_keras.callbacks, name) and name != "CallbackList"]


@pytest.mark.parametrize(("of", "name"), OF_KERAS, ids=[f"{of.__name__}-{name}" for of, name in OF_KERAS])
def test_what_a_key_replaces_is_refused(of: Any, name: str, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(NotAllowed):
        train(tmp_path / "run", [_made(of, name)])
    assert not list(tmp_path.glob("run/*.index"))


class PatientStopping(keras.callbacks.EarlyStopping):
    pass


class OfTestBatches(keras.callbacks.Callback):
    def on_test_batch_end(self, batch: int, logs: Any = None) -> None: ...


@pytest.mark.parametrize("kind", [PatientStopping, OfTestBatches])
def test_a_class_of_ones_own_is_refused_by_its_name(kind: Any, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(NotAllowed):
        train(tmp_path / "run", [kind()])


def set_rate(model: Any) -> None:
    model.optimizer.learning_rate = 0.1


def set_decay(model: Any) -> None:
    model.optimizer.weight_decay = 0.1


def set_stop(model: Any) -> None:
    model.stop_training = True


def set_attribute(model: Any) -> None:
    model.best = 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "stop_training": set_stop,
    "rate": set_rate,
    "rate_assigned": lambda model: model.optimizer.learning_rate.assign(0.1),
    "decay": set_decay,
    "attribute": set_attribute,
    "set_weights": lambda model: model.set_weights(model.get_weights()),
    "load_weights": lambda model: model.load_weights("x"),
    "weight_assigned": lambda model: model.weights[0].assign(0.0),
    "compile": lambda model: model.compile("sgd"),
}


class Changing(keras.callbacks.Callback):
    """Changes the model, and catches what is said about it."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self._change = CHANGES[change]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        try:
            self._change(self.model)
        except ValueError:
            pass


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_training_is_refused_where_it_does(change: str, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        train(tmp_path, [Changing(change)])


def test_what_it_cannot_read_is_named(tmp_path: Path, messages: Messages) -> None:
    callback: Any = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: callback.model.predict(X))
    with messages.raised(AttributeError):
        train(tmp_path, [callback])


@pytest.mark.parametrize("place", ["spec", "evaluate", "model_fn"])
def test_hooks_of_evaluations_are_no_callbacks(place: str, tmp_path: Path, messages: Messages) -> None:
    def with_hook(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = native_line(features, labels, mode, params)
        hooks = [Told()] if place == "model_fn" else []
        return dataclasses.replace(spec, evaluation_hooks=hooks)

    estimator = Estimator(with_hook, tmp_path).train(points(), steps=1)
    hooks = [Told()] if place == "evaluate" else []
    evaluate: Any = functools.partial(EvalSpec, points(), hooks=[Told()])
    if place != "spec":
        evaluate = functools.partial(estimator.evaluate, points(), hooks=hooks)
    with messages.raised(NotAllowed):
        evaluate()


# --- the command line ---------------------------------------------------------------------------------------------


def of_file(path: str) -> Any:
    """A callback of a config."""
    return keras.callbacks.CSVLogger(path)


HOOK = "train.hooks=[{fn: %s, params: {%s}}]"
JOB = (
    "model=custom", "model.fn=tests.support.jobs.model_fn", "input=custom", "input.train.fn=tests.support.jobs.once",
    "input.train.batch_size=2", "input.eval.fn=tests.support.jobs.once", "train.max_epochs=2", "train.max_steps=null",
    "tracking=none", "model_dir=run",
)  # fmt: skip


@pytest.mark.processes
def test_a_config_names_a_callback(tmp_path: Path, command_line: CommandLine) -> None:
    hook = HOOK % ("tests.hooks.test_keras_callbacks.of_file", "path: log.csv")
    done = command_line(*JOB, "input.eval.batch_size=2", hook, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert rows[0].startswith("epoch,loss") and [row[0] for row in rows[1:]] == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "params"),
    [("keras.callbacks.EarlyStopping", ""), ("tests.hooks.test_keras_callbacks.PatientStopping", "monitor: loss")],
)
@pytest.mark.processes
def test_a_config_with_one_that_is_refused_is_wrong(
    name: str, params: str, tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    done = command_line(*JOB, "input.eval.batch_size=2", HOOK % (name, params), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    said = [row for row in done.stderr.splitlines() if "Keras" in row]
    messages.same("stderr", said[0].removeprefix("runner: "))
