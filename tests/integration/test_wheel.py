"""The wheel, installed where nothing of the repository is in sight."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.test_tutorials import FROM_THE_WHEEL, follow
from tests.support.wheel import ENV, ROOT, build_wheel, call, install

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel: that of `make release`, or one built here."""
    built = os.environ.get("RUNNER_WHEEL")
    return Path(built) if built else build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a fresh environment with the wheel in it."""
    return install(wheel, tmp_path_factory.mktemp("venv"))


def test_the_wheel_holds_config_and_examples_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"runner", "model_fns", "input_fns"}
    assert {"runner/py.typed", "runner/conf/__init__.py", "runner/conf/runner.yaml"} <= names
    shipped = {f"runner/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    shipped |= {f"runner/{path.relative_to(ROOT)}" for path in (ROOT / "conf" / "schema").glob("*.json")}
    assert {name for name in shipped if "/local/" not in name} <= names
    template = [path.relative_to(ROOT) for path in (ROOT / "project_template").rglob("*") if path.is_file()]
    pages = {f"runner/docs/{path.parent.name}/{path.name}" for path in (ROOT / "docs").glob("[hrte]*/*.md")}
    assert {name for name in pages if not name.startswith("runner/docs/gallery")} <= names
    assert {f"runner/{path}" for path in template if "__pycache__" not in path.parts} <= names
    assert not {"model_fns/__init__.py", "input_fns/__init__.py"} & names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_questions_are_answered_from_the_installed_config(installed: Path, tmp_path: Path) -> None:
    assert "pkg://runner.conf" in call(installed / "runner", "--info", "searchpath", cwd=tmp_path)
    assert "fn: model_fns.digits" in call(installed / "runner", "--cfg", "job", cwd=tmp_path)
    assert call(installed / "runner", "--help", "training.md#input", cwd=tmp_path).startswith("## Input\n")
    where = call(installed / "python", "-c", "import runner; print(runner.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))


def test_the_console_script_trains_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    call(installed / "runner", "train.max_steps=2", "model.params.network=mlp", cwd=tmp_path)
    (summary,) = tmp_path.glob("outputs/*/summary.json")
    assert json.loads(summary.read_text())["global_step"] == 2
    assert (tmp_path / "mlflow.db").exists()


def test_a_new_project_trains_and_passes_its_test_as_it_stands(installed: Path, tmp_path: Path) -> None:
    said = call(installed / "python", "-m", "runner", "command=new", "new.path=my_project", cwd=tmp_path)
    home, commands = tmp_path / "my_project", said.partition("test it:\n")[2].splitlines()
    assert [line.split() for line in commands[:1]] == [["cd", "my_project"]]
    environment = {**ENV, "PATH": f"{installed}:{ENV['PATH']}"}
    lines = [line.strip() for line in commands[1:]]
    lines.remove("pip install pytest")  # the dependencies of this environment have it
    shown = [call("bash", "-ec", line, cwd=home, env=environment) for line in lines]
    (summary,) = home.glob("outputs/*/summary.json")
    found = json.loads(summary.read_text())
    assert (found["status"], found["global_step"]) == ("finished", 200)
    assert found["metrics"]["eval/accuracy"] > 0.9
    assert (home / "mlflow.db").exists() and found["mlflow_run_id"] in shown[0]
    assert "3 passed" in shown[1]
    assert not (home / "mlruns").exists()


MODEL = """
import keras
from runner import EstimatorSpec
from model_fns.digits import NUM_CLASSES  # the shipped ones are beside mine

def model_fn(features, labels, mode):
    prediction = keras.layers.Dense(1)(features["x"])[:, 0]
    return EstimatorSpec(mode, loss=(prediction - labels) ** 2, optimizer=keras.optimizers.SGD(0.1))
"""
INPUT = """
import numpy as np, tensorflow as tf

def input_fn(mode, params):
    x = np.linspace(-1, 1, 20, dtype="float32")[:, None]
    return tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, 0])).batch(params.batch_size)
"""


def test_a_users_own_model_is_found_beside_the_shipped_ones(installed: Path, tmp_path: Path) -> None:
    for path, text in (
        ("model_fns/mine.py", MODEL),
        ("input_fns/mine.py", INPUT),
        ("runner.py", "raise SystemExit(9)"),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    own = ["model=custom", "model.fn=model_fns.mine", "input=custom", "input.train.fn=input_fns.mine"]
    own += ["input.eval.fn=input_fns.mine", "input.train.batch_size=5", "input.eval.batch_size=5", "tracking=none"]
    call(installed / "runner", *own, "model_dir=run", cwd=tmp_path)  # a runner.py of the user is not in the way
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 4


MINE = """
# @package _global_
defaults:
  - override /model: custom
  - override /input: custom
model:
  fn: model_fns.mine
  params: {learning_rate: 0.1}
input:
  train: {fn: input_fns.mine, batch_size: 5}
  eval: {fn: input_fns.mine, batch_size: 5}
  predict: {fn: input_fns.mine, batch_size: 5}
train:
  max_steps: 8
"""
MY_MODEL = """
import keras
from runner import EstimatorSpec

def model_fn(features, labels, mode, params):
    prediction = keras.layers.Dense(1)(features["x"])[:, 0]
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"y": prediction, "x": features["x"]})
    loss = (prediction - labels) ** 2
    optimizer = keras.optimizers.SGD(params.learning_rate)
    return EstimatorSpec(mode, loss=loss, optimizer=optimizer, eval_metric_ops={"error": abs(prediction - labels)})
"""
MY_INPUT = """
import numpy as np, tensorflow as tf

def input_fn(mode, params):
    x = np.linspace(-1, 1, 22, dtype="float32")[:, None]
    examples = {"x": x} if mode == "infer" else ({"x": x}, x[:, 0])
    data = tf.data.Dataset.from_tensor_slices(examples).batch(params.batch_size)
    return data.repeat() if mode == "train" else data
"""


@pytest.fixture(scope="module")
def project(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own directory with nothing but three files in it, and a run of its experiment."""
    home = tmp_path_factory.mktemp("project")
    for path, text in (
        ("model_fns/mine.py", MY_MODEL),
        ("input_fns/mine.py", MY_INPUT),
        ("conf/experiment/mine.yaml", MINE),
    ):
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(text)
    call(installed / "python", "-m", "runner", "experiment=mine", "model_dir=outputs/mine", cwd=home)
    return home


def summary_of(model_dir: Path) -> dict[str, Any]:
    return json.loads((model_dir / "summary.json").read_text())


def test_a_users_experiment_trains_and_is_evaluated(project: Path) -> None:
    summary = summary_of(project / "outputs" / "mine")
    assert (summary["status"], summary["global_step"]) == ("finished", 8)
    assert set(summary["metrics"]) == {"eval/loss", "eval/error"}
    assert summary["mlflow_run_id"]


def test_a_users_run_is_evaluated_with_its_own_config(project: Path, installed: Path) -> None:
    trained = summary_of(project / "outputs" / "mine")
    call(installed / "python", "-m", "runner", "command=evaluate", "model_dir=outputs/mine", cwd=project)
    assert summary_of(project / "outputs" / "mine")["metrics"] == trained["metrics"]  # bit for bit: the same checkpoint


def test_a_users_run_predicts(project: Path, installed: Path) -> None:
    call(installed / "python", "-m", "runner", "command=predict", "model_dir=outputs/mine", cwd=project)
    lines = (project / "outputs" / "mine" / "predictions.jsonl").read_text().splitlines()
    predictions = [json.loads(line) for line in lines]
    assert len(predictions) == 22
    assert [p["x"][0] for p in predictions] == pytest.approx([-1 + 2 * i / 21 for i in range(22)])
    call(
        installed / "runner", "command=predict", "model_dir=outputs/mine", "predict.output=y.npz", "predict.keys=[y]",
        cwd=project,
    )  # fmt: skip
    arrays = np.load(project / "y.npz")
    assert arrays.files == ["y"]
    assert arrays["y"] == pytest.approx([p["y"] for p in predictions], rel=1e-6)


def test_a_users_run_is_inspected(project: Path, installed: Path) -> None:
    said = call(installed / "python", "-m", "runner", "command=inspect", "model_dir=outputs/mine", cwd=project)
    assert "dense/kernel" in said and "global_step" in said
    assert f"{summary_of(project / 'outputs' / 'mine')['metrics']['eval/error']:.4g}" in said


def test_a_user_sweeps_over_the_experiment(project: Path, installed: Path) -> None:
    from mlflow import MlflowClient

    sweep = ["-m", "experiment=mine", "model.params.learning_rate=0.1,0.5"]
    said = call(installed / "python", "-m", "runner", *sweep, cwd=project)
    assert "2 jobs, best first by eval/loss (min)" in said
    client = MlflowClient(tracking_uri=f"sqlite:///{project / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("runner").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    names = {run.info.run_name for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert names == {"learning_rate=0.1", "learning_rate=0.5"}
    again = call(installed / "python", "-m", "runner", *sweep, cwd=project)  # takes a second: both are finished
    assert again.splitlines()[-3:] == said.splitlines()[-3:]


def test_a_users_experiment_is_rehearsed_without_a_trace(project: Path, installed: Path, tmp_path: Path) -> None:
    before = sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts)
    said = call(installed / "python", "-m", "runner", "experiment=mine", "command=dry_run", cwd=project)
    assert "dense/kernel" in said
    assert sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.fixture(scope="module")
def followed(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which a reader has followed the tutorial, from a first model to a sweep."""
    home = tmp_path_factory.mktemp("tutorial")
    for page in FROM_THE_WHEEL:
        follow(page, home, installed, ENV)
    return home


def test_the_tutorial_is_followed_from_the_wheel_to_a_sweep_compared_in_mlflow(followed: Path, installed: Path) -> None:
    shown = call(installed / "python", "-c", "import runner, model_fns.digits as d; print(runner.__file__, d.__file__)",
                 cwd=followed)  # fmt: skip
    assert all(Path(path).is_relative_to(installed.parent) for path in shown.split())
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{followed / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("runner").experiment_id], max_results=100)
    by_name = {run.info.run_name: run for run in runs}
    assert {"iris", "wide", "slow", "fast"} <= set(by_name)
    assert {run.info.status for run in runs} == {"FINISHED"}
    sweeps = sorted(followed.glob("outputs/sweeps/*/sweep.json"))
    rankings = [json.loads(path.read_text())["jobs"] for path in sweeps]
    assert [len(ranked) for ranked in rankings] == [4, 6, 4]  # the grid, the one with seeds, and Optuna's
    for ranked in rankings:
        accuracies = [job["metrics"]["eval/accuracy"] for job in ranked]
        assert accuracies == sorted(accuracies, reverse=True) or len(ranked) == 6  # jobs of a setting stand together
        for job in ranked:  # each is a run in MLflow with the numbers of the ranking, beside the others of its sweep
            found = [run for run in runs if run.info.run_name == job["name"] and "mlflow.parentRunId" in run.data.tags]
            assert job["metrics"]["eval/accuracy"] in [run.data.metrics["eval/accuracy"] for run in found]
    children = [run.data.tags["mlflow.parentRunId"] for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(children) == 14 and len(set(children)) == 3


SERVE = """
import json, sys
import tensorflow as tf

model = tf.saved_model.load(sys.argv[1])
features = {"island": ["Biscoe", "Dream"], "sex": ["male", ""], "bill_length_mm": [50.0, 39.5],
            "bill_depth_mm": [15.2, float("nan")], "flipper_length_mm": [221.0, 186.0], "body_mass_g": [5200.0, 3500.0]}
signature = model.signatures["serving_default"]
wanted = signature.structured_input_signature[1]
given = {name: tf.constant(features.get(name, [1, 2]), spec.dtype) for name, spec in wanted.items()}
print(json.dumps([name.decode() for name in signature(**given)["species"].numpy().tolist()]))
"""


def test_a_day_with_a_table_from_the_wheel_to_plain_tensorflow(installed: Path, tmp_path: Path) -> None:
    """CSV files with missing values and categories, in an empty folder, as the how-to says, and all around it."""
    # It trains with class weights, and predicts new.csv with ids.
    follow("../how_to/tabular_data", tmp_path, installed, ENV)
    runner: list[str | Path] = [installed / "python", "-m", "runner"]
    header, first, *_ = (tmp_path / "data" / "train.csv").read_text().splitlines()
    (tmp_path / "data" / "worse.csv").write_text("\n".join([header, first, f"x{first}", *[first] * 60]))
    for wrong, said in {
        "model.params.train_file=data/worse.csv": ("data/worse.csv line 3", "column id"),
        "input.train.params.columns.island=float32": ("data/test.csv line 2", "column island is "),
    }.items():
        command = [*map(str, runner), "experiment=birds", "command=dry_run", wrong]
        refused = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=200)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
        assert not [text for text in said if text not in refused.stderr], refused.stderr

    call(*runner, "-m", "experiment=birds", "model.params.class_weights=[1.0,1.0,1.0],[0.75,1.7,0.92]", cwd=tmp_path)
    best = json.loads(call(*runner, "command=best", "sweep.metric=eval/accuracy", "run.output=json", cwd=tmp_path))
    accuracies = [run["eval/accuracy"] for run in best["runs"]]
    assert len(accuracies) == 3 and accuracies == sorted(accuracies, reverse=True) and accuracies[0] > 0.9

    with open(tmp_path / "data" / "new.csv") as given, open(tmp_path / "new.csv") as predicted:
        ids, rows = [row["id"] for row in csv.DictReader(given)], list(csv.DictReader(predicted))
    assert [row["id"] for row in rows] == ids and len(ids) == 94
    with open(tmp_path / "data" / "test.csv") as file:
        right = [row["species"] == truth["species"] for row, truth in zip(rows, csv.DictReader(file), strict=True)]
    accuracy = summary_of(tmp_path / "outputs" / "birds")["metrics"]["eval/accuracy"]
    assert sum(right) / len(right) == pytest.approx(accuracy, abs=1e-6)

    call(*runner, "command=export", f"model_dir={best['runs'][0]['model_dir']}", "export.dir=served", cwd=tmp_path)
    (exported,) = (path.parent for path in (tmp_path / "served").rglob("saved_model.pb"))
    served = call(installed / "python", "-c", SERVE, exported, cwd=tmp_path)
    assert json.loads(served.splitlines()[-1]) == ["Gentoo", "Adelie"]
