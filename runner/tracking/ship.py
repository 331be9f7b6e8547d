"""Send the journals of runs to their trackers, each line once, in order: `python -m runner.tracking.ship <model_dir>`.

Whoever starts a run starts one such process for each tracker (`runner.tracking.shipping`), which gets the folders on
its standard input. It may be ended at any time, and started again by anyone: shipped.<tracker>.json says how far it
came. A tracker that fails, hangs or crashes has this process for itself.

    run_started -> open or join the run     other lines -> points, files     run_ended -> tags, files, models, end
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import math
import os
import queue
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from runner.config import schema
from runner.config.schema import TRACKERS, TRAINING_RUNS, ConfigError, TrackingConfig
from runner.system.exit_codes import FINISHED, USER_ERROR
from runner.system.files import DiskFullError, FolderLostError, HeldFolder, read_json, write_json
from runner.system.redaction import SecretList, mask_text, masked
from runner.system.secret_names import LIST
from runner.system.standard_streams import keep_saying, say
from runner.tracking.backends.csv_tracker import CsvTracker
from runner.tracking.backends.user_tracker import UserTracker
from runner.tracking.curves import CURVES_FILE, draw_curves, import_matplotlib
from runner.tracking.journal import (
    ARTIFACT,
    BLOCK_BYTES,
    DATASET,
    IMAGE,
    OF_RESTARTS,
    RUN_ENDED,
    RUN_STARTED,
    SUPERVISOR,
    WANTS_RUN,
    Journals,
    is_of_host,
    journal_path,
    journals_in,
    make_durable,
    read_journal,
    starts_and_ends,
)
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.run_end import how_run_ended, settle, settle_files
from runner.tracking.run_lock import LOCK_FILE, alone_in, has_tasks
from runner.tracking.run_record import MLFLOW, Shipped
from runner.tracking.shipping import (
    ANSWER_SECS,
    NOT_ALL,
    SETTINGS_FILE,
    Shipping,
    heed_starter,
    label_of,
    lock_file,
    read_settings,
    ship_command,
)
from runner.tracking.summary import MLFLOW_STATUS
from runner.tracking.tracker import DatasetFacts, ExportedModel, Point, Tracker, describe, points_of

PERIOD_SECS = 2.0
GLANCE_SECS = 0.2
REST_SECS = 600.0
"""Seconds until the files of a run that has ended are sent again, if nobody answered. An attempt delays the other jobs
of a sweep, which the same process ships, by a few seconds.
"""
LAST_ATTEMPTS = 3
"""Number of times that everything is tried after the starter has named its last folder, LAST_PERIOD_SECS apart."""
LAST_PERIOD_SECS = 0.5
PREPARE_SECS = 120.0
"""Seconds that the import of a tracker and the making of its tables may take."""
UPLOAD_BYTES_PER_SEC = 1e6
"""For files and models, ANSWER_SECS is extended by their size divided by this number of bytes per second."""
PATIENCE_SECS = 30.0
"""Seconds to wait for a task's first step: importing MLflow takes 2 s of a core that the task's imports need.

A provisional start has no such limit. Its folder is removed after a mistake of the user, but what was shipped by then
would stay in the tracker."""
_WAKING_EVENTS = ("first_step", WANTS_RUN, RUN_ENDED)
_SENT_EVENTS = (DATASET, ARTIFACT, IMAGE)
"""Events that are sent to trackers, beside metrics and the starts and ends of the run."""


class Deadline:
    """Ends this process, also within a call that hangs in C, if its tracker does not answer. Does nothing until `arm`.

    The default action of SIGALRM ends it. Being killed is safe, because offsets are written after the data.
    """

    def __init__(self) -> None:
        self._secs = float(ANSWER_SECS)
        self.is_armed = False

    def expect(self, num_bytes: int = 0, secs: float = ANSWER_SECS) -> None:
        """Expect the next answer within `secs`, or later for many bytes."""
        self._secs = secs + num_bytes / UPLOAD_BYTES_PER_SEC
        if self.is_armed:
            signal.setitimer(signal.ITIMER_REAL, self._secs)

    def arm(self) -> None:
        self.is_armed = True
        signal.setitimer(signal.ITIMER_REAL, self._secs)


def build_tracker(backend: str, settings: TrackingConfig, model_dir: Path, name: str, started_at: float) -> Tracker:
    """Return the tracker `backend` of `settings`. Creates nothing yet.

    Args:
      settings: as `write_settings` wrote them, with MLflow's uri and experiment.
      name: name of the run.
      started_at: when the run started, in seconds since 1970; the tracker may be built later.
    """
    if backend == MLFLOW:
        return MlflowTracker(str(settings.uri), str(settings.experiment), started_at)
    if backend == "csv":
        return CsvTracker(model_dir)
    users_class = next(candidate for candidate in settings.backends if candidate.name == backend)
    return UserTracker(users_class, name)


class RunShipper:
    """Ships the journals of one folder to one tracker. A folder that another process ships is left alone.

    Raises:
      ConfigError: nothing in the folder says how the run is recorded.
      OSError: there is no such folder.
    """

    def __init__(
        self, folder: Path, name: str, deadline: Deadline, build: Callable[..., Tracker] = build_tracker
    ) -> None:
        self._build = build
        self.folder = folder
        self._name = name
        self._deadline = deadline
        self._held_folder = HeldFolder(folder)
        self._settings = read_settings(folder)
        self._lock = FileLock(lock_file(folder, name))
        self._shipped = Shipped.read(folder, name)
        self._supervisor_journal = journal_path(folder, SUPERVISOR)
        self._start: Mapping[str, Any] | None = self._find_open_start()  # known if the folder is deleted later
        self._unshipped_journals = Journals(folder, dict(self._shipped.offsets))  # to see whether a task has begun
        patience_secs = PATIENCE_SECS
        if self._start is not None and self._start.get("is_provisional"):
            patience_secs = math.inf
        if self._shipped.started is not None:  # an earlier process has seen the first step
            patience_secs = 0.0
        self._wakes_at = time.monotonic() + patience_secs
        self._due_at = 0.0
        self._tracker: Tracker | None = None  # the tracker while a start of the run is open in it
        self._tracker_to_open: Tracker | None = None
        self._said_left_out: set[str] = set()
        self._unsaved_journals: set[Path] = set()  # those with offsets that the record on disk does not have
        self._is_read_only = False  # the start that is open leaves the run's status as it was
        self._is_sweep = False
        self._has_closed_killed_runs = False  # `close_abandoned` was called, or failed
        self._is_disk_full = False

    def is_due(self) -> bool:
        """Report whether it is time to ship: not before the first step, because the task's imports need the core."""
        now = time.monotonic()
        if now < self._wakes_at and (self._is_lost() or self._unshipped_journals.has_any(_WAKING_EVENTS)):
            self._wakes_at = now
        if now < max(self._wakes_at, self._due_at):
            return False
        self._due_at = now + PERIOD_SECS
        return True

    def ship(self) -> bool:
        """Ship what is new.

        Returns:
          True: nothing more will come, because the run has ended and the tracker has all of it, or its folder is lost.
          False: it goes on, or another process ships this folder.
        """
        if self._is_lost():
            self._end_lost_run()
            return True
        if not self._lock.is_locked:
            with suppress(Timeout):
                self._lock.acquire(timeout=0)
                # Again, under the lock: another process may have shipped in the meantime.
                self._shipped = Shipped.read(self.folder, self._name)
            if not self._lock.is_locked:
                return False
        if self._tracker is None and self._shipped.started is not None:  # an earlier process opened it
            self._open(starts_and_ends(self.folder, self._shipped.started)[0], self._shipped.started)
        self._ship_supervisor()
        if self._tracker is not None:
            self._ship_tasks(self._tracker)
            if self._shipped.last_steps:
                import_matplotlib()  # this takes 0.4 s; do it while the task trains, not at the end of the run
        if self._shipped.problem is not None:
            self._shipped.problem = None
            self._save()
        if self._tracker is None:
            self._lock.release()
        return self._tracker is None

    def end_killed(self) -> bool:
        """Write the end of a start whose starter is dead. Return False if its tasks still run; then call it again."""
        with suppress(Timeout, FolderLostError), ExitStack() as held:
            self._held_folder.check()
            held.enter_context(FileLock(self.folder / LOCK_FILE).acquire(timeout=0))
            if self._find_open_start() is None:
                return True
            if has_tasks(self.folder):
                return False
            try:
                settle(self.folder)
            except DiskFullError:  # its starter, if it lives, could not note the end for the same reason
                self._is_disk_full = True
        return True  # also if another start has the lock, which looks after the run

    def note_problem(self, error: Exception) -> str:
        """Note why the tracker does not have everything, and return it in words."""
        self._shipped.problem = mask_text(describe(error), self._settings.secret_texts())
        first, *lines = self._shipped.problem.split("\n")
        if self._lock.is_locked:
            with suppress(OSError):  # a full disk
                self._save()
        what_continues = f"training continues; the journals in {self.folder} have everything"
        return "\n".join([f"{label_of(self._name)}{first} ({what_continues})", *lines])

    def release(self) -> None:
        """Release the tracker and the folder."""
        if self._tracker is not None:
            self._tracker.close()
        self._lock.release()

    # --- the lines of the supervisor ----------------------------------------------------------------------------------

    def _ship_supervisor(self) -> None:
        """Ship what is new in the supervisor's journal, which holds the starts of the run and their ends."""
        while True:
            before = self._offset(self._supervisor_journal)
            # One line at a time, because each may open or end the run: `max_bytes=1` reads to the end of a line.
            lines, after = read_journal(self._supervisor_journal, before, max_bytes=1, left_out=self._say_left_out)
            for line in lines:
                self._ship_supervisor_line(line, before)
            self._note_offset(self._supervisor_journal, after)
            if after == before:
                break

    def _ship_supervisor_line(self, line: Mapping[str, Any], offset: int) -> None:
        """Ship one line of the supervisor's journal, which begins at `offset`. What the tasks wrote before a start or
        an end is shipped before it.
        """
        kind = line.get("event")
        if kind == RUN_STARTED:
            if self._tracker is not None:  # an earlier start was killed
                self._ship_tasks(self._tracker)
                self._tracker.close()
            self._open(line, offset)
        elif self._tracker is not None:
            if kind == RUN_ENDED:
                self._ship_tasks(self._tracker)
                self._end(self._tracker, line)
            else:
                self._ship_lines(self._tracker, [line])

    def _open(self, line: Mapping[str, Any], offset: int) -> None:
        """Begin or continue the run in the tracker, for the start that the supervisor's `line` at `offset` tells of. A
        command that only reads a run joins it, and a start that failed before its first step leaves it as it was.
        """
        tracker = self._prepare_tracker(line)
        tags = dict(line["tags"])
        if line.get("parent"):
            tags["mlflow.parentRunId"] = self._begin_sweep(Path(line["parent"]))
        start_and_its_end = starts_and_ends(self.folder, offset)[:2]
        is_kept = any(bound.get("is_kept") for bound in start_and_its_end)  # if this start has ended already
        is_training = line["command"] in TRAINING_RUNS
        self._is_sweep = line["command"] == "sweep"
        self._is_read_only = is_kept or not (is_training or self._is_sweep)
        run_id = self._begin_or_join(tracker, line, tags)
        self._tracker = tracker
        self._tracker_to_open = None
        self._start = line
        if run_id is not None and run_id != self._shipped.run_id:
            self._shipped.assign_to_run(run_id)
            # A run that is new in the tracker gets the tasks' journals from their beginning. It does not get the
            # supervisor's: starts before this one are not begun once more.
            self._shipped.offsets = {self._supervisor_journal.name: offset}
        self._shipped.started = offset
        address = tracker.address()
        if address:
            address = mask_text(address, self._settings.secret_texts())
        self._shipped.address = address
        self._unsaved_journals.add(self._supervisor_journal)
        self._save()
        self._look_for_killed_runs(tracker, line["tags"].get("host"))
        self._deadline.expect()

    def _prepare_tracker(self, line: Mapping[str, Any]) -> Tracker:
        """Return the tracker for a start, imported and ready."""
        if self._name not in TRACKERS:
            # At the end, and for a user's class only: the folder must not say whose mlflow is imported.
            sys.path += [entry for entry in self._settings.path if entry not in sys.path]
        tracker = self._tracker_to_open
        if tracker is None:
            tracker = self._build(self._name, self._settings.tracking, self.folder, line["name"], line["time"])
        self._tracker_to_open = tracker  # it knows the run that it began, if a call fails halfway and is repeated
        self._deadline.expect(secs=PREPARE_SECS)
        tracker.prepare()
        self._deadline.expect()
        return tracker

    def _begin_or_join(self, tracker: Tracker, line: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        """Join the run if this start leaves it as it was, else begin or continue it. Return the tracker's id of it."""
        run_id = self._shipped.run_id
        if self._is_read_only and run_id is not None and tracker.join(run_id):
            # This process ships the run. So if MLflow says that the run is RUNNING, its supervisor was killed.
            tracker.settle(run_id, MLFLOW_STATUS["interrupted"], {"status": "interrupted"}, line["time"])
            return run_id
        self._is_read_only = False  # there is no run that it could leave as it was
        if not run_id:
            run_id = _find_run_of_killed_start(tracker, tags)
        return tracker.start(run_id, line["name"], line["params"], tags)

    def _look_for_killed_runs(self, tracker: Tracker, host: str | None) -> None:
        """Close the runs of this host that were killed; once, however many starts this process ships."""
        if not host or self._has_closed_killed_runs:
            return
        self._has_closed_killed_runs = True
        try:
            close_abandoned(tracker, host)
        except Exception as error:
            self._warn("cannot look for runs that were killed", error)

    def _begin_sweep(self, parent: Path) -> str:
        """Return the id of the run of the sweep in `parent`, of which this run is a job. Begin it, if it has none."""
        if Shipped.read(parent, self._name).run_id is None:
            sweep = RunShipper(parent, self._name, self._deadline, self._build)
            try:
                sweep.ship()
            finally:
                sweep.release()
        run_id = Shipped.read(parent, self._name).run_id
        if run_id is None:
            raise RuntimeError(f"the sweep in {parent} has no run yet")
        return run_id

    def _end(self, tracker: Tracker, line: Mapping[str, Any]) -> None:
        """Add the tags, files and models of the end of a start, of which `line` tells, and end the run.

        What the tracker refuses is left out. If nobody answers, the error is raised, and the whole end is repeated
        later, unless another start follows.

        Raises:
          An error of the tracker, which is no refusal.
        """
        tags = dict(line.get("tags", {}))
        if not self._is_read_only and not line.get("is_kept"):
            tags["status"] = line["status"]
        if tags:
            tracker.set_tags(tags)
        self._deadline.expect()
        unanswered_errors = self._send_description_and_files(tracker, line)
        if line.get("is_kept"):
            tracker.leave(self._shipped.status or line["recorded"], line["time"])
        elif self._is_read_only:
            tracker.leave(line["recorded"], line["time"])
        else:
            tracker.end(line["recorded"], line["time"])
            self._shipped.status = line["recorded"]
        self._deadline.expect()
        if unanswered_errors:
            self._due_at = time.monotonic() + REST_SECS
            raise unanswered_errors[0]
        tracker.close()
        self._tracker = None
        self._start = None
        self._shipped.started = None
        self._shipped.models = []

    def _send_description_and_files(self, tracker: Tracker, line: Mapping[str, Any]) -> list[Exception]:
        """Send the description, files and models of the end of a start.

        Returns:
          The errors of what nobody answered, which is to be sent again.
        """
        # This end is the last line of the journal. After another one the next start is waiting, for which an end is
        # not repeated.
        is_last = len(starts_and_ends(self.folder, self._offset(self._supervisor_journal))) == 1
        unanswered_errors = list[Exception]()
        with tempfile.TemporaryDirectory(prefix="runner-") as scratch:
            calls: list[Callable[[], None]] = []
            description = line.get("description")
            if description:
                # A description that begins like this one is that of an earlier start; the user's own stays.
                calls.append(partial(tracker.set_description, description, description[:20]))
            for name in line.get("files", ()):
                calls.append(partial(self._send_file, tracker, name, Path(scratch)))
            for facts in line.get("models", ()):
                calls.append(partial(self._send_model, tracker, facts))
            for call in calls:
                try:
                    call()
                except Exception as error:
                    if is_last and not tracker.is_refusal(error):
                        unanswered_errors.append(error)
                    else:
                        self._warn("the run is recorded without a file, model or text", error)
        return unanswered_errors

    def _send_file(self, tracker: Tracker, name: str, scratch: Path) -> None:
        """Send a file of the run, if there is one of this name. The curves are drawn first; a config is sent as a copy
        in `scratch`, without its secrets; and a summary for MLflow gets the id of the run there.
        """
        path = self.folder / name
        if path.name == CURVES_FILE:
            draw_curves(self.folder)
        if not path.exists() or not self._may_send(path):
            return
        if path.name.startswith("config."):
            path = _write_masked_config(path, scratch)
        elif path.suffix == ".json" and self._name == MLFLOW:
            self._correct_run_id(path)
        self._deadline.expect(path.stat().st_size)
        folder = str(Path(name).parent)
        if folder == ".":
            folder = ""
        tracker.log_file(path, folder)
        self._deadline.expect()

    def _correct_run_id(self, summary: Path) -> None:
        """Let a summary name the run that MLflow has, which may have been unknown or another when it was written."""
        with suppress(ConfigError), alone_in(self.folder):  # else the next start writes its own file
            values = read_json(summary) or {}
            if values.get("mlflow_run_id", self._shipped.run_id) != self._shipped.run_id:
                write_json(summary, {**values, "mlflow_run_id": self._shipped.run_id})

    def _send_model(self, tracker: Tracker, facts: Mapping[str, Any]) -> None:
        """Send an exported model once, and note that the tracker has it.

        Args:
          facts: the fields of an `ExportedModel`, from the journal.
        """
        if facts["path"] in self._shipped.models:  # before the end failed, which is repeated
            return
        model = ExportedModel(**{**facts, "path": Path(facts["path"])})
        # export.dir may be anywhere, but what is there is a model.
        is_exported = (model.path / "saved_model.pb").exists() and not self._is_in_folder(model.path)
        if self._extend_deadline_for(model.path) and (is_exported or self._may_send(model.path)):
            tracker.log_model(model)
            self._deadline.expect()
            self._shipped.models = [*self._shipped.models, facts["path"]]
            self._save()

    # --- the lines of tasks -------------------------------------------------------------------------------------------

    def _ship_tasks(self, tracker: Tracker) -> None:
        """Ship the journals of the tasks, up to the next start: whether a step that is repeated counts depends on the
        start.
        """
        for path in self._journals_of_tasks():
            self._ship_task(tracker, path)
        if self._unsaved_journals:
            self._save()

    def _ship_task(self, tracker: Tracker, path: Path) -> None:
        """Ship what is new in the journal of one task, block by block."""
        while True:
            before = self._offset(path)
            lines, after = read_journal(path, before, BLOCK_BYTES, left_out=self._say_left_out)
            # Lines of a start that the tracker has not open yet must wait. Look for such a start after reading: the
            # supervisor notes a start before its tasks write, so the start of each line that was read is found.
            bounds = starts_and_ends(self.folder, self._offset(self._supervisor_journal))
            started_at = [bound["time"] for bound in bounds if bound["event"] == RUN_STARTED]
            if started_at:
                lines, after = read_journal(path, before, BLOCK_BYTES, until=started_at[0])
            has_sent = self._ship_lines(tracker, lines)
            # Must follow log_points: a crash in between ships points twice, and MLflow stores them once (same time
            # and step).
            self._note_offset(path, after, saves=has_sent)
            if after == before:
                break

    def _journals_of_tasks(self) -> Iterator[Path]:
        """Yield the journals that this tracker gets beside the supervisor's; those of hosts are for MLflow's pages."""
        for path in journals_in(self.folder):
            is_taken = self._name == MLFLOW or not is_of_host(path)
            if path != self._supervisor_journal and is_taken:
                yield path

    def _ship_lines(self, tracker: Tracker, lines: Sequence[Mapping[str, Any]]) -> bool:
        """Send the metrics and the _SENT_EVENTS of these lines. Return whether there were any."""
        last_steps = dict(self._shipped.last_steps)  # a copy, which counts when the tracker has taken the points
        points: list[Point] = []
        for line in lines:
            # One by one: a point that is taken makes later ones of the same metric and step old.
            points += [point for point in points_of(line) if self._note_if_new(point, last_steps)]
        if points:
            tracker.log_points(points)
            self._deadline.expect()
        self._shipped.last_steps = last_steps
        lines_to_send = [line for line in lines if line.get("event") in _SENT_EVENTS]
        for line in lines_to_send:
            if line.get("event") == DATASET:
                facts = {field.name: line[field.name] for field in fields(DatasetFacts)}
                tracker.log_input(DatasetFacts(**facts))
            elif line.get("event") in (ARTIFACT, IMAGE):
                self._ship_file(tracker, line)
        return bool(points or lines_to_send)

    def _ship_file(self, tracker: Tracker, line: Mapping[str, Any]) -> None:
        """Send the file or image of a line ARTIFACT or IMAGE, unless it is gone or outside of the run's folder."""
        path = self.folder / line["path"]
        if not self._extend_deadline_for(path) or not self._may_send(path):
            return
        if line["event"] == ARTIFACT:
            tracker.log_file(path, line["folder"])
            return
        last_steps = dict(self._shipped.last_steps)
        point = Point(f"images/{line['name']}", 0.0, line["step"], 0.0)  # an image is new or old as a metric is
        if self._note_if_new(point, last_steps):
            tracker.log_image(line["name"], path, line["step"], line["time"])
        self._shipped.last_steps = last_steps

    def _extend_deadline_for(self, path: Path) -> bool:
        """Give the tracker the time that a file or folder takes. If it is gone, say so and return False."""
        if not path.exists():
            say(f"{label_of(self._name)}{path} is not recorded, because it no longer exists.")
            return False
        num_bytes = sum(item.stat().st_size for item in _with_contents(path) if item.is_file())
        self._deadline.expect(num_bytes)
        return True

    def _may_send(self, path: Path) -> bool:
        """Report whether a file, or all of a folder, is in the folder of the run. If not, say that it is left out.

        Whoever gives somebody the folder of a run must not choose what else of their disk is sent.
        """
        outside = [item for item in _with_contents(path) if not self._is_in_folder(item)]
        if outside:
            self._say_left_out(f"{outside[0].resolve()}, which a journal names, is outside of {self.folder}")
        return not outside

    def _is_in_folder(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.folder.resolve())

    def _note_if_new(self, point: Point, last_steps: dict[str, int]) -> bool:
        """Report whether a point is to be sent; then its step is the last one of its metric in `last_steps`."""
        last = last_steps.get(point.name, -1)
        # A step may be evaluated again, and a run restarted twice at one step: both results are shipped. The best job
        # of a sweep may change to any step.
        may_repeat = self._is_read_only or point.name.startswith(OF_RESTARTS)
        is_repeated = may_repeat and point.step == last
        is_new = point.step > last or is_repeated or self._is_sweep
        if is_new:
            last_steps[point.name] = point.step
        return is_new

    # --- the record of what is shipped --------------------------------------------------------------------------------

    def _offset(self, journal: Path) -> int:
        return self._shipped.offsets.get(journal.name, 0)

    def _find_open_start(self) -> dict[str, Any] | None:
        """Return the line about the last start of the run; None: it has ended, or was shipped before."""
        since = self._shipped.started
        if since is None:
            since = self._offset(self._supervisor_journal)
        bounds = starts_and_ends(self.folder, since)
        if not bounds or bounds[-1]["event"] != RUN_STARTED:
            return None
        return bounds[-1]

    def _note_offset(self, journal: Path, offset: int, *, saves: bool = True) -> None:
        """Note how much of a journal is shipped.

        Args:
          saves: save the record now. It has an offset for each task, so it is not saved for each: workers mostly write
            lines that no tracker gets.
        """
        if offset != self._offset(journal):
            self._shipped.offsets[journal.name] = offset
            self._unsaved_journals.add(journal)
            if saves:
                self._save()

    def _save(self) -> None:
        """Save the record, after the disk has the journals in which it has new offsets."""
        if self._is_lost():
            return
        for journal in self._unsaved_journals:
            # First: after a power cut the record must not speak of lines that the disk has not. This process waits
            # for the disk, so that training need not.
            make_durable(journal)
        self._unsaved_journals.clear()
        self._shipped.save(self.folder, self._name)

    def _is_lost(self) -> bool:
        """Report whether nothing can be written into the folder: it was deleted or moved, or its disk is full."""
        with suppress(FolderLostError):
            self._held_folder.check()
            return self._is_disk_full
        return True

    def _end_lost_run(self) -> None:
        """End the run of a folder that was deleted or moved, or whose disk is full."""
        with suppress(FileNotFoundError):  # of a tracker that writes into the folder itself, such as csv
            if self._tracker is None and self._start is not None:
                self._open(self._start, 0)
            if self._tracker is not None:
                self._tracker.set_tags({"status": "failed"})
                self._tracker.end("FAILED", time.time())
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _say_left_out(self, what: str) -> None:
        """Say that a line, or what it names, is not recorded: once, although it may be read again."""
        if what not in self._said_left_out:
            self._said_left_out.add(what)
            say(f"{label_of(self._name)}{mask_text(what, self._settings.secret_texts())}; it is left out.")

    def _warn(self, what: str, error: Exception) -> None:
        why = mask_text(describe(error), self._settings.secret_texts())
        say(f"{label_of(self._name)}{what}: {why}")


def _find_run_of_killed_start(tracker: Tracker, tags: Mapping[str, str]) -> str | None:
    """Return the run of a process that was killed before it noted the id; None: there is none."""
    for run_id, lock in tracker.running_on(tags.get("host", "")).items():
        if lock == tags.get("lock"):
            return run_id
    return None


def _write_masked_config(config: Path, scratch: Path) -> Path:
    """Write the tasks' config to `scratch`, without its secrets, which reach no tracker; return the file."""
    tree = schema.read(config)
    # It lists them itself, since this process may have another environment than the command that composed it.
    listed = SecretList.of(schema.value_at(tree, LIST), {})
    path = scratch / config.name
    path.write_text(schema.as_yaml(masked(tree, listed)))
    return path


def _with_contents(path: Path) -> list[Path]:
    """Return a file; or a folder and all that is in it."""
    return [path, *path.rglob("*")]


# --- runs that nobody ends any more -----------------------------------------------------------------------------------


def close_abandoned(tracker: Tracker, host: str) -> None:
    """Close runs of the tracker's experiment that are RUNNING on this host although their supervisor is dead.

    A supervisor holds its run's lock (tag `lock`) while it lives, and its shipping process another one. If both can be
    taken, both are dead, and `_close_by_summary` closes the run.

    Anyone can write tags into MLflow. So a path that is not the lock of a run's folder is neither created nor written.
    """
    for run_id, lock in tracker.running_on(host).items():
        path = Path(lock)
        if not path.is_absolute() or path.name != LOCK_FILE:  # a user's tag
            continue
        with ExitStack() as held:
            try:
                for file in (path, lock_file(path.parent, MLFLOW)):
                    if file.exists():
                        held.enter_context(_lock_existing_file(file))
            except OSError:  # one of the processes is alive, or the file is not a lock of a run
                continue
            _close_by_summary(tracker, run_id, path.parent)


@contextmanager
def _lock_existing_file(path: Path) -> Iterator[None]:
    """Hold the lock of a dead process inside this context. FileLock is not used, because it creates or empties the
    file.

    Raises:
      OSError: the lock is held, or the file belongs to another user.
    """
    # Do not follow links, and do not block on a pipe.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user or is not a lock file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _close_by_summary(tracker: Tracker, run_id: str, model_dir: Path) -> None:
    """Close the MLflow run `run_id`, of which nobody ships the folder any more, with the status of its summary.

    A run without a final status was interrupted, which MLflow shows as SCHEDULED (it can be resumed). Then the files in
    the folder, such as summary.json, are changed to interrupted, too. But if the folder does not belong to this MLflow
    run, its files stay as they are and say nothing of the run, which is closed as interrupted.
    """
    shipped = Shipped.read(model_dir, MLFLOW)
    if shipped.run_id is None and journals_in(model_dir):
        # Its process began the run but could not note the id. Whoever ships the folder later must go on in this run:
        # once it is closed, `_find_run_of_killed_start` finds it no longer.
        shipped.assign_to_run(run_id)
        shipped.save(model_dir, MLFLOW)
    summary = {}
    if shipped.run_id == run_id:  # the folder belongs to this MLflow run
        settle_files(model_dir)
        summary = how_run_ended(model_dir).summary
    status = str(summary.get("status", "interrupted"))  # finished: it ended but could no longer reach the tracker
    recorded = MLFLOW_STATUS.get(status, MLFLOW_STATUS["interrupted"])
    last_signs = [path.stat().st_mtime for path in journals_in(model_dir)]
    ended_at = max(last_signs, default=time.time())
    tracker.settle(run_id, recorded, {"status": status}, ended_at)


# --- the process ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Ship the folders of the command line, or with `--to` those on standard input until it ends.

    Returns:
      0: everything is shipped; 2: one is not the folder of a run, has a file that cannot be used, or names a user's
      class that the command line does not name; NOT_ALL: something is left.
    """
    parser = argparse.ArgumentParser(prog="python -m runner.tracking.ship", description="Ship the journals of runs.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="model_dir", help="the folder of a run or a sweep")
    parser.add_argument(
        "--tracker", action="append", default=[], metavar="CLASS",
        help="a class of yours that records the run, by its dotted name; may be given several times",
    )  # fmt: skip
    parser.add_argument("--to", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    keep_saying()
    if options.to is None:
        return _ship_folders([folder.absolute() for folder in options.folders], options.tracker)
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadline = Deadline()

    def take_folder(folder: str) -> None:
        folders.put(folder)
        if not folder:
            # Only now: during the run nobody waits for the tracker, and a call may take as long as it does.
            deadline.arm()

    heed_starter(take_folder)
    return _ship_until_end(folders, str(options.to), deadline)


def _ship_folders(folders: Sequence[Path], classes: Sequence[str]) -> int:
    """Ship the runs in `folders`, and those of the jobs if one is that of a sweep, each tracker in its own process.

    Args:
      folders: the folders, which may come from anybody.
      classes: the users' classes that may be imported.
    """
    shipping = Shipping(os.environ, classes)
    has_refused = False
    try:
        for folder in folders:
            jobs = sorted(file.parent for file in folder.glob(f"*/{SETTINGS_FILE}"))
            for run in (folder, *jobs):
                try:
                    shipping.ship(run)
                except ConfigError as error:
                    has_refused = True
                    say(f"ship: {error}")
    finally:
        is_all = shipping.close()
    shipping.say_addresses()
    for name, left in shipping.left_out.items():
        say(
            f"ship: tracking.backend={name} is a class that the command line does not name, so it is not imported, and "
            f"does not have everything. If it is yours: {ship_command(name, left)}"
        )
    if has_refused or shipping.left_out:
        return USER_ERROR
    return FINISHED if is_all else NOT_ALL


def _ship_until_end(folders: queue.SimpleQueue[str], name: str, deadline: Deadline) -> int:
    """Ship the runs in `folders` until all have ended. '' says that the starter names no more folders.

    Returns:
      0: everything is shipped; NOT_ALL: the last attempts, after '', have left something.
    """
    followed = _FollowedRuns(folders, name, deadline)
    attempts = 0
    while True:
        followed.hear()
        followed.ship()
        is_last = followed.has_heard_all
        if is_last and not followed.runs:
            return FINISHED
        if is_last and not followed.is_waiting_for_tasks:
            attempts += 1
        if attempts >= LAST_ATTEMPTS or followed.has_given_up():
            followed.release()
            return NOT_ALL
        if not followed.has_failed:  # else the time that the starter waits for the tracker goes on
            deadline.expect()
        pause_secs = LAST_PERIOD_SECS if is_last else GLANCE_SECS
        time.sleep(pause_secs)


class _FollowedRuns:
    """The runs that this process ships.

    Args:
      folders: what the starter names: folders, and '' at its end.
      name: the tracker's.
      deadline: ends this process.

    Attributes:
      runs: folder -> the run there that has not ended, or of which the tracker does not have everything.
      has_heard_all: the starter names no more folders: it has ended, or waits for this process.
      is_waiting_for_tasks: tasks of a run whose starter is dead still run.
      has_failed: the tracker failed for at least one run in the last call of `ship`.
    """

    def __init__(self, folders: queue.SimpleQueue[str], name: str, deadline: Deadline) -> None:
        self.runs: dict[str, RunShipper] = {}
        self.has_heard_all = False
        self.is_waiting_for_tasks = False
        self.has_failed = False
        self._folders = folders
        self._name = name
        self._deadline = deadline
        self._has_warned = False
        self._gives_up_at = math.inf

    def hear(self) -> None:
        """Take the folders that were named since the last call."""
        while not self.has_heard_all and not self._folders.empty():
            folder = self._folders.get()
            if not folder:
                self.has_heard_all = True
            elif folder not in self.runs and Path(folder).is_dir():
                self.runs[folder] = RunShipper(Path(folder), self._name, self._deadline)

    def ship(self) -> None:
        """Ship what is new of each run, and drop those of which the tracker has everything."""
        self.is_waiting_for_tasks = False
        self.has_failed = False
        for folder, run in list(self.runs.items()):
            try:
                if self._ship_run(run):
                    del self.runs[folder]
                    gc.collect()  # matplotlib's figures are circles of references: 4 MB for each job of a sweep
                    self._gives_up_at = math.inf
            except Exception as error:
                self._note_failure(run, error)
                if self.has_heard_all and self.has_given_up():
                    break

    def _ship_run(self, run: RunShipper) -> bool:
        """Ship a run if it is time to. Return whether nothing more will come."""
        if self.has_heard_all:
            if not run.end_killed():
                self.is_waiting_for_tasks = True
        elif not run.is_due():
            return False
        return run.ship()

    def _note_failure(self, run: RunShipper, error: Exception) -> None:
        self.has_failed = True
        message = run.note_problem(error)
        if not self._has_warned and not self._deadline.is_armed:  # at the end, the starter says what is left
            say(message)
            self._has_warned = True
        if self.has_heard_all:
            # From the first failure on; a run that is shipped in the meantime shows that the tracker is back.
            self._gives_up_at = min(self._gives_up_at, time.monotonic() + ANSWER_SECS)

    def has_given_up(self) -> bool:
        """Report whether the tracker has failed for so long that the starter waits no longer."""
        return time.monotonic() > self._gives_up_at

    def release(self) -> None:
        for run in self.runs.values():
            run.release()


if __name__ == "__main__":
    sys.exit(main())
