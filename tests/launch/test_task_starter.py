"""Which tasks are forked from a server, and what happens where none can be."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.config.schema import ClusterConfig, Config, RunSettings, StrategyConfig
from runner.distribute.cluster import ALONE
from runner.launch import task_group, task_starter
from runner.launch.gang import Task
from runner.launch.restarts import Restarts
from runner.launch.stop_requests import StopRequests
from runner.launch.task_group import RestartingGang
from runner.launch.task_starter import TaskStarter, build_starter
from runner.system.exit_codes import FAILED, INTERRUPTED
from runner.tracking.run_record import RunRecord
from tests.support.messages import Messages
from tests.support.processes import is_gone, wait_until
from tests.support.screen import line_of

ROOT = Path(__file__).parents[2]
FORKING = ("-m", "tests.support.forking")
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture
def starter() -> Iterator[TaskStarter]:
    """Its server executes the argument of a task as Python; a task that starts cold finds no such config: 2."""
    starter = TaskStarter(command=FORKING)
    yield starter
    starter.close()


def task(code: str = "code = 40", **env: str) -> Task:
    return Task(ALONE, [sys.executable, *task_starter.TASK_COMMAND, code], {**ENV, **env})


def start(starter: TaskStarter, task: Task) -> int:
    starter.prepare([task])
    starter.wait([])
    return starter.start(task).close()


def test_a_task_is_forked_unless_its_environment_differs_in_what_an_import_may_read(starter: TaskStarter) -> None:
    assert start(starter, task()) == 40
    assert start(starter, task(TF_CONFIG='{"cluster": {}}', RUNNER_GENERATION="7", MLFLOW_RUN_ID="1")) == 40
    assert start(starter, task(CUDA_VISIBLE_DEVICES="1")) == 40
    for name in ("TF_USE_LEGACY_KERAS", "XLA_FLAGS", "OMP_NUM_THREADS", "ANYTHING"):
        assert start(starter, task(**{name: "1"})) == 2
    assert start(starter, task(TF_CPP_MIN_LOG_LEVEL="0")) == 2  # somebody wants to read what is said at import
    assert start(starter, task()) == 40


def test_another_command_than_that_of_a_task_is_started_as_it_is(starter: TaskStarter) -> None:
    other = Task(ALONE, [sys.executable, "-c", "raise SystemExit(6)"], ENV)
    assert start(starter, other) == 6


def test_tasks_start_cold_after_the_server_was_killed_which_is_said_once(
    starter: TaskStarter, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert start(starter, task()) == 40
    assert starter.server is not None
    pid = starter.server.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))
    assert [start(starter, task()) for _ in range(2)] == [2, 2]
    messages.same("stderr", line_of(capfd.readouterr().err, "run.preload"))


def test_where_the_system_has_no_pidfd_tasks_start_cold_which_is_said_once(
    starter: TaskStarter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert [start(starter, task()) for _ in range(2)] == [2, 2]
    messages.same("stderr", line_of(capfd.readouterr().err, "run.preload"))


def test_a_stop_while_the_server_starts_does_not_wait_for_it() -> None:
    starter = TaskStarter(command=("-c", "import time; time.sleep(600)"))
    starter.prepare([task()])
    assert starter.server is not None
    pid = starter.server.pid
    starter.wait([signal.SIGTERM])
    assert starter.start(task()).close() == 2  # cold: the caller stops it at once
    starter.close()
    assert not psutil.pid_exists(pid)  # it has ended, and is no zombie


def test_a_server_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str], messages: Messages) -> None:
    starter = TaskStarter(command=("-c", "import sys; sys.exit(4)"))
    assert start(starter, task()) == 2
    messages.same("stderr", line_of(capfd.readouterr().err, "run.preload"))
    assert starter.server is None and not starter.forks


def test_the_server_of_a_session_is_replaced_when_the_environment_or_the_packages_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starter = TaskStarter(renews=True, command=FORKING)
    assert start(starter, task()) == 40
    assert starter.server is not None
    first = starter.server.pid
    assert start(starter, task(TF_CONFIG='{"cluster": {}}')) == 40
    assert starter.server.pid == first
    assert start(starter, task(OMP_NUM_THREADS="0")) == 40
    second = starter.server.pid
    assert second != first and not psutil.pid_exists(first)
    monkeypatch.setattr(task_starter, "_times_of_packages", lambda: [1])  # as after `%pip install`
    assert start(starter, task(OMP_NUM_THREADS="0")) == 40
    third = starter.server.pid
    assert third != second and not psutil.pid_exists(second)
    starter.close()
    assert not psutil.pid_exists(third)


def test_a_forked_copy_of_a_session_has_a_server_of_its_own(starter: TaskStarter) -> None:
    assert start(starter, task()) == 40
    assert starter.server is not None
    server = starter.server.pid
    copy = os.fork()
    if not copy:
        starter.forget()
        served = start(starter, task()) == 40 and starter.server is not None and starter.server.pid != server
        starter.close()
        os._exit(0 if served else 1)
    assert os.waitpid(copy, 0)[1] == 0
    assert start(starter, task()) == 40 and starter.server.pid == server


def config(strategy: str = "default", **run: Any) -> Config:
    cluster = ClusterConfig(max_restarts=run.pop("max_restarts", None))
    return Config(strategy=StrategyConfig(strategy), run=RunSettings(**run), cluster=cluster)


def test_a_server_is_there_where_more_than_one_start_may_come() -> None:
    def forks(config: Config, num_tasks: int = 1, **others: bool) -> bool:
        return build_starter(config, num_tasks, **others).forks

    assert not forks(config())  # a plain run starts as it always did
    assert forks(config(), is_sweep=True)
    assert forks(config("multi_worker"), 2)
    assert forks(config("multi_worker", max_restarts=0), 2)
    assert not forks(config("multi_worker", max_restarts=0))  # the only task of this host
    assert forks(config(max_restarts=1)) and forks(config(freeze_secs=60))
    for off in (config("multi_worker", preload=False), config("multi_worker", inline=True)):
        assert not forks(off, 2, is_sweep=True)


def test_a_stop_before_the_tasks_are_there_leaves_a_run_that_has_a_checkpoint_resumable(tmp_path: Path) -> None:
    stops = StopRequests()
    stops.came.append(signal.SIGTERM)
    settings = dataclasses.replace(config(max_restarts=1), model_dir=str(tmp_path))
    tasks = RestartingGang(settings, tmp_path / "config.yaml", ENV, stops, Restarts(tmp_path, 1), RunRecord())
    assert tasks.run().code == FAILED
    for name in ("model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"):
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-5"\n')
    assert tasks.run().code == INTERRUPTED


def test_the_command_of_a_task_is_the_one_that_is_forked() -> None:
    assert task_group.task_argv(Path("f")) == [sys.executable, "-P", "-m", "runner.task", "f"]
