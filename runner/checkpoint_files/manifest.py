"""The files of one checkpoint and its manifest: sizes, checksums and time. Works without TensorFlow.

A checksum is `crc32:<hex>` of the file's bytes, or `tensors` for the data files of a bundle: the bundle's index holds a
CRC-32C per tensor, which TensorFlow compares on every read. A CRC of the whole data file would detect nothing more, and
add 0.07 s to the 0.30 s of writing 256 MB (with a fast zlib). In the folder of an object store it has one all the same:
only TensorFlow reads an index, and the process that sends a checkpoint, which must not send a damaged one, has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runner.config.metric_names import CHECKPOINT_METRICS
from runner.system.files import RUNNER_FILES, find_runner_file, read_json, write_atomically

MANIFEST = ".manifest.json"
METRICS = CHECKPOINT_METRICS
FORMAT = 1
_BLOCK_BYTES = 16 << 20

_SHARD = re.compile(r"\.data-(\d{5})-of-(\d{5})$")


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint `path`; None if there is none or it cannot be read."""
    # A damaged one stays: without it, a damaged file of the checkpoint would seem whole.
    manifest = read_json(find_runner_file(Path(f"{os.fspath(path)}{MANIFEST}")), is_kept=True)
    if not manifest or not _is_manifest(manifest):
        return None
    return manifest


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    """Report whether a JSON object has the keys of a manifest, with values of their types: a damaged byte may have
    changed one.
    """
    files: Any = manifest.get("files")
    inputs: Any = manifest.get("input", {})
    are_mappings = isinstance(files, dict) and isinstance(inputs, dict)
    if not are_mappings or not isinstance(manifest.get("time"), int | float):
        return False
    if not all(worker.isdigit() for worker in inputs):
        return False
    for facts in files.values():
        is_known = isinstance(facts, dict) and isinstance(facts.get("bytes"), int)
        if not is_known or not isinstance(facts.get("checksum"), str):
            return False
    return True


def write_manifest(path: Path, step: int, time: float, inputs: Mapping[int, str], *, is_mirrored: bool = False) -> None:
    """Write the manifest of the checkpoint `path` with the sizes and checksums of its files.

    Args:
      path: the checkpoint.
      step: its global step.
      time: when it was written, in seconds since 1970.
      inputs: worker index -> "saved" if the checkpoint holds the state of its input, "skip" if that cannot be saved.
      is_mirrored: it goes to an object store: its data files have a CRC, too.
    """
    files = {}
    for name, size in sorted(sizes_of(path).items()):
        checksum = "tensors"
        if is_mirrored or _SHARD.search(name) is None:
            checksum = _compute_checksum(path.parent / name)
        files[name] = {"bytes": size, "checksum": checksum}
    values = {"format": FORMAT, "step": step, "time": time, "files": files}
    values["input"] = {str(worker): how for worker, how in sorted(inputs.items())}
    write_atomically(Path(f"{path}{MANIFEST}"), json.dumps(values, indent=1) + "\n")


def saved_inputs(path: str | os.PathLike[str]) -> list[int]:
    """Return the indices of the workers whose input's state the checkpoint `path` holds."""
    manifest = read_manifest(path)
    if manifest is None:
        return []
    inputs = manifest.get("input") or {}
    return [int(worker) for worker, how in inputs.items() if how == "saved"]


def _files_in_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return name -> size and checksum of each file of the checkpoint `path`; {}: it has no manifest."""
    manifest = read_manifest(path)
    if manifest is None:
        return {}
    files: dict[str, dict[str, Any]] = manifest["files"]
    return files


def _compute_checksum(file: Path) -> str:
    found = 0
    with open(file, "rb") as opened:
        for block in iter(lambda: opened.read(_BLOCK_BYTES), b""):
            found = zlib.crc32(block, found)
    return f"crc32:{found:08x}"


def what_is_wrong(path: str | os.PathLike[str]) -> str | None:
    """Return why the checkpoint `path` is incomplete or damaged, as `what_is_missing` and `what_has_changed` do."""
    return what_is_missing(path) or what_has_changed(path)


def what_is_wrong_with_input(path: str | os.PathLike[str], worker: int) -> str | None:
    """Return why the state of a worker's input in the checkpoint `path` is incomplete or damaged; None if it is whole,
    or the manifest does not know it.
    """
    path = Path(path)
    for name, facts in _files_in_manifest(path).items():
        if not name.startswith(f"{path.name}.input-{worker}."):
            continue
        place = find_runner_file(path.parent / name)
        if not place.exists() or place.stat().st_size != facts["bytes"]:
            return f"{name} is missing or has another size than {facts['bytes']} bytes"
        if facts["checksum"].startswith("crc32:") and _compute_checksum(place) != facts["checksum"]:
            return f"{name} does not have the checksum {facts['checksum']}"
    return None


def what_is_missing(path: str | os.PathLike[str]) -> str | None:
    """Return why the checkpoint `path` is incomplete: a file is missing or has another size than in the manifest.
    Return None if it is complete.

    This does not read the contents of the files; `integrity.find_damage` does.
    """
    path = Path(path)
    sizes = sizes_of(path)
    if f"{path.name}.index" not in sizes:
        return f"{path.name}.index is missing"
    manifest = read_manifest(path)
    if manifest is None:
        if f"{path.name}{MANIFEST}" in sizes:
            return f"{path.name}{MANIFEST} cannot be read"
        shards = _find_shards(path, sizes)
        # The name of each data file has the number of all: .data-00000-of-00002.
        if not shards or len(shards) < int(shards[0].group(2)):
            return f"a {path.name}.data file is missing"
        return None
    for name, facts in manifest["files"].items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != facts["bytes"]:
            return f"{name} has {sizes[name]} bytes instead of {facts['bytes']}"
    return None


def what_has_changed(path: str | os.PathLike[str]) -> str | None:
    """Return a text that names a file whose bytes do not match its checksum in the manifest. Return None if there is no
    such file, or no manifest.
    """
    path = Path(path)
    for name, facts in _files_in_manifest(path).items():
        expected = facts["checksum"]
        if not expected.startswith("crc32:"):
            continue
        found = _compute_checksum(find_runner_file(path.parent / name))
        if found != expected:
            return f"{name} has the checksum {found} instead of {expected}"
    return None


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of all files of the checkpoint `path`."""
    return sum(sizes_of(Path(path)).values())


def input_size_of(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of the training inputs' states in the checkpoint `path`."""
    path = Path(path)
    sizes = sizes_of(path)
    return sum(size for name, size in sizes.items() if name.startswith(f"{path.name}.input-"))


def num_shards(path: str | os.PathLike[str]) -> int:
    """Return the number of data files of the bundle `path`, one for each process that wrote tensors."""
    path = Path(path)
    return len(_find_shards(path, sizes_of(path)))


def fingerprint(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Return (name, bytes, modification time in ns) of each file of the checkpoint `path`, to detect changes. The file
    of evaluation results is left out.
    """
    path = Path(path)
    facts = []
    for name, size in sorted(sizes_of(path).items()):
        if name.endswith(METRICS):  # evaluations add this file later
            continue
        with contextlib.suppress(FileNotFoundError):
            time_of_change = find_runner_file(path.parent / name).stat().st_mtime_ns
            facts.append((name, size, time_of_change))
    return tuple(facts)


def time_of(path: str | os.PathLike[str]) -> float | None:
    """Return when the checkpoint `path` was written, in seconds since 1970: the time in its manifest, else the
    modification time of its index, else that of its first file. None: it has no file.
    """
    manifest = read_manifest(path)
    if manifest is not None:
        return float(manifest["time"])
    path = Path(path)
    for name in sorted(sizes_of(path), key=lambda name: name != f"{path.name}.index"):
        with contextlib.suppress(FileNotFoundError):  # another process deletes it
            return find_runner_file(path.parent / name).stat().st_mtime
    return None


def sizes_of(path: Path) -> dict[str, int]:
    """Return name -> size in bytes of the files of the checkpoint `path`; files that another process deletes meanwhile
    are left out.
    """
    sizes = {}
    for file, place in files_in(path.parent):
        if file.startswith(f"{path.name}."):
            with contextlib.suppress(FileNotFoundError):
                # If both folders have a file of this name, the one in RUNNER_FILES counts, as in `find_runner_file`.
                sizes[file] = os.stat(path.parent / place).st_size
    return sizes


def files_in(directory: Path) -> list[tuple[str, str]]:
    """Return (name, path relative to `directory`) of all in `directory` and then of all in its folder RUNNER_FILES."""
    found: list[tuple[str, str]] = []
    for folder in ("", RUNNER_FILES):  # in this order: whoever sees an index, which is written last, sees all files
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(os.listdir(directory / folder))
            found += [(name, os.path.join(folder, name)) for name in names]
    return found


def _find_shards(path: Path, files: Iterable[str]) -> list[re.Match[str]]:
    """Return the matches of _SHARD with the data files of the bundle `path`, without the data files of inputs."""
    matches = []
    for file in files:
        match = _SHARD.search(file)
        if match is not None and file.startswith(f"{path.name}.data-"):
            matches.append(match)
    return matches
