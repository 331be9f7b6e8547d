"""`checkpoint.input_state`: whether a checkpoint holds the state of the training input or a count of what was read."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.checkpoint.reader import Reader
from runner.checkpoint.writer import DiskFullError
from runner.data import inputs
from runner.system.files import RUNNER_FILES, write_json
from runner.system.standard_streams import LATER_JOB
from runner.task.inspect_run import inspect
from runner.tf_private import datasets
from tests.integration.test_exactness import LossRecorder
from tests.support.journal import journal_of
from tests.support.line import mirrored
from tests.support.messages import Messages

v1 = tf.compat.v1

NUM_EXAMPLES, WIDTH, BATCH_SIZE = 60, 12_000, 4
MEASURED = r"[\d.,]+ \w+(?= \(shuffle| were free)|(?<=of its input )[\d.,]+ \w+"
NEEDED = r"[\d,]+(?= B more)"
"""Sizes that differ from run to run."""
IMAGES = np.random.RandomState(0).rand(NUM_EXAMPLES, WIDTH).astype(np.float32)


def mean_model(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Four bytes of weights; the loss of a step tells its examples."""
    weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean(tf.square(weight * tf.reduce_mean(features, 1) - features[:, 0]))
    train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, weight, loss, train_op)


def images(shuffle: Callable[..., Any], then: Callable[[tf.data.Dataset], tf.data.Dataset]) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(IMAGES)
    return then(shuffle(dataset)).repeat().batch(BATCH_SIZE, drop_remainder=True)


def as_it_is(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset


def shuffled(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.shuffle(50)


def input_of(then: Callable[[tf.data.Dataset], tf.data.Dataset] = as_it_is, shuffle: Any = shuffled) -> Input:
    return Input(functools.partial(images, shuffle, then), batch_size=BATCH_SIZE)


def train(model_dir: Path, steps: int, source: Input | None = None, **settings: Any) -> list[float]:
    """Take `steps` more steps and return their losses."""
    config = {"tf_random_seed": 7, "save_checkpoints_steps": 5, "tensorboard": False, **settings}
    estimator = Estimator(mean_model, model_dir, RunConfig(**config))
    estimator.train(source or input_of(), hooks=[recorder := LossRecorder()], steps=steps)
    return np.concatenate(recorder.losses).tolist()


def input_bytes(model_dir: Path, step: int) -> int:
    return sum(file.stat().st_size for file in (model_dir / RUNNER_FILES).glob(f"model.ckpt-{step}.input-0.*"))


def said_of(caplog: Any) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("runner"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of forty steps on the shuffled images, without a resume."""
    return train(tmp_path_factory.mktemp("undisturbed"), 40, checkpoint_input_state="saved")


@pytest.mark.parametrize("strategy", [None, mirrored], ids=["default", "mirrored"])
def test_auto_counts_what_is_larger_than_the_model_and_resumes_to_the_bit(
    strategy: Any, tmp_path: Path, caplog: Any, messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train_distribute": strategy and strategy()}
    undisturbed = train(tmp_path / "a", 40, checkpoint_input_state="saved", **settings)
    assert input_bytes(tmp_path / "a", 40) > 50 * WIDTH * 4
    with caplog.at_level(logging.INFO, "runner"):
        first = train(tmp_path / "b", 18, **settings)
    (line,) = [line for line in said_of(caplog).splitlines() if "shuffle" in line]
    messages.same("INFO", line, hide=MEASURED)
    assert not input_bytes(tmp_path / "b", 5) and not Reader(tmp_path / "b/model.ckpt-18").has_iterator(0)
    assert not list((tmp_path / "b").glob(".*"))
    caplog.clear()
    monkeypatch.setenv(LATER_JOB, "1")  # the first job of the sweep has said it
    with caplog.at_level(logging.INFO, "runner"):
        assert first + train(tmp_path / "b", 22, **settings) == undisturbed
    assert "shuffle" not in said_of(caplog)


@pytest.mark.parametrize(
    "choices", [("saved", "counted", "saved"), ("counted", "auto", "saved"), ("auto", "saved", "counted")]
)
def test_a_run_that_changes_its_choice_goes_on_to_the_bit(
    choices: Any, undisturbed: list[float], tmp_path: Path
) -> None:
    found, step = [], 0
    for choice, steps in zip((*choices, "saved"), (13, 9, 11, 7), strict=True):
        found += train(tmp_path / "b", steps, checkpoint_input_state=choice)
        step += steps
        assert Reader(tmp_path / f"b/model.ckpt-{step}").has_iterator(0) == (choice == "saved")
    assert found == undisturbed


def parallel(dataset: tf.data.Dataset, **settings: Any) -> tf.data.Dataset:
    return dataset.map(lambda x: x + 0.0, num_parallel_calls=2, **settings)


def interleaved(dataset: tf.data.Dataset, **settings: Any) -> tf.data.Dataset:
    return dataset.interleave(tf.data.Dataset.from_tensors, 2, num_parallel_calls=2, **settings)


def careless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def careless_inside(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.flat_map(lambda x: parallel(tf.data.Dataset.from_tensors(x), deterministic=False))


def unseeded(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """As where an input function takes the seed away."""
    tf.random.set_seed(None)
    return dataset.shuffle(50)


COUNTED = {"in parallel": parallel, "interleaved": interleaved, "cached": lambda dataset: dataset.cache().prefetch(2)}
SAVED: dict[str, Any] = {
    "parallel": functools.partial(parallel, deterministic=False),
    "interleaved": functools.partial(interleaved, deterministic=False),
    "options": careless,
    "inside": careless_inside,
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_seeded_and_ordered_is_counted(name: str, tmp_path: Path) -> None:
    source = input_of(COUNTED[name])
    undisturbed = train(tmp_path / "a", 20, source, checkpoint_input_state="saved")
    found = train(tmp_path / "b", 13, source)
    assert not input_bytes(tmp_path / "b", 13)
    assert found + train(tmp_path / "b", 7, source) == undisturbed


@pytest.mark.parametrize("name", SAVED)
def test_what_could_be_read_in_another_order_is_saved_and_the_reason_said(
    name: str, tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    with caplog.at_level(logging.INFO, "runner"):
        train(tmp_path, 13, input_of(SAVED[name]))
    assert input_bytes(tmp_path, 13) > WIDTH * 4, "examples are in it; how many depends on how full its buffers were"
    (line,) = [line for line in said_of(caplog).splitlines() if "shuffle" in line]
    messages.same("INFO", line, hide=MEASURED)


def test_a_shuffle_whose_seed_another_process_does_not_have_is_saved(
    tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    with caplog.at_level(logging.INFO, "runner"):
        train(tmp_path / "a", 8, tf_random_seed=None)
        train(tmp_path / "b", 8, input_of(shuffle=unseeded))
        train(tmp_path / "c", 8, tf_random_seed=None, checkpoint_input_state="counted")
    assert input_bytes(tmp_path / "a", 8) and input_bytes(tmp_path / "b", 8) and not input_bytes(tmp_path / "c", 8)
    for record in caplog.records:
        if "shuffle" in record.getMessage():
            messages.same(record.levelname, record.getMessage(), hide=MEASURED)


def test_a_shuffle_within_a_function_counts_as_drawn_only_without_a_seed(messages: Messages) -> None:
    def inside(**seed: Any) -> tf.data.Dataset:
        return tf.data.Dataset.range(3).flat_map(lambda x: tf.data.Dataset.range(x).shuffle(3, **seed))

    tf.random.set_seed(None)
    messages.same("why", str(datasets.why_not_repeatable(inside())))
    assert datasets.why_not_repeatable(inside(seed=3)) is None
    tf.random.set_seed(0)
    assert datasets.why_not_repeatable(inside(seed=0)) is None


def test_another_seed_is_said_where_batches_are_read_again(tmp_path: Path, caplog: Any, messages: Messages) -> None:
    train(tmp_path, 8)
    train(tmp_path, 8, tf_random_seed=8)
    messages.logged(caplog, "run.seed")


def test_a_state_that_cannot_be_saved_is_said_where_it_was_asked_for(
    tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    def smaller_last_batch() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(IMAGES).shuffle(50).batch(7).repeat()

    train(tmp_path, 8, Input(smaller_last_batch), checkpoint_input_state="saved")
    messages.logged(caplog, "checkpoint.input_state")
    assert not input_bytes(tmp_path, 8)


def test_inspect_shows_the_sizes_of_variables_and_of_the_inputs_state_apart(tmp_path: Path, capsys: Any) -> None:
    train(tmp_path, 5, checkpoint_input_state="saved")
    train(tmp_path, 5, checkpoint_input_state="counted")
    inspect(tmp_path)
    words = capsys.readouterr().out.split("checkpoints\n")[1].splitlines()
    assert words[0].split()[:5] == ["step", "age", "variables", "input", "state"], words
    rows = {row.split()[0]: row for row in words if row.strip()[:1].isdigit()}
    assert re.search(r"\d (B|kB) .* MB", rows["5"]) and "counted" in rows["10"], rows


def test_a_full_disk_names_what_the_state_of_the_input_needs(small_disk: Path, messages: Messages) -> None:
    with messages.raised(DiskFullError, hide=rf"{MEASURED}|(?<=ckpt-)\d+") as caught:
        train(small_disk, 30, checkpoint_input_state="saved", keep_checkpoint_max=None)
    assert " MB, " in str(caught.value)


def test_a_full_disk_is_said_by_whoever_notes_something_on_it(small_disk: Path, messages: Messages) -> None:
    journal = journal_of(small_disk / "events.chief-0.jsonl")
    with messages.raised(OSError, hide=NEEDED):
        while True:
            journal.metrics(1, {"train/loss": 1.0})
    journal.close()
    with messages.raised(OSError, hide=NEEDED):
        write_json(small_disk / "summary.json", {"status": "finished"})
    assert os.listdir(small_disk) == ["events.chief-0.jsonl"]


def test_a_resume_with_other_options_and_with_batches_ahead_is_exact(
    undisturbed: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    messages: Messages,
) -> None:
    found = train(tmp_path / "b", 8, checkpoint_input_state="saved")
    options = tf.data.Options()
    options.threading.private_threadpool_size, options.threading.max_intra_op_parallelism = 2, 1
    options.autotune.enabled = False
    source = dataclasses.replace(input_of(), options=options)
    found += train(tmp_path / "b", 5, source, checkpoint_input_state="saved")
    assert Reader(tmp_path / "b" / "model.ckpt-13").has_iterator(0)
    ahead = dataclasses.replace(source, prefetch_to_device=2)
    with caplog.at_level(logging.INFO, "runner"):
        found += train(tmp_path / "b", 3, ahead)
    (line,) = [line for line in said_of(caplog).splitlines() if "prefetch_to_device" in line]
    messages.same("INFO", line)
    # A CPU in place of the GPU: TensorFlow copies to it in the same way.
    monkeypatch.setattr(inputs, "_choose_prefetch", lambda *_: inputs.DevicePrefetch("/device:CPU:0", 2))
    for steps in (4, 4):
        found += train(tmp_path / "b", steps, ahead)
    assert not Reader(tmp_path / "b" / "model.ckpt-24").has_iterator(0)
    assert found == undisturbed[:24]
