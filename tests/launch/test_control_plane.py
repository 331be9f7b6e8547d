"""How what each process asks of a shared folder and of a bucket grows with a cluster, up to 256 tasks that do nothing.

Operations are counted, not timed: `tests.support.control_plane` has a clock of its own. The curves are in
benchmarks/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.config.schema import ClusterConfig, StrategyConfig
from runner.distribute.cluster import Cluster
from runner.distribute.cluster_resolver import detect
from runner.launch import gang
from runner.launch.gang import Gang, Task
from tests.support.control_plane import Clock, ControlPlane, Found, IdleProcess, gather, places_of

FEW, MANY = 16, 64


def worst(counts: Mapping[str, float]) -> tuple[float, float]:
    """The operations of the chief, and the most of a worker."""
    return counts["chief"], max(count for name, count in counts.items() if name != "chief")


def grows_at_most_linearly(few: Mapping[str, float], many: Mapping[str, float]) -> None:
    for at_few, at_many in zip(worst(few), worst(many), strict=True):
        assert at_many <= MANY / FEW * at_few


def test_what_a_supervisor_asks_of_the_shared_folder_grows_at_most_linearly(tmp_path: Path) -> None:
    found: dict[int, Found] = {}
    for num_tasks in (FEW, MANY):
        found[num_tasks] = ControlPlane(num_tasks, tmp_path / str(num_tasks)).run()
    few, many = found[FEW].operations, found[MANY].operations
    grows_at_most_linearly(few, many)
    # A worker reads the chief's message, however many others do.
    assert worst(many)[1] <= 1.2 * worst(few)[1]
    assert found[MANY].agreed[1] < 1 and found[MANY].noticed < 3 and found[MANY].agreed[2] < 10


def test_the_chief_of_256_tasks_reads_no_more_in_a_second_than_that_of_64(tmp_path: Path) -> None:
    """Workers join one after another, so its wait grows with them; what it reads must not grow with both."""
    counts = [gather(places_of(num_tasks), tmp_path / str(num_tasks), apart_secs=0.4) for num_tasks in (64, 256)]
    assert counts[1] <= 1.1 * 256 / 64 * counts[0]


def of_tf_config(rank: int) -> dict[str, str]:
    hosts = [f"node{number}.cluster:2222" for number in range(256)]
    task = {"type": "worker", "index": rank - 1} if rank else {"type": "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": {"chief": hosts[:1], "worker": hosts[1:]}, "task": task})}


def of_slurm(rank: int) -> dict[str, str]:
    step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "256", "SLURM_STEP_TASKS_PER_NODE": "1(x256)"}
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[001-128],b[1-100,200-227]", **step}


def of_job_set(rank: int) -> dict[str, str]:
    job, pod = divmod(rank, 32)
    labels = {"JOBSET_NAME": "run", "JOBSET_REPLICATED_JOB": "node", "JOBSET_JOB_INDEX": str(job)}
    numbers = {"JOBSET_PODS_PER_JOB": "32", "JOBSET_REPLICAS": "8", "JOB_COMPLETION_INDEX": str(pod)}
    return {"HOSTNAME": f"run-node-{job}-{pod}", "KUBERNETES_SERVICE_HOST": "10.0.0.1", **labels, **numbers}


@pytest.mark.parametrize(
    ("env_of", "first", "last"),
    [
        (of_tf_config, "node0.cluster:2222", "node255.cluster:2222"),
        (of_slurm, "a001:", "b227:"),
        (of_job_set, "run-node-0-0.run:2222", "run-node-7-31.run:2222"),
    ],
    ids=["tf_config", "slurm", "job_set"],
)
def test_256_hosts_know_each_other_and_meet(
    env_of: Callable[[int], Mapping[str, str]], first: str, last: str, tmp_path: Path
) -> None:
    places: list[Cluster] = []
    for rank in range(256):
        places.append(detect(env_of(rank), ClusterConfig(), StrategyConfig("multi_worker")).cluster)
    assert [place.name for place in places] == ["chief", *(f"worker:{index}" for index in range(255))]
    (tasks,) = {json.dumps(dict(place.tasks)) for place in places}
    addresses = [*json.loads(tasks)["chief"], *json.loads(tasks)["worker"]]
    assert len(set(addresses)) == 256
    assert addresses[0].startswith(first) and addresses[-1].startswith(last)
    assert gather(places, tmp_path / "run", apart_secs=0.0) > 256


def test_who_has_not_joined_is_looked_up_once_for_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the journals of all of them."""
    clock, looks = Clock(), list[float]()
    stand_in: Any = SimpleNamespace(sleep=clock.sleep, monotonic=clock.monotonic)
    monkeypatch.setattr(gang, "time", stand_in)
    tasks = [Task(place, (), {}) for place in places_of(8)]

    def joined() -> list[str]:
        looks.append(clock.now)
        return [task.place.name for task in tasks if task.place.name != "worker:3"]

    def start(task: Task) -> Any:
        return IdleProcess(clock, lambda: 100.0, lambda: 0)

    endings = list[Any]()
    together = Gang(start_timeout_secs=5, start=start, joined=joined)
    clock.start("supervisor", lambda: endings.append(together.run(tasks)))
    clock.run()
    assert len(looks) == 1
    (ending,) = endings
    assert ending.did_not_start and ending.place.name == "worker:3"
