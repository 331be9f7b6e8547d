"""One pass of evaluation: sums over all batches, whatever the strategy counted them on, and what is told of them."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner import metrics, retention
from runner.agreement import Agreement
from runner.boundary import LoopLength
from runner.hooks import Interrupted
from runner.inference import EvalProgram, EvalResult, Sums
from runner.inputs import Feed
from runner.journal import Journal, NullJournal
from runner.model import Model
from runner.passes import Pass
from runner.report import NullProgress, Progress
from runner.run_config import RunConfig


@dataclasses.dataclass
class Counted:
    """What has been counted so far.

    Attributes:
      sums: name -> (sum over examples, their weight); `loss` among them.
    """

    sums: Sums = dataclasses.field(default_factory=dict)
    examples: int = 0

    def note(self, result: EvalResult) -> None:
        self.sums = result.sums
        self.examples += result.examples

    def means(self) -> dict[str, float]:
        """Name -> mean over what was counted; NaN for a weight of zero."""
        return {name: total / weight if weight else math.nan for name, (total, weight) in self.sums.items()}

    def over(self, agreement: Agreement, names: Sequence[str]) -> Counted:
        """What all workers have counted, each its own examples.

        Args:
          names: of the sums; a worker without any examples may have none of them.
        """
        mine = [part for name in names for part in self.sums.get(name, (0.0, 0.0))]
        examples, *parts = agreement.sum([self.examples, *mine])
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return Counted(dict(zip(names, pairs, strict=True)), int(examples))


@dataclasses.dataclass(frozen=True)
class Found:
    """What an evaluation came to.

    Attributes:
      name: of the evaluation; "" where it has none.
      step, path: of the checkpoint.
      examples: so many were counted.
    """

    name: str
    step: int
    path: str
    results: Mapping[str, Any]
    examples: int
    secs: float

    def report(
        self, config: RunConfig, journal: Journal | NullJournal, progress: Progress | NullProgress, folder: str
    ) -> None:
        """Tells the journal, the person who watches, the best checkpoints, and TensorBoard in `folder`."""
        scalars = metrics.scalars(self.results)
        found = {f"{prefix(self.name)}/{key}": value for key, value in scalars.items()}
        journal.metrics(self.step, found)
        if config.keep_best is not None:
            retention.note_evaluation(self.path, config.keep_best, found)
        journal.event(
            "evaluated", name=self.name, step=self.step, checkpoint=self.path, examples=self.examples, secs=self.secs
        )
        shown = ", ".join(f"{key} = {value:.6g}" for key, value in sorted(scalars.items()))
        what = f"{prefix(self.name)} at step {self.step}"
        progress.message(f"{what}: {shown} ({self.examples} examples, {self.secs:.1f} s)")
        writer = metrics.build_writer(folder, is_on=config.tensorboard)
        metrics.write_events(writer, self.step, self.results)
        writer.close()


def prefix(name: str | None) -> str:
    """Of an evaluation's metrics, and its folder."""
    return f"eval_{name}" if name else "eval"


def results(
    model: Model, program: EvalProgram, feed: Feed, steps: float, one_pass: Pass, what: str
) -> tuple[dict[str, Any], int]:
    """(the metrics, the examples) of up to `steps` batches, by the variables as they are.

    Args:
      what: names the evaluation in an error.

    Raises:
      ValueError: there are no examples.
      Interrupted: a hook gave it up.
    """
    one_pass.begin()
    program.reset()
    kept = model.values() if program.trace.may_write_in_branches else {}
    try:
        batches = program.iterate(feed.dataset, in_loops=one_pass.session.is_empty)
        counted = run(program, batches, steps, one_pass, model.agreement)
        if not counted.examples:
            raise ValueError(f"{what}: the input has no examples.")
        found: dict[str, Any] = {**counted.means()}
        found.update(tf.nest.map_structure(metrics.plain, program.values()))
    finally:
        model.assign(kept)
    return found, counted.examples


def of_chief_alone(evaluate: Callable[[], dict[str, Any]], agreement: Agreement) -> dict[str, Any]:
    """What `evaluate` gives on the chief, where it runs while the other workers wait; its numbers, on these.

    Raises: Interrupted: as `evaluate`, on all workers.
    """
    found: dict[str, Any] = {}
    given_up = ""
    if agreement.is_chief:
        try:
            found = evaluate()
        except Interrupted as stopped:
            given_up = str(stopped)
    given_up, scalars = json.loads(agreement.text_of_chief(json.dumps([given_up, metrics.scalars(found)])))
    if given_up:
        raise Interrupted(given_up)
    return found or {name: int(value) if name == "global_step" else value for name, value in scalars.items()}


def run(program: EvalProgram, iterator: Any, steps: float, one_pass: Pass, agreement: Agreement) -> Counted:
    """Evaluates up to `steps` batches: in loops, or one at a time for session hooks to see.

    Workers may have different numbers of batches, and loops of their own length. After each loop they agree whether to
    go on, those that have no more batches as well: a worker that is asked to stop cannot wait for the others' last.

    Raises:
      Interrupted: a hook gave it up, on any worker.
    """
    counted, given_up, is_over = Counted(), "", False
    loops = _loops(program, iterator, steps, one_pass, counted)
    while True:
        try:
            is_over = is_over or next(loops, None) is None
        except Interrupted as stopped:
            if agreement.num_workers == 1:
                raise
            given_up = str(stopped)
        others, stops = agreement.sum([not is_over, bool(given_up)])
        if stops:
            raise Interrupted(given_up or "another worker gave it up")
        if not others:
            return counted.over(agreement, program.sum_names)


def _loops(program: EvalProgram, iterator: Any, steps: float, one_pass: Pass, counted: Counted) -> Iterator[EvalResult]:
    """Yields what each loop has counted, which is in `counted`, too."""
    session = one_pass.session
    length, taken = LoopLength(None if session.is_empty else 1), 0
    while taken < steps:
        num_steps, started = length.next(steps - taken), time.perf_counter()
        if session.is_empty:
            result = program.run(iterator, num_steps, counted.sums)
        else:
            result, values = program.run_one(iterator, session.request(taken + 1), counted.sums)
            if not result.data_ended:
                session.after_run(values)
        counted.note(result)
        one_pass.after_batches(counted.examples)
        taken += num_steps
        length.took(num_steps, time.perf_counter() - started)
        yield result
        if result.data_ended:
            break
