"""The task server of `command_line`: `python -m tests.support.nursery <socket>`. It also forks whole commands.

A command that is forked, `python -m runner` with its words, is a process of its own, and so are its task server, which
is forked from it, its tasks and whatever it starts: each can be killed or stopped as after a cold start, which takes 6
CPU seconds more. What it imports by itself, and in which environment, belongs to tests that start the command cold.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import runner.__main__ as command
import runner.launch.app
import runner.launch.supervisor
import runner.launch.sweeps.multirun
import runner.launch.worker_supervisor
import runner.remote.upload  # noqa: F401  (as the three before it: what a command imports on its way)
from runner.config.schema import Config
from runner.launch import task_starter
from runner.launch.gang import Task
from runner.launch.task_starter import TaskStarter
from runner.system import task_server
from runner.system.child_process import LIFELINE
from runner.system.heartbeat import HEARTBEAT
from runner.system.standard_streams import keep_saying
from runner.system.task_server import ChildRequest
from runner.task import server
from runner.task.main import end, main
from runner.tf_private import legacy_keras

WHOLE_COMMAND = "python -m runner"
"""The first argument of a child that is a command; a task has one argument, the path of its config."""
GLANCE_SECS = 0.01


class _TaskServer:
    """A child of this process that serves tasks, as far as a `TaskStarter` uses its Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("task server", timeout)
            time.sleep(GLANCE_SECS)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)


class _Starter(TaskStarter):
    """Has a server that is already there."""

    def __init__(self, made: Any, connection: socket.socket, *, forks: bool) -> None:
        super().__init__(forks=forks)
        self._made = made
        self._connection = connection

    def prepare(self, tasks: Sequence[Task]) -> None:
        has_keras_3 = tasks[0].env.get(legacy_keras.VARIABLE, "0") == "0"  # as this process has
        if self.forks and has_keras_3 and self.server is None:
            self._env = task_starter.read_at_import(tasks[0].env)
            self._socket = self._connection
            self._ready_until = time.monotonic() + task_starter.START_SECS
            self.server = self._made


def run_command(request: ChildRequest) -> ChildRequest | None:
    """Turn this process into the command of `request`, which ends with it.

    Returns:
      In a task of the command: its request; None: in its task server, at its end.
    """
    shared = server.become(request)
    for name in (LIFELINE, HEARTBEAT):  # a command has neither
        os.close(int(os.environ.pop(name)))
    tempfile.tempdir = None  # it depends on the environment
    ours, theirs = socket.socketpair()
    # At once, while this process has one thread.
    child = os.fork()
    if not child:
        ours.close()
        os.close(request.status)
        return _serve_tasks(theirs)
    theirs.close()
    made = _TaskServer(child)

    def build_starter(config: Config, *args: object, **settings: object) -> TaskStarter:
        return _Starter(made, ours, forks=config.run.preload == "auto")

    sys.argv[:] = [str(command.__file__), *request.argv[1:]]
    sys.modules["__main__"] = command
    with contextlib.ExitStack() as patched:
        for user in ("task_group", "worker_supervisor", "sweeps.multirun"):
            patched.enter_context(mock.patch(f"runner.launch.{user}.build_starter", build_starter))
        code = _exit_code_of_command()
    ours.close()
    task_server.tell(request.status, task_server.INTENT, code)
    end(code, shared)


def _exit_code_of_command() -> int:
    try:
        command.main()
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code
    return 0


def _serve_tasks(connection: socket.socket) -> ChildRequest | None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    serving = server.Server(connection)
    task_server.send(connection, {"ready": True})
    return serving.serve()


if __name__ == "__main__":
    keep_saying()
    request = server.start(socket.socket(fileno=int(sys.argv[1])))
    if request is not None and request.argv[0] == WHOLE_COMMAND:
        request = run_command(request)
    if request is not None:
        made_by_server = server.become(request)
        code = main()
        task_server.tell(request.status, task_server.INTENT, code)
        end(code, made_by_server)
    os._exit(0)
