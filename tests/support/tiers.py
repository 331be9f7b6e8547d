"""Which cases of a test are left to `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of a test; all but `quick` are marked slow."""
    values = list(values)
    assert set(quick) <= set(values), quick
    return [value if value in quick else pytest.param(*_tuple(value), marks=pytest.mark.slow) for value in values]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
