"""The task server: its children are what processes that are started would be, and how each ended is known.

The server is real but for its imports, of which it has none (tests/support/forking.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.distribute.cluster import ALONE
from runner.launch.gang import Task
from runner.launch.task_starter import TASK_COMMAND, TaskStarter
from runner.system.child_process import STOP_SIGNALS, Process
from tests.support.messages import Messages
from tests.support.processes import is_gone, pidfds_of, wait_until

pytestmark = pytest.mark.processes

ROOT = str(Path(__file__).parents[2])
ENV = {**os.environ, "PYTHONPATH": ROOT, "TF_CPP_MIN_LOG_LEVEL": "3"}
FOREVER = "import time; time.sleep(600)"


def task(code: str, env: Mapping[str, str] = ENV, prefix: str = "") -> Task:
    """A task that executes `code`."""
    return Task(ALONE, [sys.executable, *TASK_COMMAND, code], env, prefix)


@contextlib.contextmanager
def serving(env: Mapping[str, str] = ENV) -> Iterator[TaskStarter]:
    starter = TaskStarter(command=("-m", "tests.support.forking"))
    starter.prepare([task("", env)])
    starter.wait([])
    yield starter
    pid = starter.server.pid if starter.server else None
    starter.close()
    assert pid is None or not psutil.pid_exists(pid)  # it has ended, and is no zombie


@pytest.fixture(scope="module")
def shared() -> Iterator[TaskStarter]:
    with serving() as starter:
        yield starter


@pytest.fixture
def server() -> Iterator[TaskStarter]:
    """A server for a test that kills it."""
    with serving() as starter:
        yield starter


def pid_of(starter: TaskStarter) -> int:
    assert starter.server is not None
    return starter.server.pid


def fork(server: TaskStarter, code: str, env: Mapping[str, str] = ENV, prefix: str = "") -> Process:
    process = server.start(task(code, env, prefix))
    assert psutil.Process(process.pid).ppid() == pid_of(server)
    return process


def told(server: TaskStarter, folder: Path, code: str, env: Mapping[str, str] = ENV) -> Any:
    """What a child found, which assigns it to `found`."""
    process = fork(server, f"{code}\nimport json; open({str(folder / 'found')!r}, 'w').write(json.dumps(found))", env)
    assert process.close() == 0
    return json.loads((folder / "found").read_text())


@pytest.mark.parametrize(
    ("code", "expected"),
    [("code = 3", 3), ("pass", 0), ("raise SystemExit(5)", 5), ("raise ValueError('as meant by the test')", 1),
     ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL), ("import os; os.abort()", -signal.SIGABRT),
     ("import os; os._exit(7)", 7)],
)  # fmt: skip
def test_the_exit_code_of_a_child_is_known(shared: TaskStarter, code: str, expected: int) -> None:
    process = fork(shared, code)
    assert process.wait(120) == expected
    assert process.wait(0) == expected and process.close() == expected


def test_waiting_has_a_limit_and_a_kill_ends_a_child_with_what_it_started(shared: TaskStarter, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    code = (
        "import signal, subprocess, pathlib, os, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"helper = subprocess.Popen(['sleep', '600']); path = {str(path)!r}\n"
        "pathlib.Path(path + '.tmp').write_text(str(helper.pid)); os.rename(path + '.tmp', path)\n"
        "time.sleep(600)"
    )
    process = fork(shared, code)
    assert process.wait(0.05) is None
    assert os.getsid(process.pid) == process.pid
    wait_until(path.exists)
    process.ask_to_stop()
    assert process.wait(0.2) is None
    process.kill()
    assert process.close() == -signal.SIGKILL
    wait_until(lambda: is_gone(int(path.read_text())))


def test_a_child_can_be_killed_as_soon_as_it_is_there(shared: TaskStarter) -> None:
    for _ in range(10):
        process = fork(shared, FOREVER)
        process.kill()
        assert process.close() == -signal.SIGKILL


def test_a_child_has_exactly_its_environment_directory_arguments_and_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = (
        "import os, signal, subprocess, sys\n"
        "handlers = [signal.getsignal(n) == signal.SIG_IGN for n in (15, 2, 1)]\n"
        # As C code sees it, and a program that it starts.
        "said = os.fsdecode(subprocess.check_output(['env', '-0'])).split('\\0')\n"
        "seen = dict(line.split('=', 1) for line in said if line)\n"
        "found = [dict(os.environ), seen, os.getcwd(), sys.argv[0], handlers, sys.stdin.read()]"
    )  # fmt: skip
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "TF_CPP_MIN_LOG_LEVEL": "3", "WITH_é": "ü\udcff"}
    with serving(env) as server:
        env["TF_CONFIG"] = "{}"
        environ, seen, directory, script, handlers, stdin = told(server, tmp_path, code, env)
    lifeline, heartbeat = environ.pop("RUNNER_LIFELINE_FD"), environ.pop("RUNNER_HEARTBEAT_FD")
    assert environ == env and int(lifeline) != int(heartbeat)
    assert seen == {**env, "RUNNER_LIFELINE_FD": lifeline, "RUNNER_HEARTBEAT_FD": heartbeat}
    assert directory == str(tmp_path)
    assert script.endswith("runner/task/__main__.py")
    # As in a process that is started: under nohup, or behind `&` of a script, some are ignored.
    assert handlers == [signal.getsignal(number) == signal.SIG_IGN for number in (15, 2, 1)] and stdin == ""


def test_a_child_ends_as_python_does_with_its_threads_exit_functions_and_objects(
    shared: TaskStarter, tmp_path: Path
) -> None:
    code = f"""
import atexit, os, sys, threading, time
said = open({str(tmp_path / "said")!r}, "w")  # never closed
class Speaker:
    def __init__(self, path):
        self.path, self.make = path, os.mkdir
    def __del__(self):
        self.make(self.path)
    def exit(self):
        import omegaconf.errors, runner.task.main  # what it shares with the server can still be imported
        said.write("exit function, ")
sys.modules["users"] = module = type(sys)("users")
module.speaker = Speaker({str(tmp_path / "deleted")!r})
atexit.register(module.speaker.exit)
threading.Thread(target=lambda: (time.sleep(0.3), said.write("thread, "))).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
code = 4
"""
    process = fork(shared, code)
    assert process.close() == 4
    assert (tmp_path / "said").read_text() == "thread, exit function, "
    assert (tmp_path / "deleted").is_dir()


def test_children_draw_different_random_numbers(shared: TaskStarter, tmp_path: Path) -> None:
    code = "import random; import numpy as np; found = [random.random(), float(np.random.rand())]"
    first, second = told(shared, tmp_path, code), told(shared, tmp_path, code)
    assert first[0] != second[0] and first[1] != second[1]


def test_neither_the_server_nor_another_child_holds_the_files_of_a_child(shared: TaskStarter, tmp_path: Path) -> None:
    files = "import os; found = sorted(map(int, os.listdir('/proc/self/fd')))[:-1]"  # the last one lists them
    holder, alone = psutil.Process(pid_of(shared)), told(shared, tmp_path, files)
    wait_until(lambda: not pidfds_of(holder))  # it lets go of a child just after it has told how that ended
    held = holder.num_fds()
    others = [fork(shared, FOREVER, prefix="[other] ") for _ in range(3)]
    try:
        assert told(shared, tmp_path, files) == alone
        wait_until(lambda: holder.num_fds() == held + 2 * len(others))  # a pidfd and a status pipe each
    finally:
        for other in others:
            other.kill()
            assert other.close() != 0  # joins the pumps: their pipes have ended
    wait_until(lambda: holder.num_fds() == held)


def test_what_a_child_says_has_its_prefix(shared: TaskStarter, capfd: pytest.CaptureFixture[str]) -> None:
    process = fork(shared, "import os; print('one'); os.system('echo two >&2')", prefix="[child] ")
    assert process.close() == 0
    said = capfd.readouterr()
    assert (said.out, said.err) == ("[child] one\n", "[child] two\n")


def test_children_outlive_a_server_that_is_killed_and_their_ends_are_known(
    server: TaskStarter, tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    ends, killed = tmp_path / "end", tmp_path / "never"
    wait = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.01)\ncode = 3"
    saves, is_lost = (fork(server, wait.format(str(path))) for path in (ends, killed))
    pid = pid_of(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))
    assert server.start(task("pass")).close() == 2  # cold: there is no such config
    (said,) = [text for text in capfd.readouterr().err.splitlines() if "SIGKILL" in text]
    messages.same("line", said)
    assert saves.wait(0.1) is None and is_lost.wait(0) is None
    ends.touch()
    is_lost.kill()
    assert saves.wait(120) == 3 and saves.close() == 3
    assert is_lost.close() == -signal.SIGKILL  # lost, as one that the system has killed


def test_a_server_outlives_its_children_when_all_are_asked_to_stop(shared: TaskStarter, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(3))\n"
        f"open({str(ready)!r}, 'w').close(); time.sleep(600)"
    )
    child = fork(shared, code)
    wait_until(ready.exists)
    for number in STOP_SIGNALS:
        os.kill(pid_of(shared), number)
    child.ask_to_stop()
    assert child.close() == 3
    assert fork(shared, "import signal; code = 4 + (signal.getsignal(15) != signal.SIG_DFL)").close() == 4


def test_a_server_ends_with_the_process_that_started_it_and_after_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = (
        "from runner.system.child_process import end_with_parent; import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: (time.sleep(0.5), os._exit(3)))\n"
        f"end_with_parent(os.environ)\nopen({str(tmp_path / 'on')!r}, 'w').close(); time.sleep(600)"
    )
    parent = (
        "import os, pathlib, time\nfrom tests.task.test_server import serving, task\n"
        "context = serving(); server = context.__enter__()\n"
        f"process = server.start(task({child!r}))\n"
        f"while not os.path.exists({str(tmp_path / 'on')!r}): time.sleep(0.01)\n"
        f"pathlib.Path({str(pids)!r} + '.tmp').write_text(f'{{server.server.pid}} {{process.pid}}')\n"
        f"os.rename({str(pids)!r} + '.tmp', {str(pids)!r}); time.sleep(600)"
    )
    started = psutil.Popen([sys.executable, "-c", parent], env=ENV)
    wait_until(pids.exists)
    left = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    started.kill()
    started.wait()
    wait_until(lambda: not left[1].is_running() or left[1].status() == psutil.STATUS_ZOMBIE)
    wait_until(lambda: is_gone(left[0].pid))
