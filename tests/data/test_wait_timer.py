"""How much of a step waits for its input: samples that change nothing of what is trained."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.data import wait_timer
from runner.tf_private import datasets
from tests.integration.test_exactness import LossRecorder
from tests.support import jobs
from tests.support.line import mirrored
from tests.support.tiers import slow_but

v1 = tf.compat.v1


@pytest.fixture
def sampled_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Samples of ten steps, the first of them as soon as a loop has been taken."""
    monkeypatch.setattr(wait_timer, "FIRST_SECS", 1e-9)
    monkeypatch.setattr(wait_timer, "EVERY_SECS", 0.05)
    monkeypatch.setattr(wait_timer, "SAMPLE_STEPS", 10)
    yield


def model(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """params: `products`, of 300 x 300 matrices in each step (0)."""
    weight = v1.get_variable("weight", [300, 300], initializer=v1.constant_initializer(1e-3))
    product = weight
    for _ in range(params.get("products", 0)):
        product = tf.matmul(product, weight)
    loss = tf.reduce_mean(tf.square(features - weight[0, 0])) + 1e-9 * tf.reduce_sum(product)
    train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, weight, loss, train_op)


def examples(secs: float = 0.0, count: int = 10_000, is_known: bool = True) -> tf.data.Dataset:
    dataset = tf.data.Dataset.range(count)
    if secs:

        def late(number: tf.Tensor) -> tf.Tensor:
            time.sleep(secs)
            return number

        dataset = dataset.map(lambda number: tf.ensure_shape(tf.py_function(late, [number], tf.int64), []))
    dataset = dataset if is_known else dataset.filter(lambda number: number >= 0)
    return dataset.map(lambda number: tf.cast(number, tf.float32) / 1000).batch(2).prefetch(2)


def train(model_dir: Path, steps: int | None, params: Any = None, **settings: Any) -> tuple[list[float], Any]:
    """Return the losses and the run."""
    source = Input(functools.partial(examples, **settings.pop("data", {})), params={}, batch_size=2)
    config = RunConfig(tf_random_seed=7, tensorboard=False, **settings)
    estimator = Estimator(model, model_dir, config, params or {})
    run = estimator.train_run(source, hooks=[recorder := LossRecorder()], steps=steps)
    return np.concatenate(recorder.losses).tolist(), run


@pytest.mark.slow
@pytest.mark.usefixtures("sampled_at_once")
def test_a_slow_input_is_what_training_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_timer, "SAMPLE_STEPS", 30)  # two are waiting in the buffer when it begins
    _, run = train(tmp_path, 80, data={"secs": 0.01})  # two examples a batch: 20 ms
    assert run.input_bound > 0.5  # 0.97 on a quiet machine


@pytest.mark.usefixtures("sampled_at_once")
def test_a_heavy_step_waits_for_no_input(tmp_path: Path) -> None:
    _, run = train(tmp_path, 30, {"products": 40})
    assert run.input_bound < 0.5  # 0.00 on a quiet machine


@pytest.mark.parametrize("strategy", [None, mirrored], ids=["default", "mirrored"])
@pytest.mark.parametrize("is_known", slow_but([True, False], False))
def test_samples_change_no_number_and_no_place_in_the_input(
    is_known: bool, strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train_distribute": strategy() if strategy else None, "data": {"count": 91, "is_known": is_known}}
    monkeypatch.setattr(wait_timer, "FIRST_SECS", math.inf)
    undisturbed, run = train(tmp_path / "a", None, **settings)
    assert run.input_bound is None
    monkeypatch.setattr(wait_timer, "FIRST_SECS", 1e-9)
    monkeypatch.setattr(wait_timer, "EVERY_SECS", 0.0)
    monkeypatch.setattr(wait_timer, "SAMPLE_STEPS", 7)
    made: list[tf.data.Dataset] = []

    def timed(*args: Any) -> tf.data.Dataset:
        made.append(datasets.timed(*args))
        return made[-1]

    monkeypatch.setattr(wait_timer, "timed", timed)
    found, run = train(tmp_path / "b", 20, **settings)
    assert run.input_bound is not None and len(made) == 1
    rest, run = train(tmp_path / "b", None, **settings)
    assert found + rest == undisturbed and run.input_bound is not None


@pytest.mark.usefixtures("sampled_at_once")
def test_no_program_is_traced_for_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    while_loop = tf.while_loop

    def noting(*args: Any, **others: Any) -> Any:
        traced.append(args)
        return while_loop(*args, **others)

    monkeypatch.setattr(tf, "while_loop", noting)
    _, run = train(tmp_path, 2000)
    assert run.input_bound is not None
    assert len(traced) == 1


def test_elements_of_every_kind_pass_and_end() -> None:
    given = tf.data.Dataset.from_tensors(
        {
            "ragged": tf.ragged.constant([[1], [2, 3]]),
            "sparse": tf.sparse.from_dense([[1, 0]]),
            "text": tf.constant("é"),
        }
    ).repeat(3)
    secs = tf.Variable(0.0, dtype=tf.float64)
    iterator: Any = iter(given)
    found = list(datasets.timed(iterator, secs))
    assert len(found) == 3 and not iterator.get_next_as_optional().has_value()
    assert found[0]["ragged"].to_list() == [[1], [2, 3]] and found[2]["text"].numpy().decode() == "é"
    assert isinstance(found[1]["sparse"], tf.SparseTensor) and float(secs.numpy()) > 0


@pytest.mark.usefixtures("sampled_at_once")
def test_a_run_tells_what_was_found(tmp_path: Path) -> None:
    assert jobs.run(tmp_path, "train.max_steps=2000", "train.log_steps=1000", "input.eval=null") == 0
    (result,) = jobs.results(tmp_path)
    points = [event for event in jobs.noted(tmp_path) if "train/input_bound" in json.dumps(event)]
    assert 0 <= result["input_bound"] <= 1 and points
