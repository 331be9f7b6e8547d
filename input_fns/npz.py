"""Arrays of NumPy's .npz files, by key, kept in memory."""

from __future__ import annotations

import contextlib
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from input_fns._batches import batches_of_arrays
from input_fns._files import divide_files, find_files, shown

_COPIES = 3
"""Copies of the data while it is loaded: as read, all files as one array, and TensorFlow's own."""

_CGROUP = Path("/sys/fs/cgroup")

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""By version of the format; 3.0, of structured arrays with names outside of Latin-1, has no public reader."""


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    input_context: tf.distribute.InputContext | None = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return batches of (dict of features `[batch, ...]`, label `[batch, ...]`), the rows of all files, in the stored
    dtypes.

    TRAIN shuffles all rows anew each epoch and never ends; EVAL and PREDICT are one ordered pass. PREDICT has no label.

    Args:
      num_epochs: number of passes in TRAIN (train.max_epochs); None: no limit.

    Params:
      files: a path or glob, or a list of them. Each contains the same arrays, `[rows, ...]`.
      features: keys of the arrays; null: all except the label.
      label: key of the labels; null: there are none.
      allow_nan: accept NaN and infinity in float arrays, false.
      batch_size, shuffle_seed, batch_across_epochs: as for input_fns.digits.

    Raises:
      ValueError: a file, array or row is bad; the message names it.
    """
    found = find_files(params)
    files, part = divide_files(found, input_context)
    label: str | None = params.get("label")
    keys = _keys(files[0], params.get("features"), label)
    if mode == "infer":
        label = None
    wanted = keys if label is None else [*keys, label]
    _check_room(files, wanted)
    loaded = [_load(file, wanted, bool(params.get("allow_nan"))) for file in files]
    _check_alike(files, loaded)
    each, first = part
    arrays = {key: np.concatenate([file[key][first::each] for file in loaded]) for key in wanted}
    features = {key: arrays[key] for key in keys}
    rows = len(arrays[wanted[0]])
    if not rows and mode != "infer" and (mode == "train" or (files, part) == (found, (1, 0))):
        share = "" if (files, part) == (found, (1, 0)) else " for one of the workers, which share them"
        raise ValueError(f"{shown(found)}: the arrays have no rows{share}.")
    return batches_of_arrays(
        features if label is None else (features, arrays[label]), rows, mode, params, config, num_epochs
    )


def _keys(file: str, features: Any, label: str | None) -> list[str]:
    if isinstance(features, str):
        return [features]
    if features is not None:
        return list(features)
    with _open(file) as archive:
        keys = [key for key in archive.files if key != label]
    if not keys:
        raise ValueError(f"{file}: holds no array beside the label {label!r}.")
    return keys


def _open(file: str) -> Any:
    try:
        # Without pickles: one in a data file could run any code.
        archive = np.load(tf.io.gfile.GFile(file, "rb"), allow_pickle=False)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: not an .npz file ({error}).") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{file}: one .npy array, not an .npz file. Save it with np.savez(path, name=array).")
    return archive


def _check_room(files: list[str], keys: list[str]) -> None:
    """Check that the arrays fit into memory before any is unpacked, since a small file may contain very large ones.

    Raises:
      ValueError: they do not; the message has the files and both sizes.
    """
    needed = {file: _bytes_of(file, keys) for file in files}
    total, free = sum(needed.values()), _free_bytes()
    if _COPIES * total > free:
        largest = max(needed, key=needed.__getitem__)
        of_all = f" of {_gigabytes(total)} in all" if len(files) > 1 else ""
        raise ValueError(
            f"{largest}: its arrays take {_gigabytes(needed[largest])}{of_all} once they are unpacked, and {_COPIES} "
            f"times as much while they are loaded; {_gigabytes(free)} of memory are free. Read them from TFRecord "
            "files (input_fns.tfrecord), which are not held in memory."
        )


def _bytes_of(file: str, keys: list[str]) -> int:
    """Return the bytes of the arrays in memory, according to the archive's directory; 0 for missing arrays.

    zipfile reads no more than that from a member. The header of each array must agree, since np.load allocates what the
    header says.
    """
    total = 0
    with _open(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.zip.infolist()}
        for key in keys:
            if key in members:
                total += members[key].file_size
                _check_header(file, key, archive, members[key])
    return total


def _check_header(file: str, key: str, archive: Any, member: zipfile.ZipInfo) -> None:
    """Check that an array's header does not promise more bytes than the member has.

    Raises:
      ValueError: it does.
    """
    try:
        with archive.zip.open(member) as stream:
            read = _HEADERS.get(np.lib.format.read_magic(stream))
            if read is None:
                return  # np.load will report the error
            shape, _, dtype = read(stream)
            there = member.file_size - stream.tell()
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file}: array {key!r} cannot be read ({error}).") from error
    stated = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and stated > there:
        raise ValueError(f"{file}: array {key!r} cannot be read ({dtype} {shape} takes {stated} bytes, not {there}).")


def _free_bytes() -> int:
    """Return how much memory this process can still use: of the machine, or of its container if that is less."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # not in a container, or the limit is "max"
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, max(0, limit - used))
    return int(free)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _load(file: str, keys: list[str], allow_nan: bool) -> dict[str, np.ndarray]:
    """Return key -> checked array."""
    arrays: dict[str, np.ndarray] = {}
    with _open(file) as archive:
        for key in keys:
            if key not in archive.files:
                raise ValueError(f"{file}: no array {key!r}; there are: {', '.join(archive.files) or 'none'}.")
            try:
                arrays[key] = archive[key]
            except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
                raise ValueError(f"{file}: array {key!r} cannot be read ({error}).") from error
            _check_array(file, key, arrays[key], allow_nan)
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{file}: its arrays have different numbers of rows: {', '.join(f'{k} {n}' for k, n in lengths.items())}. "
            f"Row {min(lengths.values())} (from 0) is the first that not all of them have."
        )
    return arrays


def _check_array(file: str, key: str, array: np.ndarray, allow_nan: bool) -> None:
    if array.ndim == 0:
        raise ValueError(f"{file}: array {key!r} is a single value; it must have a row for each example.")
    if allow_nan or not array.size or not np.issubdtype(array.dtype, np.floating):
        return
    bad = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        value = next(v for v in array[row].ravel() if not np.isfinite(v))
        raise ValueError(
            f"{file}: array {key!r} row {row} (from 0) holds {value}, as do {int(bad.sum())} rows in all. "
            "Set params.allow_nan=true to let them through."
        )


def _check_alike(files: list[str], loaded: list[dict[str, np.ndarray]]) -> None:
    for file, arrays in zip(files[1:], loaded[1:], strict=True):
        for key, array in arrays.items():
            first = loaded[0][key]
            if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
                raise ValueError(
                    f"{file}: array {key!r} has rows of {array.dtype} {array.shape[1:]}, and those of {files[0]} are "
                    f"{first.dtype} {first.shape[1:]}."
                )
