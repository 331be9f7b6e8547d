"""What an error says with which a step of training ran out of memory: with smaller micro-batches it needs less."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from runner.config.strategy_validation import next_accumulation
from runner.data.inputs import comes_from_input
from runner.data.replica_batches import num_rows
from runner.estimator.train_setup import TrainSetup
from runner.system.exit_codes import CAN_SPLIT


@contextlib.contextmanager
def explained(setup: TrainSetup, examples_before: float) -> Iterator[None]:
    """Add to the error of a step that runs out of memory inside this context what may help, and mark it with CAN_SPLIT.

    Args:
      setup: the training setup.
      examples_before: mean number of examples of a replica in earlier steps; 0: there were none.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if not comes_from_input(error):  # an input reads whole batches however they are split
            _explain(error, setup, examples_before)
        raise


def _explain(error: Any, setup: TrainSetup, examples_before: float) -> None:
    config = setup.config
    number = config.gradient_accumulation
    size = setup.input.pipeline.global_batch_size
    larger = next_accumulation(number, size, config.num_replicas_in_sync)
    if size is None:
        examples = _examples_of_next(setup.input.iterator) or examples_before
        larger = larger if number < examples else None
    refused = ""
    if setup.program.spec.optimizer is None:
        refused = "with train_op=. Return EstimatorSpec(optimizer=...)"
    elif config.eager:
        refused = "in eager steps. Set run.eager=false"
    error.is_clear = True  # where in a step the memory ran out says nothing
    setattr(error, CAN_SPLIT, larger is not None and not refused)
    said = "A step of training ran out of memory."
    if larger is None:
        error.add_note(
            f"{said} With train.gradient_accumulation={number}, a micro-batch has one example: with more, it would be "
            "empty."
        )
        return
    written = f"train.gradient_accumulation={larger}, in a script RunConfig(gradient_accumulation={larger}),"
    if refused:
        error.add_note(f"{said} {written} would need less, but does not work {refused}.")
    else:
        error.add_note(
            f"{said} {written} makes the same update, with the memory of a part of the batch; "
            "train.gradient_accumulation=auto finds the number."
        )


def _examples_of_next(iterator: Any) -> int | None:
    """Return how many examples the next element of the input has; None: not known. Nobody else reads it any more."""
    if isinstance(iterator, tf.data.Iterator):  # else workers of parameter servers read the data
        with contextlib.suppress(tf.errors.OpError, StopIteration):
            return int(num_rows(next(iterator)))
    return None
