"""What a process said, line by line."""

from __future__ import annotations


def line_of(said: str, about: str) -> str:
    """Return the one line that holds `about`, a key or a name."""
    (line,) = [line for line in said.splitlines() if about in line]
    return line
