"""`input.train.service`: a dispatcher and workers of tf.data on loopback compute the training input."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.checkpoint.reader import Reader
from runner.data import service
from runner.data.service import DataService
from tests.integration.test_exactness import LossRecorder
from tests.support.messages import Messages

v1 = tf.compat.v1
NUM_EXAMPLES = 12


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[int, str]]:
    """Number of workers -> the address of the dispatcher of a service that has so many."""
    make = tf.data.experimental.service
    found, servers = {}, []
    for number in (1, 2):
        dispatcher = make.DispatchServer(make.DispatcherConfig(port=0))
        address = dispatcher.target.partition("://")[2]
        settings = make.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=100)
        servers += [dispatcher, *(make.WorkerServer(settings) for _ in range(number))]
        found[number] = dispatcher.target
    yield found
    for server in reversed(servers):
        server._stop()


def number_model(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Learns nothing; the loss of a step is the mean of its examples."""
    weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean(tf.cast(features, tf.float32)) + 0.0 * weight
    train_op = v1.train.GradientDescentOptimizer(0.0).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, weight, loss, train_op)


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(NUM_EXAMPLES).shuffle(NUM_EXAMPLES, seed=3).batch(1)


def train(model_dir: Path, address: str, *, job: str | None = None, **limits: Any) -> list[int]:
    """Train, and return the examples in the order of their steps."""
    config = RunConfig(tf_random_seed=7, save_checkpoints_steps=5, tensorboard=False)
    source = Input(numbers, batch_size=1, service=DataService(address, job_name=job))
    Estimator(number_model, model_dir, config).train_run(
        source, hooks=[recorder := LossRecorder()], once=True, **limits
    )
    return np.concatenate([*recorder.losses, []]).round().astype(int).tolist()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_example_is_trained_on_once_a_pass(num_workers: int, addresses: dict[int, str], tmp_path: Path) -> None:
    found = train(tmp_path, addresses[num_workers], max_epochs=2)
    assert Counter(found) == dict.fromkeys(range(NUM_EXAMPLES), 2)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_resumed_run_goes_on_after_as_many_batches_as_were_read(
    num_workers: int,
    addresses: dict[int, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    messages: Messages,
) -> None:
    with caplog.at_level(logging.INFO, "runner"):
        first = train(tmp_path, addresses[num_workers], max_steps=5, max_epochs=1)
        messages.logged(caplog, addresses[num_workers], hide=r"(?<=localhost:)\d+")
        assert not Reader(tmp_path / "model.ckpt-5").has_iterator(0)
        rest = train(tmp_path, addresses[num_workers], max_epochs=1)
    assert len(first) == 5 and len(rest) == NUM_EXAMPLES - 5
    (again,) = (text for text in caplog.messages if text.startswith("Reading"))
    messages.same("INFO", again)
    if num_workers == 1:  # whose order is in fact the same one each time
        assert sorted(first + rest) == list(range(NUM_EXAMPLES))
    assert len(set(rest)) == len(rest)
    assert train(tmp_path, addresses[num_workers], max_epochs=1) == [], "the pass is over"


def test_runs_that_name_the_same_job_share_its_elements(addresses: dict[int, str], tmp_path: Path) -> None:
    first = train(tmp_path / "a", addresses[1], job="shared", max_steps=4)
    second = train(tmp_path / "b", addresses[1], job="shared", max_steps=3)
    assert len(first) == 4 and not set(first) & set(second)


def test_a_dispatcher_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setattr(service, "ANSWER_SECS", 0.1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"grpc://localhost:{free.getsockname()[1]}"
        with messages.raised(ValueError, hide=r"(?<=localhost:)\d+|\[Errno.*?(?=\))") as error:
            train(tmp_path, address, max_steps=1)
        assert address in str(error.value)
