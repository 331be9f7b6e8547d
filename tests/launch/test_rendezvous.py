"""A cluster that something else started: each task under a supervisor of its own, which meet in model_dir.

The tasks are small scripts in the place of TensorFlow's; processes and supervisors are real.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.config import schema
from runner.distribute.cluster import Cluster
from runner.launch.gang import GangResult
from runner.launch.rendezvous import FollowerRendezvous, LeaderRendezvous
from runner.launch.worker_supervisor import differences_to_chief
from runner.system.exit_codes import FAILED, INTERRUPTED, PEER_LOST, USER_ERROR
from runner.tracking.run_record import RunRecord
from tests.launch.test_gang import (
    BREAKS_OFF,
    BUILDS,
    CHIEF,
    FINISH,
    FOLLOWS,
    FOUND,
    JOIN,
    LOST,
    NEEDS_FOUR,
    PREEMPTED,
    SUPERVISE,
    TASK,
    UNTIL_ASKED,
    env,
    is_gone,
    prepared,
    started,
    summary_in,
    wait_until,
)
from tests.support.command_line import CommandLine
from tests.support.control_plane import places_of
from tests.support.messages import Messages
from tests.support.screen import line_of
from tests.support.tiers import slow_but

WORKERS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
OTHERS = {"chief": ["127.0.0.1:4"], "worker": ["127.0.0.1:5"]}
SERVERS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


class Terminals:
    """Supervisors of one cluster, each started as by hand with TF_CONFIG."""

    def __init__(self, folder: Path, tasks: Mapping[str, Sequence[str]] = WORKERS, **settings: Any) -> None:
        self._folder, self._tasks = folder, tasks
        self._strategy = "parameter_server" if "ps" in tasks else "multi_worker"
        self._settings = settings
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, codes: Mapping[str, str], tasks: Mapping[str, Sequence[str]] | None = None, **settings: Any
    ) -> None:
        """Args: tasks: the cluster that these are told of; None: that of all."""
        for name, code in codes.items():
            config = prepared(self._folder, {name: code}, self._strategy, **{**self._settings, **settings})
            file = self._folder / f"{name}.yaml"
            schema.save(config, file)
            role, _, index = name.partition(":")
            place = json.dumps({"cluster": tasks or self._tasks, "task": {"type": role, "index": int(index or 0)}})
            script = SUPERVISE.format(task=str(TASK)).replace("config.yaml", file.name)
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", script], cwd=self._folder, env={**env(), "TF_CONFIG": place},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    def end(self) -> tuple[dict[str, int], dict[str, str]]:
        """The exit codes, and what was said."""
        said = {name: process.communicate(timeout=150) for name, process in self.processes.items()}
        codes = {name: process.returncode for name, process in self.processes.items()}
        return codes, {name: err + out for name, (out, err) in said.items()}


@pytest.mark.slow
def test_two_terminals_make_one_run(tmp_path: Path, messages: Messages) -> None:
    terminals = Terminals(tmp_path)
    codes = {"worker:0": JOIN, "chief": FINISH}
    terminals.start(codes)
    ended, said = terminals.end()
    assert ended == {"chief": 0, "worker:0": 0}
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"], summary["restarts"]) == ("finished", 7, 0)
    messages.same("worker:0 says", said["worker:0"])
    terminals.start(codes)  # what the first run left in the folder says nothing to the second
    assert terminals.end()[0] == {"chief": 0, "worker:0": 0}
    assert RunRecord.read(tmp_path / "run").generation == 2


def test_a_task_that_is_killed_has_all_start_again_in_the_next_generation(tmp_path: Path, messages: Messages) -> None:
    terminals = Terminals(tmp_path)
    terminals.start({"chief": CHIEF.format(last=2, step=40), "worker:0": LOST.format(last=2, step=40)})
    ended, said = terminals.end()
    assert ended == {"chief": 0, "worker:0": 0}
    for name in ("chief", "worker:0"):
        messages.same(f"{name} says", line_of(said[name], "SIGKILL"))
    assert summary_in(tmp_path / "run")["restarts"] == 1
    assert json.loads((tmp_path / "run" / "generation.json").read_text())["generation"] == 2


@pytest.mark.parametrize("name", slow_but(["chief", "worker:0"], "worker:0"))
def test_a_task_that_runs_out_of_memory_has_all_go_on_with_smaller_micro_batches(
    name: str, tmp_path: Path, messages: Messages
) -> None:
    parts = dict.fromkeys(("chief", "worker:0"), BREAKS_OFF.format(how="sys.exit(75)"))
    parts[name] = NEEDS_FOUR
    terminals = Terminals(tmp_path, train=FOUND, max_restarts=0)
    ends = "wait_for(f'followed{number}')\n" + FINISH
    terminals.start({"chief": BUILDS + parts["chief"] + ends, "worker:0": FOLLOWS + parts["worker:0"]})
    ended, said = terminals.end()
    assert ended == {"chief": 0, "worker:0": 0}, said
    assert {(tmp_path / f"{each}.numbers").read_text() for each in parts} == {"1 2 4 "}
    record = RunRecord.read(tmp_path / "run")
    assert (record.generation, record.gradient_accumulation) == (3, 4)
    messages.same("chief says", line_of(said["chief"], "train.gradient_accumulation=4"))


def test_a_supervisor_that_is_killed_is_waited_for(tmp_path: Path, messages: Messages) -> None:
    """With its task: the platform starts another process for the same task."""
    waits = JOIN + "if generation == 1: save(3); started(); wait_for('lost1'); sys.exit(75)\n"
    worker = JOIN + "started(); time.sleep(600 if generation == 1 else 0)\n"
    terminals = Terminals(tmp_path)
    terminals.start({"chief": waits + FINISH, "worker:0": worker})
    started(tmp_path, "chief")
    (pid,) = started(tmp_path, "worker:0")
    first = terminals.processes["worker:0"]
    first.kill()
    first.communicate()
    wait_until(lambda: is_gone(pid))
    (tmp_path / "lost1").touch()  # the chief's task notices
    terminals.start({"worker:0": worker})
    ended, said = terminals.end()
    assert ended == {"chief": 0, "worker:0": 0}
    messages.same("chief says", line_of(said["chief"], "restart 1 of 3"), hide="^.*(?=; all)")
    assert RunRecord.read(tmp_path / "run").generation == 2


def test_a_chief_that_is_killed_is_waited_for(tmp_path: Path) -> None:
    waits = JOIN + "if generation == 1: save(3); started(); time.sleep(600)\n"
    worker = JOIN + "started()\nif generation == 1: wait_for('lost1'); sys.exit(75)\n"
    terminals = Terminals(tmp_path)
    terminals.start({"chief": waits + FINISH, "worker:0": worker})
    (pid,) = started(tmp_path, "chief")
    started(tmp_path, "worker:0")
    first = terminals.processes["chief"]
    first.kill()
    first.communicate()
    wait_until(lambda: is_gone(pid))
    (tmp_path / "lost1").touch()
    terminals.start({"chief": waits + FINISH})
    assert terminals.end()[0] == {"chief": 0, "worker:0": 0}
    assert summary_in(tmp_path / "run")["status"] == "finished"


@pytest.mark.slow
def test_a_second_cluster_in_the_folder_does_not_disturb_the_first(tmp_path: Path, messages: Messages) -> None:
    first, second = Terminals(tmp_path), Terminals(tmp_path, OTHERS, start_timeout_secs=5)
    codes = {"chief": JOIN + "started(); wait_for('end')\n" + FINISH, "worker:0": JOIN + "started(); wait_for('end')\n"}
    first.start(codes)
    started(tmp_path, "chief", "worker:0")
    second.start(codes)
    refused, said = second.end()
    assert refused == {"chief": 2, "worker:0": 1}
    messages.same("worker:0 says", line_of(said["worker:0"], "did not join"))
    (tmp_path / "end").touch()
    assert first.end()[0] == {"chief": 0, "worker:0": 0}
    assert summary_in(tmp_path / "run")["restarts"] == 0
    assert RunRecord.read(tmp_path / "run").generation == 1


def test_a_cluster_that_goes_on_with_the_run_of_a_dead_one_has_none_of_its_workers(tmp_path: Path) -> None:
    first, second = Terminals(tmp_path), Terminals(tmp_path, OTHERS)
    ran = JOIN + "(folder / ('ran at ' + place.tasks[place.task_type][0])).touch()\n"
    # A chief that ends at once would spare its worker the start of a task.
    both = ran + "wait_for('ran at 127.0.0.1:5')\n"
    lost = JOIN + "save(3); started(); time.sleep(60)\n"
    first.start({"chief": lost, "worker:0": JOIN + "started(); time.sleep(600)"})
    (pid,) = started(tmp_path, "chief")
    (left,) = started(tmp_path, "worker:0")
    first.processes["chief"].kill()
    first.processes["chief"].wait()
    wait_until(lambda: is_gone(pid))
    second.start({"worker:0": ran, "chief": both + FINISH})
    ended, said = second.end()
    assert ended == {"chief": 0, "worker:0": 0}, said
    assert {path.name for path in tmp_path.glob("ran at *")} == {"ran at 127.0.0.1:4", "ran at 127.0.0.1:5"}
    assert summary_in(tmp_path / "run")["restarts"] == 0
    wait_until(lambda: is_gone(left))  # as a parameter server would not by itself; it waits for its chief to come back
    first.processes["worker:0"].send_signal(signal.SIGTERM)
    assert first.end()[0]["worker:0"] == INTERRUPTED


def test_the_error_of_one_ends_all_and_is_in_the_summary(tmp_path: Path, messages: Messages) -> None:
    terminals = Terminals(tmp_path)
    fails = JOIN + "wait_for('chief.pid'); fail('width must be even', 2)"
    terminals.start({"chief": JOIN + "started(); time.sleep(600)", "worker:0": fails})
    ended, said = terminals.end()
    assert ended == {"chief": 2, "worker:0": 2}
    messages.same("error", summary_in(tmp_path / "run")["error"])
    messages.same("worker:0 says", line_of(said["worker:0"], "runner: "))


def test_another_config_than_the_chiefs_is_refused_with_the_keys_that_differ(
    tmp_path: Path, messages: Messages
) -> None:
    terminals = Terminals(tmp_path)
    terminals.start({"chief": JOIN + "time.sleep(600)"})
    terminals.start({"worker:0": JOIN}, max_restarts=7)
    ended, said = terminals.end()
    assert ended == {"chief": 2, "worker:0": 2}
    messages.same("worker:0 says", said["worker:0"].splitlines()[-1])
    # The chief's task may be stopped before or after its first step, so there may be a summary or none.
    messages.same("chief says", next(line for line in said["chief"].splitlines() if "cluster.max_restarts" in line))


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("worker:0", {**WORKERS, "worker": ["127.0.0.1:2", "127.0.0.1:3"]}),
        ("worker:1", {**WORKERS, "worker": ["127.0.0.1:2", "127.0.0.1:3"]}),  # of whom the chief does not know
        ("worker:0", {**WORKERS, "worker": ["127.0.0.1:5"]}),
    ],
    ids=["more", "stranger", "address"],
)
def test_tasks_that_know_another_cluster_than_the_chief_are_told_apart(
    name: str, tasks: Mapping[str, Sequence[str]], tmp_path: Path, messages: Messages
) -> None:
    terminals = Terminals(tmp_path)
    terminals.start({"chief": JOIN + "time.sleep(600)"})
    terminals.start({name: JOIN}, tasks)
    ended, said = terminals.end()
    assert ended == {"chief": 2, name: 2}
    messages.same(f"{name} says", said[name].splitlines()[-1])
    messages.same("error", summary_in(tmp_path / "run")["error"])


@pytest.mark.parametrize("phase", ["go", "ended"])
def test_an_earlier_cluster_with_the_same_chief_keeps_nobody_out(phase: str, tmp_path: Path) -> None:
    """Its chief was killed, or its run has ended: the next one, with fewer workers, calls later."""
    of_three = {**WORKERS, "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    terminals = Terminals(tmp_path)
    earlier = {"run": "a", "generation": 1, "phase": phase, "tasks": of_three}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "generation.json").write_text(json.dumps(earlier))
    terminals.start({"worker:0": JOIN})
    answer = tmp_path / "run" / "peers" / "worker-0.json"
    wait_until(answer.exists if phase == "go" else answer.parent.exists)
    terminals.start({"chief": FINISH})
    assert terminals.end()[0] == {"chief": 0, "worker:0": 0}


def test_who_does_not_come_is_named(tmp_path: Path, messages: Messages) -> None:
    terminals = Terminals(tmp_path, start_timeout_secs=1)
    terminals.start({"chief": JOIN})
    ended, said = terminals.end()
    assert ended == {"chief": 1}
    messages.same("chief says", line_of(said["chief"], "error: "))
    assert summary_in(tmp_path / "run")["status"] == "failed", "a run is recorded from its start"
    terminals = Terminals(tmp_path, start_timeout_secs=1)
    terminals.start({"worker:0": JOIN})
    ended, said = terminals.end()
    assert ended == {"worker:0": 1}
    messages.same("worker:0 says", line_of(said["worker:0"], "127.0.0.1:1"))


def test_sigterm_to_one_supervisor_stops_all(tmp_path: Path) -> None:
    terminals = Terminals(tmp_path)
    terminals.start({"chief": "save(5)\n" + UNTIL_ASKED, "worker:0": UNTIL_ASKED})
    started(tmp_path, "chief", "worker:0")
    terminals.processes["worker:0"].send_signal(signal.SIGTERM)
    assert terminals.end()[0] == {"chief": 3, "worker:0": 3}
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["interrupted_by"]) == ("interrupted", "worker:0")


def test_a_worker_that_is_preempted_interrupts_the_run_of_the_chief(tmp_path: Path, messages: Messages) -> None:
    """Its task was asked, and not its supervisor; the chief's task ends as one that saved with the others."""
    terminals = Terminals(tmp_path)
    terminals.start({"chief": "save(5)\n" + UNTIL_ASKED, "worker:0": PREEMPTED})
    ended, said = terminals.end()
    assert ended == {"chief": 3, "worker:0": 3}
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"], summary["interrupted_by"]) == ("interrupted", 5, "worker:0")
    messages.same("chief says", line_of(said["chief"], "asked"))


def test_servers_end_with_the_run_and_one_that_is_preempted_has_it_saved(tmp_path: Path) -> None:
    serves = JOIN + "started(); time.sleep(600)\n"
    terminals = Terminals(tmp_path, SERVERS)
    terminals.start({"chief": "save(5)\n" + UNTIL_ASKED, "worker:0": serves, "ps:0": serves})
    pids = started(tmp_path, "chief", "worker:0", "ps:0")
    terminals.processes["ps:0"].send_signal(signal.SIGTERM)
    assert terminals.end()[0] == {"chief": 3, "worker:0": 3, "ps:0": 3}
    assert (tmp_path / "chief.asked").exists()
    assert summary_in(tmp_path / "run")["interrupted_by"] == "ps:0"
    assert all(is_gone(pid) for pid in pids)


def test_a_worker_beside_parameter_servers_is_started_again_by_its_own_supervisor(
    tmp_path: Path, messages: Messages
) -> None:
    dies_once = JOIN + "if not (folder / 'died').exists(): (folder / 'died').touch(); os.kill(os.getpid(), 9)\n"
    terminals = Terminals(tmp_path, SERVERS)
    terminals.start({
        "chief": JOIN + "wait_for('back')\n" + FINISH, "ps:0": JOIN + "time.sleep(600)\n",
        "worker:0": dies_once + "(folder / 'back').touch(); time.sleep(600)\n",
    })  # fmt: skip
    ended, said = terminals.end()
    assert ended == {"chief": 0, "worker:0": 0, "ps:0": 0}
    messages.same("worker:0 says", line_of(said["worker:0"], "restart 1 of 3"))
    assert RunRecord.read(tmp_path / "run").generation == 1


def test_the_metrics_of_an_evaluator_are_waited_for(tmp_path: Path) -> None:
    evaluates = "wait_for('run/training_ended.json')\nfinish(metrics={'eval/accuracy': 0.75})\n"
    terminals = Terminals(tmp_path, {"chief": ["127.0.0.1:1"]}, evaluator=True)
    waits = JOIN + "wait_for('run/peers/evaluator.json')\n"
    terminals.start({"chief": waits + "finish(global_step=7, checkpoint='c')\n", "evaluator": evaluates})
    assert terminals.end()[0] == {"chief": 0, "evaluator": 0}
    assert summary_in(tmp_path / "run")["metrics"] == {"eval/accuracy": 0.75}


@pytest.mark.parametrize(
    ("end", "code"),
    [("os.kill(os.getpid(), 9)", 1), ("fail('no such file', 2)", 2)],
    ids=["is killed", "fails"],
)
def test_a_last_evaluation_that_is_missing_is_said_and_costs_no_checkpoint(
    end: str, code: int, tmp_path: Path, messages: Messages
) -> None:
    """As where one supervisor has all tasks; see tests/launch/test_gang.py."""
    terminals = Terminals(tmp_path, {"chief": ["127.0.0.1:1"]}, evaluator=True, max_restarts=0)
    waits = JOIN + "wait_for('run/peers/evaluator.json')\n"
    evaluates = f"wait_for('run/training_ended.json')\n{end}\n"
    terminals.start({"chief": waits + "finish(global_step=7, checkpoint='c')\n", "evaluator": evaluates})
    ended, _ = terminals.end()
    assert ended == {"chief": code, "evaluator": code}
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"], summary["checkpoint"]) == ("failed", 7, "c")
    messages.same("error", summary["error"])


# --- the files ------------------------------------------------------------------------------------------------------


def chief_and_worker(folder: Path) -> tuple[LeaderRendezvous, FollowerRendezvous]:
    worker = Cluster("worker", 0, WORKERS)
    return LeaderRendezvous(folder, Cluster("chief", 0, WORKERS), 5, settle_secs=0), FollowerRendezvous(
        folder, worker, 5
    )


def chief_and_evaluator(folder: Path, clock: Callable[[], float]) -> tuple[LeaderRendezvous, FollowerRendezvous]:
    """The chief has told the evaluator to start, and has finished."""
    place = Cluster("chief", 0, {"chief": ["127.0.0.1:1"]})
    leader = LeaderRendezvous(folder, place, 5, has_evaluator=True, clock=clock)
    evaluator = FollowerRendezvous(folder, Cluster("evaluator", 0, place.tasks), 5)
    leader._say(generation=1, phase="go")
    evaluator._answered = leader._call
    evaluator.tell("ready")
    return leader, evaluator


def test_an_evaluator_is_waited_for_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    def clock() -> float:
        """A second later at each look; the evaluator beats at each, and is done after 20."""
        secs[0] += 1
        if secs[0] > 1:
            evaluator.tell("ready" if secs[0] < 20 else "done")
        return secs[0]

    secs = [0.0]
    leader, evaluator = chief_and_evaluator(tmp_path, clock)
    assert leader.wait_for_evaluator([]) is None
    assert secs[0] >= 20


def test_an_evaluator_whose_supervisor_is_gone_is_not_waited_for_without_an_end(
    tmp_path: Path, messages: Messages
) -> None:
    seconds = itertools.count()
    leader, _ = chief_and_evaluator(tmp_path, lambda: next(seconds))
    found = leader.wait_for_evaluator([])
    assert found is not None and found.code == FAILED
    messages.same("reason", found.reason)


@pytest.mark.parametrize(("state", "code", "expected"), [("lost", 0, FAILED), ("failed", 2, 2)])
def test_after_training_an_evaluator_that_is_lost_is_a_failure_and_one_that_fails_has_its_code(
    state: str, code: int, expected: int, tmp_path: Path
) -> None:
    leader, evaluator = chief_and_evaluator(tmp_path, lambda: 0.0)
    evaluator.tell(state, "its reason", code)
    found = leader.wait_for_evaluator([])
    assert found is not None and found.code == expected and "its reason" in found.reason


def test_the_evaluators_supervisor_repeats_what_it_said(tmp_path: Path) -> None:
    seconds = itertools.count()
    tasks = {"chief": ["127.0.0.1:1"]}
    LeaderRendezvous(tmp_path, Cluster("chief", 0, tasks), 60)._say(generation=1, phase="gather")
    evaluator = FollowerRendezvous(tmp_path, Cluster("evaluator", 0, tasks), 60, clock=lambda: next(seconds))
    evaluator.tell("ready")
    beats = []
    for _ in range(40):
        evaluator.look()
        beats.append(json.loads((tmp_path / "peers" / "evaluator.json").read_text())["beat"])
    assert len(set(beats)) >= 5


def test_nobody_starts_for_a_chief_that_is_gone(tmp_path: Path, messages: Messages) -> None:
    """What it left says go, to processes that are gone as well."""
    gone, first = chief_and_worker(tmp_path)
    first.tell("ready")
    gone._say(generation=4, phase="go", nonces={"worker:0": "of another process"})
    _, worker = chief_and_worker(tmp_path)
    with messages.raised(TimeoutError):
        FollowerRendezvous(tmp_path, Cluster("worker", 0, WORKERS), 0.3).wait_for_go([])
    assert worker.code is None


@pytest.mark.parametrize(
    ("state", "code"),
    [("ready", None), ("lost", PEER_LOST), ("failed", USER_ERROR), ("stopping", INTERRUPTED), ("stopped", INTERRUPTED)],
)
def test_what_a_peer_says_reaches_the_chief(state: str, code: int | None, tmp_path: Path) -> None:
    leader, follower = chief_and_worker(tmp_path)
    leader._say(generation=1, phase="gather")
    follower._answered = leader._call
    follower.tell("ready")
    assert leader.gather(1, []) is None
    follower.tell(state, "worker:0 fell over", USER_ERROR if state == "failed" else 0)
    found = leader.look()
    assert (found and found.code) == code


def test_a_worker_whose_supervisor_is_started_again_is_lost_and_an_evaluator_is_not(tmp_path: Path) -> None:
    leader, worker = chief_and_worker(tmp_path / "workers")
    leader._say(generation=1, phase="gather")
    worker._answered = leader._call
    worker.tell("ready")
    assert leader.gather(1, []) is None and leader.look() is None
    _, again = chief_and_worker(tmp_path / "workers")
    again._answered = leader._call
    again.tell("ready")
    found = leader.look()
    assert found is not None and (found.code, found.place.name) == (-signal.SIGKILL, "worker:0")

    leader, first = chief_and_evaluator(tmp_path / "evaluator", lambda: 0.0)
    assert leader.look() is None
    _, second = chief_and_evaluator(tmp_path / "evaluator", lambda: 0.0)
    second._answered = first._answered
    leader._say()
    second.tell("ready")
    assert leader.look() is None


def test_the_task_that_was_killed_is_the_loss_and_not_one_that_lost_its_connection_to_it(tmp_path: Path) -> None:
    """All of them answer at once; the cause is named, whatever its place among them."""
    chief, *workers = places_of(4)
    leader = LeaderRendezvous(tmp_path, chief, 10)
    leader._say(generation=1, phase="gather")
    followers = [FollowerRendezvous(tmp_path, place, 10) for place in workers]
    for follower in followers:
        follower._answered = leader._call
        follower.tell("ready")
    assert leader.gather(1, []) is None
    for follower, code in zip(followers, [PEER_LOST, -signal.SIGKILL, PEER_LOST], strict=True):
        follower.tell("lost", "gone", code)
    for found in (leader.look(), leader.reason(GangResult(PEER_LOST, chief))):
        assert found is not None and (found.code, found.place.name) == (-signal.SIGKILL, "worker:1")


def test_the_supervisor_of_a_lost_task_says_why_if_it_answers_in_time(tmp_path: Path) -> None:
    def clock() -> float:
        """A second later at each look; the worker's supervisor says why at the fifth."""
        secs[0] += 1
        if secs[0] == 5:
            worker.tell("failed", "no such file", USER_ERROR)
        return secs[0]

    secs = [0.0]
    chief = Cluster("chief", 0, WORKERS)
    _, worker = chief_and_worker(tmp_path)
    leader = LeaderRendezvous(tmp_path, chief, 5, settle_secs=20, clock=clock)
    leader._say(generation=1, phase="go")
    worker._answered = leader._call
    worker.tell("ready")
    found = leader.reason(GangResult(PEER_LOST, chief, "worker:0 does not answer"))
    assert (found.code, found.place.name) == (USER_ERROR, "worker:0")


def test_a_peer_that_failed_before_all_were_there_is_not_waited_for(tmp_path: Path, messages: Messages) -> None:
    leader, follower = chief_and_worker(tmp_path)
    leader._say(generation=1, phase="gather")
    follower._answered = leader._call
    follower.tell("failed", "no such file", FAILED)
    found = leader.gather(1, [])
    assert found is not None and found.code == FAILED
    assert leader._call.phase == "gather"  # nobody starts a task of a run that has failed
    messages.same("reason", found.reason)


def test_the_end_of_the_run_ends_a_task(tmp_path: Path) -> None:
    leader, follower = chief_and_worker(tmp_path)
    follower._followed = leader._call
    leader.end(3)
    found = follower.look()
    assert found is not None and follower.code == 3


def test_differences_name_neither_paths_nor_secrets_nor_what_is_only_shown(messages: Messages) -> None:
    theirs = {"model_dir": "/a", "run": {"progress": "off", "seed": 1}, "model": {"params": {"api_key": "x", "w": 1}}}
    ours = {"model_dir": "/b", "run": {"progress": "rich", "seed": 1}, "model": {"params": {"api_key": "y", "w": 2}}}
    (difference,) = differences_to_chief(theirs, ours)
    messages.same("difference", difference)


def test_a_cluster_without_model_dir_is_refused(tmp_path: Path, command_line: CommandLine, messages: Messages) -> None:
    place = json.dumps({"cluster": WORKERS, "task": {"type": "worker", "index": 0}})
    for arguments in (["strategy=multi_worker"], ["-m", "strategy=multi_worker", "run.seed=1,2"]):
        refused = command_line(*arguments, cwd=tmp_path, TF_CONFIG=place)
        messages.same(f"exit {refused.returncode}", refused.stderr)


@pytest.mark.slow
def test_all_tasks_of_all_starts_have_the_seed_that_the_chiefs_supervisor_drew(tmp_path: Path) -> None:
    notes = "from runner.config import parsing\nseed = parsing.load(Path(sys.argv[1])).run.seed\n"
    notes += "(folder / f'{place.name}.seeds').open('a').write(f'{seed} ')\n"
    for _ in range(2):
        terminals = Terminals(tmp_path, seed=None)
        terminals.start({"chief": notes + FINISH, "worker:0": notes + JOIN})
        ended, said = terminals.end()
        assert ended == {"chief": 0, "worker:0": 0}, said
    seeds = (tmp_path / "chief.seeds").read_text().split()
    assert len(seeds) == 2 and len({*seeds, *(tmp_path / "worker:0.seeds").read_text().split()}) == 1
    drawn = int(seeds[0])
    assert schema.read(tmp_path / "run" / "config.yaml")["run"]["seed"] == drawn
    assert RunRecord.read(tmp_path / "run").drawn_seed == drawn
    assert "seed" not in said["chief"]  # nothing has changed
