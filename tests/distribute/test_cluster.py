"""Which cluster an environment describes: TF_CONFIG, Slurm, Kubernetes, managed jobs, in all their shapes and wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import ClusterConfig, ConfigError, StrategyConfig
from runner.distribute import managed_jobs
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.cluster_resolver import Detected, detect
from runner.distribute.managed_jobs import folders
from runner.distribute.slurm import expand_nodes
from runner.distribute.tf_config import read_tf_config
from tests.support.messages import Messages

A, B, C, D = (f"host{number}:2222" for number in range(4))


def found(env: Mapping[str, str], strategy: str = "multi_worker", **settings: Any) -> Detected:
    return detect(env, ClusterConfig(**settings), StrategyConfig(strategy))


def refused(messages: Messages, env: Mapping[str, str], strategy: str = "multi_worker", **settings: Any) -> str:
    with messages.raised(ConfigError, hide="(?<=not JSON: ).*?(?= at character)") as raised:
        found(env, strategy, **settings)
    return str(raised.value)


def tf_config(cluster: Any, task: Any = None, **more: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, **({} if task is None else {"task": task}), **more})}


def task(task_type: str, index: Any = 0) -> dict[str, Any]:
    return {"type": task_type, "index": index}


CHIEF_AND_TWO = {"chief": [A], "worker": [B, C]}
NORMAL = {"chief": (A,), "worker": (B, C)}


@pytest.mark.parametrize(
    ("cluster", "given", "place"),
    [
        (CHIEF_AND_TWO, task("chief"), ("chief", 0)),
        (CHIEF_AND_TWO, task("worker", 1), ("worker", 1)),
        (CHIEF_AND_TWO, task("worker", "1"), ("worker", 1)),  # the index as text
        (CHIEF_AND_TWO, {"type": "chief"}, ("chief", 0)),  # no index, and only one of the type
        (CHIEF_AND_TWO, task("evaluator"), ("evaluator", 0)),  # in `task` alone, as in TensorFlow's examples
        ({**CHIEF_AND_TWO, "evaluator": [D]}, task("evaluator"), ("evaluator", 0)),
        ({**CHIEF_AND_TWO, "evaluator": [D]}, task("worker"), ("worker", 0)),
        ({"master": [A], "worker": [B, C]}, task("master"), ("chief", 0)),  # of TensorFlow 1
        ({"master": [A], "worker": [B, C]}, task("worker", 1), ("worker", 1)),
        ({"worker": [A, B, C]}, task("worker", 0), ("chief", 0)),  # worker 0 is the chief
        ({"worker": [A, B, C]}, task("worker", 2), ("worker", 1)),
        ({"worker": [A, B, C]}, task("evaluator"), ("evaluator", 0)),
        ({"worker": {"2": C, "0": A, "1": B}}, task("worker", 1), ("worker", 0)),  # addresses by index
        ({"chief": {"0": A}, "worker": {"0": B, "1": C}, "ps": []}, task("worker", 1), ("worker", 1)),
    ],
)
def test_tf_config_in_every_shape_means_the_same_cluster(
    cluster: dict[str, Any], given: dict[str, Any], place: tuple[str, int]
) -> None:
    detected = found(tf_config(cluster, given))
    assert (detected.cluster.task_type, detected.cluster.task_index) == place
    assert {name: tuple(addresses) for name, addresses in detected.cluster.tasks.items()} == NORMAL
    assert detected.source == "tf_config"
    assert detected.has_evaluator is (given["type"] == "evaluator" or "evaluator" in cluster)
    assert read_tf_config(detected.cluster.tf_config).tf_config == detected.cluster.tf_config


def test_the_tf_config_of_a_kubeflow_job_is_read() -> None:
    hosts = {name: [f"job-{name}-{index}.ns.svc:2222" for index in range(2)] for name in ("worker", "ps")}
    cluster = {"chief": ["job-chief-0.ns.svc:2222"], **hosts}
    env = tf_config(cluster, task("ps", 1), environment="cloud")
    assert found(env, "parameter_server").cluster == Cluster("ps", 1, {k: tuple(v) for k, v in cluster.items()})


@pytest.mark.parametrize("addresses", ["[::1]:2222", "10.0.0.1:1", "job-worker-0.ns.svc.cluster.local:65535"])
def test_names_and_addresses_of_both_families_are_addresses(addresses: str) -> None:
    assert found(tf_config({"chief": [addresses]}, task("chief"))).cluster.tasks == {"chief": (addresses,)}


def test_a_cluster_of_one_task_is_that_task() -> None:
    for cluster, given in (({"worker": [A]}, task("worker")), ({"chief": [A]}, task("chief"))):
        assert found(tf_config(cluster, given)).cluster == Cluster("chief", 0, {"chief": (A,)})
        assert found(tf_config(cluster, given), "mirrored").cluster == ALONE


@pytest.mark.parametrize(
    "text", ["", "  ", "{}", '{"environment": "cloud"}', '{"cluster": {}, "task": {"type": "worker", "index": 0}}']
)
def test_a_tf_config_without_a_cluster_is_passed_over(text: str) -> None:
    detected = found({"TF_CONFIG": text})
    assert (detected.source, detected.cluster) == ("local", ALONE)


def test_an_evaluator_may_stand_beside_a_single_process() -> None:
    env = tf_config({"chief": [A]}, task("evaluator"))
    assert found(env, "mirrored").cluster == Cluster("evaluator", 0)
    assert (
        found({"TF_CONFIG": '{"task": {"type": "evaluator", "index": 0}}'}, "mirrored").cluster.task_type == "evaluator"
    )
    assert found(tf_config({"chief": [A], "evaluator": [B]}, task("chief")), "mirrored").has_evaluator


def test_white_space_before_a_tf_config_does_not_shift_the_place_of_a_mistake() -> None:
    with pytest.raises(ConfigError) as raised:
        found({"TF_CONFIG": "\n\n   {'cluster': {}}"})
    assert "at character 7" in str(raised.value) and "{>>>'cluster': {}} (JSON" in str(raised.value)


OF_THREE = {"cluster": CHIEF_AND_TWO}
BAD_TF_CONFIGS = [
    '{"cluster": {"worker": ["a:1" "b:1"]}}',
    "{'cluster': {}}",
    "tf_config.json",
    "[]",
    {"cluster": ["a:1"]},
    {"cluster": {"worker": "a:1"}},
    {"cluster": {"worker": {"x": "a:1"}}},
    {"cluster": {"worker": {"1": A, "3": B}}},
    {"cluster": {"wrker": [A]}},
    {"cluster": {"master": [A], "chief": [B]}},
    {"cluster": {"chief": [A, B]}},
    {"cluster": {"evaluator": [A, B]}},
    {"cluster": {"worker": ["host"]}},
    {"cluster": {"worker": [A, "h:port"]}},
    {"cluster": {"worker": ["h:0"]}},
    {"cluster": {"worker": ["h:65536"]}},
    {"cluster": {"worker": [":2222"]}},
    {"cluster": {"worker": ["::1:2222"]}},
    {"cluster": {"worker": ["grpc://h:2222"]}},
    {"cluster": {"worker": [" h:2222"]}},
    {"cluster": {"worker": None}},
    {"cluster": {"worker": [2222]}},
    {"cluster": {"chief": [A], "worker": [B, A]}},
    {**OF_THREE},
    {**OF_THREE, "task": {}},
    {**OF_THREE, "task": {"index": 1}},
    {**OF_THREE, "task": "worker"},
    {**OF_THREE, "task": task("wroker")},
    {**OF_THREE, "task": task("worker", 2)},
    {**OF_THREE, "task": task("worker", -1)},
    {**OF_THREE, "task": task("worker", 1.5)},
    {**OF_THREE, "task": task("worker", True)},
    {**OF_THREE, "task": {"type": "worker"}},
    {**OF_THREE, "task": task("ps")},
    {"task": task("worker", 1)},
    {**OF_THREE, "task": task("evaluator", 1)},
    {"sparseCluster": {"worker": {"1": A}, "ps": [B]}, "task": task("worker", 1)},  # a TFJob's
]


@pytest.mark.parametrize("given", BAD_TF_CONFIGS, ids=str)
def test_a_wrong_tf_config_is_refused_with_the_part_that_is_wrong(given: Any, messages: Messages) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    message = refused(messages, {"TF_CONFIG": text})
    assert message.startswith("TF_CONFIG") and "\n" not in message


def test_worker_0_coordinates_parameter_servers_where_tf_config_names_no_chief(messages: Messages) -> None:
    """The cluster of TensorFlow's guide on distributed training."""
    tasks = {"chief": [A], "worker": [B], "ps": [C]}
    for given, place in ((("worker", 0), ("chief", 0)), (("worker", 1), ("worker", 0)), (("ps", 0), ("ps", 0))):
        seen = found(tf_config({"worker": [A, B], "ps": [C]}, task(*given)), "parameter_server")
        assert (seen.cluster.task_type, seen.cluster.task_index) == place
        assert {kind: list(listed) for kind, listed in seen.cluster.tasks.items()} == tasks
        messages.same("why", seen.why)


def test_a_strategy_that_cannot_use_the_tasks_of_tf_config_says_why(messages: Messages) -> None:
    with_ps = {**CHIEF_AND_TWO, "ps": [D]}
    refused(messages, tf_config(with_ps, task("chief")))
    refused(messages, tf_config({"worker": [A], "ps": [C]}, task("worker")), "parameter_server")
    refused(messages, tf_config(CHIEF_AND_TWO, task("worker")), "parameter_server")
    refused(messages, tf_config(CHIEF_AND_TWO, task("worker")), "mirrored")
    refused(messages, tf_config(with_ps, task("worker")), "default")
    refused(messages, {"TF_CONFIG": "{}"}, resolver="tf_config")
    refused(messages, {}, resolver="tf_config")


def slurm(rank: int, count: int, nodes: str = "node[1-2]", **more: str) -> dict[str, str]:
    step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NODELIST": nodes}
    return {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", **step, **more}


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("a", ["a"]),
        ("a,b-1,c.d", ["a", "b-1", "c.d"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_slurms_short_form_of_node_names_is_expanded(nodelist: str, nodes: list[str]) -> None:
    assert expand_nodes(nodelist) == nodes


@pytest.mark.parametrize("nodelist", ["n[1-", "n[]", "n[3-1]", "a,,b", "n[1-2-3]", "n]1[", "n[a-b]"])
def test_a_broken_list_of_nodes_is_refused(nodelist: str, messages: Messages) -> None:
    with messages.raised(ConfigError):
        expand_nodes(nodelist)


@pytest.mark.parametrize("nodelist", ["node[1-99999999]", "n[1-5000],m[1-5001]", "r[1-9999]n[1-9999]"])
def test_a_list_of_more_nodes_than_anybody_has_is_refused_before_it_is_written_out(
    nodelist: str, messages: Messages
) -> None:
    with messages.raised(ConfigError):
        expand_nodes(nodelist)


@pytest.mark.parametrize(
    ("nodes", "per_node"), [("n[1-4]", "1(x4)"), ("n[1-2]", "3,1"), ("n[1-3]", "1,2(x2)"), ("n1", "6")]
)
@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_all_tasks_of_a_slurm_step_agree_on_one_address_for_each(nodes: str, per_node: str, distribution: str) -> None:
    count = {"1(x4)": 4, "3,1": 4, "1,2(x2)": 5, "6": 6}[per_node]
    more = {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_DISTRIBUTION": distribution}
    all_found = [found(slurm(rank, count, nodes, **more)) for rank in range(count)]
    (tasks,) = {json.dumps(dict(each.cluster.tasks)) for each in all_found}
    addresses = [address for listed in json.loads(tasks).values() for address in listed]
    assert len(set(addresses)) == count
    own = [each.cluster.tasks[each.cluster.task_type][each.cluster.task_index] for each in all_found]
    assert own == addresses  # the chief has rank 0, the workers follow
    assert [each.cluster.name for each in all_found] == ["chief", *(f"worker:{index}" for index in range(count - 1))]


def test_slurm_tasks_of_a_node_listen_on_neighbouring_ports_of_their_job(messages: Messages) -> None:
    env = slurm(0, 4, SLURM_STEP_TASKS_PER_NODE="2(x2)")
    tasks = found(env, port=5000).cluster.tasks
    assert tasks == {"chief": ["node1:5000"], "worker": ["node1:5001", "node2:5000", "node2:5001"]}
    chosen = {
        int(found({**env, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).cluster.tasks["chief"][0][6:])
        for job in (1, 2, 3, 10**9)
        for step in (0, 1)
    }
    assert len(chosen) == 8 and min(chosen) >= 61440 and max(chosen) + 15 <= 65535
    many = [found(slurm(0, 40, "node1", SLURM_JOB_ID=str(job))).cluster.tasks["worker"][-1] for job in range(256)]
    assert max(int(address.rpartition(":")[2]) for address in many) == 65535
    refused(messages, env, port=65535)


def test_tasks_of_slurm_have_roles_by_their_number(messages: Messages) -> None:
    env = [slurm(rank, 6, SLURM_STEP_TASKS_PER_NODE="3(x2)") for rank in range(6)]
    names = [found(each, "parameter_server", num_ps=2, evaluator=True).cluster.name for each in env]
    assert names == ["chief", "ps:0", "ps:1", "worker:0", "worker:1", "evaluator"]
    names = [found(each, evaluator=True).cluster.name for each in env]
    assert names == ["chief", *(f"worker:{index}" for index in range(4)), "evaluator"]
    assert (
        found(env[5], evaluator=True).has_evaluator and "evaluator" not in found(env[5], evaluator=True).cluster.tasks
    )
    refused(messages, slurm(0, 2, "node1"), "parameter_server")


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-4]"},  # batch script
        slurm(0, 1, "n1"),  # srun --ntasks=1
        slurm(0, 1, "n1", SLURM_NTASKS="4"),  # the shell of salloc
    ],
)
def test_a_process_that_slurm_started_alone_is_no_cluster(env: dict[str, str]) -> None:
    assert found(env).source == "local"


def test_old_names_of_slurms_variables_serve_too() -> None:
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOBID": "7"}
    assert found(env).cluster.name == "worker:0"
    env = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }
    assert found(env, port=5000).cluster.tasks == {"chief": ["n1:5000"], "worker": ["n2:5000"]}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_PROCID": "0"},
        {"SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "2"},
        slurm(2, 2),
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        slurm(0, 3),
        slurm(0, 4, SLURM_STEP_TASKS_PER_NODE="2(x3)"),
        slurm(0, 4, SLURM_STEP_TASKS_PER_NODE="2(x99999999999)"),
        slurm(0, 4, SLURM_STEP_TASKS_PER_NODE="2,99999999999"),
        slurm(0, 99999999999),
        slurm(0, 4, SLURM_STEP_TASKS_PER_NODE="two"),
        slurm(0, 5, SLURM_STEP_TASKS_PER_NODE="2(x2)"),
        slurm(1, 4, SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_NODEID="1", SLURM_LOCALID="0"),
    ],
    ids=lambda env: " ".join(f"{name.removeprefix('SLURM_')}={value}" for name, value in env.items()) or "nothing",
)
def test_what_slurm_did_not_set_or_sets_in_contradiction_is_refused(env: dict[str, str], messages: Messages) -> None:
    refused(messages, env, resolver="slurm")


def test_several_slurm_tasks_do_not_each_train_the_same_single_process_by_mistake(messages: Messages) -> None:
    env = slurm(0, 2)
    refused(messages, env, "mirrored")
    assert found(env, "mirrored", resolver="local").cluster == ALONE
    assert found(slurm(1, 2), "mirrored", evaluator=True).cluster == Cluster("evaluator", 0)


def pod(name: str, **more: str) -> dict[str, str]:
    return {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": name, **more}


def job_pod(name: str) -> dict[str, str]:
    return pod(name, JOB_COMPLETION_INDEX=name.rpartition("-")[2])


def test_the_pods_of_an_indexed_job_are_a_cluster() -> None:
    all_found = [found(job_pod(f"digits-{index}"), num_workers=3, evaluator=True) for index in range(4)]
    assert [each.cluster.name for each in all_found] == ["chief", "worker:0", "worker:1", "evaluator"]
    assert [each.source for each in all_found] == ["kubernetes"] * 4
    for each in all_found:
        assert each.cluster.tasks == {
            "chief": ["digits-0.digits:2222"], "worker": ["digits-1.digits:2222", "digits-2.digits:2222"],
        }  # fmt: skip
    addresses = found(job_pod("digits-1"), num_workers=2, service="svc.ns", port=99).cluster.tasks
    assert addresses == {"chief": ["digits-0.svc.ns:99"], "worker": ["digits-1.svc.ns:99"]}


def test_pods_whose_owner_is_named_by_a_role_have_that_role() -> None:
    names = ["run-chief-0", "run-worker-0", "run-worker-1", "run-ps-0", "run-evaluator-0"]
    settings: dict[str, Any] = {"num_workers": 2, "evaluator": True, "service": "run"}
    all_found = [found(pod(name), "parameter_server", **settings) for name in names]
    assert [each.cluster.name for each in all_found] == ["chief", "worker:0", "worker:1", "ps:0", "evaluator"]
    for each in all_found:
        assert each.cluster.tasks == {
            "chief": ["run-chief-0.run:2222"],
            "worker": ["run-worker-0.run:2222", "run-worker-1.run:2222"],
            "ps": ["run-ps-0.run:2222"],
        }
    assert found(job_pod("run-worker-0"), num_workers=2).cluster.tasks["chief"] == ["run-chief-0.run:2222"]


def in_job_set(replicated_job: str, job: int, index: int, **more: str) -> dict[str, str]:
    """What the manifest of a JobSet named run sets in a pod."""
    labels = {"JOBSET_NAME": "run", "JOBSET_REPLICATED_JOB": replicated_job, "JOBSET_JOB_INDEX": str(job)}
    return {**job_pod(f"run-{replicated_job}-{job}-{index}"), **labels, **more}


def test_the_pods_of_a_replicated_job_are_a_cluster() -> None:
    numbers = {"JOBSET_PODS_PER_JOB": "2", "JOBSET_REPLICAS": "2"}
    all_found = [found(in_job_set("node", rank // 2, rank % 2, **numbers), evaluator=True) for rank in range(4)]
    assert [each.cluster.name for each in all_found] == ["chief", "worker:0", "worker:1", "evaluator"]
    for each in all_found:
        assert each.cluster.tasks == {
            "chief": ["run-node-0-0.run:2222"], "worker": ["run-node-0-1.run:2222", "run-node-1-0.run:2222"],
        }  # fmt: skip
    # One Job: the config has the number. cluster.service is the subdomain, if it is not the JobSet's name.
    one = found(in_job_set("node", 0, 2), num_workers=3, service="net", port=99)
    assert one.cluster.name == "worker:1"
    assert one.cluster.tasks["worker"] == ["run-node-0-1.net:99", "run-node-0-2.net:99"]
    assert found(in_job_set("node", 0, 0, JOBSET_PODS_PER_JOB="1")).cluster.tasks == {
        "chief": ["run-node-0-0.run:2222"]
    }


def test_replicated_jobs_that_are_named_by_a_role_have_that_role() -> None:
    names = ["chief-0", "worker-0", "worker-1", "ps-0", "evaluator-0"]
    pods = [in_job_set(name.partition("-")[0], 0, int(name[-1])) for name in names]
    all_found = [found(each, "parameter_server", num_workers=2, evaluator=True) for each in pods]
    assert [each.cluster.name for each in all_found] == ["chief", "worker:0", "worker:1", "ps:0", "evaluator"]
    for each in all_found:
        assert each.cluster.tasks == {
            "chief": ["run-chief-0-0.run:2222"],
            "worker": ["run-worker-0-0.run:2222", "run-worker-0-1.run:2222"],
            "ps": ["run-ps-0-0.run:2222"],
        }


def test_a_job_whose_own_name_ends_in_a_number_says_so_by_its_service() -> None:
    assert found(job_pod("digits-7-1"), service="digits-7").cluster.tasks == {
        "chief": ["digits-7-0.digits-7:2222"], "worker": ["digits-7-1.digits-7:2222"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (job_pod("mnist-node-0-1"), {}),
        (job_pod("mnist-ps-0-0"), {"service": "mnist"}),
        ({name: value for name, value in in_job_set("node", 0, 1).items() if name != "JOBSET_JOB_INDEX"}, {}),
        ({name: value for name, value in in_job_set("node", 0, 1).items() if name != "JOB_COMPLETION_INDEX"}, {}),
        ({**in_job_set("node", 0, 1), "HOSTNAME": "machine-7"}, {}),
        (in_job_set("node", 1, 0), {}),
        (in_job_set("worker", 1, 0), {}),
        (in_job_set("node", 0, 1, JOBSET_PODS_PER_JOB="all"), {}),
        (in_job_set("node", 0, 1, JOBSET_PODS_PER_JOB="0"), {}),
        (in_job_set("node", 0, 2, JOBSET_PODS_PER_JOB="2"), {}),
        (in_job_set("ps", 0, 0), {}),
        ({**in_job_set("node", 0, 1), "JOBSET_JOB_INDEX": "a", "HOSTNAME": "run-node-a-1"}, {}),
        ({**in_job_set("node", 0, 1), "JOB_COMPLETION_INDEX": "", "HOSTNAME": "run-node-0-"}, {}),
    ],
)
def test_a_pod_of_a_job_set_whose_place_is_not_known_is_refused(
    env: dict[str, str], settings: dict[str, Any], messages: Messages
) -> None:
    refused(messages, env, **settings)


def in_sagemaker(host: str, hosts: Sequence[str] = ("algo-1", "algo-2", "algo-3"), **more: str) -> dict[str, str]:
    """What SageMaker sets in the container of a training job."""
    job = {"TRAINING_JOB_NAME": "digits", "SM_MODEL_DIR": "/opt/ml/model"}
    return {**job, "SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host, **more}


def test_the_hosts_of_a_sagemaker_job_are_a_cluster() -> None:
    # The same on all hosts, in whatever order they are listed.
    all_found = [found(in_sagemaker(f"algo-{n}", ["algo-2", "algo-1", "algo-3"]), port=99) for n in (1, 2, 3)]
    assert [each.cluster.name for each in all_found] == ["chief", "worker:0", "worker:1"]
    for each in all_found:
        assert (each.source, each.has_others) == ("sagemaker", True)
        assert each.cluster.tasks == {"chief": ["algo-1:99"], "worker": ["algo-2:99", "algo-3:99"]}
    roles = [
        found(in_sagemaker(f"algo-{n}"), "parameter_server", num_ps=1, resolver="sagemaker").cluster.name
        for n in (1, 2, 3)
    ]
    assert roles == ["chief", "ps:0", "worker:0"]
    assert found(in_sagemaker("algo-3"), evaluator=True).cluster.name == "evaluator"
    assert found({**in_sagemaker("algo-2"), **tf_config(CHIEF_AND_TWO, task("chief"))}).source == "tf_config"


@pytest.mark.parametrize(
    "env",
    [
        in_sagemaker("algo-1", ["algo-1"]),
        {name: value for name, value in in_sagemaker("algo-2").items() if name != "TRAINING_JOB_NAME"},  # a notebook
        {"TRAINING_JOB_NAME": "of something else"},
    ],
)
def test_one_host_and_a_notebook_of_sagemaker_are_no_cluster(env: dict[str, str]) -> None:
    assert found(env).source == "local"


@pytest.mark.parametrize(
    "env, settings",
    [
        (in_sagemaker("algo-4"), {}), (in_sagemaker("algo-1", SM_HOSTS="algo-1,algo-2"), {}),
        (in_sagemaker("algo-1", SM_HOSTS="2"), {}), ({}, {"resolver": "sagemaker"}),
        (in_sagemaker("algo-1"), {"strategy": "mirrored"}),
    ],
)  # fmt: skip
def test_hosts_of_sagemaker_that_are_not_known_are_refused(
    env: dict[str, str], settings: dict[str, Any], messages: Messages
) -> None:
    refused(messages, env, **settings)


VERTEX = {"AIP_CHECKPOINT_DIR": "gs://b/job/checkpoints/", "AIP_MODEL_DIR": "gs://b/job/model/"}


@pytest.mark.parametrize(
    "env, expected",
    [
        ({**VERTEX, "CLOUD_ML_JOB_ID": "1"}, {"model_dir": "AIP_CHECKPOINT_DIR", "export.dir": "AIP_MODEL_DIR"}),
        ({**VERTEX, "CLUSTER_SPEC": "{}"}, {"model_dir": "AIP_CHECKPOINT_DIR", "export.dir": "AIP_MODEL_DIR"}),
        ({"AIP_MODEL_DIR": "/gcs/b/model", "CLUSTER_SPEC": "{}"}, {"export.dir": "AIP_MODEL_DIR"}),
        ({"CLUSTER_SPEC": "{}"}, {}),  # no baseOutputDirectory
        (VERTEX, {}),  # a notebook
        (in_sagemaker("algo-1", ["algo-1"]), {"model_dir": "SageMaker", "export.dir": "SM_MODEL_DIR"}),
        (in_sagemaker("algo-1"), {"export.dir": "SM_MODEL_DIR"}),  # each host has its own /opt/ml/checkpoints
        ({"SM_MODEL_DIR": "/opt/ml/model", "SM_HOSTS": '["algo-1"]'}, {}),  # a notebook
    ],
)
def test_a_managed_job_offers_folders_and_nothing_else_does(env: dict[str, str], expected: dict[str, str]) -> None:
    offered = folders(env)
    assert {key: source for key, (_, source) in offered.items()} == expected
    for value, source in offered.values():
        assert value == (env[source] if source in env else "/opt/ml/checkpoints")


def test_an_image_without_the_toolkit_of_sagemaker_has_the_hosts_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr(managed_jobs, "RESOURCES", str(file))
    job = {"TRAINING_JOB_NAME": "digits"}
    assert folders(job) == {} and found(job).cluster == Cluster()
    file.write_text(
        json.dumps({"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"})
    )
    assert found(job).cluster.name == "worker:0" and folders(job) == {"export.dir": ("/opt/ml/model", "SageMaker")}
    assert found({}).cluster == Cluster() and folders({}) == {}


@pytest.mark.parametrize(
    "place, tasks, expected",
    [
        (("worker", 0), {"chief": ["a:1"], "worker": ["b:1"]}, True),
        # Its config is another one, which is refused with the keys that differ.
        (("worker", 0), {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, True),
        (("worker", 0), {"chief": ["d:1"], "worker": ["b:1"]}, False),
        (("worker", 0), {"chief": ["a:1"], "worker": ["e:1"]}, False),
        (("worker", 0), {}, False),  # a message of a former version
        (("evaluator", 0), {"chief": ["a:1"], "worker": ["e:1"]}, True),
        (("evaluator", 0), {"chief": ["d:1"], "worker": ["b:1"]}, False),
    ],
)
def test_a_cluster_is_known_by_the_addresses_of_the_chief_and_of_this_place(
    place: tuple[str, int], tasks: dict[str, list[str]], expected: bool
) -> None:
    assert Cluster(*place, {"chief": ("a:1",), "worker": ("b:1",)}).is_in(tasks) == expected


def test_the_tf_config_of_vertex_gives_the_roles() -> None:
    """As Vertex AI writes it: pools 0 to 3 are chief, worker, ps and evaluator."""
    pools = {role: [f"cmle-training-workerpool{n}-1d9-0:2222"] for n, role in enumerate(("chief", "worker", "ps"))}
    given = tf_config(pools, task("worker"), environment="cloud", job='{"job_args":[]}')
    assert found({**given, "CLUSTER_SPEC": "{}"}, "parameter_server").cluster.name == "worker:0"
    one = tf_config({"chief": ["localhost:1234"]}, task("chief"), environment="cloud")
    assert found({**one, "CLUSTER_SPEC": "{}"}, "default").cluster == ALONE


@pytest.mark.parametrize(
    "env", [pod("notebook-0"), pod("web-7d4b9c-x2x7f"), pod("web-7d4b9c-24567"), {"HOSTNAME": "pc-1"}]
)
def test_a_pod_that_nobody_meant_as_a_task_starts_its_own_cluster(env: dict[str, str]) -> None:
    assert found(env).source == "local"


def test_an_indexed_job_of_single_processes_is_no_cluster() -> None:
    assert found(job_pod("digits-3"), "mirrored").cluster == ALONE


@pytest.mark.parametrize(
    ("env", "strategy"),
    [
        (job_pod("digits-2"), "multi_worker"),
        (pod("run-ps-1"), "parameter_server"),
        (pod("run-ps-0"), "multi_worker"),
        (pod("node17", JOB_COMPLETION_INDEX="0"), "multi_worker"),
        (pod("digits-1", JOB_COMPLETION_INDEX="0"), "multi_worker"),
        (pod("web-x"), "multi_worker"),
    ],
    ids=lambda given: given if isinstance(given, str) else given["HOSTNAME"],
)
def test_pods_that_do_not_go_with_the_config_are_refused(
    env: dict[str, str], strategy: str, messages: Messages
) -> None:
    refused(messages, env, strategy, resolver="kubernetes")


def test_the_first_that_the_environment_shows_counts_unless_one_is_chosen() -> None:
    by_tf_config = tf_config(CHIEF_AND_TWO, task("worker"))
    env = {**slurm(1, 2), **job_pod("digits-0"), **by_tf_config}
    assert found(env).source == "tf_config"
    assert found({name: env[name] for name in env if name != "TF_CONFIG"}).source == "slurm"
    assert [found(env, resolver=name).source for name in ("slurm", "kubernetes", "local")] == [
        "slurm", "kubernetes", "local",
    ]  # fmt: skip
    assert found({}).source == "local"


def test_why_tells_what_was_seen(messages: Messages) -> None:
    for env in (tf_config({"worker": [A, B]}, task("worker", 1)), slurm(1, 2), job_pod("digits-1")):
        messages.same("why", found(env).why)
    messages.same("why", found({}, resolver="local").why)


def test_a_pod_of_a_stateful_set_does_not_silently_train_alone(messages: Messages) -> None:
    """Its environment was emptied on the way (env -i, sudo): the name and cluster.service tell."""
    settings = ClusterConfig(service="digits")
    with messages.raised(ConfigError):
        detect({"HOSTNAME": "digits-1"}, settings, StrategyConfig("multi_worker"))
    joined = ClusterConfig(service="digits", resolver="kubernetes")
    assert detect({"HOSTNAME": "digits-1"}, joined, StrategyConfig("multi_worker")).cluster.name == "worker:0"
    laptop = detect({"HOSTNAME": "pc"}, settings, StrategyConfig("multi_worker"))
    assert laptop.source == "local"
    messages.same("why", laptop.why)
    assert detect({"HOSTNAME": "digits-1"}, settings, StrategyConfig("mirrored")).source == "local"
