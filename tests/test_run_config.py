"""RunConfig: what it checks, and what it tells of the cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from runner import RunConfig
from runner.distribute.cluster import Cluster
from tests.support.line import mirrored
from tests.support.messages import Messages

TASKS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def test_defaults_are_those_of_a_single_process() -> None:
    config = RunConfig()
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 0, True)
    assert (config.num_worker_replicas, config.num_ps_replicas, config.num_replicas_in_sync) == (1, 0, 1)
    assert config.cluster_spec == {} and config.global_id_in_cluster == 0
    assert (config.save_summary_steps, config.log_step_count_steps, config.keep_checkpoint_max) == (100, 100, 5)


def test_model_dir_may_be_a_path(tmp_path: Path) -> None:
    assert RunConfig(model_dir=tmp_path).model_dir == str(tmp_path)  # type: ignore[arg-type]


def test_empty_model_dir_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        RunConfig(model_dir="")


def test_checkpoints_are_saved_every_ten_minutes_unless_said_otherwise() -> None:
    assert (RunConfig().save_checkpoints_steps, RunConfig().save_checkpoints_secs) == (None, 600)
    by_steps = RunConfig(save_checkpoints_steps=7)
    assert (by_steps.save_checkpoints_steps, by_steps.save_checkpoints_secs) == (7, None)
    off = RunConfig(save_checkpoints_secs=None)
    assert (off.save_checkpoints_steps, off.save_checkpoints_secs) == (None, None)


def test_both_save_cadences_are_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=2)


def test_setting_one_save_cadence_turns_the_other_off() -> None:
    by_secs = RunConfig(save_checkpoints_steps=7).replace(save_checkpoints_secs=30)
    assert (by_secs.save_checkpoints_steps, by_secs.save_checkpoints_secs) == (None, 30)
    by_steps = by_secs.replace(save_checkpoints_steps=3)
    assert (by_steps.save_checkpoints_steps, by_steps.save_checkpoints_secs) == (3, None)
    assert by_steps.replace(keep_checkpoint_max=1).save_checkpoints_steps == 3
    off = by_steps.replace(save_checkpoints_steps=None)
    assert (off.save_checkpoints_steps, off.save_checkpoints_secs) == (None, None)


@pytest.mark.parametrize("name", ["save_summary_steps", "log_step_count_steps", "keep_checkpoint_max"])
def test_zero_and_none_turn_a_number_off_and_negative_ones_are_refused(name: str, messages: Messages) -> None:
    assert getattr(RunConfig(**{name: 0}), name) == 0  # type: ignore[arg-type]
    assert getattr(RunConfig(**{name: None}), name) is None  # type: ignore[arg-type]
    with messages.raised(ValueError):
        RunConfig(**{name: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["save_checkpoints_steps", "save_checkpoints_secs", "steps_per_loop"])
def test_cadences_and_loops_must_be_positive(name: str, messages: Messages) -> None:
    with messages.raised(ValueError):
        RunConfig(**{name: 0})  # type: ignore[arg-type]


def test_unknown_nan_policy_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        RunConfig(nan="skip")


def test_it_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().model_dir = "elsewhere"  # type: ignore[misc]


def test_seed_has_two_names() -> None:
    assert RunConfig(tf_random_seed=3).seed == RunConfig(tf_random_seed=3).tf_random_seed == 3


@pytest.mark.parametrize(
    ("task_type", "index", "is_chief", "global_id"),
    [("chief", 0, True, 0), ("worker", 0, False, 1), ("worker", 1, False, 2)],
)
def test_tells_who_this_process_is(task_type: str, index: int, is_chief: bool, global_id: int) -> None:
    config = RunConfig(cluster=Cluster(task_type, index, TASKS))
    assert (config.task_type, config.task_id, config.is_chief) == (task_type, index, is_chief)
    assert config.global_id_in_cluster == global_id
    assert (config.num_worker_replicas, config.num_ps_replicas) == (3, 1)
    assert config.cluster_spec == TASKS


def test_first_worker_is_chief_where_there_is_none() -> None:
    tasks = {"worker": ["b:1", "c:1"]}
    chiefs: list[Any] = [RunConfig(cluster=Cluster("worker", index, tasks)).is_chief for index in (0, 1)]
    assert chiefs == [True, False]


@pytest.mark.parametrize("task_type", ["ps", "evaluator"])
def test_ps_and_evaluator_are_never_chief(task_type: str) -> None:
    assert not RunConfig(cluster=Cluster(task_type, 0, TASKS)).is_chief


def test_replicas_are_those_of_the_training_strategy() -> None:
    assert RunConfig(train_distribute=mirrored()).num_replicas_in_sync == 2
    assert RunConfig(eval_distribute=mirrored()).num_replicas_in_sync == 1


def test_without_a_seed_a_new_one_is_drawn() -> None:
    assert RunConfig().seed == 1
    drawn = {RunConfig(tf_random_seed=None).seed for _ in range(3)}
    assert len(drawn) == 3 and all(0 <= seed < 2**31 for seed in drawn)
