"""Child processes that end when asked, and never outlive the process that started them.

A child has its own session, so that it and everything it starts can be ended together, and Ctrl-C on the terminal
reaches only the parent. It holds the read end of a pipe whose write end only the parent has. When the parent dies, for
any reason, the pipe ends, and a watchdog process ends the child (`end_with_parent`). The child sends heartbeats on
another pipe.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, NamedTuple, Protocol

from runner.system.heartbeat import HEARTBEAT, HeartbeatMonitor
from runner.system.standard_streams import say
from runner.system.start_status import SCREEN

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which batch queues announce the end of a job (Slurm's `--signal`, submitit), to all of its processes."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *NOTICES)
"""Signals that ask a run to stop."""

LIFELINE = "RUNNER_LIFELINE_FD"
"""Environment variable with the file descriptor of the pipe that ends with the parent."""


class Child(Protocol):
    """The interface of a started process, which Popen implements."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code (negative: the signal that ended it). Raises: subprocess.TimeoutExpired."""
        ...


class Descriptors(NamedTuple):
    """The file descriptors that a child gets. Its stdin is empty. The caller closes the descriptors."""

    lifeline: int
    heartbeat: int
    stdout: int = 1
    stderr: int = 2

    def added_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment `env` of a child, with the variables that name its descriptors."""
        return {**env, LIFELINE: str(self.lifeline), HEARTBEAT: str(self.heartbeat)}


class Spawn(Protocol):
    """Starts `argv` in its own session, with exactly the environment `env` plus LIFELINE and HEARTBEAT."""

    def __call__(self, argv: Sequence[str], env: Mapping[str, str], descriptors: Descriptors) -> Child: ...


@dataclass(eq=False)
class Process:
    """A running child, which leads its own session and process group.

    Attributes:
      child: the started process.
      lifeline: the parent's end of the pipe that ends with the parent; -1 once it is closed.
      monitor: receives the child's heartbeats.
      pumps: threads that copy the child's output.
    """

    child: Child
    lifeline: int
    monitor: HeartbeatMonitor
    pumps: Sequence[threading.Thread] = ()

    @property
    def pid(self) -> int:
        return self.child.pid

    def wait(self, timeout_secs: float | None = None) -> int | None:
        """Return the exit code (negative: the signal that ended it); None if it still runs after `timeout_secs`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(timeout_secs)
        return None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the child itself, which then saves and ends."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the rest of the group. Safe in a signal handler, because it does not wait."""
        # The group can outlive its leader (a user's helper process), and its id is not reused while it does.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> int:
        """Wait for the end, close the lifeline and return the child's exit code."""
        code = self.child.wait()
        for pump in self.pumps:
            pump.join()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
            self.monitor.close()
        return code


def _spawn(argv: Sequence[str], env: Mapping[str, str], descriptors: Descriptors) -> Child:
    """Start a process that begins with `argv`, as `Spawn` says."""
    kept = [descriptors.lifeline, descriptors.heartbeat]
    if SCREEN in env:
        kept.append(int(env[SCREEN]))
    # Our own stdout and stderr are not passed but inherited.
    stdout = None if descriptors.stdout == 1 else descriptors.stdout
    stderr = None if descriptors.stderr == 2 else descriptors.stderr
    return subprocess.Popen(
        list(argv),
        env=descriptors.added_to(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=kept,
    )


def start_process(argv: Sequence[str], env: Mapping[str, str], prefix: str = "", spawn: Spawn = _spawn) -> Process:
    """Start `argv` with exactly the environment `env`.

    Args:
      prefix: precedes each line of its output, if several processes print at a time; '': it shares our output and
        terminal.
      spawn: starts it; that of a task server forks it.
    """
    # With a prefix the child's stdout and stderr are pipes, which this process reads, and prints line by line.
    line_printers: Sequence[Callable[[str], None]] = (_print_line, say) if prefix else ()
    with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as own_ends:
        lifeline, lifeline_write_end = pipe(child_ends, own_ends)
        if SCREEN in env:
            child_ends.callback(os.close, int(env[SCREEN]))
        heartbeat_source, heartbeat = pipe(own_ends, child_ends)
        outputs = [pipe(own_ends, child_ends) for _ in line_printers]
        write_ends = [end for _, end in outputs]
        child = spawn(argv, env, Descriptors(lifeline, heartbeat, *write_ends))
        own_ends.pop_all()  # these stay open; `with` closes the child's
    # newline: a progress bar's carriage returns are no ends of lines.
    sources = [os.fdopen(source, encoding="utf-8", errors="replace", newline="\n") for source, _ in outputs]
    pumps = [start_pump(source, put, prefix) for source, put in zip(sources, line_printers, strict=True)]
    return Process(child, lifeline_write_end, HeartbeatMonitor(heartbeat_source), pumps)


def _print_line(line: str) -> None:
    # In one write, so that lines of several threads do not mix.
    print(f"{line}\n", end="", flush=True)


def pipe(reads: contextlib.ExitStack, writes: contextlib.ExitStack) -> tuple[int, int]:
    """Return (end to read, end to write) of a new pipe.

    Args:
      reads, writes: close the end to read, and the end to write.
    """
    source, write_end = os.pipe()
    reads.callback(os.close, source)
    writes.callback(os.close, write_end)
    return source, write_end


GRACE_SECS = 60.0
"""Seconds that a child may take to save after its parent has died."""

IDLE_GRACE_SECS = 5.0
"""Seconds that a child without anything to save may take to end after its parent has died."""


class Watchdog:
    """A process that ends this process, and all that it started, when its parent has died.

    A thread cannot do that: while TensorFlow 2.21 builds a MultiWorkerMirroredStrategy and waits minutes for other
    workers, no Python thread of the process runs. Nor can PR_SET_PDEATHSIG: it is already sent when the thread that
    started the process ends, and it does not reach the rest of the group.

    Args:
      lifeline: the pipe that ends when the parent does; -1: there is no watchdog.
      grace_secs: see `end_with_parent`.
    """

    def __init__(self, lifeline: int, grace_secs: float) -> None:
        self._has_work = mmap.mmap(-1, 1)  # one byte of memory, 0 or 1, that is shared with the watchdog
        if lifeline < 0:
            return
        task = os.getpid()
        task_pidfd = _open_pidfd()
        # Fork before TensorFlow is used, and usually before it is imported, while this process has one thread.
        watchdog = os.fork()
        if watchdog == 0:
            try:
                _detach(keep=(lifeline, task_pidfd))
                self._watch(task, lifeline, task_pidfd, grace_secs)
            finally:
                os._exit(0)
        if task_pidfd >= 0:
            os.close(task_pidfd)
        os.set_inheritable(lifeline, False)  # processes that the child starts must not inherit it
        # If the watchdog is killed, a thread of this process does its work.
        lifeline_args = (watchdog, lifeline, grace_secs)
        threading.Thread(target=_watch_lifeline, args=lifeline_args, daemon=True, name="lifeline").start()

    def note_work(self) -> None:
        """Report that from now on there is something to save, so that the whole grace period is given."""
        self._has_work[0] = 1

    def _watch(self, task: int, lifeline: int, task_pidfd: int, grace_secs: float) -> None:
        """In the watchdog's process: wait until the task or its parent ends. If the parent does, ask the task to stop,
        and after the grace period kill its process group, to which this process belongs.

        Args:
          task_pidfd: readable when the task has ended; -1: the system has no such descriptors.
        """
        poll = select.poll()
        poll.register(lifeline, select.POLLIN)
        if task_pidfd >= 0:
            poll.register(task_pidfd, select.POLLIN)
        # Without a pidfd, look from time to time whether the task has ended: this process then has another parent.
        timeout_ms = None if task_pidfd >= 0 else 1000 * _GLANCE_SECS
        while not poll.poll(timeout_ms):
            if os.getppid() != task:
                return
        if _has_ended(task, task_pidfd, 0):
            return  # the parent lives, and will end processes that the task may have left behind
        with contextlib.suppress(ProcessLookupError):
            os.kill(task, signal.SIGTERM)
        orphaned = time.monotonic()
        while not _has_ended(task, task_pidfd, _GLANCE_SECS):
            grace = grace_secs if self._has_work[0] else min(grace_secs, IDLE_GRACE_SECS)
            if time.monotonic() - orphaned > grace:
                break
        os.killpg(os.getpgid(0), signal.SIGKILL)  # and this process


def end_with_parent(env: Mapping[str, str], grace_secs: float = GRACE_SECS) -> Watchdog:
    """In a child: when the parent dies, send SIGTERM to this process, and SIGKILL to its group after a grace period.

    Must be called before any thread is started. Does nothing in a process that `start_process` did not start.

    Args:
      env: the environment, which names the pipe.
      grace_secs: the grace period after `Watchdog.note_work`. Before that it is IDLE_GRACE_SECS, if that is shorter.
    """
    return Watchdog(int(env.get(LIFELINE, -1)), grace_secs)


def describe_exit(code: int) -> str:
    """Return an exit code in words: `exited with 1`, `was killed by SIGTERM`."""
    if code >= 0:
        return f"exited with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"was killed by {name} (by the system for lack of memory, or by hand)"
    return f"was killed by {name}"


_GLANCE_SECS = 0.2


def _watch_lifeline(watchdog: int, lifeline: int, grace_secs: float) -> None:
    """Do the watchdog's work in a thread of the task, if the watchdog was killed."""
    while os.read(lifeline, 1):  # until the parent dies
        pass
    # Wait for the end of the watchdog. If it lives, it kills this process and so this thread. To check once whether it
    # lives is not enough, because it may be killed just after the check.
    with contextlib.suppress(ChildProcessError):  # it has been waited for already
        os.waitpid(watchdog, 0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_secs)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _open_pidfd() -> int:
    """Return a descriptor that is readable when this process has ended; -1 if the system has none (before Linux
    5.3).
    """
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(os.getpid())
    return -1


def _has_ended(task: int, pidfd: int, secs: float) -> bool:
    """Report whether the task, the parent of this process, has ended: as soon as it has, or after `secs`."""
    if pidfd < 0:
        time.sleep(secs)
        return os.getppid() != task
    return bool(select.select([pidfd], [], [], secs)[0])


def _detach(keep: Sequence[int]) -> None:
    """In the watchdog's process: release all that it has of the task: signals, output, and all files but `keep`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    kept = sorted(descriptor for descriptor in keep if descriptor >= 0)
    first = 3  # of the range of descriptors to close next; the ranges lie between those that are kept
    for descriptor in kept:
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def start_pump(source: IO[str], put: Callable[[str], None], prefix: str = "") -> threading.Thread:
    """Start a thread that passes each line of `source`, with `prefix` before it, to `put`."""

    def copy() -> None:
        with source:
            for line in source:
                # This process's output may be closed, or its encoding may lack a letter. Go on reading even so, because
                # the child would block on a full pipe.
                with contextlib.suppress(OSError, ValueError):
                    put(prefix + line.rstrip("\n"))

    thread = threading.Thread(target=copy, daemon=True, name=f"output of {prefix.strip()}")
    thread.start()
    return thread
