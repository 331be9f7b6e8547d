"""`train.nan`: stop, roll back to the last checkpoint, or continue when a loss or a variable is not finite."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoint.snapshot import not_finite
from runner.distribute.strategy import is_parameter_server
from runner.estimator.checkpointing import RunCheckpoints
from runner.estimator.context import EstimatorContext
from runner.estimator.train_setup import TrainSetup
from runner.hooks.hook import Run
from runner.types import StepResult

_log = logging.getLogger(__name__)

_REFUSED = tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.ParameterServerStrategy, tf.distribute.TPUStrategy
"""The strategies with which `run.debug=nan` is refused (`runner.config.validation`)."""

MAX_ROLLBACKS = 3
"""Number of rollbacks in a run after which a loss or variable that is not finite ends it with an error."""


_SHOWN_VARIABLES = 3
"""Largest number of variables that a message names; the journal names all of them."""


def _named(variables: Sequence[str]) -> str:
    shown = ", ".join(variables[:_SHOWN_VARIABLES])
    more = len(variables) - _SHOWN_VARIABLES
    return f"{shown} and {more} more" if more > 0 else shown


class NanLossError(tf.compat.v1.train.NanLossDuringTrainingError):
    """A NanLossDuringTrainingError of tf.estimator whose text names the step and the non-finite variables.

    Attributes:
      is_clear: True: the text says enough, so no traceback is shown.
    """

    is_clear = True

    def __str__(self) -> str:
        return str(self.args[0])


class NanPolicy:
    """Acts on losses and variables that are not finite, as `train.nan` or a NanTensorHook says.

    Attributes:
      rollbacks: number of rollbacks of the run, including those before it was resumed.
    """

    def __init__(self, context: EstimatorContext, setup: TrainSetup, checkpoints: RunCheckpoints) -> None:
        self.rollbacks = int(setup.resumed.get("rollbacks", 0))
        self._context = context
        self._setup = setup
        self._checkpoints = checkpoints
        self._policy = setup.config.nan
        self._allowed: Sequence[str] = ()  # the variables that were not finite at the last save, or at the start

    @property
    def needs_single_steps(self) -> bool:
        """Report whether loops must have one step, which rollback needs.

        It can leave out the bad batch alone only if its loop has not taken further steps.
        """
        return self._policy == "rollback" and self._setup.program.has_local_losses

    @property
    def needs_position_after_bad_batch(self) -> bool:
        """Report whether, after a loss that is not finite, the input must be positioned just after the bad batch.

        It must if training continues or a checkpoint is saved.
        """
        return self._policy == "rollback" or self._setup.overrides.stop_at_nan is False

    def check(self, run: Run, result: StepResult, advance: int) -> bool:
        """Act on the first loss of a loop that is not finite; do nothing if there is none.

        Args:
          run: the training run.
          result: the loop's outcome, with losses `[num_steps]`.
          advance: the number that each step adds to the global step.

        Returns:
          Whether the variables were rolled back.

        Raises:
          NanLossError: the run ends with an error.
        """
        if self._policy == "ignore" or np.isfinite(result.losses).all():
            return False
        bad = int(np.flatnonzero(~np.isfinite(result.losses))[0])
        # The loop ended with this step, unless losses are known only after the loop (has_local_losses).
        step = result.first_step + (bad + 1) * advance - 1
        loss = str(result.losses[bad])
        variables = not_finite(self._setup.model.values())
        return self._act(run, step, f"the loss became {loss} at step {step}", variables, loss)

    def begin(self) -> None:
        """Note which variables are not finite before the first step: a best value of inf, or those of a warm start."""
        self._allowed = self._agreed_not_finite(self._setup.model.values_by_key())

    def accepts_values(self, run: Run, values: Mapping[str, Any]) -> bool:
        """Act on variables that have become non-finite since the last save, or else since training began.

        Called before each save, by all workers. Training waits for it even if the save is asynchronous: if the thread
        that writes found them, the step at which training goes back would depend on its speed.

        Returns:
          False: there were some, and the last checkpoint was restored instead, so that there is nothing to save.

        Raises:
          NanLossError: the run ends with an error.
        """
        names = self._agreed_not_finite(values)
        step = run.global_step
        new = [name for name in names if name not in self._allowed]
        if not new:
            self._allowed = names
            return True
        if not self._act(run, step, f"variables became non-finite by step {step}, and are not saved", new):
            # The run ends at the last finite checkpoint, without an error. A rollback has restored it already.
            self._restore_last()
        return False

    def _agreed_not_finite(self, values: Mapping[str, Any]) -> list[str]:
        """Return the keys of the values that are not finite on some worker; [] if they may be so."""
        if self._policy == "ignore":
            return []
        mine = set(not_finite(values))
        counts = self._context.collectives.sum([float(name in mine) for name in values])
        return [name for name, count in zip(values, counts, strict=True) if count]

    def _act(self, run: Run, step: int, what: str, variables: Sequence[str], loss: str | None = None) -> bool:
        """Roll back and return True, end the run with an error, or ask it to stop and return False."""
        finiteness = f"Non-finite variables: {_named(variables)}." if variables else "All variables are still finite."
        self._context.journal.event("nan", step=step, loss=loss, variables=variables)
        if self._policy == "rollback" and self.rollbacks < MAX_ROLLBACKS:
            self._roll_back(step, what, finiteness)
            return True
        if self._setup.overrides.stop_at_nan is not False:
            raise NanLossError(f"{what}. {self._advice()} {self._search()} {finiteness}")
        # NanTensorHook(fail_on_nan_loss=False) ends training without an error.
        _log.warning("%s. %s", what[0].upper() + what[1:], finiteness)
        run.request_stop(what)
        return False

    def _search(self) -> str:
        """Return the settings with which a run names the origin of such values, as text."""
        change = " strategy=default" if isinstance(self._setup.config.train_distribute, _REFUSED) else ""
        return f"run.debug=nan{change} names the feature or the operation where it began."

    def _advice(self) -> str:
        """Return the remedies to try, as text: the most likely first, train.nan=ignore last."""
        clip = "train.clip_global_norm=1" if self._setup.program.is_native else "tf.clip_by_global_norm in model_fn"
        saved = f"the last finite checkpoint is of step {self._checkpoints.saved_step}"
        cures = ["a lower learning rate", clip]
        if self._policy == "rollback":
            saved = f"the run has rolled back {self.rollbacks} times already; {saved}"
        elif not is_parameter_server(self._setup.config.train_distribute):  # which refuses rollback
            cures.append("train.nan=rollback (RunConfig(nan='rollback')), which rolls back and skips the batch")
        return (
            f"Try {', '.join(cures[:-1])} or {cures[-1]} ({saved}). train.nan=ignore continues with non-finite values."
        )

    def check_loss_scale(self, step: int) -> None:
        """Act on a loop whose steps were all skipped because their gradients were not finite.

        Raises:
          NanLossError: the gradients are not finite with any loss scale.
        """
        scale = self._setup.program.loss_scale
        if scale is not None and scale.is_exhausted:
            raise NanLossError(
                f"The gradients at step {step + 1} are not finite with any loss scale "
                "(train.precision=mixed_float16), so the cause is in the model or its input. The last checkpoint is of "
                f"step {self._checkpoints.saved_step}."
            )

    def _roll_back(self, step: int, what: str, held: str) -> None:
        """Restore the last checkpoint's variables, and continue with the batch after the last one.

        A run that is resumed does the same: it reaches the bad batch again, and the checkpoint has the number of
        rollbacks.
        """
        self.rollbacks += 1
        self._restore_last()
        back_to = self._setup.model.store.global_step
        self._context.journal.event("rollback", step=step, back_to=back_to, count=self.rollbacks)
        _log.warning(
            "%s: rolled back to step %d; training continues after the bad batch (rollback %d of at most %d). %s %s",
            what[0].upper() + what[1:], back_to, self.rollbacks, MAX_ROLLBACKS, self._search(), held,
        )  # fmt: skip

    def _restore_last(self) -> None:
        self._checkpoints.wait()  # it may still be being written
        self._setup.model.restore(str(self._checkpoints.latest))
