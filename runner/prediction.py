"""One pass of prediction: batch by batch, as somebody reads them, who may use the model for other things meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.inference import PredictProgram
from runner.model import Model
from runner.passes import Pass


def batches(model: Model, program: PredictProgram, iterator: Any, path: str, one_pass: Pass) -> Iterator[Any]:
    """Yields the predictions of one replica's batch at a time. NumPy values.

    Args:
      path: of the checkpoint whose values the model has.

    Raises:
      RuntimeError: it has others by now.
      Interrupted: a hook gave it up.
    """
    one_pass.begin()
    program.reset()
    if program.trace.may_write_in_branches:
        model.has_new_values()  # what runs next reads the checkpoint again
    seen = 0
    for count, batch in program.batches(iterator, one_pass.session):
        if model.is_stale(path) and not program.trace.may_write_in_branches:
            raise RuntimeError("the model was trained or restored while predict was under way: call predict again.")
        seen += count
        one_pass.after_batches(seen)
        yield batch
    one_pass.end()
