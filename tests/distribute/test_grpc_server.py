"""Servers of a cluster on one host cannot be reached from another."""

from __future__ import annotations

import socket
import threading
from typing import Any

import psutil
import pytest

from runner.distribute import grpc_server
from runner.distribute.cluster import Cluster
from runner.distribute.grpc_server import kept_local, serve_the_coordinator
from tests.support.messages import Messages


@pytest.fixture
def addresses_of_this_host() -> list[str]:
    """Those that other hosts reach it by; none on a host without a network."""
    found = [address.address for each in psutil.net_if_addrs().values() for address in each if address.family == 2]
    return [address for address in found if not address.startswith("127.")]


def listening() -> socket.socket:
    """Listens on all addresses, as TensorFlow does."""
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("::", 0))
    server.listen()
    return server


def device_of(server: socket.socket) -> bytes:
    return server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


def test_a_server_of_a_local_cluster_answers_this_host_alone(addresses_of_this_host: list[str]) -> None:
    with listening() as before:
        with kept_local(Cluster("chief", 0, {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]})):
            server = listening()
        with server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            assert device_of(server) == b"lo"
            assert device_of(before) == b""  # somebody else's
            for address in addresses_of_this_host:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address, port), timeout=5)


@pytest.mark.parametrize("tasks", [{}, {"chief": ["127.0.0.1:1"], "worker": ["node7:2"]}])
def test_a_server_that_others_are_to_reach_is_left_alone(tasks: dict[str, list[str]]) -> None:
    with kept_local(Cluster("chief", 0, tasks)):
        server = listening()
    with server:
        assert device_of(server) == b""


def of_coordinator(port: int) -> Cluster:
    return Cluster("ps", 0, {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]})


def test_a_server_of_a_script_ends_with_its_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "GONE_SECS", 0.2)
    monkeypatch.setattr(grpc_server, "LOOK_SECS", 0.05)
    coordinator, server = listening(), threading.Event()
    port = coordinator.getsockname()[1]
    serving: Any = threading.Thread(target=serve_the_coordinator, args=(server, of_coordinator(port), 60, lambda: True))
    with coordinator:
        serving.start()
        serving.join(0.5)
        assert serving.is_alive(), "what an earlier run left does not count while the coordinator answers"
    serving.join(20)
    assert not serving.is_alive()


def test_a_server_of_a_script_does_not_wait_for_a_coordinator_for_ever(
    monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setattr(grpc_server, "LOOK_SECS", 0.05)
    with listening() as server:
        port = server.getsockname()[1]
    nobody: Any = object()
    with messages.raised(TimeoutError, hide=rf"(?<=127\.0\.0\.1:){port}"):
        serve_the_coordinator(nobody, of_coordinator(port), 0.1, lambda: False)
    serve_the_coordinator(nobody, of_coordinator(port), 60, lambda: True)  # it failed before it connected
