"""What workers that divide the examples of one stream compare: which differences are refused, and which are none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner.data.inputs import Input, InputPipeline, build_input_pipeline
from runner.data.sharding import WorkerPlace
from runner.data.shared_stream import _digest
from runner.tracing.same_model import WorkersDifferError
from tests.support.two_workers import Worker, two_workers

ROWS = 8
IMAGES = np.random.default_rng(0).normal(size=[ROWS, 40]).astype(np.float32)
CLASSES = np.arange(ROWS) % 4
NAMES = np.array([f"name {number}" for number in range(ROWS)])
ORDER = np.array([3, 1, 7, 0, 2, 6, 5, 4])
Read = Callable[[int], Any]
"""Returns the arrays, or the dataset of examples, that the worker of that number reads."""


def pipeline_of(read: Read, worker: Worker, mode: str) -> InputPipeline:
    def input_fn() -> tf.data.Dataset:
        given = read(worker.worker_index)
        dataset = given if isinstance(given, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(given)
        return dataset.batch(ROWS)

    place = WorkerPlace(1, worker.worker_index, 2, worker)
    return build_input_pipeline(Input(input_fn, batch_size=ROWS, shard="examples"), mode, place, params={})


def compare(read: Read, mode: str = "train") -> None:
    """Let both workers read the first batch, and compare what they have noted."""
    for worker in two_workers():
        pipeline = pipeline_of(read, worker, mode)
        for element in pipeline.dataset:
            if mode == "train":  # the loop of training does
                pipeline.stream.remember(element, when=tf.constant(True))
        pipeline.stream.check()


def permuted(*arrays: np.ndarray) -> Read:
    def read(worker: int) -> Any:
        own = tuple(one[ORDER] if worker else one for one in arrays)
        return own if len(own) > 1 else own[0]

    return read


def drawn(worker: int) -> np.ndarray:
    return IMAGES + np.random.default_rng(worker).normal(size=IMAGES.shape).astype(np.float32)


def drawn_in_a_map(*others: np.ndarray) -> Read:
    def read(worker: int) -> tf.data.Dataset:
        def augmented(image: tf.Tensor, *others: tf.Tensor) -> Any:
            noise = tf.random.uniform([40], seed=worker)
            return image + noise, *others

        return tf.data.Dataset.from_tensor_slices((IMAGES, *others)).map(augmented)

    return read


REFUSED = {
    "classes": permuted(IMAGES, CLASSES),
    "names": permuted(NAMES),
    "numbers only": permuted(IMAGES, IMAGES[:, 0]),
    "other examples": lambda worker: (IMAGES + worker, CLASSES + worker),
    "classes that are all one": permuted(IMAGES, np.zeros(ROWS, np.int64)),
}
SAME = {
    "one order": lambda worker: (IMAGES, CLASSES),
    "augmented images with classes": lambda worker: (drawn(worker), CLASSES),
    "augmented images with names": lambda worker: ({"image": drawn(worker), "name": NAMES}, IMAGES[:, 0]),
    "augmented in a map": drawn_in_a_map(CLASSES),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("what", REFUSED)
def test_another_order_is_refused(what: str, mode: str) -> None:
    with pytest.raises(WorkersDifferError, match=f"input.{mode}.shard=examples: worker 1 .*features"):
        compare(REFUSED[what], mode)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("what", SAME)
def test_one_order_goes_on_whatever_else_differs(what: str, mode: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        compare(SAME[what], mode)
    assert not caplog.records


def test_what_may_be_augmentation_alone_is_said(caplog: Any) -> None:
    compare(drawn_in_a_map(np.zeros(ROWS, np.int64)))
    (said,) = [record.message for record in caplog.records if record.name.startswith("runner")]
    assert "features" in said and "input.train.shard=examples" in said


def ragged(worker: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[worker]] * ROWS))


def no_rows(worker: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(np.zeros([0, 3], np.float32)).unbatch()


@pytest.mark.parametrize("read", [ragged, no_rows])
def test_what_cannot_be_compared_is_not(read: Read) -> None:
    compare(read)


def test_a_batch_without_rows_has_a_digest() -> None:
    assert _digest(tf.zeros([0, 3])).numpy().tolist() == [0, 0]


def unordered(worker: int) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, CLASSES))
    return dataset.map(lambda image, label: (image, label), num_parallel_calls=2, deterministic=False)


def test_an_order_that_nobody_promises_is_refused_before_anything_is_read() -> None:
    worker, _ = two_workers()
    with pytest.raises(ValueError, match=r"input\.train\.shard=examples: .*deterministic=False"):
        pipeline_of(unordered, worker, "train")


def test_rows_of_a_large_batch_are_told_apart() -> None:
    images = np.zeros([4, 100, 100], np.uint8)
    images[:, 50, ::7] = np.arange(4)[:, None]
    with pytest.raises(WorkersDifferError):
        compare(lambda worker: images[::-1] if worker else images)
