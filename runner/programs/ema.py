"""Exponential moving averages of the trainable weights, under the names of tf.train.ExponentialMovingAverage."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from runner.checkpoint.reader import Reader
from runner.tracing.graph_operations import operations
from runner.tracing.trace_step import Replica


def average_name(name: str) -> str:
    """Return the name of the average of the variable `name`."""
    return f"{name}/ExponentialMovingAverage"


def averages_in(reader: Reader, names: Iterable[str], decay: float | None, purpose: str) -> dict[str, str]:
    """Return name of weight -> name of its average, for those of `names` whose average is in a checkpoint.

    Args:
      reader: the checkpoint.
      names: names of the weights.
      decay: train.ema_decay, for the message.
      purpose: what the averages are for: a verb such as "evaluate", for the message.

    Raises:
      ValueError: the checkpoint has no averages.
    """
    found = {name: average_name(name) for name in names if reader.has(average_name(name))}
    if not found:
        raise ValueError(
            f"train.ema_decay={decay}: {reader.path} has no moving averages of the weights to {purpose}, because it "
            "was trained without train.ema_decay. Set train.ema_decay=null."
        )
    return found


def update(replica: Replica, decay: float | None) -> Sequence[tf.Operation]:
    """Move the average of each trainable variable towards its new value.

    The averages start from the initial values, as in tf.train.ExponentialMovingAverage.

    Args:
      replica: the replica.
      decay: the decay; None: there are no averages.

    Returns:
      The operations, for callers that must fetch them.
    """
    if decay is None:
        return []
    pairs = []
    for name, (variable, _) in replica.requested.trainable.items():
        if not variable.dtype.is_floating:
            continue
        initial = functools.partial(replica.store.initial_value, name)
        kept = tf.Variable(
            initial, trainable=False, name=average_name(name), dtype=variable.dtype, shape=variable.shape
        )
        pairs.append((kept, variable))

    def move(average: Any, variable: Any) -> Any:
        return average.assign_sub((average - variable) * tf.constant(1 - decay, average.dtype), read_value=False)

    def move_all(strategy: tf.distribute.Strategy) -> list[Any]:
        # Each device updates its own copy from its own copies: nothing is sent.
        moved = [strategy.extended.update(one, move, args=(variable,), group=False) for one, variable in pairs]
        return [result for each in moved for result in strategy.experimental_local_results(each)]

    return operations(tf.distribute.get_replica_context().merge_call(move_all))
