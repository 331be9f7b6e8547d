"""Summaries made inside model_fn: which tags and steps TensorBoard finds, each once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.data import wait_timer
from tests.support.line import LINES, mirrored, points, read_events, steps_of
from tests.support.tiers import slow_but

v1 = tf.compat.v1

STRATEGIES = ["default", "mirrored"]


def summarised(style: str) -> Any:
    """A `line` that makes summaries of both kinds; `value` is the number of the batch's first example."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = LINES[style](features, labels, mode, params)
        tf.summary.scalar("v2/value", features[0])
        tf.summary.histogram("v2/histogram", features)
        v1.summary.scalar("v1_value", features[0])
        v1.summary.histogram("v1_histogram", features)
        return spec

    return model_fn


def trained(style: str, strategy: Any, model_dir: Path, **settings: Any) -> Estimator:
    config = RunConfig(train_distribute=strategy, **{"save_summary_steps": 3, "save_checkpoints_steps": 2, **settings})
    trainer = Estimator(summarised(style), model_dir, config)
    return trainer.train(points(16, 2, repeat=True), steps=7)


@pytest.fixture(scope="module", params=[(style, strategy) for style in LINES for strategy in STRATEGIES], ids="-".join)
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(strategy, model_dir) of seven steps with summaries every third, in each style under each strategy."""
    style, strategy = request.param
    model_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        # The speed of short loops whose waiting is timed is not logged. A slow machine would come to them here.
        patch.setattr(wait_timer, "FIRST_SECS", math.inf)
        trained(style, mirrored() if strategy == "mirrored" else None, model_dir)
    return strategy, model_dir


@pytest.mark.parametrize("tag", ["v2/value", "v2/histogram", "v1_value", "v1_histogram", "loss", "global_step/sec"])
def test_each_summary_is_written_once_at_its_steps(tag: str, run: tuple[str, Path]) -> None:
    _, model_dir = run
    assert steps_of(model_dir, tag) == [1, 3, 6]


def test_no_other_summary_is_written(run: tuple[str, Path]) -> None:
    _, model_dir = run
    tags = {event.tag for event in read_events(model_dir)} - {"train/mae"}  # of the native one, see test_train_scalars
    assert tags == {
        "v2/value",
        "v2/histogram",
        "v1_value",
        "v1_histogram",
        "loss",
        "global_step/sec",
        "train/learning_rate",
    }


@pytest.mark.parametrize("tag", ["v2/value", "v1_value"])
def test_values_are_those_of_all_replicas_at_that_step(tag: str, run: tuple[str, Path]) -> None:
    strategy, model_dir = run
    found = {event.step: event.value for event in read_events(model_dir) if event.tag == tag}
    # Batches of 1..16: of two, which begin at 2s - 1 in step s; of four, of which the replicas begin at 4s - 3, 4s - 1.
    expected = {1: 1, 3: 5, 6: 11} if strategy == "default" else {1: 2, 3: 10, 6: 22 - 16}
    assert found == expected


@pytest.mark.parametrize("style", LINES)
def test_summaries_can_be_turned_off(style: str, tmp_path: Path) -> None:
    trained(style, None, tmp_path, save_summary_steps=0)
    assert read_events(tmp_path) == []


@pytest.mark.parametrize("style", LINES)
def test_summaries_have_their_steps_in_a_resumed_run_too(style: str, tmp_path: Path) -> None:
    trained(style, None, tmp_path).train(points(16, 2, repeat=True), steps=3)
    counts = Counter((event.tag, event.step) for event in read_events(tmp_path))
    assert set(counts.values()) == {1}
    assert steps_of(tmp_path, "v2/value") == steps_of(tmp_path, "v1_value") == [1, 3, 6, 8, 9]


def test_summary_that_model_fn_names_loss_takes_the_place_of_the_runners(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = LINES["classic"](features, labels, mode, params)
        v1.summary.scalar("loss", spec.loss * 0 + 7)
        return spec

    Estimator(model_fn, tmp_path, RunConfig(save_summary_steps=2)).train(points(), steps=2)
    assert [(event.step, event.value) for event in read_events(tmp_path) if event.tag == "loss"] == [(1, 7), (2, 7)]


def test_summaries_do_not_change_what_is_trained(tmp_path: Path) -> None:
    with_them = trained("classic", None, tmp_path / "with")
    without = trained("classic", None, tmp_path / "without", save_summary_steps=None)
    assert with_them.get_variable_value("weight") == without.get_variable_value("weight") != 0


@pytest.mark.parametrize(
    ("style", "strategy"),
    slow_but(itertools.product(LINES, STRATEGIES), ("native", "default"), ("classic", "mirrored")),
)
def test_evaluation_writes_its_metrics_once_at_the_step_of_the_checkpoint(
    style: str, strategy: str, tmp_path: Path
) -> None:
    trainer = trained(style, mirrored() if strategy == "mirrored" else None, tmp_path)
    before = len(read_events(tmp_path))
    found = trainer.evaluate(points(7, 2))
    trainer.evaluate(points(7, 2), checkpoint_path=str(tmp_path / "model.ckpt-4"))
    list(trainer.predict(points(7, 2)))
    events = [event for event in read_events(tmp_path / "eval") if event.tag != "checkpoint_path"]
    assert [(event.step, event.tag) for event in events] == [(7, "loss"), (7, "mae"), (4, "loss"), (4, "mae")]
    assert [event.value for event in events[:2]] == pytest.approx([found["loss"], found["mae"]])
    assert np.isfinite([event.value for event in events]).all()
    assert len(read_events(tmp_path)) == before, "summaries inside model_fn are those of training"


def test_evaluating_a_model_with_summaries_gives_no_advice_on_writers(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    trainer = trained("classic", None, tmp_path)
    trainer.evaluate(points())
    next(iter(trainer.predict(points())))
    assert not [one for one in recwarn if "default summary writer not found" in str(one.message)]


def test_summaries_of_v1_can_be_merged_for_a_hook(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        v1.summary.scalar("rate", features[0])
        merged = v1.summary.merge_all()
        assert merged.dtype == tf.string and len(v1.get_collection(v1.GraphKeys.SUMMARIES)) == 1
        hook = v1.train.SummarySaverHook(save_steps=2, output_dir=str(tmp_path / "own"), summary_op=merged)
        return LINES["classic"](features, labels, mode, params)._replace(training_hooks=[hook])

    Estimator(model_fn, tmp_path).train(points(16, 2, repeat=True), steps=6)
    assert steps_of(tmp_path, "rate") == [1] and steps_of(tmp_path / "own", "rate") == [1, 3, 5]
