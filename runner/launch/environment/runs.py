"""The runs below a folder, from their small files: no journal and no checkpoint is read, and nothing is changed."""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from runner.checkpoint_files import layout
from runner.checkpoint_files.layout import RUNNER_FILES
from runner.config import saved_config
from runner.config.schema import ConfigError, flatten, read, value_at
from runner.launch.start_files import NOTES_FOLDER, read_overrides
from runner.system.console import relative
from runner.system.redaction import NO_LIST, SecretList, masked, masked_override
from runner.system.secret_names import LIST
from runner.tracking.run_end import RUNNING, RunState, how_run_ended
from runner.tracking.run_lock import is_held
from runner.tracking.run_record import RUN_FILE
from runner.tracking.summary import SUMMARY_FILE

_SMALL_FILES = (
    saved_config.FILE, SUMMARY_FILE, RUN_FILE, "checkpoint", f"{NOTES_FOLDER}/*.yaml", f"{RUNNER_FILES}/code.*",
    "events.*.jsonl",
)  # fmt: skip
"""Patterns of the files that tell of a run without its checkpoints."""

KILLED = "killed"
"""Status of a run whose files say that it is running, while no process holds its lock."""


@dataclass(frozen=True)
class FoundRun:
    """A run in a folder.

    Attributes:
      folder: its model_dir.
      state: how it ended, as its files tell.
    """

    folder: Path
    state: RunState

    @property
    def name(self) -> str:
        """Return the folder as it is shown."""
        return relative(self.folder)

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.state.summary

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the last value of each metric of evaluations."""
        values: dict[str, float] = {}
        for name, value in (self.summary.get("metrics") or {}).items():
            with suppress(TypeError, ValueError):  # "nan" and "inf" are texts
                values[name] = float(value)
        return values

    @cached_property
    def status(self) -> str:
        """Return running, finished, failed, interrupted or killed; upload_incomplete if a bucket lacks files."""
        of_summary = self.summary.get("status")
        if self.state.status != RUNNING:
            return str(of_summary or self.state.status or "-")
        return RUNNING if is_held(self.folder) else KILLED

    @property
    def step(self) -> int | None:
        """Return the global step of the last checkpoint; None if there is none."""
        known = self.summary.get("global_step")
        if known is not None:
            return int(known)
        latest = layout.latest_checkpoint(self.folder)
        if latest is None:
            return None
        return layout.step_of(latest)

    @property
    def secs(self) -> float | None:
        """Return how long all starts took, until now if the run is running; None: not known."""
        if self.state.secs is not None or self.state.started is None:
            return self.state.secs
        if self.status == RUNNING:
            return time.time() - self.state.started
        return None

    @cached_property
    def started(self) -> float:
        """Return when the last start began, in seconds since 1970; of an earlier version, when it wrote its summary."""
        if self.state.started is not None:
            return self.state.started
        return (self.folder / SUMMARY_FILE).stat().st_mtime

    @property
    def started_at(self) -> str:
        """Return `started` as it is shown, in this host's time zone."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.started))

    @cached_property
    def overrides(self) -> list[str]:
        """Return the overrides of the last start, without what the run's own config lists as secret."""
        return [masked_override(text, self._listed) for text in read_overrides(self.folder)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return key -> value of all settings of the run, but for its secrets and its folder; {} if they are lost."""
        tree: dict[str, Any] = {}
        with suppress(ConfigError):  # it is damaged
            tree = saved_config.read_saved(self.folder) or {}
        tree.pop("model_dir", None)
        return flatten(masked(tree, self._listed))

    @cached_property
    def experiment(self) -> str:
        """Return the experiment of the run, by its config; `runner` if that names none."""
        # Parsing the whole file takes 20 ms, so the line is searched for. The runner has written the file, with one key
        # a line.
        _, _, tracking = self._config_text.partition("\ntracking:\n")
        written = re.search(r"^  experiment: (.*)$", tracking, re.MULTILINE)
        if written is None:
            return "runner"
        name = yaml.safe_load(written.group(1))
        return str(name or "runner")

    @cached_property
    def _listed(self) -> SecretList:
        """What the run's own config lists as secret."""
        if not self._config_text or "\n  secrets: null\n" in self._config_text:
            return NO_LIST  # as in most runs; parsing the whole file takes 20 ms
        with suppress(ConfigError):  # it is damaged, which is reported to those who open the run
            return SecretList.of(value_at(read(self.folder / saved_config.FILE), LIST), os.environ)
        return NO_LIST

    @cached_property
    def _config_text(self) -> str:
        file = self.folder / saved_config.FILE
        return file.read_text(errors="replace") if file.exists() else ""


def find_runs(folder: Path) -> list[FoundRun]:
    """Return the runs in and below a folder, in the order of their folders' names."""
    runs = []
    for file in sorted(folder.glob(f"**/{SUMMARY_FILE}")):
        # Folders such as .unsent have copies of runs.
        is_hidden = "/." in f"/{file.relative_to(folder)}"
        if not is_hidden:
            runs.append(run_in(file.parent))
    return runs


def run_in(folder: Path) -> FoundRun:
    """Return the run in a folder."""
    return FoundRun(folder, how_run_ended(folder))


def fetch_run(url: str, key: str, folder: Path) -> FoundRun:
    """Return a run in an object store, of which the small files and the journals are copied to `folder`. Nothing is
    written to the store.

    Args:
      key: the key with its sign, for messages.

    Raises:
      ConfigError: the store cannot be reached.
    """
    from runner.remote.store import Store, reaching

    with reaching(f"{key}{url}"):
        store = Store(url.rstrip("/"), key)
        for name in store.objects():
            is_small = any(fnmatch.fnmatchcase(name, pattern) for pattern in _SMALL_FILES)
            if is_small:
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(store.fs.cat_file(name))
    return run_in(folder)


def varied_settings(runs: Iterable[FoundRun], without: Sequence[str] = ()) -> list[list[str]]:
    """Return of each run the overrides that not all of these runs have.

    Args:
      without: keys that are left out.
    """
    overrides_of_runs = []
    number_of_runs: Counter[str] = Counter()
    for run in runs:
        overrides = [text for text in run.overrides if _key_of(text) not in without]
        overrides_of_runs.append(overrides)
        number_of_runs.update(set(overrides))
    varied = []
    for overrides in overrides_of_runs:
        varied.append([text for text in overrides if number_of_runs[text] < len(overrides_of_runs)])
    return varied


def _key_of(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
