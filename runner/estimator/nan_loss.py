"""A loss that is not finite: the run stops, rolls back to its last checkpoint, or trains on (`train.nan`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from runner.checkpoint.reader import Reader
from runner.estimator.checkpointing import RunCheckpoints
from runner.estimator.context import EstimatorContext
from runner.estimator.train_setup import TrainSetup
from runner.hooks.hook import Run
from runner.types import StepResult

_log = logging.getLogger(__name__)

MAX_ROLLBACKS = 3
"""How often a run goes back to its last checkpoint because of a loss that is not finite."""


_SHOWN_VARIABLES = 3
"""How many are named; the journal has all of them."""


def _named(variables: Sequence[str]) -> str:
    more = len(variables) - _SHOWN_VARIABLES
    return ", ".join(variables[:_SHOWN_VARIABLES]) + (f" and {more} more" if more > 0 else "")


class NanLossError(tf.compat.v1.train.NanLossDuringTrainingError):
    """A loss that is not finite; as tf.estimator's error, with the step and what became NaN in its text.

    Attributes:
      is_clear: the text says all: the traceback, which is the engine's, is not shown with it.
    """

    is_clear = True

    def __str__(self) -> str:
        return str(self.args[0])


class NanPolicy:
    """Does what `train.nan` says, and a NanTensorHook, when a loss of a run is not finite.

    Attributes:
      rollbacks: number of times that the run went back, those before it was resumed included.
    """

    def __init__(self, context: EstimatorContext, setup: TrainSetup, checkpoints: RunCheckpoints) -> None:
        self.rollbacks = 0 if setup.latest is None else int(Reader(setup.latest).extra().get("rollbacks") or 0)
        self._context, self._setup, self._checkpoints = context, setup, checkpoints
        self._policy = setup.config.nan

    @property
    def needs_single_steps(self) -> bool:
        """Report whether a loop has one step: to skip the bad batch alone, its loop must not have gone on itself."""
        return self._policy == "rollback" and self._setup.program.has_local_losses

    @property
    def needs_place(self) -> bool:
        """Report whether the input must stand behind the bad batch then: training goes on, or a checkpoint is saved."""
        return self._policy == "rollback" or self._setup.overrides.stop_at_nan is False

    def accepts(self, losses: np.ndarray) -> bool:
        """Report whether training goes on after these losses."""
        return self._policy == "ignore" or bool(np.isfinite(losses).all())

    def check(self, run: Run, result: StepResult, advance: int) -> bool:
        """Act on the first loss of a loop that is not finite. Returns: whether the variables were rolled back.

        Args:
          advance: what a step adds to the global step.

        Raises: NanLossError: the run ends.
        """
        if self.accepts(result.losses):
            return False
        bad = int(np.flatnonzero(~np.isfinite(result.losses))[0])
        # The loop ends with that step, unless the loss is known only after it (has_local_losses).
        step = result.first_step + (bad + 1) * advance - 1
        loss, variables = result.losses[bad], self._setup.model.not_finite()
        held = "All variables are still finite."
        if variables:
            held = f"Non-finite variables: {_named(variables)}."
        self._context.journal.event("nan", step=step, loss=str(loss), variables=variables)
        if self._policy == "rollback" and self.rollbacks < MAX_ROLLBACKS:
            self._roll_back(step, loss)
            return True
        if self._setup.overrides.stop_at_nan is not False:
            raise NanLossError(f"the loss became {loss} at step {step}. {self._advice()} {held}")
        # NanTensorHook(fail_on_nan_loss=False): training ends without an error.
        _log.warning("The loss became %s at step %d. %s", loss, step, held)
        run.request_stop("the loss is not finite")
        return False

    def _advice(self) -> str:
        """Say what to try, the likely cure first; to ignore it is the last."""
        clip = "train.clip_global_norm=1" if self._setup.program.is_native else "tf.clip_by_global_norm in model_fn"
        saved = f"the last checkpoint is of step {self._checkpoints.saved_step}"
        cures = ["a lower learning rate", clip]
        if self._policy == "rollback":
            saved = f"it was gone back to {self.rollbacks} times already: {saved}"
        elif not self._setup.config.cluster.num_ps:
            cures.append("train.nan=rollback (RunConfig(nan='rollback')), which goes back and leaves the batch out")
        return f"Try {', '.join(cures[:-1])} or {cures[-1]} ({saved}). train.nan=ignore trains on with what there is."

    def check_loss_scale(self, step: int) -> None:
        """Act on steps that were all left out, as their gradients were not finite.

        Raises: NanLossError: no scale makes them finite.
        """
        scale = self._setup.program.loss_scale
        if scale is not None and scale.is_exhausted:
            raise NanLossError(
                f"no loss scale makes the gradients finite at step {step + 1} (train.precision=mixed_float16): they "
                f"are not finite by themselves. The last checkpoint is of step {self._checkpoints.saved_step}."
            )

    def _roll_back(self, step: int, loss: float) -> None:
        """Give the variables the values of the last checkpoint; the input goes on after the bad batch.

        A run that is resumed does the same: it comes to the bad batch again, and the count is in the checkpoint.
        """
        latest, model = self._checkpoints.latest, self._setup.model
        assert latest is not None
        self._checkpoints.wait()
        self.rollbacks += 1
        model.restore(latest)
        back_to = model.store.global_step
        self._context.journal.event("rollback", step=step, back_to=back_to, count=self.rollbacks)
        _log.warning(
            "The loss became %s at step %d: back to step %d, and on with the batches that follow the bad one "
            "(rollback %d of at most %d).",
            loss, step, back_to, self.rollbacks, MAX_ROLLBACKS,
        )  # fmt: skip
