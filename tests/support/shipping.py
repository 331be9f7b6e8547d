"""Ships journals to a user's tracker in a process that may be killed: the one place that knows how the runner ships.

A process that has imported the code, `python -m tests.support.shipping`, forks what ships, and that forks the process
of the tracker: 30 ms where two starts of Python take a second.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.support.outages import Backend, Outage, as_json

ROOT = Path(__file__).parents[2]
NAME = "tests.support.outages.Recorder"
LATER = "python -m runner model_dir=x"

WARNINGS: Mapping[str, str] = {
    "away": rf"tracking: {NAME}: \w+ raised ConnectionError: server is away long text "
    r"\((training continues; )?the journals in {run} have everything",
    "died": rf"tracking: {NAME}: its process exited with 9 in \w+ "
    r"\((training continues; )?the journals in {run} have everything",
    "silent": rf"tracking: {NAME}: no answer for [\d.]+ s; the run ends without waiting for it. Nothing is lost: the "
    rf"journals in {{run}} have everything. Ship later with: {LATER}$",
}
"""Kind -> how such a warning begins, as a regular expression."""


@dataclass(frozen=True)
class Settings:
    """How a start is shipped.

    Attributes:
      is_reader: the command reads a run.
      is_tracked: False: the start has no tracker.
      patience_secs: seconds to wait for a task's first step before anything is recorded.
      answer_secs: seconds that the end of the run waits for a tracker that does not answer.
      status: how the run ends.
      files: names of files of the run that are recorded at its end.
      draws: learning curves are drawn.
    """

    is_reader: bool = False
    is_tracked: bool = True
    patience_secs: float = 0.0
    answer_secs: float = 20.0
    status: str = "FINISHED"
    files: Sequence[str] = ()
    draws: bool = False


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
        """Return the kind of each warning; of another one its text."""
        run = re.escape(str(folder / "run"))
        begins = {kind: re.compile(text.replace("{run}", run)) for kind, text in WARNINGS.items()}
        return [
            next((kind for kind, begin in begins.items() if begin.match(warning)), warning) for warning in self.warnings
        ]


@contextlib.contextmanager
def shipping(folder: Path, outages: Sequence[Outage] = (), **settings: Any) -> Iterator[Callable[[], Said]]:
    """Ship the journals of the run in `folder`/run to a `Recorder` in `folder`/backend while this context lasts.

    Yields: what ends the run, waits for shipping, and returns how that ended. The context calls it if nobody did.
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
    """Ship what the journals of the run in `folder`/run have, to the end of a start. Args: settings: `Settings`."""
    with shipping(folder, outages, **settings) as end:
        return end()


class _Server:
    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.shipping"], env=env, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
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
    """Answer each request with what became of it. A request forks what ships, the next one ends the run."""
    from runner.tracking.backends import tracker_process  # noqa: F401
    from runner.tracking.curves import import_matplotlib

    import_matplotlib()
    while request := sys.stdin.readline():
        ending, end = os.pipe()
        said, saying = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            os.close(said)
            _become_shipping(json.loads(request), ending, saying)
        os.close(ending)
        os.close(saying)
        with os.fdopen(said) as file:
            file.readline()  # nothing, if it is killed before it has begun
            print("{}", flush=True)
            sys.stdin.readline()
            os.close(end)
            warnings = [json.loads(line) for line in file]
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"code": code, "warnings": warnings}), flush=True)


def _become_shipping(request: dict[str, Any], ending: int, saying: int) -> NoReturn:
    """Ship, say when that has begun and the warnings, and exit.

    Args:
      ending: a pipe that ends with the run.
      saying: the pipe that is told.
    """
    code = 1
    try:
        os.setsid()
        os.set_inheritable(saying, False)
        folder, outages = Path(request.pop("folder")), request.pop("outages")
        (folder / "backend" / "shipping.pid").write_text(str(os.getpid()))
        _die_at_writes([number for one in outages if one["method"] == "write" for number in one["calls"]])

        def say(text: str) -> None:
            os.write(saying, json.dumps(text).encode() + b"\n")

        def wait_for_end() -> None:
            say("begun")
            os.read(ending, 1)

        _ship(folder, Settings(**request), wait_for_end, say)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def _die_at_writes(numbers: Sequence[int]) -> None:
    """Kill this process before it opens the n-th file to write, or renames it."""
    writes, pid = 0, os.getpid()

    def count(event: str, arguments: Any) -> None:
        nonlocal writes
        if event not in ("os.rename", "open") or os.getpid() != pid:
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        writes += 1
        if writes in numbers:
            os.kill(pid, signal.SIGKILL)

    if numbers:
        sys.addaudithook(count)


# --- what follows is how the runner ships -----------------------------------------------------------------------------


def _ship(folder: Path, settings: Settings, wait_for_end: Callable[[], None], warn: Callable[[str], None]) -> None:
    """Ship the journals of a start until it has ended, with short times.

    Args:
      wait_for_end: called once shipping has begun.
      warn: is told what shipping says.
    """
    from runner.config.schema import TrackingConfig
    from runner.tracking import shipper
    from runner.tracking.backends import user_tracker
    from runner.tracking.backends.build import build_trackers
    from runner.tracking.run_record import RunRecord
    from runner.tracking.tracker import RunDescription

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda secs: time.sleep(min(secs, 0.02)))
    vars(shipper).update(PERIOD_SECS=0.02, GLANCE_SECS=0.02, CLOSING_TIMEOUT_SECS=settings.answer_secs, time=clock)
    if not settings.draws:  # which takes longer than all the rest
        vars(shipper).update(draw_curves=lambda model_dir: None)
    vars(user_tracker).update(subprocess=SimpleNamespace(Popen=_Forked, DEVNULL=subprocess.DEVNULL))
    run, backend = folder / "run", {"fn": NAME, "params": {"folder": str(folder / "backend")}}
    trackers = build_trackers(TrackingConfig(backend), run, "name", os.environ, folder) if settings.is_tracked else {}
    shipped = shipper.Shippers(
        run, trackers, RunRecord.read(run), RunDescription("name", {"a": 1}, {"b": "c"}), warn,
        is_reader=settings.is_reader, patience_secs=settings.patience_secs, ship_later=LATER,
    )  # fmt: skip
    shipped.start()
    wait_for_end()
    shipped.drain()
    shipped.close(settings.status, {"status": settings.status.lower()}, [run / name for name in settings.files])


class _Forked:
    """The process of the tracker, as `subprocess.Popen` would start it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> None:
        from runner.tracking.backends import tracker_process

        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                kept = {0, 1, 2, *pass_fds}
                for descriptor in map(int, os.listdir("/proc/self/fd")):
                    if descriptor not in kept:
                        with contextlib.suppress(OSError):  # that of the list itself
                            os.close(descriptor)
                os.environ.update(env)
                tracker_process.main()
            finally:
                os._exit(0)

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, 0 if until is None else os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired("tracker", timeout or 0.0)
            else:
                time.sleep(0.002)
        return self._code


if __name__ == "__main__":
    main()
