"""Files of predictions: what JSON Lines and .npz hold, and what is there when writing fails."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from runner.config.schema import ConfigError
from runner.task.prediction_files import open_predictions


def write(path: Path, *examples: Any) -> None:
    with open_predictions(path) as writer:
        for example in examples:
            writer.write(example)


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


def test_no_example_is_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl")
    assert (tmp_path / "p.jsonl").read_bytes() == b""


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


def test_bfloat16_is_read_back_as_float32(tmp_path: Path) -> None:
    write(tmp_path / "p.npz", {"a": np.array([1.5], ml_dtypes.bfloat16)})
    with np.load(tmp_path / "p.npz") as found:
        assert found["a"].dtype == np.float32 and found["a"].tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (
            [{"a": {"b": np.zeros(2)}}, {"a": {"b": np.zeros(3)}}],
            r"prediction 'a/b' is \[2\] in the first example and \[3\] in example 2. .* write .jsonl.",
        ),
        (
            [{"a": np.array([np.zeros(1), np.zeros(2)], object)}],
            "prediction 'a' has rows of different lengths in example 1. .* write .jsonl.",
        ),
        ([{"a": b"a\0"}], "a text of prediction 'a' ends with a zero byte in example 1, .* Write .jsonl."),
    ],
)
def test_what_an_npz_cannot_hold_says_what_to_do(examples: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "p.npz", *examples)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "p.jsonl", *examples)


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".npz"])
def test_the_file_is_there_when_all_is_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / f"p{suffix}"
    with open_predictions(path) as writer:
        writer.write({"a": np.int64(1)})
        assert not path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("suffix", [".jsonl", ".npz"])
def test_an_error_leaves_the_older_file_and_nothing_else(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"p{suffix}"
    write(path, {"a": np.int64(1)})
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), open_predictions(path) as writer:
        writer.write({"a": np.int64(2)})
        raise KeyboardInterrupt
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["p", "p.csv", "p.json", "p.jsonl.gz"])
def test_an_unknown_suffix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"predict.output=.*{name}: its suffix says the format. Use .jsonl"):
        write(tmp_path / name)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").mkdir()
    with pytest.raises(ConfigError, match="predict.output=.* is a folder. Name a file in it."):
        write(tmp_path / "p.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="predict.output=.* cannot be written: .*file"):
        write(tmp_path / "file" / "p.jsonl")
