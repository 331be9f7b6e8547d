"""What training reports beside its loss: scalars of summaries and metrics of TRAIN, over all replicas."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from runner.hooks.hook import Hook
from tests.support.journal import journal_of, metrics_of_steps
from tests.support.line import LINES, mirrored, points, read_events
from tests.support.measured import KINDS, journaled, measured, summarised_values, train_measured, wide_points
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1

SIZE = {"default": 4, "mirrored": 2}  # of a batch of a replica: four examples a step


def strategy_of(name: str) -> Any:
    return mirrored() if name == "mirrored" else None


def summarised(style: str) -> Any:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        mean = tf.reduce_mean(features)
        with tf.name_scope("v2"):
            tf.summary.scalar("mean", mean, description="of features")
            tf.summary.scalar("mean", mean + 100)  # the same tag: TensorFlow does not tell them apart, either
        tf.compat.v2.summary.scalar("own_step", mean, step=tf.cast(v1.train.get_global_step(), tf.int64) + 1000)
        with tf.summary.record_if(tf.equal(tf.cast(v1.train.get_global_step(), tf.int64) % 2, 1)):
            tf.summary.scalar("odd", mean)
        v1.summary.scalar("mean_of_v1", mean)
        v1.summary.scalar("elsewhere", mean, collections=["mine"])
        tf.summary.histogram("histogram", features)
        v1.summary.text("text", tf.as_string(features))
        return LINES[style](features, labels, mode, params)

    return model_fn


@pytest.mark.parametrize("style", LINES)
@pytest.mark.parametrize("strategy", slow_but(["default", "mirrored"], "mirrored"))
def test_scalars_are_of_all_examples_of_a_step(style: str, strategy: str, tmp_path: Path) -> None:
    config = RunConfig(train_distribute=strategy_of(strategy), save_summary_steps=1)
    # Steps 1 and 2 have four examples, step 3 has three: two of one replica and one of the other.
    Estimator(summarised(style), tmp_path, config).train(points(11, SIZE[strategy]))
    means = {1: 2.5, 2: 6.5, 3: 10.0}
    assert summarised_values(tmp_path, "mean_of_v1") == means
    events = [(one.step, one.value) for one in read_events(tmp_path) if one.tag == "v2/mean"]
    assert sorted(events) == sorted([*means.items(), *((step, mean + 100) for step, mean in means.items())])
    assert summarised_values(tmp_path, "own_step") == {step + 999: mean for step, mean in means.items()}
    assert summarised_values(tmp_path, "odd") == {2: 6.5}
    assert summarised_values(tmp_path, "elsewhere") == {}
    assert sorted(summarised_values(tmp_path, "text")) == [1, 2, 3]
    histograms = summarised_values(tmp_path, "histogram")
    # The last column counts: a histogram is of the first replica's examples.
    counts = {step: int(np.sum(value[:, 2])) for step, value in histograms.items()}
    assert counts == ({1: 4, 2: 4, 3: 3} if strategy == "default" else {1: 2, 2: 2, 3: 2})


def test_replica_without_an_example_has_no_part_in_a_scalar(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        tf.summary.scalar("inverse", tf.reduce_mean(1 / features))  # of a placeholder: 1/0
        return LINES["native"](features, labels, mode, params)

    config = RunConfig(train_distribute=mirrored(), save_summary_steps=1)
    Estimator(model_fn, tmp_path, config).train(points(3, 1))
    assert summarised_values(tmp_path, "inverse") == {1: 0.75, 2: pytest.approx(1 / 3)}


def test_summaries_that_model_fn_merges_for_its_scaffold_are_of_all_replicas(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        v1.summary.scalar("merged", tf.reduce_mean(features))
        scaffold = v1.train.Scaffold(summary_op=v1.summary.merge_all() if v1.get_collection("summaries") else None)
        return LINES["classic"](features, labels, mode, params)._replace(scaffold=scaffold)

    config = RunConfig(train_distribute=mirrored(), save_summary_steps=1)
    Estimator(model_fn, tmp_path, config).train(points(8, 2))
    assert summarised_values(tmp_path, "merged") == {1: 2.5, 2: 6.5}


def test_what_a_summary_waits_for_runs_in_steps_without_summaries_too(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        count = v1.get_variable("count", [], tf.int32, v1.zeros_initializer(), trainable=False, use_resource=True)
        with tf.control_dependencies([count.assign_add(1)]):
            tf.summary.scalar("mean", tf.reduce_mean(features))
        return LINES["native"](features, labels, mode, params)

    estimator = Estimator(model_fn, tmp_path, RunConfig(save_summary_steps=3))
    estimator.train(points(8, 2))
    assert estimator.get_variable_value("count") == 4
    assert list(summarised_values(tmp_path, "mean")) == [1, 3]


# --- metrics --------------------------------------------------------------------------------------------------------


def run(folder: Path, style: str = "native", strategy: str = "default", **config: Any) -> dict[int, dict[str, float]]:
    """Train on 1..23, four a step, with a point every two. Returns: step -> what the journal has of it."""
    settings = {"log_step_count_steps": 2, "train_metrics": True, "save_summary_steps": 1, **config}
    train_measured(folder, RunConfig(train_distribute=strategy_of(strategy), **settings), style)
    return journaled(folder)


# At weight 1 and y = 2x the error of an example is x. The weight moves, so later numbers are compared with each other.
@pytest.mark.parametrize("style", ["native", "classic"])
def test_metrics_of_training_are_those_of_the_steps_since_the_last_multiple_of_log_steps(
    style: str, tmp_path: Path
) -> None:
    found = run(tmp_path, style)
    assert sorted(found) == [1, 2, 4, 6]
    assert {step: values["train/largest"] for step, values in found.items()} == {
        1: 4,
        2: 6,  # of steps 1 and 2: the point at step 1 begins nothing anew
        4: 14,
        6: pytest.approx(149 / 7),
    }
    assert found[1]["train/mae"] == found[1]["train/pair"] == found[1]["train/kept"] == 2.5
    for step, values in found.items():
        assert values["train/pair"] == pytest.approx(values["train/kept"], rel=1e-6), step
    # The others go on: their value at the end is the mean over all examples.
    examples = {2: 8, 4: 8, 6: 7}
    whole = sum(found[step]["train/mae"] * number for step, number in examples.items()) / 23
    assert found[6]["train/kept"] == pytest.approx(whole, rel=1e-12)
    for name in KINDS:
        in_events = summarised_values(tmp_path / "model", f"train/{name}")
        assert in_events == pytest.approx({step: values[f"train/{name}"] for step, values in found.items()}, rel=1e-6)


def test_elements_of_short_arrays_are_metrics_of_training_and_longer_arrays_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        mean, update = v1.metrics.mean(labels)
        pairs = {"two": (tf.stack([mean, -mean]), update), "many": (mean * tf.ones([5, 7]), update)}
        return LINES["native"](features, labels, mode, params)._replace(eval_metric_ops=pairs)

    journal = journal_of(tmp_path / "journal.jsonl")
    config = RunConfig(log_step_count_steps=1, train_metrics=True)
    Estimator(model_fn, tmp_path, config, journal=journal).train(points(8, 2))
    found = [numbers for _, numbers in metrics_of_steps(tmp_path / "journal.jsonl")]
    assert all(numbers["train/two_0"] == -numbers["train/two_1"] > 0 for numbers in found)
    assert len(found) == 4 and not any("many" in name for name in found[0])
    messages.logged(caplog, "many")


@pytest.mark.parametrize("style", ["native", "classic"])
def test_metrics_of_training_do_not_depend_on_the_strategy_or_the_length_of_loops(style: str, tmp_path: Path) -> None:
    expected = run(tmp_path / "one", style)
    found = run(tmp_path / "two", style, "mirrored")
    assert found.keys() == expected.keys()
    for step, values in found.items():
        # What is largest is of each replica: a number that stands for a batch is weighted by its examples.
        for name, tolerance in (("mae", 1e-10), ("kept", 1e-10), ("pair", 1e-6)):  # metrics of v1 are float32
            found_value, value = values[f"train/{name}"], expected[step][f"train/{name}"]
            assert found_value == pytest.approx(value, rel=tolerance), (step, name)
    for tag in ("new", "old"):
        one, two = (summarised_values(tmp_path / folder / "model", tag) for folder in ("one", "two"))
        assert sorted(one) == [1, 2, 3, 4, 5, 6] and two == pytest.approx(one, rel=1e-6), "summaries are float32"
    looped = run(tmp_path / "loops", style, steps_per_loop=1)
    for step, values in expected.items():
        assert looped[step]["train/mae"] == values["train/mae"]
        assert looped[step]["train/loss"] == values["train/loss"]


@pytest.mark.parametrize("strategy", slow_but(SIZE, "default"))
def test_an_evaluation_in_between_leaves_the_metrics_of_training_alone(strategy: str, tmp_path: Path) -> None:
    expected = run(tmp_path / "alone", strategy=strategy)
    journal = journal_of(tmp_path / "events.jsonl")
    config = RunConfig(train_distribute=strategy_of(strategy), log_step_count_steps=2, save_checkpoints_steps=3)
    trainer = Estimator(measured, tmp_path / "model", config, params={"style": "native"}, journal=journal)
    evaluate = EvalSpec(wide_points(6, 2), steps=None, throttle_secs=0)
    train_and_evaluate(trainer, TrainSpec(wide_points(23, 4), max_steps=6), evaluate)
    journal.close()
    lines = metrics_of_steps(tmp_path / "events.jsonl")
    found = {step: values for step, values in lines if "train/kept" in values}
    assert found.keys() == expected.keys()
    for step, values in found.items():
        assert values["train/kept"] == expected[step]["train/kept"]
        assert values["train/pair"] == expected[step]["train/pair"]


def test_metrics_of_a_train_op_do_not_run_unless_they_are_asked_for(tmp_path: Path) -> None:
    counted: list[float] = []

    def count(x: Any) -> Any:
        counted.append(float(x))
        return x

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = measured(features, labels, mode, params)
        seen = tf.py_function(count, [features[0]], tf.float64)
        return spec._replace(eval_metric_ops={"seen": tf.reshape(seen, [])})

    for asked in (False, True):
        config = RunConfig(log_step_count_steps=1, train_metrics=asked)
        Estimator(model_fn, tmp_path / str(asked), config, params={"style": "classic"}).train(wide_points(8, 4))
        assert bool(counted) is asked
        assert summarised_values(tmp_path / str(asked), "train/seen") == ({1: 1.0, 2: 5.0} if asked else {})


def test_metrics_change_no_number_of_training(tmp_path: Path) -> None:
    with_them, without = run(tmp_path / "with", "classic"), run(tmp_path / "without", "classic", train_metrics=False)
    assert {step: one["train/loss"] for step, one in with_them.items()} == {
        step: one["train/loss"] for step, one in without.items()
    }
    assert not any("train/mae" in one for one in without.values())


def test_a_metric_with_a_name_of_the_runner_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        return LINES["native"](features, labels, mode, params)._replace(eval_metric_ops={"steps_per_sec": features})

    Estimator(model_fn, tmp_path).train(points())
    messages.logged(caplog, "steps_per_sec")


# --- steps with summaries within loops --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "style"),
    slow_but(itertools.product(["default", "mirrored"], LINES), ("default", "classic"), ("mirrored", "native")),
)
def test_loops_go_on_through_steps_with_summaries(style: str, strategy: str, tmp_path: Path) -> None:
    class Lengths(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            lengths.append(result.num_steps)

    found = {}
    for name, steps_per_loop, num_examples in (("one", 1, 47), ("many", 9, 47)):
        lengths: list[int] = []
        config = RunConfig(
            train_distribute=strategy_of(strategy),
            save_summary_steps=3,
            save_checkpoints_steps=100,
            log_step_count_steps=None,
            steps_per_loop=steps_per_loop,
        )
        trainer = Estimator(summarised(style), tmp_path / name, config)
        # Training ends with its input, at step 12: the last batch has three examples.
        trainer.train(points(num_examples, SIZE[strategy]), hooks=[Lengths()])
        events = [(one.tag, one.step, np.asarray(one.value).tolist()) for one in read_events(tmp_path / name)]
        events = [one for one in events if one[0] not in ("loss", "global_step/sec")]
        found[name] = (events, {one: trainer.get_variable_value(one) for one in trainer.get_variable_names()})
        assert max(lengths) == steps_per_loop or name == "many"
    one, many = found["one"][0], found["many"][0]
    assert {step for tag, step, _ in one if tag == "mean_of_v1"} == {1, 3, 6, 9, 12}
    # The first loop of a run ends with summaries: of nine steps, at the first step where they are due.
    late = sorted(str(event) for event in one if event[1] not in (1, 1001, 1000))
    assert sorted(str(event) for event in many if event[1] not in (1, 1001, 1000)) == late
    assert found["one"][1] == found["many"][1]
    assert 9 in lengths, "a loop that ends at no summary"
