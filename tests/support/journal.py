"""Journals as anybody reads them who knows only their files (docs/reference/files.md), and what tests write into them.

A journal is `events.<role>-<index>.jsonl` in the folder of a run: a JSON object a line, either metrics
`{"time", "step", "metrics": {name: number}}` or `{"time", "event", ...}`. Numbers that JSON lacks are text.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.tracking.journal import Journal


def journal_file(folder: Path, role: str = "chief", index: int = 0) -> Path:
    """Return the path of the journal of one task of the run in `folder`."""
    return folder / f"events.{role}-{index}.jsonl"


def journals(folder: Path) -> list[Path]:
    """Return the journals of all processes of a run."""
    return sorted(folder.glob("events.*.jsonl"))


def recorded(where: Path, role: str = "chief", index: int = 0, after: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a journal; none if there is no such file yet.

    What a process that was killed left of a line is skipped, also where it has not been written to its end.

    Args:
      where: the folder of a run, or the journal itself.
      role, index: the task, in the folder of a run.
      after: number of bytes to skip.
    """
    file = journal_file(where, role, index) if where.is_dir() else where
    *whole, _ = file.read_bytes()[after:].split(b"\n") if file.is_file() else (b"",)
    lines = [line for line in map(_decoded, whole) if isinstance(line, dict)]
    return [line if "event" in line else {**line, "metrics": _numbers(line["metrics"])} for line in lines]


def events_in(where: Path, kind: str, role: str = "chief", index: int = 0) -> list[dict[str, Any]]:
    """Return the lines of an event in a journal, found as `recorded` does."""
    return [line for line in recorded(where, role, index) if line.get("event") == kind]


def metrics_of_steps(where: Path, role: str = "chief", index: int = 0) -> list[tuple[int, dict[str, float]]]:
    """Return (step, name -> number) of each line with metrics of a journal, found as `recorded` does."""
    return [(line["step"], line["metrics"]) for line in recorded(where, role, index) if "event" not in line]


class Lines:
    """Appends to a journal as a task does that is not there, or was there earlier.

    Args:
      where: the folder of a run, or the journal itself.
    """

    def __init__(
        self, where: Path, role: str = "chief", index: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        path = where if where.suffix == ".jsonl" else journal_file(where, role, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._file = open(path, "a+b", buffering=0)  # as a task, it writes on where the folder is gone

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of a step."""
        self._append({"time": self._clock(), "step": step, "metrics": values})

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._append({"time": self._clock(), "event": kind, **fields})

    def cut_short(self) -> None:
        """Append what a process leaves that is killed while it writes a line; the next line does not continue it."""
        self._file.write(b'{"time": 1.0, "step": 99, "metrics": {"train/lo')

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.seek(max(self._file.seek(0, os.SEEK_END) - 1, 0))
        whole = self._file.read() in (b"", b"\n")
        text = json.dumps(_plain(line), default=str, allow_nan=False)
        self._file.write((b"" if whole else b"\n") + text.encode() + b"\n")


STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "SCHEDULED"}
"""How a start ends -> the status with which it is recorded."""


def note_start(folder: Path, **facts: Any) -> None:
    """Note a start of the run in `folder`, as whoever starts a run does."""
    known = {"command": "train", "name": "name", "params": {"a": 1}, "tags": {"b": "c"}}
    Lines(folder, "supervisor").event("run_started", **known | facts)


def note_end(folder: Path, status: str = "finished", **facts: Any) -> None:
    """Note how a start of the run in `folder` has ended."""
    known = {"status": status, "recorded": STATUS[status], "files": ["learning_curves.png"]}
    Lines(folder, "supervisor").event("run_ended", **known | facts)


def journal_of(where: Path, role: str = "chief", index: int = 0) -> Journal:
    """Return what `Estimator(journal=)` takes, for the file that `Lines` would write."""
    from runner.tracking.journal import Journal

    return Journal(where if where.suffix == ".jsonl" else journal_file(where, role, index))


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
