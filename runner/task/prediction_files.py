"""Files of predictions, written batch by batch: JSON Lines, CSV, .npz, Parquet, TFRecord.

Only TFRecord needs TensorFlow. A file is written under a temporary name, and renamed after the last example.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from runner.config.schema import PREDICTION_FORMATS, ConfigError
from runner.system.files import replacing
from runner.tracking.plain_values import json_value, leaves
from runner.types import ONLY_KEY

_ENCODER = json.JSONEncoder(default=str, allow_nan=False)  # json.dumps would create an encoder in each call
_ROW_GROUP_BYTES = 1 << 26  # size of a Parquet row group: it is kept in memory here, and a reader reads it at once


class Target(NamedTuple):
    """The file that a writer writes.

    Attributes:
      file: the open, empty temporary file, in the folder of `path`; its `name` is its path.
      path: the final path, also for messages.
    """

    file: IO[bytes]
    path: Path


class PredictionWriter:
    """Base class: writes a file of predictions, batch by batch."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, batch: Any) -> None:
        """Add a batch: an array, or dicts, lists and tuples of arrays, each `[examples, ...]`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write the parts that need all examples."""

    def close(self) -> None:
        """Release resources, whether or not the file is complete."""

    def _error(self, name: str, mistake: str) -> ValueError:
        """Return the error of a prediction that the format cannot hold, which says what to do."""
        return ValueError(f"predict.output={self._target.path}: prediction {name!r} {mistake}")


@contextlib.contextmanager
def open_predictions(path: Path) -> Iterator[PredictionWriter]:
    """Yield a writer for the file `path`, chosen by its suffix.

    The file appears at the end of the context; after an error an earlier file stays unchanged.

    Raises:
      ConfigError: the suffix is unknown, or the file cannot be created.
    """
    if path.suffix not in PREDICTION_FORMATS:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in PREDICTION_FORMATS.items())
        raise ConfigError(f"predict.output={path}: its suffix selects the format. Use one of {known}.")
    if path.is_dir():
        raise ConfigError(f"predict.output={path} is a folder. Set a file in it.")
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(replacing(path))
        except OSError as error:
            raise ConfigError(f"predict.output={path} cannot be written: {error}.") from error
        with contextlib.closing(_WRITERS[path.suffix](Target(file, path))) as writer:
            yield writer
            writer.finish()


def _named(batch: Any) -> dict[str, np.ndarray]:
    """Return name -> array of a batch; nested names are joined by `/`. bfloat16 and similar types become float32."""
    named = leaves("", batch if isinstance(batch, Mapping) else {ONLY_KEY: batch})
    arrays = ((name, np.asarray(value)) for name, value in named)
    return {name: array.astype(np.float32) if array.dtype.kind == "V" else array for name, array in arrays}


# --- JSON Lines -----------------------------------------------------------------------------------------------------


class JsonLines(PredictionWriter):
    """Writes one JSON object per example.

    Arrays are lists; bytes are text if UTF-8, else base64; numbers that JSON lacks are the strings "nan", "inf" and
    "-inf", as in a journal.
    """

    def write(self, batch: Any) -> None:
        lines = _json_texts(batch if isinstance(batch, Mapping) else {ONLY_KEY: batch})
        self._target.file.write("".join(f"{line}\n" for line in lines).encode())


def _json_texts(batch: Any) -> Iterable[str]:
    """Return the JSON of each example of a batch."""
    if isinstance(batch, Mapping):
        keys = (f"{_ENCODER.encode(str(key))}: ".replace("%", "%%") for key in batch)
        return _filled("{" + ", ".join(f"{key}%s" for key in keys) + "}", batch.values())
    if isinstance(batch, list | tuple):
        return _filled("[" + ", ".join(["%s"] * len(batch)) + "]", batch)
    array = np.asarray(batch)
    if array.size and (array.dtype.kind in "iub" or (array.dtype.kind == "f" and np.isfinite(array).all())):
        return _texts_of_numbers(array)
    return [_ENCODER.encode(json_value(value)) for value in array]


def _filled(template: str, columns: Collection[Any]) -> Iterable[str]:
    """Yield `template` for each example, with the JSON of its columns."""
    if not columns:
        return itertools.repeat(template)  # {} or [] for each example of its neighbours
    return [template % row for row in zip(*map(_json_texts, columns), strict=False)]


def _texts_of_numbers(array: np.ndarray) -> list[str]:
    """Return the JSON of each row of `[examples, ...]`: one call of the encoder, split at row ends."""
    depth = array.ndim - 1
    start, end = "[" * depth, "]" * depth
    text = _ENCODER.encode(array.tolist())
    rows = text[1 + depth : len(text) - depth - 1].split(f"{end}, {start}")
    return [f"{start}{row}{end}" for row in rows] if depth else rows


# --- CSV ------------------------------------------------------------------------------------------------------------


class Csv(PredictionWriter):
    """Writes one row per example under a line of names, as `pandas.DataFrame.to_csv(index=False)` does.

    A vector has the columns `name_0`, `name_1`, ...; nested names are joined by `/`. Bytes are text if UTF-8, else
    base64; NaN and None are empty.

    Raises:
      ValueError: a prediction is neither a number or text nor a vector of one length, or two columns have one name; the
        message names it.
    """

    _columns: Mapping[str, str] | None = None
    """Column -> name of its prediction; None before the first batch."""

    def write(self, batch: Any) -> None:
        named, text = _named(batch), io.StringIO()
        columns: dict[str, str] = {}
        for name, array in named.items():
            is_ragged = array.dtype == object and any(isinstance(row, np.ndarray) for row in array.flat)
            if is_ragged or array.ndim > 2:
                raise self._error(name, "is ragged" if is_ragged else f"is {list(array.shape[1:])} in each example")
            for column in [name] if array.ndim == 1 else [f"{name}_{number}" for number in range(array.shape[1])]:
                if columns.setdefault(column, name) != name:
                    raise self._error(name, f"would have the column {column!r}, which {columns[column]!r} has")
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = columns
            writer.writerow(columns)
        for _, name in columns.items() ^ self._columns.items():
            raise self._error(name, "has another length than in the first example")
        rows = zip(*(_csv_cells(array[:, None] if array.ndim == 1 else array) for array in named.values()), strict=True)
        writer.writerows(map(itertools.chain.from_iterable, rows))
        self._target.file.write(text.getvalue().encode())

    def _error(self, name: str, mistake: str) -> ValueError:
        why = "A .csv holds numbers, texts and vectors of one length; write .jsonl."
        return super()._error(name, f"{mistake}. {why}")


def _csv_cells(array: np.ndarray) -> list[list[Any]]:
    """Return the cells of `[examples, columns]` in the form in which `csv.writer` writes them as pandas does."""
    if array.dtype.kind == "f":  # the shortest text that is the same number in the array's own precision
        return np.where(np.isnan(array), "", array.astype(str)).tolist()
    if array.dtype.kind not in "OS":
        return array.tolist()
    cells = ((json_value(cell) if isinstance(cell, bytes) else cell for cell in row) for row in array.tolist())
    return [["" if cell is None or cell != cell else cell for cell in row] for row in cells]


# --- .npz -----------------------------------------------------------------------------------------------------------


class Npz(PredictionWriter):
    """Writes arrays for `numpy.load`: each `[examples, ...]`, nested names joined by `/`.

    They wait in files beside `path`, not in memory, because an array's header contains the number of examples.

    Raises:
      ValueError: the examples do not form an array; the message names it and what to do.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._columns: dict[str, _Column] = {}

    def write(self, batch: Any) -> None:
        for name, array in _named(batch).items():
            if name not in self._columns:
                self._columns[name] = _Column(name, self._target.path)
            self._columns[name].add(array)

    def finish(self) -> None:
        with zipfile.ZipFile(self._target.file, "w", zipfile.ZIP_STORED) as archive:
            for name, column in self._columns.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    column.write_to(member)


class _Column:
    """Writes one array of an .npz, batch by batch."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._shape: tuple[int, ...] | None = None
        self._count = 0
        # (number of values, their type) of each batch, because the longest text is not known yet
        self._batches: list[tuple[int, np.dtype]] = []
        self._spool = tempfile.TemporaryFile(dir=path.parent)

    def add(self, array: np.ndarray) -> None:
        if array.dtype == object and any(isinstance(row, np.ndarray) for row in array.flat) and array.ndim == 1:
            for row in array:  # ragged: rows may have different shapes
                self.add(row[None])
            return
        array = self._of_bytes(array) if array.dtype == object else array
        if self._shape is None:
            self._shape = array.shape[1:]
        if array.shape[1:] != self._shape:
            first, here = list(self._shape), list(array.shape[1:])
            raise self._error(f"is {first} in the first example and {here}")
        self._batches.append((array.size, array.dtype))
        self._spool.write(array.tobytes())
        self._count += len(array)

    def write_to(self, file: IO[bytes]) -> None:
        assert self._shape is not None
        dtype = np.result_type(*{one for _, one in self._batches})
        descr, shape = np.lib.format.dtype_to_descr(dtype), (self._count, *self._shape)
        np.lib.format.write_array_header_2_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        self._spool.seek(0)
        for number, own in self._batches:
            file.write(np.frombuffer(self._spool.read(number * own.itemsize), own).astype(dtype).tobytes())

    def _of_bytes(self, array: np.ndarray) -> np.ndarray:
        texts = array.ravel().tolist()
        if not all(isinstance(text, bytes) for text in texts):
            raise self._error("has rows of different lengths")
        cut = next((index for index, text in enumerate(texts) if text.endswith(b"\0")), None)
        if cut is not None:
            example = self._count + 1 + cut // math.prod(array.shape[1:])
            raise ValueError(
                f"predict.output={self._path}: a text of prediction {self._name!r} ends with a zero byte in example "
                f"{example}, and NumPy would drop that byte. Write .jsonl."
            )
        return np.array(texts, dtype=np.bytes_).reshape(array.shape)

    def _error(self, mistake: str) -> ValueError:
        where = f"predict.output={self._path}: prediction {self._name!r} {mistake} in example {self._count + 1}"
        return ValueError(f"{where}. All examples of an array in an .npz have one shape; write .jsonl.")


# --- Parquet --------------------------------------------------------------------------------------------------------


class Parquet(PredictionWriter):
    """Writes one column per name, nested names joined by `/`. Arrays are lists, or lists of lists.

    Texts are binary, because only the last one shows whether all are UTF-8.

    Raises:
      ValueError: Parquet has no type for a prediction's dtype.
    """

    def __init__(self, target: Target) -> None:
        import pyarrow

        super().__init__(target)
        self._arrow: Any = pyarrow
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._writer: Any = None

    def write(self, batch: Any) -> None:
        columns = {name: self._column(name, array) for name, array in _named(batch).items()}
        self._waiting.append(self._arrow.RecordBatch.from_pydict(columns))
        self._waiting_bytes += self._waiting[-1].nbytes
        if self._waiting_bytes >= _ROW_GROUP_BYTES:
            self._write_rows()

    def finish(self) -> None:
        if not self._writer and not self._waiting:
            self._waiting = [self._arrow.RecordBatch.from_pydict({})]
        if self._waiting:
            self._write_rows()

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _write_rows(self) -> None:
        from pyarrow import parquet

        if not self._writer:
            self._writer = parquet.ParquetWriter(self._target.file, self._waiting[0].schema)
        table = self._arrow.Table.from_batches(self._waiting)
        self._writer.write_table(table, row_group_size=max(1, len(table)))
        self._waiting, self._waiting_bytes = [], 0

    def _column(self, name: str, array: np.ndarray) -> Any:
        try:
            return self._array(array)
        except (self._arrow.ArrowInvalid, self._arrow.ArrowNotImplementedError) as error:
            raise self._error(name, f"is {array.dtype}, which Parquet cannot hold ({error}). Write .npz.") from error

    def _array(self, array: np.ndarray) -> Any:
        """Return `[examples, ...]` as an Arrow array of values, lists or lists of lists."""
        lists = self._arrow.ListArray.from_arrays
        if array.dtype == object and any(isinstance(row, np.ndarray) for row in array):  # ragged
            return lists(np.cumsum([0, *map(len, array)], dtype=np.int32), self._array(np.concatenate(array)))
        flat, arrow = array.ravel(), self._arrow
        found = arrow.array(flat.tolist(), arrow.binary()) if array.dtype == object else arrow.array(flat)
        for axis in range(array.ndim - 1, 0, -1):
            starts = np.arange(math.prod(array.shape[:axis]) + 1, dtype=np.int32) * array.shape[axis]
            found = lists(starts, found)
        return found


# --- TFRecord -------------------------------------------------------------------------------------------------------


class TFRecord(PredictionWriter):
    """Writes one tf.train.Example per example, nested names joined by `/`.

    Arrays are flattened: floats as float32, integers and booleans as int64, texts as bytes. `tf.io.parse_example` needs
    the shapes.

    Raises:
      ValueError: a tf.train.Example has no type for a prediction's dtype.
    """

    def __init__(self, target: Target) -> None:
        import tensorflow as tf

        super().__init__(target)
        self._writer = tf.io.TFRecordWriter(target.file.name)

    def write(self, batch: Any) -> None:
        import tensorflow as tf

        columns = {name: self._features(name, array) for name, array in _named(batch).items()}
        for row in zip(*columns.values(), strict=True):
            feature = dict(zip(columns, row, strict=True))
            self._writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())

    def finish(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _features(self, name: str, array: np.ndarray) -> list[Any]:
        """Return the feature of each example."""
        import tensorflow as tf

        rows = [list(_flat(row)) for row in array.tolist()]
        of_object = next((type(value) for row in rows for value in row), bytes)
        kind = {"O": of_object, "f": float}.get(array.dtype.kind, int)
        try:
            if kind is float:
                return [tf.train.Feature(float_list=tf.train.FloatList(value=row)) for row in rows]
            if kind is bytes:
                return [tf.train.Feature(bytes_list=tf.train.BytesList(value=row)) for row in rows]
            return [tf.train.Feature(int64_list=tf.train.Int64List(value=map(int, row))) for row in rows]
        except (TypeError, ValueError) as error:
            mistake = f"is {array.dtype}, which a tf.train.Example cannot hold ({error}). Write .npz."
            raise self._error(name, mistake) from error


def _flat(value: Any) -> Iterator[Any]:
    """Yield the numbers or texts of an example, in order."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        yield value
        return
    for member in value:
        yield from _flat(member)


_WRITERS: dict[str, Callable[[Target], PredictionWriter]] = {
    ".jsonl": JsonLines, ".csv": Csv, ".npz": Npz, ".parquet": Parquet, ".tfrecord": TFRecord,
}  # fmt: skip
