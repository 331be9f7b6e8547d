"""Where checkpoints lie in a model_dir: their names, listing, publishing and the state file. Plain Python.

The checkpoint of step 500 is, in model_dir:

    model.ckpt-500.index, .data-00000-of-00001             TensorFlow's own bundle, keyed by variable name
    model.ckpt-500.input-<worker>.index, .data-...         position of that worker's input
    model.ckpt-500.manifest.json                           step, time, and every file with its size and checksum
    model.ckpt-500.metrics.json                            results of its evaluations
    checkpoint                                             names the latest, by relative paths; when the first was saved

The manifest is the last file written and `.index` the last one moved here: without it nobody, TensorFlow included, sees
a checkpoint. Only then the state file moves, so "latest" is always whole.
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
"""Begins the names of what workers leave for the checkpoint that the chief is going to write."""

_log = logging.getLogger(__name__)

_LOOK_SECS = 0.2

_OUR_FILE = re.compile(rf"({re.escape(PREFIX)}\d+)\.")
_STATE_LINE = re.compile(rb'^\s*(model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"(.*)"\s*$', re.MULTILINE)
# TensorFlow's name: when it last kept a checkpoint on account of hours, or else when it began to count.
_BEGAN_LINE = re.compile(rb"^\s*last_preserved_timestamp\s*:\s*(\S+)\s*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class State:
    """The state file.

    Attributes:
      latest: None: there is no such file.
      names: relative to model_dir, oldest first.
      began: when hours began to count of which a checkpoint each is kept, in seconds since 1970; None: not known.
    """

    latest: str | None
    names: tuple[str, ...]
    began: float | None = None


def step_of(name: str) -> int | None:
    """The step at the end of a checkpoint's name; None when it ends otherwise."""
    match = re.search(r"-(\d+)$", name)
    return int(match.group(1)) if match else None


def list_names(model_dir: str | os.PathLike[str]) -> list[str]:
    """The names of the checkpoints of `model_dir` by step, those that are not complete among them."""
    names = [name for name in groups(Path(model_dir)) if step_of(name) is not None]
    return sorted(names, key=lambda name: (step_of(name) or 0, name))


def latest_checkpoint(model_dir: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint to continue from; None when there is no complete one.

    That is what the state file names, as for tf.train.latest_checkpoint, looked for inside `model_dir` wherever that
    has been moved. When it is not complete, the newest before it; without a state file, the newest of all.
    """
    named = read_state(model_dir).latest
    candidates = candidates_in(model_dir)
    path = next((path for path in candidates if manifest.what_is_missing(path) is None), None)
    if named is not None and path != str(Path(model_dir) / named):
        latest = Path(model_dir) / named
        _log.warning(
            "%s cannot be used: %s. The latest checkpoint is %s.", latest, manifest.what_is_missing(latest), path
        )
    return path


def candidates_in(model_dir: str | os.PathLike[str]) -> list[str]:
    """Paths of the checkpoints to continue from, whole or not, in the order in which they are to be tried.

    The one that the state file names, those of earlier steps from the newest on, the others. What has no index and is
    not named is what a broken save left, and no checkpoint.
    """
    directory = Path(model_dir)
    latest = read_state(directory).latest
    step = None if latest is None else step_of(latest)
    names = [name for name in reversed(list_names(directory)) if (directory / f"{name}.index").exists()]
    before = [name for name in names if step is not None and (step_of(name) or 0) < step]
    is_there = latest is not None and (names or latest in groups(directory))  # not when all has been removed
    ordered = dict.fromkeys([*([latest] if is_there and latest else []), *before, *names])
    return [str(directory / name) for name in ordered]


def awaited(path: str, secs: float = 60, wait: Callable[[float], None] = time.sleep) -> str:
    """`path`, of a checkpoint that another process has written, once it can be seen here: shared folders may be slow.

    Args:
      secs: so long at most.

    Raises: RuntimeError: it cannot be seen.
    """
    for _ in range(int(secs / _LOOK_SECS)):
        if os.path.exists(f"{path}.index"):
            return path
        wait(_LOOK_SECS)
    raise RuntimeError(
        f"{path}, from which the chief goes on, cannot be seen here. model_dir must be a folder that all workers share."
    )


def groups(directory: Path) -> dict[str, list[str]]:
    """Name of a checkpoint -> its files, complete or not."""
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
    """An empty folder in `directory` to write a checkpoint in; it and what is left in it goes away in any case."""
    folder = directory / SCRATCH
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it saved
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(path: Path, directory: Path) -> None:
    """Moves the files of the finished checkpoint `path` into `directory`, durably; its index, which vouches, last."""
    index = f"{path.name}.index"
    # Saving a step again: it is no checkpoint while its files are exchanged.
    (directory / index).unlink(missing_ok=True)
    names = sorted(manifest.sizes_of(path), key=lambda name: (name == index, name.endswith(manifest.MANIFEST), name))
    for name in names:
        _sync(path.parent / name)
    for name in names:
        if name == index:
            _sync(directory)  # the other names are on disk before this one
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
    """What the state file says, TensorFlow's or ours; directories in it are dropped, model_dir may have moved."""
    try:
        text = (Path(model_dir) / STATE_FILE).read_bytes()
    except FileNotFoundError:
        return State(None, ())
    try:
        # Text protos escape bytes, \346\227\245; what is not escaped is UTF-8.
        entries = [
            (key, value.decode("unicode_escape").encode("latin-1").decode("utf-8"))
            for key, value in _STATE_LINE.findall(text)
        ]
        began = [float(value) for value in _BEGAN_LINE.findall(text)]
    except ValueError:  # garbled: as good as none
        return State(None, ())
    latest = [os.path.basename(value) for key, value in entries if key == b"model_checkpoint_path"]
    names = [os.path.basename(value) for key, value in entries if key == b"all_model_checkpoint_paths"]
    return State(latest[-1] if latest else None, tuple(names), began[-1] if began else None)


def write_state(model_dir: Path, names: Iterable[str], began: float) -> None:
    """Makes the last of `names` the latest. Args: began: see `State`."""
    for left in model_dir.glob(f".{STATE_FILE}.*"):  # of a process that was killed before it could move it
        left.unlink(missing_ok=True)
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    lines = [f"model_checkpoint_path: {quoted[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in quoted)]
    lines.append(f"last_preserved_timestamp: {began!r}")
    write_atomically(model_dir / STATE_FILE, "\n".join(lines) + "\n")
    _sync(model_dir)
