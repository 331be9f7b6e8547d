"""`RunConfig(tracking=...)`: record what an Estimator does in a script, as the command line does for a run.

The script's process writes the journal, as a task does, and how a run begins and ends, as a supervisor does. Only the
end of the script waits for the processes that ship it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.config.schema import ConfigError, TrackingConfig
from runner.system.files import MODEL_SUMMARY_FILE
from runner.system.redaction import NO_LIST, mask_text, masked
from runner.system.standard_streams import say
from runner.tracking.artifacts import Artifacts, keeping, log_artifact
from runner.tracking.backends.host_metrics import HostMetrics
from runner.tracking.curves import CURVES_FILE
from runner.tracking.journal import RUN_STARTED, Journal, Journals, note_of_run
from runner.tracking.provenance import tags_of_this_process
from runner.tracking.run_end import RunEnd, write_end
from runner.tracking.run_lock import TIMEOUT_SECS, alone_in
from runner.tracking.shipping import Shipping, write_settings
from runner.tracking.summary import MLFLOW_STATUS
from runner.tracking.tracker import exported_models

script: str | None = None
"""Path of the script that `python -m runner.classic` runs, which is kept with its runs."""

LOCK_SECS = 60.0
"""Seconds that an evaluator, when it has ended, waits for the chief to leave the folder."""


@functools.cache
def _shipping(pid: int) -> Shipping:
    """Return the shipping processes of this process.

    Args:
      pid: id of this process; a process forked from it has another id, and so gets shipping processes of its own.
    """
    # They find modules where this process does: a script's folder is on its path.
    folders = [folder for folder in sys.path if folder]
    shipping = Shipping({**os.environ, "PYTHONPATH": os.pathsep.join(folders)})
    atexit.register(wait_until_recorded)
    return shipping


def wait_until_recorded() -> None:
    """Wait until everything is recorded, as at the end of a script, and say where."""
    if _shipping.cache_info().currsize:
        atexit.unregister(wait_until_recorded)
        shipping = _shipping(os.getpid())
        _shipping.cache_clear()
        shipping.close()
        shipping.say_addresses()


class NullRecord:
    """Records nothing of what an Estimator does."""

    def recording(self, command: str, *, trains: bool, **settings: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass
class ScriptRecord(NullRecord):
    """The record of one Estimator.

    Attributes:
      params: dotted name -> value, for MLflow; with secrets masked.
      tags: tags, in addition to those that say where the run came from.
      model_name: name of exported models.
      role: role of this process. The chief's journals are shipped at once. An evaluator's journals are shipped when it
        has ended, because only one process at a time may ship the journals of a folder. All other roles only write
        journals.
    """

    settings: TrackingConfig
    model_dir: Path
    journal: Journal
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    model_name: str
    role: str
    _is_recording: bool = field(default=False, init=False)
    _journals: Journals | None = field(default=None, init=False)
    _had_checkpoint: bool = field(default=False, init=False)
    _folder_lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    @contextlib.contextmanager
    def recording(self, command: str, *, trains: bool, **settings: Any) -> Iterator[None]:
        """Record what happens inside this context as one run of `command`. A context inside another belongs to the
        outer run.

        Args:
          command: the name of the recorded command.
          trains: the command trains. False: it only reads a run, whose params and tags stay as they are.
          settings: further params, by dotted names; None values are left out.
        """
        if self._is_recording:
            yield
            return
        self._is_recording = True
        keeps_files = self.role in ("chief", "evaluator")
        artifacts = Artifacts(self.model_dir, self.journal, keeps_files, self.settings.takes_files)
        if self.role == "chief":
            # Whatever only reads the run is recorded as evaluate, which leaves the run as it was.
            self._begin_run(command if trains else "evaluate", settings)
        self.journal.event("started", pid=os.getpid(), command=command)
        status = "failed"
        try:
            with keeping(artifacts), self._measuring_host(trains=trains):
                if script is not None and self._journals is not None:
                    log_artifact(script)
                yield
            status = "finished"
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            status = "interrupted"
            raise
        finally:
            self._is_recording = False
            if self.role == "evaluator":
                self._begin_run("evaluate", settings, LOCK_SECS)
            self._end_run(status, trains=trains)

    def _measuring_host(self, *, trains: bool) -> contextlib.AbstractContextManager[object]:
        """Return a context beside which the use of this host is recorded, if that is asked for."""
        is_recorded = self._journals is not None and self.settings.has_mlflow
        if not (trains and is_recorded and self.settings.system_metrics):
            return contextlib.nullcontext()
        return HostMetrics(self.model_dir, os.environ)

    def _begin_run(self, command: str, settings: Mapping[str, Any], wait_secs: float = TIMEOUT_SECS) -> None:
        """Take the folder's lock, note that a run has started, and begin to ship its journals. Without a backend, or if
        another process has the lock, nothing is recorded, and `_journals` stays None.
        """
        if not self.settings.backends:
            return
        try:
            self._folder_lock.enter_context(alone_in(self.model_dir, timeout_secs=wait_secs))
        except ConfigError as error:
            say(f"tracking: {error} (nothing is recorded; training continues)")
            return
        self._journals = Journals(self.model_dir).mark()
        self._had_checkpoint = (self.model_dir / "checkpoint").exists()
        given = {name: value for name, value in settings.items() if value is not None}
        params = masked({**self.params, **given}, NO_LIST)
        tags = {
            **masked(self.settings.tags, NO_LIST),
            **masked(self.tags, NO_LIST),
            **tags_of_this_process(self.model_dir, sys.argv),
        }
        run_name = mask_text(self.settings.run_name or self.model_dir.name, ())
        note_of_run(self.model_dir, RUN_STARTED, command=command, name=run_name, params=params, tags=tags)
        write_settings(self.model_dir, self.settings, os.environ, sys.path[:1])  # `ship` reads them
        _shipping(os.getpid()).ship(self.model_dir)

    def _end_run(self, status: str, *, trains: bool) -> None:
        """Note how the run ended, and release the folder. Its journals are shipped further meanwhile."""
        if self._journals is None:
            return
        models = exported_models(self._journals.events("exported").get("chief", ()), self.model_name)
        ended_before_first_step = trains and status != "finished" and not self._journals.events("first_step")
        # Such a start has changed nothing, so the run keeps the end of the start before it.
        is_kept = ended_before_first_step and self._had_checkpoint
        tags = {}
        if is_kept:
            tags["last_failed_start"] = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {status}"
        end = RunEnd(
            status,
            MLFLOW_STATUS[status],
            tags=tags,
            files=[MODEL_SUMMARY_FILE, CURVES_FILE],
            models=[asdict(model) for model in models],
            is_kept=is_kept,
        )
        write_end(self.model_dir, end)
        self._journals = None
        # After the line about the end: the next start, which waits for this lock, comes after it in the journal.
        self._folder_lock.close()
