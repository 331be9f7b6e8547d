"""Which cases of a test are left to `make test-slow`: those that a test names, and further cases of dear functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

CASES_SECS = 1.2
"""CPU seconds that all cases of a function may take in `make test`; one case at least is run."""
FURTHER = pytest.mark.slow("further case")
"""Marks the other cases."""


def is_named_slow(item: pytest.Item) -> bool:
    """Say whether the source of a test marks it slow, not its costs."""
    return any(mark != FURTHER.mark for mark in item.iter_markers("slow"))


def further_cases(cases: Sequence[pytest.Item], secs: float) -> set[pytest.Item]:
    """Return those that are more than CASES_SECS allows: what is left is spread evenly.

    Args:
      cases: of one function, none of them marked slow.
      secs: CPU seconds of all of them.
    """
    number = len(cases) if secs <= CASES_SECS else max(1, int(len(cases) * CASES_SECS / secs))
    left = {cases[place * len(cases) // number] for place in range(number)}
    return set(cases) - left


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of a test; all but `quick` are marked slow."""
    values = list(values)
    assert set(quick) <= set(values), quick
    return [value if value in quick else pytest.param(*_tuple(value), marks=pytest.mark.slow) for value in values]


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
