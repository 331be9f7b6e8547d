"""The global step of a trace: where model_fn finds it, and who advances it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from runner.operations import changes_state, needed, operations
from runner.traces import Replica

v1 = tf.compat.v1


def collect(replica: Replica) -> None:
    """Puts the global step where model_fn finds it: the first of its variables, as tf.estimator made it first."""
    for name in (v1.GraphKeys.GLOBAL_STEP, v1.GraphKeys.GLOBAL_VARIABLES):
        v1.add_to_collection(name, replica.global_step)


def advance(replica: Replica, train_op: Any) -> Sequence[tf.Operation]:
    """Advances the global step by one for a train_op that does not count: that of no replica does so itself.

    tf.estimator left the step of `optimizer.minimize(loss)` where it was: one checkpoint was written over another, and
    training had no other end than that of its data.

    Returns: the operations, for those who have to fetch them; none where `train_op` counts.
    """

    def count(strategy: tf.distribute.Strategy, counts: Any) -> list[Any]:
        if any(strategy.experimental_local_results(counts)):
            return []
        added = strategy.extended.update(replica.global_step, _add_one, group=False)
        return list(strategy.experimental_local_results(added))

    context = tf.distribute.get_replica_context()
    return operations(context.merge_call(count, args=(_counts(replica.global_step, train_op),)))


def _add_one(step: tf.Variable) -> Any:
    return step.assign_add(1, read_value=False)


def _counts(global_step: tf.Variable, train_op: Any) -> bool:
    """Whether what `train_op` runs writes to the global step, or may do so in a branch."""
    graph = v1.get_default_graph()
    copies = getattr(global_step, "values", None) or [global_step]
    handles = {id(copy.handle) for copy in copies}
    names = {internal.name for external, internal in graph.captures if id(external) in handles}
    running = needed(graph, operations([train_op]))
    return any(changes_state(one) and any(tensor.name in names for tensor in one.inputs) for one in running)
