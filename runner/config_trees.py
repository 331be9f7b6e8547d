"""A config as a tree of plain values: its text, its file, its dotted keys; and what is said of one that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError


class ConfigError(ValueError):
    """The config is wrong; the message names the key, the value, what is allowed and the nearest valid name."""


def as_yaml(tree: Mapping[str, Any]) -> str:
    """The text of a config file."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(tree)))


def read(path: Path) -> dict[str, Any]:
    """The tree in a config file that `save` wrote, not checked.

    Raises:
      ConfigError: it is damaged.
    """
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no config.")
    return tree


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, for what has no nesting (MLflow's parameters). An empty mapping is itself a value."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, child in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), child)
        else:
            flat[prefix] = value

    walk("", tree)
    return flat
