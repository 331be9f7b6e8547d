"""Allow one process at a time in a run's or a sweep's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from runner.config.schema import ConfigError
from runner.system.standard_streams import say

LOCK_FILE = ".lock"
"""Lock file in the folder, held by the supervisor of the run while it lives."""

TASK_LOCK_FILE = ".task.{}.lock"
"""Lock file of a task; each task of a cluster has its own."""

TASK_TIMEOUT_SECS = 75.0
"""Seconds to wait for a task of an earlier start; more than a task takes to save after its supervisor was killed."""

TIMEOUT_SECS = 3.0
"""Seconds to wait for a lock: another run holds it for milliseconds, to close the record of a killed run."""


@contextmanager
def alone_in(directory: Path, key: str = "model_dir", timeout_secs: float = TIMEOUT_SECS) -> Iterator[None]:
    """Hold the folder's lock inside this context. Two processes that wrote the same files would destroy both runs.

    Args:
      directory: the folder.
      key: the config key of the folder, for messages.
      timeout_secs: how long to wait for another process that holds the lock.

    Raises:
      ConfigError: another process holds the lock.
    """
    try:
        held = FileLock(directory / LOCK_FILE).acquire(timeout=timeout_secs)
    except Timeout:
        raise ConfigError(f"{key}={directory} is in use by another run. Wait for it, or choose another.") from None
    with held:
        yield


@contextmanager
def only_task_in(directory: Path, name: str = "chief-0") -> Iterator[None]:
    """Hold the folder's lock for a task inside this context: after its supervisor was killed, a task still saves.

    Args:
      directory: the folder.
      name: the task's name; each task of a cluster has its own lock.

    Raises:
      ConfigError: the task of an earlier start still runs after TASK_TIMEOUT_SECS.
    """
    lock = FileLock(directory / TASK_LOCK_FILE.format(name))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        say(f"Waiting for the task of an earlier start, which is still saving in {directory}.")
        try:
            held = lock.acquire(timeout=TASK_TIMEOUT_SECS)
        except Timeout:
            holder = holder_of(Path(lock.lock_file))
            who = f"It is {holder}. " if holder else ""
            raise ConfigError(
                f"model_dir={directory} is in use: task {name} of an earlier start did not release it within "
                f"{TASK_TIMEOUT_SECS:.0f} s. {who}End that process, or choose another model_dir."
            ) from None
    with held:
        yield


def holder_of(*files: Path) -> str:
    """Return in words the process of this host that holds one of these locks; '' if none is known."""
    paths = {os.path.realpath(file) for file in files}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_other = process.pid != os.getpid()
            if is_other and any(opened.path in paths for opened in process.open_files()):
                return _describe_process(process)
    return ""


def _describe_process(process: psutil.Process) -> str:
    if process.status() != psutil.STATUS_STOPPED:
        return f"process {process.pid}"
    pid = process.pid
    return f"process {pid}, which is stopped: `kill -CONT {pid}` lets it go on, `kill -KILL {pid}` ends it"


def is_held(directory: Path) -> bool:
    """Report whether a process works on the run in the folder: its supervisor, or a task that still saves."""
    return _is_locked(directory / LOCK_FILE) or has_tasks(directory)


def wait_for_tasks(directory: Path, name: str = "*") -> None:
    """Wait until no task of an earlier start is left in the folder, so that each has written its last line.

    Args:
      directory: the folder.
      name: the task's name; `*`: all tasks.

    Raises:
      ConfigError: a task still runs after TASK_TIMEOUT_SECS.
    """
    before, after = TASK_LOCK_FILE.split("{}")
    for file in directory.glob(TASK_LOCK_FILE.format(name)):
        with only_task_in(directory, file.name.removeprefix(before).removesuffix(after)):
            pass


def has_tasks(directory: Path) -> bool:
    """Report whether a task still runs in the folder."""
    return any(_is_locked(file) for file in directory.glob(TASK_LOCK_FILE.format("*")))


def _is_locked(file: Path) -> bool:
    """Report whether another process holds a lock; a file that does not exist is not made."""
    if not file.exists():
        return False
    try:
        FileLock(file).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    return False
