"""A user's day: the wheel in an empty environment, a network of one's own, from its first step to a served model.

The tests go on from one another's work, in their order: train, evaluate, compare, search, export, serve.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from mlflow import MlflowClient
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from runner.distribute.local_cluster import free_ports
from runner.system.files import RUNNER_FILES
from tests.support.browser import answers
from tests.support.processes import wait_until
from tests.support.users_project import write_project
from tests.support.wheel import ENV, build_wheel, call, install

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
SEARCH = [
    "-m", "experiment=cnn", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "sweep.metric=eval/accuracy",
    "model.params.learning_rate=tag(log,interval(0.001,0.1))", "model.params.filters=4,8",
]  # fmt: skip


class Project:
    """The user's folder, and the environment in which the wheel is installed."""

    def __init__(self, home: Path, bin_folder: Path) -> None:
        self.home, self.bin = home, bin_folder
        self.uri = f"sqlite:///{home}/mlflow.db"
        self.env = {**ENV, "PATH": f"{bin_folder}{os.pathsep}{ENV['PATH']}"}  # activated

    def run(self, *arguments: str) -> str:
        return call(self.bin / "python", "-m", "runner", *arguments, cwd=self.home)

    def python(self, code: str) -> Any:
        """Run a script of the user's. Return what its last line says, which is JSON."""
        return json.loads(call(self.bin / "python", "-c", code, cwd=self.home).splitlines()[-1])

    def summary(self, model_dir: str, name: str = "summary") -> dict[str, Any]:
        return json.loads((self.home / model_dir / f"{name}.json").read_text())

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri)

    def runs(self, **search: Any) -> list[Any]:
        (experiment,) = [one for one in self.client.search_experiments() if one.name == "runner"]
        return list(self.client.search_runs([experiment.experiment_id], **search))

    @property
    def sweep(self) -> Path:
        (directory,) = (self.home / "outputs" / "sweeps").iterdir()
        return directory

    def test_data(self) -> tuple[np.ndarray, np.ndarray]:
        with np.load(self.home / "data" / "test.npz") as file:
            return file["images"], file["labels"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("day")
    bin_folder = install(build_wheel(folder / "wheel"), folder / "venv", commands=("mlflow", "uvicorn"))
    home = folder / "project"
    home.mkdir()
    write_project(home)
    return Project(home, bin_folder)


def test_trains_from_its_experiment(project: Project) -> None:
    said = project.run("experiment=cnn", "model_dir=outputs/first")
    summary = project.summary("outputs/first")
    assert (summary["status"], summary["global_step"]) == ("finished", 300)
    assert summary["metrics"]["eval/accuracy"] > 0.85
    assert f"mlflow_run_id: {summary['mlflow_run_id']}" in said
    run = project.client.get_run(summary["mlflow_run_id"])
    assert (run.info.status, run.data.params["model.params.filters"]) == ("FINISHED", "8")
    history = project.client.get_metric_history(run.info.run_id, "train/learning_rate")
    decayed = {step: 0.01 * (1 + np.cos(np.pi * (step - 1) / 300)) / 2 for step in (1, *range(20, 301, 20))}
    assert {one.step: one.value for one in history} == pytest.approx(decayed, abs=1e-8)
    assert {"train/loss", "train/accuracy", "train/confidence"} <= set(run.data.metrics)
    datasets = {one.tags[0].value: one.dataset.name for one in run.inputs.dataset_inputs}
    assert datasets == {"train": "train.npz", "eval": "valid.npz"}
    images = [one.path for one in project.client.list_artifacts(run.info.run_id, "images")]
    assert any(path.endswith(".png") for path in images)


EVALUATE = """
import json, runner
run = runner.load("outputs/first")
metrics = run.evaluate("input.eval.params.path=data/test.npz", "eval.name=test")
run.predict("predict.output=test.npz")
print(json.dumps(metrics))
"""


def test_evaluates_on_test_data(project: Project) -> None:
    metrics = project.python(EVALUATE)
    predicted = np.load(project.home / "test.npz")
    _, labels = project.test_data()
    own = predicted["probabilities"][np.arange(len(labels)), labels]
    assert metrics["eval_test/accuracy"] == pytest.approx(np.mean(predicted["digit"] == labels), abs=1e-6)
    assert metrics["eval_test/loss"] == pytest.approx(-np.mean(np.log(own)), rel=1e-4)
    run = project.client.get_run(project.summary("outputs/first")["mlflow_run_id"])
    assert run.data.metrics["eval_test/accuracy"] == metrics["eval_test/accuracy"]
    assert run.data.metrics["eval/accuracy"] == project.summary("outputs/first")["metrics"]["eval/accuracy"]
    datasets = {one.tags[0].value: one.dataset.name for one in run.inputs.dataset_inputs}
    assert datasets["eval_test"] == "test.npz"


def test_compares_runs(project: Project) -> None:
    project.run("experiment=cnn", "model_dir=outputs/second", "model.params.learning_rate=0.0001")
    found = project.runs(order_by=["metrics.`eval/accuracy` DESC"])
    assert [run.info.run_name for run in found] == ["first", "second"]
    assert [run.data.params["model.params.learning_rate"] for run in found] == ["0.01", "0.0001"]
    for run in found:
        summary = project.summary(f"outputs/{run.info.run_name}")
        assert run.data.metrics["eval/accuracy"] == summary["metrics"]["eval/accuracy"]
    shown = project.run("command=inspect", "model_dir=outputs/second")
    assert f"{summary['metrics']['eval/accuracy']:.4g}" in shown
    better = project.runs(filter_string="metrics.`eval/accuracy` > 0.85 and params.`model.params.filters` = '8'")
    assert [run.info.run_name for run in better] == ["first"]


@pytest.mark.timeout(1000)  # beside other tests
def test_a_killed_search_goes_on_with_the_same_command(project: Project) -> None:
    command = [str(project.bin / "python"), "-m", "runner", *SEARCH]
    started = subprocess.Popen(
        command, cwd=project.home, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    killed: set[str] = set()

    def a_later_one_is_half_way() -> bool:
        assert started.poll() is None, "it ended before it was killed"
        summaries = project.home.glob("outputs/sweeps/*/*/summary.json")
        said = {path.parent: json.loads(path.read_text())["status"] for path in summaries}
        killed.clear()
        killed.update(job.name for job in said if said[job] == "running" and list(job.glob("model.ckpt-*.index")))
        return "finished" in said.values() and len(killed) == 1

    wait_until(a_later_one_is_half_way)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()

    said = project.run(*SEARCH)
    record = json.loads((project.sweep / "sweep.json").read_text())
    jobs = {job["folder"]: job for job in record["jobs"]}
    assert [job["status"] for job in jobs.values()] == ["finished"] * 4
    assert {job["global_step"] for job in jobs.values()} == {300}
    values = [job["value"] for job in jobs.values()]
    assert values == sorted(values, reverse=True)
    assert "4 jobs, best first by eval/accuracy (max)" in said
    generations = {name: json.loads((project.sweep / name / "run.json").read_text())["generation"] for name in jobs}
    assert generations == {name: 2 if name in killed else 1 for name in jobs}

    storage = JournalStorage(JournalFileBackend(str(project.sweep / "study.journal")))
    trials = optuna.load_study(study_name=project.sweep.name, storage=storage).get_trials()
    assert Counter(trial.state.name for trial in trials) == {"COMPLETE": 4, "FAIL": 1}
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len({json.dumps(trial.params) for trial in complete}) == 4
    (failed,) = (trial for trial in trials if trial.state.name == "FAIL")
    assert failed.params in [trial.params for trial in complete]
    assert Counter(trial.value for trial in complete) == Counter(values)

    parent = project.client.get_run(record["mlflow_run_id"])
    children = project.runs(filter_string=f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert [run.info.status for run in (parent, *children)] == ["FINISHED"] * 5
    assert {run.info.run_name for run in children} == {job["name"] for job in jobs.values()}
    for run in children:
        steps = [one.step for one in project.client.get_metric_history(run.info.run_id, "train/loss")]
        assert steps == [1, *range(20, 301, 20)], run.info.run_name
    files = {one.path for one in project.client.list_artifacts(parent.info.run_id)}
    assert {"optimization_history.png", "param_importances.png", "parallel_coordinates.png", "sweep.json"} <= files
    assert parent.data.metrics["best/eval/accuracy"] == max(values)


def best_job(project: Project) -> str:
    """The model_dir of the sweep's best job."""
    job = json.loads((project.sweep / "sweep.json").read_text())["jobs"][0]
    return f"{project.sweep.relative_to(project.home)}/{job['folder']}"


def commands_of_the_docs(project: Project) -> dict[str, str]:
    """The commands of docs/how_to/export.md by their second word, with the sweep's best run and a free port."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (DOCS / "how_to" / "export.md").read_text(), re.DOTALL | re.MULTILINE)
    block = "".join(blocks)
    (port,) = free_ports(1)
    assert "outputs/mine" in block and ":5001" in block and "--port 5001" in block
    text = block.replace("\\\n", " ").replace("outputs/mine", best_job(project)).replace("5001", str(port))
    commands = {" ".join(line.split()[:2]): line for line in text.splitlines() if line}
    (variable,) = (line.removeprefix("export ") for name, line in commands.items() if name.startswith("export "))
    return {name: f"{variable} {line}" for name, line in commands.items()}


@pytest.fixture(scope="module")
def docs(project: Project) -> dict[str, str]:
    """First asked for by `server`: its port is kept for a minute."""
    return commands_of_the_docs(project)


def shell(project: Project, command: str) -> str:
    return call("bash", "-ec", command, cwd=project.home, env=project.env)


def test_registers_the_best_checkpoint(project: Project) -> None:
    shell(project, commands_of_the_docs(project)["python -m"])
    model_dir = best_job(project)
    (export,) = project.summary(model_dir, "summary.export")["exports"]
    assert Path(export).is_dir()
    version = project.client.get_model_version_by_alias("digits", "champion")
    assert (str(version.version), version.status) == ("1", "READY")
    assert version.run_id == project.summary(model_dir)["mlflow_run_id"]
    evaluated = {
        path.name.split(".")[1].removeprefix("ckpt-"): json.loads(path.read_text())["eval/accuracy"]
        for path in (project.home / model_dir / RUNNER_FILES).glob("model.ckpt-*.metrics.json")
    }
    best = max(evaluated.values())
    assert evaluated[version.tags["step"]] == best
    run = project.client.get_run(version.run_id)
    assert version.description.startswith(f"Step {version.tags['step']} of run {run.info.run_name}: eval/loss ")
    assert version.description.endswith(f"eval/accuracy {best:.4g}")
    model = project.client.get_logged_model(version.source.removeprefix("models:/"))
    assert {metric.key: metric.value for metric in model.metrics}["eval/accuracy"] == best
    assert model.params["model.params.filters"] == run.data.params["model.params.filters"]
    steps = [one.step for one in project.client.get_metric_history(version.run_id, "eval/accuracy")]
    assert steps == [100, 200, 300]  # what the model was given is not once more in the run


@pytest.fixture(scope="module")
def server(project: Project, docs: dict[str, str]) -> Iterator[None]:
    """The registered model, answering as docs/how_to/export.md says."""
    command = docs["mlflow models"]
    port = shlex.split(command)[-1]
    with (project.home / "server.log").open("w") as log:
        serving = subprocess.Popen(
            ["bash", "-ec", command], cwd=project.home, env=project.env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        end = time.monotonic() + 120
        while not answers(f"http://127.0.0.1:{port}/ping"):
            assert serving.poll() is None and time.monotonic() < end, (project.home / "server.log").read_text()
            time.sleep(0.2)
        yield
    finally:
        os.killpg(serving.pid, signal.SIGKILL)
        serving.wait()


PREDICT = """
import json, runner
print(json.dumps(list(runner.load({model_dir!r}).predict("predict.checkpoint=best"))))
"""


@pytest.mark.usefixtures("server")
def test_the_served_model_answers_as_the_run_predicts(project: Project, docs: dict[str, str]) -> None:
    predicted = project.python(PREDICT.format(model_dir=best_job(project)))
    images, labels = project.test_data()
    (project.home / "request.json").write_text(json.dumps({"inputs": {"image": images.tolist()}}))
    asked = docs["curl -sS"]
    assert "@serving_input_example.json" in asked
    answer = json.loads(shell(project, asked.replace("@serving_input_example.json", "@request.json")))["predictions"]
    probabilities = np.array([one["probabilities"] for one in predicted])
    assert probabilities.shape == (len(labels), 10)
    np.testing.assert_allclose(answer["probabilities"], probabilities, rtol=0, atol=1e-6)
    assert answer["digit"] == [one["digit"] for one in predicted]
    assert np.mean(np.array(answer["digit"]) == labels) > 0.85


@pytest.mark.usefixtures("server")
def test_the_input_example_is_a_request_that_the_server_answers(project: Project, docs: dict[str, str]) -> None:
    shell(project, docs["mlflow artifacts"])
    request = json.loads((project.home / "serving_input_example.json").read_text())
    assert np.shape(request["inputs"]["image"]) == (1, 8, 8, 1)
    answer = json.loads(shell(project, docs["curl -sS"]))["predictions"]
    assert np.shape(answer["probabilities"]) == (1, 10)
