"""TensorFlow's gRPC server in the tasks of a parameter_server run, and its protection from other hosts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import tensorflow as tf

from runner.distribute.cluster import Cluster, answers
from runner.distribute.devices import session_config


def start_server(cluster: Cluster) -> tf.distribute.Server:
    """Start the server of this process, at its address in `cluster`.

    The server does not authenticate callers. It listens on all interfaces of the host, even if the address names one;
    `kept_local` restricts it to this host.
    """
    spec = tf.train.ClusterSpec({kind: list(addresses) for kind, addresses in cluster.tasks.items()})
    return tf.distribute.Server(
        spec, job_name=cluster.task_type, task_index=cluster.task_index, protocol="grpc", config=session_config()
    )


def serve(server: tf.distribute.Server) -> None:
    """Serve until a signal or the supervisor ends this process. Unlike TensorFlow's `join`, this reacts to signals.

    Args:
      server: the server of this process, which ends when nothing refers to it any more.
    """
    while True:
        time.sleep(3600)


def serve_the_coordinator(
    server: tf.distribute.Server, cluster: Cluster, timeout_secs: float, is_over: Callable[[], bool]
) -> None:
    """Return when the coordinator, the chief of `cluster`, has ended.

    Without a supervisor, the only sign is the coordinator's address: it answers as long as the coordinator lives.

    Args:
      server: the server of this process, which ends when nothing refers to it any more.
      cluster: the cluster.
      timeout_secs: how long to wait for the coordinator's first answer.
      is_over: reports whether the run has ended; it is asked as long as the coordinator has not answered.

    Raises:
      TimeoutError: the coordinator has not answered within `timeout_secs`.
    """
    (address,) = cluster.tasks["chief"]
    started = time.monotonic()
    answered: float | None = None  # the time of the last answer
    while answered is None or time.monotonic() - answered < GONE_SECS:
        if answers(address, GONE_SECS):
            answered = time.monotonic()
        elif answered is None:
            if is_over():
                return
            if time.monotonic() - started > timeout_secs:
                raise TimeoutError(
                    f"The coordinator of the parameter servers, {address}, did not join within {timeout_secs:.0f} s."
                )
        time.sleep(LOOK_SECS)


GONE_SECS = 5.0
"""Seconds without an answer after which the coordinator counts as ended."""

LOOK_SECS = 0.5


_log = logging.getLogger(__name__)

PERIOD_SECS = 0.02


@contextlib.contextmanager
def kept_local(cluster: Cluster) -> Iterator[None]:
    """Make every port that is opened inside this context unreachable from other hosts, if `cluster` is on this host."""
    addresses = list(itertools.chain.from_iterable(cluster.tasks.values()))
    is_on_this_host = all(address.startswith("127.0.0.1:") for address in addresses)
    if not addresses or not is_on_this_host:
        yield
        return
    ended = threading.Event()
    known = set(_list_listening())
    thread = threading.Thread(target=_close_new_to_others, args=(ended, known), daemon=True, name="loopback")
    thread.start()  # a thread, because a server listens for seconds while its strategy waits for the other tasks
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _close_to_others(known)


def _close_new_to_others(ended: threading.Event, known: set[int]) -> None:
    while not ended.wait(PERIOD_SECS):
        _close_to_others(known)


def _close_to_others(known: set[int]) -> None:
    """Bind the listening sockets that are not in `known` to the loopback device, and add them to `known`."""
    for descriptor in set(_list_listening()) - known:
        known.add(descriptor)
        try:
            with socket.socket(fileno=os.dup(descriptor)) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except OSError as error:
            _log.warning(
                "The server of this task is reachable from other hosts: its socket cannot be bound to the loopback "
                "device (%s).",
                error,
            )


def _list_listening() -> list[int]:
    """Return the file descriptors of this process that listen for TCP connections."""
    connections = psutil.Process().net_connections("tcp")
    return [connection.fd for connection in connections if connection.status == psutil.CONN_LISTEN]
