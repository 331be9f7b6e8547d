"""Gangs of small scripts in the place of TensorFlow tasks: who is started, stopped and started again, and what is said.

Processes and supervisors are real.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from runner.config import schema
from runner.config.schema import ClusterConfig, Config, RunSettings, StrategyConfig, TrackingConfig, TrainConfig
from runner.distribute.cluster import ALONE, Cluster
from runner.launch import gang, restarts, supervisor, task_group, task_starter
from runner.launch.gang import GangResult
from runner.launch.restarts import Restarts, pause_secs
from runner.system.exit_codes import FAILED, OUT_OF_MEMORY, USER_ERROR, rank_of
from runner.tracking.run_record import RunRecord
from tests.launch.test_supervisor import config_of, summary_in
from tests.support.journal import events_in, metrics_of_steps, recorded
from tests.support.messages import Messages
from tests.support.processes import is_gone, wait_until
from tests.support.screen import line_of

ROOT = Path(__file__).parents[2]
TASK = Path(__file__).parents[1] / "support" / "gang_task.py"
JOIN = "journal.event('joined')\n"
FINISH = JOIN + "finish(global_step=7, checkpoint='c', metrics={'eval/accuracy': 0.5})\n"
PREEMPTED = JOIN + "on_sigterm(3); wait_for('chief.pid')\njournal.event('asked_to_stop'); os.kill(os.getpid(), 15)\n"
SILENT_SECS = r"(?<=no heartbeat for )\d+"
# In short sleeps: Python sees a signal that comes just before a sleep when that is over.
UNTIL_ASKED = JOIN + "on_sigterm(3); started()\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a supervisor; each task does what is given for its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(task_group, "task_argv", lambda file: [sys.executable, str(TASK), str(file)])
    monkeypatch.setattr(restarts, "pause_secs", lambda number: 0.0)

    def run_gang(codes: Mapping[str, str], strategy: str = "multi_worker", **settings: Any) -> int:
        return supervisor.run(prepared(tmp_path, codes, strategy, **settings), env()).code

    return run_gang


def env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def prepared(folder: Path, codes: Mapping[str, str], strategy: str, **settings: Any) -> Config:
    """The config of a run in `folder/run` whose tasks do `codes`."""
    for name, code in codes.items():
        (folder / f"{name}.py").write_text(code)
    tracking = TrackingConfig(backend=settings.pop("backend", "none"), uri=f"sqlite:///{folder}/mlflow.db")
    train = settings.pop("train", TrainConfig())
    run = RunSettings(**{name: settings.pop(name) for name in ("seed", "freeze_secs") if name in settings})
    cluster = ClusterConfig(**settings)
    groups = {"strategy": StrategyConfig(strategy), "cluster": cluster, "tracking": tracking, "run": run}
    return config_of(folder / "run", train=train, **groups)


def noted(folder: Path, role: str = "chief", index: int = 0) -> list[dict[str, Any]]:
    return recorded(folder / "run", role, index)


def started(folder: Path, *names: str, generation: int = 1) -> list[int]:
    """The process ids of the tasks of a generation, as soon as all run."""
    files = [folder / f"{name}.pid" for name in names]

    def found() -> list[dict[str, int]]:
        return [json.loads(file.read_text()) for file in files if file.exists()]

    wait_until(lambda: [each["generation"] for each in found()] == [generation] * len(names))
    return [each["pid"] for each in found()]


# --- one start ------------------------------------------------------------------------------------------------------


def test_the_chief_tells_what_the_summary_says_and_all_must_finish(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    says = "print('hello from', place.name, file=sys.stderr)\n"
    assert run({"chief": says + FINISH, "worker:0": says + JOIN, "worker:1": says + JOIN}, num_workers=3) == 0
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"], summary["restarts"]) == ("finished", 7, 0)
    said = capfd.readouterr().err.splitlines()
    expected = ["hello from chief", "[worker:0] hello from worker:0", "[worker:1] hello from worker:1"]
    assert sorted(said) == sorted(expected)


def test_servers_are_ended_when_the_chief_has_finished(run: Callable[..., int], tmp_path: Path) -> None:
    serves = JOIN + "started(); time.sleep(600)\n"
    waits = "wait_for('worker:0.pid'); wait_for('ps:0.pid')\n"
    codes = {"chief": waits + FINISH, "worker:0": serves, "ps:0": serves}
    assert run(codes, "parameter_server", num_workers=1) == 0
    for pid in started(tmp_path, "worker:0", "ps:0"):
        assert is_gone(pid)


def test_the_error_of_a_worker_ends_the_run_and_is_what_a_person_reads(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    loses = JOIN + "wait_for('failed'); sys.exit(75)\n"
    fails = JOIN + "(folder / 'failed').touch(); fail('width must be even', 2)\n"
    assert run({"chief": loses, "worker:0": fails}) == 2
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["restarts"]) == ("failed", 0)
    messages.same("error", summary["error"])
    messages.same("stderr", capfd.readouterr().err)


def test_a_mistake_that_all_tasks_find_is_said_once(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(dict.fromkeys(["chief", "worker:0", "worker:1"], "fail('no such file', 2)"), num_workers=3) == 2
    messages.same("stderr", capfd.readouterr().err)
    error = summary_in(tmp_path / "run")["error"]
    messages.same("error", error[error.index("ValueError") :])  # whose it is, is a matter of who comes first


@pytest.mark.alone
def test_tasks_that_do_not_find_the_others_in_time_are_named(
    run: Callable[..., int], tmp_path: Path, messages: Messages
) -> None:
    hangs = "started(); time.sleep(600)\n"
    codes = {"chief": UNTIL_ASKED, "worker:0": hangs, "worker:1": UNTIL_ASKED}
    assert run(codes, num_workers=3, start_timeout_secs=8) == 1
    messages.same("error", summary_in(tmp_path / "run")["error"])
    for pid in started(tmp_path, "chief", "worker:0", "worker:1"):
        assert is_gone(pid)


# --- stops ----------------------------------------------------------------------------------------------------------

SUPERVISE = """
import os, sys
from pathlib import Path
from runner.config import parsing, schema
from runner.launch import gang, supervisor, task_group
task_group.task_argv = lambda file: [sys.executable, {task!r}, str(file)]
gang.SETTLE_SECS = 1.0
try:
    sys.exit(supervisor.run(parsing.load(Path("config.yaml")), dict(os.environ)).code)
except schema.ConfigError as error:
    print(f"runner: {{error}}", file=sys.stderr)
    sys.exit(2)
"""


def supervised(folder: Path, codes: Mapping[str, str], strategy: str, **settings: Any) -> subprocess.Popen[str]:
    """A supervisor in a process of its own."""
    schema.save(prepared(folder, codes, strategy, **settings), folder / "config.yaml")
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISE.format(task=str(TASK))], cwd=folder, env=env(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ctrl_c_asks_all_to_save_and_exits_with_3(tmp_path: Path, messages: Messages) -> None:
    saves = JOIN + "save(5)\n" + UNTIL_ASKED
    process = supervised(tmp_path, {"chief": saves, "worker:0": UNTIL_ASKED}, "multi_worker")
    pids = started(tmp_path, "chief", "worker:0")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=150)[1]
    assert process.returncode == 3
    messages.same("line", said.splitlines()[-1])
    assert (tmp_path / "chief.asked").exists() and (tmp_path / "worker:0.asked").exists()
    assert summary_in(tmp_path / "run")["status"] == "interrupted"
    assert all(is_gone(pid) for pid in pids)


def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    ignores = JOIN + "signal.signal(signal.SIGTERM, lambda *_: (folder / f'{place.name}.asked').touch())\n"
    ignores += "started()\nwhile True: time.sleep(600)\n"
    process = supervised(tmp_path, {"chief": ignores, "worker:0": ignores}, "multi_worker")
    pids = started(tmp_path, "chief", "worker:0")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "chief.asked").exists() and (tmp_path / "worker:0.asked").exists())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=150)
    assert process.returncode == 1
    assert all(is_gone(pid) for pid in pids)
    assert summary_in(tmp_path / "run")["restarts"] == 0


def test_servers_go_on_until_the_coordinator_has_saved(tmp_path: Path) -> None:
    serves = JOIN + "on_sigterm(0); started(); time.sleep(600)\n"
    codes = {"chief": JOIN + "save(5)\n" + UNTIL_ASKED, "worker:0": serves, "ps:0": serves}
    process = supervised(tmp_path, codes, "parameter_server", num_workers=1)
    started(tmp_path, "chief", "worker:0", "ps:0")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=150)
    assert process.returncode == 3
    assert (tmp_path / "chief.asked").exists()
    assert not (tmp_path / "worker:0.asked").exists() and not (tmp_path / "ps:0.asked").exists()


def test_one_task_that_is_preempted_stops_all(run: Callable[..., int], tmp_path: Path) -> None:
    assert run({"chief": JOIN + "save(5)\n" + UNTIL_ASKED, "worker:0": PREEMPTED}) == 3
    assert (tmp_path / "chief.asked").exists()
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["interrupted_by"]) == ("interrupted", "worker:0")


def test_a_server_that_is_preempted_has_the_coordinator_save(run: Callable[..., int], tmp_path: Path) -> None:
    serves = JOIN + "started(); time.sleep(600)\n"
    asks = JOIN + "wait_for('chief.pid'); heart.ask_to_stop(); time.sleep(600)\n"
    codes = {"chief": JOIN + "save(5)\n" + UNTIL_ASKED, "worker:0": serves, "ps:0": asks}
    assert run(codes, "parameter_server", num_workers=1) == 3
    assert (tmp_path / "chief.asked").exists()
    assert summary_in(tmp_path / "run")["interrupted_by"] == "ps:0"


def test_no_task_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """Each stops itself when its lifeline ends, as `runner.task` does."""
    serves = JOIN + "started(); time.sleep(600)\n"
    codes = {"chief": UNTIL_ASKED, "worker:0": serves, "ps:0": serves, "evaluator": UNTIL_ASKED}
    process = supervised(tmp_path, codes, "parameter_server", num_workers=1, evaluator=True)
    pids = started(tmp_path, *codes)
    process.kill()
    process.wait()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_an_evaluator_that_fails_after_training_fails_the_run_which_keeps_its_checkpoint(
    run: Callable[..., int], tmp_path: Path, messages: Messages
) -> None:
    evaluates = "wait_for('run/training_ended.json')\nfail('no such file', 2)\n"
    ends = "(model_dir / 'training_ended.json').touch()\nfinish(global_step=7, checkpoint='c')\n"
    assert run({"chief": ends, "evaluator": evaluates}, "default", evaluator=True) == 2
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"], summary["checkpoint"]) == ("failed", 7, "c")
    messages.same("error", summary["error"])


# --- losses ---------------------------------------------------------------------------------------------------------

CHIEF = """
journal.event('joined')
if generation < {last}:
    save({step})
    started()
    wait_for(f'lost{{generation}}')
    sys.exit(75)
finish(global_step=9, checkpoint='c')
"""
LOST = """
journal.event('joined')
if generation < {last}:
    wait_for('run/model.ckpt-{step}.index')
    (folder / f'lost{{generation}}').touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("mlflow_database")
def test_a_gang_that_lost_a_task_starts_again_from_the_last_checkpoint(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    codes = {"chief": CHIEF.format(last=2, step=40), "worker:0": LOST.format(last=2, step=40)}
    assert run(codes, backend="mlflow") == 0
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"], summary["restarts"]) == ("finished", 9, 1)
    assert RunRecord.read(tmp_path / "run").generation == 2
    said = line_of(capfd.readouterr().err, "runner: ")
    messages.same("stderr", said)
    (restart,) = events_in(tmp_path / "run", "restart", "supervisor")
    assert (restart["task"], restart["step"]) == ("worker:0", 40)
    messages.same("reason", restart["reason"])
    assert metrics_of_steps(tmp_path / "run", "supervisor") == [(40, {"run/restarts": 1.0})]
    tracked = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(summary["mlflow_run_id"])
    assert tracked.data.tags["restarts"] == "1"
    assert f"runner: {tracked.data.tags['last_restart']}" == said
    assert tracked.data.metrics["run/restarts"] == 1.0


def test_a_peer_of_a_killed_task_that_notices_nothing_holds_up_nobody(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "SETTLE_SECS", 1000.0)  # that is for reasons which are not known yet
    waits = JOIN + "if generation == 1: started(); time.sleep(1000)\n" + FINISH
    killed = JOIN + "if generation == 1: wait_for('chief.pid'); os.kill(os.getpid(), signal.SIGKILL)\n"
    assert run({"chief": waits, "worker:0": killed}) == 0
    assert summary_in(tmp_path / "run")["restarts"] == 1


def test_losses_without_a_newer_checkpoint_are_counted_and_end_the_run(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    codes = {"chief": CHIEF.format(last=99, step=40), "worker:0": LOST.format(last=99, step=40)}
    assert run(codes, max_restarts=2) == 1
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["restarts"]) == ("failed", 2)
    messages.same("error", summary["error"])
    messages.same("stderr", line_of(capfd.readouterr().err, "cluster.max_restarts=2"))


def test_a_worker_beside_parameter_servers_is_started_again_alone(run: Callable[..., int], tmp_path: Path) -> None:
    dies_once = JOIN + (
        "if not (folder / 'died').exists():\n"
        "    wait_for('chief.pid'); (folder / 'died').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "(folder / 'back').write_text(os.environ['TF_CONFIG']); time.sleep(600)\n"
    )
    serves = JOIN + "(folder / 'ps').write_text(os.environ['TF_CONFIG']); time.sleep(600)\n"
    codes = {"chief": JOIN + "started(); wait_for('back')\n" + FINISH, "worker:0": dies_once, "ps:0": serves}
    assert run(codes, "parameter_server", num_workers=1) == 0
    assert summary_in(tmp_path / "run")["restarts"] == 1
    assert RunRecord.read(tmp_path / "run").generation == 1
    back, ps = (json.loads((tmp_path / name).read_text())["cluster"] for name in ("back", "ps"))
    assert back == ps  # where the coordinator looks for it


def test_a_lost_parameter_server_starts_all_again(run: Callable[..., int], tmp_path: Path) -> None:
    serves = JOIN + "time.sleep(600)\n"
    lost = JOIN + "if generation == 1: wait_for('chief.pid'); (folder / 'lost1').touch(); os.kill(os.getpid(), 9)\n"
    codes = {"chief": CHIEF.format(last=2, step=3), "worker:0": serves, "ps:0": lost + serves}
    assert run(codes, "parameter_server", num_workers=1) == 0
    assert RunRecord.read(tmp_path / "run").generation == 2


@pytest.mark.alone
def test_a_frozen_task_is_found_and_named(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    messages: Messages,
) -> None:
    """The others notice nothing, as beside parameter servers."""
    monkeypatch.setattr(gang, "SILENCE_SECS", 6.0)  # a process takes a second to its first sign on a busy machine
    monkeypatch.setattr(gang, "SETTLE_SECS", 0.5)
    freezes = JOIN + "if generation == 1: started(); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)\n"
    waits = JOIN + "if generation == 1: time.sleep(600)\n"
    assert run({"chief": waits + FINISH, "worker:0": freezes}) == 0
    messages.same("stderr", line_of(capfd.readouterr().err, "froze"), hide=SILENT_SECS)
    assert is_gone(started(tmp_path, "worker:0")[0])


@pytest.mark.alone
def test_a_frozen_worker_is_replaced_though_the_coordinator_that_waits_for_it_is_silent_too(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits in TensorFlow for the worker, the coordinator's Python does not run."""
    monkeypatch.setattr(gang, "SILENCE_SECS", 6.0)
    chief = "started(); wait_for('again')\n"
    frozen = (
        "if not (folder / 'worker:0.pid').exists():\n"
        "    started(); wait_for('chief.pid')\n"
        "    waits = json.loads((folder / 'chief.pid').read_text())['pid']\n"
        "    os.kill(waits, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "os.kill(json.loads((folder / 'chief.pid').read_text())['pid'], signal.SIGCONT)\n"
        "(folder / 'again').touch(); time.sleep(600)\n"
    )
    serves = JOIN + "started(); time.sleep(600)\n"
    codes = {"chief": JOIN + chief + FINISH, "worker:0": JOIN + frozen, "ps:0": serves}
    assert run(codes, "parameter_server", num_workers=1) == 0
    (restart,) = [line for line in noted(tmp_path, "supervisor") if line.get("event") == "restart"]
    assert restart["reason"].startswith("worker:0 froze: no heartbeat for")
    assert RunRecord.read(tmp_path / "run").generation == 1  # the others went on


@pytest.mark.alone
def test_a_frozen_task_is_the_reason_when_the_others_lost_it(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setattr(gang, "SETTLE_SECS", 1.0)
    freezes = JOIN + "if generation == 1: started(); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)\n"
    loses = JOIN + "if generation == 1: wait_for('worker:0.pid'); sys.exit(75)\n"
    assert run({"chief": loses + FINISH, "worker:0": freezes}) == 0
    messages.same("reason", events_in(tmp_path / "run", "restart", "supervisor")[0]["reason"], hide=SILENT_SECS)


@pytest.mark.alone
@pytest.mark.parametrize(("code", "ends_with"), [(USER_ERROR, USER_ERROR), (OUT_OF_MEMORY, FAILED)])
def test_an_error_is_the_reason_though_another_task_is_silent(
    code: int,
    ends_with: int,
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It may import TensorFlow: nothing is started again for a mistake in the config."""
    monkeypatch.setattr(gang, "SETTLE_SECS", 1.0)
    silent = JOIN + "started(); os.kill(os.getpid(), signal.SIGSTOP)\n"
    assert run({"chief": silent, "worker:0": JOIN + f"wait_for('chief.pid'); sys.exit({code})\n"}) == ends_with
    assert "froze" not in capfd.readouterr().err
    assert RunRecord.read(tmp_path / "run").generation == 1


def test_a_single_process_is_started_again_where_that_is_asked_for(
    run: Callable[..., int], tmp_path: Path, messages: Messages
) -> None:
    dies_once = "if generation == 1: save(3); os.kill(os.getpid(), signal.SIGKILL)\n"
    assert run({"chief": dies_once + FINISH}, "default", max_restarts=1) == 0
    messages.same("reason", events_in(tmp_path / "run", "restart", "supervisor")[0]["reason"])


# --- smaller micro-batches -------------------------------------------------------------------------------------------

FOUND = TrainConfig(gradient_accumulation="auto")
NUMBERED = JOIN + (
    "number = int(os.environ['RUNNER_GRADIENT_ACCUMULATION'])\n"
    "(folder / f'{place.name}.numbers').open('a').write(f'{number} ')\n"
)
BUILDS = NUMBERED + "journal.event('built', num_replicas=2, devices='CPU'); (folder / f'built{number}').touch()\n"
FOLLOWS = NUMBERED + "wait_for(f'built{number}'); (folder / f'followed{number}').touch()\n"
NEEDS_FOUR = (
    "if number < 4:\n"
    "    wait_for(f'there{number}')\n"
    "    journal.event('out_of_memory', error='no memory for 8 examples')\n"
    "    (folder / f'ended{number}').touch()\n"
    "    sys.exit(76)\n"
)
BREAKS_OFF = "(folder / f'there{{number}}').touch()\nif number < 4: wait_for(f'ended{{number}}'); {how}\n"
"""What a task does whose step another task breaks off."""


@pytest.mark.usefixtures("mlflow_database")
@pytest.mark.parametrize("how", ["sys.exit(75)", "fail('Collective ops is aborted', 1)"], ids=["peer", "error"])
def test_a_gang_goes_on_with_smaller_micro_batches_whatever_the_other_tasks_see_of_it(
    how: str, run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    codes = {"chief": BUILDS + BREAKS_OFF.format(how=how) + FINISH, "worker:0": FOLLOWS + NEEDS_FOUR}
    assert run(codes, backend="mlflow", max_restarts=0, train=FOUND) == 0
    assert {(tmp_path / f"{name}.numbers").read_text() for name in codes} == {"1 2 4 "}
    record = RunRecord.read(tmp_path / "run")
    assert (record.generation, record.gradient_accumulation) == (3, 4)
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["restarts"], summary["gradient_accumulation"]) == ("finished", 2, 4)
    first, second = events_in(tmp_path / "run", "restart", "supervisor")
    assert (first["task"], first["gradient_accumulation"], second["gradient_accumulation"]) == ("worker:0", 2, 4)
    messages.same("reason", first["reason"])
    metrics = [values for _, values in metrics_of_steps(tmp_path / "run", "supervisor")]
    assert metrics[0] == {"run/restarts": 1.0, "run/gradient_accumulation": 2.0}
    tracked = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(summary["mlflow_run_id"]).data
    assert (tracked.params["train.gradient_accumulation"], tracked.tags["gradient_accumulation"]) == ("auto", "4")
    assert tracked.metrics["run/gradient_accumulation"] == 4.0


def test_a_run_that_is_asked_to_stop_is_not_started_again_with_smaller_micro_batches(
    run: Callable[..., int], tmp_path: Path
) -> None:
    stopped = "on_sigterm(76); journal.event('built', num_replicas=1); save(3); os.kill(os.getppid(), signal.SIGTERM)\n"
    waits = "while True: time.sleep(0.05)\n"
    assert run({"chief": JOIN + stopped + waits}, "default", train=FOUND) == 3
    assert summary_in(tmp_path / "run")["restarts"] == 0
    assert RunRecord.read(tmp_path / "run").gradient_accumulation == 1


# --- fewer workers --------------------------------------------------------------------------------------------------

COUNTS = JOIN + "workers = 1 + len(place.tasks.get('worker', ()))\nstep = 10 * (4 - workers)\n"
GOES_ON_ALONE = COUNTS + (
    "(folder / f'workers{generation}').write_text(str(workers))\n"
    "if workers > 1 and not (folder / 'healed').exists(): save(step); time.sleep(600)\n"
    "finish(global_step=40, checkpoint='c')\n"
)
KILLED = "os.kill(os.getpid(), signal.SIGKILL)\n"


def dying(last: int, dies: str = KILLED) -> str:
    """The code of a worker that always dies where it is the last of this number, once the chief has said so."""
    # The checkpoint may be of an earlier start.
    waits = "wait_for(f'workers{generation}'); wait_for(f'run/model.ckpt-{step}.index')\n"
    return COUNTS + f"if workers == {last} and not (folder / 'healed').exists():\n    {waits}    {dies}time.sleep(0)\n"


ALL_DIE = {"chief": GOES_ON_ALONE, "worker:0": dying(2), "worker:1": dying(3)}


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_database")
def test_a_run_that_lost_workers_for_good_goes_on_with_those_that_are_left(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    messages: Messages,
) -> None:  # fmt: skip
    monkeypatch.setattr(gang, "NOTICE_SECS", 0.1)
    assert run(ALL_DIE, num_workers=3, min_workers=1, max_restarts=1, backend="mlflow") == 0
    assert workers_of_each_start(tmp_path) == [3, 3, 2, 2, 1]  # each number of workers has all restarts anew
    summary, said = summary_in(tmp_path / "run"), capfd.readouterr()
    assert (summary["status"], summary["global_step"], summary["restarts"]) == ("finished", 40, 4)
    assert [(one["step"], one["left"]) for one in summary["lost_workers"]] == [(10, 2), (20, 1)]
    events = [line for line in noted(tmp_path, "supervisor") if "workers" in line]
    assert [(line["task"], line["step"], line["workers"]) for line in events] == [
        ("worker:1", 10, 2),
        ("worker:0", 20, 1),
    ]
    assert [line["reason"] for line in events] == [one["reason"] for one in summary["lost_workers"]]
    for line in said.err.splitlines():
        if "cluster.min_workers" in line:
            messages.same("stderr", line)
    messages.same("stdout", line_of(said.out, "lost workers"), hide=r"\d+-\d+-\d+ \d+:\d+:\d+")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    tracked = client.get_run(summary["mlflow_run_id"])
    assert tracked.data.tags["lost_workers"].count(" left") == 2
    history = client.get_metric_history(summary["mlflow_run_id"], "run/workers")
    assert [(point.step, point.value) for point in history] == [(10, 2.0), (20, 1.0)]
    assert schema.value_at(schema.read(tmp_path / "run" / "config.yaml"), "cluster.num_workers") == 3


def workers_of_each_start(folder: Path) -> list[int]:
    numbers = range(1, RunRecord.read(folder / "run").generation + 1)
    return [int((folder / f"workers{number}").read_text()) for number in numbers]


def test_with_too_few_workers_left_the_run_ends_and_its_resume_starts_all_again(
    run: Callable[..., int], tmp_path: Path
) -> None:
    settings = {"num_workers": 3, "min_workers": 2, "max_restarts": 0}
    assert run(ALL_DIE, **settings) == 1
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], len(summary["lost_workers"])) == ("failed", 1)
    (tmp_path / "healed").touch()
    assert run(ALL_DIE, **settings) == 0
    assert workers_of_each_start(tmp_path) == [3, 2, 3]
    assert summary_in(tmp_path / "run")["lost_workers"] == []


@pytest.mark.alone
@pytest.mark.parametrize(
    ("code", "settings"),
    [
        (dying(2, "os.kill(os.getpid(), signal.SIGSTOP)\n"), {}),
        ("time.sleep(600)\n", {"start_timeout_secs": 8}),
        ("not started", {}),
    ],
    ids=["it freezes", "it does not connect", "it cannot be started"],
)
def test_a_worker_that_freezes_or_cannot_start_counts_as_lost(
    code: str, settings: dict[str, int], run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    messages: Messages,
) -> None:  # fmt: skip
    monkeypatch.setattr(gang, "SILENCE_SECS", 6.0)

    def start(task: gang.Task, start_cold: Callable[..., Any] = gang.start_cold) -> Any:
        if code == "not started" and task.place.name == "worker:0":
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return start_cold(task)

    monkeypatch.setattr(task_starter, "start_cold", start)
    assert run({"chief": GOES_ON_ALONE, "worker:0": code}, min_workers=1, max_restarts=0, **settings) == 0
    (lost,) = summary_in(tmp_path / "run")["lost_workers"]
    messages.same("reason", lost["reason"], hide=SILENT_SECS)


def test_the_loss_of_an_evaluator_takes_no_worker_away(run: Callable[..., int], tmp_path: Path) -> None:
    waits = JOIN + "time.sleep(600)\n"
    codes = {"chief": waits, "worker:0": waits, "evaluator": KILLED}
    assert run(codes, min_workers=1, max_restarts=0, evaluator=True) == 1
    assert summary_in(tmp_path / "run")["lost_workers"] == []


# --- the policy -----------------------------------------------------------------------------------------------------


def loss(name: str = "worker") -> GangResult:
    return GangResult(-signal.SIGKILL, Cluster(name, 0, {"chief": ("a:1",)}), f"{name}:0 was killed")


def test_restarts_are_given_back_by_a_newer_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    steps = iter([None, None, 10, 10, 10, 10])
    monkeypatch.setattr(restarts, "latest_step", lambda model_dir: next(steps))
    said: list[str] = []
    policy = Restarts(tmp_path, 2, [], said.append)
    monkeypatch.setattr(restarts, "pause_secs", lambda number: 0.0)
    assert [policy.allow(loss()) for _ in range(5)] == [True, True, True, True, False]
    assert policy.total == 4
    for line in said:
        messages.same("stderr", line)


def test_nothing_is_started_again_after_a_stop(tmp_path: Path) -> None:
    assert not Restarts(tmp_path, 3, [signal.SIGTERM]).allow(loss())


def test_the_pauses_before_restarts_grow() -> None:
    assert [pause_secs(number) for number in range(1, 9)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_cluster_is_started_again_three_times_unless_told_otherwise() -> None:
    assert Config().max_restarts == 0
    assert Config(strategy=StrategyConfig("multi_worker")).max_restarts == 3
    assert Config(strategy=StrategyConfig("multi_worker"), cluster=ClusterConfig(max_restarts=0)).max_restarts == 0


def test_which_end_is_a_loss_and_which_of_two_is_the_reason() -> None:
    def ending(code: int) -> GangResult:
        return GangResult(code, ALONE)

    assert [code for code in (-9, -6, -11, 75, 76, 1, 2, 3, -15, -2) if ending(code).is_loss] == [-9, -6, -11, 75]
    assert sorted([75, -6, 3, 1, 76, -9], key=rank_of) == [-9, 76, 1, 3, -6, 75]


# --- a task that freezes alone ------------------------------------------------------------------------------------

FREEZES = "started(); os.kill(os.getpid(), signal.SIGSTOP)\n"


@pytest.mark.alone
def test_a_single_task_that_is_frozen_is_said_and_goes_on_when_it_wakes(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    messages: Messages,
) -> None:
    monkeypatch.setattr(gang, "SAID_SILENCE_SECS", 3.0)  # the task's start, without heartbeats, takes a second or two
    wakes = f"import subprocess; subprocess.Popen(['sh', '-c', f'sleep 6; kill -CONT {{os.getpid()}}'])\n{FREEZES}"
    assert run({"chief": wakes + "time.sleep(1)\n" + FINISH}, "default") == 0
    messages.same("stderr", capfd.readouterr().err, hide=SILENT_SECS)
    assert summary_in(tmp_path / "run")["restarts"] == 0


@pytest.mark.alone
def test_a_single_task_that_is_frozen_is_started_again_where_freeze_secs_asks_for_it(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run({"chief": f"if generation == 1:\n    {FREEZES}{FINISH}"}, "default", freeze_secs=6) == 0
    assert summary_in(tmp_path / "run")["restarts"] == 1
    messages.same("stderr", line_of(capfd.readouterr().err, "froze"), hide=SILENT_SECS)


@pytest.mark.parametrize("has_saved", [True, False])
@pytest.mark.alone
def test_a_frozen_task_that_is_asked_to_stop_does_not_hold_the_command(
    has_saved: bool, run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "SAID_SILENCE_SECS", 0.5)
    monkeypatch.setattr(gang, "FROZEN_GRACE_SECS", 0.5)
    asks = f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 2; kill {os.getpid()}'])\n"
    before = time.monotonic()
    assert run({"chief": ("save(4)\n" if has_saved else "") + asks + FREEZES}, "default") == (3 if has_saved else 1)
    assert time.monotonic() - before < 30
