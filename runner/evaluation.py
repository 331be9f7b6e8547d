"""One pass of evaluation: sums over all batches, whatever the strategy counted them on."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from runner.inference import EvalProgram, EvalResult
from runner.loop import LoopLength
from runner.passes import Pass


@dataclasses.dataclass
class Counted:
    """What has been counted so far.

    Attributes:
      sums: name -> (sum over examples, their weight); `loss` among them.
    """

    sums: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    examples: int = 0

    def add(self, result: EvalResult) -> None:
        for name, (value, weight) in result.sums.items():
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (before[0] + value, before[1] + weight)
        self.examples += result.examples

    def means(self) -> dict[str, float]:
        """Name -> mean over what was counted; NaN for a weight of zero."""
        return {name: total / weight if weight else math.nan for name, (total, weight) in self.sums.items()}


def run(program: EvalProgram, iterator: Any, steps: float, one_pass: Pass) -> Counted:
    """Evaluates up to `steps` batches: in loops, or one at a time for session hooks to see.

    Raises:
      Interrupted: a hook gave it up.
    """
    session = one_pass.session
    counted, length, taken = Counted(), LoopLength(None if session.is_empty else 1), 0
    while taken < steps:
        num_steps, started = length.next(steps - taken), time.perf_counter()
        if session.is_empty:
            result = program.run(iterator, num_steps)
        else:
            result, values = program.run_one(iterator, session.fetches(taken + 1))
            if not result.data_ended:
                session.after_run(values)
        counted.add(result)
        one_pass.after_batches(counted.examples)
        taken += num_steps
        length.took(num_steps, time.perf_counter() - started)
        if result.data_ended:
            break
    return counted
