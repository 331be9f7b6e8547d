"""The files of checkpoints in a model_dir: names, listing, publishing and the state file. Works without TensorFlow.

The checkpoint of step 500 consists of, in model_dir:

    model.ckpt-500.index, .data-00000-of-00001             TensorFlow's bundle, keyed by variable name
    checkpoint                                             the state file: names of checkpoints, time of the first save
    runner_files/
        model.ckpt-500.input-<worker>.index, .data-...     position of that worker's input
        model.ckpt-500.manifest.json                       step, time, and every file with its size and checksum
        model.ckpt-500.metrics.json                        results of its evaluations

Earlier versions wrote all of them to model_dir. `runner.system.files.find_runner_file` finds a file in either place.
Without runner_files, the checkpoint is one of tf.estimator.

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
from runner.system.files import RUNNER_FILES, new_runner_file, set_aside, write_atomically

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
    if match is None:
        return None
    return int(match.group(1))


def checkpoint_of(file: str) -> str | None:
    """Return the path of the checkpoint of which a file is a part; None: it is part of no checkpoint whose name begins
    with PREFIX.

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
    found: list[tuple[int, str]] = []
    for name, files in groups(Path(model_dir)).items():
        step = step_of(name)
        # If only files in RUNNER_FILES are left, the user deleted the checkpoint.
        has_own_files = os.sep not in files[0]
        if step is not None and has_own_files:
            found.append((step, name))
    return [name for _, name in sorted(found)]


def latest_checkpoint(model_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint to continue from; None if there is no complete one.

    This is the checkpoint that the state file names as the latest, as in tf.train.latest_checkpoint, but always inside
    `model_dir`, even if the folder was moved. If it is not complete, the complete one with the next lower step takes
    its place; without a state file, the one with the highest step does.
    """
    named = read_state(model_dir).latest
    complete = (path for path in candidates_in(model_dir) if manifest.what_is_missing(path) is None)
    path = next(complete, None)
    if named is None:
        return path
    latest = Path(model_dir) / named
    if path != str(latest):
        _log.warning("%s cannot be used: %s. Using %s instead.", latest, manifest.what_is_missing(latest), path)
    return path


def candidates_in(model_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the checkpoints from which a run may continue, in the order in which to try them. They may be
    damaged.

    First comes the latest checkpoint of the state file, then those with lower steps in descending order, then the
    others. Files without an index are left from an interrupted save and are not a checkpoint, unless the state file
    names them as the latest.
    """
    directory = Path(model_dir)
    latest = read_state(directory).latest
    newest_first = reversed(list_names(directory))
    names = [name for name in newest_first if (directory / f"{name}.index").exists()]
    ordered = []
    if latest:
        # Also if it has lost its index, which is then reported. But if no checkpoint is left, and of this one at most
        # files in RUNNER_FILES, the user has deleted all of them.
        tries_latest = bool(names)
        if not tries_latest:
            files = groups(directory).get(latest, ())
            tries_latest = any(os.sep not in file for file in files)
        if tries_latest:
            ordered.append(latest)
        step = step_of(latest)
        if step is not None:
            ordered += [name for name in names if (step_of(name) or 0) < step]
    ordered += names
    return [str(directory / name) for name in dict.fromkeys(ordered)]  # each once, at its first place


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
    other_names = [name for name in read_state(directory).names if not _OUR_FILE.match(f"{name}.")]
    for file, place in manifest.files_in(directory):
        name = _name_in(file, other_names)
        if name is not None:
            found.setdefault(name, []).append(place)
    return found


def _name_in(file: str, other_names: Iterable[str]) -> str | None:
    """Return the name of the checkpoint that a file's name begins with; None: there is none.

    Args:
      other_names: names of checkpoints that do not begin with PREFIX.
    """
    match = _OUR_FILE.match(file)
    if match is not None:
        return match.group(1)
    for name in other_names:
        if file.startswith(f"{name}."):
            return name
    return None


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

    def order(name: str) -> tuple[bool, bool, str]:
        # The manifest comes last but one.
        return name == index, name.endswith(manifest.MANIFEST), name

    names = sorted(manifest.sizes_of(path), key=order)
    for name in names:
        _sync(path.parent / name)
    for name in names:
        if name == index:
            _sync(directory / RUNNER_FILES)  # the other files are durable before the index
            _sync(directory)
        place = directory / name
        is_own = name.startswith(f"{path.name}.input-") or name.endswith(manifest.MANIFEST)
        if is_own:
            place = new_runner_file(place)
        os.replace(path.parent / name, place)
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
    latest = None
    names = []
    began = None
    lines = _STATE_LINE.findall(text)
    try:
        for key, value in lines:
            # Text protos escape bytes as \346\227\245; the rest is UTF-8.
            path = value.decode("unicode_escape").encode("latin-1").decode("utf-8")
            if key == b"model_checkpoint_path":
                latest = os.path.basename(path)
            else:
                names.append(os.path.basename(path))
        for value in _BEGAN_LINE.findall(text):
            began = float(value)
    except ValueError:
        return None
    if not lines:
        return None
    return State(latest, tuple(names), began)


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
    lines = [f"model_checkpoint_path: {quoted[-1]}"]
    lines += [f"all_model_checkpoint_paths: {name}" for name in quoted]
    lines.append(f"last_preserved_timestamp: {began!r}")
    write_atomically(model_dir / STATE_FILE, "\n".join(lines) + "\n")
    _sync(model_dir)
