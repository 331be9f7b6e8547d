"""Runs that revision 8664505 left go on and are evaluated bit for bit (tests/data/runs_of_8664505)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "data" / "runs_of_8664505"

_spec = importlib.util.spec_from_file_location("write_runs", RUNS / "write_runs.py")
assert _spec is not None and _spec.loader is not None
write_runs: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write_runs)


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    """What `python -m runner` with these overrides leaves in the summary of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "runner", f"model_dir={folder / 'run'}", *overrides],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    command = next((o.removeprefix("command=") for o in overrides if o.startswith("command=")), None)
    name = "summary.json" if command is None else f"summary.{command}.json"
    summary: dict[str, Any] = json.loads((folder / "run" / name).read_text())
    return summary


@pytest.fixture(params=write_runs.RUNS)
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, np.ndarray]]:
    """(its name, a folder with a copy of it as `run` and its user code, what it came to)."""
    shutil.copytree(RUNS / request.param, tmp_path / "run")
    shutil.copy(RUNS / "small_model.py", tmp_path)
    with np.load(RUNS / "expected" / f"{request.param}.npz") as expected:
        return request.param, tmp_path, dict(expected)


def test_it_goes_on_to_the_bits_of_one_that_was_never_stopped(
    old_run: tuple[str, Path, dict[str, np.ndarray]],
) -> None:
    name, folder, expected = old_run
    run(folder, *write_runs.COMMON, *write_runs.RUNS[name], "train.max_steps=20")
    values = write_runs.values(folder / "run" / "model.ckpt-20")
    assert values.keys() == {key for key in expected if not key.startswith("metrics/")}
    for key, value in values.items():
        assert np.asarray(value).tobytes() == expected[key].tobytes(), key


def test_it_is_evaluated_with_the_config_that_it_left(old_run: tuple[str, Path, dict[str, np.ndarray]]) -> None:
    _, folder, expected = old_run
    metrics = run(folder, "command=evaluate")["metrics"]
    assert {f"metrics/{key}": value for key, value in metrics.items()} == {
        key: float(value) for key, value in expected.items() if key.startswith("metrics/")
    }
