"""tf.train.Example records of TFRecord files, parsed by a feature spec from config."""

from __future__ import annotations

import contextlib
import gzip
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from input_fns._files import compressions, divide_files, find_files
from input_fns._records import Records, assert_that, check_not_empty, fails, parsed_batches

_DTYPES = {"float32": tf.float32, "int64": tf.int64, "string": tf.string}

# Replaces a record that cannot be read, so that the parser reports its place. It is not a valid Example:
# no protocol buffer begins with wire type 7.
_DAMAGED = b"\xff\xff\xffa record that could not be read"


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    input_context: tf.distribute.InputContext | None = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return batches of (dict of features `[batch, ...]`, label `[batch, ...]`).

    TRAIN shuffles anew each epoch and never ends; EVAL and PREDICT are one ordered pass. PREDICT has no label.

    Args:
      num_epochs: number of passes in TRAIN (train.max_epochs); None: no limit.

    Params:
      files: a path or glob, or a list of them. Files whose names end in .gz are compressed.
      features: {name: {dtype: float32|int64|string, shape: [], default: value, varlen: false}}. Without a default the
        feature is required; a default is one value, or nested lists of the shape. varlen: any number of values, as a
        SparseTensor.
      label: name of the label's feature; null: there is none.
      index: read the lengths of all records at the start, true. Then the number of steps is known, and truncated or
        damaged files are reported with the record.
      shuffle_buffer: examples in the shuffle buffer, 10000.
      batch_size, shuffle_seed, batch_across_epochs: as for input_fns.digits.

    Raises:
      ValueError: a file does not exist or is not whole, or the spec is wrong. When the iterator runs, an
        InvalidArgumentError names the file and the record (from 0) that does not fit the spec.
    """
    label = params.get("label")
    spec = _feature_spec(params.get("features"), label)
    with_label = label is not None and mode != "infer"
    if label is not None and not with_label:
        del spec[label]
    found = find_files(params)
    files, part = divide_files(found, input_context)

    def records_of(files: list[str], part: tuple[int, int]) -> Records:
        counts = [_count_records(file) for file in files] if params.get("index", True) else None

        def read(file: tf.Tensor) -> tf.data.Dataset:
            records = tf.data.TFRecordDataset(tf.gather(files, file), tf.gather(compressions(files), file))
            if counts is None:
                return records
            # The readable records, then _DAMAGED for each of the others.
            return records.ignore_errors().concatenate(tf.data.Dataset.from_tensors(_DAMAGED).repeat())

        return Records(files, read, part, counts)

    def parse(records: tf.Tensor) -> Any:
        features = tf.io.parse_example(records, spec)
        return (features, features.pop(label)) if with_label else features

    def explain(place: tf.Tensor, record: tf.Tensor) -> tf.data.Dataset:
        def check(broken: tf.Tensor) -> tf.Tensor:
            whole = assert_that(record != _DAMAGED, place, ": cannot be read, the file is damaged there or before")
            with tf.control_dependencies([whole]):
                is_example = assert_that(~broken, place, ": is not a tf.train.Example")
            with tf.control_dependencies([is_example]):
                # This error of TensorFlow's names the place, the feature and what is wrong with it.
                parsed = tf.io.parse_example(record[None], spec, example_names=place[None])
            # As data of the assertion, since TensorFlow prunes what is there for control dependencies alone.
            values = tf.nest.flatten(parsed, expand_composites=True)
            failed = tf.debugging.Assert(False, [tf.strings.join([place, ": cannot be parsed"]), *values])
            with tf.control_dependencies([failed]):
                return tf.identity(broken)

        # Of a feature that no record has, only what is no Example at all fails.
        anything = {"\0": tf.io.VarLenFeature(tf.string)}
        return fails(record, lambda one: tf.io.parse_example(one, anything)).map(check)

    records = records_of(files, part)
    check_not_empty(records, lambda: records_of(found, (1, 0)), mode)
    return parsed_batches(records, parse, explain, mode, params, config, num_epochs)


def _feature_spec(features: Any, label: str | None) -> dict[str, Any]:
    """Return tf.io's feature spec for that of the config."""
    if not isinstance(features, Mapping) or not features:
        raise ValueError("params.features is not set. Give {name: {dtype: float32|int64|string, shape: [...]}}.")
    if label is not None and label not in features:
        raise ValueError(f"params.label={label!r} is not among params.features: {', '.join(features)}.")
    return {name: _feature(name, declared) for name, declared in features.items()}


def _feature(name: str, declared: Any) -> Any:
    setting = f"params.features.{name}"
    declared = {"dtype": declared} if isinstance(declared, str) else dict(declared)
    unknown = set(declared) - {"dtype", "shape", "default", "varlen"}
    if unknown:
        raise ValueError(f"{setting} has {', '.join(sorted(unknown))}; it can have dtype, shape, default, varlen.")
    if declared.get("dtype") not in _DTYPES:
        raise ValueError(
            f"{setting}.dtype={declared.get('dtype')!r} is not what an Example holds: {', '.join(_DTYPES)}."
        )
    dtype, shape, default = _DTYPES[declared["dtype"]], declared.get("shape") or [], declared.get("default")
    if declared.get("varlen"):
        if shape or default is not None:
            raise ValueError(f"{setting} is varlen, so it has neither shape nor default.")
        return tf.io.VarLenFeature(dtype)
    if default is not None:
        try:
            default = np.broadcast_to(np.asarray(default, dtype.as_numpy_dtype), shape)
        except (TypeError, ValueError):
            raise ValueError(f"{setting}.default={default!r} is not of dtype {dtype.name} and shape {shape}.") from None
    return tf.io.FixedLenFeature(list(shape), dtype, default)


def _count_records(file: str) -> int:
    """Return the number of records in a file; only their lengths are read.

    Refuses a file that ends within a record. TensorFlow would take one that ends within a record's header for complete,
    and train on less data.
    """
    count = 0
    try:
        with _open(file) as (stream, skip):
            while header := stream.read(12):
                # A record is: length (8 bytes), its checksum (4), the data, its checksum (4).
                if len(header) < 12 or not skip(struct.unpack("<Q", header[:8])[0] + 4):
                    raise EOFError("the file ends within it")
                count += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{file}: record {count} (from 0) is cut off or damaged, or this is no TFRecord file ({error})."
        ) from error
    return count


@contextlib.contextmanager
def _open(file: str) -> Iterator[tuple[Any, Callable[[int], bool]]]:
    """Yield (stream of a file, function that skips N bytes and reports whether they existed)."""
    local = os.path.exists(file)  # Python reads local files 10x faster than gfile
    with open(file, "rb") if local else tf.io.gfile.GFile(file, "rb") as raw:
        if file.endswith(".gz"):
            with gzip.open(raw) as stream:
                yield stream, lambda size: _skip(stream, size)
        else:
            total = tf.io.gfile.stat(file).length

            def skip(size: int) -> bool:
                there = raw.tell() + size <= total
                if there:
                    raw.seek(size, os.SEEK_CUR) if local else raw.seek(raw.tell() + size)
                return there

            yield raw, skip


def _skip(stream: Any, size: int) -> bool:
    """Read and drop `size` bytes, in chunks, since a damaged length may exceed the memory."""
    while size and (chunk := stream.read(min(size, 1 << 20))):
        size -= len(chunk)
    return not size
