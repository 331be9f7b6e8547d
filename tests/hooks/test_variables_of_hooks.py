"""Variables that hooks and listeners make in `begin`: saved, restored, and only an evaluation's own in evaluations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from runner import Estimator, RunConfig
from tests.support.line import line, mirrored, points
from tests.support.tiers import slow_but

v1 = tf.compat.v1

STRATEGIES: dict[str, Callable[[], Any]] = {"default": lambda: None, "mirrored": mirrored}


class Builds(tf.compat.v1.train.SessionRunHook):
    """Builds something in `begin`, and runs it in each step."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self.results: list[Any] = []

    def begin(self) -> None:
        self._fetches = self._build()

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.results.append(run_values.results)


class CountsSaves(tf.compat.v1.train.CheckpointSaverListener):
    def begin(self) -> None:
        self._count = v1.assign_add(zero("saves"), 1)

    def before_save(self, session: Any, global_step_value: int) -> None:
        session.run(self._count)


def zero(name: str) -> Any:
    return v1.get_variable(name, [], tf.int64, initializer=v1.zeros_initializer(), trainable=False)


def counter() -> Any:
    return v1.assign_add(zero("counter"), 1)


def weight() -> Any:
    return next(one for one in v1.global_variables() if one.op.name == "weight")


def trained(model_dir: Path, *hooks: Any, steps: int = 2, listeners: Any = (), strategy: Any = None) -> Estimator:
    """A process that trains: its Estimator is a new one. The input begins anew."""
    model = Estimator(line, model_dir, RunConfig(train_distribute=strategy))
    return model.train(points(), hooks=hooks, steps=steps, saving_listeners=listeners)


def saved(model_dir: Path) -> dict[str, Any]:
    """What the latest checkpoint has beside the model."""
    model = Estimator(line, model_dir, RunConfig())
    names = set(model.get_variable_names()) - {"global_step", "weight", "weight/Momentum"}
    return {name: model.get_variable_value(name).tolist() for name in names}


def beginnings() -> Any:
    """A name that model_fn has, and initial values that are tensors of the graph."""
    variables = [
        tf.Variable(1.5, name="weight"),
        v1.get_variable("three", initializer=tf.range(3) + 1),
    ]
    return [v1.assign_add(one, tf.ones_like(one)) for one in variables]


def metric() -> Any:
    return v1.metrics.mean(v1.train.get_global_step(), name="mean")[1]


# What 2.15 has in its checkpoint after two calls of `train` of two steps each, and what the next step fetches.
OF_2_15: dict[str, tuple[Callable[[], Any], dict[str, Any], Any]] = {
    "counter": (counter, {"counter": 4}, 5),
    "beginnings": (beginnings, {"weight_1": 5.5, "three": [5, 6, 7]}, [6.5, pytest.approx([6, 7, 8])]),
    "metric": (metric, {}, 4.0),
}


@pytest.mark.parametrize("strategy", slow_but(STRATEGIES, "mirrored"))
@pytest.mark.parametrize("build", OF_2_15)
def test_they_are_saved_and_restored_as_by_2_15(build: str, strategy: str, tmp_path: Path) -> None:
    build_graph, expected, after = OF_2_15[build]
    distribute = STRATEGIES[strategy]()
    model = trained(tmp_path, Builds(build_graph), strategy=distribute)
    model.train(points(), hooks=[Builds(build_graph)], steps=2)
    assert saved(tmp_path) == expected
    trained(tmp_path, again := Builds(build_graph), steps=1, strategy=None if distribute else mirrored())
    assert saved(tmp_path).keys() == expected.keys() and again.results == [after]


def test_a_moving_average_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    class Averages(tf.compat.v1.train.SessionRunHook):
        def begin(self) -> None:
            self._update = v1.train.ExponentialMovingAverage(0.5).apply([weight()])

        def after_run(self, run_context: Any, run_values: Any) -> None:
            run_context.session.run(self._update)

    trained(tmp_path, Averages()).train(points(), hooks=[Averages()], steps=2)
    of_2_15 = pytest.approx(0.7320312, rel=1e-6)
    assert saved(tmp_path) == {"weight/ExponentialMovingAverage": of_2_15}


def test_a_listener_has_variables_too(tmp_path: Path) -> None:
    model = trained(tmp_path, listeners=[CountsSaves()])
    model.train(points(), steps=2, saving_listeners=[CountsSaves()])
    assert saved(tmp_path) == {"saves": 4}  # as in 2.15: at the start and the end of each call


def test_local_variables_begin_anew_in_each_call(tmp_path: Path) -> None:
    hook = Builds(metric)
    model = trained(tmp_path, hook, steps=3)
    model.train(points(), hooks=[hook], steps=2)
    for _ in range(2):
        model.evaluate(points(), hooks=[hook], steps=2)
    assert hook.results == [0.0, 0.5, 1.0, 3.0, 3.5, *[5.0] * 4]  # as in 2.15


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_evaluation_begins_with_those_of_the_checkpoint_and_changes_none(strategy: str, tmp_path: Path) -> None:
    hook = Builds(counter)
    model = trained(tmp_path, hook, strategy=STRATEGIES[strategy]())
    for one in (model, model, Estimator(line, tmp_path, RunConfig())):
        for use in (one.evaluate, one.predict):
            hook.results.clear()
            assert list(use(points(), hooks=[hook])) and hook.results[:2] == [3, 4]
    model.train(points(), hooks=[hook], steps=1)
    assert saved(tmp_path) == {"counter": 3}


def test_what_an_evaluations_hook_assigns_is_not_trained_on(tmp_path: Path) -> None:
    class Assigns(tf.compat.v1.train.SessionRunHook):
        def begin(self) -> None:
            self._assign = v1.assign(weight(), 100.0)

        def after_create_session(self, session: Any, coord: Any) -> None:
            session.run(self._assign)

    twice = trained(tmp_path / "twice", steps=1)
    expected = twice.train(points(), steps=1).get_variable_value("weight")
    model = trained(tmp_path, steps=1)
    before = model.evaluate(points())
    assert model.evaluate(points(), hooks=[Assigns()])["loss"] == 244902.0  # as in 2.15
    assert model.evaluate(points()) == before
    assert model.train(points(), steps=1).get_variable_value("weight") == expected


def test_checkpoints_of_a_run_without_the_hook_lack_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = trained(tmp_path, Builds(counter))
    first = model.latest_checkpoint()
    model.train(points(), steps=1)
    assert saved(tmp_path) == {}
    # 2.15 could not restore such a checkpoint. Checkpoints that runs have written so far are such ones.
    with caplog.at_level(logging.INFO, logger="runner"):
        trained(tmp_path, hook := Builds(counter), steps=1)
    assert hook.results == [1] and "counter" in caplog.text
    assert model.evaluate(points(), checkpoint_path=first)["global_step"] == 2


def test_get_variable_finds_those_of_model_fn_as_in_the_graph_of_a_session(tmp_path: Path) -> None:
    def reused() -> Any:
        with v1.variable_scope("", reuse=True):
            return v1.get_variable("weight", [])

    model = trained(tmp_path, hook := Builds(reused), strategy=mirrored())
    assert hook.results[0] == 0.0 and hook.results[1] > 0 and saved(tmp_path) == {}
    with pytest.raises(ValueError, match="weight"):
        model.train(points(), hooks=[Builds(lambda: v1.get_variable("weight", []))], steps=1)


def test_another_model_may_be_trained_meanwhile(tmp_path: Path) -> None:
    def build() -> Any:
        count = counter()
        with tf.init_scope():
            trained(tmp_path / "other", strategy=mirrored())
        return count

    trained(tmp_path, Builds(build))
    assert saved(tmp_path) == {"counter": 2} and saved(tmp_path / "other") == {}
