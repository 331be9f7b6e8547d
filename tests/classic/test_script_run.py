"""`python -m runner.classic [OPTION ...] train.py`: what stands before the script's name is for the runner.

docs/tutorial/from_tf_estimator.md, which tests/docs/test_docs_migrating.py follows, records a script in MLflow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest
import tensorflow as tf

from runner.classic import __main__ as command
from runner.classic import script_run
from runner.classic.script_run import ScriptOptions
from runner.system.standard_streams import hidden_stderr
from runner.tracking.backends import session
from tests.support.classic_models import batches, dense
from tests.support.messages import Messages

estimator = tf.compat.v1.estimator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the Estimators of a test be those of a script that was started with some options."""
    monkeypatch.setattr(script_run, "current", script_run.current)
    return lambda **options: script_run.begin(ScriptOptions(("train.py",), **options))


def test_its_folder_is_that_of_the_first_estimator(
    begun: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    begun(model_dir=str(tmp_path / "given"))
    first = estimator.Estimator(dense, tmp_path / "written")
    assert first.model_dir == first.config.model_dir == str(tmp_path / "given")
    again = estimator.Estimator(dense, config=estimator.RunConfig(str(tmp_path / "written")))
    derived = estimator.Estimator(dense, config=first.config)
    assert again.model_dir == derived.model_dir == str(tmp_path / "given")
    assert not caplog.messages
    other = estimator.Estimator(dense, tmp_path / "other")
    assert other.model_dir == str(tmp_path / "other")
    messages.logged(caplog, "--model-dir")


def test_its_strategy_trains_and_evaluates(begun: Any, tmp_path: Path) -> None:
    begun(strategy="mirrored")
    made = estimator.Estimator(dense, tmp_path)
    strategy = made.config.train_distribute
    assert isinstance(strategy, tf.distribute.MirroredStrategy) and made.config.eval_distribute is strategy
    assert estimator.Estimator(dense, tmp_path / "2").config.train_distribute is strategy
    made.train(batches(), steps=2)
    assert made.evaluate(batches(2))["global_step"] == 2


def test_a_strategy_of_the_script_gives_way(
    begun: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    begun(strategy="default")
    config = estimator.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy("/cpu:0"))
    assert estimator.Estimator(dense, tmp_path, config).config.train_distribute is None
    messages.logged(caplog, "--strategy")


def test_without_options_all_is_as_the_script_says(tmp_path: Path) -> None:
    made = estimator.Estimator(dense, tmp_path)
    assert (made.model_dir, made.config.train_distribute) == (str(tmp_path), None)
    made.train(batches(), steps=1)
    assert not list(tmp_path.glob("*.jsonl")) and not (tmp_path / "run.json").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_fails_is_recorded_as_failed(
    begun: Any, tmp_path: Path, mlflow_database: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "--steps=2"])
    monkeypatch.setattr(session, "script", None)
    (tmp_path / "train.py").write_text("# mine")
    begun(tracking=True, model_dir="model")
    made = estimator.Estimator(dense, params={"units": 3})

    class Fails(tf.compat.v1.train.SessionRunHook):
        steps = 0

        def after_run(self, *values: Any) -> None:
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("the end")

    with pytest.raises(RuntimeError, match="the end"):
        made.train(batches(), steps=2, hooks=[Fails()])
    session.wait_until_recorded()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs(["1"])
    assert (found.info.status, found.data.tags["status"]) == ("FAILED", "failed")
    assert found.data.params["model.params.units"] == "3"
    assert [one.step for one in client.get_metric_history(found.info.run_id, "train/loss")] == [1]
    assert found.data.tags["command"] == "train.py --steps=2"
    assert "train.py" in [one.path for one in client.list_artifacts(found.info.run_id)]


WITH_FLAGS = """
import tensorflow as tf

tf.flags.DEFINE_string("word", "", "what to say")
tf.logging.set_verbosity(tf.logging.INFO)
tf.logging.info("before main")


def main(_):
    tf.logging.info("in main: " + tf.flags.FLAGS.word)


if __name__ == "__main__":
    tf.app.run(main)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_with_flags_says_each_line_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WITH_FLAGS)
    command = [sys.executable, "-m", "runner.classic", "script.py", "--word=hello"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "main" in line]
    assert [line.partition("main")[2] for line in said] == ["", ": hello"], said


def test_what_follows_the_script_is_the_scripts() -> None:
    options = command._parser().parse_args(["--tracking", "train.py", "--model-dir", "x", "-m", "--strategy=y"])
    assert options.script == ["train.py", "--model-dir", "x", "-m", "--strategy=y"]
    assert (options.tracking, options.model_dir, options.strategy, options.module) == (True, None, None, None)
    options = command._parser().parse_args(["--model-dir=x", "-m", "trainer.task", "--tracking"])
    assert (options.module, options.model_dir, options.tracking) == (["trainer.task", "--tracking"], "x", False)


@pytest.mark.parametrize("arguments", [
    [],
    ["-m"],
    ["nowhere.py"],
    ["--strategy", "mirored", "train.py"],
    ["--strategy", "parameter_server", __file__],
], ids=["no script", "no module", "no such script", "no such strategy", "no cluster"])  # fmt: skip
def test_a_mistake_before_the_script_is_exit_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, messages: Messages
) -> None:
    monkeypatch.setattr("sys.argv", ["-m", *arguments])
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(SystemExit) as ended:
        command.main()
    messages.same(f"exit {ended.value.code}", capsys.readouterr().err.splitlines()[-1])


def test_what_is_hidden_is_said_where_the_import_fails(capfd: Any) -> None:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with hidden_stderr(quiet):
        os.write(2, b"start-up")
    with hidden_stderr({"TF_CPP_MIN_LOG_LEVEL": "0"}):
        os.write(2, b"asked for")
    with pytest.raises(ImportError), hidden_stderr(quiet):
        os.write(2, b" and why")
        raise ImportError
    with pytest.raises(ImportError), hidden_stderr(quiet, but_for=ImportError):
        os.write(2, b"stopped")
        raise ImportError
    assert capfd.readouterr().err == "asked for and why"
