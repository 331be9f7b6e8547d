"""The setup of a training run before its first step: the model is traced and restored, the input is at its position.

Nothing has been written yet.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.checkpoint.input_position import InputPosition, continued, source_of, was_read_to_its_end
from runner.data.inputs import Input, InputPipeline, check_examples, say_small_batches
from runner.estimator.context import EstimatorContext, Models
from runner.estimator.specs import InputFn
from runner.hooks.builtin_hooks import TrainingOverrides, split_hooks
from runner.hooks.scaffold import ModelScaffold
from runner.hooks.session_hooks import SessionHooks
from runner.hooks.trace_session import TraceSession
from runner.programs.model import Model
from runner.programs.train import TrainProgram
from runner.programs.train_loop import LoopResult
from runner.run_config import RunConfig
from runner.tracking import tensorboard

v1 = tf.compat.v1
_log = logging.getLogger(__name__)


class TrainInput:
    """The training input while it is read.

    Attributes:
      iterator: iterator over `pipeline.dataset`.
      position: the position of the iterator, as stored in checkpoints.
      remaining_steps: steps to the end of the data; infinite if the data has no end; None: unknown.
    """

    def __init__(self, pipeline: InputPipeline, iterator: Any, position: InputPosition) -> None:
        self.pipeline, self.iterator, self.position = pipeline, iterator, position
        # The position counts elements, not steps, because a step of a run with another number of replicas reads another
        # number of elements.
        self.remaining_steps = pipeline.remaining_steps(position.elements)
        self._is_resumed = position.elements > 0

    @property
    def num_steps_read(self) -> int:
        return self.position.elements // self.pipeline.division.elements_per_step

    @property
    def remaining(self) -> float:
        """The number of steps to the end of the data; infinite if unknown."""
        return math.inf if self.remaining_steps is None else self.remaining_steps

    def may_end_within(self, num_steps: int) -> bool:
        return self.remaining_steps is None or self.remaining_steps < num_steps

    def advance(self, result: LoopResult) -> bool:
        """Note how much a loop has read, and return whether the data has ended.

        Raises:
          ValueError: as in `check_examples`.
        """
        num_steps = result.num_steps + result.repeated_steps
        check_examples(self.pipeline, num_steps, result.examples)
        if self.position.elements == 0:
            say_small_batches(self.pipeline, num_steps, result.examples)
        read = self.position.elements + result.num_steps * self.pipeline.division.elements_per_step
        cardinality = int(self.pipeline.given.cardinality())
        # The last step of the data may read fewer elements than a step takes. Count only elements that exist, so that
        # training with a larger max_epochs continues at the right element.
        self.position.elements = min(read, cardinality) if cardinality >= 0 else read
        if self.remaining_steps is not None:
            self.remaining_steps -= result.num_steps
            self.position.ended = self.remaining_steps <= 0
        was_at_its_end = result.data_ended and not result.num_steps and self._is_resumed
        self._is_resumed = False
        if was_at_its_end and self.position.num_epochs is None:
            # The checkpoint was saved at the end of data of unknown size: read the data again, as a new call does.
            self.iterator = self.pipeline.open()
            self.position = InputPosition.at_start(self.position.source, self.pipeline)
        elif result.data_ended:
            self.position.ended = True
        return self.position.ended


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """Everything that a training run starts from.

    Attributes:
      latest: path of the checkpoint that the run resumes from; None: a new model.
      config: the Estimator's config, with the settings of TensorFlow's own hooks that a RunConfig can hold.
      hooks, session_hooks: native hooks, and SessionRunHooks.
      overrides: all settings of TensorFlow's own hooks.
    """

    model: Model
    program: TrainProgram
    input: TrainInput
    latest: str | None
    config: RunConfig
    hooks: Sequence[Any]
    session_hooks: SessionHooks
    overrides: TrainingOverrides

    def target(self, steps: int | None = None, max_steps: int | None = None) -> float:
        """Return the global step at which training ends; infinite if only the input ends it."""
        return self.overrides.target(self.model.store.global_step, steps, max_steps)


class TrainSetupBuilder:
    """Builds the TrainSetup of each call of `Estimator.train`.

    Args:
      context: the Estimator's settings.
      models: the models on their strategies.
      warm_start: called with a new model, to load its warm start.
    """

    def __init__(self, context: EstimatorContext, models: Models, warm_start: Callable[[Model], None]) -> None:
        self._context, self._models, self._warm_start = context, models, warm_start
        self._last_input_fn: Any = None

    @functools.cached_property
    def summary_writer(self) -> Any:
        """The writer of the training's events; created on first use, because it creates its file at once."""
        is_on = self._context.config.tensorboard and self._context.is_chief
        return tensorboard.build_writer(self._context.model_dir, is_on=is_on)

    def open_input(self, input_fn: InputFn, latest: str | None, max_epochs: int | None) -> InputPipeline:
        """Build the training input.

        Args:
          input_fn: an input function or an Input.
          latest: the checkpoint that the run resumes from; None: a new model.
          max_epochs: number of passes over the examples; None: no limit.
        """
        if latest is None:
            self._models.clear()  # model_dir was emptied, so the values in memory belong to the earlier model
        with self._context.journal.phase("build"):
            return self._models.build_train_pipeline(input_fn, max_epochs)

    def has_input_ended(self, input_fn: InputFn, pipeline: InputPipeline, latest: str | None) -> bool:
        """Report whether the input was read to its end by an earlier process, not by an earlier call on this object."""
        source = source_of(input_fn, pipeline)
        return self._last_input_fn is None and was_read_to_its_end(source, latest, pipeline)

    def build(
        self, pipeline: InputPipeline, input_fn: InputFn, hooks: Sequence[Any] | None, latest: str | None
    ) -> TrainSetup:
        """Trace the model, restore it from `latest` or initialize it, and move the input to its position."""
        context, model = self._context, self._models.for_training
        stop_at_nan = split_hooks(hooks or ())[0].nan(context.config.nan) != "ignore"
        program = model.train_program(pipeline, summary_writer=self.summary_writer, stop_at_nan=stop_at_nan)
        spec = program.spec
        chief_hooks = spec.training_chief_hooks if context.is_chief else ()
        overrides, native, session = split_hooks([*(hooks or ()), *spec.training_hooks, *chief_hooks])
        for note in overrides.notes:
            _log.warning("%s", note)
        writers = tensorboard.EventWriters(is_on=context.is_chief, own={context.model_dir: self.summary_writer})
        trace_session = TraceSession(program.trace, context.model_fn.operators)
        session_hooks = SessionHooks(session, trace_session, writers, in_loops=True)
        scaffold = ModelScaffold(spec.scaffold, program.trace.collections.get(v1.GraphKeys.SAVERS, ()))
        if context.is_chief:
            scaffold.warn_in_training(list(model.store.saved), context.config.keep_checkpoint_max)
        with trace_session.entered():
            model.objects = scaffold.objects(program.trace)
        if latest is not None:
            model.restore(latest, scaffold.keys, partly=scaffold.restores)
            scaffold.restore(trace_session, latest)
        else:
            self._warm_start(model)
            model.keys = scaffold.keys
            # init_fn runs after the warm start, because it may change values that the warm start loaded.
            scaffold.begin(trace_session)
            if getattr(spec.scaffold, "init_op", None) is None:  # an init_op sets initial values itself
                model.store.check_fed()
        scaffold.begin_local(trace_session)
        with context.journal.phase("restore" if latest else "build"):
            train_input = self._resume_input(pipeline, input_fn, latest)
        config = overrides.config(context.config)
        return TrainSetup(model, program, train_input, latest, config, native, session_hooks, overrides)

    def _resume_input(self, pipeline: InputPipeline, input_fn: InputFn, latest: str | None) -> TrainInput:
        """Return the training input at the position of the checkpoint.

        A further call of `train` on this object is a new epoch, as in tf.estimator: a finite input, or another
        function, is read from the beginning. An endless input continues, because otherwise the same examples would come
        again.
        """
        fn = input_fn.fn if isinstance(input_fn, Input) else input_fn
        last, self._last_input_fn = self._last_input_fn, fn
        source = source_of(input_fn, pipeline)
        if last is None or (fn is last and pipeline.remaining_steps() == math.inf):
            return TrainInput(pipeline, *continued(pipeline, source, latest))
        return TrainInput(pipeline, pipeline.open(), InputPosition.at_start(source, pipeline))
