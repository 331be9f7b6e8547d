"""Hooks of tf.estimator code, as 2.15 called them: what they feed, what they compare, where their summaries go."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf

import runner
from runner import EstimatorSpec, ModeKeys
from runner.classic.estimator import Estimator
from runner.classic.run_config import RunConfig
from tests.support.line import Weight, line, mirrored, native_line, points, read_events, steps_of
from tests.support.messages import Messages

v1 = tf.compat.v1


def fed_line(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A `line` whose learning rate is a placeholder, with a default or without. params: `placeholder`, `hooks`."""
    make = params.get("placeholder", lambda: v1.placeholder_with_default(0.0, [], name="rate"))
    rate = make()
    if mode == ModeKeys.TRAIN:
        spec = line(features, labels, mode, {"learning_rate": rate})
        return spec._replace(training_hooks=[hook(rate) for hook in params.get("hooks", ())])
    spec = line(features * (1 + rate), labels, mode, {})
    hooks = [hook(rate) for hook in params.get("hooks", ())]
    return spec._replace(evaluation_hooks=hooks, prediction_hooks=hooks)


class Feeds(tf.estimator.SessionRunHook):
    """Feeds `key` with one value after another."""

    def __init__(self, key: Any, values: Any, fetches: Any = None) -> None:
        self._key, self._values, self._fetches = key, iter(values), fetches
        self.results: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        return tf.estimator.SessionRunArgs(self._fetches, feed_dict={self._key: next(self._values)})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.results.append(run_values.results)


def weights_after(rates: list[float]) -> float:
    """What steps of `line` on points(8, 2), repeated, make of its weight."""
    weight = 0.0
    for number, rate in enumerate(rates):
        x = [2 * (number % 4) + 1, 2 * (number % 4) + 2]
        weight -= rate * sum(2 * (weight - 2) * one**2 for one in x) / 2
    return weight


RATES = [0.01, 0.02, 0.0, 0.005]


def trained(model_dir: Path, model_fn: Any = fed_line, steps: int = 4, **params: Any) -> Estimator:
    config = RunConfig(train_distribute=params.pop("strategy", None))
    return Estimator(model_fn, model_dir, config, params).train(points(repeat=True), steps=steps)  # type: ignore[return-value]


@pytest.mark.parametrize("key", ["tensor", "name", "operation"])
def test_a_hook_feeds_a_step_by_the_tensor_or_its_name(key: str, tmp_path: Path) -> None:
    def hook(rate: Any) -> Any:
        return Feeds({"tensor": rate, "name": "rate:0", "operation": "rate"}[key], RATES)

    trainer = trained(tmp_path, hooks=[hook])
    assert trainer.get_variable_value("weight") == pytest.approx(weights_after(RATES), rel=1e-5)


def test_feed_fn_hook_feeds_each_step_and_what_it_leaves_out_has_its_default(tmp_path: Path) -> None:
    trainer = trained(tmp_path, hooks=[lambda rate: tf.estimator.FeedFnHook(lambda: {rate: 0.01})])
    assert trainer.get_variable_value("weight") == pytest.approx(weights_after([0.01] * 4), rel=1e-5)
    trained(tmp_path, steps=2)
    assert trainer.get_variable_value("weight") == pytest.approx(weights_after([0.01] * 4), rel=1e-5)


def test_what_is_fed_is_fed_to_all_replicas(tmp_path: Path) -> None:
    trainer = trained(tmp_path, steps=1, hooks=[lambda rate: Feeds(rate, [0.01])], strategy=mirrored())
    expected = 0.01 * 2 * 2 * (1 + 4 + 9 + 16) / 4
    assert trainer.get_variable_value("weight") == pytest.approx(expected, rel=1e-5)


def test_evaluations_and_predictions_are_fed_by_their_hooks(tmp_path: Path) -> None:
    trainer = Estimator(fed_line, tmp_path, RunConfig(), {})
    trainer.train(points(repeat=True), hooks=[Feeds("rate:0", RATES)], steps=4)
    weight = trainer.get_variable_value("weight")
    hook = Feeds("rate:0", [1.0] * 5, "my_loss:0")
    found = trainer.evaluate(points(), hooks=[hook])
    assert found["mae"] == pytest.approx(abs(2 * weight - 2) * 4.5, rel=1e-5)
    assert found["loss"] == pytest.approx(sum(hook.results) / 4)
    predictions = trainer.predict(points(), hooks=[Feeds("rate:0", [1.0, 2.0, 0.0, 1.0, 0.0])])
    expected = [weight * x * factor for x, factor in zip(range(1, 9), [2, 2, 3, 3, 1, 1, 2, 2], strict=True)]
    assert [one["y"] for one in predictions] == pytest.approx(expected, rel=1e-5)


def test_a_placeholder_that_nobody_feeds_is_named(tmp_path: Path, messages: Messages) -> None:
    plain: Callable[[], Any] = lambda: v1.placeholder(tf.float32, [], name="rate")  # noqa: E731
    with messages.raised(ValueError):
        trained(tmp_path, placeholder=plain)
    hooks = [lambda rate: Feeds(rate, [0.01, 0.01, 0.0, 0.0, 0.0, 0.0])]
    trainer = trained(tmp_path, steps=2, placeholder=plain, hooks=hooks)
    assert trainer.get_variable_value("weight") == pytest.approx(weights_after([0.01] * 2), rel=1e-5)
    assert math.isfinite(trainer.evaluate(points(), steps=4)["loss"])


def test_sparse_and_ragged_values_and_rows_of_gradients_are_fetched_as_in_a_session(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        table = v1.get_variable("table", [4, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_sum(tf.gather(table, [2, 0]))
        fetches = {
            "rows": v1.gradients(loss, table)[0],
            "sparse": tf.sparse.from_dense([[0, 7]]),
            "ragged": [tf.ragged.constant([[[1], [2, 3]], []]), "table"],
        }
        spec = line(features, labels, mode, params)
        return spec._replace(training_hooks=[params["hook"](fetches)])

    hooks: list[Any] = []

    class Fetches(tf.estimator.SessionRunHook):
        def __init__(self, fetches: Any) -> None:
            self._fetches = fetches
            hooks.append(self)

        def before_run(self, run_context: Any) -> Any:
            return tf.estimator.SessionRunArgs(self._fetches)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.results = run_values.results

    trained(tmp_path, model_fn, steps=1, hook=Fetches)
    found = next(hook.results for hook in hooks if hasattr(hook, "results"))
    assert isinstance(found["sparse"], v1.SparseTensorValue)
    assert [part.tolist() for part in found["sparse"]] == [[[0, 1]], [7], [1, 2]]
    assert [part.tolist() for part in found["rows"]] == [[[1.0], [1.0]], [2, 0], [4, 1]]
    assert found["ragged"][0].to_list() == [[[1], [2, 3]], []] and found["ragged"][1].shape == (4, 1)


def test_a_sparse_placeholder_is_fed_what_a_session_took(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        rates = v1.sparse_placeholder(tf.float32, [2, 2])
        spec = line(features, labels, mode, {"learning_rate": tf.sparse.reduce_sum(rates)})
        values = [v1.SparseTensorValue([[0, 1]], [rate], [2, 2]) for rate in RATES]
        return spec._replace(training_hooks=[Feeds(rates, values)])

    assert trained(tmp_path, model_fn).get_variable_value("weight") == pytest.approx(weights_after(RATES), rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_feeds_placeholders_of_its_own_and_restores_and_saves_by_a_saver(replicas: int, tmp_path: Path) -> None:
    class Restores(tf.estimator.SessionRunHook):
        """Begins with the weight of another run, 2.0 added to it."""

        def begin(self) -> None:
            (weight,) = v1.trainable_variables()
            self._saver, self._more = v1.train.Saver([weight]), v1.placeholder(tf.float32, [])
            self._add = weight.assign_add(self._more)

        def after_create_session(self, session: Any, coord: Any) -> None:
            self._saver.restore(session, v1.train.latest_checkpoint(tmp_path / "other"))
            session.run(self._add, {self._more: 2.0})

        def end(self, session: Any) -> None:
            self.saved = self._saver.save(session, f"{tmp_path}/own/model", global_step=v1.train.get_global_step())

    other = trained(tmp_path / "other", line, steps=3).get_variable_value("weight")
    config, model_dir = RunConfig(train_distribute=mirrored() if replicas == 2 else None), tmp_path / "new"
    estimator = Estimator(line, model_dir, config, {"learning_rate": 0.0})
    estimator.train(points(), hooks=[hook := Restores()], steps=1)
    assert estimator.get_variable_value("weight") == pytest.approx(other + 2.0)
    assert hook.saved == f"{tmp_path}/own/model-1"
    assert tf.train.load_variable(hook.saved, "weight") == pytest.approx(other + 2.0)


def test_a_hook_fetches_variables_of_keras(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        layer = Weight(name="line")
        loss = tf.square(layer(features) - labels)
        optimizer = keras.optimizers.SGD(0.01)
        hooks.append(Feeds(v1.placeholder_with_default(0.0, []), [0.0] * 2, layer.weight))
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer, training_hooks=hooks[-1:])

    hooks: list[Feeds] = []
    trained(tmp_path, model_fn, steps=2)
    (results,) = [hook.results for hook in hooks if hook.results]
    assert results == pytest.approx([0.0, weights_after([0.01])])


@pytest.mark.parametrize(
    "hooks",
    [
        [Feeds("my_loss:0", [1.0])],
        [Feeds("rate:0", [[1.0, 2.0]])],
        [Feeds("rate:0", [1.0]), Feeds("rate:0", [1.0])],
    ],
    ids=["no placeholder", "another shape", "twice"],
)
def test_what_cannot_be_fed_is_refused(hooks: list[Any], tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        Estimator(fed_line, tmp_path, RunConfig(), {}).train(points(), hooks=hooks, steps=1)


def test_a_step_of_several_programs_cannot_be_fed(tmp_path: Path, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        v1.placeholder_with_default(0.0, [], name="rate")
        return native_line(features, labels, mode, params)

    trainer = runner.Estimator(model_fn, tmp_path, runner.RunConfig(gradient_accumulation=2))
    with messages.raised(ValueError):
        trainer.train(points(), hooks=[Feeds("rate:0", [1.0])], steps=1)


def test_code_of_hooks_has_the_operators_of_model_fn(tmp_path: Path) -> None:
    said: list[str] = []

    class Keys(tf.estimator.SessionRunHook):
        def __init__(self, tensor: Any) -> None:
            self._tensor = tensor

        def note(self, where: str) -> None:
            if {self._tensor: where}[self._tensor] == where and self._tensor != 1:
                said.append(where)

        def begin(self) -> None:
            self.note("begin")

        def after_create_session(self, session: Any, coord: Any) -> None:
            assert session.run("rate:0", {self._tensor: 3.0}) == 3.0
            self.note("session")

        def before_run(self, run_context: Any) -> None:
            self.note("before")

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.note("after")

        def end(self, session: Any) -> None:
            self.note("end")

    class Listens(tf.estimator.CheckpointSaverListener):
        def before_save(self, session: Any, global_step_value: int) -> None:
            said.append("save" if {session.graph.get_tensor_by_name("rate:0"): 1} else "")

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = fed_line(features, labels, mode, params)
        rate = v1.get_default_graph().get_tensor_by_name("rate:0")
        scaffold = v1.train.Scaffold(init_fn=lambda _, session: said.append(f"{session.run(rate, {rate: 2.0})}"))
        return spec._replace(scaffold=scaffold if mode == ModeKeys.TRAIN else None)

    trainer = Estimator(model_fn, tmp_path, RunConfig(), {"hooks": [Keys]})
    trainer.train(points(), steps=1, saving_listeners=[Listens()])
    steps = ["begin", "session", "before", "after", "end"]
    assert said == ["2.0", "begin", "session", "save", "before", "after", "save", "end"]
    said.clear()
    trainer.evaluate(points(), steps=1)
    next(trainer.predict(points()))
    assert said == [*steps, *steps[:3], "after"]
    assert bool(tf.constant(1) == tf.constant(1)), "elsewhere they are what they are"


def test_global_step_is_the_first_of_the_variables(tmp_path: Path) -> None:
    seen = []

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        for variable in v1.global_variables():
            v1.summary.histogram(variable.op.name, variable)
        spec = line(features, labels, mode, params)
        average = tf.train.ExponentialMovingAverage(0.9, v1.train.get_global_step())
        saved = v1.train.Saver(v1.global_variables()) if mode == ModeKeys.TRAIN else None
        seen.append([variable.op.name for variable in v1.global_variables()])
        if mode != ModeKeys.TRAIN:
            return spec
        with tf.control_dependencies([spec.train_op]):
            moved = average.apply(v1.trainable_variables())
        return spec._replace(train_op=moved, scaffold=v1.train.Scaffold(saver=saved))

    trainer = trained(tmp_path, model_fn, steps=2)
    trainer.evaluate(points())
    list(trainer.predict(points()))
    assert all(names[:2] == ["global_step", "weight"] and names.count("global_step") == 1 for names in seen)
    assert len(seen) == 3 and trainer.get_variable_value("global_step") == 2
    assert steps_of(tmp_path, "global_step") == [1]


# --- summaries --------------------------------------------------------------------------------------------------------


def summarised(tmp_path: Path, *save_steps: int, folder: str = "own") -> Any:
    """A `line` whose hooks save the first feature of a batch, each `save_steps`, to folders of their own."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        v1.summary.scalar("first", features[0])
        merged = v1.summary.merge_all()
        hooks = [
            tf.estimator.SummarySaverHook(save_steps=steps, output_dir=f"{tmp_path}/{folder}{steps}", summary_op=merged)
            for steps in save_steps
        ]
        return line(features, labels, mode, params)._replace(training_hooks=hooks, evaluation_hooks=hooks)

    return model_fn


def firsts(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_events(folder) if event.tag == "first"]


@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_summary_saver_hook_saves_its_summaries_to_its_folder_at_its_cadence(strategy: str, tmp_path: Path) -> None:
    distribute = mirrored() if strategy == "mirrored" else None
    config = RunConfig(save_summary_steps=5, train_distribute=distribute)
    trainer = Estimator(summarised(tmp_path, 3), tmp_path, config)
    trainer.train(points(32, 2, repeat=True), steps=8)
    stride = 4 if strategy == "mirrored" else 2
    assert firsts(tmp_path / "own3") == [(step, 1 + stride * (step - 1)) for step in (1, 4, 7)]
    assert steps_of(tmp_path, "first") == [1, 6], "of the runner's own"
    trainer.train(points(32, 2, repeat=True), steps=3)
    assert [step for step, _ in firsts(tmp_path / "own3")] == [1, 4, 7, 9]
    trainer.train(points(32, 2, repeat=True), steps=7)
    assert steps_of(tmp_path, "first") == [1, 6, 9, 12, 17], "each call counts from its first step"


def test_summary_saver_hook_of_an_evaluation_saves_batches_at_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    trainer = trained(tmp_path, summarised(tmp_path, 1, 2, 3, folder="eval/own"), steps=2)
    for _ in range(2):
        trainer.evaluate(points(10, 2))
    found = {
        steps: [value for step, value in firsts(tmp_path / f"eval/own{steps}") if step == 2] for steps in (1, 2, 3)
    }
    # Training was saved there at step 1, and step 2 by the hook of each.
    assert found[1] == [3.0, *[1.0, 3.0, 5.0, 7.0, 9.0] * 2]
    assert found[2] == [1.0, 5.0, 9.0] * 2
    assert found[3] == [1.0] * 2


def test_summary_saver_hook_in_the_folder_of_the_evaluation_comes_before_its_metrics(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        merged = v1.summary.scalar("first", features[0])
        hook = tf.estimator.SummarySaverHook(save_steps=1, output_dir=f"{tmp_path}/eval", summary_op=merged)
        return line(features, labels, mode, params)._replace(evaluation_hooks=[hook])

    trainer = trained(tmp_path, model_fn, steps=2)
    for _ in range(2):
        trainer.evaluate(points(4, 2))
    of_one = ["first", "first", "checkpoint_path", "loss", "mae"]
    assert [event.tag for event in read_events(tmp_path / "eval")] == of_one * 2


def test_summary_saver_hook_in_model_dir_writes_to_the_file_of_the_run(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        first = v1.summary.scalar("first", features[0], collections=[])
        hook = tf.estimator.SummarySaverHook(save_steps=2, output_dir=str(tmp_path), summary_op=[first, first])
        return line(features, labels, mode, params)._replace(training_hooks=[hook])

    trained(tmp_path, model_fn, steps=5)
    assert steps_of(tmp_path, "first") == [1, 1, 3, 3, 5, 5] and steps_of(tmp_path, "loss") == [1]
    assert len(list(tmp_path.glob("events.*"))) == 1


def test_summary_op_of_a_scaffold_is_written_in_place_of_all_summaries(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        v1.summary.scalar("first", features[0])
        last = v1.summary.scalar("last", features[-1])
        return line(features, labels, mode, params)._replace(scaffold=v1.train.Scaffold(summary_op=last))

    trained(tmp_path, model_fn, steps=2)
    assert steps_of(tmp_path, "last") == [1] and steps_of(tmp_path, "first") == []


# --- what 2.15 refused, and with which type ----------------------------------------------------------------------

Hook, Args = tf.estimator.SessionRunHook, tf.estimator.SessionRunArgs
Listener, Mock = v1.train.CheckpointSaverListener, mock.Mock


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Estimator:
    return Estimator(line, tmp_path_factory.mktemp("model"), RunConfig(), {}).train(points(), steps=1)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "hooks", [["text"], [Hook], Hook(), 5, "text", [None], [Mock()]],
    ids=["texts", "class", "one hook", "number", "text", "none", "mock"],
)  # fmt: skip
def test_a_list_of_hooks_has_hooks(hooks: Any, model: Estimator, tmp_path: Path) -> None:
    new = Estimator(line, tmp_path, RunConfig(), {})
    uses: list[Callable[[], Any]] = [
        lambda: new.train(points(), steps=1, hooks=hooks),
        lambda: new.evaluate(points(), hooks=hooks),  # before it looks for a checkpoint
        lambda: list(new.predict(points(), hooks=hooks)),
        lambda: model.evaluate(points(), hooks=hooks),
        lambda: tf.estimator.TrainSpec(points(), hooks=hooks),
        lambda: tf.estimator.EvalSpec(points(), hooks=hooks),
        lambda: tf.estimator.experimental.InMemoryEvaluatorHook(model, points(), hooks=hooks),
    ]
    for use in uses:
        with pytest.raises(TypeError):
            use()
    assert new.latest_checkpoint() is None


@pytest.mark.parametrize(
    "listeners", [["text"], [Hook()], Listener(), [Mock()]], ids=["texts", "hook", "one listener", "mock"]
)
def test_a_list_of_listeners_has_listeners(listeners: Any, tmp_path: Path) -> None:
    new = Estimator(line, tmp_path, RunConfig(), {})
    for use in (functools.partial(new.train, steps=1), tf.estimator.TrainSpec):
        with pytest.raises(TypeError):
            use(points(), saving_listeners=listeners)
    assert new.latest_checkpoint() is None


def in_before_run(returned: Any) -> Any:
    hook = Hook()
    hook.before_run = lambda run_context: returned
    return hook


def in_session(fetches: Any, feed_dict: Any = None) -> Any:
    hook = Hook()
    hook.after_create_session = lambda session, coord: session.run(fetches, feed_dict)
    return hook


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: in_before_run(Args("nothing:0")), ValueError),
        (lambda: in_before_run(Args("nothing")), ValueError),
        (lambda: in_before_run(Args(5)), TypeError),
        (lambda: in_before_run(Args([None])), TypeError),
        (lambda: in_before_run(Args({"x": object()})), TypeError),
        (lambda: in_before_run("my_loss:0"), AttributeError),
        (lambda: in_before_run(Args(None, feed_dict={"nothing:0": 1})), TypeError),
        (lambda: in_before_run(Args(None, feed_dict=[1])), AttributeError),
        (lambda: in_session("nothing:0"), ValueError),
        (lambda: in_session(None), TypeError),
        (lambda: in_session(3), TypeError),
        (lambda: in_session("weight", {"nothing:0": 1}), TypeError),
        (lambda: Mock(spec=Hook), TypeError),  # its before_run returns a mock, which fetches another
        (lambda: mock.MagicMock(spec=Hook), TypeError),
        (lambda: tf.estimator.LoggingTensorHook(["nothing"], every_n_iter=1), KeyError),
        (lambda: tf.estimator.FinalOpsHook("nothing:0"), ValueError),
        (lambda: tf.estimator.FinalOpsHook(5), TypeError),
        (lambda: tf.estimator.FeedFnHook(None), TypeError),
    ],
)
def test_what_a_hook_does_wrong_has_the_type_of_2_15(
    make: Callable[[], Any], kind: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(kind):
        Estimator(line, tmp_path, RunConfig(), {}).train(points(), hooks=[make()], steps=1)


@pytest.mark.parametrize(
    ("make", "arguments", "kind"),
    [
        ("CheckpointSaverHook", {"checkpoint_dir": "d"}, ValueError),
        ("CheckpointSaverHook", {"checkpoint_dir": "d", "save_secs": 1, "save_steps": 1}, ValueError),
        ("StepCounterHook", {"every_n_steps": 1, "every_n_secs": 1}, ValueError),
        ("SummarySaverHook", {"save_steps": 1}, ValueError),
        ("LoggingTensorHook", {"tensors": ["x"]}, ValueError),
        ("LoggingTensorHook", {"tensors": ["x"], "every_n_iter": 0}, ValueError),
        ("StopAtStepHook", {}, ValueError),
        ("StopAtStepHook", {"num_steps": 1, "last_step": 1}, ValueError),
        ("ProfilerHook", {}, ValueError),
        ("ProfilerHook", {"save_steps": 1, "save_secs": 1}, ValueError),
        ("InMemoryEvaluatorHook", {"input_fn": points(), "every_n_iter": 0}, ValueError),
        ("InMemoryEvaluatorHook", {"input_fn": points(), "every_n_iter": None}, ValueError),
        ("InMemoryEvaluatorHook", {"input_fn": points(), "steps": 0}, ValueError),
        ("make_early_stopping_hook", {"estimator": None, "should_stop_fn": bool}, TypeError),
        ("make_early_stopping_hook", {"should_stop_fn": None}, TypeError),
        ("make_early_stopping_hook", {"should_stop_fn": bool, "run_every_steps": 1}, ValueError),
        ("make_early_stopping_hook", {"should_stop_fn": bool, "run_every_secs": None}, ValueError),
        ("stop_if_lower_hook", {"metric_name": "m", "threshold": 1, "run_every_steps": 1}, ValueError),
        ("make_stop_at_checkpoint_step_hook", {"last_step": None}, ValueError),
    ],
)
def test_arguments_of_hooks_are_refused_as_by_2_15(
    make: str, arguments: dict[str, Any], kind: type[Exception], model: Estimator
) -> None:
    is_own = not hasattr(tf.estimator, make)
    call = getattr(tf.estimator.experimental if is_own else tf.estimator, make)
    with pytest.raises(kind):
        call(**{"estimator": model, **arguments} if is_own else arguments)


# --- methods of objects ------------------------------------------------------------------------------------------


def told(hook: Any, calls: list[str]) -> Any:
    """Return the hook with methods of its own, which note their calls."""
    hook.begin = lambda: calls.append("begin")
    hook.after_run = lambda run_context, run_values: calls.append("after")
    hook.end = lambda session: calls.append("end")
    return hook


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        (Hook(), 4),
        (tf.estimator.StopAtStepHook(last_step=2), 4),  # which then stops nothing
        (tf.estimator.StepCounterHook(), 4),
        (tf.estimator.LoggingTensorHook({"x": "my_loss:0"}, every_n_iter=100), 4),
    ],
    ids=lambda one: type(one).__name__,
)
def test_methods_that_an_object_was_given_are_called_at_each_step(hook: Any, steps: int, tmp_path: Path) -> None:
    calls: list[str] = []
    hook.before_run = lambda run_context: None
    model = Estimator(line, tmp_path, RunConfig(), {}).train(points(), hooks=[told(hook, calls)], steps=steps)
    assert calls == ["begin", *["after"] * steps, "end"] and model.get_variable_value("global_step") == steps


@pytest.mark.parametrize("kind", ["SessionRunHook", "LoggingTensorHook", "StopAtStepHook", "SummarySaverHook"])
def test_mocks_are_called_as_in_a_session(kind: str, tmp_path: Path) -> None:
    hook = mock.MagicMock(wraps=Hook(), spec=getattr(tf.estimator, kind))
    listener = mock.MagicMock(wraps=Listener(), spec=Listener)
    model = Estimator(line, tmp_path, RunConfig(), {})
    model.train(points(), hooks=[hook], steps=3, saving_listeners=[listener])
    names = ["begin", "after_create_session", *["before_run", "after_run"] * 3, "end"]
    assert [call[0] for call in hook.method_calls] == names
    assert [call[0] for call in listener.method_calls] == ["begin", *["before_save", "after_save"] * 2, "end"]
    hook.reset_mock()
    model.evaluate(points(4, 2), hooks=[hook])
    assert hook.begin.call_count == hook.end.call_count == 1 and hook.after_run.call_count == 2


def test_a_hook_ends_an_evaluation_and_a_prediction(model: Estimator) -> None:
    hook = Hook()
    hook.after_run = lambda run_context, run_values: run_context.request_stop()
    found = model.evaluate(points(), hooks=[hook])
    assert found["loss"] == pytest.approx(9.025)  # of 2.15: that of the first batch
    assert len(list(model.predict(points(), hooks=[hook]))) == 2
