"""How a run ended: one answer for all readers, wherever the process that wrote it was killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.launch.api import Run
from runner.tracking.journal import RUN_STARTED, note_of_run
from runner.tracking.run_end import RunEnd, how_run_ended, read_ending, settle, settle_files, write_end, write_ending
from runner.tracking.run_record import RunRecord
from tests.support.cuts import Cuts, Killed
from tests.support.journal import STATUS, events_in, note_end, note_start

OLD_RUNS = Path(__file__).parents[1] / "data" / "runs_of_b5fe916"
ORDER = ["run.json", "training_ended.json", "summary.json", "run_ended"]
STATUSES = ("finished", "failed", "interrupted")
RUNNING_SUMMARY: dict[str, Any] = {"command": "train", "status": "running", "error": None, "metrics": {}}


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Cuts:
    return Cuts(monkeypatch)


def write(folder: Path, name: str, values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def started(folder: Path, generation: int = 1) -> RunRecord:
    """A start that trains, as its supervisor notes it."""
    write(folder, "summary.json", RUNNING_SUMMARY)
    record = RunRecord(generation, "running")
    record.save(folder)
    note_of_run(folder, RUN_STARTED, command="train", name="n", params={}, tags={}, generation=generation)
    return record


def end_of(status: str) -> RunEnd:
    summary = {"command": "train", "status": status, "error": None, "metrics": {"eval/loss": 0.5}}
    return RunEnd(status, STATUS[status], {"summary.json": summary}, tags={"strategy": "default"}, files=["a.png"])


def answers(folder: Path, generation: int = 1) -> set[str | None]:
    """What those say who may read at any time."""
    return {how_run_ended(folder).status, Run(folder).status, read_ending(folder, generation).status}


def files_say(folder: Path) -> set[str]:
    """What stands in the files, for programs that read them on their own."""
    texts = {json.loads((folder / name).read_text())["status"] for name in ("summary.json", "training_ended.json")}
    return {*texts, json.loads((folder / "run.json").read_text())["training"], ended(folder)[-1]["status"]}


def ended(folder: Path) -> list[dict[str, Any]]:
    return events_in(folder, "run_ended", "supervisor")


@pytest.mark.parametrize("writes", range(5))
@pytest.mark.parametrize("status", STATUSES)
def test_a_kill_between_any_two_writes_ends_in_one_answer(status: str, writes: int, tmp_path: Path, cuts: Cuts) -> None:
    record = started(tmp_path)
    cuts.cut(writes)
    with pytest.raises(Killed):
        write_end(tmp_path, end_of(status), record)
        raise Killed  # after the last write nothing is left to cut
    assert cuts.names == ORDER[:writes]
    assert answers(tmp_path) == {status if writes else "running"}
    cuts.cut(None)
    settle(tmp_path)
    expected = status if writes else "interrupted"
    assert answers(tmp_path) == files_say(tmp_path) == {expected}
    (line,) = ended(tmp_path)
    assert line["recorded"] == STATUS[expected]
    if writes:
        assert Run(tmp_path).metrics == {"eval/loss": 0.5}
        assert (line["tags"], line["files"]) == ({"strategy": "default"}, ["a.png"])


@pytest.mark.parametrize("writes", range(5))
@pytest.mark.parametrize("of_end", range(4))
def test_a_kill_of_who_settles_it_changes_no_answer(of_end: int, writes: int, tmp_path: Path, cuts: Cuts) -> None:
    record = started(tmp_path)
    for kill, what in (
        (of_end, lambda: write_end(tmp_path, end_of("finished"), record)),
        (writes, lambda: settle(tmp_path)),
    ):
        cuts.cut(kill)
        with pytest.raises(Killed):
            what()
            raise Killed
    cuts.cut(None)
    settle(tmp_path)
    assert answers(tmp_path) == files_say(tmp_path) == {"finished" if of_end else "interrupted"}
    assert len(ended(tmp_path)) == 1


def test_the_line_in_the_journal_is_left_to_the_process_that_ships_it(tmp_path: Path) -> None:
    started(tmp_path)
    settle_files(tmp_path)
    assert answers(tmp_path) == {"interrupted"} and not ended(tmp_path)
    settle(tmp_path)
    (line,) = ended(tmp_path)
    assert (line["status"], line["recorded"]) == ("interrupted", "SCHEDULED")
    assert line["files"] == ["config.yaml", "summary.json", "learning_curves.png"]


def test_what_is_settled_is_left_alone(tmp_path: Path, cuts: Cuts) -> None:
    write_end(tmp_path, end_of("finished"), started(tmp_path))
    cuts.cut(None)
    settle(tmp_path)
    assert cuts.names == []


@pytest.mark.parametrize("status", STATUSES)
def test_the_start_before_answers_until_run_json_tells_of_the_next(status: str, tmp_path: Path) -> None:
    write_end(tmp_path, end_of(status), started(tmp_path))
    write(tmp_path, "summary.json", RUNNING_SUMMARY)  # the first that a start writes
    assert how_run_ended(tmp_path).status == Run(tmp_path).status == status
    assert Run(tmp_path).metrics == {"eval/loss": 0.5}
    settle(tmp_path)
    assert files_say(tmp_path) == {status} and len(ended(tmp_path)) == 1
    record = RunRecord.read(tmp_path)
    record.generation, record.training, record.ending = 2, "running", {}
    write(tmp_path, "summary.json", RUNNING_SUMMARY)
    record.save(tmp_path)  # the second, before the journal has the start
    assert answers(tmp_path, 2) == {"running"}
    settle(tmp_path)
    assert answers(tmp_path, 2) == {"interrupted"} and len(ended(tmp_path)) == 1


def test_a_start_that_has_undone_itself_is_noted_as_one(tmp_path: Path) -> None:
    write_end(tmp_path, end_of("finished"), started(tmp_path))
    note_of_run(tmp_path, RUN_STARTED, command="train", name="n", params={}, tags={}, generation=2)
    settle(tmp_path)
    assert files_say(tmp_path) == {"finished"}
    assert [(line["is_kept"], line["files"]) for line in ended(tmp_path)] == [(False, ["a.png"]), (True, [])]


@pytest.mark.parametrize("command", ["train", "evaluate", "sweep"])
def test_another_start_that_was_killed_changes_nothing_about_the_run(command: str, tmp_path: Path) -> None:
    write_end(tmp_path, end_of("finished"), started(tmp_path))
    note_start(tmp_path, command=command)  # of a script, a reader or a sweep, whose line has no number
    settle(tmp_path)
    assert answers(tmp_path) == {"finished"}
    assert [line["status"] for line in ended(tmp_path)] == ["finished", "interrupted"]


def test_an_evaluator_learns_the_end_of_its_own_start_alone(tmp_path: Path) -> None:
    RunRecord(3, "failed").save(tmp_path)
    assert read_ending(tmp_path, 3).status == read_ending(tmp_path, 2).status == "failed"
    assert read_ending(tmp_path, 4).status == "running"
    assert read_ending(tmp_path).status == "running"  # of a script, which has no run.json
    write_ending(tmp_path, "stopped_early", 7, 3)
    assert read_ending(tmp_path, 3).status == "stopped_early"


# --- runs of earlier versions -----------------------------------------------------------------------------------------

OF_AA67824: dict[str, Any] = {"mlflow_run_id": None, "offsets": {}, "last_steps": {}, "trackers": {}, "is_held": False}
ENDED = {**RUNNING_SUMMARY, "metrics": {"eval/loss": 0.5}}


@pytest.mark.parametrize(
    ("record", "summary", "status", "in_summary", "settled"),
    [
        ({**OF_AA67824, "generation": 1, "training": "finished"}, "finished", "finished", "finished", "finished"),
        ({"generation": 1, "training": "failed", "drawn_seed": 3}, "failed", "failed", "failed", "failed"),
        ({"generation": 2, "training": "interrupted"}, "interrupted", *["interrupted"] * 3),
        ({"generation": 2, "training": "running"}, "running", "running", "running", "interrupted"),
        ({"generation": 2, "training": "running"}, "interrupted", *["interrupted"] * 3),
        ({"generation": 2, "training": "finished"}, "running", *["finished"] * 3),
        ({"generation": 2, "training": "finished"}, "upload_incomplete", "finished", *["upload_incomplete"] * 2),
        (None, "failed", "failed", "failed", "failed"),
        (None, "running", "running", "running", "interrupted"),
    ],
    ids=[
        "aa67824", "049eb36", "interrupted", "killed", "killed, and closed in the summary alone",
        "killed before its summary", "upload incomplete", "without run.json", "killed before run.json",
    ],
)  # fmt: skip
def test_a_run_of_an_earlier_version_is_read(
    record: dict[str, Any] | None, summary: str, status: str, in_summary: str, settled: str, tmp_path: Path
) -> None:
    if record is not None:
        write(tmp_path, "run.json", record)
    write(tmp_path, "summary.json", {**ENDED, "status": summary})
    state = how_run_ended(tmp_path)
    assert (state.status, state.summary["status"]) == (status, in_summary)
    assert state.summary["metrics"] == {"eval/loss": 0.5}
    settle(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == settled
    assert (how_run_ended(tmp_path).status, Run(tmp_path).status) == (
        settled if status == "running" else status,
        settled,
    )
    assert (tmp_path / "run.json").exists() == (record is not None) and not ended(tmp_path)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in OLD_RUNS.glob("*/run.json")))
def test_a_run_that_an_earlier_version_left_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(OLD_RUNS / name, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert how_run_ended(folder).status == "finished"
    assert how_run_ended(folder).summary == json.loads((folder / "summary.json").read_text())
    settle(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_start_of_an_earlier_version_that_was_killed_was_interrupted(tmp_path: Path) -> None:
    started(tmp_path)
    (tmp_path / "events.supervisor-0.jsonl").unlink()
    note_start(tmp_path)  # without a number
    settle(tmp_path)
    assert files_say(tmp_path) == {"interrupted"}


def test_nothing_was_trained_in_a_folder_that_was_only_evaluated(tmp_path: Path) -> None:
    assert how_run_ended(tmp_path).status is None and how_run_ended(tmp_path).summary == {}
    RunRecord().save(tmp_path)
    write(tmp_path, "summary.json", {"command": "evaluate", "status": "failed"})
    note_start(tmp_path, command="evaluate")
    note_end(tmp_path, "failed")
    settle(tmp_path)
    assert (how_run_ended(tmp_path).status, Run(tmp_path).status) == (None, "failed")


@pytest.mark.parametrize("record", ['{"generation": "many"}', '{"training": 3}', '{"ending": []}', "{broken"])
def test_a_damaged_run_json_leaves_the_answer_to_the_summary(record: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(record)
    write(tmp_path, "summary.json", {**ENDED, "status": "finished"})
    assert how_run_ended(tmp_path).status == "finished"
