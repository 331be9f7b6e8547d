"""Reduce the learning rate when an evaluation's metric no longer improves.

The rule is that of Keras' callback ReduceLROnPlateau, counted in evaluations instead of epochs. The optimizer keeps the
rate in a variable, so each checkpoint has the rate from before that checkpoint was evaluated. A file in model_dir keeps
the metric's values and the rates that were set because of them. A run that resumes from a checkpoint therefore begins
with the same rate as an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from runner.config.settings.metric_rules import ReduceLROnPlateau as ReduceLROnPlateau
from runner.distribute.collectives import Collectives
from runner.estimator.early_stopping import LEARNING_RATE_REDUCED, MetricHistory


class RunWithRate(Protocol):
    """A training run whose learning rate can be read and set; both raise ValueError if the rate cannot be changed."""

    learning_rate: float

    @property
    def global_step(self) -> int: ...


class LearningRateReductions:
    """The reductions of the learning rate in one run. The chief decides; all workers call the same methods together.

    Args:
      rule: the rule.
      history: the values of the rule's metric.
      collectives: communication between the workers.
      announce: `Estimator.announce`, which shows a text to the user and notes an event with fields in the journal.
    """

    def __init__(
        self,
        rule: ReduceLROnPlateau,
        history: MetricHistory,
        collectives: Collectives,
        announce: Callable[..., None],
    ) -> None:
        self._rule = rule
        self._history = history
        self._collectives = collectives
        self._announce = announce
        self._rates: dict[int, float] = {}  # equal on all workers
        self._is_open = True

    def check(self, run: RunWithRate) -> None:
        """Check that there is a rate to reduce.

        Raises:
          ValueError: the learning rate cannot be changed.
        """
        if self._rule.metric is not None:
            try:
                _ = run.learning_rate
            except ValueError as error:
                raise ValueError(f"{self._rule.key}.metric={self._rule.metric}: {error}") from None

    def evaluated(self) -> None:
        """Note that the metric has a new value; `apply` then decides before the next step."""
        self._is_open = True

    def apply(self, run: RunWithRate) -> None:
        """Set the rate that results from the evaluations up to this step, before the step that follows.

        The rate is not set directly after an evaluation, because another evaluation may still read the checkpoint into
        the variables. After a rollback (train.nan) the run comes to this step again, with the rate from before its
        evaluation, and sets the same rate again.
        """
        step = run.global_step
        if self._rule.metric is not None and self._is_open:
            self._is_open = False
            # As text, because "" can say that there is no new rate; from `repr` every worker reads the same float.
            text = ""
            if self._collectives.is_chief:
                decided = self._decide(run, step)
                text = "" if decided is None else repr(decided)
            text = self._collectives.broadcast_text(text)
            if text:
                self._rates[step] = float(text)
        if step in self._rates:
            run.learning_rate = self._rates[step]

    def _decide(self, run: RunWithRate, step: int) -> float | None:
        """Return the rate that begins after `step`; None: it stays.

        A new reduction is written to the history's file, and announced.
        """
        reason = self._history.reason(step)
        if reason is None or step in self._history.rates:  # a resumed run takes the rate that it had decided
            return self._history.rates.get(step)
        before = run.learning_rate
        after = max(before * self._rule.factor, self._rule.min_lr)
        # Compare as float32, the dtype of the rate; otherwise rounding could make a rate at the limit seem different.
        if before <= np.float32(self._rule.min_lr):
            return None
        # Written to the file before the run gets the rate: a run that is killed in between sets it when it resumes.
        self._history.add_rate(step, after)
        text = f"learning rate {before:.6g} -> {after:.6g} at step {step}: {reason}"
        self._announce(LEARNING_RATE_REDUCED, text, step=step, before=before, after=after)
        return after
