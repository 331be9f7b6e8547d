"""Child processes: how they end, and that they never outlive their parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.system.child_process import describe_exit, start_process, start_pump
from tests.support.messages import Messages
from tests.support.processes import is_gone, wait_until

pytestmark = pytest.mark.processes

ROOT = str(Path(__file__).parents[2])
ENV = {**os.environ, "PYTHONPATH": ROOT}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_exit_code_of_the_child_is_returned() -> None:
    process = start_process(python("raise SystemExit(3)"), ENV)
    assert process.wait(120) == 3
    assert process.close() == 3


@pytest.mark.parametrize("error", [BrokenPipeError(), UnicodeEncodeError("ascii", "é", 0, 1, "no such letter")])
def test_what_cannot_be_shown_takes_nothing_else_of_the_output_with_it(error: Exception) -> None:
    """The reader of our own output has gone, or it lacks a letter."""
    read_end, write_end = os.pipe()
    shown = []

    def put(line: str) -> None:
        if line == "> é":
            raise error
        shown.append(line)

    pump = start_pump(os.fdopen(read_end, encoding="utf-8"), put, "> ")
    with os.fdopen(write_end, "w", encoding="utf-8") as output:
        for line in ("1", "é", "2"):
            print(line, file=output, flush=True)
    pump.join(60)
    assert shown == ["> 1", "> 2"]


def test_waiting_has_a_limit() -> None:
    process = start_process(python("import time; time.sleep(600)"), ENV)
    assert process.wait(0.05) is None
    process.kill()
    assert process.close() == -signal.SIGKILL


def test_a_child_leads_a_session_of_its_own() -> None:
    process = start_process(python("import time; time.sleep(600)"), ENV)
    assert os.getsid(process.pid) == process.pid
    process.kill()
    process.close()


def test_a_child_that_is_asked_to_stop_saves(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal(signal.SIGTERM, lambda *a: (pathlib.Path({str(tmp_path / 'saved')!r}).touch(), sys.exit(3)))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(600)"
    )
    process = start_process(python(code), ENV)
    wait_until((tmp_path / "ready").exists)
    process.ask_to_stop()
    assert process.wait(120) == process.close() == 3
    assert (tmp_path / "saved").exists()


def test_a_kill_ends_a_child_that_does_not_stop_and_what_it_started(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"path = pathlib.Path({str(tmp_path / 'pid')!r}); path.with_suffix('.tmp').write_text(str(helper.pid))\n"
        "path.with_suffix('.tmp').rename(path)\n"
        "time.sleep(600)"
    )
    process = start_process(python(code), ENV)
    wait_until((tmp_path / "pid").exists)
    process.ask_to_stop()
    assert process.wait(0.2) is None
    process.kill()
    assert process.close() == -signal.SIGKILL
    wait_until(lambda: is_gone(int((tmp_path / "pid").read_text())))


CHILD = (
    "import ctypes, json, os, sys, time, pathlib, psutil\n"
    "from runner.system.child_process import end_with_parent\n"
    "{before}\n"
    "watchdog = end_with_parent(os.environ, grace_secs={grace_secs})\n"
    "{after}\n"
    "path = pathlib.Path({pid!r}); path.with_suffix('.tmp').write_text(str(os.getpid()))\n"
    "others = [one.pid for one in psutil.Process().children()]\n"
    "path.with_name('others').write_text(json.dumps(others))\n"
    "path.with_suffix('.tmp').rename(path)\n"
    "{then}\n"
)
PARENT = (
    "import os, sys, time\n"
    "from runner.system.child_process import start_process\n"
    "process = start_process([sys.executable, '-c', {child!r}], os.environ)\n"
    "time.sleep(600)\n"
)


def _orphan(
    tmp_path: Path, before: str, grace_secs: float = 0.3, then: str = "time.sleep(600)", after: str = ""
) -> int:
    """Kills a parent -9 whose child does `before` and `after` it has a watchdog, and begins `then`; the child's pid."""
    child = CHILD.format(before=before, after=after, pid=str(tmp_path / "pid"), grace_secs=grace_secs, then=then)
    parent = subprocess.Popen(python(PARENT.format(child=child)), env=ENV)
    wait_until((tmp_path / "pid").exists)
    parent.kill()
    parent.wait()
    return int((tmp_path / "pid").read_text())


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid = _orphan(tmp_path, before="")
    wait_until(lambda: is_gone(pid))


def test_a_child_ends_with_its_parent_where_the_system_has_no_pidfd(tmp_path: Path) -> None:
    pid = _orphan(tmp_path, before="del os.pidfd_open")
    wait_until(lambda: is_gone(pid))


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    pid = _orphan(tmp_path, before="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    wait_until(lambda: is_gone(pid))


def test_a_child_in_which_no_python_thread_runs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pid = _orphan(
        tmp_path, "import subprocess; subprocess.Popen(['sleep', '600'])", then="ctypes.PyDLL(None).sleep(600)"
    )
    others = json.loads((tmp_path / "others").read_text())
    assert len(others) == 2  # the helper and the watchdog
    wait_until(lambda: all(map(is_gone, [pid, *others])))


def test_a_child_that_has_something_to_save_has_the_time_for_it(tmp_path: Path) -> None:
    """One that has nothing has less time than it takes."""
    saves = f"time.sleep(1), pathlib.Path({str(tmp_path)!r}, 'saved').touch(), os._exit(0)"
    before = (
        "import signal; from runner.system import child_process\n"
        f"signal.signal(signal.SIGTERM, lambda *a: ({saves}))\n"
        "child_process.IDLE_GRACE_SECS = 0.3"
    )
    pid = _orphan(tmp_path, before, grace_secs=60, after="watchdog.note_work()")
    wait_until(lambda: is_gone(pid))
    assert (tmp_path / "saved").exists()


def test_a_child_whose_watchdog_was_killed_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid = _orphan(tmp_path, "", then="[one.kill() for one in psutil.Process().children()]; time.sleep(600)")
    wait_until(lambda: is_gone(pid))


def test_the_watchdog_of_a_child_that_has_ended_ends(tmp_path: Path) -> None:
    child = CHILD.format(before="", after="", pid=str(tmp_path / "pid"), grace_secs=9, then="raise SystemExit(4)")
    process = start_process(python(child), ENV, prefix="[child] ")  # its output ends with it
    assert process.wait(120) == 4
    wait_until(lambda: all(map(is_gone, json.loads((tmp_path / "others").read_text()))))
    assert process.close() == 4


def test_exits_are_said_in_words(messages: Messages) -> None:
    for code in (1, -9, -11):
        messages.same(f"exit {code}", describe_exit(code))
