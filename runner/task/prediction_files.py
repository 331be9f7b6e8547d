"""Files of predictions, one example after another: JSON Lines, or the arrays of an .npz. No TensorFlow.

A file is written beside its place and moved there when the last example is in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from runner.config.schema import ConfigError
from runner.system.files import HALF_WRITTEN
from runner.tracking.plain_values import json_value, leaves

ONLY_KEY = "predictions"
"""The name of predictions that are no dict."""

_ENCODER = json.JSONEncoder(default=str, allow_nan=False)  # json.dumps would make one for each example


class PredictionWriter(Protocol):
    """A file of predictions, written one example after another."""

    def write(self, prediction: Any) -> None:
        """Add an example: an array, or a nest of dicts, lists and tuples of arrays."""

    def finish(self) -> None:
        """Write what can only be written when all examples are known."""


@contextlib.contextmanager
def open_predictions(path: Path) -> Iterator[PredictionWriter]:
    """Yield a writer of the file `path`, by its suffix. The file is there when this is left, and untouched by an error.

    Raises:
      ConfigError: the suffix is not known, or no file can be made there.
    """
    if path.suffix not in _WRITERS:
        raise ConfigError(
            f"predict.output={path}: its suffix says the format. Use .jsonl (JSON Lines) or .npz (NumPy)."
        )
    if path.is_dir():
        raise ConfigError(f"predict.output={path} is a folder. Name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(HALF_WRITTEN, f".{path.name}.", path.parent)
    except OSError as error:
        raise ConfigError(f"predict.output={path} cannot be written: {error}.") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            writer = _WRITERS[path.suffix](file, path)
            yield writer
            writer.finish()
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


class JsonLines:
    """One JSON object an example. Arrays are lists; bytes are text where they are UTF-8, else base64; numbers that JSON
    has no word for are the strings "nan", "inf" and "-inf", as in a journal.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file

    def write(self, prediction: Any) -> None:
        named = prediction if isinstance(prediction, Mapping) else {ONLY_KEY: prediction}
        self._file.write(_ENCODER.encode(json_value(named)).encode() + b"\n")

    def finish(self) -> None: ...


class Npz:
    """The arrays of `numpy.load`: each `[examples, ...]`, names of nested predictions joined by `/`.

    Numbers wait in files beside `path`, not in memory; texts wait in memory until the longest is known.

    Raises:
      ValueError: an array cannot be made of the examples; the message names it and says what to do.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._columns: dict[str, _Column] = {}

    def write(self, prediction: Any) -> None:
        named = dict(leaves("", prediction if isinstance(prediction, Mapping) else {ONLY_KEY: prediction}))
        for name, value in named.items():
            if name not in self._columns:
                self._columns[name] = _Column(name, self._path)
            self._columns[name].add(value)

    def finish(self) -> None:
        with zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED) as archive:
            for name, column in self._columns.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    column.write_to(member)


_WRITERS: dict[str, Callable[[IO[bytes], Path], PredictionWriter]] = {".jsonl": JsonLines, ".npz": Npz}


class _Column:
    """One array of an .npz, example by example."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._first: np.ndarray | None = None
        self._count = 0
        self._texts: list[np.ndarray] = []
        self._spool = tempfile.TemporaryFile(dir=path.parent)

    def add(self, value: Any) -> None:
        array = self._array(value)
        self._first = array if self._first is None else self._first
        if array.shape != self._first.shape:
            first, here = list(self._first.shape), list(array.shape)
            raise self._error(f"is {first} in the first example and {here}")
        if array.dtype.kind == "S":
            self._texts.append(array)
        else:
            self._spool.write(array.tobytes())
        self._count += 1

    def write_to(self, file: IO[bytes]) -> None:
        assert self._first is not None
        if self._texts:
            np.lib.format.write_array(file, np.stack(self._texts))
            return
        shape = (self._count, *self._first.shape)
        descr = np.lib.format.dtype_to_descr(self._first.dtype)
        np.lib.format.write_array_header_2_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        self._spool.seek(0)
        shutil.copyfileobj(self._spool, file)

    def _array(self, value: Any) -> np.ndarray:
        array = np.asarray(value, dtype=object if isinstance(value, bytes) else None)
        if array.dtype.kind == "V":  # bfloat16 and its kin, which numpy.load does not know
            return array.astype(np.float32)
        if array.dtype != object:
            return array
        texts = array.ravel().tolist()
        if not all(isinstance(text, bytes) for text in texts):
            raise self._error("has rows of different lengths")
        if any(text.endswith(b"\0") for text in texts):
            raise ValueError(
                f"predict.output={self._path}: a text of prediction {self._name!r} ends with a zero byte in example "
                f"{self._count + 1}, and NumPy drops it. Write .jsonl."
            )
        return np.array(texts, dtype=np.bytes_).reshape(array.shape)

    def _error(self, mistake: str) -> ValueError:
        where = f"predict.output={self._path}: prediction {self._name!r}"
        where += f" {mistake} in example {self._count + 1}"
        return ValueError(f"{where}. An .npz holds one shape a name; write .jsonl.")
