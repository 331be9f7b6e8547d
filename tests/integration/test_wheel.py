"""The wheel, installed where nothing of the repository is in sight."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

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


def test_the_wheel_holds_code_config_and_examples_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"runner", "model_fns", "input_fns"}
    assert {str(path.relative_to(ROOT)) for top in tops for path in (ROOT / top).rglob("*.py")} <= names
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
    call(installed / "runner", "train.max_steps=2", "model.params.network=mlp", "tracking=none", cwd=tmp_path)
    (summary,) = tmp_path.glob("outputs/*/summary.json")
    assert json.loads(summary.read_text())["global_step"] == 2


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


def test_the_first_tutorial_is_followed_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    follow(FROM_THE_WHEEL, tmp_path, installed, ENV)
    shown = call(installed / "python", "-c", "import runner, model_fns.digits as d; print(runner.__file__, d.__file__)",
                 cwd=tmp_path)  # fmt: skip
    assert all(Path(path).is_relative_to(installed.parent) for path in shown.split())
