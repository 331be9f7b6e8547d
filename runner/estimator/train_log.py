"""Losses, speed and summaries of a run of training: to the journal, the event file and the progress line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from runner.estimator.context import EstimatorContext
from runner.estimator.train_setup import TrainSetup
from runner.hooks.hook import Every
from runner.types import StepResult

_log = logging.getLogger(__name__)


class TrainLog:
    """The log of one call of `Estimator.train`.

    Args:
      summary_writer: of the event file of training.
    """

    def __init__(self, context: EstimatorContext, setup: TrainSetup, summary_writer: Any) -> None:
        self._context, self._config, self._program = context, setup.config, setup.program
        self._summary_writer, self._first_step = summary_writer, setup.model.store.global_step
        # Of a run that resumes the journal has no point of its first step: its points are those of an undisturbed one.
        # Its summaries do, as TensorFlow's SummarySaverHook writes them.
        self._is_new = setup.latest is None or self._first_step == 0
        self._writes_loss = "loss" not in setup.program.summary_names  # model_fn writes its own
        self._summary_every = Every()

    def begin(self, target: int | None) -> None:
        """Start the progress line. Args: target: the last step, where one is known."""
        self._context.progress.start(target, self._first_step)
        # What only the chief has splits the loops of all workers: they call the same functions.
        if self._context.collectives.any(self._program.has_summaries):
            self._summary_every = Every(self._config.save_summary_steps or None)

    def are_summaries_due(self, step: int, last_step: int) -> bool:
        """Report whether the steps after `step`, up to `last_step`, end with one whose summaries are written."""
        is_first = self._summary_every.steps is not None and step == self._first_step
        return is_first or self._summary_every.due(step, last_step)

    def steps_until_due(self, step: int) -> float:
        """Return the steps to where a loop must end for summaries; infinite where there are none."""
        return self._summary_every.steps_until_due(step)

    def note(self, result: StepResult) -> None:
        """Log a loop that has taken a step or more."""
        if result.first_step == self._first_step + 1:  # whoever started the run knows how long that took
            self._context.journal.event("first_step", step=result.first_step)
        if not self._config.is_chief:
            return
        speed = {
            "train/steps_per_sec": result.num_steps / result.secs,
            "train/examples_per_sec": result.examples / result.secs,
        }
        steps = np.linspace(result.first_step, result.last_step, result.num_steps).round().astype(int)
        for step, loss in self._at(self._config.log_step_count_steps, steps, result.losses, first=self._is_new):
            values: Mapping[str, float] = {"train/loss": loss}
            if step + (self._config.log_step_count_steps or 0) > result.last_step:
                values = {**values, **speed}
            self._context.journal.metrics(step, values)
        with self._summary_writer.as_default():
            for step, loss in self._at(self._config.save_summary_steps, steps, result.losses, first=True):
                scalars = {"global_step/sec": speed["train/steps_per_sec"]}
                scalars |= {"loss": loss} if self._writes_loss else {}
                # One proto for both: tf.summary.scalar takes 0.12 ms for each.
                proto = tf.compat.v1.Summary(
                    value=[{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
                )
                tf.summary.experimental.write_raw_pb(proto.SerializeToString(), step=step)
        self._context.progress.update(result.last_step, float(result.losses[-1]), *speed.values())

    def repeated(self, step: int, asked: int, twice: int) -> None:
        """Log that steps were asked for once more, as a worker was lost.

        Args:
          twice: how many of them it had taken already: their examples are trained on twice.
        """
        self._context.journal.event("repeated", step=step, asked=asked, twice=twice)
        _log.warning(
            "A worker was lost, and %d %s asked for once more. It had taken %d of them: their examples were trained on "
            "twice.",
            asked, "step was" if asked == 1 else "steps were", twice,
        )  # fmt: skip

    def summaries(self, protos: list[Any], step: int) -> None:
        """Write the serialised `tf.compat.v1.Summary`s of `step`."""
        with self._summary_writer.as_default():
            for proto in protos:
                tf.summary.experimental.write_raw_pb(proto, step=step)

    def end(self) -> None:
        """Return when all events are on the disk."""
        self._summary_writer.flush()

    def _at(self, every: int | None, steps: np.ndarray, losses: np.ndarray, *, first: bool) -> list[tuple[int, float]]:
        """Return (step, loss) at each multiple of `every` and, where `first` says so, at the first step of this run."""
        if not every:
            return []
        chosen = (steps % every == 0) | (first & (steps == self._first_step + 1))
        return [(int(step), float(loss)) for step, loss in zip(steps[chosen], losses[chosen], strict=True)]
