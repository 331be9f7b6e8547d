"""RunConfig(tracking=...): what a script's Estimator does is recorded as on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import runner
from runner import Estimator, EvalSpec, RunConfig, TrackingConfig, TrainSpec, train_and_evaluate
from runner.distribute.cluster import Cluster
from runner.tracking import shipping
from runner.tracking.backends import session
from runner.tracking.run_record import Shipped
from tests.support.jobs import serving_input_receiver_fn
from tests.support.journal import journal_file, journal_of, recorded
from tests.support.line import line, points
from tests.support.messages import Messages
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]

OWN = """
import json, os

class Records:
    def __init__(self, path):
        self.file = open(path, "a")

    def note(self, *what):
        print(json.dumps(what), file=self.file, flush=True)

    def start(self, run_id, name, params, tags):
        self.note("start", run_id, name, params.get("train.max_steps"), os.getpid())
        return "mine"

    def log_points(self, points):
        for one in points:
            self.note("point", one.name, one.step)

    def log_model(self, model):
        self.note("model", model.name)

    def end(self, status):
        self.note("end", status)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    yield tmp_path
    session.wait_until_recorded()


def noted(folder: Path) -> list[list[Any]]:
    return [json.loads(text) for text in (folder / "own.txt").read_text().splitlines()]


def tags_in(folder: Path) -> dict[str, str]:
    return dict(pd.read_csv(folder / "run" / "tracking" / "tags.csv", index_col="name")["value"])


@pytest.mark.slow
@pytest.mark.processes
def test_train_and_evaluate_and_what_follows_is_one_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = {"fn": "own.Records", "params": {"path": "own.txt"}}
    tracking = TrackingConfig(["csv", own], tags={"team": "a"})
    config = RunConfig(save_checkpoints_steps=2, log_step_count_steps=1, tracking=tracking, progress="plain")

    def estimator() -> Estimator:
        return Estimator(line, folder / "run", config, {"learning_rate": 0.02, "api_key": "hunter22"})

    train_and_evaluate(estimator(), TrainSpec(points(repeat=True), 4), EvalSpec(points()))
    session.wait_until_recorded()
    said = capfd.readouterr().err
    assert "step 4/4" in said and "csv: run/tracking/metrics.csv" in said
    table = pd.read_csv(folder / "run" / "tracking" / "metrics.csv", index_col="step")
    assert list(table["train/loss"].dropna().index) == [1, 2, 3, 4]
    assert list(table["eval/mae"].dropna().index) == [2, 4]
    params = pd.read_csv(folder / "run" / "tracking" / "params.csv", index_col="name")["value"]
    wanted = {"model.params.learning_rate": "0.02", "model.params.api_key": "***", "train.max_steps": "4"}
    assert {name: params[name] for name in wanted} == wanted and params["checkpoint.save_steps"] == "2"
    tags = tags_in(folder)
    assert (tags["status"], tags["team"], tags["strategy"], tags["num_replicas"]) == ("finished", "a", "default", "1")
    assert tags["version.tensorflow"].startswith("2.")
    before = noted(folder)
    assert before[0][:4] == ["start", None, "run", 4] and before[-1] == ["end", "FINISHED"]

    again = estimator()
    again.train(points(repeat=True), steps=2)
    again.evaluate(points(), name="test")
    again.export_saved_model(folder / "exported", serving_input_receiver_fn)
    with pytest.raises(ZeroDivisionError):
        again.train(lambda: 1 / 0, max_steps=9)
    in_cluster = config.replace(cluster=Cluster("evaluator", 0, {"chief": ("a:1",), "evaluator": ("b:1",)}))
    Estimator(line, folder / "run", in_cluster).evaluate(points(), name="beside")
    session.wait_until_recorded()
    after = noted(folder)[len(before) :]
    starts = [call for call in after if call[0] == "start"]
    assert [call[1:4] for call in starts] == [["mine", "run", None]] * 5
    assert len({call[4] for call in starts}) == 1, "one process ships all of a script"
    assert [call[1:] for call in after if call[0] == "end"] == [["FINISHED"]] * 5, "a start without a step"
    assert "failed" in tags_in(folder)["last_failed_start"] and tags_in(folder)["status"] == "finished"
    assert [call[1] for call in after if call[0] == "model"] == ["line-exported"]
    steps = [step for kind, name, *step in noted(folder) if kind == "point" and name == "train/loss"]
    assert steps == [[1], [2], [3], [4], [5], [6]]
    table = pd.read_csv(folder / "run" / "tracking" / "metrics.csv", index_col="step")
    assert list(table.index) == [1, 2, 3, 4, 5, 6] and list(table["eval_test/mae"].dropna().index) == [6]
    assert list(table["eval_beside/mae"].dropna().index) == [6], "what the evaluator's own journal holds"
    assert journal_file(folder / "run", "evaluator").exists()


@pytest.mark.processes
@pytest.mark.usefixtures("mlflow_database")
def test_mlflow_has_the_run_of_a_script_that_fails(folder: Path) -> None:
    from mlflow import MlflowClient

    class Stop(runner.Hook):
        def after_step(self, run: Any, result: Any) -> None:
            raise RuntimeError("the end")

    config = RunConfig(log_step_count_steps=1, tracking=TrackingConfig("mlflow", experiment="e", run_name="mine"))
    estimator = Estimator(line, folder / "run", config.replace(progress="off"))
    with pytest.raises(RuntimeError, match="the end"):
        estimator.train(points(repeat=True), max_steps=4, hooks=[Stop()])
    session.wait_until_recorded()
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["status"]) == ("mine", "FAILED", "failed")
    assert run.data.metrics["train/loss"] > 0 and run.data.params["train.max_steps"] == "4"
    assert run.inputs.dataset_inputs[0].dataset.name == "points"


def test_without_tracking_there_is_no_journal_and_with_none_no_process(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "ShippingProcess", None)  # to start one fails
    Estimator(line, folder / "one", RunConfig()).train(points(), steps=2)
    assert not list((folder / "one").glob("*.jsonl")) and capsys.readouterr().err == ""
    Estimator(line, folder / "two", RunConfig(tracking="none", log_step_count_steps=1)).train(points(), steps=2)
    lines = recorded(folder / "two")
    assert [one["step"] for one in lines if "train/loss" in one.get("metrics", {})] == [1, 2]
    assert "step 2/2" in capsys.readouterr().err and not (folder / "two" / "tracking").exists()
    given = journal_of(folder / "given.jsonl")
    Estimator(line, folder / "three", RunConfig(tracking="none"), journal=given).train(points(), steps=2)
    assert not list((folder / "three").glob("*.jsonl")) and recorded(folder / "given.jsonl")


@pytest.mark.parametrize(
    "tracking",
    [
        "mlfow",
        [],
        TrackingConfig(["csv", "csv"]),
        True,
    ],
    ids=["mlfow", "none", "csv twice", "true"],
)
def test_what_is_no_tracker_is_refused(tracking: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        RunConfig(tracking=tracking)


@pytest.mark.processes
def test_a_script_that_was_killed_leaves_a_run_that_was_interrupted(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import os, signal, sys; from pathlib import Path\n"
        "from runner.config.schema import TrackingConfig\n"
        "from runner.tracking.backends.session import ScriptRecord\n"
        "from tests.support.journal import journal_of\n"
        "journal = journal_of(Path('run').absolute())\n"
        "record = ScriptRecord(TrackingConfig('csv'), Path('run').absolute(), journal, {}, {}, 'm', 'chief')\n"
        "with record.recording('train', trains=True):\n"
        "    journal.event('first_step', step=1)\n"
        "    journal.metrics(1, {'train/loss': 0.5})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "train.py"], env=env).returncode == -9
    wait_until(lambda: Shipped.read(folder / "run", "csv").is_complete(folder / "run") and bool(tags_in(folder)))
    assert tags_in(folder)["status"] == "interrupted" and tags_in(folder)["command"] == "train.py"
    assert (folder / "run" / "tracking" / "metrics.csv").read_text() == "step,train/loss\n1,0.5\n"
