"""docs/how_to/clusters.md tells the truth: its commands print what is shown under them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.config.schema import ClusterConfig
from runner.config.settings.limits import limits_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how_to" / "clusters.md").read_text()
SHOWN = re.findall(r"^```\n([^`]*command=cluster_info[^`]*)^```\n\n```text\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.processes
@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=range(len(SHOWN)))
def test_a_command_prints_what_the_document_shows(command: str, printed: str, tmp_path: Path) -> None:
    assert command.count("python -m runner") == 1
    command = command.replace("python -m runner", f"'{sys.executable}' -m runner")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=150, check=False,
    )  # fmt: skip
    assert result.stdout == printed
    assert result.returncode == (2 if printed.startswith("runner: ") else 0)


def test_the_document_shows_what_is_found_where_nobody_else_starts_tasks_under_slurm_and_a_mistake() -> None:
    sources = [re.findall(r"^source +(\w+)", printed, re.MULTILINE) for _, printed in SHOWN]
    assert sources == [["local"], ["slurm"], []]


def test_the_table_names_every_resolver() -> None:
    (resolver,) = (each for each in dataclasses.fields(ClusterConfig) if each.name == "resolver")
    chapter = TEXT.partition("## Who this process is")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)` \| ", chapter, re.MULTILINE))
    assert rows == set(limits_of(resolver).choices) - {"auto", "tpu"}
