"""What tests ask about processes that they started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def wait_until(condition: Callable[[], bool], secs: float = 120.0) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return all processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
