"""The names of sweeps and jobs: a hash of their settings, so the same command finds the same folder again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config import schema

_LENGTH = 10


def sweep_id(overrides: Iterable[str]) -> str:
    """Return the name of a sweep: a hash of its sorted overrides, without the number of parallel jobs.

    A dry run of a sweep (`command=dry_run`) has the name of the sweep itself.
    """
    identifying = []
    for text in overrides:
        key = text.lstrip("+~").partition("=")[0]
        if text != "command=dry_run" and not is_shown_only(key):
            identifying.append(text)
    return _hash(sorted(identifying))


def job_id(tree: Mapping[str, Any], *, reads_a_run: bool = False) -> str:
    """Return the name of a job: a hash of the settings, in its resolved config, that differ from the schema's defaults.

    So a key that is added to the schema changes no name, and a key that the config lacks has its default.

    Args:
      tree: the config.
      reads_a_run: the job reads the run in `model_dir`, so model_dir is part of the hash.
    """
    changed = _changed(tree, schema.Config())
    changed.pop("vars", None)  # what they are for is in the keys that have their values
    if not reads_a_run:
        changed.pop("model_dir", None)
    return _hash(changed)


def settings_id(composed: DictConfig) -> str:
    """Return what runs have in common that repeat each other, with other seeds: a hash as `job_id`, without the seed.

    Args:
      composed: the config, not resolved: other keys may follow the seed (`shuffle_seed: ${run.seed}`).
    """
    of_any_seed = composed.copy()
    OmegaConf.update(of_any_seed, "run.seed", 0)
    tree: Any = OmegaConf.to_container(of_any_seed, resolve=True)
    return job_id(tree)


def _changed(tree: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Return the settings in `tree` that differ from those in `defaults`, and are not only shown.

    What the schema does not know is kept as it is: params, hooks, vocabularies, named evaluations. A named evaluation
    inherits from the keys beside it, so a default in it may mean something.
    """
    settings = {setting.name: setting for setting in dataclasses.fields(defaults)}
    changed: dict[str, Any] = {}
    for name, value in tree.items():
        default = getattr(defaults, name, None)
        if name == "eval" and isinstance(defaults, schema.InputConfig):
            # The schema's default is an empty mapping. The keys of a single evaluation have those of a block.
            default = schema.InputBlock()
        if isinstance(value, Mapping) and dataclasses.is_dataclass(default):
            value = _changed(value, default)
            default = {}  # a group without changed settings is left out
        if name not in settings or (value != default and not settings[name].metadata.get("shown_only")):
            changed[name] = value
    return changed


def is_shown_only(key: str) -> bool:
    """Report whether `key` only changes how a run is shown, ranked or recorded, not what it computes."""
    for group in accumulate(key.split("."), "{}.{}".format):  # of a.b.c: a, a.b, a.b.c
        setting = schema.setting_at(group)
        if setting is not None and setting.metadata.get("shown_only"):
            return True
    return False


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
