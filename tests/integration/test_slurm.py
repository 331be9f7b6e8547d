"""The batch script on a real Slurm: a killed task costs the job no more than a start from the last checkpoint."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.chains import variables
from tests.support.processes import wait_until
from tests.support.slurm import Slurm, slurm

pytestmark = pytest.mark.world

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "multi_worker.sbatch"
STEPS = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as cluster:
        cluster.env |= {
            "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{cluster.env['PATH']}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }  # fmt: skip
        yield cluster


def submit(cluster: Slurm, folder: Path, *words: str) -> str:
    """Submit the script with two tasks, on two nodes where there are two; return the number of the job."""
    folder.mkdir(exist_ok=True)
    size = [f"--nodes={cluster.nodes}", f"--ntasks-per-node={2 // cluster.nodes}", "--cpus-per-task=1"]
    settings = ["model.params.network=mlp", "tracking=none", f"train.max_steps={STEPS}", "checkpoint.save_steps=50"]
    said = cluster.ask("sbatch", *size, f"--chdir={folder}", str(SCRIPT), *settings, *words)
    return re.findall(r"Submitted batch job (\d+)", said)[0]


def wait_for_end(cluster: Slurm, job: str) -> dict[str, str]:
    wait_until(lambda: cluster.facts(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), 500)
    return cluster.facts(job)


def task(folder: Path, number: int) -> psutil.Process:
    """The process `python -m runner` of a task of the job that works in `folder`."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:3] == ["-m", "runner"] and process.cwd() == str(folder):
            if process.environ().get("SLURM_PROCID") == str(number):
                return process
    raise LookupError(f"no task {number}")


@pytest.fixture(scope="module")
def undisturbed(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    end = wait_for_end(cluster, submit(cluster, folder))
    assert end["JobState"] == "COMPLETED", Path(end["StdOut"]).read_text()
    return folder / "outputs" / "digits"


@pytest.mark.parametrize("number", [0, 1], ids=["chief", "worker"])
def test_a_job_that_lost_a_task_goes_on_with_the_same_numbers(
    number: int, cluster: Slurm, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path)
    model_dir = tmp_path / "outputs" / "digits"
    wait_until(lambda: bool(list(model_dir.glob("model.ckpt-*.index"))))
    task(tmp_path, number).kill()
    end = wait_for_end(cluster, job)
    said = (tmp_path / f"digits-{job}.log").read_text()
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "1"), said
    summary = json.loads((model_dir / "summary.json").read_text())
    assert (summary["status"], summary["global_step"], summary["num_replicas"]) == ("finished", STEPS, 2)
    expected, found = variables(undisturbed, STEPS), variables(model_dir, STEPS)
    assert expected.keys() == found.keys() and len(expected) > 4
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)
