"""`train/loss` and metrics of training: means over the steps from one multiple of `train.log_steps` to the next."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Hook, ModeKeys, RunConfig
from tests.support.journal import journal_of, metrics_of_steps
from tests.support.line import mirrored, read_events
from tests.support.measured import measured, wide_points

v1 = tf.compat.v1

NUM_EXAMPLES = 23
"""In batches of four: five steps of four examples and one of three, an epoch."""


class Losses(Hook):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []
        self.examples = 0

    def after_step(self, run: Any, result: Any) -> None:
        self.of_steps += result.losses.tolist()
        self.examples += result.examples


def train(folder: Path, model_fn: Any = measured, max_steps: int = 17, hooks: Any = (), **config: Any) -> Losses:
    """Train on three epochs, up to `max_steps`; a point every four steps. Return the losses of the steps taken."""
    settings = {"log_step_count_steps": 4, "train_metrics": True, "save_checkpoints_steps": 100, **config}
    losses = Losses()
    journal = journal_of(folder / "events.jsonl")
    trainer = Estimator(model_fn, folder, RunConfig(**settings), params={"style": "native"}, journal=journal)
    trainer.train(wide_points(NUM_EXAMPLES, 4), hooks=[losses, *hooks], max_steps=max_steps, max_epochs=3)
    journal.close()
    return losses


def series(folder: Path, *names: str) -> dict[int, dict[str, float]]:
    """Return step -> name -> value in the journal, of the points with `train/loss`."""
    found: dict[int, dict[str, float]] = {}
    for step, values in metrics_of_steps(folder / "events.jsonl"):
        if "train/loss" in values:
            assert step not in found, "a point twice"
            found[step] = {name: values[f"train/{name}"] for name in names}
    return found


def examples_of(step: int) -> int:
    return 3 if step % 6 == 0 else 4


def means(losses: list[float], *, weighted: bool) -> dict[int, float]:
    """Return step -> mean loss since the last multiple of four, of losses of the steps 1, 2, ..."""
    expected = {1: losses[0]}
    for end in range(4, len(losses) + 1, 4):
        steps = range(end - 3, end + 1)
        weights = [examples_of(step) if weighted else 1 for step in steps]
        expected[end] = float(np.average([losses[step - 1] for step in steps], weights=weights))
    return expected


@pytest.mark.parametrize("steps_per_loop", [1, 5, None])
@pytest.mark.parametrize("strategy", [None, mirrored()], ids=["default", "mirrored"])
def test_loss_is_the_mean_over_the_examples_since_the_last_multiple(
    strategy: Any, steps_per_loop: int | None, tmp_path: Path
) -> None:
    losses = train(tmp_path, train_distribute=strategy, steps_per_loop=steps_per_loop)
    found = {step: values["loss"] for step, values in series(tmp_path, "loss").items()}
    assert losses.examples == 2 * NUM_EXAMPLES + 5 * 4
    assert found == pytest.approx(means(losses.of_steps, weighted=True), rel=1e-12)


def test_event_files_have_the_loss_of_one_step_as_those_of_tf_estimator(tmp_path: Path) -> None:
    losses = train(tmp_path, save_summary_steps=4)
    events = [(event.step, event.tag, event.value) for event in read_events(tmp_path)]
    found = {step: value for step, tag, value in events if tag == "loss"}
    assert found == pytest.approx({step: losses.of_steps[step - 1] for step in (1, 4, 8, 12, 16)}, rel=1e-6)
    assert not [tag for _, tag, _ in events if tag == "train/loss"]


def of_keras(reduction: str) -> Any:
    def loss_of(predictions: Any, labels: Any) -> Any:
        return keras.losses.MeanSquaredError(reduction=reduction)(labels[:, None], predictions[:, None])

    return loss_of


def of_v1(reduction: str) -> Any:
    return lambda predictions, labels: v1.losses.mean_squared_error(labels, predictions, reduction=reduction)


@pytest.mark.parametrize("strategy", [None, mirrored()], ids=["default", "mirrored"])
@pytest.mark.parametrize(
    ("loss_of", "is_sum"),
    [
        (of_keras("sum"), True),
        (of_keras("sum_over_batch_size"), False),
        (of_v1(v1.losses.Reduction.SUM), True),
        (of_v1(v1.losses.Reduction.MEAN), False),
    ],
    ids=["sum of keras", "mean of keras", "sum of v1", "mean of v1"],
)
def test_losses_that_are_sums_are_averaged_over_steps(
    loss_of: Any, is_sum: bool, strategy: Any, tmp_path: Path
) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        weight = v1.get_variable("weight", [], tf.float64, initializer=v1.constant_initializer(1.0))
        loss = loss_of(features * weight, labels)
        return EstimatorSpec(mode, loss=loss, optimizer=v1.train.GradientDescentOptimizer(1e-5))

    losses = train(tmp_path, model_fn, train_distribute=strategy)
    found = {step: values["loss"] for step, values in series(tmp_path, "loss").items()}
    assert found == pytest.approx(means(losses.of_steps, weighted=not is_sum), rel=1e-12)


class Killed(Exception):
    pass


class KillAt(Hook):
    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: Any, result: Any) -> None:
        if result.last_step >= self._step:
            raise Killed


@pytest.mark.parametrize("strategy", [None, mirrored()], ids=["default", "mirrored"])
def test_points_of_a_run_that_was_killed_between_two_of_them_are_those_of_an_undisturbed_one(
    strategy: Any, tmp_path: Path
) -> None:
    settings = {"train_distribute": strategy, "save_checkpoints_steps": 6, "steps_per_loop": 1}
    train(tmp_path / "whole", **settings)
    expected = series(tmp_path / "whole", "loss", "mae", "largest")
    points: list[tuple[int, dict[str, float]]] = []
    # Each checkpoint stands between two points: of step 6, of 12.
    for killed_at in (7, 13, None):
        hooks = [] if killed_at is None else [KillAt(killed_at)]
        with contextlib.suppress(Killed):
            train(tmp_path / "killed", hooks=hooks, **settings)
        points += series(tmp_path / "killed", "loss", "mae", "largest").items()
        (tmp_path / "killed" / "events.jsonl").unlink()
    assert [step for step, _ in points] == [1, 4, 8, 12, 16]
    assert dict(points) == expected


def test_another_cadence_after_a_resume_begins_anew(tmp_path: Path) -> None:
    first = train(tmp_path, max_steps=6)
    second = train(tmp_path, log_step_count_steps=3, max_steps=9)
    assert len(first.of_steps) == 6
    found = series(tmp_path, "loss")
    assert found[9]["loss"] == pytest.approx(np.average(second.of_steps, weights=[4, 4, 4]), rel=1e-12)


def compiled(features: Any, labels: Any, mode: str) -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones", name="line")])
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.RootMeanSquaredError(name="rmse")])
    return model


@pytest.mark.parametrize("strategy", [None, mirrored()], ids=["default", "mirrored"])
def test_metrics_of_a_compiled_model_are_reported_in_training(strategy: Any, tmp_path: Path) -> None:
    x = np.linspace(0, 1, 24, dtype=np.float32)[:, None]

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4 if strategy is None else 2)

    journal = journal_of(tmp_path / "events.jsonl")
    config = RunConfig(log_step_count_steps=3, train_distribute=strategy)
    Estimator(compiled, tmp_path, config, journal=journal).train(input_fn)
    journal.close()
    model = compiled(None, None, ModeKeys.TRAIN)
    history = model.fit(x, 2 * x, batch_size=4, shuffle=False, verbose=0).history
    found = dict(metrics_of_steps(tmp_path / "events.jsonl"))
    assert list(found) == [1, 3, 6]
    for name in ("mae", "rmse"):
        assert found[6][f"train/{name}"] == pytest.approx(history[name][0], rel=1e-5)
