"""What a model_dir says about its checkpoints: their files, manifests and the state file. Plain Python.

The checkpoint of step 500 is, in model_dir:

    model.ckpt-500.index, .data-00000-of-00001             TensorFlow's own bundle, keyed by variable name
    model.ckpt-500.input-<worker>.index, .data-...         where that worker's input stood
    model.ckpt-500.manifest.json                           step, time, and every file with its size and checksum
    model.ckpt-500.metrics.json                            what evaluations found of it, where the best are kept
    checkpoint                                             names the latest, by relative paths; when the first was saved

The manifest is the last file written and `.index` the last one moved here: without it nobody, TensorFlow included, sees
a checkpoint. Only then the state file moves, so "latest" is always whole.

A checksum is `crc32:<hex>` of the file's bytes, or `tensors`: the data of a bundle is covered by a CRC-32C per tensor
in its index, which TensorFlow compares on every read. A CRC of the file would add a quarter to the time of a write
(0.07 s to 0.30 s for 256 MB, with a fast zlib) and tell nothing new.
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
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.files import read_json, write_atomically

PREFIX = "model.ckpt-"
STATE_FILE = "checkpoint"
MANIFEST = ".manifest.json"
METRICS = ".metrics.json"
SCRATCH = ".saving"
LEFT = f".{PREFIX}"
"""Begins the names of what workers leave for the checkpoint that the chief is going to write."""
FORMAT = 1

_log = logging.getLogger(__name__)

_LOOK_SECS = 0.2

_OUR_FILE = re.compile(rf"({re.escape(PREFIX)}\d+)\.")
_SHARD = re.compile(r"\.data-(\d{5})-of-(\d{5})$")
_STATE_LINE = re.compile(rb'^\s*(model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"(.*)"\s*$', re.MULTILINE)
# TensorFlow's name: when it last kept a checkpoint on account of hours, or else when it began to count.
_BEGAN_LINE = re.compile(rb"^\s*last_preserved_timestamp\s*:\s*(\S+)\s*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint on disk.

    Attributes:
      path: the prefix that Savers and Readers take.
      time: when it was written, in seconds since 1970; of one without a manifest, when its index was.
      files: names in model_dir, the index first.
      bytes: of all files together.
      input: worker -> "saved" (its iterator's state is here) or "skip" (it could not be saved); empty for TF1's.
    """

    step: int
    path: str
    time: float
    files: tuple[str, ...]
    bytes: int
    input: Mapping[str, str] = dataclasses.field(default_factory=dict)


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


def list_checkpoints(model_dir: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The complete checkpoints of `model_dir`, by step: ours, and those that tf.estimator or a Saver left there."""
    directory = Path(model_dir)
    infos = (_describe(directory, name, files) for name, files in groups(directory).items())
    return sorted((info for info in infos if info), key=lambda info: info.step)


def list_names(model_dir: str | os.PathLike[str]) -> list[str]:
    """The names of the checkpoints of `model_dir` by step, those that are not complete among them."""
    names = [name for name in groups(Path(model_dir)) if step_of(name) is not None]
    return sorted(names, key=lambda name: (step_of(name) or 0, name))


def time_of(path: str | os.PathLike[str]) -> float | None:
    """When the checkpoint `path` was written, in seconds since 1970; None where it has neither manifest nor index."""
    path = Path(path)
    try:
        return time_in(path.parent, path.name, [f"{path.name}.index"])
    except FileNotFoundError:
        return None


def latest_checkpoint(model_dir: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint to continue from; None when there is no complete one.

    That is what the state file names, as for tf.train.latest_checkpoint, looked for inside `model_dir` wherever that
    has been moved. When it is not complete, the newest before it; without a state file, the newest of all.
    """
    named = read_state(model_dir).latest
    candidates = candidates_in(model_dir)
    path = next((path for path in candidates if what_is_missing(path) is None), None)
    if named is not None and path != str(Path(model_dir) / named):
        latest = Path(model_dir) / named
        _log.warning("%s cannot be used: %s. The latest checkpoint is %s.", latest, what_is_missing(latest), path)
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


def what_is_missing(path: str | os.PathLike[str]) -> str | None:
    """Why the checkpoint is not complete: a file that is missing or has another size; None when nothing is.

    Contents are not read; checkpoints.find_damage does that.
    """
    path = Path(path)
    sizes = _sizes(path)
    if f"{path.name}.index" not in sizes:
        return f"{path.name}.index is missing"
    manifest = read_manifest(path)
    if manifest is None:
        if f"{path.name}{MANIFEST}" in sizes:
            return f"{path.name}{MANIFEST} cannot be read"
        return None if _has_all_shards(path.name, sizes) else f"a {path.name}.data file is missing"
    for name, facts in manifest["files"].items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != facts["bytes"]:
            return f"{name} has {sizes[name]} bytes and was written with {facts['bytes']}"
    return None


def what_has_changed(path: str | os.PathLike[str]) -> str | None:
    """A file whose bytes are not those of its checksum; None when there is none, or no manifest to say so."""
    path = Path(path)
    for name, facts in (read_manifest(path) or {"files": {}})["files"].items():
        if facts["checksum"].startswith("crc32:") and facts["checksum"] != _checksum(path.parent / name):
            return f"{name} has checksum {_checksum(path.parent / name)} and was written with {facts['checksum']}"
    return None


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of all files of the checkpoint `path`."""
    return sum(_sizes(Path(path)).values())


def num_shards(path: str | os.PathLike[str]) -> int:
    """Files that the tensors of the bundle `path` are in: one for each process that wrote some of them."""
    return sum(bool(_SHARD.search(name)) for name in _sizes(Path(path)) if name.startswith(f"{Path(path).name}.data-"))


def fingerprint(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Tells whether any file of the checkpoint `path` was written anew: names, bytes and times of change."""
    path = Path(path)
    facts = []
    for name, size in sorted(_sizes(path).items()):
        with contextlib.suppress(FileNotFoundError):
            if name.endswith(METRICS):  # what evaluations add later
                continue
            facts.append((name, size, (path.parent / name).stat().st_mtime_ns))
    return tuple(facts)


# --- manifests ------------------------------------------------------------------------------------------------------


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest beside the checkpoint `path`; None when there is none that can be read."""
    manifest = read_json(Path(f"{os.fspath(path)}{MANIFEST}"))
    return manifest if manifest and isinstance(manifest.get("files"), dict) else None


def write_manifest(path: Path, step: int, time: float, inputs: Mapping[int, str]) -> None:
    """Measures the files of the checkpoint `path` and says in its manifest what they are."""
    files = {}
    for name, size in sorted(_sizes(path).items()):
        checksum = "tensors" if _SHARD.search(name) else _checksum(path.parent / name)
        files[name] = {"bytes": size, "checksum": checksum}
    values = {"format": FORMAT, "step": step, "time": time, "files": files}
    values["input"] = {str(worker): how for worker, how in sorted(inputs.items())}
    write_atomically(Path(f"{path}{MANIFEST}"), json.dumps(values, indent=1) + "\n")


def _checksum(file: Path) -> str:
    return f"crc32:{zlib.crc32(file.read_bytes()):08x}"


# --- moving into place ----------------------------------------------------------------------------------------------


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
    names = sorted(_sizes(path), key=lambda name: (name == index, name.endswith(MANIFEST), name))
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


# --- the state file -------------------------------------------------------------------------------------------------


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


# --- what lies in the directory -------------------------------------------------------------------------------------


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


def _sizes(path: Path) -> dict[str, int]:
    """File -> bytes of the files of the checkpoint `path`, without what another process removes meanwhile."""
    sizes = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for file in os.listdir(path.parent):
            if file.startswith(f"{path.name}."):
                with contextlib.suppress(FileNotFoundError):
                    sizes[file] = os.stat(path.parent / file).st_size
    return sizes


def _describe(directory: Path, name: str, files: list[str]) -> CheckpointInfo | None:
    step = step_of(name)
    if step is None or what_is_missing(directory / name) is not None:
        return None
    manifest = read_manifest(directory / name) or {}
    sizes = _sizes(directory / name)
    ours = [*manifest.get("files", sizes), *([f"{name}{MANIFEST}"] if manifest else [])]
    names = sorted(ours, key=lambda file: (file != f"{name}.index", file))
    return CheckpointInfo(
        step=step,
        path=str(directory / name),
        time=time_in(directory, name, files),
        files=tuple(names),
        bytes=sum(sizes.get(file, 0) for file in names),
        input=manifest.get("input", {}),
    )


def time_in(directory: Path, name: str, files: list[str]) -> float:
    """When the checkpoint `name` was written; without a manifest, when its index was, or what is left of it."""
    manifest = read_manifest(directory / name)
    if manifest is not None:
        return float(manifest["time"])
    index = f"{name}.index"
    return (directory / (index if index in files else files[0])).stat().st_mtime


def _has_all_shards(name: str, files: Iterable[str]) -> bool:
    shards = [match for file in files if file.startswith(f"{name}.data-") and (match := _SHARD.search(file))]
    return bool(shards) and len(shards) >= int(shards[0].group(2))
