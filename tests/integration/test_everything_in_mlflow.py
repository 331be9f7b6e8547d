"""All that a user logs is in the run of MLflow: of the runner, of MLflow's own functions, files, images, inputs."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient

from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL
from tests.support.line import steps_of
from tests.support.messages import Messages
from tests.support.screen import line_of

SETTINGS = [*(one for one in SMALL if not one.startswith("tracking=")), "model_dir=run"]


OWN = """
import sys

class Lines:
    def __init__(self, path):
        self.file = open(path, "a")

    def start(self, run_id, name, params, tags):
        print("start", run_id, name, params["model.params.start"], tags["status" if run_id else "host"], file=self.file)
        return "mine"

    def log_points(self, points):
        for one in points:
            print("point", one.name, one.step, one.value, file=self.file, flush=True)

    def end(self, status):
        print("end", status, file=self.file, flush=True)
        sys.exit(3)
"""


@pytest.fixture(scope="module")
def tracked(
    tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path, command_line: CommandLine
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tracked")
    shutil.copy(empty_mlflow_database, folder / "mlflow.db")
    (folder / "own.py").write_text(OWN)
    words = [
        *SETTINGS, "tracking.backend=[mlflow,csv,{fn: own.Lines, params: {path: own.txt}}]", "+model.params.start=0.0",
        "model.fn=tests.support.tracked.model_fn", "train.log_steps=2", "train.summary_steps=2",
        "export.exporters=[final]", "export.register=lines", "export.alias=champion", "train.max_steps=4",
        "eval.hooks=[{fn: runner.ConfusionMatrix, params: {predictions: predictions}}]",
    ]  # fmt: skip
    done = command_line(*words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return {"done": done, "client": client, "runs": runs, "folder": folder, "words": words}


@pytest.mark.slow
def test_the_run_has_its_name_its_command_its_params_and_its_metrics(tracked: dict[str, Any]) -> None:
    (run,) = tracked["runs"]
    (model_dir,) = (path.parent for path in tracked["folder"].glob("*/summary.json"))
    assert json.loads((model_dir / "summary.json").read_text())["mlflow_run_id"] == run.info.run_id
    assert run.info.run_name == model_dir.name
    assert shlex.split(run.data.tags["command"]) == ["runner", *tracked["words"]]
    assert (run.data.params["model.params.start"], run.data.params["train.max_steps"]) == ("0.0", "4")
    assert {"eval/mae", "eval/loss", "train/loss", "train/steps_per_sec"} <= set(run.data.metrics)


def test_what_user_code_logs_to_mlflow_joins_the_run(tracked: dict[str, Any]) -> None:
    assert len(tracked["runs"]) == 1, "a stray run"
    (run,) = tracked["runs"]
    assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "finished")
    assert run.data.params["mine"] == "7" and run.data.metrics["own"] == 3.5
    assert sorted(path.name for path in tracked["folder"].iterdir() if path.name != "__pycache__") == [
        "mlartifacts", "mlflow.db", "mlflow.db.lock", "notes.txt", "own.py", "own.txt", "run",
    ]  # fmt: skip


def test_training_scalars_are_at_the_steps_they_belong_to(tracked: dict[str, Any]) -> None:
    run_id = tracked["runs"][0].info.run_id
    for name, steps in {"train/x": [1, 2, 4], "train/learning_rate": [1, 2, 4], "train/loss": [1, 2, 4]}.items():
        found = tracked["client"].get_metric_history(run_id, name)
        assert [one.step for one in found] == steps, name
    assert [one.value for one in tracked["client"].get_metric_history(run_id, "train/x")] == [1.5, 3.5, 7.5]
    of_hook = tracked["client"].get_metric_history(run_id, "train/last")
    assert [(one.step, one.value) for one in of_hook] == [(4, 1.25)]


def test_each_tracker_of_a_list_gets_the_same_and_one_that_fails_harms_none(
    tracked: dict[str, Any], messages: Messages
) -> None:
    folder, done = tracked["folder"], tracked["done"]
    table = pd.read_csv(folder / "run" / "tracking" / "metrics.csv", index_col="step")
    own = [line.split() for line in (folder / "own.txt").read_text().splitlines()]
    ends = [line for line in own if line[0] == "end"]
    points = {(name, int(step)): float(value) for kind, name, step, value in own[1 : -len(ends)]}
    assert own[0][:4] == ["start", "None", "run", "0.0"] and own[-len(ends) :] == [["end", "FINISHED"]] * len(ends)
    assert len(points) == len(own) - 1 - len(ends), "a point came twice"
    assert len(ends) > 1, "an end that fails is repeated"
    run_id = tracked["runs"][0].info.run_id
    for name in ("train/x", "train/loss", "eval/mae"):
        history = {one.step: one.value for one in tracked["client"].get_metric_history(run_id, name)}
        assert history and table[name].dropna().to_dict() == history, name
        assert {step: value for (one, step), value in points.items() if one == name} == history, name
    params = pd.read_csv(folder / "run" / "tracking" / "params.csv", index_col="name")["value"]
    assert params["train.max_steps"] == "4"
    for name in ("csv: ", "mlflow: "):
        messages.same("stdout", line_of(done.stdout, name))
    messages.same("stderr", line_of(done.stderr, "own.Lines"))


def test_params_are_those_that_are_set_and_the_config_is_an_artifact(tracked: dict[str, Any]) -> None:
    (run,) = tracked["runs"]
    assert "None" not in run.data.params.values() and run.data.params["train.max_steps"] == "4"
    files = {one.path for one in tracked["client"].list_artifacts(run.info.run_id)}
    assert {"config.yaml", "summary.json", "notes.txt", "plots", "images"} <= files


def test_images_and_figures_are_artifacts(tracked: dict[str, Any]) -> None:
    run_id = tracked["runs"][0].info.run_id
    client = tracked["client"]
    assert [one.path for one in client.list_artifacts(run_id, "plots")] == ["plots/line.png"]
    images = [one.path for one in client.list_artifacts(run_id, "images") if one.path.endswith(".png")]
    steps = sorted((one.split("+")[0], int(one.split("+")[2])) for one in images)
    expected = [(name, step) for name in ("images/old~image~0", "images/pictures") for step in (1, 2, 4)]
    assert steps == [("images/eval~confusion_matrix", 4), *expected, ("images/train~drawn", 4)]
    assert steps_of(tracked["folder"] / "run" / "eval", "confusion_matrix") == [4]
    assert (tracked["folder"] / "run/artifacts/images/eval/confusion_matrix/4.png").stat().st_size > 1000


def test_inputs_are_datasets_of_the_run(tracked: dict[str, Any]) -> None:
    inputs = tracked["runs"][0].inputs.dataset_inputs
    found = {one.tags[0].value: (one.dataset.name, len(one.dataset.digest)) for one in inputs}
    assert found["train"] == ("endless", 8) and found["eval"] == ("once", 8)


def test_the_exported_model_is_registered(tracked: dict[str, Any]) -> None:
    version = tracked["client"].get_model_version_by_alias("lines", "champion")
    assert version.run_id == tracked["runs"][0].info.run_id
    model = tracked["client"].get_logged_model(version.source.removeprefix("models:/"))
    assert model.name == "tracked-final"


def test_the_screen_says_where_to_look_and_what_the_users_loggers_say(
    tracked: dict[str, Any], messages: Messages
) -> None:
    done = tracked["done"]
    messages.same("stdout", line_of("\n".join(done.stdout.splitlines()[-4:]), "mlflow: "))
    assert ":5000/#/experiments/" in line_of(done.stdout, "mlflow_runs: ")
    assert "my own word" in done.stderr
    assert "x 7.5" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_a_start_without_a_step_whose_code_logged_is_a_failed_run(tmp_path: Path, command_line: CommandLine) -> None:
    done = command_line(*SETTINGS, "model.fn=tests.support.tracked.failing", cwd=tmp_path)
    assert done.returncode == 2 and "the user's mistake" in done.stderr
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert (run.info.status, run.data.params["mine"]) == ("FAILED", "7")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["mlflow_run_id"] == run.info.run_id


def test_a_dry_run_leaves_no_run(tmp_path: Path, command_line: CommandLine) -> None:
    done = command_line(*SETTINGS, "model.fn=tests.support.tracked.model_fn", "command=dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "mlflow.db").exists() and not (tmp_path / "mlruns").exists()
