"""`python -m runner strategy=multi_worker`, with real tasks that are killed, frozen and preempted on the way.

One run meets it all, and comes to the bits of an undisturbed one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import runner
from runner.checkpoint.reader import Reader
from runner.checkpoint_files.layout import latest_checkpoint
from runner.distribute.tf_config import read_tf_config
from tests.support.command_line import Command, CommandLine
from tests.support.jobs import SMALL
from tests.support.journal import events_in
from tests.support.messages import Messages
from tests.support.processes import wait_until
from tests.support.screen import line_of

# Its runs take a minute. tests/launch/test_gang.py has the same restarts with tasks that do not import TensorFlow.
pytestmark = pytest.mark.slow

MAX_STEPS, SAVE_STEPS = 1200, 100
RUN = [
    *(setting for setting in SMALL if not setting.startswith("train.max_steps")), f"train.max_steps={MAX_STEPS}",
    f"checkpoint.save_steps={SAVE_STEPS}", "train.steps_per_loop=20", "eval.start_delay_secs=1000", "model_dir=run",
    "strategy=multi_worker", f"train.hooks=[{{fn: {__name__}.Slow}}]",
]  # fmt: skip


class Slow(runner.Hook):
    """Each loop takes $LOOP_SECS: what a test wants to do to a run, it does before the end."""

    def after_step(self, run: Any, result: Any) -> None:
        time.sleep(float(os.environ.get("LOOP_SECS", 0)))


def start(command_line: CommandLine, folder: Path, *changes: str, loop_secs: float = 0.0) -> Command:
    """Start the command, which adds what it says to `said.txt`."""
    env = {**os.environ, "LOOP_SECS": str(loop_secs)}
    with open(os.devnull, "w") as nowhere, open(folder / "said.txt", "a") as said:
        return command_line.start(*RUN, *changes, cwd=folder, env=env, out=nowhere, err=said)


def noted(folder: Path, event: str, role: str = "chief") -> list[dict[str, Any]]:
    return events_in(folder / "run", event, role)


def task(folder: Path, role: str) -> psutil.Process:
    """The task of that role which was started last."""
    return psutil.Process(noted(folder, "started", role)[-1]["pid"])


def of_the_worker() -> float | None:
    """A notice of preemption, for the machine of the worker."""
    place = read_tf_config(os.environ["TF_CONFIG"])
    return 25.0 if not place.is_chief and Path("taken_away").exists() else None


def disturb(folder: Path, role: str, number: signal.Signals | None, rng: Any) -> None:
    """Sends a signal to a task, somewhere after the next checkpoint of the run; None: a notice of preemption."""
    trained = len(noted(folder, "first_step"))
    wait_until(lambda: len(noted(folder, "first_step")) > trained)
    saved = len(noted(folder, "checkpoint"))
    wait_until(lambda: len(noted(folder, "checkpoint")) > saved)
    time.sleep(rng.uniform(0, 0.1))
    if number is None:
        (folder / "taken_away").touch()
    else:
        task(folder, role).send_signal(number)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> tuple[Path, Path, list[int], str]:
    """Folders of an undisturbed and of a disturbed run, the exit codes of the second, and what it said."""
    undisturbed, disturbed = (tmp_path_factory.mktemp(name) for name in ("undisturbed", "disturbed"))
    alone = command_line(*RUN, cwd=undisturbed)
    assert alone.returncode == 0, alone.stderr
    rng = random.Random()
    process = start(command_line, disturbed, f"run.preemption_notice={__name__}.of_the_worker", loop_secs=0.1)
    disturb(disturbed, "worker", signal.SIGKILL, rng)
    disturb(disturbed, "chief", signal.SIGKILL, rng)
    disturb(disturbed, "worker", signal.SIGSTOP, rng)
    disturb(disturbed, "worker", None, rng)
    codes = [process.wait(240)]
    (disturbed / "run" / "summary.json").rename(disturbed / "preempted.json")
    again = start(command_line, disturbed, "input.eval.fn=tests.support.jobs.endless_of_unknown_size")
    wait_until(lambda: any(line["step"] == MAX_STEPS for line in noted(disturbed, "checkpoint")))
    task(disturbed, "worker").send_signal(signal.SIGTERM)  # of the evaluation, which has no other end
    codes.append(again.wait(240))
    (disturbed / "run" / "summary.json").rename(disturbed / "given_up.json")
    codes.append(start(command_line, disturbed).wait(240))
    return undisturbed, disturbed, codes, (disturbed / "said.txt").read_text()


def hashes(folder: Path) -> dict[str, str]:
    path = latest_checkpoint(folder / "run")
    assert path is not None and path.endswith(f"-{MAX_STEPS}")
    reader = Reader(path)
    return {
        name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in reader.get_many(reader.names()).items()
    }


def test_a_run_that_lost_tasks_comes_to_the_bits_of_an_undisturbed_one(runs: Any) -> None:
    undisturbed, disturbed, codes, _ = runs
    assert codes == [3, 3, 0]  # one task is preempted: all saved, resumable; then SIGTERM in the last evaluation
    assert hashes(disturbed) == hashes(undisturbed)
    assert json.loads((disturbed / "run" / "summary.json").read_text())["status"] == "finished"


def test_an_evaluation_is_given_up_by_all_when_one_task_is_preempted_and_made_by_the_next_start(runs: Any) -> None:
    _, disturbed, _, _ = runs
    given_up = json.loads((disturbed / "given_up.json").read_text())
    assert (given_up["status"], given_up["interrupted_by"], given_up["metrics"]) == ("interrupted", "worker:0", {})
    assert given_up["global_step"] == MAX_STEPS
    last = json.loads((disturbed / "run" / "summary.json").read_text())
    assert last["global_step"] == MAX_STEPS and last["metrics"].keys() == {"eval/loss", "eval/mae"}


def test_only_a_frozen_worker_of_a_parameter_server_run_is_started_again(
    tmp_path: Path, command_line: CommandLine
) -> None:
    """The coordinator waits for it in TensorFlow, without a heartbeat; training goes on from where it was."""
    served = ["strategy=parameter_server", "cluster.num_workers=2", "cluster.num_ps=1", "run.freeze_secs=15"]
    process = start(command_line, tmp_path, *served, "train.max_steps=1000", loop_secs=0.1)
    wait_until(lambda: len(noted(tmp_path, "first_step")) > 0)
    task(tmp_path, "worker").suspend()
    code, said = process.wait(240), (tmp_path / "said.txt").read_text()
    (restart,) = noted(tmp_path, "restart", "supervisor")
    assert (code, restart["task"]) == (0, "worker:0") and "only this task" in said, said
    assert len(noted(tmp_path, "started")) == 1 and len(noted(tmp_path, "started", "worker")) == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] >= 1000


def test_the_reason_of_each_restart_is_said_and_noted(runs: Any, messages: Messages) -> None:
    _, disturbed, _, said = runs
    restarts = noted(disturbed, "restart", "supervisor")
    assert [line["task"] for line in restarts] == ["worker:0", "chief", "worker:0"]
    for restart in restarts:
        line = line_of(said, f"runner: {restart['reason']}; ")
        assert f" step {restart['step']} " in line
        messages.same("stderr", line, hide=r"(?<=from step )\d+|(?<=no heartbeat for )\d+")


def test_all_save_the_same_step_when_one_task_is_preempted(runs: Any, messages: Messages) -> None:
    _, disturbed, _, said = runs
    preempted = json.loads((disturbed / "preempted.json").read_text())
    assert (preempted["status"], preempted["interrupted_by"]) == ("interrupted", "worker:0")
    step = preempted["global_step"]
    assert step % 20 == 0  # at the end of a loop; one in ten of these is a step of SAVE_STEPS, too
    assert step in {line["step"] for line in noted(disturbed, "checkpoint")}
    assert f"Saved model.ckpt-{step}" in said
    messages.same("stderr", line_of(said, "run.preemption_notice="))
