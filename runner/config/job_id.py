"""The names of sweeps and jobs: a hash of their settings, so the same command finds the same folder again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

_LENGTH = 10

_SHOWN_ONLY = (
    "run.progress", "run.inline", "run.freeze_secs", "run.log_level", "run.memory_growth", "run.preload",
    "run.preemption_notice", "run.secrets", "sweep", "tracking",
)  # fmt: skip
"""Keys that change only how a run is shown, watched, ranked or recorded, and not what it computes."""


def sweep_id(overrides: Iterable[str]) -> str:
    """Return the name of a sweep: a hash of its sorted overrides, without the number of parallel jobs.

    A dry run of a sweep (`command=dry_run`) has the name of the sweep itself.
    """
    kept = (text for text in overrides if text != "command=dry_run")
    return _hash(sorted(text for text in kept if not is_shown_only(text.lstrip("+~").partition("=")[0])))


def job_id(tree: Mapping[str, Any], *, reads_a_run: bool = False) -> str:
    """Return the name of a job: a hash of its resolved config, without model_dir and the keys in `_SHOWN_ONLY`.

    Args:
      tree: the config.
      reads_a_run: the job reads the run in `model_dir`, so model_dir is part of the hash.
    """
    without = ("model_dir", *_SHOWN_ONLY) if not reads_a_run else _SHOWN_ONLY
    return _hash(_pruned(tree, without))


def _pruned(tree: Mapping[str, Any], without: Iterable[str]) -> dict[str, Any]:
    """Return `tree` without the keys in `without`; such a key has one or two parts."""
    pruned = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for key in without:
        group, _, name = key.rpartition(".")
        owner = pruned.get(group) if group else pruned
        if isinstance(owner, dict):
            owner.pop(name, None)
    return pruned


def is_shown_only(key: str) -> bool:
    """Report whether `key` only changes how a run is shown, ranked or recorded, not what it computes."""
    return any(key == shown or key.startswith(f"{shown}.") for shown in _SHOWN_ONLY)


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
