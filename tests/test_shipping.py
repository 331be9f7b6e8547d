"""Journals on their way to the tracker: in order, once, and never in the way."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner import shipping
from runner.journal import Journal, journal_path
from runner.shipping import RunRecord, Shipper
from runner.tracking import Point


class RecordingTracker:
    """Keeps what it is told; fails the first `failures` calls."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.points: list[Point] = []
        self.tags: dict[str, str] = {}
        self.files: list[str] = []
        self.status: str | None = None
        self.started_with: list[str | None] = []

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        self._maybe_fail()
        self.started_with.append(run_id)
        return run_id or "run-1"

    def log_points(self, points: Sequence[Point]) -> None:
        self._maybe_fail()
        self.points += points

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._maybe_fail()
        self.tags.update(tags)

    def log_file(self, path: Path) -> None:
        self.files.append(path.name)

    def end(self, status: str) -> None:
        self._maybe_fail()
        self.status = status

    def _maybe_fail(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("server is away\nlong text")


def ship(model_dir: Path, tracker: Any, warnings: list[str] | None = None) -> tuple[str | None, Shipper]:
    said = [] if warnings is None else warnings
    shipper = Shipper(model_dir, tracker, RunRecord.read(model_dir), "name", {}, {}, said.append)
    shipper.start()
    return shipper.drain(), shipper


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(journal_path(tmp_path))


def test_ships_all_metrics_in_order_and_closes_the_run(tmp_path: Path, journal: Journal) -> None:
    journal.event("started")
    for step in (1, 2, 3):
        journal.metrics(step, {"train/loss": 1.0 / step})
    tracker = RecordingTracker()
    run_id, shipper = ship(tmp_path, tracker)
    (tmp_path / "summary.json").write_text("{}")
    shipper.close("FINISHED", {"status": "finished"}, [tmp_path / "summary.json", tmp_path / "missing"])
    assert run_id == "run-1"
    assert [(p.step, p.value) for p in tracker.points] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert (tracker.status, tracker.tags, tracker.files) == ("FINISHED", {"status": "finished"}, ["summary.json"])


def test_the_next_process_goes_on_with_the_run_where_the_last_stopped(tmp_path: Path, journal: Journal) -> None:
    journal.metrics(1, {"m": 1.0})
    ship(tmp_path, RecordingTracker())
    journal.metrics(2, {"m": 2.0})
    tracker = RecordingTracker()
    run_id, _ = ship(tmp_path, tracker)
    assert run_id == "run-1"
    assert tracker.started_with == ["run-1"]
    assert [p.step for p in tracker.points] == [2]


def test_steps_that_a_resumed_run_repeats_are_not_shipped_twice(tmp_path: Path, journal: Journal) -> None:
    for step in (10, 20, 30):
        journal.metrics(step, {"m": 1.0})
    ship(tmp_path, RecordingTracker())
    for step in (20, 30, 40):  # resumed from a checkpoint at 10
        journal.metrics(step, {"m": 1.0, "other": 2.0})
    tracker = RecordingTracker()
    ship(tmp_path, tracker)
    assert [p.step for p in tracker.points if p.name == "m"] == [40]
    assert [p.step for p in tracker.points if p.name == "other"] == [20, 30, 40]


def test_a_tracker_that_is_away_costs_one_warning_and_is_caught_up_later(tmp_path: Path, journal: Journal) -> None:
    journal.metrics(1, {"m": 1.0})
    warnings: list[str] = []
    away = RecordingTracker(failures=1000)
    run_id, shipper = ship(tmp_path, away, warnings)
    shipper.close("FINISHED", {}, [])
    assert run_id is None and away.points == []
    assert len(warnings) == 1
    assert warnings[0].startswith("tracking: server is away (training goes on; the journals in ")
    back = RecordingTracker()
    ship(tmp_path, back)
    assert [p.step for p in back.points] == [1]


def test_a_short_outage_is_retried(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "PERIOD_SECS", 0.01)
    journal.metrics(1, {"m": 1.0})
    tracker = RecordingTracker(failures=2)
    ship(tmp_path, tracker)
    assert [p.step for p in tracker.points] == [1]


def test_a_failure_while_closing_still_ends_the_run(tmp_path: Path, journal: Journal) -> None:
    warnings: list[str] = []
    tracker = RecordingTracker()
    _, shipper = ship(tmp_path, tracker, warnings)
    tracker.failures = 1
    shipper.close("FAILED", {"a": "b"}, [])
    assert tracker.status == "FAILED"
    assert len(warnings) == 1


def test_ships_while_the_run_goes_on(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "PERIOD_SECS", 0.01)
    arrived = threading.Event()
    tracker = RecordingTracker()
    monkeypatch.setattr(tracker, "log_points", lambda points: arrived.set())
    shipper = Shipper(tmp_path, tracker, RunRecord(), "name", {}, {}, lambda text: None)
    shipper.start()
    journal.metrics(1, {"m": 1.0})
    assert arrived.wait(10)
    shipper.drain()


def test_the_journals_of_all_tasks_are_shipped(tmp_path: Path, journal: Journal) -> None:
    journal.metrics(1, {"train/loss": 1.0})
    Journal(journal_path(tmp_path, "evaluator", 0)).metrics(1, {"eval/loss": 2.0})
    tracker = RecordingTracker()
    ship(tmp_path, tracker)
    assert {p.name for p in tracker.points} == {"train/loss", "eval/loss"}


def test_the_record_survives_and_ignores_what_a_newer_version_wrote(tmp_path: Path) -> None:
    RunRecord("id", 2, {"j": 5}, {"m": 1}).save(tmp_path)
    assert RunRecord.read(tmp_path) == RunRecord("id", 2, {"j": 5}, {"m": 1})
    (tmp_path / "run.json").write_text('{"mlflow_run_id": "id", "new": 1}')
    assert RunRecord.read(tmp_path).mlflow_run_id == "id"
    (tmp_path / "run.json").write_text("{broken")
    assert RunRecord.read(tmp_path) == RunRecord()
