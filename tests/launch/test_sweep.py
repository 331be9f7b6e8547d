"""Sweeps: identities, parent and children, failures, resume, ranking; a small script in the place of the task."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config import job_id
from runner.config.hydra import Composer
from runner.config.schema import SweepConfig, TrackingConfig
from runner.launch import app, task_group
from runner.launch.sweeps import sweep as sweeps
from runner.launch.sweeps.multirun import name_of_job
from runner.launch.sweeps.ranking import JobResult
from runner.launch.sweeps.sweep import Sweep
from runner.system.standard_streams import LATER_JOB
from tests.support.command_line import CommandLine
from tests.support.messages import Messages
from tests.support.screen import line_of
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
APP = """
import sys
from pathlib import Path
from runner.launch import app, supervisor, task_group
task_group.task_argv = lambda file: [sys.executable, {script!r}, str(file)]
sys.exit(app.run_command_line())
"""
TASK = """
import os, sys, time, signal
from pathlib import Path
import yaml
from tests.support.journal import Lines
config = yaml.safe_load(Path(sys.argv[1]).read_text())
model_dir, params = Path(config["model_dir"]), config["model"]["params"]
rate = params["learning_rate"]
journal = Lines(model_dir)
journal.event("built", num_replicas=1)
def finish():
    metrics = {"eval/loss": 1 - rate, "eval/accuracy": rate}
    journal.event("result", global_step=7, metrics=metrics, checkpoint="c", steps_per_sec=3.0)
"""


class Outcome:
    """What a sweep left and said."""

    def __init__(self, cwd: Path, process: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = process.returncode, process.stdout, process.stderr
        (self.directory,) = (cwd / "outputs" / "sweeps").iterdir()
        self.record: dict[str, Any] = json.loads((self.directory / "sweep.json").read_text())
        self.jobs: list[dict[str, Any]] = self.record["jobs"]

    def generations(self) -> dict[str, int]:
        """How often the task of each job was started, by what varied."""
        return {
            job["name"]: json.loads((self.directory / job["folder"] / "run.json").read_text())["generation"]
            for job in self.jobs
        }


def write_task(tmp_path: Path, code: str) -> Path:
    script = tmp_path / "task.py"
    script.write_text(TASK + code)
    return script


def command(tmp_path: Path, code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", APP.format(script=str(write_task(tmp_path, code))), "-m", *arguments]


ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def run_sweep(command_line: CommandLine, folder: Path, code: str, *arguments: str) -> Outcome:
    """Run a sweep over `arguments` whose tasks execute `code` after TASK."""
    task = write_task(folder, code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_group, "task_argv", lambda file: [sys.executable, str(task), str(file)])
        return Outcome(folder, command_line("-m", *arguments, cwd=folder))


@pytest.fixture
def sweep(tmp_path: Path, command_line: CommandLine) -> Callable[..., Outcome]:
    """Runs a sweep of `run_sweep` in the folder of the test."""

    def run(code: str, *arguments: str, tracking: str = "none") -> Outcome:
        return run_sweep(command_line, tmp_path, code, f"tracking={tracking}", *arguments)

    return run


NAME = r"(?<=outputs/sweeps/)[^:\s]+"
"""The name that a sweep gives itself, in what it says."""

RATES = "model.params.learning_rate=0.1,0.3,0.2"
OF_FINISHED = ("tracking=none", RATES, "+model.params.db_password=hunter22")


@pytest.fixture(scope="module")
def finished(command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A sweep all of whose jobs have finished."""
    return run_sweep(command_line, tmp_path_factory.mktemp("finished"), "finish()", *OF_FINISHED)


@pytest.fixture
def again(finished: Outcome, tmp_path: Path, command_line: CommandLine) -> Callable[..., Outcome]:
    """Runs it once more, in a copy, whose jobs are skipped; any that begins anew fails."""
    shutil.copytree(finished.directory, tmp_path / "outputs" / "sweeps" / finished.directory.name)
    return functools.partial(run_sweep, command_line, tmp_path, "sys.exit(1)", *OF_FINISHED)


def test_the_jobs_are_ranked_at_the_end(finished: Outcome, messages: Messages) -> None:
    result = finished
    assert result.code == 0, result.err
    assert [job["name"] for job in result.jobs] == ["learning_rate=0.3", "learning_rate=0.2", "learning_rate=0.1"]
    assert [job["value"] for job in result.jobs] == pytest.approx([0.7, 0.8, 0.9])
    table = result.out[result.out.index("sweep outputs/sweeps/") :].splitlines()
    messages.same("title", table[0], hide=NAME)
    assert table[1].split() == ["rank", "job", "status", "eval/loss", "step", "model_dir"]
    assert table[2].split()[:5] == ["1", "learning_rate=0.3", "finished", "0.7", "7"]
    assert (result.directory / table[2].split()[5].rpartition("/")[2] / "summary.json").exists()


@pytest.mark.parametrize(
    ("metric", "mode", "best"),
    slow_but(
        [("eval/accuracy", None, "0.3"), ("eval/accuracy", "min", "0.1"), (None, "max", "0.1")],
        ("eval/accuracy", "min", "0.1"),
    ),
)
def test_the_config_says_what_is_best(metric: str | None, mode: str | None, best: str, again: Any) -> None:
    chosen = [*([f"sweep.metric={metric}"] if metric else []), *([f"sweep.mode={mode}"] if mode else [])]
    assert again(*chosen).jobs[0]["name"] == f"learning_rate={best}"


def test_a_metric_that_no_job_has_is_named(again: Callable[..., Outcome], messages: Messages) -> None:
    result = again("sweep.metric=eval/acuracy")
    messages.same("stderr", line_of(result.err, "sweep.metric"))
    assert [job["value"] for job in result.jobs] == [None] * 3


def test_the_same_sweep_again_skips_what_is_finished_and_resumes_what_is_broken(
    sweep: Callable[..., Outcome], messages: Messages
) -> None:
    broken = "sys.exit(1) if rate == 0.3 else finish()"
    first = sweep(broken, RATES)
    assert first.code == 1
    assert [job["status"] for job in first.jobs] == ["finished", "finished", "failed"]
    messages.same("stdout", line_of(first.out, "learning_rate=0.3: "))
    again = sweep("finish()", RATES)
    assert again.code == 0
    assert again.directory == first.directory
    assert again.generations() == {"learning_rate=0.3": 2, "learning_rate=0.2": 1, "learning_rate=0.1": 1}
    for line in again.err.splitlines():
        if "skipped" in line:
            messages.same("stderr", line)


def test_a_finished_job_whose_supervisor_was_killed_before_its_summary_keeps_its_place(
    again: Callable[..., Outcome], finished: Outcome, tmp_path: Path
) -> None:
    for job in finished.jobs:
        file = tmp_path / "outputs" / "sweeps" / finished.directory.name / job["folder"] / "summary.json"
        started = {**json.loads(file.read_text()), "status": "running", "metrics": {}, "global_step": None}
        file.write_text(json.dumps(started))
    assert again().jobs == finished.jobs


def test_a_job_whose_config_is_wrong_does_not_end_the_sweep(sweep: Callable[..., Outcome], messages: Messages) -> None:
    result = sweep("finish()", "train.max_steps=0,5")
    assert result.code == 2
    assert [(job["name"], job["status"]) for job in result.jobs] == [
        ("max_steps=5", "finished"),
        ("max_steps=0", "failed"),
    ]
    messages.same("stdout", line_of(result.out, "max_steps=0: "))


def test_after_max_failed_jobs_none_is_started_and_the_next_start_runs_what_is_left(
    sweep: Callable[..., Outcome], tmp_path: Path, messages: Messages
) -> None:
    code = "finish() if rate in (0.1, 0.5) or (model_dir.parents[2] / 'mended').exists() else sys.exit(1)"
    rates = "model.params.learning_rate=0.1,0.2,0.3,0.4,0.5"
    first = sweep(code, rates, "sweep.max_failed=2")
    assert first.code == 1
    assert {job["name"].partition("=")[2]: job["status"] for job in first.jobs} == {
        "0.1": "finished",
        "0.2": "failed",
        "0.3": "failed",
        "0.4": "not started",
        "0.5": "not started",
    }
    folders = [first.directory / job["folder"] for job in first.jobs if job["status"] == "not started"]
    assert not any((folder / "run.json").exists() for folder in folders)
    messages.same("left", line_of(first.out, "jobs are left"))
    (tmp_path / "outputs" / "mended").touch()
    second = sweep(code, rates, "sweep.max_failed=1")
    assert (second.directory, second.code) == (first.directory, 0), "another limit is the same sweep"
    assert [job["status"] for job in second.jobs] == ["finished"] * 5
    assert second.generations() == {
        f"learning_rate={rate}": 2 if rate in (0.2, 0.3) else 1 for rate in (0.1, 0.2, 0.3, 0.4, 0.5)
    }


SLOW = pytest.mark.slow
SHOWING = """
(model_dir.parents[2] / f"{rate}.devices").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
while len(list(model_dir.parents[2].glob("*.devices"))) < {jobs}:
    time.sleep(0.01)
finish()
"""
"""Code of a task that writes what it sees, and waits until so many jobs have: one might end before another begins."""


@pytest.mark.parametrize(
    ("visible", "words", "expected"),
    [
        pytest.param("0,3,GPU-8932f937,MIG-7", ["sweep.parallel=2"], {"0,3", "GPU-8932f937,MIG-7"}, id="auto"),
        pytest.param("4,5", ["sweep.parallel=2", "strategy=mirrored", "strategy.num_gpus=2"], {"4,5"}, id="chosen"),
        # One job waits for the other.
        pytest.param("4,5", ["sweep.parallel=2", "sweep.devices_per_job=2"], {"4,5"}, id="all", marks=SLOW),
        pytest.param("4,5,6", ["sweep.devices_per_job=1"], {"4"}, id="one", marks=SLOW),
        pytest.param("4,5", ["sweep.parallel=2", "sweep.devices_per_job=0"], {"4,5"}, id="hands off", marks=SLOW),
        pytest.param("4", ["sweep.parallel=2"], {"4"}, id="too few", marks=SLOW),
        pytest.param("-1", ["sweep.parallel=2"], {"-1"}, id="none", marks=SLOW),
    ],
)
def test_jobs_that_run_at_a_time_see_gpus_of_their_own(
    visible: str, words: list[str], expected: set[str], sweep: Callable[..., Outcome], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, messages: Messages,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    showing = SHOWING.replace("{jobs}", str(len(expected)))
    result = sweep(showing, "model.params.learning_rate=0.1,0.2,0.3", *words)
    assert result.code == 0, result.err
    seen = [(tmp_path / "outputs" / f"{rate}.devices").read_text() for rate in (0.1, 0.2, 0.3)]
    assert set(seen) == expected
    said = [line for line in result.err.splitlines() if "GPU" in line]
    if said:
        messages.same("said", *said)


def test_more_gpus_for_a_job_than_there_are_is_refused(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    done = command_line("-m", "sweep.devices_per_job=3", "train.max_steps=1,2", "tracking=none", cwd=tmp_path)
    messages.same(f"exit {done.returncode}", line_of(done.stderr, "devices_per_job"))


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_mlflow_has_a_parent_with_named_children_and_each_its_status(
    sweep: Callable[..., Outcome], tmp_path: Path, messages: Messages
) -> None:
    from mlflow import MlflowClient

    arguments = (RATES, "strategy=default,one_device", "tracking.tags.team=a")
    sweep("finish() if rate != 0.1 else os.kill(os.getpid(), 9)", *arguments, tracking="mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("runner").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert len(runs) == 7
    parent = next(run for name, run in runs.items() if name.startswith("sweep "))
    assert parent.info.status == "FAILED"
    assert parent.data.tags["best"] == "learning_rate=0.3, strategy=default"
    assert parent.data.metrics["best/eval/accuracy"] == 0.3
    described = parent.data.tags["mlflow.note.content"].splitlines()
    messages.same("title", described[0])
    assert described[2:5] == [
        "| job | eval/loss | status |",
        "| --- | ---: | --- |",
        "| learning_rate=0.3, strategy=default | 0.7 | finished |",
    ]
    assert parent.data.tags["command"] == f"runner -m tracking=mlflow {' '.join(arguments)}"
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == [
        "parallel_coordinates.png",
        "sweep.json",
    ]
    children = [run for name, run in runs.items() if not name.startswith("sweep ")]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {name: run.info.status for name, run in runs.items() if name.endswith("one_device")} == {
        "learning_rate=0.1, strategy=one_device": "FAILED",
        "learning_rate=0.2, strategy=one_device": "FINISHED",
        "learning_rate=0.3, strategy=one_device": "FINISHED",
    }
    assert runs["learning_rate=0.2, strategy=default"].data.params["model.params.learning_rate"] == "0.2"

    again = sweep("finish()", *arguments, tracking="mlflow")
    assert again.record["mlflow_run_id"] == parent.info.run_id
    assert len(client.search_runs([experiment])) == 7  # the broken ones went on in the runs that they had
    assert client.get_run(parent.info.run_id).info.status == "FINISHED"


def test_jobs_may_run_at_the_same_time_and_say_who_they_are(sweep: Callable[..., Outcome]) -> None:
    meet = """
Path(f"{rate}.here").touch()
deadline = time.monotonic() + 120
while len(list(Path(".").glob("*.here"))) < 3:
    assert time.monotonic() < deadline
    time.sleep(0.01)
print("met", flush=True)
finish()
"""
    result = sweep(meet, RATES, "sweep.parallel=3")
    assert result.code == 0, result.err
    for rate in ("0.1", "0.2", "0.3"):
        assert f"[learning_rate={rate}] met\n" in result.out
        assert f"[learning_rate={rate}] finished: " in result.out
    assert result.out.count("strategy: ") == 1, "what is the same for all stands at the end"
    assert len(result.jobs) == 3


def runs_in_mlflow(folder: Path) -> list[Any]:
    """Return all runs of the experiment of the sweeps in `folder`."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    return list(client.search_runs([client.get_experiment_by_name("runner").experiment_id]))


def test_only_the_first_job_says_what_is_the_same_in_all(sweep: Callable[..., Outcome], tmp_path: Path) -> None:
    note = f"with open({str(tmp_path / 'later')!r}, 'a') as file: print(os.getenv({LATER_JOB!r}), file=file)"
    sweep(f"{note}\nfinish()", RATES)
    assert (tmp_path / "later").read_text().split() == ["None", "1", "1"]


def test_ctrl_c_saves_the_job_that_runs_and_starts_no_other(sweep: Callable[..., Outcome], tmp_path: Path) -> None:
    saves = """
def save(*a):
    journal.event('result', global_step=3, metrics={}, checkpoint='c'); sys.exit(3)
signal.signal(signal.SIGTERM, save)
Path('ready').touch()
time.sleep(600)
"""
    process = subprocess.Popen(
        command(tmp_path, saves, "tracking=mlflow", RATES),
        cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 3, err
    left = Outcome(tmp_path, subprocess.CompletedProcess([], 3, out, err))
    assert [(job["name"], job["status"]) for job in left.jobs] == [("learning_rate=0.1", "interrupted")]
    runs = runs_in_mlflow(tmp_path)
    assert len(runs) == 2  # the sweep and its job
    for run in runs:  # MLflow draws KILLED as a failure
        assert (run.info.status, run.data.tags["status"]) == ("SCHEDULED", "interrupted")
    again = sweep("finish()", RATES, tracking="mlflow")
    assert {run.info.status for run in runs_in_mlflow(tmp_path)} == {"FINISHED"}
    assert again.generations() == {"learning_rate=0.3": 1, "learning_rate=0.2": 1, "learning_rate=0.1": 2}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_list_of_jobs_ends_when_it_is_asked_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    words = ["-m", "tracking=none", "command=dry_run", "run.seed=range(1,200)"]
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", *words], cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(number)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 3
    assert first.startswith("job 1/199") and out.count("job ") < 100
    assert not list((tmp_path / "outputs/sweeps").iterdir())


def test_a_stop_request_ends_a_sweep_that_still_composes_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra composes all jobs before the first one begins."""
    composed: list[Any] = []
    compose = Composer.load_sweep_config

    def stopping(composer: Composer, *arguments: Any, **settings: Any) -> Any:
        composed.append(arguments)
        signal.raise_signal(signal.SIGTERM)
        return compose(composer, *arguments, **settings)

    monkeypatch.setattr(Composer, "load_sweep_config", stopping)
    monkeypatch.setattr(sys, "argv", ["runner", "-m", "tracking=none", "run.seed=range(1,200)"])
    monkeypatch.chdir(tmp_path)
    assert app.run_command_line() == 3
    assert len(composed) == 1


def test_a_sweep_that_was_killed_has_kept_what_had_finished(sweep: Callable[..., Outcome], tmp_path: Path) -> None:
    hangs = """
if rate == 0.2:
    Path("ready").touch()
    time.sleep(600)
finish()
"""
    argv = command(tmp_path, hangs, "tracking=none", RATES)
    early = "from runner.launch.sweeps import sweep\nsweep.WRITE_AFTER_SECS_PER_BYTE = 1e3\n"
    argv[2] = early + argv[2]
    process = subprocess.Popen(argv, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    left = Outcome(tmp_path, subprocess.CompletedProcess([], -9, "", ""))
    assert left.jobs == [], "sweep.json was too young to be written anew"
    lines = [json.loads(line) for line in (left.directory / "sweep.results.jsonl").read_text().splitlines()]
    assert [line["result"]["name"] for line in lines] == ["learning_rate=0.1", "learning_rate=0.3"]
    assert {line["result"]["status"] for line in lines} == {"finished"}

    again = sweep("finish()", RATES)
    assert again.err.count("skipped") == 2
    assert [job["name"] for job in again.jobs] == ["learning_rate=0.3", "learning_rate=0.2", "learning_rate=0.1"]
    assert again.generations() == {"learning_rate=0.3": 1, "learning_rate=0.2": 2, "learning_rate=0.1": 1}
    assert not (again.directory / "sweep.results.jsonl").exists()


def opened(directory: Path, *, start: str = "now", is_copy: bool = True) -> Sweep:
    config: Any = SimpleNamespace(sweep=SweepConfig(), tracking=TrackingConfig(backend="none"))
    of_start: Any = SimpleNamespace(env={}, start=start, argv=[], is_copy=is_copy)
    return Sweep(directory, config, of_start)


def in_sweep_json(directory: Path) -> list[str]:
    return [job["folder"] for job in json.loads((directory / "sweep.json").read_text())["jobs"]]


def test_a_job_adds_a_line_and_sweep_json_has_all_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.setattr(sweeps, "WRITE_AFTER_SECS_PER_BYTE", 1e3)
    first = opened(tmp_path, is_copy=False)
    for number in range(3):
        metrics = {"eval/loss": 3.0 - number, "eval/auc": "nan"}
        first.add(JobResult(f"rate={number}", f"job{number}", "finished", 3.0 - number, metrics, 7))
    assert in_sweep_json(tmp_path) == []
    with (tmp_path / "sweep.results.jsonl").open("a") as journal:
        journal.write('{"time": 1, "event": "job", "sta')  # a process was killed in the midst of it
    joined = opened(tmp_path)
    joined.add(JobResult("rate=1", "job1", "failed", error="it was killed"))
    for one in (first, joined, opened(tmp_path)):
        assert [job.folder for job in one.results] == ["job0", "job2", "job1"]
        assert one.results[-1].error == "it was killed" and one.result_in("job1") == one.results[-1]
        assert one.result_in("job3") is None
    first.end(stops=[2], failed=False)
    assert in_sweep_json(tmp_path) == ["job2", "job0", "job1"]
    assert not (tmp_path / "sweep.results.jsonl").exists()
    messages.same("title", line_of(capsys.readouterr().out, "sweep "))
    (tmp_path / "sweep.results.jsonl").write_text('{"event": "job", "start": "now", "result": {}}\n')
    assert opened(tmp_path, start="later").results == [], "results of another start do not count"


def test_sweep_json_has_the_last_job_soon_while_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "WRITE_AFTER_SECS_PER_BYTE", 1e-3)
    one = opened(tmp_path, is_copy=False)
    for number in range(3):
        one.add(JobResult(f"rate={number}", f"job{number}", "finished"))
    deadline = time.monotonic() + 60
    while in_sweep_json(tmp_path) != ["job0", "job1", "job2"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    one.end(failed=False)


def test_what_varies_is_parsed_once_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = OverridesParser.parse_overrides

    def counted(parser: OverridesParser, overrides: list[str], *rest: Any) -> Any:
        parsed.append(len(overrides))
        return parse(parser, overrides, *rest)

    monkeypatch.setattr(OverridesParser, "parse_overrides", counted)
    argv = ["-m", "model.params.units=1,2,3,4", "model.params.dropout=0.1,0.2", "train.max_steps=7"]
    names = [name_of_job(argv, [f"model.params.units={n}", "model.params.dropout=0.1"]) for n in range(1, 5)]
    assert names == [f"units={n}, dropout=0.1" for n in range(1, 5)]
    assert parsed == [3]


@pytest.mark.slow
def test_a_sweep_can_be_kept_elsewhere(sweep: Callable[..., Outcome], tmp_path: Path) -> None:
    called = command(tmp_path, "finish()", "tracking=none", RATES, "sweep.dir=mine")
    called = [word for word in called if word != "-m"] + ["-m"]  # wherever it stands
    assert subprocess.run(called, cwd=tmp_path, env=ENV, capture_output=True, timeout=150).returncode == 0
    assert len(json.loads((tmp_path / "mine" / "sweep.json").read_text())["jobs"]) == 3


def test_a_sweep_has_the_same_name_however_it_is_typed_or_shown() -> None:
    name = job_id.sweep_id(["a=1,2", "b=3"])
    assert job_id.sweep_id(["b=3", "a=1,2", "sweep.parallel=2", "run.progress=plain"]) == name
    assert job_id.sweep_id(["a=1,3", "b=3"]) != name
    assert len(name) == 10


def test_a_job_has_the_name_of_what_it_computes_wherever_it_lives() -> None:
    tree = {"command": "train", "model": {"params": {"a": 1}}, "run": {"seed": 1, "progress": "auto"}, "model_dir": "x"}
    name = job_id.job_id(tree)
    assert job_id.job_id({**tree, "model_dir": None, "run": {"seed": 1, "progress": "off"}}) == name
    assert job_id.job_id({**tree, "run": {"seed": 2, "progress": "auto"}}) != name
    assert job_id.job_id({**tree, "model": {"params": {"a": 2}}}) != name
    evaluations = {job_id.job_id({**tree, "model_dir": where}, reads_a_run=True) for where in ("x", "y")}
    assert len(evaluations) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_a_job_whose_metric_is_not_a_number_comes_last_and_ends_nothing(sweep: Callable[..., Outcome]) -> None:
    code = """
value = float("nan") if rate == 0.3 else float("inf") if rate == 0.2 else rate
journal.event("result", global_step=7, metrics={"eval/loss": value, "eval/auc": float("nan")}, checkpoint="c")
"""
    result = sweep(code, RATES, tracking="mlflow")
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert [job["value"] for job in result.jobs] == [0.1, None, None]
    assert {job["metrics"]["eval/loss"] for job in result.jobs[1:]} == {"nan", "inf"}
    assert "eval/loss nan, " in result.out


@pytest.mark.slow
def test_a_finished_job_that_was_evaluated_since_is_still_finished(
    finished: Outcome, again: Callable[..., Outcome], tmp_path: Path
) -> None:
    best = tmp_path / "outputs" / "sweeps" / finished.directory.name / finished.jobs[0]["folder"]
    called = [word for word in command(tmp_path, "sys.exit(1)", "tracking=none", "command=evaluate") if word != "-m"]
    (best / "checkpoint").touch()
    assert subprocess.run([*called, f"model_dir={best}"], cwd=tmp_path, env=ENV, capture_output=True).returncode == 1
    result = again()
    assert result.err.count("skipped") == 3
    assert result.generations() == {"learning_rate=0.3": 1, "learning_rate=0.2": 1, "learning_rate=0.1": 1}


def test_secrets_of_a_sweep_are_its_owners(finished: Outcome) -> None:
    result = finished
    holding = {
        path
        for path in result.directory.rglob("*")
        if path.is_file() and "hunter22" in path.read_text(errors="replace")
    }
    assert {path.name for path in holding} >= {"config.yaml", "multirun.yaml", "overrides.yaml"}
    for path in holding:
        assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0


def test_a_sweep_that_a_config_file_describes_names_its_jobs_by_what_varies(
    sweep: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "rates.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      model.params.learning_rate: 0.1,0.2\n"
    )
    result = sweep("finish()", "experiment=rates")
    assert [job["name"] for job in result.jobs] == ["learning_rate=0.2", "learning_rate=0.1"]


def test_a_sweep_in_hydras_own_directory_is_ranked_and_has_its_code(
    sweep: Callable[..., Outcome], messages: Messages
) -> None:
    result = sweep("sys.exit(1) if rate == 0.3 else finish()", RATES, "hydra.sweep.dir=outputs/sweeps/mine")
    assert result.code == 1
    messages.same("title", line_of(result.out, "sweep outputs"))


def test_on_a_terminal_of_80_columns_the_table_divides_no_word(tmp_path: Path) -> None:
    terminal, child = pty.openpty()
    env = {**ENV, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
    called = command(tmp_path, "finish()", "tracking=none", RATES)
    with subprocess.Popen(
        called, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=child, stderr=child
    ) as process:
        os.close(child)
        said = b""
        while part := read_some(terminal):
            said += part
    assert process.returncode == 0, said.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).replace("\r", "\n")
    table = text[text.index("sweep outputs/sweeps/") :].splitlines()
    rows = [line.strip("│").split("│") for line in table if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["learning_rate=0.3", "learning_rate=0.2", "learning_rate=0.1"]
    (directory,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert all((directory / row[-1].strip() / "summary.json").exists() for row in rows)
    assert "folder" in text and max(map(len, table)) <= 80


def read_some(terminal: int) -> bytes:
    """What the other end has written; nothing once that is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux, where the other end is closed
        return b""
