"""Ship journals to a tracker: in order, each line once, without delaying training.

run.json records how much has been shipped. So if a tracker cannot be reached for an hour, or a supervisor is killed,
nothing is lost: the remaining lines are shipped later.
"""

from __future__ import annotations

import fcntl
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from runner.system.files import write_atomically
from runner.tracking.curves import draw_curves, import_matplotlib
from runner.tracking.exit_codes import MLFLOW_STATUS, STILL_RUNNING
from runner.tracking.journal import (
    ARTIFACT,
    BLOCK_BYTES,
    DATASET,
    IMAGE,
    WANTS_RUN,
    Journals,
    journals_in,
    read_journal,
)
from runner.tracking.run_lock import LOCK_FILE
from runner.tracking.run_record import MLFLOW, RUN_FILE, RunRecord
from runner.tracking.summary import SUMMARY_FILE, as_killed, read_summary, write_summary
from runner.tracking.tracker import (
    DatasetFacts,
    ExportedModel,
    NullTracker,
    Point,
    RunDescription,
    Tracker,
    describe,
    points_of,
)

PERIOD_SECS = 2.0
GLANCE_SECS = 0.2
CLOSING_ATTEMPTS = 3
CLOSING_TIMEOUT_SECS = 20.0
"""Seconds that the end of a run waits for a tracker that does not answer: a frozen server or a locked database."""
UPLOAD_BYTES_PER_SEC = 1e6
"""For files and models, that time is extended by their size divided by this number of bytes per second."""


class Shipper:
    """Ships the journals of one run to one tracker from a thread, until `close`.

    Args:
      model_dir: the folder of the run.
      tracker: the tracker.
      record: says how much has been shipped; saved after each shipment.
      described: the facts that are recorded at the start.
      warn: called with a text when the tracker fails for the first time. Failures are never raised.
      is_reader: the command reads a run. Metrics and files are added to the run; its params, tags and status stay.
      patience_secs: seconds to wait for a task's first step before anything is recorded, because importing MLflow takes
        2 s of a core that the task's imports need. Infinite: a start without a step is not recorded, unless `drain`
        says so.
      on_first_step: called once when a task has taken its first step, but not if this is noticed only at the end.
      ship_later: the command that ships what has not been shipped at the end of the run.
      name: the tracker's name in the record.
      journals: the journals, marked where this start begins; None: this start begins now.
    """

    def __init__(
        self, model_dir: Path, tracker: Tracker, record: RunRecord, described: RunDescription,
        warn: Callable[[str], None], is_reader: bool = False, patience_secs: float = 0.0,
        on_first_step: Callable[[], None] = lambda: None, ship_later: str = "", name: str = MLFLOW,
        journals: Journals | None = None,
    ) -> None:  # fmt: skip
        self.name, self.record = name, record
        self._shipped = record.of(name)
        self._model_dir, self._tracker = model_dir, tracker
        self._described = described
        self._warn, self._is_reader, self._patience_secs = warn, is_reader, patience_secs
        self._on_first_step = on_first_step
        self._is_recorded, self._ship_later = True, ship_later
        self._until = math.inf
        self._is_enough: Callable[[], bool] = lambda: False
        self._run_id = self._shipped.run_id
        self._warned = self._opened = self._is_guest = self._is_left = False
        self._is_offered = self._is_made_early = False
        self._journals = journals or Journals(model_dir).mark()  # skip the first step of an earlier start
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ship_until_end, name=f"ships to {name}", daemon=True)

    def start(self) -> None:
        self._forget_run_file()  # a start that was killed may have left it
        self._thread.start()

    def address(self) -> str | None:
        """Return the address at which the user finds the run; None: there is none."""
        return self._tracker.address() if self._opened and self._run_id is not None else None

    def drain(self, is_enough: Callable[[], bool] = lambda: False, *, is_recorded: bool = True) -> str | None:
        """Ship the remaining lines, end the thread, and return the tracker's id of the run; None if there is none.

        Args:
          is_enough: reports whether to stop waiting for a tracker that does not answer.
          is_recorded: False: the start is not recorded, unless the tracker already has a run for it.
        """
        self.begin_drain(is_enough, is_recorded=is_recorded)
        return self.drained()

    def begin_drain(self, is_enough: Callable[[], bool] = lambda: False, *, is_recorded: bool = True) -> None:
        """Begin `drain` without waiting for it; `drained` waits."""
        self._is_recorded, self._is_enough = is_recorded, is_enough
        self._ending.set()
        self._answered()

    def drained(self) -> str | None:
        """Wait for the `drain` that `begin_drain` began. Return the tracker's id of the run; None: there is none."""
        self._wait_for(self._thread)
        self._forget_run_file()
        return self._run_id

    @property
    def has_run(self) -> bool:
        """Report whether the tracker has a run, to which files can be added."""
        return not self._thread.is_alive() and self._opened and self._run_id is not None

    def close(
        self, status: str, tags: Mapping[str, str], files: Sequence[Path], models: Sequence[ExportedModel] = ()
    ) -> None:
        """Add tags, files, curves and models, and close the run as FINISHED, FAILED or KILLED. Called after `drain`."""
        drawn = self.draw() if self.has_run else None
        self.begin_close(status, tags, [file for file in (*files, drawn) if file is not None], models)
        self.closed()

    def draw(self) -> Path | None:
        """Draw the learning curves and return the file; None: there is none."""
        drawn = None
        with self._warning("no learning curves"):
            drawn = draw_curves(self._model_dir)
        return drawn

    def begin_close(
        self, status: str, tags: Mapping[str, str], files: Sequence[Path], models: Sequence[ExportedModel] = ()
    ) -> None:
        """Begin `close` without waiting for it, and without the curves; `closed` waits."""
        if self.has_run:
            kept = [file for file in files if file.exists()]
            self._answered()
            self._thread = threading.Thread(target=self._close, args=(status, tags, kept, models), daemon=True)
            self._thread.start()

    def closed(self) -> None:
        """Wait for the `close` that `begin_close` began, and release the tracker."""
        self._wait_for(self._thread)
        if self._thread.is_alive():
            self._is_left = True
            later = f" Ship later with: {self._ship_later}" if self._ship_later else ""
            why = "it does not answer" if self._is_enough() else f"no answer for {CLOSING_TIMEOUT_SECS:g} s"
            self._warn(
                f"tracking: {self._named}{why}; the run ends without waiting for it. Nothing is lost: the journals in "
                f"{self._model_dir} have everything.{later}"
            )
        self.release()

    def release(self) -> None:
        """Release the tracker, whether or not everything has been shipped."""
        self._is_left = True
        self._tracker.close()

    @property
    def _named(self) -> str:
        return "" if self.name == MLFLOW else f"{self.name}: "

    def _forget_run_file(self) -> None:
        if self.name == MLFLOW:
            (self._model_dir / RUN_FILE).unlink(missing_ok=True)

    def _close(
        self, status: str, tags: Mapping[str, str], files: Sequence[Path], models: Sequence[ExportedModel]
    ) -> None:
        with self._failures_said():
            if not self._is_guest:
                self._tracker.set_tags(tags)
            for file in files:
                self._answered(file.stat().st_size)
                self._tracker.log_file(file)
            for model in models:
                self._answered(size_of(model.path))
                self._tracker.log_model(model)
            self._answered()
        with self._failures_said():
            if self._is_guest:
                self._tracker.leave(status)
            else:
                self._tracker.end(status)

    def _answered(self, num_bytes: int = 0) -> None:
        """Note that the tracker has answered. The next answer may take CLOSING_TIMEOUT_SECS, or more for many bytes."""
        self._until = time.monotonic() + CLOSING_TIMEOUT_SECS + num_bytes / UPLOAD_BYTES_PER_SEC

    def _wait_for(self, thread: threading.Thread) -> None:
        """Return when the thread has ended, the tracker no longer answers, or `is_enough`."""
        while thread.is_alive() and time.monotonic() < self._until and not self._is_enough():
            thread.join(GLANCE_SECS)

    def _ship_until_end(self) -> None:
        if not self._wait_for_first_step():
            self._take_back()
            return
        while not self._ending.is_set():
            self._ship()
            self._ending.wait(PERIOD_SECS)
        for _ in range(CLOSING_ATTEMPTS):
            if self._ship():
                return
            time.sleep(0.5)

    def _wait_for_first_step(self) -> bool:
        """Wait until a task has taken its first step, `patience_secs` have passed, or the task has ended.

        Returns:
          False if there is nothing to ship.
        """
        until = time.monotonic() + self._patience_secs
        while time.monotonic() < until:
            if self._journals.events("first_step"):
                self._on_first_step()
                return True
            if self.name == MLFLOW and not self._is_offered and self._journals.events(WANTS_RUN):
                self._offer()
            if self._ending.wait(GLANCE_SECS):
                return self._is_recorded
        return True

    def _offer(self) -> None:
        """Create the MLflow run before the first step, because the user's code logs to MLflow itself."""
        with self._failures_said():
            known = self._shipped.run_id
            if known is None or not self._tracker.join(known):
                run_id = self._tracker.start(
                    self._of_a_killed_start(), self._described.name, self._described.params, self._described.tags
                )
                self._is_made_early = True
            else:
                run_id = known
            self._is_offered = True
            self._tell_tasks(run_id)

    def _take_back(self) -> None:
        """Delete the MLflow run if no step was taken."""
        with self._failures_said():
            if self._is_made_early:
                self._tracker.delete()
            elif self._is_offered:
                self._tracker.leave("KILLED")

    def _tell_tasks(self, run_id: str | None) -> None:
        if run_id is not None and self.name == MLFLOW:
            write_atomically(self._model_dir / RUN_FILE, run_id)

    def _ship(self) -> bool:
        """Ship the new lines, and report whether that succeeded."""
        shipped = False
        with self._failures_said():
            if not self._opened:
                self._open()
                self._answered()
                host = self._described.tags.get("host")
                if self._run_id is not None and host:
                    with self._warning("cannot look for runs that were killed"):
                        close_abandoned(self._tracker, host)
            if self._run_id is not None:
                for path in journals_in(self._model_dir):
                    self._ship_journal(path)
                if self._shipped.last_steps:
                    import_matplotlib()  # this takes 0.4 s; do it while the task trains, not at the end of the run
            shipped = True
        return shipped

    def _open(self) -> None:
        known = self._shipped.run_id
        if self._is_reader and known is not None:
            self._is_guest = self._tracker.join(known)
            known = None  # the tracker does not have that run, so a new one is created
        if self._is_guest:
            assert self._run_id is not None
            # This process holds the run's lock. So if MLflow says that the run is RUNNING, its supervisor was killed.
            self._tracker.settle(self._run_id, "KILLED", {"status": "interrupted"}, _last_sign(self._model_dir))
        else:
            known = known or self._of_a_killed_start()
            self._run_id = self._tracker.start(
                known, self._described.name, self._described.params, self._described.tags
            )
        self._opened = True  # set even if the disk is full, so that the open run is closed
        if self._run_id is not None:  # an untracked start does not change the record of tracked ones
            self._shipped.belongs_to(self._run_id)
            self.record.save(self._model_dir)
            self._tell_tasks(self._run_id)

    def _of_a_killed_start(self) -> str | None:
        """Return the MLflow run of a start that was killed before it noted the id here; this process holds the lock
        and may use it.
        """
        try:
            running = self._tracker.running_on(self._described.tags.get("host", ""))
        except Exception:  # the calls that follow meet the same error and report it
            return None
        return next((run_id for run_id, lock in running.items() if lock == self._described.tags.get("lock")), None)

    def _ship_journal(self, path: Path) -> None:
        before = -1
        while before != (before := self._shipped.offsets.get(path.name, 0)):
            lines, offset = read_journal(path, before, BLOCK_BYTES)
            last_steps = dict(self._shipped.last_steps)
            points = [point for line in lines for point in points_of(line) if self._is_new(point, last_steps)]
            if points:
                self._tracker.log_points(points)
                self._answered()
            self._shipped.last_steps = last_steps
            for line in lines:
                self._ship_thing(line)
            if offset != before:
                # Must follow log_points: a crash in between ships points twice, and MLflow stores them once (same time
                # and step).
                self._shipped.offsets = {**self._shipped.offsets, path.name: offset}
                self.record.save(self._model_dir)

    def _ship_thing(self, line: Mapping[str, Any]) -> None:
        """Ship the file, image or input that a line refers to, if any."""
        kind = line.get("event")
        if kind == DATASET:
            names = ("context", "name", "digest", "source", "profile")
            self._tracker.log_input(DatasetFacts(*(line[name] for name in names)))
        if kind not in (ARTIFACT, IMAGE):
            return
        path = self._model_dir / line["path"]
        if not path.exists():
            self._warn(f"tracking: {self._named}{path} is not recorded, because it no longer exists.")
            return
        self._answered(size_of(path))
        if kind == ARTIFACT:
            self._tracker.log_file(path, line["folder"])
            return
        last_steps, point = dict(self._shipped.last_steps), Point(f"images/{line['name']}", 0.0, line["step"], 0.0)
        if self._is_new(point, last_steps):
            self._tracker.log_image(line["name"], path, line["step"], line["time"])
        self._shipped.last_steps = last_steps

    def _is_new(self, point: Point, last_steps: dict[str, int]) -> bool:
        last = last_steps.get(point.name, -1)
        # A step may be evaluated again; both results are shipped.
        is_new = point.step > last or (self._is_guest and point.step == last)
        if is_new:
            last_steps[point.name] = point.step
        return is_new

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Turn an error inside this context into a warning that begins with `what`."""
        try:
            yield
        except Exception as error:
            self._warn(f"tracking: {self._named}{what}: {describe(error)}")

    @contextmanager
    def _failures_said(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        if not self._warned and not self._is_left:
            kept = f"training continues; the journals in {self._model_dir} have everything"
            if self._ending.is_set() and self._ship_later:
                kept = f"the journals in {self._model_dir} have everything; ship later with: {self._ship_later}"
            first, *lines = describe(error).split("\n")
            self._warn("\n".join([f"tracking: {self._named}{first} ({kept})", *lines]))
        self._warned = True


class Shippers:
    """Ships the journals of one run to several trackers, each at its own pace.

    Args:
      trackers: name -> tracker; empty: nothing is recorded.
      described, settings: as in `Shipper`.
    """

    def __init__(
        self, model_dir: Path, trackers: Mapping[str, Tracker], record: RunRecord, described: RunDescription,
        warn: Callable[[str], None], **settings: Any,
    ) -> None:  # fmt: skip
        self._all = [
            Shipper(model_dir, tracker, record, described, warn, name=name, **settings)
            for name, tracker in (trackers or {MLFLOW: NullTracker()}).items()
        ]

    def start(self) -> None:
        for shipper in self._all:
            shipper.start()

    def addresses(self) -> dict[str, str]:
        """Return tracker name -> the address at which the user finds the run."""
        found = {shipper.name: shipper.address() for shipper in self._all}
        return {name: address for name, address in found.items() if address}

    def drain(self, is_enough: Callable[[], bool] = lambda: False, *, is_recorded: bool = True) -> str | None:
        """Do what `Shipper.drain` does, for all trackers at once. Return the MLflow run's id; None if there is none."""
        for shipper in self._all:
            shipper.begin_drain(is_enough, is_recorded=is_recorded)
        ids = {shipper.name: shipper.drained() for shipper in self._all}
        return ids.get(MLFLOW)

    def close(
        self, status: str, tags: Mapping[str, str], files: Sequence[Path], models: Sequence[ExportedModel] = ()
    ) -> None:
        """Do what `Shipper.close` does, for all trackers at once."""
        recording = [shipper for shipper in self._all if shipper.has_run]
        drawn = recording[0].draw() if recording else None
        files = [file for file in (*files, drawn) if file is not None]
        for shipper in recording:
            shipper.begin_close(status, tags, files, models)
        for shipper in self._all:
            shipper.closed()

    def release(self) -> None:
        """Release all trackers, whether or not everything has been shipped."""
        for shipper in self._all:
            shipper.release()


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


def close_abandoned(tracker: Tracker, host: str) -> None:
    """Close runs of the tracker's experiment that are RUNNING on this host although their supervisor is dead.

    A supervisor holds its run's lock (tag `lock`) while it lives. If the lock can be taken, the supervisor is dead. The
    MLflow run then gets the status in the run's summary, or KILLED if the summary has no final status. A summary with
    the status running becomes interrupted, if the folder's run.json names this MLflow run.

    Anyone can write tags into MLflow. So a path that is not the lock of a run's folder is neither created nor written.
    """
    for run_id, lock in tracker.running_on(host).items():
        path = Path(lock)
        if not path.is_absolute() or path.name != LOCK_FILE:  # a user's tag
            continue
        with ExitStack() as held:
            try:
                if path.exists():
                    held.enter_context(_lock_as_it_is(path))
            except OSError:  # its supervisor is alive, or the file is not a lock of a run
                continue
            _close_as_killed(tracker, run_id, path.parent)


@contextmanager
def _lock_as_it_is(path: Path) -> Iterator[None]:
    """Hold the lock of a dead supervisor inside this context. FileLock is not used, because it creates or empties the
    file.

    Raises:
      OSError: the lock is held, or the file belongs to another user.
    """
    # Do not follow links, and do not block on a pipe.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user or is not a lock file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _close_as_killed(tracker: Tracker, run_id: str, model_dir: Path) -> None:
    summary = read_summary(model_dir / SUMMARY_FILE)
    status = "interrupted"
    if summary.get("status") == STILL_RUNNING.status:
        if RunRecord.read(model_dir).mlflow_run_id == run_id:
            write_summary(model_dir, as_killed(summary))
    elif summary.get("mlflow_run_id") == run_id:  # it ended but could no longer reach the tracker
        status = str(summary.get("status"))
    tracker.settle(run_id, MLFLOW_STATUS.get(status, "KILLED"), {"status": status}, _last_sign(model_dir))


def _last_sign(model_dir: Path) -> float:
    """Return when the tasks of a run last wrote to a journal, in seconds since 1970; now if they never did."""
    return max((path.stat().st_mtime for path in journals_in(model_dir)), default=time.time())
