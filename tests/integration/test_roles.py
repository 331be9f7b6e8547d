"""train_and_evaluate by roles: a real evaluator process beside a chief, which is this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import Estimator, Hook, RunConfig, TrainingResult, train_and_evaluate
from runner.checkpoint import retention
from runner.checkpoint.integrity import DamagedCheckpointsError
from runner.config import parsing
from runner.config.schema import ConfigError
from runner.distribute.cluster import Cluster
from runner.distribute.errors import PeerLost
from runner.estimator.evaluator import CheckpointFollower, TrainingWatch
from runner.estimator.train_and_evaluate import evaluate_checkpoints
from runner.hooks.hook import Interrupted
from runner.system.console import Progress
from runner.system.exit_codes import INTERRUPTED
from runner.task import commands
from runner.task.commands import TaskContext
from runner.task.stop_hook import StopRequest
from runner.tracking.journal import NullJournal
from runner.tracking.run_end import TrainingStatus, generation_in, read_ending, remove_ending, write_ending
from tests.config.test_config import composed
from tests.estimator.test_early_stopping import Interrupter, around_six
from tests.support import jobs
from tests.support.checkpoints import list_checkpoints
from tests.support.command_line import CommandLine
from tests.support.evaluator import BEST, PLACE, evaluator, specs, untuned
from tests.support.journal import events_in, journal_of
from tests.support.line import points, steps_of
from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "how_to" / "evaluator.md"
TIMEOUT_SECS = 300.0
BYTES = r"\d+(?= bytes)|(?<=bytes instead of )\d+"


class Companion:
    """The evaluator process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.evaluator"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answered = 0

    def begin(self, folder: Path, generation: int = 0, **settings: Any) -> None:
        """Has it follow the run in `folder`."""
        case = {"folder": str(folder), "generation": generation, "specs": settings}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """What came of it; returns when it has ended."""
        assert self._process.stdout is not None
        guard = threading.Timer(TIMEOUT_SECS, self._process.kill)
        guard.start()
        answer = self._process.stdout.readline()
        guard.cancel()
        assert answer, "the evaluator died, or went on when training had ended"
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT_SECS)


@pytest.fixture(scope="module")
def companion() -> Iterator[Companion]:
    process = Companion()
    yield process
    process.close()


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + TIMEOUT_SECS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def evaluated(folder: Path) -> list[int]:
    """The steps that the evaluator has noted, in order."""
    return [line["step"] for line in events_in(folder, "evaluated", "evaluator")]


class Patient(Hook):
    """Training goes on after a checkpoint when the evaluator has evaluated it and lets it go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def before_step(self, run: Any, step: int) -> None:
        if step and step % 2 == 0:
            run.wait_for_checkpoint()
            # It notes the evaluation within the lease, which keeps the checkpoint from being deleted.
            wait_for(lambda: step in evaluated(self._folder) and not (self._folder / retention.LEASE).exists())


class Failing(Hook):
    """Training fails after this step, when the evaluator is in the middle of an evaluation."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: Any, result: Any) -> None:
        if result.last_step == self._step:
            wait_for(lambda: (Path(run.model_dir) / retention.LEASE).exists())
            raise RuntimeError("out of luck")


def chief(
    folder: Path,
    max_steps: int | None = 8,
    *hooks: Hook,
    input_fn: Any = None,
    patience: int | None = None,
    **config: Any,
) -> TrainingResult:
    """What the process that trains does: a step a loop, a checkpoint every two."""
    settings: dict[str, Any] = {"save_checkpoints_steps": 2, "steps_per_loop": 1, "has_evaluator": True, **config}
    journal = journal_of(folder)
    trainer = Estimator(around_six, folder, RunConfig(**settings), journal=journal)
    train_spec, eval_spec = specs(patience=patience)
    train_spec = dataclasses.replace(
        train_spec, input_fn=input_fn or train_spec.input_fn, max_steps=max_steps, hooks=list(hooks)
    )
    return train_and_evaluate(trainer, train_spec, eval_spec)


# --- beside each other ------------------------------------------------------------------------------------------


def test_evaluator_follows_the_checkpoints_and_ends_with_training(companion: Companion, tmp_path: Path) -> None:
    companion.begin(tmp_path)  # it waits for the first checkpoint
    result = chief(tmp_path, 7, Patient(tmp_path))
    answer = companion.end()
    assert evaluated(tmp_path) == steps_of(tmp_path / "eval", "loss") == [2, 4, 6, 7]
    assert (result.global_step, result.examples, dict(result.metrics)) == (7, 14, {})
    assert (answer["step"], answer["checkpoint"]) == (7, str(tmp_path / "model.ckpt-7"))
    alone = Estimator(around_six, tmp_path).evaluate(points())
    assert answer["metrics"] == alone, "all examples, once"
    ending = read_ending(tmp_path)
    assert (ending.status, ending.global_step) == ("finished", 7)
    assert not (tmp_path / retention.LEASE).exists()
    assert not events_in(tmp_path, "evaluated"), "the chief does not evaluate"


def test_evaluator_ends_when_the_input_does(companion: Companion, tmp_path: Path) -> None:
    companion.begin(tmp_path, at_start=True)
    chief(tmp_path, None, Patient(tmp_path), input_fn=untuned(points(8, 2)))
    assert companion.end()["step"] == 4
    assert evaluated(tmp_path)[-2:] == [2, 4]


def test_evaluator_that_the_chief_does_not_know_of_ends_with_training(companion: Companion, tmp_path: Path) -> None:
    companion.begin(tmp_path)
    result = chief(tmp_path, 6, has_evaluator=False)
    assert result.metrics[""]["global_step"] == 6, "it evaluates, too"
    answer = companion.end()
    assert (answer["step"], answer["metrics"]) == (6, result.metrics[""])
    assert read_ending(tmp_path).status == "finished"


def test_evaluator_ends_with_training_that_fails_before_its_first_checkpoint(
    companion: Companion, tmp_path: Path
) -> None:
    companion.begin(tmp_path / "new")
    with pytest.raises(ZeroDivisionError):
        chief(tmp_path / "new", 6, input_fn=lambda: 1 // 0)
    assert companion.end()["metrics"] == {}
    assert read_ending(tmp_path / "new").status == "failed"


def test_early_stop_of_the_evaluator_ends_training(companion: Companion, tmp_path: Path, messages: Messages) -> None:
    companion.begin(tmp_path, patience=2)
    result = chief(tmp_path, 10_000, Patient(tmp_path), patience=2)
    answer = companion.end()
    assert result.stopped_early == answer["early"]
    assert 10 <= result.global_step == answer["step"] == read_ending(tmp_path).global_step < 10_000
    assert read_ending(tmp_path).status == "stopped_early"
    (said,) = events_in(tmp_path, "stopped_early")
    messages.same("journal", said["text"])
    assert said["text"].endswith(str(result.stopped_early))

    companion.begin(tmp_path, generation=0, patience=2)
    again = chief(tmp_path, 10_000, patience=2)
    assert (again.global_step, again.examples, again.stopped_early) == (result.global_step, 0, result.stopped_early)
    assert companion.end()["early"] == result.stopped_early


def test_evaluator_ends_at_once_when_training_fails(companion: Companion, tmp_path: Path) -> None:
    companion.begin(tmp_path, endless=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        chief(tmp_path, 100, Failing(5))
    assert companion.end()["metrics"] == {}, "the evaluation that was under way is given up"
    assert read_ending(tmp_path).status == "failed"
    assert not (tmp_path / retention.LEASE).exists()


def test_evaluator_ends_with_an_interrupted_run_and_goes_on_with_it(companion: Companion, tmp_path: Path) -> None:
    companion.begin(tmp_path, generation=1)
    chief(tmp_path, 9, Patient(tmp_path), Interrupter(5), generation=1)
    answer = companion.end()
    assert (answer["step"], read_ending(tmp_path).status) == (4, "interrupted")
    companion.begin(tmp_path, generation=2)  # what the first start left says nothing
    chief(tmp_path, 9, Patient(tmp_path), generation=2)
    assert companion.end()["step"] == 9
    assert evaluated(tmp_path) == [2, 4, 6, 8, 9]


def test_best_checkpoint_stays_by_what_the_evaluator_found(companion: Companion, tmp_path: Path) -> None:
    companion.begin(tmp_path)
    chief(tmp_path, 12, Patient(tmp_path), keep_best=BEST, keep_checkpoint_max=1)
    companion.end()
    assert [info.step for info in list_checkpoints(tmp_path)] == [6, 12]
    assert retention.metrics_of(tmp_path / "model.ckpt-6")["eval/distance"] == 0


class Losing(Hook):
    """Training loses a worker after its first step."""

    def after_step(self, run: Any, result: Any) -> None:
        raise PeerLost("a worker of the cluster was lost")


def test_evaluator_stays_when_training_lost_a_worker_and_will_be_started_again(tmp_path: Path) -> None:
    with pytest.raises(PeerLost):
        chief(tmp_path, 8, Losing())
    assert not read_ending(tmp_path).is_over


# --- from the command line ---------------------------------------------------------------------------------------


def overrides(folder: Path, *others: str) -> list[str]:
    """The small job of tests/support/jobs.py with the metric that is best at step 6, and an evaluator."""
    fn = "model.fn=tests.estimator.test_early_stopping.around_six"
    return [*jobs.SMALL, fn, "cluster.evaluator=true", f"model_dir={folder}/run", *others]


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_command_line_starts_an_evaluator_whose_early_stop_ends_the_run(
    tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    documented = re.search(r"```\n(python -m runner cluster.evaluator=true.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert documented is not None
    shown = shlex.split(documented[1].replace("\\\n", " ").replace("eval/accuracy", "eval/distance"))[3:]
    ours = [f"tracking.uri={uri}", "train.max_steps=100000000", "train.early_stopping.metric=eval/distance"]
    command = overrides(tmp_path, *shown, "tracking=mlflow", *ours, "train.early_stopping.patience_evals=1")
    done = command_line(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    messages.same("stopped early", summary["stopped_early"], hide="(?<=best ).*")
    step = summary["global_step"]
    assert summary["metrics"]["eval/distance"] == float(np.float32(step) - np.float32(6))
    assert f"[evaluator] eval at step {step}: distance = " in done.stderr
    assert f": {summary['stopped_early']}" in done.stderr
    assert "eval/distance" in done.stdout, "the table at the end"
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        query = "select distinct run_uuid, key from metrics where key in ('eval/distance', 'train/loss') order by key"
        found = database.execute(query).fetchall()
    assert found == [(summary["mlflow_run_id"], "eval/distance"), (summary["mlflow_run_id"], "train/loss")]


def task(folder: Path) -> subprocess.Popen[str]:
    """The evaluator's task, as a supervisor starts it."""
    (folder / "run").mkdir(exist_ok=True)
    config = jobs.config_file(folder, *overrides(folder)[len(jobs.SMALL) :])
    place = json.dumps(
        {"cluster": {"chief": ["host:1"], "worker": ["host:2"]}, "task": {"type": "evaluator", "index": 0}}
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": place}
    command = [sys.executable, "-m", "runner.task", str(config)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_sigterm_ends_an_evaluator_that_waits(tmp_path: Path) -> None:
    process = task(tmp_path)
    assert process.stderr is not None
    guard = threading.Timer(TIMEOUT_SECS, process.kill)
    guard.start()
    for line in process.stderr:
        if "Waiting for the first" in line:
            process.terminate()
    guard.cancel()
    assert process.wait(TIMEOUT_SECS) == INTERRUPTED


@pytest.mark.parametrize("changes", ["cluster.evaluator=false", "command=evaluate"])
def test_an_evaluator_of_which_the_others_do_not_know_is_refused(
    changes: str, tmp_path: Path, messages: Messages
) -> None:
    train(tmp_path / "run", 1)
    config = parsing.parse(composed(overrides(tmp_path, changes)))
    around = TaskContext(NullJournal(), Progress(), StopRequest(NullJournal(), ()), 0.0, PLACE)
    with messages.raised(ConfigError):
        commands.run(config, around)


# --- what the evaluator does with what it finds: the other process is played by `wait` ----------------------------


class Script:
    """Between two looks of the evaluator, the next of these happens; after the last one it is too much."""

    def __init__(self, *acts: Callable[[], Any]) -> None:
        self._acts = list(acts)

    def __call__(self, secs: float) -> None:
        assert self._acts, "it waits although nothing more will come"
        self._acts.pop(0)()


def end(folder: Path, status: str = "finished") -> Callable[[], None]:
    return lambda: write_ending(folder, status, 0, 0)


def train(folder: Path, max_steps: int, **config: Any) -> None:
    """As a chief that is killed afterwards: nobody tells the evaluator."""
    trainer = Estimator(around_six, folder, RunConfig(save_checkpoints_steps=2, steps_per_loop=1, **config))
    trainer.train(points(repeat=True), max_steps=max_steps)


def test_waits_for_the_first_checkpoint_and_says_so_once(tmp_path: Path, caplog: Any, messages: Messages) -> None:
    caplog.set_level("INFO", "runner")
    script = Script(lambda: None, lambda: None, lambda: train(tmp_path, 2), end(tmp_path))
    result = evaluate_checkpoints(evaluator(tmp_path), *specs(), wait=script)
    assert (result.global_step, evaluated(tmp_path)) == (2, [2])
    (waits,) = [record for record in caplog.records if "Waiting" in record.getMessage()]
    messages.same(waits.levelname, waits.getMessage())


def test_without_any_checkpoint_it_ends_all_the_same(tmp_path: Path) -> None:
    result = evaluate_checkpoints(evaluator(tmp_path), *specs(), wait=Script(end(tmp_path, "failed")))
    assert (result.checkpoint, result.metrics, result.global_step) == (None, {}, 0)


def test_evaluates_the_newest_and_what_a_throttle_left_out_at_the_end(tmp_path: Path) -> None:
    acts = [lambda: train(tmp_path, 6), lambda: train(tmp_path, 8), lambda: train(tmp_path, 9), end(tmp_path)]
    evaluate_checkpoints(evaluator(tmp_path), *specs(throttle_secs=1000), wait=Script(*acts))
    assert evaluated(tmp_path) == [6, 9]


def test_the_model_before_the_first_step_is_evaluated_with_at_start(tmp_path: Path) -> None:
    saved = Estimator(around_six, tmp_path, RunConfig(save_checkpoints_steps=2, steps_per_loop=1))
    with contextlib.suppress(KeyboardInterrupt):
        saved.train(points(repeat=True), hooks=[_Killed()], max_steps=4)
    acts = [lambda: None, lambda: train(tmp_path, 2), end(tmp_path)]
    evaluate_checkpoints(evaluator(tmp_path), *specs(), wait=Script(*acts))
    assert evaluated(tmp_path) == [2]
    for path in tmp_path.glob("model.ckpt-2*"):
        path.unlink()
    remove_ending(tmp_path)
    evaluate_checkpoints(
        evaluator(tmp_path), *specs(at_start=True), wait=Script(lambda: train(tmp_path, 2), end(tmp_path))
    )
    assert evaluated(tmp_path) == [2, 0, 2]


class _Killed(Hook):
    def before_step(self, run: Any, step: int) -> None:
        run.wait_for_checkpoint()
        raise KeyboardInterrupt


def test_a_chief_that_goes_back_is_followed_back(tmp_path: Path) -> None:
    def go_back() -> None:
        for path in (*tmp_path.glob("model.ckpt-8*"), *tmp_path.glob("model.ckpt-6*"), tmp_path / "checkpoint"):
            path.unlink()

    acts = [go_back, lambda: train(tmp_path, 8), end(tmp_path)]
    train(tmp_path, 8)
    evaluate_checkpoints(evaluator(tmp_path), *specs(patience=5), wait=Script(*acts))
    assert evaluated(tmp_path) == [8, 4, 8]
    values = json.loads((tmp_path / "early_stopping.json").read_text())["values"]
    assert sorted(values) == ["4", "8"]


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    train(tmp_path, 4)
    (data,) = tmp_path.glob("model.ckpt-4.data-*")
    os.truncate(data, data.stat().st_size // 2)
    result = evaluate_checkpoints(evaluator(tmp_path), *specs(), wait=Script(end(tmp_path)))
    assert result.global_step == 2
    messages.logged(caplog, "model.ckpt-2", hide=BYTES)


def test_it_waits_while_all_checkpoints_are_damaged_and_fails_when_training_is_over(
    tmp_path: Path, messages: Messages
) -> None:
    train(tmp_path, 1)
    for data in tmp_path.glob("model.ckpt-*.data-*"):
        os.truncate(data, data.stat().st_size // 2)
    with messages.raised(DamagedCheckpointsError, hide=BYTES):
        evaluate_checkpoints(evaluator(tmp_path), *specs(), wait=Script(lambda: None, end(tmp_path)))


def test_an_interrupt_while_it_waits_ends_it_with_what_it_found(tmp_path: Path) -> None:
    def interrupt(secs: float) -> None:
        raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted):
        evaluate_checkpoints(evaluator(tmp_path), *specs(), wait=interrupt)
    train(tmp_path, 2)
    result = evaluate_checkpoints(evaluator(tmp_path), *specs(), wait=interrupt)
    assert (result.global_step, result.metrics[""]["distance"]) == (2, 4)


class Removing:
    """Evaluations under which the checkpoint goes away; the last one stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: list[str] = []

    def is_due(self) -> bool:
        return True

    def of_checkpoint(self, path: str, *, is_last: bool) -> list[Callable[[], None]]:
        return [lambda: self._evaluate(path, is_last)]

    def _evaluate(self, path: str, is_last: bool) -> None:
        self.seen.append(os.path.basename(path))
        if is_last:
            return
        for file in self._folder.glob("model.ckpt-4*"):
            file.unlink()
        raise ValueError("no such file")


def test_a_checkpoint_that_is_removed_under_it_is_passed_over(tmp_path: Path, caplog: Any, messages: Messages) -> None:
    train(tmp_path, 4)
    watch, removing = TrainingWatch(tmp_path), Removing(tmp_path)
    latest = evaluator(tmp_path).latest_checkpoint
    assert (
        CheckpointFollower(str(tmp_path), watch, removing, latest, wait=Script(end(tmp_path))).run().status
        == "finished"
    )
    assert removing.seen == ["model.ckpt-4", "model.ckpt-2"]
    messages.logged(caplog, "model.ckpt-4")


def test_an_error_of_its_own_is_raised(tmp_path: Path, messages: Messages) -> None:
    train(tmp_path, 2)
    with messages.raised(ValueError) as raised:
        train_spec, eval_spec = specs(patience=1)
        rule = dataclasses.replace(train_spec.early_stopping, metric="eval/distanse")
        evaluate_checkpoints(
            evaluator(tmp_path), dataclasses.replace(train_spec, early_stopping=rule), eval_spec, wait=Script()
        )
    assert not (tmp_path / retention.LEASE).exists()
    assert raised.value is not None


def test_there_is_one_evaluator(tmp_path: Path, messages: Messages) -> None:
    second = Estimator(around_six, tmp_path, RunConfig(cluster=Cluster("evaluator", 1)))
    with messages.raised(ValueError):
        train_and_evaluate(second, *specs())


def test_an_evaluator_is_a_single_process_for_itself() -> None:
    assert PLACE.is_evaluator and not PLACE.is_chief and (PLACE.num_workers, PLACE.worker_index) == (1, 0)


# --- how training has ended ------------------------------------------------------------------------------------


def test_an_ending_is_what_was_written(tmp_path: Path) -> None:
    assert read_ending(tmp_path) == TrainingStatus() and not TrainingStatus().is_over
    write_ending(tmp_path, "interrupted", 40, 3)
    found = read_ending(tmp_path)
    assert (found.status, found.global_step, found.generation, found.is_over, found.is_complete) == (
        "interrupted", 40, 3, True, False,
    )  # fmt: skip
    remove_ending(tmp_path)
    remove_ending(tmp_path)
    assert read_ending(tmp_path) == TrainingStatus()


def test_the_generation_is_in_the_environment() -> None:
    assert (generation_in({}), generation_in({"RUNNER_GENERATION": "4"})) == (0, 4)


@pytest.mark.parametrize(
    ("status", "generation", "own", "counts"),
    [
        ("finished", 1, 1, True),
        ("failed", 1, 1, True),
        ("finished", 1, 2, False),
        ("finished", 0, 0, True),  # it came late
        ("stopped_early", 0, 0, True),
        ("interrupted", 0, 0, False),  # the others are about to be started again
        ("failed", 0, 0, False),
    ],
)
def test_what_an_earlier_start_left_says_nothing(
    status: str, generation: int, own: int, counts: bool, tmp_path: Path
) -> None:
    write_ending(tmp_path, status, 1, generation)
    watch = TrainingWatch(tmp_path, own)
    assert watch.ending().is_over is counts
    time.sleep(0.001)
    write_ending(tmp_path, status, 1, own)
    assert watch.ending().status == status, "one that came meanwhile counts"
