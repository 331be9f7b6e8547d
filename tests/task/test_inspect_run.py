"""command=inspect: checkpoints with their metrics and damage, the variables of the newest, without the user's code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runner.config.schema import ConfigError
from runner.task import inspect_run
from tests.support.jobs import run
from tests.support.journal import Lines
from tests.support.trained import Put


@pytest.fixture
def trained(put_trained: Put, tmp_path: Path) -> Path:
    """A model_dir with checkpoints of the steps 0, 2 and 4, the last two evaluated."""
    put_trained("checkpoint.save_steps=2")
    return tmp_path / "run"


def inspected(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    inspect_run.inspect(model_dir)
    return capsys.readouterr().out


def test_lists_checkpoints_and_the_variables_of_the_newest(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / "summary.json").write_text(
        json.dumps({"command": "train_and_evaluate", "status": "finished", "global_step": 4, "error": None})
    )
    said = inspected(trained, capsys)
    assert said.splitlines()[:4] == [
        f"model_dir: {trained}", "command: train_and_evaluate", "status: finished", "global_step: 4",
    ]  # fmt: skip
    table = said[said.index("checkpoints\n") :].splitlines()
    assert table[1].split() == ["step", "age", "variables", "input", "state", "eval/loss", "eval/mae", "state"]
    assert re.fullmatch(r" *0  *\d+ s  *[\d.]+ k?B  *[\d.]+ k?B  *-  *-", table[2])
    assert re.fullmatch(r" *2  *\d+ s  *[\d.]+ k?B  *[\d.]+ k?B  *[\d.]+  *[\d.]+", table[3])
    assert re.fullmatch(r" *4  *\d+ s  *[\d.]+ k?B  *[\d.]+ k?B  *[\d.]+  *[\d.]+  newest", table[4])
    assert "variables of model.ckpt-4" in said
    assert re.search(r"^weight +\[\] +float32 +1$", said, re.MULTILINE)
    assert re.search(r"^weight/Momentum +\[\] +float32 +1$", said, re.MULTILINE)
    assert "_runner" not in said
    assert said.endswith("total: 3 values in 3 variables, 16 B\n")


def test_the_command_needs_no_code_of_the_users(
    put_trained: Put, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_trained()
    before = sorted(tmp_path.rglob("*"))
    gone = ("model.fn=gone.model_fn", "input.train.fn=gone.input_fn", "input.eval.fn=gone.input_fn")
    assert run(tmp_path, "command=inspect", *gone) == 0
    assert "variables of model.ckpt-4" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_damage_is_named_and_the_newest_whole_one_marked(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = trained / "model.ckpt-4.data-00000-of-00001"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 255]) + data.read_bytes()[1:])
    (trained / "model.ckpt-0.data-00000-of-00001").unlink()
    lines = {line.split()[0]: line for line in inspected(trained, capsys).splitlines() if line.strip()}
    assert lines["0"].endswith("damaged: model.ckpt-0.data-00000-of-00001 is missing")
    assert lines["2"].endswith("newest")
    assert "damaged: model.ckpt-4 cannot be read" in lines["4"]
    assert "variables of model.ckpt-2" in " ".join(lines.values())


def test_a_folder_without_a_whole_checkpoint_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in trained.glob("*.index"):
        index.write_bytes(b"")
    with pytest.raises(ConfigError, match=f"command=inspect: all checkpoints in {trained} are damaged or incomplete."):
        inspect_run.inspect(trained)
    assert capsys.readouterr().out.count("damaged: ") == 3
    for file in trained.glob("model.ckpt-*"):
        file.unlink()
    with pytest.raises(ConfigError, match=f"command=inspect: no checkpoint in {trained}."):
        inspect_run.inspect(trained)


def test_as_many_metrics_as_a_screen_takes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Lines(trained)
    journal.metrics(4, {f"eval_many/m{index}": float(index) for index in range(8)} | {"train/loss": 1.0})
    said = inspected(trained, capsys)
    assert "eval_many/m3  state\n" in said and "train/loss" not in said
    assert "... and 4 more metrics: eval_many/m4, eval_many/m5, eval_many/m6, eval_many/m7" in said


def test_the_last_evaluation_of_a_step_counts(tmp_path: Path) -> None:
    journal = Lines(tmp_path)
    for accuracy in (0.5, 0.75):
        journal.metrics(10, {"eval/accuracy": accuracy})
        journal.event("evaluated", step=10)
    assert inspect_run.eval_metrics(tmp_path) == {10: {"eval/accuracy": 0.75}}


def test_a_folder_without_summary_says_so(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no summary.json in this folder" in inspected(trained, capsys)
