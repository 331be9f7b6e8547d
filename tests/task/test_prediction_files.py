"""Files of predictions: what each format holds, and what is there when writing fails."""

from __future__ import annotations

import base64
import itertools
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from pyarrow import parquet

from runner.config.schema import PREDICTION_FORMATS, ConfigError
from runner.task import prediction_files
from runner.task.prediction_files import open_predictions
from tests.support.messages import Messages


def write(path: Path, *examples: Any) -> None:
    """Write each example as a batch of its own."""
    with open_predictions(path) as writer:
        for example in examples:
            writer.write(batch_of_one(example))


def batch_of_one(example: Any) -> Any:
    if isinstance(example, dict):
        return {name: batch_of_one(value) for name, value in example.items()}
    if isinstance(example, list | tuple):
        return [batch_of_one(value) for value in example]
    return np.array([example], dtype=object) if isinstance(example, bytes) else np.asarray(example)[None]


def write_batches(path: Path, *batches: Any) -> None:
    with open_predictions(path) as writer:
        for batch in batches:
            writer.write(batch)


def lines(path: Path) -> list[Any]:
    """What a strict reader of JSON makes of each line."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


# --- JSON Lines -----------------------------------------------------------------------------------------------------


def test_one_object_an_example_with_arrays_as_lists(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    write(path, {"a": np.float32(0.5), "b": np.array([[1, 2], [3, 4]])}, {"a": np.float32(-1), "b": np.array([[5, 6]])})
    assert lines(path) == [{"a": 0.5, "b": [[1, 2], [3, 4]]}, {"a": -1.0, "b": [[5, 6]]}]


def test_nested_dicts_stay_nested_and_tuples_are_lists(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", {"a": {"b": {"c": np.int64(1)}}, "t": (np.int64(2), [np.True_])})
    assert lines(tmp_path / "p.jsonl") == [{"a": {"b": {"c": 1}}, "t": [2, [True]]}]


@pytest.mark.parametrize("prediction", [np.array([1, 2]), np.int64(3), (np.int64(1), np.int64(2))])
def test_what_is_no_dict_has_the_key_predictions(prediction: Any, tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", prediction)
    assert list(lines(tmp_path / "p.jsonl")[0]) == ["predictions"]


def test_texts_are_text_and_other_bytes_are_base64(tmp_path: Path) -> None:
    raw = b"\xff\x00"
    write(tmp_path / "p.jsonl", {"text": "é".encode(), "raw": raw, "list": np.array([b"a", raw], dtype=object)})
    encoded = base64.b64encode(raw).decode()
    assert lines(tmp_path / "p.jsonl") == [{"text": "é", "raw": encoded, "list": ["a", encoded]}]


def test_numbers_that_json_lacks_are_written_as_in_a_journal(tmp_path: Path) -> None:
    values = np.array([1.5, math.nan, math.inf, -math.inf], np.float32)
    write(tmp_path / "p.jsonl", {"array": values, "one": np.float32("nan"), "float": -math.inf})
    assert lines(tmp_path / "p.jsonl") == [{"array": [1.5, "nan", "inf", "-inf"], "one": "nan", "float": "-inf"}]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int8, np.uint8, np.bool_])
def test_every_dtype_has_its_value(dtype: Any, tmp_path: Path) -> None:
    values = np.array([0, 1], dtype)
    write(tmp_path / "p.jsonl", {"array": values, "one": values[1]})
    assert lines(tmp_path / "p.jsonl") == [{"array": [0, 1], "one": 1}]


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2), (1, 1, 1, 1), (3, 0), (3, 0, 2), (3, 2, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_the_lines_of_a_batch_are_those_of_json_dumps(shape: tuple[int, ...], dtype: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=shape).astype(dtype)
    texts = np.array([b"], [%s", 'é"'.encode(), b"\n"][: shape[0]], object)
    batch = {"a %s": values, "t": texts, "deep": {"none": {}, "pair": (values, {"x": values})}}
    write_batches(tmp_path / "p.jsonl", batch, batch)
    rows = values.tolist()
    expected = [
        {"a %s": row, "t": text.decode(), "deep": {"none": {}, "pair": [row, {"x": row}]}}
        for row, text in zip(rows, texts.tolist(), strict=True)
    ]
    assert (tmp_path / "p.jsonl").read_text() == "".join(json.dumps(one) + "\n" for one in expected * 2)


def test_one_number_that_json_lacks_leaves_the_others_of_its_batch(tmp_path: Path) -> None:
    write_batches(tmp_path / "p.jsonl", np.array([[1.5, 2.5], [math.nan, 0.5]], np.float32))
    assert [line["predictions"] for line in lines(tmp_path / "p.jsonl")] == [[1.5, 2.5], ["nan", 0.5]]


def test_no_example_is_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl")
    assert (tmp_path / "p.jsonl").read_bytes() == b""


# --- CSV ------------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
COLUMNS: dict[str, Any] = {
    "half": np.array([0.1, 1e-5, 6e4, NAN], np.float16),
    "single": np.array([0.1, 1e20, INF, NAN], np.float32),
    "double": np.array([0.1, 1e16, -INF, 1e-7]),
    "whole": np.array([1.0, -0.0, 1e15, 123456789.0]),
    "int": np.array([-1, 2**62, 0, 7]),
    "byte": np.array([0, 255, 1, 2], np.uint8),
    "bool": np.array([True, False, True, True]),
    "text": np.array(["a,b", 'say "x"', "two\nlines", "cr\r"], object),
    "name, quoted": np.array(["", " sp", "é", "'"], object),
    "missing": np.array([None, NAN, "", "x"], object),
    "mixed": np.array([1, 0.1, None, np.float32(0.1)], object),
}


@pytest.mark.parametrize("names", [list(COLUMNS), *([name] for name in COLUMNS)], ids=lambda names: names[0])
def test_a_csv_is_what_pandas_writes(names: list[str], tmp_path: Path) -> None:
    chosen = {name: COLUMNS[name] for name in names}
    write_batches(tmp_path / "p.csv", chosen, {name: values[:2] for name, values in chosen.items()})
    frame = pd.concat([pd.DataFrame(chosen), pd.DataFrame(chosen)[:2]])
    assert (tmp_path / "p.csv").read_bytes().decode() == frame.to_csv(index=False)


def test_a_csv_has_a_column_for_each_value_of_a_vector(tmp_path: Path) -> None:
    batch = {
        "id": np.array([b"a", b"\xff"], object),
        "p": np.array([[0.5, NAN], [1, 2]], np.float32),
        "n": {"b": np.array([[1], [2]])},
    }
    write_batches(tmp_path / "p.csv", batch)
    assert (tmp_path / "p.csv").read_text().splitlines() == ["id,p_0,p_1,n/b_0", "a,0.5,,1", "/w==,1.0,2.0,2"]


def test_a_csv_of_one_array_has_the_name_predictions(tmp_path: Path) -> None:
    write(tmp_path / "one.csv", np.int64(3))
    write(tmp_path / "vector.csv", np.array([0.5, 1]))
    assert (tmp_path / "one.csv").read_text() == "predictions\n3\n"
    assert (tmp_path / "vector.csv").read_text() == "predictions_0,predictions_1\n0.5,1.0\n"


@pytest.mark.parametrize(
    "examples",
    [
        [{"a": {"matrix": np.zeros([2, 2])}}],
        [{"a": np.array([np.zeros(1), np.zeros(2)], object)}],
        [{"a": np.zeros(2)}, {"a": np.zeros(3)}],
        [{"a": np.zeros(2), "a_1": np.int64(1)}],
    ],
    ids=["matrix", "ragged", "lengths", "names"],
)
def test_what_a_csv_cannot_hold_is_named_and_says_what_to_do(
    examples: list[Any], tmp_path: Path, messages: Messages
) -> None:
    with messages.raised(ValueError):
        write(tmp_path / "p.csv", *examples)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "p.jsonl", *examples)


# --- npz ------------------------------------------------------------------------------------------------------------


def test_arrays_are_stacked_by_name(tmp_path: Path) -> None:
    write(tmp_path / "p.npz", *({"a": np.float32(i), "b": np.full([2, 3], i)} for i in range(5)))
    with np.load(tmp_path / "p.npz") as found:
        assert sorted(found) == ["a", "b"]
        assert found["a"].dtype == np.float32 and found["a"].tolist() == [0, 1, 2, 3, 4]
        assert found["b"].shape == (5, 2, 3) and found["b"][4].tolist() == [[4] * 3] * 2


def test_nested_names_are_joined(tmp_path: Path) -> None:
    write(tmp_path / "p.npz", {"a": {"b": np.int64(1), "c": (np.int64(2), np.int64(3))}})
    with np.load(tmp_path / "p.npz") as found:
        assert {name: found[name].tolist() for name in found} == {"a/b": [1], "a/c/0": [2], "a/c/1": [3]}


def test_a_bare_array_is_called_predictions(tmp_path: Path) -> None:
    write(tmp_path / "p.npz", np.int64(1), np.int64(2))
    with np.load(tmp_path / "p.npz") as found:
        assert found["predictions"].tolist() == [1, 2]


def test_texts_are_as_long_as_the_longest(tmp_path: Path) -> None:
    first, second = {"t": b"a", "l": np.array([b"x", b"yy"], object)}, {"t": b"abc", "l": np.array([b"", b"z"], object)}
    write(tmp_path / "p.npz", first, second)
    with np.load(tmp_path / "p.npz") as found:
        assert found["t"].tolist() == [b"a", b"abc"] and found["l"].tolist() == [[b"x", b"yy"], [b"", b"z"]]


def test_batches_of_any_size_are_one_array(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).normal(size=[50_000, 3])
    texts = np.array([[b"x" * (number % 7)] for number in range(50_000)], object)
    cuts = [0, 1, 100, 100, 49_999, 50_000]
    batches = [{"n": numbers[a:b], "t": texts[a:b]} for a, b in itertools.pairwise(cuts) if a < b]
    write_batches(tmp_path / "p.npz", *batches)
    with np.load(tmp_path / "p.npz") as found:
        np.testing.assert_array_equal(found["n"], numbers, strict=True)
        assert found["t"].dtype == np.dtype("S6") and found["t"].tolist() == texts.tolist()


def test_an_npz_waits_on_disk_not_in_memory(tmp_path: Path) -> None:
    batch = {"n": np.zeros([1000, 128]), "t": np.array([b"x" * 1000] * 1000, object)}  # 2 MB
    tracemalloc.start()
    write_batches(tmp_path / "p.npz", *[batch] * 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "p.npz").stat().st_size > 60e6 > 5 * peak


def test_bfloat16_is_read_back_as_float32(tmp_path: Path) -> None:
    write(tmp_path / "p.npz", {"a": np.array([1.5], ml_dtypes.bfloat16)})
    with np.load(tmp_path / "p.npz") as found:
        assert found["a"].dtype == np.float32 and found["a"].tolist() == [[1.5]]


@pytest.mark.parametrize(
    "examples",
    [
        [{"a": {"b": np.zeros(2)}}, {"a": {"b": np.zeros(3)}}],
        [{"a": np.array([np.zeros(1), np.zeros(2)], object)}],
        [{"a": b"a\0"}],
    ],
    ids=["shapes", "rows", "zero byte"],
)
def test_what_an_npz_cannot_hold_says_what_to_do(examples: list[Any], tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        write(tmp_path / "p.npz", *examples)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "p.jsonl", *examples)


# --- Parquet and TFRecord -------------------------------------------------------------------------------------------

RAGGED = np.array([np.array(row, np.float32) for row in ([1], [2, 3], [])], object)
KINDS: dict[str, Any] = {
    "f": np.array([0.5, math.nan, -math.inf], np.float32),
    "double": np.array([0.1, 0.2, 0.3]),
    "half": np.array([1, 2, 3], np.float16),
    "brain": np.array([1.5, 2, 3], ml_dtypes.bfloat16),
    "i": np.array([-1, 2, 3], np.int8),
    "b": np.array([True, False, True]),
    "t": np.array([b"a", b"\xff\x00", b""], object),
    "matrix": np.arange(12).reshape(3, 2, 2),
    "texts": np.array([[b"a", b"b"]] * 3, object),
    "empty": np.zeros([3, 0], np.float32),
    "nested": {"pair": (np.array([1, 2, 3], np.int64), np.array([4, 5, 6], np.int64))},
    "ragged": RAGGED,
}


def test_parquet_has_a_column_a_name_with_its_dtype(tmp_path: Path) -> None:
    first = {**KINDS, "ragged": np.array([[7, 8]] * 3, np.float32)}  # that it is ragged shows in the second batch
    write_batches(tmp_path / "p.parquet", first, KINDS)
    table = parquet.read_table(tmp_path / "p.parquet")
    found = {name: column.to_pylist() for name, column in zip(table.column_names, table.columns, strict=True)}
    assert {name: str(table.schema.field(name).type) for name in ("f", "double", "half", "brain", "i", "b", "t")} == {
        "f": "float", "double": "double", "half": "halffloat", "brain": "float", "i": "int8", "b": "bool",
        "t": "binary",
    }  # fmt: skip
    assert str(table.schema.field("matrix").type) == "list<element: list<element: int64>>"
    assert found["matrix"] == np.arange(12).reshape(3, 2, 2).tolist() * 2
    assert found["t"] == [b"a", b"\xff\x00", b""] * 2 and found["texts"] == [[b"a", b"b"]] * 6
    assert found["empty"] == [[]] * 6 and found["nested/pair/1"] == [4, 5, 6] * 2
    assert found["ragged"] == [[7, 8]] * 3 + [[1], [2, 3], []]
    np.testing.assert_array_equal(found["f"], [0.5, math.nan, -math.inf] * 2)


def test_parquet_is_written_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_files, "_ROW_GROUP_BYTES", 1000)
    write_batches(tmp_path / "p.parquet", *(np.arange(number, number + 50.0) for number in range(0, 450, 50)))
    file = parquet.ParquetFile(tmp_path / "p.parquet")
    assert [file.metadata.row_group(index).num_rows for index in range(3)] == [150, 150, 150]
    assert file.read().column("predictions").to_pylist() == list(range(450))


def test_tfrecord_has_a_tf_train_example_an_example(tmp_path: Path) -> None:
    write_batches(tmp_path / "p.tfrecord", KINDS)
    features = {
        "f": tf.io.FixedLenFeature([], tf.float32), "double": tf.io.FixedLenFeature([], tf.float32),
        "half": tf.io.FixedLenFeature([], tf.float32), "brain": tf.io.FixedLenFeature([], tf.float32),
        "i": tf.io.FixedLenFeature([], tf.int64), "b": tf.io.FixedLenFeature([], tf.int64),
        "t": tf.io.FixedLenFeature([], tf.string), "matrix": tf.io.FixedLenFeature([2, 2], tf.int64),
        "texts": tf.io.FixedLenFeature([2], tf.string), "empty": tf.io.VarLenFeature(tf.float32),
        "nested/pair/1": tf.io.FixedLenFeature([], tf.int64), "ragged": tf.io.RaggedFeature(tf.float32),
    }  # fmt: skip
    records = list(tf.data.TFRecordDataset(str(tmp_path / "p.tfrecord")))
    assert len(records) == 3
    found = tf.io.parse_example(records, features)
    np.testing.assert_array_equal(found["f"], KINDS["f"])
    np.testing.assert_array_equal(found["double"], np.array([0.1, 0.2, 0.3], np.float32))
    np.testing.assert_array_equal(found["matrix"], KINDS["matrix"])
    assert found["t"].numpy().tolist() == KINDS["t"].tolist() and found["b"].numpy().tolist() == [1, 0, 1]
    assert found["nested/pair/1"].numpy().tolist() == [4, 5, 6]
    assert found["ragged"].to_list() == [[1], [2, 3], []]
    assert found["empty"].dense_shape.numpy().tolist() == [3, 0]


@pytest.mark.parametrize("suffix", [".parquet", ".tfrecord"])
def test_what_a_format_cannot_hold_says_what_to_do(suffix: str, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError, hide=r"\(.*\)"):
        write(tmp_path / f"p{suffix}", {"c": np.complex64(1j)})
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "p.npz", {"c": np.complex64(1j)})


def test_files_without_examples_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "p.parquet")
    write(tmp_path / "p.tfrecord")
    assert len(parquet.read_table(tmp_path / "p.parquet")) == 0
    assert list(tf.data.TFRecordDataset(str(tmp_path / "p.tfrecord"))) == []


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", PREDICTION_FORMATS)
def test_the_file_is_there_when_all_is_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / f"p{suffix}"
    with open_predictions(path) as writer:
        writer.write({"a": np.array([1])})
        assert not path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("suffix", PREDICTION_FORMATS)
def test_an_error_leaves_the_older_file_and_nothing_else(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"p{suffix}"
    write(path, {"a": np.int64(1)})
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), open_predictions(path) as writer:
        writer.write({"a": np.array([2])})
        raise KeyboardInterrupt
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["p", "p.tsv", "p.json", "p.jsonl.gz"])
def test_an_unknown_suffix_is_refused(name: str, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ConfigError):
        write(tmp_path / name)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "p.jsonl").mkdir()
    with messages.raised(ConfigError):
        write(tmp_path / "p.jsonl")
    (tmp_path / "file").touch()
    with messages.raised(ConfigError):
        write(tmp_path / "file" / "p.jsonl")
