"""Child processes that end when they are told to, and never outlive the process that started them.

A child gets a session of its own, so that everything it starts can be ended with it and a Ctrl-C on the terminal
reaches only the parent. It holds the read end of a pipe whose write end only the parent has: when the parent dies,
however it dies, the pipe ends and the child stops itself (`end_with_parent`). On another pipe it gives signs of life.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from runner.system.heartbeat import HEARTBEAT, HeartbeatMonitor

LIFELINE = "RUNNER_LIFELINE_FD"
"""The environment variable that tells a child which file descriptor ends when its parent does."""


@dataclass(eq=False)
class Process:
    """A running child. Its group is `pid`: it leads its own session.

    Attributes:
      lifeline: our end of the pipe that ends when we do; -1 once it is closed.
      monitor: its signs of life.
      pumps: the threads that copy what it says.
    """

    popen: subprocess.Popen[bytes]
    lifeline: int
    monitor: HeartbeatMonitor
    pumps: Sequence[threading.Thread] = ()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait(self, timeout_secs: float | None = None) -> int | None:
        """The exit code (negative: the signal that ended it); None when it still runs after `timeout_secs`."""
        try:
            return self.popen.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_stop(self) -> None:
        """Sends SIGTERM to the child itself: it saves what it has and ends."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, grace_secs: float) -> int:
        """Ends the child and everything it started: SIGTERM, up to `grace_secs`, then SIGKILL. Its exit code."""
        if self.wait(0) is None:
            self.ask_to_stop()
            self.wait(grace_secs)
        self.kill()
        return self.close()

    def kill(self) -> None:
        """SIGKILL to what is left of the group. Safe in a signal handler: it does not wait."""
        # The group can outlive its leader (a user's helper process), and its id is not reused while it does.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> int:
        """Waits for the end and lets the lifeline go. The child's exit code."""
        code = self.popen.wait()
        for pump in self.pumps:
            pump.join()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
            self.monitor.close()
        return code


def start_process(argv: Sequence[str], env: Mapping[str, str], prefix: str = "") -> Process:
    """Starts `argv` with exactly the environment `env`.

    Args:
      prefix: put before each line that it says, where several processes talk at a time; '': its output goes where ours
        goes, a terminal stays one.
    """
    lifeline, write_end = os.pipe()
    heard, heartbeat = os.pipe()
    output = subprocess.PIPE if prefix else None
    try:
        popen = subprocess.Popen(
            list(argv), env={**env, LIFELINE: str(lifeline), HEARTBEAT: str(heartbeat)},
            stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True, pass_fds=(lifeline, heartbeat),
        )  # fmt: skip
    except BaseException:
        os.close(write_end)
        os.close(heard)
        raise
    finally:
        os.close(lifeline)
        os.close(heartbeat)
    pumps = [
        _start_pump(ours, theirs, prefix)
        for ours, theirs in ((popen.stdout, sys.stdout), (popen.stderr, sys.stderr))
        if ours is not None
    ]
    return Process(popen, write_end, HeartbeatMonitor(heard), pumps)


def end_with_parent(env: Mapping[str, str], grace_secs: float = 30.0) -> None:
    """In a child: SIGTERM to itself when the parent dies, SIGKILL to its group `grace_secs` later.

    Does nothing in a process that `start_process` did not start.
    """
    if LIFELINE not in env:
        return
    descriptor = int(env[LIFELINE])
    os.set_inheritable(descriptor, False)  # what the child starts must not hold it
    threading.Thread(target=_watch, args=(descriptor, grace_secs), daemon=True, name="lifeline").start()


def describe_exit(code: int) -> str:
    """What an exit code says, in words: `exited with 1`, `was killed by SIGKILL (out of memory?)`."""
    if code >= 0:
        return f"exited with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (by the system for lack of memory, or by hand)" if -code == 9 else "")


def _watch(descriptor: int, grace_secs: float) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_secs)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _start_pump(source: IO[bytes], target: IO[str], prefix: str) -> threading.Thread:
    """A thread that copies each line of `source` with `prefix` before it."""

    def copy() -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\n")
                target.write(f"{prefix}{text}\n")  # one write a line: those of several processes do not mix
                target.flush()

    thread = threading.Thread(target=copy, daemon=True, name=f"output of {prefix.strip()}")
    thread.start()
    return thread
