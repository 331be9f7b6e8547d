"""docs/migrating.md tells the truth: its script and its snippets run, its commands print what is shown under them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.classic import run_config
from runner.classic.compat import names
from runner.classic.compat.differences import RUN_CONFIG

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "migrating.md").read_text()
SCRIPT, OLD_SCRIPT, *SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHOWN = re.findall(r"^```\n(python -m runner\.classic[^`]*)```\n\n```text\n(.*?)```$", TEXT, re.DOTALL | re.MULTILINE)


def rows(chapter: str) -> list[list[str]]:
    """The cells of the table of a chapter, without its head."""
    lines = [
        line for line in TEXT.partition(f"## {chapter}\n")[2].partition("\n## ")[0].splitlines() if line[:1] == "|"
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrating")
    (path / "train.py").write_text(SCRIPT)
    (path / "old.py").write_text(OLD_SCRIPT)
    return path


def printed(command: str, folder: Path) -> str:
    command = command.replace("python -m", f"'{sys.executable}' -m")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    ran = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.processes
def test_the_script_is_checked_as_shown(folder: Path) -> None:
    (command, shown), *_ = SHOWN
    assert printed(command, folder) == shown


@pytest.mark.processes
def test_the_script_runs_as_it_stands_and_the_snippets_after_it(folder: Path, monkeypatch: Any) -> None:
    _, (command, shown), _ = SHOWN
    assert printed(command, folder).endswith(shown)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    space: dict[str, Any] = {"__name__": "migrating"}
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/migrating.md", "exec"), space)
    monkeypatch.delitem(sys.modules, "train")


@pytest.mark.processes
def test_a_script_of_tensorflow_1_runs_as_it_stands(folder: Path) -> None:
    *_, (command, shown) = SHOWN
    assert printed(command, folder) == shown


def test_the_table_of_run_config_names_every_argument() -> None:
    told = {name: what for names_, what in rows("RunConfig") for name in quoted(names_)}
    arguments = inspect.signature(run_config.RunConfig).parameters
    assert {*told} == {*arguments} - {"tf_config", "engine"}
    assert {name for name, what in told.items() if what.startswith("no effect")} == {*RUN_CONFIG} - {
        "experimental_distribute"
    }


def test_the_table_of_what_is_gone_names_all_of_it() -> None:
    told = {name for names_, _ in rows("What is not there any more") for name in quoted(names_)}
    assert {*names.GONE} <= told
