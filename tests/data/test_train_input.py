"""Inputs whose position no iterator can save: what was read is read again, and a warning says so."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, Input, RunConfig
from runner.checkpoint.reader import Reader
from runner.data.input_identity import _describe, _digest, source_of
from runner.data.inputs import build_input_pipeline
from runner.data.sharding import WorkerPlace
from runner.data.train_input import TrainInput
from tests.integration.test_exactness import LossRecorder
from tests.support.line import line
from tests.support.messages import Messages
from tests.support.tiers import slow_but

NUMBERS = np.random.RandomState(0).rand(60).astype(np.float32)


def batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda x: (x, 2.0 * x)).repeat().batch(5)


def generator() -> tf.data.Dataset:
    spec = tf.TensorSpec([], tf.float32)
    return batches(tf.data.Dataset.from_generator(lambda: iter(NUMBERS), output_signature=spec))


def py_function() -> tf.data.Dataset:
    def scaled(x: tf.Tensor) -> tf.Tensor:
        y = tf.py_function(lambda value: value * 1.5, [x], tf.float32)
        y.set_shape([])
        return y

    return batches(tf.data.Dataset.from_tensor_slices(NUMBERS).shuffle(60, seed=1).map(scaled))


def numpy_function() -> tf.data.Dataset:
    def scaled(x: tf.Tensor) -> tf.Tensor:
        y = tf.numpy_function(lambda value: np.float32(value * 1.5), [x], tf.float32)
        y.set_shape([])
        return y

    return batches(tf.data.Dataset.from_tensor_slices(NUMBERS).map(scaled))


def random_map() -> tf.data.Dataset:
    return batches(tf.data.Dataset.from_tensor_slices(NUMBERS).map(lambda x: x + tf.random.uniform([])))


SOURCES: dict[str, Callable[[], tf.data.Dataset]] = {
    one.__name__: one for one in (generator, py_function, numpy_function, random_map)
}


def losses(source: str, model_dir: Path, steps: int) -> list[float]:
    trainer = Estimator(line, model_dir, RunConfig(save_checkpoints_steps=1))
    trainer.train(SOURCES[source], hooks=[recorder := LossRecorder()], steps=steps)
    return np.concatenate(recorder.losses).tolist()


@pytest.mark.parametrize("source", slow_but(SOURCES, "generator", "random_map"))
def test_what_was_read_is_read_again_and_one_warning_names_the_cost(
    source: str, tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    undisturbed = losses(source, tmp_path / "a", 30)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "runner"):
        first = losses(source, tmp_path / "b", 14)  # past the end of an epoch of twelve
        assert len([record for record in caplog.records if record.name.startswith("runner")]) == 1
        assert first + losses(source, tmp_path / "b", 16) == undisturbed
    for record in caplog.records:
        if record.name.startswith("runner"):
            messages.same(record.levelname, record.message, hide="(?<=cannot be saved: ).*?(?= A resumed)")


def test_of_several_workers_the_chief_says_that_batches_are_read_again(tmp_path: Path, caplog: Any) -> None:
    trainer = Estimator(line, tmp_path, RunConfig())
    trainer.train(SOURCES["generator"], steps=3)
    source = Input(SOURCES["generator"], shard="examples")
    for worker, said in ((0, ["warning"]), (1, [])):
        caplog.clear()
        feed = build_input_pipeline(source, "train", WorkerPlace(1, worker, 2), params={})
        checkpoint = Reader(str(trainer.latest_checkpoint()))
        TrainInput.open(feed, checkpoint, checkpoint.extra()["input"])
        assert [one.levelname.lower() for one in caplog.records if "again" in one.message] == said


# --- the identity of an input ------------------------------------------------------------------------------------


def identity(fn: Any, **settings: Any) -> str:
    return source_of(build_input_pipeline(Input(fn, **settings), "train", WorkerPlace(), params={}))


def numbers(start: float = 0.0) -> tf.data.Dataset:
    return batches(tf.data.Dataset.from_tensor_slices(NUMBERS + np.float32(start)))


USER_MODULE = """
import tensorflow as tf

def input_fn():
    data = tf.data.Dataset.range(60).shuffle(60, seed=3).repeat().batch(5)
    return data.map(lambda x: (tf.cast(x, tf.float32) / 60, tf.cast(x, tf.float32) / 30))
"""


def user_input_fn(lines_above: int) -> Any:
    module: dict[str, Any] = {"__name__": "user_module"}
    exec("\n" * lines_above + USER_MODULE, module)
    return module["input_fn"]


def trained(model_dir: Path, fn: Any, steps: int) -> list[float]:
    Estimator(line, model_dir, RunConfig()).train(fn, hooks=[recorder := LossRecorder()], steps=steps)
    return np.concatenate(recorder.losses).tolist()


def test_a_line_added_above_the_function_leaves_the_position(tmp_path: Path) -> None:
    straight = trained(tmp_path / "a", user_input_fn(0), 10)
    assert trained(tmp_path / "b", user_input_fn(0), 4) + trained(tmp_path / "b", user_input_fn(7), 6) == straight


def test_two_lambdas_of_one_function_are_two_inputs() -> None:
    one, other = identity(lambda: numbers(1.0)), identity(lambda: numbers(2.0))
    assert one != other
    partials = [functools.partial(lambda make: make(), one) for one in (lambda: numbers(1.0), lambda: numbers(2.0))]
    assert len({identity(partial) for partial in partials}) == 2


def test_a_lambda_that_has_moved_is_the_same_input() -> None:
    moved = [identity(eval("\n" * lines + "lambda: numbers(1.0)", globals())) for lines in (0, 5)]
    assert moved[0] == moved[1]


@pytest.mark.slow
@pytest.mark.processes
def test_a_digest_of_code_is_the_same_in_another_process() -> None:
    """Constants hold code objects, which have addresses, and sets, whose order depends on the seed of hashes."""
    text = "lambda x: (x in {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}, lambda: ('e', 1.5))"
    imported = "from runner.data.input_identity import _digest, _describe"
    script = f"{imported}\nprint(_digest(_describe(({text}).__code__)))"
    there = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, check=True
    ).stdout.decode()
    assert there.strip() == _digest(_describe(eval(text).__code__))


def test_settings_and_bound_arguments_tell_inputs_apart() -> None:
    assert identity(numbers) == identity(numbers)
    assert identity(numbers) != identity(numbers, batch_size=5)
    assert identity(functools.partial(numbers, 1.0)) != identity(functools.partial(numbers, 2.0))
    assert identity(functools.partial(numbers, 1.0)) == identity(functools.partial(numbers, 1.0))
