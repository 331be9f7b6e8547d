"""The live line before TensorFlow is there: who draws it, and that it is gone before the task says something."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.system.start_status import SCREEN, StartStatus, is_for, take_terminal
from tests.support.jobs import SMALL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], True), (["-m", "train.max_steps=1,2"], True), (["run.progress=rich"], True), (["--help"], False),
        (["--cfg", "job"], False), (["run.progress=plain"], False), (["run.progress=off"], False),
    ],
)  # fmt: skip
def test_a_command_that_runs_something_draws_a_line(words: list[str], expected: bool) -> None:
    assert is_for(words) is expected


def test_it_draws_nothing_for_a_log_and_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_for([])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_for([])


def test_the_line_is_gone_when_the_task_has_the_terminal() -> None:
    status = StartStatus()
    assert status.lend("importing TensorFlow") == {} and not status.say("x")
    status.show("reading the config")
    env = status.lend("importing TensorFlow")
    take_terminal(env)
    assert SCREEN not in env and not status.say("x"), "nothing is shown any more"
    take_terminal(env)  # asks nobody


def test_the_line_goes_with_a_task_that_dies() -> None:
    status = StartStatus()
    status.show("reading the config")
    os.close(int(status.lend("importing TensorFlow")[SCREEN]))
    deadline = time.monotonic() + 120
    while status.say(""):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_on_a_terminal_says_what_it_does_from_the_beginning_to_the_end(tmp_path: Path) -> None:
    terminal, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
    words = [word for word in SMALL if not word.startswith("run.progress")]
    command = [sys.executable, "-m", "runner", *words, f"model_dir={tmp_path}/run", "train.max_epochs=2"]
    command += ["input.train.fn=tests.support.jobs.once", "train.max_steps=null"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=child, stdout=child, stderr=child)
    os.close(child)
    text, first, began = b"", 0.0, time.monotonic()
    while True:
        ready, _, _ = select.select([terminal], [], [], 120)
        assert ready, text
        try:
            text += os.read(terminal, 65536)
        except OSError:  # Linux, where the other end is closed
            break
        if not first and "reading the config" in text.decode(errors="replace"):
            first = time.monotonic() - began
    assert process.wait() == 0, text.decode()
    whole = time.monotonic() - began
    said = text.decode()
    order = [
        "reading the config",
        "importing TensorFlow",
        "ready after",
        "epoch 2/2",
        "step 8/8",
        "eval at step 8",
        "status",
    ]
    places = [said.rfind(words) for words in order]
    assert 0 < first < whole / 4  # 0.3 s of 8 on a machine that does nothing else
    assert all(place >= 0 for place in places), dict(zip(order, places, strict=True))
    assert said.rfind("importing TensorFlow") < said.index("train_and_evaluate tests."), "the line is gone by then"
    assert "…" not in said
