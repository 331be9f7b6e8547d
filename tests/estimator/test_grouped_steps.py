"""Loops whose batches are fetched in groups: the numbers, the steps and the place in the input are those of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Every, Hook, Input, RunConfig
from runner.checkpoint import reader
from runner.data import wait_timer
from runner.data.batch_groups import GROUP_SIZE
from runner.estimator import loop_boundary
from runner.programs.train_loop import Loop, Steps
from runner.task.error_report import explain
from tests.integration.test_exactness import LossRecorder
from tests.support.line import line, mirrored, read_events, steps_of
from tests.support.messages import Messages
from tests.support.models import classic, data, native
from tests.support.tiers import slow_but

STEPS_PER_LOOP = 53


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each loop over groups; these begin with the second loop, however long a step takes."""
    monkeypatch.setattr(loop_boundary, "_GROUPED_STEP_SECS", 1e9)
    monkeypatch.setattr(loop_boundary, "_GROUPED_LOOP_STEPS", 5)
    monkeypatch.setattr(loop_boundary, "_GROUPED_STEPS", 20)
    # A loop whose waiting is timed takes batches one by one. A slow machine would come to the first of them here.
    monkeypatch.setattr(wait_timer, "FIRST_SECS", math.inf)
    taken: list[int] = []
    call = Loop.__call__

    def noted(self: Loop, iterator: Any, asked: Steps) -> Any:
        result = call(self, iterator, asked)
        if self._in_groups and asked.number:  # not `prepare`
            taken.append(result.num_steps)
        return result

    monkeypatch.setattr(Loop, "__call__", noted)
    return taken


def shuffled(epochs: int | None = None) -> tf.data.Dataset:
    """Fifty examples in batches of seven across epochs, in another order in each; the last batch may be smaller."""
    return tf.data.Dataset.from_tensor_slices(data()).shuffle(30, seed=3).repeat(epochs).batch(7)


def train(
    model_dir: Path, input_fn: Any, max_steps: int | None, model: Any = native, hooks: Any = (), **config: Any
) -> list[float]:
    settings: dict[str, Any] = {"steps_per_loop": STEPS_PER_LOOP, "tensorboard": False, **config}
    estimator = Estimator(model, model_dir, RunConfig(tf_random_seed=7, **settings))
    estimator.train(input_fn, hooks=[recorder := LossRecorder(), *hooks], max_steps=max_steps)
    return np.concatenate(recorder.losses).tolist()


def contents(model_dir: Path) -> tuple[dict[str, Any], Any]:
    """Return (the variables of the latest checkpoint, the place in its input)."""
    latest = tf.train.latest_checkpoint(str(model_dir))
    found = reader.Reader(latest)
    values = {name: np.asarray(found.get(name)).tolist() for name in found.names()}
    return values, found.extra()["input"]


class Killer(Hook):
    """Ends the run after a step, without a checkpoint."""

    def __init__(self, step: int) -> None:
        self.every = Every(steps=step)

    def after_step(self, run: Any, result: Any) -> None:
        if self.every.steps == result.last_step:
            raise RuntimeError("killed")


@pytest.mark.parametrize("model", slow_but([native, classic], classic))
def test_numbers_are_those_of_single_batches_also_of_a_run_that_is_resumed_within_an_epoch(
    tmp_path: Path, grouped: list[int], monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    first = train(tmp_path / "grouped", shuffled, 150, model)
    second = train(tmp_path / "grouped", shuffled, 300, model)
    assert sum(grouped) > 190  # all but the first loop, or two, of each call
    assert all(steps % GROUP_SIZE for steps in grouped)
    saved = train(tmp_path / "saving", shuffled, 300, model, save_checkpoints_steps=90)  # 90 = 5 groups and 10 steps
    monkeypatch.setattr(loop_boundary, "_GROUPED_STEPS", 1e9)
    single = train(tmp_path / "single", shuffled, 300, model)
    assert first + second == saved == single

    with pytest.raises(RuntimeError, match="killed"):  # which saves nothing: the latest checkpoint is of step 90
        train(tmp_path / "killed", shuffled, 300, model, hooks=[Killer(150)], save_checkpoints_steps=90)
    assert contents(tmp_path / "killed")[1]["elements"] == 90
    monkeypatch.setattr(loop_boundary, "_GROUPED_STEPS", 20)
    assert train(tmp_path / "killed", shuffled, 300, model) == single[90:]
    monkeypatch.setattr(loop_boundary, "_GROUPED_STEPS", 1e9)

    expected = contents(tmp_path / "single")
    assert all(contents(tmp_path / name) == expected for name in ("grouped", "saving", "killed"))
    # Whoever resumes either of them without groups has the same examples before it.
    assert train(tmp_path / "grouped", shuffled, 330, model) == train(tmp_path / "single", shuffled, 330, model)


@pytest.mark.parametrize("epochs", [21, 23])  # 150 batches: a loop ends with the data; 164.3: within a group
def test_ends_with_the_data_after_its_last_batch(tmp_path: Path, grouped: list[int], epochs: int) -> None:
    def unknown_size() -> tf.data.Dataset:
        return shuffled(epochs).filter(lambda x, y: tf.size(y) > 0)

    batches = -(-50 * epochs // 7)
    for name, input_fn in (("known", lambda: shuffled(epochs)), ("unknown", unknown_size)):
        losses = train(tmp_path / name, input_fn, None)
        assert len(losses) == batches
        assert sum(grouped) > 90
        grouped.clear()
        values, place = contents(tmp_path / name)
        assert values["global_step"] == batches
        assert (place["ended"], place["elements"]) == (True, batches)


def summarised(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Native, with a scalar and a histogram, whose shape the graph does not know."""
    spec = native(features, labels, mode)
    tf.summary.scalar("error", tf.reduce_mean(labels))
    tf.summary.histogram("labels", labels)
    return spec


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", slow_but([1, 7, 40], 7)
)  # steps of a group with summaries: all, two or three, some none
def test_steps_with_summaries_are_taken_within_groups(
    tmp_path: Path, grouped: list[int], monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    def input_fn() -> tf.data.Dataset:
        return shuffled(23)

    config = {"save_summary_steps": every, "save_checkpoints_steps": 90, "tensorboard": True}
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "killed", input_fn, None, summarised, hooks=[Killer(150)], **config)
    assert sum(grouped) == 150 - 1, "all but the first step, whose metrics are a point"
    resumed = train(tmp_path / "killed", input_fn, None, summarised, **config)
    losses = train(tmp_path / "grouped", input_fn, None, summarised, **config)
    assert len(losses) == 165
    monkeypatch.setattr(loop_boundary, "_GROUPED_STEPS", 1e9)
    single = train(tmp_path / "single", input_fn, None, summarised, **config)
    assert losses == single
    assert resumed == single[90:]
    assert contents(tmp_path / "grouped") == contents(tmp_path / "killed") == contents(tmp_path / "single")
    found, expected = (
        [
            (one.step, one.tag, np.asarray(one.value).tolist())
            for one in read_events(tmp_path / name)
            if one.tag in ("error", "labels")
        ]
        for name in ("grouped", "single")
    )
    assert found == expected
    assert steps_of(tmp_path / "grouped", "labels") == steps_of(tmp_path / "grouped", "error")


def by_rows(epochs: int) -> Input:
    """Batches of eight, of which each of two replicas takes four rows; of the last one, as many as there are."""

    def input_fn(params: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(data()).shuffle(30, seed=3).repeat(epochs).batch(params["batch_size"])

    return Input(input_fn, params={}, batch_size=8)


def in_turn(epochs: int) -> Callable[[], tf.data.Dataset]:
    """Batches of seven, each for one of two replicas; the last step has one for the first replica alone."""
    return lambda: shuffled(epochs)


@pytest.mark.parametrize(
    ("model", "input_of", "epochs", "steps"),
    [pytest.param(native, by_rows, 21, 132, marks=pytest.mark.slow), (classic, in_turn, 23, 83)],
)
def test_two_replicas_on_cpus_take_the_steps_of_single_batches(
    tmp_path: Path,
    grouped: list[int],
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    input_of: Callable[[int], Any],
    epochs: int,
    steps: int,
) -> None:
    config = {"train_distribute": mirrored(), "save_checkpoints_steps": 30}
    losses = train(tmp_path / "grouped", input_of(epochs), None, model, **config)
    assert sum(grouped) > steps / 2
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "killed", input_of(epochs), None, model, hooks=[Killer(60)], **config)
    resumed = train(tmp_path / "killed", input_of(epochs), None, model, **config)

    monkeypatch.setattr(loop_boundary, "_GROUPED_STEPS", 1e9)
    single = train(tmp_path / "single", input_of(epochs), None, model, **config)
    assert len(single) == steps
    assert losses == single
    assert resumed == single[30:]
    expected = contents(tmp_path / "single")
    assert expected[1]["ended"]
    assert all(contents(tmp_path / name) == expected for name in ("grouped", "killed"))


def numbers(bad: int, value: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[], tf.data.Dataset]:
    """A hundred thousand batches of (1, 2), of which the one numbered `bad` (from 1) is what `value` makes of it."""

    def input_fn() -> tf.data.Dataset:
        def batch(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x = tf.ones([1])
            x = tf.cond(number == bad, lambda: value(x), lambda: x)
            return x, 2 * tf.ones([1])

        return tf.data.Dataset.range(1, 100_000).map(batch)

    return input_fn


def test_stops_after_the_step_that_became_nan(tmp_path: Path, grouped: list[int], messages: Messages) -> None:
    with messages.raised(tf.compat.v1.train.NanLossDuringTrainingError):
        train(tmp_path, numbers(80, lambda x: x * np.nan), 1000, line)
    assert grouped == [80 - STEPS_PER_LOOP]


@pytest.mark.parametrize(
    "stays_single", [{"nan": "rollback"}, {"hooks": [tf.compat.v1.train.NanTensorHook(None, fail_on_nan_loss=False)]}]
)
def test_where_training_goes_on_after_a_nan_batches_are_fetched_one_by_one(
    tmp_path: Path, grouped: list[int], stays_single: dict[str, Any]
) -> None:
    train(tmp_path, numbers(80, lambda x: x * np.nan), 160, line, save_checkpoints_steps=60, **stays_single)
    assert grouped == []


def test_goes_through_a_nan_that_is_ignored(tmp_path: Path, grouped: list[int]) -> None:
    losses = train(tmp_path, numbers(80, lambda x: x * np.nan), 160, line, nan="ignore")
    assert np.isnan(losses).tolist() == [step >= 80 for step in range(1, 161)]
    assert grouped == [53, 53]


def test_an_error_of_the_data_says_the_same(
    tmp_path: Path, grouped: list[int], monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    failing = numbers(80, lambda x: tf.ensure_shape(tf.io.parse_tensor("damaged record", tf.float32), [1]))
    errors = []
    for name in ("grouped", "single"):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            train(tmp_path / name, failing, 1000, line, save_checkpoints_steps=60)
        errors.append(raised.value)
        assert contents(tmp_path / name)[0]["global_step"] == 60
        monkeypatch.setattr(loop_boundary, "_GROUPED_STEPS", 1e9)
    assert grouped == [7]  # 53 + 7 = 60
    ours, single = (explain(error) for error in errors)
    assert ours.said == single.said
    assert "Could not parse" in ours.said
    assert errors[0].__notes__ == errors[1].__notes__
    messages.same("note", errors[0].__notes__[0])


def test_hooks_are_called_at_their_steps(tmp_path: Path, grouped: list[int]) -> None:
    class Steps(Hook):
        every = Every(steps=25)

        def __init__(self) -> None:
            self.steps: list[int] = []

        def after_step(self, run: Any, result: Any) -> None:
            self.steps.append(result.last_step)

    class Session(tf.compat.v1.train.SessionRunHook):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def before_run(self, run_context: Any) -> Any:
            step = tf.compat.v1.train.get_global_step(run_context.session.graph)
            return tf.compat.v1.train.SessionRunArgs(step)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.steps.append(int(run_values.results))

    native_hook, session_hook = Steps(), Session()
    train(tmp_path / "native", shuffled, 100, hooks=[native_hook])
    assert native_hook.steps[-4:] == [25, 50, 75, 100]
    assert grouped == [24, 25, 25, 25]
    grouped.clear()
    train(tmp_path / "session", shuffled, 100, classic, hooks=[session_hook])
    assert len(session_hook.steps) == 100
    assert grouped == []


def with_kernel_random(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    spec = classic(features, labels, mode)
    noise = tf.raw_ops.RandomUniform(shape=[1], dtype=tf.float32, seed=3, seed2=4)
    assert spec.loss is not None
    return EstimatorSpec(mode, loss=spec.loss + 0 * tf.reduce_sum(noise), train_op=spec.train_op)


def of_python() -> tf.data.Dataset:
    features, labels = data()
    spec = (tf.TensorSpec([7, 4]), tf.TensorSpec([7, 1]))
    batches = [(features[:7], labels[:7])] * 200
    return tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)


@pytest.mark.parametrize(("model", "input_fn"), [(with_kernel_random, shuffled), (native, of_python)])
def test_what_a_group_might_change_is_fetched_batch_by_batch(
    tmp_path: Path, grouped: list[int], model: Any, input_fn: Any
) -> None:
    """Random numbers of kernels would begin anew; a Python function may look at what is trained."""
    train(tmp_path, input_fn, 120, model)
    assert grouped == []


def test_short_runs_and_slow_steps_build_no_second_loop() -> None:
    asked: list[bool] = []
    length = loop_boundary.LoopLength(None)
    pace = loop_boundary.Pace(length, lambda: not asked.append(True), wait_timer.WaitTimer(is_on=False))  # type: ignore[func-returns-value]

    def in_groups(num_steps: int, secs_per_step: float, remaining: float) -> bool:
        length.took(1, secs_per_step)
        return pace.next_loop(num_steps, remaining).in_groups

    assert not in_groups(5_000, 50e-6, remaining=5_000)
    assert not in_groups(100, 50e-6, remaining=1e6)
    assert not in_groups(1_000, 2e-3, remaining=1e6)
    assert not asked
    assert in_groups(1_000, 50e-6, remaining=1e6)
    assert in_groups(1_000, 50e-6, remaining=1_000)
    assert len(asked) == 1
