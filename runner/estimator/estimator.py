"""The Estimator: trains, evaluates, predicts and exports a model_fn, from the checkpoints of its model_dir."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.checkpoint import reader
from runner.checkpoint.integrity import VerifiedCheckpoints
from runner.checkpoint_files import layout
from runner.config.metric_names import evaluation_prefix
from runner.data.inputs import InputPipeline
from runner.data.sharding import WorkerPlace
from runner.distribute.collectives import Collectives, check_evaluation, collectives_of
from runner.distribute.strategy import check_devices_of
from runner.estimator import evaluation
from runner.estimator.checkpointing import RunCheckpoints
from runner.estimator.context import EstimatorContext, Models, record_of_script, script_journal, script_progress
from runner.estimator.evaluation import EvalSetup
from runner.estimator.specs import InputFn, check_positive
from runner.estimator.train_log import TrainLog
from runner.estimator.train_loop import TrainingRun
from runner.estimator.train_setup import TrainSetup, TrainSetupBuilder
from runner.export import saved_model
from runner.export.receivers import ServingInputReceiver, SupervisedInputReceiver
from runner.hooks.builtin_hooks import checked
from runner.hooks.evaluation_hooks import EvaluationHooks
from runner.hooks.fetches import NO_EXAMPLE_HOOKS, ExampleHooks, fetches_of
from runner.hooks.hook import Hook, PassContext
from runner.hooks.model_summary import ModelSummary
from runner.hooks.profiler import Profiling
from runner.hooks.scaffold import ModelScaffold
from runner.hooks.trace_session import TraceSession
from runner.model_fn import ModeKeys, ModelFn
from runner.model_log import StepLog, logging_to
from runner.programs import predict as prediction
from runner.programs.mixed_precision import with_precision
from runner.programs.model import Model
from runner.programs.program import Program
from runner.remote.mirror import writing
from runner.run_config import DrawnSeed, RunConfig, with_model_dir
from runner.system.console import Progress, format_table, relative
from runner.tf_private import graphs
from runner.tracking.backends.session import NullRecord
from runner.tracking.journal import Journal, NullJournal
from runner.tracking.tensorboard import EventWriters
from runner.types import Params, copied_params

_log = logging.getLogger(__name__)


class Estimator:
    """Trains, evaluates, predicts and exports a model_fn in `model_dir`, with tf.estimator's methods and argument
    rules.

    Args:
      model_fn: called with those of the arguments features, labels, mode, params and config that it declares; returns
        an `EstimatorSpec`.
      model_dir: folder of checkpoints and events; None: that of the config, or a temporary one.
      config: a RunConfig; None: `RunConfig()`.
      params: a dict or an object, copied; passed to model_fn, and to input functions without params of their own.
      journal: receives events, which the supervisor reads. None: no journal, or with `RunConfig(tracking=...)` one in
        model_dir.
      progress: shows the run on the screen. None: nothing is shown, or with `RunConfig(tracking=...)` what
        `RunConfig.progress` asks for.

    Raises:
      ValueError: model_dir differs from the config's, or model_fn has arguments that the runner does not fill.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        *,
        journal: Journal | None = None,
        progress: Progress | None = None,
    ) -> None:
        config = with_model_dir(model_dir, config)
        is_recorded_script = config.tracking is not None and journal is None
        if params is None:
            params = {}
        # Reads of the copy that `copied_params` makes are noted in the record of the user's `Params`.
        params = copied_params(params) if isinstance(params, Params) else copy.deepcopy(params)
        check_evaluation(config.train_distribute, config.eval_distribute)
        for argument in ("train_distribute", "eval_distribute"):
            check_devices_of(argument, getattr(config, argument))
        collectives = collectives_of(config.train_distribute)
        # Each process has drawn a seed of its own, but with shard=examples all workers must shuffle in the same order.
        if isinstance(config.seed, DrawnSeed):
            config = config.replace(tf_random_seed=DrawnSeed(collectives.broadcast([config.seed])[0]))
        if progress is None:
            progress = script_progress(config) if is_recorded_script else Progress()
        if journal is None:
            journal = self._own_journal(config, collectives, progress)
        context = EstimatorContext(config, params, ModelFn(model_fn, params, config), journal, progress, collectives)
        self._record = record_of_script(context) if is_recorded_script else NullRecord()
        self._checkpoints = VerifiedCheckpoints(context.model_dir)
        self._use(context)

    def _use(self, context: EstimatorContext) -> None:
        """Take the settings and the model_fn of `context`. Nothing is traced yet."""
        self._context = context
        self._events: EventWriters | None = None
        self._models = Models(context, self._as_input)
        self._train_setups = TrainSetupBuilder(context, self._models, self._warm_start)
        self._summarised: Any = None  # the program described by model_summary.txt

    def _on_written(self, path: str) -> None:
        writing(self.model_dir)  # an error if another run has taken over its URL
        self._checkpoints.trust(path)

    def _own_journal(self, config: RunConfig, collectives: Collectives, progress: Progress) -> Journal:
        """Return the journal of an Estimator to which none was passed."""
        if config.tracking is None:
            return NullJournal()
        return script_journal(config, collectives, progress)

    @property
    def model_dir(self) -> str:
        return self._context.model_dir

    @property
    def config(self) -> RunConfig:
        return self._context.config

    @property
    def params(self) -> Any:
        """A copy of the parameters."""
        return copy.deepcopy(self._context.params)

    @property
    def collectives(self) -> Collectives:
        """The collectives of the workers that train together."""
        return self._context.collectives

    # --- training ---------------------------------------------------------------------------------------------

    def train(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
        max_epochs: int | None = None,
    ) -> Estimator:
        """Train from the latest checkpoint, and save a checkpoint at the end.

        Args:
          input_fn: an input function or an `Input`: (features, labels) batches, tensors `[batch, ...]`.
          hooks: native `Hook`s, `tf.compat.v1.train.SessionRunHook`s and `keras.callbacks.Callback`s that read.
          steps: number of further steps; None: until the input ends.
          max_steps: train until this global step; nothing happens if it has been reached.
          saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.
          max_epochs: number of passes over the input, counted from the model's first step.

        Returns:
          This Estimator, as in tf.estimator.

        Raises:
          ValueError: both steps and max_steps are given, a number is not positive, or max_epochs is given for an
            infinite dataset.
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite; the message names the step.
        """
        settings = {"train.max_steps": max_steps, "train.max_epochs": max_epochs}
        with self.recording("train", trains=True, **settings):
            self.train_run(input_fn, hooks, steps, max_steps, saving_listeners, max_epochs=max_epochs)
        return self

    def recording(self, command: str, *, trains: bool, **settings: Any) -> contextlib.AbstractContextManager[None]:
        """Record what happens inside this context as one run, if `RunConfig(tracking=...)` asks for a record.

        Args:
          command: the name of the recorded command.
          trains: the command trains. False: its results are added to an existing run.
          settings: params of the run, by the config's keys; None values are left out.
        """
        writing(self.model_dir)  # before the record, whose end is sent, too
        return self._record.recording(command, trains=trains, **settings)

    def train_run(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
        after_save: Sequence[Callable[[TrainingRun], None]] = (),
        once: bool = False,
        max_epochs: int | None = None,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> TrainingRun | None:
        """Train like `train` and return the run; None if there was nothing to do.

        Args:
          input_fn, hooks, steps, max_steps, saving_listeners, max_epochs: as in `train`.
          after_save: functions that are called with the run after each checkpoint, unless the run was interrupted.
          once: an input that an earlier process read to its end is not read again, if the end of the input may be what
            ends training: without steps, and without max_steps unless max_epochs is given.
          facts: returns what each checkpoint stores beside the variables, values that JSON can hold.
        """
        check_positive(steps=steps, max_steps=max_steps, max_epochs=max_epochs)
        if steps is not None and max_steps is not None:
            raise ValueError(f"train(steps={steps}, max_steps={max_steps}): give only one of them.")
        latest = self.agreed_checkpoint()
        if latest is not None and max_steps is not None and reader.checkpoint_step(latest) >= max_steps:
            self._say_nothing_to_train(latest, max_steps)
            self.collectives.part()
            return None
        hooks = checked("hook", hooks)
        saving_listeners = checked("listener", saving_listeners)
        self.collectives.tell_waits(self._context.journal.waited)  # until the first step
        ends_with_input = steps is None and (max_steps is None or max_epochs is not None)
        # Restore: the setup has a model with its values, and an input at its position.
        setup = self._train_setups.build(
            input_fn, hooks, latest, max_epochs, reads_again=not (once and ends_with_input)
        )
        if setup is None:
            more = "train.max_steps" if max_epochs is None else "A larger train.max_epochs"
            _log.info("Nothing to train: the training input ended at %s. %s continues training.", latest, more)
            self.collectives.part()
            self.collectives.tell_waits(None)
            return None
        setup = dataclasses.replace(setup, hooks=[*setup.hooks, *self._own_hooks(setup)])
        checkpoints = RunCheckpoints(self._context, setup, saving_listeners, self._on_written)
        log = TrainLog(self._context, setup, self._train_setups.summary_writer)
        target = setup.target(steps, max_steps)
        run = TrainingRun(self._context, setup, checkpoints, log, target=target, after_save=after_save, facts=facts)
        try:
            with self.collectives.noticing_lost_peers(), logging_to(run):
                run.run()  # Begin, loop, save, end.
                self.collectives.part()
        finally:
            self._context.progress.stop()
        return run

    def prepare(
        self, input_fn: InputFn, hooks: Sequence[Any] | None = None, max_epochs: int | None = None
    ) -> TrainSetup:
        """Return the setup of training: the model traced and restored from the latest checkpoint, the input at its
        position.

        No step is taken and no checkpoint is written.
        """
        setup = self._train_setups.build(input_fn, hooks, self.agreed_checkpoint(), max_epochs)
        assert setup is not None
        return setup

    def train_pipeline(
        self, input_fn: InputFn, max_epochs: int | None = None, num_workers: int | None = None
    ) -> InputPipeline:
        """Return the training input of this process, from its beginning; no model is built.

        Args:
          input_fn: an input function or an Input.
          max_epochs: number of passes over the examples; None: no limit.
          num_workers: the input is that of the first of so many workers; None: as many as there are.
        """
        model = self._models.for_training
        place = model.place(training=True)
        if num_workers is not None:
            place = dataclasses.replace(place, num_workers=num_workers)
        return self._models.build_pipeline(input_fn, ModeKeys.TRAIN, model, max_epochs, place=place)

    def _own_hooks(self, setup: TrainSetup) -> list[Hook]:
        """Return the runner's own hooks, on the process that writes. They are called after all other hooks."""
        if not self._context.is_chief:
            return []
        hooks: list[Hook] = []
        if self._summarised is not setup.program:
            # Once for a program: a further call of `train` on such an input has the same one.
            self._summarised = setup.program
            hooks.append(ModelSummary(setup.model.store, setup.program.trace))
        if self.config.profile_steps is not None:
            hooks.append(Profiling(self.config.profile_steps, self.announce))
        return hooks

    def _as_input(self, input_fn: InputFn, mode: str) -> InputFn:
        """Return the function to call in place of `input_fn`; a subclass may wrap it."""
        return input_fn

    def _warm_start(self, model: Model) -> None:
        """Load the warm start into a new model, and log which variables it sets."""
        if self.config.warm_start is None:
            return
        with self._context.journal.phase("restore"):
            loaded = model.begin_with(self.config.warm_start)
        self._context.journal.event("warm_start", **loaded.facts)
        table = format_table(f"warm start from {loaded.path}", ["variable", "shape", "value"], loaded.rows)
        self._context.progress.message(table)

    def _say_nothing_to_train(self, latest: str, max_steps: int) -> None:
        step = reader.checkpoint_step(latest)
        if step == max_steps:
            _log.info(
                "Nothing to train: %s is at step %d. Set a larger train.max_steps to continue training.", latest, step
            )
        else:
            _log.warning(
                "Nothing to train: train.max_steps=%d, and %s is at step %d. max_steps counts from the model's first "
                "step: set it to more than %d, or use a new model_dir.",
                max_steps, latest, step, step,
            )  # fmt: skip

    # --- evaluation and prediction ----------------------------------------------------------------------------

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluate a checkpoint. Every example counts exactly once, on any strategy.

        Args:
          input_fn: an input function or an `Input`: (features, labels) batches, tensors `[batch, ...]`.
          steps: number of global batches, or without a batch_size of batches per replica; None: all.
          hooks: native hooks, whose begin, after_batches, after_examples and end are called; session hooks, which are
            called for each batch.
          checkpoint_path: the checkpoint; None: the latest.
          name: distinguishes several evaluations; its events go to `eval_<name>`.

        Returns:
          Metric name -> NumPy or Python number, with `loss` (mean over the examples) and `global_step`.

        Raises:
          ValueError: there is no checkpoint, `steps` is not positive, or the input is empty.
          TypeError: a hook or `name` has another type.
          Interrupted: a native hook gave the evaluation up.
        """
        hooks = checked("hook", hooks)
        check_positive(steps=steps)
        if name and not isinstance(name, str):
            raise TypeError(f"evaluate(name={name!r}): it must be a str.")
        with self.recording("evaluate", trains=False), self.collectives.noticing_lost_peers():
            path = self._checkpoint(checkpoint_path or self.agreed_checkpoint(), "evaluate")
            with self._context.journal.phase("evaluate"):
                limit = math.inf if steps is None else steps
                run = functools.partial(self._evaluation, input_fn, limit, hooks, path, name)
                if self._all_evaluate:
                    metrics = run()
                else:
                    metrics = evaluation.run_on_chief_alone(run, self.collectives)
            self.collectives.part()
            return metrics

    def _evaluation(
        self, input_fn: InputFn, steps: float, hooks: Sequence[Any], path: str, name: str | None
    ) -> dict[str, Any]:
        """Evaluate the checkpoint `path`, report the results, and return the metrics.

        All workers that evaluate must call this together. The arguments are as in `evaluate`.
        """
        started = time.monotonic()
        # Inside `awaiting`, variables may be left without initial values: `_restored` loads the checkpoint next.
        with self._models.for_evaluation.awaiting(path):
            setup = self.prepare_evaluation(input_fn, name, steps)
        given = [*hooks, *setup.program.spec.evaluation_hooks]
        evaluation.check_ends(setup.pipeline, steps, given)
        setup.program.check_fetches(given)
        with self._restored(setup.model, setup.program, path):
            step = setup.model.store.global_step
            label = evaluation_prefix(name)
            fetching = ExampleHooks(given, setup.model.collectives)
            eval_hooks = self._begin_hooks(given, setup.model, setup.program, path, label, fetching)
            metrics, examples = evaluation.results(setup, eval_hooks, f"evaluate({name or ''})")
            # Before the report, because TensorBoard reads only the newer of two event files in a folder.
            eval_hooks.end()
        if self.collectives.is_chief:
            secs = time.monotonic() - started
            result = evaluation.EvaluationResult(name or "", step, path, metrics, examples, secs)
            result.report(self._context, self._events)
        graphs.drop_scalars()
        return self._returned(metrics, step)

    @contextlib.contextmanager
    def events_in(self, writers: EventWriters) -> Iterator[None]:
        """Let evaluations inside this context write their events with `writers`: into one file for each folder."""
        before = self._events
        self._events = writers
        try:
            yield
        finally:
            self._events = before

    def _returned(self, metrics: dict[str, Any], step: int) -> dict[str, Any]:
        """Return what `evaluate` returns, of the metrics at a global step."""
        return {**evaluation.plain(metrics), "global_step": step}

    def prepare_evaluation(self, input_fn: InputFn, name: str | None = None, steps: float = math.inf) -> EvalSetup:
        """Return an evaluation before its first batch, without restored values.

        Args:
          steps: number of batches, as in `evaluate`; infinite: all.
        """
        model = self._models.for_evaluation
        models = self._models
        build = functools.partial(
            models.build_pipeline, input_fn, ModeKeys.EVAL, model, eval_name=name, num_batches=steps
        )
        pipeline = build()
        program = model.eval_program(pipeline)
        if program.why_one_replica is not None and pipeline.num_in_turn > 1:
            models.log_once(f"One replica of one process evaluates all batches: {program.why_one_replica}.")
            # The chief's, on the whole, unsharded input; the other workers wait in the sums of `evaluation.run`.
            pipeline = build(place=WorkerPlace())
            if not model.collectives.is_chief:
                pipeline = dataclasses.replace(pipeline, dataset=pipeline.dataset.take(0))
        elif pipeline.global_batch_size is not None and pipeline.num_in_turn > 1:
            models.log_once(
                f"Each of {pipeline.num_in_turn} replicas evaluates whole batches of "
                f"input.eval.batch_size={pipeline.global_batch_size} examples, in turn."
            )
        return EvalSetup(model, pipeline, program)

    def check_evaluation_hooks(self, input_fn: InputFn, name: str | None, hooks: Sequence[Any]) -> None:
        """Check, before an evaluation, that it has what its hooks fetch. With several workers, all must call this
        together.

        Raises:
          ValueError: it has not.
        """
        fetch = any(fetches_of(hook) for hook in hooks)
        # Tracing is common to all workers, and hooks may differ between them.
        if self.collectives.any(fetch) and self._evaluates_here:
            self.prepare_evaluation(input_fn, name).program.check_fetches(hooks)

    @property
    def _all_evaluate(self) -> bool:
        """Report whether all workers that train take part in evaluations; otherwise the chief evaluates alone."""
        return self._models.for_evaluation.collectives.num_workers == self.collectives.num_workers

    @property
    def _evaluates_here(self) -> bool:
        """Report whether this worker takes part in evaluations."""
        return self._all_evaluate or self.collectives.is_chief

    def names_of_metrics(self, input_fn: InputFn, name: str | None) -> list[str]:
        """Return the names of the metrics of an evaluation; an empty list on a worker that does not evaluate.

        With several workers, all must call this together. A metric with several values is reported under names that
        begin with the returned one.
        """
        if not self._evaluates_here:
            return []
        program = self.prepare_evaluation(input_fn, name).program
        metrics = dict.fromkeys([*program.sum_names, *(program.spec.eval_metric_ops or {})])
        return [f"{evaluation_prefix(name)}/{metric}" for metric in metrics]

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
        *,
        with_features: bool = False,
        must_end: bool = False,
    ) -> Iterator[Any]:
        """Yield predictions in the order of the input.

        With several workers, the worker that calls it computes all predictions on one device and waits for no other.

        Args:
          input_fn: an input function or an `Input`: features, tensors `[batch, ...]`; labels are ignored.
          predict_keys: yield only these, in a dict; predictions that are no dict are `predictions`. None: all.
          hooks: native hooks, whose begin is called before the first prediction, after_batches after each batch and end
            after the last prediction; session hooks, which are called for each batch.
          checkpoint_path: the checkpoint; None: the latest.
          yield_single_examples: yield one example at a time; False: one batch of a replica at a time.
          with_features: each of predict_keys is the name of a prediction or of a feature to yield beside them, as in
            predict.keys; False: only predictions have names, and other names are ignored beside one, as in
            tf.estimator.
          must_end: raise an error if the input is known to have no end; False: the caller stops asking.

        Yields:
          NumPy values in the structure of `predictions`: `[...]` for one example, or `[batch, ...]`.

        Raises:
          ValueError: there is no checkpoint; predict_keys names no prediction, or, with features, has a name of
            neither or of both; predictions differ in their number of examples; or the input has no end and must.
          RuntimeError: the model was trained or restored between two predictions.
        """
        # Here and not in the generator, whose body begins to run only with the first `next`.
        hooks = checked("hook", hooks)
        path = self._checkpoint(checkpoint_path or self.latest_checkpoint(), "predict")
        keys: Sequence[str] = predict_keys or ()
        if isinstance(predict_keys, str):
            keys = (predict_keys,)
        prepare = functools.partial(self.prepare_prediction, input_fn, tuple(keys), with_features, must_end)
        return self._predictions(prepare, hooks, path, yield_single_examples)

    def _predictions(
        self,
        prepare: Callable[[], tuple[Model, Any, Any]],
        hooks: Sequence[Any],
        path: str,
        yield_single_examples: bool,
    ) -> Iterator[Any]:
        """Yield the predictions of the checkpoint `path`, as `predict` does.

        This is a generator, so even the input function and model_fn are called at the first `next`.

        Args:
          prepare: returns (model, input pipeline, traced program), without restored values.
          hooks: native hooks and session hooks, without those of model_fn.
          path: the checkpoint.
          yield_single_examples: as in `predict`.

        Raises:
          RuntimeError: the model was trained, or another checkpoint was loaded, between two batches.
        """
        # Inside `awaiting`, variables may be left without initial values: `_restored` loads the checkpoint next.
        with self._models.for_prediction.awaiting(path):
            model, pipeline, program = prepare()
        with self._restored(model, program, path):
            given = [*hooks, *program.spec.prediction_hooks]
            predict_hooks = self._begin_hooks(given, model, program, path, "predict")
            for batch in evaluation.batches(model, program, pipeline.dataset, path, predict_hooks):
                if yield_single_examples:
                    yield from prediction.single_examples(batch)
                else:
                    yield batch
                # Between two batches the caller may have used the model. Then it has its training weights again, and
                # what this program needs (moving averages) must be loaded. If the model was trained or another
                # checkpoint was loaded, nothing is loaded here: `batches` raises an error before the next batch.
                if model.values_of == path:
                    self._load_for(model, program, path)

    def prepare_prediction(
        self, input_fn: InputFn, keys: Sequence[str] = (), with_features: bool = False, must_end: bool = False
    ) -> tuple[Model, Any, Any]:
        """Return a prediction before its first batch, without restored values: model, input, traced program."""
        model = self._models.for_prediction
        pipeline = self._models.build_pipeline(input_fn, ModeKeys.PREDICT, model)
        if must_end:
            evaluation.check_ends(pipeline, math.inf, (), "prediction")
        return model, pipeline, model.predict_program(pipeline, keys, with_features)

    @contextlib.contextmanager
    def _restored(self, model: Model, program: Program, path: str) -> Iterator[None]:
        """Give the model the values of the checkpoint `path` inside this context, with metrics reset."""
        program.reset()
        try:
            self._load_for(model, program, path)
            yield
        finally:
            model.show_weights()

    def _load_for(self, model: Model, program: Program, path: str) -> None:
        """Load the checkpoint `path` as `program` needs it, unless the model has these values already.

        The program's Scaffold may read variables from other keys, or restore the values itself. Weights of which
        training kept moving averages are replaced by the averages.
        """
        if model.shown is program:
            return
        scaffold = ModelScaffold(program.spec.scaffold, program.trace.graph, program.trace.requested)
        model.restore(path, scaffold.keys, partly=scaffold.restores, for_a_while=True)
        self._say_what_saver_lacks(scaffold, model, program)
        if scaffold.runs:
            # The Scaffold may write to variables. If it restores them all, keeping the present values would double the
            # memory. So they are kept only during training; otherwise the next use of the model reads a checkpoint.
            model.set_aside(in_memory=model.is_trained or not scaffold.restores)
            session = TraceSession(program.trace, self._context.model_fn.operators, model.set_aside)
            scaffold.restore(session, path)
            scaffold.begin_local(session)
        # After the Scaffold, because the averages take the place of what it has restored.
        if model.show_averages(path):
            decay = self.config.ema_decay
            whose = "use_ema=True of the optimizer" if decay is None else f"ema_decay={decay}"
            self._models.log_once(f"Evaluation uses the moving averages of the weights ({whose}).")
        # Last, because `restore` begins with `show_weights`, which sets `shown` to None.
        model.shown = program

    def _say_what_saver_lacks(self, scaffold: ModelScaffold, model: Model, program: Program) -> None:
        names = [name for name in model.store.saved if name in program.trace.requested.requests]
        beside = scaffold.not_in_saver(names)
        if beside and not scaffold.restores:
            self._models.log_once(
                f"EstimatorSpec.scaffold: its saver lacks {', '.join(beside)}. These variables are nevertheless "
                f"restored from the checkpoint ({program.spec.mode})."
            )

    def _begin_hooks(
        self,
        hooks: Sequence[Any],
        model: Model,
        program: Any,
        path: str,
        what: str,
        examples: ExampleHooks = NO_EXAMPLE_HOOKS,
    ) -> EvaluationHooks:
        """Call `begin` of the session hooks of an evaluation or prediction, and return all its hooks.

        Args:
          hooks: native hooks and session hooks, with those of model_fn.
          model: the model, which has the values of `path`.
          program: the traced evaluation or prediction.
          path: the checkpoint.
          what: the prefix of values that hooks log, and the folder of their events: eval, eval_<name> or predict.
          examples: as in EvaluationHooks.
        """
        step = model.store.global_step
        session = TraceSession(program.trace, self._context.model_fn.operators, model.set_aside)
        is_on = self._context.is_chief or self.config.place.is_evaluator
        writers = EventWriters(is_on=is_on and self.config.tensorboard)
        reported_names = {"loss", "global_step", *(program.spec.eval_metric_ops or {})}
        writer = functools.partial(writers.of, os.path.join(self.model_dir, what))
        log = StepLog(what, self._context.journal.metrics, writer, reported_names, is_on)
        show_count = functools.partial(self._context.progress.count, what)
        run = PassContext(self.model_dir, step, log=functools.partial(log.write, step))
        session.begin(run)
        evaluation_hooks = EvaluationHooks(hooks, session, run, writers, show_count, examples)
        # Inside `extended`, variables that a hook requests in `begin` become variables of the model.
        with model.extended(program, path):
            evaluation_hooks.session.begin()
        return evaluation_hooks

    # --- export -----------------------------------------------------------------------------------------------

    def export_saved_model(
        self,
        export_dir_base: str | bytes | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], ServingInputReceiver | SupervisedInputReceiver],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> bytes:
        """Write a SavedModel with a signature for each of `export_outputs`.

        It contains the variables that the signatures need, and all trainable ones if the receiver is one of
        tf.estimator's, from which a warm start may load them. If the run keeps moving averages of the weights, it
        contains these instead of the weights. Files of lookup tables are copied into it.

        Args:
          export_dir_base: parent folder; the new folder is named by the seconds since 1970. A URL (s3://, gs://, az://)
            gets what is written to its local folder.
          serving_input_receiver_fn: returns the receiver of requests; see `runner.export.receivers`.
          assets_extra: path below `assets.extra` -> the file to copy there.
          as_text: write saved_model.pbtxt instead of saved_model.pb.
          checkpoint_path: the checkpoint; None: the latest.
          experimental_mode: the mode in which model_fn is called.

        Returns:
          The path of the new folder as bytes, as in tf.estimator.

        Raises:
          ValueError: there is no receiver function; there is neither a checkpoint nor a warm start; or the checkpoint
            lacks a variable.
        """
        if serving_input_receiver_fn is None:
            raise ValueError(
                "export_saved_model(serving_input_receiver_fn=None): pass a function that returns a receiver."
            )
        return self.experimental_export_all_saved_models(
            export_dir_base, {experimental_mode: serving_input_receiver_fn}, assets_extra, as_text, checkpoint_path
        )

    def experimental_export_all_saved_models(
        self,
        export_dir_base: str | bytes | os.PathLike[str],
        input_receiver_fn_map: Mapping[str, Callable[[], Any]],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> bytes:
        """Write a SavedModel like `export_saved_model`, with a graph for each mode, tagged `train`, `eval` and `serve`.

        Args:
          export_dir_base, assets_extra, as_text, checkpoint_path: as in `export_saved_model`.
          input_receiver_fn_map: mode -> receiver function; for TRAIN and EVAL it returns a SupervisedInputReceiver.

        Returns:
          The path of the new folder as bytes.
        """
        path = os.fsdecode(checkpoint_path) if checkpoint_path else self.latest_checkpoint()
        if self.config.warm_start is None:
            self._checkpoint(path, "export_saved_model")
        source = saved_model.Source(with_precision(self._context.model_fn, self.config.precision), path, self.config)
        with self.recording("export", trains=False):
            with self._context.journal.phase("export"):
                written = saved_model.write_saved_model(
                    os.fsdecode(export_dir_base),
                    input_receiver_fn_map,
                    source,
                    assets_extra=assets_extra,
                    as_text=as_text,
                )
            step = 0 if path is None else layout.step_of(Path(path).name)
            where = os.path.abspath(written.path)
            self._context.journal.event("exported", path=where, checkpoint=path, step=step, tensors=written.tensors)
        shown = "; ".join(f"{name}: {what}" for name, what in written.signatures.items())
        self._context.progress.message(f"Exported {relative(Path(written.path))} ({shown})")
        return os.fsencode(written.path)

    def features_spec(self, input_fn: Any, mode: str) -> Any:
        """Call an input function and return the TensorSpecs of its features, for the signatures of requests."""
        return self._models.features_spec(input_fn, mode)

    def export_savedmodel(
        self,
        export_dir_base: str | bytes | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], ServingInputReceiver],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        strip_default_attrs: bool = True,
    ) -> bytes:
        """Call `export_saved_model`, which had this name in TensorFlow 1. Default attributes are always stripped."""
        return self.export_saved_model(
            export_dir_base, serving_input_receiver_fn, assets_extra, as_text, checkpoint_path
        )

    # --- checkpoints ------------------------------------------------------------------------------------------

    def agreed_checkpoint(self) -> str | None:
        """Return the chief's `latest_checkpoint` on all workers. All workers must call this together.

        Raises:
          RuntimeError: the checkpoint does not exist on this worker.
        """
        name = ""
        if self.collectives.is_chief:
            name = os.path.basename(self._checkpoints.latest() or "")
        name = self.collectives.broadcast_text(name)
        return layout.awaited(os.path.join(self.model_dir, name)) if name else None

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest undamaged checkpoint in model_dir; None if there is no checkpoint.

        Raises:
          DamagedCheckpointsError: all checkpoints are damaged.
        """
        return self._checkpoints.latest()

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the latest checkpoint, with optimizer slots and global_step."""
        path = self._checkpoint(self.latest_checkpoint(), "get_variable_names")
        return sorted(reader.Reader(path).names())

    def get_variable_value(self, name: str) -> np.ndarray:
        """Return the value of a variable in the latest checkpoint, an array of the variable's shape and dtype.

        Raises:
          KeyError: the checkpoint has no variable of that name.
        """
        path = self._checkpoint(self.latest_checkpoint(), "get_variable_value")
        return reader.Reader(path).get(name)

    def eval_dir(self, name: str | None = None) -> str:
        """Return the folder for the event files of an evaluation."""
        return os.path.join(self.model_dir, evaluation_prefix(name))

    def announce(self, kind: str, text: str, **fields: Any) -> None:
        """Show `text` on the screen and write an event of this kind to the journal."""
        self._context.progress.message(text)
        self._context.journal.event(kind, text=text, **fields)

    def _checkpoint(self, path: str | None, command: str) -> str:
        if path is None:
            raise ValueError(
                f"{command}: no checkpoint in {self.model_dir}. Train first, or set the model_dir of a trained model."
            )
        return path
