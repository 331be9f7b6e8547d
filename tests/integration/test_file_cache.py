"""Inputs that are cached in files: no lock file is left behind, but by a process that was killed, and that is said."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine

RUN = (
    "model=custom", "model.fn=tests.support.line.line", "input=custom",
    "input.train.fn=tests.support.cached_input.input_fn", "input.eval.fn=tests.support.cached_input.input_fn",
    "input.train.params={folder: cache}", "input.eval.params={folder: cache}", "run.seed=3", "tracking.backend=none",
    "model_dir=run",
)  # fmt: skip


STEPS = ("train.max_steps=200", "train.log_steps=1", "checkpoint.save_steps=20")


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "events.chief-0.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        if "train/loss" in line.get("metrics", {}):
            found[line["step"]] = line["metrics"]["train/loss"]
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> list[float]:
    """The losses of a run that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "cache").mkdir()
    assert command_line(*RUN, *STEPS, cwd=folder).returncode == 0
    return losses(folder)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_goes_on(
    stop: signal.Signals, tmp_path: Path, command_line: CommandLine, expected: list[float]
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "signal").write_text(str(int(stop)))
    stopped = command_line(*RUN, *STEPS, "cluster.max_restarts=0", cwd=tmp_path)
    is_killed = stop == signal.SIGKILL
    assert stopped.returncode == (1 if is_killed else 3), stopped.stderr
    lock = cache / "train_0.lockfile"
    assert lock.exists() == is_killed
    if is_killed:
        refused = command_line(*RUN, *STEPS, cwd=tmp_path)
        assert refused.returncode != 0 and str(lock.relative_to(tmp_path)) in refused.stderr
        lock.unlink()
    done = command_line(*RUN, *STEPS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == expected
    again = command_line(*RUN, "command=evaluate", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path.name for path in cache.iterdir() if "lock" in path.name or "temp" in path.name} == set()
