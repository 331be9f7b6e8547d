"""Sweeps under Hydra's launchers that run each job in a process of its own; a small script in the place of the task."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.test_optuna import BEST_AT_03, RATE, trials_in
from tests.launch.test_sweep import ENV, ROOT, TASK, Outcome

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
pytest.importorskip("hydra_plugins.hydra_joblib_launcher")

# Each process of Python begins with it: those that a launcher starts import nothing of the test's.
SITE = """
import sys
from runner.launch import task_group
task_group.task_argv = lambda file: [sys.executable, {script!r}, str(file)]
"""
LAUNCHERS = {
    "submitit": ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"),
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
}


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a sweep whose tasks execute `code` after those of TASK and BEST_AT_03."""

    def run(launcher: str, code: str, *arguments: str) -> Outcome:
        script, site = tmp_path / "task.py", tmp_path / "site"
        script.write_text(TASK + BEST_AT_03 + code)
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE.format(script=str(script)))
        path = os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        called = [sys.executable, "-m", "runner", "-m", "tracking=none", *LAUNCHERS[launcher], *arguments]
        process = subprocess.run(
            called, cwd=tmp_path, env={**ENV, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240
        )
        return Outcome(tmp_path, process)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_its_jobs_are_ranked_and_the_same_command_goes_on(launcher: str, sweep: Callable[..., Outcome]) -> None:
    swept = ("model.params.learning_rate=0.1,0.2", "+model.params.db_password=hunter22")
    first = sweep(launcher, "sys.exit(1) if rate == 0.2 else finish()", *swept)
    assert first.code == 1
    assert [(job["name"], job["status"]) for job in first.jobs] == [
        ("learning_rate=0.1", "finished"), ("learning_rate=0.2", "failed"),
    ]  # fmt: skip
    assert "hunter22" not in first.out + first.err
    again = sweep(launcher, "finish()", *swept)
    assert again.code == 0, again.err
    assert again.directory == first.directory
    assert again.generations() == {"learning_rate=0.2": 2, "learning_rate=0.1": 1}
    table = again.out[again.out.index("sweep outputs/sweeps/") :].splitlines()
    assert table[2].split()[:4] == ["1", "learning_rate=0.2", "finished", "0.1"]


@pytest.mark.slow
def test_its_jobs_are_ranked_though_one_was_refused(sweep: Callable[..., Outcome]) -> None:
    result = sweep("joblib", "finish()", "model.params.learning_rate=0.1", "train.max_steps=2,-1")
    assert result.code == 2 and "train.max_steps=-1" in result.out + result.err
    assert [(job["name"], job["status"]) for job in result.jobs] == [
        ("max_steps=2", "finished"), ("max_steps=-1", "failed"),
    ]  # fmt: skip


@pytest.mark.slow
def test_optuna_hands_it_so_many_jobs_at_once(sweep: Callable[..., Outcome]) -> None:
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "sweep.parallel=2", RATE)
    result = sweep("joblib", "finish()", *optuna)
    assert result.code == 0, result.err
    trials = trials_in(result.directory)
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3
    rates = [trial.params["model.params.learning_rate"] for trial in trials]
    assert [trial.value for trial in trials] == pytest.approx([abs(rate - 0.3) for rate in rates])
    assert len(result.jobs) == 3 and result.jobs[0]["value"] == pytest.approx(min(abs(rate - 0.3) for rate in rates))
