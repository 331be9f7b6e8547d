"""The events of a run on disk: JSON lines that one task appends and the supervisor reads while they grow.

There are two kinds of lines, metrics and events, each with the `time` (seconds since the epoch) at which it was
written:

    {"time": 1763647000.1, "step": 100, "metrics": {"train/loss": 0.31}}
    {"time": 1763647000.2, "event": "phase", "name": "trace", "secs": 0.91}
    {"time": 1763647000.3, "event": "result", "global_step": 100}

Numbers that JSON lacks are the strings "nan", "inf" and "-inf", which `float` reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.system.files import naming_need
from runner.tracking.plain_values import json_value

WANTS_RUN = "wants_run"
"""Event: user code has imported MLflow and needs the MLflow run."""
RUN_STARTED = "run_started"
RUN_ENDED = "run_ended"
"""Events of whoever starts a run: what the run is (name, command, params, tags, parent), and how it ended (status,
recorded, tags, files, models), which `runner.tracking.run_end` writes. They are in one journal of a folder, that of
SUPERVISOR, a script's too."""
SUPERVISOR = "supervisor"
HOST = "host"
"""Role of the journals with the metrics of a host (`system/...`)."""
OF_RESTARTS = "run/"
"""What the names of metrics begin with that say what restarts have changed; there may be several at one step."""
ARTIFACT = "artifact"
IMAGE = "image"
DATASET = "dataset"
"""Events: a file or folder to keep with the run (path in model_dir, folder), a PNG of a step, facts of an input."""


ShowPhase = Callable[[str], contextlib.AbstractContextManager[Any]]

BLOCK_BYTES = 1_000_000
"""Number of bytes of a journal that are read at once."""


class Journal:
    """Appends lines to one file. Every line is flushed, so that a reader sees it and a crash does not lose it.

    It may be called from several threads of the process that owns the file; phases only from its main thread.

    Args:
      path: the file.
      clock, timer: return seconds since the epoch, and of a clock that is never set.
      show_phase: makes a context that shows a phase, by its name, to the user.

    Attributes:
      phases: name -> seconds so far, in this process.
    """

    def __init__(
        self,
        path: str | Path,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
        show_phase: ShowPhase = contextlib.nullcontext,
    ) -> None:
        self.phases: dict[str, float] = {}
        self._show_phase = show_phase
        self._clock = clock
        self._timer = timer
        self._nested_secs = 0.0  # of the phases so far inside the current one, and of waits; they are not counted twice
        self._waited_secs = 0.0  # since the last `note_waits`
        self._lock = threading.Lock()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, and appended by the system: a line is in the file when `write` returns, and overwrites none.
        self._file = open(path, "a+b", buffering=0)
        if self._file.tell():  # its size: a file opened to append begins at its end
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")  # the previous process died while it was writing a line

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a global step: name (`train/loss`, `eval/accuracy`, `eval_<name>/accuracy`) ->
        number.
        """
        self.metrics_of_steps([(step, values)])

    def metrics_of_steps(self, points: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Write the metrics of several steps at once: a loop may log every step."""
        self._write(_lines_of_steps(self._clock(), points))

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event. Fields that JSON cannot hold are written as text."""
        self._write([_encode({"time": self._clock(), "event": kind, **fields})])

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Write how long this context took, without the phases inside it; so the seconds of all phases add up."""
        outer_secs = self._nested_secs
        self._nested_secs = 0.0
        started = self._timer()
        try:
            with self._show_phase(name):
                yield
        finally:
            secs = self._timer() - started
            self.took(name, secs - self._nested_secs)
            self._nested_secs = outer_secs + secs  # for the phase around this one, all of this one is nested

    def waited(self, secs: float) -> None:
        """Count seconds in which this process waited for others; they belong to no phase but `waiting`."""
        self._nested_secs += secs
        self._waited_secs += secs

    def note_waits(self) -> None:
        """Write the seconds that `waited` has counted since the last call as the phase `waiting`, if there are any."""
        if self._waited_secs:
            self.took("waiting", self._waited_secs)
        self._waited_secs = 0.0

    def took(self, name: str, secs: float) -> None:
        """Write the seconds of a phase that was measured elsewhere."""
        self.phases[name] = self.phases.get(name, 0.0) + secs
        self.event("phase", name=name, secs=round(secs, 4))

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: Iterable[str]) -> None:
        rest = memoryview("".join(f"{line}\n" for line in lines).encode())
        with self._lock:
            # Whole lines are written in one call, so that a reader never sees parts of two. A full disk may accept only
            # a part; writing the rest then raises the error.
            while rest:
                with naming_need(self._file.name, len(rest)):
                    rest = rest[self._file.write(rest) or 0 :]


def _lines_of_steps(now: float, points: Iterable[tuple[int, Mapping[str, float]]]) -> Iterator[str]:
    """Yield the line of each step, as `_encode` would write it.

    Successive steps mostly have the same names, which are encoded once: 0.7 us per value instead of 1.2.
    """
    names = None
    template = ""
    for step, values in points:
        numbers = tuple(map(float, values.values()))
        if tuple(values) != names:
            names = tuple(values)
            template = _template_of(now, names)
        # One test for all numbers: the sum is finite only if each number is. (A sum that overflows takes the slow way.)
        if math.isfinite(sum(numbers)):
            yield template % (step, *numbers)
        else:
            metrics = dict(zip(names, numbers, strict=True))
            yield _encode({"time": now, "step": int(step), "metrics": metrics})


def _template_of(now: float, names: Iterable[str]) -> str:
    """Return the line of a step with metrics of these names, with `%d` for the step and `%r` for each value."""
    metrics = []
    for name in names:
        key = _STRICT_ENCODER.encode(name).replace("%", "%%")
        metrics.append(f"{key}: %r")
    return f'{{"time": {_STRICT_ENCODER.encode(now)}, "step": %d, "metrics": {{{", ".join(metrics)}}}}}'


def _encode(line: Mapping[str, Any]) -> str:
    try:
        return _STRICT_ENCODER.encode(line)
    except (TypeError, ValueError):  # a number that JSON lacks, an array, or bytes
        return json.dumps(json_value(line), default=str, allow_nan=False)


_STRICT_ENCODER = json.JSONEncoder(allow_nan=False)


class NullJournal(Journal):
    """Writes nothing."""

    def __init__(self, show_phase: ShowPhase = contextlib.nullcontext) -> None:
        self.phases = {}
        self._show_phase = show_phase
        self._timer = time.perf_counter
        self._nested_secs = 0.0
        self._waited_secs = 0.0

    def metrics_of_steps(self, points: Iterable[tuple[int, Mapping[str, float]]]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def took(self, name: str, secs: float) -> None: ...

    def close(self) -> None: ...


def journal_path(model_dir: Path, role: str = "chief", index: int | str = 0) -> Path:
    """Return the path of the journal of one task, or of a host by its name."""
    return model_dir / f"events.{role}-{index}.jsonl"


def is_of_host(path: Path) -> bool:
    """Report whether a journal has the metrics of a host, which are not of a step."""
    return path.name.startswith(f"events.{HOST}-")


def journals_in(model_dir: Path) -> list[Path]:
    """Return the journals of all tasks of a run, and of its supervisors."""
    return sorted(model_dir.glob("events.*.jsonl"))


def task_of(path: Path) -> str:
    """Return the name of the task that writes a journal: chief, worker:1, ps:0, evaluator."""
    role, _, index = path.name.split(".")[1].rpartition("-")
    return role if role in ("chief", "evaluator") else f"{role}:{index}"


def has_end_of_line(path: Path, offset: int) -> bool:
    """Report whether a line of the journal ends at `offset`; one that is not there, or shorter, has none."""
    if offset <= 0:
        return offset == 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"
    return False


def make_durable(path: Path) -> None:
    """Wait until the disk has what the journal holds. The process that writes the journal does not wait for that."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def note_of_run(folder: Path, event: str, /, **facts: Any) -> None:
    """Write RUN_STARTED or RUN_ENDED for the run in `folder`."""
    with contextlib.closing(Journal(journal_path(folder, SUPERVISOR))) as journal:
        journal.event(event, **facts)


def read_journal(
    path: str | Path, offset: int = 0, max_bytes: int = -1, until: float = math.inf, containing: bytes = b"",
    left_out: Callable[[str], None] = lambda what: None,
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """Return (lines after `offset`, the offset from which to continue).

    A last line that is still being written is left for the next call. A line that a crash cut short is skipped, and so
    is a line with a value of a wrong type, which no reader could use. A missing file has no lines.

    Args:
      path: the journal.
      offset: position in bytes.
      max_bytes: read about this many bytes, up to the end of a line; negative: all.
      until: stop before the first line that was written later, in seconds since 1970.
      containing: skip lines without these bytes before decoding, which takes most of the time.
      left_out: is told of each line with a value of a wrong type: the file, the number of the line, and what is wrong.
    """
    events = []
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(max_bytes)
            if max_bytes > 0 and len(data) == max_bytes:
                data += file.readline()  # the rest of the line that max_bytes has cut
    except FileNotFoundError:
        return [], offset
    whole_lines = data[: data.rfind(b"\n") + 1]
    for line in whole_lines.split(b"\n")[:-1]:
        event = None
        if containing in line:
            try:
                event = _decode(line)
            except _WrongValue as error:
                left_out(f"{path}, line {_number_of_line(path, offset)}: {error}")
        if event is not None and event.get("time", 0.0) > until:
            break
        offset += len(line) + 1
        if event is not None:
            events.append(event)
    return events, offset


def iterate_journal(path: str | Path, offset: int = 0, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the lines written after `offset`, as `read_journal` does. Only a block of them is in memory at a time."""
    before = -1
    while before != offset:
        before = offset
        lines, offset = read_journal(path, before, BLOCK_BYTES, containing=containing)
        yield from lines


def starts_and_ends(folder: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Return the lines RUN_STARTED and RUN_ENDED of the run in `folder` after `offset`, in order."""
    lines = iterate_journal(journal_path(folder, SUPERVISOR), offset, containing=b'"event": "run_')
    return [line for line in lines if line.get("event") in (RUN_STARTED, RUN_ENDED)]


@dataclass
class Journals:
    """The lines that the tasks of a run wrote after `mark` was called, or all lines if it was not called.

    Attributes:
      sizes: name of a journal -> its size in bytes when `mark` was called.
    """

    model_dir: Path
    sizes: Mapping[str, int] = field(default_factory=dict)

    def mark(self) -> Journals:
        """Skip the existing lines from now on."""
        self.sizes = {path.name: path.stat().st_size for path in journals_in(self.model_dir)}
        return self

    @property
    def tasks(self) -> list[str]:
        """The names of the processes that have a journal."""
        return [task_of(path) for path in journals_in(self.model_dir)]

    def events_of(self, task: str = "chief") -> list[dict[str, Any]]:
        """Return the events (not metrics) of a task, by its name."""
        found = []
        for path in journals_in(self.model_dir):
            if task_of(path) == task:
                found += [line for line in self._lines(path, "event") if "event" in line]
        return found

    def events(self, event: str) -> dict[str, list[dict[str, Any]]]:
        """Return task name -> its lines of `event`; tasks without one are left out."""
        found = {}
        for path in journals_in(self.model_dir):
            lines = self._lines(path, event)
            found[task_of(path)] = [line for line in lines if line.get("event") == event]
        return {task: lines for task, lines in found.items() if lines}

    def has_any(self, events: Collection[str]) -> bool:
        """Report whether a task has written one of `events`. Each journal is read once, up to the first of them."""
        for path in journals_in(self.model_dir):
            if any(line.get("event") in events for line in self._lines(path, "event")):
                return True
        return False

    def _lines(self, path: Path, word: str) -> Iterator[dict[str, Any]]:
        return iterate_journal(path, self.sizes.get(path.name, 0), containing=f'"{word}"'.encode())


_TEXT_OR_NOTHING = (str, type(None))
_WHOLE_OR_NOTHING = (int, type(None))
_NUMBER = (int, float)
_REQUIRED_FIELDS: Mapping[str, Mapping[str, Any]] = {
    RUN_STARTED: {"time": _NUMBER, "name": str, "command": str, "params": dict, "tags": dict},
    RUN_ENDED: {"time": _NUMBER, "status": str, "recorded": str},
    ARTIFACT: {"time": _NUMBER, "path": str, "folder": str},
    IMAGE: {"time": _NUMBER, "path": str, "name": str, "step": int},
    DATASET: {"context": str, "name": str, "digest": str, "source": dict, "profile": dict},
}
"""Event -> name and type of each field without which no reader can use a line of the event."""
_OPTIONAL_FIELDS: Mapping[str, Any] = {
    "time": _NUMBER, "parent": _TEXT_OR_NOTHING, "description": _TEXT_OR_NOTHING, "files": list, "models": list,
    "generation": _WHOLE_OR_NOTHING,
}  # fmt: skip
"""Field of any event -> its type, which is checked if a line has the field."""
_TYPE_TEXTS = {
    str: "text",
    dict: "a mapping",
    list: "a list",
    int: "a whole number",
    _NUMBER: "a number",
    _TEXT_OR_NOTHING: "text or null",
    _WHOLE_OR_NOTHING: "a whole number or null",
}
_LARGEST_STEP = 2**63 - 1
_MAX_SHOWN_CHARS = 60
"""Largest number of characters of a value in a message."""


class _WrongValue(ValueError):
    """A value of a line has a wrong type."""


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds; None if it is no JSON object, such as a line that was cut short.

    Raises:
      _WrongValue: a value has a type that a reader cannot use.
    """
    event = None
    with contextlib.suppress(ValueError, RecursionError):
        event = json.loads(line)
    if not isinstance(event, dict):
        return None
    if "event" in event:
        kind = event["event"]
        _check_type("event", kind, str)
        for name, type_ in _REQUIRED_FIELDS.get(kind, {}).items():
            _check_type(name, event.get(name), type_)
        for name in _OPTIONAL_FIELDS.keys() & event.keys():
            _check_type(name, event[name], _OPTIONAL_FIELDS[name])
    elif "metrics" in event:
        _check_type("time", event.get("time"), _NUMBER)
        _check_type("step", event.get("step"), int)
        _check_type("metrics", event["metrics"], dict)
        event["metrics"] = {name: _read_number(name, value) for name, value in event["metrics"].items()}
    return event


def _check_type(name: str, value: Any, type_: Any) -> None:
    is_right = isinstance(value, type_) and not isinstance(value, bool)  # a bool is an int, too, and none is expected
    # Trackers count steps in 64 bits, and time in milliseconds.
    if isinstance(value, _NUMBER) and is_right:
        is_right = abs(value) <= _LARGEST_STEP
    if not is_right:
        raise _WrongValue(f"{name}={_shorten(value)} is not {_TYPE_TEXTS[type_]}")


def _read_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _WrongValue(f"{name}={_shorten(value)} is not a number") from None


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def _number_of_line(path: str | Path, offset: int) -> int:
    """Return the number, from 1, of the line that begins at `offset`."""
    with open(path, "rb") as file:
        return file.read(offset).count(b"\n") + 1
