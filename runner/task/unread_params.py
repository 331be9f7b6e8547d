"""Report params that no user function has read: misspelt names, or values without effect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from runner.config.schema import TRAINING_RUNS, Config
from runner.distribute.cluster import Cluster
from runner.hooks.hook import Hook, PassContext, Run
from runner.tracking.journal import Journal
from runner.types import ParamReads, Params

_log = logging.getLogger(__name__)


class UnreadParams(Hook):
    """A hook that reports, once, the params that neither model_fn nor an input_fn has read.

    It reports at the end of the first evaluation, or of a training without evaluations. Commands that read a run report
    nothing, because a model_fn that only evaluates does not read its learning rate. With `cluster.evaluator`, chief and
    evaluator report nothing, because each of them calls model_fn in some modes only.
    """

    def __init__(self, config: Config, cluster: Cluster, journal: Journal) -> None:
        calls_all_modes = cluster.is_chief and not config.cluster.evaluator
        self._is_on = config.command in TRAINING_RUNS and calls_all_modes
        self._journal = journal
        self._reads: dict[str, ParamReads] = {}
        self._has_trained = False

    def watch(self, key: str, params: Mapping[str, Any]) -> Params:
        """Return params whose reads are noted, to pass to a function; `key` is their key in the config."""
        reads = ParamReads(map(str, params))
        self._reads[key] = reads
        return Params(params).watched(reads)

    def begin(self, run: Run) -> None:
        self._has_trained = self._has_trained or not isinstance(run, PassContext)

    def end(self, run: Run) -> None:
        if isinstance(run, PassContext):
            self.say()

    def say(self) -> None:
        """Report the unread params once, after training: on the screen, and in the journal for the summary."""
        if not self._has_trained:  # an evaluation before the first step, or a run that had finished before
            return
        unread = []
        for key, reads in self._reads.items():
            unread += [f"{key}.{name}" for name in reads.unread]
        if self._is_on and unread:
            self._journal.event("unread_params", keys=unread)
            _log.warning(
                "No effect, because neither model_fn nor input_fn reads it: %s. Check the spelling, or remove it.",
                ", ".join(unread),
            )
        self._is_on = False
