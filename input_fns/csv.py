"""CSV files with declared columns."""

from __future__ import annotations

import csv  # the standard library's module, not this one
import difflib
import gzip
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from input_fns._files import check_compressed, compressions, divide_files, find_files
from input_fns._records import Records, assert_that, check_not_empty, fails, first_failing, parsed_batches

_START = 1024
"""Bytes of a file that tell its encoding."""

_DTYPES = {
    "int32": tf.int32,
    "int64": tf.int64,
    "float32": tf.float32,
    "float64": tf.float64,
    "string": tf.string,
}


class Column(NamedTuple):
    """One field of each line.

    Attributes:
      name: in the header and in the features.
      dtype: None: the column is not used.
      default: for an empty field; None: it must not be empty.
    """

    name: str
    dtype: tf.DType | None
    default: Any = None


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    input_context: tf.distribute.InputContext | None = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return batches of (dict of features `[batch]`, label `[batch]`).

    TRAIN shuffles anew each epoch and never ends; EVAL and PREDICT are one ordered pass. PREDICT has no label, and with
    a header the files need no column for it.

    Args:
      num_epochs: number of passes in TRAIN (train.max_epochs); None: no limit.

    Params:
      files: a path or glob, or a list of them. Files whose names end in .gz are compressed; they are read through once
        at the start to check that they are whole. A quoted field may contain the delimiter, and "" for a quote, but no
        line break.
      columns: {name: {dtype: int32|int64|float32|float64|string, default: value}} or {name: dtype}. Without a default
        the field must not be empty.
      label: name of the label's column; null: there is none.
      header: the files begin with a line of column names, true. Then columns may be any of them in any order; without a
        header they must be all columns in order.
      delimiter: one character, ','.
      na_value: a text that also means empty, ''.
      shuffle_buffer: examples in the shuffle buffer, 10000.
      batch_size, shuffle_seed, batch_across_epochs: as for input_fns.digits.

    Raises:
      ValueError: a file does not exist, or its header lacks a column. When the iterator runs, an InvalidArgumentError
        names the file, the line (from 1, including the header) and the column that cannot be parsed.
    """
    delimiter = params.get("delimiter") or ","
    header, label = bool(params.get("header", True)), params.get("label")
    declared = _declared_columns(params.get("columns"), label)
    if mode == "infer" and header and label is not None:
        del declared[label]
    found = find_files(params)
    for file, compression in zip(found, compressions(found), strict=True):
        _check_text(file, compression)
    columns = list(declared.values())
    if header:
        columns = [declared.get(name, Column(name, None)) for name in _header(found, declared, delimiter)]
    files, part = divide_files(found, input_context)
    skip = 1 if header else 0

    line = Line(columns, delimiter, params.get("na_value") or "")

    def parse(records: tf.Tensor) -> Any:
        features = line.parse(records)
        if label is None or label not in features:
            return features
        value = features.pop(label)
        return features if mode == "infer" else (features, value)

    def records_of(files: list[str], part: tuple[int, int]) -> Records:
        def read(file: tf.Tensor) -> tf.data.Dataset:
            return tf.data.TextLineDataset(tf.gather(files, file), tf.gather(compressions(files), file)).skip(skip)

        compressed = any(compressions(files))
        # The shortest line is its delimiters and the line end.
        most = None if compressed else sum(tf.io.gfile.stat(file).length for file in files) // len(columns) + len(files)
        beside = " beside the header" if header else ""
        return Records(files, read, part, most=most, noun="line", first=1 + skip, beside=beside)

    records = records_of(files, part)
    check_not_empty(records, lambda: records_of(found, (1, 0)), mode)
    return parsed_batches(records, parse, line.explain, mode, params, config, num_epochs)


class Line:
    """The columns of a line: parses lines, and explains parse errors."""

    def __init__(self, columns: list[Column], delimiter: str, na_value: str) -> None:
        self._columns = columns
        self._delimiter = delimiter
        self._na_value = na_value

    def parse(self, lines: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return name -> `[n]` for the declared columns of lines, string `[n]`. For graphs; fails if a line is bad."""
        # Decode all columns of the file, or TensorFlow does not check the number of fields.
        defaults = [_record_default(column) for column in self._columns]
        values = self._decode(lines, defaults)
        return {c.name: value for c, value in zip(self._columns, values, strict=True) if c.dtype is not None}

    def explain(self, place: tf.Tensor, line: tf.Tensor) -> tf.data.Dataset:
        """Return a dataset of one element that cannot be read. Its error is the reason why `parse` failed on `line`, a
        string scalar. For graphs.
        """
        number = self._num_fields(line)

        def split(broken: tf.Tensor) -> tf.Tensor:
            expected = f" fields, and there are {len(self._columns)} columns: "
            count = assert_that(
                number == len(self._columns), place, ": has ", tf.strings.as_string(number), expected, line
            )
            quotes = assert_that(~broken, place, ": its quotes are not as CSV has them: ", line)
            with tf.control_dependencies([count, quotes]):
                return self._fields(tf.identity(line)[None])

        def check(fields: tf.Tensor) -> tf.data.Dataset:
            dtypes = [name for name in _DTYPES if self._of_dtype(name)]
            found = tf.data.Dataset.zip(
                (tf.data.Dataset.from_tensors(fields), *(self._first_bad(fields, name) for name in dtypes))
            )

            def say(fields: tf.Tensor, *bad: tf.Tensor) -> tf.Tensor:
                each = zip(dtypes, bad, strict=True)
                with tf.control_dependencies([self._check_dtype(place, fields, name, first) for name, first in each]):
                    failed = assert_that(tf.constant(False), place, ": cannot be parsed: ", line)
                with tf.control_dependencies([failed]):
                    return tf.identity(fields)

            return found.map(say)

        return fails(line, self._fields).map(split).flat_map(check)

    def _of_dtype(self, dtype: str) -> list[int]:
        """Return the indices of the columns of one dtype."""
        return [i for i, column in enumerate(self._columns) if column.dtype == _DTYPES[dtype]]

    def _is_empty(self, texts: tf.Tensor) -> tf.Tensor:
        return (texts == "") | (texts == self._na_value)

    def _first_bad(self, fields: tf.Tensor, dtype: str) -> tf.data.Dataset:
        """Return a dataset of one element, an int64 scalar: the first column of a dtype whose field is invalid; their
        number if there is none.
        """
        texts = tf.gather(fields, self._of_dtype(dtype))
        if dtype == "string":
            return tf.data.Dataset.from_tensors(tf.size(texts, tf.int64))
        # An empty field with a default is fine, whatever the default.
        texts = tf.where(self._is_empty(texts), "0", texts)
        return first_failing(texts, lambda text: tf.strings.to_number(text, _DTYPES[dtype]))

    def _check_dtype(self, place: tf.Tensor, fields: tf.Tensor, dtype: str, bad: tf.Tensor) -> tf.Operation:
        """Return an assertion that the fields of all columns of a dtype are valid; `bad` is what `_first_bad` found."""
        chosen = self._of_dtype(dtype)
        names = tf.constant([self._columns[i].name for i in chosen])
        texts = tf.gather(fields, chosen)
        missing = self._is_empty(texts) & tf.constant([self._columns[i].default is None for i in chosen])
        no_value = assert_that(
            ~tf.reduce_any(missing), place, ": column ", names[tf.argmax(missing)], " is empty and has no default"
        )
        index = tf.minimum(bad, len(chosen) - 1)
        with tf.control_dependencies([no_value]):
            is_value = bad == len(chosen)
            return assert_that(
                is_value, place, ": column ", names[index], " is ", texts[index], f", not {_article(dtype)}"
            )

    def _fields(self, lines: tf.Tensor) -> tf.Tensor:
        """Return the fields of one line (`[1]`) as strings, `[columns]`."""
        return tf.concat(self._decode(lines, [tf.constant([""])] * len(self._columns), na_value=""), 0)

    def _decode(self, lines: tf.Tensor, defaults: list[tf.Tensor], na_value: str | None = None) -> list[tf.Tensor]:
        na_value = self._na_value if na_value is None else na_value
        return tf.io.decode_csv(lines, defaults, field_delim=self._delimiter, na_value=na_value)

    def _num_fields(self, line: tf.Tensor) -> tf.Tensor:
        # Remove quoted fields and all characters other than delimiters, and count what remains.
        escaped = "\\" + self._delimiter if self._delimiter in r"\^]-|.*+?()[{}$" else self._delimiter
        return tf.strings.length(tf.strings.regex_replace(line, f'"(?:[^"]|"")*"|[^{escaped}]', "")) + 1


def _check_text(file: str, compression: str) -> None:
    """Check that a file is UTF-8 text before TensorFlow reads it, whose errors do not name the file.

    Raises:
      ValueError: it is not; the message names it.
    """
    if compression:
        check_compressed(file)
    with tf.io.gfile.GFile(file, "rb") as raw, gzip.open(raw) if compression else raw as stream:
        start = stream.read(_START)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise ValueError(f"{file}: is not UTF-8 text, but seems to be UTF-16. Convert it: iconv -f utf-16 -t utf-8.")


def _declared_columns(columns: Any, label: str | None) -> dict[str, Column]:
    if not isinstance(columns, Mapping) or not columns:
        raise ValueError(f"params.columns is not set. Give {{name: {{dtype: {'|'.join(_DTYPES)}, default: value}}}}.")
    if label is not None and label not in columns:
        raise ValueError(f"params.label={label!r} is not among params.columns: {', '.join(columns)}.")
    return {name: _declared_column(name, declared) for name, declared in columns.items()}


def _declared_column(name: str, declared: Any) -> Column:
    declared = {"dtype": declared} if isinstance(declared, str) else dict(declared)
    unknown = set(declared) - {"dtype", "default"}
    if unknown:
        raise ValueError(f"params.columns.{name} has {', '.join(sorted(unknown))}; it can have dtype and default.")
    if declared.get("dtype") not in _DTYPES:
        raise ValueError(f"params.columns.{name}.dtype={declared.get('dtype')!r} is not one of {', '.join(_DTYPES)}.")
    dtype, default = _DTYPES[declared["dtype"]], declared.get("default")
    try:
        if default is not None:
            tf.constant(default, dtype)
    except (TypeError, ValueError):
        article = _article(declared["dtype"])
        raise ValueError(f"params.columns.{name}.default={default!r} is not {article}.") from None
    return Column(name, dtype, default)


def _record_default(column: Column) -> tf.Tensor:
    """Return a column's default for tf.io.decode_csv; an empty tensor means that a value is required."""
    if column.dtype is None:
        return tf.constant([""])
    return tf.constant([] if column.default is None else [column.default], column.dtype)


def _header(files: list[str], declared: Mapping[str, Column], delimiter: str) -> list[str]:
    """Return the column names of the files, which must all have the same.

    Raises:
      ValueError: a file lacks a declared column, or differs from the first file; the message names both.
    """
    first: list[str] | None = None
    for file, compression in zip(files, compressions(files), strict=True):
        lines = list(tf.data.TextLineDataset(file, compression).take(1).as_numpy_iterator())
        if not lines:
            raise ValueError(f"{file}: is empty; its first line should be the header. Set params.header=false if not.")
        try:
            names = _split(lines[0].decode("utf-8-sig"), delimiter)
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{file} line 1: the header is not a line of CSV in UTF-8 ({error}).") from error
        for name in declared:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{file} line 1: no column {name!r}.{hint} The header has: {', '.join(names)}.")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{file} line 1: the header has {twice!r} twice.")
        first = first or names
        if names != first:
            raise ValueError(f"{file} line 1: the header is {', '.join(names)}; that of {files[0]} {', '.join(first)}.")
    assert first is not None
    return first


def _split(line: str, delimiter: str) -> list[str]:
    """Return the fields of a header line."""
    return [name.strip() for name in next(csv.reader([line], delimiter=delimiter))]


def _article(dtype: str) -> str:
    return f"{'an' if dtype[0] in 'aeiou' else 'a'} {dtype}"
