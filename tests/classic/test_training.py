"""tf.estimator's train_and_evaluate, its specs, and the hooks that stop training early.

Acceptance list of tf.estimator's own tests (T training_test, S early_stopping_test), and where each is asserted:

    T TrainSpec, EvalSpec: defaults, validation, names of exporters    below
    T local: an evaluation of each checkpoint, exports, the final one  below; estimator/test_training.py, exporters
    T listeners that stop before and after an evaluation               tests/estimator/test_training.py
    T throttling, and the last checkpoint all the same                 below, tests/estimator/test_training.py
    T evaluator: several, none or the same checkpoint, delays          tests/integration/test_roles.py
    T worker, chief, ps: servers and delays                            there are none: tests/launch/test_gang.py
    T dispatch by role, an evaluator other than 0                      tests/integration/test_roles.py, below
    T what evaluate may return                                         nobody overrides it here
    S thresholds, steps without improvement, damaged event files       below
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from runner.classic import early_stopping
from runner.classic.estimator import Estimator
from runner.classic.run_config import RunConfig
from runner.tracking import tensorboard
from tests.classic.test_estimator import evaluated, mirrored
from tests.support.classic_models import batches, dense
from tests.support.messages import Messages

TrainSpec, EvalSpec = tf.estimator.TrainSpec, tf.estimator.EvalSpec


class Exporter(tf.estimator.Exporter):
    """Remembers how it was called."""

    def __init__(self, name: str = "mine") -> None:
        self._name, self.calls = name, list[Any]()

    @property
    def name(self) -> str:
        return self._name

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        self.calls.append((eval_result["global_step"], is_the_final_export))
        return f"{self.name}-{eval_result['global_step']}"


ADDRESS = r"(?<= at )0x[0-9a-f]+"

# --- specs ------------------------------------------------------------------------------------------------------


def test_defaults_of_the_specs_are_those_of_2_15() -> None:
    train, evaluation = TrainSpec(batches()), EvalSpec(batches())
    assert (train.max_steps, train.hooks, train.saving_listeners) == (None, (), ())
    assert (evaluation.steps, evaluation.start_delay_secs, evaluation.throttle_secs) == (100, 120, 600)
    assert (evaluation.name, evaluation.hooks, evaluation.exporters) == (None, (), ())
    one = Exporter()
    assert EvalSpec(batches(), exporters=one).exporters == (one,)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: TrainSpec("no"), TypeError),
        (lambda: TrainSpec(batches(), max_steps=0), ValueError),
        (lambda: TrainSpec(batches(), hooks=[object()]), TypeError),
        (lambda: TrainSpec(batches(), saving_listeners=[object()]), TypeError),
        (lambda: EvalSpec("no"), TypeError),
        (lambda: EvalSpec(batches(), steps=0), ValueError),
        (lambda: EvalSpec(batches(), name=3), TypeError),
        (lambda: EvalSpec(batches(), hooks=[object()]), TypeError),
        (lambda: EvalSpec(batches(), start_delay_secs=-1), ValueError),
        (lambda: EvalSpec(batches(), throttle_secs=-1), ValueError),
        (lambda: EvalSpec(batches(), exporters=object()), TypeError),
        (lambda: EvalSpec(batches(), exporters=[Exporter(), Exporter()]), ValueError),
    ],
    ids=[
        "train, input_fn", "max_steps", "train, hooks", "saving_listeners", "eval, input_fn", "steps", "name",
        "eval, hooks", "start_delay_secs", "throttle_secs", "exporters", "two of a name",
    ],
)  # fmt: skip
def test_specs_that_cannot_be_are_refused(make: Any, error: type[Exception], messages: Messages) -> None:
    with messages.raised(error, hide=ADDRESS):
        make()


def test_specs_are_tuples_that_can_be_changed_in_a_copy(tmp_path: Path) -> None:
    train = TrainSpec(batches(), max_steps=3)._replace(max_steps=2)
    _, steps, name, hooks, exporters, delay, throttle = EvalSpec(batches(), 5, "dev")
    assert (steps, name, hooks, exporters, delay, throttle) == (5, "dev", (), (), 120, 600)
    evaluation = EvalSpec(batches(2))._replace(steps=1, exporters=Exporter())
    found, exported = tf.estimator.train_and_evaluate(Estimator(dense, str(tmp_path)), train, evaluation)
    assert found["global_step"] == train.max_steps == 2 and exported == ["mine-2"]
    spec = tf.estimator.EstimatorSpec("infer", predictions=tf.zeros([1]))
    assert tf.estimator.EstimatorSpec(**spec._asdict()).predictions is spec.predictions
    tpu = tf.estimator.tpu
    assert tpu.TPUConfig(iterations_per_loop=7)._replace(num_shards=3).iterations_per_loop == 7
    assert tpu.TPUEstimatorSpec("infer", {"y": 1})._replace(loss=2)[:3] == ("infer", {"y": 1}, 2)


def test_arguments_of_another_kind_are_refused(tmp_path: Path, messages: Messages) -> None:
    estimator = Estimator(dense, str(tmp_path))
    for wrong in ((None, TrainSpec(batches()), EvalSpec(batches())), (estimator, None, EvalSpec(batches()))):
        with messages.raised(TypeError):
            tf.estimator.train_and_evaluate(*wrong)


# --- train_and_evaluate -----------------------------------------------------------------------------------------


def test_every_checkpoint_is_evaluated_and_exported_and_the_last_one_is_final(tmp_path: Path) -> None:
    """22 steps, saved every 10: one run of training, three evaluations and exports, and the results of the last."""
    estimator = Estimator(dense, str(tmp_path), RunConfig(save_checkpoints_steps=10))
    exporter, begun = Exporter(), list[str]()

    class Runs(tf.train.SessionRunHook):
        def begin(self) -> None:
            begun.append("a run")

    spec = EvalSpec(batches(2), steps=1, exporters=exporter, throttle_secs=0, name="dev")
    train = TrainSpec(batches(), max_steps=22, hooks=[Runs()])
    found, exported = tf.estimator.train_and_evaluate(estimator, train, spec)
    assert begun == ["a run"]
    assert evaluated(estimator.eval_dir("dev"), "mae") == [10, 20, 22]
    assert [step for step, is_final in exporter.calls if not is_final] == [10, 20]
    assert exporter.calls[-1] == (22, True)
    assert set(found) == {"loss", "mae", "global_step"} and found["global_step"] == 22
    assert exported == ["mine-22"]


@pytest.mark.slow
def test_a_finished_run_is_evaluated_where_tf_estimator_returned_nothing(tmp_path: Path) -> None:
    config = RunConfig(train_distribute=mirrored(), eval_distribute=mirrored())
    specs = TrainSpec(batches(), max_steps=2), EvalSpec(batches(2))
    first, _ = tf.estimator.train_and_evaluate(Estimator(dense, str(tmp_path), config), *specs)
    again, exported = tf.estimator.train_and_evaluate(Estimator(dense, str(tmp_path), config), *specs)
    assert again == first and again["global_step"] == 2
    assert exported == []


def test_throttling_leaves_out_all_but_the_first_and_the_last(tmp_path: Path) -> None:
    """The start delay is one of evaluator processes: who trains evaluates the first checkpoint that it saves."""
    estimator = Estimator(dense, str(tmp_path), RunConfig(save_checkpoints_steps=2))
    tf.estimator.train_and_evaluate(estimator, TrainSpec(batches(), max_steps=6), EvalSpec(batches(2)))
    assert evaluated(estimator.eval_dir(), "mae") == [2, 6]


def test_training_without_summaries_still_saves(tmp_path: Path) -> None:
    """Under several workers save_summary_steps=0 made tf.estimator write no checkpoint."""
    estimator = Estimator(dense, str(tmp_path), RunConfig(save_summary_steps=0, train_distribute=mirrored()))
    assert estimator.train(batches(3)).latest_checkpoint() == str(tmp_path / "model.ckpt-2")


def test_an_evaluator_is_number_0(tmp_path: Path, messages: Messages) -> None:
    tree = {"cluster": {"chief": ["a:1"], "evaluator": ["b:2"]}, "task": {"type": "evaluator", "index": 0}}
    config = RunConfig(tf_config=json.dumps(tree))
    config = config.replace(cluster=type(config.cluster)("evaluator", 1))
    with messages.raised(ValueError):
        tf.estimator.train_and_evaluate(Estimator(dense, str(tmp_path), config), TrainSpec(batches()),
                                        EvalSpec(batches()))  # fmt: skip


# --- early stopping ---------------------------------------------------------------------------------------------

EVENTS = {1000: (0.8, 0.5), 2000: (0.7, 0.6), 3000: (0.4, 0.7), 3500: (0.41, 0.68)}
"""Global step -> (loss, accuracy) of an evaluation."""


class Run:
    """As a hook sees it."""

    model_dir, global_step, interrupted = "", 4000, False

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def request_stop(self, reason: str = "") -> None:
        self.reasons.append(reason)


@pytest.fixture
def estimator(tmp_path: Path) -> Estimator:
    """One that has been evaluated, each time into an event file."""
    estimator = Estimator(dense, str(tmp_path))
    for step, (loss, accuracy) in EVENTS.items():
        writer = tensorboard.build_writer(estimator.eval_dir(), is_on=True)
        tensorboard.write_events(writer, step, {"loss": np.float32(loss), "accuracy": np.float32(accuracy)})
        writer.close()
    return estimator


def stops(hook: Any) -> bool:
    run = Run()
    hook.begin(run)
    return bool(run.reasons)


@pytest.mark.parametrize(
    ("make", "arguments", "expected"),
    [
        ("stop_if_higher_hook", ("accuracy", 0.5, None, 0), True),
        ("stop_if_higher_hook", ("accuracy", 0.69, None, 3500), False),
        ("stop_if_higher_hook", ("accuracy", 0.69, None, 2000), True),
        ("stop_if_higher_hook", ("accuracy", 0.8, None, 0), False),
        ("stop_if_lower_hook", ("loss", 0.4001, None, 0), True),
        ("stop_if_lower_hook", ("loss", 0.4001, None, 3500), False),
        ("stop_if_lower_hook", ("loss", 0.3, None, 0), False),
        ("stop_if_no_increase_hook", ("accuracy", 500, None, 0), True),
        ("stop_if_no_increase_hook", ("accuracy", 501, None, 0), False),
        ("stop_if_no_increase_hook", ("loss", 2500, None, 0), True),
        ("stop_if_no_decrease_hook", ("loss", 500, None, 0), True),
        ("stop_if_no_decrease_hook", ("loss", 1000, None, 0), False),
        ("stop_if_no_decrease_hook", ("accuracy", 1500, None, 2000), True),
        ("stop_if_no_decrease_hook", ("accuracy", 1600, None, 2000), False),
    ],
)
def test_early_stopping_hooks_read_what_evaluations_found(
    estimator: Estimator, make: str, arguments: tuple[Any, ...], expected: bool
) -> None:
    hook = getattr(tf.estimator.experimental, make)(estimator, *arguments)
    assert stops(hook) is expected
    # In a session of TensorFlow, as in 2.15: it asks after the first step.
    with tf.Graph().as_default():
        tf.train.create_global_step()
        nothing = tf.no_op()
        with tf.train.SingularMonitoredSession(hooks=[hook]) as session:
            session.run(nothing)
            assert session.should_stop() is expected


def test_a_metric_that_no_evaluation_has_is_named(estimator: Estimator, tmp_path: Path, messages: Messages) -> None:
    hook = tf.estimator.experimental.stop_if_higher_hook(estimator, "acuracy", 0.5)
    with messages.raised(KeyError):  # as in 2.15
        stops(hook)
    assert not stops(tf.estimator.experimental.stop_if_higher_hook(estimator, "any", 0.5, str(tmp_path / "none_yet")))


def test_a_damaged_event_file_is_read_up_to_the_damage(estimator: Estimator) -> None:
    first, second, *_ = sorted(Path(estimator.eval_dir()).glob("events*"))
    first.write_bytes(first.read_bytes() + second.read_bytes()[:-20])
    second.unlink()
    found = early_stopping.read_eval_metrics(estimator.eval_dir())
    assert list(found) == [1000, 3000, 3500] and len(found[1000]) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, lambda: True), TypeError),
        (("estimator", None), TypeError),
        (("estimator", lambda: True, 60, 100), ValueError),
        (("estimator", lambda: True, None, None), ValueError),
    ],
    ids=["no estimator", "no function", "seconds and steps", "neither"],
)
def test_early_stopping_hooks_that_cannot_be_are_refused(
    estimator: Estimator, arguments: tuple[Any, ...], error: type[Exception], messages: Messages
) -> None:
    given: list[Any] = [estimator if one == "estimator" else one for one in arguments]
    with messages.raised(error):
        early_stopping.make_early_stopping_hook(*given)


def test_early_stopping_works_under_a_strategy_and_leaves_nothing_in_the_checkpoint(tmp_path: Path) -> None:
    """tf.estimator's: a ValueError under any strategy, a variable STOP in the checkpoint, one step more in a re-run, a
    NotFoundError where the model had been trained without the hook (tensorflow issue 51525)."""
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    def train(steps: int | None = None) -> Estimator:
        estimator = Estimator(dense, str(tmp_path), RunConfig(train_distribute=mirrored()))
        hook = tf.estimator.experimental.make_early_stopping_hook(
            estimator, should_stop, run_every_secs=None, run_every_steps=3
        )
        return estimator.train(batches(), hooks=[hook], steps=steps)  # type: ignore[return-value]

    Estimator(dense, str(tmp_path)).train(batches(), steps=1)
    assert train().get_variable_value("global_step") == 6
    assert [name for name in train().get_variable_names() if "STOP" in name] == []
    assert train().get_variable_value("global_step") == 6
