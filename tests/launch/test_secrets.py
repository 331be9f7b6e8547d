"""No secret reaches the screen when the supervisor itself fails, nor a file that others may read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = """
import sys
from runner.launch import app, supervisor
def fail(*args, **kwargs):
    raise RuntimeError("cannot log in with hunter22")
supervisor.run = fail
sys.exit(app.run_command_line())
"""
WATCHED = """
import os, pathlib, sys
from runner.launch import app
modes = set()
def watch(event, args):
    if event == "os.rename":  # a file gets its name with the mode that it keeps
        modes.add((pathlib.Path(args[1]).name, oct(os.stat(args[0]).st_mode & 0o777)))
    if event == "open" and isinstance(args[1], str) and "w" in args[1] and str(args[0]).endswith(".yaml"):
        modes.add((str(args[0]), "opened"))
sys.addaudithook(watch)
code = app.run_command_line()
print(*sorted(modes), sep="\\n")
sys.exit(code)
"""
SECRETS = ("+model.params.db_password=hunter22", "run.secrets=[customer_id]", "+model.params.customer_id=cust4711")


def run(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *SECRETS, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("more", [[], ["train.max_stps=3", "+model.params.customer_id=other"]])
def test_a_supervisor_that_fails_shows_no_secret(more: list[str], tmp_path: Path) -> None:
    result = run(BROKEN, tmp_path, "model_dir=run", *more)
    assert result.returncode == (2 if more else 1)
    assert more or "RuntimeError: cannot log in with ***" in result.stderr
    assert "hunter22" not in result.stdout + result.stderr
    assert "cust4711" not in result.stdout + result.stderr


def test_notes_of_a_run_and_of_a_sweep_are_private_from_the_first_moment(tmp_path: Path) -> None:
    result = run(WATCHED, tmp_path, "model_dir=run", "train.max_steps=1", "tracking=none")
    assert result.returncode == 0, result.stderr
    assert "('config.yaml', '0o600')" in result.stdout
    # Hydra writes its notes in a temporary folder that is its owner's alone; nothing is opened for writing elsewhere.
    assert [line for line in result.stdout.splitlines() if "opened" in line and "/runner-" not in line] == []
    notes = tmp_path / "run" / ".hydra"
    assert notes.stat().st_mode & 0o777 == 0o700
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in notes.iterdir()} == {
        "config.yaml": "0o600", "hydra.yaml": "0o600", "overrides.yaml": "0o600",
    }  # fmt: skip
    swept = run(BROKEN, tmp_path, "-m", "train.max_steps=1,2", "tracking=none")
    (note,) = tmp_path.glob("outputs/sweeps/*/multirun.yaml")
    assert note.stat().st_mode & 0o777 == 0o600
    assert "hunter22" not in swept.stdout + swept.stderr
