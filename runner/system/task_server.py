"""Both ends of the socket between a process that starts tasks and the server that forks them.

A request is one message: JSON after its length, with the child's descriptors (SCM_RIGHTS). The server answers with the
child's process id and a pidfd. The server writes how a child ended to a pipe of that child; the child writes it, too,
before it ends, in case the server is gone by then.

Python's `multiprocessing.forkserver` does not fit: its children share the server's output and environment, their work
is pickled, and an exit code is lost with the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.system.child_process import LIFELINE, Descriptors, describe_exit
from runner.system.heartbeat import HEARTBEAT

START_SECS = 300.0
"""How long a server may take for its imports."""

REPLY_SECS = 30.0
"""How long a server may take to fork."""

REAP_SECS = 5.0
"""How long a server may take to report how a child ended, which it does at once."""

GLANCE_SECS = 0.05

_LENGTH = struct.Struct("!I")
_EXIT, _INTENT = b"exit", b"ends"


class TaskServerError(RuntimeError):
    """The server cannot fork a child: it refused, or has ended."""


class ChildRequest(NamedTuple):
    """A request for a child.

    Attributes:
      argv: arguments of its command line.
      env: its whole environment, except the numbers of its descriptors.
      directory: its working directory, open.
      status: write end of its status pipe.
    """

    argv: list[str]
    env: dict[str, str]
    descriptors: Descriptors
    directory: int
    status: int

    @property
    def open_files(self) -> tuple[int, ...]:
        return (*self.descriptors, self.directory, self.status)


class TaskServer:
    """The server, as seen by the process that started it.

    Attributes:
      is_ready: its imports are done.

    Args:
      argv: its command; the number of its end of the socket is appended.
      env: its whole environment.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()  # jobs of a sweep run in threads
        self.is_ready = False
        with theirs:
            # It does not hold the run's output: a reader of that pipe must not wait for the server.
            self._process = subprocess.Popen(
                [*argv, str(theirs.fileno())], env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self._until = time.monotonic() + START_SECS

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, stops: Sequence[int] = ()) -> bool:
        """Wait for its imports, and report whether it is ready: False if `stops` is not empty.

        Raises:
          TaskServerError: it cannot be forked from, has ended, or takes too long.
        """
        while not stops:
            with self._lock:
                if self.is_ready:
                    return True
                if select.select([self._socket], [], [], GLANCE_SECS)[0]:
                    self._receive()
                    self.is_ready = True
                elif time.monotonic() > self._until:
                    raise TaskServerError(f"it was not ready after {START_SECS:.0f} s")
        return False

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], descriptors: Descriptors) -> ForkedChild:
        """Fork a child, as `child_process.Spawn` describes; `argv` are the arguments of its command line.

        Raises:
          TaskServerError: no child was forked.
        """
        status, theirs = os.pipe()
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with self._lock:
                request = ChildRequest(list(argv), dict(env), descriptors, directory, theirs)
                try:
                    send(self._socket, {"argv": request.argv, "env": request.env}, request.open_files)
                except OSError as error:
                    raise TaskServerError(self._describe_end()) from error
                if not select.select([self._socket], [], [], REPLY_SECS)[0]:
                    raise TaskServerError(f"it did not fork within {REPLY_SECS:.0f} s")
                answer, (pidfd,) = self._receive(1)
            return ForkedChild(answer["pid"], pidfd, status, self._process)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(theirs)
            os.close(directory)

    def close(self, secs: float = REAP_SECS) -> None:
        """Let the server end after its children, and wait for that up to `secs`."""
        self._socket.close()
        if not self.is_ready:  # it has no child, and would notice the closed socket only after its imports
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(secs)

    def _receive(self, num_files: int = 0) -> tuple[dict[str, Any], list[int]]:
        """Return the server's answer.

        Raises:
          TaskServerError: it refuses, or has ended.
        """
        try:
            message = receive(self._socket)
        except OSError:
            message = None
        if message is None:
            raise TaskServerError(self._describe_end())
        said, files = message
        if "error" in said or len(files) != num_files:
            raise TaskServerError(said.get("error", "it answered, but started no process"))
        return said, files

    def _describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"it {describe_exit(self._process.wait(REAP_SECS))}"
        return "it closed its connection"


class ForkedChild:
    """A child of a task server, with the interface of a Popen.

    Args:
      pidfd: readable when it has ended, whoever its parent is then.
      status: read end of the pipe with its exit code.
    """

    def __init__(self, pid: int, pidfd: int, status: int, server: subprocess.Popen[bytes]) -> None:
        self.pid = pid
        self._pidfd, self._status, self._server = pidfd, status, server
        os.set_blocking(status, False)
        self._heard = b""
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code (negative: the signal that ended it).

        If the server ended before the child, the system no longer knows the code. Then it is the one that the child
        itself wrote, else that of SIGKILL.

        Raises:
          subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self._code is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._code = self._read_code()
            os.close(self._pidfd)
            os.close(self._status)
        return self._code

    def _read_code(self) -> int:
        """Return the exit code of a child that has ended."""
        until = time.monotonic() + REAP_SECS
        while (code := self._told(_EXIT)) is None:
            if self._server.poll() is not None or time.monotonic() > until:
                break
            select.select([self._status], [], [], GLANCE_SECS)
        if code is None:  # read again, because the server may have ended in between
            code = self._told(_EXIT)
        if code is None:
            code = self._told(_INTENT)
        return -signal.SIGKILL if code is None else code

    def _told(self, word: bytes) -> int | None:
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self._status, 4096):
                self._heard += text
        codes = [int(line.split()[1]) for line in self._heard.splitlines() if line.startswith(word)]
        return codes[-1] if codes else None


# --- what both ends use -----------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send `message`, and with its first byte the descriptors."""
    text = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(text))], files)
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return (message, its descriptors, not inheritable); None at the end of the connection."""
    most = len(ChildRequest._fields) + len(Descriptors._fields)
    length, files, *_ = socket.recv_fds(connection, _LENGTH.size, most, socket.MSG_CMSG_CLOEXEC)
    while length and len(length) < _LENGTH.size:
        length += connection.recv(_LENGTH.size - len(length))
    if not length:
        return None
    text = bytearray()
    while len(text) < _LENGTH.unpack(length)[0]:
        part = connection.recv(1 << 16)
        if not part:
            return None
        text += part
    return json.loads(text), files


def tell_exit(status: int, code: int) -> None:
    """Write how a child ended; called by the server."""
    _tell(status, _EXIT, code)


def tell_intent(status: int, code: int) -> None:
    """Write how a child is about to end; called by the child."""
    _tell(status, _INTENT, code)


def _tell(status: int, word: bytes, code: int) -> None:
    with contextlib.suppress(OSError):  # the other end has closed
        os.write(status, b"%s %d\n" % (word, code))


def missing_support() -> str:
    """Return why this system cannot have a task server, in words; '' if it can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} is not Linux"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return "this system has no pidfd (Linux 5.3)"
    return ""


def environment_of_child(request: ChildRequest) -> dict[str, str]:
    """Return the environment of a forked child: the one that it would have if it had been started by its command."""
    lifeline, heartbeat, *_ = request.descriptors
    return {**request.env, LIFELINE: str(lifeline), HEARTBEAT: str(heartbeat)}
