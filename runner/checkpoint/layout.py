"""The files of checkpoints in a model_dir: names, listing, publishing and the state file. No TensorFlow.

The checkpoint of step 500 consists of, in model_dir:

    model.ckpt-500.index, .data-00000-of-00001             TensorFlow's bundle, keyed by variable name
    model.ckpt-500.input-<worker>.index, .data-...         position of that worker's input
    model.ckpt-500.manifest.json                           step, time, and every file with its size and checksum
    model.ckpt-500.metrics.json                            results of its evaluations
    checkpoint                                             names the latest, by relative paths; time of the first save

The manifest is written last, and `.index` is moved here last: without it neither the runner nor TensorFlow sees a
checkpoint. Only then the state file is replaced, so "latest" is always whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from runner.checkpoint import manifest
from runner.system.files import write_atomically

PREFIX = "model.ckpt-"
STATE_FILE = "checkpoint"
SCRATCH = ".saving"
LEFT = f".{PREFIX}"
"""Prefix of the files that workers leave for the next checkpoint, which the chief writes."""

_log = logging.getLogger(__name__)

_LOOK_SECS = 0.2

_OUR_FILE = re.compile(rf"({re.escape(PREFIX)}\d+)\.")
_STATE_LINE = re.compile(rb'^\s*(model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"(.*)"\s*$', re.MULTILINE)
# TensorFlow's field: when it last kept a checkpoint for keep_every_n_hours, or when it began to count.
_BEGAN_LINE = re.compile(rb"^\s*last_preserved_timestamp\s*:\s*(\S+)\s*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class State:
    """The contents of the state file.

    Attributes:
      latest: name of the latest checkpoint; None: there is no state file.
      names: names relative to model_dir, oldest first.
      began: start of the count for keep_every_n_hours, in seconds since 1970; None: not known.
    """

    latest: str | None
    names: tuple[str, ...]
    began: float | None = None


def step_of(name: str) -> int | None:
    """Return the step at the end of a checkpoint's name; None if there is no number."""
    match = re.search(r"-(\d+)$", name)
    return int(match.group(1)) if match else None


def list_names(model_dir: str | os.PathLike[str]) -> list[str]:
    """Return the names of the checkpoints of `model_dir` by step, incomplete ones included."""
    names = [name for name in groups(Path(model_dir)) if step_of(name) is not None]
    return sorted(names, key=lambda name: (step_of(name) or 0, name))


def latest_checkpoint(model_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint to continue from; None if there is no complete one.

    It is the one that the state file names, like tf.train.latest_checkpoint, but always inside `model_dir`, which may
    have been moved. If that one is not complete, it is the newest complete one before it; without a state file, the
    newest of all.
    """
    named = read_state(model_dir).latest
    candidates = candidates_in(model_dir)
    path = next((path for path in candidates if manifest.what_is_missing(path) is None), None)
    if named is not None and path != str(Path(model_dir) / named):
        latest = Path(model_dir) / named
        _log.warning("%s cannot be used: %s. Using %s instead.", latest, manifest.what_is_missing(latest), path)
    return path


def candidates_in(model_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of checkpoints to continue from, whole or not, in the order in which to try them.

    First the one that the state file names, then earlier steps from the newest, then the others. Files without an index
    that the state file does not name are left from a broken save and are not a checkpoint.
    """
    directory = Path(model_dir)
    latest = read_state(directory).latest
    step = None if latest is None else step_of(latest)
    names = [name for name in reversed(list_names(directory)) if (directory / f"{name}.index").exists()]
    before = [name for name in names if step is not None and (step_of(name) or 0) < step]
    is_there = latest is not None and (names or latest in groups(directory))  # not if all files were removed
    ordered = dict.fromkeys([*([latest] if is_there and latest else []), *before, *names])
    return [str(directory / name) for name in ordered]


def awaited(path: str, secs: float = 60, wait: Callable[[float], None] = time.sleep) -> str:
    """Wait until `path`, a checkpoint that another process wrote, is visible here, and return it: shared folders may be
    slow.

    Args:
      path: path of the checkpoint.
      secs: how many seconds to wait at most.
      wait: called with a number of seconds between two looks.

    Raises:
      RuntimeError: it does not become visible.
    """
    for _ in range(int(secs / _LOOK_SECS)):
        if os.path.exists(f"{path}.index"):
            return path
        wait(_LOOK_SECS)
    raise RuntimeError(
        f"The chief continues from {path}, which does not exist on this worker. model_dir must be a folder that all "
        "workers share."
    )


def groups(directory: Path) -> dict[str, list[str]]:
    """Return the name of each checkpoint, complete or not -> its files."""
    try:
        files = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found: dict[str, list[str]] = {}
    listed = {name: f"{name}." for name in read_state(directory).names if not _OUR_FILE.match(f"{name}.")}
    for file in files:
        match = _OUR_FILE.match(file)
        name = match.group(1) if match else next((name for name, dot in listed.items() if file.startswith(dot)), None)
        if name is not None:
            found.setdefault(name, []).append(file)
    return found


# --- moving into place ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """Yield an empty folder in `directory` in which to write a checkpoint; the folder is removed in any case."""
    folder = directory / SCRATCH
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while saving
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(path: Path, directory: Path) -> None:
    """Move the files of the finished checkpoint `path` into `directory`, durably, its index last."""
    index = f"{path.name}.index"
    # When a step is saved again, remove its index first: it is not a checkpoint while its files are replaced.
    (directory / index).unlink(missing_ok=True)
    names = sorted(manifest.sizes_of(path), key=lambda name: (name == index, name.endswith(manifest.MANIFEST), name))
    for name in names:
        _sync(path.parent / name)
    for name in names:
        if name == index:
            _sync(directory)  # the other files are durable before the index
        os.replace(path.parent / name, directory / name)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the state file ------------------------------------------------------------------------------------------------


def read_state(model_dir: str | os.PathLike[str]) -> State:
    """Return the contents of the state file. Folders in its names are dropped, because model_dir may have moved."""
    try:
        text = (Path(model_dir) / STATE_FILE).read_bytes()
    except FileNotFoundError:
        return State(None, ())
    try:
        # Text protos escape bytes as \346\227\245; the rest is UTF-8.
        entries = [
            (key, value.decode("unicode_escape").encode("latin-1").decode("utf-8"))
            for key, value in _STATE_LINE.findall(text)
        ]
        began = [float(value) for value in _BEGAN_LINE.findall(text)]
    except ValueError:  # unreadable: treat it as missing
        return State(None, ())
    latest = [os.path.basename(value) for key, value in entries if key == b"model_checkpoint_path"]
    names = [os.path.basename(value) for key, value in entries if key == b"all_model_checkpoint_paths"]
    return State(latest[-1] if latest else None, tuple(names), began[-1] if began else None)


def write_state(model_dir: Path, names: Iterable[str], began: float) -> None:
    """Make the last of `names` the latest checkpoint; `began` as in `State`."""
    for left in model_dir.glob(f".{STATE_FILE}.*"):  # left by a process that was killed before it moved the file
        left.unlink(missing_ok=True)
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    lines = [f"model_checkpoint_path: {quoted[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in quoted)]
    lines.append(f"last_preserved_timestamp: {began!r}")
    write_atomically(model_dir / STATE_FILE, "\n".join(lines) + "\n")
    _sync(model_dir)
