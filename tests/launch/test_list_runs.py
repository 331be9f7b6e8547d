"""command=list shows all runs below a folder, newest first, also those that did not finish."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from runner.config.schema import Config
from runner.launch.environment import list_runs
from runner.launch.environment.runs import run_in
from runner.tracking.run_record import RunRecord
from tests.launch.test_best_runs import ROOT, write_run
from tests.launch.test_sweep import Outcome, sweep  # noqa: F401


def listed(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", "command=list", *words]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=home, env=given, capture_output=True, text=True, timeout=150)


def note_start(folder: Path, status: str, started: float, secs: float | None = None) -> None:
    """Write what the supervisor writes of a start, and of its end after `secs`."""
    ending = {} if secs is None else {"status": status, "recorded": "FINISHED", "time": started + secs}
    RunRecord(1, status, None, ending, started).save(folder)


def test_it_lists_runs_of_any_status_newest_first(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    write_run(outputs / "old", "train.max_steps=5", "model.params.rate=0.1", loss=0.1)
    write_run(outputs / "new", "train.max_steps=5", "model.params.db_password=swordfish", accuracy=0.5, loss=0.25)
    write_run(outputs / "nan", "train.max_steps=5", loss="nan")
    for name in ("runs", "killed", "killed/.unsent"):
        write_run(outputs / name, "train.max_steps=5", status="running")
    for end in ("index", "data-00000-of-00001"):
        (outputs / "killed" / f"model.ckpt-7.{end}").touch()
    summary = {"status": "running", "command": "train", "metrics": {}}
    (outputs / "killed" / "summary.json").write_text(json.dumps(summary))
    (outputs / "killed" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    now = time.time()
    note_start(outputs / "old", "finished", now - 5000, 1000.0)
    note_start(outputs / "new", "finished", now - 100, 61.0)
    note_start(outputs / "nan", "failed", now - 200, 2.0)
    note_start(outputs / "killed", "running", now - 300)
    note_start(outputs / "runs", "running", now - 60)
    before = {path: path.stat().st_mtime_ns for path in outputs.rglob("*") if path.is_file()}
    with FileLock(outputs / "runs" / ".lock"):
        result = listed(tmp_path)
        answer = json.loads(listed(tmp_path, "run.output=json").stdout)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        ["outputs/runs", "running"], ["outputs/new", "finished"], ["outputs/nan", "finished"],
        ["outputs/killed", "killed"], ["outputs/old", "finished"],
    ]  # fmt: skip
    of_new = next(run for run in answer["runs"] if run["model_dir"] == "outputs/new")
    assert (of_new["metric"], of_new["value"], of_new["step"]) == ("eval/loss", 0.25, 100)
    assert of_new["secs"] == 61.0
    assert of_new["settings"] == ["model.params.db_password=***"], "what all have is left out"
    of_killed = next(run for run in answer["runs"] if run["model_dir"] == "outputs/killed")
    assert (of_killed["step"], of_killed["value"], of_killed["secs"]) == (7, None, None)
    of_running = next(run for run in answer["runs"] if run["model_dir"] == "outputs/runs")
    assert 60 <= of_running["secs"] < 200
    after = {path: path.stat().st_mtime_ns for path in outputs.rglob("*") if path.is_file()}
    assert after == {**before, outputs / "runs" / ".lock": after[outputs / "runs" / ".lock"]}, "nothing is changed"


def test_no_journal_is_read_however_long_it_is(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "one", "train.max_steps=5", loss=0.1)
    os.mkfifo(tmp_path / "one" / "events.chief-0.jsonl")  # who opened it would wait for ever
    answer = list_runs.show(Config(model_dir=str(tmp_path)), {})
    assert [run["value"] for run in answer["runs"]] == [0.1]


def test_an_empty_folder_and_one_that_is_not_there_have_no_runs(tmp_path: Path) -> None:
    for words in ([], ["model_dir=nowhere"]):
        result = listed(tmp_path, *words, "run.output=json")
        assert (result.returncode, json.loads(result.stdout)["runs"]) == (0, [])


def test_a_run_takes_the_time_of_all_its_starts(sweep: Callable[..., Outcome]) -> None:  # noqa: F811
    words = ("model.params.learning_rate=0.1,0.2",)
    first = sweep("time.sleep(0.3)\nsys.exit(1)", *words)
    (folder, _) = sorted(path.parent for path in first.directory.glob("*/run.json"))
    before = run_in(folder)
    assert before.status == "failed"
    assert before.secs is not None
    assert 0.3 < before.secs < 60
    again = sweep("time.sleep(0.3)\nfinish()", *words)
    after = run_in(folder)
    assert (again.code, after.status) == (0, "finished")
    assert after.secs is not None
    assert after.secs > before.secs + 0.3
    assert after.started > before.started
