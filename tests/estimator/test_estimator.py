"""The Estimator: what tf.estimator's did, with its argument rules; deviations are tests of their own."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner import Estimator, EstimatorSpec, Every, Hook, Input, ModeKeys, RunConfig
from runner.system.console import Progress
from tests.support.journal import journal_of, metrics_of_steps, recorded
from tests.support.line import LINES, line, mirrored, points, read_events, steps_of
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1
X = np.arange(1, 9, dtype=np.float32)


def estimator(model_dir: Path, model_fn: Any = line, params: dict[str, Any] | None = None, **config: Any) -> Estimator:
    return Estimator(model_fn, model_dir, RunConfig(**config), params)


def step_of(trainer: Estimator) -> int:
    return int(trainer.get_variable_value("global_step"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Estimator:
    """At step 10, with checkpoints of steps 0, 5 and 10. Not to be trained further."""
    trainer = estimator(tmp_path_factory.mktemp("trained"), save_checkpoints_steps=5)
    return trainer.train(points(repeat=True), steps=10)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Estimator:
    """A weight of 1.5 that does not learn: the error of (x, 2x) is x / 2."""
    trainer = estimator(tmp_path_factory.mktemp("halves"), params={"start": 1.5, "learning_rate": 0.0})
    return trainer.train(points(), steps=1)


# --- construction -------------------------------------------------------------------------------------------------


def test_model_dir_comes_from_the_argument_or_the_config(tmp_path: Path) -> None:
    assert Estimator(line, tmp_path).model_dir == str(tmp_path)
    assert Estimator(line, config=RunConfig(model_dir=str(tmp_path))).model_dir == str(tmp_path)
    both = Estimator(line, tmp_path, RunConfig(model_dir=str(tmp_path)))
    assert both.model_dir == both.config.model_dir == str(tmp_path)


def test_two_different_model_dirs_are_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        Estimator(line, "a", RunConfig(model_dir="b"))


def test_empty_model_dir_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        Estimator(line, "")


def test_without_model_dir_it_is_a_temporary_one_and_says_so(
    caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    with caplog.at_level(logging.WARNING, logger="runner"):
        trainer = Estimator(line)
    assert os.path.isdir(trainer.model_dir) and trainer.config.model_dir == trainer.model_dir
    messages.logged(caplog, trainer.model_dir, hide=re.escape(trainer.model_dir))


def test_params_are_copied(tmp_path: Path) -> None:
    params = {"start": 1.0, "deep": {"width": [1]}}
    trainer = Estimator(line, tmp_path, params=params)
    params["deep"]["width"].append(2)  # type: ignore[index]
    trainer.params["deep"]["width"].append(3)
    assert trainer.params == {"start": 1.0, "deep": {"width": [1]}}


def test_config_of_another_type_is_refused(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        Estimator(line, tmp_path, config={"model_dir": "a"})  # type: ignore[arg-type]


def test_model_fn_is_checked_at_once(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        Estimator(lambda features, mode, width: None, tmp_path)


def test_constructing_one_writes_nothing(tmp_path: Path) -> None:
    trainer = Estimator(line, tmp_path / "new")
    assert trainer.latest_checkpoint() is None and not (tmp_path / "new").exists()


# --- train --------------------------------------------------------------------------------------------------------


def test_training_goes_on_where_the_last_call_stopped(tmp_path: Path) -> None:
    trainer = estimator(tmp_path)
    assert trainer.train(points(repeat=True), steps=5) is trainer
    assert step_of(trainer) == 5
    trainer.train(points(repeat=True), steps=5)
    assert step_of(trainer) == 10
    estimator(tmp_path).train(points(repeat=True), steps=5)
    assert step_of(trainer) == 15


def test_max_steps_counts_from_the_start_of_the_model(tmp_path: Path) -> None:
    calls = []

    def input_fn() -> Any:
        calls.append(1)
        return points(repeat=True)()

    trainer = estimator(tmp_path)
    for max_steps, steps, num_calls in ((5, 5, 1), (5, 5, 1), (4, 5, 1), (7, 7, 2)):
        trainer.train(input_fn, max_steps=max_steps)
        assert (step_of(trainer), len(calls)) == (steps, num_calls)
    assert trainer.train_run(input_fn, max_steps=7) is None


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["steps", "max_steps"])
def test_steps_that_are_not_positive_are_refused(name: str, value: int, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        estimator(tmp_path).train(points(), **{name: value})  # type: ignore[arg-type]


def test_steps_and_max_steps_together_are_refused(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        estimator(tmp_path).train(points(), steps=1, max_steps=2)


def test_training_ends_with_the_input_and_saves_its_last_step(tmp_path: Path) -> None:
    trainer = estimator(tmp_path, save_checkpoints_steps=3)
    run = trainer.train_run(points(8, 2))
    assert run is not None and (run.global_step, run.examples) == (4, 8)
    assert saved_steps(tmp_path) == [0, 3, 4]
    trainer.train(points(8, 2))  # from the beginning of the input, as it was read to its end
    assert step_of(trainer) == 8


def saved_steps(model_dir: Path) -> list[int]:
    names = [re.fullmatch(r"model.ckpt-(\d+).index", name) for name in os.listdir(model_dir)]
    return sorted(int(name[1]) for name in names if name)


def test_batches_of_any_size_are_trained_on(tmp_path: Path) -> None:
    run = estimator(tmp_path).train_run(points(7, 3))
    assert run is not None and (run.global_step, run.examples) == (3, 7)


def five_examples(**batching: Any) -> tf.data.Dataset:
    inputs, targets = [[1.0]] * 5, [[2.0]] * 5
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8, **batching)


def of_unknown_size() -> tf.data.Dataset:
    return five_examples().unbatch().filter(lambda x, y: x[0] > 5).batch(8, drop_remainder=True)


EMPTY = {
    "no batches": lambda: points()().take(0),
    "not one full batch": lambda: five_examples(drop_remainder=True),
    "all left out": of_unknown_size,
    "with a batch size": Input(lambda params: five_examples(drop_remainder=True), batch_size=8),
}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
def test_training_on_an_empty_input_is_refused_each_time(empty: Any, tmp_path: Path, messages: Messages) -> None:
    trainer = estimator(tmp_path)
    with messages.raised(ValueError):
        trainer.train(empty)
    # The checkpoint of step 0 does not say that the input has been read to its end.
    with messages.raised(ValueError):
        trainer.train_run(empty, once=True)
    assert step_of(trainer) == 0


@pytest.mark.parametrize("empty", list(EMPTY.values())[:3], ids=list(EMPTY)[:3])
def test_going_on_with_an_empty_input_is_refused(empty: Any, tmp_path: Path, messages: Messages) -> None:
    trainer = estimator(tmp_path).train(points(), steps=2)
    with messages.raised(ValueError):
        trainer.train(empty, steps=2)
    assert step_of(trainer) == 2


@pytest.mark.parametrize("max_epochs", [None, 1])
def test_an_input_that_was_read_to_its_end_before_is_finished(max_epochs: int | None, tmp_path: Path) -> None:
    def of_unknown_size() -> tf.data.Dataset:
        return points()().filter(lambda *batch: True)

    for name, input_fn in {"known": points(), "unknown": of_unknown_size}.items():
        step = step_of(estimator(tmp_path / name).train(input_fn, max_epochs=max_epochs))
        again = estimator(tmp_path / name)
        assert again.train_run(input_fn, once=True, max_epochs=max_epochs) is None
        assert step_of(again) == step > 0


def test_checkpoint_state_file_holds_relative_paths(trained: Estimator) -> None:
    state = tf.train.get_checkpoint_state(trained.model_dir)
    text = Path(trained.model_dir, "checkpoint").read_text()
    assert "/" not in text and 'model_checkpoint_path: "model.ckpt-10"' in text
    assert [Path(path).name for path in state.all_model_checkpoint_paths] == [f"model.ckpt-{n}" for n in (0, 5, 10)]


def test_no_more_checkpoints_are_kept_than_asked_for(tmp_path: Path) -> None:
    estimator(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=2).train(points(repeat=True), steps=7)
    assert saved_steps(tmp_path) == [6, 7]


def test_renamed_model_dir_resumes(tmp_path: Path) -> None:
    estimator(tmp_path / "old").train(points(repeat=True), steps=5)
    os.rename(tmp_path / "old", tmp_path / "new")
    trainer = estimator(tmp_path / "new")
    assert trainer.latest_checkpoint() == str(tmp_path / "new" / "model.ckpt-5")
    assert trainer.train(points(repeat=True), steps=5).evaluate(points())["global_step"] == 10
    assert not (tmp_path / "old").exists()


def test_latest_checkpoint_is_none_before_training_and_then_in_model_dir(tmp_path: Path, trained: Estimator) -> None:
    assert estimator(tmp_path).latest_checkpoint() is None
    assert trained.latest_checkpoint() == os.path.join(trained.model_dir, "model.ckpt-10")


def test_loss_is_in_the_event_file_without_user_code(tmp_path: Path) -> None:
    params = {"start": 1.0, "learning_rate": 0.0}
    estimator(tmp_path, params=params, save_summary_steps=5).train(points(8, 8, repeat=True), steps=12)
    losses = [event for event in read_events(tmp_path) if event.tag == "loss"]
    assert [event.step for event in losses] == [1, 5, 10]
    assert [event.value for event in losses] == pytest.approx([np.mean(X**2)] * 3)
    assert steps_of(tmp_path, "global_step/sec")[-1] == 10


def test_without_summaries_there_is_no_event_file(tmp_path: Path) -> None:
    estimator(tmp_path, save_summary_steps=None).train(points(), steps=2)
    assert read_events(tmp_path) == []


class Listener(tf.compat.v1.train.CheckpointSaverListener):
    """Notes what it is told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self._stop_at = stop_at

    def begin(self) -> None:
        self.calls.append("begin")

    def before_save(self, session: Any, global_step_value: int) -> None:
        self.calls.append(("before", global_step_value))

    def after_save(self, session: Any, global_step_value: int) -> bool:
        self.calls.append(("after", global_step_value))
        return global_step_value == self._stop_at

    def end(self, session: Any, global_step_value: int) -> None:
        self.calls.append(("end", global_step_value))


def saved(*steps: int) -> list[Any]:
    return [call for step in steps for call in (("before", step), ("after", step))]


def test_saving_listeners_are_told_of_each_checkpoint_once(tmp_path: Path) -> None:
    listener = Listener()
    estimator(tmp_path, save_checkpoints_steps=2).train(points(8, 2), saving_listeners=[listener])
    assert listener.calls == ["begin", *saved(0, 2, 4), ("end", 4)]


def test_saving_listeners_are_told_of_the_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    trainer, listener = estimator(tmp_path), Listener()
    trainer.train(points(8, 2), steps=2)
    before = Path(f"{trainer.latest_checkpoint()}.index").stat().st_mtime_ns
    trainer.train(points(8, 2), steps=1, saving_listeners=[listener])
    assert listener.calls == ["begin", *saved(2, 3), ("end", 3)]
    assert (tmp_path / "model.ckpt-2.index").stat().st_mtime_ns == before, "it is there, and stays what it is"


def test_saving_listeners_stop_nobody_before_the_first_step(tmp_path: Path) -> None:
    """As in tf.estimator, which did not look at what they return there."""
    trainer, listener = estimator(tmp_path), Listener(stop_at=0)
    trainer.train(points(8, 2), saving_listeners=[listener])
    assert step_of(trainer) == 4 and listener.calls == ["begin", *saved(0, 4), ("end", 4)]


def test_listeners_begin_and_end_before_hooks_do(tmp_path: Path) -> None:
    listener = Listener()

    class Beside(tf.compat.v1.train.SessionRunHook):
        def begin(self) -> None:
            listener.calls.append("hook begins")

        def end(self, session: Any) -> None:
            listener.calls.append("hook ends")

    estimator(tmp_path).train(points(8, 2), [Beside()], steps=1, saving_listeners=[listener])
    assert listener.calls == ["begin", "hook begins", *saved(0, 1), ("end", 1), "hook ends"]


def test_saving_listener_can_stop_training(tmp_path: Path) -> None:
    listener = Listener(stop_at=4)
    trainer = estimator(tmp_path, save_checkpoints_steps=2)
    run = trainer.train_run(points(repeat=True), steps=10, saving_listeners=[listener])
    assert run is not None and run.stop_reason == "Listener requested it"
    assert step_of(trainer) == 4 and listener.calls[-1] == ("end", 4)


def test_two_runs_with_the_same_seed_are_the_same(tmp_path: Path) -> None:
    def noisy(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("weight", [], initializer=v1.random_normal_initializer())
        loss = tf.reduce_mean(tf.square(features * weight - labels))
        train_op = v1.train.GradientDescentOptimizer(0.001).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    def weight(name: str, seed: int) -> float:
        trainer = estimator(tmp_path / name, noisy, tf_random_seed=seed)
        return float(trainer.train(lambda: points()().shuffle(8), steps=4).get_variable_value("weight"))

    assert weight("a", 3) == weight("b", 3) != weight("c", 4)


# --- evaluate -----------------------------------------------------------------------------------------------------


def test_evaluate_reports_metrics_loss_and_global_step(halves: Estimator) -> None:
    found = halves.evaluate(points())
    expected = {"loss": np.mean((X / 2) ** 2), "mae": np.mean(X / 2), "global_step": 1}
    assert found == pytest.approx(expected)
    assert {type(value) for value in found.values()} <= {float, int}


def test_loss_is_the_mean_over_examples_whatever_the_batches(halves: Estimator) -> None:
    # tf.estimator took the mean of the batches' means: 12.9 for batches of 3, 3 and 2.
    for batch_size in (3, 5, 8):
        assert halves.evaluate(points(8, batch_size))["loss"] == pytest.approx(np.mean((X / 2) ** 2))


def test_steps_limit_the_batches_evaluated(halves: Estimator, messages: Messages) -> None:
    assert halves.evaluate(points(8, 2), steps=2)["mae"] == pytest.approx(np.mean(X[:4] / 2))
    assert halves.evaluate(points(8, 2, repeat=True), steps=5)["mae"] == pytest.approx(
        np.mean(X[[*range(8), 0, 1]] / 2)
    )
    assert halves.evaluate(points(8, 2), steps=100)["mae"] == pytest.approx(np.mean(X / 2))
    for steps in (0, -1):
        with messages.raised(ValueError):
            halves.evaluate(points(), steps=steps)


def test_an_evaluation_that_would_never_end_is_refused(halves: Estimator, messages: Messages) -> None:
    with messages.raised(ValueError):
        halves.evaluate(points(repeat=True))


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
def test_evaluating_an_empty_input_is_refused(empty: Any, halves: Estimator, messages: Messages) -> None:
    with messages.raised(ValueError):
        halves.evaluate(empty, name="test")


def test_evaluations_go_to_folders_of_their_own(tmp_path: Path) -> None:
    trainer = estimator(tmp_path).train(points(), steps=2)
    assert trainer.eval_dir() == str(tmp_path / "eval") and trainer.eval_dir("test") == str(tmp_path / "eval_test")
    expected = trainer.evaluate(points())
    trainer.evaluate(points(4), name="test")
    written = {event.tag: event for event in read_events(tmp_path / "eval") if event.tag != "checkpoint_path"}
    assert {tag: event.value for tag, event in written.items()} == pytest.approx(
        {"loss": expected["loss"], "mae": expected["mae"]}
    )
    assert {event.step for event in written.values()} == {2}
    assert steps_of(tmp_path / "eval_test", "loss") == [2]


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_without_a_checkpoint_it_is_refused(method: str, tmp_path: Path, messages: Messages) -> None:
    # tf.estimator took freshly initialised variables, and logged that.
    with messages.raised(ValueError):
        getattr(estimator(tmp_path), method)(points())


@pytest.mark.parametrize("name", ["loss", "global_step"])
def test_metrics_with_names_of_the_runner_are_refused(name: str, trained: Estimator, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        return spec._replace(eval_metric_ops={name: v1.metrics.mean(labels)})

    with messages.raised(ValueError):
        estimator(Path(trained.model_dir), model_fn).evaluate(points())


def test_an_older_checkpoint_can_be_evaluated(trained: Estimator) -> None:
    path = os.path.join(trained.model_dir, "model.ckpt-5")
    older, latest = trained.evaluate(points(), checkpoint_path=path), trained.evaluate(points())
    assert (older["global_step"], latest["global_step"]) == (5, 10)
    assert older["loss"] > latest["loss"]
    initial = trained.evaluate(points(), checkpoint_path=os.path.join(trained.model_dir, "model.ckpt-0"))
    assert initial["loss"] == pytest.approx(np.mean((2 * X) ** 2))


def test_evaluate_sees_what_another_estimator_has_trained_meanwhile(tmp_path: Path) -> None:
    trainer, evaluator = estimator(tmp_path), estimator(tmp_path)
    for steps in (3, 6):
        trainer.train(points(repeat=True), max_steps=steps)
        found = evaluator.evaluate(points())
        assert found == trainer.evaluate(points()) and found["global_step"] == steps


def test_variable_of_another_shape_is_named(tmp_path: Path, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        kernel = v1.get_variable("kernel", [params.width], initializer=v1.ones_initializer())
        loss = tf.reduce_sum(kernel) * tf.reduce_mean(features)
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator(tmp_path, model_fn, {"width": 2}).train(points(), steps=1)
    other = estimator(tmp_path, model_fn, {"width": 3})
    for call in (other.evaluate, functools.partial(other.train, steps=1)):
        with messages.raised(ValueError):
            call(points())


def test_variable_that_training_never_made_is_named(trained: Estimator, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        v1.get_variable("only_in_eval", [])
        return line(features, labels, mode, params)

    with messages.raised(ValueError, hide=re.escape(trained.model_dir)):
        estimator(Path(trained.model_dir), model_fn).evaluate(points())


def test_metrics_may_be_nested(trained: Estimator) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        mean, update = v1.metrics.mean(labels)
        count, count_update = v1.metrics.mean(tf.ones_like(labels))
        both = ((mean, {"count": count}), tf.group(update, count_update))
        vector = (tf.stack([mean, count]), update)
        spec = line(features, labels, mode, params)
        return spec._replace(eval_metric_ops={"pair": both, "dict": ({"mean": mean}, update), "vector": vector})

    found = estimator(Path(trained.model_dir), model_fn).evaluate(points(), name="nested")
    assert found["pair"] == (9.0, {"count": 1.0}) and found["dict"] == {"mean": 9.0}
    assert found["vector"].tolist() == [9.0, 1.0]
    events = {event.tag: event.value for event in read_events(trained.eval_dir("nested"))}
    assert events["vector"].tolist() == [9.0, 1.0]
    assert events["pair/0"] == 9.0 and events["pair/1/count"] == 1.0 and events["dict/mean"] == 9.0


class Said(Progress):
    """The lines that stay on the screen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def test_elements_of_short_arrays_are_metrics_and_longer_arrays_are_said(tmp_path: Path, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        mean, update = v1.metrics.mean(labels)
        values = {
            "pair": tf.stack([mean, mean + 1]), "pair_1": tf.constant(-1.0), "matrix": tf.reshape(tf.range(4), [2, 2]),
            "longest": mean * tf.ones([32]), "too_long": mean * tf.ones([33]), "texts": tf.constant(["a", "b"]),
        }  # fmt: skip
        spec = line(features, labels, mode, params)
        return spec._replace(eval_metric_ops={name: (value, update) for name, value in values.items()})

    journal, said = journal_of(tmp_path / "journal.jsonl"), Said()
    trainer = Estimator(model_fn, tmp_path, RunConfig(), journal=journal, progress=said)
    trainer.train(points(), steps=1).evaluate(points())
    (found,) = [numbers for _, numbers in metrics_of_steps(tmp_path / "journal.jsonl") if "eval/loss" in numbers]
    assert (found["eval/pair_0"], found["eval/pair_1"]) == (9.0, -1.0), "a metric keeps its own name"
    assert found["eval/matrix_1_0"] == 2.0
    others = [name for name in found if "pair" not in name and "matrix" not in name]
    assert others == [*(f"eval/longest_{number}" for number in range(32)), "eval/loss"]
    (shown,) = [text for text in said.lines if text.startswith("eval at step")]
    messages.same("line", shown.partition("pair_1 = -1, ")[2], hide=r"[\d.]+ s\)")


def test_the_speed_of_a_run_is_that_of_its_later_loops(tmp_path: Path) -> None:
    def wait_for_the_first(number: np.int64) -> np.int64:
        time.sleep(0 if number else 1.5)
        return number

    def input_fn() -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(80).map(
            lambda number: tf.numpy_function(wait_for_the_first, [number], tf.int64)
        )
        return numbers.map(lambda number: (tf.ones([1, 1]), tf.ones([1, 1])))

    run = estimator(tmp_path).train_run(input_fn)
    assert run is not None and run.global_step == 80
    assert run.steps_per_sec > 80 / 1.5


def test_event_files_of_evaluations_have_the_fields_of_2_15(trained: Estimator) -> None:
    """Programs read `value.simple_value`, which is 0.0 if a number is in `value.tensor`."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        mean, update = v1.metrics.mean(labels)
        values = {
            "count": tf.constant(7), "big": tf.constant(2**40, tf.int64), "vector": tf.stack([mean, mean]),
            "proto": v1.summary.scalar("inside", mean), "image": v1.summary.image("inside", tf.ones([2, 3, 3, 1])),
        }  # fmt: skip
        spec = line(features, labels, mode, params)
        pairs = {name: (value, update) for name, value in values.items()}
        return spec._replace(eval_metric_ops={**(spec.eval_metric_ops or {}), **pairs})

    found = estimator(Path(trained.model_dir), model_fn).evaluate(points(), name="fields")
    assert v1.Summary.FromString(found["proto"]).value[0].simple_value == 9.0
    (file,) = Path(trained.eval_dir("fields")).iterdir()
    values = {one.tag: one for event in v1.train.summary_iterator(str(file)) for one in event.summary.value}
    numbers = {tag: one.simple_value for tag, one in values.items() if one.HasField("simple_value")}
    expected = {"loss": found["loss"], "mae": found["mae"], "count": 7.0, "big": 2.0**40, "proto/0": 9.0}
    assert numbers == pytest.approx(expected)
    assert [tag for tag, one in values.items() if one.HasField("image")] == ["image/0", "image/1"]
    tensors = {tag: tf.make_ndarray(one.tensor).tolist() for tag, one in values.items() if one.HasField("tensor")}
    assert tensors == {"vector": [9.0, 9.0], "checkpoint_path": f"{trained.model_dir}/model.ckpt-10".encode()}
    of_tensorboard = EventAccumulator(str(file.parent)).Reload()
    points_of = {tag: [(one.step, one.value) for one in of_tensorboard.Scalars(tag)] for tag in numbers}
    assert points_of == {tag: [(10, value)] for tag, value in numbers.items()}


def test_metric_that_is_a_text_is_written_as_one(trained: Estimator) -> None:
    """Texts that can be taken for the beginning of a summary, and that cannot."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        metrics = {name: (tf.constant(name), tf.no_op()) for name in ("a", "version 3", "")}
        return line(features, labels, mode, params)._replace(eval_metric_ops={f"<{m}>": v for m, v in metrics.items()})

    found = estimator(Path(trained.model_dir), model_fn).evaluate(points(), name="texts")
    assert (found["<a>"], found["<version 3>"], found["<>"]) == (b"a", b"version 3", b"")


# --- predict ------------------------------------------------------------------------------------------------------


def predicting(model_dir: str, predictions: Any) -> Estimator:
    """On the checkpoints of `line`, with `predictions(features)`."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        return spec._replace(predictions=predictions(features))

    return estimator(Path(model_dir), model_fn)


def test_predict_yields_a_dict_for_each_example(halves: Estimator) -> None:
    found = list(halves.predict(points(8, 3)))
    assert [one["x"] for one in found] == X.tolist()
    assert [one["y"] for one in found] == (1.5 * X).tolist()


def test_predict_yields_rows_of_a_tensor(halves: Estimator) -> None:
    found = list(predicting(halves.model_dir, lambda x: tf.stack([x, -x], axis=1)).predict(points(8, 3)))
    assert [row.tolist() for row in found] == [[x, -x] for x in X]


def test_predict_yields_whole_batches_when_asked(halves: Estimator) -> None:
    found = list(halves.predict(points(8, 3), yield_single_examples=False))
    assert [batch["x"].tolist() for batch in found] == [[1, 2, 3], [4, 5, 6], [7, 8]]


def test_predictions_of_different_sizes_are_refused_unless_batches_are_asked_for(
    halves: Estimator, messages: Messages
) -> None:
    predictor = predicting(halves.model_dir, lambda x: {"all": x, "sum": tf.reduce_sum(x), "two": x[:2]})
    with messages.raised(ValueError):
        list(predictor.predict(points(8, 3)))
    batch = next(predictor.predict(points(8, 3), yield_single_examples=False))
    assert (batch["all"].tolist(), batch["sum"], batch["two"].tolist()) == ([1, 2, 3], 6.0, [1, 2])


def test_predict_keys_choose_some_of_a_dict(halves: Estimator, messages: Messages) -> None:
    assert next(halves.predict(points(), predict_keys=["y"])) == {"y": 1.5}
    assert next(halves.predict(points(), predict_keys="x")) == {"x": 1.0}
    with messages.raised(ValueError):
        next(halves.predict(points(), predict_keys=["z"]))
    with messages.raised(ValueError):
        next(predicting(halves.model_dir, tf.identity).predict(points(), predict_keys=["y"]))


def test_predict_from_an_older_checkpoint(trained: Estimator) -> None:
    path = os.path.join(trained.model_dir, "model.ckpt-0")
    assert next(trained.predict(points(), checkpoint_path=path))["y"] == 0.0
    assert next(trained.predict(points()))["y"] > 0.0


def test_predict_takes_features_without_labels(halves: Estimator) -> None:
    found = halves.predict(lambda: tf.data.Dataset.from_tensor_slices(X).batch(3))
    assert [one["x"] for one in found] == X.tolist()


def test_a_model_fn_gets_no_labels_in_prediction(halves: Estimator) -> None:
    """Some tell by them what they are called for."""
    seen: dict[str, list[Any]] = {}

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        seen.setdefault(mode, []).append(labels)
        return line(features, labels, mode, params)

    both = estimator(Path(halves.model_dir), model_fn)
    both.evaluate(points())
    assert next(both.predict(points()))["x"] == 1.0
    assert seen[ModeKeys.PREDICT] == [None] and None not in seen[ModeKeys.EVAL]


def test_predictions_can_be_interleaved(halves: Estimator) -> None:
    """tf.estimator's graphs were on one stack, which this broke (tensorflow issue 20506)."""
    pairs = zip(halves.predict(points(8, 3)), halves.predict(points(8, 2)), strict=True)
    assert [(one["x"], other["x"]) for one, other in pairs] == [(x, x) for x in X]


def test_predictions_of_an_endless_input_can_be_broken_off(halves: Estimator) -> None:
    found = list(itertools.islice(halves.predict(points(repeat=True)), 11))
    assert found[10]["x"] == 3.0


def test_training_under_a_prediction_is_refused_instead_of_mixing_models(tmp_path: Path, messages: Messages) -> None:
    trainer = estimator(tmp_path).train(points(), steps=1)
    predictions = trainer.predict(points(8, 2))
    next(predictions)
    trainer.train(points(), steps=1)
    with messages.raised(RuntimeError):
        list(predictions)


# --- variables ----------------------------------------------------------------------------------------------------


def test_variables_are_an_error_before_training(tmp_path: Path, messages: Messages) -> None:
    for call in (Estimator.get_variable_names, lambda trainer: trainer.get_variable_value("weight")):
        with messages.raised(ValueError):
            call(estimator(tmp_path))


def test_variables_have_their_names_and_values_after_training(halves: Estimator) -> None:
    assert halves.get_variable_names() == ["global_step", "weight", "weight/Momentum"]
    assert halves.get_variable_value("weight") == 1.5
    assert halves.get_variable_value("global_step") == 1
    with pytest.raises(KeyError, match="wieght"):
        halves.get_variable_value("wieght")


# --- input functions ----------------------------------------------------------------------------------------------


def test_input_fn_gets_what_it_declares_in_each_mode(tmp_path: Path) -> None:
    seen: list[Any] = []

    def input_fn(mode: str, params: Any, config: Any) -> Any:
        seen.append((mode, params.start, config.model_dir))
        return points()()

    trainer = estimator(tmp_path, params={"start": 0.5}).train(input_fn, steps=1)
    trainer.evaluate(input_fn)
    list(trainer.predict(input_fn))
    modes = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
    assert seen == [(mode, 0.5, str(tmp_path)) for mode in modes]


def test_input_context_is_given_where_it_is_declared(halves: Estimator) -> None:
    def input_fn(input_context: Any) -> Any:
        assert input_context.num_input_pipelines == input_context.num_replicas_in_sync == 1
        return points()()

    assert halves.evaluate(input_fn) == halves.evaluate(points())


class Points:
    """A callable object that gives an input."""

    def __call__(self, params: Any) -> Any:
        return points()()


@pytest.mark.parametrize(
    "input_fn",
    [functools.partial(lambda n, mode: points(n)(), 8), Points(), Points().__call__, Input(Points(), params={})],
    ids=["partial", "object", "method", "Input"],
)
def test_input_fn_may_be_any_callable(input_fn: Any, halves: Estimator) -> None:
    assert halves.evaluate(input_fn)["mae"] == pytest.approx(np.mean(X / 2))


def test_tensors_are_one_batch(halves: Estimator) -> None:
    assert halves.evaluate(lambda: (tf.constant(X), tf.constant(2 * X)))["mae"] == pytest.approx(np.mean(X / 2))


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_of_another_length_than_two_or_three_are_refused(kind: Any, halves: Estimator) -> None:
    with pytest.raises(ValueError, match="4"):
        halves.evaluate(lambda: kind([tf.constant(X)] * 4))


def test_labels_may_be_missing(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        assert labels is None
        weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(features - weight))
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_global_step())
        return EstimatorSpec(mode, predictions=features - weight, loss=loss, train_op=train_op)

    def input_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices(X).batch(4)

    trainer = estimator(tmp_path, model_fn).train(input_fn)
    assert trainer.evaluate(input_fn)["global_step"] == 2
    assert len(list(trainer.predict(input_fn))) == 8


def test_labels_that_model_fn_does_not_take_are_refused(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        estimator(tmp_path, lambda features, mode: None).train(points())


def test_features_and_labels_may_be_nested(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        y = None if labels is None else labels["y"]
        return line(features["deep"][0], y, mode, params)

    def input_fn() -> Any:
        return points()().map(lambda x, y: ({"deep": (x, y)}, {"y": y}))

    trainer = estimator(tmp_path, model_fn).train(input_fn)
    assert trainer.evaluate(input_fn)["global_step"] == 4
    assert [one["x"] for one in trainer.predict(input_fn)] == X.tolist()


# --- what classic model_fns do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
def test_lookup_tables_that_model_fn_makes_are_filled(devices: int, tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        entries = tf.lookup.KeyValueTensorInitializer(["half", "one"], [0.5, 1.0])
        table = tf.lookup.StaticHashTable(entries, default_value=0.0)
        return line(features * table.lookup(tf.constant("half")), labels, mode, params)

    strategy = mirrored() if devices == 2 else None
    trainer = estimator(tmp_path, model_fn, train_distribute=strategy).train(points(8, 4), steps=1)
    assert trainer.evaluate(points())["global_step"] == 1
    assert [one["x"] for one in trainer.predict(points())] == (X / 2).tolist()


def test_what_happens_is_noted_in_the_journal(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "journal.jsonl")
    config = RunConfig(log_step_count_steps=2, steps_per_loop=1, save_checkpoints_asynchronously=False)
    trainer = Estimator(line, tmp_path / "run", config, journal=journal)
    trainer.train(points()).evaluate(points(), name="test")
    lines = recorded(tmp_path / "journal.jsonl")
    assert [line["context"] for line in lines if line.get("event") == "dataset"] == ["train", "eval_test"]
    speeds = ["train/examples_per_sec", "train/learning_rate", "train/loss", "train/steps_per_sec"]
    evaluated = ["eval_test/loss", "eval_test/mae"]
    noted = [(line["step"], sorted(line["metrics"])) for line in lines if "metrics" in line]
    assert noted == [(1, speeds), (2, speeds), (4, speeds), (4, evaluated)]
    events = [(line["event"], line.get("name", line.get("step"))) for line in lines if "event" in line]
    assert events == [
        ("dataset", "points"), ("phase", "input"), ("phase", "input"), ("phase", "trace"),
        ("phase", "save"), ("first_step", 1), ("phase", "save"), ("checkpoint", 4), ("phase", "train"),
        ("dataset", "points"), ("phase", "trace"), ("evaluated", "test"), ("phase", "evaluate"),
    ]  # fmt: skip
    assert all(line["secs"] >= 0 for line in lines if line.get("event") == "phase")


def test_a_resumed_run_notes_that_it_restored(tmp_path: Path) -> None:
    Estimator(line, tmp_path / "run").train(points(repeat=True), steps=2)
    journal = journal_of(tmp_path / "journal.jsonl")
    Estimator(line, tmp_path / "run", journal=journal).train(points(repeat=True), steps=2)
    lines = recorded(tmp_path / "journal.jsonl")
    assert [one["step"] for one in lines if one.get("event") == "first_step"] == [3]
    assert journal.phases["restore"] > 0 and set(journal.phases) == {"input", "trace", "restore", "train", "save"}


def test_phases_are_noted_when_they_fail(tmp_path: Path) -> None:
    def broken(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        raise ValueError("no")

    journal = journal_of(tmp_path / "journal.jsonl")
    with pytest.raises(ValueError, match="no"):
        Estimator(broken, tmp_path / "run", journal=journal).train(points())
    assert "trace" in journal.phases


def test_saves_are_said_with_their_size_but_for_that_of_step_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    with caplog.at_level(logging.INFO, logger="runner"):
        Estimator(line, tmp_path, RunConfig(save_checkpoints_steps=2)).train(points(repeat=True), steps=4)
    for record in caplog.records:
        if record.getMessage().startswith("Saved "):
            messages.same(record.levelname, record.getMessage(), hide=r"[\d.]+(?= (k?B|s)\b)")


def test_event_files_can_be_left_out(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        tf.summary.scalar("v2", spec.predictions[0])
        v1.summary.scalar("v1", spec.predictions[0])
        return spec

    config = RunConfig(tensorboard=False, save_summary_steps=1)
    trainer = Estimator(model_fn, tmp_path, config).train(points(), steps=3)
    metrics = trainer.evaluate(points())
    assert metrics["global_step"] == 3
    assert not list(tmp_path.rglob("events.out*")) and not (tmp_path / "eval").exists()
    with_them = Estimator(model_fn, tmp_path / "with").train(points(), steps=3)
    assert with_them.get_variable_value("weight") == trainer.get_variable_value("weight")


def test_only_training_makes_an_event_file_in_model_dir(tmp_path: Path) -> None:
    Estimator(line, tmp_path, RunConfig(tensorboard=False)).train(points(), steps=1)
    reader = Estimator(line, tmp_path)
    list(reader.predict(points()))
    reader.evaluate(points())
    assert not list(tmp_path.glob("events.out*")) and list((tmp_path / "eval").glob("events.out*"))


class UsesAnother(Hook):
    """Evaluates the first checkpoint at each step, and at step 5, which is saved, begins to predict with it."""

    every = Every(steps=1)

    def __init__(self, used: Estimator) -> None:
        self._used = used
        self._path = os.path.join(used.model_dir, "model.ckpt-2")
        self.found: list[dict[str, Any]] = []
        self.predictions: Any = None

    def after_step(self, run: Any, result: Any) -> None:
        self.found.append(self._used.evaluate(points(), checkpoint_path=self._path))
        if result.last_step == 5:
            self.predictions = self._used.predict(points(), checkpoint_path=self._path)
            next(self.predictions)  # the others are never asked for


@pytest.mark.parametrize("strategy", [None, mirrored], ids=["default", "mirrored"])
@pytest.mark.parametrize("style", slow_but(LINES, "native"))
def test_a_hook_may_use_another_checkpoint_while_training_goes_on(
    style: str, strategy: Any, tmp_path: Path, messages: Messages
) -> None:
    config: dict[str, Any] = {
        "train_distribute": strategy() if strategy else None,
        "ema_decay": 0.5 if style == "native" else None,
        "save_checkpoints_steps": 5,
    }
    straight = estimator(tmp_path / "straight", LINES[style], **config).train(points(repeat=True), steps=2)
    straight.train(points(repeat=True), steps=7)
    trainer = estimator(tmp_path / "used", LINES[style], **config).train(points(repeat=True), steps=2)
    expected = trainer.evaluate(points())
    hook = UsesAnother(trainer)
    trainer.train(points(repeat=True), steps=7, hooks=[hook])
    assert hook.found == [expected] * 7
    for name in straight.get_variable_names():
        np.testing.assert_array_equal(trainer.get_variable_value(name), straight.get_variable_value(name), name)
    used, undisturbed = (
        one.evaluate(points(), checkpoint_path=f"{one.model_dir}/model.ckpt-5") for one in (trainer, straight)
    )
    assert used == undisturbed != expected, "what was saved right after the prediction began"
    with messages.raised(RuntimeError):
        list(hook.predictions)
    assert trainer.evaluate(points()) == straight.evaluate(points())
