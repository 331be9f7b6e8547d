"""The Estimator: trains, evaluates and predicts with a model_fn, from the checkpoints of its model_dir."""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner import checkpoints, evaluation, inference, metrics
from runner.hooks import Hook, PassRun
from runner.inputs import Feed, Input, build_feed
from runner.journal import Journal, NullJournal
from runner.loop import TrainingRun
from runner.model import Model
from runner.model_fn import ModeKeys, ModelFn
from runner.position import Position, continued, source_of
from runner.report import NullProgress, Progress
from runner.run_config import RunConfig
from runner.seeds import seeded
from runner.session_hooks import SessionHooks, split_hooks
from runner.types import Params

_log = logging.getLogger(__name__)

InputFn = Callable[..., Any] | Input


class Estimator:
    """A model_fn and its life in `model_dir`, with tf.estimator's methods and argument rules.

    Args:
      model_fn: called with those of features, labels, mode, params, config that it declares; see `EstimatorSpec`.
      model_dir: folder of checkpoints and events; None: config's, or a temporary one.
      config: None: `RunConfig()`.
      params: for model_fn, and for input functions that bring none of their own; copied.
      journal: where what happens is noted for the supervisor; by default nowhere.
      progress: what a person watches; by default nothing.

    Raises:
      ValueError: model_dir differs from config's; model_fn's arguments cannot be filled.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        journal: Journal | NullJournal | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._config = _with_model_dir(config, model_dir)
        self._params = copy.deepcopy(dict(params or {}))
        self._model_fn = ModelFn(model_fn, Params(self._params), self._config)
        self._journal = journal or NullJournal()
        self._progress = progress or NullProgress()
        self._models: dict[bool, Model] = {}
        self._trained_on: Any = None

    @property
    def model_dir(self) -> str:
        assert self._config.model_dir is not None
        return self._config.model_dir

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the parameters."""
        return copy.deepcopy(self._params)

    # --- training ---------------------------------------------------------------------------------------------

    def train(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Trains from the latest checkpoint on, and saves one at the end.

        Args:
          hooks: native `Hook`s and `tf.compat.v1.train.SessionRunHook`s.
          steps: so many further steps; None: until the input ends.
          max_steps: until the global step is so large; nothing happens when it already is.
          saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.

        Raises:
          ValueError: both steps and max_steps are given, or one is not positive.
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite; it names the step.
        """
        self.train_run(input_fn, hooks, steps, max_steps, saving_listeners)
        return self

    def train_run(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
        after_save: Sequence[Callable[[TrainingRun], None]] = (),
    ) -> TrainingRun | None:
        """As `train`. Returns what the run came to; None when there was nothing to do.

        Args:
          after_save: called with the run after each checkpoint, unless the run was interrupted.
        """
        _check_positive(steps=steps, max_steps=max_steps)
        if steps is not None and max_steps is not None:
            raise ValueError(f"train(steps={steps}, max_steps={max_steps}): give one of them.")
        latest = self.latest_checkpoint()
        if latest is not None and max_steps is not None and checkpoints.checkpoint_step(latest) >= max_steps:
            _log.info("Nothing to train: %s is at step %d.", latest, checkpoints.checkpoint_step(latest))
            return None
        listeners = list(saving_listeners or ())
        run = self._training_run(input_fn, list(hooks or ()), listeners, after_save, latest, steps, max_steps)
        try:
            run.run(save_first=latest is None)
        finally:
            self._progress.stop()
        return run

    def _training_run(
        self,
        input_fn: InputFn,
        hooks: list[Any],
        listeners: list[Any],
        after_save: Sequence[Callable[[TrainingRun], None]],
        latest: str | None,
        steps: int | None,
        max_steps: int | None,
    ) -> TrainingRun:
        if latest is None:
            self._models.clear()  # what is in memory is of a model_dir that somebody has emptied
        model = self._model(training=True)
        feed = self._feed(input_fn, ModeKeys.TRAIN, model)
        overrides, _, _ = split_hooks(hooks)
        program = model.train_program(feed, stop_at_nan=overrides.nan(self._config.nan) == "stop")
        spec = program.spec
        hooks += [*spec.training_hooks, *(spec.training_chief_hooks if self._config.is_chief else ())]
        overrides, native, session = split_hooks(hooks)
        session_hooks = SessionHooks(session, program.trace, lambda reason: run.request_stop(reason))
        if latest is not None:
            model.restore(latest)
        elif spec.scaffold is not None:
            session_hooks.initialise(spec.scaffold)
        iterator, position = self._iterator(feed, input_fn, latest)
        config = overrides.config(self._config)
        run = TrainingRun(
            model,
            program,
            feed,
            iterator,
            position,
            config=config,
            checkpoints=checkpoints.CheckpointWriter(self.model_dir, config.keep_checkpoint_max),
            summary_writer=self._writer,
            journal=self._journal,
            progress=self._progress,
            hooks=native,
            session_hooks=session_hooks,
            listeners=session_hooks.listeners([*listeners, *overrides.listeners]),
            target=overrides.target(model.store.global_step, steps, max_steps),
            after_save=after_save,
            fail_at_nan=overrides.stop_at_nan is not False,
        )
        return run

    def _iterator(self, feed: Feed, input_fn: InputFn, latest: str | None) -> tuple[Any, Position]:
        """The training input, where the checkpoint left it.

        A further call on this object starts an input that ends, and any other function, from its beginning, as
        tf.estimator did: epochs are trained by calls. One without end goes on: it would show the same examples again.
        """
        fn = input_fn.fn if isinstance(input_fn, Input) else input_fn
        is_further_call, self._trained_on, last = self._trained_on is not None, fn, self._trained_on
        goes_on = not is_further_call or (fn is last and feed.remaining_steps() == math.inf)
        source = source_of(input_fn, feed)
        if not goes_on:
            return iter(feed.dataset), Position(source)
        return continued(feed, source, latest, self._config.cluster.worker_index)

    # --- evaluation and prediction ----------------------------------------------------------------------------

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint. Every example counts once, whatever the strategy.

        Args:
          steps: of evaluation: a global batch each, or a batch of the function's own for each replica; None: all.
          hooks: native hooks, whose begin and end are called; session hooks, which see each batch.
          checkpoint_path: None: the latest.
          name: of this evaluation, where there are several: its events go to `eval_<name>`.

        Returns: the metrics, `loss` (mean over examples) and `global_step`.

        Raises:
          ValueError: there is no checkpoint; steps is not positive; the input is empty.
        """
        _check_positive(steps=steps)
        path = self._checkpoint(checkpoint_path, "evaluate")
        model = self._model(training=False)
        feed = self._feed(input_fn, ModeKeys.EVAL, model)
        program = model.eval_program(feed)
        model.restore(path)
        native, session = _hooks_of_pass([*(hooks or ()), *program.spec.evaluation_hooks], program.trace)
        run = PassRun(self.model_dir, model.store.global_step)
        session.begin(in_loops=False)
        for hook in native:
            hook.begin(run)
        program.reset()
        kept = model.values() if program.trace.may_write_in_branches else None
        counted = evaluation.run(program, iter(feed.dataset), math.inf if steps is None else steps, session)
        if not counted.examples:
            raise ValueError(f"evaluate({name or ''}): the input has no examples.")
        results = {**counted.means()}
        results.update(tf.nest.map_structure(metrics.plain, program.values()))
        if kept is not None:
            model.assign(kept)
        self._report_evaluation(results, run.global_step, name, path, counted.examples)
        session.end()
        for hook in native:
            hook.end(run)
        return {**results, "global_step": run.global_step}

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions, in the order of the input. NumPy values.

        Args:
          predict_keys: of a dict of predictions, only these.
          hooks: native ones, whose begin is called with the first prediction and end after the last one, and session
            hooks, which see each batch.
          yield_single_examples: one example at a time; False: one batch of a replica at a time.

        Raises:
          ValueError: there is no checkpoint; predict_keys names none of the predictions, or there is no dict;
            predictions differ in their number of examples.
        """
        path = self._checkpoint(checkpoint_path, "predict")
        return self._predictions(input_fn, predict_keys, list(hooks or ()), path, yield_single_examples)

    def _predictions(
        self, input_fn: InputFn, predict_keys: Sequence[str] | str | None, hooks: list[Any], path: str, single: bool
    ) -> Iterator[Any]:
        model = self._model(training=False)
        feed = self._feed(input_fn, ModeKeys.PREDICT, model)
        program = model.predict_program(feed)
        model.restore(path)
        native, session = _hooks_of_pass([*hooks, *program.spec.prediction_hooks], program.trace)
        run = PassRun(self.model_dir, model.store.global_step)
        session.begin(in_loops=False)
        for hook in native:
            hook.begin(run)
        program.reset()
        if program.trace.may_write_in_branches:
            model.has_new_values()  # what runs next reads the checkpoint again
        for batch in program.batches(iter(feed.dataset), session):
            if model.is_stale(path) and not program.trace.may_write_in_branches:
                raise RuntimeError("the model was trained or restored while predict was under way: call predict again.")
            batch = inference.chosen(batch, predict_keys)
            if not single:
                yield batch
                continue
            for example in range(inference.num_examples(batch)):
                yield tf.nest.map_structure(lambda values, example=example: values[example], batch)
        session.end()
        for hook in native:
            hook.end(run)

    # --- what is there ----------------------------------------------------------------------------------------

    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint in model_dir; None when there is none."""
        return checkpoints.latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Names of the variables in the latest checkpoint, optimizer slots and global_step among them."""
        return sorted(checkpoints.Reader(self._checkpoint(None, "get_variable_names")).names())

    def get_variable_value(self, name: str) -> np.ndarray:
        """Value of a variable in the latest checkpoint. Raises: KeyError: there is none of that name."""
        return checkpoints.Reader(self._checkpoint(None, "get_variable_value")).get(name)

    def eval_dir(self, name: str | None = None) -> str:
        """Where the events of an evaluation go."""
        return os.path.join(self.model_dir, "eval" if not name else f"eval_{name}")

    # --- parts ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _writer(self) -> Any:
        """Of training's events. Made with the first model: constructing an Estimator touches no file."""
        return tf.summary.create_file_writer(self.model_dir)

    def _model(self, *, training: bool) -> Model:
        """The model on the strategy of training, or on that of evaluation where it is another one."""
        strategy = self._config.train_distribute
        if not training and self._config.eval_distribute is not None:
            strategy = None if self._config.eval_distribute == "default" else self._config.eval_distribute
        other = strategy is not self._config.train_distribute
        if other not in self._models:
            writer = None if other else self._writer
            self._models[other] = Model(self._model_fn, strategy, seed=self._config.seed, summary_writer=writer)
        return self._models[other]

    def _feed(self, input_fn: InputFn, mode: str, model: Model) -> Feed:
        # As tf.estimator seeded the graph before input_fn was called: what shuffles in it, shuffles the same way.
        with seeded(self._config.seed):
            feed = build_feed(
                input_fn,
                mode=mode,
                params=self._params,
                config=self._config,
                num_replicas=model.num_replicas(training=mode == ModeKeys.TRAIN),
            )
        _log.info("Input (%s): sharding %s: %s", mode, feed.shard, feed.reason)
        return feed

    def _checkpoint(self, path: str | None, command: str) -> str:
        path = path or self.latest_checkpoint()
        if path is None:
            raise ValueError(
                f"{command}: there is no checkpoint in {self.model_dir}. Train first, or give the model_dir of a model "
                "that was trained."
            )
        return path

    def _report_evaluation(
        self, results: Mapping[str, Any], step: int, name: str | None, path: str, examples: int
    ) -> None:
        scalars = metrics.scalars(results)
        prefix = f"eval_{name}" if name else "eval"
        self._journal.metrics(step, {f"{prefix}/{key}": value for key, value in scalars.items()})
        self._journal.event("evaluated", name=name or "", step=step, checkpoint=path, examples=examples)
        shown = ", ".join(f"{key} = {value:.6g}" for key, value in sorted(scalars.items()))
        self._progress.message(f"{prefix} at step {step}: {shown} ({examples} examples)")
        metrics.write_events(self.eval_dir(name), step, results)


def _with_model_dir(config: RunConfig | None, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    if config is not None and not isinstance(config, RunConfig):
        raise ValueError(f"Estimator(config={config!r}): it must be a RunConfig.")
    config = config or RunConfig()
    if model_dir is not None:
        given = os.fspath(model_dir)
        if not given:
            raise ValueError("Estimator(model_dir=''): give a folder, or None for a temporary one.")
        if config.model_dir is not None and config.model_dir != given:
            raise ValueError(f"Estimator(model_dir={given!r}) and its config's model_dir={config.model_dir!r} differ.")
        config = config.replace(model_dir=given)
    if config.model_dir is None:
        config = config.replace(model_dir=tempfile.mkdtemp(prefix="model-"))
        _log.warning("No model_dir was given: using the temporary folder %s.", config.model_dir)
    return config


def _check_positive(**arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value}: it must be positive; None sets no limit.")


def _hooks_of_pass(hooks: Sequence[Any], trace: Any) -> tuple[list[Hook], SessionHooks]:
    """Hooks of an evaluation or prediction; those that only steer training (StopAtStepHook, ..) have no part in it."""

    def refuse(reason: str) -> None:
        raise RuntimeError(f"{reason}: only training can be stopped; give evaluate(steps=).")

    _, native, session = split_hooks(hooks)
    return native, SessionHooks(session, trace, refuse)
