"""The error for a lost peer, which tells it from a task's own errors."""

from __future__ import annotations

from runner.distribute.cluster import Cluster

OF_A_LOST_PEER = ("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError")
"""Names of the errors that TensorFlow raises when a peer is lost."""


class PeerLost(RuntimeError):
    """A peer, or the connection to it, was lost; the cause is not in this task."""


def tells_of_a_lost_peer(error: BaseException, cluster: Cluster) -> bool:
    """Report whether a task stopped because of another task of the cluster."""
    if isinstance(error, PeerLost):
        return True
    kind = type(error)
    is_of_tensorflow = kind.__module__.startswith("tensorflow.")
    return cluster.num_workers > 1 and is_of_tensorflow and kind.__name__ in OF_A_LOST_PEER
