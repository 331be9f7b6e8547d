"""`python -m runner` in the process of the tests, its tasks forked from one server: a start costs 0.3 s, cold it is 6.

A sweep starts its tasks like that. That the command does so by itself, and a task that imports TensorFlow by itself,
belong to tests that start a process: tests/integration/test_main.py and tests/integration/test_task_server.py.

`command_line.start` is for tests that kill, stop or signal the command: it is forked, too, and has its own process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO
from unittest import mock

import pytest

from runner.distribute.cluster import ALONE
from runner.launch import app, task_group, task_starter
from runner.launch.gang import Task
from runner.launch.task_starter import TaskStarter
from runner.system.child_process import Descriptors, Process
from runner.system.task_server import ForkedChild
from runner.tf_private import legacy_keras
from tests.support.nursery import WHOLE_COMMAND
from tests.support.processes import STARTED

ROOT = Path(__file__).parents[2]
SERVER_COMMAND = ("-P", "-m", "tests.support.nursery")
OF_NO_IMPORT = ("AWS_", "XDG_CACHE_HOME", "STEP_SECS", "SM_", "TRAINING_JOB_NAME", "AIP_", "CLOUD_ML_", "CLUSTER_SPEC")
"""Further prefixes of environment variables that no import reads: a task with others than the server's is forked."""


class Command:
    """A command that was forked, with the interface of a Popen.

    Attributes:
      returncode: None: nobody has seen its end yet.
    """

    def __init__(self, child: ForkedChild) -> None:
        self.pid = child.pid
        self.returncode: int | None = None
        self._child = child

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises: subprocess.TimeoutExpired: it still runs after so many seconds."""
        self.returncode = self._child.wait(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


PYTHON = """#!{python} -IS
import json, os, socket, sys

if sys.argv[1:3] != ["-m", "runner"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    connection.sendall(json.dumps([os.getcwd(), *sys.argv[3:]]).encode() + b"\\n")
    code, out, err = json.loads(connection.makefile().readline())
print(out, end="", flush=True)
print(err, end="", file=sys.stderr)
sys.exit(code)
"""
"""The `python` of a shell of `CommandLine.run_shell`: it asks for `-m runner`, and becomes Python for all else."""


class SharedStarter(TaskStarter):
    """Starts the tasks of all runs of a session, and forks whole commands."""

    def __init__(self) -> None:
        super().__init__(command=SERVER_COMMAND)

    def prepare(self, tasks: Sequence[Task]) -> None:
        super().prepare([_outside_pytest(task) for task in tasks])
        if self.server is not None:
            STARTED.discard(self.server)

    def start(self, task: Task) -> Process:
        return super().start(_outside_pytest(task))

    def start_command(self, words: Sequence[str], env: Mapping[str, str], out: IO[str], err: IO[str]) -> Command:
        """Fork a command, which begins in the directory of this process."""
        env = {**env, "PYTHONPATH": str(ROOT)}
        self.prepare([Task(ALONE, task_group.task_argv(Path("none")), task_group.task_env(env))])
        self.wait([])
        assert self.server is not None
        with open(os.devnull, "w") as nothing, self._lock:
            descriptors = Descriptors(nothing.fileno(), nothing.fileno(), out.fileno(), err.fileno())
            command = Command(self._fork([WHOLE_COMMAND, *words], env, descriptors))
        STARTED.add(command)
        return command

    def close(self) -> None:
        """Keep the server, at the end of each run."""

    def end(self) -> None:
        super().close()


def _outside_pytest(task: Task) -> Task:
    """Return `task` in an environment that is the same in all tests, and for all models but those of Keras 2."""
    env = {name: value for name, value in task.env.items() if name != "PYTEST_CURRENT_TEST"}
    env.setdefault(legacy_keras.VARIABLE, "0")
    return dataclasses.replace(task, env=env)


class CommandLine:
    """The command line; a call is a command."""

    def __init__(self) -> None:
        self.starter = SharedStarter()

    def __call__(self, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m runner <words>` in `cwd`. Return its exit code and what it and its tasks said."""
        with tempfile.TemporaryFile("w+", 1) as out, tempfile.TemporaryFile("w+", 1) as err:
            with pytest.MonkeyPatch.context() as patch, _redirected(1, out), _redirected(2, err):
                patch.chdir(cwd)
                patch.setattr(sys, "argv", ["runner", *words])
                patch.setattr(sys, "path", [*sys.path])
                patch.setattr(task_starter, "READ_AFTER_IMPORT", (*task_starter.READ_AFTER_IMPORT, *OF_NO_IMPORT))
                for user in ("task_group", "sweeps.multirun"):
                    patch.setattr(f"runner.launch.{user}.build_starter", lambda *args, **settings: self.starter)
                # What a command sets in its environment ends with it, too: the tasks of the next would not be forked.
                with mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT), **env}):
                    code = app.run_command_line()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def start(self, *words: str, cwd: Path, env: Mapping[str, str], out: IO[str], err: IO[str]) -> Command:
        """Start `python -m runner <words>` in `cwd`, in a process of its own."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(task_starter, "READ_AFTER_IMPORT", (*task_starter.READ_AFTER_IMPORT, *OF_NO_IMPORT))
            return self.starter.start_command(words, env, out, err)

    def run_shell(self, text: str, cwd: Path, env: Mapping[str, str], also: str = "") -> str:
        """Run `text` in bash, whose `python -m runner <words>` are calls of this, one at a time; variables that it sets
        do not reach them. Return what it printed; it must succeed.

        Args:
          also: a word that each of them gets.
        """
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
            python, address = Path(folder, "python"), f"{folder}/socket"
            python.write_text(PYTHON.format(python=sys.executable, address=address))
            python.chmod(0o755)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(address)
                server.listen()
                shell = subprocess.Popen(
                    ["bash", "-ec", text], cwd=cwd, env={**env, "PATH": f"{folder}:{env['PATH']}"},
                    stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                )  # fmt: skip
                ended = os.pidfd_open(shell.pid)
                while server.fileno() in select.select([server.fileno(), ended], [], [])[0]:
                    self._answer(server, also)
                os.close(ended)
            said.seek(0)
            printed = said.read()
            assert shell.wait() == 0, printed
            return printed

    def _answer(self, server: socket.socket, also: str) -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rw") as lines:
            folder, *words = json.loads(lines.readline())
            if also and also not in words:
                words.append(also)
            ran = self(*words, cwd=Path(folder))
            lines.write(json.dumps([ran.returncode, ran.stdout, ran.stderr]) + "\n")


@contextlib.contextmanager
def _redirected(descriptor: int, file: IO[str]) -> Iterator[None]:
    """Lead a standard stream of this process, and so of those that it starts, into `file`."""
    name = {1: "stdout", 2: "stderr"}[descriptor]
    before, stream = os.dup(descriptor), getattr(sys, name)
    stream.flush()
    os.dup2(file.fileno(), descriptor)
    setattr(sys, name, file)
    try:
        yield
    finally:
        file.flush()
        setattr(sys, name, stream)
        os.dup2(before, descriptor)
        os.close(before)
