"""Servers of a cluster on one host, closed to all others.

TensorFlow 2.21 listens on all addresses, whatever address it is given (`[::]:port`; grpc_server_lib.cc builds it from
the port alone), and its servers run any graph that they are sent. So each socket that listens is bound to the loopback
device: Linux lets anybody do so since 5.7, also after `listen`. Connections that come from elsewhere are refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator

import psutil

from runner.cluster import Cluster

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
