"""What the journals of workers say of their starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.tracking.journal import Journals
from runner.tracking.workers import (
    LAUNCH,
    LOOK_SECS,
    Launch,
    Start,
    StepTimes,
    StragglerWatch,
    slowest_start,
    start_in,
    starts_of,
    step_times_in,
    straggler_in,
)
from tests.support.journal import Lines, journal_of, recorded


def at(after: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": 1000.0 + after, "event": kind, **fields}


def phase(after: float, name: str, took: float) -> dict[str, Any]:
    return at(after, "phase", name=name, secs=took)


BEGUN = [at(2, "started", began=1000.0), phase(2, "launch", 2.0), phase(5, "import", 3.0)]


def test_the_phases_of_a_start_add_up_to_the_end_of_the_first_step() -> None:
    lines = [*BEGUN, phase(9, "trace", 1.5), phase(9.5, "trace", 0.5), at(12, "first_step", step=1, secs=2.0)]
    later = [phase(15, "save", 1.0), phase(15, "import", 9.0), at(20, "first_step", step=5, secs=4.0)]
    start = start_in([*lines, *later])
    phases = {"launch": 2.0, "import": 3.0, "trace": 2.0, "first_step": 2.0, "other": 3.0}
    assert start == Start(12.0, phases) and start.own_secs == 10.0


def test_of_several_starts_the_last_that_took_a_step_counts() -> None:
    first = [*BEGUN, at(8, "first_step", step=1, secs=1.0)]
    second = [at(100, "started", began=1090.0), phase(100, "launch", 10.0), at(103, "first_step", step=7, secs=1.0)]
    killed = [at(200, "started", began=1190.0), phase(200, "launch", 10.0)]
    start = start_in([*first, *second, *killed])
    assert start is not None and start.secs == 13.0


@pytest.mark.parametrize(
    ("lines", "secs"),
    [
        ([*BEGUN, phase(7, "rendezvous", 2.0), at(7, "joined"), at(90, "ended")], 7.0),  # a parameter server
        (BEGUN, None),  # an evaluator, or one that failed
        ([at(2, "started"), phase(5, "import", 3.0), at(8, "first_step", step=1)], None),  # of an earlier version
    ],
)
def test_a_process_without_a_first_step_has_a_start_once_it_serves(
    lines: Sequence[dict[str, Any]], secs: float | None
) -> None:
    start = start_in(lines)
    assert (start and start.secs) == secs


def test_the_slowest_is_the_one_that_did_most_itself_not_the_one_that_waited_longest() -> None:
    waits = Start(30.0, {"launch": 1.0, "import": 3.0, "input": 1.0, "waiting": 24.0, "first_step": 1.0})
    slow = Start(30.0, {"launch": 1.0, "import": 4.0, "input": 24.0, "first_step": 1.0})
    slowest = slowest_start({"chief": waits, "worker:0": slow, "worker:1": waits})
    assert slowest is not None and slowest.is_told
    assert (slowest.task, slowest.phase, slowest.secs, slowest.others) == ("worker:0", "input", 29.0, 5.0)
    assert (slowest.phase_secs, slowest.phase_others) == (24.0, 1.0)


@pytest.mark.parametrize(("secs", "is_told"), [(14.9, False), (15.1, True)])
def test_a_start_is_told_if_it_is_much_longer_in_seconds_and_in_ratio(secs: float, is_told: bool) -> None:
    starts = {"chief": Start(10.0, {"import": 10.0}), "worker:0": Start(secs, {"import": secs})}
    slowest = slowest_start(starts)
    assert slowest is not None and slowest.is_told == is_told
    short = {"chief": Start(1.0, {"import": 1.0}), "worker:0": Start(5.0, {"import": 5.0})}
    slowest = slowest_start(short)
    assert slowest is not None and not slowest.is_told  # five times as long, but 4 s
    assert slowest_start({"chief": starts["chief"]}) is None


def test_a_task_notes_what_its_supervisor_did_before(tmp_path: Path) -> None:
    launch = Launch()
    launch.began -= 10.0
    with launch.phase("rendezvous"):
        pass
    launch.phases["rendezvous"] += 4.0
    journal = journal_of(tmp_path)
    assert 10.0 <= Launch.of_task(launch.env).write_to(journal) < 60.0
    noted = {line["name"]: line["secs"] for line in recorded(tmp_path)}
    assert set(noted) == {"launch", "rendezvous"}
    assert noted["rendezvous"] >= 4.0 and 5.0 < noted["launch"] < 60.0
    launch.begin_again()
    assert not launch.phases and LAUNCH not in os.environ


def test_starts_are_found_by_task_behind_the_mark(tmp_path: Path) -> None:
    def write(role: str) -> None:
        lines = Lines(tmp_path, role, clock=lambda: 1012.0)
        lines.event("started", began=1000.0)
        lines.event("first_step", step=1, secs=2.0)

    write("worker")
    journals = Journals(tmp_path).mark()
    write("chief")
    Lines(tmp_path, "evaluator").event("started", began=1.0)
    assert starts_of(journals) == {"chief": Start(12.0, {"first_step": 2.0, "other": 10.0})}


def test_the_times_of_steps_are_means_over_all_of_them() -> None:
    lines = [
        at(1, "step_times", step=11, steps=10, secs=0.1, input=0.01, compute=0.02),
        at(2, "step_times", step=41, steps=30, secs=0.3, input=0.05, compute=0.02),
        at(3, "checkpoint", step=41),
    ]
    assert step_times_in(lines) == StepTimes(40, 0.25, 0.04, 0.02)
    assert step_times_in(lines[2:]) is None


def of_worker(input_secs: float, compute_secs: float) -> StepTimes:
    return StepTimes(10, 0.1, input_secs, compute_secs)


@pytest.mark.parametrize(
    ("slow", "cause", "is_told"),
    [
        (of_worker(0.041, 0.02), "input", True),
        (of_worker(0.003, 0.06), "compute", True),
        (of_worker(0.011, 0.02), "input", False),  # not 1.5 times the others'
        (StepTimes(10, 0.0012, 0.0, 0.0009), "compute", False),  # less than a millisecond
        (StepTimes(10, 1.0, 0.041, 0.02), "input", False),  # less than a tenth of a step
    ],
)
def test_a_straggler_is_told_with_its_cause_if_the_others_lose_much(slow: StepTimes, cause: str, is_told: bool) -> None:
    is_short = slow.secs < 0.01
    other = StepTimes(10, slow.secs, 0.0, 0.0001) if is_short else of_worker(0.003, 0.02)
    straggler = straggler_in({"chief": other, "worker:0": slow, "worker:1": other})
    assert straggler is not None
    assert (straggler.task, straggler.cause, straggler.is_told) == ("worker:0", cause, is_told)
    assert straggler_in({"chief": other}) is None


def test_the_watch_looks_once_a_minute_and_tells_each_worker_and_cause_once(tmp_path: Path) -> None:
    now, said = [0.0], list[str]()
    watch = StragglerWatch(tmp_path, said.append, clock=lambda: now[0])

    def look_after(secs: float, slow_input: float) -> int:
        for role, input_secs in (("chief", 0.003), ("worker", slow_input)):
            Lines(tmp_path, role).event("step_times", step=1, steps=10, secs=0.1, input=input_secs, compute=0.02)
        now[0] += secs
        watch.look()
        return len(said)

    assert look_after(LOOK_SECS - 1, 0.041) == 0
    assert look_after(1, 0.041) == 1 and "worker:0" in said[0] and "input 41 ms" in said[0]
    assert look_after(LOOK_SECS, 0.041) == 1
    assert look_after(LOOK_SECS, 0.003) == 1
