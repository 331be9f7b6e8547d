"""The files of one checkpoint and its manifest: sizes, checksums and time. No TensorFlow.

A checksum is `crc32:<hex>` of the file's bytes, or `tensors`. The latter stands for a bundle's data: its index holds a
CRC-32C per tensor, which TensorFlow compares on every read. A CRC of the whole file would add a quarter to the time of
a write (0.07 s to 0.30 s for 256 MB, with a fast zlib) and find nothing more.
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
from runner.system.files import read_json, write_atomically

MANIFEST = ".manifest.json"
METRICS = CHECKPOINT_METRICS
FORMAT = 1

_SHARD = re.compile(r"\.data-(\d{5})-of-(\d{5})$")


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint `path`; None if there is none or it cannot be read."""
    manifest = read_json(Path(f"{os.fspath(path)}{MANIFEST}"))
    return manifest if manifest and isinstance(manifest.get("files"), dict) else None


def write_manifest(path: Path, step: int, time: float, inputs: Mapping[int, str]) -> None:
    """Measure the files of the checkpoint `path` and write its manifest."""
    files = {}
    for name, size in sorted(sizes_of(path).items()):
        checksum = "tensors" if _SHARD.search(name) else _checksum(path.parent / name)
        files[name] = {"bytes": size, "checksum": checksum}
    values = {"format": FORMAT, "step": step, "time": time, "files": files}
    values["input"] = {str(worker): how for worker, how in sorted(inputs.items())}
    write_atomically(Path(f"{path}{MANIFEST}"), json.dumps(values, indent=1) + "\n")


def _checksum(file: Path) -> str:
    return f"crc32:{zlib.crc32(file.read_bytes()):08x}"


def what_is_missing(path: str | os.PathLike[str]) -> str | None:
    """Return why the checkpoint is not complete, a file that is missing or has another size; None if it is complete.

    Contents are not read; `integrity.find_damage` does that.
    """
    path = Path(path)
    sizes = sizes_of(path)
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
    """Return a file whose bytes do not match its checksum; None if there is none, or no manifest."""
    path = Path(path)
    for name, facts in (read_manifest(path) or {"files": {}})["files"].items():
        if facts["checksum"].startswith("crc32:") and facts["checksum"] != _checksum(path.parent / name):
            return f"{name} has checksum {_checksum(path.parent / name)} and was written with {facts['checksum']}"
    return None


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of all files of the checkpoint `path`."""
    return sum(sizes_of(Path(path)).values())


def input_size_of(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of its files that hold the states of training inputs."""
    sizes = sizes_of(Path(path))
    return sum(size for name, size in sizes.items() if name.startswith(f"{Path(path).name}.input-"))


def num_shards(path: str | os.PathLike[str]) -> int:
    """Return the number of data files of the bundle `path`, one for each process that wrote tensors."""
    return sum(
        bool(_SHARD.search(name)) for name in sizes_of(Path(path)) if name.startswith(f"{Path(path).name}.data-")
    )


def fingerprint(path: str | os.PathLike[str]) -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and modification times of the files of `path`; it changes if one is rewritten."""
    path = Path(path)
    facts = []
    for name, size in sorted(sizes_of(path).items()):
        if not name.endswith(METRICS):  # evaluations add this file later
            with contextlib.suppress(FileNotFoundError):
                facts.append((name, size, (path.parent / name).stat().st_mtime_ns))
    return tuple(facts)


def time_of(path: str | os.PathLike[str]) -> float | None:
    """Return when the checkpoint `path` was written, in seconds since 1970; None if it has neither manifest nor
    index.
    """
    path = Path(path)
    try:
        return time_in(path.parent, path.name, [f"{path.name}.index"])
    except FileNotFoundError:
        return None


def time_in(directory: Path, name: str, files: list[str]) -> float:
    """Return when the checkpoint `name` was written: by its manifest, else its index, else its remaining files."""
    manifest = read_manifest(directory / name)
    if manifest is not None:
        return float(manifest["time"])
    index = f"{name}.index"
    return (directory / (index if index in files else files[0])).stat().st_mtime


def sizes_of(path: Path) -> dict[str, int]:
    """Return file -> bytes of the checkpoint `path`, without files that another process removes meanwhile."""
    sizes = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for file in os.listdir(path.parent):
            if file.startswith(f"{path.name}."):
                with contextlib.suppress(FileNotFoundError):
                    sizes[file] = os.stat(path.parent / file).st_size
    return sizes


def _has_all_shards(name: str, files: Iterable[str]) -> bool:
    shards = [match for file in files if file.startswith(f"{name}.data-") and (match := _SHARD.search(file))]
    return bool(shards) and len(shards) >= int(shards[0].group(2))
