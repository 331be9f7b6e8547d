"""What is told of a run as it goes: journal, event file, progress line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from runner.journal import Journal, NullJournal
from runner.report import NullProgress, Progress
from runner.run_config import RunConfig
from runner.types import StepResult

_log = logging.getLogger(__name__)


class Record:
    """Losses and speeds of one call of `Estimator.train`.

    Args:
      first_step: the global step that the run goes on from.
      writes_loss: the loss goes to the event file; a model_fn may write its own.
    """

    def __init__(
        self,
        config: RunConfig,
        journal: Journal | NullJournal,
        summary_writer: Any,
        progress: Progress | NullProgress,
        *,
        first_step: int,
        writes_loss: bool,
    ) -> None:
        self._config, self._journal, self._progress = config, journal, progress
        self._summary_writer, self._first_step, self._writes_loss = summary_writer, first_step, writes_loss

    def note(self, result: StepResult) -> None:
        """Tells of a loop that has taken a step or more."""
        if result.first_step == self._first_step + 1:  # whoever started the run knows how long that took
            self._journal.event("first_step", step=result.first_step)
        if not self._config.is_chief:
            return
        speed = {
            "train/steps_per_sec": result.num_steps / result.secs,
            "train/examples_per_sec": result.examples / result.secs,
        }
        steps = np.linspace(result.first_step, result.last_step, result.num_steps).round().astype(int)
        for step, loss in self._at(self._config.log_step_count_steps, steps, result.losses):
            values: Mapping[str, float] = {"train/loss": loss}
            if step + (self._config.log_step_count_steps or 0) > result.last_step:
                values = {**values, **speed}
            self._journal.metrics(step, values)
        with self._summary_writer.as_default():
            for step, loss in self._at(self._config.save_summary_steps, steps, result.losses):
                scalars = {"global_step/sec": speed["train/steps_per_sec"]}
                scalars |= {"loss": loss} if self._writes_loss else {}
                # One proto for both: tf.summary.scalar takes 0.12 ms for each.
                proto = tf.compat.v1.Summary(
                    value=[{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
                )
                tf.summary.experimental.write_raw_pb(proto.SerializeToString(), step=step)
        self._progress.update(result.last_step, float(result.losses[-1]), *speed.values())

    def repeated(self, step: int, asked: int, twice: int) -> None:
        """Tells that steps were asked for once more, as a worker was lost.

        Args:
          twice: so many of them it had taken already: their examples are trained on twice.
        """
        self._journal.event("repeated", step=step, asked=asked, twice=twice)
        _log.warning(
            "A worker was lost, and %d %s asked for once more. It had taken %d of them: their examples were trained on "
            "twice.",
            asked, "step was" if asked == 1 else "steps were", twice,
        )  # fmt: skip

    def summaries(self, protos: list[Any], step: int) -> None:
        """Writes the serialised `tf.compat.v1.Summary`s of `step`."""
        with self._summary_writer.as_default():
            for proto in protos:
                tf.summary.experimental.write_raw_pb(proto, step=step)

    def end(self) -> None:
        """All that was told is on the disk when this returns."""
        self._summary_writer.flush()

    def _at(self, every: int | None, steps: np.ndarray, losses: np.ndarray) -> list[tuple[int, float]]:
        """(step, loss) at each multiple of `every`, and at the first step of the run."""
        if not every:
            return []
        chosen = (steps % every == 0) | (steps == self._first_step + 1)
        return [(int(step), float(loss)) for step, loss in zip(steps[chosen], losses[chosen], strict=True)]
