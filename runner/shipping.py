"""Journals on their way to the tracker: in order, each line once, and never in the way of training.

The journal is the spool. What was shipped is remembered in `run.json`, so a tracker that is away for an hour or a
supervisor that was killed costs nothing: the rest is shipped when there is one again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from runner.curves import draw_curves, import_matplotlib
from runner.files import read_json, write_json
from runner.journal import read_journal
from runner.outcome import SUMMARY_FILE, as_killed, write_summary
from runner.tracking import Model, Point, Tracker, describe, points_of

PERIOD_SECS = 2.0
GLANCE_SECS = 0.2
CLOSING_ATTEMPTS = 3
CLOSING_TIMEOUT_SECS = 90.0
"""More than two requests that are never answered."""

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED"}
"""MLflow's word for the status in a summary; KILLED for any other."""


_SAVING = threading.Lock()


@dataclass
class RunRecord:
    """What a run remembers between its processes, in `model_dir/run.json`.

    Attributes:
      mlflow_run_id: the MLflow run that it goes on with; None when it has none yet.
      generation: how often the run was started, the first time included.
      offsets: journal file name -> bytes of it that are shipped.
      last_steps: metric -> last global step that is shipped; a resumed run repeats steps, its curve does not.
      training: the status that its training has: running, finished, failed or interrupted.
    """

    mlflow_run_id: str | None = None
    generation: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    last_steps: dict[str, int] = field(default_factory=dict)
    training: str | None = None

    @classmethod
    def read(cls, model_dir: Path) -> RunRecord:
        """The record of the run in `model_dir`; an empty one when there is none."""
        known = read_json(model_dir / "run.json") or {}
        return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})

    def save(self, model_dir: Path) -> None:
        with _SAVING:  # the supervisor counts restarts while the shipper notes what it has shipped
            write_json(model_dir / "run.json", asdict(self))

    def belongs_to(self, mlflow_run_id: str) -> None:
        """Goes on with this MLflow run. One that is new to us has none of what was shipped to another."""
        if mlflow_run_id != self.mlflow_run_id:
            self.mlflow_run_id = mlflow_run_id
            self.offsets, self.last_steps = {}, {}


class Shipper:
    """Ships the journals of one run from a thread of its own, until `close`.

    Args:
      record: where it goes on; saved after each shipment.
      params: masked by the caller.
      tags: masked too; those named `host` and `lock` let another run close this one when its supervisor was killed.
      warn: called with a text when the tracker fails for the first time. Failures are never raised.
      is_reader: the command reads a run. An MLflow run that is there gets metrics and files, but keeps its params,
        tags and status.
      patience_secs: how long to leave the machine to a task that has not taken its first step: to import MLflow takes
        2 s of a core, which would come just while the task imports TensorFlow.
    """

    def __init__(
        self, model_dir: Path, tracker: Tracker, record: RunRecord, name: str, params: Mapping[str, Any],
        tags: Mapping[str, str], warn: Callable[[str], None], is_reader: bool = False,
        patience_secs: float = 0.0,
    ) -> None:  # fmt: skip
        self.record = record
        self._model_dir, self._tracker = model_dir, tracker
        self._name, self._params, self._tags = name, params, tags
        self._warn, self._is_reader, self._patience_secs = warn, is_reader, patience_secs
        self._run_id = record.mlflow_run_id
        self._warned = self._opened = self._is_guest = False
        # An earlier start has left its own first step.
        self._began_at = {path.name: path.stat().st_size for path in model_dir.glob("events.*.jsonl")}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ship_until_end, name="shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, is_enough: Callable[[], bool] = lambda: False) -> str | None:
        """Ships what is left and ends the thread. The MLflow run's id; None when there is none.

        Args:
          is_enough: whether somebody will not wait for a tracker that does not answer.
        """
        self._ending.set()
        until = time.monotonic() + CLOSING_TIMEOUT_SECS
        while self._thread.is_alive() and time.monotonic() < until and not is_enough():
            self._thread.join(GLANCE_SECS)
        return self._run_id

    def close(self, status: str, tags: Mapping[str, str], files: Sequence[Path], models: Sequence[Model] = ()) -> None:
        """After `drain`: adds tags, files, curves and models, and closes the run as FINISHED, FAILED or KILLED."""
        if self._thread.is_alive():
            self._say(TimeoutError("it does not answer"))
            return
        if not self._opened or self._run_id is None:
            return
        try:
            if not self._is_guest:
                self._tracker.set_tags(tags)
            for file in [*files, *self._drawn_curves()]:
                if file.exists():
                    self._tracker.log_file(file)
            for model in models:
                self._tracker.log_model(model)
        except Exception as error:
            self._say(error)
        finally:
            self._end(status)

    def _end(self, status: str) -> None:
        try:
            if not self._is_guest:
                self._tracker.end(status)
        except Exception as error:
            self._say(error)

    def _drawn_curves(self) -> list[Path]:
        try:
            drawn = draw_curves(self._model_dir)
        except Exception as error:
            self._warn(f"tracking: no learning curves: {describe(error)}")
            return []
        return [drawn] if drawn else []

    def _ship_until_end(self) -> None:
        until = time.monotonic() + self._patience_secs
        while time.monotonic() < until and not self._has_begun() and not self._ending.wait(GLANCE_SECS):
            pass
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
            self._open()
            self._close_abandoned()
        if self._run_id is not None:
            for path in sorted(self._model_dir.glob("events.*.jsonl")):
                self._ship_journal(path)
            if self.record.last_steps:
                import_matplotlib()  # 0.4 s while the task trains, for which the end of the run need not wait

    def _has_begun(self) -> bool:
        """Whether the task has taken its first step."""
        return any(
            line.get("event") == "first_step"
            for path in self._model_dir.glob("events.*.jsonl")
            for line in read_journal(path, self._began_at.get(path.name, 0))[0]
        )

    def _open(self) -> None:
        known = self.record.mlflow_run_id
        if self._is_reader and known is not None:
            self._is_guest = self._tracker.join(known)
            known = None  # it is not there: a new one is made
        if self._is_guest:
            assert self._run_id is not None
            # We hold the run's lock: if it still says RUNNING, its supervisor was killed.
            self._tracker.settle(self._run_id, "KILLED", {"status": "interrupted"}, _last_sign(self._model_dir))
        else:
            known = known or self._of_a_killed_start()
            self._run_id = self._tracker.start(known, self._name, self._params, self._tags)
        self._opened = True  # also where the disk is full: a run that was opened is closed
        if self._run_id is not None:  # an untracked start leaves the record of tracked ones as it is
            self.record.belongs_to(self._run_id)
            self.record.save(self._model_dir)

    def _of_a_killed_start(self) -> str | None:
        """The MLflow run of a start that was killed before it could note it here. We hold its lock, so it is ours."""
        try:
            running = self._tracker.running_on(self._tags.get("host", ""))
        except Exception:  # `start` and the look for abandoned runs, which follow, meet it again and say it
            return None
        return next((run_id for run_id, lock in running.items() if lock == self._tags.get("lock")), None)

    def _close_abandoned(self) -> None:
        if self._run_id is None or not self._tags.get("host"):
            return
        try:
            close_abandoned(self._tracker, self._tags["host"])
        except Exception as error:
            self._warn(f"tracking: cannot look for runs that were killed: {describe(error)}")

    def _ship_journal(self, path: Path) -> None:
        lines, offset = read_journal(path, self.record.offsets.get(path.name, 0))
        last_steps = dict(self.record.last_steps)
        points = [point for line in lines for point in points_of(line) if self._is_new(point, last_steps)]
        if points:
            self._tracker.log_points(points)
        self.record.last_steps = last_steps
        if offset != self.record.offsets.get(path.name, 0):
            # After log_points: a crash in between ships points twice; MLflow stores them once (same time and step).
            self.record.offsets = {**self.record.offsets, path.name: offset}
            self.record.save(self._model_dir)

    def _is_new(self, point: Point, last_steps: dict[str, int]) -> bool:
        last = last_steps.get(point.name, -1)
        # Whoever evaluates a step once more wants to see what came out.
        is_new = point.step > last or (self._is_guest and point.step == last)
        if is_new:
            last_steps[point.name] = point.step
        return is_new

    def _say(self, error: Exception) -> None:
        if not self._warned:
            kept = f"training goes on; the journals in {self._model_dir} keep everything"
            self._warn(f"tracking: {describe(error)} ({kept})")
        self._warned = True


def close_abandoned(tracker: Tracker, host: str) -> None:
    """Closes the runs of the tracker's experiment that are RUNNING on this host although their supervisor is dead.

    A supervisor holds its run's lock (tag `lock`) while it lives. Where the lock can be taken the MLflow run gets the
    status of its summary: KILLED, unless the supervisor came as far as writing another. A summary that says running
    becomes interrupted.
    """
    for run_id, lock in tracker.running_on(host).items():
        path = Path(lock)
        if not path.is_absolute():  # a tag of the user's own
            continue
        held = FileLock(path, timeout=0)
        try:
            if path.exists():
                held.acquire()
        except OSError:  # a Timeout: its supervisor lives; or the file is somebody else's
            continue
        try:
            _close_as_killed(tracker, run_id, path.parent)
        finally:
            held.release()


def _close_as_killed(tracker: Tracker, run_id: str, model_dir: Path) -> None:
    summary = read_json(model_dir / SUMMARY_FILE) or {}
    status = "interrupted"
    if summary.get("status") == "running":
        write_summary(model_dir, as_killed(summary))
    elif summary.get("mlflow_run_id") == run_id:  # it ended, and could not reach the tracker any more
        status = str(summary.get("status"))
    tracker.settle(run_id, MLFLOW_STATUS.get(status, "KILLED"), {"status": status}, _last_sign(model_dir))


def _last_sign(model_dir: Path) -> float:
    """When the tasks of a run last noted something; now when they never did."""
    return max((path.stat().st_mtime for path in model_dir.glob("events.*.jsonl")), default=time.time())
