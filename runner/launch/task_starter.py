"""Starting a task: as a new process, or forked from a task server that has already imported TensorFlow."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from runner.config.schema import UNRECORDED_COMMANDS, Config
from runner.launch.environment.gpus import VISIBLE
from runner.launch.gang import Task, start_cold
from runner.system import task_server
from runner.system.child_process import Descriptors, Process, describe_exit, pipe, start_process
from runner.system.standard_streams import say
from runner.system.start_status import START_STATUS
from runner.system.task_server import GLANCE_SECS, REAP_SECS, ChildRequest, ForkedChild

TASK_COMMAND = ("-P", "-m", "runner.task")
"""The command of a task, without its config file."""
# -P: a file `runner.py` in the user's directory must not shadow this package. The task adds the directory itself.

SERVER_COMMAND = ("-P", "-m", "runner.task.server")
"""The command of a task server, without the number of its end of the socket."""

READ_AFTER_IMPORT = ("TF_CONFIG", "RUNNER_", "MLFLOW_", VISIBLE)
"""Prefixes of the names of environment variables that no import reads. All other variables must be equal in a task
and in the server from which it is forked."""

START_SECS = 300.0
"""How long a server may take for its imports."""

REPLY_SECS = 30.0
"""How long a server may take to fork."""


class _ServerError(OSError):
    """The server cannot fork a child: it cannot be started, or refused, or takes too long."""


class TaskStarter:
    """Starts tasks: forks them from a server, or starts each cold, in a process that imports TensorFlow itself.

    The server is started for the first task that it can fork. A task is started cold if its environment differs from
    the server's in a variable that an import may read. If the server fails, all later tasks are started cold, and one
    message says so.

    Args:
      forks: False: there is no server, and each task is started cold.
      renews: end the server and start another when the environment of the tasks or the installed packages have
        changed. For a Python session, whose user sets variables and installs packages between two runs.
      command: the server's command for Python.

    Attributes:
      forks: as above; False also when the server has failed, or was closed.
      server: the server; None: there is none.
    """

    def __init__(self, *, forks: bool = True, renews: bool = False, command: Sequence[str] = SERVER_COMMAND) -> None:
        self.forks = forks
        self._renews = renews
        self._command = command
        self._env: Mapping[str, str] = {}
        self._packages: Sequence[int] = ()  # when packages were last changed, as the server was started
        self.server: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = threading.Lock()  # of all of these: jobs of a sweep run in threads

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Start the server in the background, if there is none and one of `tasks` may be forked."""
        with self._cold_after_failure():
            forkable = next((task for task in tasks if _may_be_forked(task)), None)
            if not self.forks or forkable is None:
                return
            env = read_at_import(forkable.env)
            packages = _times_of_packages()
            has_changed = (env, packages) != (self._env, self._packages)
            if self._renews and has_changed:
                self._end_server(REAP_SECS)
            if self.server is not None:
                return
            missing = task_server.missing_support()
            if missing:
                raise _ServerError(missing)
            self._env = env
            self._packages = packages
            self._socket, server_end = socket.socketpair()
            self._ready_until = time.monotonic() + START_SECS
            with server_end:
                number = server_end.fileno()
                # Without this process's stdout and stderr: a reader of these pipes must not wait for the server to end.
                self.server = subprocess.Popen(
                    [sys.executable, *self._command, str(number)],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=(number,),
                )

    def wait(self, stops: Sequence[int]) -> None:
        """Wait until the server, if any, has done its imports, or a stop is requested."""
        while not stops:
            with self._cold_after_failure():
                if self.server is None or self._is_ready:
                    return
                if _can_be_read(self._socket, GLANCE_SECS):
                    self._receive()
                    self._is_ready = True
                elif time.monotonic() > self._ready_until:
                    raise _ServerError(f"it was not ready after {START_SECS:.0f} s")

    def start(self, task: Task) -> Process:
        """Fork `task`, or start it cold."""
        with self._cold_after_failure():
            can_fork = self._is_ready and _may_be_forked(task)
            if can_fork and read_at_import(task.env) == self._env:
                if not task.prefix:  # it draws its own live line at once
                    START_STATUS.stop()
                arguments = task.argv[1 + len(TASK_COMMAND) :]
                return start_process(arguments, task.env, task.prefix, self._fork)
        return start_cold(task)

    def close(self) -> None:
        """Let the server end. Must be called when no task runs any more."""
        with self._lock:
            self._turn_off(REAP_SECS)

    def forget(self) -> None:
        """In a forked copy of this process: leave the server to the original, and serve from another one."""
        self._lock = threading.Lock()  # a thread that is not in this copy may have held it
        if self.server is not None:
            self._socket.close()  # else the server would outlive the original
            self.server.returncode = 0  # it is no child of this process
        self.server = None
        self._is_ready = False

    @contextmanager
    def _cold_after_failure(self) -> Iterator[None]:
        """Hold the lock; if the server fails inside, later tasks are started cold."""
        with self._lock:
            try:
                yield
            except OSError as error:
                reason = str(error)
                if isinstance(error, ConnectionError):
                    reason = self._describe_end()
                self._turn_off(0)  # a live server still reports how its children end
                text = f"tasks start without a task server (run.preload): {reason}"
                say(f"runner: {text}. Each task imports TensorFlow itself.")

    def _turn_off(self, secs: float) -> None:
        """Start later tasks cold, and let the server end as in `_end_server`."""
        self.forks = False
        self._end_server(secs)

    def _end_server(self, secs: float) -> None:
        """Let the server, if any, end after its children; wait for that up to `secs`."""
        if self.server is not None:
            self._socket.close()
            if not self._is_ready:  # it has no child, and would notice the closed socket only after its imports
                self.server.kill()
            with suppress(subprocess.TimeoutExpired):
                self.server.wait(secs)
        self.server = None
        self._is_ready = False

    def _fork(self, argv: Sequence[str], env: Mapping[str, str], descriptors: Descriptors) -> ForkedChild:
        """Fork a child, as `child_process.Spawn` describes; `argv` are the arguments of its command line."""
        assert self.server is not None
        # Of the files of the child the server has copies, so they are closed here in any case. The others are closed
        # after an error.
        with ExitStack() as kept_files, ExitStack() as files_of_child:
            status, child_end = pipe(kept_files, files_of_child)
            directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
            files_of_child.callback(os.close, directory)
            request = ChildRequest(list(argv), dict(env), descriptors, directory, child_end)
            task_server.send(self._socket, {"argv": request.argv, "env": request.env}, request.open_files)
            if not _can_be_read(self._socket, REPLY_SECS):
                raise _ServerError(f"it did not fork within {REPLY_SECS:.0f} s")
            answer, (pidfd,) = self._receive(1)
            kept_files.pop_all()  # `status` stays open: the returned object reads it
            return ForkedChild(answer["pid"], pidfd, status, self.server)

    def _receive(self, num_files: int = 0) -> tuple[dict[str, Any], list[int]]:
        """Return the server's answer.

        Raises:
          _ServerError: it refuses.
          ConnectionError: it has ended.
        """
        answer, files = task_server.receive(self._socket)
        if "error" in answer or len(files) != num_files:
            raise _ServerError(answer.get("error", "it answered, but started no process"))
        return answer, files

    def _describe_end(self) -> str:
        assert self.server is not None
        with suppress(subprocess.TimeoutExpired):
            return f"it {describe_exit(self.server.wait(REAP_SECS))}"
        return "it closed its connection"


def build_starter(config: Config, num_tasks: int, *, is_sweep: bool = False) -> TaskStarter:
    """Return the starter of a run's tasks, which forks them if several starts are likely.

    Args:
      config: the config.
      num_tasks: number of tasks that start together.
      is_sweep: all runs of a sweep use the starter.
    """
    is_recorded = config.command not in UNRECORDED_COMMANDS
    may_restart = is_recorded and (config.max_restarts > 0 or config.train.finds_accumulation)
    pays = is_sweep or num_tasks > 1 or may_restart
    is_allowed = config.run.preload == "auto" and not config.run.inline
    return TaskStarter(forks=pays and is_allowed)


def _can_be_read(connection: socket.socket, secs: float) -> bool:
    """Wait until something comes, or the other end is closed; return False if neither does in that many seconds."""
    readable, _, _ = select.select([connection], [], [], secs)
    return bool(readable)


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` that importing TensorFlow or another module may read."""
    return {name: value for name, value in env.items() if not name.startswith(READ_AFTER_IMPORT)}


def _times_of_packages() -> list[int]:
    """Return when a package was last installed or removed, for each folder of installed packages."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}  # often the same
    return [os.stat(folder).st_mtime_ns for folder in sorted(folders) if os.path.isdir(folder)]


def _may_be_forked(task: Task) -> bool:
    """Report whether `task` may be forked from a process that has already imported TensorFlow.

    It must run the runner's own task command, and TensorFlow's messages at import must not be wanted.
    """
    command = tuple(task.argv[: 1 + len(TASK_COMMAND)])
    is_ours = command == (sys.executable, *TASK_COMMAND)
    return is_ours and task.env.get("TF_CPP_MIN_LOG_LEVEL", "0") >= "2"
