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


def _as_mapping(batch: Any) -> Mapping[str, Any]:
    """Return a batch whose predictions have names."""
    if isinstance(batch, Mapping):
        return batch
    return {ONLY_KEY: batch}


def _arrays_in(batch: Any) -> dict[str, np.ndarray]:
    """Return name -> array of a batch; nested names are joined by `/`. bfloat16 and similar types become float32."""
    arrays = {}
    for name, value in leaves("", _as_mapping(batch)):
        array = np.asarray(value)
        if array.dtype.kind == "V":  # NumPy itself has no such type
            array = array.astype(np.float32)
        arrays[name] = array
    return arrays


def _holds_arrays(array: np.ndarray) -> bool:
    """Report whether the values of an array are arrays themselves."""
    return array.dtype == object and any(isinstance(value, np.ndarray) for value in array.flat)


# --- JSON Lines -----------------------------------------------------------------------------------------------------


class JsonLines(PredictionWriter):
    """Writes one JSON object per example.

    Arrays are lists; bytes are text if UTF-8, else base64; numbers that JSON lacks are the strings "nan", "inf" and
    "-inf", as in a journal.
    """

    def write(self, batch: Any) -> None:
        lines = _json_texts(_as_mapping(batch))
        text = "".join(f"{line}\n" for line in lines)
        self._target.file.write(text.encode())


def _json_texts(batch: Any) -> Iterable[str]:
    """Return the JSON of each example of a batch."""
    if isinstance(batch, Mapping):
        names = [_ENCODER.encode(str(key)).replace("%", "%%") for key in batch]
        members = ", ".join(f"{name}: %s" for name in names)
        return _fill(f"{{{members}}}", batch.values())
    if isinstance(batch, list | tuple):
        members = ", ".join(["%s"] * len(batch))
        return _fill(f"[{members}]", batch)
    array = np.asarray(batch)
    if array.size and _are_numbers_of_json(array):
        return _texts_of_numbers(array)
    return [_ENCODER.encode(json_value(value)) for value in array]


def _are_numbers_of_json(array: np.ndarray) -> bool:
    """Report whether JSON has all values of an array as numbers, true or false."""
    kind = array.dtype.kind
    if kind == "f":
        return bool(np.isfinite(array).all())
    return kind in "iub"


def _fill(template: str, columns: Collection[Any]) -> Iterable[str]:
    """Return `template` for each example, with the JSON of its columns."""
    if not columns:
        return itertools.repeat(template)  # {} or [] for each example of its neighbours
    texts = [_json_texts(column) for column in columns]
    # Not strict: what repeats has no end.
    return [template % row for row in zip(*texts, strict=False)]


def _texts_of_numbers(array: np.ndarray) -> list[str]:
    """Return the JSON of each row of `[examples, ...]`: one call of the encoder, split at row ends."""
    depth = array.ndim - 1
    start = "[" * depth
    end = "]" * depth
    text = _ENCODER.encode(array.tolist())
    rows = text[1 + depth : len(text) - depth - 1].split(f"{end}, {start}")
    if depth == 0:
        return rows
    return [f"{start}{row}{end}" for row in rows]


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
        arrays = _arrays_in(batch)
        columns: dict[str, str] = {}
        for name, array in arrays.items():
            for column in self._columns_of(name, array):
                if columns.setdefault(column, name) != name:
                    raise self._error(name, f"would have the column {column!r}, which {columns[column]!r} has")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = columns
            writer.writerow(columns)
        differing = columns.items() ^ self._columns.items()  # pairs of a column and the name of its prediction
        for _, name in differing:
            raise self._error(name, "has another length than in the first example")
        cells = []
        for array in arrays.values():
            table = array[:, None] if array.ndim == 1 else array
            cells.append(_csv_cells(table))
        rows = zip(*cells, strict=True)
        writer.writerows(map(itertools.chain.from_iterable, rows))
        self._target.file.write(text.getvalue().encode())

    def _columns_of(self, name: str, array: np.ndarray) -> list[str]:
        """Return the names of the columns of a prediction.

        Raises:
          ValueError: it is neither a number or text nor a vector of one length.
        """
        if _holds_arrays(array):
            raise self._error(name, "is ragged")
        if array.ndim > 2:
            raise self._error(name, f"is {list(array.shape[1:])} in each example")
        if array.ndim == 1:
            return [name]
        return [f"{name}_{number}" for number in range(array.shape[1])]

    def _error(self, name: str, mistake: str) -> ValueError:
        why = "A .csv holds numbers, texts and vectors of one length; write .jsonl."
        return super()._error(name, f"{mistake}. {why}")


def _csv_cells(array: np.ndarray) -> list[list[Any]]:
    """Return the cells of `[examples, columns]` in the form in which `csv.writer` writes them as pandas does."""
    if array.dtype.kind == "f":  # the shortest text that is the same number in the array's own precision
        return np.where(np.isnan(array), "", array.astype(str)).tolist()
    if array.dtype.kind not in "OS":
        return array.tolist()
    rows = []
    for values in array.tolist():
        rows.append([_csv_cell(value) for value in values])
    return rows


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bytes):
        return json_value(value)
    is_nan = value != value
    if value is None or is_nan:
        return ""
    return value


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
        for name, array in _arrays_in(batch).items():
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
        self._name = name
        self._path = path
        self._shape: tuple[int, ...] | None = None
        self._count = 0
        # (number of values, their type) of each batch, because the longest text is not known yet
        self._batches: list[tuple[int, np.dtype]] = []
        self._spool = tempfile.TemporaryFile(dir=path.parent)

    def add(self, array: np.ndarray) -> None:
        """Write the values of a batch, `[examples, ...]`, to a temporary file.

        Raises:
          ValueError: the examples do not form an array.
        """
        if array.ndim == 1 and _holds_arrays(array):
            for row in array:  # ragged: rows may have different shapes
                self.add(row[None])
            return
        if array.dtype == object:
            array = self._as_bytes(array)
        shape = array.shape[1:]
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            raise self._error(f"is {list(self._shape)} in the first example and {list(shape)}")
        self._batches.append((array.size, array.dtype))
        self._spool.write(array.tobytes())
        self._count += len(array)

    def write_to(self, file: IO[bytes]) -> None:
        """Write the array of all batches to `file`, in the format .npy."""
        assert self._shape is not None
        # The type that holds what the batches have: of texts, the longest.
        dtype = np.result_type(*{dtype_of_batch for _, dtype_of_batch in self._batches})
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (self._count, *self._shape),
        }
        np.lib.format.write_array_header_2_0(file, header)
        self._spool.seek(0)
        for num_values, dtype_of_batch in self._batches:
            data = self._spool.read(num_values * dtype_of_batch.itemsize)
            array = np.frombuffer(data, dtype_of_batch).astype(dtype)
            file.write(array.tobytes())

    def _as_bytes(self, array: np.ndarray) -> np.ndarray:
        """Return an array of objects as one of texts."""
        texts = array.ravel().tolist()
        if not all(isinstance(text, bytes) for text in texts):
            raise self._error("has rows of different lengths")
        for place, text in enumerate(texts):
            if text.endswith(b"\0"):
                example = self._count + 1 + place // math.prod(array.shape[1:])
                raise ValueError(
                    f"predict.output={self._path}: a text of prediction {self._name!r} ends with a zero byte in "
                    f"example {example}, and NumPy would drop that byte. Write .jsonl."
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
        columns = {name: self._column(name, array) for name, array in _arrays_in(batch).items()}
        rows = self._arrow.RecordBatch.from_pydict(columns)
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
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
        self._waiting = []
        self._waiting_bytes = 0

    def _column(self, name: str, array: np.ndarray) -> Any:
        try:
            return self._array(array)
        except (self._arrow.ArrowInvalid, self._arrow.ArrowNotImplementedError) as error:
            raise self._error(name, f"is {array.dtype}, which Parquet cannot hold ({error}). Write .npz.") from error

    def _array(self, array: np.ndarray) -> Any:
        """Return `[examples, ...]` as an Arrow array of values, lists or lists of lists."""
        build_lists = self._arrow.ListArray.from_arrays
        is_ragged = array.dtype == object and any(isinstance(row, np.ndarray) for row in array)
        if is_ragged:
            lengths = [len(row) for row in array]
            starts = np.cumsum([0, *lengths], dtype=np.int32)
            return build_lists(starts, self._array(np.concatenate(array)))
        flat = array.ravel()
        if array.dtype == object:
            values = self._arrow.array(flat.tolist(), self._arrow.binary())
        else:
            values = self._arrow.array(flat)
        # The last axis becomes the innermost lists. `build_lists` gets the places where lists begin, and the end.
        for axis in range(array.ndim - 1, 0, -1):
            num_lists = math.prod(array.shape[:axis])
            starts = np.arange(num_lists + 1, dtype=np.int32) * array.shape[axis]
            values = build_lists(starts, values)
        return values


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

        columns = {name: self._features(name, array) for name, array in _arrays_in(batch).items()}
        for row in zip(*columns.values(), strict=True):
            feature = dict(zip(columns, row, strict=True))
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            self._writer.write(example.SerializeToString())

    def finish(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _features(self, name: str, array: np.ndarray) -> list[Any]:
        """Return the feature of each example: a list of its values, of one of the three types that features have."""
        import tensorflow as tf

        rows = [list(_flat(row)) for row in array.tolist()]
        kind: type = int
        if array.dtype.kind == "f":
            kind = float
        elif array.dtype.kind == "O":
            kind = next((type(row[0]) for row in rows if row), bytes)  # bytes if all examples are empty
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
