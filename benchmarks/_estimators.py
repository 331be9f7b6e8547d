"""Benchmark cases that train with the Estimator. Not a script."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _rounds import Case, Times

import runner


class Stopwatch(runner.Hook):
    """Adds up the times from the end of one grown loop to the end of the next.

    Args:
      grown: shorter loops are ignored; they come at the start, before the Estimator has measured a step.
    """

    def __init__(self, grown: int) -> None:
        self.steps = 0
        self.spent = Times()
        self._grown, self._ended = grown, Times()

    def after_step(self, run: Any, result: runner.StepResult) -> None:
        now = Times.now()
        if result.num_steps >= self._grown:
            self.steps += result.num_steps
            self.spent += now - self._ended
        self._ended = now


def training(
    name: str,
    model_fn: Callable[..., Any],
    input_fn: Any,
    steps: int,
    *,
    grown: int = 1000,
    config: runner.RunConfig | None = None,
    model_dir: Path | None = None,
) -> Case:
    """Return a case with two rows: `name`, the steady state, and `name, whole call`, one `train(steps=...)` with its
    setup, the short first loops and the checkpoint at the end.
    """
    trained = runner.Estimator(model_fn, model_dir or tempfile.mkdtemp(prefix="benchmark-"), config)

    def case() -> dict[str, Times]:
        stopwatch, started = Stopwatch(grown), Times.now()
        trained.train(input_fn, hooks=[stopwatch], steps=steps)
        whole = Times.now() - started
        # With --tiny no loop grows, so the steady state is NaN.
        steady = stopwatch.spent / stopwatch.steps if stopwatch.steps else Times(math.nan, math.nan)
        return {name: steady, f"{name}, whole call": whole / steps}

    return case
