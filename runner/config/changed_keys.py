"""Keys of the config that were added, removed or renamed, and how each is answered.

A removed key is refused with a sentence that says what to do instead. A renamed key still works for one minor version,
with a warning. In the config.yaml of an earlier run both are read without a fuss, so that old runs can be used.
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
    """A key that is gone.

    Attributes:
      default: the value that changed nothing; a config.yaml that holds it is read in silence.
      instead: a sentence for whoever still sets it.
    """

    default: Any
    instead: str


REMOVED: Mapping[str, Removed] = {
    "cluster.standby": Removed(False, "A restarted task imports TensorFlow itself; leave the key out."),
    **{
        f"eval_strategy.{name}": Removed(
            None, f"No strategy of evaluation takes it; leave it out, or set strategy.{name}."
        )
        for name in ("communication", "timeout_secs", "bytes_per_pack", "partitioner", "address", "zone", "project")
    },
}  # fmt: skip

RENAMED: Mapping[str, str] = {}
"""Old key -> new key. Remove an entry with the second minor version after the renaming."""


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
"""Key or group that sweeps of 8664505 did not have -> its default, with which a job computes what it did."""


def rename_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the words of a command line with the new names of renamed keys, warning of each old one."""
    words = []
    for word in overrides:
        for old, new in RENAMED.items():
            renamed = re.sub(rf"^([+~]*){re.escape(old)}(?=[=.]|$)", rf"\g<1>{new}", word)
            if renamed != word:
                warn(f"{old} is now called {new}. The old name works for one more minor version.")
                word = renamed
        words.append(word)
    return words


def rename_in(tree: DictConfig) -> list[str]:
    """Give renamed keys in `tree` their new names, and return a warning for each of them."""
    warnings = []
    for old, new in RENAMED.items():
        node = _take(tree, old)
        if node is not None:
            OmegaConf.update(tree, new, node, force_add=True)
            warnings.append(f"{old} is now called {new}. The old name works for one more minor version.")
    return warnings


def update_saved(tree: DictConfig, file: str) -> None:
    """Bring the config that an earlier version saved up to date; say which settings are dropped."""
    rename_in(tree)  # nobody is warned: the next start writes the new names
    for key, removed in REMOVED.items():
        node = _take(tree, key)
        if node is not None and node._value() != removed.default:
            warn(f"{file}: {key}={node._value()} is ignored: this key was removed. {removed.instead}")


def with_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tree` with removed keys at their defaults, renamed ones under their old names, and without added ones
    that are at their defaults.

    The folder of a sweep's job is a hash of its config: with the keys of before, a sweep of before is continued.
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
    """Take the node at `key` out of `tree`, interpolations unresolved, and return it; None where there is none."""
    owner: Any = tree
    for part in key.split("."):
        # `keys`, since the schema refuses to be asked for a key that it does not have.
        if not isinstance(owner, DictConfig) or owner._is_none() or part not in owner.keys():
            return None
        holder, owner = owner, owner._get_node(part)
    del holder[part]
    return owner


def warn(text: str) -> None:
    """Say a line on stderr."""
    say(f"runner: {text}")
