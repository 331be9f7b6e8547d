"""The config of an earlier run in its model_dir, changed by the command line.

`command=evaluate model_dir=outputs/x` evaluates the model of outputs/x, not that of the shipped defaults. Commands that
read a run therefore start from its own config.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config.schema import ConfigError, read
from runner.system.files import set_aside

FILE = "config.yaml"

_OF_THIS_COMMAND = ("command", "model_dir", "run.progress", "run.inline", "sweep")
"""Keys that always come from the command line, even if the command line does not set them."""


def read_saved(model_dir: Path) -> dict[str, Any] | None:
    """Return the tree in `model_dir/config.yaml`; None if there is none.

    Raises:
      ConfigError: the file is damaged.
    """
    path = model_dir / FILE
    return read(path) if path.exists() else None


def read_left(file: Path) -> dict[str, Any]:
    """Return the tree in a config that an earlier start left; {} if there is none. A damaged one is set aside."""
    if not file.exists():
        return {}
    try:
        tree = read(file)
        if "tracking" in tree:  # the last group; a file that was cut may be YAML
            return tree
        set_aside(file, "it is not whole")
    except ConfigError as error:
        set_aside(file, str(error))
    return {}


def changed_by(saved: Mapping[str, Any], composed: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `saved` with the changes that `overrides` make.

    The values are taken from `composed`, the shipped defaults with these overrides applied. A chosen group
    (`strategy=mirrored`) replaces the whole group, a value (`eval.steps=3`) only that value. `experiment=...` and the
    user's own groups may change anything, so with one of them `composed` itself is returned.

    Args:
      saved: the config of the earlier run.
      composed: the config that Hydra composed for this command.
      overrides: the words of the command line.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    keys = [str(override.key_or_group).replace("/", ".") for override in parsed]  # `a.b` for `++a.b=1`, `~a.b`, `a/b=x`
    # A key without a dot that the config does not have is a group of the user's own.
    if any("." not in key and key not in composed for key in keys) or "experiment" in keys:
        return copy.deepcopy(dict(composed))
    tree = copy.deepcopy(dict(saved))
    for key in (*keys, *_OF_THIS_COMMAND):
        _copy_value(tree, composed, key.split("."))
    return tree


def _copy_value(tree: dict[str, Any], composed: Mapping[str, Any], path: Sequence[str]) -> None:
    """Copy the value at `path` from `composed` to `tree`; delete it from `tree` if its group in `composed` lacks it."""
    for part in path[:-1]:
        if not isinstance(composed.get(part), Mapping):  # no key of the config, such as hydra.job.name
            return
        composed = composed[part]
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if path[-1] in composed:
        tree[path[-1]] = composed[path[-1]]
    else:
        tree.pop(path[-1], None)
