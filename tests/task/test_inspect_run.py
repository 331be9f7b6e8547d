"""command=inspect: checkpoints with their metrics and damage, the variables of the newest, without the user's code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runner.checkpoint.retention import note_metrics
from runner.config.schema import ConfigError
from runner.task import inspect_run
from tests.support.jobs import run
from tests.support.messages import Messages
from tests.support.trained import Put


@pytest.fixture
def trained(put_trained: Put, tmp_path: Path) -> Path:
    """A model_dir with checkpoints of the steps 0, 2 and 4, the last two evaluated."""
    put_trained("checkpoint.save_steps=2")
    return tmp_path / "run"


def inspected(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    inspect_run.inspect(model_dir)
    return capsys.readouterr().out


def test_lists_checkpoints_and_the_variables_of_the_newest(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    (trained / "summary.json").write_text(
        json.dumps({"command": "train_and_evaluate", "status": "finished", "global_step": 4, "error": None})
    )
    said = inspected(trained, capsys)
    for line in said.splitlines()[:4]:
        messages.same("line", line)
    table = said[said.index("checkpoints\n") :].splitlines()
    assert table[1].split() == ["step", "age", "variables", "input", "state", "eval/loss", "eval/mae", "state"]
    assert re.fullmatch(r" *0  *\d+ s  *[\d.]+ k?B  *[\d.]+ k?B  *-  *-", table[2])
    assert re.fullmatch(r" *2  *\d+ s  *[\d.]+ k?B  *[\d.]+ k?B  *[\d.]+  *[\d.]+", table[3])
    assert re.fullmatch(r" *4  *\d+ s  *[\d.]+ k?B  *[\d.]+ k?B  *[\d.]+  *[\d.]+  newest", table[4])
    messages.same("variables", said[said.index("variables of ") :])
    assert "_runner" not in said


def test_the_command_needs_no_code_of_the_users(
    put_trained: Put, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    put_trained()
    before = sorted((tmp_path / "run").rglob("*"))
    gone = ("model.fn=gone.model_fn", "input.train.fn=gone.input_fn", "input.eval.fn=gone.input_fn")
    assert run(tmp_path, "command=inspect", *gone) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("variables")]
    messages.same("line", line)
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_damage_is_named_and_the_newest_whole_one_marked(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    data = trained / "model.ckpt-4.data-00000-of-00001"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 255]) + data.read_bytes()[1:])
    (trained / "model.ckpt-0.data-00000-of-00001").unlink()
    lines = {line.split()[0]: line for line in inspected(trained, capsys).splitlines() if line.strip()}
    messages.same("damaged", lines["0"].partition("damaged: ")[2])
    assert lines["2"].endswith("newest")
    messages.same("damaged", lines["4"].partition("damaged: ")[2])
    messages.same("line", lines["variables"])


def test_a_folder_without_a_whole_checkpoint_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    for index in trained.glob("*.index"):
        index.write_bytes(b"")
    with messages.raised(ConfigError):
        inspect_run.inspect(trained)
    assert capsys.readouterr().out.count("damaged: ") == 3
    for file in trained.glob("model.ckpt-*"):
        file.unlink()
    with messages.raised(ConfigError):
        inspect_run.inspect(trained)


def test_as_many_metrics_as_a_screen_takes(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    note_metrics(trained / "model.ckpt-4", {f"eval_many/m{index}": float(index) for index in range(8)})
    said = inspected(trained, capsys)
    assert "train/loss" not in said
    (head,) = [line.split() for line in said.splitlines() if "eval_many/m3" in line]
    assert head[-2:] == ["eval_many/m3", "state"]
    (more,) = [line for line in said.splitlines() if "eval_many/m4" in line]
    messages.same("line", more)


def test_the_last_evaluation_of_a_step_counts(trained: Path) -> None:
    for accuracy in (0.5, 0.75):
        note_metrics(trained / "model.ckpt-4", {"eval/accuracy": accuracy})
    assert inspect_run.find_checkpoints(trained)[-1].metrics["eval/accuracy"] == 0.75


def test_a_folder_without_summary_says_so(
    trained: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    (line,) = [line for line in inspected(trained, capsys).splitlines() if "summary.json" in line]
    messages.same("line", line)
