"""A tracker of a user's own that writes what it gets into a file, and fails when it is told to.

It knows of shipping what docs/how_to/track_elsewhere.md says. All it has is in one folder:

    got.jsonl       what it has recorded: a JSON list for each call, [method, argument, ..]
    outages.json    when it fails, and how: a list of outages, as its call began to be counted with this file
    attempts        a line for each call, also those that fail
    run_id          the id that `start` returns; without the file it is the given one, or "run-1"
    start.pid       the process that started what ships, which an outage kills, too
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

KILLS = ("kill", "kill after")
DEATHS = ("exit", "exit after", *KILLS)
"""After these nobody knows what the tracker has recorded."""


@dataclass(frozen=True)
class Outage:
    """What the tracker does instead of recording some of its calls, counted from the start of the shipping.

    Attributes:
      does: refuse: raises an error. exit: its process, which ships, ends. hang: it never returns. kill: so does what
        started it. "after": when it has recorded the call.
      calls: the numbers of the calls, from 1.
      method: only calls of this method count; "": all. "write": it is no call, but a file that what ships opens to
        write, or renames: both are killed before that.
    """

    does: Literal["refuse", "exit", "exit after", "hang", "kill", "kill after"]
    calls: Sequence[int] = (1,)
    method: str = ""


def as_json(outages: Sequence[Outage]) -> list[dict[str, Any]]:
    """Return outages as values of JSON."""
    return [{**asdict(outage), "calls": list(outage.calls)} for outage in outages]


class Backend:
    """What has been recorded in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def plan(self, outages: Sequence[Outage]) -> None:
        """Have the tracker fail like this from now on, and count its calls from here."""
        (self.folder / "attempts").write_text("")
        (self.folder / "outages.json").write_text(json.dumps(as_json(outages)))

    def got(self, method: str = "") -> list[list[Any]]:
        """Return the recorded calls: [method, argument, ..]; with `method` the arguments of its calls."""
        file = self.folder / "got.jsonl"
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [call[1:] for call in calls if call[0] == method] if method else calls

    def points(self) -> list[tuple[str, int, float]]:
        """Return (name, step, value) of the points that were recorded, in order."""
        return points_in(self.got())

    def attempts(self, method: str) -> int:
        """Return the number of calls of a method that have begun, recorded or not."""
        return (self.folder / "attempts").read_text().split().count(method)


def points_in(calls: Sequence[list[Any]]) -> list[tuple[str, int, float]]:
    """Return (name, step, value) of the points in recorded calls, in order."""
    batches = [call[1] for call in calls if call[0] == "log_points"]
    return [(name, step, value) for batch in batches for name, value, step, _ in batch]


class Recorder:
    """The tracker: `tracking.backend={fn: tests.support.outages.Recorder, params: {folder: <folder>}}`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def start(self, run_id: str | None, name: str, params: Any, tags: Any) -> str:
        self._get("start", run_id, name, params, tags)
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "run_id").read_text()
        return run_id or "run-1"

    def log_points(self, points: Any) -> None:
        self._get("log_points", [[one.name, one.value, one.step, one.time] for one in points])

    def set_tags(self, tags: Any) -> None:
        self._get("set_tags", tags)

    def log_file(self, path: Path, folder: str) -> None:
        self._get("log_file", path.name, folder)

    def log_image(self, name: str, path: Path, step: int, time: float) -> None:
        self._get("log_image", name, path.name, step)

    def log_input(self, dataset: Any) -> None:
        self._get("log_input", dataset.context, dataset.digest)

    def end(self, status: str) -> None:
        self._get("end", status)

    def _get(self, method: str, *what: Any) -> None:
        does = self._outage(method)
        if does == "refuse":
            raise ConnectionError("server is away\nlong text")
        while does == "hang":
            signal.pause()
        if does in ("exit", "kill"):
            self._die(does)
        with open(self._folder / "got.jsonl", "a") as file:
            file.write(json.dumps([method, *what], default=str) + "\n")
        if does.endswith("after"):
            self._die(does)

    def _outage(self, method: str) -> str:
        """Count a call, and return what is to be done instead of recording it; "" for nothing."""
        with open(self._folder / "attempts", "a+") as file:
            file.write(f"{method}\n")
            file.seek(0)
            attempts = file.read().split()
        for outage in json.loads((self._folder / "outages.json").read_text()):
            if outage["method"] in ("", method):
                number = attempts.count(method) if outage["method"] else len(attempts)
                if number in outage["calls"]:
                    return str(outage["does"])
        return ""

    def _die(self, does: str) -> None:
        if does in KILLS:
            os.kill(int((self._folder / "start.pid").read_text()), signal.SIGKILL)
        os._exit(9)
