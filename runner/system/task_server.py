"""Messages between a process that starts tasks and the server that forks them, and a child as the first sees it.

A request is one message: a line of JSON, with the child's descriptors (SCM_RIGHTS). The server answers with the
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
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.system.child_process import Descriptors

REAP_SECS = 5.0
"""How long a server may take to report how a child ended, which it does at once."""

GLANCE_SECS = 0.05

EXIT = b"exit"
INTENT = b"ends"


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


class ForkedChild:
    """A child of a task server, with the interface of a Popen.

    Args:
      pidfd: readable when it has ended, whoever its parent is then.
      status: read end of the pipe with its exit code.
    """

    def __init__(self, pid: int, pidfd: int, status: int, server: subprocess.Popen[bytes]) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status = status
        self._server = server
        os.set_blocking(status, False)
        self._received = b""
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code (negative: the signal that ended it).

        If the server ended before the child, the system no longer knows the code. Then it is the one that the child
        itself wrote, else that of SIGKILL.

        Raises:
          subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self._code is None:
            ended, _, _ = select.select([self._pidfd], [], [], timeout)
            if not ended:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._code = self._read_code()
            os.close(self._pidfd)
            os.close(self._status)
        return self._code

    def _read_code(self) -> int:
        """Return the exit code of a child that has ended: the one that the server reports (EXIT); if the server does
        not, the one that the child wrote before it ended (INTENT); without that, the code of SIGKILL.
        """
        gives_up_at = time.monotonic() + REAP_SECS
        while self._read_told_code(EXIT) is None and self._server.poll() is None and time.monotonic() < gives_up_at:
            select.select([self._status], [], [], GLANCE_SECS)
        # Read again, because the server may have reported the code after the last reading, and then ended.
        for word in (EXIT, INTENT):
            code = self._read_told_code(word)
            if code is not None:
                return code
        return -signal.SIGKILL

    def _read_told_code(self, word: bytes) -> int | None:
        """Read what the status pipe has. Return the code of the last line with this word; None: there is none yet."""
        with contextlib.suppress(BlockingIOError):  # nothing more has come
            while True:
                text = os.read(self._status, 4096)
                if not text:  # both ends that write are closed
                    break
                self._received += text
        code = None
        for line in self._received.splitlines():
            if line.startswith(word):
                code = int(line.split()[1])
        return code


# --- what both ends use -----------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send `message` as a line of JSON, and with its first byte the descriptors `files`."""
    line = json.dumps(message).encode() + b"\n"
    socket.send_fds(connection, [line[:1]], files)
    connection.sendall(line[1:])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return (message, its descriptors, not inheritable). The other end must not send two before it has an answer.

    Raises:
      ConnectionError: the other end has closed.
    """
    max_descriptors = len(ChildRequest._fields) + len(Descriptors._fields)
    first, files, *_ = socket.recv_fds(connection, 1, max_descriptors, socket.MSG_CMSG_CLOEXEC)
    with connection.makefile("rb") as rest:
        line = first + rest.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError
    return json.loads(line), files


def tell(status: int, word: bytes, code: int) -> None:
    """Write how a child ended (EXIT, of the server), or is about to end (INTENT, of the child)."""
    with contextlib.suppress(OSError):  # the other end has closed
        os.write(status, b"%s %d\n" % (word, code))


def missing_support() -> str:
    """Return why this system cannot have a task server, in words; '' if it can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} is not Linux"
    with contextlib.suppress(AttributeError, OSError):
        os.close(os.pidfd_open(os.getpid()))
        return ""
    return "this system has no pidfd (Linux 5.3)"
