"""The files of checkpoints in a model_dir: names, listing, publishing and the state file. Works without TensorFlow.

The checkpoint of step 500 consists of, in model_dir:

    model.ckpt-500.index, .data-00000-of-00001             TensorFlow's bundle, keyed by variable name
    checkpoint                                             the state file: names of checkpoints, time of the first save
    runner_files/
        model.ckpt-500.input-<worker>.index, .data-...     position of that worker's input
        model.ckpt-500.manifest.json                       step, time, and every file with its size and checksum
        model.ckpt-500.metrics.json                        results of its evaluations

Earlier versions wrote all of them to model_dir. `runner.system.files.place_of` finds a file in either place. Without
runner_files, the checkpoint is one of tf.estimator.

The files are written to a scratch folder, the manifest last. Then they are moved to model_dir, `.index` last: without
it, neither the runner nor TensorFlow sees a checkpoint. The state file is replaced after that, so the latest checkpoint
that it names is always complete.
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

from runner.checkpoint_files import manifest
from runner.system.files import RUNNER_FILES, new_place_of, set_aside, write_atomically

PREFIX = "model.ckpt-"
STATE_FILE = "checkpoint"
SCRATCH = ".saving"
LEFT = f".{PREFIX}"
"""Prefix of the files in which workers save their input states until the chief moves them into the checkpoint."""

_log = logging.getLogger(__name__)

_LOOK_SECS = 0.2

_OUR_FILE = re.compile(rf"({re.escape(PREFIX)}\d+)\.")
_PARTS = ("index", "meta", r"data-\d+-of-\d+", r"input-\d+\..+", manifest.MANIFEST[1:], manifest.METRICS[1:])
_OUR_PART = re.compile(rf"({re.escape(PREFIX)}\d+)\.({'|'.join(_PARTS)})")
_STATE_LINE = re.compile(rb'^\s*(model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"(.*)"\s*$', re.MULTILINE)
# TensorFlow's field: when it last kept a checkpoint for keep_every_n_hours, or when it began to count.
_BEGAN_LINE = re.compile(rb"^\s*last_preserved_timestamp\s*:\s*(\S+)\s*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class State:
    """The contents of the state file.

    Attributes:
      latest: name of the latest checkpoint; None: there is no state file.
      names: names of all kept checkpoints, relative to model_dir, oldest first.
      began: time from which keep_every_n_hours counts, in seconds since 1970; None: not known.
    """

    latest: str | None
    names: tuple[str, ...]
    began: float | None = None


def step_of(name: str) -> int | None:
    """Return the step at the end of a checkpoint's name; None if there is no number."""
    match = re.search(r"-(\d+)$", name)
    return int(match.group(1)) if match else None


def checkpoint_of(file: str) -> str | None:
    """Return the path of the checkpoint of which a file is a part; None: of none, or of one with a name of its own.

    Args:
      file: path of a file, which need not exist, in the folder of checkpoints or in RUNNER_FILES of it.
    """
    folder, name = os.path.split(file)
    match = _OUR_PART.fullmatch(name)
    if match is None:
        return None
    if os.path.basename(folder) == RUNNER_FILES:
        folder = os.path.dirname(folder)
    return os.path.join(folder, match.group(1))


def list_names(model_dir: str | os.PathLike[str]) -> list[str]:
    """Return the names of the checkpoints in `model_dir` in the order of their steps, incomplete ones included."""
    there = groups(Path(model_dir))
    # If only files in RUNNER_FILES are left, the user deleted the checkpoint.
    names = [name for name in there if step_of(name) is not None and os.sep not in there[name][0]]
    return sorted(names, key=lambda name: (step_of(name) or 0, name))


def latest_checkpoint(model_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint to continue from; None if there is no complete one.

    This is the checkpoint that the state file names as the latest, as in tf.train.latest_checkpoint, but always inside
    `model_dir`, even if the folder was moved. If it is not complete, the complete one with the next lower step takes
    its place; without a state file, the one with the highest step does.
    """
    named = read_state(model_dir).latest
    candidates = candidates_in(model_dir)
    path = next((path for path in candidates if manifest.what_is_missing(path) is None), None)
    if named is not None and path != str(Path(model_dir) / named):
        latest = Path(model_dir) / named
        _log.warning("%s cannot be used: %s. Using %s instead.", latest, manifest.what_is_missing(latest), path)
    return path


def candidates_in(model_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the checkpoints from which a run may continue, in the order in which to try them. They may be
    damaged.

    First comes the latest checkpoint of the state file, then those with lower steps in descending order, then the
    others. Files without an index are left from an interrupted save and are not a checkpoint, unless they are those of
    the latest.
    """
    directory = Path(model_dir)
    latest = read_state(directory).latest
    step = None if latest is None else step_of(latest)
    names = [name for name in reversed(list_names(directory)) if (directory / f"{name}.index").exists()]
    before = [name for name in names if step is not None and (step_of(name) or 0) < step]
    # Not if all files were removed from `directory` itself.
    is_there = names or any(os.sep not in file for file in groups(directory).get(latest or "", ()))
    ordered = dict.fromkeys([*([latest] if is_there and latest else []), *before, *names])
    return [str(directory / name) for name in ordered]


def awaited(path: str, secs: float = 60, wait: Callable[[float], None] = time.sleep) -> str:
    """Wait until the checkpoint `path`, which another process wrote, is visible to this one, and return `path`.

    A shared folder may show a new file late.

    Args:
      path: path of the checkpoint.
      secs: how many seconds to wait at most.
      wait: sleeps for the number of seconds that it is called with.

    Raises:
      RuntimeError: the checkpoint has not become visible.
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
    """Return name -> its files, for each checkpoint in `directory`, complete or not. The files are paths relative to
    `directory`, those in RUNNER_FILES last.
    """
    found: dict[str, list[str]] = {}
    listed = {name: f"{name}." for name in read_state(directory).names if not _OUR_FILE.match(f"{name}.")}
    for file, place in manifest.files_in(directory):
        match = _OUR_FILE.match(file)
        name = match.group(1) if match else next((name for name, dot in listed.items() if file.startswith(dot)), None)
        if name is not None:
            found.setdefault(name, []).append(place)
    return found


# --- moving into place ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """Yield an empty folder in `directory` in which to write a checkpoint, and remove it at the end."""
    folder = directory / SCRATCH
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while saving
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(path: Path, directory: Path) -> None:
    """Flush the files of the finished checkpoint `path` to disk and move them to their places, the index last.

    Args:
      path: the checkpoint, with all its files beside it.
      directory: the model_dir.
    """
    index = f"{path.name}.index"
    # When a step is saved again, remove its index first: it is not a checkpoint while its files are replaced.
    (directory / index).unlink(missing_ok=True)
    names = sorted(manifest.sizes_of(path), key=lambda name: (name == index, name.endswith(manifest.MANIFEST), name))
    for name in names:
        _sync(path.parent / name)
    for name in names:
        if name == index:
            _sync(directory / RUNNER_FILES)  # the other files are durable before the index
            _sync(directory)
        is_own = name.startswith(f"{path.name}.input-") or name.endswith(manifest.MANIFEST)
        os.replace(path.parent / name, new_place_of(directory / name) if is_own else directory / name)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the state file ------------------------------------------------------------------------------------------------


def read_state(model_dir: str | os.PathLike[str]) -> State:
    """Return the contents of the state file. Paths in it are reduced to names, because model_dir may have been moved.
    A file that is missing has no names, nor has one that cannot be read, which is set aside.
    """
    path = Path(model_dir) / STATE_FILE
    try:
        state = parse_state(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return State(None, ())
    except IsADirectoryError:
        state = None
    if state is None:
        set_aside(path, "it names no checkpoint")
        return State(None, ())
    return state


def parse_state(text: bytes) -> State | None:
    """Return what the bytes of a state file say; None if they cannot be read, or name no checkpoint."""
    try:
        # Text protos escape bytes as \346\227\245; the rest is UTF-8.
        entries = [
            (key, value.decode("unicode_escape").encode("latin-1").decode("utf-8"))
            for key, value in _STATE_LINE.findall(text)
        ]
        began = [float(value) for value in _BEGAN_LINE.findall(text)]
    except ValueError:
        return None
    if not entries:
        return None
    latest = [os.path.basename(value) for key, value in entries if key == b"model_checkpoint_path"]
    names = [os.path.basename(value) for key, value in entries if key == b"all_model_checkpoint_paths"]
    return State(latest[-1] if latest else None, tuple(names), began[-1] if began else None)


def write_state(model_dir: Path, names: Iterable[str], began: float) -> None:
    """Write the state file, with the last of `names` as the latest checkpoint.

    Args:
      model_dir: the folder of the file.
      names: at least one, oldest first.
      began: as in `State`.
    """
    for left in model_dir.glob(f".{STATE_FILE}.*"):  # left by a process that was killed before it moved the file
        left.unlink(missing_ok=True)
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    lines = [f"model_checkpoint_path: {quoted[-1]}", *(f"all_model_checkpoint_paths: {name}" for name in quoted)]
    lines.append(f"last_preserved_timestamp: {began!r}")
    write_atomically(model_dir / STATE_FILE, "\n".join(lines) + "\n")
    _sync(model_dir)
