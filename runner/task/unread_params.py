"""Params that no function of the user has read: a misspelt name, or one whose value makes no difference."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from runner.config.schema import TRAINING_RUNS, Config
from runner.distribute.cluster import Cluster
from runner.hooks.hook import Hook, PassContext, Run
from runner.tracking.journal import Journal, NullJournal
from runner.types import ParamReads, Params

_log = logging.getLogger(__name__)


class UnreadParams(Hook):
    """Name, once, the params that neither model_fn nor an input_fn has read by the end of the first evaluation.

    Or by the end of a training that nobody evaluates. Commands that read a run have no note: a model_fn that only
    evaluates does not ask for its learning rate; nor have the chief and the evaluator of `cluster.evaluator`, of which
    each calls model_fn in modes of its own.
    """

    def __init__(self, config: Config, cluster: Cluster, journal: Journal | NullJournal) -> None:
        self._is_on = config.command in TRAINING_RUNS and cluster.is_chief and not config.cluster.evaluator
        self._journal = journal
        self._reads: dict[str, ParamReads] = {}
        self._has_trained = False

    def watch(self, key: str, params: Mapping[str, Any]) -> Params:
        """Return `params` of a function, to be handed to it; `key` is where the config has them."""
        reads = ParamReads(map(str, params))
        self._reads[key] = reads
        return Params(params).watched(reads)

    def begin(self, run: Run) -> None:
        # An evaluation before the first step has not called model_fn to train.
        self._has_trained = self._has_trained or not isinstance(run, PassContext)

    def end(self, run: Run) -> None:
        if isinstance(run, PassContext) and self._has_trained:
            self.say()

    def say(self) -> None:
        """Say it, unless it was said: on the screen, and in the journal for the summary."""
        unread = [f"{key}.{name}" for key, reads in self._reads.items() for name in reads.unread]
        if self._is_on and unread:
            self._journal.event("unread_params", keys=unread)
            _log.warning(
                "Not read by model_fn or input_fn, so without effect: %s. Check the name, or remove it.",
                ", ".join(unread),
            )
        self._is_on = False
