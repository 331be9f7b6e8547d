"""Keys of the config that were added, removed or renamed.

A removed key is refused with a sentence that says what to do instead. A renamed key still works, with a warning, until
the second minor version after the renaming. Both are accepted in the config.yaml of an earlier run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.system.standard_streams import say


@dataclass(frozen=True)
class Removed:
    """A removed key.

    Attributes:
      default: the value without effect; a config.yaml that holds it is read without a message.
      instead: what to do instead, in a sentence.
    """

    default: Any
    instead: str


REMOVED: Mapping[str, Removed] = {
    "cluster.standby": Removed(False, "A restarted task imports TensorFlow itself. Remove the key."),
    "run.profile_format": Removed(
        "trace", "Remove it. xprof shows the table of operations: pip install xprof, then xprof --logdir <model_dir>."
    ),
    **{
        f"eval_strategy.{name}": Removed(
            None, f"No evaluation strategy uses this key. Remove it, or set strategy.{name}."
        )
        for name in ("communication", "timeout_secs", "bytes_per_pack", "partitioner", "address", "zone", "project")
    },
}  # fmt: skip

RENAMED: Mapping[str, str] = {}
"""Old key -> new key. Remove an entry in the second minor version after the renaming."""


_OPTIONS = {
    "deterministic": None, "private_threadpool_size": None, "max_intra_op_parallelism": None,
    "autotune": {"enabled": None, "ram_budget": None, "cpu_budget": None},
}  # fmt: skip

ADDED: Mapping[str, Any] = {
    "checkpoint.input_state": "auto", "eval.checkpoint": None, "eval.name": None, "export.alias": None,
    "export.register": None, "input.predict.options": _OPTIONS, "input.train.options": _OPTIONS,
    "input.train.prefetch_to_device": None,
    "input.train.service": {"address": None, "processing_mode": "distributed_epoch", "job_name": None},
    "new": {"path": None}, "predict.checkpoint": None, "run.eager": False,
    "run.freeze_secs": None, "run.inter_op_threads": None, "run.intra_op_threads": None, "run.log_level": "info",
    "run.memory_growth": False, "run.preload": "auto", "run.preemption_notice": None, "run.profile_format": "trace",
    "run.secrets": None, "train.hooks": [], "train.log_gradient_norm": False, "train.max_secs": None,
    "train.metrics": False, "train.reduce_lr_on_plateau": {
        "metric": None, "mode": None, "factor": 0.1, "patience_evals": 10, "min_delta": 0.0001, "cooldown_evals": 0,
        "min_lr": 0.0,
    },
}  # fmt: skip
"""Key or group that was added after commit 8664505, and perhaps removed since -> its default, with which a job computes
the same as without it."""


def rename_overrides(overrides: Iterable[str]) -> list[str]:
    """Return a command line's words with renamed keys under their new names, and print a warning for each old name."""
    words = []
    for word in overrides:
        for old, new in RENAMED.items():
            renamed = re.sub(rf"^([+~]*){re.escape(old)}(?=[=.]|$)", rf"\g<1>{new}", word)
            if renamed != word:
                warn(f"{old} is now called {new}. The old name works for one more minor version.")
                word = renamed
        words.append(word)
    return words


def rename_in(tree: DictConfig, at: str = "") -> list[str]:
    """Rename old keys in `tree`, which stands at the group `at`, and return a warning for each."""
    warnings = []
    for old, new in RENAMED.items():
        inside = old.startswith(at) and new.startswith(at)
        node = _take(tree, old.removeprefix(at)) if inside else None
        if node is not None:
            OmegaConf.update(tree, new.removeprefix(at), node, force_add=True)
            warnings.append(f"{old} is now called {new}. The old name works for one more minor version.")
    return warnings


def update_saved(tree: DictConfig, file: str) -> None:
    """Update, in place, the config that an earlier version saved, and warn of settings that are dropped.

    Args:
      tree: the config.
      file: the path of the config, for warnings.
    """
    rename_in(tree)  # without warnings, because the next start writes the new names
    for key, removed in REMOVED.items():
        node = _take(tree, key)
        if node is not None and node._value() != removed.default:
            warn(f"{file}: {key}={node._value()} is ignored, because this key was removed. {removed.instead}")


def with_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` as an earlier version would have written it, to compute the same folder name for a sweep's job.

    The name is a hash of the job's config, and with it a sweep of an earlier version is resumed. Removed keys are added
    with their defaults, renamed keys get their old names, and added keys that have their defaults are left out.
    """
    node = OmegaConf.create(dict(tree))
    for old, new in RENAMED.items():
        OmegaConf.update(node, old, _take(node, new), force_add=True)
    for key, removed in REMOVED.items():
        OmegaConf.update(node, key, removed.default, force_add=True)
    for key, default in ADDED.items():
        if OmegaConf.select(node, key) == default:
            _take(node, key)
    return OmegaConf.to_container(node)  # type: ignore[return-value]


def _take(tree: DictConfig, key: str) -> Any:
    """Remove the node at `key` from `tree`, with interpolations unresolved, and return it; None if there is none."""
    owner: Any = tree
    for part in key.split("."):
        # `keys`, because the schema raises an error for a key that it does not have.
        if not isinstance(owner, DictConfig) or owner._is_none() or part not in owner.keys():
            return None
        holder, owner = owner, owner._get_node(part)
    del holder[part]
    return owner


def warn(text: str) -> None:
    """Print a line on stderr."""
    say(f"runner: {text}")
