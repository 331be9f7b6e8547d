"""Every metric of keras.metrics and of tf.compat.v1.metrics has the same value on every strategy."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.exactness import every_metric
from tests.exactness.product import strategy_of

ROOT = Path(__file__).parents[2]
NAMES = [*(f"keras.{name}" for name in every_metric.KERAS), *(f"v1.{name}" for name in every_metric.V1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("every_metric")
    every_metric.trained(path)
    return path


@pytest.fixture(scope="module")
def of_default(folder: Path) -> dict[str, Any]:
    return every_metric.evaluated(folder, None)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    assert set(found) == set(expected) == {*NAMES, "loss"}
    same = {name: np.allclose(found[name], expected[name], rtol=1e-6, atol=1e-6) for name in expected}
    return {name: (found[name], expected[name]) for name in expected if not same[name]}


def test_no_metric_is_missing() -> None:
    classes = {
        name for name, one in vars(keras.metrics).items()
        if inspect.isclass(one) and issubclass(one, keras.metrics.Metric) and one is not keras.metrics.Metric
    }  # fmt: skip
    # Aliases such as MSE are functions.
    assert classes == set(every_metric.KERAS)
    functions = {name for name, one in vars(tf.compat.v1.metrics).items() if inspect.isfunction(one)}
    assert functions == set(every_metric.V1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_each_metric_is_that_of_one_device(
    strategy: str, folder: Path, of_default: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert differing(every_metric.evaluated(folder, strategy_of(strategy)), of_default) == {}
    assert ("One replica" in caplog.text) == bool(every_metric.ONE_REPLICA)


@pytest.mark.slow
@pytest.mark.processes
def test_each_metric_of_two_workers_is_that_of_one_device(folder: Path, of_default: dict[str, Any]) -> None:
    from runner.distribute.local_cluster import free_ports

    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    processes = []
    for index in range(2):
        place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = os.environ | {"TF_CONFIG": json.dumps(place)}
        command = [sys.executable, "-m", "tests.exactness.every_metric", str(folder)]
        processes.append(subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ))  # fmt: skip
    said = [process.communicate(timeout=250) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said[0][1][-2000:]
    assert differing(json.loads(said[0][0].splitlines()[-1]), of_default) == {}


def test_the_page_has_the_table() -> None:
    """Made by `python -m tests.exactness.every_metric --table`."""
    page = every_metric.PAGE.read_text()
    between = page[page.index(every_metric.FIRST) + len(every_metric.FIRST) : page.index(every_metric.LAST)]
    assert between.strip() == every_metric.table()
