"""Small files that other processes read and that are complete at any time, and checks of the folder they are in."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from runner.system.standard_streams import say

_T = TypeVar("_T")

MODEL_SUMMARY_FILE = "model_summary.txt"
"""File in model_dir with readable tables of the model's variables and layers."""
MODEL_CARD_FILE = "README.md"
"""File in the folder of an exported model that describes it."""


RUNNER_FILES = "runner_files"
"""Folder in model_dir with the runner's own files of checkpoints. In model_dir itself, a program written for
tf.estimator takes every `*.index` and `model.ckpt*` for one of its checkpoints."""


def find_runner_file(file: Path) -> Path:
    """Return where one of the runner's own files of a checkpoint is.

    Args:
      file: its path beside the checkpoint, where earlier versions wrote it. This is returned if it is not in the folder
        RUNNER_FILES.
    """
    inside = file.parent / RUNNER_FILES / file.name
    return inside if inside.exists() else file


def new_runner_file(file: Path) -> Path:
    """Return where to write the file that `find_runner_file` then finds. The folder exists afterwards."""
    (file.parent / RUNNER_FILES).mkdir(exist_ok=True)  # not its parents: a deleted model_dir is not made again
    return file.parent / RUNNER_FILES / file.name


class StorageError(OSError):
    """A run's folder can no longer be written. The message says enough, so no traceback is shown."""


class DiskFullError(StorageError):
    """The disk is full."""


class FolderLostError(StorageError):
    """A run's folder was deleted, replaced or moved during the run."""


def is_disk_full(error: BaseException) -> bool:
    """Report whether `error` says that a disk, or the user's quota on a disk, is full.

    TensorFlow 2.21 has no error code for this; it raises ResourceExhausted or Unknown with the system's text.
    """
    if isinstance(error, DiskFullError):
        return True
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)
    return "No space left on device" in text or "Disk quota exceeded" in text


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the free bytes on the disk of `folder`, which need not exist."""
    path = Path(folder).absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(nearest).free


@contextlib.contextmanager
def naming_need(path: str | os.PathLike[str], num_bytes: int) -> Iterator[None]:
    """Turn an error about a full disk into one that names the needed and the free space.

    Raises:
      DiskFullError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if not is_disk_full(error) or isinstance(error, DiskFullError):
            raise
        free = free_bytes(Path(path).parent)
        quota = ", but your disk quota is used up" if error.errno == errno.EDQUOT else ""
        raise DiskFullError(
            f"no space left for {os.fspath(path)}: it needs {num_bytes:,} B more, and {free:,} B were free"
            f"{quota}. Free some space and run the same command again to resume from the last checkpoint."
        ) from error


class HeldFolder:
    """A folder that must continue to exist, and must not be replaced by another folder of the same name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        # The folder is kept open. Otherwise its inode number may be reused after a deletion, and some network file
        # systems change the number of a folder that is not open.
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    def check(self) -> None:
        """Check that the folder still exists, is the same and is where it was.

        Raises:
          FolderLostError: the folder was deleted, replaced or moved.
        """
        held = os.fstat(self._descriptor)
        is_deleted = False
        try:
            if os.path.samestat(os.stat(self._path), held):
                return
        except FileNotFoundError:
            is_deleted = True
        moved_to = self._find_folder(held)
        if moved_to is not None:
            raise FolderLostError(
                f"the folder {self._path} was moved during the run, and is whole in {moved_to}. Move it back, or write "
                f"model_dir={moved_to}: the same command then goes on from its newest checkpoint."
            )
        replaced = "" if is_deleted else " and replaced by another folder"
        raise FolderLostError(f"the folder {self._path} was deleted during the run{replaced}. {_AFTER_LOSS}")

    def _find_folder(self, held: os.stat_result) -> str | None:
        """Return where the folder is now, as the kernel knows it; None if it was deleted, or is out of reach."""
        with contextlib.suppress(OSError):  # no /proc; of a deleted folder, "<path> (deleted)" is no path
            place = os.readlink(f"/proc/self/fd/{self._descriptor}")
            if os.path.samestat(os.stat(place), held):
                return place
        return None


_AFTER_LOSS = "Everything that the run had saved in it is lost. The same command starts the run from the beginning."


DAMAGED = ".damaged"
"""Suffix of files that could not be read."""

HALF_WRITTEN = ".tmp"
"""Suffix of temporary files that replace others when they are complete."""


def remove_half_written(*folders: Path) -> None:
    """Remove temporary files that killed processes left in `folders` and their RUNNER_FILES. No process may be writing
    there.
    """
    with_own_files = [*folders, *(folder / RUNNER_FILES for folder in folders)]
    for folder in with_own_files:
        for file in folder.glob(f".*.????????{HALF_WRITTEN}"):  # of _new_file_beside
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Yield an empty file, with a `name`, that replaces `path` at the end of this context: a reader sees the old or the
    new file, even after a crash. After an error inside this context, the old one stays.

    Args:
      mode: the mode of the file, which until the end of this context only its owner can read; None: as of every new
        file, 0o666 less the umask.
    """
    mode_so_far = 0o666 if mode is None else 0o600
    with _new_file_beside(path, mode_so_far) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename, which may otherwise reach the disk first
            if mode is not None:
                os.chmod(file.name, mode)
            try:
                os.replace(file.name, path)
            except IsADirectoryError:  # somebody has made a folder in the file's place
                set_aside(path, "a folder")
                os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _new_file_beside(path: Path, mode: int) -> IO[bytes]:
    """Create and open a file with a name of its own in the folder of `path`.

    Args:
      mode: its mode, from which the kernel takes the umask; a process can read its umask only by changing it, which
        files that other threads make at that moment would have.
    """

    def open_with_mode(file: str, flags: int) -> int:
        return os.open(file, flags, mode)

    while True:
        name = path.parent / f".{path.name}.{secrets.token_hex(4)}{HALF_WRITTEN}"
        with contextlib.suppress(FileExistsError):
            return open(os.fspath(name), "x+b", opener=open_with_mode)


def write_atomically(path: Path, text: str | bytes, mode: int | None = None) -> None:
    """Replace the contents of `path` at once, as `replacing` does."""
    data = text.encode() if isinstance(text, str) else text
    with naming_need(path, len(data)), replacing(path, mode) as file:
        file.write(data)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as an indented JSON object."""
    write_atomically(path, json.dumps(values, indent=2, default=str) + "\n")


def set_aside(path: Path, why: str) -> None:
    """Rename a file that cannot be read, or a folder in its place, and say so. Another process may do it first."""
    aside = path.with_name(f"{path.name}.{time.time_ns()}{DAMAGED}")
    try:
        os.replace(path, aside)
    except FileNotFoundError:
        return
    except OSError:  # a folder that may only be read
        aside = path
    where = "" if aside == path else f" as {aside.name}"
    say(f"runner: {path} is damaged ({why}), and is left aside{where}.")


def remove(path: Path) -> None:
    """Remove a file, if it is there. A folder in its place is set aside."""
    if path.is_dir():
        set_aside(path, "a folder")
    path.unlink(missing_ok=True)


def read_json(path: Path, *, is_kept: bool = False) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if there is none. A file that holds something else, or a folder in its
    place, is renamed (`set_aside`), so that the run goes on without it.

    Args:
      is_kept: a damaged file stays where it is, because the caller reports it.
    """
    why = "no JSON object"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        why = "a folder"
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        pass
    if not is_kept:
        set_aside(path, why)
    return None


def read_dataclass(cls: type[_T], path: Path) -> _T:
    """Return a `cls` with the fields of the JSON object in `path`; with the defaults if there is no such object.

    Fields that `cls` does not have, because another version wrote them, are ignored.
    """
    saved = read_json(path) or {}
    names = cls.__dataclass_fields__  # type: ignore[attr-defined]
    known = {name: value for name, value in saved.items() if name in names}
    return cls(**known)
