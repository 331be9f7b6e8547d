"""Ships journals to a user's tracker in processes that may be killed: the one place that knows how the runner ships.

A process that has imported the code, `python -m tests.support.shipping`, forks what starts a run, and that forks the
process that ships: 30 ms where two starts of Python take a second.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.support.journal import note_end, note_start
from tests.support.outages import Backend, Outage, as_json
from tests.support.processes import STARTED

ROOT = Path(__file__).parents[2]
NAME = "tests.support.outages.Recorder"

WARNINGS: Mapping[str, str] = {
    "left": rf"tracking: {NAME}: (.* \()?\S*run is not recorded completely. Nothing is lost: the journals have "
    rf"everything; ship later with: python -m runner.tracking.ship --tracker {NAME} \S*run\)?$",
    "away": rf"tracking: {NAME}: \w+ raised ConnectionError: server is away long text "
    r"\(training continues; the journals in {run} have everything\)$",
    "died": rf"tracking: {NAME}: its process exited with 9 \(training continues; the journals have everything\)$",
    "silent": rf"tracking: {NAME}: no answer for 20 s; the run ends without waiting for it.$",
}
"""Kind -> such a warning, as a regular expression."""


@dataclass(frozen=True)
class Settings:
    """How a start is shipped.

    Attributes:
      is_reader: the command reads a run.
      is_tracked: False: the start has no tracker.
      is_killed: what starts the run is killed in place of ending it; what ships is not.
      patience_secs: seconds to wait for a task's first step before anything is recorded.
      period_secs: seconds between two looks into the journals.
      answer_secs: seconds that the end of the run waits for a tracker that does not answer, in place of 20.
      status: how the run ends.
      files: names of files of the run that are recorded at its end.
    """

    is_reader: bool = False
    is_tracked: bool = True
    is_killed: bool = False
    patience_secs: float = 0.0
    period_secs: float = 0.02
    answer_secs: float = 20.0
    status: str = "finished"
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Said:
    """How shipping ended.

    Attributes:
      code: 0, or the negative signal that ended it.
      warnings: what it said.
      secs: how long it took from the end of the run.
    """

    code: int
    warnings: Sequence[str] = ()
    secs: float = field(default=0.0, compare=False)

    def kinds(self, folder: Path) -> list[str]:
        """Return the kind of each warning; of another one its text. Lines of a user's code belong to the one before."""
        run = re.escape(str(folder / "run"))
        kinds = {kind: re.compile(text.replace("{run}", run)) for kind, text in WARNINGS.items()}
        lines = [line for text in self.warnings for line in text.split("\n") if not line.startswith("  ")]
        return [next((kind for kind, text in kinds.items() if text.match(line)), line) for line in lines]


@contextlib.contextmanager
def shipping(folder: Path, outages: Sequence[Outage] = (), **settings: Any) -> Iterator[Callable[[], Said]]:
    """Ship the journals of the run in `folder`/run to a `Recorder` in `folder`/backend while this context lasts.

    Yields: what ends the run, waits until nothing ships any more, and returns how that ended. The context calls it if
      nobody did.
    """
    (folder / "run").mkdir(exist_ok=True)
    Backend(folder / "backend").plan(outages)
    server = _server()
    server.ask({"folder": str(folder), "outages": as_json(outages), **asdict(Settings(**settings))})
    ended: list[Said] = []

    def end() -> Said:
        began = time.monotonic()
        answer = server.ask("end")
        ended.append(Said(answer["code"], tuple(answer["warnings"]), time.monotonic() - began))
        return ended[0]

    try:
        yield end
    finally:
        if not ended:
            end()


def ship(folder: Path, outages: Sequence[Outage] = (), **settings: Any) -> Said:
    """Ship what the journals of the run in `folder`/run have, to the end of a start: once before it, and then at it.

    Args: settings: `Settings`.
    """
    with shipping(folder, outages, period_secs=60.0, **settings) as end:
        return end()


class _Server:
    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.shipping"], env=env, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        STARTED.discard(self._process)
        atexit.register(self.close)

    def ask(self, request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


_server = functools.cache(_Server)


# --- in the process that forks ----------------------------------------------------------------------------------------


def main() -> None:
    """Answer each request with what became of it. A request forks what starts a run, the next one ends that."""
    from runner.tracking import ship  # noqa: F401
    from runner.tracking.curves import import_matplotlib

    import_matplotlib()
    while request := sys.stdin.readline():
        ending, end = os.pipe()
        said, saying = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            os.close(said)
            _become_start(json.loads(request), ending, saying)
        os.close(ending)
        os.close(saying)
        with os.fdopen(said) as file:
            lines = map(json.loads, file)
            warnings = list(itertools.takewhile(lambda line: line is not None, lines))  # until it has begun
            print("{}", flush=True)
            sys.stdin.readline()
            os.close(end)
            warnings += lines  # until what ships has ended, too, which has the pipe open
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"code": code, "warnings": warnings}), flush=True)


@dataclass(frozen=True)
class _Start:
    """One start: its folder, and how it is shipped.

    Attributes:
      writes: what ships is killed at these, as of `_die_at_writes`.
      pid: id of the process that started it.
    """

    folder: Path
    settings: Settings
    writes: Sequence[int]
    pid: int


def _become_start(request: dict[str, Any], ending: int, saying: int) -> NoReturn:
    """Ship, say when that has begun and the warnings, and exit.

    Args:
      ending: a pipe that ends with the run.
      saying: the pipe that is told.
    """
    code = 1
    try:
        os.setsid()
        os.set_inheritable(saying, True)
        folder, outages = Path(request.pop("folder")), request.pop("outages")
        (folder / "backend" / "start.pid").write_text(str(os.getpid()))
        writes = [number for one in outages if one["method"] == "write" for number in one["calls"]]

        def say(text: str | None) -> None:
            os.write(saying, json.dumps(text).encode() + b"\n")

        def wait_for_end() -> None:
            say(None)
            os.read(ending, 1)

        _ship(_Start(folder, Settings(**request), writes, os.getpid()), wait_for_end, say)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def _die_at_writes(numbers: Sequence[int], start: int) -> None:
    """Kill this process and that which started it, before this one opens the n-th file to write, or renames it."""
    writes = 0

    def count(event: str, arguments: Any) -> None:
        nonlocal writes
        if event not in ("os.rename", "open"):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        writes += 1
        if writes in numbers:
            os.kill(start, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    if numbers:
        sys.addaudithook(count)


# --- what follows is how the runner ships -----------------------------------------------------------------------------


def _ship(start: _Start, wait_for_end: Callable[[], None], warn: Callable[[str], None]) -> None:
    """Ship the journals of a start until it has ended.

    Args:
      wait_for_end: called once all that the journals have was shipped, or has failed.
      warn: is told what shipping says.
    """
    from runner.config.schema import TrackingConfig
    from runner.tracking import shipping
    from runner.tracking.run_lock import alone_in

    run, settings = start.folder / "run", start.settings
    backend: Any = {"fn": NAME, "params": {"folder": str(start.folder / "backend")}} if settings.is_tracked else "none"
    forked: list[_Forked] = []

    def start_process(argv: Sequence[str], **_: Any) -> _Forked:
        forked.append(_Forked(argv[argv.index("--to") :], start))
        return forked[-1]

    vars(shipping).update(say=warn, GLANCE_SECS=0.01)
    vars(shipping).update(subprocess=SimpleNamespace(**{**vars(subprocess), "Popen": start_process}))
    following = shipping.Shipping(os.environ)
    with alone_in(run):
        note_start(run, command="evaluate" if settings.is_reader else "train")
        shipping.write_settings(run, TrackingConfig(backend), os.environ)
        following.ship(run)
        if forked and settings.patience_secs == 0:
            forked[0].wait_for_first_look()
        wait_for_end()
        if settings.is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        note_end(run, settings.status, files=settings.files)
    following.close()


class _Forked:
    """The process that ships, as `subprocess.Popen` would start it, with short times."""

    def __init__(self, argv: Sequence[str], start: _Start) -> None:
        told, telling = os.pipe()
        said, saying = os.pipe()
        self._looked, looking = os.pipe()
        self._code: int | None = None
        self._answer_secs = start.settings.answer_secs
        self.pid = os.fork()
        if self.pid == 0:
            _become_shipping(argv, start, told, saying, looking)
        for descriptor in (told, saying, looking):
            os.close(descriptor)
        self.stdin, self.stdout = os.fdopen(telling, "w"), os.fdopen(said)

    def wait_for_first_look(self) -> None:
        """Wait until all that the journals have was shipped or has failed, or until the process hangs or has ended."""
        select.select([self._looked], [], [], self._answer_secs)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_shipping(argv: Sequence[str], start: _Start, told: int, saying: int, looking: int) -> NoReturn:
    """Ship as `python -m runner.tracking.ship` does, and exit.

    Args:
      told, saying: pipes that become its standard input and output.
      looking: the pipe that is told when it has looked into the journals of a run.
    """
    from runner.tracking import ship, shipping

    code, settings = 1, start.settings
    try:
        os.setsid()
        os.dup2(told, 0)
        os.dup2(saying, 1)
        os.dup2(saying, 2)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the list itself
                if descriptor > 2 and descriptor != looking and not os.get_inheritable(descriptor):
                    os.close(descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        looks = 0

        class Shipper(ship.RunShipper):
            def ship(self) -> bool:
                nonlocal looks
                looks += 1
                return super().ship()

        def sleep(secs: float) -> None:
            nonlocal looking
            if looks and looking:
                os.close(looking)
                looking = 0
            time.sleep(min(secs, 0.02))

        def set_timer(which: int, secs: float) -> Any:
            return signal.setitimer(which, secs * settings.answer_secs / shipping.ANSWER_SECS)

        vars(ship).update(PERIOD_SECS=settings.period_secs, PATIENCE_SECS=settings.patience_secs, RunShipper=Shipper)
        vars(ship).update(time=SimpleNamespace(**{**vars(time), "sleep": sleep}))
        vars(ship).update(signal=SimpleNamespace(**{**vars(signal), "setitimer": set_timer}))
        _die_at_writes(start.writes, start.pid)
        code = ship.main(argv)
    finally:
        if code == 1:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


if __name__ == "__main__":
    main()
