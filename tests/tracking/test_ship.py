"""What shipping has of MLflow's: runs that were killed, lost or kept, curves, models. Else see test_shipping.py."""

from __future__ import annotations

import json
import os
import queue
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from runner.config.schema import TrackingConfig
from runner.tracking import ship as shipping
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.run_record import RunRecord, Shipped
from runner.tracking.ship import PREPARE_SECS, Deadline, RunShipper, close_abandoned
from runner.tracking.shipping import ANSWER_SECS, NOT_ALL, Shipping, write_settings
from runner.tracking.tracker import Point, Tracker
from tests.support.journal import Lines, journal_file, note_end, note_start
from tests.support.messages import Messages
from tests.support.processes import wait_until


class RecordingTracker(Tracker):
    """Keeps what it is told; fails in the method that it `refuses`."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.tags: dict[str, str] = {}
        self.files: list[str] = []
        self.status: str | None = None
        self.started_with: list[str | None] = []
        self.known: set[str] = set()
        self.running: dict[str, str] = {}
        self.settled: dict[str, tuple[str, Mapping[str, str], float]] = {}
        self.models: list[str] = []
        self.left: str | None = None
        self.times_closed = 0
        self.refuses = ""
        self.is_away = False

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        self.started_with.append(run_id)
        return run_id or "run-1"

    def join(self, run_id: str) -> bool:
        return run_id in self.known

    def log_points(self, points: Sequence[Point]) -> None:
        self.points += points

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.tags.update(tags)

    def log_model(self, model: Any) -> None:
        self._maybe_fail("log_model")
        self.models.append(model.name)

    def log_file(self, path: Path, folder: str = "") -> None:
        self._maybe_fail("log_file")
        self.files.append(path.name)

    def end(self, status: str, time: float) -> None:
        self._maybe_fail("end")
        self.status = status

    def leave(self, status: str, time: float) -> None:
        self.left = status

    def close(self) -> None:
        self.times_closed += 1

    def running_on(self, host: str) -> Mapping[str, str]:
        return self.running

    def settle(self, run_id: str, status: str, tags: Mapping[str, str], time: float) -> None:
        self.settled[run_id] = (status, tags, time)

    def is_refusal(self, error: Exception) -> bool:
        return not self.is_away

    def _maybe_fail(self, method: str) -> None:
        if method == self.refuses:
            raise ConnectionError("server is away\nlong text")


def started(model_dir: Path, *, command: str = "train", host: str = "", uri: str | None = None) -> None:
    """Note a start, as whoever starts a run does."""
    tags = {"host": host, "lock": str(model_dir / ".lock")}
    note_start(model_dir, command=command, tags=tags)
    write_settings(model_dir, TrackingConfig(uri=uri), {})


def shipper_of(model_dir: Path, tracker: Tracker) -> RunShipper:
    return RunShipper(model_dir, "mlflow", Deadline(), lambda *args: tracker)


def ship(model_dir: Path, tracker: Tracker, **facts: Any) -> str | None:
    """Ship a start that has begun, and return the tracker's id of its run. Args: facts: as of `started`."""
    started(model_dir, **facts)
    return go_on(model_dir, tracker)


def go_on(model_dir: Path, tracker: Tracker) -> str | None:
    """Ship what is new in a process of its own, which ends at once."""
    shipper = shipper_of(model_dir, tracker)
    try:
        shipper.ship()
    finally:
        shipper.release()
    return Shipped.read(model_dir, "mlflow").run_id


@pytest.fixture
def journal(tmp_path: Path) -> Lines:
    return Lines(tmp_path)


def test_the_summary_gets_the_id_of_its_run(tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / "summary.json").write_text('{"mlflow_run_id": null, "status": "finished"}')
    note_end(tmp_path, files=["summary.json"])
    assert go_on(tmp_path, tracker := RecordingTracker()) == "run-1" and tracker.files == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"mlflow_run_id": "run-1", "status": "finished"}


def test_the_summary_of_a_start_that_has_begun_since_is_its_own(tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / "summary.json").write_text('{"mlflow_run_id": null, "status": "running"}')
    note_end(tmp_path, files=["summary.json"])
    with FileLock(tmp_path / ".lock"):
        assert go_on(tmp_path, tracker := RecordingTracker()) == "run-1" and tracker.files == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"mlflow_run_id": None, "status": "running"}


def test_a_reader_adds_metrics_and_files_and_nothing_else(tmp_path: Path, journal: Lines) -> None:
    journal.metrics(5, {"eval/loss": 1.0})
    ship(tmp_path, RecordingTracker())
    started(tmp_path, command="evaluate")
    journal.metrics(5, {"eval/loss": 0.5})  # evaluated once more
    (tmp_path / "summary.json").write_text("{}")
    note_end(tmp_path, files=["summary.json", "learning_curves.png"])
    tracker = RecordingTracker()
    tracker.known = {"run-1"}
    assert go_on(tmp_path, tracker) == "run-1"
    assert (tracker.started_with, tracker.tags, tracker.status, tracker.left) == (["run-1"], {}, None, "FINISHED")
    assert [(p.step, p.value) for p in tracker.points] == [(5, 0.5)]
    assert tracker.files == ["summary.json", "learning_curves.png"]
    status, tags, _ = tracker.settled["run-1"]  # does nothing to a run that has ended
    assert (status, tags) == ("SCHEDULED", {"status": "interrupted"})


def test_a_step_that_a_reader_evaluates_again_counts_however_late_it_is_shipped(tmp_path: Path, journal: Lines) -> None:
    for command, values in (("train", (1.0, 1.0)), ("evaluate", (0.5,)), ("train", (0.3,))):
        started(tmp_path, command=command)
        for value in values:
            journal.metrics(5, {"eval/loss": value})
        note_end(tmp_path)
    tracker = RecordingTracker()
    tracker.known = {"run-1"}
    assert go_on(tmp_path, tracker) == "run-1"
    assert [p.value for p in tracker.points] == [1.0, 0.5]
    assert tracker.started_with == [None, "run-1"]


@pytest.mark.parametrize("recorded", [False, True], ids=["untracked", "lost"])
def test_a_reader_of_a_run_that_mlflow_does_not_know_makes_one(recorded: bool, tmp_path: Path, journal: Lines) -> None:
    Shipped("gone" if recorded else None).save(tmp_path, "mlflow")
    started(tmp_path, command="evaluate")
    note_end(tmp_path)
    tracker = RecordingTracker()
    tracker.start = lambda *args: (tracker.started_with.append(args[0]), "run-1")[1]  # type: ignore[func-returns-value,method-assign]
    assert go_on(tmp_path, tracker) == "run-1"
    assert tracker.started_with == ["gone" if recorded else None]  # MLflow makes a new one if it does not know it
    assert (tracker.status, tracker.tags) == ("FINISHED", {"status": "finished"})


@pytest.mark.parametrize("opened", [False, True], ids=["at its end", "before"])
def test_a_start_that_failed_before_its_first_step_leaves_a_run_with_a_checkpoint(
    opened: bool, tmp_path: Path, journal: Lines
) -> None:
    ship(tmp_path, RecordingTracker())
    note_end(tmp_path)
    go_on(tmp_path, RecordingTracker())
    tracker = RecordingTracker()
    tracker.known = {"run-1"}
    started(tmp_path)
    if opened:  # user code asked for the MLflow run
        go_on(tmp_path, tracker)
    note_end(tmp_path, "failed", files=[], is_kept=True, tags={"last_failed_start": "why"})
    go_on(tmp_path, tracker)
    assert (tracker.status, tracker.left) == (None, "FINISHED")
    assert tracker.tags == {"last_failed_start": "why"}


def test_an_end_that_fails_is_repeated_and_no_model_is_sent_twice(tmp_path: Path, journal: Lines) -> None:
    ship(tmp_path, tracker := RecordingTracker())
    model = {"name": "m", "path": str(tmp_path), "inputs": {}, "outputs": {}}
    note_end(tmp_path, "failed", models=[model])
    tracker.refuses = "end"
    with pytest.raises(ConnectionError):
        go_on(tmp_path, tracker)
    assert tracker.status is None
    tracker.refuses = ""
    go_on(tmp_path, tracker)
    assert (tracker.status, tracker.models) == ("FAILED", ["m"])


@pytest.mark.parametrize("refused", ["log_file", "log_model"])
def test_what_a_tracker_refuses_does_not_keep_the_run_open(
    refused: str, tmp_path: Path, journal: Lines, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    ship(tmp_path, tracker := RecordingTracker())
    (tmp_path / "notes.txt").touch()
    model = {"name": "m", "path": str(tmp_path), "inputs": {}, "outputs": {}}
    note_end(tmp_path, files=["notes.txt"], models=[model])
    tracker.refuses = refused
    go_on(tmp_path, tracker)
    assert tracker.status == "FINISHED" and Shipped.read(tmp_path, "mlflow").is_complete(tmp_path)
    assert tracker.files == ["notes.txt"] * (refused != "log_file")
    assert tracker.models == ["m"] * (refused != "log_model")
    messages.same("stderr", capsys.readouterr().err)


@pytest.mark.parametrize("unanswered", ["log_file", "log_model"])
def test_what_nobody_answers_at_the_end_is_sent_later_and_keeps_no_later_start_from_the_tracker(
    unanswered: str, tmp_path: Path, journal: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(tmp_path, tracker := RecordingTracker())
    (tmp_path / "notes.txt").touch()
    model = {"name": "m", "path": str(tmp_path), "inputs": {}, "outputs": {}}
    note_end(tmp_path, files=["notes.txt"], models=[model])
    tracker.refuses, tracker.is_away = unanswered, True
    with pytest.raises(ConnectionError):
        go_on(tmp_path, tracker)
    assert tracker.status == "FINISHED" and not Shipped.read(tmp_path, "mlflow").is_complete(tmp_path)
    tracker.refuses = ""
    go_on(tmp_path, tracker)
    assert Shipped.read(tmp_path, "mlflow").is_complete(tmp_path)
    assert "notes.txt" in tracker.files and tracker.models == ["m"]

    started(tmp_path)
    note_end(tmp_path, files=["notes.txt"])
    tracker.refuses, tracker.files = "log_file", []
    with pytest.raises(ConnectionError):
        go_on(tmp_path, tracker)
    journal.metrics(1, {"train/loss": 1.0})
    started(tmp_path)
    go_on(tmp_path, tracker)
    assert [point.step for point in tracker.points] == [1] and tracker.files == []
    assert capsys.readouterr().err.count("recorded without a file") == 1


def test_what_nobody_answered_at_the_end_is_not_tried_again_at_once(tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / "notes.txt").touch()
    note_end(tmp_path, files=["notes.txt"])
    tracker = RecordingTracker()
    tracker.refuses, tracker.is_away = "log_file", True
    shipper = shipper_of(tmp_path, tracker)
    with pytest.raises(ConnectionError):
        shipper.ship()
    shipper._wakes_at = 0.0
    assert not shipper.is_due()
    shipper.release()


def test_nothing_is_shipped_of_a_start_that_may_be_removed_until_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "PATIENCE_SECS", 0.0)
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        note_start(tmp_path / name, command="train", tags={}, is_provisional=name == "new")
        write_settings(tmp_path / name, TrackingConfig(), {})
    new, old = (shipper_of(tmp_path / name, RecordingTracker()) for name in ("new", "old"))
    assert not new.is_due() and old.is_due()
    Lines(tmp_path / "new").event("first_step", step=1)
    assert new.is_due()


def test_a_tracker_has_longer_to_prepare_than_to_answer(tmp_path: Path) -> None:
    class Noting(Deadline):
        secs = 0.0

        def expect(self, num_bytes: int = 0, secs: float = ANSWER_SECS) -> None:
            self.secs = secs

    deadline, tracker, of_prepare = Noting(), RecordingTracker(), list[float]()
    tracker.prepare = lambda: of_prepare.append(deadline.secs)  # type: ignore[method-assign]
    started(tmp_path)
    shipper = RunShipper(tmp_path, "mlflow", deadline, lambda *args: tracker)
    shipper.ship()
    shipper.release()
    assert of_prepare == [PREPARE_SECS] and deadline.secs == ANSWER_SECS


def test_what_nobody_answers_for_keeps_nothing_else_from_the_tracker(tmp_path: Path, journal: Lines) -> None:
    ship(tmp_path, tracker := RecordingTracker())
    (tmp_path / "notes.txt").touch()
    models: list[Any] = [{"name": one, "path": f"{tmp_path}/{one}", "inputs": {}, "outputs": {}} for one in "ab"]
    for name in "ab":
        (tmp_path / name).mkdir()
    note_end(tmp_path, files=["notes.txt"], models=models)
    tracker.refuses, tracker.is_away = "log_file", True
    with pytest.raises(ConnectionError):
        go_on(tmp_path, tracker)
    assert tracker.status == "FINISHED" and tracker.models == ["a", "b"]
    with pytest.raises(ConnectionError):
        go_on(tmp_path, tracker)
    assert tracker.models == ["a", "b"], "once"


def test_the_end_of_a_sweep_does_not_wait_for_each_of_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()

    class Slow(RecordingTracker):
        def log_file(self, path: Path, folder: str = "") -> None:
            tried.append(path.parent.name)
            time.sleep(0.1)
            raise ConnectionError("the store is away")

    tracker = Slow()
    tracker.is_away = True
    monkeypatch.setattr(shipping, "ANSWER_SECS", 1)
    monkeypatch.setattr(shipping, "RunShipper", lambda folder, *_: shipper_of(folder, tracker))
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "notes.txt").touch()
        started(folder)
        note_end(folder, files=["notes.txt"])
        folders.put(str(folder))
    folders.put("")
    assert shipping._ship_until_end(folders, "mlflow", Deadline()) == NOT_ALL
    assert 1 < len(set(tried)) < 50


def test_a_model_that_was_deleted_before_it_was_sent_is_said(
    tmp_path: Path, journal: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(tmp_path, tracker := RecordingTracker())
    model = {"name": "m", "path": str(tmp_path / "gone"), "inputs": {}, "outputs": {}}
    note_end(tmp_path, models=[model])
    go_on(tmp_path, tracker)
    assert tracker.status == "FINISHED" and tracker.models == []
    assert f"{tmp_path / 'gone'} is not recorded" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["../private", "/absolute", "link", "folder"])
def test_what_a_strangers_journal_names_outside_of_its_folder_is_not_sent(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir, private = tmp_path / "run", tmp_path / "private"
    (model_dir / "folder").mkdir(parents=True)
    private.write_text("a key")
    (model_dir / "link").symlink_to(private)
    (model_dir / "folder" / "link").symlink_to(private)
    (model_dir / "own.txt").write_text("of the run")
    named = str(private) if place == "/absolute" else place
    ship(model_dir, tracker := RecordingTracker())
    lines = Lines(model_dir)
    for path in (named, "own.txt"):
        lines.event("artifact", path=path, folder="")
    lines.event("image", name="x", path=named, step=1)
    note_end(model_dir, files=[named], models=[{"name": "m", "path": named, "inputs": {}, "outputs": {}}])
    go_on(model_dir, tracker)
    assert (tracker.status, tracker.files, tracker.models) == ("FINISHED", ["own.txt"], [])
    said = capsys.readouterr().err
    assert said.count(f"{private}, which a journal names, is outside of {model_dir}") == 1


def test_a_model_that_was_exported_elsewhere_is_sent(tmp_path: Path) -> None:
    exported = tmp_path / "served" / "1"
    exported.mkdir(parents=True)
    (exported / "saved_model.pb").write_bytes(b"")
    ship(tmp_path / "run", tracker := RecordingTracker())
    note_end(tmp_path / "run", models=[{"name": "m", "path": str(exported), "inputs": {}, "outputs": {}}])
    go_on(tmp_path / "run", tracker)
    assert (tracker.status, tracker.models) == ("FINISHED", ["m"])


def test_curves_that_cannot_be_drawn_do_not_keep_the_run_open(
    tmp_path: Path,
    journal: Lines,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    messages: Messages,
) -> None:
    def draw(model_dir: Path) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(shipping, "draw_curves", draw)
    tracker = RecordingTracker()
    started(tmp_path)
    note_end(tmp_path)
    go_on(tmp_path, tracker)
    assert tracker.status == "FINISHED"
    messages.same("stderr", capsys.readouterr().err)


def test_a_folder_that_another_process_ships_is_left_alone(tmp_path: Path, journal: Lines) -> None:
    started(tmp_path)
    first, second = shipper_of(tmp_path, RecordingTracker()), shipper_of(tmp_path, tracker := RecordingTracker())
    assert not first.ship() and not second.ship()
    assert tracker.started_with == []
    first.release()
    assert not second.ship()
    assert tracker.started_with == ["run-1"]
    second.release()


@pytest.mark.parametrize("opened", [True, False])
def test_a_run_whose_folder_is_deleted_has_failed(opened: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    started(folder)
    shipper = shipper_of(folder, tracker := RecordingTracker())
    if opened:
        assert not shipper.ship()
    shutil.rmtree(folder)
    assert shipper.is_due() and shipper.ship()
    assert (tracker.status, tracker.tags) == ("FAILED", {"status": "failed"})
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_end_finds_no_space_has_failed_until_there_is_some(small_disk: Path) -> None:
    started(small_disk)
    shipper = shipper_of(small_disk, tracker := RecordingTracker())
    assert not shipper.ship()
    for name in ("of_another_program", "events.supervisor-0.jsonl"):  # the second has room in its last page
        with open(small_disk / name, "ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"\n" * 4096)
    assert shipper.end_killed() and shipper.ship()
    assert (tracker.status, tracker.tags) == ("FAILED", {"status": "failed"})
    shipper.release()
    (small_disk / "of_another_program").unlink()
    assert not Shipped.read(small_disk, "mlflow").is_complete(small_disk)
    shipper = shipper_of(small_disk, tracker)
    assert shipper.end_killed() and shipper.ship()
    assert (tracker.status, tracker.tags) == ("SCHEDULED", {"status": "interrupted"})


def test_the_tracker_of_a_killed_start_is_closed_before_the_next_start_has_one(tmp_path: Path) -> None:
    started(tmp_path)
    started(tmp_path)
    shipper = shipper_of(tmp_path, tracker := RecordingTracker())
    assert not shipper.ship()
    assert (len(tracker.started_with), tracker.times_closed) == (2, 1)
    note_end(tmp_path)
    assert shipper.ship()
    assert tracker.times_closed == 2


def test_the_end_of_a_killed_start_is_noted_when_its_tasks_have_ended(tmp_path: Path, journal: Lines) -> None:
    started(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "running"}')
    shipper = shipper_of(tmp_path, tracker := RecordingTracker())
    with FileLock(tmp_path / ".lock"):  # the supervisor of this or another start
        assert shipper.end_killed()
    with FileLock(tmp_path / ".task.chief-0.lock"):
        assert not shipper.end_killed()
    assert not shipper.ship() and tracker.status is None
    assert shipper.end_killed() and shipper.end_killed()
    assert shipper.ship()
    assert (tracker.status, tracker.tags) == ("SCHEDULED", {"status": "interrupted"})
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


def test_the_record_survives_and_ignores_what_a_newer_version_wrote(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("line\n")
    Shipped("id", offsets={"j": 5}, last_steps={"m": 1}).save(tmp_path, "csv")
    assert Shipped.read(tmp_path, "csv") == Shipped("id", offsets={"j": 5}, last_steps={"m": 1})
    assert Shipped.read(tmp_path, "mlflow") == Shipped()
    (tmp_path / "shipped.csv.json").write_text('{"run_id": "id", "new": 1}')
    assert Shipped.read(tmp_path, "csv").run_id == "id"
    (tmp_path / "shipped.csv.json").write_text("{broken")
    assert Shipped.read(tmp_path, "csv") == Shipped()
    RunRecord(2, "finished").save(tmp_path)
    assert RunRecord.read(tmp_path) == RunRecord(2, "finished")


def test_the_disk_has_a_journal_before_the_record_speaks_of_it(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: dict[str, int] = {}
    records: list[dict[str, Any]] = []

    def sync(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if file.suffix == ".jsonl":
            durable[file.name] = file.stat().st_size
        elif file.name.startswith(".shipped."):
            records.append(json.loads(file.read_text()))
            for name, offset in records[-1]["offsets"].items():
                assert offset <= durable.get(name, 0)
            assert (records[-1]["started"] or 0) <= durable[journal_file(tmp_path, "supervisor").name]

    journal.metrics(1, {"m": 1.0})
    started(tmp_path)
    monkeypatch.setattr(os, "fsync", sync)
    shipper = shipper_of(tmp_path, RecordingTracker())
    assert not shipper.ship()
    journal.metrics(2, {"m": 1.0})
    note_end(tmp_path)
    assert shipper.ship()
    assert records[-1]["offsets"] == durable


def test_a_round_saves_the_record_once_for_all_workers_of_which_no_tracker_is_told_anything(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has an offset for each task: saved for each, it would be n x n of them in a round."""
    started(tmp_path)
    shipper = shipper_of(tmp_path, RecordingTracker())
    assert not shipper.ship()
    saved: list[dict[str, int]] = []
    monkeypatch.setattr(Shipped, "save", lambda record, *where: saved.append(dict(record.offsets)))
    for worker in range(64):
        Lines(tmp_path, "worker", worker).event("phase", name="input", secs=0.1)
    journal.metrics(1, {"m": 1.0})
    assert not shipper.ship()
    # The chief's metrics are saved at once, so that a crash repeats no more than a block of its journal.
    assert len(saved) == 2
    for worker in range(64):
        name = f"events.worker-{worker}.jsonl"
        assert saved[-1][name] == (tmp_path / name).stat().st_size


def test_a_record_forgets_where_a_journal_has_no_end_of_a_line(tmp_path: Path, journal: Lines) -> None:
    journal.metrics(1, {"m": 1.0})
    ship(tmp_path, RecordingTracker())
    before = Shipped.read(tmp_path, "mlflow")
    assert before.started == 0 and len(before.offsets) == 2
    os.truncate(journal_file(tmp_path), 1)
    after = Shipped.read(tmp_path, "mlflow")
    bounds = journal_file(tmp_path, "supervisor").name
    assert (after.started, after.offsets) == (0, {bounds: before.offsets[bounds]})
    os.truncate(tmp_path / bounds, 1)
    after = Shipped.read(tmp_path, "mlflow")
    assert (after.started, after.offsets, after.run_id, after.last_steps) == (None, {}, "run-1", {"m": 1})
    assert not after.is_complete(tmp_path)


def abandoned(tmp_path: Path, summary: Mapping[str, Any] | None, *, lock: bool = True) -> RecordingTracker:
    """A tracker with one run that is RUNNING, and the folder that its supervisor left."""
    folder = tmp_path / "dead"
    folder.mkdir()
    if lock:
        (folder / ".lock").touch()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    Shipped((summary or {}).get("mlflow_run_id", "dead-id")).save(folder, "mlflow")
    tracker = RecordingTracker()
    tracker.running = {"dead-id": str(folder / ".lock")}
    return tracker


@pytest.mark.parametrize("lock", [True, False], ids=["free", "gone"])
@pytest.mark.parametrize(
    ("summary", "status", "tag", "left"),
    [
        (None, "SCHEDULED", "interrupted", None),
        ({"status": "running", "global_step": 7}, "SCHEDULED", "interrupted", "interrupted"),
        ({"status": "finished", "mlflow_run_id": "dead-id"}, "FINISHED", "finished", "finished"),
        ({"status": "failed", "mlflow_run_id": "dead-id"}, "FAILED", "failed", "failed"),
        ({"status": "interrupted", "mlflow_run_id": "dead-id"}, "SCHEDULED", "interrupted", "interrupted"),
        ({"status": "finished", "mlflow_run_id": "another"}, "SCHEDULED", "interrupted", "finished"),
    ],
)
def test_a_run_whose_supervisor_is_dead_gets_the_status_it_ended_with(
    summary: dict[str, Any] | None,
    status: str,
    tag: str,
    left: str | None,
    lock: bool,
    tmp_path: Path,
    messages: Messages,
) -> None:
    tracker = abandoned(tmp_path, summary, lock=lock)
    close_abandoned(tracker, "host")
    assert tracker.settled["dead-id"][:2] == (status, {"status": tag})
    if summary is not None:
        now = json.loads((tmp_path / "dead" / "summary.json").read_text())
        assert now["status"] == left
        if summary["status"] == "running":
            messages.same("error", now.pop("error"))
            assert now == {"status": "interrupted", "global_step": 7}
    assert (tmp_path / "dead" / ".lock").exists() == lock


def test_a_run_ended_when_its_tasks_last_noted_something(tmp_path: Path) -> None:
    tracker = abandoned(tmp_path, None)
    Lines(tmp_path / "dead").event("started")
    os.utime(journal_file(tmp_path / "dead"), (1000, 1000))
    close_abandoned(tracker, "host")
    assert tracker.settled["dead-id"][2] == 1000


def test_a_run_whose_folder_is_gone_is_closed_too(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    tracker.running = {"dead-id": str(tmp_path / "nowhere" / ".lock")}
    close_abandoned(tracker, "host")
    assert tracker.settled["dead-id"][0] == "SCHEDULED"
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_supervisor_lives_is_left_alone(tmp_path: Path) -> None:
    tracker = abandoned(tmp_path, {"status": "running"})
    tracker.running["odd"] = "a lock of the user's own"
    with FileLock(tmp_path / "dead" / ".lock"):
        close_abandoned(tracker, "host")
    assert tracker.settled == {}
    assert json.loads((tmp_path / "dead" / "summary.json").read_text()) == {"status": "running"}


@pytest.mark.parametrize("kind", ["file", "folder of another run", "link", "pipe"])
def test_a_tag_of_somebody_elses_run_makes_us_write_nowhere(kind: str, tmp_path: Path) -> None:
    tracker = abandoned(tmp_path, {"status": "running"})
    folder = tmp_path / "dead"
    lock = folder / ".lock"
    lock.write_text("precious")
    if kind == "file":
        lock = lock.rename(folder / "thesis.txt")
    elif kind == "folder of another run":
        Shipped("theirs").save(folder, "mlflow")
    elif kind == "link":
        lock.symlink_to(lock.rename(tmp_path / "thesis.txt"))
    else:
        lock.unlink()
        os.mkfifo(lock)
    tracker.running = {"dead-id": str(lock), "nowhere": str(tmp_path / "new" / ".lock")}
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    close_abandoned(tracker, "host")
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "precious" in [*before.values(), "precious" if kind == "pipe" else ""]
    assert set(tracker.settled) == {"nowhere", *(["dead-id"] if kind == "folder of another run" else [])}


def test_a_run_whose_journal_is_still_shipped_is_left_alone(tmp_path: Path) -> None:
    tracker = abandoned(tmp_path, {"status": "finished"})
    with FileLock(tmp_path / "dead" / ".ship.mlflow.lock"):
        close_abandoned(tracker, "host")
    assert tracker.settled == {}
    close_abandoned(tracker, "host")
    assert tracker.settled["dead-id"][0] == "FINISHED"


def test_the_lock_is_held_while_a_run_is_closed_and_free_afterwards(tmp_path: Path) -> None:
    tracker = abandoned(tmp_path, None)
    lock = FileLock(tmp_path / "dead" / ".lock", timeout=0)

    def settle(*args: Any) -> None:
        with pytest.raises(TimeoutError):
            lock.acquire()

    tracker.settle = settle  # type: ignore[method-assign,assignment]
    close_abandoned(tracker, "host")
    with lock:
        pass


def test_each_start_closes_what_was_abandoned_and_a_failure_there_costs_one_warning(
    tmp_path: Path, journal: Lines, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    journal.metrics(1, {"m": 1.0})
    tracker = abandoned(tmp_path, None)
    ship(tmp_path, tracker, host="here")
    assert set(tracker.settled) == {"dead-id"}

    def fail(host: str) -> Mapping[str, str]:
        raise ConnectionError("http://me:hunter2@host is away")

    journal.metrics(2, {"m": 1.0})
    tracker.running_on = fail  # type: ignore[method-assign]
    assert ship(tmp_path, tracker, host="here") == "run-1"
    assert [p.step for p in tracker.points] == [1, 2]
    messages.same("stderr", capsys.readouterr().err)


@pytest.mark.parametrize("event", ["wants_run", "run_ended"])
def test_a_word_to_mlflow_and_the_end_of_a_run_are_not_waited_for(event: str, tmp_path: Path, journal: Lines) -> None:
    started(tmp_path)
    shipper = shipper_of(tmp_path, RecordingTracker())
    assert not shipper.is_due()
    journal.event(event, status="finished", recorded="FINISHED")
    assert shipper.is_due()


def test_goes_on_in_the_run_of_a_start_that_was_killed_before_it_could_note_it(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    tracker.running = {"of-another": "/elsewhere/.lock", "of-this": str(tmp_path / ".lock")}
    started(tmp_path, host="here")
    with FileLock(tmp_path / ".lock"):
        go_on(tmp_path, tracker)
    assert tracker.started_with == ["of-this"]


def test_a_run_whose_id_nobody_noted_is_continued_also_if_another_command_closes_it_first(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    tracker.running = {"of-this": str(tmp_path / ".lock")}
    started(tmp_path, host="here")
    (tmp_path / ".lock").touch()
    close_abandoned(tracker, "here")
    tracker.running = {}
    note_end(tmp_path, "finished")
    go_on(tmp_path, tracker)
    assert (tracker.started_with, tracker.status) == (["of-this"], "FINISHED")


@pytest.mark.processes
@pytest.mark.usefixtures("mlflow_database")
def test_a_run_that_was_killed_is_closed_in_mlflow_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "summary.json").write_text('{"status": "running"}')
    for folder in (first, second):
        started(folder, host="here")
        journal_file(folder).touch()
    uri, client = f"sqlite:///{tmp_path}/mlflow.db", MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = str(go_on(first, MlflowTracker(uri, "runner")))  # the machine went down
    assert client.get_run(run_id).info.status == "RUNNING"
    with FileLock(second / ".lock"):
        own_id = str(go_on(second, MlflowTracker(uri, "runner")))
    assert client.get_run(run_id).info.status == "SCHEDULED"
    assert client.get_run(run_id).data.tags["status"] == "interrupted"
    assert json.loads((first / "summary.json").read_text())["status"] == "interrupted"
    assert client.get_run(own_id).info.status == "RUNNING"
    note_end(second)
    go_on(second, MlflowTracker(uri, "runner"))
    assert client.get_run(own_id).info.status == "FINISHED"


@pytest.mark.processes
def test_several_runs_without_a_server_end_with_one_warning_and_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    said: list[str] = []
    monkeypatch.setattr("runner.tracking.shipping.say", said.append)
    folders = [tmp_path / str(number) for number in range(4)]
    following = Shipping(os.environ)
    for folder in folders:
        Lines(folder).event("first_step")
        started(folder, uri="http://me:hunter2@127.0.0.1:9")
        following.ship(folder)
    wait_until(lambda: bool(said))
    began = time.monotonic()
    for folder in folders:
        note_end(folder)
    assert not following.close()
    assert time.monotonic() - began < 120  # with MLflow's own settings, 247 s for each call
    for line in said:
        messages.same("stderr", line)
