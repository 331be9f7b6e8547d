"""One training run: the loop, and the work between two loops of steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.checkpoint.reader import Reader
from runner.data.inputs import EmptyInputError, why_empty
from runner.estimator.checkpointing import RunCheckpoints
from runner.estimator.context import EstimatorContext
from runner.estimator.loop_boundary import Boundary
from runner.estimator.nan_loss import NanPolicy
from runner.estimator.train_log import TrainLog
from runner.estimator.train_setup import TrainSetup
from runner.estimator.train_steps import TrainSteps
from runner.hooks.fetches import ExampleHooks
from runner.hooks.hook import WhenDue
from runner.hooks.keras_callbacks import KerasCallbacks
from runner.model_fn import ModeKeys
from runner.programs.ema import AVERAGES
from runner.programs.train_scalars import WINDOW
from runner.tf_private import graphs
from runner.tracing.adapted_layers import ADAPTED
from runner.tracing.graph_operations import user_line_of
from runner.tracing.numeric_checks import NotFiniteError
from runner.tracing.trace import Trace
from runner.tracing.variable_store import VariableStore

_log = logging.getLogger(__name__)


class TrainingRun:
    """One call of `Estimator.train`, as hooks see it. All workers call the same methods in the same order.

    Args:
      context: the Estimator's settings.
      setup: the training setup.
      checkpoints: writes the run's checkpoints.
      log: writes the run's log.
      target: train until this global step; infinite: until the data ends or a hook stops the run.
      after_save: functions that are called with this run after each checkpoint, to evaluate it. The checkpoint may not
        be durable yet; `wait_for_checkpoint` waits for it.
      facts: returns what each checkpoint stores beside the variables, values that JSON can hold.

    Attributes:
      stop_reason: why the run ends after this loop; None: it continues.
      interrupted: the run ends without evaluations, because it was asked to stop.
    """

    def __init__(
        self,
        context: EstimatorContext,
        setup: TrainSetup,
        checkpoints: RunCheckpoints,
        log: TrainLog,
        *,
        target: float,
        after_save: Sequence[Callable[[TrainingRun], None]] = (),
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.model_dir = context.model_dir
        self.stop_reason: str | None = None
        self.interrupted = False
        self._context = context
        self._setup = setup
        self._checkpoints = checkpoints
        self._log = log
        self._target = target
        self._after_save = after_save
        self._facts = facts
        self._callbacks = [hook for hook in setup.hooks if isinstance(hook, KerasCallbacks)]
        self._nan = NanPolicy(context, setup, checkpoints)
        self._steps = TrainSteps(context, setup, log, self._nan, self.request_stop)
        self._next = Boundary(0, False, None, False)
        self._is_end_saved = False  # whether the last checkpoint says that the data has ended

    # --- what hooks see and ask -------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        return self._steps.global_step

    @property
    def examples(self) -> int:
        """Number of examples trained on by this run."""
        return self._steps.examples

    @property
    def ended_early(self) -> str | None:
        """The reason why the run ended before its last step, if that was the end of the input; None: it was not.

        A run without a last step, or for a number of passes (max_epochs), is meant to end with its input.
        """
        position = self._setup.input.position
        if not position.ended or position.num_epochs or not self.global_step < self._target < math.inf:
            return None
        return (
            f"the training input ended at step {self.global_step} of {int(self._target)}. To train on, call .repeat() "
            "in the input function; for a number of passes over the input, set train.max_epochs."
        )

    @property
    def steps_per_sec(self) -> float:
        """The speed without the first loop, which traces the graph, as the screen shows it; of a run that has taken
        only that loop, its speed; 0: no step was taken.
        """
        return self._steps.steps_per_sec

    @property
    def input_bound(self) -> float | None:
        """The share of step time spent waiting for input, from 0 to 1; None: it was not measured."""
        return self._steps.input_bound

    @property
    def learning_rate(self) -> float:
        """The learning rate, if the optimizer keeps it in a variable. A rate that is set holds from the next step on.

        All workers must set it together.

        Raises:
          ValueError: the rate is not in a variable; the message says how to put it there.
        """
        setup = self._setup
        return float(setup.model.store[setup.program.rate_variable].numpy())

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._setup.model.assign({self._setup.program.rate_variable: rate})

    @property
    def recorded(self) -> tuple[int, Mapping[str, float]]:
        """The metrics of training that were recorded last: (global step, `train/<name>` -> value)."""
        return self._log.recorded

    def before_evaluation(self) -> None:
        """Tell callbacks of Keras that an evaluation begins."""
        for callbacks in self._callbacks:
            callbacks.before_evaluation()

    def evaluated(self, name: str, metrics: Mapping[str, Any]) -> None:
        """Tell callbacks of Keras the metrics of the evaluation `name`."""
        for callbacks in self._callbacks:
            callbacks.evaluated(self.global_step, name, metrics)

    def log(self, values: Mapping[str, Any], *, on_progress: bool = False) -> None:
        self._log.of_hooks.write(self.global_step, values, on_progress=on_progress)

    def request_stop(self, reason: str = "a hook requested it") -> None:
        self.stop_reason = self.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """End the run like `request_stop`, but without the evaluations and exports after the last save."""
        self.request_stop(reason)
        self.interrupted = True

    def save(self) -> str:
        """Write a checkpoint of this step, which becomes the latest, and return its path. All workers must call this
        together.

        If variables have become non-finite, nothing is written: the run fails, or goes back to the last checkpoint
        (train.nan), whose path is returned.

        Raises:
          tf.compat.v1.train.NanLossDuringTrainingError: variables have become non-finite.
        """
        path = self._save(asynchronous=False)
        self.wait_for_checkpoint()
        return path

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is durable on all workers. All workers must call this together.

        Raises:
          The error because of which the checkpoint could not be written.
        """
        self._checkpoints.wait()

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train.

        Raises:
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite, or variables became non-finite; the
            message names the step.
          ValueError: the step does not advance the global step.
          EmptyInputError: no step was taken, because the training input has no examples.
        """
        model = self._setup.model
        hooks = self._setup.hooks
        steps = self._steps
        checkpoints = self._checkpoints
        due = [WhenDue(hook) for hook in hooks]
        examples = ExampleHooks(hooks, self._context.collectives)
        # From now on perhaps no checkpoint has the values, so an evaluation keeps them in memory.
        model.is_trained = True
        try:
            self._begin(examples.names)
            self._agree(saves=False)
            while self.goes_on:
                for hook in due:
                    hook.before_step(self, self.global_step)
                result = steps.take(self._next.num_steps, self._target)
                # After the log, so that the journal has the loss because of which the run ends or goes back.
                if self._nan.check(self, result, steps.advance):
                    self._reload_after_rollback()
                self._setup.input.pipeline.stream.check_once()
                if result.num_steps:  # no step was taken if the data had ended
                    went_on = self.global_step == result.last_step  # False: a rollback went to the last checkpoint
                    if steps.fetched is not None and went_on:
                        examples.call(self, steps.fetched)
                    for hook in due:
                        hook.after_step(self, result)
                checkpoints.poll()
                graphs.drop_scalars()  # one of each step that was written to an event file
                # After a rollback, the checkpoint of this step exists already.
                is_due = checkpoints.is_due(result) and self.global_step == result.last_step
                # A clock, a signal or a hook of one worker concerns all workers: if one acted alone, the others would
                # wait in a collective forever.
                self._agree(saves=is_due)
                is_end = not self.goes_on and self.global_step != checkpoints.saved_step
                if self._next.saves or is_end:
                    # No training follows the last save, so it need not be asynchronous.
                    self._save(asynchronous=self.goes_on)
                    # A listener or an evaluation may have requested a stop. At a NaN in the variables the run stops, or
                    # has gone back and trains on.
                    self._agree(saves=False)
            self._end()
        except Exception as error:
            checkpoints.settle_before(error)
            if isinstance(error, NotFiniteError):
                error.add_note(
                    f"at step {self.global_step + 1}; the last checkpoint is of step {checkpoints.saved_step}"
                )
            raise
        finally:
            self._close()

    @property
    def goes_on(self) -> bool:
        """Report whether a further step is to be taken, as far as this process knows; after `_agree`, all know."""
        return self.global_step < self._target and self.stop_reason is None

    def _begin(self, names: Sequence[str]) -> None:
        """Begin log, listeners and hooks. A new run writes its first checkpoint.

        Args:
          names: as in `TrainSteps.begin`.
        """
        program = self._setup.program
        session_hooks = self._setup.session_hooks
        self._log.begin(None if math.isinf(self._target) else int(self._target))
        self._log.restore(self._setup.resumed)
        self._steps.begin(names)
        _warn_of_lost_state(program.trace, self._setup.model.store)
        session_hooks.session.begin(self, self._steps.take_batch)
        # Variables that listeners and session hooks make in `begin` become variables of the model, as in a session's
        # graph: they are saved and restored with it.
        with self._setup.model.extended(program, self._setup.latest):
            self._checkpoints.tell_listeners("begin")
            session_hooks.begin()
        session_hooks.start(self.request_stop)
        for hook in self._setup.hooks:
            hook.begin(self)
        if self._setup.input.remaining_steps <= 0:  # the run was trained for more epochs than max_epochs is now
            self.request_stop("the training input ended")
        self._nan.begin()
        # After the hooks: their `begin` may assign variables, and the first checkpoint has what training starts from.
        self._checkpoints.begin(self.global_step, self._extra())

    def _agree(self, *, saves: bool) -> None:
        """Agree with the other workers on what to do next: `self._next`. All workers must call this together.

        Args:
          saves: whether a checkpoint of this step is due.
        """
        boundary = Boundary(self._num_steps(), saves, self.stop_reason, self.interrupted)
        self._next = boundary.agreed(self._context.collectives)
        if self._next.stop_reason is not None:
            self.request_stop(self._next.stop_reason)
        if self._next.interrupted:
            self.interrupt(str(self._next.stop_reason))

    def _num_steps(self) -> int:
        """Return the number of steps of the next loop, which ends where the next save, log, hook or other cadence is
        due.
        """
        step = self.global_step
        cadences: list[Any] = [self._checkpoints.every, self._setup.session_hooks, self._steps]
        cadences += [hook.every for hook in self._setup.hooks if hasattr(hook, "every")]
        distance = min(self._target - step, self._log.steps_until_due(step, in_loops=self._steps.records_in_loops))
        for cadence in cadences:
            distance = min(distance, cadence.steps_until_due(step))
        return self._steps.number_until(distance)

    def _save(self, *, asynchronous: bool) -> str:
        """Write a checkpoint of this step, and evaluate it. Return the path of the latest checkpoint."""
        setup = self._setup
        # Before the save: if workers have read different examples, or in another order, the result must not be saved.
        setup.input.pipeline.stream.check()
        setup.model.show_weights()  # a hook may have loaded another checkpoint, to predict with it
        path = self._checkpoints.save(self, self._extra(), self._nan.accepts_values, asynchronous=asynchronous)
        if path is None:  # variables are not finite, and the last checkpoint was restored
            self._reload_after_rollback()
            return str(self._checkpoints.latest)
        self._is_end_saved = setup.input.ended
        if self._after_save and not self._next.interrupted:
            with setup.program.kept_metrics.restoring_state():
                for call in self._after_save:
                    call(self)
        return path

    def _reload_after_rollback(self) -> None:
        """Read global step and log of the last checkpoint, whose variables have been restored."""
        self._steps.locate()
        self._log.restore(Reader(str(self._checkpoints.latest)).extra())

    def _extra(self) -> dict[str, Any]:
        """Return the facts that a checkpoint of this step stores beside the variables."""
        train_input = self._setup.input
        step = self.global_step
        # "evaluate": whether an undisturbed run evaluates at this step: where the cadence asks for a save, and at its
        # end. Only then does a resumed run make up for a missing evaluation.
        is_end = not self.interrupted or step >= self._target or train_input.ended
        is_evaluated = step > self._steps.first_step and (self._next.saves or is_end)
        extra: dict[str, Any] = {"input": train_input.as_extra(), "evaluate": is_evaluated}
        extra["rollbacks"] = self._nan.rollbacks
        window = self._log.state()
        if window:
            extra[WINDOW] = window
        extra.update(self._facts())
        for callbacks in self._callbacks:
            extra.update(callbacks.facts())
        if self._setup.model.store.adapted:
            extra[ADAPTED] = self._setup.model.store.adapted
        if self._setup.program.averages and step:  # those of Keras are 0 before the first step
            extra[AVERAGES] = self._setup.program.averages
        return extra

    def _end(self) -> None:
        """End listeners and hooks after the last step, whose checkpoint is written."""
        if self.global_step == self._steps.first_step:
            # Before the checkpoint says that the data has ended: the same command then reads the mended input.
            self._refuse_empty_input()
            _log.warning("No step was taken: a hook stopped training at once, or the training input was at its end.")
        if self.ended_early is not None and self._context.is_chief:
            _log.warning("Stopped early: %s", self.ended_early)
        if self._setup.input.ended and not self._is_end_saved:
            # Write the same values again: the checkpoint must say that the data has ended.
            self._checkpoints.write(self.global_step, self._extra(), asynchronous=False, is_evaluated=True)
        self.wait_for_checkpoint()
        self._checkpoints.tell_listeners("end", self.global_step)
        if not self._setup.session_hooks.is_empty:
            self._setup.session_hooks.end()
        for hook in self._setup.hooks:
            hook.end(self)

    def _close(self) -> None:
        """Close hooks and log, whether training has ended or failed."""
        self._setup.model.show_weights()
        self._setup.model.is_trained = False
        self._context.journal.took("train", self._steps.secs)
        self._setup.session_hooks.close()
        for hook in self._setup.hooks:
            if hasattr(hook, "close"):  # absent in hooks that do not derive from Hook
                hook.close(self)
        self._log.end()  # a hook's `close` may have logged

    def _refuse_empty_input(self) -> None:
        """Raise EmptyInputError if no worker has read an example, and that is why no step was taken."""
        collectives = self._context.collectives
        train_input = self._setup.input
        (empty,) = collectives.sum([float(train_input.is_empty)])
        if empty == collectives.num_workers and not self.interrupted:
            raise EmptyInputError(f"training: {why_empty(train_input.pipeline, ModeKeys.TRAIN, collectives)}")


def _warn_of_lost_state(trace: Trace, store: VariableStore) -> None:
    """Warn of state of model_fn that is in no checkpoint."""
    others = [variable.name.partition(":")[0] for variable in trace.variables_of_others(store)]
    if others:
        _log.warning(
            "model_fn uses variables that were made outside of it (%s). No optimizer changes them, and no checkpoint "
            "has them: a resumed run, evaluations and predictions use the values that the code gives them. Make the "
            "layers inside model_fn if they are to be trained or kept.",
            _some(others),
        )
    for write in trace.table_writes()[:1]:
        _log.warning(
            "model_fn changes a lookup table%s. What it holds is in no checkpoint: a resumed run, evaluations, "
            "predictions and exports begin with an empty one. Keep the values in a variable.",
            user_line_of(write),
        )
    random_ops = trace.kernel_random_ops()
    if random_ops:
        _log.warning(
            "model_fn draws random numbers whose state is not in checkpoints (%s), so a resumed run differs from an "
            "undisturbed one. Use Keras layers or tf.random.stateless_*.",
            _some(random_ops),
        )


def _some(names: Sequence[str]) -> str:
    """Return the first names as text."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
