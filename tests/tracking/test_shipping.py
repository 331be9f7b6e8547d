"""Journals on their way to a tracker that fails, hangs, or is killed with what ships: each point once, in order."""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import TrackingConfig
from runner.tracking.shipping import write_settings
from tests.support.journal import Lines, journal_file, journals, note_end, note_start
from tests.support.messages import Messages
from tests.support.outages import DEATHS, KILLS, Backend, Outage, points_in
from tests.support.processes import wait_until
from tests.support.shipping import Said, ship, shipping
from tests.support.tiers import slow_but

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FIRST, AGAIN = ["start", None, "name", {"a": 1}, {"b": "c"}], ["start", "run-1", "name", {"a": 1}, {"b": "c"}]
READING = ["start", "run-1", "name", {}, {}]
TAGS, END = ["set_tags", {"status": "finished"}], ["end", "FINISHED"]
INTERRUPTED = [["set_tags", {"status": "interrupted"}], ["end", "SCHEDULED"]]
AWAY = Outage("refuse", range(1, 1000))


def points(*steps: int, name: str = "m") -> list[tuple[str, int, float]]:
    """Return points whose values tell their steps."""
    return [(name, step, step / 2) for step in steps]


def noted(run: Path, lines: Sequence[Any], role: str = "chief") -> None:
    """Append lines to a journal: a step that has a metric `m`, (step, metrics), or the kind of an event."""
    journal = Lines(run, role, clock=lambda: 5.0)
    for line in lines:
        if isinstance(line, str):
            journal.event(line)
        elif isinstance(line, int):
            journal.metrics(line, {"m": line / 2})
        else:
            journal.metrics(*line)


@dataclass(frozen=True)
class Start:
    """One start of a run: what its tasks have noted at its end, and what its shipping meets and leaves.

    Attributes:
      lines: those of the chief, as `noted` takes them.
      others: role -> lines.
      outages, settings: as of `ship`.
      run_id: the id that the tracker returns; "": that which it is given, or "run-1".
      calls: all calls that it recorded, but for those of points; None: not compared.
      among: some of these calls.
      points: the points of the calls.
      warnings: kind of each.
    """

    lines: Sequence[Any] = ()
    others: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    outages: Sequence[Outage] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = ""
    calls: Sequence[Any] | None = None
    among: Sequence[Any] = ()
    points: Sequence[tuple[str, int, float]] = ()
    warnings: Sequence[str] = ()


AT_THE_END: Mapping[str, Any] = {"files": ("summary.json", "missing", "learning_curves.png")}
FILES = [["log_file", "summary.json", ""], ["log_file", "learning_curves.png", ""]]
FROZEN: Mapping[str, Sequence[Any]] = {
    "start": [], "log_points": [FIRST], "set_tags": [FIRST], "log_file": [FIRST, TAGS], "end": [FIRST, TAGS, FILES[0]],
}  # fmt: skip
"""The method in which a tracker freezes -> what it has got by then."""

CASES: dict[str, list[Start]] = {
    "all metrics in order, then the end of the run": [
        Start(
            ["started", (1, {"m": 1.0}), (2, {"m": 0.5}), (3, {"m": 1 / 3})], settings=AT_THE_END,
            calls=[FIRST, TAGS, *FILES, END], points=[("m", 1, 1.0), ("m", 2, 0.5), ("m", 3, 1 / 3)],
        ),
    ],
    "the next start goes on with the run where the last stopped": [
        Start([1], points=points(1)),
        Start([2], calls=[AGAIN, TAGS, END], points=points(2)),
    ],
    "steps that a resumed run repeats are not shipped twice": [
        Start([10, 20, 30], points=points(10, 20, 30)),
        Start(  # from a checkpoint at 10
            [(step, {"m": 1.0, "other": step / 2}) for step in (20, 30, 40)],
            points=[*points(20, 30, name="other"), ("m", 40, 1.0), ("other", 40, 20.0)],
        ),
    ],
    "points that were refused are sent once more, and not those that it had": [
        Start([1, 2], points=points(1, 2)),
        Start([2, 3], outages=[Outage("refuse", (1, 2), "log_points")], points=points(3), warnings=["away"]),
    ],
    "a tracker that is away costs a warning, the last lines say what is left, and it is caught up later": [
        Start([1], outages=[AWAY], calls=[], warnings=["away", "left"]),
        Start([], calls=[FIRST, TAGS, END, AGAIN, TAGS, END], points=points(1)),
    ],
    "steps that were repeated while the tracker was away are shipped once": [
        Start([10, 20], outages=[AWAY], calls=[], warnings=["away", "left"]),
        Start([30, 20, 30, 40], points=points(10, 20, 30, 40)),
    ],
    "a new run in the place of a lost one gets everything": [
        Start([1], points=points(1)),
        Start([2], run_id="run-2", calls=[AGAIN, TAGS, END], points=points(1, 2)),
        Start([3], run_id="run-2", calls=[["start", "run-2", *AGAIN[2:]], TAGS, END], points=points(3)),
    ],
    "an untracked start is recorded by the next that has a tracker": [
        Start([1], points=points(1)),
        Start([2], settings={"is_tracked": False, "files": ["learning_curves.png"]}, calls=[]),
        Start([3], calls=[AGAIN, TAGS, FILES[1], END, AGAIN, TAGS, END], points=points(2, 3)),
    ],
    "a reader adds metrics and files and nothing else": [
        Start([(5, {"eval/loss": 1.0})], points=[("eval/loss", 5, 1.0)]),
        Start(  # evaluated once more
            [(5, {"eval/loss": 0.5})], settings={"is_reader": True, **AT_THE_END},
            calls=[READING, *FILES, END], points=[("eval/loss", 5, 0.5)],
        ),
    ],
    "a reader of a run that has none makes one": [
        Start([], settings={"is_reader": True}, calls=[FIRST, TAGS, END]),
    ],
    "a short outage is retried": [
        Start([1], outages=[Outage("refuse", (1, 2))], calls=[FIRST, TAGS, END], points=points(1), warnings=["away"]),
    ],
    "a failure while closing still ends the run": [
        Start(
            [1], outages=[Outage("refuse", (1,), "set_tags")], settings={"status": "failed"},
            among=[["end", "FAILED"]], points=points(1),
        ),
    ],
    "the journals of all tasks are shipped": [
        Start([1], {"evaluator": [(1, {"eval/loss": 2.0})]}, points=[*points(1), ("eval/loss", 1, 2.0)]),
    ],
    "a process of the tracker that dies is replaced": [
        Start(
            [1], outages=[Outage("exit", (1,), "log_points")], calls=[FIRST, AGAIN, TAGS, END], points=points(1),
            warnings=["died"],
        ),
    ],
    "a start that is killed with what ships before anything was sent": [
        Start([1], outages=[Outage("kill")], calls=[]),
        Start([2], calls=[FIRST, AGAIN, TAGS, END], points=points(1, 2)),
    ],
    "a start that is killed alone is shipped, and closed as killed": [
        Start([1], settings={"is_killed": True}, calls=[FIRST, *INTERRUPTED], points=points(1)),
        Start([2], calls=[AGAIN, TAGS, END], points=points(2)),
    ],
    "what was killed between the points and its note of them sends them again, with equal values": [
        Start([1, 2], outages=[Outage("kill after", (1,), "log_points")], calls=[FIRST], points=points(1, 2)),
        Start([3], calls=[AGAIN, AGAIN, TAGS, END], points=points(1, 2, 3)),
    ],
    **{
        f"a tracker that freezes in {method} holds the end of a run for a limited time": [
            Start(
                [1], outages=[Outage("hang", range(1, 9), method)],
                settings={"files": ["summary.json"], "answer_secs": 0.7}, calls=before,
                points=points(1) if method not in ("start", "log_points") else (), warnings=["silent", "left"],
            ),
        ]
        for method, before in FROZEN.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_tracker_gets(name: str, tmp_path: Path) -> None:
    run, backend = tmp_path / "run", Backend(tmp_path / "backend")
    run.mkdir()
    (run / "summary.json").write_text("{}")
    for number, start in enumerate(CASES[name]):
        before = len(backend.got())
        for role, lines in {"chief": start.lines, **start.others}.items():
            noted(run, lines, role)
        if start.run_id:
            (backend.folder / "run_id").write_text(start.run_id)
        said = ship(tmp_path, start.outages, **start.settings)
        new = backend.got()[before:]
        assert (number, said.kinds(tmp_path)) == (number, list(start.warnings))
        is_killed = start.settings.get("is_killed") or any(outage.does in KILLS for outage in start.outages)
        assert said.code == (-9 if is_killed else 0)
        assert said.secs < 20, "a tracker that freezes hangs for ever"
        assert (number, points_in(new)) == (number, list(start.points))
        if start.calls is not None:
            assert (number, [call for call in new if call[0] != "log_points"]) == (number, list(start.calls))
        assert all(new.count(call) == 1 for call in start.among), (number, new)
        if start.settings.get("is_tracked") is False:
            assert not (run / "learning_curves.png").exists()


def test_ships_while_the_run_goes_on(tmp_path: Path) -> None:
    backend = Backend(tmp_path / "backend")
    with shipping(tmp_path) as end:
        noted(tmp_path / "run", [1])
        wait_until(lambda: backend.points() == points(1))
        noted(tmp_path / "run", [2])
        wait_until(lambda: backend.points() == points(1, 2))
        assert end() == Said(0)


def test_leaves_the_machine_to_a_task_until_its_first_step(tmp_path: Path) -> None:
    backend = Backend(tmp_path / "backend")
    noted(tmp_path / "run", ["first_step"])
    ship(tmp_path)
    with shipping(tmp_path, patience_secs=60.0) as end:
        noted(tmp_path / "run", ["built", 1])
        time.sleep(0.3)
        assert backend.points() == [] and backend.attempts("start") == 0
        noted(tmp_path / "run", ["first_step"])
        wait_until(lambda: backend.points() == points(1))
        assert end() == Said(0)


@pytest.mark.parametrize("rest", [3, 20])
@pytest.mark.parametrize("new", [(3, 4), range(2, 9)], ids=["shorter", "longer"])
@pytest.mark.parametrize("role", ["chief", "supervisor"])
def test_what_follows_in_a_journal_that_lost_its_end_is_recorded(
    role: str, new: Sequence[int], rest: int, tmp_path: Path
) -> None:
    """A power cut, or an older backup: the record of what was shipped speaks of more than the journal has."""
    run, backend = tmp_path / "run", Backend(tmp_path / "backend")
    noted(run, [1, 2, 3])
    ship(tmp_path)
    os.truncate(journal_file(run, role), rest)
    noted(run, list(new))
    said = ship(tmp_path)
    assert (said.code, said.kinds(tmp_path)) == (0, [])
    assert backend.points() == points(1, 2, 3, *range(4, new[-1] + 1))
    assert backend.got()[-1] == END


def test_ship_sends_what_a_journal_has_behind_its_lost_end(tmp_path: Path) -> None:
    write_settings(tmp_path, TrackingConfig("csv"), {})
    for steps in ([1, 2, 3], [3, 4]):
        note_start(tmp_path, name="a" * 50 * len(steps))  # so no line ends where one ended before
        noted(tmp_path, steps)
        note_end(tmp_path)
        result = subprocess.run([sys.executable, "-m", "runner.tracking.ship", str(tmp_path)], cwd=ROOT)
        assert result.returncode == 0
        for file in journals(tmp_path):
            os.truncate(file, 0)
    with open(tmp_path / "tracking/metrics.csv", newline="") as table:
        assert [row["step"] for row in csv.DictReader(table)] == ["1", "2", "3", "4"]


WRONG = {
    "value": '{"time": 5.0, "step": 2, "metrics": {"m": [1, 2]}}',
    "step": '{"time": 5.0, "step": "two", "metrics": {"m": 1.0}}',
    "time": '{"time": null, "step": 2, "metrics": {"m": 1.0}}',
    "metrics": '{"time": 5.0, "step": 2, "metrics": [1.0]}',
    "huge": '{"time": 5.0, "step": 2, "metrics": {"m": 1' + "0" * 400 + "}}",
    "kind": '{"time": 5.0, "event": ["artifact"]}',
    "file": '{"time": 5.0, "event": "artifact", "path": 3, "folder": ""}',
    "image": '{"time": 5.0, "event": "image", "path": "a.png", "name": "a", "step": 2.5}',
    "dataset": '{"time": 5.0, "event": "dataset", "context": "train"}',
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_that_nobody_can_use_is_named_and_keeps_no_other_from_a_tracker(
    name: str, tmp_path: Path, messages: Messages
) -> None:
    run, backend = tmp_path / "run", Backend(tmp_path / "backend")
    noted(run, [1])
    with open(journal_file(run), "a") as file:
        file.write(WRONG[name] + "\n")
    noted(run, [3])
    said = ship(tmp_path)
    assert said.code == 0 and backend.points() == points(1, 3)
    assert backend.got()[-1] == END
    (text,) = said.warnings
    messages.same("stderr", text)


def test_a_start_that_nobody_can_read_keeps_no_other_from_a_tracker(tmp_path: Path, messages: Messages) -> None:
    run, backend = tmp_path / "run", Backend(tmp_path / "backend")
    noted(run, [1])
    note_start(run, params="none")
    note_end(run)
    said = ship(tmp_path)
    assert said.code == 0 and backend.points() == points(1)
    (text,) = said.warnings
    messages.same("stderr", text)


# --- the truth of any journals, outages and kills: each point once, in order ------------------------------------------

ROLES = {"chief": ("train/loss", "train/error"), "evaluator": ("eval/loss",)}


def random_lines(draw: random.Random, role: str, step: int) -> list[Any]:
    """Return lines of a start that goes on after `step`, or before it where it repeats steps."""
    lines: list[Any] = []
    step = max(0, step - draw.choice((0, 0, 0, 4)))
    for _ in range(draw.randrange(8)):
        step += draw.choice((0, 1, 1, 3))
        names = draw.sample(ROLES[role], draw.randint(1, len(ROLES[role])))
        lines.append((step, {name: draw.random() for name in names}))
        if draw.random() < 0.2:
            lines.append("checkpoint")
    return lines


def random_outages(draw: random.Random) -> list[Outage]:
    """Return what goes wrong while a start is shipped; mostly something does."""
    found = []
    for _ in range(draw.randrange(3)):
        method = draw.choice(("", "", "start", "log_points", "set_tags", "end"))
        does: Any = draw.choice(("refuse", "refuse", *DEATHS))
        found.append(Outage(does, [draw.randint(1, 6) if method == "" else draw.randint(1, 2)], method))
    if draw.random() < 0.4:
        found.append(Outage("kill", [draw.randint(1, 40)], "write"))
    return found


def once(lines: Sequence[Any]) -> list[tuple[str, int, float]]:
    """Return the points of a journal, without those of steps that a metric had reached before."""
    last: dict[str, int] = {}
    found = []
    for step, metrics in (line for line in lines if not isinstance(line, str)):
        for name, value in metrics.items():
            if step > last.get(name, -1):
                last[name] = step
                found.append((name, step, value))
    return found


@pytest.mark.parametrize("seed", slow_but(range(30), *range(3)))
def test_random_journals_outages_and_kills(seed: int, tmp_path: Path) -> None:
    draw, backend = random.Random(seed), Backend(tmp_path / "backend")
    written: dict[str, list[Any]] = {role: [] for role in ROLES}
    deaths = 0
    for number in range(5):
        outages = random_outages(draw) if number < 4 else []
        new = {}
        for role, lines in written.items():
            steps = [line[0] for line in lines if not isinstance(line, str)]
            new[role] = random_lines(draw, role, max(steps, default=0))
            lines += new[role]
        is_early = draw.random() < 0.5
        if is_early:
            for role, lines in new.items():
                noted(tmp_path / "run", lines, role)
        status, is_killed = draw.choice(("finished", "failed")), number < 4 and draw.random() < 0.25
        with shipping(tmp_path, outages, status=status, is_killed=is_killed):
            if not is_early:  # what ships reads the journals as they grow
                for role, lines in new.items():
                    for line in lines:
                        noted(tmp_path / "run", [line], role)
                        time.sleep(0.01 * (draw.random() < 0.2))
            if draw.random() < 0.3:
                Lines(tmp_path / "run", draw.choice(list(ROLES))).cut_short()
        deaths += sum(outage.does in DEATHS for outage in outages)

    got = backend.points()
    for role, names in ROLES.items():
        of_role = [point for point in got if point[0] in names]
        assert list(dict.fromkeys(of_role)) == once(written[role]), "each point once, in order"
    seen: set[Any] = set()
    repeating = 0
    for call in backend.got():
        sent = set(points_in([call]))
        assert len(sent) == len(points_in([call]))
        repeating += not sent.isdisjoint(seen)
        seen |= sent
    assert repeating <= deaths, "only what is killed between a call and its note of it repeats that call"
    assert backend.got()[-1][0] == "end"
