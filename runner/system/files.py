"""Small files that other processes read: always whole, never half written. And the folder that they are in."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

MODEL_SUMMARY_FILE = "model_summary.txt"
"""In model_dir: tables of the model's variables and layers, for a person."""


class StorageError(OSError):
    """A run's folder can no longer be written in. The message says all that a person needs; no traceback helps."""


class DiskFullError(StorageError):
    """What was to be written does not fit on the disk."""


class FolderLostError(StorageError):
    """A run's folder was deleted while the run went on."""


def is_disk_full(error: BaseException) -> bool:
    """Report whether `error` says that a disk, or somebody's share of it, is full.

    TensorFlow 2.21 has no code of its own for it: it is a ResourceExhausted or an Unknown error with the text.
    """
    words = ("No space left on device", "Disk quota exceeded")
    if isinstance(error, DiskFullError):
        return True
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in words)


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return what is free on the disk that `folder` is on, or will be."""
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    return shutil.disk_usage(there).free


@contextlib.contextmanager
def naming_need(path: str | os.PathLike[str], num_bytes: int) -> Iterator[None]:
    """While entered, a full disk is said with what is needed and what is free. Raises: DiskFullError: it is full."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error) or isinstance(error, DiskFullError):
            raise
        free = free_bytes(Path(path).parent)
        raise DiskFullError(
            f"no space left for {os.fspath(path)}: it needs {num_bytes:,} B more, and {free:,} B were free"
            f"{_quota(error)}. Make space, and run the same again: it goes on from its last checkpoint."
        ) from error


def _quota(error: OSError) -> str:
    return " beside a quota that is used up" if error.errno == errno.EDQUOT else ""


class HeldFolder:
    """An existing folder that must stay the same one: not deleted, nor deleted and made anew under its name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        # Open for as long as this object lives: the number of a deleted folder may be given to the next one, and some
        # network file systems give a folder another number when nobody has it open.
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    def check(self) -> None:
        """Raises: FolderLostError: it is another folder by now, or none."""
        try:
            now, held = os.stat(self._path), os.fstat(self._descriptor)
        except FileNotFoundError:
            raise FolderLostError(f"the folder {self._path} was deleted while the run went on. {_AFTER_LOSS}") from None
        if (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino):
            raise FolderLostError(
                f"the folder {self._path} was deleted while the run went on, and is another folder by now. "
                f"{_AFTER_LOSS}"
            )


_AFTER_LOSS = "What the run noted and saved there is lost; the same command begins anew."


HALF_WRITTEN = ".tmp"
"""How the names of files end that are to take the place of others once they are whole."""


def remove_half_written(*folders: Path) -> None:
    """Remove what processes that were killed have left of files on their way. Nobody may be writing in `folders`."""
    for folder in folders:
        for left in folder.glob(f".*.????????{HALF_WRITTEN}"):  # as mkstemp names them
            left.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces `path` in one move; a reader sees the old text or the new one, also after a crash."""
    data = text.encode()
    with naming_need(path, len(data)):
        descriptor, temporary = tempfile.mkstemp(HALF_WRITTEN, f".{path.name}.", path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)  # mkstemp makes files that only their owner may read
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes `values` as an indented JSON object."""
    write_atomically(path, json.dumps(values, indent=2, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None when there is no such file or it holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def read_dataclass(cls: type[_T], path: Path) -> _T:
    """Return the `cls` whose fields the JSON object in `path` holds; its defaults when there is none.

    What other versions wrote and `cls` does not know is passed over.
    """
    known = read_json(path) or {}
    return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})  # type: ignore[attr-defined]
