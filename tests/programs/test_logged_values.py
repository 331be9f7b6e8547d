"""What `runner.log` reports of a step, the learning rate, the norm of the gradient, and summaries in the journal."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import runner
from runner import Estimator, EstimatorSpec, ModeKeys, RunConfig
from runner.system.console import LoopReport, Progress
from tests.support.journal import journal_of, metrics_of_steps
from tests.support.line import Weight, mirrored, points, read_events
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1

SIZE = {"default": 4, "mirrored": 2}  # of a batch of a replica: four examples a step
TWELVE = 12  # examples: three steps


def strategy_of(name: str) -> Any:
    return mirrored() if name == "mirrored" else None


def optimizer_of(name: str, step: Any) -> Any:
    decayed = v1.train.inverse_time_decay(0.01, step, 1, 1.0)
    makers = {
        "keras": lambda: keras.optimizers.SGD(0.01),
        "keras schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.InverseTimeDecay(0.01, 1, 1.0)),
        "v1": lambda: v1.train.MomentumOptimizer(0.01, 0.0),
        "v1 decay": lambda: v1.train.GradientDescentOptimizer(decayed),
    }
    return makers[name]()


OPTIMIZERS = ("keras", "keras schedule", "v1", "v1 decay")


def logging_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """y = weight * x from weight 0. params: `optimizer`, `style` (native), `log` (True)."""
    predictions = tf.cast(Weight(name="line")(features), tf.float32)  # in mixed precision it is a half
    error = tf.abs(predictions - labels)
    loss = tf.square(predictions - labels)
    if params.get("log", True):
        runner.log({"largest": tf.reduce_max(features), "error": error}, on_progress=True)
        runner.log({"half": 0.5})
        tf.summary.scalar("mean_x", tf.reduce_mean(features))
    optimizer = optimizer_of(params.get("optimizer", "keras"), v1.train.get_global_step())
    if mode == ModeKeys.TRAIN and params.get("style") == "classic":
        loss = tf.reduce_mean(loss)
        return EstimatorSpec(mode, predictions, loss, optimizer.minimize(loss, v1.train.get_global_step()))
    return EstimatorSpec(mode, predictions, loss, optimizer=optimizer)


class Shown(Progress):
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def update(self, loop: LoopReport) -> None:
        self.logged.append((loop.step, dict(loop.logged)))


def train(folder: Path, params: Any, strategy: str = "default", **settings: Any) -> dict[int, dict[str, float]]:
    """Train three steps, four examples each; go on where the folder has a run. Returns: step -> all the journal has."""
    settings = {"log_step_count_steps": 1, "save_summary_steps": 1, **settings}
    steps = settings.pop("steps", None)
    journal = journal_of(folder / "events.jsonl")
    config = RunConfig(train_distribute=strategy_of(strategy), **settings)
    trainer = Estimator(logging_fn, folder / "model", config, params=params, journal=journal)
    trainer.train(points(TWELVE, SIZE[strategy]), steps=steps)
    journal.close()
    return journaled(folder)


def journaled(folder: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for step, values in metrics_of_steps(folder / "events.jsonl"):
        for name, value in values.items():
            assert name not in found.setdefault(step, {}), f"{name} twice at {step}"
            found[step][name] = value
    return found


@pytest.mark.parametrize("strategy", SIZE)
def test_logged_values_are_those_of_the_step_over_all_replicas(strategy: str, tmp_path: Path) -> None:
    found = train(tmp_path, {}, strategy)
    assert sorted(found) == [1, 2, 3]
    # At two replicas each has a largest of its own, and they count alike: 2 and 4 are 3.
    largest = {"default": [4, 8, 12], "mirrored": [3, 7, 11]}[strategy]
    assert [found[step]["train/largest"] for step in (1, 2, 3)] == largest
    assert found[1]["train/error"] == 5.0  # at weight 0 the error is y = 2x, of x = 1..4
    assert [found[step]["train/half"] for step in (1, 2, 3)] == [0.5] * 3
    assert [found[step]["train/mean_x"] for step in (1, 2, 3)] == [2.5, 6.5, 10.5]
    in_events = {one.step: one.value for one in read_events(tmp_path / "model") if one.tag == "train/error"}
    assert in_events == pytest.approx({step: one["train/error"] for step, one in found.items()})


def test_logged_values_are_those_of_the_step_and_not_of_the_steps_between(tmp_path: Path) -> None:
    found = train(tmp_path, {}, log_step_count_steps=3, save_summary_steps=2)
    assert {step: one.get("train/largest") for step, one in found.items()} == {1: 4, 2: None, 3: 12}
    assert {step: one.get("train/mean_x") for step, one in found.items()} == {1: 2.5, 2: 6.5, 3: None}


def test_points_of_a_long_loop_are_those_of_single_steps(tmp_path: Path) -> None:
    def run(folder: Path, steps_per_loop: int) -> tuple[Any, Any]:
        journal = journal_of(folder / "events.jsonl")
        config = RunConfig(log_step_count_steps=1, save_summary_steps=1, steps_per_loop=steps_per_loop)
        trainer = Estimator(
            logging_fn, folder / "model", config, params={"optimizer": "keras schedule"}, journal=journal
        )
        trainer.train(points(TWELVE, 4, repeat=True), max_steps=20)
        journal.close()
        found = journaled(folder)
        values = {step: {k: v for k, v in one.items() if "per_sec" not in k} for step, one in found.items()}
        events = [
            (one.step, one.tag, one.value) for one in read_events(folder / "model") if one.tag.startswith("train/")
        ]
        return values, events

    one, many = run(tmp_path / "one", 1), run(tmp_path / "many", 10)
    assert many[0] == one[0] and len(one[0]) == 20
    assert sorted(many[1]) == sorted(one[1]) and len(one[1]) == 20 * 4


def test_progress_shows_what_is_logged_on_it(tmp_path: Path) -> None:
    shown = Shown()
    config = RunConfig(log_step_count_steps=1, steps_per_loop=1)
    Estimator(logging_fn, tmp_path, config, params={}, progress=shown).train(points(TWELVE, 4))
    assert [(step, sorted(logged), logged["largest"]) for step, logged in shown.logged] == [
        (step, ["error", "largest"], 4.0 * step) for step in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("style", "optimizer"),
    [*(("native", one) for one in OPTIMIZERS), *(("classic", one) for one in OPTIMIZERS if one.startswith("v1"))],
)
def test_the_learning_rate_is_that_of_the_step(style: str, optimizer: str, tmp_path: Path) -> None:
    found = train(tmp_path, {"optimizer": optimizer, "style": style})
    decays = optimizer in ("keras schedule", "v1 decay")
    expected = [0.01, 0.005, 0.01 / 3] if decays else [0.01] * 3
    assert [found[step]["train/learning_rate"] for step in (1, 2, 3)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("optimizer", "strategy"),
    slow_but(itertools.product(OPTIMIZERS, SIZE), *((one, "mirrored") for one in OPTIMIZERS), ("keras", "default")),
)
def test_the_learning_rate_is_reported_as_it_is_scaled_and_warmed_up(
    optimizer: str, strategy: str, tmp_path: Path
) -> None:
    found = train(tmp_path, {"optimizer": optimizer}, strategy, warmup_steps=2, learning_rate_scaling="linear")
    replicas = {"default": 1, "mirrored": 2}[strategy]
    decays = [1, 1 / 2, 1 / 3] if optimizer in ("keras schedule", "v1 decay") else [1, 1, 1]
    warmed = [1 + (replicas - 1) * min(step / 2, 1) for step in range(3)]
    expected = [0.01 * one * decay for one, decay in zip(warmed, decays, strict=True)]
    assert [found[step]["train/learning_rate"] for step in (1, 2, 3)] == pytest.approx(expected)


PARTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "clipped": {"clip_global_norm": 0.5},
    "micro-batches": {"gradient_accumulation": 2},
    "compiled": {"jit": True},
}


@pytest.mark.parametrize(
    ("parts", "strategy"),
    slow_but(
        itertools.product(PARTS, SIZE), ("whole", "default"), ("clipped", "mirrored"), ("micro-batches", "mirrored")
    ),
)
def test_the_norm_of_the_gradient_is_that_of_the_global_batch_before_clipping(
    parts: str, strategy: str, tmp_path: Path
) -> None:
    settings = PARTS[parts]
    params = {"log": False, "optimizer": "keras schedule"}
    found = train(tmp_path / "with", params, strategy, log_gradient_norm=True, **settings)
    # The loss is (w x - 2 x)^2 at w = 0: its gradient is -4 x^2, of x = 1..4.
    assert found[1]["train/gradient_norm"] == pytest.approx(4 * 7.5, rel=1e-6)
    assert all(math.isfinite(found[step]["train/gradient_norm"]) for step in (1, 2, 3))
    assert [found[step]["train/learning_rate"] for step in (1, 2, 3)] == pytest.approx([0.01, 0.005, 0.01 / 3])
    without = train(tmp_path / "without", params, strategy, **settings)
    assert [one["train/loss"] for one in without.values()] == [one["train/loss"] for one in found.values()]
    assert "train/gradient_norm" not in without[1]


def test_a_step_that_a_loss_scale_leaves_out_has_no_norm_and_no_rate(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "events.jsonl")
    config = RunConfig(precision="mixed_float16", log_gradient_norm=True, log_step_count_steps=1)
    params = {"log": False, "optimizer": "keras schedule"}
    trainer = Estimator(logging_fn, tmp_path / "model", config, params=params, journal=journal)
    trainer.train(points(4, 4, repeat=True), max_steps=2)  # a scale of 2^15 is too much for the first gradients
    journal.close()
    lines = metrics_of_steps(tmp_path / "events.jsonl")
    found = [values for _, values in lines]
    by_step = {step: values for step, values in lines if "train/gradient_norm" in values}
    assert len(found) > len(by_step) == 2 and by_step[1]["train/gradient_norm"] == pytest.approx(30, rel=1e-2)
    assert [one["train/learning_rate"] for one in by_step.values()] == pytest.approx([0.01, 0.005])
    assert "nan" not in str([one.get("train/gradient_norm") for one in found])


def test_a_run_that_resumes_has_neither_a_hole_nor_a_point_more(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"log_step_count_steps": 2, "save_summary_steps": 2}
    whole = train(tmp_path / "whole", {}, **settings)
    train(tmp_path / "parts", {}, steps=2, **settings)
    parts = train(tmp_path / "parts", {}, steps=1, **settings)

    def shape(found: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
        return {step: {k: v for k, v in one.items() if "per_sec" not in k} for step, one in found.items()}

    assert shape(parts) == shape(whole)


def test_with_nothing_logged_nothing_is_in_the_graph(tmp_path: Path) -> None:
    def operations(**settings: Any) -> list[str]:
        names: list[str] = []

        class Look(runner.Hook):
            def begin(self, run: Any) -> None:
                names.extend(sorted(one.type for one in run._setup.program.trace.graph.get_operations()))

        config = RunConfig(save_summary_steps=None, **settings)
        model = Estimator(logging_fn, tmp_path / str(len(settings)), config, params={"log": False})
        model.train(points(TWELVE, 4), hooks=[Look()])
        return names

    assert operations() == operations(log_step_count_steps=None)


def logged_and_returned(x: Any) -> Any:
    runner.log({"x": x})
    return x


@pytest.mark.parametrize(
    "logged",
    [
        lambda x: runner.log({"x": tf.as_string(x)}),
        lambda x: [logged_and_returned(x) for _ in range(2)],
        lambda x: runner.log({"mae": x}),
        lambda x: tf.cond(x[0] > 0, lambda: logged_and_returned(x), lambda: x),
        lambda x: runner.log({"": x}),
    ],
    ids=["text", "twice", "metric", "branch", "no name"],
)
def test_what_cannot_be_logged_is_refused(logged: Any, tmp_path: Path, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        logged(features)
        spec = logging_fn(features, labels, mode, {"log": False})
        return spec._replace(eval_metric_ops={"mae": features})

    with messages.raised(ValueError):
        Estimator(model_fn, tmp_path, params={}).train(points(TWELVE, 4))


def test_outside_of_model_fn_it_says_that_it_has_no_effect(
    caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    runner.log({"x": 1.0})
    messages.logged(caplog)


def test_two_optimizers_have_two_rates(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        a, b = (v1.get_variable(name, [], initializer=v1.zeros_initializer()) for name in "ab")
        loss = tf.reduce_mean(tf.square(a * features + b - labels))
        first = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step(), var_list=[a])
        second = v1.train.AdamOptimizer(0.25).minimize(loss, var_list=[b])
        return EstimatorSpec(mode, loss=loss, train_op=tf.group(first, second))

    journal = journal_of(tmp_path / "events.jsonl")
    Estimator(model_fn, tmp_path / "model", RunConfig(), journal=journal).train(points(4, 4))
    journal.close()
    found = journaled(tmp_path)[1]
    assert (found["train/learning_rate_1"], found["train/learning_rate_2"]) == (pytest.approx(0.01), 0.25)
    assert np.isfinite(found["train/loss"])
