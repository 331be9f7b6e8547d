"""Keys of the config that were removed or renamed.

A removed key is refused with a sentence that says what to do instead. A renamed key still works, with a warning, until
the second minor version after the renaming. Both are accepted in the config.yaml of an earlier run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.system.standard_streams import say

if TYPE_CHECKING:  # imported where it is used, because `--help` needs the names of the keys only
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Removed:
    """A removed key.

    Attributes:
      default: the value without effect; a config.yaml that holds it is read without a message.
      instead: what to do instead, in a sentence.
    """

    default: Any
    instead: str


_NEVER_OF_EVALUATION = ("communication", "timeout_secs", "bytes_per_pack", "partitioner", "address", "zone", "project")
"""Keys of `strategy` that `eval_strategy` once had, although no strategy of one process uses them."""

REMOVED: Mapping[str, Removed] = {
    "cluster.standby": Removed(False, "A restarted task imports TensorFlow itself. Remove the key."),
    "run.profile_format": Removed(
        "trace", "Remove it. xprof shows the table of operations: pip install xprof, then xprof --logdir <model_dir>."
    ),
    **{
        f"eval_strategy.{name}": Removed(
            None, f"No evaluation strategy uses this key. Remove it, or set strategy.{name}."
        )
        for name in _NEVER_OF_EVALUATION
    },
}  # fmt: skip

RENAMED: Mapping[str, str] = {}
"""Old key -> new key. Remove an entry in the second minor version after the renaming.

In a user's config file of a group only keys that stay in the group are renamed.
"""

_IN_WORDS = "{} is now called {}. The old name works for one more minor version."


def rename_overrides(overrides: Iterable[str]) -> list[str]:
    """Return a command line's words with renamed keys under their new names, and print a warning for each old name."""
    words = list(overrides)
    for old, new in RENAMED.items():
        for place, word in enumerate(words):
            words[place] = re.sub(rf"^([+~]*){re.escape(old)}(?=[=.]|$)", rf"\g<1>{new}", word)
            if words[place] != word:
                warn(_IN_WORDS.format(old, new))
    return words


def rename_in(tree: DictConfig, at: str = "") -> list[str]:
    """Rename old keys in `tree`, which stands at the group `at`, and return a warning for each."""
    from omegaconf import OmegaConf

    warnings = []
    for old, new in RENAMED.items():
        is_inside = old.startswith(at) and new.startswith(at)
        if not is_inside:
            continue
        node = _pop_node(tree, old.removeprefix(at))
        if node is not None:
            OmegaConf.update(tree, new.removeprefix(at), node, force_add=True)
            warnings.append(_IN_WORDS.format(old, new))
    return warnings


def update_saved(tree: DictConfig, file: str) -> None:
    """Update, in place, the config that an earlier version saved, and warn of settings that are dropped.

    Args:
      tree: the config.
      file: the path of the config, for warnings.
    """
    rename_in(tree)  # without warnings, because the next start writes the new names
    for key, removed in REMOVED.items():
        node = _pop_node(tree, key)
        if node is not None and node._value() != removed.default:
            warn(f"{file}: {key}={node._value()} is ignored, because this key was removed. {removed.instead}")


def _pop_node(tree: DictConfig, key: str) -> Any:
    """Remove the node at `key` from `tree`, with interpolations unresolved, and return it; None if there is none."""
    from omegaconf import DictConfig

    node: Any = tree
    for part in key.split("."):
        # `keys`, because the schema raises an error for a key that it does not have.
        if not isinstance(node, DictConfig) or node._is_none() or part not in node.keys():
            return None
        parent = node
        node = parent._get_node(part)
    del parent[part]
    return node


def warn(text: str) -> None:
    """Print a line on stderr."""
    say(f"runner: {text}")
