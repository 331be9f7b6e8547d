"""Suggestions for whatever a user misspells: "did you mean" a key, a value, a function, a variable?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str], n: int = 1) -> str:
    """Return " Did you mean 'x' or 'y'?", with up to `n` of `names` that are similar to `name`; '' if none is."""
    return suggestion(nearest(str(name), names, n=n))


def nearest(name: str, names: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` of `names` similar to `name`, most similar first."""
    return difflib.get_close_matches(name, list(names), n=n, cutoff=cutoff)


def suggestion(names: list[str]) -> str:
    """Return " Did you mean 'x' or 'y'?", with all of `names`; '' if there are none."""
    if not names:
        return ""
    choices = " or ".join(map(repr, names))
    return f" Did you mean {choices}?"
