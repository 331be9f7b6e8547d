"""`runner.run` and `runner.load`: the command line for a script or a notebook."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import runner
from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL, endless, once
from tests.support.journal import recorded
from tests.support.line import line
from tests.support.messages import Messages
from tests.support.processes import is_gone, wait_until

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
    patch.setattr("runner.launch.api._STARTER", command_line.starter)
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


SETTINGS = [word for word in SMALL if ".fn=" not in word]


def of_a_cell(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function as a cell of a notebook defines it, which does what `function` does."""

    def in_cell(*args: Any, **settings: Any) -> Any:
        return function(*args, **settings)

    in_cell.__module__, in_cell.__qualname__ = "__main__", f"{function.__name__}_of_cell"
    in_cell.__wrapped__ = function  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["__main__"], in_cell.__qualname__, in_cell, raising=False)
    return in_cell


def test_functions_of_a_cell_are_used_in_the_process_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model_fn = of_a_cell(line, monkeypatch)
    input_fns = {"train": of_a_cell(endless, monkeypatch), "eval": of_a_cell(once, monkeypatch)}
    with mock.patch.dict(os.environ):
        run = runner.run(
            *SETTINGS, f"model_dir={tmp_path}/run", "run.inline=true", model_fn=model_fn, input_fns=input_fns
        )
    assert run.status == "finished" and run.summary["global_step"] == 4
    assert run.model_fn is model_fn and run.input_fns["eval"] is input_fns["eval"]


@pytest.mark.usefixtures("forked")
def test_functions_of_a_module_are_used_in_any_run(tmp_path: Path) -> None:
    run = runner.run(*SETTINGS, f"model_dir={tmp_path}/run", model_fn=line, input_fns={"train": endless, "eval": once})
    assert run.status == "finished" and run.model_fn is line


def test_a_function_that_a_process_of_the_run_cannot_import_is_refused(
    monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    cell = of_a_cell(line, monkeypatch)
    for settings, functions in (
        (SMALL, {"model_fn": cell}),
        (SMALL, {"input_fns": {"train": cell}}),
        ((*SMALL, "model.fn=__main__.line_of_cell"), {}),
        ((*SMALL, "run.inline=true", "tracking.backend=__main__.line_of_cell"), {}),
        ((*SMALL, "run.inline=true", "model.fn=__main__.lin_of_cell"), {}),
    ):
        with messages.raised(runner.RunError) as raised:
            runner.run(*settings, **functions)
        assert raised.value.code == 2
    with pytest.raises(runner.RunError, match="Define it with def"):
        runner.run(*SMALL, model_fn=lambda features, labels, mode: None)


IN_A_NOTEBOOK = """
import os, pathlib, signal, runner
MODULE = pathlib.Path("mine.py")
MODULE.write_text("from tests.support.line import line as model_fn")
words = [{words}, "model.fn=mine", "model_dir=run"]
run = runner.run(*words)
before = run.evaluate()["eval/loss"]
MODULE.write_text("from tests.support.line import line\\ndef model_fn(features, labels, mode, params):\\n"
                  "    return line(features, 0 * labels, mode, params)")
assert run.evaluate()["eval/loss"] != before, "the file is imported anew"
from runner.launch.api import _STARTER
if os.fork() == 0:
    assert _STARTER.server is None, "a forked process has none of it"
    os._exit(0)
assert os.wait()[1] == 0
print("server", _STARTER.server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_session_imports_tensorflow_once_and_its_server_ends_with_it_even_if_it_is_killed(tmp_path: Path) -> None:
    code = IN_A_NOTEBOOK.format(words=", ".join(map(repr, SMALL)))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == -9, ran.stderr
    imports = seconds_of_imports(tmp_path / "run")
    # Of each of three tasks, and how long the first start waited for the server's.
    assert len(imports) >= 3 and sum(secs >= 0.5 for secs in imports) <= 1
    (server,) = [int(text.split()[1]) for text in ran.stdout.splitlines() if text.startswith("server ")]
    wait_until(lambda: is_gone(server))


def seconds_of_imports(model_dir: Path) -> list[float]:
    return [line["secs"] for line in recorded(model_dir) if line.get("name") == "import"]


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
