"""A Scaffold in training, evaluation, prediction and export: its saver, and the operations that it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, RunConfig, TensorServingInputReceiver
from runner.classic.estimator import Estimator
from runner.classic.training import EvalSpec, TrainSpec, train_and_evaluate
from tests.support.line import mirrored, points
from tests.support.messages import Messages
from tests.support.tiers import slow_but

v1: Any = tf.compat.v1
TRAIN = ModeKeys.TRAIN


def averaged(scaffold: Callable[[str, Any], Any]) -> Callable[..., EstimatorSpec]:
    """A model_fn of one weight and its average, whose Scaffold is made of (mode, average)."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
        average = v1.train.ExponentialMovingAverage(0.5)
        predictions = features * weight
        if mode != TRAIN:
            given = scaffold(mode, average)
            if mode == ModeKeys.PREDICT:
                return EstimatorSpec(mode, {"y": predictions, "x": features}, scaffold=given)
            loss = tf.reduce_mean(tf.square(predictions - labels))
            metrics = {"weight": v1.metrics.mean(weight)}
            return EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics, scaffold=given)
        loss = tf.reduce_mean(tf.square(predictions - labels))
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
        with tf.control_dependencies([train_op]):
            train_op = average.apply([weight])
        return EstimatorSpec(mode, predictions, loss, train_op, scaffold=scaffold(mode, average))

    return model_fn


def of_averages(mode: str, average: Any) -> Any:
    saver = None if mode == TRAIN else v1.train.Saver(average.variables_to_restore())
    return v1.train.Scaffold(saver=saver)


def receiver() -> TensorServingInputReceiver:
    given = v1.placeholder(tf.float32, [None])
    return TensorServingInputReceiver(given, {"x": given})


def values(estimator: Estimator) -> tuple[float, float]:
    weight = float(estimator.get_variable_value("weight"))
    return weight, float(estimator.get_variable_value("weight/ExponentialMovingAverage"))


def answered(estimator: Estimator, tmp_path: Path) -> list[float]:
    """What evaluation, prediction and the export say that the weight is."""
    evaluated = estimator.evaluate(points())["weight"]
    (first, *_) = estimator.predict(points())
    path = estimator.export_saved_model(tmp_path / "export", receiver)
    answer = tf.saved_model.load(path.decode()).signatures["serving_default"](x=tf.constant([1.0]))
    return [float(evaluated), float(first["y"] / first["x"]), float(answer["y"][0])]


@pytest.mark.parametrize("distribute", slow_but([None, mirrored], mirrored))
def test_a_saver_of_averages_is_what_is_evaluated_predicted_and_exported(
    distribute: Callable[[], Any] | None, tmp_path: Path
) -> None:
    config = RunConfig(train_distribute=None if distribute is None else distribute())
    estimator = Estimator(averaged(of_averages), tmp_path, config)
    estimator.train(points(repeat=True), steps=3)
    weight, average = values(estimator)
    assert weight != pytest.approx(average)
    assert answered(estimator, tmp_path) == pytest.approx([average] * 3)
    # A new process, which never trained, sees the same.
    assert answered(Estimator(averaged(of_averages), tmp_path), tmp_path) == pytest.approx([average] * 3)


def test_training_goes_on_from_its_own_values_after_an_evaluation_of_averages(tmp_path: Path) -> None:
    plain = averaged(lambda mode, average: None)
    found = []
    for name, model_fn in {"plain": plain, "saver": averaged(of_averages)}.items():
        estimator = Estimator(model_fn, tmp_path / name, RunConfig(save_checkpoints_steps=2))
        evaluation = EvalSpec(points(), start_delay_secs=0, throttle_secs=0)
        train_and_evaluate(estimator, TrainSpec(points(repeat=True), max_steps=6), evaluation)
        found.append(values(estimator))
    assert found[0] == found[1]


def test_a_saver_in_the_collection_counts_where_the_scaffold_has_none(tmp_path: Path) -> None:
    def collected(mode: str, average: Any) -> None:
        if mode != TRAIN:
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver(average.variables_to_restore()))

    estimator = Estimator(averaged(collected), tmp_path)
    estimator.train(points(repeat=True), steps=3)
    assert answered(estimator, tmp_path) == pytest.approx([values(estimator)[1]] * 3)


class Tenfold(v1.train.Saver):
    """Restores the weight as ten times what it was."""

    def restore(self, sess: Any, save_path: str) -> None:
        super().restore(sess, save_path)
        weight = next(one for one in v1.global_variables() if one.op.name == "weight")
        value = v1.train.NewCheckpointReader(save_path).get_tensor("weight")
        sess.run(v1.assign(weight, 10 * value))


@pytest.mark.parametrize("distribute", slow_but([None, mirrored], mirrored))
def test_a_saver_with_a_restore_of_its_own_restores(distribute: Callable[[], Any] | None, tmp_path: Path) -> None:
    def tenfold(mode: str, average: Any) -> Any:
        return v1.train.Scaffold(saver=None if mode == TRAIN else Tenfold())

    estimator = Estimator(
        averaged(tenfold), tmp_path, RunConfig(train_distribute=None if distribute is None else distribute())
    )
    estimator.train(points(repeat=True), steps=3)
    weight = values(estimator)[0]
    assert answered(estimator, tmp_path) == pytest.approx([10 * weight] * 3)
    assert estimator.evaluate(points())["weight"] == pytest.approx(10 * weight)  # once more, and not a hundredfold
    estimator.train(points(repeat=True), steps=1)
    assert abs(values(estimator)[0]) < abs(5 * weight)


def test_a_saver_with_a_restore_of_its_own_restores_what_training_resumes_from(tmp_path: Path) -> None:
    model_fn = averaged(lambda mode, average: v1.train.Scaffold(saver=Tenfold()) if mode == TRAIN else None)
    Estimator(model_fn, tmp_path).train(points(repeat=True), steps=1)
    before = Estimator(model_fn, tmp_path).get_variable_value("weight")
    seen: list[float] = []

    class Weight(v1.train.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return v1.train.SessionRunArgs("weight")

        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(run_values.results)

    Estimator(model_fn, tmp_path).train(points(repeat=True), hooks=[Weight()], steps=1)
    assert seen == pytest.approx([10 * before])


def test_names_of_a_saver_in_training_are_the_keys_of_its_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    def renamed(mode: str, average: Any) -> Any:
        weight = next(one for one in v1.global_variables() if one.op.name == "weight")
        return v1.train.Scaffold(saver=v1.train.Saver({"old/w": weight, "step": v1.train.get_global_step()}))

    with caplog.at_level(logging.INFO, logger="runner"):
        estimator = Estimator(averaged(renamed), tmp_path, RunConfig(keep_checkpoint_max=7))
        estimator.train(points(repeat=True), steps=3)
    messages.logged(caplog, "scaffold")
    for line in caplog.messages:
        if "ExponentialMovingAverage" in line:
            messages.same("INFO", line)
    names = estimator.get_variable_names()
    assert "old/w" in names and "weight" not in names and "weight/ExponentialMovingAverage" in names
    weight = estimator.get_variable_value("old/w")
    assert answered(estimator, tmp_path) == pytest.approx([float(weight)] * 3)
    resumed = Estimator(averaged(renamed), tmp_path)
    resumed.train(points(repeat=True), steps=2)
    assert resumed.get_variable_value("step") == 5
    with messages.raised(tf.errors.NotFoundError):
        Estimator(averaged(lambda mode, average: None), tmp_path).evaluate(points())


def test_a_key_that_a_checkpoint_lacks_is_named(tmp_path: Path, messages: Messages) -> None:
    Estimator(averaged(lambda mode, average: None), tmp_path).train(points(repeat=True), steps=1)

    def strange(mode: str, average: Any) -> Any:
        return v1.train.Scaffold(saver=v1.train.Saver({"strange": v1.global_variables()[-1]}))

    with messages.raised(tf.errors.NotFoundError):
        Estimator(averaged(strange), tmp_path).evaluate(points())


def test_local_init_op_runs_in_each_mode_and_is_taken_back(tmp_path: Path) -> None:
    def doubling(mode: str, average: Any) -> Any:
        weight = next(one for one in v1.global_variables() if one.op.name == "weight")
        double = tf.group(v1.assign(weight, 2 * weight)) if mode != TRAIN else None
        return v1.train.Scaffold(local_init_op=double)

    estimator = Estimator(averaged(doubling), tmp_path)
    estimator.train(points(repeat=True), steps=2)
    weight, _ = values(estimator)
    assert answered(estimator, tmp_path) == pytest.approx([2 * weight] * 3)
    assert estimator.evaluate(points())["weight"] == pytest.approx(2 * weight)
    estimator.train(points(repeat=True), steps=1)
    plain = Estimator(averaged(lambda mode, average: None), tmp_path / "plain")
    for steps in (2, 1):
        plain.train(points(repeat=True), steps=steps)
    assert values(estimator) == pytest.approx(values(plain))


def test_a_ready_op_that_names_something_ends_the_evaluation(tmp_path: Path, messages: Messages) -> None:
    def unready(mode: str, average: Any) -> Any:
        names = tf.constant(["weight"] if mode != TRAIN else [], tf.string)
        return v1.train.Scaffold(ready_op=names, ready_for_local_init_op=v1.report_uninitialized_variables())

    estimator = Estimator(averaged(unready), tmp_path)
    estimator.train(points(repeat=True), steps=1)
    with messages.raised(RuntimeError):
        estimator.evaluate(points())


def test_what_has_no_effect_of_a_scaffold_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    class Own(v1.train.Saver):
        def save(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("is not called")

    class Finalized(v1.train.Scaffold):
        def finalize(self) -> Any:
            raise AssertionError("is not called")

    model_fn = averaged(lambda mode, average: Finalized(saver=Own()))
    with caplog.at_level(logging.WARNING, logger="runner"):
        Estimator(model_fn, tmp_path).train(points(repeat=True), steps=1)
    messages.logged(caplog, "scaffold")


def test_something_else_than_a_saver_is_refused(tmp_path: Path, messages: Messages) -> None:
    model_fn = averaged(lambda mode, average: v1.train.Scaffold(saver=np.zeros(1)))
    with messages.raised(ValueError):
        Estimator(model_fn, tmp_path).train(points(repeat=True), steps=1)


@pytest.mark.parametrize("distribute", slow_but([None, mirrored], mirrored))
def test_a_checkpoint_of_objects_as_saver_is_restored_by_objects(
    distribute: Callable[[], Any] | None, tmp_path: Path
) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        layer = keras.layers.Dense(1, name="dense")
        other = v1.get_variable("other", [2])
        predictions = layer(features[:, None])[:, 0] + tf.reduce_sum(other)
        step, optimizer = v1.train.get_global_step(), v1.train.MomentumOptimizer(0.01, 0.9)
        objects = tf.train.Checkpoint(step=step, net=layer, other=other, optimizer=optimizer)
        loss = tf.reduce_mean(tf.square(predictions - labels))
        train_op = optimizer.minimize(loss, step)
        scaffold = v1.train.Scaffold(saver=objects)
        metrics = {"mean": v1.metrics.mean(predictions)}
        return EstimatorSpec(mode, {"y": predictions}, loss, train_op, eval_metric_ops=metrics, scaffold=scaffold)

    config = RunConfig(train_distribute=None if distribute is None else distribute())
    estimator = Estimator(model_fn, tmp_path, config)
    estimator.train(points(repeat=True), steps=3)
    named = {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}
    assert {"dense/kernel", "dense/bias", "other", "other/Momentum", "global_step"} <= set(named)

    layer, other, step = keras.layers.Dense(1), tf.Variable([0.0, 0.0]), tf.Variable(0, dtype=tf.int64)
    layer.build([None, 1])
    objects = tf.train.Checkpoint(step=step, net=layer, other=other)
    # `restore` would look for a save_counter, too, which tf.estimator wrote as little.
    objects.read(tf.train.latest_checkpoint(str(tmp_path))).assert_existing_objects_matched().expect_partial()
    assert int(step) == 3
    np.testing.assert_array_equal(layer.kernel, named["dense/kernel"])
    np.testing.assert_array_equal(other, named["other"])

    before = estimator.evaluate(points())
    again = Estimator(model_fn, tmp_path)
    assert again.evaluate(points())["mean"] == pytest.approx(before["mean"])
    again.train(points(repeat=True), steps=2)
    assert again.get_variable_value("global_step") == 5


class OfObjects:
    """A model_fn of one weight, whose Scaffold has a tf.train.Checkpoint; the names of its variables are not those of
    the objects that `written` saves.
    """

    def __call__(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        net, step, optimizer = tf.Module(), v1.train.get_global_step(), v1.train.MomentumOptimizer(0.1, 0.5)
        net.w = v1.get_variable("model/weight", [], initializer=v1.zeros_initializer())
        predictions = features * net.w
        scaffold = v1.train.Scaffold(saver=tf.train.Checkpoint(net=net, step=step, optimizer=optimizer))
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, {"y": predictions}, scaffold=scaffold)
        loss, metrics = tf.reduce_mean(predictions), {"w": v1.metrics.mean(net.w)}
        train_op = optimizer.minimize(loss, step) if mode == TRAIN else None
        return EstimatorSpec(mode, predictions, loss, train_op, eval_metric_ops=metrics, scaffold=scaffold)

    @staticmethod
    def written(folder: Path) -> str:
        net, step = tf.Module(), tf.Variable(7, dtype=tf.int64)
        net.w = tf.Variable(5.0, name="another_name")
        optimizer = v1.train.MomentumOptimizer(0.1, 0.5)
        optimizer.apply_gradients([(tf.constant(2.0), net.w)])  # w 4.8, momentum 2
        return str(tf.train.Checkpoint(net=net, step=step, optimizer=optimizer).save(str(folder / "model.ckpt")))


def test_a_checkpoint_that_was_written_eagerly_is_read_by_the_paths_of_its_objects(tmp_path: Path) -> None:
    """TensorFlow 2.15: the same values of `evaluate`, `predict` and the export."""
    path, model_fn = OfObjects.written(tmp_path / "eager"), OfObjects()
    estimator = Estimator(model_fn, tmp_path / "new")
    assert estimator.evaluate(points(), checkpoint_path=path) == pytest.approx(
        {"w": 4.8, "loss": 4.8 * np.mean([float(x) for x, _ in points()().unbatch()]), "global_step": 7}
    )
    assert next(estimator.predict(points(), checkpoint_path=path))["y"] == pytest.approx(
        4.8 * float(next(iter(points()().unbatch()))[0])
    )
    exported = estimator.export_saved_model(tmp_path / "export", receiver, checkpoint_path=path)
    served = tf.saved_model.load(exported.decode()).signatures["serving_default"]
    assert served(x=tf.constant([1.0]))["y"].numpy() == pytest.approx([4.8])

    resumed = Estimator(model_fn, tmp_path / "eager")
    resumed.train(lambda: tf.data.Dataset.from_tensors((tf.ones([1]), tf.ones([1]))), steps=1)
    net, step = tf.Module(), tf.Variable(0, dtype=tf.int64)
    net.w = tf.Variable(0.0)
    tf.train.Checkpoint(net=net, step=step).read(resumed.latest_checkpoint()).expect_partial()
    # The gradient is 1, and half of the momentum that the checkpoint has is added to it.
    assert (float(net.w), int(step)) == (pytest.approx(4.8 - 0.1 * (1 + 0.5 * 2)), 8)


def test_a_checkpoint_by_name_is_read_after_the_scaffold_has_got_objects(tmp_path: Path) -> None:
    def without(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        return OfObjects()(features, labels, mode)._replace(scaffold=None)

    Estimator(without, tmp_path).train(points(repeat=True), steps=1)
    weight = Estimator(without, tmp_path).get_variable_value("model/weight")
    estimator = Estimator(OfObjects(), tmp_path)
    assert estimator.evaluate(points())["w"] == pytest.approx(float(weight))
    estimator.train(points(repeat=True), steps=1)
    assert estimator.evaluate(points())["global_step"] == 2
