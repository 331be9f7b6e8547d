"""train.nan=rollback: back to the last checkpoint, and on with the batches that follow the bad one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Every, Hook, RunConfig
from tests.support import jobs
from tests.support.journal import events_in, journal_file, journal_of, recorded
from tests.support.line import line, mirrored
from tests.support.messages import Messages
from tests.support.tiers import slow_but

NUMBERS = np.random.RandomState(0).rand(60, 2).astype(np.float32)

SAVING: dict[str, dict[str, Any]] = {"at once": {"save_checkpoints_asynchronously": False}, "asynchronous": {}}


def batches(*bad: int, without: Sequence[int] = ()) -> Callable[[], tf.data.Dataset]:
    """Sixty batches of two examples; those numbered `bad` (from 1) hold a NaN, those in `without` are left out."""

    def input_fn() -> tf.data.Dataset:
        x = NUMBERS.copy()
        x[np.array(bad, int) - 1, 1] = np.nan
        x = np.delete(x, np.array(without, int) - 1, axis=0)
        return tf.data.Dataset.from_tensor_slices((x, 2 * x))

    return input_fn


class Killer(Hook):
    """Ends the run at a step, without a checkpoint."""

    every = Every(steps=1)

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self, run: Any, step: int) -> None:
        if step == self._step and run.examples > 2 * step:  # the second time
            raise KeyboardInterrupt


def train(folder: Path, input_fn: Any, steps: int = 20, hooks: Any = (), **config: Any) -> dict[str, Any]:
    settings = RunConfig(**{"save_checkpoints_steps": 5, "nan": "rollback", **config})
    trainer = Estimator(line, folder, settings, journal=journal_of(folder))
    trainer.train(input_fn, hooks=list(hooks), max_steps=steps)
    return {name: trainer.get_variable_value(name).tolist() for name in trainer.get_variable_names()}


def rollbacks(folder: Path) -> list[tuple[int, int]]:
    lines = recorded(folder)
    return [(line["step"], line["back_to"]) for line in lines if line.get("event") == "rollback"]


@pytest.mark.parametrize("saving", slow_but(SAVING, "at once"))
@pytest.mark.parametrize("strategy", [None, mirrored()], ids=["default", "mirrored"])
def test_it_goes_on_from_the_checkpoint_with_the_batches_after_the_bad_one(
    strategy: Any, saving: str, tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    # A replica takes a batch of the function's own: of two, a step has two batches.
    bad, expected, skipped = [7, 15], [(7, 5), (13, 10)], [6, 7, 13, 14, 15]
    if strategy is not None:
        bad, expected, skipped = [13], [(7, 5)], [11, 12, 13, 14]
    with caplog.at_level(logging.WARNING, "runner"):
        found = train(tmp_path / "a", batches(*bad), train_distribute=strategy, **SAVING[saving])
    assert rollbacks(tmp_path / "a") == expected
    messages.logged(caplog)
    assert found == train(tmp_path / "b", batches(without=skipped), train_distribute=strategy)
    assert found["global_step"] == 20


def test_a_run_that_was_killed_after_it_goes_back_again(tmp_path: Path) -> None:
    expected = train(tmp_path / "a", batches(7, 15))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", batches(7, 15), hooks=[Killer(6)])
    assert train(tmp_path / "b", batches(7, 15)) == expected
    assert rollbacks(tmp_path / "b") == [(7, 5), (7, 5), (13, 10)]


def test_it_fails_after_three(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(tf.compat.v1.train.NanLossDuringTrainingError) as raised:
        train(tmp_path, batches(*range(7, 40)))
    assert "train.nan=rollback" not in str(raised.value)
    assert rollbacks(tmp_path) == [(7, 5), (6, 5), (6, 5)]


def test_a_nan_says_what_to_try_first(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(tf.compat.v1.train.NanLossDuringTrainingError):
        train(tmp_path, batches(7), nan="stop")


def test_a_nan_on_the_command_line_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert jobs.run(tmp_path, "model.fn=tests.support.line.native_line", "+model.params.learning_rate=1e30") == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "NanLossError" in line]
    messages.same("exit 1", said)


def many_layers(features: tf.Tensor, labels: tf.Tensor, mode: str) -> EstimatorSpec:
    weights = [tf.compat.v1.get_variable(f"w{number}", []) for number in range(6)]
    loss = tf.reduce_mean(tf.square(features * sum(weights) - labels))
    step = tf.compat.v1.train.get_or_create_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    return EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_the_error_names_three_of_many_variables_and_counts_the_others(tmp_path: Path, messages: Messages) -> None:
    """Of a model of 300 layers it was 20 kB of names."""
    journal = journal_file(tmp_path)
    trainer = Estimator(many_layers, tmp_path, RunConfig(steps_per_loop=1), journal=journal_of(journal))
    with messages.raised(tf.compat.v1.train.NanLossDuringTrainingError):
        trainer.train(lambda: batches(3)().batch(2), max_steps=10)
    (noted,) = [line["variables"] for line in events_in(journal, "nan")]
    assert noted == [f"w{number}" for number in range(6)]


def test_the_count_is_that_of_the_run_and_not_of_a_process(tmp_path: Path) -> None:
    # The same data in both: a checkpoint holds the batches that were read ahead.
    input_fn = batches(7, 15, 25, 26)
    train(tmp_path, input_fn, steps=15)
    assert len(rollbacks(tmp_path)) == 2
    with pytest.raises(tf.compat.v1.train.NanLossDuringTrainingError):
        train(tmp_path, input_fn, steps=30)
    assert len(rollbacks(tmp_path)) == 3


def test_a_config_may_ask_for_it(tmp_path: Path) -> None:
    assert jobs.run(tmp_path, "train.nan=rollback") == 0
