"""docs/how_to/export.md tells the truth: its programs run and its commands are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner.config.parsing import parse
from tests.config.test_config import composed

TEXT = (Path(__file__).parents[2] / "docs" / "how_to" / "export.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line, comments=True) for kind, block in BLOCKS if not kind for line in block.splitlines()]
RECEIVER, PROGRAM = (block for kind, block in BLOCKS if kind == "python")


def test_the_program_exports_what_it_says(capsys: Any) -> None:
    found: dict[str, Any] = {"__name__": "docs_export"}
    exec(compile(PROGRAM, "docs/how_to/export.md", "exec"), found)
    signatures, prediction = capsys.readouterr().out.splitlines()[-2:]
    assert f"# {signatures}" in PROGRAM and re.fullmatch(r"\[[\d.]+\]", prediction)
    folders = [Path(path).parent.name for path in found["result"].exports]
    assert folders == ["best", "final", "best"]
    assert (Path(found["path"].decode()) / "saved_model.pb").exists()


def test_the_receiver_takes_examples() -> None:
    found: dict[str, Any] = {}
    exec(RECEIVER, found)
    with tf.Graph().as_default():
        assert set(found["receiver_fn"]().receiver_tensors) == {"examples"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_are_accepted(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "outputs" / "mine"
    run.mkdir(parents=True)
    (run / "checkpoint").touch()
    (run / "model.ckpt-500.index").touch()
    monkeypatch.chdir(tmp_path)
    assert command[:3] == ["python", "-m", "runner"]
    assert parse(composed(command[3:])).exports
