"""The process that ships the journals of a script's Estimators, begun and ended by messages on its standard input.

  python -m runner.tracking.backends.session_process

The process ends with its input, or with an empty message. If a run has not been ended by then, its script was killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.config.schema import ConfigError, TrackingConfig
from runner.system.files import MODEL_SUMMARY_FILE
from runner.system.redaction import mask_text, secrets_of
from runner.system.standard_streams import keep_saying, say
from runner.tracking.backends.build import build_trackers
from runner.tracking.exit_codes import MLFLOW_STATUS
from runner.tracking.journal import Journals
from runner.tracking.provenance import tags_of_this_process
from runner.tracking.run_lock import alone_in
from runner.tracking.run_record import RunRecord
from runner.tracking.shipper import Shippers
from runner.tracking.tracker import RunDescription, exported_models

LOCK_SECS = 60.0
"""Seconds to wait for the folder's lock, while the process of a killed script still closes its run."""


class Session:
    """One run of an Estimator.

    Args:
      told: the message that began the run, from `session.ScriptRecord`.

    Raises:
      ConfigError: another process runs in the folder.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.model_dir = Path(told["model_dir"])
        settings = TrackingConfig(**told["tracking"])
        secrets = secrets_of(told["tracking"])
        self._model_name = str(told["model_name"])
        self._held = contextlib.ExitStack()
        self._held.enter_context(_alone_in(self.model_dir))
        self._journals = Journals(self.model_dir, told["sizes"])
        name = settings.run_name or self.model_dir.name
        self._shippers = Shippers(
            self.model_dir,
            build_trackers(settings, self.model_dir, name, os.environ, Path.cwd()),
            RunRecord.read(self.model_dir),
            RunDescription(
                name, told["params"], {**told["tags"], **tags_of_this_process(self.model_dir, told["argv"])}
            ),
            warn=lambda text: say(mask_text(text, secrets)),
            is_reader=told["is_reader"],
            journals=self._journals,
            patience_secs=0.0 if told["is_reader"] else math.inf,
        )
        self._shippers.start()

    def end(self, status: str, until: float) -> dict[str, str]:
        """Ship the remaining lines and close the run.

        Args:
          status: how the run ended.
          until: when it ended, in seconds since the epoch; later lines belong to the script's next run.

        Returns:
          Tracker name -> the address at which the user finds the run.
        """

        def noted(event: str) -> list[dict[str, Any]]:
            return [line for line in self._journals.events(event).get("chief", ()) if line["time"] <= until]

        try:
            is_recorded = status == "finished" or bool(noted("first_step"))
            self._shippers.drain(is_recorded=is_recorded)
            files = [self.model_dir / MODEL_SUMMARY_FILE]
            models = exported_models(noted("exported"), self._model_name)
            addresses = self._shippers.addresses()
            self._shippers.close(MLFLOW_STATUS[status], {"status": status}, files, models)
            return addresses
        finally:
            self._shippers.release()
            self._held.close()


@contextlib.contextmanager
def _alone_in(model_dir: Path) -> Any:
    until = time.monotonic() + LOCK_SECS
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(alone_in(model_dir))
                break
            except ConfigError:
                if time.monotonic() > until:
                    raise
        yield


def main() -> None:
    """Handle the messages on standard input one by one, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_saying()
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # All is read at once: the script never waits for us.
    threading.Thread(target=_read, args=(told.put,), daemon=True).start()
    sessions: dict[int, Session] = {}
    shown: dict[str, dict[str, str]] = {}
    while (line := told.get()) is not None:
        message = json.loads(line)
        if not message:
            break
        try:
            if "begin" in message:
                sessions[message["begin"]] = Session(message)
            elif message["end"] in sessions:
                _end(sessions.pop(message["end"]), message["status"], message["time"], shown)
        except (ConfigError, OSError) as error:
            say(f"tracking: {error} (nothing is recorded; training continues)")
    for session in sessions.values():
        _end(session, "interrupted", time.time(), shown)


def _end(session: Session, status: str, until: float, shown: dict[str, dict[str, str]]) -> None:
    addresses = session.end(status, until)
    if addresses != shown.get(str(session.model_dir)):  # once for each, however often a script trains and evaluates
        shown[str(session.model_dir)] = addresses
        for name, address in addresses.items():
            say(f"{name}: {address}")


def _read(put: Callable[[str | None], None]) -> None:
    for line in sys.stdin:
        put(line)
    put(None)


if __name__ == "__main__":
    main()
