"""docs/how_to/hooks.md tells the truth: its hook runs from the command line that it shows."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from runner import Hook
from tests.support.command_line import CommandLine
from tests.support.jobs import results, run
from tests.support.journal import events_in, metrics_of_steps

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "how_to" / "hooks.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"```\n(python -m runner .*?)```", TEXT, re.DOTALL)
REFERENCE = (DOCS / "reference" / "hooks.md").read_text()
NATIVE = "model.fn=tests.support.line.native_line"


def test_the_hook_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, *_ = CODE
    _, command = COMMANDS
    (tmp_path / "my_hooks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        (override,) = shlex.split(command)[3:]
        assert run(tmp_path, override.replace("steps: 50", "steps: 3"), "train.max_steps=7") == 0
    finally:
        sys.modules.pop("my_hooks", None)
    assert results(tmp_path)[0]["global_step"] == 7
    assert [line.split()[0] for line in (tmp_path / "loss.txt").read_text().splitlines()] == ["1-3", "4-6"]


def test_what_the_hook_of_the_page_logs_is_recorded_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, code, *_ = CODE
    (tmp_path / "my_logs.py").write_text(code.replace("steps=50", "steps=3"))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert run(tmp_path, "train.hooks=[{fn: my_logs.Losses}]", "train.max_steps=7") == 0
    finally:
        sys.modules.pop("my_logs", None)
    logged = [step for step, values in metrics_of_steps(tmp_path / "run") if "train/loss_spread" in values]
    assert logged == [3, 6]
    assert [(one["name"], one["step"]) for one in events_in(tmp_path / "run", "image")] == [
        ("train/losses", 3), ("train/losses", 6),
    ]  # fmt: skip


@pytest.mark.processes
def test_the_hook_of_the_page_that_fetches_counts_each_example(tmp_path: Path, command_line: CommandLine) -> None:
    code = CODE[2]
    command, _ = COMMANDS
    (tmp_path / "my_errors.py").write_text(code.replace("run.log({", 'run.log({"counted": self._examples, '))
    words = shlex.split(command)[3:]
    done = command_line(*words, "train.max_steps=100", "tracking=none", "model_dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logged: dict[str, float] = {}
    for _, values in metrics_of_steps(tmp_path / "run"):
        logged.update(values)
    assert logged["eval/counted"] == 360
    assert 0 < logged["eval/sure_and_wrong"] < 0.5


def test_the_callback_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (command,) = re.findall(r"```bash\n(python -m runner .*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_callbacks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    hook, *epochs, _ = shlex.split(command.replace("\\\n", " "))[3:]
    try:
        assert run(tmp_path, hook, *epochs, "input.train.fn=tests.support.jobs.once", NATIVE) == 0
    finally:
        sys.modules.pop("my_callbacks", None)
    assert [line.split()[0] for line in (tmp_path / "epochs.txt").read_text().splitlines()] == ["0", "1"]


def test_the_table_of_methods_is_that_of_the_class() -> None:
    named = re.findall(r"^\| `(\w+)\((.*?)\)` \|", REFERENCE, re.MULTILINE)
    methods = {name for name, member in vars(Hook).items() if callable(member)}
    assert {name for name, _ in named} == methods
