"""Heads: the numbers of tf.estimator 2.15, the same on any strategy, and what is said of labels that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, RunConfig
from runner.classic.heads.base import Head
from runner.classic.heads.multi_head import MultiHead
from tests.support import head_cases
from tests.support.line import read_events
from tests.support.messages import Messages
from tests.support.models import data, strategies

v1, heads = tf.compat.v1, tf.estimator
REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "head_reference.json").read_text())


@pytest.mark.parametrize("name", REFERENCE)
def test_loss_predictions_and_metrics_are_those_of_2_15(name: str) -> None:
    found, expected = head_cases.measured(*head_cases.cases(heads)[name]), REFERENCE[name]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert list(found["predictions"]) == list(expected["predictions"])
    for key, value in expected["predictions"].items():
        if isinstance(np.ravel(value)[0], str):
            assert found["predictions"][key] == value
        else:
            np.testing.assert_allclose(found["predictions"][key], value, atol=2e-6)


def test_names_of_signatures_are_those_that_were_exported() -> None:
    logits = tf.constant([[0.5]])
    binary = heads.BinaryClassHead(label_vocabulary=["no", "yes"])
    assert list(binary.export_outputs(binary.predictions(logits))) == [
        "serving_default", "classification", "predict", "regression",
    ]  # fmt: skip
    both = heads.MultiHead([heads.BinaryClassHead(name="a"), heads.RegressionHead(name="b")])
    assert sorted(both.export_outputs(both.predictions(tf.constant([[0.5, 1.0]])))) == [
        "a", "a/classification", "a/predict", "a/regression", "b", "b/predict", "b/regression", "predict",
        "serving_default",
    ]  # fmt: skip


# --- in a model ---------------------------------------------------------------------------------------------------


def model_fn(head: Head, train_op_fn: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    def fn(features: Any, labels: Any, mode: str) -> Any:
        x, weights = features["x"], features["w"]
        kernel = v1.get_variable("kernel", [4, 1], tf.float64, v1.constant_initializer(0.2))
        regularization = [1e-3 * tf.reduce_sum(tf.square(kernel))]
        optimizer = None if train_op_fn else v1.train.AdagradOptimizer(0.1)
        return head.create_estimator_spec(
            {"w": weights}, mode, x @ kernel, labels, optimizer, None, train_op_fn,
            regularization_losses=regularization,
        )  # fmt: skip

    return fn


def weighted_input(batch_size: int = 6, epochs: int = 1, num_examples: int = 19) -> Input:
    """In batches of 6, the last has 1 example: one of two replicas has none."""

    def fn(params: Any) -> tf.data.Dataset:
        x, y = data(num_examples, "float64")
        weights = np.linspace(0, 2, num_examples)
        labels = (y > np.median(y)).astype(np.int64)
        dataset = tf.data.Dataset.from_tensor_slices(({"x": x, "w": weights}, labels))
        return dataset.batch(params["batch_size"]).repeat(epochs)

    return Input(fn, params={}, batch_size=batch_size)


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_replicas(tmp_path: Path) -> None:
    head = heads.BinaryClassHead("w", [0.3], name="h")
    found = {}
    for name in ("default", "mirrored"):
        config = RunConfig(train_distribute=strategies()[name])
        estimator = Estimator(model_fn(head), tmp_path / name, config)
        estimator.train(weighted_input(epochs=2))
        found[name] = estimator.evaluate(weighted_input()) | {"kernel": estimator.get_variable_value("kernel").tolist()}
    kernel = found["default"].pop("kernel")
    np.testing.assert_allclose(found["mirrored"].pop("kernel"), kernel, rtol=1e-10)
    for metric, expected in found["default"].items():
        in_float32 = metric.startswith(("auc", "precision", "recall"))  # areas, and sums of weights
        precision = 1e-6 if in_float32 else 1e-10
        assert found["mirrored"][metric] == pytest.approx(expected, rel=precision), metric
    assert {"loss", "average_loss/h", "auc/h", "accuracy/positive_threshold_0.3/h", "regularization_loss/h"} <= set(
        found["default"]
    )


def two_heads(reduction: str) -> MultiHead:
    both = [heads.RegressionHead(1, "w", reduction, name=name) for name in ("a", "b")]
    return heads.MultiHead(both, [1.0, 0.5])


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (two_heads("sum"), lambda found: found["loss/a"] + 0.5 * found["loss/b"] + found["regularization_loss/a_b"]),
        pytest.param(
            heads.RegressionHead(1, "w", "weighted_mean"), lambda found: found["average_loss"], marks=pytest.mark.slow
        ),
    ],
)
def test_sums_and_weighted_means_do_not_depend_on_the_replicas(head: Head, expected: Any, tmp_path: Path) -> None:
    def fn(features: Any, labels: Any, mode: str) -> Any:
        x, size = features["x"], head.logits_dimension
        kernel = v1.get_variable("kernel", [4, size], tf.float64, v1.constant_initializer(0.2))
        labels = tf.cast(labels, tf.float64)
        both, some = isinstance(head, heads.MultiHead), {"w": features["w"]}
        return head.create_estimator_spec(
            some, mode, x @ kernel, {"a": labels, "b": 2 * labels} if both else labels,
            v1.train.AdagradOptimizer(0.1), regularization_losses=[tf.reduce_sum(kernel**2)] if both else None,
        )  # fmt: skip

    found = {}
    for name in ("default", "mirrored"):
        estimator = Estimator(fn, tmp_path / name, RunConfig(train_distribute=strategies()[name], tensorboard=False))
        estimator.train(weighted_input(epochs=2))
        found[name] = estimator.evaluate(weighted_input()) | {"kernel": estimator.get_variable_value("kernel")[0, 0]}
    assert found["mirrored"] == pytest.approx(found["default"], rel=1e-10)
    metrics = found["default"]
    assert metrics["loss"] == pytest.approx(expected(metrics), rel=1e-10)
    if isinstance(head, heads.MultiHead):  # of 4 batches, whose weights (float32) add up to 19
        assert metrics["loss/a"] == pytest.approx(metrics["average_loss/a"] * 19 / 4, rel=1e-7)


def test_the_state_of_an_optimizer_in_train_op_fn_is_named_as_in_2_15(tmp_path: Path) -> None:
    def train_op_fn(loss: tf.Tensor) -> Any:
        return v1.train.AdamOptimizer(0.1).minimize(loss, v1.train.get_global_step())

    estimator = Estimator(model_fn(heads.RegressionHead(), train_op_fn), tmp_path)
    estimator.train(weighted_input())
    assert estimator.get_variable_names() == [
        "global_step", "kernel", "kernel/Adam", "kernel/Adam_1", "training/beta1_power", "training/beta2_power",
    ]  # fmt: skip


def test_of_several_heads_each_has_its_loss_in_the_events(tmp_path: Path) -> None:
    def fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        kernel = v1.get_variable("kernel", [4, 2], tf.float64, v1.constant_initializer(0.2))
        head = heads.MultiHead([heads.BinaryClassHead(name="a"), heads.RegressionHead(name="b")], [1.0, 0.5])
        regularization = [1e-3 * tf.reduce_sum(tf.square(kernel))]
        return head.create_estimator_spec(
            features, mode, features["x"] @ kernel, {"a": labels, "b": features["w"][:, None]},
            v1.train.AdagradOptimizer(0.1), regularization_losses=regularization,
        )  # fmt: skip

    Estimator(fn, tmp_path, RunConfig(save_summary_steps=1)).train(weighted_input(), steps=1)
    found = {event.tag: event.value for event in read_events(tmp_path)}
    assert set(found) - {"global_step/sec", "train/learning_rate"} == {
        "loss",
        "loss/a",
        "loss/b",
        "regularization_loss",
    }
    parts = found["loss/a"] + 0.5 * found["loss/b"] + found["regularization_loss"]
    assert found["loss"] == pytest.approx(parts, rel=1e-6)


# --- in a graph and session of the program's own --------------------------------------------------------------------

BINARY, CLASSES = [[45.0], [-41.0]], [[10.0, 0, 0], [0, 10, 0]]
CUBE = [[[10.0], [-10]], [[12], [-12]]]  # a logit for each of two places of two examples
PLACES = tf.feature_column.numeric_column("w", shape=(2,))


def losses(values: Any, dtype: str = "float32") -> Callable[..., Any]:
    return lambda labels, logits: tf.constant(values, dtype)


# The last column is what TensorFlow 2.15 computed, or the type of its exception. Only what is wrapped in a lambda has
# no static shape.
IN_A_GRAPH: dict[str, tuple[Callable[[], Head], Any, Any, Any, dict[str, float] | type[Exception]]] = {
    "binary": (heads.BinaryClassHead, BINARY, lambda: [[1], [1]], None,
               {"loss": 20.5, "accuracy": 0.5, "label/mean": 1.0, "accuracy_baseline": 1.0}),
    "classes": (lambda: heads.MultiClassHead(3), CLASSES, lambda: [[1], [1]], None,
                {"loss": 5.0000, "average_loss": 5.0000, "accuracy": 0.5}),
    "names of classes": (lambda: heads.MultiClassHead(3, label_vocabulary=["a", "b", "c"]), CLASSES,
                         lambda: [["b"], ["b"]], None, {"loss": 5.0000, "accuracy": 0.5}),
    "several labels": (lambda: heads.MultiLabelHead(2), [[-1.0, 1], [-1.5, 1.5]], lambda: [[1, 0], [1, 1]], None,
                       {"loss": 1.1323, "average_loss": 1.1323}),
    "numbers": (heads.RegressionHead, [[45.0], [41]], lambda: [[1.0], [1]], None,
                {"loss": 1768.0, "prediction/mean": 43.0, "label/mean": 1.0}),
    "logits, too": (heads.BinaryClassHead, lambda: [[1.0], [2]], lambda: [[1], [1]], None,
                    {"loss": 0.22009, "prediction/mean": 0.80593}),
    "labels without their axis": (heads.BinaryClassHead, BINARY, lambda: [1, 1], None, tf.errors.InvalidArgumentError),
    "too many labels": (heads.RegressionHead, BINARY, lambda: [[1.0], [1], [1]], None, tf.errors.InvalidArgumentError),
    "weights of places": (lambda: heads.BinaryClassHead(PLACES), CUBE, [[[1], [0]], [[0], [1]]],
                          [[1.0, 1.5], [2, 2.5]], {"loss": 13.5, "average_loss": 7.7143, "accuracy": 0.35714}),
    "weights of logits": (lambda: heads.RegressionHead(2, "w"), [[45.0, 1], [41, 1]], [[43.0, 2], [44, 2]],
                          lambda: [[1.0, 2], [3, 4]], {"loss": 9.25, "average_loss": 3.7}),
    "weights of another shape": (lambda: heads.BinaryClassHead("w"), BINARY, [[1], [1]], lambda: [1.0, 2, 3],
                                 tf.errors.InvalidArgumentError),
    "float64": (lambda: heads.BinaryClassHead("w", loss_fn=losses([[1.0], [2]], "float64")), BINARY, [[1], [0]],
                [[1.0], [0.5]], {"loss": 1.0, "average_loss": 1.3333, "label/mean": 0.66667}),
    "losses that are too few": (lambda: heads.BinaryClassHead(loss_fn=losses([1.0, 2.0])), BINARY, [[1], [0]], None,
                                tf.errors.InvalidArgumentError),
    "losses that fit by broadcasting": (lambda: heads.RegressionHead(2, "w", loss_fn=losses([1.0, 2.0])),
                                        [[1.0, 2], [3, 4]], [[1, 2], [0, 1]], [[1.0], [0.5]],
                                        {"loss": 1.0, "average_loss": 1.3333, "label/mean": 1.1667}),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_a_spec_gives_a_session_what_that_of_2_15_gave(name: str) -> None:
    make, logits, labels, weights, expected = IN_A_GRAPH[name]

    def tensor(value: Any) -> Any:
        return v1.placeholder_with_default(tf.constant(value()), None) if callable(value) else tf.constant(value)

    with tf.Graph().as_default(), v1.Session() as session:
        head, features = make(), {"x": tf.zeros([2])}
        features |= {} if weights is None else {"w": tensor(weights)}
        spec = head.create_estimator_spec(features, "eval", tensor(logits), tensor(labels))
        assert (spec.train_op, spec.export_outputs) == (None, None)
        pairs = spec.eval_metric_ops
        assert all(type(pair) is tuple and len(pair) == 2 for pair in pairs.values())
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer(), v1.tables_initializer()])
        if not isinstance(expected, dict):
            with pytest.raises(expected):
                session.run(spec.loss)
            return
        found = {"loss": session.run([spec.loss, *(update for _, update in pairs.values())])[0]}
        found |= session.run({name: value for name, (value, _) in pairs.items()})
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert spec.loss.dtype == ("float64" if name == "float64" else "float32")


def test_a_spec_of_train_has_the_users_update_and_the_summaries_of_2_15() -> None:
    tf_keras = pytest.importorskip("tf_keras", reason="the extra 'classic' brings it")

    class Mine(tf_keras.optimizers.legacy.Optimizer):  # type: ignore[name-defined]
        def get_updates(self, loss: Any, params: Any) -> list[Any]:
            assert [one.name for one in params] == ["v:0"]
            return [tf.strings.as_string(loss, precision=3)]

        def get_config(self) -> dict[str, Any]:
            return super().get_config()

    with tf.Graph().as_default(), v1.Session() as session:
        variables, regularization = [tf.Variable([1.0, 2.0], name="v")], [tf.constant(1.5), tf.constant(0.5)]
        spec = heads.BinaryClassHead().create_estimator_spec(
            {}, "train", tf.constant(BINARY), tf.constant([[1], [1]]), Mine("mine"), variables,
            regularization_losses=regularization,
        )  # fmt: skip
        spec.scaffold.finalize()
        session.run(spec.scaffold.init_op)
        loss, updated, summaries = session.run([spec.loss, spec.train_op, spec.scaffold.summary_op])
    assert (loss, updated) == (22.5, b"22.500")
    assert {one.tag: one.simple_value for one in v1.Summary.FromString(summaries).value} == {
        "loss": 22.5, "regularization_loss": 2.0,
    }  # fmt: skip


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        (heads.BinaryClassHead(), None),
        (heads.BinaryClassHead(), [0, 1, 1]),
        (heads.BinaryClassHead(label_vocabulary=["n", "y"]), [0, 1]),
        (heads.MultiClassHead(3), [0.0, 1.0]),
        (heads.MultiClassHead(3), [[0, 1], [1, 0]]),
    ],
    ids=["no labels", "another shape", "numbers for names", "floats", "one-hot"],
)
def test_labels_that_cannot_fit_are_refused_at_the_trace(head: Head, labels: Any, messages: Messages) -> None:
    logits = tf.zeros([2, head.logits_dimension])
    with messages.raised(Exception):
        head.loss(None if labels is None else tf.constant(labels), logits)


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        (heads.BinaryClassHead(), [0, 7]),
        (heads.MultiClassHead(3), [-1, 3]),
        (heads.MultiClassHead(3, label_vocabulary=["a", "b", "c"]), ["a", "q"]),
        (heads.MultiLabelHead(2), [[0, 2], [1, 1]]),
        (heads.LogisticRegressionHead(), [0.5, 1.5]),
    ],
    ids=["binary", "classes", "names of classes", "several labels", "logistic"],
)
def test_values_of_labels_that_do_not_fit_are_shown(head: Head, labels: Any, messages: Messages) -> None:
    with messages.raised(tf.errors.InvalidArgumentError):
        head.loss(tf.constant(labels), tf.zeros([2, head.logits_dimension]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: heads.BinaryClassHead(loss_reduction="none"),
        lambda: heads.BinaryClassHead(thresholds=[0.5, 1.0]),
        lambda: heads.BinaryClassHead(loss_fn=lambda y, logits: y),
        lambda: heads.MultiClassHead(2),
        lambda: heads.MultiClassHead(3, label_vocabulary=["a"]),
        lambda: heads.MultiLabelHead(2, classes_for_class_based_metrics=[2]),
        lambda: heads.RegressionHead(0),
        lambda: heads.MultiHead([heads.RegressionHead()]),
    ],
    ids=[
        "loss_reduction", "thresholds", "loss_fn", "n_classes", "label_vocabulary", "classes_for_class_based_metrics",
        "label_dimension", "no name",
    ],
)  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(make: Callable[[], Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        make()


def test_a_weight_column_that_is_not_there_is_named(messages: Messages) -> None:
    with messages.raised(ValueError):
        heads.RegressionHead(weight_column="w").loss(tf.zeros([2, 1]), tf.zeros([2, 1]), {"x": tf.zeros([2])})
