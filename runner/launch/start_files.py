"""The files that a start writes into model_dir, and how a start that failed before its first step undoes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml

from runner.config import saved_config, schema
from runner.system.files import write_atomically
from runner.tracking import run_end
from runner.tracking.run_record import RUN_FILE
from runner.tracking.summary import SUMMARY_FILE

NOTES_FOLDER = ".hydra"

_OF_A_START = (saved_config.FILE, SUMMARY_FILE, run_end.FILE)


def file_of_tasks(model_dir: Path, command: str) -> Path:
    """Return the path of the config from which the tasks of a start run."""
    if command in schema.TRAINING_RUNS:
        return model_dir / saved_config.FILE
    return model_dir / f"config.{command}.yaml"


def write_notes(model_dir: Path, notes: Mapping[str, str]) -> None:
    """Write notes on how the config was composed; only their owner can read them, because they may contain secrets."""
    folder = model_dir / NOTES_FOLDER
    if notes:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)  # a file of an earlier start
    for name, text in notes.items():
        write_atomically(folder / name, text, mode=0o600)


def read_overrides(model_dir: Path) -> list[str]:
    """Return the overrides of a run's last start, but for model_dir; [] if they are not known."""
    notes = model_dir / NOTES_FOLDER / "overrides.yaml"
    if not notes.exists():
        return []
    # The loader in C takes 0.1 ms, the other 1 ms, and there may be a thousand runs.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    typed = yaml.load(notes.read_text(), loader) or ()
    return [text for text in typed if not text.startswith("model_dir=")]


class EarlierFiles:
    """What the files that a start writes contained before it. Must be created before the start writes them."""

    def __init__(self, model_dir: Path, notes: Mapping[str, str]) -> None:
        paths = [model_dir / name for name in _OF_A_START]
        paths += [model_dir / NOTES_FOLDER / name for name in notes]
        # The last file to be put back, because it says how the run ended: a process that is killed before that has not
        # undone its start.
        paths.append(model_dir / RUN_FILE)
        self._known: dict[Path, tuple[bytes, os.stat_result] | None] = {}  # path -> contents and status; None: no file
        for path in paths:
            self._known[path] = None
            if path.is_file():
                self._known[path] = (path.read_bytes(), path.stat())

    def restore(self) -> None:
        """Write the files as they were."""
        for path, facts in self._known.items():
            if facts is None:
                path.unlink(missing_ok=True)
            else:
                data, status = facts
                write_atomically(path, data, mode=status.st_mode & 0o777)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove_folder(model_dir: Path) -> None:
    """Remove a folder in which nothing was, or what is in it if it is the working directory."""
    for entry in model_dir.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if model_dir != Path.cwd():
        with suppress(OSError):  # the folder is a mounted disk, or another program has written to it
            model_dir.rmdir()
