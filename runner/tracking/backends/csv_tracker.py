"""The record of a run as CSV files in `model_dir/tracking`, each read by one line of pandas.

    pd.read_csv("outputs/mine/tracking/metrics.csv", index_col="step")

A row is a global step, a column a metric; values not measured at a step are empty. New steps are appended. A value for
an existing step (an evaluation after training took the step) is added to its row: the file is replaced, never half
written.
"""

from __future__ import annotations

import csv
import io
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.system.console import relative
from runner.system.files import naming_need, remove_half_written, replacing, write_atomically
from runner.tracking.tracker import Point, Tracker

FOLDER = "tracking"
METRICS_FILE = "metrics.csv"
PARAMS_FILE = "params.csv"
TAGS_FILE = "tags.csv"

_LAST_BYTES = 1 << 20
"""Bytes at the end of a file in which its last row is searched; enough for over 10,000 columns."""


class CsvTracker(Tracker):
    """Records in `model_dir/tracking`. Files and models of the run are in model_dir anyway.

    If the files of an earlier start are missing, they are written again from the journals.
    """

    def __init__(self, model_dir: Path) -> None:
        self._folder = model_dir / FOLDER
        self._tags: dict[str, str] = {}
        self._columns: list[str] = []
        self._last_step = -1

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        self._folder.mkdir(exist_ok=True)  # not its parents: a model_dir that was deleted or moved is not made again
        remove_half_written(self._folder)
        if run_id is None or not self.join(run_id):
            run_id = secrets.token_hex(8)
            self._columns = []
            self._last_step = -1
            (self._folder / TAGS_FILE).unlink(missing_ok=True)
            self._write_table(METRICS_FILE, [["step"]])
        self._write_table(PARAMS_FILE, [["name", "value"], *params.items()])
        self.set_tags(tags)
        return run_id

    def join(self, run_id: str) -> bool:
        path = self._folder / METRICS_FILE
        if not path.exists():
            return False
        self._last_step = _remove_cut_line(path)
        with open(path, newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file), ["step"])[1:]
        if (self._folder / TAGS_FILE).exists():
            with open(self._folder / TAGS_FILE, newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))
            self._tags = dict(row[:2] for row in rows[1:])
        return True

    def log_points(self, points: Sequence[Point]) -> None:
        rows: dict[int, dict[str, float]] = {}  # step -> column -> value
        for point in points:
            heading = " ".join(point.name.split())  # in one line
            rows.setdefault(point.step, {})[heading] = point.value
        known = set(self._columns)
        new_headings: dict[str, None] = {}  # in order, each once
        for row in rows.values():
            new_headings |= dict.fromkeys(heading for heading in row if heading not in known)
        if new_headings or min(rows) <= self._last_step:  # else the rows can be appended
            self._rewrite_metrics(rows, [*self._columns, *new_headings])
        else:
            data = _csv_text(_row(step, rows[step], self._columns) for step in sorted(rows)).encode()
            path = self._folder / METRICS_FILE
            with naming_need(path, len(data)), open(path, "ab") as file:
                file.write(data)
        self._last_step = max(self._last_step, *rows)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._tags |= tags
        self._write_table(TAGS_FILE, [["name", "value"], *self._tags.items()])

    def address(self) -> str:
        return relative(self._folder / METRICS_FILE)

    def _rewrite_metrics(self, rows: Mapping[int, Mapping[str, float]], columns: list[str]) -> None:
        """Replace the file by one with new columns, and with `rows` merged into its rows by step.

        Args:
          rows: step -> its values, by column.
          columns: the columns of the new file: those of the old one, then new ones.
        """
        path = self._folder / METRICS_FILE
        pending = sorted(rows, reverse=True)  # the smallest step is taken first, from the end
        padding = b"," * (len(columns) - len(self._columns)) + b"\n"  # old rows have no values in the new columns
        with naming_need(path, path.stat().st_size), open(path, "rb") as old, replacing(path) as new:
            old.readline()
            new.write(_csv_text([["step", *columns]]).encode())
            for line in old:
                step = int(line.partition(b",")[0])
                while pending and pending[-1] < step:
                    between = pending.pop()
                    new.write(_csv_text([_row(between, rows[between], columns)]).encode())
                line = line.rstrip(b"\n") + padding
                if pending and pending[-1] == step:
                    pending.pop()
                    values = {**_cells_of(line, columns), **rows[step]}
                    line = _csv_text([_row(step, values, columns)]).encode()
                new.write(line)
            new.write(_csv_text(_row(step, rows[step], columns) for step in reversed(pending)).encode())
        self._columns = columns

    def _write_table(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        write_atomically(self._folder / name, _csv_text(rows))


def _cells_of(line: bytes, columns: Sequence[str]) -> dict[str, Any]:
    """Return column -> text of each cell of a row, without the step and empty cells."""
    cells = line.decode().rstrip("\n").split(",")  # only numbers, so nothing is quoted
    return {name: cell for name, cell in zip(columns, cells[1:], strict=True) if cell}


def _row(step: int, values: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    return [step, *(values.get(name) for name in columns)]


def _csv_text(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _remove_cut_line(path: Path) -> int:
    """Remove a last line that a crash left incomplete, and return the step of the last row; -1: there is none."""
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LAST_BYTES))
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(size - len(lines.pop()))
    step = lines[-1].partition(b",")[0].strip() if lines else b""
    return int(step) if step.isdigit() else -1
