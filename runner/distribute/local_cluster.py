"""The cluster that a run starts on its own host."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence

from runner.config.schema import ClusterConfig, Config
from runner.distribute.cluster import Cluster

HOST = "127.0.0.1"


def local_places(config: Config, ports: Callable[[int], Sequence[int]] | None = None) -> list[Cluster]:
    """Return the places of the tasks of `config`, the chief first.

    Args:
      config: the config.
      ports: returns a number of free ports; None: ask the operating system.
    """
    settings = config.cluster
    tasks: dict[str, list[str]] = {}
    if config.is_cluster:
        counts = task_counts(settings, str(config.strategy.name))
        find_ports = ports or free_ports
        found_ports = iter(find_ports(sum(counts.values())))
        for name, count in counts.items():
            tasks[name] = [f"{HOST}:{next(found_ports)}" for _ in range(count)]
    places: list[Cluster] = []
    for name, addresses in tasks.items():
        places += [Cluster(name, index, tasks) for index in range(len(addresses))]
    if not places:
        places.append(Cluster())
    if settings.evaluator and config.command == "train_and_evaluate":
        places.append(Cluster("evaluator", 0, tasks))
    return places


def task_counts(settings: ClusterConfig, strategy: str) -> dict[str, int]:
    """Return task type -> number of processes that the config asks for, without the evaluator."""
    counts = {"chief": 1}
    if strategy == "multi_worker":
        counts["worker"] = settings.num_workers - 1
    if strategy == "parameter_server":
        counts |= {"worker": settings.num_workers, "ps": settings.num_ps}
    return {name: count for name, count in counts.items() if count}


def free_ports(count: int) -> list[int]:
    """Return ports for servers that start within a minute (macOS: 30 s); until then nobody else is given them."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        for server in servers:
            # Who closes a connection first leaves its port in TIME_WAIT: the system then gives it to no other
            # connection and no bind to port 0, and a server with SO_REUSEADDR, as TensorFlow's has, can bind it.
            with socket.create_connection((HOST, server.getsockname()[1])):
                accepted, _ = server.accept()
                accepted.close()
        return [int(server.getsockname()[1]) for server in servers]
