"""Exponential moving averages of the trainable weights, under the names of tf.train.ExponentialMovingAverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from runner.operations import operations
from runner.traces import Replica

SUFFIX = "/ExponentialMovingAverage"


def average_name(name: str) -> str:
    """Name of the average of the variable `name`."""
    return name + SUFFIX


def update(replica: Replica, decay: float | None) -> Sequence[tf.Operation]:
    """Moves the average of each trainable variable towards what the update has made of it.

    The averages start from the initial values, as those of tf.train.ExponentialMovingAverage do.

    Args:
      decay: None: there are none.

    Returns: the operations, for those who have to fetch them.
    """
    if decay is None:
        return []
    trainable = {
        name: variable for name, (variable, _) in replica.served.trainable.items() if variable.dtype.is_floating
    }
    if not trainable:
        return []
    kept = [
        tf.Variable(
            lambda name=name: replica.initial_value(name),
            name=average_name(name),
            trainable=False,
            dtype=variable.dtype,
            shape=variable.shape,
        )
        for name, variable in trainable.items()
    ]
    pairs = list(zip(kept, trainable.values(), strict=True))

    def move(average: Any, variable: Any) -> Any:
        return average.assign_sub((average - variable) * tf.constant(1 - decay, average.dtype), read_value=False)

    def move_all(strategy: tf.distribute.Strategy) -> list[Any]:
        # Each device moves its own copy by its own copy: nothing is sent.
        moved = [strategy.extended.update(one, move, args=(variable,), group=False) for one, variable in pairs]
        return [result for each in moved for result in strategy.experimental_local_results(each)]

    return operations(tf.distribute.get_replica_context().merge_call(move_all))
