"""Threads and memory of devices, set before TensorFlow uses one. What only a GPU shows is in test_gpu.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner import Hook, Params
from runner.config.schema import ConfigError, RunSettings, StrategyConfig
from runner.distribute.cluster import Cluster
from runner.distribute.devices import configure_devices, describe_devices, peak_memory, session_config
from runner.distribute.grpc_server import start_server
from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL
from tests.support.messages import Messages

GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]


class NoteThreads(Hook):
    """Write how many threads TensorFlow has; what `train.hooks` names."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def begin(self, run: Any) -> None:
        threading = tf.config.threading
        found = [threading.get_inter_op_parallelism_threads(), threading.get_intra_op_parallelism_threads()]
        self._path.write_text(json.dumps(found))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Have TensorFlow see two GPUs. Return name -> whether its memory grows, as it was set."""
    grows: dict[str, bool] = {}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: GPUS if kind == "GPU" else [])
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: grows.update({gpu.name: on}))
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: grows.get(gpu.name))
    return grows


@pytest.mark.slow
@pytest.mark.processes
def test_a_task_that_is_forked_has_the_threads_of_the_config_and_tells_its_devices(
    tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    hook = f"train.hooks=[{{fn: tests.distribute.test_devices.NoteThreads, params: {{path: {tmp_path}/threads}}}}]"
    threads = ["run.inter_op_threads=3", "run.intra_op_threads=2", "run.memory_growth=true"]
    result = command_line(*SMALL, *threads, hook, "model_dir=run", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "threads").read_text()) == [3, 2]
    (warning,) = (line for line in result.stderr.splitlines() if "memory_growth" in line)
    messages.same("line", warning)
    cores = len(os.sched_getaffinity(0))
    on = f"CPU, {cores} core{'s' * (cores > 1)}"
    assert f" on {on}; strategy default, 1 replica" in result.stderr
    assert f"\ndevices: {on}\n" in result.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["devices"] == on


def test_the_memory_of_each_gpu_grows_where_the_config_says_so(gpus: dict[str, bool]) -> None:
    configure_devices(RunSettings())
    assert gpus == {}, "what a script has set stays"
    configure_devices(RunSettings(memory_growth=True))
    assert gpus == {gpu.name: True for gpu in GPUS}


def test_a_server_of_tensorflow_gets_the_same(gpus: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    given = Params()
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 3)
    monkeypatch.setattr(tf.distribute, "Server", lambda spec, **arguments: given.update(arguments))
    configure_devices(RunSettings(memory_growth=True))
    start_server(Cluster("ps", 0, {"chief": ("localhost:1",), "ps": ("localhost:2",)}))
    assert given["config"] == session_config()
    assert (given["config"].inter_op_parallelism_threads, given["config"].intra_op_parallelism_threads) == (4, 0)
    assert given["config"].gpu_options.allow_growth is True
    gpus.clear()
    assert session_config().gpu_options.allow_growth is False


@pytest.mark.parametrize(("given", "cores", "threads"), [(0, 1, 2), (0, 8, 9), (1, 8, 2)])
def test_a_server_has_a_thread_beside_those_that_compute(
    given: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: given)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert session_config().inter_op_parallelism_threads == threads


@pytest.mark.parametrize(
    "settings", [RunSettings(inter_op_threads=7), RunSettings(intra_op_threads=7)], ids=["inter_op", "intra_op"]
)
def test_threads_that_come_too_late_are_refused(settings: RunSettings, messages: Messages) -> None:
    tf.constant(1)
    with messages.raised(ConfigError):
        configure_devices(settings)


def test_devices_are_named_as_a_person_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_devices(StrategyConfig(), 1).startswith("CPU, ")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: GPUS if kind == "GPU" else [])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: GPUS)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"device_name": "NVIDIA H200"})
    assert describe_devices(StrategyConfig("mirrored"), 2) == "2 x NVIDIA H200"
    assert describe_devices(StrategyConfig("mirrored", virtual_devices=2), 2).startswith("CPU, ")


def test_the_peak_of_each_gpu_is_told_where_tensorflow_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("/device:GPU:0", "/job:worker/replica:0/task:0/device:GPU:1", "/device:GPU:2")
    devices = [tf.config.LogicalDevice(name, "GPU") for name in names]

    def memory_of(name: str) -> dict[str, int]:
        if name == "GPU:2":
            raise ValueError("its allocator does not count")
        return {"current": 1, "peak": 1000 + int(name[-1])}

    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", memory_of)
    peaks = peak_memory()
    assert peaks.pop("process") > 1e8
    assert peaks == {"GPU:0": 1000, "GPU:1": 1001}
