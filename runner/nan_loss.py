"""A loss that is not finite: at which step, and what became NaN with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from runner.types import StepResult

MAX_ROLLBACKS = 3
"""How often a run goes back to its last checkpoint because of a loss that is not finite."""


class NanLossError(tf.compat.v1.train.NanLossDuringTrainingError):
    """A loss that is not finite; as tf.estimator's error, with the step and what became NaN in its text."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass(frozen=True)
class NanLoss:
    """The first of some losses that is not finite.

    Attributes:
      variables: names of those that are not finite after that loop.
    """

    step: int
    loss: float
    variables: Sequence[str]

    @property
    def held(self) -> str:
        """What the variables hold, in a sentence."""
        if not self.variables:
            return "All variables are still finite."
        return f"After it these variables hold values that are not finite: {', '.join(self.variables)}."

    def error(self, saved_step: int | None, rollbacks: int) -> NanLossError:
        """What ends a run. Args: rollbacks: it has gone back so many times."""
        return NanLossError(
            f"the loss became {self.loss} at step {self.step}. {self.held} "
            f"The last checkpoint is of step {saved_step}; train.nan=ignore (RunConfig(nan='ignore')) trains on."
            + (f" It was gone back to {rollbacks} times already." if rollbacks else "")
        )


def first_nan(result: StepResult, advance: int) -> tuple[int, float] | None:
    """(the step, the loss) of the first loss that is not finite; None: all are. Args: advance: steps an update."""
    bad = np.flatnonzero(~np.isfinite(result.losses))
    if not bad.size:
        return None
    # The loop ends with that step, but for those that learn of it only afterwards (has_local_losses).
    return result.first_step + (int(bad[0]) + 1) * advance - 1, result.losses[bad[0]]
