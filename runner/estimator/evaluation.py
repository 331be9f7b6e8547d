"""Evaluation and prediction at one checkpoint: sums over all batches on any strategy, and their report."""

from __future__ import annotations

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
from runner.data.inputs import InputPipeline
from runner.data.iterators import iterate
from runner.distribute.collectives import Collectives
from runner.estimator.context import EstimatorContext
from runner.estimator.loop_boundary import LoopLength
from runner.hooks.evaluation_hooks import EvaluationHooks
from runner.hooks.hook import Interrupted
from runner.programs.evaluate import EvalProgram, EvalResult, Sums
from runner.programs.model import Model
from runner.programs.predict import PredictProgram
from runner.tracking import tensorboard

# Predictions of one call of TensorFlow: so many that its overhead is small, so few that nobody waits long for the first
# of them, and that they fit into memory.
_PREDICT_SECS = 0.1
_PREDICT_BYTES = 1 << 24


@dataclasses.dataclass
class RunningMeans:
    """The means over the examples that were counted so far.

    Attributes:
      sums: name -> (sum over examples, their weight); `loss` among them.
    """

    sums: Sums = dataclasses.field(default_factory=dict)
    examples: int = 0

    def means(self) -> dict[str, float]:
        """Return name -> mean over what was counted; NaN for a weight of zero."""
        return {name: total / weight if weight else math.nan for name, (total, weight) in self.sums.items()}

    def over(self, collectives: Collectives, names: Sequence[str]) -> RunningMeans:
        """Return what all workers have counted, each its own examples.

        Args:
          names: of the sums; a worker without any examples may have none of them.
        """
        mine = [part for name in names for part in self.sums.get(name, (0.0, 0.0))]
        examples, *parts = collectives.sum([self.examples, *mine])
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return RunningMeans(dict(zip(names, pairs, strict=True)), int(examples))


class EvalSetup(NamedTuple):
    """An evaluation before its first batch; its model may have the values of another checkpoint still."""

    model: Model
    pipeline: InputPipeline
    program: EvalProgram


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The metrics of one evaluation.

    Attributes:
      name: of the evaluation; "" where it has none.
      step, path: of the checkpoint.
      examples: how many were counted.
    """

    name: str
    step: int
    path: str
    results: Mapping[str, Any]
    examples: int
    secs: float

    def report(self, context: EstimatorContext) -> None:
        """Tell the journal, the person who watches, TensorBoard, and the checkpoint."""
        scalars, config, label = tensorboard.scalars(self.results), context.config, evaluation_prefix(self.name)
        named = {f"{label}/{key}": value for key, value in scalars.items()}
        context.journal.metrics(self.step, named)
        context.journal.event(
            "evaluated", name=self.name, step=self.step, checkpoint=self.path, examples=self.examples, secs=self.secs
        )
        shown = ", ".join(f"{key} = {value:.6g}" for key, value in sorted(scalars.items()))
        context.progress.message(f"{label} at step {self.step}: {shown} ({self.examples} examples, {self.secs:.1f} s)")
        writer = tensorboard.build_writer(os.path.join(context.model_dir, label), is_on=config.tensorboard)
        tensorboard.write_events(writer, self.step, self.results)
        writer.close()
        # Last: whoever is killed before this evaluates once more, and nothing is missing. Of another model's checkpoint
        # nothing is noted.
        if os.path.dirname(self.path) == os.path.normpath(context.model_dir):
            retention.note_evaluation(self.path, config.keep_best, named)


def check_ends(setup: EvalSetup, steps: float, hooks: Sequence[Any]) -> None:
    """Refuse an evaluation of data without end that nothing else ends.

    Args:
      hooks: those of v1 among them may end it.

    Raises:
      ValueError: naming the input function.
    """
    is_v1 = (isinstance(hook, tf.compat.v1.train.SessionRunHook) for hook in hooks)
    if math.isinf(steps) and setup.pipeline.remaining_steps() == math.inf and not any(is_v1):
        raise ValueError(
            f"{setup.pipeline.name} returns an infinite dataset, so its evaluation would never end. Remove .repeat(), "
            "or set eval.steps (EvalSpec(steps=...), evaluate(steps=...))."
        )


def results(setup: EvalSetup, steps: float, hooks: EvaluationHooks, what: str) -> tuple[dict[str, Any], int]:
    """Return (metrics, number of examples) of up to `steps` batches, by the variables as they are.

    Args:
      what: names the evaluation in an error.

    Raises:
      ValueError: there are no examples.
      Interrupted: a hook gave it up.
    """
    model, program = setup.model, setup.program
    hooks.begin()
    kept = model.values() if program.trace.may_write_in_branches else {}
    try:
        counted = run(setup, steps, hooks)
        if not counted.examples:
            raise ValueError(f"{what}: the input has no examples: {setup.pipeline.name} gave none.")
        metrics: dict[str, Any] = {**counted.means()}
        metrics.update(tf.nest.map_structure(tensorboard.plain, program.values()))
    finally:
        model.assign(kept)
    return metrics, counted.examples


def of_chief_alone(evaluate: Callable[[], dict[str, Any]], collectives: Collectives) -> dict[str, Any]:
    """Run `evaluate` on the chief while the other workers wait; return its results there, and its numbers on them.

    Raises: Interrupted: as `evaluate`, on all workers.
    """
    metrics: dict[str, Any] = {}
    given_up = ""
    if collectives.is_chief:
        try:
            metrics = evaluate()
        except Interrupted as stopped:
            given_up = str(stopped)
    given_up, scalars = json.loads(collectives.broadcast_text(json.dumps([given_up, tensorboard.scalars(metrics)])))
    if given_up:
        raise Interrupted(given_up)
    return metrics or {name: int(value) if name == "global_step" else value for name, value in scalars.items()}


def run(setup: EvalSetup, steps: float, hooks: EvaluationHooks) -> RunningMeans:
    """Evaluate up to `steps` batches: in loops, or one at a time for session hooks to see.

    Workers may have different numbers of batches, and loops of their own length. After each loop they agree whether to
    continue, those without further batches as well: a worker that is asked to stop cannot wait for the others' last.

    Raises:
      Interrupted: a hook gave it up, on any worker.
    """
    counted, given_up, is_over = RunningMeans(), "", False
    collectives, loops = setup.model.collectives, _loops(setup, steps, hooks, counted)
    while True:
        try:
            is_over = is_over or next(loops, None) is None
        except Interrupted as stopped:
            if collectives.num_workers == 1:
                raise
            given_up = str(stopped)
        others, stops = collectives.sum([not is_over, bool(given_up)])
        if stops:
            raise Interrupted(given_up or "another worker gave it up")
        if not others:
            return counted.over(collectives, setup.program.sum_names)


def _loops(setup: EvalSetup, steps: float, hooks: EvaluationHooks, counted: RunningMeans) -> Iterator[EvalResult]:
    """Yield the result of each loop, and add it to `counted`."""
    program, session = setup.program, hooks.session
    iterator = program.iterate(setup.pipeline.dataset, in_loops=session.is_empty)
    length, taken = LoopLength(None if session.is_empty else 1), 0
    while taken < steps:
        num_steps, started = length.next(steps - taken), time.perf_counter()
        if session.is_empty:
            result = program.run(iterator, num_steps, counted.sums)
        else:
            result, values = program.run_one(iterator, session.request(taken + 1), counted.sums)
            if not result.data_ended:
                session.after_run(values)
        counted.sums, counted.examples = result.sums, counted.examples + result.examples
        hooks.after_batches(counted.examples)
        taken += num_steps
        length.took(num_steps, time.perf_counter() - started)
        yield result
        if result.data_ended:
            break


def batches(model: Model, program: PredictProgram, dataset: Any, path: str, hooks: EvaluationHooks) -> Iterator[Any]:
    """Yield the predictions of one replica's batch at a time. NumPy values.

    Args:
      path: of the checkpoint whose values the model has.

    Raises:
      RuntimeError: it has others by now.
      Interrupted: a hook gave it up.
    """
    hooks.begin()
    if program.trace.may_write_in_branches:
        model.values_of = None  # what runs next reads the checkpoint again
    seen = 0
    for count, batch in _predicted(program, dataset, hooks):
        if model.values_of != path and not program.trace.may_write_in_branches:
            raise RuntimeError("the model was trained or restored while predict was under way: call predict again.")
        seen += count
        hooks.after_batches(seen)
        yield batch
    hooks.end()


def _predicted(program: PredictProgram, dataset: Any, hooks: EvaluationHooks) -> Iterator[tuple[int, Any]]:
    """Yield (examples, predictions) of each replica's batch: in loops, or step by step for session hooks to see."""
    session, iterator = hooks.session, iterate(dataset)
    in_loops = session.is_empty and program.runs_in_loops(dataset)
    length, limit = LoopLength(None if in_loops else 1, _PREDICT_SECS), math.inf
    for step in itertools.count(1):
        num_steps, started = length.next(limit), time.perf_counter()
        if in_loops:
            found = program.run(iterator, num_steps)
            limit = max(1, _PREDICT_BYTES * found.num_steps // max(1, found.num_bytes))
        else:
            found, values = program.run_one(iterator, session.request(step))
            if not found.data_ended:
                session.after_run(values)
        length.took(found.num_steps, time.perf_counter() - started)
        yield from found.batches
        if found.data_ended:
            return
