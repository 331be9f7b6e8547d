"""Runs that revision b5fe916 left go on and are evaluated bit for bit (tests/data/runs_of_b5fe916).

Where nobody ran b5fe916 on a CPU of this kind, they come to the numbers of another kind to a float32's precision.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command_line import CommandLine
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "data" / "runs_of_b5fe916"

_spec = importlib.util.spec_from_file_location("write_runs", RUNS / "write_runs.py")
assert _spec is not None and _spec.loader is not None
write_runs: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write_runs)


def run(folder: Path, *overrides: str, command_line: CommandLine) -> dict[str, Any]:
    """What `python -m runner` with these overrides leaves in the summary of the command."""
    done = command_line(f"model_dir={folder / 'run'}", *overrides, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    command = next((o.removeprefix("command=") for o in overrides if o.startswith("command=")), None)
    name = "summary.json" if command is None else f"summary.{command}.json"
    summary: dict[str, Any] = json.loads((folder / "run" / name).read_text())
    return summary


RECORDED = sorted(path.name for path in (RUNS / "expected").iterdir())
CPU = write_runs.cpu()
"""Expected are the bits of this kind of CPU where they are recorded."""


@pytest.fixture
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, np.ndarray]]:
    """(its name, a folder with a copy of it as `run` and its user code, what it came to)."""
    shutil.copytree(RUNS / request.param, tmp_path / "run")
    shutil.copy(RUNS / "small_model.py", tmp_path)
    with np.load(RUNS / "expected" / (CPU if CPU in RECORDED else RECORDED[0]) / f"{request.param}.npz") as expected:
        return request.param, tmp_path, dict(expected)


def assert_as_recorded(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        if CPU in RECORDED or np.asarray(value).dtype.kind != "f":
            assert np.asarray(value).tobytes() == np.asarray(expected[key]).tobytes(), key
        else:
            np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("old_run", slow_but(write_runs.RUNS, "mirrored"), indirect=True)
def test_it_goes_on_to_the_bits_of_one_that_was_never_stopped(
    old_run: tuple[str, Path, dict[str, np.ndarray]], command_line: CommandLine
) -> None:
    name, folder, expected = old_run
    settings = (*write_runs.COMMON, *write_runs.RUNS[name], "train.max_steps=20")
    run(folder, *settings, command_line=command_line)
    values = write_runs.values(folder / "run" / "model.ckpt-20")
    assert_as_recorded(values, {key: value for key, value in expected.items() if not key.startswith("metrics/")})


@pytest.mark.parametrize("old_run", slow_but(write_runs.RUNS, "default_counted"), indirect=True)
def test_it_is_evaluated_with_the_config_that_it_left(
    old_run: tuple[str, Path, dict[str, np.ndarray]], command_line: CommandLine
) -> None:
    _, folder, expected = old_run
    metrics = run(folder, "command=evaluate", command_line=command_line)["metrics"]
    recorded = {key: float(value) for key, value in expected.items() if key.startswith("metrics/")}
    assert_as_recorded({f"metrics/{key}": value for key, value in metrics.items()}, recorded)


def test_runs_of_before_are_listed_compared_and_reported(tmp_path: Path, command_line: CommandLine) -> None:
    names = list(write_runs.RUNS)[:2]
    for name in names:
        shutil.copytree(RUNS / name, tmp_path / "outputs" / name)

    def answer(*words: str) -> dict[str, Any]:
        done = command_line(*words, "run.output=json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    listed = answer("command=list")["runs"]
    assert {run["model_dir"] for run in listed} == {f"outputs/{name}" for name in names}
    assert all(run["step"] and run["value"] is not None for run in listed)
    differences = answer("command=diff", f"diff.runs=[outputs/{names[0]},outputs/{names[1]}]")
    assert differences["settings"]
    assert answer("command=report")["runs"] == 2
    assert names[1] in (tmp_path / "report.html").read_text()
