"""Which checkpoints stay: the newest, the best by a metric, one in so many hours; across restarts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from runner.checkpoint import retention
from runner.checkpoint.retention import Keep
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter
from runner.checkpoint_files.layout import read_state
from runner.config.schema import ConfigError
from runner.run_config import KeepBest
from runner.system.files import RUNNER_FILES
from tests.config.test_config import parsed
from tests.support.checkpoints import list_checkpoints
from tests.support.jobs import run
from tests.support.line import line, points
from tests.support.messages import Messages


def save(model_dir: Path, keep: Keep, step: int, hours: float = 0.0, **metrics: float) -> None:
    """A checkpoint of `step` at so many hours, and what its evaluation found."""
    writer = CheckpointWriter(model_dir, keep, clock=lambda: 1e9 + hours * 3600)
    path = writer.save(Snapshot(step, {"w": np.float32(step)}))
    if metrics:
        retention.note_metrics(path, {f"eval/{name}": value for name, value in metrics.items()})


def steps(model_dir: Path) -> list[int]:
    return [info.step for info in list_checkpoints(model_dir)]


# --- the best ---------------------------------------------------------------------------------------------------


def test_the_best_are_never_removed_by_keep_max(tmp_path: Path) -> None:
    keep = Keep(2, KeepBest("eval/accuracy", max=2))
    for step, accuracy in enumerate([0.1, 0.9, 0.8, 0.3, 0.4, 0.2], start=1):
        save(tmp_path, keep, step, hours=step, accuracy=accuracy)
    assert steps(tmp_path) == [2, 3, 5, 6]
    assert read_state(tmp_path).names == tuple(f"model.ckpt-{step}" for step in (2, 3, 5, 6))
    assert retention.best_of(tmp_path, KeepBest("eval/accuracy")) == (2, 0.9)
    assert retention.best_of(tmp_path, KeepBest("eval/auc")) is None
    assert retention.best_of(tmp_path, KeepBest(None)) is None
    save(tmp_path, keep, 7, hours=7, accuracy=0.85)
    save(tmp_path, keep, 8, hours=8)
    assert steps(tmp_path) == [2, 7, 8], "3 is beaten, and goes with all its files"
    assert not list(tmp_path.rglob("model.ckpt-3.*"))


def test_the_newest_are_those_that_were_saved_last_also_when_the_clock_jumps_back(tmp_path: Path) -> None:
    for step, hours in enumerate([100, 101, 1, 2, 3], start=1):
        save(tmp_path, Keep(2), step, hours)
        assert steps(tmp_path) == [one for one in (step - 1, step) if one]
    save(tmp_path, Keep(2), 2, hours=0)  # after a rollback
    assert read_state(tmp_path).names == ("model.ckpt-5", "model.ckpt-2")


@pytest.mark.parametrize(("mode", "metric", "best"), [
    (None, "loss", 2), (None, "accuracy", 1), ("max", "loss", 1), ("min", "accuracy", 2),
])  # fmt: skip
def test_mode_says_what_is_best_else_the_name_does(tmp_path: Path, mode: str | None, metric: str, best: int) -> None:
    keep = Keep(1, KeepBest(f"eval/{metric}", mode))
    for step, value in enumerate([0.9, 0.1, 0.5, 0.5], start=1):
        save(tmp_path, keep, step, hours=step, **{metric: value})
    assert steps(tmp_path) == [best, 4]


def test_nan_is_never_the_best_and_of_equals_the_older_is(tmp_path: Path) -> None:
    keep = Keep(1, KeepBest("eval/loss"))
    for step, loss in enumerate([float("nan"), 0.5, 0.5, 0.7], start=1):
        save(tmp_path, keep, step, hours=step, loss=loss)
    assert steps(tmp_path) == [2, 4]


def test_what_was_best_survives_restarts(tmp_path: Path) -> None:
    config = RunConfig(
        save_checkpoints_steps=1, keep_checkpoint_max=1, keep_best=KeepBest("eval/mae", "max"), steps_per_loop=1
    )
    for max_steps in (3, 6):  # the error shrinks, so the largest is that of the first model
        estimator = Estimator(line, tmp_path, config)
        train_and_evaluate(estimator, TrainSpec(points(repeat=True), max_steps), EvalSpec(points()))
    assert steps(tmp_path) == [1, 6]
    noted = json.loads((tmp_path / RUNNER_FILES / "model.ckpt-1.metrics.json").read_text())
    assert sorted(noted) == ["eval/loss", "eval/mae"]


def test_a_step_that_is_saved_again_has_not_been_evaluated(tmp_path: Path) -> None:
    keep = Keep(1, KeepBest("eval/loss"))
    save(tmp_path, keep, 1, hours=1, loss=0.1)
    save(tmp_path, keep, 1, hours=2)
    assert retention.metrics_of(tmp_path / "model.ckpt-1") == {}


def test_the_rewrite_at_the_end_of_the_data_keeps_what_was_found(tmp_path: Path) -> None:
    config = RunConfig(save_checkpoints_steps=2, keep_best=KeepBest("eval/loss"), steps_per_loop=2)
    spec = EvalSpec(points())
    train_and_evaluate(Estimator(line, tmp_path, config), TrainSpec(points(num_examples=8, batch_size=2)), spec)
    assert "eval/loss" in retention.metrics_of(tmp_path / "model.ckpt-4")


def test_a_metric_that_the_evaluation_does_not_have_is_named(tmp_path: Path, messages: Messages) -> None:
    config = RunConfig(keep_best=KeepBest("eval/accuracy"))
    with messages.raised(ValueError):
        train_and_evaluate(Estimator(line, tmp_path, config), TrainSpec(points(), 2), EvalSpec(points()))
    assert steps(tmp_path) == []  # before the first step: nobody trains for an hour to read of it


@pytest.mark.parametrize(
    "settings",
    [{"metric": "accuracy"}, {"metric": "eval/loss", "mode": "best"}, {"metric": "eval/loss", "max": 0}],
    ids=str,
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        KeepBest(**settings)


@pytest.mark.parametrize("setting", ["metric=accuracy", "metric=eval_x/accuracy", "mode=max", "max=2"])
def test_a_config_that_keeps_nothing_is_refused(setting: str, messages: Messages) -> None:
    with messages.raised(ConfigError):
        parsed(f"checkpoint.keep_best.{setting}")


# --- one in so many hours ---------------------------------------------------------------------------------------


def test_one_in_so_many_hours_stays_for_good(tmp_path: Path) -> None:
    keep = Keep(1, every_hours=2)
    for step in range(12):
        save(tmp_path, keep, step, hours=step * 0.75)
    assert steps(tmp_path) == [3, 6, 9, 11]
    save(tmp_path, Keep(1, every_hours=2), 12, hours=9.0)  # after a restart
    assert steps(tmp_path) == [3, 6, 9, 11, 12]


def test_one_an_hour_stays_also_where_saves_do_not_divide_hours(tmp_path: Path) -> None:
    """What a Saver of TensorFlow 1 keeps of saves at every 40 minutes."""
    for step in range(11):
        save(tmp_path, Keep(1, every_hours=1), step, hours=step * 40 / 60)
    assert steps(tmp_path) == [2, 4, 5, 7, 8, 10]


def test_nothing_stays_for_hours_that_have_not_passed_since_the_first_save(tmp_path: Path) -> None:
    for step in range(8):  # as tf.estimator's default: five, and one in 10,000 hours
        save(tmp_path, Keep(5, every_hours=10000), step, hours=step)
    assert steps(tmp_path) == [3, 4, 5, 6, 7]
    assert [*retention.why_kept(tmp_path, Keep(5, every_hours=10000)).values()] == [["last 5"]] * 5


def test_hours_count_from_the_first_save_when_it_is_gone_and_the_run_is_started_again(tmp_path: Path) -> None:
    for step, hours in enumerate([0.0, 1.5, 2.5]):
        save(tmp_path, Keep(1, every_hours=2), step, hours)  # a process each
    assert tf.train.get_checkpoint_state(str(tmp_path)).last_preserved_timestamp == 1e9
    save(tmp_path, Keep(1, every_hours=2), 3, hours=3.0)
    assert steps(tmp_path) == [2, 3]
    assert retention.why_kept(tmp_path, Keep(1, every_hours=2))["model.ckpt-2"] == ["every 2 h"]


def test_where_nobody_has_noted_the_first_save_hours_count_from_the_oldest_checkpoint(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, Keep(None), step, hours=step)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-2"\n')  # as a Saver writes it
    for step in range(3, 5):
        save(tmp_path, Keep(1, every_hours=2), step, hours=step)
    assert steps(tmp_path) == [3, 4]


# --- in a run ---------------------------------------------------------------------------------------------------


def test_inspect_says_why_each_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keeping = (
        "checkpoint.save_steps=1", "checkpoint.keep_max=2", "checkpoint.keep_best.metric=eval/mae",
        "checkpoint.keep_best.mode=max", "checkpoint.keep_every_hours=1",
    )  # fmt: skip
    assert run(tmp_path, *keeping) == 0
    capsys.readouterr()
    assert run(tmp_path, "command=inspect", *keeping) == 0
    table = capsys.readouterr().out.partition("checkpoints\n")[2].splitlines()[1:]
    marks = {row.split()[0]: row.split("  ")[-1].strip() for row in table[: table.index("")]}
    assert marks == {
        "1": "best eval/mae", "3": "last 2", "4": "newest, last 2",
    }  # fmt: skip
    assert os.path.exists(tmp_path / "run" / RUNNER_FILES / "model.ckpt-1.metrics.json")
