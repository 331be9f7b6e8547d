"""A run as CSV files: what pandas reads of them, also of a run that was killed, resumed or evaluated later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from runner.config.schema import TrackingConfig
from runner.tracking.backends.csv_tracker import CsvTracker
from runner.tracking.run_record import Shipped
from runner.tracking.ship import Deadline, RunShipper
from runner.tracking.shipping import write_settings
from runner.tracking.tracker import Point
from tests.support.journal import Lines, note_end, note_start


def metrics_of(model_dir: Path) -> Any:
    return pd.read_csv(model_dir / "tracking" / "metrics.csv", index_col="step")


def points(step: int, **values: float) -> list[Point]:
    return [Point(f"train/{name}", value, step, 5.0) for name, value in values.items()]


def ship(model_dir: Path, lines: Sequence[tuple[int, dict[str, float]]], *, is_reader: bool = False) -> None:
    params = {"train.max_steps": 5, "model.params.name": 'a "b", c', "eval.steps": None}
    note_start(model_dir, command="evaluate" if is_reader else "train", params=params, tags={"a": "b"})
    journal = Lines(model_dir)
    for step, values in lines:
        journal.metrics(step, values)
    note_end(model_dir)
    write_settings(model_dir, TrackingConfig("csv"), {})
    assert RunShipper(model_dir, "csv", Deadline()).ship()


def test_a_row_is_a_step_and_a_column_a_metric(tmp_path: Path) -> None:
    of_step_2 = {"train/loss": math.nan, "train/x": -math.inf}
    ship(tmp_path, [(1, {"train/loss": 0.1}), (2, of_step_2), (2, {"eval/a": 1e-9})])
    found = metrics_of(tmp_path)
    assert list(found.index) == [1, 2] and list(found.columns) == ["train/loss", "train/x", "eval/a"]
    assert found["train/loss"][1] == 0.1 and math.isnan(found["train/loss"][2])
    assert found["train/x"][2] == -math.inf and found["eval/a"][2] == 1e-9 and math.isnan(found["eval/a"][1])
    params = pd.read_csv(tmp_path / "tracking" / "params.csv", index_col="name")["value"]
    assert params["train.max_steps"] == "5" and params["model.params.name"] == 'a "b", c'
    tags = pd.read_csv(tmp_path / "tracking" / "tags.csv", index_col="name")["value"]
    assert dict(tags) == {"a": "b", "status": "finished"}


def test_a_resumed_run_appends_and_doubles_no_step(tmp_path: Path) -> None:
    ship(tmp_path, [(step, {"train/loss": step / 10}) for step in (1, 2, 3)])
    before = (tmp_path / "tracking" / "metrics.csv").read_bytes()
    ship(tmp_path, [(step, {"train/loss": step / 5}) for step in (2, 3, 4, 5)])  # it repeats two steps
    found = metrics_of(tmp_path)
    assert list(found.index) == [1, 2, 3, 4, 5] and list(found["train/loss"]) == [0.1, 0.2, 0.3, 0.8, 1.0]
    assert (tmp_path / "tracking" / "metrics.csv").read_bytes().startswith(before)
    ship(tmp_path, [(5, {"eval/loss": 9.0})], is_reader=True)
    assert list(metrics_of(tmp_path).index) == [1, 2, 3, 4, 5] and metrics_of(tmp_path)["eval/loss"][5] == 9.0


def test_what_was_written_and_not_noted_is_not_doubled_nor_a_torn_line_kept(tmp_path: Path) -> None:
    ship(tmp_path, [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})])
    shipped = Shipped.read(tmp_path, "csv")
    shipped.offsets, shipped.last_steps = {}, {}  # killed after it had written
    shipped.save(tmp_path, "csv")
    with open(tmp_path / "tracking" / "metrics.csv", "a") as file:
        file.write("3,0.1")
    ship(tmp_path, [(3, {"train/loss": 0.125})])
    assert metrics_of(tmp_path)["train/loss"].to_dict() == {1: 0.5, 2: 0.25, 3: 0.125}


def test_what_an_evaluator_finds_later_goes_into_the_row_of_its_step(tmp_path: Path) -> None:
    tracker = CsvTracker(tmp_path)
    tracker.start(None, "name", {}, {})
    for step in range(10, 40, 10):
        tracker.log_points(points(step, loss=step))
    tracker.log_points([Point("eval/loss", 0.5, 10, 6.0), Point("eval/loss", 0.25, 15, 6.0)])
    tracker.log_points([Point("eval/loss", 0.75, 30, 6.0), *points(50, loss=50)])
    found = metrics_of(tmp_path)
    assert list(found.index) == [10, 15, 20, 30, 50]
    assert found["eval/loss"].dropna().to_dict() == {10: 0.5, 15: 0.25, 30: 0.75}
    assert found["train/loss"].dropna().to_dict() == {10: 10, 20: 20, 30: 30, 50: 50}
    widths = {line.count(",") for line in (tmp_path / "tracking" / "metrics.csv").read_text().splitlines()}
    assert widths == {2}


def test_a_name_with_a_comma_or_a_line_break_is_one_column(tmp_path: Path) -> None:
    tracker = CsvTracker(tmp_path)
    tracker.start(None, "name", {}, {})
    tracker.log_points([Point("a,b", 1.0, 1, 1.0), Point("c\nd", 2.0, 1, 1.0)])
    tracker.log_points([Point("e", 3.0, 1, 1.0)])
    assert metrics_of(tmp_path).to_dict("records") == [{"a,b": 1.0, "c d": 2.0, "e": 3.0}]


@pytest.mark.parametrize("gone", ["tracking", "shipped.csv.json"])
def test_files_that_are_gone_are_made_anew_with_all_that_the_journal_holds(tmp_path: Path, gone: str) -> None:
    ship(tmp_path, [(1, {"train/loss": 0.5})])
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    ship(tmp_path, [(2, {"train/loss": 0.25})])
    assert metrics_of(tmp_path)["train/loss"].to_dict() == {1: 0.5, 2: 0.25}


def test_a_reader_sees_whole_rows_while_steps_are_added(tmp_path: Path) -> None:
    tracker = CsvTracker(tmp_path)
    tracker.start(None, "name", {}, {})
    tracker.log_points(points(1, loss=1))
    with open(tmp_path / "tracking" / "metrics.csv") as reader:
        tracker.log_points([Point(f"m{number}", 1.0, 1, 1.0) for number in range(100)])
        assert reader.read() == "step,train/loss\n1,1\n"
    assert len(metrics_of(tmp_path).columns) == 101
    assert [path.name for path in (tmp_path / "tracking").iterdir() if path.name.startswith(".")] == []
