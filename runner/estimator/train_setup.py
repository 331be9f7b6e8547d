"""The setup of a training run before its first step: the model is traced and restored, the input is at its position.

Nothing has been written yet.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.checkpoint.reader import Reader
from runner.data.train_input import TrainInput
from runner.estimator.context import EstimatorContext, Models
from runner.estimator.specs import InputFn
from runner.hooks.builtin_hooks import TrainingOverrides, split_hooks
from runner.hooks.keras_callbacks import KerasCallbacks
from runner.hooks.scaffold import ModelScaffold
from runner.hooks.session_hooks import SessionHooks
from runner.hooks.trace_session import TraceSession
from runner.model_fn import ModeKeys
from runner.programs.model import Model
from runner.programs.train import TrainProgram
from runner.run_config import RunConfig
from runner.tf_private.optimizers import schedule_of
from runner.tracking import tensorboard

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """Everything that a training run starts from.

    Attributes:
      latest: path of the checkpoint that the run resumes from; None: a new model.
      resumed: the facts that this checkpoint stores beside the variables.
      config: the Estimator's config, with the settings of TensorFlow's own hooks that a RunConfig can hold.
      hooks, session_hooks: native hooks, and SessionRunHooks.
      overrides: all settings of TensorFlow's own hooks.
    """

    model: Model
    program: TrainProgram
    input: TrainInput
    latest: str | None
    resumed: Mapping[str, Any]
    config: RunConfig
    hooks: Sequence[Any]
    session_hooks: SessionHooks
    overrides: TrainingOverrides

    def target(self, steps: int | None = None, max_steps: int | None = None) -> float:
        """Return the global step at which training ends; infinite if only the input ends it."""
        return self.overrides.target(self.model.store.global_step, steps, max_steps)


@dataclasses.dataclass(frozen=True)
class ReadableByCallbacks:
    """What callbacks of Keras can read of a model in training (`keras_callbacks.ReadableModel`)."""

    model: Model
    program: TrainProgram

    @property
    def weights(self) -> Mapping[str, bool] | None:
        return self.program.weights

    def value(self, name: str) -> np.ndarray:
        value = self.model.values()[name]
        is_partitioned = isinstance(value, tuple)
        return np.concatenate(value) if is_partitioned else np.asarray(value)

    @property
    def learning_rate(self) -> float:
        schedule = schedule_of(self.program.spec.optimizer)
        if schedule is not None:
            return float(schedule(tf.constant(self.global_step, tf.int64)))
        known = self.program.rates()  # those in a variable, and the constants of a train_op
        if "learning_rate" in known:
            return known["learning_rate"]
        return float(self.model.store[self.program.rate_variable].numpy())

    @property
    def global_step(self) -> int:
        return self.model.store.global_step


class TrainSetupBuilder:
    """Builds the TrainSetup of each call of `Estimator.train`.

    Args:
      context: the Estimator's settings.
      models: the models on their strategies.
      warm_start: called with a new model, to load its warm start.
    """

    def __init__(self, context: EstimatorContext, models: Models, warm_start: Callable[[Model], None]) -> None:
        self._context = context
        self._models = models
        self._warm_start = warm_start
        self._last_function: Any = None  # the input function of the last call; None: this is the first

    @functools.cached_property
    def summary_writer(self) -> Any:
        """The writer of the training's events; created on first use, because it creates its file at once."""
        is_on = self._context.config.tensorboard and self._context.is_chief
        return tensorboard.build_writer(self._context.model_dir, is_on=is_on)

    def build(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None,
        latest: str | None,
        max_epochs: int | None,
        *,
        reads_again: bool = True,
    ) -> TrainSetup | None:
        """Open the input at its position, trace the model for it, and restore the model or initialize it.

        Args:
          input_fn: an input function or an Input.
          hooks: native hooks and session hooks.
          latest: the checkpoint that the run resumes from; None: a new model.
          max_epochs: number of passes over the examples; None: no limit.
          reads_again: False: return None if an earlier process has read the input to its end.
        """
        if latest is None:
            self._models.clear()  # model_dir was emptied, so the values in memory belong to the earlier model
        checkpoint: Reader | None = None
        resumed: dict[str, Any] = {}
        if latest is not None:
            checkpoint = Reader(latest)
            resumed = checkpoint.extra()
        train_input = self._open_input(input_fn, max_epochs, checkpoint, resumed)
        if train_input.was_at_its_end and not reads_again:
            return None
        context = self._context
        model = self._models.for_training
        pipeline = train_input.pipeline
        model.store.forget_hooks()
        # Decided by the caller's hooks alone: the trace needs `stop_at_nan`, and the hooks of model_fn are known only
        # after the trace.
        stop_at_nan = split_hooks(hooks or ())[0].nan(context.config.nan) != "ignore"
        with model.awaiting(latest):
            program = model.train_program(pipeline, summary_writer=self.summary_writer, stop_at_nan=stop_at_nan)
        spec = program.spec
        chief_hooks = spec.training_chief_hooks if context.is_chief else ()
        overrides, native, session = split_hooks([*(hooks or ()), *spec.training_hooks, *chief_hooks])
        program.check_fetches(native)
        for note in overrides.notes:
            _log.warning("%s", note)
        writers = tensorboard.EventWriters(is_on=context.is_chief, own={context.model_dir: self.summary_writer})
        trace_session = TraceSession(program.trace, context.model_fn.operators, model.begin_to_write)
        session_hooks = SessionHooks(session, trace_session, writers, is_training=True)
        scaffold = ModelScaffold(spec.scaffold, program.trace.graph, program.trace.requested)
        if context.is_chief:
            scaffold.warn_in_training(list(model.store.saved), context.config.keep_checkpoint_max)
        model.objects = scaffold.objects
        if latest is not None:
            # After the trace, which has found out which variables there are.
            model.restore(latest, scaffold.keys, partly=scaffold.restores)
            scaffold.restore(trace_session, latest)
        else:
            self._warm_start(model)
            model.keys = scaffold.keys
            # init_fn runs after the warm start, because it may change values that the warm start loaded.
            scaffold.begin(trace_session)
            if getattr(spec.scaffold, "init_op", None) is None:  # an init_op sets initial values itself
                model.store.check_fed()
        # Last, as in TensorFlow's SessionManager, which runs local_init_op after init_op, init_fn or a restore.
        scaffold.begin_local(trace_session)
        # After `_open_input`, which compares this function with the one of the earlier call of `train`.
        self._last_function = pipeline.function
        config = overrides.config(context.config)
        for hook in native:
            if isinstance(hook, KerasCallbacks):
                readable = ReadableByCallbacks(model, program)
                hook.bind(readable, train_input, resumed, is_chief=context.is_chief)
        return TrainSetup(model, program, train_input, latest, resumed, config, native, session_hooks, overrides)

    def _open_input(
        self, input_fn: InputFn, max_epochs: int | None, checkpoint: Reader | None, resumed: Mapping[str, Any]
    ) -> TrainInput:
        """Open the training input at the position of `checkpoint`, whose extra facts are `resumed`.

        A further call of `train` on this object is a new epoch, as in tf.estimator: a finite input, or another
        function, is read from the beginning. An endless input continues, because otherwise the same examples would come
        again.
        """
        with self._context.journal.phase("input"):
            model = self._models.for_training
            pipeline = self._models.build_pipeline(input_fn, ModeKeys.TRAIN, model, max_epochs)
        is_same = pipeline.function is self._last_function
        continues = self._last_function is None or (is_same and pipeline.remaining_steps() == math.inf)
        if checkpoint is None or not continues:
            with self._context.journal.phase("input"):
                return TrainInput.open(pipeline)
        with self._context.journal.phase("restore"):
            return TrainInput.open(pipeline, checkpoint, resumed.get("input"), self._context.collectives)
