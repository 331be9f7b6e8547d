"""docs/how_to/slurm.md on a real Slurm: whatever happens to a job, it comes to the numbers of an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.docs.test_tutorials import blocks
from tests.support.chains import variables
from tests.support.hold import HELD
from tests.support.journal import recorded
from tests.support.processes import wait_until
from tests.support.slurm import Slurm, slurm

pytestmark = [pytest.mark.world, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
SCRIPT = "deploy/slurm/multi_worker.sbatch"
STEPS, HELD_AT = 600, 120
SECS = 500.0  # a machine may be busy
SMALL = ["model.params.network=mlp", "tracking=none", HELD]
_, BATCH, TIMED, STOP, REQUEUE, ARRAY, SWEEP = (
    shlex.split(line) for language, _, text in blocks("../how_to/slurm") if not language for line in text.splitlines()
)
"""The commands of the page."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as cluster:
        cluster.env |= {
            "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{cluster.env['PATH']}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }  # fmt: skip
        yield cluster


def submit(cluster: Slurm, folder: Path, command: list[str], *words: str, nodes: int = 2) -> str:
    """Submit a command of the page, with two tasks on as many nodes as there are up to `nodes`. Return the number."""
    folder.mkdir(exist_ok=True)
    nodes, script = min(nodes, cluster.nodes), command.index(SCRIPT)
    options = [one for one in words if one.startswith("--")]
    options += [f"--nodes={nodes}", f"--ntasks-per-node={2 // nodes}", "--cpus-per-task=1", f"--chdir={folder}"]
    overrides = [*command[script + 1 :], *SMALL, *(one for one in words if one not in options)]
    said = cluster.ask(*command[:script], *options, f"{ROOT}/{SCRIPT}", *overrides)
    return re.findall(r"Submitted batch job (\d+)", said)[0]


def wait_for_end(cluster: Slurm, job: str, restarts: int) -> None:
    """Wait until a job has completed after so many restarts."""
    wait_until(lambda: cluster.facts(job)["JobState"] in ENDS, SECS)
    end = cluster.facts(job)
    said = Path(end["StdOut"]).read_text()
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), said


def supervisor(number: int, folder: Path, **variables: str) -> psutil.Process:
    """Return the process `python -m runner` of a task of the job that works in `folder`, with these variables."""
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[1:3] == ["-m", "runner"] and process.cwd() == str(folder):
            if {"SLURM_PROCID": str(number), **variables}.items() <= process.environ().items():
                return process
    raise LookupError(f"no task {number}")


def trainer(number: int, folder: Path) -> psutil.Process:
    """Return the process that trains for it: of those that lead a session, the last one that was started."""
    leaders = [one for one in supervisor(number, folder).children(recursive=True) if os.getsid(one.pid) == one.pid]
    return max(leaders, key=lambda one: one.create_time())


def hold(folder: Path, processes: int, then: Callable[[], object]) -> None:
    """Wait until so many processes are between two checkpoints, do something to them, and let them go on."""
    wait_until(lambda: len(list(folder.glob("held-*"))) == processes, SECS)
    then()
    (folder / "hold").unlink()


def assert_same_numbers(found: Path, expected: Path) -> None:
    ours, theirs = variables(found, STEPS), variables(expected, STEPS)
    assert ours.keys() == theirs.keys() and len(ours) > 4
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, name)


def assert_nothing_was_lost(journal: Sequence[Mapping[str, Any]]) -> None:
    """Check that the first start of a run saved the step at which it was held."""
    ends = [line["global_step"] for line in journal if line.get("event") == "result"]
    assert HELD_AT <= ends[0] < HELD_AT + 50 and ends[1:] == [STEPS]


@pytest.fixture(scope="module")
def undisturbed(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The elements 0 and 1 of an array, whose seeds are their numbers."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit(cluster, folder, ARRAY)
    for element in ("0", "1"):
        wait_for_end(cluster, f"{job}_{element}", 0)
    return folder / "outputs" / "digits"


Disturb = Callable[[Slurm, str, Path], object]


def signalled(name: str) -> Disturb:
    return lambda cluster, job, folder: cluster.ask(*STOP[:-2], f"--signal={name}", job)


def killed(which: Callable[[int, Path], psutil.Process], number: int) -> Disturb:
    return lambda cluster, job, folder: which(number, folder).kill()


SIGNALS = ("TERM", "USR1", "USR2")
DISTURBANCES: dict[str, tuple[Disturb, int]] = {
    **{name: (signalled(name), 1) for name in SIGNALS},
    "requeue": (lambda cluster, job, folder: cluster.ask(*REQUEUE[:-1], job), 1),
    "the chief's supervisor is killed": (killed(supervisor, 0), 1),
    "a worker's supervisor is killed": (killed(supervisor, 1), 1),
    "the chief's trainer is killed": (killed(trainer, 0), 0),
    "a worker's trainer is killed": (killed(trainer, 1), 0),
}
"""Name -> what is done to a job in the middle, and how often Slurm starts it again."""


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbed_job_goes_on_to_the_same_numbers(
    name: str, cluster: Slurm, undisturbed: Path, tmp_path: Path
) -> None:
    disturb, restarts = DISTURBANCES[name]
    (tmp_path / "hold").write_text(str(HELD_AT))
    job, model_dir = submit(cluster, tmp_path, BATCH, "run.seed=0"), tmp_path / "outputs" / "digits"
    hold(tmp_path, 2, lambda: disturb(cluster, job, tmp_path))
    wait_for_end(cluster, job, restarts)
    journal = recorded(model_dir)
    assert [line["event"] for line in journal if line.get("event") == "built"] == ["built"] * 2
    if name in SIGNALS:
        assert_nothing_was_lost(journal)
    summary = json.loads((model_dir / "summary.json").read_text())
    assert (summary["status"], summary["global_step"], summary["num_replicas"]) == ("finished", STEPS, 2)
    assert_same_numbers(model_dir, undisturbed / "0")


def test_a_job_whose_time_is_over_saves_before_and_goes_on(cluster: Slurm, undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "hold").write_text(str(HELD_AT))
    job = submit(cluster, tmp_path, TIMED, "--time=00:02:00", "--signal=USR1@60", "run.seed=0")
    log, model_dir = tmp_path / f"digits-{job}.log", tmp_path / "outputs" / "digits"
    hold(tmp_path, 2, lambda: wait_until(lambda: "Stopping: " in log.read_text(), SECS))
    wait_for_end(cluster, job, 1)
    assert_nothing_was_lost(recorded(model_dir))
    assert_same_numbers(model_dir, undisturbed / "0")


def test_an_element_of_an_array_goes_on_alone(cluster: Slurm, undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "hold").write_text(str(HELD_AT))
    job, outputs = submit(cluster, tmp_path, ARRAY, nodes=1), tmp_path / "outputs" / "digits"
    element = str(cluster.nodes - 1)  # on one node, they run one after the other
    hold(tmp_path, 2 * cluster.nodes, lambda: supervisor(1, tmp_path, SLURM_ARRAY_TASK_ID=element).kill())
    for one in ("0", "1"):
        wait_for_end(cluster, f"{job}_{one}", int(one == element))
        assert_same_numbers(outputs / one, undisturbed / one)


def test_a_sweep_by_submitit_goes_on_after_a_notice(cluster: Slurm, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("plain", "slurm")}

    def sweep(name: str, words: list[str]) -> subprocess.Popen[bytes]:
        folders[name].mkdir()
        with open(folders[name] / "said.txt", "wb") as said:
            argv = [*cluster.prefix, sys.executable, *words[1:], *SMALL]
            return subprocess.Popen(argv, cwd=folders[name], env=cluster.env, stdout=said, stderr=said)

    assert sweep("plain", [word for word in SWEEP if not word.startswith("hydra")]).wait(500) == 0
    sweeping = sweep("slurm", [*SWEEP, "hydra.launcher.timeout_min=10", "hydra.launcher.cpus_per_task=1"])
    (folders["slurm"] / "hold").write_text(str(HELD_AT))
    rates = folders["slurm"] / "outputs" / "rates"
    wait_until(lambda: "_0" in cluster.ask("squeue", "--noheader", "--array", "--format=%i"), SECS)
    job = re.findall(r"(\d+)_0", cluster.ask("squeue", "--noheader", "--array", "--format=%i"))[0]
    hold(folders["slurm"], cluster.nodes, lambda: cluster.ask(*STOP[:-2], "--signal=USR2", f"{job}_0"))
    assert sweeping.wait(500) == 0, (folders["slurm"] / "said.txt").read_text()
    assert [cluster.facts(f"{job}_{one}")["Restarts"] for one in "01"] == ["1", "0"]
    ranked = {}
    for name, folder in folders.items():
        jobs = json.loads((folder / "outputs" / "rates" / "sweep.json").read_text())["jobs"]
        ranked[name] = [(one["name"], one["folder"], one["status"], one["value"]) for one in jobs]
        assert [status for _, _, status, _ in ranked[name]] == ["finished"] * 2
    assert ranked["slurm"] == ranked["plain"]
    for _, folder, _, _ in ranked["plain"]:
        assert_same_numbers(rates / folder, folders["plain"] / "outputs" / "rates" / folder)
