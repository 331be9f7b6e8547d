"""The life of the evaluator: it follows the checkpoints that another process writes, until training has ended."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from runner import manifest, retention
from runner.damage import DamagedCheckpointsError
from runner.ending import Ending, read_ending
from runner.hooks import Hook, Interrupted, Run

_log = logging.getLogger(__name__)

POLL_SECS = 0.5
"""How often the evaluator looks for a checkpoint, and whether training has ended."""


class Abandoned(Interrupted):
    """Training failed or was interrupted: nobody waits for the evaluation that is under way."""


class Evaluations(Protocol):
    """What is evaluated, and when."""

    def is_due(self) -> bool:
        """Whether a new checkpoint would be evaluated now."""

    def of_checkpoint(self, path: str, *, is_last: bool) -> Sequence[Callable[[], None]]:
        """What is due and not done of the checkpoint `path`, each to be called; of the last one, what is not done."""


class TrainingWatch(Hook):
    """Whether training goes on, in a process that has no part in it; as a hook, it gives up an evaluation that nobody
    waits for any more.

    Args:
      generation: of this process. What an earlier start of the run left says nothing. 0, where nobody counts: of an
        ending that is there already only a complete one counts, since the others are about to be gone on from.
    """

    def __init__(self, model_dir: str | os.PathLike[str], generation: int = 0) -> None:
        self._model_dir, self._generation = model_dir, generation
        before = read_ending(model_dir)
        self._stale = before if generation == 0 and not before.is_complete else None
        self._looked = time.monotonic()

    def ending(self) -> Ending:
        """How training has ended, or that it goes on."""
        found = read_ending(self._model_dir)
        counts = found.generation >= self._generation and found != self._stale
        return found if counts else Ending()

    def after_batches(self, run: Run, examples: int) -> None:
        if time.monotonic() - self._looked < POLL_SECS:
            return
        self._looked = time.monotonic()
        ending = self.ending()
        if ending.is_over and not ending.is_complete:
            raise Abandoned(f"training was {ending.status}" if ending.status == "interrupted" else "training failed")


class Follower:
    """Evaluates checkpoints of `model_dir`, the newest first, while another process writes and removes them.

    Args:
      latest: the path of the newest whole checkpoint; None: there is none yet.
      wait: called between two looks, with seconds; what it raises ends the evaluator.
    """

    def __init__(
        self,
        model_dir: str,
        watch: TrainingWatch,
        evaluations: Evaluations,
        latest: Callable[[], str | None],
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model_dir, self._watch, self._evaluations = model_dir, watch, evaluations
        self._latest, self._wait = latest, wait
        self._has_waited = False

    def follow(self) -> Ending:
        """Evaluates until training has ended.

            while training goes on:
                evaluate the newest checkpoint, when that is due
                wait
            evaluate the last checkpoint, unless training failed or was interrupted

        Raises:
          DamagedCheckpointsError: training has ended, and every checkpoint is damaged.
        """
        retention.release(self._model_dir)  # of an evaluator that was killed
        while True:
            # Before the look for the checkpoint: the last one is then there to be seen.
            ending = self._watch.ending()
            if ending.is_over and not ending.is_complete:
                return ending
            if ending.is_over or self._evaluations.is_due():
                is_done = self._look(is_last=ending.is_over)
                if ending.is_over and is_done:
                    return ending
            self._wait(POLL_SECS)

    def _look(self, *, is_last: bool) -> bool:
        """Evaluates the newest checkpoint; False where it went away meanwhile."""
        path = self._newest(is_last=is_last)
        if path is None:
            if not self._has_waited:
                _log.info("There is no checkpoint in %s yet: waiting for the first.", self._model_dir)
            self._has_waited = True
            return is_last
        before = manifest.fingerprint(path)
        try:
            due = self._evaluations.of_checkpoint(path, is_last=is_last)
            with retention.lease(path) if due else contextlib.nullcontext():
                for evaluate in due:
                    evaluate()
        except Abandoned:
            return False
        except Interrupted:
            raise
        except Exception:
            # The chief may have removed it before it saw the lease, or may be writing this step again.
            if manifest.fingerprint(path) == before:
                raise
            _log.warning("%s was removed while it was read, and is not evaluated.", os.path.basename(path))
            return False
        return True

    def _newest(self, *, is_last: bool) -> str | None:
        try:
            return self._latest()
        except DamagedCheckpointsError:
            if is_last:
                raise
            return None  # or the only one is just being written again
