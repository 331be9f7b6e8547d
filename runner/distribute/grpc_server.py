"""TensorFlow's gRPC server of a parameter_server run, and who may reach the servers that a run starts."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import tensorflow as tf

from runner.distribute.cluster import Cluster
from runner.distribute.devices import session_config


def start_server(cluster: Cluster) -> tf.distribute.Server:
    """The server of this process, at its address in `cluster`. It asks nobody who calls it, and listens on all
    interfaces of the host, whatever the address says; see `runner.distribute.grpc_server`.
    """
    spec = tf.train.ClusterSpec({kind: list(addresses) for kind, addresses in cluster.tasks.items()})
    return tf.distribute.Server(
        spec, job_name=cluster.task_type, task_index=cluster.task_index, protocol="grpc", config=session_config()
    )


def serve(server: tf.distribute.Server) -> None:
    """Does not return: a signal ends this process, or whoever started it. TensorFlow's own `join` heeds no signal."""
    assert server is not None  # it lives as long as somebody holds it
    while True:
        time.sleep(3600)


def serve_the_coordinator(
    server: tf.distribute.Server, cluster: Cluster, timeout_secs: float, is_over: Callable[[], bool]
) -> None:
    """Returns when the process of the chief of `cluster`, which coordinates, has ended. Without a supervisor nobody
    else tells: its address, at which TensorFlow serves as long as it lives, no longer answers.

    Args:
      is_over: whether it has ended, where it has not answered yet.

    Raises:
      TimeoutError: it has not come within `timeout_secs`.
    """
    assert server is not None  # it lives as long as somebody holds it
    (address,) = cluster.tasks["chief"]
    started, answered = time.monotonic(), None
    while answered is None or time.monotonic() - answered < GONE_SECS:
        if _answers(address):
            answered = time.monotonic()
        elif answered is None and is_over():
            return
        elif answered is None and time.monotonic() - started > timeout_secs:
            raise TimeoutError(
                f"The coordinator of the parameter servers, {address}, has not come within {timeout_secs:.0f} s."
            )
        time.sleep(LOOK_SECS)


GONE_SECS = 5.0
"""A coordinator that has not answered for so long has ended."""

LOOK_SECS = 0.5


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=GONE_SECS).close()
    except OSError:
        return False
    return True


_log = logging.getLogger(__name__)

PERIOD_SECS = 0.02


@contextlib.contextmanager
def kept_local(cluster: Cluster) -> Iterator[None]:
    """Closes to other hosts what begins to listen while it is entered, where `cluster` lives on this host alone."""
    addresses = [address for addresses in cluster.tasks.values() for address in addresses]
    if not addresses or not all(address.startswith("127.0.0.1:") for address in addresses):
        yield
        return
    ended, before = threading.Event(), set(_listening())
    thread = threading.Thread(target=_watch, args=(ended, before), daemon=True, name="loopback")
    thread.start()  # a server listens for seconds before its strategy is there: it waits for the others
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _close_to_others(before)


def _watch(ended: threading.Event, known: set[int]) -> None:
    while not ended.wait(PERIOD_SECS):
        _close_to_others(known)


def _close_to_others(known: set[int]) -> None:
    """Binds to the loopback device what listens and is not among `known`, to which it is added."""
    for descriptor in set(_listening()) - known:
        known.add(descriptor)
        try:
            with socket.socket(fileno=os.dup(descriptor)) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except OSError as error:
            _log.warning("The server of this task listens to other hosts, too: it cannot be bound to lo (%s).", error)


def _listening() -> list[int]:
    """The file descriptors of this process that listen for TCP connections."""
    connections = psutil.Process().net_connections("tcp")
    return [connection.fd for connection in connections if connection.status == psutil.CONN_LISTEN]
