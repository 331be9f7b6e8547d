"""strategy=tpu as far as it can be tried without a TPU: where it is looked for, what is said where there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner.config.schema import ClusterConfig, ConfigError, StrategyConfig
from runner.distribute import tpu
from runner.distribute.cluster_resolver import detect
from runner.distribute.strategy import build_strategy
from tests.support.messages import Messages


@pytest.mark.parametrize(
    ("env", "address", "found"),
    [
        ({"TPU_NAME": "mine"}, "grpc://10.0.0.2:8470", ("grpc://10.0.0.2:8470", "strategy.address")),
        ({"TPU_NAME": "mine"}, None, ("mine", "TPU_NAME")),
        (
            {"TPU_NAME": "mine", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.3:8470"}, None,
            ("grpc://10.0.0.3:8470", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"),
        ),
        ({"TPU_CONFIG": '{"tpu_node_name": "node"}'}, None, ("node", "TPU_CONFIG")),
    ],
    ids=["config", "TPU_NAME", "Kubernetes", "TPU_CONFIG"],
)  # fmt: skip
def test_a_tpu_is_found_where_tensorflow_looks_for_it(
    env: dict[str, str], address: str | None, found: tuple[str, str], messages: Messages
) -> None:
    assert tpu.find_tpu(env, address) == found
    detected = detect(env, ClusterConfig(), StrategyConfig("tpu", address=address))
    assert detected.source == "tpu"
    messages.same("why", detected.why)


@pytest.mark.parametrize(
    "env", [{}, {"TPU_NAME": ""}, {"TPU_CONFIG": "{}"}, {"TPU_CONFIG": "[1"}, {"TPU_CONFIG": "3"}], ids=str
)
def test_without_a_tpu_in_sight_it_is_said_how_to_name_one(env: dict[str, str], messages: Messages) -> None:
    with messages.raised(ConfigError):
        detect(env, ClusterConfig(), StrategyConfig("tpu"))


@pytest.mark.processes
def test_a_run_without_a_tpu_is_refused_before_tensorflow_is_imported(tmp_path: Path, messages: Messages) -> None:
    command = [sys.executable, "-m", "runner", "strategy=tpu"]
    env = {name: value for name, value in os.environ.items() if "TPU" not in name}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert list(tmp_path.glob("outputs/*")) == []


class Recorded:
    """What is asked of TensorFlow, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        resolvers = tf.distribute.cluster_resolver
        monkeypatch.setattr(resolvers, "TPUClusterResolver", lambda *given: self._note("resolver", given))
        monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", lambda at: self._note("connect", at))
        monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda at: self._note("initialize", at))
        monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda at: self._note("strategy", at))

    def _note(self, *call: Any) -> Any:
        self.calls.append(call)
        return call[0]


@pytest.fixture
def listener() -> Iterator[str]:
    """An address where somebody accepts connections."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_the_strategy_is_built_in_the_order_of_tensorflows_guide(
    monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    recorded = Recorded(monkeypatch)
    address = f"grpc://{listener}"
    built: Any = build_strategy("tpu", address=address, zone="z", project="p")
    assert built == "strategy"
    assert recorded.calls == [
        ("resolver", (address, "z", "p")),
        ("connect", "resolver"),
        ("initialize", "resolver"),
        ("strategy", "resolver"),
    ]


def test_an_address_where_nobody_listens_is_refused_at_once(listener: str, messages: Messages) -> None:
    """TensorFlow 2.21 itself was still trying after 100 s."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"grpc://127.0.0.1:{closed.getsockname()[1]}"
    with messages.raised(ConfigError, hide=r"(?<=127\.0\.0\.1:)\d+") as error:
        build_strategy("tpu", address=address)
    assert address[7:] in str(error.value)


def test_a_name_needs_googles_client_and_a_zone(monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    with messages.raised(ConfigError):
        tpu.check_reachable("mine", None, None, {})
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    nobody = {"GCE_METADATA_HOST": "127.0.0.1"}
    with messages.raised(ConfigError):
        tpu.check_reachable("mine", "zone", None, nobody)
    tpu.check_reachable("mine", "zone", "project", nobody)


def test_a_machine_without_a_tpu_says_so(messages: Messages) -> None:
    with messages.raised(ConfigError):
        build_strategy("tpu", address="local")
