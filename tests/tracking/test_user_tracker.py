"""A run recorded by classes of the user's: in processes of their own, which fail without harm."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
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
from runner.tracking.run_record import Shipped
from runner.tracking.ship import main as ship_main
from runner.tracking.shipping import MAX_DEATHS, NOT_ALL, Shipping, write_settings
from tests.support.journal import Lines, note_end, note_start
from tests.support.messages import Messages
from tests.support.processes import is_gone, wait_until
from tests.support.tiers import slow_but

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


def started(folder: Path, backend: Any, *, command: str = "train") -> None:
    """Note a start that is recorded by `backend`, as whoever starts a run does."""
    note_start(folder, command=command)
    write_settings(folder, TrackingConfig(backend), os.environ)


def shipping_of(folder: Path) -> Shipping:
    following = Shipping({**os.environ, "PYTHONPATH": str(ROOT)})
    following.ship(folder)
    return following


def ship(
    folder: Path, backend: Any, steps: range = range(0), *, command: str = "train", values: Mapping[str, float] = {}
) -> dict[str, str]:
    """Record a start whose task notes the loss of `steps`. Return tracker -> the address of the run."""
    started(folder, backend, command=command)
    journal = noted(folder, steps)
    if values:
        journal.metrics(steps[-1], values)
    note_end(folder)
    following = shipping_of(folder)
    following.close()
    return following.addresses(folder)


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


def test_a_class_gets_everything_once_and_in_order_over_two_starts_and_an_evaluation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = {"fn": "mine.Records", "params": {"project": "p"}}
    started(folder, backend)
    journal = noted(folder, range(1, 4))
    (folder / "notes.txt").write_text("x")
    journal.event("artifact", path="notes.txt", folder="texts")
    journal.event("dataset", context="train", name="n", digest="d", source={}, profile={})
    note_end(folder)
    following = shipping_of(folder)
    assert following.close() and capsys.readouterr().err == ""
    assert following.addresses(folder) == {"mine.Records": "https://mine/7"}
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
    ship(folder, backend, range(3, 6))
    ship(folder, backend, range(5, 6), command="evaluate", values={"eval/loss": 0.25})
    assert calls(folder, "start")[1:] == [["mine-7", "name", {"a": 1}, {"b": "c"}], ["mine-7", "name", {}, {}]]
    assert points(folder)[:5] == [1, 2, 3, 4, 5] and calls(folder, "points")[-1][0][-1][0] == "eval/loss"
    assert calls(folder, "end") == [["FINISHED"]] * 3 and len(calls(folder, "tags")) == 2


FAILING: Mapping[str, tuple[str, list[int]]] = {
    "a mistake": (
        "class Fails(Records):\n    def log_points(self, points):\n        self.help(points)\n"
        "    def help(self, points):\n        raise KeyError('x')\n", [6, 4],
    ),
    "sys.exit": ("class Fails(Records):\n    def log_points(self, points):\n        sys.exit(7)\n", [4]),
    "a crash": ("class Fails(Records):\n    def log_points(self, points):\n        os._exit(9)\n", []),
    "sys.exit while it is imported": ("sys.exit('no')\nclass Fails: pass\n", [2]),
    "no such argument": ("class Fails:\n    def __init__(self, project): pass\n", []),
    "not a tracker": ("class Fails:\n    def start(self, *args): pass\n    def log_metrics(self): pass\n", []),
}  # fmt: skip
"""What is wrong -> the class, and the lines of its file that are named."""


@pytest.mark.parametrize("name", slow_but(FAILING, "a crash"))
def test_a_class_that_fails_is_said_and_stops_no_other(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    code, lines = FAILING[name]
    (folder / "fails.py").write_text(f"from mine import *; from mine import Records, os, sys\n{code}")
    ship(folder, ["fails.Fails", "csv", {"fn": "mine.Records", "params": {"path": "calls.jsonl"}}], range(1, 4))
    said = capsys.readouterr().err
    messages.same("stderr", said)
    assert [int(line) for line in re.findall(r"fails\.py, line (\d+)", said)] == lines
    assert points(folder) == [1, 2, 3]
    assert (folder / "tracking" / "metrics.csv").read_text() == "step,train/loss\n1,0.5\n2,1.0\n3,1.5\n"
    assert "events.chief-0.jsonl" not in Shipped.read(folder, "fails.Fails").offsets  # its next start gets everything


def test_what_failed_is_shipped_when_it_works_again(
    folder: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    (folder / "fails.py").write_text(
        "import os; from mine import Records\nclass Fails(Records):\n    def log_points(self, points):\n"
        "        if not os.path.exists('ready'):\n            open('ready', 'w').close()\n            os._exit(1)\n"
        "        super().log_points(points)\n"
    )
    ship(folder, "fails.Fails", range(1, 4))
    messages.same("stderr", capsys.readouterr().err)
    assert points(folder) == [1, 2, 3] and Shipped.read(folder, "fails.Fails").is_complete(folder)
    assert len({pid for _, pid in calls(folder, "made")}) == 2  # another process took over
    assert [run_id for run_id, *_ in calls(folder, "start")] == [None, "mine-7"]


def has_shipped(folder: Path, steps: Mapping[str, int]) -> bool:
    return Shipped.read(folder, "mine.Records").last_steps == steps


def test_a_process_that_is_killed_is_started_again_and_doubles_nothing(folder: Path) -> None:
    started(folder, "mine.Records")
    journal = noted(folder, range(0))
    journal.event("first_step", step=1)
    following = shipping_of(folder)
    for number in range(2):
        journal.metrics(number, {"train/loss": 1.0})
        wanted = {"train/loss": number}  # noted after the class has got it
        wait_until(functools.partial(has_shipped, folder, wanted))
        os.kill(calls(folder, "made")[-1][1], signal.SIGKILL)
    journal.metrics(2, {"train/loss": 1.0})
    note_end(folder)
    assert following.close()
    assert points(folder) == [0, 1, 2] and calls(folder, "end") == [["FINISHED"]]


def test_a_class_that_hangs_is_ended_with_the_run_and_delays_no_other(
    folder: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    (folder / "hangs.py").write_text(
        "import time; from mine import Records\nclass Hangs(Records):\n    def log_points(self, points):\n"
        "        time.sleep(600)\n"
    )
    started(folder, [{"fn": "hangs.Hangs", "params": {"path": "hangs.jsonl"}}, "mine.Records"])
    journal = noted(folder, range(1, 4))
    journal.event("first_step", step=1)
    following = shipping_of(folder)
    wait_until(lambda: points(folder) == [1, 2, 3])
    hangs = folder / "hangs.jsonl"
    wait_until(lambda: hangs.exists() and '"start"' in hangs.read_text())
    noted(folder, range(4, 7))
    wait_until(lambda: points(folder) == [1, 2, 3, 4, 5, 6])
    pid = json.loads(hangs.read_text().splitlines()[0])[2]
    note_end(folder)
    began = time.monotonic()
    assert not following.close()
    assert time.monotonic() - began < 100, "the class sleeps for 600 s"
    messages.same("stderr", capsys.readouterr().err)
    assert calls(folder, "end") == [["FINISHED"]] and not psutil.pid_exists(pid)
    (folder / "hangs.py").write_text("from mine import Records as Hangs\n")
    # What the last line says.
    assert ship_main(["--tracker", "hangs.Hangs", "--tracker", "mine.Records", str(folder)]) == 0
    table = [json.loads(line) for line in hangs.read_text().splitlines()]
    assert [step for call in table if call[0] == "points" for _, _, step, _ in call[1]] == [1, 2, 3, 4, 5, 6]
    assert table[-1] == ["end", "FINISHED"] and calls(folder, "end") == [["FINISHED"]]


def test_a_process_that_is_stopped_holds_the_end_of_a_run_for_a_limited_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    monkeypatch.setattr("runner.tracking.shipping.ANSWER_SECS", 3)
    started(folder, "mine.Records")
    noted(folder, range(1, 4)).event("first_step", step=1)
    following = shipping_of(folder)
    wait_until(lambda: has_shipped(folder, {"train/loss": 3}))
    ((_, pid),) = calls(folder, "made")
    os.kill(pid, signal.SIGSTOP)
    note_end(folder)
    began = time.monotonic()
    assert not following.close()
    assert time.monotonic() - began < 60, "nothing else ends what is stopped"
    said = capsys.readouterr().err
    assert f"process {pid} " in said and is_gone(pid)
    messages.same("stderr", said, hide=rf"\b{pid}\b")
    assert ship_main(["--tracker", "mine.Records", str(folder)]) == 0  # what the last line says
    assert points(folder) == [1, 2, 3] and calls(folder, "end") == [["FINISHED"]]


def test_a_process_that_is_stopped_and_ships_the_run_is_named_by_the_next(
    folder: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    started(folder, "mine.Records")
    noted(folder, range(1, 4)).event("first_step", step=1)
    code = (
        "import os, time; from pathlib import Path; from runner.tracking.shipping import Shipping\n"
        "Shipping(os.environ).ship(Path.cwd())\ntime.sleep(600)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: has_shipped(folder, {"train/loss": 3}))
    ((_, pid),) = calls(folder, "made")
    os.kill(pid, signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    began = time.monotonic()
    assert ship_main(["--tracker", "mine.Records", str(folder)]) == NOT_ALL
    assert time.monotonic() - began < 60
    said = capsys.readouterr().err
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_gone(pid))
    messages.same("stderr", said, hide=rf"\b{pid}\b")
    assert calls(folder, "end") == [["SCHEDULED"]]
    assert ship_main(["--tracker", "mine.Records", str(folder)]) == 0


def test_a_class_that_the_command_line_does_not_name_is_not_imported(
    folder: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    """The folder came from a stranger, whose settings name code, and where it is."""
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "evil.py").write_text(f"open({str(folder / 'imported')!r}, 'w')\nfrom mine import Records as Evil\n")
    run = folder / "run"
    note_start(run)
    noted(run, range(1, 4))
    note_end(run)
    write_settings(run, TrackingConfig(["evil.Evil", "csv"]), os.environ, path=[str(theirs)])
    assert ship_main([str(run)]) == 2
    assert not (folder / "imported").exists()
    assert (run / "tracking/metrics.csv").read_text().count("\n") == 4
    messages.same("stderr", capsys.readouterr().err)
    assert ship_main(["--tracker", "evil.Evil", str(run)]) == 0  # what the last line says
    assert (folder / "imported").exists() and points(folder) == [1, 2, 3]
    assert ship_main([str(run)]) == 0, "it has everything"


def damaged_settings(**changes: Any) -> dict[str, Any]:
    return {"settings": {"backend": "csv", **changes}, "path": [], "secrets": []}


@pytest.mark.parametrize(
    ("file", "values"),
    [
        (".tracking.json", {"path": []}),
        (".tracking.json", damaged_settings(uri=["http://me:hunter2@host"])),
        (".tracking.json", damaged_settings(backend=5)),
        (".tracking.json", damaged_settings(backend=[{"name": "csv"}])),
        ("shipped.csv.json", {"offsets": 3}),
        ("shipped.csv.json", {"models": 3}),
        ("shipped.csv.json", {"started": "first"}),
    ],
)
def test_a_file_with_a_value_of_another_type_is_named_and_keeps_no_other_run_from_a_tracker(
    file: str, values: Any, folder: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    for name in ("damaged", "whole"):
        note_start(folder / name)
        noted(folder / name, range(1, 4))
        note_end(folder / name)
        write_settings(folder / name, TrackingConfig("csv"), os.environ)
    (folder / "damaged" / file).write_text(json.dumps(values))
    assert ship_main([str(folder / "damaged"), str(folder / "whole")]) == 2
    messages.same("stderr", capsys.readouterr().err)
    assert (folder / "whole/tracking/metrics.csv").read_text().count("\n") == 4


def test_a_key_of_another_version_is_no_mistake(folder: Path) -> None:
    note_start(folder)
    note_end(folder)
    (folder / ".tracking.json").write_text(json.dumps(damaged_settings(later=1)))
    assert ship_main([str(folder)]) == 0


def test_a_process_that_dies_again_and_again_is_not_started_for_ever(
    folder: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    (folder / "dies.py").write_text("import os\nopen('deaths', 'a').write('x')\nos._exit(1)\nclass Dies: pass\n")
    started(folder, "dies.Dies")
    noted(folder, range(1, 4)).event("first_step", step=1)
    following = shipping_of(folder)
    deaths = folder / "deaths"
    wait_until(lambda: deaths.exists() and len(deaths.read_text()) == MAX_DEATHS)
    time.sleep(1.0)
    note_end(folder)
    assert not following.close()
    assert len(deaths.read_text()) == MAX_DEATHS
    messages.same("stderr", capsys.readouterr().err)


def test_a_process_that_dies_now_and_then_is_started_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.tracking.shipping.STEADY_SECS", 0.0)
    rare = f"open('deaths', 'a').write('x')\nif os.path.getsize('deaths') <= {MAX_DEATHS + 1}: os._exit(1)\n"
    (folder / "rare.py").write_text(f"import os; from mine import Records\n{rare}class Rare(Records): pass\n")
    started(folder, "rare.Rare")
    noted(folder, range(1, 4)).event("first_step", step=1)
    following = shipping_of(folder)
    wait_until(lambda: points(folder) == [1, 2, 3])
    note_end(folder)
    assert following.close() and calls(folder, "end") == [["FINISHED"]]


def test_the_process_of_a_class_ends_with_a_supervisor_that_is_killed(folder: Path) -> None:
    (folder / "hangs.py").write_text(
        "import time; from mine import Records\nclass Hangs(Records):\n    def log_points(self, points):\n"
        "        self.note('hangs')\n        time.sleep(600)\n"
    )
    started(folder, "hangs.Hangs")
    noted(folder, range(1, 4)).event("first_step", step=1)
    code = (
        "import os, time; from pathlib import Path; from runner.tracking.shipping import Shipping\n"
        "Shipping(os.environ).ship(Path.cwd())\ntime.sleep(600)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: bool(calls(folder, "hangs")))
    ((_, pid),) = calls(folder, "made")
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: is_gone(pid))


@pytest.mark.slow
def test_the_tracker_of_the_documentation_works(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(
        r"```python\n(# my_trackers.py\n.*?)```", (ROOT / "docs" / "how_to" / "track_elsewhere.md").read_text(), re.S
    )
    (folder / "my_trackers.py").write_text(code)
    backend = {"fn": "my_trackers.JsonLines", "params": {"path": "all_runs.jsonl"}}
    ship(folder, ["csv", backend], range(1, 3))
    assert capsys.readouterr().err == ""
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
