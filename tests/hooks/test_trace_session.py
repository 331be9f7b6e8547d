"""`session.run` of what depends on a batch, in hooks: it takes the next one, as in a session of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from tests.support.line import line, mirrored, native_line, points
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1 = tf.compat.v1


class Calls(tf.compat.v1.train.SessionRunHook):
    """Calls `do` with the session in one of its methods, and keeps what that returns."""

    def __init__(self, method: str, do: Callable[[Any], Any]) -> None:
        self.method, self.do = method, do
        self.found: list[Any] = []

    def _call(self, method: str, session: Any) -> None:
        if method == self.method:
            self.found.append(self.do(session))

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._call("after_create_session", session)

    def before_run(self, run_context: Any) -> Any:
        self._call("before_run", run_context.session)
        return v1.train.SessionRunArgs("features:0")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen = run_values.results
        self._call("after_run", run_context.session)

    def end(self, session: Any) -> None:
        self._call("end", session)


def model(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A `line` whose features have a name, and twice of them too. params: `hooks`, called with its train_op."""
    tf.multiply(features, 2, name="doubled")
    spec = line(tf.identity(features, name="features"), labels, mode, {"learning_rate": 0.001})
    hooks = [hook(spec.train_op) for hook in params.get("hooks", ())]
    return spec._replace(training_hooks=hooks, evaluation_hooks=hooks)


def trained(model_dir: Path, *hooks: Any, data: Any = None, **config: Any) -> Estimator:
    """Trains up to `max_steps` on the batches 1 2, 3 4, 5 6, 7 8, 1 2, .."""
    steps = config.pop("max_steps", 100)
    estimator = Estimator(model, model_dir, RunConfig(tensorboard=False, **config), {"hooks": hooks})
    return estimator.train(data or points(repeat=True), max_steps=steps)


def weight_after(batches: int, size: int = 2) -> float:
    weight = 0.0
    for number in range(batches):
        x = np.arange(number * size, (number + 1) * size) % 8 + 1
        weight -= 0.001 * float(np.mean(2 * (weight - 2) * x**2))
    return weight


def features(session: Any) -> list[float]:
    return session.run("features:0").tolist()


def weight_and_step(estimator: Estimator) -> tuple[float, int]:
    return float(estimator.get_variable_value("weight")), int(estimator.get_variable_value("global_step"))


@pytest.mark.parametrize(
    ("method", "found", "seen"),
    [
        ("after_create_session", [[2, 4]], [5, 6]),
        ("before_run", [[2, 4], [10, 12]], [7, 8]),
        ("after_run", [[6, 8], [14, 16]], [5, 6]),
        ("end", [[10, 12]], [3, 4]),
    ],
)
def test_what_a_hook_runs_takes_the_next_batch(method: str, found: Any, seen: Any, tmp_path: Path) -> None:
    """Two steps."""
    hook = Calls(method, lambda session: session.run("doubled:0").tolist())
    trained(tmp_path, lambda _: hook, max_steps=2)
    assert hook.found == found and hook.seen.tolist() == seen


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_train_op_that_a_hook_runs_is_an_update_with_the_next_batch(replicas: int, tmp_path: Path) -> None:
    """As TF-GAN's RunTrainOpsHook; two updates and the step count three, so two steps come to six."""
    strategy = mirrored() if replicas == 2 else None

    def hook(train_op: Any) -> Any:
        return Calls("before_run", lambda session: [session.run([train_op]) for _ in range(2)])

    estimator = trained(tmp_path, hook, max_steps=4, train_distribute=strategy)
    assert weight_and_step(estimator) == (pytest.approx(weight_after(6, 2 * replicas), rel=1e-5), 6)


def test_a_run_that_resumes_comes_to_the_same(tmp_path: Path) -> None:
    def hook(train_op: Any) -> Any:
        return Calls("before_run", lambda session: session.run(train_op))

    data = points(14, 3, repeat=True)
    whole = trained(tmp_path / "whole", hook, data=data, max_steps=12)
    for steps in (2, 6, 8, 12):
        parts = trained(tmp_path / "parts", hook, data=data, max_steps=steps)
    assert weight_and_step(parts) == weight_and_step(whole)


@pytest.mark.parametrize("method", ["before_run", "after_run"])
@pytest.mark.parametrize("known", [True, False], ids=["counted", "unknown size"])
def test_training_ends_where_a_hook_finds_no_further_batch(method: str, known: bool, tmp_path: Path) -> None:
    """Five batches of one example: the hook or the step finds the end."""

    def data() -> Any:
        dataset = points(5, 1)()
        return dataset if known else dataset.filter(lambda x, y: x[0] > 0)

    hook = Calls(method, features)
    estimator = trained(tmp_path, lambda _: hook, data=data)
    # before_run: 1 | 2, 3 | 4, 5 | end. after_run: 1, 2 | 3, 4 | 5, end: the third step has been taken.
    before = method == "before_run"
    assert hook.found == ([[1], [3], [5]] if before else [[2], [4]])
    assert weight_and_step(estimator)[1] == (2 if before else 3)


@pytest.mark.parametrize(
    ("method", "found", "steps", "mean"),
    [
        ("after_create_session", [[1, 2]], None, 5.5),
        ("before_run", [[1, 2], [5, 6]], None, 5.5),
        ("after_run", [[3, 4], [7, 8]], None, 3.5),
        ("before_run", [[1, 2]], 1, 3.5),  # a batch that a hook takes is no step
    ],
)
def test_what_a_hook_of_an_evaluation_or_prediction_runs_takes_the_next_batch(
    method: str, found: Any, steps: int | None, mean: float, tmp_path: Path
) -> None:
    """Batches 1 2, 3 4, 5 6, 7 8. TensorFlow 2.15: the same batches, the same mean over the others."""

    def with_mean(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        spec = model(features, labels, mode, params)
        metrics = None if mode == "infer" else {"mean": v1.metrics.mean(features)}
        return spec._replace(eval_metric_ops=metrics)

    path = trained(tmp_path, max_steps=1).latest_checkpoint()
    estimator, hook = Estimator(with_mean, tmp_path, RunConfig(), {}), Calls(method, features)
    assert estimator.evaluate(points(), steps, [hook])["mean"] == mean
    assert hook.found == found
    if steps is None:
        hook = Calls(method, features)
        predictions = list(estimator.predict(points(), hooks=[hook], checkpoint_path=path))
        assert np.mean([one["x"] for one in predictions]) == mean
        assert hook.found == found


def test_where_no_batch_can_be_taken_the_message_says_so(tmp_path: Path, messages: Messages) -> None:
    hook = Calls("after_create_session", features)
    with messages.raised(ValueError, hide="<tf.Tensor .*?>"):
        native = {"hooks": [lambda _: hook]}
        Estimator(native_model, tmp_path / "parts", RunConfig(gradient_accumulation=2), native).train(
            points(repeat=True), steps=1
        )

    def begins_with_a_batch(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        scaffold = v1.train.Scaffold(init_fn=lambda _, session: session.run("features:0"))
        return model(features, labels, mode, params)._replace(scaffold=scaffold)

    with messages.raised(ValueError):
        Estimator(begins_with_a_batch, tmp_path, RunConfig(), {}).train(points(), steps=1)


def native_model(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    spec = native_line(tf.identity(features, name="features"), labels, mode, {})
    return spec._replace(training_hooks=[hook(None) for hook in params["hooks"]])


# --- iterators whose initializer a hook runs -------------------------------------------------------------------------


class Feeds(tf.compat.v1.train.SessionRunHook):
    """Runs the initializer of the iterator that `data` makes, with the arrays that it is fed."""

    def __init__(self, *, is_fed: bool = True, again: bool = False) -> None:
        self.is_fed, self.again = is_fed, again

    def data(self) -> Any:
        x = np.arange(1, 9, dtype=np.float32)
        if self.is_fed:
            placeholders = [v1.placeholder(tf.float32, [8]) for _ in range(2)]
            self.feed = dict(zip([one.name for one in placeholders], (x, 2 * x), strict=True))
        else:
            placeholders, self.feed = [x, 2 * x], {}
        dataset = tf.data.Dataset.from_tensor_slices(tuple(placeholders)).repeat()
        iterator = v1.data.make_initializable_iterator(dataset.batch(2))
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        self.initializer = iterator.initializer
        return iterator.get_next()

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.initializer, feed_dict=self.feed)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.again:
            run_context.session.run([self.initializer], self.feed)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_fed", slow_but([True, False], True), ids=["fed", "not fed"])
def test_data_whose_iterator_a_hook_initializes_is_trained_on_and_resumes(
    is_fed: bool, replicas: int, tmp_path: Path
) -> None:
    strategy = mirrored() if replicas == 2 else None
    for steps in (1, 3, 5):
        hook = Feeds(is_fed=is_fed)
        estimator = trained(
            tmp_path, lambda _, hook=hook: hook, data=hook.data, max_steps=steps, train_distribute=strategy
        )
    assert weight_and_step(estimator) == (pytest.approx(weight_after(5, 2 * replicas), rel=1e-5), 5)


def test_what_a_hook_does_not_feed_or_runs_again_is_named(tmp_path: Path, messages: Messages) -> None:
    hook = Feeds(again=True)
    with messages.raised(ValueError):
        trained(tmp_path / "again", lambda _: hook, data=hook.data, max_steps=2)
    lacking = Feeds()
    with messages.raised(ValueError):
        lacking_data = lambda: (lacking.data(), lacking.feed.popitem())[0]  # noqa: E731
        trained(tmp_path / "lacking", lambda _: lacking, data=lacking_data, max_steps=2)
    with messages.raised(ValueError):
        trained(tmp_path / "nobody", data=lambda: v1.placeholder(tf.float32, [2]), max_steps=2)


# --- variables that begin with what is fed ---------------------------------------------------------------------------


def fed_model(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """A `line` with a table that begins with a placeholder. params: `feed`, of the Scaffold, or None."""
    spec = line(features, labels, mode, {"learning_rate": 0.0})
    given = v1.placeholder(tf.float32, [3, 2], name="given")
    table = v1.get_variable("table", initializer=given, trainable=False)
    v1.get_variable("loaded", [2], initializer=v1.zeros_initializer(), trainable=False)
    if mode == "train" and params["feed"] is not None:

        def load(scaffold: Any, session: Any) -> None:
            (loaded,) = [one for one in v1.global_variables() if one.name.startswith("loaded")]
            with session.as_default():
                loaded.load(loaded.eval() + table[0].eval() + table.eval(session=session)[1], session)

        return spec._replace(scaffold=v1.train.Scaffold(init_feed_dict={given.name: params["feed"]}, init_fn=load))
    return spec._replace(eval_metric_ops={"table": v1.metrics.mean(table)})


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_variable_begins_with_what_a_scaffold_feeds(replicas: int, tmp_path: Path, messages: Messages) -> None:
    """And another with what is loaded of it, on all replicas. A run that resumes needs no feed, nor does evaluation."""
    feed = np.arange(6.0).reshape(3, 2)
    config = RunConfig(tensorboard=False, train_distribute=mirrored() if replicas == 2 else None)
    estimator = Estimator(fed_model, tmp_path, config, {"feed": feed})
    estimator.train(points(repeat=True), max_steps=1)
    again = Estimator(fed_model, tmp_path, config, {"feed": None}).train(points(repeat=True), max_steps=2)
    assert again.get_variable_value("table").tolist() == feed.tolist()
    assert again.get_variable_value("loaded").tolist() == [2, 4]
    assert again.evaluate(points())["table"] == 2.5
    with messages.raised(ValueError) as caught:
        Estimator(fed_model, tmp_path / "new", config, {"feed": None}).train(points(repeat=True), max_steps=1)
    messages.same("note", caught.value.__notes__[0])
