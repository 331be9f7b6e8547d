"""The step that was traced for one process runs on a cluster: two processes, collectives inside tf.while."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runner import Estimator, RunConfig
from tests.models import STYLES, train_input

pytestmark = pytest.mark.multi_process
ROOT = Path(__file__).parent.parent


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.parametrize("style", ["native", "classic"])
def test_two_workers_take_the_steps_of_one_process(style: str, tmp_path: Path) -> None:
    """A native step (`optimizer=`) and a pruned classic one (`train_op=`), raw iterators, an uneven last batch."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        command = [sys.executable, "-m", "tests.multi_worker_steps", style, str(tmp_path / f"{index}.npz")]
        environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    results = [np.load(tmp_path / f"{index}.npz") for index in range(2)]

    alone = Estimator(STYLES[style], tmp_path / "alone", RunConfig()).train(train_input(8, dtype="float64"), steps=20)
    for name in alone.get_variable_names():
        expected = alone.get_variable_value(name)
        for result in results:
            np.testing.assert_allclose(result[name], expected, rtol=1e-10, atol=1e-10, err_msg=name)
    # 50 examples in batches of 8, the last of 2: in 20 steps two epochs and six full batches more.
    assert [int(result["examples"]) for result in results] == [148, 148]
