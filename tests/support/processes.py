"""What tests ask about processes that they started."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], bool], secs: float = 120.0) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
