"""Runs that were killed by SIGKILL, again and again, come to the very bits of an undisturbed one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.checkpoint.layout import latest_checkpoint
from runner.checkpoint.reader import Reader
from runner.tracking.journal import journal_path, read_journal
from tests.support.killed import CASES, MAX_STEPS

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
KILLED = "9 9 9 9 9 9 0"


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs; one process forks them, since each start of TensorFlow costs 4 s."""
    folder = tmp_path_factory.mktemp("lives")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{case} {KILLED}" for case in CASES]
    return folder


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss; of a step that was taken several times, the last."""
    lines = read_journal(journal_path(folder))[0]
    return {line["step"]: line["metrics"]["train/loss"] for line in lines if "train/loss" in line.get("metrics", {})}


def hashes(folder: Path) -> dict[str, str]:
    """Variable -> sha256 of its value in the latest checkpoint."""
    path = latest_checkpoint(folder)
    assert path is not None and path.endswith(f"-{MAX_STEPS}")
    reader = Reader(path)
    values = reader.get_many(reader.names())
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in values.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_killed_comes_to_the_bits_of_an_undisturbed_one(case: str, lives: Path) -> None:
    expected, found = losses(lives / f"{case}-undisturbed"), losses(lives / f"{case}-killed")
    assert list(expected) == list(range(1, MAX_STEPS + 1))
    assert dict(sorted(found.items())) == expected
    assert len(hashes(lives / f"{case}-killed")) > 8
    assert hashes(lives / f"{case}-killed") == hashes(lives / f"{case}-undisturbed")


@pytest.mark.parametrize("case", CASES)
def test_what_a_kill_left_half_written_is_cleared_away(case: str, lives: Path) -> None:
    left = {path.name for path in (lives / f"{case}-killed").iterdir()}
    undisturbed = {path.name for path in (lives / f"{case}-undisturbed").iterdir()}
    assert {name for name in left if "tfevents" not in name} == {name for name in undisturbed if "tfevents" not in name}
