"""Evaluation and prediction at one checkpoint: loops over the batches, on any strategy, and the report of metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.checkpoint import retention
from runner.config.metric_names import evaluation_prefix
from runner.data.inputs import EmptyInputError, InputPipeline, why_empty
from runner.data.iterators import iterate
from runner.distribute.collectives import Collectives
from runner.estimator.context import EstimatorContext
from runner.estimator.loop_boundary import LoopLength
from runner.hooks.evaluation_hooks import EvaluationHooks
from runner.hooks.hook import Interrupted
from runner.model_fn import ModeKeys
from runner.programs.evaluate import EvalProgram, EvalResult
from runner.programs.model import Model
from runner.programs.predict import PredictProgram
from runner.tracking import tensorboard
from runner.tracking.tensorboard import EventWriters

# Predictions per call of TensorFlow: so many that the call's overhead is small, and so few that the first predictions
# come soon and all fit into memory.
_PREDICT_SECS = 0.1
_PREDICT_BYTES = 1 << 24


class EvalSetup(NamedTuple):
    """An evaluation before its first batch. Its model may still have the values of another checkpoint."""

    model: Model
    pipeline: InputPipeline
    program: EvalProgram


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The metrics of one evaluation.

    Attributes:
      name: the evaluation's name; "" if it has none.
      step, path: global step and path of the checkpoint.
      examples: number of examples counted.
    """

    name: str
    step: int
    path: str
    results: Mapping[str, Any]
    examples: int
    secs: float

    def report(self, context: EstimatorContext, writers: EventWriters | None = None) -> None:
        """Report the metrics to journal, screen and TensorBoard, and note in the checkpoint that it was evaluated.

        Args:
          context: the Estimator's.
          writers: have the event file of several evaluations of one training; None: this one has its own.
        """
        scalars = tensorboard.scalars(self.results)
        config = context.config
        label = evaluation_prefix(self.name)
        named = {f"{label}/{key}": value for key, value in scalars.items()}
        context.journal.metrics(self.step, named)
        context.journal.event(
            "evaluated", name=self.name, step=self.step, checkpoint=self.path, examples=self.examples, secs=self.secs
        )
        shown = ", ".join(f"{key} = {value:.6g}" for key, value in sorted(scalars.items()))
        too_large = tensorboard.too_large(self.results)
        if too_large:
            shown += f", only in TensorBoard's events: {', '.join(too_large)}"
        context.progress.message(f"{label} at step {self.step}: {shown} ({self.examples} examples, {self.secs:.1f} s)")
        is_of_this_run = os.path.dirname(self.path) == os.path.normpath(context.model_dir)
        if is_of_this_run:
            # The writer would make a model_dir anew that was deleted or moved during the evaluation.
            os.stat(context.model_dir)
        folder = os.path.join(context.model_dir, label)
        if writers is not None:
            tensorboard.write_events(writers.of(folder).writer, self.step, self.results)
        else:
            writer = tensorboard.build_writer(folder, is_on=config.tensorboard)
            tensorboard.write_events(writer, self.step, {"checkpoint_path": self.path, **self.results})
            writer.close()
        # Marked last: a process that is killed before this line evaluates again, so nothing is missing. Only a
        # checkpoint of this model_dir is marked.
        if is_of_this_run:
            retention.note_evaluation(self.path, config.keep_best, named)


def check_ends(pipeline: InputPipeline, steps: float, hooks: Sequence[Any], what: str = "evaluation") -> None:
    """Raise an error if an evaluation or prediction would never end: its input has no end, and nothing limits it.

    Args:
      pipeline: the input.
      steps: number of batches; infinite: all.
      hooks: the hooks of the evaluation; a v1 hook may end it, so with one no error is raised.
      what: what the input is for.

    Raises:
      ValueError: the message names the input function.
    """
    may_be_ended = any(isinstance(hook, tf.compat.v1.train.SessionRunHook) for hook in hooks)
    is_endless = math.isinf(steps) and pipeline.remaining_steps() == math.inf
    if is_endless and not may_be_ended:
        raise ValueError(
            f"{pipeline.name} returns an infinite dataset, or tensors, which a session computes for each step, so its "
            f"{what} would never end. Remove .repeat(), return a tf.data.Dataset instead of tensors, or set the number "
            "of batches of an evaluation: eval.steps (EvalSpec(steps=...), evaluate(steps=...))."
        )


def results(setup: EvalSetup, hooks: EvaluationHooks, what: str) -> tuple[dict[str, Any], int]:
    """Evaluate with the current values of the variables.

    Args:
      setup: the evaluation.
      hooks: native and session hooks.
      what: the evaluation's name in errors.

    Returns:
      (metrics, number of examples). Those that keep their state in variables are NumPy values of their dtypes.

    Raises:
      EmptyInputError: there are no examples.
      Interrupted: a hook ended the evaluation early.
    """
    model = setup.model
    program = setup.program
    # In a session, an evaluation wrote to variables of its own. Here it writes to the model's, so their values are set
    # aside before the first write, and put back afterwards. That costs memory: the first lookup copies a table whose
    # buffer is shared. So it is done only if model_fn writes variables; session hooks do it before their first write.
    if program.changes_model:
        model.set_aside()
    try:
        total = run(setup, hooks)
        setup.pipeline.stream.check()
        if not total.examples:
            raise EmptyInputError(f"{what}: {why_empty(setup.pipeline, ModeKeys.EVAL, model.collectives)}")
        metrics: dict[str, Any] = {**total.means()}
        metrics.update(program.values())
    except tf.errors.ResourceExhaustedError as error:
        size = setup.pipeline.global_batch_size
        if size is not None and size > 1:
            # The share of a batch that each replica would have if batches were divided over the replicas.
            fits = max(1, size // max(2, setup.pipeline.num_in_turn))
            error.add_note(
                f"input.eval.batch_size={size} is the number of examples that one device evaluates at a time. If its "
                f"memory is too small for them, set input.eval.batch_size={fits}: means over examples stay the same."
            )
        raise
    return metrics, total.examples


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with their scalars as Python's numbers and bytes."""
    values: dict[str, Any] = tf.nest.map_structure(tensorboard.plain, dict(metrics))
    return values


def run_on_chief_alone(evaluate: Callable[[], dict[str, Any]], collectives: Collectives) -> dict[str, Any]:
    """Run `evaluate` on the chief while the other workers wait. All workers must call this together.

    Returns:
      The results on the chief; on other workers only those results that are numbers.

    Raises:
      Interrupted: `evaluate` raised it; then it is raised on all workers.
    """
    metrics: dict[str, Any] = {}
    given_up = ""
    if collectives.is_chief:
        try:
            metrics = evaluate()
        except Interrupted as stopped:
            given_up = str(stopped)
    # Also if the chief gave up: the other workers wait here, and would wait forever.
    given_up, scalars = json.loads(collectives.broadcast_text(json.dumps([given_up, tensorboard.scalars(metrics)])))
    if given_up:
        collectives.part()
        raise Interrupted(given_up)
    if metrics:
        return metrics
    if "global_step" in scalars:  # the only result that is an integer: `tensorboard.scalars` makes all numbers floats
        scalars["global_step"] = int(scalars["global_step"])
    return dict(scalars)


def run(setup: EvalSetup, hooks: EvaluationHooks) -> EvalResult:
    """Evaluate all batches: in loops, or one by one if hooks look at each batch.

    Workers may have different numbers of batches, and loops of different lengths. After each loop all workers, even
    those without further batches, agree whether to continue. So when a worker is asked to stop, it need not wait until
    the others have evaluated their last batch. If hooks fetch values of examples, all workers take one batch of each
    replica at a time.

    Raises:
      Interrupted: a hook ended the evaluation early, on any worker.
    """
    total = EvalResult()
    given_up = ""
    program = setup.program
    collectives = setup.model.collectives
    one_by_one = hooks.see_each_batch
    iterator = program.iterate(setup.pipeline.dataset, in_loops=not one_by_one)
    length = LoopLength(1 if one_by_one else None)
    loops = _loops(program, iterator, length, hooks, one_by_one=one_by_one, max_steps=setup.pipeline.max_steps)

    @contextlib.contextmanager
    def given_up_together() -> Iterator[None]:
        """Note in `given_up` why a hook ends the evaluation; all workers end it after the sum that follows."""
        nonlocal given_up
        try:
            yield
        except Interrupted as stopped:
            # With several workers, raise the error only after the sum, in which the other workers wait for this one.
            if collectives.num_workers == 1:
                raise
            given_up = str(stopped)

    while True:
        result = None
        with given_up_together():
            if not given_up:
                result = next(loops, None)
            if result is not None:
                total = dataclasses.replace(result, fetched={})  # so that no batch is kept beside the next
                hooks.after_batches(total.examples)
        num_evaluating, num_giving_up = collectives.sum([result is not None, bool(given_up)])
        if num_giving_up:
            collectives.part()
            raise Interrupted(given_up or "another worker ended the evaluation early")
        if not num_evaluating:  # no worker has further batches
            return total.over(collectives, program.sum_names)
        fetched = {} if result is None else result.fetched
        with given_up_together():
            hooks.after_examples(fetched)


def _loops(
    program: EvalProgram | PredictProgram,
    iterator: Any,
    length: LoopLength,
    hooks: EvaluationHooks,
    *,
    one_by_one: bool,
    max_steps: float = math.inf,
) -> Iterator[Any]:
    """Start the session hooks, and yield the result of each loop over batches, until the data ends, a session hook
    requests a stop, or `max_steps` steps have been taken.

    Args:
      program: the program.
      iterator: the iterator over the batches.
      length: the length of the loops.
      hooks: the hooks. If a session hook runs operations that depend on a batch, these get the next batch, which no
        step evaluates then.
      one_by_one: each batch is a call of its own, whose values hooks may see.
      max_steps: the largest number of steps.
    """
    taken = 0
    numbers_of_batches = itertools.count()  # counts all that are read one by one, also those that only a hook gets
    session = hooks.session
    hooks.start(lambda request: program.fetch(iterator, next(numbers_of_batches), request))
    while taken < max_steps:
        num_steps = length.next(max_steps - taken)
        started = time.perf_counter()
        result: Any = None
        if not one_by_one:
            result = program.run(iterator, taken, num_steps)
        else:
            try:
                request = dataclasses.replace(session.request(taken + 1), names=hooks.names)
                result, values = program.run_one(iterator, next(numbers_of_batches), request)
                session.after_run(values)
            except tf.errors.OutOfRangeError:  # there is no further batch, for the step or for a hook
                max_steps = taken  # ends the loop
        taken += num_steps
        # Before `yield`: what the caller does then is no part of the loop.
        num_bytes = 0 if result is None else result.num_bytes
        length.took(num_steps, time.perf_counter() - started, num_bytes)
        if result is not None:
            yield result
            if result.data_ended or session.stop_requested:
                return


def batches(model: Model, program: PredictProgram, dataset: Any, path: str, hooks: EvaluationHooks) -> Iterator[Any]:
    """Yield the predictions of one batch of a replica at a time: NumPy values `[batch, ...]`.

    Args:
      model: the model.
      program: its prediction program.
      dataset: the input.
      path: the checkpoint whose values the model has.
      hooks: native and session hooks.

    Raises:
      RuntimeError: the model was given other values between two batches.
      Interrupted: a hook ended the prediction early.
    """
    in_loops = hooks.session.is_empty and program.runs_in_loops(dataset)
    length = LoopLength(None if in_loops else 1, _PREDICT_SECS, _PREDICT_BYTES)
    examples = 0

    def keep_values() -> None:
        if program.changes_model:
            model.set_aside()

    keep_values()
    for result in _loops(program, iterate(dataset), length, hooks, one_by_one=not in_loops):
        for count, batch in result.batches:
            if model.values_of != path:
                raise RuntimeError("The model was trained or restored while predict was running. Call predict again.")
            examples += count
            hooks.after_batches(examples)
            yield batch
            # Once more: if the caller has used the model meanwhile, the values that were set aside have been put back.
            keep_values()
    hooks.end()
