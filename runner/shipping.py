"""Journals on their way to the tracker: in order, each line once, and never in the way of training.

The journal is the spool. What was shipped is remembered in `run.json`, so a tracker that is away for an hour or a
supervisor that was killed costs nothing: the rest is shipped when there is one again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.files import read_json, write_json
from runner.journal import read_journal
from runner.tracking import Point, Tracker, points_of

PERIOD_SECS = 2.0
CLOSING_ATTEMPTS = 3
CLOSING_TIMEOUT_SECS = 120.0


@dataclass
class RunRecord:
    """What a run remembers between its processes, in `model_dir/run.json`.

    Attributes:
      mlflow_run_id: the MLflow run that it goes on with; None when it has none yet.
      generation: how often the run was started, the first time included.
      offsets: journal file name -> bytes of it that are shipped.
      last_steps: metric -> last global step that is shipped; a resumed run repeats steps, its curve does not.
    """

    mlflow_run_id: str | None = None
    generation: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, model_dir: Path) -> RunRecord:
        """The record of the run in `model_dir`; an empty one when there is none."""
        known = read_json(model_dir / "run.json") or {}
        return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})

    def save(self, model_dir: Path) -> None:
        write_json(model_dir / "run.json", asdict(self))


class Shipper:
    """Ships the journals of one run from a thread of its own, until `close`.

    Args:
      record: where it goes on; saved after each shipment.
      warn: called with a text when the tracker fails for the first time. Failures are never raised.
    """

    def __init__(
        self, model_dir: Path, tracker: Tracker, record: RunRecord, name: str, params: Mapping[str, Any],
        tags: Mapping[str, str], warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._model_dir, self._tracker, self._record = model_dir, tracker, record
        self._name, self._params, self._tags = name, params, tags
        self._warn = warn
        self._warned = False
        self._opened = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ship_until_end, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> str | None:
        """Ships what is left and ends the thread. The MLflow run's id; None when there is none."""
        self._ending.set()
        self._thread.join(CLOSING_TIMEOUT_SECS)
        return self._record.mlflow_run_id

    def close(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
        """After `drain`: adds tags and files and closes the run as FINISHED, FAILED or KILLED."""
        if self._thread.is_alive() or not self._opened:
            return
        try:
            self._tracker.set_tags(tags)
            for file in files:
                if file.exists():
                    self._tracker.log_file(file)
        except Exception as error:
            self._say(error)
        finally:
            self._end(status)

    def _end(self, status: str) -> None:
        try:
            self._tracker.end(status)
        except Exception as error:
            self._say(error)

    def _ship_until_end(self) -> None:
        attempts = 0
        while attempts < CLOSING_ATTEMPTS:
            ending = self._ending.is_set()
            attempts += ending
            try:
                self._ship()
                if ending:
                    return
            except Exception as error:
                self._say(error)
            if not self._ending.wait(PERIOD_SECS) or not ending:
                continue
            threading.Event().wait(0.5)  # between two closing attempts

    def _ship(self) -> None:
        if not self._opened:
            record = self._record
            record.mlflow_run_id = self._tracker.start(record.mlflow_run_id, self._name, self._params, self._tags)
            record.save(self._model_dir)
            self._opened = True
        for path in sorted(self._model_dir.glob("events.*.jsonl")):
            self._ship_journal(path)

    def _ship_journal(self, path: Path) -> None:
        lines, offset = read_journal(path, self._record.offsets.get(path.name, 0))
        points = [point for line in lines for point in points_of(line) if self._is_new(point)]
        if points:
            self._tracker.log_points(points)
        for point in points:
            self._record.last_steps[point.name] = point.step
        if offset != self._record.offsets.get(path.name, 0):
            # After log_points: a crash in between ships points twice; MLflow stores them once (same time and step).
            self._record.offsets[path.name] = offset
            self._record.save(self._model_dir)

    def _is_new(self, point: Point) -> bool:
        return point.step > self._record.last_steps.get(point.name, -1)

    def _say(self, error: Exception) -> None:
        if not self._warned:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._warn(f"tracking: {first_line} (training goes on; the journals in {self._model_dir} keep everything)")
        self._warned = True
