"""Starts in one model_dir that change limits, strategies and inputs: each goes on where the last one left the data."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, Input, RunConfig
from runner.checkpoint.reader import Reader
from runner.checkpoint_files.layout import latest_checkpoint
from runner.data.inputs import InputPipeline, build_input_pipeline
from runner.data.sharding import WorkerPlace
from runner.data.train_input import TrainInput
from tests.support import chains
from tests.support.line import line, mirrored
from tests.support.messages import Messages
from tests.support.tiers import slow_but

LIMITS = ((None, 1), (10, 20), (20, 20), (25, 20), (30, None), (chains.TOTAL, None))
"""(max_steps, max_epochs): the third start is the one that could not restore what the second had saved."""


@pytest.mark.parametrize("seed", slow_but(range(10), 1, 3))
def test_a_random_chain_of_starts_comes_to_the_undisturbed_run(seed: int, tmp_path: Path) -> None:
    chains.check(chains.draw(random.Random(f"tests-{seed}")), tmp_path)


def chain_of(limits: Any, data: str = "shipped") -> chains.Chain:
    starts = [chains.Start("default", steps, epochs, 100, None, "limit", 0, "none") for steps, epochs in limits]
    return chains.Chain("classic", data, False, tuple(starts))


def test_limits_that_change_between_starts_change_no_number(tmp_path: Path) -> None:
    chains.check(chain_of(LIMITS), tmp_path)
    assert Reader(tmp_path / "model.ckpt-25").extra()["input"]["skipped"] == chains.STEPS_PER_EPOCH


# --- the place in the input -----------------------------------------------------------------------------------------


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(24).map(lambda x: (tf.cast(x, tf.float32), tf.cast(x, tf.float32))).batch(4)


def pipeline_of(source: Input, workers: int = 1, max_epochs: int | None = None) -> InputPipeline:
    return build_input_pipeline(source, "train", WorkerPlace(1, 0, workers), params={}, num_epochs=max_epochs)


def test_one_batch_again_and_again_is_another_input(tmp_path: Path) -> None:
    fn = Input(lambda: numbers().repeat(), batch_size=4)
    overfitted = dataclasses.replace(fn, first_batch_only=True)
    for source, steps in ((fn, 2), (overfitted, 4), (overfitted, 6), (fn, 8)):
        Estimator(line, tmp_path, RunConfig()).train(source, max_steps=steps)
    assert Reader(tmp_path / "model.ckpt-8").extra()["input"]["elements"] == 2, "it began anew"


@pytest.mark.parametrize("ended", [False, True])
def test_parts_that_are_divided_otherwise_start_from_the_beginning(
    ended: bool, tmp_path: Path, caplog: Any, messages: Messages
) -> None:
    whole = Input(numbers, shard="off")
    trainer = Estimator(line, tmp_path, RunConfig())
    trainer.train(whole, max_steps=None if ended else 3, max_epochs=1)
    two = pipeline_of(whole, workers=2, max_epochs=2)
    assert two.num_pipelines == 2
    checkpoint = Reader(str(trainer.latest_checkpoint()))
    position = TrainInput.open(two, checkpoint, checkpoint.extra()["input"]).position
    assert (position.elements, position.shard) == (0, "off")
    messages.logged(caplog, "epoch")


def test_the_last_step_of_replicas_counts_no_batch_that_there_was_not(tmp_path: Path) -> None:
    """Three batches for two replicas: the second step has one, and the next epoch begins after it."""
    config = RunConfig(train_distribute=mirrored(), steps_per_loop=1)
    runs = [
        Estimator(line, tmp_path, config).train_run(lambda: numbers().take(3), max_epochs=epochs) for epochs in (1, 3)
    ]
    assert [run.examples for run in runs if run is not None] == [12, 24]
    assert Reader(str(tmp_path / "model.ckpt-5")).extra()["input"]["elements"] == 9


# --- batches of another size ----------------------------------------------------------------------------------------


def of_size(batch_size: int, num_examples: int = 64) -> Any:
    """An input_fn that ignores params["batch_size"]."""
    values = np.arange(num_examples, dtype=np.float32) / num_examples

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((values, 2 * values)).batch(batch_size).repeat()

    return input_fn


@pytest.mark.parametrize("strategy", [None, "mirrored"])
def test_larger_batches_than_batch_size_are_refused_before_a_step_is_saved(
    strategy: Any, tmp_path: Path, messages: Messages
) -> None:
    config = RunConfig(train_distribute=mirrored() if strategy else None, save_checkpoints_steps=1)
    with messages.raised(ValueError):
        Estimator(line, tmp_path, config).train(Input(of_size(32), batch_size=10), max_steps=50)
    assert latest_checkpoint(tmp_path) in (None, str(tmp_path / "model.ckpt-0"))


@pytest.mark.parametrize(("strategy", "steps_per_loop"), [(None, None), ("mirrored", 4)])
def test_smaller_batches_than_batch_size_are_said_once(
    strategy: Any, steps_per_loop: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    """They were trained on in silence, under the header "global batch 10"."""
    config = RunConfig(train_distribute=mirrored() if strategy else None, steps_per_loop=steps_per_loop)
    data = Input(of_size(4), batch_size=10)
    Estimator(line, tmp_path, config).train(data, max_steps=8)
    messages.logged(caplog, "batch_size")


def test_smaller_last_batches_are_fine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Estimator(line, tmp_path, RunConfig()).train_run(Input(of_size(10), batch_size=10), max_steps=15)
    assert run is not None and run.examples == 64 * 2 + 10
    assert "batch_size" not in caplog.text
