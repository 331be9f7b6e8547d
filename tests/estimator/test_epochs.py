"""Training for a number of passes over the input: which examples it sees, where it ends, how it goes on."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig, TrainSpec, train_and_evaluate
from runner.config import parsing
from runner.system.console import Progress
from runner.task.build import build_job
from runner.tracking.journal import NullJournal
from tests.config.test_config import composed
from tests.support import jobs
from tests.support.messages import Messages
from tests.support.models import strategies
from tests.support.tiers import slow_but

STRATEGIES = strategies()
NUM_EXAMPLES = 10


class Seen:
    """A model of one weight that notes the examples it trains on, real ones and placeholders' copies."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    @property
    def examples(self) -> Counter[int]:
        return Counter(example for batch in self.batches for example in batch)

    def model_fn(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        def note(batch: tf.Tensor) -> tf.Tensor:
            self.batches.append(batch.numpy().astype(int).tolist())
            return batch

        noted = tf.py_function(note, [features], tf.float64)
        noted.set_shape([None])
        predictions = keras.layers.Dense(1, dtype="float64")(noted[:, None])
        optimizer = keras.optimizers.SGD(0.001, momentum=0.5)
        return EstimatorSpec(mode, predictions, tf.square(predictions[:, 0] - 1), optimizer=optimizer)


def points(params: Any) -> tf.data.Dataset:
    """0.0 .. 9.0, shuffled anew in each pass."""
    dataset = tf.data.Dataset.range(NUM_EXAMPLES).map(lambda x: tf.cast(x, tf.float64))
    return dataset.shuffle(NUM_EXAMPLES, seed=3).batch(params["batch_size"])


def from_generator(params: Any) -> tf.data.Dataset:
    """The same in order, from a source whose length nobody knows and whose position cannot be saved."""
    spec = tf.TensorSpec([], tf.float64)
    return tf.data.Dataset.from_generator(lambda: iter(np.arange(10.0)), output_signature=spec).batch(
        params["batch_size"]
    )


def ends_by_itself(params: Any, num_epochs: int | None = None) -> tf.data.Dataset:
    """Makes the passes that it is asked for."""
    epochs = tf.data.Dataset.range(num_epochs or 10**9)
    return epochs.flat_map(
        lambda _: tf.data.Dataset.range(10).map(lambda x: tf.cast(x, tf.float64)).batch(params["batch_size"])
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "points": points,
    "from_generator": from_generator,
    "ends_by_itself": ends_by_itself,
}


def estimator(seen: Seen, model_dir: Path, strategy: str = "default", **config: Any) -> Estimator:
    return Estimator(seen.model_fn, model_dir, RunConfig(train_distribute=STRATEGIES[strategy], **config))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_example_is_trained_on_once_an_epoch(function: str, tmp_path: Path) -> None:
    seen = Seen()
    data = Input(FUNCTIONS[function], params={}, batch_size=4)
    run = estimator(seen, tmp_path).train_run(data, max_epochs=3)
    assert run is not None and (run.global_step, run.examples) == (9, 30)
    assert [len(batch) for batch in seen.batches] == [4, 4, 2] * 3
    for epoch in range(3):
        assert sorted(itertools.chain(*seen.batches[3 * epoch : 3 * epoch + 3])) == list(range(10))
    if function == "points":
        assert seen.batches[:3] != seen.batches[3:6], "shuffled anew"


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_several_replicas_count_the_same_examples_and_steps(strategy: str, tmp_path: Path) -> None:
    run = estimator(Seen(), tmp_path, strategy).train_run(Input(points, params={}, batch_size=4), max_epochs=3)
    assert run is not None and (run.global_step, run.examples) == (9, 30)
    own = estimator(Seen(), tmp_path / "in turn", strategy)
    run = own.train_run(lambda: points({"batch_size": 2}), max_epochs=3)
    assert run is not None and run.examples == 30


def test_what_comes_first_ends_training(tmp_path: Path) -> None:
    data = Input(points, params={}, batch_size=4)
    run = estimator(Seen(), tmp_path / "steps").train_run(data, max_steps=5, max_epochs=3)
    assert run is not None and run.global_step == 5
    run = estimator(Seen(), tmp_path / "epochs").train_run(data, max_steps=50, max_epochs=3)
    assert run is not None and run.global_step == 9


@pytest.mark.parametrize(
    ("function", "stop"),
    slow_but(itertools.product(FUNCTIONS, [2, 3, 5]), ("points", 2), ("from_generator", 3), ("ends_by_itself", 5)),
)
def test_a_run_that_resumes_in_an_epoch_sees_the_examples_of_the_undisturbed_one(
    function: str, stop: int, tmp_path: Path
) -> None:
    data = Input(FUNCTIONS[function], params={}, batch_size=4)
    whole, parts = Seen(), Seen()
    expected = estimator(whole, tmp_path / "whole").train(data, max_epochs=3)
    estimator(parts, tmp_path / "parts").train(data, max_epochs=3, max_steps=stop)
    found = estimator(parts, tmp_path / "parts").train(data, max_epochs=3)
    assert parts.batches == whole.batches
    for name in expected.get_variable_names():
        np.testing.assert_array_equal(found.get_variable_value(name), expected.get_variable_value(name), err_msg=name)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_finished_run_is_not_trained_again_and_a_larger_number_goes_on(function: str, tmp_path: Path) -> None:
    data = Input(FUNCTIONS[function], params={}, batch_size=4)
    seen = Seen()
    for epochs, steps in ((2, 6), (2, 6), (1, 6), (3, 9)):
        trainer = estimator(seen, tmp_path)
        result = train_and_evaluate(trainer, TrainSpec(data, max_steps=100, max_epochs=epochs), [])
        assert result.global_step == steps
    assert set(seen.examples.values()) == {3}


def test_stopped_at_the_end_of_the_last_epoch_there_is_nothing_left(tmp_path: Path) -> None:
    for max_steps in (9, 20):
        trainer = estimator(Seen(), tmp_path)
        data = Input(from_generator, params={}, batch_size=4)
        result = train_and_evaluate(trainer, TrainSpec(data, max_steps=max_steps, max_epochs=3), [])
        assert result.global_step == 9


def test_data_without_end_has_no_epochs(tmp_path: Path, messages: Messages) -> None:
    trainer = estimator(Seen(), tmp_path)
    with messages.raised(ValueError):
        trainer.train(lambda: points({"batch_size": 4}).repeat(), max_epochs=3)
    with messages.raised(ValueError):
        trainer.train(lambda: points({"batch_size": 4}), max_epochs=0)


def test_the_shipped_inputs_end_after_the_epochs_of_the_config(tmp_path: Path) -> None:
    config = parsing.parse(composed([f"model_dir={tmp_path}", "train.max_epochs=2", "input.train.batch_size=500"]))
    job = build_job(config, NullJournal(), Progress())
    assert job.train_spec is not None
    run = job.estimator.train_run(job.train_spec.input_fn, max_steps=1000, max_epochs=job.train_spec.max_epochs)
    assert run is not None and (run.global_step, run.examples) == (6, 2 * 1437)


def train_to(folder: Path, steps: int, batch_size: int = 2, epochs: int | None = None, function: Any = points) -> Any:
    data = Input(function, params={}, batch_size=batch_size)
    return train_and_evaluate(estimator(Seen(), folder), TrainSpec(data, max_steps=steps, max_epochs=epochs), [])


@pytest.mark.parametrize("function", [points, from_generator])
def test_an_input_that_ends_before_the_last_step_is_reported(
    function: Any, tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        result = train_to(tmp_path, 60, function=function)
    assert result.global_step == 5 and result.stopped_early is not None
    messages.logged(caplog, result.stopped_early)


def test_an_input_that_may_end_is_not_reported(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        assert train_to(tmp_path / "a", 60, epochs=2).stopped_early is None, "passes are asked for"
        assert train_to(tmp_path / "b", 5).stopped_early is None, "the last step is the last batch"
        spec = TrainSpec(Input(points, params={}, batch_size=2))
        result = train_and_evaluate(estimator(Seen(), tmp_path / "c"), spec, [])
        assert (result.global_step, result.stopped_early) == (5, None), "there is no last step"
    assert "Stopped" not in caplog.text


@pytest.mark.parametrize("command", ["train_and_evaluate", "train"])
def test_the_end_of_the_input_is_in_the_result_of_the_command(command: str, tmp_path: Path, messages: Messages) -> None:
    settings = (f"command={command}", "input.train.fn=tests.support.jobs.once", "train.max_steps=60")
    assert jobs.run(tmp_path, *settings) == 0
    (result,) = jobs.results(tmp_path)
    messages.same("stopped_early", result["stopped_early"])


def test_another_batch_size_says_by_how_much_the_passes_overrun_their_number(
    tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    def num_said() -> int:
        found = [record for record in caplog.records if "overrun" in record.getMessage()]
        messages.logged(caplog, "overrun")
        caplog.clear()
        return len(found)

    caplog.set_level(logging.WARNING, "runner")
    train_to(tmp_path / "a", 5, epochs=2)
    train_to(tmp_path / "a", 8, epochs=2)
    assert num_said() == 0, "it goes on at the next example"
    assert train_to(tmp_path / "a", 60, 5, epochs=1).global_step == 10
    assert num_said() == 1
    train_to(tmp_path / "a", 60, 1, epochs=1)
    assert num_said() == 1
    train_to(tmp_path / "b", 3, function=from_generator, epochs=1)
    train_to(tmp_path / "b", 60, 5, function=from_generator, epochs=1)
    assert num_said() == 1
    train_to(tmp_path / "c", 3)
    train_to(tmp_path / "c", 6, 5)
    assert num_said() == 0, "no number of passes is asked for"


def test_a_function_that_ends_by_itself_is_told_when_and_else_keeps_its_default(tmp_path: Path) -> None:
    given: list[Any] = []

    def required(num_epochs: int | None) -> tf.data.Dataset:
        given.append(num_epochs)
        return points({"batch_size": 4})

    def optional(num_epochs: int | None = 7) -> tf.data.Dataset:
        return required(num_epochs)

    for function in (required, optional):
        for epochs in (None, 1):
            estimator(Seen(), tmp_path / f"{len(given)}").train(function, max_epochs=epochs)
    assert given == [None, 1, 7, 1]
