"""`--help KEY`, `--help GROUP`, `--help WORD` and `--version`: answered at once, from the comments of conf/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import runner
from runner.config import schema
from runner.config.help import answer, page_on
from runner.config.mistakes import ConfigError
from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "conf").rglob("*.yaml")), *sorted((ROOT / "runner").rglob("*.py"))]
SOURCES = "".join(path.read_text() for path in FILES)
"""The comments and messages that a user may read, where the repository is not in sight."""


def ask(*words: str) -> str:
    """Return the answer to a command line, with the line end that it is printed with."""
    return answer(words) + "\n"


def test_a_key_is_told_in_full_with_its_default_and_what_it_takes() -> None:
    assert ask("--help", "checkpoint.keep_max") == (
        "checkpoint.keep_max=5\n    Keep the newest N checkpoints. null: all.\n    A whole number or null, at least "
        "1.\n"
    )
    assert ask("-h", "train.nan").endswith("    Allowed: stop, rollback, ignore.\n")
    assert ask("--help", "run.debug").endswith(", null.\n")
    assert ask("--help", "model.classic").endswith("    Allowed: auto, true, false.\n")
    assert ask("--help", "cluster.num_workers").endswith("    A whole number, at least 1, at most 10000.\n")
    assert ask("--help", "train.steps_per_loop").endswith("    A whole number or auto, at least 1.\n")
    assert "input.train.options.autotune.cpu_budget=null\n" in ask("--help", "input.train.options")
    below = ask("--help", "train.early_stopping")
    assert (
        below.count("train.early_stopping.") >= 5 and "train.early_stopping.patience_evals=1\n    End after N" in below
    )


def test_a_group_is_told_in_full_with_its_files() -> None:
    said = ask("--help", "strategy")
    assert said.startswith("strategy=<one of: central_storage, default, mirrored, multi_worker, ")
    assert "--- strategy=mirrored ---" in said and "strategy.virtual_devices=null\n    " in said


def test_a_word_finds_a_line_for_each_key_that_speaks_of_it() -> None:
    lines = ask("--help", "early").splitlines()
    assert any(line.startswith("train.early_stopping.min_steps=0  ") for line in lines)
    assert lines[0].startswith("train.early_stopping: ")


def test_keys_with_the_word_come_before_comments_with_it_and_words_only_begin_with_it() -> None:
    lines = ask("--help", "seed").splitlines()
    of_key = [line.split("=")[0].endswith("seed") for line in lines]
    assert of_key[0] and not of_key[-1] and of_key == sorted(of_key, reverse=True)
    assert not any("memory_growth" in line for line in ask("--help", "early").splitlines())  # "nearly"


def test_there_is_a_line_for_each_key() -> None:
    lines = ask("--help", "keys").splitlines()
    told = {line.split("=")[0].split(":")[0] for line in lines}
    tree = schema.flatten({key: value for key, value in schema.to_tree(schema.Config()).items()
                           if key not in ("model", "input", "strategy", "eval_strategy")})  # fmt: skip
    assert set(tree) <= told, set(tree) - told
    assert max(map(len, lines)) <= 120
    shown = {line.split("=")[0].split(":")[0] for line in ask("--help").splitlines()}
    assert {*tree, "command", "model.params.learning_rate", "input.train.fn"} <= shown


def test_what_is_not_known_is_said_with_what_is_near(messages: Messages) -> None:
    with messages.raised(schema.ConfigError):
        ask("--help", "checkpiont")


def test_the_users_own_files_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# My net.\n\nparams:\n  # How wide.\n  width: 8\n")
    monkeypatch.chdir(tmp_path)
    assert "--- model=mine ---\nMy net.\n" in ask("--help", "model")
    assert ask("--help", "model.params.width").endswith("with model=mine: model.params.width=8\n    How wide.\n")


@pytest.mark.parametrize("text", ["defaults: [\n", "defaults: []\n", "hydra: {help: {header: a}}\n", "- a\n", ""])
def test_a_start_file_without_texts_is_left_to_hydra(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "runner.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert answer(["--help"]) == ""


@pytest.mark.processes
def test_help_is_answered_before_hydra_is_imported(tmp_path: Path, messages: Messages) -> None:
    write = "# My start.\ndefaults:\n  - model: mine\nhydra: {help: {header: HEAD, footer: FOOT}}\n"
    for name, text in {"runner.yaml": write, "model/mine.yaml": "# My net.\n\n# How wide.\nwidth: 8\n"}.items():
        (tmp_path / "conf" / "model").mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    imported = "print({'hydra', 'omegaconf'} & {*sys.modules})"
    code = f"import sys; from runner.__main__ import main\ntry: main()\nfinally: {imported}"
    env = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}
    for words, code_of_it, first in (
        (["--help"], 0, "HEAD"), (["-h", "run.seed"], 0, "run.seed=1"), (["--help", "checkpiont"], 2, "set()"),
    ):  # fmt: skip
        asked = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
        )
        assert (asked.returncode, asked.stdout.splitlines()[0]) == (code_of_it, first), asked.stderr
        assert asked.stdout.endswith("\nset()\n") or asked.stdout == "set()\n"
        if words == ["--help"]:
            assert "  model: mine, custom, digits, " in asked.stdout and "\nFOOT\n" in asked.stdout
            assert re.search(r"^model\.width=8 +How wide\.$", asked.stdout, re.M)
        if asked.returncode:
            messages.same(f"exit {asked.returncode}", asked.stderr)


def test_the_version_is_ours() -> None:
    said = ask("--version")
    assert said.startswith(f"estimator-runner {runner.__version__} (tensorflow ") and said.count("\n") == 1


def test_a_package_that_is_installed_by_another_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    version_of = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version_of(f"{name}-of-tonight" if name == "keras" else name))
    assert "(tensorflow " in ask("--version") and "keras" not in ask("--version")


def test_a_page_is_printed_whole_or_a_part_of_it() -> None:
    page = (ROOT / "docs" / "how_to" / "training.md").read_text()
    assert page_on("training.md") == page.rstrip()
    part = page_on("training.md#input")
    assert part.startswith("## Input\n") and part in page
    below = page[page.index("## Learning rate") : page.index("## Precision")].rstrip()
    assert page_on("docs/how_to/training.md#learning-rate") == below, "with the headings below it"


def test_a_page_or_heading_that_is_not_there_is_refused_with_the_nearest(messages: Messages) -> None:
    with messages.raised(ConfigError):
        page_on("training.md#inptu")
    with pytest.raises(ConfigError, match=r"Did you mean 'training\.md'"):
        page_on("trainings.md")


@pytest.mark.parametrize("page", sorted(set(re.findall(r"--help (\w+\.md(?:#[\w-]+)?)", SOURCES))))
def test_a_page_that_a_comment_or_message_names_is_there(page: str) -> None:
    assert page_on(page)


def test_no_comment_or_message_names_a_file_that_only_the_repository_has() -> None:
    assert not re.findall(r"docs/how_to/\S+|docs/reference/\S+", SOURCES)
