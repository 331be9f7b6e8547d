"""Runs in MLflow: what is recorded, in which database, and under which status."""

from __future__ import annotations

import http.server
import importlib.machinery
import json
import math
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from runner.config.schema import TrackingConfig
from runner.tracking.mlflow_tracker import MlflowTracker, experiment_name, sqlite_path, tracking_uri
from runner.tracking.tracker import Point, Tracker, describe, points_of
from tests.support.messages import Messages
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]


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
    tracker.end("FINISHED", time.time())

    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(run_id)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.max_steps": "10"}
    assert run.data.tags["strategy"] == "default" and run.data.tags["status"] == "finished"
    assert run.data.tags["mlflow.user"]
    history = client.get_metric_history(run_id, "train/loss")
    assert [(m.step, m.value, m.timestamp) for m in history] == [(1, 0.5, 1000500), (2, 0.25, 1001000)]
    assert [file.path for file in client.list_artifacts(run_id)] == ["summary.json"]


@pytest.mark.parametrize(
    ("params", "metric", "ascending"),
    [
        ({}, "eval/loss", True),
        ({"sweep.metric": "eval/accuracy@5"}, "eval/accuracy_5", False),
        ({"checkpoint.keep_best.metric": "eval/auc"}, "eval/auc", False),
        ({"sweep.metric": "eval/auc", "sweep.mode": "min"}, "eval/auc", True),
    ],
    ids=["loss", "sweep", "best checkpoint", "mode"],
)
def test_the_address_shows_the_runs_of_the_experiment_best_first(
    params: dict[str, Any], metric: str, ascending: bool, uri: str
) -> None:
    tracker = MlflowTracker(uri, "addresses")
    assert tracker.address() is None
    run_id = tracker.start(None, "x", params, {})
    assert run_id is not None
    command, runs = (tracker.address() or "").splitlines()
    assert command == f"mlflow ui --backend-store-uri {uri}"
    experiment = MlflowClient(uri).get_experiment(run_of(tracker, run_id).info.experiment_id)
    page, _, key = runs.rpartition("=")
    where = f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs"
    assert page == f"{where}?workflowType=machine_learning&viewStateShareKey"
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
    assert (view["orderByKey"], view["orderByAsc"]) == (f"metrics.`{metric}`", ascending)
    assert {f"metrics.`{metric}`", "metrics.`eval/loss`", "metrics.`train/loss`"} <= set(view["selectedColumns"])


def test_where_an_experiment_cannot_be_changed_the_address_has_the_order(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise MlflowException("not yours", PERMISSION_DENIED)

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    tracker = MlflowTracker(uri, "of others")
    tracker.start(None, "x", {"sweep.metric": "eval/auc"}, {})
    order = "orderByKey=metrics.%60eval/auc%60&orderByAsc=false"
    assert (tracker.address() or "").endswith(f"/runs?workflowType=machine_learning&{order}")


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"sweep.metric": "eval/accuracy"},
        {"checkpoint.keep_best.metric": "eval/auc", "checkpoint.keep_best.mode": "min"},
    ],
    ids=["loss", "sweep", "best checkpoint"],
)
def test_a_command_that_reads_a_run_shows_the_runs_as_its_training_did(params: dict[str, Any], uri: str) -> None:
    training = MlflowTracker(uri, "read")
    run_id = training.start(None, "x", params, {})
    reader = MlflowTracker(uri, "read")
    assert run_id is not None and reader.join(run_id)
    assert reader.address() == training.address()
    again = MlflowTracker(uri, "read")
    again.start(run_id, "x", {**params, "checkpoint.keep_best.metric": "eval/f1", "sweep.metric": None}, {})
    assert reader.join(run_id)
    assert reader.address() == again.address()


def test_the_artifacts_are_beside_the_database_wherever_the_reader_is(uri: str) -> None:
    tracker = MlflowTracker(uri, "my experiment")
    run_id = tracker.start(None, "x", {}, {})
    assert run_id is not None
    location = run_of(tracker, run_id).info.artifact_uri
    assert location.startswith(f"file://{Path(uri.removeprefix('sqlite:///')).parent}/mlartifacts/my_experiment/")


def test_going_on_keeps_the_run_and_turns_changed_params_into_tags(uri: str) -> None:
    first = MlflowTracker(uri, "resumed")
    run_id = first.start(None, "x", {"a": 1, "b": 2}, {})
    first.end("FAILED", time.time())
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


def test_a_deleted_run_is_begun_anew(uri: str) -> None:
    first = MlflowTracker(uri, "deleted")
    run_id = first.start(None, "x", {}, {})
    assert run_id is not None
    MlflowClient(tracking_uri=uri).delete_run(run_id)
    again = MlflowTracker(uri, "deleted")
    assert again.start(run_id, "x", {}, {}) not in (None, run_id)


def test_a_start_that_failed_half_way_goes_on_with_the_run_that_it_made(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = MlflowTracker(uri, "half-way")
    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(tracker, "_log_params", lambda known, params: (_ for _ in ()).throw(ConnectionError()))
        tracker.start(None, "x", {"a": 1}, {})
    run_id = tracker.start(None, "x", {"a": 1}, {})
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("half-way")
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [run_id]
    assert client.get_run(run_id).data.params == {"a": "1"}


def test_a_run_began_when_its_tracker_was_made_not_when_the_server_came_back(uri: str) -> None:
    before = time.time()
    tracker = MlflowTracker(uri, "waited")
    after = time.time()
    wait_until(lambda: time.time() > after + 0.1)
    run_id = tracker.start(None, "x", {}, {})
    assert run_id is not None
    assert int(before * 1000) <= run_of(tracker, run_id).info.start_time <= after * 1000 + 1


def test_joining_a_run_leaves_its_params_tags_and_status_as_they_are(uri: str) -> None:
    first = MlflowTracker(uri, "joined")
    run_id = first.start(None, "x", {"a": 1}, {"command": "train"})
    assert run_id is not None
    first.end("FAILED", time.time())
    before = run_of(first, run_id)
    reader = MlflowTracker(uri, "joined")
    assert reader.join(run_id)
    reader.log_points([Point("eval/loss", 0.5, 3, 1.0)])
    after = run_of(reader, run_id)
    assert (after.info.status, after.info.end_time) == ("FAILED", before.info.end_time)
    assert (after.data.params, after.data.tags) == (before.data.params, before.data.tags)
    assert after.data.metrics == {"eval/loss": 0.5}
    assert not MlflowTracker(uri, "joined").join("0" * 32)


def test_many_params_and_metrics_fit(uri: str) -> None:
    tracker = MlflowTracker(uri, "many")
    run_id = tracker.start(None, "x", {f"p{n}": n for n in range(1200)}, {f"t{n}": "v" for n in range(250)})
    tracker.log_points([Point("m", float(n), n, 1.0) for n in range(2300)])
    assert run_id is not None
    run = run_of(tracker, run_id)
    assert len(run.data.params) == 1000
    assert run.data.tags["params_left_out"] == "200 params are left out; config.yaml has all"
    assert run.data.tags["t249"] == "v"
    assert run.data.metrics["m"] == 2299.0


@pytest.mark.parametrize(
    "text",
    ["", " ", ".", "..", "../x", "/a", "a/", "a//b", "a/./b", "a@b", "a\nb", "x" * 9000, "日本" * 4500, "\udc80", "\0"],
)
def test_any_text_can_be_a_name_or_a_value(text: str, uri: str) -> None:
    tracker = MlflowTracker(uri, "texts")
    run_id = tracker.start(None, text, {text: text, "b": None}, {text: text, "d": ""})
    tracker.log_points([Point(text, 1.0, 1, 1.0)])
    tracker.set_tags({text: text})
    assert run_id is not None
    run = run_of(tracker, run_id)
    assert len(run.data.params) == 1, "what is null is no parameter"
    assert list(run.data.metrics.values()) == [1.0]
    assert MlflowTracker(uri, "texts").start(run_id, text, {text: "changed" + text}, {}) == run_id
    assert len([tag for tag in run_of(tracker, run_id).data.tags if tag.startswith("changed.")]) == 1


def test_keys_that_become_the_same_stay_two(uri: str) -> None:
    tracker = MlflowTracker(uri, "same")
    long = "x" * 300
    run_id = tracker.start(None, "x", {"a@b": 1, "a#b": 2, long + "1": 3, long + "2": 4}, {})
    tracker.log_points([Point("m@1", 1.0, 1, 1.0), Point("m#1", 2.0, 1, 1.0)])
    assert run_id is not None
    run = run_of(tracker, run_id)
    assert sorted(run.data.params.values()) == ["1", "2", "3", "4"]
    assert sorted(run.data.metrics.values()) == [1.0, 2.0]


def test_the_users_own_name_in_a_tag_is_the_name(uri: str) -> None:
    tracker = MlflowTracker(uri, "named")
    run_id = tracker.start(None, "x", {}, {"mlflow.runName": "mine", "mlflow.user": "me"})
    assert run_id is not None
    run = run_of(tracker, run_id)
    assert (run.info.run_name, run.data.tags["mlflow.user"]) == ("mine", "me")


@pytest.mark.parametrize("name", ["it's", "a/b", "日本" * 50, "x" * 600, ".."])
def test_any_name_of_an_experiment_holds_runs_with_files(name: str, uri: str, tmp_path: Path) -> None:
    tracker = MlflowTracker(uri, name)
    run_id = tracker.start(None, "x", {}, {})
    (tmp_path / "f.txt").write_text("1")
    tracker.log_file(tmp_path / "f.txt")
    assert [file.path for file in MlflowClient(tracking_uri=uri).list_artifacts(run_id)] == ["f.txt"]


def test_a_deleted_experiment_is_named(uri: str, messages: Messages) -> None:
    MlflowTracker(uri, "gone").start(None, "x", {}, {})
    client = MlflowClient(tracking_uri=uri)
    number = client.get_experiment_by_name("gone").experiment_id
    client.delete_experiment(number)
    with messages.raised(ValueError, hide=rf"{uri}|(?<=-x ){number}\b"):
        MlflowTracker(uri, "gone").start(None, "x", {}, {})


@pytest.mark.parametrize("folder", slow_but(["a b", "a%20b", "a?b", "a#b"], "a%20b", "a?b"))
def test_the_database_is_in_the_folder_whatever_its_name(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    tracker = MlflowTracker(tracking_uri(TrackingConfig("mlflow"), {}, tmp_path / folder), "runner")
    assert sqlite_path(tracker.uri) == tmp_path / folder / "mlflow.db"
    tracker._connect()
    assert {path.name for path in (tmp_path / folder).iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def test_shipping_the_same_points_twice_stores_them_once(uri: str) -> None:
    tracker = MlflowTracker(uri, "twice")
    run_id = tracker.start(None, "x", {}, {})
    for _ in range(2):
        tracker.log_points([Point("m", 1.0, 1, 1.0), Point("m", 2.0, 2, 2.0)])
    assert run_id is not None
    assert len(MlflowClient(tracking_uri=uri).get_metric_history(run_id, "m")) == 2


def test_values_that_are_no_numbers_survive(uri: str) -> None:
    tracker = MlflowTracker(uri, "nan")
    run_id = tracker.start(None, "x", {}, {})
    tracker.log_points(
        [Point("nan", math.nan, 1, 1.0), Point("inf", math.inf, 1, 1.0), Point("low", -math.inf, 1, 1.0)]
    )
    assert run_id is not None
    metrics = run_of(tracker, run_id).data.metrics
    assert math.isnan(metrics["nan"])
    assert (metrics["inf"], metrics["low"]) == (sys.float_info.max, -sys.float_info.max)  # MLflow's word for them


def test_logging_is_synchronous_whatever_the_environment_says(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    tracker = MlflowTracker(uri, "synchronous")
    run_id = tracker.start(None, "x", {"a": 1}, {})
    tracker.log_points([Point("m", 1.0, 1, 1.0)])
    tracker.set_tags({"status": "finished"})
    assert run_id is not None
    data = run_of(tracker, run_id).data
    assert (data.params, data.metrics, data.tags["status"]) == ({"a": "1"}, {"m": 1.0}, "finished")


def test_finds_the_other_runs_of_a_host_and_settles_those_that_still_run(uri: str) -> None:
    def started(name: str, host: str) -> tuple[MlflowTracker, str]:
        tracker = MlflowTracker(uri, "hosts")
        run_id = tracker.start(None, name, {}, {"host": host, "lock": f"/{name}/.lock"})
        assert run_id is not None
        return tracker, run_id

    _, here = started("here", "o'hara")
    started("elsewhere", "other")
    ended, ended_id = started("ended", "o'hara")
    ended.end("FINISHED", time.time())
    tracker, _ = started("me", "o'hara")
    assert tracker.running_on("o'hara") == {}  # MLflow's filters know no such text
    _, here = started("here", "host.a-1")
    tracker, _ = started("me", "host.a-1")
    assert tracker.running_on("host.a-1") == {here: "/here/.lock"}

    tracker.settle(here, "SCHEDULED", {"status": "interrupted"}, 2000.5)
    run = run_of(tracker, here)
    assert (run.info.status, run.info.end_time, run.data.tags["status"]) == ("SCHEDULED", 2000500, "interrupted")
    tracker.settle(ended_id, "SCHEDULED", {"status": "interrupted"}, 1.0)
    assert run_of(tracker, ended_id).info.status == "FINISHED"
    assert "status" not in run_of(tracker, ended_id).data.tags


def test_a_parent_and_children_share_a_process(uri: str) -> None:
    parent = MlflowTracker(uri, "family")
    parent_id = parent.start(None, "sweep", {}, {})
    assert parent_id is not None
    ids: dict[str, str | None] = {}

    def child(name: str) -> None:
        tracker = MlflowTracker(uri, "family")
        ids[name] = tracker.start(None, name, {"name": name}, {"mlflow.parentRunId": parent_id})
        tracker.log_points([Point("m", float(n), n, 1.0) for n in range(20)])
        tracker.end("FINISHED", time.time())

    threads = [threading.Thread(target=child, args=(f"child {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parent.log_points([Point("best/eval/loss", 0.5, 20, 2.0)])
    parent.end("FINISHED", time.time())
    assert len(set(ids.values())) == 4
    for name, run_id in ids.items():
        run = run_of(parent, str(run_id))
        assert (run.info.run_name, run.data.params, run.data.metrics) == (name, {"name": name}, {"m": 19.0})
        assert run.data.tags["mlflow.parentRunId"] == parent_id
    assert run_of(parent, parent_id).data.metrics == {"best/eval/loss": 0.5}


@pytest.mark.processes
@pytest.mark.slow
def test_several_first_starts_on_a_fresh_database_all_succeed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.config.schema import TrackingConfig\n"
        "from runner.tracking.mlflow_tracker import MlflowTracker, tracking_uri\n"
        "from runner.tracking.tracker import Point\n"
        "t = MlflowTracker(tracking_uri(TrackingConfig(), {}, Path('.').resolve()), 'runner')\n"
        "print(t.start(None, sys.argv[1], {'a': 1}, {}))\n"
        "t.log_points([Point('m', 1.0, 1, 1.0)]); t.end('FINISHED', 2.0)"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(n)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    said = [start.communicate(timeout=240) for start in starts]
    assert [(start.returncode, err) for start, (_, err) in zip(starts, said, strict=True)] == [(0, "")] * 4
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = [client.get_run(out.strip()) for out, _ in said]
    assert {run.info.run_name for run in runs} == {"0", "1", "2", "3"}
    assert {run.info.experiment_id for run in runs} == {runs[0].info.experiment_id}
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_went_wrong_is_one_line_without_passwords() -> None:
    assert describe(ValueError("no database at http://me:hunter2@host\nlong text")) == "no database at http://***@host"
    assert describe(TimeoutError()) == "TimeoutError"
    assert describe(ValueError("x" * 500)) == "x" * 399 + "…"


def test_a_server_that_is_away_is_named_with_the_reason(messages: Messages) -> None:
    with pytest.raises(Exception) as raised:
        MlflowTracker("http://me:hunter2@127.0.0.1:9", "away").start(None, "x", {}, {})
    messages.same(type(raised.value).__name__, describe(raised.value))


@pytest.mark.parametrize(
    "status, words",
    [
        (401, "words of MLflow"), (403, "words of MLflow"), (503, "words of MLflow"),
        (403, "Invalid Host header - possible DNS rebinding attack detected"),
    ],
)  # fmt: skip
def test_a_server_that_refuses_says_why(status: int, words: str, messages: Messages) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(words.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(Exception) as raised:
            MlflowTracker(f"http://me:hunter2@127.0.0.1:{server.server_port}", "refused").start(None, "x", {}, {})
        server.shutdown()
    messages.same(type(raised.value).__name__, describe(raised.value), hide=r"(?<=127\.0\.0\.1:)\d+")


def test_files_in_s3_without_its_library_are_refused_before_a_run_is_begun(
    uri: str, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("in the bucket", artifact_location="s3://bucket/files")
    with monkeypatch.context() as patch, pytest.raises(ModuleNotFoundError) as raised:
        patch.setitem(sys.modules, "boto3", None)
        MlflowTracker(uri, "in the bucket").start(None, "x", {}, {})
    messages.same("ModuleNotFoundError", describe(raised.value))
    assert client.search_runs([experiment]) == []
    monkeypatch.setitem(sys.modules, "boto3", types.ModuleType("boto3", None))
    sys.modules["boto3"].__spec__ = importlib.machinery.ModuleSpec("boto3", None)
    assert MlflowTracker(uri, "in the bucket").start(None, "x", {}, {}) is not None


def test_a_tracker_that_overrides_nothing_records_nothing() -> None:
    tracker = Tracker()
    assert tracker.start(None, "x", {}, {}) is None
    tracker.log_points([Point("m", 1.0, 1, 1.0)])
    tracker.set_tags({})
    tracker.log_file(Path("x"))
    tracker.end("FINISHED", time.time())
    assert not tracker.join("x") and tracker.running_on("host") == {}
    tracker.settle("x", "KILLED", {}, 1.0)


def test_the_uri_is_config_then_environment_then_a_database_here() -> None:
    here = Path("/work/dir")
    env = {"MLFLOW_TRACKING_URI": "http://server:5000", "MLFLOW_EXPERIMENT_NAME": "from env"}

    def built(uri: str | None, experiment: str | None, env: dict[str, str]) -> tuple[str, str]:
        settings = TrackingConfig("mlflow", uri, experiment)
        return tracking_uri(settings, env, here), experiment_name(settings, env)

    assert built(None, None, {}) == ("sqlite:////work/dir/mlflow.db", "runner")
    assert built(None, None, env) == ("http://server:5000", "from env")
    assert built("sqlite:///x.db", "mine", env) == ("sqlite:////work/dir/x.db", "mine")
    assert built("sqlite:////abs/x.db", None, {}) == ("sqlite:////abs/x.db", "runner")


def test_only_metric_lines_have_points() -> None:
    assert points_of({"time": 2.0, "event": "result", "metrics": {"eval/loss": 1.0}}) == []
    line = {"time": 2.0, "step": 3, "metrics": {"a": 1.0, "b": 2.0}}
    assert points_of(line) == [Point("a", 1.0, 3, 2.0), Point("b", 2.0, 3, 2.0)]


def test_only_sqlite_has_a_path() -> None:
    assert sqlite_path("http://x") is None
    assert sqlite_path("sqlite:////a/b%20c.db?timeout=9") == Path("/a/b c.db")
