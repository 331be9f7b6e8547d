"""`hydra/sweeper=optuna`: what it suggests, prunes and goes on with; a small script in the place of the task."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from omegaconf import OmegaConf
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from runner.launch.sweeps.optuna_sweeper import _draw, _note_version
from runner.tracking.run_record import RunRecord
from tests.launch.test_sweep import ENV, NAME, Outcome, command, run_sweep
from tests.support.command_line import CommandLine
from tests.support.messages import Messages
from tests.support.screen import line_of
from tests.support.tiers import slow_but

RATE = "model.params.learning_rate=tag(log,interval(0.01,1))"

BEST_AT_03 = """
def finish():
    metrics = {"eval/loss": abs(rate - 0.3), "eval/accuracy": 1 - abs(rate - 0.3)}
    journal.event("result", global_step=7, metrics=metrics, checkpoint="c", steps_per_sec=3.0)
"""

EVALUATES = """
signal.signal(signal.SIGTERM, lambda *_: (journal.event("result", global_step=step, checkpoint="c"), sys.exit(3)))
for step in range(1, 6):
    journal.metrics(step, {"eval/loss": rate + 1 / step})
    time.sleep(2.0 if rate > 0.3 else 0.1)
finish()
"""

Study = Callable[..., Outcome]


@pytest.fixture
def study(tmp_path: Path, command_line: CommandLine) -> Study:
    """Runs a sweep with Optuna over `arguments` whose tasks execute `code`."""

    def run(code: str, *arguments: str) -> Outcome:
        words = ("tracking=none", "hydra/sweeper=optuna", *arguments)
        return run_sweep(command_line, tmp_path, BEST_AT_03 + code, *words)

    return run


def trials_in(directory: Path) -> list[optuna.trial.FrozenTrial]:
    """The trials of the study that a sweep left in `directory`."""
    return opened(directory).get_trials()


def opened(directory: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(directory / "study.journal")))
    return optuna.load_study(study_name=directory.name, storage=storage)


OLD = {"multivariate": False, "constant_liar": False}


@pytest.mark.parametrize(("before", "sampler", "params", "is_said", "has_hint"), [
    ("4.9.0", "tpe", {}, True, True),
    ("4.9.0", "tpe", OLD, True, False),
    ("4.9.0", "random", {}, True, False),
    ("5.1.0", "tpe", {}, False, False),
    (None, "tpe", {}, True, True),  # of a study of before, which does not say
    ("none", "tpe", {}, False, False),
])  # fmt: skip
def test_a_study_says_that_another_optuna_goes_on_with_it(
    before: str | None, sampler: str, params: dict[str, Any], is_said: bool, has_hint: bool, capsys: Any
) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    if before != "none":  # it has no trials yet
        study.add_trial(optuna.trial.create_trial(value=1.0))
        if before is not None:
            study.set_user_attr("optuna", before)
    _note_version(study, "5.0.0", OmegaConf.create({"sampler": sampler, "sampler_params": params}))
    said = capsys.readouterr().err
    assert (study.user_attrs["optuna"], "5.0.0" in said, "sampler_params" in said) == ("5.0.0", is_said, has_hint)
    _note_version(study, "5.0.1", OmegaConf.create({"sampler": sampler, "sampler_params": params}))
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_suggestions_follow_from_what_came_before_and_the_same_command_goes_on(
    study: Study, messages: Messages
) -> None:
    arguments = (RATE, "+hydra.sweeper.sampler_params.n_startup_trials=6")
    first = study("finish()", *arguments, "hydra.sweeper.n_trials=10")
    assert first.code == 0, first.err
    assert "job 10/10: learning_rate=" in first.err
    assert all(re.fullmatch(r"learning_rate=0\.\d{1,6}", job["name"]) for job in first.jobs)
    trials = trials_in(first.directory)
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 10
    # The six first are drawn at random, the others near the best.
    distances = [abs(trial.params["model.params.learning_rate"] - 0.3) for trial in trials]
    assert [trial.value for trial in trials] == pytest.approx(distances)
    assert sorted(distances[6:])[1] < sorted(distances[:6])[2]
    assert first.jobs[0]["value"] == pytest.approx(min(distances))
    kept = {path.name for path in first.directory.glob("*.png")}
    assert kept == {"optimization_history.png", "param_importances.png", "parallel_coordinates.png"}
    opened(first.directory).set_user_attr("optuna", "4.9.0")
    again = study("finish()", *arguments, "hydra.sweeper.n_trials=11")
    hint = line_of(again.err, "Optuna 4")
    assert again.directory == first.directory
    assert again.code == 0
    assert "job 11/11" in again.err
    assert "skipped" not in again.err
    assert len(again.jobs) == 11
    values = [trial.params["model.params.learning_rate"] for trial in trials_in(first.directory)]
    assert len(set(values)) == 11
    as_before = re.findall(r"\+hydra\.sweeper\.sampler_params\.\w+=false", hint)
    done = study("finish()", *arguments, *as_before, "hydra.sweeper.n_trials=11")
    messages.same("stderr", line_of(done.err, "hydra.sweeper.n_trials"))
    assert (done.directory, done.code, "Optuna" in done.err) == (first.directory, 0, False), done.err
    assert done.jobs == again.jobs


@pytest.mark.slow
def test_a_study_asks_for_no_further_trial_after_max_failed(study: Study) -> None:
    result = study("sys.exit(1)", RATE, "sweep.max_failed=2", "hydra.sweeper.n_trials=6")
    assert (result.code, [job["status"] for job in result.jobs]) == (1, ["failed", "failed"])
    again = study("finish()", RATE, "sweep.max_failed=2", "hydra.sweeper.n_trials=6")
    assert (again.directory, again.code) == (result.directory, 0)
    assert [job["status"] for job in again.jobs] == ["finished"] * 6
    tried = {job["name"] for job in again.jobs}
    assert {job["name"] for job in result.jobs} <= tried, "those that failed have run again"


@pytest.mark.slow
def test_the_metrics_name_says_the_direction(study: Study) -> None:
    result = study("finish()", RATE, "sweep.metric=eval/accuracy", "hydra.sweeper.n_trials=2")
    assert result.jobs[0]["value"] > result.jobs[1]["value"]
    assert (result.directory / "study.journal").read_text().count('"directions":[2]') == 1  # maximize


@pytest.mark.slow
def test_ranges_choices_and_whole_numbers(study: Study) -> None:
    result = study(
        "finish()", "model.params.learning_rate=choice(0.1,0.2)", "model.params.width=16,32",
        "train.max_steps=range(10,50,10)", "train.log_steps=int(interval(1,3))", "hydra.sweeper.n_trials=4",
        "hydra.sweeper.sampler=random",
    )  # fmt: skip
    assert result.code == 0, result.err
    for trial in trials_in(result.directory):
        assert trial.params["model.params.learning_rate"] in ("0.1", "0.2")
        assert trial.params["model.params.width"] in ("16", "32")
        assert trial.params["train.max_steps"] in (10, 20, 30, 40)
        assert trial.params["train.log_steps"] in (1, 2, 3)


@pytest.mark.slow
def test_values_that_ran_before_are_not_run_again(study: Study) -> None:
    result = study("finish()", "model.params.learning_rate=0.1,0.2", "hydra.sweeper.n_trials=7")
    assert result.code == 0, result.err
    assert len(result.jobs) == 2
    assert set(result.generations().values()) == {1}
    assert len(trials_in(result.directory)) == 7


@pytest.mark.parametrize("parallel", slow_but([1, 2], 1))
def test_a_job_that_falls_behind_is_pruned(parallel: int, study: Study, messages: Messages) -> None:
    arguments = (
        "model.params.learning_rate=0.1,0.9", "hydra.sweeper.sampler=random", "hydra.sweeper.seed=6",
        "hydra.sweeper.pruner=median", "+hydra.sweeper.pruner_params.n_startup_trials=1", "hydra.sweeper.n_trials=6",
        f"sweep.parallel={parallel}",
    )  # fmt: skip
    result = study(EVALUATES, *arguments)
    assert result.code == 0, result.err
    states = {trial.params["model.params.learning_rate"]: trial.state.name for trial in trials_in(result.directory)}
    status = {job["name"]: job["status"] for job in result.jobs}
    assert states["0.1"] == "COMPLETE"
    assert states["0.9"] == "PRUNED"
    assert status["learning_rate=0.9"] == "pruned"
    folders = [result.directory / job["folder"] for job in result.jobs if job["status"] == "pruned"]
    assert {RunRecord.read(folder).ending["recorded"] for folder in folders} == {"KILLED"}, "it does not go on"
    pruned = next(line for line in result.err.splitlines() if "pruned: " in line)
    messages.same("stderr", pruned, hide=r"(?<=was )\S+|(?<=step )\d+")
    assert result.jobs[0]["status"] == "finished"
    again = study(EVALUATES, *arguments)
    assert {job["name"]: job["status"] for job in again.jobs} == status
    assert again.generations() == result.generations()


@pytest.mark.slow
def test_jobs_that_failed_come_first_with_their_values(study: Study) -> None:
    first = study("sys.exit(1)", RATE, "hydra.sweeper.n_trials=2")
    assert first.code == 1
    failed = [trial.params for trial in trials_in(first.directory)]
    again = study("finish()", RATE, "hydra.sweeper.n_trials=2")
    assert again.code == 0
    trials = trials_in(first.directory)
    assert [trial.params for trial in trials if trial.state.name == "COMPLETE"] == failed
    assert set(again.generations().values()) == {2}


@pytest.mark.slow
def test_a_killed_study_goes_on(tmp_path: Path) -> None:
    arguments = ("tracking=none", "hydra/sweeper=optuna", RATE, "hydra.sweeper.n_trials=5")
    slow = command(tmp_path, BEST_AT_03 + "time.sleep(0.5)\nfinish()", *arguments)
    process = subprocess.Popen(
        slow, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "job 3/5" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    quick = command(tmp_path, BEST_AT_03 + "finish()", *arguments)
    ended = subprocess.run(quick, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=240)
    result = Outcome(tmp_path, ended)
    assert result.code == 0, result.err
    assert len(result.jobs) == 5
    assert all(job["status"] == "finished" for job in result.jobs)
    complete = [trial for trial in trials_in(result.directory) if trial.state.name == "COMPLETE"]
    assert len({json.dumps(trial.params) for trial in complete}) == 5


@pytest.mark.slow  # tests/launch/test_sweep.py: Ctrl-C in a sweep of a grid
def test_ctrl_c_says_what_is_left(tmp_path: Path, messages: Messages) -> None:
    arguments = ("tracking=none", "hydra/sweeper=optuna", RATE, "hydra.sweeper.n_trials=5")
    stop = "len(list(model_dir.parent.glob('*/run.json'))) == 2 and os.kill(os.getppid(), 15)"
    code = f"{BEST_AT_03}{stop}\ntime.sleep(0.5)\nfinish()"
    ended = subprocess.run(
        command(tmp_path, code, *arguments), cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=240
    )
    messages.same(f"exit {ended.returncode}", line_of(ended.stdout, "4 of 5"))


OURS = ("hydra/sweeper=optuna", RATE)


@pytest.mark.parametrize("arguments", [
    [*OURS, "hydra.sweeper.sampler=tpee"],
    [*OURS, "hydra.sweeper.pruner=my_pkg.Mine"],
    [*OURS, "+hydra.sweeper.sampler_params.x=1"],
    [*OURS, "hydra.sweeper.storage=sqlit:///x"],
    [OURS[0]],
    [*OURS, "hydra.sweeper.n_trial=3"],
    [*OURS, "hydra.sweeper._target_=hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"],
    ["model.params.learning_rate=interval(0,1)"],
], ids=lambda arguments: arguments[-1])  # fmt: skip
def test_mistakes_are_said_before_anything_runs(
    arguments: list[str], tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    result = command_line("-m", "tracking=none", *arguments, cwd=tmp_path)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
def test_optuna_is_imported_only_where_it_is_chosen(tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "optuna.py").write_text("raise ImportError('no Optuna here')")
    hidden = {**ENV, "PYTHONPATH": os.pathsep.join([str(tmp_path), ENV["PYTHONPATH"]])}

    def ran(*arguments: str) -> Any:
        called = command(tmp_path, "finish()", "tracking=none", *arguments)
        return subprocess.run(called, cwd=tmp_path, env=hidden, capture_output=True, text=True, timeout=240)

    assert ran("model.params.learning_rate=0.1,0.2").returncode == 0
    missing = ran("hydra/sweeper=optuna", RATE)
    messages.same(f"exit {missing.returncode}", line_of(missing.stderr, "runner: "))


@pytest.mark.slow
def test_a_dry_run_lists_the_jobs(tmp_path: Path, command_line: CommandLine, messages: Messages) -> None:
    def listed(*arguments: str) -> list[str]:
        result = command_line("-m", "tracking=none", "command=dry_run", *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    lines = listed("model.params.learning_rate=0.1,0.2", "train.max_steps=5,6")
    assert [line.partition(" (not started")[0] for line in lines] == [
        "job 1/4: learning_rate=0.1, max_steps=5", "job 2/4: learning_rate=0.1, max_steps=6",
        "job 3/4: learning_rate=0.2, max_steps=5", "job 4/4: learning_rate=0.2, max_steps=6",
    ]  # fmt: skip
    assert not any((tmp_path / "outputs").glob("sweeps/*/*"))
    lines = listed("hydra/sweeper=optuna", RATE)
    for line in lines[:2]:
        messages.same("line", line, hide=NAME)
    words = ("model.params.learning_rate=0.1,0.2", "tracking=none")
    assert run_sweep(command_line, tmp_path, BEST_AT_03 + "finish()", *words).code == 0
    assert all("(finished, outputs/sweeps/" in line for line in listed("model.params.learning_rate=0.1,0.2"))


def test_pictures_show_whole_names_and_leave_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib.image import imread

    study = optuna.create_study(direction="maximize")
    for number in range(4):
        trial = study.ask({"model.params.learning_rate": optuna.distributions.FloatDistribution(0, 1)})
        study.tell(trial, trial.params["model.params.learning_rate"] * number)
    before = matplotlib.rcParams["axes.facecolor"]
    _draw(study, "eval/accuracy", tmp_path)
    assert matplotlib.rcParams["axes.facecolor"] == before
    for name in ("optimization_history.png", "param_importances.png"):
        pixels = imread(tmp_path / name)
        assert pixels.shape[:2] == (450, 900)
        assert (pixels[:, :2, :3] == 1).all(), "a name is cut off at the left"


def test_pictures_show_a_metric_and_a_key_that_look_like_formulas(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    study = optuna.create_study()
    for number in range(4):
        trial = study.ask({"model.params.$\\frac{$": optuna.distributions.FloatDistribution(0, 1)})
        study.tell(trial, number)
    _draw(study, "eval/$\\frac{$", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"optimization_history.png", "param_importances.png"}
    assert "not drawn" not in capfd.readouterr().err
