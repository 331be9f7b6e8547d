"""A process that does what the coordinator of a parameter_server run asks it to: a parameter server, or a worker."""

from __future__ import annotations

import time

import tensorflow as tf

from runner.cluster import Cluster


def start_server(cluster: Cluster) -> tf.distribute.Server:
    """The server of this process, at its address in `cluster`. It asks nobody who calls it, and listens on all
    interfaces of the host, whatever the address says; see `runner.loopback`."""
    spec = tf.train.ClusterSpec({kind: list(addresses) for kind, addresses in cluster.tasks.items()})
    return tf.distribute.Server(spec, job_name=cluster.task_type, task_index=cluster.task_index, protocol="grpc")


def serve(server: tf.distribute.Server) -> None:
    """Does not return: a signal ends this process, or whoever started it. TensorFlow's own `join` heeds no signal."""
    assert server is not None  # it lives as long as somebody holds it
    while True:
        time.sleep(3600)
