"""tf.estimator's RunConfig: its arguments, and the place in a cluster that TF_CONFIG gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import runner
from runner.classic.estimator import Estimator
from runner.classic.run_config import RunConfig
from tests.support.messages import Messages

CLUSTER = {"chief": ["host0:9"], "ps": ["host1:1", "host2:2"], "worker": ["host3:3", "host4:4", "host5:5"]}


def config(tree: Any, **arguments: Any) -> RunConfig:
    return RunConfig(tf_config=json.dumps(tree), **arguments)


def task(kind: str, index: int, cluster: Any = CLUSTER) -> dict[str, Any]:
    return {"cluster": cluster, "task": {"type": kind, "index": index}}


def test_defaults_are_those_of_2_15() -> None:
    plain = RunConfig()
    assert plain.model_dir is None
    assert (plain.save_summary_steps, plain.log_step_count_steps, plain.keep_checkpoint_max) == (100, 100, 5)
    assert (plain.save_checkpoints_secs, plain.save_checkpoints_steps) == (600, None)
    assert plain.keep_checkpoint_every_n_hours == 10000
    assert plain.session_creation_timeout_secs == 7200  # type: ignore[attr-defined]
    assert plain.session_config is None and plain.train_distribute is None
    assert isinstance(plain, runner.RunConfig)


def test_arguments_come_in_their_order() -> None:
    given = RunConfig("here", 7, 10, 20, None, None, 3, 2.0, 50)
    assert (given.model_dir, given.tf_random_seed, given.save_summary_steps) == ("here", 7, 10)
    assert (given.save_checkpoints_steps, given.save_checkpoints_secs, given.keep_checkpoint_max) == (20, None, 3)
    assert (given.keep_checkpoint_every_n_hours, given.log_step_count_steps) == (2.0, 50)


def test_what_the_engine_has_beside_them_is_given_by_name(messages: Messages) -> None:
    assert RunConfig(nan="ignore", steps_per_loop=3).steps_per_loop == 3
    with messages.raised(TypeError):
        RunConfig(steps_per_lop=3)


def test_without_a_cluster_it_is_worker_0_of_1() -> None:
    alone = config({})
    assert (alone.task_type, alone.task_id, alone.is_chief, alone.master) == ("worker", 0, True, "")
    assert (alone.num_worker_replicas, alone.num_ps_replicas, alone.global_id_in_cluster) == (1, 0, 0)
    assert not alone.cluster_spec and alone.cluster_spec.as_dict() == {}


@pytest.mark.parametrize(
    ("kind", "index", "master", "global_id"),
    [
        ("chief", 0, "grpc://host0:9", 0),
        ("worker", 1, "grpc://host4:4", 2),
        ("ps", 1, "grpc://host2:2", 5),
    ],
)
def test_a_task_of_a_cluster_knows_its_place(kind: str, index: int, master: str, global_id: int) -> None:
    found = config(task(kind, index))
    assert (found.task_type, found.task_id, found.master, found.global_id_in_cluster) == (
        kind, index, master, global_id,
    )  # fmt: skip
    assert (found.num_worker_replicas, found.num_ps_replicas) == (4, 2)
    assert found.is_chief == (kind == "chief")
    assert found.cluster_spec == tf.train.ClusterSpec(CLUSTER)


@pytest.mark.parametrize("cluster", [CLUSTER, {**CLUSTER, "evaluator": ["host9:9"]}])
def test_an_evaluator_is_no_part_of_the_cluster_named_there_or_not(cluster: Any) -> None:
    found = config(task("evaluator", 0, cluster))
    assert (found.task_type, found.is_chief, found.master, found.global_id_in_cluster) == ("evaluator", False, "", None)
    assert (found.num_worker_replicas, found.num_ps_replicas) == (0, 0)
    assert found.cluster_spec.as_dict() == {}


@pytest.mark.parametrize(
    ("cluster", "index"), [(CLUSTER, 12), (CLUSTER, "2"), ({**CLUSTER, "evaluator": ["host9:9", "host8:8"]}, 1)]
)
@pytest.mark.parametrize("strategy", [None, object()])
def test_an_evaluator_may_have_any_number_as_launchers_give_it(cluster: Any, index: Any, strategy: Any) -> None:
    found = config(task("evaluator", index, cluster), train_distribute=strategy)
    assert (found.task_type, found.task_id) == ("evaluator", int(index))
    assert found.cluster_spec.as_dict() == {}


def test_an_evaluator_in_the_cluster_is_left_to_evaluate() -> None:
    assert config(task("chief", 0, {**CLUSTER, "evaluator": ["host9:9"]})).has_evaluator
    assert not config(task("chief", 0)).has_evaluator


def test_a_master_is_the_chief() -> None:
    cluster = {"master": ["host0:9"], "worker": ["host3:3"]}
    master, worker = config(task("master", 0, cluster)), config(task("worker", 0, cluster))
    assert (master.task_type, master.is_chief, master.num_worker_replicas) == ("master", True, 2)
    assert (worker.task_type, worker.is_chief, worker.global_id_in_cluster) == ("worker", False, 1)


def test_one_node_alone_needs_no_address() -> None:
    assert config(task("chief", 0, {"chief": ["host0:9"]})).master == ""


def test_a_strategy_makes_worker_0_the_chief_where_there_is_none() -> None:
    cluster = {"worker": ["host3:3", "host4:4"]}
    first, second = (config(task("worker", i, cluster), train_distribute=object()) for i in (0, 1))
    assert (first.is_chief, second.is_chief, second.global_id_in_cluster) == (True, False, 1)
    assert first.seed == second.seed  # drawn for each, they would begin differently


GUIDE = {"worker": ["host1:1", "host2:2", "host3:3"], "ps": ["host4:4", "host5:5"]}
"""The cluster of TensorFlow's guide on distributed training."""


def test_worker_0_coordinates_parameter_servers_where_there_is_no_chief() -> None:
    first, second, server = (config(task(*place, GUIDE)) for place in (("worker", 0), ("worker", 1), ("ps", 1)))
    assert [(one.task_type, one.task_id, one.is_chief) for one in (first, second, server)] == [
        ("chief", 0, True), ("worker", 0, False), ("ps", 1, False),
    ]  # fmt: skip
    assert first.cluster_spec.as_dict() == {"chief": ["host1:1"], "worker": ["host2:2", "host3:3"], "ps": GUIDE["ps"]}
    assert first.cluster_spec == second.cluster_spec == server.cluster_spec
    assert first.seed == server.seed
    assert config(task("evaluator", 0, GUIDE)).task_type == "evaluator"


def test_addresses_of_sessions_and_the_service_are_passed_on() -> None:
    tree = {**task("worker", 0), "service": {"key": 1}, "session_master": "a", "eval_session_master": "b"}
    found = config(tree)
    assert (found.service, found.master, found.evaluation_master) == ({"key": 1}, "a", "")
    assert config({**tree, "task": {"type": "evaluator", "index": 0}}).evaluation_master == "b"


@pytest.mark.parametrize("tree", [
    task("worker", 0, {"worker": ["a:1"]}),
    task("worker", 0, {"worker": ["a:1"], "ps": ["b:2"]}),
    task("chief", 0, {"chief": ["a:1", "b:2"]}),
    {"cluster": CLUSTER},
    {"cluster": CLUSTER, "task": {"type": "worker"}},
    {"cluster": CLUSTER, "task": {"index": 0}},
    task("worker", -1),
    task("worker", 3),
    task("ps", 0, {"chief": ["a:1"]}),
    task("boss", 0),
    {"task": {"type": "worker", "index": 1}},
    {"task": {"type": "chief", "index": 0}},
    task("chief", 0, {"chief": ["a:1"], "master": ["b:2"]}),
], ids=[
    "no chief", "no second worker", "two chiefs", "no task", "no index", "no type", "a negative index",
    "no such worker", "no such servers", "an unknown type", "worker 1 of no cluster", "chief of no cluster",
    "a chief and a master",
])  # fmt: skip
def test_a_place_that_cannot_be_is_refused(tree: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        config(tree)


def test_a_service_that_is_no_object_is_refused(messages: Messages) -> None:
    with messages.raised(TypeError):
        config({"service": 3})


def test_model_dir_comes_from_the_argument_or_from_tf_config(tmp_path: Path, messages: Messages) -> None:
    assert config({"model_dir": "there"}).model_dir == "there"
    assert config({"model_dir": "there"}, model_dir="there").model_dir == "there"
    assert config({}, model_dir=tmp_path).model_dir == str(tmp_path)
    with messages.raised(ValueError):
        config({"model_dir": "there"}, model_dir="here")
    for wrong in ({"model_dir": ""}, {}):
        with messages.raised(ValueError):
            config(wrong, **({} if wrong else {"model_dir": ""}))


def test_one_cadence_of_checkpoints_turns_the_other_off(messages: Messages) -> None:
    by_steps = RunConfig(save_checkpoints_steps=100)
    assert (by_steps.save_checkpoints_steps, by_steps.save_checkpoints_secs) == (100, None)
    assert by_steps.replace(save_checkpoints_secs=7).save_checkpoints_steps is None
    neither = RunConfig(save_checkpoints_steps=None, save_checkpoints_secs=None)
    assert (neither.save_checkpoints_steps, neither.save_checkpoints_secs) == (None, None)
    with messages.raised(ValueError):
        RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)
    with messages.raised(ValueError):
        RunConfig().replace(save_checkpoints_steps=1, save_checkpoints_secs=1)


def test_a_seed_that_was_drawn_stays_and_is_not_shown() -> None:
    drawn = RunConfig()
    assert drawn.replace(model_dir="x").seed == drawn.seed != RunConfig().seed
    assert drawn.replace(model_dir="x").tf_random_seed is drawn.tf_random_seed is None
    assert drawn.replace(tf_random_seed=3).seed == RunConfig(tf_random_seed=3).seed == 3
    assert drawn.replace(tf_random_seed=None).seed != drawn.seed
    assert RunConfig(tf_random_seed=-5).seed >= 0


def test_evaluation_is_on_one_device_unless_it_has_a_strategy() -> None:
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    assert RunConfig(train_distribute=strategy).evaluation_strategy is None
    assert RunConfig(eval_distribute=strategy).evaluation_strategy is strategy
    assert runner.RunConfig(train_distribute=strategy).evaluation_strategy is strategy
    assert runner.RunConfig(train_distribute=strategy, eval_distribute="default").evaluation_strategy is None


def test_replace_keeps_the_rest_and_refuses_what_is_no_argument(messages: Messages) -> None:
    session = tf.compat.v1.ConfigProto()
    before = config(task("worker", 1), session_config=session, tf_random_seed=3)
    after = before.replace(model_dir="x", save_summary_steps=0)
    assert (after.model_dir, after.save_summary_steps, before.model_dir) == ("x", 0, None)
    assert after.session_config is session and after.tf_random_seed == 3
    assert (after.task_type, after.task_id) == ("worker", 1)
    with messages.raised(ValueError):
        before.replace(no_such=1, master="x")


def test_what_somebody_has_set_on_a_config_stays_and_so_does_its_class() -> None:
    class Mine(RunConfig):
        def __init__(self, more: int, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.more = more

    given = Mine(3, tf_random_seed=1)
    given.hparams = {"a": 1}  # type: ignore[attr-defined]
    after = given.replace(model_dir="x")
    assert (type(after), after.more, after.hparams, after.model_dir) == (Mine, 3, {"a": 1}, "x")  # type: ignore[attr-defined]
    tpu = tf.compat.v1.estimator.tpu
    config = tpu.RunConfig(tpu_config=tpu.TPUConfig(7), master="grpc://a:1")
    assert config.replace(model_dir="x").tpu_config.iterations_per_loop == 7
    assert config.replace(tpu_config=tpu.TPUConfig(8)).tpu_config.iterations_per_loop == 8
    assert config.replace(model_dir="x").master == "grpc://a:1"


RESOLVER = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({"worker": ["a:1"]}), "grpc://m:3")


@pytest.mark.parametrize(
    ("tree", "given", "masters"),
    [
        ({}, {}, ("", "")),
        ({}, {"master": "m"}, ("m", "m")),
        ({}, {"master": "m", "evaluation_master": ""}, ("m", "")),
        ({}, {"master": "m", "evaluation_master": "e"}, ("m", "e")),
        ({}, {"cluster": RESOLVER}, ("grpc://m:3", "grpc://m:3")),
        ({"session_master": "s"}, {}, ("s", "s")),
        ({"session_master": "s", "eval_session_master": "e"}, {"master": "m"}, ("m", "e")),
        (task("evaluator", 0), {"master": "m"}, ("m", "")),
    ],
)
def test_the_config_of_tpus_has_the_masters_and_the_cluster_that_were_given(
    tree: dict[str, Any], given: dict[str, Any], masters: tuple[str, str]
) -> None:
    """TensorFlow 2.15: the same."""
    made = tf.compat.v1.estimator.tpu.RunConfig(tf_config=json.dumps(tree), **given)
    for found in (made, made.replace(model_dir="x")):
        assert (found.master, found.evaluation_master) == masters
        assert found.cluster is given.get("cluster")
    assert Estimator(lambda features: None, config=made).config.is_chief == (made.task_type != "evaluator")
    if "cluster" in given:
        assert made.cluster_spec.as_dict() == {"worker": ["a:1"]}
        with pytest.raises(ValueError):
            tf.compat.v1.estimator.tpu.RunConfig(master="m", **given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_summary_steps": -1}, {"save_checkpoints_steps": -1}, {"save_checkpoints_secs": -1},
        {"keep_checkpoint_max": -1}, {"keep_checkpoint_every_n_hours": 0}, {"log_step_count_steps": -1},
        {"tf_random_seed": 1.5}, {"session_config": {}}, {"device_fn": 3}, {"protocol": "http"},
        {"session_creation_timeout_secs": 0}, {"experimental_max_worker_delay_secs": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be_are_refused(wrong: dict[str, Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        RunConfig(**wrong)


def test_a_standalone_client_is_refused_with_what_to_do(messages: Messages) -> None:
    class Both:
        train_distribute, eval_distribute, remote_cluster = None, None, {"worker": ["a:1"]}

    with messages.raised(ValueError):
        RunConfig(experimental_distribute=Both())
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    given = type("Both", (), {"train_distribute": strategy, "eval_distribute": None, "remote_cluster": None})
    assert RunConfig(experimental_distribute=given).train_distribute is strategy
