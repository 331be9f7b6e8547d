"""The parameter_server strategy: who serves variables, who trains, and how large variables are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

MIN_PART_BYTES = 256 << 10
"""strategy.partitioner=min_size: a part of a variable has at least so many bytes."""


def build_parameter_server(
    tasks: Mapping[str, Sequence[str]], partitioner: str | None = None
) -> tf.distribute.experimental.ParameterServerStrategy:
    """The strategy for the coordinator of `tasks`; returns when it has found all workers and servers.

    Args:
      tasks: chief (this process), worker and ps -> addresses.
      partitioner: of variables: min_size (parts of 256 KiB or more, at most one a server), fixed_shards (a part on each
        server); None: each is whole.

    Raises:
      ValueError: there is no worker or no server.
    """
    for kind in ("worker", "ps"):
        if not tasks.get(kind):
            raise ValueError(
                f"strategy=parameter_server needs a {kind} at least; the cluster has: {', '.join(tasks) or 'nothing'}."
            )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({kind: list(tasks[kind]) for kind in ("chief", "worker", "ps") if kind in tasks}),
        task_type="chief",
        task_id=0,
        rpc_layer="grpc",
    )
    return tf.distribute.experimental.ParameterServerStrategy(resolver, _partitioner(partitioner, len(tasks["ps"])))


def _partitioner(name: str | None, num_servers: int) -> Any:
    partitioners = tf.distribute.experimental.partitioners
    if name == "min_size":
        return partitioners.MinSizePartitioner(MIN_PART_BYTES, max_shards=num_servers)
    if name == "fixed_shards":
        return partitioners.FixedShardsPartitioner(num_servers)
    return None


def is_parameter_server(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether variables are served, and workers are asked to train with them."""
    return isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
