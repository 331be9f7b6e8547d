"""docs/how_to/migrating.md and tutorial/from_tf_estimator.md tell the truth: commands and snippets run as shown."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

from runner.checkpoint_files import layout
from runner.classic import run_config
from runner.classic.compat import names
from runner.classic.compat.differences import RUN_CONFIG
from tests.support.command_line import CommandLine

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how_to" / "migrating.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorial" / "from_tf_estimator.md").read_text()
SCRIPT, _ = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
OLD_SCRIPT, *SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHOWN = re.findall(
    r"^```\n(python -m runner\.classic[^`]*)```\n\n```text\n(.*?)```$", TUTORIAL + TEXT, re.DOTALL | re.MULTILINE
)


def rows(chapter: str) -> list[list[str]]:
    """The cells of the table of a chapter, without its head."""
    lines = [
        line for line in TEXT.partition(f"## {chapter}\n")[2].partition("\n## ")[0].splitlines() if line[:1] == "|"
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrating")
    (path / "train.py").write_text(SCRIPT)
    (path / "old.py").write_text(OLD_SCRIPT)
    return path


def printed(command: str, folder: Path) -> str:
    command = command.replace("python -m", f"'{sys.executable}' -m")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    ran = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.processes
def test_the_script_is_checked_as_shown(folder: Path) -> None:
    (command, shown), *_ = SHOWN
    assert printed(command, folder) == shown


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_runs_as_it_stands_and_the_snippets_after_it(folder: Path, monkeypatch: Any) -> None:
    _, (command, shown), _ = SHOWN
    assert printed(command, folder).endswith(shown)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    space: dict[str, Any] = {"__name__": "migrating"}
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/how_to/migrating.md", "exec"), space)
    monkeypatch.delitem(sys.modules, "train")


@pytest.mark.slow  # tests/classic/compat/test_classic_tensorflow1.py: what such scripts are made of
@pytest.mark.processes
def test_a_script_of_tensorflow_1_runs_as_it_stands(folder: Path) -> None:
    *_, (command, shown) = SHOWN
    assert printed(command, folder) == shown


def steps_to_a_config(language: str) -> list[str]:
    """The blocks of the chapter."""
    chapter = TUTORIAL.partition("## From the script to a config\n")[2].partition("\n## ")[0]
    return [
        text
        for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", chapter, re.DOTALL | re.MULTILINE)
        if kind == language
    ]


def started(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Starts a command of the chapter, in a shell that says nothing of what TensorFlow logs."""
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = command.replace("python -m", f"'{sys.executable}' -m")
    ran = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def runs_in(folder: Path) -> tuple[mlflow.MlflowClient, list[Any]]:
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("runner")
    return client, [] if experiment is None else client.search_runs([experiment.experiment_id])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, empty_mlflow_database: Path) -> Path:
    """The files of the chapter."""
    folder = tmp_path_factory.mktemp("steps_to_a_config")
    shutil.copy(empty_mlflow_database, folder / "mlflow.db")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "inputs.py").write_text(*steps_to_a_config("python"))
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "line.yaml").write_text(*steps_to_a_config("yaml"))
    return folder


@pytest.mark.slow
@pytest.mark.processes
def test_the_steps_lead_from_the_script_to_a_config_in_one_run_of_mlflow(
    project: Path, command_line: CommandLine
) -> None:
    of_script, of_config, _ = steps_to_a_config("")
    ran = started(of_script, project)
    assert ran.stdout == "['global_step', 'loss', 'mae'] 400 True\n"
    noise = [line for line in ran.stderr.splitlines() if re.search(r"^[IWE]\d{4} |absl::Init|oneDNN|tfprof", line)]
    assert not noise, "TensorFlow's start-up"
    assert "mlflow: mlflow ui --backend-store-uri sqlite:///mlflow.db" in ran.stderr
    assert not (project / "model").exists(), "--model-dir is in place of the script's"
    client, (run,) = runs_in(project)
    assert (run.info.run_name, run.info.status) == ("line", "FINISHED")
    assert (run.data.tags["command"], run.data.params["model.params.units"]) == ("train.py", "8")
    assert (run.data.tags["strategy"], run.data.tags["status"]) == ("MirroredStrategy", "finished")
    assert {"train/loss", "eval/loss", "eval/mae", "train/steps_per_sec"} <= set(run.data.metrics)
    assert {"train.py", "learning_curves.png"} <= {one.path for one in client.list_artifacts(run.info.run_id)}

    command_line.run_shell(of_config, project, os.environ)
    client, (same,) = runs_in(project)
    assert same.info.run_id == run.info.run_id
    assert [one.step for one in client.get_metric_history(run.info.run_id, "eval/mae")] == [200, 400, 600]
    assert layout.latest_checkpoint(project / "runs" / "line") == str(project / "runs" / "line" / "model.ckpt-600")


@pytest.mark.slow
@pytest.mark.processes
def test_the_steps_end_with_a_sweep(project: Path, command_line: CommandLine) -> None:
    *_, of_sweep = steps_to_a_config("")
    command_line.run_shell(of_sweep, project, os.environ)
    _, runs = runs_in(project)
    swept = {
        run.data.params.get("model.params.units") for run in runs if run.data.params.get("train.max_steps") == "50"
    }
    assert swept == {"4", "8"}


def test_the_table_of_run_config_names_every_argument() -> None:
    told = {name: what for names_, what in rows("RunConfig") for name in quoted(names_)}
    arguments = inspect.signature(run_config.RunConfig).parameters
    assert {*told} == {*arguments} - {"tf_config", "engine"}
    assert {name for name, what in told.items() if what.startswith("no effect")} == {*RUN_CONFIG} - {
        "experimental_distribute"
    }


def test_the_table_of_what_is_gone_names_all_of_it() -> None:
    told = {name for names_, _ in rows("Names that are gone") for name in quoted(names_)}
    assert {*names.GONE} <= told
