"""`--help KEY`, `--help GROUP`, `--help WORD` and `--version`: answered at once, from the comments of conf/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.config import schema
from runner.launch import app


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the answer to a command line that must succeed."""

    def ask(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["runner", *words])
        assert app.run_command_line() == code
        answer = capsys.readouterr()
        return answer.out if code == 0 else answer.err

    return ask


def test_a_key_is_told_in_full_with_its_default_and_what_it_takes(ask: Any) -> None:
    assert ask("--help", "checkpoint.keep_max") == (
        "checkpoint.keep_max=5\n    Keep the newest N checkpoints. null: all.\n    A whole number or null, at least "
        "1.\n"
    )
    assert ask("-h", "train.nan").endswith("    Allowed: stop, rollback, ignore.\n")
    assert ask("--help", "model.classic").endswith("    Allowed: auto, true, false.\n")
    assert ask("--help", "cluster.num_workers").endswith("    A whole number, at least 1, at most 10000.\n")
    assert ask("--help", "train.steps_per_loop").endswith("    A whole number or auto, at least 1.\n")
    assert "input.train.options.autotune.cpu_budget=null\n" in ask("--help", "input.train.options")
    below = ask("--help", "train.early_stopping")
    assert (
        below.count("train.early_stopping.") >= 5 and "train.early_stopping.patience_evals=1\n    End after N" in below
    )


def test_a_group_is_told_in_full_with_its_files(ask: Any) -> None:
    said = ask("--help", "strategy")
    assert said.startswith("strategy=<one of: central_storage, default, mirrored, multi_worker, ")
    assert "--- strategy=mirrored ---" in said and "strategy.virtual_devices=null\n    " in said


def test_a_word_finds_a_line_for_each_key_that_speaks_of_it(ask: Any) -> None:
    lines = ask("--help", "early").splitlines()
    assert any(line.startswith("train.early_stopping.min_steps=0  ") for line in lines)
    assert all("early" in line.lower() for line in lines if line.startswith("train.early"))


def test_there_is_a_line_for_each_key(ask: Any) -> None:
    lines = ask("--help", "keys").splitlines()
    told = {line.split("=")[0].split(":")[0] for line in lines}
    tree = schema.flatten({key: value for key, value in schema.to_tree(schema.Config()).items()
                           if key not in ("model", "input", "strategy", "eval_strategy")})  # fmt: skip
    assert set(tree) <= told, set(tree) - told
    assert max(map(len, lines)) <= 150


def test_what_is_not_known_is_said_with_what_is_near(ask: Any) -> None:
    said = ask("--help", "checkpiont", code=2)
    assert said.startswith("runner: --help checkpiont: no key or group has this name, and no comment contains it. Did")
    assert "Did you mean 'checkpoint'?" in said


def test_the_users_own_files_are_told_of(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# My net.\n\nparams:\n  # How wide.\n  width: 8\n")
    monkeypatch.chdir(tmp_path)
    assert "--- model=mine ---\nMy net.\n" in ask("--help", "model")
    assert ask("--help", "model.params.width").endswith("with model=mine: model.params.width=8\n    How wide.\n")


def test_the_version_is_ours(ask: Any) -> None:
    said = ask("--version")
    assert said.startswith(f"tf-runner {runner.__version__} (tensorflow ") and said.count("\n") == 1
