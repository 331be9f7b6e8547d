"""The cluster that a run starts for itself: who is in it, and how each of its tasks is told."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

from runner.config.schema import ClusterConfig, Config, StrategyConfig
from runner.distribute.cluster import ALONE, Cluster
from runner.distribute.local_cluster import free_ports, local_places
from runner.distribute.tf_config import read_tf_config


def places(strategy: str, command: str = "train_and_evaluate", **settings: Any) -> list[Cluster]:
    config = Config(command, strategy=StrategyConfig(strategy), cluster=ClusterConfig(**settings))
    return local_places(config, ports=lambda count: range(1, count + 1))


def test_one_of_the_workers_of_multi_worker_is_the_chief() -> None:
    tasks = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    assert places("multi_worker", num_workers=3) == [
        Cluster("chief", 0, tasks), Cluster("worker", 0, tasks), Cluster("worker", 1, tasks),
    ]  # fmt: skip
    (alone,) = places("multi_worker", num_workers=1)
    assert (alone.is_chief, alone.num_workers, alone.name) == (True, 1, "chief")


def test_a_coordinator_is_the_chief_of_workers_and_parameter_servers() -> None:
    found = places("parameter_server", num_workers=2, num_ps=2)
    assert [place.name for place in found] == ["chief", "worker:0", "worker:1", "ps:0", "ps:1"]
    assert [place.is_server for place in found] == [False, True, True, True, True]


def test_an_evaluator_stands_beside_any_strategy_while_it_trains() -> None:
    found = places("multi_worker", evaluator=True)
    assert [place.name for place in found] == ["chief", "worker:0", "evaluator"]
    assert found[0].tasks == found[2].tasks and "evaluator" not in found[2].tasks
    assert places("default", evaluator=True) == [ALONE, Cluster("evaluator")]
    assert places("default", "train", evaluator=True) == [ALONE]
    assert [place.name for place in places("multi_worker", "evaluate", evaluator=True)] == ["chief", "worker:0"]


def test_a_task_reads_its_place_from_tf_config() -> None:
    for place in [*places("parameter_server", evaluator=True), Cluster("evaluator")]:
        read = read_tf_config(place.tf_config)
        assert (read.name, read.tf_config) == (place.name, place.tf_config)
    assert ALONE.tf_config == ""
    assert read_tf_config("") == ALONE
    assert dataclasses.replace(ALONE, task_type="evaluator").role == "evaluator"
    assert (ALONE.role, ALONE.name) == ("chief", "chief")


def test_nobody_else_is_given_a_port_before_its_server_starts() -> None:
    """TensorFlow is imported in between, which takes seconds."""
    ports = free_ports(20)
    assert len(set(ports)) == 20
    given = set()
    for _ in range(20_000):  # of the 28,000 that Linux gives
        with socket.socket() as other:
            other.bind(("", 0))
            given.add(other.getsockname()[1])
    assert not given & set(ports)
    for port in ports:
        socket.create_server(("", port)).close()  # with SO_REUSEADDR
