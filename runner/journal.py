"""What happened in a run, on disk: JSON lines that one task appends and the supervisor reads while they grow.

Two kinds of lines, metrics and events, each with the `time` (seconds since the epoch) at which it was written:

    {"time": 1763647000.1, "step": 100, "metrics": {"train/loss": 0.31}}
    {"time": 1763647000.2, "event": "phase", "name": "trace", "secs": 0.91}
    {"time": 1763647000.3, "event": "result", "global_step": 100}

Numbers that JSON has no word for are the strings "nan", "inf" and "-inf"; `float` reads them.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Appends to one file; every line is flushed, so a reader or a crash loses nothing that was said.

    Safe to call from several threads of the one process that owns the file; phases are of its main thread.

    Attributes:
      phases: name -> seconds so far, of this process.
    """

    def __init__(
        self,
        path: str | Path,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.phases: dict[str, float] = {}
        self._clock, self._timer = clock, timer
        self._inner_secs = 0.0
        self._lock = threading.Lock()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)
        if self._file.tell() and not _ends_with_newline(Path(path)):
            self._file.write(b"\n")  # the process before us died inside a line

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Notes the metrics of a global step, by name (`train/loss`, `eval/accuracy`, `eval_<name>/accuracy`)."""
        self._append({"step": int(step), "metrics": {name: float(value) for name, value in values.items()}})

    def event(self, kind: str, **fields: Any) -> None:
        """Notes that something happened; fields are anything that JSON can hold, everything else as text."""
        self._append({"event": kind, **fields})

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Notes how long its body took, less the phases inside it: the seconds of all phases add up."""
        outer, self._inner_secs = self._inner_secs, 0.0
        started = self._timer()
        try:
            yield
        finally:
            secs = self._timer() - started
            self.took(name, secs - self._inner_secs)
            self._inner_secs = outer + secs

    def took(self, name: str, secs: float) -> None:
        """Notes the seconds of a phase that was measured elsewhere."""
        self.phases[name] = self.phases.get(name, 0.0) + secs
        self.event("phase", name=name, secs=round(secs, 4))

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        text = json.dumps(_jsonable({"time": self._clock(), **line}), default=str, allow_nan=False)
        with self._lock:
            self._file.write(text.encode() + b"\n")  # one write a line: a reader never sees two halves mixed


class NullJournal:
    """Notes nothing."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def took(self, name: str, secs: float) -> None: ...

    def close(self) -> None: ...


def journal_path(model_dir: Path, role: str = "chief", index: int = 0) -> Path:
    """Where the journal of one task of a run lives."""
    return model_dir / f"events.{role}-{index}.jsonl"


def read_journal(path: str | Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines written after `offset`, and the offset to go on from.

    A last line that is still being written is left for the next call; one that a crash cut short is passed over.
    A file that is not there (yet) has no lines.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    events = [event for event in map(_decoded, whole.splitlines()) if event is not None]
    return events, offset + len(whole)


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict):
        return None
    if "metrics" in event and "event" not in event:
        event["metrics"] = {name: float(value) for name, value in event["metrics"].items()}
    return event


def _jsonable(value: Any) -> Any:
    """`value` with numpy scalars as Python's and non-finite numbers as their names."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(child) for child in value]
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
