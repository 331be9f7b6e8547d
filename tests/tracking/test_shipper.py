"""What shipping has of MLflow's: runs that were killed or lost, curves, servers. Else see test_shipping.py."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from runner.config.schema import ConfigError
from runner.tracking import shipper as shipping
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.run_record import RunRecord
from runner.tracking.shipper import Shipper, close_abandoned
from runner.tracking.tracker import Point, RunDescription, Tracker
from tests.support.journal import Lines, journal_file

ROOT = Path(__file__).parents[2]


class RecordingTracker(Tracker):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.tags: dict[str, str] = {}
        self.files: list[str] = []
        self.status: str | None = None
        self.started_with: list[str | None] = []
        self.known: set[str] = set()
        self.running: dict[str, str] = {}
        self.settled: dict[str, tuple[str, Mapping[str, str], float]] = {}

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        self.started_with.append(run_id)
        return run_id or "run-1"

    def join(self, run_id: str) -> bool:
        return run_id in self.known

    def log_points(self, points: Sequence[Point]) -> None:
        self.points += points

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.tags.update(tags)

    def log_model(self, model: Any) -> None: ...

    def log_file(self, path: Path, folder: str = "") -> None:
        self.files.append(path.name)

    def end(self, status: str) -> None:
        self.status = status

    def running_on(self, host: str) -> Mapping[str, str]:
        return self.running

    def settle(self, run_id: str, status: str, tags: Mapping[str, str], time: float) -> None:
        self.settled[run_id] = (status, tags, time)


def ship(
    model_dir: Path, tracker: Any, warnings: list[str] | None = None, *, is_reader: bool = False, host: str = ""
) -> tuple[str | None, Shipper]:
    said = [] if warnings is None else warnings
    tags = {"host": host, "lock": str(model_dir / ".lock")}
    shipper = Shipper(
        model_dir, tracker, RunRecord.read(model_dir), RunDescription("name", {"a": 1}, tags), said.append, is_reader
    )
    shipper.start()
    return shipper.drain(), shipper


@pytest.fixture
def journal(tmp_path: Path) -> Lines:
    return Lines(tmp_path)


def test_a_reader_adds_metrics_and_files_and_nothing_else(tmp_path: Path, journal: Lines) -> None:
    journal.metrics(5, {"eval/loss": 1.0})
    ship(tmp_path, RecordingTracker())
    journal.metrics(5, {"eval/loss": 0.5})  # evaluated once more
    tracker = RecordingTracker()
    tracker.known = {"run-1"}
    run_id, shipper = ship(tmp_path, tracker, is_reader=True)
    (tmp_path / "summary.json").write_text("{}")
    shipper.close("FINISHED", {"status": "finished"}, [tmp_path / "summary.json"])
    assert (run_id, tracker.started_with, tracker.tags, tracker.status) == ("run-1", [], {}, None)
    assert [(p.step, p.value) for p in tracker.points] == [(5, 0.5)]
    assert tracker.files == ["summary.json", "learning_curves.png"]
    status, tags, when = tracker.settled["run-1"]  # does nothing to a run that has ended
    assert (status, tags) == ("KILLED", {"status": "interrupted"})
    assert when == journal_file(tmp_path).stat().st_mtime


@pytest.mark.parametrize("recorded", [False, True], ids=["untracked", "lost"])
def test_a_reader_of_a_run_that_mlflow_does_not_know_makes_one(recorded: bool, tmp_path: Path, journal: Lines) -> None:
    RunRecord("gone" if recorded else None).save(tmp_path)
    tracker = RecordingTracker()
    run_id, shipper = ship(tmp_path, tracker, is_reader=True)
    shipper.close("FINISHED", {"status": "finished"}, [])
    assert (run_id, tracker.started_with) == ("run-1", [None])
    assert (tracker.status, tracker.tags) == ("FINISHED", {"status": "finished"})


def test_curves_that_cannot_be_drawn_do_not_keep_the_run_open(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(model_dir: Path) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(shipping, "draw_curves", draw)
    warnings: list[str] = []
    tracker = RecordingTracker()
    _, shipper = ship(tmp_path, tracker, warnings)
    shipper.close("FINISHED", {}, [])
    assert tracker.status == "FINISHED"
    assert warnings == ["tracking: no learning curves: no fonts"]


def test_the_record_survives_and_ignores_what_a_newer_version_wrote(tmp_path: Path) -> None:
    RunRecord("id", 2, {"j": 5}, {"m": 1}).save(tmp_path)
    assert RunRecord.read(tmp_path) == RunRecord("id", 2, {"j": 5}, {"m": 1})
    (tmp_path / "run.json").write_text('{"mlflow_run_id": "id", "new": 1}')
    assert RunRecord.read(tmp_path).mlflow_run_id == "id"
    (tmp_path / "run.json").write_text("{broken")
    assert RunRecord.read(tmp_path) == RunRecord()


def test_the_record_holds_the_place_of_each_tracker(tmp_path: Path) -> None:
    record = RunRecord("id")
    record.of("csv").belongs_to("x")
    record.of("csv").offsets = {"j": 7}
    record.save(tmp_path)
    found = RunRecord.read(tmp_path)
    assert found == record and found.of("mlflow").run_id == "id" and found.trackers["csv"].offsets == {"j": 7}
    for wrong in ('{"csv": {"offsets": {"j": "x"}}}', '{"csv": 3}', "[]"):
        (tmp_path / "run.json").write_text(f'{{"trackers": {wrong}}}')
        with pytest.raises(ConfigError, match=r"run.json: trackers.*is not .*Repair it, or use a new model_dir"):
            RunRecord.read(tmp_path)


def abandoned(tmp_path: Path, summary: Mapping[str, Any] | None, *, lock: bool = True) -> RecordingTracker:
    """A tracker with one run that is RUNNING, and the folder that its supervisor left."""
    folder = tmp_path / "dead"
    folder.mkdir()
    if lock:
        (folder / ".lock").touch()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    RunRecord(mlflow_run_id="dead-id").save(folder)
    tracker = RecordingTracker()
    tracker.running = {"dead-id": str(folder / ".lock")}
    return tracker


@pytest.mark.parametrize("lock", [True, False], ids=["free", "gone"])
@pytest.mark.parametrize(
    ("summary", "status", "tag", "left"),
    [
        (None, "KILLED", "interrupted", None),
        ({"status": "running", "global_step": 7}, "KILLED", "interrupted", "interrupted"),
        ({"status": "finished", "mlflow_run_id": "dead-id"}, "FINISHED", "finished", "finished"),
        ({"status": "failed", "mlflow_run_id": "dead-id"}, "FAILED", "failed", "failed"),
        ({"status": "interrupted", "mlflow_run_id": "dead-id"}, "KILLED", "interrupted", "interrupted"),
        ({"status": "finished", "mlflow_run_id": "another"}, "KILLED", "interrupted", "finished"),
    ],
)
def test_a_run_whose_supervisor_is_dead_gets_the_status_it_ended_with(
    summary: dict[str, Any] | None, status: str, tag: str, left: str | None, lock: bool, tmp_path: Path
) -> None:
    tracker = abandoned(tmp_path, summary, lock=lock)
    close_abandoned(tracker, "host")
    assert tracker.settled["dead-id"][:2] == (status, {"status": tag})
    if summary is not None:
        now = json.loads((tmp_path / "dead" / "summary.json").read_text())
        assert now["status"] == left
        if summary["status"] == "running":
            assert now == {"status": "interrupted", "global_step": 7, "error": "the supervisor was killed"}
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
    assert tracker.settled["dead-id"][0] == "KILLED"
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
        RunRecord(mlflow_run_id="theirs").save(folder)
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
    tmp_path: Path, journal: Lines
) -> None:
    journal.metrics(1, {"m": 1.0})
    tracker = abandoned(tmp_path, None)
    ship(tmp_path, tracker, host="here")
    assert set(tracker.settled) == {"dead-id"}

    def fail(host: str) -> Mapping[str, str]:
        raise ConnectionError("http://me:hunter2@host is away")

    journal.metrics(2, {"m": 1.0})
    tracker.running_on = fail  # type: ignore[method-assign]
    warnings: list[str] = []
    run_id, _ = ship(tmp_path, tracker, warnings, host="here")
    assert run_id == "run-1"
    assert [p.step for p in tracker.points] == [1, 2]
    assert warnings == ["tracking: cannot look for runs that were killed: http://***@host is away"]


KILLED_HERE = """
import os, signal, sys
from pathlib import Path
from filelock import FileLock
from runner.tracking.run_record import RunRecord
from runner.tracking.shipper import Shipper
from runner.tracking.tracker import RunDescription
from runner.tracking.mlflow_tracker import MlflowTracker
folder = Path(sys.argv[1])
FileLock(folder / ".lock").acquire()
(folder / "summary.json").write_text('{"status": "running"}')
tags = {"host": "here", "lock": str(folder / ".lock")}
shipper = Shipper(folder, MlflowTracker(sys.argv[2], "e"), RunRecord(), RunDescription("first", {}, tags), print)
shipper.start()
shipper.drain()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.usefixtures("mlflow_database")
def test_a_run_that_was_killed_is_closed_in_mlflow_by_the_next_one(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED_HERE, first, uri], cwd=ROOT, timeout=150)
    assert killed.returncode == -9
    client = MlflowClient(tracking_uri=uri)
    run_id = str(RunRecord.read(first).mlflow_run_id)
    assert client.get_run(run_id).info.status == "RUNNING"

    with FileLock(second / ".lock"):
        own_id, shipper = ship(second, MlflowTracker(uri, "e"), host="here")
        assert client.get_run(run_id).info.status == "KILLED"
        assert client.get_run(run_id).data.tags["status"] == "interrupted"
        assert json.loads((first / "summary.json").read_text())["status"] == "interrupted"
        assert client.get_run(str(own_id)).info.status == "RUNNING"
        shipper.close("FINISHED", {}, [])


WITHOUT_A_SERVER = """
import sys
from pathlib import Path
from runner.tracking.run_record import RunRecord
from runner.tracking.shipper import Shipper
from runner.tracking.tracker import RunDescription
from runner.tracking.mlflow_tracker import MlflowTracker
tracker = MlflowTracker("http://me:hunter2@127.0.0.1:9", "e")
shipper = Shipper(Path(sys.argv[1]), tracker, RunRecord(), RunDescription("name", {}, {"host": "here"}), print)
shipper.start()
assert shipper.drain() is None
shipper.close("FINISHED", {}, [])
"""


@pytest.mark.processes
@pytest.mark.slow
def test_several_runs_without_a_server_all_end_with_one_warning(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        Lines(folder).metrics(1, {"m": 1.0})
    before = time.monotonic()
    runs = [
        subprocess.Popen([sys.executable, "-c", WITHOUT_A_SERVER, folder], cwd=ROOT, stdout=subprocess.PIPE)
        for folder in folders
    ]
    for run, folder in zip(runs, folders, strict=True):
        said = run.communicate(timeout=240)[0].decode()
        assert run.returncode == 0
        assert said == (
            "tracking: http://***@127.0.0.1:9 cannot be reached: Connection refused. Start that server, or choose "
            f"another tracking.uri. (training continues; the journals in {folder} have everything)\n"
        )
    assert time.monotonic() - before < 200  # with MLflow's own settings, 247 s for each call


@pytest.mark.slow
def test_a_server_that_never_answers_costs_no_more_than_its_time_limit(
    tmp_path: Path, journal: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(shipping, "CLOSING_TIMEOUT_SECS", 1.5)
    journal.metrics(1, {"m": 1.0})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        warnings: list[str] = []
        tracker = MlflowTracker(f"http://me:hunter2@127.0.0.1:{silent.getsockname()[1]}", "e")
        before = time.monotonic()
        run_id, shipper = ship(tmp_path, tracker, warnings)
        shipper.close("FINISHED", {}, [])
        assert time.monotonic() - before < 60
        assert run_id is None
        assert len(warnings) == 1 and "hunter2" not in warnings[0]
        shipper._thread.join(60)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_whether_a_run_that_ends_before_its_first_step_is_recorded_is_said_at_its_end(
    is_recorded: bool, tmp_path: Path
) -> None:
    tracker = RecordingTracker()
    shipper = Shipper(
        tmp_path, tracker, RunRecord(), RunDescription("name", {}, {}), lambda text: None, patience_secs=math.inf
    )
    shipper.start()
    assert shipper.drain(is_recorded=is_recorded) == ("run-1" if is_recorded else None)
    shipper.close("FAILED", {}, [])
    assert tracker.status == ("FAILED" if is_recorded else None)


def test_goes_on_in_the_run_of_a_start_that_was_killed_before_it_could_note_it(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    tracker.running = {"of-another": "/elsewhere/.lock", "of-this": str(tmp_path / ".lock")}
    tags = {"host": "here", "lock": str(tmp_path / ".lock")}
    shipper = Shipper(tmp_path, tracker, RunRecord(), RunDescription("name", {}, tags), lambda text: None)
    shipper.start()
    shipper.drain()
    assert tracker.started_with == ["of-this"]
