"""What tests ask about processes that they started."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil


class Started(Protocol):
    """A Popen, or what has its interface."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


STARTED = weakref.WeakSet[Started]()
"""What a test starts, and ends with it if it fails: tests/conftest.py. What other tests use, too, is taken out."""


def end_all_of(process: Started) -> None:
    """Kill `process` and all that it has started, at once, as the end of their machine would, and wait until all are
    gone.
    """
    if process.poll() is not None:  # its number may be another process's by now
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        first.suspend()  # it starts no more
        others = first.children(recursive=True)
        for one in (*others, first):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        wait_until(lambda: all(is_gone(one.pid) for one in others))
    process.wait()


def wait_until(condition: Callable[[], bool], secs: float = 300.0, period_secs: float = 0.02) -> None:
    """Wait for what happens within seconds, or minutes on a machine that is busy with other things; look each
    `period_secs`.
    """
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(period_secs)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return all processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def pidfds_of(process: psutil.Process) -> list[str]:
    """Return the files by which a process sees the ends of others."""
    links = []
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(path))
    return [link for link in links if "pidfd" in link]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
