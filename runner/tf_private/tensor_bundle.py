"""TensorFlow's checkpoint format ("tensor bundle"): named tensors in an index and data shards, each with a CRC-32C."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

PART_BYTES = 64 << 20
"""Bytes of a checkpoint that are read at once; a larger tensor is read alone."""

_T = TypeVar("_T")


class Entry(NamedTuple):
    """A tensor in a bundle, or some rows of one.

    Attributes:
      key: the tensor's key in the bundle.
      rows: a slice in TensorFlow's notation, see `slice_specs`; "": the whole tensor.
      value: array, tensor or variable.
    """

    key: str
    rows: str
    value: Any


def write_bundle(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write one bundle from key -> tensor of any shape and dtype; a tuple of tensors is written as the slices of one
    tensor.

    Parameter servers write the tensors that they hold, so `path` must be the same file for all of them.
    """
    entries_on: dict[str, list[Entry]] = {}  # device -> what is written there
    for key, value in tensors.items():
        if isinstance(value, tuple):
            parts = value
            rows = slice_specs([tf.TensorShape(part.shape) for part in parts])
        else:
            parts = (value,)
            rows = [""]
        for spec, part in zip(rows, parts, strict=True):
            device = part.device if is_far(part) else "CPU:0"
            entries_on.setdefault(device, []).append(Entry(key, spec, part))
    with tf.init_scope():
        if set(entries_on) <= {"CPU:0"}:
            _write("CPU:0", entries_on.get("CPU:0", []), path)
        else:
            bundles = map(_write, entries_on, entries_on.values(), _prefixes(path))
            _merge(path, bundles)


def write_in_parts(path: Path, parts: Iterator[Sequence[Entry]]) -> None:
    """Write one bundle of entries that come in parts. Each part is freed before the next one is requested."""
    with tf.init_scope():
        # `map`, not a loop: a loop variable would keep a part in memory while the next one is made.
        bundles = map(functools.partial(_write, "CPU:0"), parts, _prefixes(path))
        _merge(path, bundles)


def _prefixes(path: Path) -> Iterator[Path]:
    """Yield the paths of the bundles to merge into `path`, each in a new folder."""
    for number in itertools.count():
        folder = path.parent / f"{number}"
        folder.mkdir()
        yield folder / path.name


def _merge(path: Path, written: Iterable[Path]) -> None:
    prefixes = [str(prefix) for prefix in written]
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=str(path), delete_old_dirs=True)


def _write(place: str, entries: Sequence[Entry], prefix: Path) -> Path:
    with tf.device(place):
        tf.raw_ops.SaveV2(
            prefix=str(prefix),
            tensor_names=[entry.key for entry in entries],
            shape_and_slices=[entry.rows for entry in entries],
            tensors=[tf.convert_to_tensor(entry.value) for entry in entries],
        )
    return prefix


def is_far(value: Any) -> bool:
    """Report whether a tensor or variable is on a parameter server."""
    return "/job:ps/" in (getattr(value, "device", None) or "")


def slice_specs(parts: Sequence[tf.TensorShape], axis: int = 0) -> list[str]:
    """Return TensorFlow's notation of consecutive slices along an axis: "10 4 0,5:0,4" is rows 0-4 of a `[10, 4]`.

    Args:
      parts: the shape of each slice.
      axis: the axis along which the tensor is divided.
    """
    sizes = [part[axis] for part in parts]
    whole = list(parts[0])
    whole[axis] = sum(sizes)
    lengths = " ".join(map(str, whole))
    specs = []
    start = 0
    for size in sizes:
        slices = [f"0,{length}" for length in whole]
        slices[axis] = f"{start},{size}"
        specs.append(f"{lengths} {':'.join(slices)}")
        start += size
    return specs


def pieces(shape: tf.TensorShape, number: int) -> list[str]:
    """Return the specs (see `slice_specs`) of `number` slices of about equal size; one slice, "", if there are too
    few rows.
    """
    if number == 1 or not shape.rank or shape[0] < number:
        return [""]
    fewest_rows, num_larger = divmod(int(shape[0]), number)
    parts = []
    for piece in range(number):
        num_rows = fewest_rows + 1 if piece < num_larger else fewest_rows
        parts.append(tf.TensorShape([num_rows]).concatenate(shape[1:]))
    return slice_specs(parts)


_PATTERN = re.compile(r"[*?\[\\]")


def literal(path: str) -> str:
    """Return a path by which TensorFlow finds the bundle `path`, even if its folder has characters of a pattern.

    TensorFlow 2.21 takes the path of a bundle to read as a pattern: `run[1]` would match `run1`, and an escaped name is
    not opened. Such a folder is read through a symbolic link.
    """
    folder, name = os.path.split(path)
    if not _PATTERN.search(folder):
        return path
    return os.path.join(_plain_name(os.path.abspath(folder)), name)


@functools.cache
def _plain_name(folder: str) -> str:
    """Return a symbolic link to `folder`; it is removed when the process exits."""
    links = tempfile.mkdtemp(prefix="runner-")
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    link = os.path.join(links, "model_dir")
    os.symlink(folder, link)
    return link


def size_of(shape: Sequence[int], dtype: tf.DType) -> int:
    """Return the bytes of a tensor in memory; for strings, an amount per string."""
    return math.prod(shape) * int(dtype.size)


def in_parts(entries: Iterable[_T], size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield `entries`, in order, in lists of up to PART_BYTES; a larger entry comes alone."""
    part: list[_T] = []
    size = 0
    for entry in entries:
        if part and size + size_of(entry) > PART_BYTES:
            yield part
            part = []
            size = 0
        part.append(entry)
        size += size_of(entry)
    if part:
        yield part


def read_bundle(path: str, dtypes: Mapping[str, tf.DType]) -> dict[str, tf.Tensor]:
    """Read tensors in one call and return key -> tensor, with the shape and dtype that were saved.

    Args:
      path: prefix of the bundle.
      dtypes: key -> dtype of the tensors to read.

    Raises:
      DataLossError: a tensor does not match its CRC-32C.
    """
    values = read_entries(path, "CPU:0", [(key, "", dtype) for key, dtype in dtypes.items()])
    return dict(zip(dtypes, values, strict=True))


def read_entries(path: str, place: str, entries: Sequence[tuple[str, str, tf.DType]]) -> list[tf.Tensor]:
    """Return tensors, or slices of them, read on the device `place`.

    Args:
      path: prefix of the bundle.
      place: name of a device.
      entries: (key, slice as in `slice_specs`, dtype) of each.

    Raises:
      DataLossError: a tensor does not match its CRC-32C.
    """
    if not entries:
        return []
    keys, rows, dtypes = (list(column) for column in zip(*entries, strict=True))
    with tf.init_scope(), tf.device(place):
        return tf.raw_ops.RestoreV2(prefix=literal(path), tensor_names=keys, shape_and_slices=rows, dtypes=dtypes)
