"""`runner.run` and `runner.load`: the command line for a script or a notebook."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import runner
from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL
from tests.support.line import line
from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> runner.Run:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("api") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        fork_tasks(patch, command_line)
        own = logging.getLogger("of.the.caller")
        before = own.disabled, logging.root.level, logging.root.handlers[:]
        run = runner.run(
            *SMALL, f"model_dir={folder}", "checkpoint.save_steps=2", "checkpoint.keep_best.metric=eval/loss"
        )
        assert (own.disabled, logging.root.level, logging.root.handlers[:]) == before, "the caller logs as before"
        return run


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where tests.support is found


def fork_tasks(patch: pytest.MonkeyPatch, command_line: CommandLine) -> None:
    patch.setattr("runner.launch.task_group.build_starter", lambda *args, **settings: command_line.starter)
    patch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def forked(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the tasks of the test; that of the notebook imports TensorFlow itself."""
    fork_tasks(monkeypatch, command_line)


def test_a_run_is_what_the_command_line_makes(finished: runner.Run) -> None:
    before = sys.argv, dict(os.environ)
    assert finished.status == "finished"
    assert finished.summary["global_step"] == 4
    assert [one.step for one in finished.checkpoints] == [0, 2, 4]
    newest = finished.checkpoints[-1]
    assert newest.metrics["eval/loss"] == finished.metrics["eval/loss"]
    assert finished.config.train.max_steps == 4
    assert finished.model_fn is line
    assert set(finished.input_fns) == {"train", "eval", "predict"}
    assert (sys.argv, dict(os.environ)) == before


def test_a_run_gives_its_curves(finished: runner.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    table = finished.curve("eval/loss", "train/loss")
    assert list(table.columns) == ["eval/loss", "train/loss"] and table.index.name == "step"
    losses = table["eval/loss"].dropna()
    assert list(losses.index) == [2, 4] and losses[4] == finished.metrics["eval/loss"]
    assert set(table.columns) < set(finished.curve().columns)
    with pytest.raises(KeyError, match="eval/loss"):
        finished.curve("loss")
    monkeypatch.setattr("runner.launch.api.find_spec", lambda name: None)
    steps, values = finished.curve("eval/loss")["eval/loss"]
    assert steps.tolist() == [2, 4] and values.tolist() == losses.tolist()


def test_a_notebook_shows_a_run_with_its_metrics_and_curves(finished: runner.Run) -> None:
    shown = finished._repr_html_()
    assert "<th>status</th><td>finished</td>" in shown and "<th>eval/loss</th>" in shown
    assert ("data:image/png;base64," in shown) == (finished.model_dir / "learning_curves.png").exists()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "files", [("all.npz",), pytest.param(("all.npz", "all.parquet", "all.tfrecord"), marks=pytest.mark.slow)], ids=str
)
def test_a_loaded_run_evaluates_and_predicts(finished: runner.Run, files: tuple[str, ...]) -> None:
    loaded = runner.load(finished.model_dir)
    assert loaded == finished
    assert loaded.evaluate()["eval/loss"] == pytest.approx(finished.metrics["eval/loss"])
    best = min(finished.checkpoints[1:], key=lambda one: one.metrics["eval/loss"])
    assert loaded.evaluate("eval.checkpoint=best")["eval/loss"] == pytest.approx(best.metrics["eval/loss"])
    predicted = list(loaded.predict())
    assert len(predicted) == 8
    assert [set(one) for one in predicted] == [{"x", "y"}] * 8
    for name in files:
        found = list(loaded.predict(f"predict.output={finished.model_dir}/{name}"))
        assert [set(one) for one in found] == [{"x", "y"}] * 8
        assert [float(np.squeeze(one["y"])) for one in found] == pytest.approx([one["y"] for one in predicted])


@pytest.mark.usefixtures("forked")
def test_a_loaded_run_goes_on(finished: runner.Run) -> None:
    longer = runner.load(finished.model_dir).train("train.max_steps=6")
    assert longer.summary["global_step"] == 6
    assert longer.model_dir == finished.model_dir


@pytest.mark.usefixtures("forked")
def test_what_is_wrong_is_raised(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(runner.RunError) as raised:
        runner.run("train.max_step=4")
    assert raised.value.code == 2
    with messages.raised(runner.RunError) as raised:
        runner.run(*SMALL, "model.fn=tests.support.jobs.no_such", f"model_dir={tmp_path}/run")
    assert raised.value.code == 2
    with messages.raised(ValueError):
        runner.run("--multirun", "run.seed=1,2")
    with messages.raised(FileNotFoundError):
        runner.load(tmp_path)


@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_is_raised(tmp_path: Path) -> None:
    with pytest.raises(runner.RunError) as raised:
        runner.run(*SMALL, "input.train.fn=tests.support.jobs.failing", f"model_dir={tmp_path}/run")
    assert raised.value.code in (1, 2)
    assert raised.value.model_dir == tmp_path / "run"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("input.train.fn=tests.support.jobs.failing",), "bad example"),  # the folder of such a start is removed
        pytest.param(("command=predict", "predict.keys=[nothing]"), "nothing", marks=pytest.mark.slow),
        (("command=dry_run", "model.fn=tests.task.test_error_report.of_wrong_shape"), "Dimensions must be equal"),
    ],
    ids=["train", "predict", "dry_run"],
)
def test_the_error_of_a_run_is_its_reason(
    words: tuple[str, ...], reason: str, finished: runner.Run, tmp_path: Path
) -> None:
    folder = finished.model_dir if "command=predict" in words else tmp_path / "run"
    with pytest.raises(runner.RunError) as raised:
        runner.run(*SMALL, *words, f"model_dir={folder}")
    assert reason in str(raised.value) and "printed above" not in str(raised.value)


@pytest.mark.slow
def test_the_notebook_of_the_docs_runs(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "docs" / "tutorial" / "first_run.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    assert "accuracy" in ran.stdout
