"""A run is repeated from its record: the lines that command=inspect shows are followed in a fresh clone of its project,
and come to the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from runner.tracking.provenance import packages_in, read_code, repeat_lines
from tests.support.command_line import CommandLine

ROOT = Path(__file__).parents[2]
PROJECT = {
    ".gitignore": "outputs\nmlflow.db*\nmlartifacts\n__pycache__\n.env\nlocal_paths.py\n",
    "model_fns/net.py": """
import runner
import tensorflow as tf
from lib.rate import RATE


def model_fn(features, labels, mode, params):
    kernel = tf.compat.v1.get_variable("kernel", [2, 1])
    logits = features @ kernel
    loss = tf.reduce_mean((logits - labels) ** 2)
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.5 * RATE * params["scale"]).minimize(loss, step)
    return runner.EstimatorSpec(mode, logits, loss, train_op)
""",
    "input_fns/net.py": """
import tensorflow as tf


def input_fn(params):
    import local_paths  # when it is called, and not before
    import noise

    x = tf.random.stateless_normal([64, 2], [noise.SEED, local_paths.SEED])
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(64).repeat().batch(4)
""",
    "lib/rate.py": "RATE = 0.1\n",
}
CHANGED = {
    "model_fns/net.py": PROJECT["model_fns/net.py"].replace("0.5 * ", ""),
    "noise.py": "SEED = 7\n",
    "unused.py": "SEED = 8\n",
    "local_paths.py": "SEED = 1  # of this machine\n",
    ".env": "HARMLESS=yes\n",
    "settings/experiment/mine.yaml": """
# @package _global_
defaults: [base, _self_]
model: {fn: model_fns.net}
input: {train: {fn: input_fns.net, batch_size: null, params: {}}}
train: {max_steps: 12, max_epochs: null}
""",
    "settings/experiment/base.yaml": """
# @package _global_
model: {params: {scale: 2.0}}
command: train
""",
}
COMMAND = ("--config-dir", "settings", "experiment=mine", "run.seed=null", "model_dir=outputs/mine")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a commit, and since then changes, and new files."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "project"
    write(folder, PROJECT)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "the first"]):
        identity = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *identity, *words], cwd=folder, check=True)
    write(folder, CHANGED)
    return folder


def values_in(model_dir: Path) -> dict[str, bytes]:
    """Return name -> value of what a checkpoint holds, but for the text by which a resumed run knows its input: that
    has shuffle_seed, which is null if run.seed is, and run.seed where that is set to the number that was drawn.
    """
    path = tf.train.latest_checkpoint(str(model_dir))
    names = [name for name, _ in tf.train.list_variables(path) if name != "_runner/input"]
    return {name: np.asarray(tf.train.load_variable(path, name)).tobytes() for name in names}


def test_the_lines_that_repeat_a_run_come_to_its_bits_in_a_fresh_clone(
    project: Path, tmp_path: Path, command_line: CommandLine, empty_mlflow_database: Path
) -> None:
    from mlflow import MlflowClient

    shutil.copy(empty_mlflow_database, project / "mlflow.db")
    done = command_line(*COMMAND, cwd=project)
    assert done.returncode == 0, done.stderr
    folder = project / "outputs" / "mine"
    (code,) = read_code(folder)
    assert set(code.files) == {
        "model_fns/net.py", "noise.py", "settings/experiment/mine.yaml", "settings/experiment/base.yaml",
    }  # fmt: skip
    assert set(code.left_out) == {"local_paths.py"}

    # The lines are the last of command=inspect, an entry of its JSON, and stand on MLflow's page.
    lines = repeat_lines(folder)
    inspected = command_line("command=inspect", f"model_dir={folder}", cwd=project).stdout
    assert inspected.splitlines()[-len(lines) :] == lines
    as_json = command_line("command=inspect", f"model_dir={folder}", "run.output=json", cwd=project).stdout
    assert json.loads(as_json)["repeat"] == lines
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert all(line in run.data.tags["mlflow.note.content"].splitlines() for line in lines)
    kept = {Path(file.path).name for file in client.list_artifacts(run.info.run_id, "runner_files")}
    assert kept == {"code.1.json", "code.1.patch", "code.1.requirements.txt"}

    # What a person does who has a clone: the file that git ignores is theirs.
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(project), str(clone)], check=True)
    write(clone, {"local_paths.py": CHANGED["local_paths.py"]})
    (install,) = [line for line in lines if line.startswith("pip install")]
    for name, how in packages_in(Path(install.split()[-1]).read_text()).items():
        assert how == f"=={metadata.version(name)}"
    followed = [line for line in lines if line != install]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join([*followed[:-1], f"{followed[-1]} tracking=none model_dir=outputs/again"])
    again = subprocess.run(["bash", "-ec", script], cwd=clone, env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert values_in(clone / "outputs/again") == values_in(folder)
    # They depend on what was recorded: without the patch the bits are others.
    subprocess.run(["git", "checkout", "-q", "model_fns/net.py"], cwd=clone, check=True)
    other = command_line(*followed[-1].split()[3:], "tracking=none", "model_dir=outputs/other", cwd=clone)
    assert other.returncode == 0, other.stderr
    assert values_in(clone / "outputs/other") != values_in(folder)


def test_with_run_code_false_nothing_is_recorded(project: Path, command_line: CommandLine) -> None:
    done = command_line(*COMMAND, "run.code=false", "tracking=none", cwd=project)
    assert done.returncode == 0, done.stderr
    assert not list((project / "outputs" / "mine" / "runner_files").glob("code.*"))


def test_a_resumed_run_may_differ_in_run_code_and_records_the_code_of_each_start(
    project: Path, command_line: CommandLine
) -> None:
    for words in ("run.code=false", "train.max_steps=13", "train.max_steps=14"):
        done = command_line(*COMMAND, words, "tracking=none", cwd=project)
        assert done.returncode == 0, done.stderr
    folder = project / "outputs" / "mine"
    (code,) = read_code(folder)
    assert (code.start, code.step) == (2, 13) and code.command.split()[-1].startswith("run.seed=")
    assert "train.max_steps=14" in code.command
    write(project, {"lib/rate.py": "RATE = 0.2\n"})
    assert command_line(*COMMAND, "train.max_steps=15", "tracking=none", cwd=project).returncode == 0
    assert [(code.start, code.step) for code in read_code(folder)] == [(2, 13), (4, 15)]
