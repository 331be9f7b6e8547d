"""The wheel, installed where nothing of the repository is in sight."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("pyproject.toml", "README.md", "LICENSE", "runner", "conf", "model_fns", "input_fns")
ENV = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def call(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=ENV, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves directories behind in its source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a fresh environment with the wheel in it; its dependencies are those of this one."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site_packages,) = home.glob("lib/python*/site-packages")
    # A directory that a .pth adds is searched, but its own .pth files (an editable install of ours) are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    return home / "bin"


def test_the_wheel_holds_config_and_examples_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"runner", "model_fns", "input_fns"}
    assert {"runner/py.typed", "runner/conf/__init__.py", "runner/conf/runner.yaml"} <= names
    shipped = {f"runner/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert {name for name in shipped if "/local/" not in name} <= names
    assert not {"model_fns/__init__.py", "input_fns/__init__.py"} & names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_questions_are_answered_from_the_installed_config(installed: Path, tmp_path: Path) -> None:
    assert "pkg://runner.conf" in call(installed / "runner", "--info", "searchpath", cwd=tmp_path)
    assert "fn: model_fns.digits" in call(installed / "runner", "--cfg", "job", cwd=tmp_path)
    where = call(installed / "python", "-c", "import runner; print(runner.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))


def test_the_console_script_trains_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    call(installed / "runner", "train.max_steps=2", "model.params.network=mlp", cwd=tmp_path)
    (summary,) = tmp_path.glob("outputs/*/summary.json")
    assert json.loads(summary.read_text())["global_step"] == 2
    assert (tmp_path / "mlflow.db").exists()


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
