"""Hooks: native ones, and those of tf.compat.v1.train on a traced step."""

from __future__ import annotations

import collections
import itertools
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Every, Hook, RunConfig, StepResult
from runner.hooks.builtin_hooks import split_hooks
from runner.hooks.hook import Interrupted, TimeLimit, WhenDue
from runner.programs.model import Model
from tests.support.line import LINES, line, mirrored, native_line, points, steps_of
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1


def estimator(model_dir: Path, model_fn: Any = line, **config: Any) -> Estimator:
    return Estimator(model_fn, model_dir, RunConfig(**config))


def train(model_dir: Path, hooks: list[Any], steps: int, model_fn: Any = line, **config: Any) -> Any:
    return estimator(model_dir, model_fn, **config).train_run(points(repeat=True), hooks=hooks, steps=steps)


# --- cadences -----------------------------------------------------------------------------------------------------


def test_cadence_in_steps_is_crossed_not_met() -> None:
    every = Every(steps=100)
    assert every.due(99, 100) and every.due(0, 100) and every.due(90, 250)
    assert not every.due(100, 199) and not every.due(0, 99) and not every.due(100, 100)
    assert [every.steps_until_due(step) for step in (0, 99, 100, 101)] == [100, 1, 100, 99]


def test_cadence_in_seconds_is_due_after_them() -> None:
    every = Every(secs=30)
    assert every.due(0, 1, elapsed_secs=30) and not every.due(0, 1, elapsed_secs=29.9)
    assert every.steps_until_due(7) == math.inf


def test_no_cadence_is_never_due() -> None:
    assert not Every().due(0, 10**9, elapsed_secs=1e9) and Every().steps_until_due(0) == math.inf


# --- native hooks -------------------------------------------------------------------------------------------------


class Recorder(Hook):
    """Notes its calls, with the steps that it is told of."""

    def __init__(self, every: Every = Every()) -> None:  # noqa: B008
        self.every = every
        self.calls: list[Any] = []
        self.results: list[StepResult] = []

    def begin(self, run: Any) -> None:
        self.calls.append(("begin", run.global_step))
        self.model_dir = run.model_dir

    def before_step(self, run: Any, step: int) -> None:
        self.calls.append(("before", step))

    def after_step(self, run: Any, result: StepResult) -> None:
        assert run.global_step == result.last_step
        self.calls.append(("after", result.last_step))
        self.results.append(result)

    def end(self, run: Any) -> None:
        self.calls.append(("end", run.global_step))

    @property
    def ends(self) -> list[int]:
        """Where loops ended."""
        return [result.last_step for result in self.results]


def test_methods_are_called_in_order(tmp_path: Path) -> None:
    hook = Recorder()
    train(tmp_path, [hook], 5, steps_per_loop=2)
    loops = [("before", 0), ("after", 2), ("before", 2), ("after", 4), ("before", 4), ("after", 5)]
    assert hook.calls == [("begin", 0), *loops, ("end", 5)]
    assert hook.model_dir == str(tmp_path)


def test_result_holds_every_step_of_the_loop(tmp_path: Path) -> None:
    single, looped = Recorder(), Recorder()
    train(tmp_path / "a", [single], 5, steps_per_loop=1)
    train(tmp_path / "b", [looped], 5, steps_per_loop=3)
    first, second = looped.results
    assert (first.first_step, first.last_step, first.num_steps, first.examples) == (1, 3, 3, 6)
    assert (second.first_step, second.last_step, second.num_steps, second.examples) == (4, 5, 2, 4)
    assert first.secs > 0
    one_by_one = np.concatenate([result.losses for result in single.results])
    np.testing.assert_array_equal(np.concatenate([first.losses, second.losses]), one_by_one)
    assert one_by_one[0] == pytest.approx((2**2 + 4**2) / 2)


def test_hooks_are_told_of_the_step_where_a_run_resumes(tmp_path: Path) -> None:
    train(tmp_path, [], 3)
    hook = Recorder()
    train(tmp_path, [hook], 2, steps_per_loop=10)
    assert hook.calls == [("begin", 3), ("before", 3), ("after", 5), ("end", 5)]


def test_hooks_are_called_at_the_steps_that_they_ask_for_with_all_steps_since(tmp_path: Path) -> None:
    fours, sixes, all_loops = Recorder(Every(steps=4)), Recorder(Every(steps=6)), Recorder()
    train(tmp_path, [fours, sixes, all_loops], 14, steps_per_loop=100)
    assert fours.ends == [4, 8, 12] and sixes.ends == [6, 12], "not at the end, which is no multiple"
    assert all_loops.ends == [4, 6, 8, 12, 14]
    assert [call for call in fours.calls if call[0] == "before"] == [("before", 0), ("before", 4), ("before", 8),
                                                                     ("before", 12)]  # fmt: skip
    second = fours.results[1]
    assert (second.first_step, second.num_steps, second.examples) == (5, 4, 8)
    losses = np.concatenate([result.losses for result in all_loops.results])
    np.testing.assert_array_equal(np.concatenate([result.losses for result in fours.results]), losses[:12])
    resumed = Recorder(Every(steps=4))
    train(tmp_path, [resumed], 6, steps_per_loop=1)
    assert resumed.ends == [16, 20] and resumed.results[0].first_step == 15


def test_a_hook_with_a_cadence_in_seconds_is_called_at_the_first_end_of_a_loop_after_them() -> None:
    now, hook = [0.0], Recorder(Every(secs=30))
    due = WhenDue(hook, clock=lambda: now[0])
    run: Any = SimpleNamespace(global_step=0)
    for step in range(1, 8):
        due.before_step(run, step - 1)
        now[0] += 12
        run.global_step = step
        due.after_step(run, StepResult(step, step, np.ones(1), 2, 12.0))
    assert hook.ends == [3, 6] and hook.results[1].secs == 36


def test_training_ends_after_so_many_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    clock = itertools.count()  # a second at each look: when it begins, and after each loop
    with caplog.at_level(logging.INFO, "runner"):
        run = train(tmp_path, [TimeLimit(3, clock=lambda: next(clock))], 100, steps_per_loop=2)
    assert run.global_step == 6 and run.stop_reason == "train.max_secs=3"
    assert estimator(tmp_path).get_variable_value("global_step") == 6
    (record,) = [one for one in caplog.records if "train.max_secs" in one.getMessage()]
    messages.same(record.levelname, record.getMessage())


def test_loops_grow_by_themselves_and_still_end_there(tmp_path: Path) -> None:
    hook, all_loops = Recorder(Every(steps=40)), Recorder()
    train(tmp_path, [hook, all_loops], 100)
    assert hook.ends == [40, 80] and {40, 80, 100} <= set(all_loops.ends) and len(all_loops.ends) < 10


def test_native_hook_can_stop(tmp_path: Path) -> None:
    class Stop(Recorder):
        def after_step(self, run: Any, result: StepResult) -> None:
            super().after_step(run, result)
            if result.last_step >= 4:
                run.request_stop("it is enough")

    hook = Stop()
    run = train(tmp_path, [hook], 10, steps_per_loop=2)
    assert run.stop_reason == "it is enough" and run.global_step == 4
    assert hook.calls[-2:] == [("after", 4), ("end", 4)]
    assert estimator(tmp_path).get_variable_value("global_step") == 4


def test_end_is_not_called_when_training_fails(tmp_path: Path) -> None:
    class Fails(Recorder):
        def after_step(self, run: Any, result: StepResult) -> None:
            raise OSError("disk")

    hook = Recorder()
    with pytest.raises(OSError, match="disk"):
        train(tmp_path, [hook, Fails()], 4)
    assert hook.calls[-1][0] == "after"


def test_native_hooks_are_not_called_for_loops_without_a_step(tmp_path: Path) -> None:
    hook = Recorder()
    estimator(tmp_path, steps_per_loop=2).train(points(8, 2), hooks=[hook])
    assert hook.ends == [2, 4] and all(result.num_steps for result in hook.results)


def test_hook_needs_no_base_class(tmp_path: Path) -> None:
    class Duck:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def begin(self, run: Any) -> None:
            self.calls.append("begin")

        def before_step(self, run: Any, step: int) -> None:
            self.calls.append("before")

        def after_step(self, run: Any, result: Any) -> None:
            self.calls.append("after")

        def end(self, run: Any) -> None:
            self.calls.append("end")

    duck = Duck()
    trainer = estimator(tmp_path, steps_per_loop=5).train(points(repeat=True), hooks=[duck], steps=5)
    trainer.evaluate(points(), hooks=[duck])
    assert duck.calls == ["begin", "before", "after", "end", "begin", "end"]


def test_what_is_no_hook_is_refused(tmp_path: Path, messages: Messages) -> None:
    with messages.raised(TypeError):
        train(tmp_path, ["x"], 1)


@pytest.mark.parametrize("style", LINES)
def test_native_hooks_begin_and_end_evaluations_and_predictions(style: str, tmp_path: Path) -> None:
    evaluating, predicting, given = Recorder(), Recorder(), Recorder()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = LINES[style](features, labels, mode, params)
        return spec._replace(evaluation_hooks=[evaluating], prediction_hooks=[predicting])

    trainer = estimator(tmp_path, model_fn).train(points(), steps=3)
    assert not evaluating.calls and not predicting.calls
    trainer.evaluate(points(), hooks=[given])
    assert evaluating.calls == given.calls == [("begin", 3), ("end", 3)] and given.model_dir == str(tmp_path)
    predictions = trainer.predict(points(), hooks=[given])
    assert not predicting.calls
    next(predictions)
    assert predicting.calls == [("begin", 3)]
    list(predictions)
    assert predicting.calls == given.calls[2:] == [("begin", 3), ("end", 3)]


def test_an_evaluation_cannot_be_stopped(tmp_path: Path, messages: Messages) -> None:
    class Stop(Hook):
        def begin(self, run: Any) -> None:
            run.request_stop("no")

    trainer = estimator(tmp_path).train(points(), steps=1)
    with messages.raised(RuntimeError):
        trainer.evaluate(points(), hooks=[Stop()])


def test_hooks_are_told_how_many_examples_a_pass_has_seen(tmp_path: Path) -> None:
    class Counter(Hook):
        def __init__(self) -> None:
            self.told: list[int] = []

        def after_batches(self, run: Any, examples: int) -> None:
            assert run.global_step == 3
            self.told.append(examples)

    trainer = estimator(tmp_path).train(points(), steps=3)
    evaluating, predicting = Counter(), Counter()
    trainer.evaluate(points(7, 2), hooks=[evaluating])
    list(trainer.predict(points(7, 2), hooks=[predicting]))
    assert evaluating.told[-1] == 7 and evaluating.told == sorted(evaluating.told)
    assert predicting.told == [2, 4, 6, 7]


def test_a_pass_can_be_given_up(tmp_path: Path) -> None:
    class GivesUp(Hook):
        def after_batches(self, run: Any, examples: int) -> None:
            run.interrupt("enough")

    trainer = estimator(tmp_path).train(points(), steps=3)
    before = trainer.evaluate(points())
    with pytest.raises(Interrupted, match="enough"):
        trainer.evaluate(points(), hooks=[GivesUp()])
    with pytest.raises(Interrupted, match="enough"):
        next(trainer.predict(points(), hooks=[GivesUp()]))
    assert len(steps_of(trainer.eval_dir(), "loss")) == 1, "it has no result"
    assert trainer.evaluate(points()) == before


# --- hooks of tf.compat.v1.train: any of them ---------------------------------------------------------------------


class Session(tf.compat.v1.train.SessionRunHook):
    """Notes its calls, and the values of what `ask` gives it in `begin`."""

    def __init__(self, ask: Any = None, stop_at: int | None = None) -> None:
        self._ask, self._stop_at = ask, stop_at
        self.calls: list[str] = []
        self.values: list[Any] = []

    def begin(self) -> None:
        self.calls.append("begin")
        self._fetches = self._ask() if self._ask else None

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.calls.append("session")

    def before_run(self, run_context: Any) -> Any:
        self.calls.append("before")
        return v1.train.SessionRunArgs(self._fetches) if self._ask else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.calls.append("after")
        self.values.append(run_values.results)
        if len(self.values) == self._stop_at:
            run_context.request_stop()

    def end(self, session: Any) -> None:
        self.calls.append("end")


def test_session_hook_is_called_for_each_step_as_in_a_session(tmp_path: Path) -> None:
    hook = Session()
    train(tmp_path, [hook], 3)
    assert hook.calls == ["begin", "session", *["before", "after"] * 3, "end"]
    assert hook.values == [None] * 3


def test_unknown_hook_makes_one_step_per_loop_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    recorder = Recorder()
    with caplog.at_level(logging.WARNING, logger="runner"):
        train(tmp_path, [Session(), recorder], 5, steps_per_loop=5)
    assert recorder.ends == [1, 2, 3, 4, 5]
    messages.logged(caplog, "Session")


def test_request_stop_ends_training_at_that_step(tmp_path: Path) -> None:
    hook = Session(stop_at=3)
    run = train(tmp_path, [hook], 10)
    assert run.global_step == 3 and run.stop_reason == "Session requested it" and hook.calls[-1] == "end"
    assert estimator(tmp_path).get_variable_value("global_step") == 3


def weight_variable() -> Any:
    (weight,) = v1.trainable_variables()
    return weight


def graph_tensor() -> Any:
    return v1.get_default_graph().get_tensor_by_name("my_loss:0")


def three_steps() -> tuple[list[float], list[float]]:
    """(losses, weights before and after them) of the first three steps of `line` on points(8, 2)."""
    losses, weights = [], [0.0]
    for x in (np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0])):
        error = x * (weights[-1] - 2)
        losses.append(float(np.mean(error**2)))
        weights.append(weights[-1] - 0.01 * float(np.mean(2 * error * x)))
    return losses, weights


LOSSES, WEIGHTS = three_steps()


ASKED: dict[str, tuple[Any, list[float]]] = {
    "name": (lambda: "my_loss:0", LOSSES),
    "tensor": (graph_tensor, LOSSES),
    "global step": (v1.train.get_global_step, [0, 1, 2]),
    "global step or new": (v1.train.get_or_create_global_step, [0, 1, 2]),
    "variable": (weight_variable, WEIGHTS[:3]),
    "new tensor": (lambda: weight_variable() * 2, [2 * weight for weight in WEIGHTS[:3]]),
    "name of a variable": (lambda: "weight:0", WEIGHTS[:3]),
    "its name alone": (lambda: "weight", WEIGHTS[:3]),
    "name of the global step": (lambda: "global_step:0", [0, 1, 2]),
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    """Return a hook for each of ASKED, after three steps with all of them."""
    hooks = {name: Session(ask) for name, (ask, _) in ASKED.items()}
    train(tmp_path_factory.mktemp("asked"), list(hooks.values()), 3)
    return hooks


@pytest.mark.parametrize("name", ASKED)
def test_session_run_args_get_values_of_the_step_and_variables_before_it(
    name: str, answered: dict[str, Session]
) -> None:
    assert answered[name].values == pytest.approx(ASKED[name][1], rel=1e-5)


def test_session_run_args_may_be_nested(tmp_path: Path) -> None:
    def ask() -> Any:
        nothing = tf.no_op()
        return {
            "b": ["my_loss:0", v1.train.get_global_step()],
            "a": {"none": nothing},
            "op": nothing,
            "g": graph_tensor(),
        }

    hook = Session(ask)
    train(tmp_path, [hook], 2)
    assert [value["b"][1] for value in hook.values] == [0, 1]
    assert [value["b"][0] for value in hook.values] == [value["g"] for value in hook.values]
    assert hook.values[0]["a"] == {"none": None} and hook.values[0]["op"] is None


def test_two_hooks_get_their_own_values(tmp_path: Path) -> None:
    hooks = [Session(lambda: "my_loss:0"), Session(), Session(lambda: [v1.train.get_global_step()])]
    train(tmp_path, hooks, 2)
    assert hooks[0].values[0] == pytest.approx(10.0)
    assert hooks[1].values == [None, None] and hooks[2].values == [[0], [1]]


def test_operations_that_hooks_fetch_run_once_a_step(tmp_path: Path) -> None:
    counter = tf.Variable(0)
    hook = Session(lambda: counter.assign_add(1).op)
    train(tmp_path, [hook], 4)
    assert counter.numpy() == 4 and hook.values == [None] * 4


def test_fetching_by_name_does_not_trace_each_step_anew(tmp_path: Path) -> None:
    trainer = estimator(tmp_path)
    trainer.train(points(repeat=True), hooks=[Session(lambda: "my_loss:0")], steps=6)
    (model,) = trainer._models._by_strategy.values()
    (program,) = model._programs.values()
    assert len(program._loops) <= 2


def test_session_run_gives_the_values_after_the_step(tmp_path: Path) -> None:
    class Looks(Session):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            step, weight = run_context.session.run([v1.train.get_global_step(), weight_variable()])
            self.values.append((*run_values.results, step, weight))

    hook = Looks(lambda: [v1.train.get_global_step(), weight_variable()])
    train(tmp_path, [hook], 3)
    assert hook.values == [(n, pytest.approx(WEIGHTS[n]), n + 1, pytest.approx(WEIGHTS[n + 1])) for n in range(3)]


def test_a_name_that_is_not_there_is_shown_with_those_that_are_near(tmp_path: Path, messages: Messages) -> None:
    hooks = [Session(lambda: "my_los:0"), v1.train.LoggingTensorHook(["wieght"], every_n_iter=1)]
    with messages.raised(ValueError):
        train(tmp_path, hooks[:1], 1)
    with messages.raised(ValueError):
        train(tmp_path, hooks[1:], 1)


def test_session_in_a_hook_reads_and_writes_variables(tmp_path: Path) -> None:
    class Doubles(Session):
        def begin(self) -> None:
            self.double = weight_variable().assign(weight_variable() + 100.0)

        def after_create_session(self, session: Any, coord: Any) -> None:
            session.run(self.double)
            self.seen = session.run(weight_variable())

        def end(self, session: Any) -> None:
            self.last = session.run(v1.train.get_global_step())

    hook = Doubles()
    trainer = estimator(tmp_path, LINES["classic"])
    trainer.train(points(), hooks=[hook], steps=1)
    assert hook.seen == 100.0 and hook.last == 1
    assert trainer.get_variable_value("weight") == pytest.approx(100 - 0.01 * 2 * 98 * (1 + 4) / 2, rel=1e-5)


@pytest.mark.parametrize("style", LINES)
def test_what_a_hook_adds_to_the_graph_runs_when_it_is_asked_for(style: str, tmp_path: Path) -> None:
    class Adds(Session):
        def begin(self) -> None:
            weight_variable().assign(100.0)

    trainer = estimator(tmp_path, LINES[style]).train(points(), hooks=[Adds()], steps=3)
    assert trainer.evaluate(points())["mae"] < 50


def test_tracing_a_step_is_refused(tmp_path: Path, messages: Messages) -> None:
    class Traces(Session):
        def before_run(self, run_context: Any) -> Any:
            return v1.train.SessionRunArgs(None, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE))

    with messages.raised(ValueError):
        train(tmp_path, [Traces()], 2)


def test_hooks_add_to_the_graph_that_is_default_in_all_their_methods(tmp_path: Path) -> None:
    class Looks(Session):
        def begin(self) -> None:
            self.graph = v1.get_default_graph()
            self.same: list[bool] = []

        def after_create_session(self, session: Any, coord: Any) -> None:
            self.look(session)

        def before_run(self, run_context: Any) -> None:
            self.look(run_context.session)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.look(run_context.session)

        def end(self, session: Any) -> None:
            self.look(session)

        def look(self, session: Any) -> None:
            self.same.append(v1.get_default_graph() is self.graph is session.graph and not tf.executing_eagerly())

    hook = Looks()
    train(tmp_path, [hook], 1)
    assert hook.same == [True] * 4


@pytest.mark.parametrize(
    ("style", "strategy"),
    slow_but(itertools.product(LINES, ["default", "mirrored"]), ("native", "default"), ("classic", "mirrored")),
)
def test_session_hooks_see_each_batch_of_evaluations_and_predictions(style: str, strategy: str, tmp_path: Path) -> None:
    hooks = [Session(lambda: ("named:0", v1.train.get_global_step())) for _ in range(3)]

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        tf.identity(tf.reduce_min(features), name="named")
        spec = LINES[style](features, labels, mode, params)
        return spec._replace(evaluation_hooks=[hooks[0]], prediction_hooks=[hooks[1]])

    distribute = mirrored() if strategy == "mirrored" else None
    trainer = estimator(tmp_path, model_fn, train_distribute=distribute).train(points(), steps=1)
    expected, predicted = trainer.evaluate(points(7, 2)), list(trainer.predict(points(7, 2)))
    firsts = [1.0, 3.0, 5.0, 7.0] if strategy == "default" else [1.0, 5.0]
    for hook in hooks[:2]:
        assert hook.values == [(first, 1) for first in firsts]
        assert hook.calls[:3] == ["begin", "session", "before"] and hook.calls[-1] == "end"
    assert trainer.evaluate(points(7, 2), hooks=[hooks[2]], steps=1)["global_step"] == 1
    assert hooks[2].values == [(1.0, 1)]
    plain = Estimator(LINES[style], tmp_path, RunConfig(train_distribute=distribute))
    assert plain.evaluate(points(7, 2)) == pytest.approx(expected) and list(plain.predict(points(7, 2))) == predicted


def test_evaluation_with_session_hooks_takes_the_batches_asked_for(tmp_path: Path) -> None:
    hook = Session()
    trainer = estimator(tmp_path).train(points(), steps=1)
    assert trainer.evaluate(points(8, 2), hooks=[hook], steps=3) == trainer.evaluate(points(6, 2))
    assert len(hook.values) == 3


# --- hooks of tf.compat.v1.train: TensorFlow's own, which keep the loop -------------------------------------------


def test_stop_at_step_hook_is_a_target(tmp_path: Path) -> None:
    recorder = Recorder()
    train(tmp_path, [v1.train.StopAtStepHook(num_steps=6), recorder], 10, steps_per_loop=4)
    assert recorder.ends == [4, 6]
    run = train(tmp_path, [v1.train.StopAtStepHook(last_step=9)], 10)
    assert run.global_step == 9
    assert train(tmp_path, [v1.train.StopAtStepHook(num_steps=2)], 10).global_step == 11


def test_first_of_several_stop_hooks_counts(tmp_path: Path) -> None:
    hooks = [v1.train.StopAtStepHook(num_steps=n) for n in (5, 3, 8)]
    assert train(tmp_path, hooks, 10).global_step == 3


def test_step_counter_hook_is_the_runners_own_speed(tmp_path: Path) -> None:
    recorder = Recorder()
    hooks = [v1.train.StepCounterHook(every_n_steps=2, output_dir=str(tmp_path / "else")), recorder]
    train(tmp_path, hooks, 6, steps_per_loop=6, save_summary_steps=3)
    assert recorder.ends == [6] and steps_of(tmp_path, "global_step/sec")[-1] == 6


def test_checkpoint_saver_hook_sets_the_cadence_and_its_listeners_are_told(tmp_path: Path) -> None:
    class Listener(tf.compat.v1.train.CheckpointSaverListener):
        def __init__(self) -> None:
            self.saved: list[int] = []

        def begin(self) -> None:
            self.doubled = v1.train.get_global_step() * 2

        def after_save(self, session: Any, global_step_value: int) -> None:
            self.saved.append(global_step_value)
            assert session.run([v1.train.get_global_step(), self.doubled]) == [global_step_value, 2 * global_step_value]

    listeners = [Listener(), Listener()]
    recorder = Recorder()
    hooks = [v1.train.CheckpointSaverHook(str(tmp_path), save_steps=4, listeners=[listener]) for listener in listeners]
    train(tmp_path, [*hooks, recorder], 10, steps_per_loop=100)
    assert recorder.ends == [4, 8, 10]
    assert [listener.saved for listener in listeners] == [[0, 4, 8, 10]] * 2


def failing(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """The loss is infinite from the fifth step on."""
    spec = line(features, labels, mode, params)
    loss = spec.loss / tf.cast(tf.reduce_max(features) < 9, tf.float32)
    return spec._replace(loss=loss)


def test_nan_tensor_hook_stops_where_config_would_not(tmp_path: Path, messages: Messages) -> None:
    hook = v1.train.NanTensorHook("my_loss")
    with messages.raised(v1.train.NanLossDuringTrainingError):
        estimator(tmp_path, failing, nan="ignore", steps_per_loop=8).train(points(16, 2), hooks=[hook])


def test_nan_tensor_hook_that_does_not_fail_ends_training_quietly(tmp_path: Path) -> None:
    hook = v1.train.NanTensorHook("my_loss", fail_on_nan_loss=False)
    run = estimator(tmp_path, failing, steps_per_loop=8).train_run(points(16, 2), hooks=[hook])
    assert run is not None and run.global_step == 5


class Lines(logging.Handler):
    """What LoggingTensorHook says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Any:
    handler, logger = Lines(), v1.get_logger() if hasattr(v1, "get_logger") else tf.get_logger()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_logging_tensor_hook_logs_on_its_cadence_and_keeps_the_loop(said: list[str], tmp_path: Path) -> None:
    recorder = Recorder()
    tensors = {"loss": "my_loss", "step": "step_of_line"}

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        tf.identity(v1.train.get_global_step(), name="step_of_line")
        return line(features, labels, mode, params)

    train(tmp_path, [v1.train.LoggingTensorHook(tensors, every_n_iter=10), recorder], 35, model_fn)
    assert {1, 11, 21, 31, 35} <= set(recorder.ends) and len(recorder.ends) < 14
    steps = [int(text.split("step = ")[1].split()[0].rstrip(",")) + 1 for text in said]
    assert steps == [1, 11, 21, 31]


def test_logging_tensor_hook_gets_values_of_the_step_and_formats_them(said: list[str], tmp_path: Path) -> None:
    hook = v1.train.LoggingTensorHook(
        ["my_loss"], every_n_iter=2, formatter=lambda values: f"<{values['my_loss']:.4f}>"
    )
    recorder = Recorder()
    train(tmp_path, [hook, recorder], 4, steps_per_loop=2)
    losses = np.concatenate([result.losses for result in recorder.results])
    assert said == [f"<{losses[0]:.4f}>", f"<{losses[2]:.4f}>"]


@pytest.mark.parametrize("ends", ["data", "nan"])
def test_logging_tensor_hook_is_left_out_of_a_loop_that_ends_early(
    ends: str, said: list[str], tmp_path: Path, messages: Messages
) -> None:
    recorder = Recorder()
    hooks = [v1.train.LoggingTensorHook(["my_loss"], every_n_iter=5), recorder]
    if ends == "nan":
        with messages.raised(v1.train.NanLossDuringTrainingError):
            estimator(tmp_path, failing, steps_per_loop=3).train(points(16, 2), hooks=hooks)
    else:
        # Of unknown cardinality, so that the end is found only by reaching it.
        run = estimator(tmp_path, steps_per_loop=3).train_run(
            lambda: points(8, 2)().filter(lambda *_: True), hooks=hooks
        )
        assert run is not None and run.global_step == 4
    assert recorder.ends[:2] == [1, 4] and len(said) == 1


def test_logging_tensor_hook_at_the_end_logs_the_last_values(said: list[str], tmp_path: Path) -> None:
    recorder = Recorder()
    hook = v1.train.LoggingTensorHook(["my_loss"], at_end=True, formatter=lambda values: f"{values['my_loss']:.4f}")
    train(tmp_path, [hook, recorder], 6, steps_per_loop=3)
    assert recorder.ends == [3, 6] and said == [f"{recorder.results[-1].losses[-1]:.4f}"]


def test_each_of_two_hooks_logs_its_own_values_at_the_end(said: list[str], tmp_path: Path) -> None:
    def hook(tensor: str) -> Any:
        return v1.train.LoggingTensorHook([tensor], at_end=True, formatter=lambda values: ", ".join(values))

    train(tmp_path, [hook("my_loss"), hook("my_loss:0"), hook("weight")], 2)
    assert said == ["my_loss", "my_loss:0", "weight"]


def test_logging_tensor_hook_by_the_clock(said: list[str], tmp_path: Path) -> None:
    recorder = Recorder()
    hooks = [v1.train.LoggingTensorHook(["my_loss"], every_n_secs=1e6), recorder]
    train(tmp_path, hooks, 6, steps_per_loop=3)
    assert recorder.ends == [1, 4, 6] and len(said) == 1


def test_logging_tensor_hook_takes_variables_and_their_names(said: list[str], tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        tensors = {"step": v1.train.get_global_step(), "named": "weight", "w": weight_variable()}
        hook = v1.train.LoggingTensorHook(tensors, every_n_iter=2, formatter=lambda values: seen.append(values))
        return spec._replace(training_hooks=[hook])

    seen: list[Any] = []
    trainer = estimator(tmp_path, model_fn).train(points(repeat=True), steps=2)
    trainer.train(points(repeat=True), steps=3)
    assert [values["step"] for values in seen] == [0, 2, 4]
    assert [values["w"] for values in seen[:2]] == [values["named"] for values in seen[:2]]
    assert [values["w"] for values in seen[:2]] == pytest.approx([WEIGHTS[0], WEIGHTS[2]])


def test_fetches_keep_their_structure_with_keys_of_any_kind(tmp_path: Path) -> None:
    """As a session gave them; tf.nest sorts keys."""
    from runner.classic.estimator import Estimator as Classic

    Pair = collections.namedtuple("Pair", "b a")
    seen: list[Any] = []

    class Asks(tf.compat.v1.train.SessionRunHook):
        def begin(self) -> None:
            loss, step = v1.losses.get_losses()[0], v1.train.get_global_step()
            others = collections.defaultdict(list, {"z": (step,), 1: []})
            self.fetches = {
                loss: loss,
                1: Pair(step, [loss]),
                "a": collections.OrderedDict([("y", step), ("x", others)]),
            }

        def before_run(self, run_context: Any) -> Any:
            return v1.train.SessionRunArgs(self.fetches)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            assert list(run_values.results) == list(self.fetches)
            seen.append(list(run_values.results.values()))

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        v1.add_to_collection(v1.GraphKeys.LOSSES, spec.loss)
        logged = v1.train.LoggingTensorHook([spec.loss, v1.train.get_global_step()], every_n_iter=1)
        return spec._replace(training_hooks=[logged])

    Classic(model_fn, tmp_path, params={}).train(points(repeat=True), hooks=[Asks()], steps=2)
    (loss, pair, named), _ = seen
    assert type(pair) is Pair and pair.b == 0 and pair.a == [loss]
    assert list(named) == ["y", "x"] and type(named["x"]) is collections.defaultdict
    assert list(named["x"].items()) == [("z", (0,)), (1, [])]


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_variables_are_evaluated_and_loaded_with_the_session_of_a_hook(strategy: str, tmp_path: Path) -> None:
    seen: list[float] = []

    class Doubles(tf.compat.v1.train.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            weight, session = weight_variable(), run_context.session
            seen.append(float(weight.eval(session=session)))
            weight.load(7.0, session)
            seen.append(float(weight.eval(session)))

    distribute = mirrored() if strategy == "mirrored" else None
    trained = estimator(tmp_path, train_distribute=distribute)
    trained.train(points(repeat=True), hooks=[Doubles()], steps=1)
    assert seen[-1] == trained.get_variable_value("weight") == 7.0
    assert seen[0] not in (0.0, 7.0)


def test_subclass_of_one_of_tensorflows_own_runs_as_it_is(tmp_path: Path) -> None:
    class Stops(tf.compat.v1.train.StopAtStepHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(run_values.results)
            super().after_run(run_context, run_values)

    seen: list[Any] = []
    _, native, session = split_hooks([hook := Stops(num_steps=3)])
    assert (native, session) == ([], [hook])
    run = train(tmp_path, [hook], 10)
    assert run.global_step == 3 and seen == [0, 1, 2]


# --- hooks in an EstimatorSpec ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
@pytest.mark.parametrize("style", LINES)
def test_hooks_of_a_spec_run_once_whatever_the_strategy(style: str, strategy: str, tmp_path: Path) -> None:
    """Under Mirrored, tf.estimator called `begin` of a PerReplica (tensorflow issue 28018)."""
    asked, known, own = (
        Session(lambda: ("named:0", weight_variable(), v1.train.get_global_step())),
        Session(),
        Recorder(),
    )

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = LINES[style](features, labels, mode, params)
        tf.identity(tf.reduce_min(features), name="named")
        stop = v1.train.StopAtStepHook(num_steps=3)
        return spec._replace(training_hooks=[asked, stop], training_chief_hooks=[known, own])

    distribute = mirrored() if strategy == "mirrored" else None
    trainer = estimator(tmp_path, model_fn, train_distribute=distribute)
    trainer.train(points(repeat=True), steps=5)
    assert own.ends == [1, 2, 3] and len(known.values) == 3
    # The first replica's values: its batches are every second one where there are two.
    firsts = [1.0, 3.0, 5.0] if strategy == "default" else [1.0, 5.0, 1.0]
    assert [value[0] for value in asked.values] == firsts
    assert [value[2] for value in asked.values] == [0, 1, 2]
    assert asked.values[0][1] == 0 and asked.values[2][1] != asked.values[1][1] != 0


def test_chief_hooks_do_not_run_on_others(tmp_path: Path) -> None:
    from runner.distribute.cluster import Cluster

    chief, everyone = Recorder(), Recorder()

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = native_line(features, labels, mode, params)
        return spec._replace(training_chief_hooks=[chief], training_hooks=[everyone])

    tasks = {"chief": ["a:1"], "worker": ["b:1"]}
    estimator(tmp_path, model_fn, cluster=Cluster("worker", 0, tasks)).train(points(), steps=1)
    assert everyone.calls and not chief.calls


def test_scaffolds_operations_run_and_may_be_fed_as_in_a_session(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, params)
        given = v1.placeholder(tf.float32, [3], "given")
        with v1.variable_scope("extra"):
            table = v1.get_variable("table", [3], trainable=False)
            starts = v1.get_variable("starts", [], trainable=False, initializer=v1.zeros_initializer())
        scaffold = v1.train.Scaffold(
            init_op=table.assign(given, read_value=False), init_feed_dict={"given:0": [1.0, 2.0, 3.0]},
            local_init_op=starts.assign_add(1.0, read_value=False),
        )  # fmt: skip
        return spec._replace(scaffold=scaffold)

    for steps in (2, 4):
        train(tmp_path, [], steps, model_fn)
    saved = tf.train.load_checkpoint(str(tmp_path))
    assert saved.get_tensor("extra/table").tolist() == [1.0, 2.0, 3.0]
    assert saved.get_tensor("extra/starts") == 2.0


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_scaffolds_init_fn_sets_variables_of_a_new_model(strategy: str, tmp_path: Path) -> None:
    calls = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = line(features, labels, mode, {**params, "learning_rate": 0.0})
        assign = weight_variable().assign(1.25)

        def init(scaffold: Any, session: Any) -> None:
            calls.append(session.run(weight_variable()))
            session.run(assign)

        return spec._replace(scaffold=v1.train.Scaffold(init_fn=init))

    distribute = mirrored() if strategy == "mirrored" else None
    trainer = estimator(tmp_path, model_fn, train_distribute=distribute)
    trainer.train(points(repeat=True), steps=1)
    assert trainer.get_variable_value("weight") == 1.25 and len(calls) == 1
    trainer.train(points(repeat=True), steps=1)
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_an_evaluation_keeps_values_only_for_a_session_hook_that_writes(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are kept cost a copy of each table that is looked up. Training goes on with its own in any case."""

    class Evaluates(tf.compat.v1.train.SessionRunHook):
        """Fetches in `before_run`, and acts after the batch."""

        def __init__(self, fetched: Any = None, acts: Any = None) -> None:
            self._fetched, self._acts = fetched or (lambda: None), acts or (lambda session: None)

        def begin(self) -> None:
            self._fetch = self._fetched()

        def before_run(self, run_context: Any) -> Any:
            return None if self._fetch is None else v1.train.SessionRunArgs(self._fetch)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self._acts(run_context.session)

    hooks = {
        "nothing": (Evaluates(), False),
        "reads": (Evaluates(lambda: [weight_variable(), graph_tensor()]), False),
        "session reads": (Evaluates(acts=lambda session: session.run(weight_variable())), False),
        "logs": (v1.train.LoggingTensorHook({"loss": "my_loss:0"}, every_n_iter=1), False),
        "assigns": (Evaluates(lambda: weight_variable().assign(7.0).op), True),
        "assigns in a branch": (
            Evaluates(lambda: tf.cond(tf.constant(True), lambda: weight_variable().assign(7.0), lambda: 0.0)), True,
        ),
        "session assigns": (Evaluates(acts=lambda session: session.run(weight_variable().assign(7.0))), True),
        "loads": (Evaluates(acts=lambda session: weight_variable().load(7.0, session)), True),
    }  # fmt: skip
    distribute = (lambda: mirrored()) if strategy == "mirrored" else (lambda: None)
    undisturbed = estimator(tmp_path / "undisturbed", train_distribute=distribute())
    undisturbed.train(points(repeat=True), steps=2).train(points(repeat=True), steps=2)
    trained, kept = estimator(tmp_path / "evaluated", train_distribute=distribute()), []
    values = Model.values

    def counted(self: Model) -> Any:
        kept.append(1)
        return values(self)

    monkeypatch.setattr(Model, "values", counted)
    trained.train(points(repeat=True), steps=2)
    expected = trained.evaluate(points())
    for name, (hook, writes) in hooks.items():
        kept.clear()
        results = trained.evaluate(points(), hooks=[hook], steps=1)
        assert bool(kept) == writes, name
        assert trained.evaluate(points()) == expected, name
        assert results["global_step"] == 2
    trained.train(points(repeat=True), steps=2)
    assert trained.get_variable_value("weight") == undisturbed.get_variable_value("weight")
