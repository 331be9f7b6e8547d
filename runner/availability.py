"""What the schema has and this version of the runner cannot do yet; the comments in `conf/` say so, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.config import Config, ConfigError

AVAILABLE: Mapping[str, tuple[Any, ...]] = {
    "export.exporters": (None,),
    "export.dir": (None,),
}
"""Key -> the values that it may have today. A line goes when its feature comes."""


def check_available(config: Config) -> None:
    """Refuses what is declared and does not work yet: better than a run that silently leaves it out.

    Raises:
      ConfigError: naming the key, its value and the values that work.
    """
    for key, allowed in AVAILABLE.items():
        found = _value_at(config, key)
        if found is None or found in allowed:  # null asks for nothing
            continue
        shown = key.removesuffix(".name")  # strategy=multi_worker is what was typed
        instead = f"leave it at {_in_yaml(allowed[0])}" if len(allowed) == 1 else f"use {_listed(allowed)}"
        raise ConfigError(f"{shown}={_in_yaml(found)}: this version of the runner cannot do that yet; {instead}.")


def available(key: str, choices: Sequence[str]) -> list[str]:
    """Those of `choices` that somebody who mistyped one is told; all where none of them works yet."""
    return [choice for choice in choices if choice in AVAILABLE.get(key, choices)] or list(choices)


def _value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _in_yaml(value: Any) -> str:
    """`value` as it is written in a config."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: tuple[Any, ...]) -> str:
    *others, last = map(_in_yaml, values)
    return f"{', '.join(others)} or {last}"
