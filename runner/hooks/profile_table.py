"""The table of operations in a profile (`run.profile_format=text`): how often each ran, and for how long."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from runner.system.console import format_table
from runner.tf_private.summaries import profile_type

FILE = "operations.txt"
_HEADERS = ("self ms", "self %", "total ms", "count", "device", "type", "operation")
_SHOWN, _WIDTH, _LONGEST_TYPE = 10, 80, 24
_OPERATION = re.compile(r"(?P<name>[A-Za-z0-9.][\w./>-]*):(?P<type>[A-Z_]\w*)")
_DATASET = re.compile(r"Iterator::([\w\[\]]+::)*(?P<type>\w+)")


class Executed(NamedTuple):
    """One execution of an operation.

    Attributes:
      thread: the thread of the execution, beginning with the device: `/host:CPU`, `/device:GPU:0`. Two executions in
        one thread are nested or follow each other.
      type, name: `MatMul`, and the operation's name in the graph. For tf.data, `Iterator::Map` and an empty name.
      began, secs: start, in seconds since the recording of the thread began, and duration in seconds.
    """

    thread: tuple[str, str]
    type: str
    name: str
    began: float
    secs: float


@dataclasses.dataclass
class Row:
    """The row of one operation on one device.

    Attributes:
      self_secs: seconds of the operation, without those of operations that ran inside it in the same thread.
    """

    device: str
    type: str
    name: str
    count: int = 0
    secs: float = 0.0
    self_secs: float = 0.0


def write_table(profile: Path) -> tuple[Path, str]:
    """Write a table of the operations in a profile, in a file beside the profile.

    Args:
      profile: the file that TensorFlow's profiler wrote.

    Returns:
      (path of the table, its first rows as text).

    Raises:
      ImportError, OSError, ValueError: no table can be made; the message says why.
    """
    rows = rows_of(read_executed(profile))
    path = profile.parent / FILE
    path.write_text(_table("operations by self time", rows) + "\n")
    title = f"operations by self time, {min(_SHOWN, len(rows))} of {len(rows)}"
    return path, _table(title, rows, _SHOWN)


def read_executed(path: Path) -> Iterator[Executed]:
    """Yield the executions of operations in the profile `path`, in no particular order.

    Raises:
      ImportError: TensorFlow no longer has the profile's format.
      ValueError: the file is not a profile.
    """
    try:
        space = profile_type().FromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path} is not a profile: {error}") from error
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                found = _operation_of(plane, event)
                if found is not None:
                    began, secs = event.offset_ps / 1e12, event.duration_ps / 1e12
                    yield Executed((plane.name, f"{line.id} {line.name}"), *found, began, secs)


def rows_of(executed: Iterable[Executed]) -> list[Row]:
    """Return the operations, sorted by self time, largest first."""
    threads: dict[tuple[str, str], list[Executed]] = collections.defaultdict(list)
    for one in executed:
        threads[one.thread].append(one)
    rows: dict[tuple[str, str, str], Row] = {}
    for (device, _), events in threads.items():
        around: list[tuple[float, Row]] = []  # (end time, row) of each operation that is still running
        for one in sorted(events, key=lambda one: (one.began, -one.secs)):
            key = (device.rpartition("/")[2].removeprefix("host:").removeprefix("device:"), one.type, one.name)
            row = rows.setdefault(key, Row(*key))
            while around and around[-1][0] <= one.began:
                around.pop()
            if around:
                around[-1][1].self_secs -= one.secs
            # If an operation runs inside itself (nested functions), the outer time includes the inner one.
            row.secs += 0.0 if any(outer is row for _, outer in around) else one.secs
            row.count, row.self_secs = row.count + 1, row.self_secs + one.secs
            around.append((one.began + one.secs, row))
    return sorted(rows.values(), key=lambda row: (-row.self_secs, row.type, row.name))


def _table(title: str, rows: Sequence[Row], shown: int | None = None) -> str:
    """Return the table as text.

    Args:
      title: the heading.
      rows: all rows.
      shown: number of rows, in a width that fits a terminal; None: all rows, in full width.
    """
    whole = sum(row.self_secs for row in rows) or 1.0
    cells = [
        [
            f"{1e3 * row.self_secs:.3f}", f"{100 * row.self_secs / whole:.1f}", f"{1e3 * row.secs:.3f}",
            f"{row.count:,}", row.device, row.type, row.name,
        ]
        for row in rows[:shown]
    ]  # fmt: skip
    headers = list(_HEADERS)
    if shown is not None:
        if len({row.device for row in rows}) == 1:  # then a column for the device says nothing
            headers, cells = [*headers[:4], *headers[5:]], [row[:4] + row[5:] for row in cells]
        cells = [[*row, type if len(type) <= _LONGEST_TYPE else f"{type[: _LONGEST_TYPE - 3]}...", name]
                 for *row, type, name in cells]  # fmt: skip
        columns = list(zip(headers, *cells, strict=True))[:-1]
        room = _WIDTH - sum(max(map(len, column)) + 2 for column in columns)
        cells = [[*row, name if len(name) <= room else f"...{name[-max(room - 3, 5) :]}"] for *row, name in cells]
    return format_table(title, headers, cells)


def _operation_of(plane: Any, event: Any) -> tuple[str, str] | None:
    """Return (type, name) of the operation that a profile's event records; None: the event records no operation.

    The event of a GPU kernel names its operation in the statistic tf_op.
    """
    texts = [plane.event_metadata[event.metadata_id].name]
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "tf_op":
            texts.insert(0, stat.str_value or plane.stat_metadata[stat.ref_value].name)
    for text in texts:
        plain = text.partition("#")[0]  # shapes and other details follow the #
        operation, dataset = _OPERATION.fullmatch(plain), _DATASET.fullmatch(plain)
        if operation:
            return operation["type"], operation["name"]
        if dataset:
            return f"Iterator::{dataset['type']}", ""
    return None
