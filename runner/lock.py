"""One process at a time in a run's or a sweep's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from runner.config import ConfigError

LOCK_FILE = ".lock"
"""Held in the folder by the process that runs it, for as long as it lives."""

TIMEOUT_SECS = 3.0
"""Another run that closes the record of a killed one holds its lock for some milliseconds."""


@contextmanager
def alone_in(directory: Path, key: str = "model_dir") -> Iterator[None]:
    """Holds the folder's lock; two that write the same files destroy both.

    Args:
      key: what the folder is in the config, for the error.

    Raises:
      ConfigError: somebody else holds it.
    """
    lock = FileLock(directory / LOCK_FILE, timeout=TIMEOUT_SECS)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{key}={directory} is in use by another run. Wait for it, or choose another.") from None
    try:
        yield
    finally:
        lock.release()
