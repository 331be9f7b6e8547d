"""Journals on their way to the tracker: in order, each line once, and never in the way of training.

The journal is the spool. What was shipped is remembered in `run.json`, so a tracker that is away for an hour or a
supervisor that was killed costs nothing: the rest is shipped when there is one again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from runner.tracking.curves import draw_curves, import_matplotlib
from runner.tracking.exit_codes import MLFLOW_STATUS, STILL_RUNNING
from runner.tracking.journal import Journals, journals_in, read_journal
from runner.tracking.run_record import RunRecord
from runner.tracking.summary import SUMMARY_FILE, as_killed, read_summary, write_summary
from runner.tracking.tracker import ExportedModel, Point, RunDescription, Tracker, describe, points_of

PERIOD_SECS = 2.0
GLANCE_SECS = 0.2
CLOSING_ATTEMPTS = 3
CLOSING_TIMEOUT_SECS = 90.0
"""More than two requests that are never answered."""


class Shipper:
    """Ships the journals of one run from a thread of its own, until `close`.

    Args:
      record: where it goes on; saved after each shipment.
      warn: called with a text when the tracker fails for the first time. Failures are never raised.
      is_reader: the command reads a run. An MLflow run that is there gets metrics and files, but keeps its params,
        tags and status.
      patience_secs: how long to leave the machine to a task that has not taken its first step: to import MLflow takes
        2 s of a core, which would come just while the task imports TensorFlow.
    """

    def __init__(
        self, model_dir: Path, tracker: Tracker, record: RunRecord, described: RunDescription,
        warn: Callable[[str], None], is_reader: bool = False, patience_secs: float = 0.0,
    ) -> None:  # fmt: skip
        self.record = record
        self._model_dir, self._tracker = model_dir, tracker
        self._described = described
        self._warn, self._is_reader, self._patience_secs = warn, is_reader, patience_secs
        self._run_id = record.mlflow_run_id
        self._warned = self._opened = self._is_guest = False
        self._journals = Journals(model_dir).mark()  # an earlier start has left its own first step
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

    def close(
        self, status: str, tags: Mapping[str, str], files: Sequence[Path], models: Sequence[ExportedModel] = ()
    ) -> None:
        """After `drain`: adds tags, files, curves and models, and closes the run as FINISHED, FAILED or KILLED."""
        if self._thread.is_alive():
            self._say(TimeoutError("it does not answer"))
            return
        if not self._opened or self._run_id is None:
            return
        with self._failures_said():
            if not self._is_guest:
                self._tracker.set_tags(tags)
            drawn = None
            with self._warning("no learning curves"):
                drawn = draw_curves(self._model_dir)
            for file in filter(None, [*files, drawn]):
                if file.exists():
                    self._tracker.log_file(file)
            for model in models:
                self._tracker.log_model(model)
        with self._failures_said():
            if not self._is_guest:
                self._tracker.end(status)

    def _ship_until_end(self) -> None:
        until = time.monotonic() + self._patience_secs
        while time.monotonic() < until and not self._journals.events("first_step"):
            if self._ending.wait(GLANCE_SECS):
                break
        while not self._ending.is_set():
            self._ship()
            self._ending.wait(PERIOD_SECS)
        for _ in range(CLOSING_ATTEMPTS):
            if self._ship():
                return
            time.sleep(0.5)

    def _ship(self) -> bool:
        """Ship what is new, and report whether that worked."""
        shipped = False
        with self._failures_said():
            if not self._opened:
                self._open()
                host = self._described.tags.get("host")
                if self._run_id is not None and host:
                    with self._warning("cannot look for runs that were killed"):
                        close_abandoned(self._tracker, host)
            if self._run_id is not None:
                for path in journals_in(self._model_dir):
                    self._ship_journal(path)
                if self.record.last_steps:
                    import_matplotlib()  # 0.4 s while the task trains, for which the end of the run need not wait
            shipped = True
        return shipped

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
            self._run_id = self._tracker.start(
                known, self._described.name, self._described.params, self._described.tags
            )
        self._opened = True  # also where the disk is full: a run that was opened is closed
        if self._run_id is not None:  # an untracked start leaves the record of tracked ones as it is
            self.record.belongs_to(self._run_id)
            self.record.save(self._model_dir)

    def _of_a_killed_start(self) -> str | None:
        """The MLflow run of a start that was killed before it could note it here. We hold its lock, so it is ours."""
        try:
            running = self._tracker.running_on(self._described.tags.get("host", ""))
        except Exception:  # `start` and the look for abandoned runs, which follow, meet it again and say it
            return None
        return next((run_id for run_id, lock in running.items() if lock == self._described.tags.get("lock")), None)

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

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Go on without what the body does, and say `what` is missing and why."""
        try:
            yield
        except Exception as error:
            self._warn(f"tracking: {what}: {describe(error)}")

    @contextmanager
    def _failures_said(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._say(error)

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
    summary = read_summary(model_dir / SUMMARY_FILE)
    status = "interrupted"
    if summary.get("status") == STILL_RUNNING.status:
        write_summary(model_dir, as_killed(summary))
    elif summary.get("mlflow_run_id") == run_id:  # it ended, and could not reach the tracker any more
        status = str(summary.get("status"))
    tracker.settle(run_id, MLFLOW_STATUS.get(status, "KILLED"), {"status": status}, _last_sign(model_dir))


def _last_sign(model_dir: Path) -> float:
    """Return when the tasks of a run last noted something; now when they never did."""
    return max((path.stat().st_mtime for path in journals_in(model_dir)), default=time.time())
