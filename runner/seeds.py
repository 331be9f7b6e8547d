"""Seeds: what is random in a run is a function of one number."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from runner import random_bridge


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python, NumPy and TensorFlow draw from `seed`; the first two get their state back afterwards.

    Compiled loops stay, unless something has drawn eagerly that would not start again otherwise.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    random_bridge.set_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
