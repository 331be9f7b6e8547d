"""What all tests share, and the tiers: which marker a test has, and that only those marked `processes` start any."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import cost
from tests.support.processes import STARTED, end_all_of
from tests.support.tiers import FURTHER, further_cases, is_named_slow

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine
    from tests.support.messages import Messages
    from tests.support.trained import Put

# Before anything imports MLflow or starts a process that does.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "HYDRA_FULL_ERROR"):
    os.environ.pop(name, None)

TESTS = Path(__file__).parent
PROCESS_FOLDERS = ("integration", "launch")
"""Their tests are `processes`."""

running: pytest.Item | None = None
environment_of_all: dict[str, str] = {}
"""What is set when all is collected."""
INSTALLED = "runner.classic.compat.install"
"""Its `called` are the switches of TensorFlow 1 that code in this process has called."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-messages", action="store_true", help="run what meets messages; write their files anew")
    parser.addoption("--cost", action="store_true", help="show what each test costs: tests/support/cost.py")


def pytest_configure(config: pytest.Config) -> None:
    """Split the CPU into two devices to mirror over, before any test makes a tensor."""
    is_xdist_controller = bool(config.getoption("numprocesses", None))
    if config.getoption("cost"):
        if not is_xdist_controller:
            config.pluginmanager.register(cost.Cost())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(cost.Summary())
    if is_xdist_controller:
        return  # pytest-xdist: this process runs no test, and need not import TensorFlow; each worker comes here, too
    gc.disable()  # until all is collected: nothing that is imported is garbage, and to search it took 3 CPU seconds
    from runner.distribute.strategy import split_cpu

    split_cpu(2)


def pytest_collection_finish() -> None:
    """Note the environment, and leave TensorFlow's modules to no search for garbage: a million objects that live as
    long as the process.
    """
    environment_of_all.update(os.environ)
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("write_messages"):
        items[:] = [item for item in items if "messages" in getattr(item, "fixturenames", ())]

    costs = cost.read_list()
    secs_of_file: dict[str, float] = collections.defaultdict(float)
    for function, secs in costs.items():
        secs_of_file[function.partition("::")[0]] += sum(secs)

    def has_processes(item: pytest.Item) -> bool:
        return item.path.relative_to(TESTS).parts[0] in PROCESS_FOLDERS

    def place(item: pytest.Item) -> tuple[float, bool]:
        return -secs_of_file[item.nodeid.partition("::")[0]], not has_processes(item)

    # A file is one worker's. Long ones at the end, and those that wait, would leave a core without work.
    items.sort(key=place)
    cases_of: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if has_processes(item):
            item.add_marker("processes")
        if not is_named_slow(item):
            cases_of[item.nodeid.partition("[")[0]].append(item)
    for function, cases in cases_of.items():
        quick_secs, _ = costs.get(function, (0.0, 0.0))
        further = further_cases(cases, quick_secs)
        for item in cases:
            file = item.nodeid.partition("::")[0]
            fixtures = [costs.get(f"{file}::{name}", (0.0, 0.0)) for name in getattr(item, "fixturenames", ())]
            if quick_secs + sum(map(sum, fixtures)) >= cost.LONG_SECS:
                item.add_marker("long")
            if item in further:
                item.add_marker(FURTHER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave what outlives a file's tests to no later search for garbage: late in a session one took 10 s. What the last
    search complains of, such as an open socket, pytest says at the beginning of the next file.

    Nor does what the code of a file has set in the environment outlive it: with other variables than its server a task
    of `command_line` would import TensorFlow itself, for 4 s. Nor does a switch of TensorFlow 1 that a program called.
    """
    global running
    running = item
    try:
        return (yield)
    finally:
        running = None
        if nextitem is None or nextitem.path != item.path:
            os.environ.clear()
            os.environ.update(environment_of_all)
            if INSTALLED in sys.modules:
                sys.modules[INSTALLED].called.clear()
            gc.collect()
            gc.freeze()


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: keep tests that start a Python or a shell out of what runs side by side."""
    if event != "subprocess.Popen" or running is None or running.get_closest_marker("processes"):
        return
    if os.path.basename(str(arguments[0])).startswith(("python", "bash", "sh")):
        raise AssertionError(f"{running.nodeid} starts a process: mark it `processes`")


sys.addaudithook(_refuse_processes)
_start = subprocess.Popen.__init__
_noting = threading.Lock()  # threads of what is tested start processes, too


@functools.wraps(_start)
def _start_and_note(process: subprocess.Popen[Any], *arguments: Any, **settings: Any) -> None:
    _start(process, *arguments, **settings)
    with _noting:
        STARTED.add(process)


subprocess.Popen.__init__ = _start_and_note  # type: ignore[assignment, method-assign]


def _end_what_a_failure_leaves() -> Iterator[Any]:
    """End the processes that a test, or the beginning of a fixture, has started and not ended when it fails.

    They would take time of other tests, and the first that collects garbage would be told of them in its place.
    """
    with _noting:
        before = set(STARTED)
    try:
        return (yield)
    except BaseException:
        with _noting, contextlib.ExitStack() as ended:  # all of them, also if one does not end
            for process in set(STARTED) - before:
                ended.callback(end_all_of, process)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    return (yield from _end_what_a_failure_leaves())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[Any]:
    return (yield from _end_what_a_failure_leaves())


@pytest.fixture(scope="session")
def empty_mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database as the tracker makes it before a first run, which takes more than a second."""
    from runner.tracking.mlflow_tracker import MlflowTracker

    made = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowTracker(f"sqlite:///{made}", "Default")._connect()
    return made


@pytest.fixture
def mlflow_database(empty_mlflow_database: Path, tmp_path: Path) -> None:
    """Put a copy of it where runs in `tmp_path` look for theirs: for tests that are not about its making."""
    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")


@pytest.fixture(scope="session")
def _put_into(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Put]:
    from tests.support.trained import build_put

    return build_put(tmp_path_factory.mktemp)


@pytest.fixture
def put_trained(_put_into: Callable[[Path], Put], tmp_path: Path) -> Put:
    """Return what puts a finished run into `tmp_path`, a copy of one of all tests: see tests/support/trained.py."""
    return _put_into(tmp_path)


@pytest.fixture
def messages(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Messages]:
    """Compare messages with those of `messages.txt` in the package of the test: see tests/support/messages.py."""
    from tests.support.messages import Messages

    messages = Messages(request.node, tmp_path)
    yield messages
    messages.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 4 MB and yield its folder. The test is skipped where this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=4m runner-test {folder} 2>/dev/null"):
        pytest.skip("no right to mount a small disk")
    yield folder
    os.system(f"umount --lazy {folder}")  # the writer has the folder open


@pytest.fixture(scope="session")
def command_line() -> Iterator[CommandLine]:
    """Return what runs commands in this process: for tests that are not about the start of one."""
    from tests.support.command_line import CommandLine

    command = CommandLine()
    yield command
    command.starter.end()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("write_messages"):
        from tests.support.messages import write_messages

        write_messages()


def pytest_unconfigure() -> None:
    """Waits for the iterators of all tests to be deleted: `task.end` would not, and has the process end at once."""
    iterators = sys.modules.get("runner.data.iterators")
    last = time.monotonic() + 90
    while iterators is not None and not iterators.OPEN.have_ended() and time.monotonic() < last:
        time.sleep(0.1)
