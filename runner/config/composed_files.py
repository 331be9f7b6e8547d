"""A cache, for the jobs of a sweep, of what Hydra composes from config files before it applies overrides."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

MOST_KEPT = 256
"""Choices of groups that are kept at a time, 25 kB each."""


class ComposedFiles:
    """The config files that a sweep has read, composed once for each choice of groups.

    Hydra 1.3 composes each job twice (it checks all jobs before the first runs), each time from all files: 0.12 s of
    CPU. Jobs that differ only in values have the same files; their overrides are applied to a copy, as Hydra does.

    Attributes:
      is_on: whether anything is kept; a single run composes once.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._lists: dict[str, DefaultsList] = {}
        self._configs: dict[str, bytes] = {}

    def defaults_list(
        self, create: Callable[..., DefaultsList], repo: IConfigRepository, config_name: str | None,
        overrides_list: list[Override], prepend_hydra: bool, skip_missing: bool,
    ) -> DefaultsList:  # fmt: skip
        """Return what Hydra's own `create` does: which files a config consists of, and the overrides of values."""
        settings = (config_name, overrides_list, prepend_hydra, skip_missing)
        if not self.is_on:
            return create(repo, *settings)
        overrides = Overrides(repo, overrides_list)
        chosen = (overrides.override_choices, overrides.append_group_defaults, overrides.deletions)
        key = repr((config_name, prepend_hydra, skip_missing, chosen, _sources(repo)))
        if key not in self._lists:
            _keep(self._lists, key, create(repo, *settings))
        kept = self._lists[key]
        return DefaultsList(kept.defaults, kept.defaults_tree, overrides.config_overrides, kept.overrides)

    def config(
        self, compose: Callable[[list[ResultDefault], IConfigRepository], DictConfig], defaults: list[ResultDefault],
        repo: IConfigRepository,
    ) -> DictConfig:  # fmt: skip
        """Return the config composed from the files `defaults`, as by Hydra's `compose`. The caller may change it."""
        if not self.is_on:
            return compose(defaults, repo)
        key = repr((defaults, _sources(repo)))
        if key not in self._configs:
            _keep(self._configs, key, pickle.dumps(compose(defaults, repo)))
        config: DictConfig = pickle.loads(self._configs[key])  # half the time of copy.deepcopy
        return config


def _sources(repo: IConfigRepository) -> list[tuple[str, str]]:
    """Return the folders in which `repo` finds files; an override may change them."""
    return [(source.provider, source.path) for source in repo.get_sources()]


def _keep(kept: dict[str, Any], key: str, value: Any) -> None:
    if len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value
