"""What Hydra needs to know before it composes: the schema, the folders of config files, our resolvers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from runner import config as configs
from runner.config_nodes import register_schema
from runner.identity import job_id, sweep_id


def prepare(note_sweep: Callable[[str], None] = lambda directory: None) -> None:
    """Makes all of it known to Hydra; may be called again.

    Args:
      note_sweep: gets the folder of the sweep, when Hydra asks for it.
    """

    def sweep_dir(given: str | None, overrides: Any) -> str:
        texts: Any = OmegaConf.to_container(overrides, resolve=False)
        directory = given or f"outputs/sweeps/{sweep_id(texts)}"
        note_sweep(directory)
        return directory

    register_schema()
    # Hydra 1.3 copies all that is stored for each group that --help lists, 125 times (0.55 s); `load` hands out copies
    # anyway. Leave it out once Hydra does.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    if UsersConf not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(UsersConf)
    for name, resolver, is_cached in (
        ("new_name", lambda: secrets.token_hex(2), True),
        ("run_dir", run_dir, False),
        ("run_files", run_files, False),
        ("sweep_dir", sweep_dir, True),  # cached: of the whole sweep, also where a job's own overrides are in sight
        ("job_dir", job_dir, False),
    ):
        OmegaConf.register_new_resolver(name, resolver, use_cache=is_cached, replace=True)


def conf_path() -> str:
    """Where our `conf/` is: packed as `runner.conf` in an installed wheel, beside the package in a checkout."""
    here = Path(__file__).parent
    return "pkg://runner.conf" if (here / "conf").is_dir() else str(here.parent / "conf")


class UsersConf(SearchPathPlugin):
    """Puts the user's `./conf` before ours: it adds options to every group, and its files win over ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        users = Path.cwd() / "conf"
        if users.is_dir() and not (Path(conf_path()).is_dir() and users.samefile(conf_path())):
            search_path.prepend("your ./conf", users.as_uri())


def run_dir(command: str, given: str | None, new: str) -> str:
    """Hydra's directory of a run: that of a training run is its model_dir; no other command makes one."""
    return (given or new) if command in configs.TRAINING_RUNS else "."


def run_files(command: str) -> str | None:
    """Where in it Hydra notes the composed config; None: nowhere."""
    return ".hydra" if command in configs.TRAINING_RUNS else None


def job_dir(*, _root_: DictConfig) -> str:
    """The folder of a job in its sweep."""
    tree: Any = {}
    for name in _root_:
        if name != "hydra":
            value = _root_[name]
            is_node = OmegaConf.is_config(value)
            tree[name] = OmegaConf.to_container(value, resolve=True) if is_node else value
    return job_id(tree, reads_a_run=tree.get("command") not in configs.TRAINING_COMMANDS)
