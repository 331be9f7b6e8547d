"""The checkpoints of one call of `Estimator.train`: when one is due, written, durable and told of."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from runner.hooks import Every
from runner.inputs import Feed
from runner.journal import Journal, NullJournal
from runner.model import Model
from runner.position import state_is_exact
from runner.report import format_bytes
from runner.saving import Saved, Saving
from runner.snapshots import Snapshot
from runner.types import StepResult

_log = logging.getLogger(__name__)


class RunCheckpoints:
    """What a run writes, and what is known of the last one.

    Args:
      saving: where they go.
      every: their cadence.
      latest: path of the one that the run goes on from; None: it is new.

    Attributes:
      saved_step: of the last one, or where the run began.
      latest: path of the last one.
    """

    def __init__(
        self, saving: Saving, model: Model, feed: Feed, journal: Journal | NullJournal, every: Every, latest: str | None
    ) -> None:
        self.every, self.latest = every, latest
        self.saved_step: int | None = None
        self._saving, self._model, self._feed, self._journal = saving, model, feed, journal
        self._saved_at = time.monotonic()
        self._is_told = False
        self._state_is_exact = state_is_exact(feed)

    def begin(self, step: int) -> None:
        """The run begins at `step`: the cadence counts from here."""
        self.saved_step, self._saved_at = step, time.monotonic()

    def is_due(self, result: StepResult) -> bool:
        """Whether the cadence asks for one after these steps."""
        return self.every.due(result.first_step - 1, result.last_step, time.monotonic() - self._saved_at)

    def write(
        self,
        step: int,
        extra: Mapping[str, Any],
        iterator: Any,
        *,
        asynchronous: bool,
        is_told: bool = False,
        is_evaluated: bool = False,
    ) -> str:
        """Returns, with its path, when the values are copied or, where it is not asynchronous, when it is durable.

        Args:
          extra: what it holds beside the variables.
          iterator: of the training input, whose place it holds where that leads to the same examples.
          is_told: the log and the journal tell of it.
        """
        self.settle()  # one at a time
        snapshot = Snapshot(step, self._model.values(), extra)
        iterators = {self._feed.pipeline: iterator} if self._state_is_exact else {}
        self._is_told = is_told
        with self._journal.phase("save"):
            path = self._saving.begin(snapshot, iterators, asynchronous=asynchronous, is_evaluated=is_evaluated)
        self._model.has_values_of(path)
        self.saved_step, self._saved_at, self.latest = step, time.monotonic(), path
        self.poll()
        return path

    def settle(self) -> None:
        """Returns when the last one is durable, on this worker. Raises: what went wrong while it was written."""
        self.poll()
        if self._saving.is_busy:
            with self._journal.phase("save"):
                saved = self._saving.wait()
            self._tell(saved)

    def settle_before(self, error: Exception) -> None:
        """Lets the one that is under way become durable before `error` is raised."""
        try:
            self.settle()
        except Exception as other:
            error.add_note(f"and the last checkpoint was not written: {other}")

    def poll(self) -> None:
        """Tells of the last one, once it is durable."""
        self._tell(self._saving.poll())

    def _tell(self, saved: Saved | None) -> None:
        if saved is None or not self._is_told:
            return
        self._journal.event("checkpoint", **saved.facts)
        waited = saved.copy_secs + saved.input_secs
        _log.info(
            "Saved %s: %s in %.2f s%s",
            os.path.basename(saved.path),
            format_bytes(saved.bytes),
            waited + saved.write_secs,
            f"; training waited for {waited:.3f} s of it" if saved.asynchronous else "",
        )
