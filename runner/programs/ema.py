"""Exponential moving averages of the trainable weights: those of train.ema_decay, under the names of
tf.train.ExponentialMovingAverage, and those that an optimizer of Keras keeps itself (`use_ema=True`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from runner.checkpoint.reader import Reader
from runner.tf_private.optimizers import average_kept_by
from runner.tracing.graph_operations import operations
from runner.tracing.trace_step import Replica

AVERAGES = "averages"
"""Key of the checkpoint's own state: name of a weight -> name of the average that the optimizer keeps of it. Only who
trains has the optimizer, and its variables alone do not say what they are averages of.
"""


def average_name(name: str) -> str:
    """Return the name of the average of the variable `name`."""
    return f"{name}/ExponentialMovingAverage"


def averages_in(reader: Reader, names: Iterable[str], decay: float | None, purpose: str) -> dict[str, str]:
    """Return name of weight -> name of its average, for those of `names` whose average is in a checkpoint.

    Args:
      reader: the checkpoint.
      names: names of the weights.
      decay: train.ema_decay; None: the averages are those of the optimizer, if it kept any.
      purpose: what the averages are for: a verb such as "evaluate", for the message.

    Raises:
      ValueError: train.ema_decay is set, and the checkpoint has no averages.
    """
    if decay is None:
        of_optimizer = reader.extra().get(AVERAGES, {})
        return {name: of_optimizer[name] for name in names if name in of_optimizer}
    found: dict[str, str] = {}
    for name in names:
        average = average_name(name)
        if reader.has(average):
            found[name] = average
    if not found:
        raise ValueError(
            f"train.ema_decay={decay}: {reader.path} has no moving averages of the weights to {purpose}, because it "
            "was trained without train.ema_decay. Set train.ema_decay=null."
        )
    return found


def of_optimizer(optimizer: Any, decay: float | None, replica: Replica) -> dict[str, str]:
    """Return name of weight -> name of its average, of an optimizer that has updated the weights. {}: it keeps none, or
    this is not the first replica, which stands for all.

    Args:
      optimizer: an optimizer of any kind.
      decay: train.ema_decay.
      replica: the replica.

    Raises:
      ValueError: train.ema_decay is set, too.
    """
    if replica.index > 0:  # its variables have the same names as those of the first replica
        return {}
    kept: dict[str, Any] = {}
    for part in getattr(optimizer, "optimizers", [optimizer]):  # it may have one for each part of a model
        for name, (variable, _) in replica.requested.trainable.items():
            average = average_kept_by(part, variable)
            if average is not None:
                kept[name] = average
    if kept and decay is not None:
        raise ValueError(
            f"train.ema_decay={decay}, and the optimizer has use_ema=True: both keep averages of the weights, and an "
            "evaluation can show only one of them. Remove one of the two."
        )
    names: dict[int, str] = {}
    for name, (variable, owner) in replica.requested.requests.items():
        names[id(variable)] = name
        names[id(owner)] = name
    return {name: names[id(average)] for name, average in kept.items()}


def update(replica: Replica, decay: float | None) -> Sequence[tf.Operation]:
    """Move the average of each trainable variable towards its new value. All replicas must call this together.

    This makes the variables of the averages. They start from the initial values, as in
    tf.train.ExponentialMovingAverage.

    Args:
      replica: the replica.
      decay: the decay; None: there are no averages.

    Returns:
      The operations, for callers that must fetch them.
    """
    if decay is None:
        return []
    averaged_pairs = []
    for name, (variable, _) in replica.requested.trainable.items():
        if not variable.dtype.is_floating:
            continue
        initial = functools.partial(replica.store.initial_value, name)
        kept = tf.Variable(
            initial, trainable=False, name=average_name(name), dtype=variable.dtype, shape=variable.shape
        )
        averaged_pairs.append((kept, variable))

    def move(average: Any, variable: Any) -> Any:
        distance = average - variable
        return average.assign_sub(distance * tf.constant(1 - decay, average.dtype), read_value=False)

    def move_all(strategy: tf.distribute.Strategy) -> list[Any]:
        # Each device moves its own copy of an average towards its own copy of the variable, so nothing is sent.
        moved: list[Any] = []
        for average, variable in averaged_pairs:
            of_replicas = strategy.extended.update(average, move, args=(variable,), group=False)
            moved += strategy.experimental_local_results(of_replicas)
        return moved

    return operations(tf.distribute.get_replica_context().merge_call(move_all))
