"""Runs of the same settings with other seeds are one setting, with mean, standard deviation and number."""

from __future__ import annotations

import functools
import json
import re
import signal
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.launch.sweeps.repeats import Spread, group_repeats, have_repeats
from tests.launch.test_best_runs import best
from tests.launch.test_optuna import trials_in
from tests.launch.test_sweep import ENV, Outcome, command, run_sweep, runs_in_mlflow
from tests.support.command_line import CommandLine
from tests.support.messages import Messages

SEEDED = """
seed = config["run"]["seed"]
def finish(loss=None):
    loss = round(1 - rate + {1: 0.0, 2: 0.05, 3: 0.2}[seed], 3) if loss is None else loss
    metrics = {"eval/loss": loss, "eval/accuracy": rate}
    journal.event("result", global_step=7, metrics=metrics, checkpoint="c", steps_per_sec=3.0)
"""
"""Code of a task whose loss depends on its learning rate and its seed."""

GRID = ("model.params.learning_rate=0.1,0.3,0.2,0.4", "run.seed=1,2,3")
RATE = "model.params.learning_rate=tag(log,interval(0.01,1))"


@dataclass
class Run:
    name: str
    settings_id: str | None
    seed: int | None
    value: float | None = None


@pytest.fixture
def sweep(tmp_path: Path, command_line: CommandLine) -> Callable[..., Outcome]:
    """Runs a sweep whose tasks execute SEEDED and what follows it."""

    def run(code: str, *words: str, tracking: str = "none") -> Outcome:
        return run_sweep(command_line, tmp_path, f"{SEEDED}\n{code}", f"tracking={tracking}", *words)

    return run


@pytest.fixture
def study(sweep: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs such a sweep with Optuna."""
    return functools.partial(_with_optuna, sweep)


def _with_optuna(sweep: Callable[..., Outcome], code: str, *words: str) -> Outcome:
    return sweep(code, "hydra/sweeper=optuna", *words)


def test_runs_repeat_each_other_if_only_their_seeds_differ() -> None:
    runs = [
        Run("a", "x", 1),
        Run("b", "y", 1),
        Run("c", "x", 2),
        Run("d", "x", 1),
        Run("e", None, 1),
        Run("f", None, 2),
    ]
    groups = group_repeats(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    assert have_repeats(groups)
    assert not have_repeats(groups[1:])


def test_the_spread_of_a_metric_leaves_out_runs_without_it() -> None:
    (group,) = group_repeats([Run("a", "x", 1, 0.5), Run("b", "x", 2), Run("c", "x", 3, 0.7)])
    assert (group.spread.mean, group.spread.deviation) == (
        pytest.approx(0.6),
        pytest.approx(statistics.stdev([0.5, 0.7])),
    )
    assert (str(group.spread), group.count) == ("0.6 ± 0.14", "2 of 3")
    assert (group.best("min").name, group.best("max").name) == ("a", "c")
    assert (str(Spread([])), str(Spread([0.25])), Spread([0.25]).deviation) == ("-", "0.25", None)


def test_a_grid_of_seeds_is_ranked_by_the_means(sweep: Callable[..., Outcome], tmp_path: Path) -> None:
    code = 'if rate == 0.4 and seed == 2:\n    sys.exit(1)\nfinish(float("nan") if rate == 0.1 else None)'
    result = sweep(code, *GRID)
    table = result.out[result.out.index("sweep outputs/sweeps/") :].splitlines()
    assert "12 jobs of 4 settings" in table[0]
    assert re.split(r"\s{2,}", table[1].strip()) == ["rank", "job", "n", "status", "eval/loss", "step", "model_dir"]
    rows = [re.split(r"\s{2,}", line.strip())[:6] for line in table[2:6]]
    of_three = statistics.stdev([0.0, 0.05, 0.2])
    assert rows == [
        ["1", "learning_rate=0.4", "2 of 3", "2 finished, 1 failed", "0.7 ± 0.14", "7"],
        ["2", "learning_rate=0.3", "3", "finished", f"0.7833 ± {of_three:.2g}", "7"],
        ["3", "learning_rate=0.2", "3", "finished", f"0.8833 ± {of_three:.2g}", "7"],
        ["4", "learning_rate=0.1", "0 of 3", "finished", "-", "7"],
    ]
    settings = result.record["settings"]
    assert [(entry["settings"], entry["n"], entry["seeds"]) for entry in settings][1] == (
        "learning_rate=0.3",
        3,
        [1, 2, 3],
    )
    assert settings[1]["mean"] == statistics.fmean([0.7, 0.75, 0.9])
    assert settings[1]["sd"] == pytest.approx(of_three)
    assert settings[3]["mean"] is None
    best_seed = next(job for job in result.jobs if job["settings"] == "learning_rate=0.3" and job["seed"] == 1)
    assert settings[1]["best_folder"] == best_seed["folder"]
    assert table[3].rstrip().endswith(best_seed["folder"])
    assert len(result.jobs) == 12

    answer = json.loads(best(tmp_path, "run.output=json").stdout)
    ranked = [(run["n"], run["eval/loss"], run["sd"], run["seeds"]) for run in answer["runs"]]
    assert [number for number, *_ in ranked] == [2, 3, 3]
    assert ranked[1] == (3, settings[1]["mean"], settings[1]["sd"], [1, 2, 3])
    assert len(answer["without"]) == 4, "three without a finite loss, and one that failed"


def test_a_setting_that_follows_the_seed_is_no_other_setting(sweep: Callable[..., Outcome]) -> None:
    follows = "+model.params.depends=${run.seed}"
    result = sweep("finish()", "run.seed=1,2", "model.params.learning_rate=0.1,0.2", follows)
    assert [(entry["settings"], entry["n"]) for entry in result.record["settings"]] == [
        ("learning_rate=0.2", 2), ("learning_rate=0.1", 2),
    ]  # fmt: skip


def test_a_sweep_without_repeats_has_no_means(sweep: Callable[..., Outcome]) -> None:
    result = sweep("finish()", "model.params.learning_rate=0.1,0.2", "run.seed=2")
    assert "settings" not in result.record
    assert [job["name"] for job in result.jobs] == ["learning_rate=0.2", "learning_rate=0.1"]


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_mlflow_groups_repeats_by_a_tag_and_shows_their_means(
    sweep: Callable[..., Outcome],
    tmp_path: Path,
) -> None:
    sweep("finish()", "model.params.learning_rate=0.1,0.2", "run.seed=1,2", tracking="mlflow")
    runs = {run.info.run_name: run for run in runs_in_mlflow(tmp_path)}
    parent = next(run for name, run in runs.items() if name.startswith("sweep "))
    tags = sorted(run.data.tags.get("settings", "-") for run in runs.values())
    assert tags == ["-", "learning_rate=0.1", "learning_rate=0.1", "learning_rate=0.2", "learning_rate=0.2"]
    assert parent.data.tags["best"] == "learning_rate=0.2"
    assert parent.data.metrics["best/eval/loss"] == pytest.approx(0.825)
    assert parent.data.tags["mlflow.note.content"].splitlines()[2:5] == [
        "| job | n | eval/loss | status |",
        "| --- | ---: | ---: | --- |",
        "| learning_rate=0.2 | 2 | 0.825 ± 0.035 | finished |",
    ]


def test_a_trial_is_the_mean_of_its_seeds_and_more_seeds_go_on_with_the_study(study: Callable[..., Outcome]) -> None:
    words = ("model.params.learning_rate=0.1,0.2", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler=random")
    first = study("finish()", *words, "sweep.seeds=[1,2]")
    assert first.code == 0, first.err
    assert sorted(job["name"] for job in first.jobs) == [
        "learning_rate=0.1, seed=1", "learning_rate=0.1, seed=2",
        "learning_rate=0.2, seed=1", "learning_rate=0.2, seed=2",
    ]  # fmt: skip
    values = {trial.params["model.params.learning_rate"]: trial.value for trial in trials_in(first.directory)}
    assert values == {"0.1": pytest.approx(0.925), "0.2": pytest.approx(0.825)}
    assert [entry["n"] for entry in first.record["settings"]] == [2, 2]

    more = study("finish()", *words, "sweep.seeds=[1,2,3]")
    assert (more.code, more.directory) == (0, first.directory)
    assert [(entry["settings"], entry["n"]) for entry in more.record["settings"]] == [
        ("learning_rate=0.2", 3), ("learning_rate=0.1", 3),
    ]  # fmt: skip
    assert set(more.generations().values()) == {1}, "the seeds of before are not run again"


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_first_seed_of_a_trial_decides_whether_the_others_run(
    parallel: int,
    study: Callable[..., Outcome],
) -> None:
    evaluates = """
signal.signal(signal.SIGTERM, lambda *_: (journal.event("result", global_step=step, checkpoint="c"), sys.exit(3)))
for step in range(1, 6):
    journal.metrics(step, {"eval/loss": rate + 1 / step})
    time.sleep(2.0 if rate > 0.3 and seed == 2 else 0.05)
finish(rate)
"""
    result = study(
        evaluates, "model.params.learning_rate=0.1,0.9", "hydra.sweeper.sampler=random",
        "hydra.sweeper.seed=6", "hydra.sweeper.pruner=threshold", "+hydra.sweeper.pruner_params.upper=1.5",
        "+hydra.sweeper.pruner_params.n_warmup_steps=1", "hydra.sweeper.n_trials=6",
        "sweep.seeds=[2,1,3]", f"sweep.parallel={parallel}",
    )  # fmt: skip
    assert result.code == 0, result.err
    ran = sorted((job["settings"], job["seed"], job["status"]) for job in result.jobs)
    assert ran == [
        ("learning_rate=0.1", 1, "finished"), ("learning_rate=0.1", 2, "finished"),
        ("learning_rate=0.1", 3, "finished"), ("learning_rate=0.9", 2, "pruned"),
    ]  # fmt: skip
    states = {trial.params["model.params.learning_rate"]: trial.state.name for trial in trials_in(result.directory)}
    assert states == {"0.1": "COMPLETE", "0.9": "PRUNED"}


def test_a_trial_with_a_seed_that_failed_runs_again(study: Callable[..., Outcome]) -> None:
    words = (RATE, "hydra.sweeper.n_trials=1", "sweep.seeds=[1,2,3]")
    first = study("sys.exit(1) if seed == 2 else finish()", *words)
    assert first.code == 1
    assert [trial.state.name for trial in trials_in(first.directory)] == ["FAIL"]
    assert sorted((job["seed"], job["status"]) for job in first.jobs) == [(1, "finished"), (2, "failed")]
    again = study("finish()", *words)
    assert again.code == 0, again.err
    assert [trial.state.name for trial in trials_in(first.directory)] == ["FAIL", "COMPLETE"]
    assert sorted((job["seed"], job["status"]) for job in again.jobs) == [(seed, "finished") for seed in (1, 2, 3)]
    assert sorted(again.generations().values()) == [1, 1, 2]


@pytest.mark.parametrize("words", [
    ["hydra/sweeper=optuna", RATE, "run.seed=1,2,3"],
    ["hydra/sweeper=optuna", RATE, "sweep.seeds=[1,2]", "run.seed=5"],
    ["hydra/sweeper=optuna", RATE, "sweep.seeds=[]"],
    ["hydra/sweeper=optuna", RATE, "sweep.seeds=[1,2,1]"],
    ["hydra/sweeper=optuna", RATE, "sweep.seeds=[-1]"],
    ["model.params.learning_rate=0.1,0.2", "sweep.seeds=[1,2]"],
], ids=["varied", "both", "none", "twice", "negative", "grid"])  # fmt: skip
def test_seeds_that_cannot_be_are_refused(
    words: list[str], tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    result = command_line("-m", "tracking=none", *words, cwd=tmp_path)
    said = dict.fromkeys(line for line in result.stderr.splitlines() if line.startswith("runner: "))
    messages.same(f"exit {result.returncode}", "\n".join(said))
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    GRID, ("hydra/sweeper=optuna", RATE, "hydra.sweeper.n_trials=5", "sweep.seeds=[1,2]"),
], ids=["grid", "optuna"])  # fmt: skip
def test_a_sweep_that_was_killed_ends_with_the_table_of_an_undisturbed_one(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    kill = """
if len(list(model_dir.parent.glob("*/run.json"))) == 4:
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)
finish()
"""

    def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        argv = command(folder, f"{SEEDED}\n{code}", "tracking=none", *words)
        return subprocess.run(argv, cwd=folder, env=ENV, capture_output=True, text=True, timeout=240)

    assert run(tmp_path / "killed", kill).returncode == -signal.SIGKILL
    tables = []
    for folder in (tmp_path / "killed", tmp_path / "undisturbed"):
        result = Outcome(folder, run(folder, "finish()"))
        assert result.code == 0, result.err
        table = result.out[result.out.index("sweep outputs/sweeps/") :].partition("\nstrategy: ")[0]
        tables.append((table, result.record["settings"]))
    assert tables[0] == tables[1]
    assert len(tables[0][1]) == (5 if "hydra/sweeper=optuna" in words else 4)
