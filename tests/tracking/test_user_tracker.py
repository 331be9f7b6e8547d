"""A run recorded by classes of the user's: in processes of their own, which fail without harm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner import RunTracker
from runner.config.schema import TrackingConfig
from runner.tracking import shipper as shipping
from runner.tracking.backends import user_tracker
from runner.tracking.backends.build import build_trackers
from runner.tracking.run_record import RunRecord
from runner.tracking.shipper import Shippers
from runner.tracking.tracker import RunDescription
from tests.support.journal import Lines
from tests.support.processes import is_gone, wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes

RECORDS = """
import json, os, sys, time

class Records:
    def __init__(self, path="calls.jsonl", project=None):
        self.file = open(path, "a")
        self.note("made", project, os.getpid())

    def note(self, *what):
        print(json.dumps(what, default=str), file=self.file, flush=True)

    def start(self, run_id, name, params, tags):
        self.note("start", run_id, name, params, tags)
        return "mine-7"

    def log_points(self, points):
        self.note("points", [[one.name, one.value, one.step, one.time] for one in points])

    def log_file(self, path, folder):
        self.note("file", path.name, folder)

    def log_input(self, dataset):
        self.note("input", dataset.context, dataset.digest)

    def set_tags(self, tags):
        self.note("tags", tags)

    def end(self, status):
        self.note("end", status)

    def address(self):
        return "https://mine/7"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(RECORDS)
    return tmp_path


def shippers(folder: Path, backend: Any, warnings: list[str], *, is_reader: bool = False) -> Shippers:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    trackers = build_trackers(TrackingConfig(backend), folder, "name", env, folder)
    described = RunDescription("name", {"a": 1}, {"b": "c"})
    return Shippers(folder, trackers, RunRecord.read(folder), described, warnings.append, is_reader=is_reader)


def ship(folder: Path, backend: Any, *, is_reader: bool = False) -> tuple[list[str], dict[str, str]]:
    warnings: list[str] = []
    shipped = shippers(folder, backend, warnings, is_reader=is_reader)
    shipped.start()
    shipped.drain()
    addresses = shipped.addresses()
    shipped.close("FINISHED", {"status": "finished"}, [])
    return warnings, addresses


def calls(folder: Path, kind: str = "") -> list[Any]:
    file = folder / "calls.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [call[1:] for call in found if call[0] == kind] if kind else found


def noted(folder: Path, steps: range) -> Lines:
    journal = Lines(folder, clock=lambda: 5.0)
    for step in steps:
        journal.metrics(step, {"train/loss": step / 2})
    return journal


def points(folder: Path) -> list[int]:
    return [step for (one,) in calls(folder, "points") for name, value, step, at in one if name == "train/loss"]


def test_a_class_gets_everything_once_and_in_order_over_two_starts_and_an_evaluation(folder: Path) -> None:
    journal = noted(folder, range(1, 4))
    (folder / "notes.txt").write_text("x")
    journal.event("artifact", path="notes.txt", folder="texts")
    journal.event("dataset", context="train", name="n", digest="d", source={}, profile={})
    backend = {"fn": "mine.Records", "params": {"project": "p"}}
    assert ship(folder, backend) == ([], {"mine.Records": "https://mine/7"})
    ((project, pid),) = calls(folder, "made")
    assert project == "p" and pid != os.getpid() and not psutil.pid_exists(pid)
    assert calls(folder)[1:] == [
        ["start", None, "name", {"a": 1}, {"b": "c"}],
        ["points", [["train/loss", 0.5, 1, 5.0], ["train/loss", 1.0, 2, 5.0], ["train/loss", 1.5, 3, 5.0]]],
        ["file", "notes.txt", "texts"],
        ["input", "train", "d"],
        ["tags", {"status": "finished"}],
        ["file", "learning_curves.png", ""],
        ["end", "FINISHED"],
    ]
    noted(folder, range(3, 6))
    ship(folder, backend)
    noted(folder, range(5, 6)).metrics(5, {"eval/loss": 0.25})
    ship(folder, backend, is_reader=True)
    assert calls(folder, "start")[1:] == [["mine-7", "name", {"a": 1}, {"b": "c"}], ["mine-7", "name", {}, {}]]
    assert points(folder)[:5] == [1, 2, 3, 4, 5] and calls(folder, "points")[-1][0][-1][0] == "eval/loss"
    assert calls(folder, "end") == [["FINISHED"]] * 3 and len(calls(folder, "tags")) == 2


FAILING: Mapping[str, tuple[str, str]] = {
    "a mistake": (
        "class Fails(Records):\n    def log_points(self, points):\n        self.help(points)\n"
        "    def help(self, points):\n        raise KeyError('x')\n",
        r"tracking: fails.Fails: log_points raised KeyError: 'x' \(.*\)\n  \S+fails.py, line 6, in help: "
        r"raise KeyError\('x'\)\n  \S+fails.py, line 4, in log_points: self.help\(points\)",
    ),
    "sys.exit": (
        "class Fails(Records):\n    def log_points(self, points):\n        sys.exit(7)\n",
        r"tracking: fails.Fails: log_points raised SystemExit: 7 \(.*\)\n  \S+fails.py, line 4, in log_points: sys",
    ),
    "a crash": (
        "class Fails(Records):\n    def log_points(self, points):\n        os._exit(9)\n",
        r"tracking: fails.Fails: its process exited with 9 in log_points \(",
    ),
    "sys.exit while it is imported": (
        "sys.exit('no')\nclass Fails: pass\n",
        r"fails.Fails: cannot be made, SystemExit: no \(.*\)\n  \S+fails.py, line 2, in <module>: sys.exit",
    ),
    "no such argument": (
        "class Fails:\n    def __init__(self, project): pass\n",
        r"fails.Fails: cannot be made, TypeError: .*missing 1 required positional argument: 'project' \(",
    ),
    "not a tracker": (
        "class Fails:\n    def start(self, *args): pass\n    def log_metrics(self): pass\n",
        r"fails.Fails: cannot be made, TypeError: a Fails lacks log_points, end, which a tracker needs \(",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_a_class_that_fails_is_said_once_and_stops_no_other(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "CLOSING_ATTEMPTS", 1)
    code, message = FAILING[name]
    (folder / "fails.py").write_text(f"from mine import *; from mine import Records, os, sys\n{code}")
    noted(folder, range(1, 4))
    warnings, _ = ship(folder, ["fails.Fails", "csv", {"fn": "mine.Records", "params": {"path": "calls.jsonl"}}])
    assert len(warnings) == 1 and re.search(message, warnings[0]), warnings
    assert points(folder) == [1, 2, 3]
    assert (folder / "tracking" / "metrics.csv").read_text() == "step,train/loss\n1,0.5\n2,1.0\n3,1.5\n"
    assert RunRecord.read(folder).trackers["fails.Fails"].offsets == {}  # its next start gets everything


def test_what_failed_is_shipped_when_it_works_again(folder: Path) -> None:
    (folder / "fails.py").write_text(
        "import os; from mine import Records\nclass Fails(Records):\n    def log_points(self, points):\n"
        "        if not os.path.exists('ready'):\n            open('ready', 'w').close()\n            os._exit(1)\n"
        "        super().log_points(points)\n"
    )
    noted(folder, range(1, 4))
    warnings, _ = ship(folder, "fails.Fails")
    assert len(warnings) == 1 and points(folder) == [1, 2, 3]
    assert len({pid for _, pid in calls(folder, "made")}) == 2  # another process took over
    assert [run_id for run_id, *_ in calls(folder, "start")] == [None, "mine-7"]


def test_a_class_that_hangs_is_ended_with_the_run_and_delays_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "CLOSING_TIMEOUT_SECS", 2.0)
    monkeypatch.setattr(shipping, "PERIOD_SECS", 0.1)
    (folder / "hangs.py").write_text(
        "import time; from mine import Records\nclass Hangs(Records):\n    def log_points(self, points):\n"
        "        time.sleep(600)\n"
    )
    noted(folder, range(1, 4))
    warnings: list[str] = []
    backend = [{"fn": "hangs.Hangs", "params": {"path": "hangs.jsonl"}}, "mine.Records"]
    shipped = shippers(folder, backend, warnings)
    shipped.start()
    wait_until(lambda: points(folder) == [1, 2, 3], 20)
    hangs = folder / "hangs.jsonl"
    wait_until(lambda: hangs.exists() and '"start"' in hangs.read_text(), 20)
    noted(folder, range(4, 7))
    wait_until(lambda: points(folder) == [1, 2, 3, 4, 5, 6], 20)
    pid = json.loads(hangs.read_text().splitlines()[0])[2]
    began = time.monotonic()
    shipped.drain()
    shipped.close("FINISHED", {}, [])
    assert time.monotonic() - began < 100, "the class sleeps for 600 s"
    assert len(warnings) == 1 and warnings[0].startswith("tracking: hangs.Hangs: no answer for 2 s; the run ends ")
    assert calls(folder, "end") == [["FINISHED"]] and not psutil.pid_exists(pid)


def test_a_process_that_dies_again_and_again_is_not_started_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "PERIOD_SECS", 0.01)
    (folder / "dies.py").write_text("import os\nopen('deaths', 'a').write('x')\nos._exit(1)\nclass Dies: pass\n")
    warnings: list[str] = []
    shipped = shippers(folder, "dies.Dies", warnings)
    shipped.start()
    deaths = folder / "deaths"
    wait_until(lambda: deaths.exists() and len(deaths.read_text()) == user_tracker.MAX_DEATHS, 60)
    time.sleep(0.5)
    shipped.drain()
    shipped.close("FINISHED", {}, [])
    assert len(deaths.read_text()) == user_tracker.MAX_DEATHS and len(warnings) == 1


def test_the_process_of_a_class_ends_with_a_supervisor_that_is_killed(folder: Path) -> None:
    (folder / "hangs.py").write_text(
        "import time; from mine import Records\nclass Hangs(Records):\n    def log_points(self, points):\n"
        "        self.note('hangs')\n        time.sleep(600)\n"
    )
    code = (
        "import os; from runner.config.schema import TrackingBackend\n"
        "from runner.tracking.backends.user_tracker import UserTracker\nfrom runner.tracking.tracker import Point\n"
        "tracker = UserTracker(TrackingBackend('hangs.Hangs'), 'name', dict(os.environ))\n"
        "tracker.start(None, 'name', {}, {})\ntracker.log_points([Point('a', 1.0, 1, 1.0)])\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: bool(calls(folder, "hangs")), 30)
    ((_, pid),) = calls(folder, "made")
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: is_gone(pid), 2 * user_tracker.GRACE_SECS + 5)


def test_the_tracker_of_the_documentation_works(folder: Path) -> None:
    (code,) = re.findall(
        r"```python\n(# my_trackers.py\n.*?)```", (ROOT / "docs" / "how_to" / "track_elsewhere.md").read_text(), re.S
    )
    (folder / "my_trackers.py").write_text(code)
    noted(folder, range(1, 3))
    backend = {"fn": "my_trackers.JsonLines", "params": {"path": "all_runs.jsonl"}}
    assert ship(folder, ["csv", backend])[0] == []
    lines = [json.loads(line) for line in (folder / "all_runs.jsonl").read_text().splitlines()]
    assert lines[0]["params"] == {"a": 1} and lines[0]["run"] == lines[-1]["run"] == "name"
    assert [(line["metric"], line["step"], line["value"]) for line in lines[1:-1]] == [
        ("train/loss", 1, 0.5),
        ("train/loss", 2, 1.0),
    ]
    assert lines[-1]["status"] == "FINISHED"
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert isinstance(scope["JsonLines"](str(folder / "x")), RunTracker)
