"""Inputs whose position no iterator can save: what was read is read again, and a warning says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, Input, RunConfig
from runner.inputs import build_feed
from runner.position import continued, source_of
from tests.line import line
from tests.test_exactness import LossRecorder

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


@pytest.mark.parametrize("source", SOURCES)
def test_what_was_read_is_read_again_and_one_warning_names_the_cost(source: str, tmp_path: Path, caplog: Any) -> None:
    undisturbed = losses(source, tmp_path / "a", 30)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "runner"):
        first = losses(source, tmp_path / "b", 14)  # past the end of an epoch of twelve
        said = [record.message for record in caplog.records if record.name.startswith("runner")]
        assert len(said) == 1 and "cannot be saved" in said[0]
        assert "has to read and drop every batch up to its step before it trains on" in said[0]
        assert first + losses(source, tmp_path / "b", 16) == undisturbed
        again = [record.message for record in caplog.records if record.name.startswith("runner")][1:]
    assert again[0].startswith("Reading 14 batches again, to continue where ")
    assert len(again) == 2 and "cannot be saved" in again[1]


def test_of_several_workers_the_chief_says_that_batches_are_read_again(tmp_path: Path, caplog: Any) -> None:
    trainer = Estimator(line, tmp_path, RunConfig())
    trainer.train(SOURCES["generator"], steps=3)
    settings: dict[str, Any] = {"mode": "train", "params": {}, "config": None, "num_replicas": 1, "num_workers": 2}
    source = Input(SOURCES["generator"], shard="examples")
    for worker, said in ((0, ["warning"]), (1, [])):
        caplog.clear()
        feed = build_feed(source, **settings, worker_index=worker)
        continued(feed, source_of(SOURCES["generator"], feed), trainer.latest_checkpoint())
        assert [one.levelname.lower() for one in caplog.records if "batches again" in one.message] == said
