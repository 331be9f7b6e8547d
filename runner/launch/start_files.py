"""The files that a start writes into model_dir before its first step, and their removal if no step is taken."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from runner.config import schema
from runner.launch.rendezvous import CALL_FILE, PEERS_FOLDER
from runner.system.files import HALF_WRITTEN, write_atomically
from runner.tracking import training_status
from runner.tracking.run_lock import LOCK_FILE, TASK_LOCK_FILE
from runner.tracking.run_record import RUN_FILE

START_FILE = ".start.yaml"
"""File in model_dir with the config of the tasks. It becomes config.yaml at the first step."""

NOTES_FOLDER = ".hydra"

_OF_OTHERS = (LOCK_FILE, CALL_FILE, PEERS_FOLDER)
"""Files that other supervisors of the cluster still read."""

_BEFORE_THE_FIRST_STEP = (
    *_OF_OTHERS, START_FILE, RUN_FILE, TASK_LOCK_FILE.format("*"), "events.*.jsonl", training_status.FILE,
    f".*{HALF_WRITTEN}",
)  # fmt: skip
"""Files that a killed start or another supervisor may have left in a folder without a run."""


def file_of_tasks(model_dir: Path, command: str) -> Path:
    """Return the path of the config from which the tasks of a start run."""
    return model_dir / (START_FILE if command in schema.TRAINING_RUNS else f"config.{command}.yaml")


def write_notes(model_dir: Path, notes: Mapping[str, str]) -> None:
    """Write notes on how the config was composed; only their owner can read them, because they may contain secrets."""
    folder = model_dir / NOTES_FOLDER
    if notes:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)  # a file of an earlier start
    for name, text in notes.items():
        write_atomically(folder / name, text, mode=0o600)


class Left:
    """The files that earlier starts left in model_dir. Must be created before a start writes anything.

    Args:
      model_dir: the folder.
      is_cluster: other supervisors read in the folder that the run has ended.
    """

    def __init__(self, model_dir: Path, *, is_cluster: bool) -> None:
        self._model_dir, self._is_cluster = model_dir, is_cluster
        self._ending = _text_in(model_dir / training_status.FILE)
        names = (entry.name for entry in model_dir.iterdir())
        self.is_empty = all(any(fnmatch.fnmatch(name, one) for one in _BEFORE_THE_FIRST_STEP) for name in names)

    def restore(self) -> None:
        """Restore the earlier state of the run; remove the folder if there was none."""
        if not self.is_empty:
            (self._model_dir / START_FILE).unlink(missing_ok=True)
            if self._ending is not None:
                write_atomically(self._model_dir / training_status.FILE, self._ending)
            return
        kept = _OF_OTHERS if self._is_cluster else ()
        for entry in self._model_dir.glob("*"):
            if entry.name in kept:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if not kept and self._model_dir != Path.cwd():
            with suppress(OSError):  # the folder is a mounted disk, or another program has written to it
                self._model_dir.rmdir()


def _text_in(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
