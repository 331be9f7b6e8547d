"""The status of a run in MLflow, however it ended; a small script in the place of the task, real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from runner.tracking.run_record import MLFLOW, Shipped
from tests.support.messages import Messages
from tests.support.processes import wait_until
from tests.support.screen import line_of

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
APP = """
import sys
from runner.launch import app, supervisor, task_group
task_group.task_argv = lambda file: [sys.executable, "task.py", str(file)]
sys.exit(app.run_command_line())
"""
TASK = """
import os, signal, sys, time
from pathlib import Path
from tests.support.journal import Lines
from runner.system.child_process import end_with_parent
end_with_parent(os.environ)
from runner.tracking.run_lock import only_task_in
model_dir = Path(sys.argv[1]).parent
held = only_task_in(model_dir)
held.__enter__()
journal = Lines(model_dir)
journal.event("built", num_replicas=1)
journal.event("first_step", step=1)
def save(*a):
    while (model_dir / "slow").exists():
        time.sleep(0.02)
    journal.event("result", global_step=3, metrics={}, checkpoint="c")
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
end = (model_dir / "how").read_text()
if end == "error":
    journal.event("error", error="ValueError: width must be even")
    sys.exit(2)
if end == "finish":
    journal.event("result", global_step=7, metrics={"eval/loss": 0.5}, checkpoint="c")
    sys.exit(0)
(model_dir / "ready").touch()
time.sleep(600)
"""


def start(where: Path, name: str, how: str) -> subprocess.Popen[str]:
    (where / name).mkdir(exist_ok=True)
    (where / name / "how").write_text(how)
    (where / "task.py").write_text(TASK)
    return subprocess.Popen(
        [sys.executable, "-c", APP, f"model_dir={name}"], cwd=where, env=ENV,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def start_and_wait(where: Path, name: str) -> subprocess.Popen[str]:
    """A run whose task has begun to work, and whose MLflow run is open and noted."""
    process = start(where, name, "work")
    deadline = time.monotonic() + 120
    while not (where / name / "ready").exists() or Shipped.read(where / name, MLFLOW).run_id is None:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def task_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The task of a supervisor, which also has a process that ships."""
    children = psutil.Process(process.pid).children()
    (task,) = (child for child in children if "runner.tracking.ship" not in child.cmdline())
    return task


def statuses(where: Path) -> Mapping[str, str]:
    """Name -> status of the runs in MLflow."""
    if not (where / "mlflow.db").exists() or (where / "mlflow.db").stat().st_size == 0:
        return {}
    client = MlflowClient(tracking_uri=f"sqlite:///{where / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("runner")
    runs = client.search_runs([experiment.experiment_id]) if experiment is not None else []
    return {run.info.run_name: run.info.status for run in runs}


def summary_status(where: Path, name: str) -> str:
    return json.loads((where / name / "summary.json").read_text())["status"]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path) -> Path:
    """One directory, so one database, for all."""
    where = tmp_path_factory.mktemp("status")
    shutil.copy(empty_mlflow_database, where / "mlflow.db")
    assert start(where, "first", "finish").wait(150) == 0
    return where


def test_a_run_that_finishes_is_finished(where: Path) -> None:
    assert statuses(where)["first"] == "FINISHED"
    assert summary_status(where, "first") == "finished"


@pytest.mark.slow
def test_a_run_whose_model_fn_raises_has_failed(where: Path) -> None:
    assert start(where, "error", "error").wait(150) == 2
    assert statuses(where)["error"] == "FAILED"
    assert summary_status(where, "error") == "failed"


@pytest.mark.slow
def test_a_run_that_others_leave_alone_was_killed_when_it_is_stopped_by_sigterm(
    where: Path, messages: Messages
) -> None:
    process = start_and_wait(where, "sigterm")
    assert statuses(where)["sigterm"] == "RUNNING"
    assert summary_status(where, "sigterm") == "running"
    second = start(where, "sigterm", "work")
    _, said = second.communicate(timeout=150)
    messages.same(f"exit {second.returncode}", line_of(said, "runner: "), hide=rf"{where}/|(?<=process )\d+")
    assert start(where, "beside", "finish").wait(150) == 0
    assert statuses(where)["sigterm"] == "RUNNING"
    process.send_signal(signal.SIGTERM)
    assert process.wait(150) == 3
    assert statuses(where)["sigterm"] == "SCHEDULED"
    assert summary_status(where, "sigterm") == "interrupted"


def test_a_run_whose_task_is_killed_has_failed(where: Path) -> None:
    process = start_and_wait(where, "task")
    task_of(process).kill()
    assert process.wait(150) == 1
    assert statuses(where)["task"] == "FAILED"
    assert summary_status(where, "task") == "failed"


@pytest.mark.slow
def test_a_run_whose_supervisor_is_killed_was_killed_as_soon_as_its_task_has_saved(where: Path) -> None:
    process = start_and_wait(where, "supervisor")
    assert statuses(where)["supervisor"] == "RUNNING"
    process.kill()
    process.wait(150)
    wait_until(lambda: statuses(where)["supervisor"] == "SCHEDULED")
    assert summary_status(where, "supervisor") == "interrupted"


@pytest.mark.slow
def test_a_run_whose_supervisor_was_killed_goes_on_in_its_own_run_when_its_task_has_saved(
    where: Path, messages: Messages
) -> None:
    process = start_and_wait(where, "again")
    (where / "again" / "slow").touch()
    process.kill()
    process.wait(150)
    second = start(where, "again", "finish")
    assert second.stderr is not None
    messages.same("line", second.stderr.readline(), hide=rf"{where}/")
    (where / "again" / "slow").unlink()
    assert second.wait(150) == 0
    assert json.loads((where / "again" / "summary.json").read_text())["global_step"] == 7
    assert statuses(where)["again"] == "FINISHED"
    assert summary_status(where, "again") == "finished"
