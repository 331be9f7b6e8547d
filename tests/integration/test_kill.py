"""Runs that were killed by SIGKILL, again and again, come to the very bits of an undisturbed one."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.checkpoint.reader import Reader
from runner.checkpoint_files.layout import latest_checkpoint
from tests.support.journal import recorded
from tests.support.killed import CASES, MAX_STEPS
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
KILLED = "9 9 9 9 9 9 0"


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of the runs of a case; one process forks them, since each start of TensorFlow costs 4 s."""

    @functools.cache
    def folder_of(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.killed", str(folder), case],
            cwd=ROOT, capture_output=True, text=True, timeout=500,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == f"{KILLED}\n"
        return folder

    return folder_of


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss; of a step that was taken several times, the last."""
    lines = recorded(folder)
    return {line["step"]: line["metrics"]["train/loss"] for line in lines if "train/loss" in line.get("metrics", {})}


def hashes(folder: Path) -> dict[str, str]:
    """Variable -> sha256 of its value in the latest checkpoint."""
    path = latest_checkpoint(folder)
    assert path is not None and path.endswith(f"-{MAX_STEPS}")
    reader = Reader(path)
    values = reader.get_many(reader.names())
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in values.items()}


@pytest.mark.parametrize("case", slow_but(CASES, "default"))
def test_a_run_that_was_killed_comes_to_the_bits_of_an_undisturbed_one(case: str, lives: Callable[[str], Path]) -> None:
    """And what a kill left half written is cleared away."""
    undisturbed, killed = lives(case) / "undisturbed", lives(case) / "killed"
    expected, found = losses(undisturbed), losses(killed)
    assert list(expected) == list(range(1, MAX_STEPS + 1))
    assert dict(sorted(found.items())) == expected
    assert len(hashes(killed)) > 8
    assert hashes(killed) == hashes(undisturbed)
    assert names(killed) == names(undisturbed)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name}
