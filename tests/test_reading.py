"""`.ci/reading.py`, by which `make lint` sees that code does not become harder to read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "reading.py"
pytestmark = pytest.mark.processes
PLAIN = '''"""A module."""


def total(numbers):
    found = 0
    for number in numbers:
        if number > 0:
            found += number
    return found
'''
FOLDED = """
def pairs(rows):
    first, second = rows, [[cell if cell else 0 for cell in row] for row in rows]
    while (row := first.pop()) or second:
        yield row
"""
BRANCHED = "def choose(x):\n" + "".join(f"    if x == {number}:\n        return {number}\n" for number in range(16))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose package `models` is plain, and has a baseline."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "runner" / "models").mkdir(parents=True)
    (tmp_path / "runner" / "models" / "line.py").write_text(PLAIN * 10)
    assert call(tmp_path, "--write").returncode == 0
    return tmp_path


def call(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / ".ci" / "reading.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_what_is_as_plain_as_before_passes(project: Path) -> None:
    (project / "runner" / "models" / "other.py").write_text(PLAIN)
    assert call(project, "--check").returncode == 0


@pytest.mark.parametrize(
    ("text", "figures"),
    [(FOLDED, {"tuples", "comprehensions", "nested"}), (BRANCHED, {"complex"})],
    ids=["folds", "branches"],
)
def test_what_is_harder_to_read_than_before_fails_by_its_figures(project: Path, text: str, figures: set[str]) -> None:
    (project / "runner" / "models" / "other.py").write_text(text * 4)
    checked = call(project, "--check")
    named = {line.split()[1] for line in checked.stderr.splitlines() if line.startswith("runner/models: ")}
    assert checked.returncode == 1
    assert figures <= named


def test_a_new_package_is_held_to_the_goals(project: Path) -> None:
    (project / "runner" / "fresh").mkdir()
    (project / "runner" / "fresh" / "line.py").write_text(FOLDED)
    checked = call(project, "--check")
    assert checked.returncode == 1
    assert "runner/fresh: nested" in checked.stderr
