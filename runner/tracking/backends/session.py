"""`RunConfig(tracking=...)`: record what an Estimator does in a script, as the command line does for a run.

The script's process writes the journal, as a task does. One second process ships the journals of all Estimators of the
script (`session_process`); the script waits for it only at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.config.schema import TrackingConfig
from runner.system.redaction import masked
from runner.system.standard_streams import say
from runner.tracking.artifacts import Artifacts, keeping
from runner.tracking.journal import Journal, Journals

MODULE = "runner.tracking.backends.session_process"
LAST_SECS = 60.0
"""Seconds that the end of a script waits for its record: more than the shipping process waits for a frozen tracker."""


class ShippingProcess:
    """The process that ships the journals of this process's Estimators."""

    def __init__(self) -> None:
        # It finds modules where this process does: a script's folder is on its path.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._numbers = itertools.count()
        self._child = subprocess.Popen(
            [sys.executable, "-m", MODULE], env=env, stdin=subprocess.PIPE, stdout=2, start_new_session=True
        )
        atexit.register(self.close)

    def send(self, **message: Any) -> None:
        """Send the process a message. This does not wait for its work, because it reads its messages at once."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            say("tracking: the process that ships the journals has ended. The journals still have everything.")
            _shipping_process.cache_clear()

    def number(self) -> int:
        return next(self._numbers)

    def close(self) -> None:
        """Wait until everything is recorded, up to LAST_SECS."""
        atexit.unregister(self.close)
        _shipping_process.cache_clear()
        with contextlib.suppress(OSError):
            assert self._child.stdin is not None
            # A process forked from this one may keep the pipe open.
            self._child.stdin.write(b"{}\n")
            self._child.stdin.close()
        try:
            self._child.wait(LAST_SECS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@functools.cache
def _shipping_process(pid: int) -> ShippingProcess:
    """Return the process that ships the journals of this process.

    Args:
      pid: id of this process; a process forked from it has another id, and so gets a shipping process of its own.
    """
    return ShippingProcess()


def wait_until_recorded() -> None:
    """Wait until everything is recorded, as at the end of a script."""
    if _shipping_process.cache_info().currsize:
        _shipping_process(os.getpid()).close()


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
    _depth: int = field(default=0, init=False)

    @contextlib.contextmanager
    def recording(self, command: str, *, trains: bool, **settings: Any) -> Iterator[None]:
        """Record what happens inside this context as one run of `command`. A context inside another belongs to the
        outer run.

        Args:
          command: the name of the recorded command.
          trains: the command trains. False: it only reads a run, whose params and tags stay as they are.
          settings: further params, by dotted names; None values are left out.
        """
        self._depth += 1
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        ships = self.role in ("chief", "evaluator")
        kept = Artifacts(self.model_dir, self.journal, ships, self.settings.takes_files)
        number = self._begin(trains, settings) if self.role == "chief" else None
        self.journal.event("started", pid=os.getpid(), command=command)
        status = "failed"
        try:
            with keeping(kept):
                yield
            status = "finished"
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            status = "interrupted"
            raise
        finally:
            self._depth -= 1
            if self.role == "evaluator":
                number = self._begin(False, settings)
            if number is not None:
                _shipping_process(os.getpid()).send(end=number, status=status, time=time.time())

    def _begin(self, trains: bool, settings: Mapping[str, Any]) -> int | None:
        if not self.settings.backends:
            return None
        process = _shipping_process(os.getpid())
        number = process.number()
        given = {name: value for name, value in settings.items() if value is not None}
        process.send(
            begin=number,
            model_dir=str(self.model_dir),
            tracking=asdict(self.settings),
            params=masked({**self.params, **given}),
            tags={**masked(self.settings.tags), **self.tags},
            argv=sys.argv,
            model_name=self.model_name,
            is_reader=not trains,
            # noted now, because the first step may come before the message is read
            sizes=Journals(self.model_dir).mark().sizes,
        )
        return number
