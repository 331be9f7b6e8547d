"""Runs in MLflow: what is recorded, in which database, and under which status."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from runner.tracking import (
    MlflowTracker,
    NullTracker,
    Point,
    build_tracker,
    clean_name,
    points_of,
    sqlite_path,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the file: making one takes a second."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def run_of(tracker: MlflowTracker, run_id: str) -> Any:
    return MlflowClient(tracking_uri=tracker.uri).get_run(run_id)


def test_records_params_metrics_tags_files_and_the_status(uri: str, tmp_path: Path) -> None:
    tracker = MlflowTracker(uri, "records")
    run_id = tracker.start(None, "first", {"train.max_steps": 10, "a@b": None}, {"strategy": "default"})
    assert run_id is not None
    tracker.log_points([Point("train/loss", 0.5, 1, 1000.5), Point("train/loss", 0.25, 2, 1001.0)])
    (tmp_path / "summary.json").write_text("{}")
    tracker.log_file(tmp_path / "summary.json")
    tracker.set_tags({"status": "finished"})
    tracker.end("FINISHED")

    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(run_id)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.max_steps": "10", "a_b": "None"}
    assert run.data.tags["strategy"] == "default" and run.data.tags["status"] == "finished"
    assert run.data.tags["mlflow.user"]
    history = client.get_metric_history(run_id, "train/loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [(1, 0.5, 1000500), (2, 0.25, 1001000)]
    assert [file.path for file in client.list_artifacts(run_id)] == ["summary.json"]


def test_the_artifacts_are_beside_the_database_wherever_the_reader_is(uri: str) -> None:
    tracker = MlflowTracker(uri, "my experiment")
    run_id = tracker.start(None, "x", {}, {})
    assert run_id is not None
    location = run_of(tracker, run_id).info.artifact_uri
    assert location.startswith(f"file://{Path(uri.removeprefix('sqlite:///')).parent}/mlartifacts/my_experiment/")


def test_going_on_keeps_the_run_and_turns_changed_params_into_tags(uri: str) -> None:
    first = MlflowTracker(uri, "resumed")
    run_id = first.start(None, "x", {"a": 1, "b": 2}, {})
    first.end("FAILED")
    again = MlflowTracker(uri, "resumed")
    assert again.start(run_id, "x", {"a": 1, "b": 3, "c": 4}, {"command": "again"}) == run_id
    assert run_id is not None
    run = run_of(again, run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"a": "1", "b": "2", "c": "4"}
    assert run.data.tags["changed.b"] == "2 -> 3"
    assert run.data.tags["command"] == "again"


def test_a_run_that_is_not_in_the_database_is_begun_anew(uri: str) -> None:
    tracker = MlflowTracker(uri, "lost")
    run_id = tracker.start("0" * 32, "x", {}, {})
    assert run_id is not None and run_id != "0" * 32


def test_many_params_and_metrics_fit(uri: str) -> None:
    tracker = MlflowTracker(uri, "many")
    run_id = tracker.start(None, "x", {f"p{n}": n for n in range(250)}, {})
    tracker.log_points([Point("m", float(n), n, 1.0) for n in range(2300)])
    assert run_id is not None
    run = run_of(tracker, run_id)
    assert len(run.data.params) == 250
    assert run.data.metrics["m"] == 2299.0


def test_shipping_the_same_points_twice_stores_them_once(uri: str) -> None:
    tracker = MlflowTracker(uri, "twice")
    run_id = tracker.start(None, "x", {}, {})
    for _ in range(2):
        tracker.log_points([Point("m", 1.0, 1, 1.0), Point("m", 2.0, 2, 2.0)])
    assert run_id is not None
    assert len(MlflowClient(tracking_uri=uri).get_metric_history(run_id, "m")) == 2


def test_nan_is_recorded_as_nan(uri: str) -> None:
    tracker = MlflowTracker(uri, "nan")
    run_id = tracker.start(None, "x", {}, {})
    tracker.log_points([Point("m", math.nan, 1, 1.0)])
    assert run_id is not None
    assert math.isnan(run_of(tracker, run_id).data.metrics["m"])


def test_several_first_starts_on_a_fresh_database_all_succeed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.tracking import build_tracker\n"
        "t = build_tracker('mlflow', None, None, {}, Path('.').resolve())\n"
        "print(t.start(None, sys.argv[1], {'a': 1}, {}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    starts = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    run_ids = {start.communicate(timeout=120)[0].strip() for start in starts}
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert len(run_ids) == 3


def test_the_null_tracker_records_nothing() -> None:
    tracker = NullTracker()
    assert tracker.start(None, "x", {}, {}) is None
    tracker.log_points([Point("m", 1.0, 1, 1.0)])
    tracker.set_tags({})
    tracker.log_file(Path("x"))
    tracker.end("FINISHED")


def test_the_uri_is_config_then_environment_then_a_database_here() -> None:
    here = Path("/work/dir")
    env = {"MLFLOW_TRACKING_URI": "http://server:5000", "MLFLOW_EXPERIMENT_NAME": "from env"}

    def built(uri: str | None, experiment: str | None, env: dict[str, str]) -> tuple[str, str]:
        tracker = build_tracker("mlflow", uri, experiment, env, here)
        assert isinstance(tracker, MlflowTracker)
        return tracker.uri, tracker._experiment

    assert built(None, None, {}) == ("sqlite:////work/dir/mlflow.db", "runner")
    assert built(None, None, env) == ("http://server:5000", "from env")
    assert built("sqlite:///x.db", "mine", env) == ("sqlite:////work/dir/x.db", "mine")
    assert built("sqlite:////abs/x.db", None, {}) == ("sqlite:////abs/x.db", "runner")
    assert isinstance(build_tracker("none", None, None, {}, here), NullTracker)


def test_only_metric_lines_have_points() -> None:
    assert points_of({"time": 2.0, "event": "result", "metrics": {"eval/loss": 1.0}}) == []
    line = {"time": 2.0, "step": 3, "metrics": {"a": 1.0, "b": 2.0}}
    assert points_of(line) == [Point("a", 1.0, 3, 2.0), Point("b", 2.0, 3, 2.0)]


def test_names_are_made_of_what_mlflow_takes() -> None:
    assert clean_name("eval_val/accuracy@k#1") == "eval_val/accuracy_k_1"
    assert sqlite_path("http://x") is None
