"""Every benchmark script runs: one round of a few steps, whose numbers mean nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted({path.name for path in (ROOT / "benchmarks").glob("[a-z]*.py")} - {"compare.py"})
"""All but the one that runs the others."""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("command", [*SCRIPTS, "checkpoint.py --peaks"])
def test_one_tiny_round_runs(command: str, tmp_path: Path) -> None:
    script, *options = command.split()
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--rounds", "1", "--tiny", *options], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert "ratio" in ran.stdout
