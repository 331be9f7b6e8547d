"""Record a run in a user's class, which runs in a separate process.

The class is never imported in this process, so it may crash, hang, print or call sys.exit. Calls and answers are JSON
lines on a socket; `tracker_process` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from runner.config.schema import TrackingBackend
from runner.system import child_process
from runner.system.child_process import LIFELINE, Descriptors, describe_exit
from runner.system.heartbeat import HEARTBEAT
from runner.tracking.tracker import DatasetFacts, ExportedModel, Point, Tracker, TrackerError

SOCKET = "RUNNER_TRACKER_FD"
"""Environment variable with the file descriptor of the tracker process's end of the socket."""
MODULE = "runner.tracking.backends.tracker_process"
MAX_DEATHS = 3
"""Number of times that the process may die. Then it is not restarted, because its imports slow training down."""
GRACE_SECS = 5.0
"""Seconds that the process may take to end after everything is recorded."""


@runtime_checkable
class RunTracker(Protocol):
    """The interface of a user's class that records runs: `tracking.backend=my_pkg.trackers.Mine`.

    An object of the class is created in a separate process, with its `params` as keyword arguments. Its methods are
    called there, one at a time. If a method raises an error, the error is reported with your line of code, training
    continues, and the call is repeated later. The class may also have the methods `set_tags(tags)`, `log_file(path,
    folder)`, `log_image(name, path, step, time)`, `log_input(dataset)`, `log_model(model)` and `address()`, which are
    described in `runner.tracking.tracker.Tracker`.
    """

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        """Begin a run, or continue one.

        Args:
          run_id: the value that `start` returned for this run earlier; None: the run is new.
          name: name of the run.
          params, tags: facts about the run; empty for a command that only reads it (evaluate, predict, export).

        Returns:
          An id that identifies the run when it is continued; None: the runner chooses one.
        """
        ...

    def log_points(self, points: Sequence[Point]) -> None:
        """Record metrics, each a `Point(name, value, step, time)`, in order.

        Each point is passed once, with one exception: if a process is killed between a call and its note in run.json,
        the points of that call are passed again, with equal values.
        """
        ...

    def end(self, status: str) -> None:
        """End the run with the status FINISHED, FAILED or KILLED. No other method is called afterwards."""
        ...


class UserTracker(Tracker):
    """The supervisor's end of a user's class.

    Args:
      backend: the class and its params.
      name: name of the run, for a command that only reads it.
      env: environment of the process.
    """

    def __init__(self, backend: TrackingBackend, name: str, env: Mapping[str, str]) -> None:
        self._backend, self._name, self._env = backend, name, env
        self._process: child_process.Process | None = None
        self._socket: socket.socket | None = None
        self._lines: Any = None
        self._methods: frozenset[str] = frozenset()
        self._started: list[Any] | None = None  # the arguments of `start`, for a process that replaces this one
        self._address: str | None = None
        self._deaths = 0
        self._is_asking = self._is_closed = False

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        self._started = None
        self._begin()
        returned = self._ask("start", run_id, name, params, tags)
        found = str(returned or run_id or os.urandom(8).hex())
        self._started = [found, name, params, tags]
        if "address" in self._methods:  # ask now, since the process may hang at the end of the run
            address = self._ask("address")
            self._address = None if address is None else str(address)
        return found

    def join(self, run_id: str) -> bool:
        self.start(run_id, self._name, {}, {})
        return True

    def log_points(self, points: Sequence[Point]) -> None:
        self._call("log_points", [[one.name, one.value, one.step, one.time] for one in points])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._call("set_tags", tags)

    def log_file(self, path: Path, folder: str = "") -> None:
        self._call("log_file", path, folder)

    def log_image(self, name: str, path: Path, step: int, time: float) -> None:
        self._call("log_image", name, path, step, time)

    def log_input(self, dataset: DatasetFacts) -> None:
        self._call("log_input", asdict(dataset))

    def log_model(self, model: ExportedModel) -> None:
        self._call("log_model", asdict(model))

    def end(self, status: str) -> None:
        self._call("end", status)

    def leave(self, status: str) -> None:
        self._call("end", status)

    def address(self) -> str | None:
        return self._address

    def close(self) -> None:
        self._is_closed, hangs = True, self._is_asking
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the process, and any call that waits for it
        process, self._process = self._process, None
        if process is not None:
            process.wait(0.0 if hangs else GRACE_SECS)
            process.stop(0.0 if hangs else 1.0)
        if not hangs:  # otherwise the waiting thread does it
            self._close_socket()

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the class if it has it.

        Raises:
          TrackerError: the method or its process failed.
        """
        if self._process is None:
            self._begin()
            if self._started is not None:
                self._ask("start", *self._started)
        return self._ask(method, *args) if method in self._methods else None

    def _begin(self) -> None:
        """Start the process and make the object there, if not done yet."""
        if self._process is not None:
            return
        if self._deaths >= MAX_DEATHS or self._is_closed:
            raise TrackerError(f"its process has ended {self._deaths} times and is not restarted")
        ours, theirs = socket.socketpair()

        def spawn(argv: Sequence[str], env: Mapping[str, str], descriptors: Descriptors) -> subprocess.Popen[bytes]:
            lifeline, heartbeat, _, stderr = descriptors
            return subprocess.Popen(
                list(argv),
                env={**env, LIFELINE: str(lifeline), HEARTBEAT: str(heartbeat), SOCKET: str(theirs.fileno())},
                stdin=subprocess.DEVNULL, stdout=stderr,  # stdout of this process is for results
                start_new_session=True, pass_fds=(lifeline, heartbeat, theirs.fileno()),
            )  # fmt: skip

        with theirs:
            self._process = child_process.start_process([sys.executable, "-m", MODULE], self._env, spawn=spawn)
        self._socket = ours
        self._lines = ours.makefile("rwb")
        try:
            self._methods = frozenset(self._ask("", self._backend.name, self._backend.params))
        except TrackerError:
            if self._process is not None:
                self._let_go()  # the next attempt imports the class again, which the user may have fixed
            raise

    def _ask(self, method: str, *args: Any) -> Any:
        self._is_asking = True
        try:
            self._lines.write(json.dumps([method, *args], default=str).encode() + b"\n")
            self._lines.flush()
            answer = self._lines.readline()
        except (OSError, ValueError):  # one of the ends is closed
            answer = b""
        finally:
            self._is_asking = False
        if not answer and self._is_closed:
            self._close_socket()
            raise TrackerError("the run has ended without waiting for it")
        if not answer:
            code = self._let_go()
            raise TrackerError(f"its process {describe_exit(code)}{f' in {method}' if method else ''}")
        value, error = json.loads(answer)
        if error is not None:
            raise TrackerError(error)
        return value

    def _let_go(self) -> int:
        """End the process and return its exit code."""
        self._deaths += 1
        process, self._process = self._process, None
        self._close_socket()
        if process is None:
            return 0
        process.wait(GRACE_SECS)
        return process.stop(0.0)

    def _close_socket(self) -> None:
        for one in (self._lines, self._socket):
            with contextlib.suppress(OSError):
                if one is not None:
                    one.close()
