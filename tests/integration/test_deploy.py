"""The files of deploy/: their own commands, in the environment that Kubernetes and Slurm set, make one cluster."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kubeflow_trainer_api.models
import kubernetes_validate
import pytest
import yaml

from tests.support.command_line import CommandLine
from tests.support.hosts import two_hosts

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPT = DEPLOY / "slurm" / "multi_worker.sbatch"

SRUN = """
import json, os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = [word for word in sys.argv[1:] if not word.startswith("--")]
tasks = json.loads(os.environ["FAKE_TASKS"])
prefixes = json.loads(os.environ["FAKE_PREFIXES"]) or [[]] * len(tasks)
running = []
for rank, (task, prefix) in enumerate(zip(tasks, prefixes)):
    out, err = open(f"{rank}.out", "w"), open(f"{rank}.err", "w")
    running.append(subprocess.Popen(prefix + command, env={**os.environ, **task}, stdout=out, stderr=err))
json.dump(options, open("srun.json", "w"))
sys.exit(max(task.wait() for task in running))
"""
"""Starts the command that it gets once for each task, as srun does, with the variables that srun sets."""


class Task(NamedTuple):
    """What a process of the platform sees of itself, and what it said."""

    name: str
    output: str

    @property
    def tf_config(self) -> dict[str, Any]:
        return dict(json.loads(self.output.splitlines()[-1].removeprefix("TF_CONFIG of this task: ")))

    @property
    def role(self) -> str:
        task = self.tf_config["task"]
        return f"{task['type']}:{task['index']}"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def entrypoint() -> list[str]:
    """The command of the image, without its init process."""
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    words = json.loads(line)
    assert words[:2] == ["tini", "--"] and words[2] == "python"
    return [sys.executable, *words[3:]]


def pods(name: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Host name of each pod that a manifest makes -> its arguments, and what Kubernetes sets in its environment."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for owner in documents(name):
        if owner["kind"] in ("JobSet", "TrainJob"):
            found |= pods_of_job_set(owner, documents(name))
        if owner["kind"] not in ("Job", "StatefulSet"):
            continue
        (container,) = owner["spec"]["template"]["spec"]["containers"]
        is_job = owner["kind"] == "Job"
        for index in range(owner["spec"]["completions" if is_job else "replicas"]):
            hostname = f"{owner['metadata']['name']}-{index}"
            env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": hostname}
            found[hostname] = (container["args"], {**env, **({"JOB_COMPLETION_INDEX": str(index)} if is_job else {})})
    return found


def pods_of_job_set(
    owner: dict[str, Any], all_documents: list[dict[str, Any]]
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """The same for a JobSet, or a TrainJob, of which Kubeflow Trainer makes a JobSet by its runtime."""
    found = {}
    trainer = owner["spec"].get("trainer")
    spec = all_documents[0]["spec"]["template"]["spec"] if trainer else owner["spec"]
    for replicated in spec["replicatedJobs"]:
        job = replicated["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        for at, index in itertools.product(
            range(replicated.get("replicas", 1)), range(trainer["numNodes"] if trainer else job["completions"])
        ):
            name = owner["metadata"]["name"]
            labels = {"jobset-name": name, "replicatedjob-name": replicated["name"], "job-index": str(at)}
            hostname = f"{name}-{replicated['name']}-{at}-{index}"
            env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": hostname, "JOB_COMPLETION_INDEX": str(index)}
            for variable in container["env"]:
                field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                label = re.fullmatch(r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.*)'\]", field)
                env[variable["name"]] = labels[label[1]] if label else variable["value"]
            found[hostname] = (trainer["args"] if trainer else container["args"], env)
    return found


def ask_pods(name: str, tmp_path: Path, command_line: CommandLine) -> list[Task]:
    _, *words = entrypoint()
    assert words == ["-m", "runner"], "command_line is this command"
    tasks = []
    for hostname, (arguments, env) in pods(name).items():
        result = command_line(*arguments, "command=cluster_info", cwd=tmp_path, **env)
        assert result.returncode == 0, result.stderr
        tasks.append(Task(hostname, result.stdout))
    return tasks


def assert_that_all_agree(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """The one cluster that all of them see."""
    (cluster,) = {json.dumps(task.tf_config["cluster"]) for task in tasks}
    return dict(json.loads(cluster))


def test_the_pods_of_the_indexed_job_are_one_cluster(tmp_path: Path, command_line: CommandLine) -> None:
    tasks = ask_pods("multi_worker.yaml", tmp_path, command_line)
    assert assert_that_all_agree(tasks) == {
        "chief": ["digits-0.digits:2222"],
        "worker": [f"digits-{index}.digits:2222" for index in (1, 2, 3)],
    }
    assert [task.role for task in tasks] == ["chief:0", "worker:0", "worker:1", "worker:2"]


@pytest.mark.parametrize(("name", "per_job"), [("jobset.yaml", 2), ("trainjob.yaml", 4)])
def test_the_pods_of_a_job_set_are_one_cluster(
    name: str, per_job: int, tmp_path: Path, command_line: CommandLine
) -> None:
    tasks = ask_pods(name, tmp_path, command_line)
    addresses = [f"digits-node-{rank // per_job}-{rank % per_job}.digits:2222" for rank in range(4)]
    assert assert_that_all_agree(tasks) == {"chief": addresses[:1], "worker": addresses[1:]}
    assert [task.role for task in tasks] == ["chief:0", "worker:0", "worker:1", "worker:2"]


def test_the_pods_of_the_parameter_server_run_are_one_cluster(tmp_path: Path, command_line: CommandLine) -> None:
    tasks = ask_pods("parameter_server.yaml", tmp_path, command_line)
    assert assert_that_all_agree(tasks) == {
        "chief": ["digits-chief-0.digits:2222"],
        "worker": [f"digits-worker-{index}.digits:2222" for index in range(4)],
        "ps": [f"digits-ps-{index}.digits:2222" for index in range(2)],
    }
    roles = {task.name: task.role for task in tasks}
    assert roles == {task.name: ":".join(task.name.split("-")[1:]) for task in tasks}
    assert len(roles) == 8 and "digits-evaluator-0" in roles


MODELS = {"JobSet": "JobsetV1alpha2JobSet"} | {
    kind: f"TrainerV1alpha1{kind}" for kind in ("ClusterTrainingRuntime", "TrainJob")
}
"""Kind of a resource that Kubernetes itself does not have -> its model of Kubeflow's."""


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_a_manifest_of_a_job_set_has_what_its_model_has_and_nothing_that_it_does_not_know(name: str) -> None:
    for document in documents(name):
        model = getattr(kubeflow_trainer_api.models, MODELS[document["kind"]])
        assert json.loads(model.from_dict(document).to_json()) == document  # the model drops what it does not know


@pytest.mark.parametrize("version", ["1.29", "1.31"])
@pytest.mark.parametrize("name", sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")))
def test_a_manifest_has_what_kubernetes_requires_and_nothing_that_it_does_not_know(name: str, version: str) -> None:
    for document in documents(name):
        if document["kind"] not in MODELS:
            kubernetes_validate.validate(document, version, strict=True)
        spec = document.get("spec", {})
        for replicated in spec.get("template", document).get("spec", {}).get("replicatedJobs", ()):
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits"}}
            kubernetes_validate.validate({**job, "spec": replicated["template"]["spec"]}, version, strict=True)
    for container in re.findall(r"image: (\S+)", (DEPLOY / "kubernetes" / name).read_text()):
        assert re.fullmatch(r".+:\d+\.\d+\.\d+", container), "without a tag the image may change during a run"


def test_the_pods_of_every_owner_say_what_they_need() -> None:
    for name in ("multi_worker.yaml", "parameter_server.yaml"):
        for owner in documents(name)[1:]:
            (container,) = owner["spec"]["template"]["spec"]["containers"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), owner["metadata"]["name"]
            assert "memory" in container["resources"]["limits"], owner["metadata"]["name"]


@pytest.mark.parametrize("name", ["multi_worker.yaml", "parameter_server.yaml"])
def test_a_manifest_gives_every_pod_the_same_arguments_and_its_name(name: str) -> None:
    service, *owners = documents(name)
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    arguments = {tuple(words) for words, _ in pods(name).values()}
    assert len(arguments) == 1
    settings = dict(word.split("=") for word in next(iter(arguments)))
    for owner in owners:
        spec = owner["spec"]
        pod = spec["template"]["spec"]
        # A pod has a name in the network when it names the Service and the Service selects it.
        assert service["metadata"]["name"] == (
            spec["serviceName"] if owner["kind"] == "StatefulSet" else pod["subdomain"]
        )
        labels = {"job-name": owner["metadata"]["name"], **spec["template"].get("metadata", {}).get("labels", {})}
        assert service["spec"]["selector"].items() <= labels.items()
        assert pod["terminationGracePeriodSeconds"] > 60  # what a supervisor gives its task
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert settings["model_dir"].startswith(f"{mount['mountPath']}/")
        if owner["kind"] == "Job":
            assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
            by_code = {
                rule["onExitCodes"]["values"][0]: rule["action"]
                for rule in spec["podFailurePolicy"]["rules"]
                if "onExitCodes" in rule
            }
            assert by_code == {2: "FailJob", 3: "Ignore"}
            assert pod["restartPolicy"] == "Never"  # Kubernetes takes a podFailurePolicy with no other


def locked(path: Path) -> dict[str, tuple[str, int]]:
    """Name of each requirement of a lock file -> its version, and how many hashes it has."""
    blocks = re.split(r"\n(?=[a-z])", re.sub(r"^ *#.*\n", "", path.read_text(), flags=re.MULTILINE))
    found = {}
    for block in blocks:
        name, version = re.findall(r"^([\w.-]+)==([^ ;\\\n]+)", block.strip())[0]
        found[name] = (version, block.count("--hash=sha256:"))
    return found


def test_the_image_has_files_with_hashes_of_the_versions_that_the_tests_ran_with() -> None:
    tested, image = locked(ROOT / "requirements/dev.lock"), locked(DEPLOY / "requirements.lock")
    assert tested["tensorflow"][0].startswith("2.21") and "pytest" not in image
    assert image.items() <= tested.items()
    assert [name for name, (_, hashes) in tested.items() if not hashes] == []
    lines = (DEPLOY / "Dockerfile").read_text()
    assert "pip install --no-cache-dir --require-hashes -r deploy/requirements.lock" in lines
    assert re.search(r"^FROM \S+:\S+@sha256:[0-9a-f]{64}$", lines, re.MULTILINE)


def test_the_image_and_its_pods_run_as_a_user_who_is_not_root() -> None:
    (user,) = re.findall(r"^USER (\d+):\1$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    uid = int(user)
    owners = [one for name in ("multi_worker.yaml", "parameter_server.yaml") for one in documents(name)]
    pods = [owner["spec"]["template"]["spec"] for owner in owners if owner["kind"] != "Service"]
    assert len(pods) == 5
    for pod in pods:
        assert pod["securityContext"] == {
            "runAsNonRoot": True, "runAsUser": uid, "runAsGroup": uid, "fsGroup": uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        }  # fmt: skip
        (container,) = pod["containers"]
        context = container["securityContext"]
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert pod["automountServiceAccountToken"] is False


def slurm_tasks(nodes: Sequence[str], nodelist: str, per_node: int) -> list[dict[str, str]]:
    """What srun sets for each task."""
    count = len(nodes) * per_node
    return [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_NODELIST": nodelist,
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{len(nodes)})" if len(nodes) > 1 else str(per_node),
        }
        for rank in range(count)
    ]


def run_script(
    tmp_path: Path,
    tasks: Sequence[dict[str, str]],
    *words: str,
    prefixes: Sequence[Sequence[str]] = (),
    timeout: int = 240,
) -> int:
    """Runs the batch script as Slurm does, with `words` behind it. Its exit code.

    Args:
      prefixes: what goes before the command of each task, to run it elsewhere.
    """
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (tmp_path / "srun.py").write_text(SRUN)
    for name, line in {
        "srun": f'exec "{sys.executable}" "{tmp_path}/srun.py" "$@"',
        "python": f'exec "{sys.executable}" "$@"',
        "scontrol": f'echo "$@" >> "{tmp_path}/scontrol.txt"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "digits", "SLURM_NTASKS": str(len(tasks)), "SLURM_PROCID": "0",
        "FAKE_TASKS": json.dumps(tasks), "FAKE_PREFIXES": json.dumps(prefixes),
    }  # fmt: skip
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, cwd=tmp_path, env=env, timeout=timeout, check=False).returncode


def directives() -> dict[str, str]:
    """The #SBATCH lines of the script."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ([], ["chief:0", "worker:0", "worker:1", "worker:2"]),
        (["strategy=parameter_server", "cluster.num_ps=1"], ["chief:0", "ps:0", "worker:0", "worker:1"]),
    ],
)
def test_the_tasks_of_the_batch_script_are_one_cluster(words: list[str], roles: list[str], tmp_path: Path) -> None:
    set_by_script = directives()
    assert (set_by_script["nodes"], set_by_script["ntasks-per-node"]) == ("2", "2")
    tasks = slurm_tasks(["node07", "node08"], "node[07-08]", per_node=2)
    assert run_script(tmp_path, tasks, *words, "command=cluster_info") == 0
    asked = [Task(str(rank), (tmp_path / f"{rank}.out").read_text()) for rank in range(4)]
    cluster = assert_that_all_agree(asked)
    assert [task.role for task in asked] == roles
    addresses = [cluster[role.partition(":")[0]][int(role.partition(":")[2])] for role in roles]
    assert [address.partition(":")[0] for address in addresses] == ["node07", "node07", "node08", "node08"]
    assert len(set(addresses)) == 4
    assert "--distribution=block" in json.loads((tmp_path / "srun.json").read_text())
    assert not (tmp_path / "scontrol.txt").exists()


@pytest.mark.parametrize(("code", "restarts", "requeued"), [
    (0, 0, False), (1, 0, False), (2, 0, False), (3, 0, True), (3, 99, True), (137, 0, True), (139, 19, True),
    (137, 20, False),
])  # fmt: skip
def test_the_batch_script_queues_itself_again_after_3_and_after_a_task_was_killed(
    code: int, restarts: int, requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "runner.py").write_text(f"raise SystemExit({code})")  # before the real one on the path of `python -m`
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    assert run_script(tmp_path, [{}]) == code
    assert (tmp_path / "scontrol.txt").exists() is requeued
    if requeued:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"
    assert int(directives()["signal"].removeprefix("TERM@")) > 60  # what a supervisor gives its task


def test_hosts_of_these_tests_reach_each_other_by_their_addresses() -> None:
    """So that the test below tests what it says."""
    listen = "import socket; s = socket.create_server(('{}', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    connect = "import socket; socket.create_connection(('{}', {}), 20)"
    with two_hosts() as hosts:
        first, last = hosts[0], hosts[-1]
        command = [*last.prefix, sys.executable, "-c", listen.format(last.address)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            subprocess.run([*first.prefix, sys.executable, "-c", connect.format(last.address, port)], check=True)
            assert server.wait(20) == 0
    assert len(hosts) == 1 or hosts[0].address != hosts[1].address


@pytest.mark.slow
def test_the_batch_script_trains_with_two_tasks(tmp_path: Path) -> None:
    """On two hosts, or on one where network namespaces are not allowed: TensorFlow listens on all its addresses."""
    with two_hosts() as hosts:
        nodelist = ",".join(host.address for host in hosts)
        tasks = slurm_tasks([host.address for host in hosts], nodelist, per_node=2 // len(hosts))
        prefixes = [host.prefix for host in hosts] * (2 // len(hosts))
        words = ["train.max_steps=20", "model.params.network=mlp", "tracking=none"]
        code = run_script(tmp_path, tasks, *words, prefixes=prefixes, timeout=280)
    said = [(tmp_path / f"{rank}.err").read_text() for rank in range(2)]
    assert code == 0, said
    model_dir = tmp_path / "outputs" / "digits"
    summary = json.loads((model_dir / "summary.json").read_text())
    assert (summary["status"], summary["global_step"], summary["num_replicas"]) == ("finished", 20, 2)
    journals = {path.name for path in model_dir.glob("events.*.jsonl")}
    assert journals == {"events.chief-0.jsonl", "events.supervisor-0.jsonl", "events.worker-0.jsonl"}
    assert len(list(model_dir.glob("model.ckpt-20.index"))) == 1
