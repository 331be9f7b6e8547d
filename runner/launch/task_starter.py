"""Starting a task: as a new process, or forked from a task server that has already imported TensorFlow."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.config.schema import UNRECORDED_COMMANDS, Config
from runner.launch.gang import Task, start_cold
from runner.system.child_process import Process, start_process
from runner.system.standard_streams import say
from runner.system.start_status import SCREEN, START_STATUS
from runner.system.task_server import TaskServer, TaskServerError, missing_support

TASK_COMMAND = ("-P", "-m", "runner.task")
"""The command of a task, without its config file."""
# -P: a file `runner.py` in the user's directory must not shadow this package. The task adds the directory itself.

SERVER_COMMAND = ("-P", "-m", "runner.task.server")

READ_AFTER_IMPORT = ("TF_CONFIG", "RUNNER_", "MLFLOW_")
"""Prefixes of the names of environment variables that no import reads. All other variables must be equal in a task
and in the server from which it is forked."""


class ColdStarter:
    """Starts each task in a process that imports TensorFlow itself."""

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Prepare in the background to start `tasks`."""

    def wait(self, stops: Sequence[int]) -> None:
        """Wait until the preparation is done, or a stop is requested."""

    def start(self, task: Task) -> Process:
        return start_cold(task)

    def close(self) -> None:
        """Release what was prepared. Must be called when no task runs any more."""


class ForkingStarter(ColdStarter):
    """Forks tasks from a server, which is started with the first task. Several threads may use it.

    A task is started cold (by its command) if its environment differs from the server's in a variable that an import
    may read. If the server fails, all later tasks are started cold, and one message says so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: TaskServer | None = None
        self._env: Mapping[str, str] = {}
        self._is_off = False

    def prepare(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            fit = next((task for task in tasks if _may_be_forked(task)), None)
            if self._server is not None or self._is_off or fit is None:
                return
            missing = missing_support()
            if missing:
                self._turn_off(missing)
                return
            self._env = read_at_import(fit.env)
            try:
                self._server = TaskServer([sys.executable, *SERVER_COMMAND], self._env)
            except OSError as error:
                self._turn_off(str(error))

    def wait(self, stops: Sequence[int]) -> None:
        server = self._server
        if server is not None:
            try:
                server.wait_until_ready(stops)
            except TaskServerError as error:
                self._fail(server, error)

    def start(self, task: Task) -> Process:
        server = self._server
        if server is not None and server.is_ready and self._fits(task):
            task = _with_terminal(task)
            try:
                arguments = task.argv[1 + len(TASK_COMMAND) :]
                return start_process(arguments, task.env, task.prefix, server.spawn)
            except TaskServerError as error:
                self._fail(server, error)
        return start_cold(task)

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server, self._is_off = None, True

    def _fits(self, task: Task) -> bool:
        return _may_be_forked(task) and read_at_import(task.env) == self._env

    def _fail(self, server: TaskServer, error: TaskServerError) -> None:
        with self._lock:
            if self._server is server:
                self._server = None
                server.close(0)  # a live server still reports how its children end
                self._turn_off(str(error))

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        say(f"runner: tasks start without a task server (run.preload): {reason}. Each task imports TensorFlow itself.")


def _with_terminal(task: Task) -> Task:
    """Return `task` marked as connected to the terminal, so that it draws a progress line without checking."""
    env = dict(task.env)
    lent = env.pop(SCREEN, None)
    if lent is None:
        return task
    START_STATUS.stop()
    os.close(int(lent))
    return replace(task, env=env)


def build_starter(config: Config, num_tasks: int, *, is_sweep: bool = False) -> ColdStarter:
    """Return the starter of a run's tasks: a server that forks them if several starts are likely, else a ColdStarter.

    Args:
      config: the config.
      num_tasks: number of tasks that start together.
      is_sweep: all runs of a sweep use the starter.
    """
    may_restart = config.max_restarts > 0 and config.command not in UNRECORDED_COMMANDS
    pays = is_sweep or num_tasks > 1 or may_restart
    return ForkingStarter() if pays and config.run.preload == "auto" and not config.run.inline else ColdStarter()


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` that importing TensorFlow or another module may read."""
    return {name: value for name, value in env.items() if not name.startswith(READ_AFTER_IMPORT)}


def _may_be_forked(task: Task) -> bool:
    """Report whether `task` may be forked from a process that has already imported TensorFlow.

    It must run the runner's own task command, and TensorFlow's messages at import must not be wanted.
    """
    is_ours = tuple(task.argv[: 1 + len(TASK_COMMAND)]) == (sys.executable, *TASK_COMMAND)
    return is_ours and task.env.get("TF_CPP_MIN_LOG_LEVEL", "0") >= "2"
