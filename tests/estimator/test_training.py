"""train_and_evaluate in one process: when it evaluates, what it returns, what it refuses."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner import (
    Estimator,
    EstimatorSpec,
    EvalSpec,
    Every,
    Hook,
    Input,
    LatestExporter,
    RunConfig,
    TrainingResult,
    TrainSpec,
    train_and_evaluate,
)
from runner.checkpoint.retention import metrics_of
from runner.data.sharding import WorkerPlace
from runner.estimator.context import Models
from runner.run_config import KeepBest
from tests.support.jobs import serving_input_receiver_fn
from tests.support.journal import journal_of, recorded
from tests.support.line import line, points, read_events, steps_of
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1


def estimator(model_dir: Path, model_fn: Any = line, **config: Any) -> Estimator:
    return Estimator(model_fn, model_dir, RunConfig(**config))


def train_spec(max_steps: int | None, **settings: Any) -> TrainSpec:
    return TrainSpec(points(repeat=True), max_steps, **settings)


# --- specs --------------------------------------------------------------------------------------------------------


def test_train_spec_holds_what_it_is_given() -> None:
    spec = TrainSpec(points(), max_steps=3, hooks=["hook"], saving_listeners=["listener"])
    assert (spec.max_steps, list(spec.hooks), list(spec.saving_listeners)) == (3, ["hook"], ["listener"])
    assert TrainSpec(points()).max_steps is None


@pytest.mark.parametrize("max_steps", [0, -1])
def test_train_spec_refuses_steps_that_are_not_positive(max_steps: int, messages: Messages) -> None:
    with messages.raised(ValueError):
        TrainSpec(points(), max_steps)


def test_eval_spec_takes_all_examples_unless_told_otherwise() -> None:
    # tf.estimator: steps=100, start_delay_secs=120, throttle_secs=600.
    spec = EvalSpec(points())
    assert (spec.steps, spec.name, spec.start_delay_secs, spec.throttle_secs) == (None, None, 0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"steps": -3},
        {"start_delay_secs": -1},
        {"throttle_secs": -1},
    ],
    ids=str,
)
def test_eval_spec_refuses_what_cannot_be(settings: dict[str, Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        EvalSpec(points(), **settings)


@pytest.mark.parametrize("kind", [TrainSpec, EvalSpec])
def test_specs_refuse_inputs_that_cannot_be_called(kind: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        kind("data")
    assert kind(Input(points())).input_fn.fn is not None


# --- when it evaluates --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Estimator, TrainingResult]:
    """22 steps, a checkpoint every 10, two evaluations. Not to be trained further."""
    trainer = estimator(tmp_path_factory.mktemp("run"), save_checkpoints_steps=10)
    evals = [EvalSpec(points()), EvalSpec(points(4), name="small", steps=1)]
    return trainer, train_and_evaluate(trainer, train_spec(22), evals)


def test_evaluates_every_checkpoint_and_the_last_one(run: tuple[Estimator, TrainingResult]) -> None:
    trainer, _ = run
    assert steps_of(trainer.eval_dir(), "loss") == steps_of(trainer.eval_dir("small"), "mae") == [10, 20, 22]


def test_result_is_that_of_the_last_checkpoint(run: tuple[Estimator, TrainingResult]) -> None:
    trainer, result = run
    assert (result.global_step, result.examples) == (22, 44) and result.steps_per_sec > 0
    assert result.checkpoint == trainer.latest_checkpoint() == os.path.join(trainer.model_dir, "model.ckpt-22")
    assert result.metrics == {"": trainer.evaluate(points()), "small": trainer.evaluate(points(4), steps=1)}
    assert result.metrics[""]["global_step"] == 22


def test_finished_run_is_evaluated_and_reported(run: tuple[Estimator, TrainingResult]) -> None:
    # tf.estimator returned (None, None).
    trainer, before = run
    again = estimator(Path(trainer.model_dir))
    result = train_and_evaluate(again, train_spec(22), EvalSpec(points(), name="again"))
    assert (result.global_step, result.examples, result.steps_per_sec) == (22, 0, 0.0)
    assert result.metrics["again"] == before.metrics[""] and result.checkpoint == before.checkpoint


def test_metrics_of_training_and_evaluation_are_where_tensorboard_looks(run: tuple[Estimator, TrainingResult]) -> None:
    trainer, _ = run
    assert {event.tag for event in read_events(trainer.model_dir)} == {"loss", "global_step/sec", "train/learning_rate"}
    assert {event.tag for event in read_events(trainer.eval_dir("small"))} == {"checkpoint_path", "loss", "mae"}


def test_resumed_run_evaluates_only_what_is_new(tmp_path: Path) -> None:
    def run(max_steps: int) -> TrainingResult:
        trainer = estimator(tmp_path, save_checkpoints_steps=2)
        return train_and_evaluate(trainer, train_spec(max_steps), EvalSpec(points()))

    assert (run(3).examples, run(5).examples) == (6, 4)
    assert steps_of(tmp_path / "eval", "loss") == [2, 3, 4, 5]


def test_ends_with_the_input_and_evaluates_each_step_once(tmp_path: Path) -> None:
    # The last checkpoint is on the cadence and at the end of the input, which is found out only after it.
    trainer = estimator(tmp_path, save_checkpoints_steps=2)
    result = train_and_evaluate(trainer, TrainSpec(points(8, 2)), EvalSpec(points()))
    assert result.global_step == 4
    assert steps_of(tmp_path / "eval", "loss") == [2, 4]


def test_checkpoints_by_the_clock_are_evaluated_too(tmp_path: Path) -> None:
    trainer = estimator(tmp_path, save_checkpoints_secs=1e-6, steps_per_loop=2)
    train_and_evaluate(trainer, train_spec(4), EvalSpec(points()))
    assert steps_of(tmp_path / "eval", "loss") == [2, 4]


@pytest.mark.parametrize(
    ("settings", "expected"), [({"throttle_secs": 1000}, [2, 7]), ({"start_delay_secs": 1000}, [7])]
)
def test_throttled_evaluations_leave_out_all_but_the_last_checkpoint(
    settings: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    trainer = estimator(tmp_path, save_checkpoints_steps=2)
    train_and_evaluate(trainer, train_spec(7), EvalSpec(points(), **settings))
    assert steps_of(tmp_path / "eval", "loss") == expected


def test_evaluations_are_throttled_each_by_itself(tmp_path: Path) -> None:
    trainer = estimator(tmp_path, save_checkpoints_steps=2)
    evals = [EvalSpec(points(), name="often"), EvalSpec(points(), name="seldom", throttle_secs=1000)]
    train_and_evaluate(trainer, train_spec(6), evals)
    assert steps_of(trainer.eval_dir("often"), "loss") == [2, 4, 6]
    assert steps_of(trainer.eval_dir("seldom"), "loss") == [2, 6]


def test_the_start_is_evaluated_once_on_request(tmp_path: Path) -> None:
    evals = [EvalSpec(points(), name="all", at_start=True, start_delay_secs=1000), EvalSpec(points(), name="last")]
    for max_steps in (2, 4):
        trainer = estimator(tmp_path, save_checkpoints_steps=1000)
        train_and_evaluate(trainer, train_spec(max_steps), evals)
    assert steps_of(trainer.eval_dir("all"), "loss") == [0, 2, 2, 4], "the new model, and what the second run goes on"
    assert steps_of(trainer.eval_dir("last"), "loss") == [2, 4]


def test_evaluating_the_start_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    first, second = estimator(tmp_path / "a"), estimator(tmp_path / "b")
    train_and_evaluate(first, train_spec(3), EvalSpec(points(), at_start=True))
    train_and_evaluate(second, train_spec(3), [])
    assert first.get_variable_value("weight") == second.get_variable_value("weight")


def test_a_run_to_the_end_of_its_input_is_finished_for_the_next_process(tmp_path: Path) -> None:
    def run() -> TrainingResult:
        return train_and_evaluate(estimator(tmp_path), TrainSpec(points(8, 2)), EvalSpec(points()))

    first, second = run(), run()
    assert (first.global_step, first.examples) == (4, 8) and first.steps_per_sec > 0
    assert (second.global_step, second.examples, second.steps_per_sec) == (4, 0, 0.0)
    assert second.metrics == first.metrics and second.checkpoint == first.checkpoint


def test_epochs_are_trained_by_calls_on_one_estimator(tmp_path: Path) -> None:
    trainer = estimator(tmp_path)
    steps = [train_and_evaluate(trainer, TrainSpec(points(8, 2)), []).global_step for _ in range(3)]
    assert steps == [4, 8, 12]


class Interrupting(Hook):
    """Gives up an evaluation after some examples."""

    def __init__(self, at_step: int) -> None:
        self._at_step = at_step
        self.told: list[int] = []

    def after_batches(self, run: Any, examples: int) -> None:
        self.told.append(examples)
        if run.global_step == self._at_step:
            run.interrupt("enough")


@pytest.mark.parametrize(("at_step", "ends_at", "evaluated"), [(2, 2, None), (4, 4, 2), (0, 1, None)])
def test_an_interrupted_evaluation_ends_the_run_with_its_checkpoint(
    at_step: int, ends_at: int, evaluated: int | None, tmp_path: Path
) -> None:
    trainer = estimator(tmp_path, save_checkpoints_steps=2)
    spec = EvalSpec(points(), hooks=[Interrupting(at_step)], at_start=at_step == 0)
    result = train_and_evaluate(trainer, train_spec(4), spec)
    assert result.global_step == ends_at and trainer.latest_checkpoint() == f"{tmp_path}/model.ckpt-{ends_at}"
    assert result.metrics.get("", {}).get("global_step") == evaluated, "that of the last whole evaluation"
    again = train_and_evaluate(estimator(tmp_path), train_spec(4), EvalSpec(points()))
    assert again.global_step == 4 and again.metrics[""]["global_step"] == 4
    assert steps_of(tmp_path / "eval", "loss") == ([2, 4] if at_step else [4]), "step 1 is off the schedule"


class Ends(Hook):
    """Ends a run at a step as somebody who sends SIGTERM, and one that evaluates as somebody who kills it."""

    def __init__(self, at_step: int) -> None:
        self.every, self._at_step = Every(steps=1), at_step

    def after_step(self, run: Any, result: Any) -> None:
        if result.last_step == self._at_step:
            run.interrupt("enough")

    def after_batches(self, run: Any, examples: int) -> None:
        if run.global_step == self._at_step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("ends", slow_but(["killed", "stopped"], "killed"))
@pytest.mark.parametrize("at_step", [2, 4])
def test_what_an_ended_run_did_not_evaluate_the_next_does_and_keeps_and_exports(
    at_step: int, ends: str, tmp_path: Path
) -> None:
    journal = journal_of(tmp_path / "journal.jsonl")

    def run(hooks: list[Any], eval_hooks: list[Any]) -> None:
        config = RunConfig(
            save_checkpoints_steps=2, log_step_count_steps=4, steps_per_loop=1, keep_best=KeepBest("eval/loss")
        )
        trainer = Estimator(line, tmp_path / "run", config, journal=journal)
        exporter = LatestExporter("latest", serving_input_receiver_fn)
        spec = EvalSpec(points(), hooks=eval_hooks, exporters=[exporter])
        train_and_evaluate(trainer, train_spec(6, hooks=hooks), [spec, EvalSpec(points(4), name="small")])

    if ends == "stopped":
        run([Ends(at_step)], [])
    else:
        with pytest.raises(KeyboardInterrupt):
            run([], [Ends(at_step)])
    run([], [])
    assert steps_of(tmp_path / "run/eval", "loss") == steps_of(tmp_path / "run/eval_small", "loss") == [2, 4, 6]
    lines = [one for one in recorded(tmp_path / "journal.jsonl") if "metrics" in one]
    assert [one["step"] for one in lines if "train/loss" in one["metrics"]] == [1, 4], "no point for a resumed run"
    assert metrics_of(tmp_path / f"run/model.ckpt-{at_step}").keys() >= {"eval/loss", "eval_small/loss"}
    assert len(list((tmp_path / "run/export/latest").glob("[0-9]*"))) == 3


def test_what_a_stop_saved_off_schedule_is_evaluated_only_where_the_run_ends_there(tmp_path: Path) -> None:
    def run(max_steps: int, *hooks: Hook) -> None:
        trainer = estimator(tmp_path, save_checkpoints_steps=2, steps_per_loop=1)
        train_and_evaluate(trainer, train_spec(max_steps, hooks=hooks), EvalSpec(points()))

    run(8, Ends(3))
    run(8, Ends(5))
    assert steps_of(tmp_path / "eval", "loss") == [2, 4]
    run(5)
    assert steps_of(tmp_path / "eval", "loss") == [2, 4, 5]
    run(8)
    assert steps_of(tmp_path / "eval", "loss") == [2, 4, 5, 6, 8]


@pytest.mark.parametrize("names", [(None, None), ("a", "b", "a"), (None, "")], ids=str)
def test_evaluations_of_the_same_name_are_refused(
    names: tuple[str | None, ...], tmp_path: Path, messages: Messages
) -> None:
    evals = [EvalSpec(points(), name=name) for name in names]
    with messages.raised(ValueError):
        train_and_evaluate(estimator(tmp_path), train_spec(1), evals)
    assert estimator(tmp_path).latest_checkpoint() is None, "found out before anything is trained"


def test_without_evaluations_it_trains(tmp_path: Path) -> None:
    result = train_and_evaluate(estimator(tmp_path), train_spec(2), [])
    assert result.metrics == {} and result.global_step == 2


def test_an_empty_training_input_is_refused_before_anything_is_evaluated(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        train_and_evaluate(estimator(tmp_path), TrainSpec(lambda: points()().take(0)), EvalSpec(points()))
    assert not (tmp_path / "eval").exists()


def test_evaluating_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    both = estimator(tmp_path / "both", save_checkpoints_steps=1)
    train_and_evaluate(both, train_spec(5), EvalSpec(points(3, 1)))
    alone = estimator(tmp_path / "alone").train(points(repeat=True), max_steps=5)
    assert both.get_variable_value("weight") == alone.get_variable_value("weight")


# --- who takes part -----------------------------------------------------------------------------------------------


class Listener(tf.compat.v1.train.CheckpointSaverListener):
    """Asks to stop after the checkpoint of a step; notes which evaluations there were by then."""

    def __init__(self, stop_at: int, eval_dir: str) -> None:
        self._stop_at, self._eval_dir = stop_at, eval_dir
        self.evaluated: list[list[int]] = []

    def after_save(self, session: Any, global_step_value: int) -> bool:
        self.evaluated.append(steps_of(self._eval_dir, "loss"))
        return global_step_value == self._stop_at


def test_saving_listener_can_stop_and_its_checkpoint_is_evaluated(tmp_path: Path) -> None:
    trainer = estimator(tmp_path, save_checkpoints_steps=2)
    listener = Listener(4, trainer.eval_dir())
    result = train_and_evaluate(trainer, train_spec(10, saving_listeners=[listener]), EvalSpec(points()))
    assert result.global_step == 4 and result.metrics[""]["global_step"] == 4
    assert listener.evaluated == [[], [], [2]], "the listeners of the caller come before the evaluation"
    assert steps_of(trainer.eval_dir(), "loss") == [2, 4]


def test_hooks_of_both_specs_are_used(tmp_path: Path) -> None:
    class Recorder(Hook):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def begin(self, run: Any) -> None:
            self.calls.append(("begin", run.global_step))

        def after_step(self, run: Any, result: Any) -> None:
            self.calls.append(("after", result.last_step))

        def end(self, run: Any) -> None:
            self.calls.append(("end", run.global_step))

    training, evaluating = Recorder(), Recorder()
    trainer = estimator(tmp_path, save_checkpoints_steps=2, steps_per_loop=2)
    train_and_evaluate(trainer, train_spec(4, hooks=[training]), EvalSpec(points(), hooks=[evaluating]))
    assert training.calls == [("begin", 0), ("after", 2), ("after", 4), ("end", 4)]
    assert evaluating.calls == [("begin", 2), ("end", 2), ("begin", 4), ("end", 4)]


def test_error_in_an_evaluation_says_where(tmp_path: Path, messages: Messages) -> None:
    def broken() -> Any:
        return points()().map(lambda x, y: (x, tf.debugging.check_numerics(y / 0.0, "labels")))

    trainer = estimator(tmp_path, save_checkpoints_steps=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="labels") as caught:
        train_and_evaluate(trainer, train_spec(4), EvalSpec(broken, name="test"))
    messages.same("note", caught.value.__notes__[-1])


# --- the whole of it ----------------------------------------------------------------------------------------------


def test_complete_flow_with_a_simple_linear_model(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        return line(features["x"], labels, mode, params)

    def input_fn() -> Any:
        return points(8, 4, repeat=True)().map(lambda x, y: ({"x": x}, y))

    trainer = Estimator(model_fn, tmp_path, params={"learning_rate": 0.02})
    evaluation = EvalSpec(input_fn, steps=2)
    result = train_and_evaluate(trainer, TrainSpec(input_fn, max_steps=200), evaluation)
    assert result.global_step == 200
    assert result.metrics[""]["loss"] == pytest.approx(0, abs=1e-6)
    (prediction,) = trainer.predict(lambda: tf.data.Dataset.from_tensors({"x": [10.0]}))
    assert prediction["y"] == pytest.approx(20.0, abs=1e-3)
    reopened = Estimator(model_fn, tmp_path)
    assert reopened.evaluate(input_fn, steps=2) == result.metrics[""]


@pytest.mark.parametrize("shuffle_seed", [None, 7])
def test_workers_that_all_read_all_of_the_data_shuffle_it_in_orders_of_their_own(
    shuffle_seed: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    def shuffled(params: Any, config: Any) -> tf.data.Dataset:
        data = tf.data.Dataset.range(100)
        if shuffle_seed is None:
            return data.shuffle(100).batch(4)
        return data.shuffle(100, seed=params["shuffle_seed"]).batch(4)

    def orders(shard: str) -> list[list[int]]:
        models = Models(Estimator(line, tmp_path)._context, lambda input_fn, mode: input_fn)
        source = Input(shuffled, batch_size=12, shard=shard, shuffle_seed=shuffle_seed)
        build = functools.partial(models.build_pipeline, source, "train", models.for_training)
        pipelines = [build(place=WorkerPlace(1, worker, 3)) for worker in range(3)]
        return [[int(i) for (batch,) in one.given.as_numpy_iterator() for i in batch] for one in pipelines]

    with caplog.at_level("INFO"):
        own = orders("off")
    assert all(sorted(order) == list(range(100)) for order in own)
    assert own[0] != own[1] != own[2] != own[0]
    for record in caplog.records:
        if "shuffle" in record.getMessage():
            messages.same(record.levelname, record.getMessage())
    one, *others = orders("examples")  # each takes its rows of the same batches
    assert others == [one, one]
    assert own[0] == one


def test_estimators_of_one_process_draw_a_seed_where_none_was_given(tmp_path: Path) -> None:
    seeds = {Estimator(line, tmp_path, RunConfig(tf_random_seed=None)).config.tf_random_seed for _ in range(3)}
    assert len(seeds) == 3
