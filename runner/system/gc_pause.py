"""Imports with the garbage collector paused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def not_searched() -> Iterator[None]:
    """Exclude the objects created inside this context from garbage collection permanently.

    This is for imports, whose objects live as long as the process. TensorFlow creates 400,000 objects at import.
    Python's collector searches all of them seven times during the import (0.8 of 4.8 s), and once or twice more while a
    large model is traced (0.3 s each).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
