"""Input functions of TF 1, and what was written for TPUEstimator."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow.compat.v1 as tf

from runner.checkpoint.reader import Reader
from runner.classic.compat import install
from runner.classic.estimator import Estimator
from runner.classic.run_config import RunConfig
from runner.classic.tpu import TPUEstimator, TPUEstimatorSpec
from runner.data import inputs
from runner.data.sharding import WorkerPlace
from runner.estimator import estimator as engine
from tests.classic.test_estimator import mirrored
from tests.support.classic_models import batches, data, dense
from tests.support.line import line
from tests.support.messages import Messages

numpy_input_fn = tf.estimator.inputs.numpy_input_fn
pandas_input_fn = tf.estimator.inputs.pandas_input_fn


def taken(input_fn: Any) -> list[Any]:
    return list(input_fn().as_numpy_iterator())


# --- arrays and frames ------------------------------------------------------------------------------------------


def test_arrays_come_in_batches_that_may_cross_epochs() -> None:
    x, y = np.arange(3), np.arange(3) * 10
    found = taken(numpy_input_fn(x, y, batch_size=2, num_epochs=2, shuffle=False))
    assert [(a.tolist(), b.tolist()) for a, b in found] == [
        ([0, 1], [0, 10]), ([2, 0], [20, 0]), ([1, 2], [10, 20]),
    ]  # fmt: skip


def test_dicts_of_arrays_stay_dicts_and_labels_may_be_missing() -> None:
    x = {"a": np.arange(3.0), "b": np.ones([3, 2])}
    (found,) = taken(numpy_input_fn(x, batch_size=128, shuffle=False))
    assert set(found) == {"a", "b"} and found["b"].shape == (3, 2)
    ((_, labels),) = taken(numpy_input_fn(x, {"y": np.arange(3)}, shuffle=False))
    assert labels["y"].tolist() == [0, 1, 2]


def test_shuffled_epochs_hold_each_example_once_and_have_no_end_with_none() -> None:
    found = numpy_input_fn(np.arange(4), batch_size=4, num_epochs=None, shuffle=True)().take(5).as_numpy_iterator()
    assert all(sorted(batch.tolist()) == [0, 1, 2, 3] for batch in found)


def test_columns_of_a_frame_are_features() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}, index=[7, 8])
    ((features, labels),) = taken(pandas_input_fn(frame, pd.Series([3, 4], index=[7, 8]), shuffle=False))
    assert features["a"].tolist() == [1.0, 2.0] and features["b"].tolist() == [b"x", b"y"]
    assert labels.tolist() == [3, 4]
    ((_, labels),) = taken(pandas_input_fn(frame, pd.DataFrame({"y": [3, 4]}, index=[7, 8]), shuffle=False))
    assert labels["y"].tolist() == [3, 4]


def frame_of(x: dict[str, Any], y: Any) -> Any:
    return pandas_input_fn(pd.DataFrame(x), pd.Series(y), batch_size=4, shuffle=False)()


@pytest.mark.parametrize(
    "read",
    [
        lambda x, y: (lambda both: (both[0]["a"], both[1]))(numpy_input_fn(x, y, batch_size=4, shuffle=False)()),
        lambda x, y: (lambda both: (both[0]["a"], both[1]["y"]))(
            numpy_input_fn(x, {"y": y}, batch_size=4, shuffle=False)()
        ),
        lambda x, y: (lambda features: (features["a"], features["a"]))(
            numpy_input_fn(x, batch_size=4, shuffle=False)()
        ),
        lambda x, y: (numpy_input_fn(x["a"], batch_size=4, shuffle=False)() + 0.0, tf.zeros([1], tf.float64)),
        lambda x, y: (lambda both: (both[0]["a"], both[1]))(frame_of(x, y)),
    ],
    ids=["labels", "dict of labels", "no labels", "array", "frame"],
)
def test_in_another_input_fn_they_return_tensors_of_the_next_batch_in_each_step(read: Any, tmp_path: Path) -> None:
    """TensorFlow 2.15: the same tensors and batches, in the input function of an Estimator and in a graph."""
    x, y = {"a": np.arange(6.0)}, np.arange(6.0)

    def input_fn() -> Any:
        features, labels = read(x, y)
        assert tf.is_tensor(features)
        return {"twice": features * 2}, labels + tf.zeros_like(features)

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        step = tf.train.get_global_step()
        with tf.control_dependencies([features["twice"]]):
            train_op = step.assign_add(1)
        loss = None if labels is None else tf.reduce_mean(labels)
        return tf.estimator.EstimatorSpec(mode, features, loss, train_op)

    estimator = Estimator(model_fn, str(tmp_path))
    estimator.train(input_fn)
    assert estimator.get_variable_value("global_step") == 2
    assert [one["twice"] for one in estimator.predict(lambda: input_fn()[0])] == [0, 2, 4, 6, 8, 10]
    with tf.Graph().as_default(), tf.Session() as session:
        features, _ = read(x, y)
        assert [session.run(features).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5]]
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(features)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: numpy_input_fn(np.arange(3)), ValueError),
        (lambda: numpy_input_fn(np.arange(3), shuffle="no"), ValueError),
        (lambda: numpy_input_fn([1, 2], shuffle=True), TypeError),
        (lambda: numpy_input_fn({}, shuffle=True), ValueError),
        (lambda: numpy_input_fn(np.arange(3), {}, shuffle=True), ValueError),
        (lambda: numpy_input_fn({"a": np.arange(3), "b": np.arange(2)}, shuffle=True), ValueError),
        (lambda: numpy_input_fn(np.arange(3), np.arange(2), shuffle=True), ValueError),
        (lambda: numpy_input_fn(np.zeros([3, 0]), shuffle=True), ValueError),
        (lambda: numpy_input_fn({"a": np.arange(3)}, {"a": np.arange(3)}, shuffle=True), ValueError),
        (lambda: pandas_input_fn(pd.DataFrame({"a": [1]})), ValueError),
        (lambda: pandas_input_fn({"a": [1]}, shuffle=True), TypeError),
        (lambda: pandas_input_fn(pd.DataFrame({"target": [1]}), pd.Series([1]), shuffle=True), ValueError),
        (lambda: pandas_input_fn(pd.DataFrame({"a": [1]}), pd.Series([1], index=[3]), shuffle=True), ValueError),
        (lambda: pandas_input_fn(pd.DataFrame({"a": [1]}), shuffle=True, target_column=1), TypeError),
    ],
    ids=[
        "arrays, no shuffle", "arrays, another shuffle", "a list", "no arrays", "no labels", "arrays of two lengths",
        "labels of another length", "arrays without values", "a key twice", "a frame, no shuffle", "no frame",
        "a column target", "two indexes", "a number as target",
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(make: Any, error: type[Exception], messages: Messages) -> None:
    with messages.raised(error):
        make()()  # as in tf.estimator, some are refused when the function is called


def test_input_functions_get_nothing_but_what_they_name(tmp_path: Path) -> None:
    seen: list[Any] = []

    def decorated(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return batches(1)()

    def named(mode: str, **kwargs: Any) -> Any:
        return decorated(mode=mode, **kwargs)

    estimator = Estimator(dense, str(tmp_path), params={"a": 1})
    for input_fn in (decorated, named, functools.partial(decorated, size=3)):
        estimator.train(input_fn)
    assert seen == [{}, {"mode": "train"}, {"size": 3}]


class Called:
    def __call__(self, mode: str) -> Any:
        return batches(1)()


def sized(batch_size: int) -> Any:
    return batches(1, batch_size)()


# Type of the error in tf.estimator 2.15; None: none.
INPUT_FNS: dict[str, tuple[Any, type[Exception] | None]] = {
    "none": (None, TypeError),
    "a number": (5, TypeError),
    "a tuple": ((np.ones([1, 2]), np.ones([1, 1])), TypeError),
    "a dataset": (tf.data.Dataset.range(1), TypeError),
    "another argument": (sized, TypeError),
    "a bound argument": (functools.partial(sized, batch_size=4), None),
    "an object": (Called(), None),
    "one part": (lambda: (tf.ones([1, 2]),), ValueError),
    "no part": (lambda: (), ValueError),
    "a dataset of one part": (lambda: tf.data.Dataset.from_tensors((tf.ones([1, 2]),)), ValueError),
}


@pytest.mark.parametrize("kind", INPUT_FNS)
def test_input_functions_of_another_kind_are_refused_as_by_tf_estimator(kind: str, tmp_path: Path) -> None:
    input_fn, error = INPUT_FNS[kind]
    estimator = Estimator(dense, str(tmp_path)).train(batches(1))
    calls: Any = (
        lambda: estimator.train(input_fn),
        lambda: estimator.evaluate(input_fn, steps=1),
        lambda: next(estimator.predict(input_fn)),
    )
    for call in calls:
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            call()


# --- iterators --------------------------------------------------------------------------------------------------


def feed(input_fn: Any, mode: str = "train", **more: Any) -> Any:
    return inputs.build_input_pipeline(input_fn, mode, WorkerPlace(), params={}, **more)


def test_tensors_of_a_one_shot_iterator_are_new_in_each_step() -> None:
    def input_fn() -> Any:
        dataset = tf.data.Dataset.range(6).batch(2)
        x = dataset.make_one_shot_iterator().get_next()
        return {"x": x, "squared": x * x}, tf.cast(x, tf.float32)  # what comes after get_next belongs to the step

    found = list(feed(input_fn).dataset.as_numpy_iterator())
    assert [features["squared"].tolist() for features, _ in found] == [[0, 1], [4, 9], [16, 25]]
    assert [labels.tolist() for _, labels in found] == [[0, 1], [2, 3], [4, 5]]


def test_an_input_fn_with_an_iterator_is_called_once_and_its_position_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it draws and shuffles without a seed belongs to its dataset, and is not drawn for each element."""
    calls = []

    def input_fn() -> Any:
        calls.append(1)
        dataset = batches(3)().unbatch().shuffle(100).repeat().batch(8)
        with tf.device("/cpu:0"), tf.name_scope("input"):
            x, y = tf.data.make_one_shot_iterator(dataset).get_next()
        scale = tf.constant(1.0)
        return {"x": x["x"] * scale}, y

    estimator = Estimator(dense, str(tmp_path))
    estimator.train(input_fn, steps=2)
    assert calls == [1]
    assert "position" not in caplog.text and Reader(str(estimator.latest_checkpoint())).has_iterator(0)
    assert estimator.evaluate(lambda: tf.data.make_one_shot_iterator(batches(3)()).get_next())["global_step"] == 2


def test_an_iterator_that_is_made_after_an_element_was_taken_is_read_together_with_it() -> None:
    def input_fn() -> Any:
        x = tf.data.make_one_shot_iterator(tf.data.Dataset.range(4).batch(2)).get_next()
        return x, tf.data.make_one_shot_iterator(tf.data.Dataset.range(10, 14).batch(2)).get_next() + x

    found = list(feed(input_fn).dataset.as_numpy_iterator())
    assert [(x.tolist(), y.tolist()) for x, y in found] == [([0, 1], [10, 12]), ([2, 3], [14, 16])]


def test_initializable_and_several_iterators_are_read_together() -> None:
    def input_fn() -> Any:
        first = tf.data.make_initializable_iterator(tf.data.Dataset.range(4).batch(2))
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, first.initializer)
        second = tf.data.make_one_shot_iterator(tf.data.Dataset.range(10, 14).batch(2))
        return first.get_next(), second.get_next()

    found = list(feed(input_fn).dataset.as_numpy_iterator())
    assert [(x.tolist(), y.tolist()) for x, y in found] == [([0, 1], [10, 11]), ([2, 3], [12, 13])]


def test_two_elements_of_one_iterator_are_refused(messages: Messages) -> None:
    def input_fn() -> Any:
        iterator = tf.data.make_one_shot_iterator(tf.data.Dataset.range(4).batch(2))
        return iterator.get_next(), iterator.get_next()

    with messages.raised(ValueError):
        feed(input_fn)


# --- tensors, which a session computes for each step ------------------------------------------------------------------


def summed(features: Any, labels: Any, mode: str) -> Any:
    """Each step of training adds the first feature to `w`. An evaluation has its mean, and counts its steps."""
    structures.append((mode, shape_of(features), shape_of(labels)))
    x = tf.cast(tf.reduce_sum(tf.nest.flatten(features)[0]), tf.float32)
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"x": tf.reshape(x, [1])})
    if mode == tf.estimator.ModeKeys.TRAIN:
        train_op = tf.group(w.assign_add(x), tf.train.get_global_step().assign_add(1))
        return tf.estimator.EstimatorSpec(mode, loss=x, train_op=train_op)
    local = [tf.GraphKeys.LOCAL_VARIABLES]
    count = tf.get_variable("n", [], initializer=tf.zeros_initializer(), trainable=False, collections=local)
    steps = count.assign_add(1.0)
    return tf.estimator.EstimatorSpec(mode, loss=2 * steps, eval_metric_ops={"x": tf.metrics.mean(x)})


structures: list[Any] = []


def shape_of(structure: Any) -> Any:
    """The types of a structure, without its tensors."""
    if isinstance(structure, dict):
        return {name: shape_of(one) for name, one in structure.items()}
    return type(structure)(map(shape_of, structure)) if isinstance(structure, list | tuple) else None


class Counts:
    """Of calls of an input function, and of a Python function in it."""

    def __init__(self) -> None:
        self.calls = self.drawn = 0

    def draw(self) -> Any:
        self.drawn += 1
        return np.float32(self.drawn)


def one_by_one() -> Any:
    return tf.data.make_one_shot_iterator(tf.data.Dataset.range(100).batch(1)).get_next()


# name -> input function, `w` after three steps, mean `x` of five, first predictions, all of tf.estimator 2.15; types of
# features, of labels: also those of 2.15, but for lists of numbers, which are tensors here.
OF_A_SESSION: dict[str, Any] = {
    "constants": (lambda _: (tf.constant([[1.0]]), tf.constant([2.0])), 3.0, 1.0, [1, 1, 1], None, None),
    "arrays": (lambda _: ({"a": np.ones([1, 1])}, np.ones([1])), 3.0, 1.0, [1, 1, 1], {"a": None}, None),
    "drawn by a seed": (
        lambda _: (tf.random.uniform([1, 1], seed=3), tf.constant([2.0])),
        1.449923038482666, 0.51681197, [0.40108788, 0.70619488, 0.34264028], None, None,
    ),
    "py_func": (lambda counts: tf.py_func(counts.draw, [], tf.float32), 6.0, 3.0, [1, 2, 3], None, None),
    "numpy_function": (
        lambda counts: [tf.numpy_function(counts.draw, [], tf.float32), tf.ones([1])], 6.0, 3.0, [1, 2, 3], None, None,
    ),
    "py_function": (
        lambda counts: (2 * tf.py_function(counts.draw, [], tf.float32), [tf.ones([1])]),
        12.0, 6.0, [2, 4, 6], None, [None],
    ),
    "lists": (
        lambda _: ([tf.constant([[1.0]]), tf.constant([[1.0, 2.0]])], [tf.ones([1]), tf.ones([1, 1])]),
        3.0, 1.0, [1, 1, 1], [None, None], [None, None],
    ),
    "nested": (
        lambda _: ({"a": [tf.ones([1]), (tf.ones([1]), [tf.ones([1])])], "b": [[3.0]]}, None),
        3.0, 1.0, [1, 1, 1], {"a": [None, (None, [None])], "b": [[None]]}, None,
    ),
    "lists of an iterator": (
        lambda _: (lambda n: ([n, n + 1], {"y": [n]}))(one_by_one()), 3.0, 2.0, [0, 1, 2], [None, None], {"y": [None]},
    ),
    "drawn beside an iterator": (
        lambda counts: [one_by_one(), tf.py_func(counts.draw, [], tf.float32)], 3.0, 2.0, [0, 1, 2], None, None,
    ),
    "drawn before an iterator": (
        lambda _: [tf.random.uniform([1, 1], seed=3), one_by_one()],
        1.449923038482666, 0.51681197, [0.40108788, 0.70619488, 0.34264028], None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_A_SESSION)
def test_tensors_are_a_new_batch_for_each_step_without_end(kind: str, tmp_path: Path) -> None:
    make, w, x, predicted, features, labels = OF_A_SESSION[kind]
    counts = Counts()

    def input_fn() -> Any:
        counts.calls += 1
        return make(counts)

    def again() -> Counts:
        calls, counts.calls, counts.drawn = counts.calls, 0, 0
        assert kind == "drawn before an iterator" or calls == 1
        return counts

    structures.clear()
    estimator = Estimator(summed, tmp_path, RunConfig(tf_random_seed=7)).train(input_fn, steps=3)
    assert estimator.get_variable_value("w") == pytest.approx(w, rel=1e-6)
    assert again()
    found = estimator.evaluate(input_fn, steps=5)
    assert (found["loss"], found["x"]) == (6.0, pytest.approx(x, rel=1e-6))
    assert again()
    predictions = estimator.predict(input_fn)
    np.testing.assert_allclose([next(predictions)["x"][()] for _ in range(3)], predicted, rtol=1e-6)
    assert structures == [("train", features, labels), ("eval", features, labels), ("infer", features, None)]


def test_an_evaluation_of_tensors_needs_a_number_of_steps(tmp_path: Path, messages: Messages) -> None:
    """In tf.estimator it never ended."""

    def input_fn() -> Any:
        return tf.constant([[1.0]]), tf.constant([2.0])

    estimator = Estimator(summed, tmp_path).train(input_fn, steps=1)
    with messages.raised(ValueError):
        estimator.evaluate(input_fn)
    with messages.raised(ValueError):
        next(estimator.predict(input_fn, must_end=True))


def test_tensors_of_a_native_input_fn_are_one_batch(tmp_path: Path) -> None:
    def input_fn(mode: str) -> Any:
        return (np.ones([3, 1], np.float32) if mode == "infer" else tf.random.uniform([3, 1])), [1.0, 1.0, 1.0]

    estimator = engine.Estimator(line, tmp_path, params={}).train(input_fn, steps=2)
    assert estimator.evaluate(input_fn)["global_step"] == 2
    assert len(list(estimator.predict(input_fn))) == 3


def test_draws_go_on_where_a_resumed_run_stopped(tmp_path: Path) -> None:
    def input_fn() -> Any:
        return tf.random.uniform([4, 1]) + tf.random.normal([4, 1], seed=5)

    def trained(name: str, *steps: int) -> float:
        for one in steps:
            estimator = Estimator(summed, tmp_path / name, RunConfig(tf_random_seed=7)).train(input_fn, steps=one)
        return float(estimator.get_variable_value("w"))

    assert trained("parts", 2, 1, 2) == trained("whole", 5) != trained("less", 4)


@pytest.mark.parametrize("kind", ["lists", "drawn by a seed", "lists of an iterator"])
def test_each_replica_has_a_batch_of_its_own(kind: str, tmp_path: Path) -> None:
    make, *_, predicted, features, labels = OF_A_SESSION[kind]
    structures.clear()
    config = RunConfig(train_distribute=mirrored(), eval_distribute=mirrored(), tf_random_seed=7)
    estimator = Estimator(summed, tmp_path, config).train(lambda: make(None), steps=3)
    found = estimator.evaluate(lambda: make(None), steps=5)
    predictions = estimator.predict(lambda: make(None))
    values = [next(predictions)["x"][()] for _ in range(10)]
    np.testing.assert_allclose(values[:3], predicted, rtol=1e-6)
    assert found["x"] == pytest.approx(np.mean(values), rel=1e-6), "of five batches for each replica"
    assert all(one in structures for one in [("train", features, labels), ("eval", features, labels)])
    assert structures[-1] == ("infer", features, None)


def test_a_dataset_of_what_was_drawn_has_one_draw(tmp_path: Path) -> None:
    counts = Counts()
    made: dict[str, Any] = {
        "a dataset": lambda x: tf.data.Dataset.from_tensors([[1.0]]).map(lambda one: one * x).repeat(),
        "an iterator": lambda x: tf.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(x).repeat()).get_next(),
        "eager": lambda x: np.full([1, 1], x.numpy()),
    }
    for name, make in made.items():
        counts.drawn = 0
        found = feed(lambda make=make: make(tf.py_func(counts.draw, [], tf.float32)), as_in_session=True)
        values = [np.ravel(one)[0] for (one,) in found.dataset.take(3).as_numpy_iterator()]
        assert values == [1.0, 1.0, 1.0], name


def test_an_iterator_divides_over_replicas_and_resumes(tmp_path: Path) -> None:
    def input_fn() -> Any:
        return tf.data.make_one_shot_iterator(batches(3)()).get_next()

    estimator = Estimator(dense, str(tmp_path), RunConfig(train_distribute=mirrored()))
    assert estimator.train(input_fn).get_variable_value("global_step") == 2
    assert evaluated_examples(estimator, input_fn) == 24


def evaluated_examples(estimator: Estimator, input_fn: Any) -> int:
    return len(list(estimator.predict(input_fn)))


# --- TPUEstimator -----------------------------------------------------------------------------------------------


def tpu_model(features: Any, labels: Any, mode: str, params: Any) -> TPUEstimatorSpec:
    spec = dense(features, labels, mode)
    sizes.append((mode, params["batch_size"]))
    if mode == tf.estimator.ModeKeys.PREDICT:
        return TPUEstimatorSpec(mode, predictions=spec.predictions)
    calls = tf.get_variable("calls", [], trainable=False, initializer=tf.zeros_initializer())
    optimizer = tf.tpu.CrossShardOptimizer(tf.train.GradientDescentOptimizer(0.1))

    def host_call(amount: Any) -> Any:
        return calls.assign_add(amount[0], read_value=False)

    def eval_metrics(loss: Any) -> Any:
        return {"twice": {loss: tf.metrics.mean(2 * loss)}[loss]}

    def scaffold_fn() -> Any:
        # With TensorFlow 1's operators, like model_fn: a variable and a tensor can be keys, and `==` is a bool.
        assert {calls: 1, spec.loss: 2}[spec.loss] == 2 and (spec.loss == calls) is False
        return tf.train.Scaffold()

    return TPUEstimatorSpec(
        mode,
        loss=spec.loss,
        train_op=optimizer.minimize(spec.loss, tf.train.get_global_step()),
        host_call=(host_call, [tf.ones([1])]),
        eval_metrics=(eval_metrics, {"loss": spec.loss}),
        scaffold_fn=scaffold_fn,
    )


sizes: list[tuple[str, int]] = []


def test_what_was_written_for_tpus_runs_without_one(tmp_path: Path) -> None:
    def input_fn(params: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(data()).batch(params["batch_size"]).repeat(2)

    sizes.clear()
    config = tf.estimator.tpu.RunConfig(
        model_dir=str(tmp_path), tpu_config=tf.estimator.tpu.TPUConfig(iterations_per_loop=3), save_checkpoints_steps=3
    )
    estimator = TPUEstimator(
        tpu_model, config=config, use_tpu=False, train_batch_size=8, eval_batch_size=4, predict_batch_size=16
    )
    estimator.train(input_fn, max_steps=5)
    found = estimator.evaluate(input_fn, steps=2)
    assert estimator.get_variable_value("calls") == 5
    assert found["twice"] == pytest.approx(2 * found["loss"], rel=1e-5)
    assert len(list(estimator.predict(input_fn))) == 64
    assert set(sizes) == {("train", 8), ("eval", 4), ("infer", 16)}
    assert estimator.config.tpu_config.iterations_per_loop == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments", [{"use_tpu": True, "train_batch_size": 8}, {"use_tpu": False, "params": {"batch_size": 8}}], ids=str
)
def test_tpu_estimators_that_cannot_be_are_refused(
    arguments: dict[str, Any], tmp_path: Path, messages: Messages
) -> None:
    with messages.raised(ValueError):
        TPUEstimator(tpu_model, str(tmp_path), **arguments)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda tpu: tuple(tpu.TPUConfig())[:4], (2, None, None, 2)),
        (lambda tpu: tuple(tpu.TPUConfig("300s", per_host_input_for_training=False))[:4], ("300s", None, None, 1)),
        (lambda tpu: tpu.TPUConfig(per_host_input_for_training=3).per_host_input_for_training, 3),
        (lambda tpu: tpu.TPUConfig(0), ValueError),
        (lambda tpu: tpu.TPUConfig(num_shards=0), ValueError),
        (lambda tpu: tpu.TPUConfig(num_cores_per_replica=3), ValueError),
        (lambda tpu: TPUEstimatorSpec("train")[8:], ((), (), ())),  # its hooks
        (lambda tpu: TPUEstimatorSpec("train", training_hooks=[3]), TypeError),
        (lambda tpu: TPUEstimatorSpec("train", training_hooks=3), TypeError),
    ],
)
def test_values_for_tpus_are_those_of_tf_estimator(make: Any, expected: Any) -> None:
    """The values, and the types of the errors, are those of TensorFlow 2.15."""
    if isinstance(expected, type):
        with pytest.raises(expected):
            make(tf.estimator.tpu)
    else:
        assert make(tf.estimator.tpu) == expected


@pytest.mark.parametrize("name", ["eval_metrics", "host_call"])
def test_a_call_is_a_function_and_its_tensors(name: str, messages: Messages) -> None:
    with messages.raised(ValueError):
        TPUEstimatorSpec("train", **{name: "no"})


def test_a_hook_feeds_the_iterator_of_a_file_that_turns_tensorflow_2_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There a placeholder outside of graphs is in one of its own, but not in an input function."""
    monkeypatch.setattr(install, "called", {"disable_v2_behavior"})

    class Initializer(tf.estimator.SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            self.initialize(session)

    hook = Initializer()

    def input_fn() -> Any:
        x = np.arange(1.0, 9.0, dtype=np.float32)
        features, labels = tf.placeholder(x.dtype, x.shape), tf.placeholder(x.dtype, x.shape)
        iterator = tf.data.Dataset.from_tensor_slices((features, labels)).batch(4).make_initializable_iterator()
        hook.initialize = lambda session: session.run(iterator.initializer, feed_dict={features: x, labels: 2 * x})
        return iterator.get_next()

    estimator = Estimator(line, tmp_path, params={})
    estimator.train(input_fn, hooks=[hook])
    found = estimator.evaluate(input_fn, hooks=[hook])
    weight = 0.01 * 2 * 2 * 7.5
    weight -= 0.01 * 2 * (weight - 2) * 43.5
    assert found["global_step"] == 2 and found["mae"] == pytest.approx(abs(weight - 2) * 4.5, rel=1e-5)
