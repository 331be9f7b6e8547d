"""Prediction in loops: the batches are those of a step at a time, and nothing is read that nobody may read yet."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Hook, Input, ModeKeys, RunConfig
from runner.estimator import evaluation
from runner.programs.predict import PredictProgram
from runner.tf_private.datasets import may_change_meanwhile
from tests.support.line import line, mirrored, points
from tests.support.tiers import slow_but


class EachStep(tf.compat.v1.train.SessionRunHook):
    """A session hook: steps then come one at a time."""

    def before_run(self, run_context: Any) -> None: ...


def every_kind(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Predictions of every dtype and shape; `long` has another width in each batch, `ranks` another rank."""
    spec = line(features, labels, mode, params)
    if mode != ModeKeys.PREDICT:
        return spec
    first = tf.cast(features[0], tf.int32)
    ranks = tf.cond(first % 2 == 0, lambda: features[:, None], lambda: features)
    unknown = tf.py_function(lambda x: x, [ranks], tf.float32)
    y = spec.predictions["y"]
    predictions = {
        "y": y,
        "text": tf.strings.as_string(features),
        "long": tf.tile(features[:, None], [1, first]),
        "ranks": unknown,
        "none": tf.zeros([tf.shape(features)[0], 0]),
        "nested": {"even": features % 2 == 0, "pair": (tf.cast(y, tf.float64), tf.cast(y, tf.bfloat16))},
        "sum": tf.reduce_sum(features),
        "name": tf.constant("batch"),
        "drawn": tf.random.uniform([2, 2]),
        "first_two": features[:2],
    }
    return spec._replace(predictions=predictions)


@pytest.fixture(params=["default", "mirrored"])
def predictor(request: pytest.FixtureRequest, tmp_path: Path) -> Estimator:
    distribute = mirrored() if request.param == "mirrored" else None
    trainer = Estimator(every_kind, tmp_path, RunConfig(train_distribute=distribute))
    return trainer.train(points(), steps=1)


@pytest.mark.parametrize("divided", slow_but([False, True], True))
def test_loops_give_the_bits_of_one_step_at_a_time(predictor: Estimator, divided: bool) -> None:
    """23 examples in batches of 3: the last is smaller, and a replica may have nothing of it."""
    fn = points(23, 3)
    source: Any = Input(fn, batch_size=3) if divided else fn
    stepwise = list(predictor.predict(source, hooks=[EachStep()], yield_single_examples=False))
    looped = list(predictor.predict(source, yield_single_examples=False))
    assert len(looped) == len(stepwise) >= 8
    for one, other in zip(looped, stepwise, strict=True):
        assert list(one) == list(other), "the order is that of model_fn"
        tf.nest.assert_same_structure(one, other)
        for mine, theirs in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
            assert type(mine) is type(theirs)
            np.testing.assert_array_equal(mine, theirs, strict=isinstance(mine, np.ndarray))
            assert not isinstance(mine, np.ndarray) or mine.flags.writeable
    assert len({batch["drawn"].tobytes() for batch in looped}) == len(looped), "each batch draws anew"


class Counted:
    """How many steps each call of TensorFlow was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        run = PredictProgram.run

        def counting(program: PredictProgram, iterator: Any, first_step: int, max_steps: int) -> Any:
            self.asked.append(max_steps)
            return run(program, iterator, first_step, max_steps)

        monkeypatch.setattr(PredictProgram, "run", counting)


def trained(tmp_path: Path, model_fn: Any = line) -> Estimator:
    return Estimator(model_fn, tmp_path).train(points(), steps=1)


def test_loops_grow_and_hooks_still_see_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Hook):
        def __init__(self) -> None:
            self.examples: list[int] = []

        def after_batches(self, run: Any, examples: int) -> None:
            self.examples.append(examples)

    monkeypatch.setattr(evaluation, "_PREDICT_SECS", 60.0)
    counted, seen = Counted(monkeypatch), Seen()
    found = list(trained(tmp_path).predict(points(401, 4), hooks=[seen]))
    assert [one["x"] for one in found] == list(range(1, 402))
    assert counted.asked == [1, 10, 100]
    assert seen.examples == [*range(4, 401, 4), 401]


def test_a_loop_holds_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_PREDICT_BYTES", 100)  # a step has 2 predictions of 2 floats
    counted = Counted(monkeypatch)
    monkeypatch.setattr(evaluation, "_PREDICT_SECS", 60.0)
    assert len(list(trained(tmp_path).predict(points(40, 2)))) == 40
    assert counted.asked == [1, 6, 6, 6, 6]


def test_a_generator_is_not_asked_for_more_than_the_next_prediction(tmp_path: Path) -> None:
    """What serves requests with one open prediction: the generator waits for the next request."""
    requests: queue.Queue[float] = queue.Queue()

    def served() -> Iterator[float]:
        while True:
            yield requests.get(timeout=20)

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(served, output_signature=tf.TensorSpec([], tf.float32)).batch(1)

    answers = trained(tmp_path).predict(input_fn)
    for number in range(1, 30):
        requests.put(float(number))
        assert next(answers)["x"] == number
    requests.put(0.0)  # what tf.data reads ahead by itself


def test_a_dataset_that_reads_what_python_may_change_is_known() -> None:
    variable, whole = tf.Variable(0.0), tf.data.Dataset.range(9)
    assert not may_change_meanwhile(whole.shuffle(9).map(lambda x: x + 1, 2).batch(2).prefetch(1))
    assert may_change_meanwhile(whole.map(lambda _: variable.read_value()).batch(2))
    assert may_change_meanwhile(whole.map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)))
    assert may_change_meanwhile(object()), "nobody knows"


def test_sparse_and_ragged_predictions_are_what_they_were(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        if mode != ModeKeys.PREDICT:
            return spec
        ragged = tf.RaggedTensor.from_row_lengths(features, [1, tf.shape(features)[0] - 1])
        return spec._replace(predictions={"ragged": ragged, "x": features})

    batches = list(trained(tmp_path, model_fn).predict(points(6, 3), yield_single_examples=False))
    assert [[row.tolist() for row in batch["ragged"]] for batch in batches] == [[[1], [2, 3]], [[4], [5, 6]]]


def test_an_endless_input_is_predicted_as_far_as_it_is_asked(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    found = list(itertools.islice(trainer.predict(points(repeat=True)), 1001))
    assert [one["x"] for one in found[-9:]] == [1, 2, 3, 4, 5, 6, 7, 8, 1]
