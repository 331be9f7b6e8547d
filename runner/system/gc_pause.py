"""Imports without looking for garbage among what they make."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def not_searched() -> Iterator[None]:
    """What is made meanwhile is never searched for garbage, then or later. For imports: it lives as long as we do.

    TensorFlow makes 400,000 objects as it is imported. Python goes through all of them seven times before that is over,
    0.8 of 4.8 s, and once or twice more, 0.3 s each, while a large model is traced.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
