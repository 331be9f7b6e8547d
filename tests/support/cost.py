"""What each test costs, with the processes that it starts: `make test ARGS=--cost`.

A thread looks twenty times a second where the main thread is, and twice a second at all processes below this one.
A row for each test goes to FILE, of several calls of pytest if nobody has removed it:

    python -m tests.support.cost            show the table of all rows there
    python -m tests.support.cost --list     write LIST anew from them: after a quiet `make test-all ARGS=--cost`

LIST has the functions that are too dear for `make check`; tests/conftest.py marks them `long`, and some of their cases
slow.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.tiers import is_named_slow

ROOT = Path(__file__).parents[2]
FILE = ROOT / "build" / "cost.jsonl"
LIST = ROOT / "tests" / "costs.txt"
LONG_SECS = 0.7
"""CPU seconds of all cases of a function that are not slow, from which on it is no part of `make check`."""
STACK_SECS = 0.05
PROCESSES_SECS = 0.5
DEAREST = 20
BETWEEN = "imports, collection, and what is between tests"
"""The name of the rows of the time in which no test runs."""
MARK = "PYTEST_COST_OF"
"""A variable by which a process is known whose parents have ended before it was seen: the number of the test's."""
TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")

KINDS = (
    ("import", ("importlib/_bootstrap", "<frozen importlib")),
    ("MLflow", ("/mlflow/", "/sqlalchemy/", "/alembic/")),
    ("collecting", ("/_pytest/assertion/rewrite.py",)),
    ("tracing", ("/framework/func_graph.py", "/autograph/", "/polymorphic_function/", "/framework/ops.py")),
    ("running", ("/eager/execute.py", "/eager/context.py", "/client/session.py", "/data/ops/iterator_ops.py")),
)
"""Kinds of work of the test's own process: of the innermost frame in one of these files, so that what an operation
runs while a graph is traced is `running`."""
ROLES = (
    ("shipping", ("runner.tracking.shipping", "runner.tracking.ship")),
    ("mlflow server", ("mlflow server", "mlflow.server", "mlflow ui", "gunicorn", "uvicorn")),
    ("tasks", ("runner.task",)),
    ("python -m runner", ("-m runner", "/runner ")),
    ("fork servers", ("forkserver", "resource_tracker", "tests.support.forking")),
    ("browser", ("chrom",)),
    ("other Python", ("python",)),
)
"""Kinds of processes, by words of their command line."""


@dataclasses.dataclass
class _Process:
    """What was last seen of a process below this one."""

    parent: int
    role: str
    own_secs: float
    reaped_secs: float
    """CPU seconds of its children that have ended and for which it has waited."""


@dataclasses.dataclass
class Row:
    """What a test cost.

    Attributes:
      test: or `<file>::<fixture>`, of a fixture that several tests share.
      is_slow: its source says that only `make test-slow` runs it.
      secs: on the clock, with its fixtures.
      own: CPU seconds of the process of the test.
      children: CPU seconds of all processes below it.
      kinds: kind of work -> CPU seconds.
      starts: role -> processes that were seen first during the test.
    """

    test: str
    is_slow: bool
    secs: float
    own: float
    children: float
    kinds: dict[str, float]
    starts: dict[str, int]

    @property
    def cpu(self) -> float:
        return self.own + self.children

    @property
    def function(self) -> str:
        return self.test.partition("[")[0]


class Cost:
    """The plugin, in each process that runs tests."""

    def __init__(self) -> None:
        self._kinds: dict[str, float] = collections.defaultdict(float)
        self._starts: collections.Counter[str] = collections.Counter()
        self._below: dict[tuple[int, str], _Process] = {}
        self._others = {key for key, _ in _all_processes()}
        os.environ[MARK] = str(os.getpid())
        self._orphans_secs = 0.0
        self._looking = threading.Lock()
        self._rows: list[Row] = []
        self._test = BETWEEN
        self._is_slow = False
        self._begin = (time.monotonic(), 0.0, 0.0)
        self._main = threading.main_thread().ident
        threading.Thread(target=self._watch, daemon=True, name="cost of tests").start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._end_row()
        self._test = item.nodeid
        self._is_slow = is_named_slow(item)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            self._end_row()
            report.user_properties += [("cost", dataclasses.asdict(row)) for row in self._rows]
            self._rows.clear()
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Give what several tests share a row of its own: the first of them costs no more than the others."""
        if fixturedef.scope == "function":
            return (yield)
        before, kinds, starts = self._totals(), dict(self._kinds), self._starts.copy()
        try:
            return (yield)
        finally:
            secs, own, children = (after - begin for after, begin in zip(self._totals(), before, strict=True))
            name = f"{request.node.nodeid}::{fixturedef.argname}"
            used_kinds = {kind: total - kinds.get(kind, 0.0) for kind, total in self._kinds.items()}
            self._rows.append(Row(name, self._is_slow, secs, own, children, used_kinds, dict(self._starts - starts)))
            begin_secs, begin_own, begin_children = self._begin
            self._begin = begin_secs + secs, begin_own + own, begin_children + children
            self._kinds.clear()
            self._kinds.update(kinds)
            self._starts = starts

    def _end_row(self) -> None:
        now = self._totals()
        secs, own, children = (after - before for after, before in zip(now, self._begin, strict=True))
        row = Row(self._test, self._is_slow, secs, own, children, dict(self._kinds), dict(self._starts))
        self._rows.append(row)
        self._begin = now
        self._test = BETWEEN
        self._kinds.clear()
        self._starts.clear()

    def _totals(self) -> tuple[float, float, float]:
        """Return the clock, CPU seconds of this process, and CPU seconds of all below it, the ended ones too."""
        self._look_below()
        with self._looking:
            living = sum(process.own_secs + process.reaped_secs for process in self._below.values())
            reaped = os.times().children_user + os.times().children_system
            return time.monotonic(), time.process_time(), living + reaped + self._orphans_secs

    def _watch(self) -> None:
        seen_secs = time.process_time()
        next_look = 0.0
        while True:
            time.sleep(STACK_SECS)
            secs = time.process_time() - seen_secs
            seen_secs += secs
            self._kinds[_kind_of(sys._current_frames().get(self._main or 0))] += secs
            if time.monotonic() > next_look:
                next_look = time.monotonic() + PROCESSES_SECS
                self._look_below()

    def _look_below(self) -> None:
        with self._looking:
            living = dict(_all_processes())
            parents = {number: parent for (number, _), (parent, _, _) in living.items()}
            now: dict[tuple[int, str], _Process] = {}
            for key, (parent, own_secs, reaped_secs) in living.items():
                known = self._below.get(key)
                if key in self._others or (known is None and not _is_below(key[0], parents, self._below)):
                    self._others.add(key)
                    continue
                role = known.role if known else _role_of(key[0])
                if known is None:
                    self._starts[role] += 1
                self._kinds[role] += own_secs - (known.own_secs if known else 0.0)
                now[key] = _Process(parent, role, own_secs, reaped_secs)
            for key, gone in self._below.items():
                # One whose parent is outside was waited for by nobody here: what it had used is in no other count.
                is_orphan = gone.parent != os.getpid() and gone.parent not in {number for number, _ in self._below}
                if key not in now and is_orphan:
                    self._orphans_secs += gone.own_secs + gone.reaped_secs
            self._below = now


def _all_processes() -> Iterator[tuple[tuple[int, str], tuple[int, float, float]]]:
    """Yield (number, when it was started), (parent, its own CPU seconds, those of children it has waited for)."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # The name of the program is in parentheses and may have any character in it.
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            user, system, reaped_user, reaped_system = (int(field) / TICKS_PER_SEC for field in fields[11:15])
            yield (int(name), fields[19]), (int(fields[1]), user + system, reaped_user + reaped_system)


def _is_below(number: int, parents: dict[int, int], known: Iterable[tuple[int, str]]) -> bool:
    """Return whether a process descends from this one, also where those between have ended."""
    ours = {os.getpid(), *(number for number, _ in known)}
    ancestor = parents[number]
    while ancestor in parents and ancestor not in ours:
        ancestor = parents[ancestor]
    if ancestor in ours:
        return True
    try:
        variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARK}={os.getpid()}".encode() in variables


def _role_of(number: int) -> str:
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = ""
    for role, signs in ROLES:
        if any(sign in words for sign in signs):
            return role
    return "other programs"


def _kind_of(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        for kind, places in KINDS:
            if any(place in file for place in places):
                return kind
        frame = frame.f_back
    return "other Python code of the test"


class Summary:
    """The plugin in the process that prints: keeps the rows, and shows the table at the end."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cost" and report.when == "teardown":
                assert isinstance(value, dict)
                self._rows.append(Row(**value))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        FILE.parent.mkdir(exist_ok=True)
        with FILE.open("a") as file:
            file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in self._rows)
        terminalreporter.section("cost")
        for line in table(self._rows):
            terminalreporter.write_line(line)


def _largest_first(secs: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(secs.items(), key=lambda pair: -pair[1])


def read_rows() -> list[Row]:
    return [Row(**json.loads(line)) for line in FILE.read_text().splitlines()]


def table(rows: list[Row]) -> Iterator[str]:
    """Yield lines: CPU seconds of all by kind, by file, and of the dearest tests."""
    kinds: dict[str, float] = collections.defaultdict(float)
    files: dict[str, float] = collections.defaultdict(float)
    starts: collections.Counter[str] = collections.Counter()
    for row in rows:
        for kind, secs in row.kinds.items():
            kinds[kind] += secs
        starts.update(row.starts)
        files[row.test.partition("::")[0]] += row.cpu
    total_secs = sum(row.cpu for row in rows)
    tests = [row for row in rows if row.test != BETWEEN]
    clock_secs = sum(row.secs for row in rows)
    yield f"{len(tests)} tests, {total_secs:,.0f} CPU seconds; {clock_secs:,.0f} on the clock of all workers"
    for kind, secs in _largest_first(kinds):
        yield f"{secs:8.1f}  {kind}" + (f" ({starts[kind]} processes)" if starts[kind] else "")
    yield f"The {DEAREST} dearest files"
    for file, secs in _largest_first(files)[:DEAREST]:
        yield f"{secs:8.1f}  {file}"
    yield f"The {DEAREST} dearest tests: CPU seconds, and on the clock"
    for row in sorted(tests, key=lambda row: -row.cpu)[:DEAREST]:
        yield f"{row.cpu:8.1f} {row.secs:7.1f}  {row.test}"


def write_list(rows: list[Row]) -> None:
    """Write LIST: a line for each dear function, the dearest first."""
    costs: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        of_a_file = row.test != BETWEEN and not row.test.startswith("::")  # a fixture of the session is no file's
        if of_a_file:
            costs[row.function][row.is_slow] += row.cpu
    dear = {function: secs for function, secs in costs.items() if max(secs) >= LONG_SECS}
    lines = [f"{quick:6.1f} {slow:6.1f}  {function}\n" for function, (quick, slow) in dear.items()]
    lines.sort(key=lambda line: (-sum(map(float, line.split()[:2])), line))
    LIST.write_text(HEAD + "".join(lines))


HEAD = """\
# CPU seconds of each dear test: of its cases that are not marked slow, and of those that are.
# Written by `python -m tests.support.cost --list`.
"""


def read_list() -> dict[str, tuple[float, float]]:
    """Return function -> CPU seconds of its cases that are not marked slow in its source, and of those that are."""
    costs = {}
    for line in LIST.read_text().splitlines():
        if not line.startswith("#"):
            quick, slow, function = line.split()
            costs[function] = float(quick), float(slow)
    return costs


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        write_list(read_rows())
    else:
        print("\n".join(table(read_rows())))
