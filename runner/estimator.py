"""The Estimator: trains, evaluates and predicts with a model_fn, from the checkpoints of its model_dir."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from runner import checkpoints, evaluation, inference, prediction, scaffold
from runner.event_writers import EventWriters
from runner.exporting import Exporting
from runner.hook_overrides import split_hooks
from runner.hooks import Hook, PassRun
from runner.input_states import OfEach, OfOne
from runner.inputs import Feed, Input
from runner.iterators import iterate
from runner.loop import TrainingRun
from runner.model import Model
from runner.model_fn import ModeKeys
from runner.model_summary import ModelSummary
from runner.passes import Pass
from runner.position import Position, continued, source_of, was_read_to_its_end
from runner.preparation import Preparation
from runner.profiling import Profiling
from runner.report import format_table
from runner.retention import Keep
from runner.saving import SavedElsewhere, Saver, Saving
from runner.session_hooks import SessionHooks
from runner.stored_model import InputFn

_log = logging.getLogger(__name__)


class Estimator(Exporting):
    """A model_fn and its life in `model_dir`, with tf.estimator's methods and argument rules.

    Args:
      model_fn: called with those of features, labels, mode, params, config that it declares; see `EstimatorSpec`.
      model_dir: folder of checkpoints and events; None: config's, or a temporary one.
      config: None: `RunConfig()`.
      params: for model_fn, and for input functions that bring none of their own: a dict, or an object; copied.
      journal: where what happens is noted for the supervisor; by default nowhere.
      progress: what a person watches; by default nothing.

    Raises:
      ValueError: model_dir differs from config's; model_fn's arguments cannot be filled.
    """

    _trained_on: Any = None
    _summarised: Any = None

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
        """Trains from the latest checkpoint on, and saves one at the end.

        Args:
          hooks: native `Hook`s and `tf.compat.v1.train.SessionRunHook`s.
          steps: so many further steps; None: until the input ends.
          max_steps: until the global step is so large; nothing happens when it already is.
          saving_listeners: `tf.compat.v1.train.CheckpointSaverListener`s.
          max_epochs: until so many passes over the input are made, those before the latest checkpoint included.

        Raises:
          ValueError: both steps and max_steps are given, or a number is not positive; max_epochs of data without end.
          tf.compat.v1.train.NanLossDuringTrainingError: a loss was not finite; it names the step.
        """
        self.train_run(input_fn, hooks, steps, max_steps, saving_listeners, max_epochs=max_epochs)
        return self

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
    ) -> TrainingRun | None:
        """As `train`. Returns what the run came to; None when there was nothing to do.

        Args:
          after_save: called with the run after each checkpoint, unless the run was interrupted.
          once: without an end in steps, an input that an earlier process read to its end is not read again.
        """
        _check_end(steps, max_steps, max_epochs)
        latest = self.agreed_checkpoint()
        if latest is not None and max_steps is not None and checkpoints.checkpoint_step(latest) >= max_steps:
            _log.info("Nothing to train: %s is at step %d.", latest, checkpoints.checkpoint_step(latest))
            return None
        feed = self._training_feed(input_fn, latest, max_epochs)
        to_its_end = steps is None and (max_steps is None or max_epochs is not None)
        if once and to_its_end and self._is_at_its_end(input_fn, feed, latest):
            more = "train.max_steps" if max_epochs is None else "A larger train.max_epochs"
            _log.info("Nothing to train: %s is where the training input ended. %s trains on.", latest, more)
            return None
        preparation = self._prepare(feed, input_fn, list(hooks or ()), latest, lambda reason: run.request_stop(reason))
        preparation = dataclasses.replace(preparation, hooks=[*preparation.hooks, *self._own_hooks(preparation)])
        listeners = preparation.session_hooks.listeners([*(saving_listeners or ()), *preparation.overrides.listeners])
        run = TrainingRun(
            preparation,
            target=preparation.target(steps, max_steps),
            agreement=self._agreement,
            saving=self._saving(Keep.of(preparation.config), feed),
            summary_writer=self._writer,
            journal=self._journal,
            progress=self._progress,
            listeners=listeners if self._agreement.is_chief else (),
            after_save=after_save,
        )
        try:
            with self._agreement.noticing_lost_peers():
                run.run(save_first=latest is None)
        finally:
            self._progress.stop()
        return run

    def _saving(self, keep: Keep, feed: Feed) -> Saving:
        writer = checkpoints.CheckpointWriter(self.model_dir, keep, written=self._checkpoints.trust)
        states = OfEach(writer, self._agreement) if feed.num_pipelines > 1 else OfOne()
        return Saver(writer, states) if self._agreement.is_chief else SavedElsewhere(writer, states)

    def prepare(
        self, input_fn: InputFn, hooks: Sequence[Any] | None = None, max_epochs: int | None = None
    ) -> Preparation:
        """Training up to its first step: the model traced, restored from the latest checkpoint, at its place in the
        input. No step is taken and no checkpoint written."""
        latest = self.agreed_checkpoint()
        return self._prepare(self._training_feed(input_fn, latest, max_epochs), input_fn, list(hooks or ()), latest)

    def _own_hooks(self, preparation: Preparation) -> list[Hook]:
        """Those of the process that writes; after all others."""
        if not self._is_chief:
            return []
        steps, hooks = self._config.profile_steps, list[Hook]()
        if self._summarised is not preparation.program:
            self._summarised = preparation.program
            hooks.append(ModelSummary(preparation))
        return hooks if steps is None else [*hooks, Profiling(steps, self.announce)]

    def _is_at_its_end(self, input_fn: InputFn, feed: Feed, latest: str | None) -> bool:
        """Whether an earlier process, not a call on this object, has read the input to its end."""
        return self._trained_on is None and was_read_to_its_end(source_of(input_fn, feed), latest, feed.num_epochs)

    def _training_feed(self, input_fn: InputFn, latest: str | None, max_epochs: int | None) -> Feed:
        if latest is None:
            self._models.clear()  # what is in memory is of a model_dir that somebody has emptied
        with self._journal.phase("build"):
            model = self._model(training=True)
            build = functools.partial(self._feed, mode=ModeKeys.TRAIN, model=model, num_epochs=max_epochs)
            return model.training_feed(input_fn, build)

    def _prepare(
        self,
        feed: Feed,
        input_fn: InputFn,
        hooks: list[Any],
        latest: str | None,
        stop: Callable[[str], None] = lambda reason: None,
    ) -> Preparation:
        """Args: stop: called with the reason when a session hook requests to stop."""
        model = self._model(training=True)
        overrides, _, _ = split_hooks(hooks)
        stop_at_nan = overrides.nan(self._config.nan) != "ignore"
        program = model.train_program(feed, summary_writer=self._writer, stop_at_nan=stop_at_nan)
        spec = program.spec
        hooks += [*spec.training_hooks, *(spec.training_chief_hooks if self._is_chief else ())]
        overrides, native, session = split_hooks(hooks)
        for note in overrides.notes:
            _log.warning("%s", note)
        writers = EventWriters(is_on=self._is_chief, own={self.model_dir: self._writer})
        operators = self._model_fn.operators
        session_hooks = SessionHooks(session, program.trace, operators, stop, writers, in_loops=True)
        if latest is not None:
            model.restore(latest)
        else:
            self._warm_start(model)
        scaffold.initialise(spec.scaffold, session_hooks.session, is_new=latest is None)
        with self._journal.phase("restore" if latest else "build"):
            iterator, position = self._iterator(feed, input_fn, latest)
        config = overrides.config(self._config)
        return Preparation(model, program, feed, iterator, position, latest, config, native, session_hooks, overrides)

    def _warm_start(self, model: Model) -> None:
        """Gives a new model the values that it begins with, and says which."""
        if self._config.warm_start is None:
            return
        with self._journal.phase("restore"):
            loaded = model.begin_with(self._config.warm_start)
        self._journal.event("warm_start", **loaded.facts)
        self._progress.message(format_table(f"warm start from {loaded.path}", ["variable", "shape", ""], loaded.rows))

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
            return iterate(feed.dataset), Position.at_start(source, feed)
        return continued(feed, source, latest)

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
          hooks: native hooks, whose begin, after_batches and end are called; session hooks, which see each batch.
          checkpoint_path: None: the latest.
          name: of this evaluation, where there are several: its events go to `eval_<name>`.

        Returns: the metrics, `loss` (mean over examples) and `global_step`.

        Raises:
          ValueError: there is no checkpoint; steps is not positive; the input is empty.
          Interrupted: a native hook gave it up.
        """
        _check_positive(steps=steps)
        with self._agreement.noticing_lost_peers():
            path = self._checkpoint(checkpoint_path or self.agreed_checkpoint(), "evaluate")
            with self._journal.phase("evaluate"):
                limit = math.inf if steps is None else steps
                run = functools.partial(self._evaluation, input_fn, limit, list(hooks or ()), path, name)
                if self._model(training=False).agreement.num_workers == self._agreement.num_workers:
                    return run()
                return evaluation.of_chief_alone(run, self._agreement)

    def _evaluation(
        self, input_fn: InputFn, steps: float, hooks: list[Any], path: str, name: str | None
    ) -> dict[str, Any]:
        started = time.monotonic()
        model, feed, program = self.prepare_evaluation(input_fn)
        with self._restored(model, path):
            step = model.store.global_step
            prefix = evaluation.prefix(name)
            one_pass = self._pass([*hooks, *program.spec.evaluation_hooks], program, step, prefix)
            results, examples = evaluation.results(model, program, feed, steps, one_pass, f"evaluate({name or ''})")
        one_pass.end()  # first of all: of two files of events in a folder TensorBoard goes on with the newer
        if self._agreement.is_chief:
            found = evaluation.Found(name or "", step, path, results, examples, time.monotonic() - started)
            found.report(self._config, self._journal, self._progress, self.eval_dir(name))
        return {**results, "global_step": step}

    def prepare_evaluation(self, input_fn: InputFn) -> tuple[Model, Feed, inference.EvalProgram]:
        """An evaluation up to its first batch, but for what the checkpoint holds."""
        model = self._model(training=False)
        feed = self._feed(input_fn, ModeKeys.EVAL, model)
        return model, feed, model.eval_program(feed)

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions, in the order of the input. NumPy values.

        Of several workers, the one that calls it computes all of them, on one device; the others are not waited for.

        Args:
          predict_keys: of a dict of predictions, only these.
          hooks: native ones, whose begin is called with the first prediction, after_batches with each batch and end
            after the last one, and session hooks, which see each batch.
          yield_single_examples: one example at a time; False: one batch of a replica at a time.

        Raises:
          ValueError: there is no checkpoint; predict_keys names none of the predictions, or there is no dict;
            predictions differ in their number of examples.
        """
        path = self._checkpoint(checkpoint_path or self.latest_checkpoint(), "predict")
        return self._predictions(input_fn, predict_keys, list(hooks or ()), path, yield_single_examples)

    def _predictions(
        self, input_fn: InputFn, predict_keys: Sequence[str] | str | None, hooks: list[Any], path: str, single: bool
    ) -> Iterator[Any]:
        model = self._model(training=False)
        if model.agreement.num_workers > 1:  # nobody has to wait for the others
            model = self._model_on(None)
        feed = self._feed(input_fn, ModeKeys.PREDICT, model)
        program = model.predict_program(feed)
        with self._restored(model, path):
            one_pass = self._pass([*hooks, *program.spec.prediction_hooks], program, model.store.global_step, "predict")
            for batch in prediction.batches(model, program, iterate(feed.dataset), path, one_pass):
                batch = inference.chosen(batch, predict_keys)
                yield from inference.single_examples(batch) if single else [batch]
                self._show_averages(model, path)  # whoever used the model meanwhile has put the weights back

    @contextlib.contextmanager
    def _restored(self, model: Model, path: str) -> Iterator[None]:
        """The model with what is evaluated of the checkpoint `path`: its values, or the averages of its weights."""
        model.restore(path)
        try:
            self._show_averages(model, path)
            yield
        finally:
            model.show_weights()

    def _show_averages(self, model: Model, path: str) -> None:
        if self._config.ema_decay is not None:
            self._say_once(f"Evaluation uses the moving averages of the weights (ema_decay={self._config.ema_decay}).")
            model.show_averages(path)

    def _pass(self, hooks: Sequence[Any], program: Any, step: int, what: str) -> Pass:
        run = PassRun(self.model_dir, step)
        writers = EventWriters(is_on=self._is_chief)
        count = functools.partial(self._progress.count, what)
        return Pass(hooks, program.trace, self._model_fn.operators, run, writers, count)


def _check_end(steps: int | None, max_steps: int | None, max_epochs: int | None) -> None:
    _check_positive(steps=steps, max_steps=max_steps, max_epochs=max_epochs)
    if steps is not None and max_steps is not None:
        raise ValueError(f"train(steps={steps}, max_steps={max_steps}): give one of them.")


def _check_positive(**arguments: int | None) -> None:
    for name, value in arguments.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value}: it must be positive; None sets no limit.")
