"""The contract: how a model_fn is called, and what it may return in each mode."""

from __future__ import annotations

import argparse
import collections
import functools
import json
from typing import Any

import keras
import pytest
import tensorflow as tf

from runner import EstimatorSpec, ModeKeys, Params, RunConfig
from runner.estimator.specs import TrainingResult
from runner.model_fn import ModelFn
from runner.types import WeightedLabels
from tests.support.messages import Messages

TRAIN, EVAL, PREDICT = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT
X, Y = tf.constant([[1.0], [2.0]]), tf.constant([[2.0], [4.0]])
LOSS = tf.constant(1.0)


def called(fn: Any, mode: str = PREDICT, *, labels: Any = Y, params: dict[str, Any] | None = None) -> EstimatorSpec:
    return ModelFn(fn, Params(params), RunConfig(model_dir="m"))(X, labels, mode)


def explained(messages: Messages, features: Any, fn: Any, labels: Any = None) -> None:
    """Compare what is said of a model_fn that fails in TRAIN with these features and labels."""
    with messages.raised(Exception):
        ModelFn(fn, Params(), RunConfig(model_dir="m"))(features, labels, TRAIN)


def returned(mode: str, **fields: Any) -> EstimatorSpec:
    """What the runner takes from a model_fn that returns such a spec."""

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        return EstimatorSpec(mode, **fields)

    return called(model_fn, mode)


# --- how it is called ---------------------------------------------------------------------------------------------


def test_modes_are_those_of_tf_estimator() -> None:
    assert (TRAIN, EVAL, PREDICT) == ("train", "eval", "infer")


def test_it_is_given_all_that_it_declares() -> None:
    seen: dict[str, Any] = {}

    def model_fn(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        seen.update(features=features, labels=labels, mode=mode, params=params, config=config)
        return EstimatorSpec(mode, predictions=features)

    called(model_fn, params={"width": 3, "deep": {"rate": 0.1}})
    assert seen["features"] is X and seen["labels"] is Y and seen["mode"] == PREDICT
    assert seen["params"]["width"] == seen["params"].width == 3 and seen["params"].deep.rate == 0.1
    assert seen["config"].model_dir == "m"


def test_it_may_declare_features_alone() -> None:
    spec = called(lambda features: EstimatorSpec(PREDICT, predictions=features), labels=None)
    assert spec.predictions is X


def test_order_of_arguments_is_free_and_other_arguments_keep_their_default() -> None:
    def model_fn(params: Any, mode: str, features: Any, depth: int = 2) -> EstimatorSpec:
        assert (params.width, depth) == (3, 2)
        return EstimatorSpec(mode, predictions=features)

    assert called(model_fn, labels=None, params={"width": 3}).predictions is X


def test_keyword_only_arguments_are_given() -> None:
    def model_fn(features: Any, *, mode: str, params: Any = None) -> EstimatorSpec:
        assert params.width == 3
        return EstimatorSpec(mode, predictions=features)

    assert called(model_fn, labels=None, params={"width": 3}).predictions is X


def test_partial_gets_what_it_has_not_bound(messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any, depth: int) -> EstimatorSpec:
        assert params == {"mine": 1} and depth == 7
        return EstimatorSpec(mode, predictions=features)

    bound = functools.partial(model_fn, depth=7, params={"mine": 1})
    assert called(bound).predictions is X
    with messages.raised(ValueError):
        called(bound, params={"width": 3})


def test_callable_object_is_called() -> None:
    class Model:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, features: Any, mode: str) -> EstimatorSpec:
            return EstimatorSpec(mode, predictions=features * self.factor)

        def method(self, features: Any, mode: str) -> EstimatorSpec:
            return EstimatorSpec(mode, predictions=features + self.factor)

    assert called(Model(3.0), labels=None).predictions.numpy().tolist() == [[3.0], [6.0]]
    assert called(Model(3.0).method, labels=None).predictions.numpy().tolist() == [[4.0], [5.0]]


def test_params_are_a_dict_that_it_may_change_for_itself(messages: Messages) -> None:
    def model_fn(features: Any, mode: str, params: Any) -> EstimatorSpec:
        assert issubclass(type(params), dict) and json.dumps(params.deep) == '{"rate": 0.1}'
        assert params.copy().pop("width") == 3 and params.setdefault("depth", 2) == 2
        params.width = params["width"] + 1
        params.deep.rate = 0.2
        assert (params["width"], params["deep"]) == (4, {"rate": 0.2})
        with messages.raised(KeyError):
            params["widht"]
        return EstimatorSpec(mode, predictions=features)

    given = {"width": 3, "deep": {"rate": 0.1}}
    model = ModelFn(model_fn, given, RunConfig(model_dir="m"))
    for _ in range(2):
        model(X, None, PREDICT)
    assert given == {"width": 3, "deep": {"rate": 0.1}}


def test_params_that_are_one_object_or_another_kind_of_dict_stay_so() -> None:
    names, sizes = ["a"], collections.defaultdict(int, rows=2)

    def model_fn(features: Any, mode: str, params: Any) -> EstimatorSpec:
        assert params.names is params.deep.names is not names
        assert params.sizes == sizes and params.sizes["columns"] == 0
        return EstimatorSpec(mode, predictions=features)

    called(model_fn, params={"names": names, "sizes": sizes, "deep": {"names": names}})
    assert sizes == {"rows": 2}


def test_params_of_another_type_are_copied_as_they_are(messages: Messages) -> None:
    seen = []

    def model_fn(features: Any, mode: str, params: Any) -> EstimatorSpec:
        params.width += 1
        seen.append(params)
        return EstimatorSpec(mode, predictions=features)

    given = argparse.Namespace(width=3)
    ModelFn(model_fn, given, RunConfig(model_dir="m"))(X, None, PREDICT)
    assert seen == [argparse.Namespace(width=4)] and given.width == 3
    with messages.raised(ValueError):
        ModelFn(lambda features, mode: None, given, None)


def test_without_features_it_is_refused(messages: Messages) -> None:
    def model_fn(x: Any, labels: Any, mode: str) -> None: ...

    with messages.raised(ValueError):
        called(model_fn)


def test_arguments_that_nobody_fills_are_refused(messages: Messages) -> None:
    def model_fn(features: Any, labels: Any, mode: str, depth: int, width: int) -> None: ...

    with messages.raised(ValueError):
        called(model_fn)


def test_params_that_it_does_not_take_are_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        called(lambda features, mode: None, params={"width": 3})


@pytest.mark.parametrize("mode", [TRAIN, EVAL])
def test_labels_that_it_does_not_take_are_refused(mode: str, messages: Messages) -> None:
    with messages.raised(ValueError):
        called(lambda features, mode: EstimatorSpec(mode, loss=LOSS, train_op=LOSS), mode)


def test_labels_that_it_does_not_take_are_ignored_in_predict() -> None:
    assert called(lambda features, mode: EstimatorSpec(mode, predictions=features)).predictions is X


def test_labels_are_none_where_the_input_has_none() -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        assert labels is None
        return EstimatorSpec(mode, loss=LOSS, train_op=LOSS)

    called(model_fn, TRAIN, labels=None)


# --- what it returns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, {"loss": 1.0}, (1, 2)], ids=str)
def test_anything_else_than_a_spec_is_refused(value: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        called(lambda features, labels, mode: value)


def test_spec_of_another_mode_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        called(lambda features, labels, mode: EstimatorSpec(PREDICT, predictions=features), TRAIN)


def test_a_loss_of_unknown_shape_is_taken_for_a_scalar() -> None:
    found: list[tf.Tensor] = []

    @tf.function
    def traced() -> None:
        loss = tf.numpy_function(lambda: 3.0, [], tf.float32)
        found.append(returned(TRAIN, loss=loss, train_op=LOSS).loss)

    traced.get_concrete_function()
    assert found[0].shape == []


def test_unknown_mode_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        EstimatorSpec("test")


def test_replace_changes_all_but_the_mode(messages: Messages) -> None:
    spec = EstimatorSpec(EVAL, loss=LOSS)
    assert spec._replace(predictions=X).predictions is X and spec.predictions is None
    assert spec._replace(mode=EVAL, loss=None).loss is None
    with messages.raised(ValueError):
        spec._replace(mode=TRAIN)


def test_fields_come_in_the_order_of_tf_estimator() -> None:
    spec = EstimatorSpec(TRAIN, X, LOSS, Y, {"m": X}, None, ["chief"], ["all"], None, ["eval"], ["predict"])
    assert (spec.predictions, spec.loss, spec.train_op) == (X, LOSS, Y)
    assert spec.training_chief_hooks == ("chief",) and spec.training_hooks == ("all",)
    assert spec.evaluation_hooks == ("eval",) and spec.prediction_hooks == ("predict",)
    assert spec.export_outputs == {}


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        (PREDICT, {"loss": LOSS}),
        (EVAL, {"predictions": X}),
        (TRAIN, {"train_op": LOSS}),
        (TRAIN, {"loss": LOSS}),
        (TRAIN, {"loss": LOSS, "train_op": LOSS, "optimizer": 1}),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_what_a_mode_needs_is_asked_for(mode: str, fields: dict[str, Any], messages: Messages) -> None:
    with messages.raised(ValueError):
        returned(mode, **fields)


@pytest.mark.parametrize(
    "wrong", [lambda: None, "minimize", 0, 1.5, ["minimize"]], ids=lambda given: type(given).__name__
)
def test_a_train_op_that_would_run_nothing_is_refused(wrong: Any, messages: Messages) -> None:
    with messages.raised(TypeError, hide=r" at 0x\w+"):
        returned(TRAIN, loss=LOSS, train_op=wrong)


def test_what_a_mode_needs_is_enough() -> None:
    returned(PREDICT, predictions=X)
    returned(EVAL, loss=LOSS)
    returned(TRAIN, loss=LOSS, train_op=LOSS)
    returned(TRAIN, loss=LOSS, optimizer=keras.optimizers.SGD())


@pytest.mark.parametrize("mode", [TRAIN, EVAL])
def test_loss_is_a_scalar_or_one_per_example(mode: str, messages: Messages) -> None:
    assert returned(mode, loss=LOSS, train_op=LOSS).loss.shape == []
    assert returned(mode, loss=tf.ones([3]), train_op=LOSS).loss.shape == [3]
    assert returned(mode, loss=tf.ones([1]), train_op=LOSS).loss.shape == []
    assert returned(mode, loss=1.5, train_op=LOSS).loss.numpy() == 1.5
    with messages.raised(ValueError):
        returned(mode, loss=tf.ones([2, 1]), train_op=LOSS)


@pytest.mark.parametrize(
    "loss", [tf.sparse.from_dense([1.0]), "loss", {"loss": LOSS}, object()], ids=["sparse", "text", "dict", "object"]
)
def test_loss_that_is_no_dense_tensor_of_numbers_is_refused(loss: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        returned(EVAL, loss=loss)


@pytest.mark.parametrize("name", ["loss", "global_step"])
def test_names_of_the_runners_own_metrics_are_refused(name: str, messages: Messages) -> None:
    with messages.raised(ValueError):
        returned(EVAL, loss=LOSS, eval_metric_ops={name: X})


def test_three_forms_of_metrics_are_taken_and_others_refused(messages: Messages) -> None:
    spec = returned(EVAL, loss=LOSS, eval_metric_ops={"pair": (X, X), "keras": keras.metrics.Mean(), "mean": X})
    assert list(spec.eval_metric_ops or ()) == ["pair", "keras", "mean"]
    for wrong in (1.0, (X, X, X), keras.metrics.Mean):
        with messages.raised(ValueError):
            returned(EVAL, loss=LOSS, eval_metric_ops={"m": wrong})


@pytest.mark.parametrize("predictions", [{"y": X, "n": 3}, 3], ids=["in a dict", "alone"])
def test_predictions_that_are_no_tensors_are_refused(predictions: Any, messages: Messages) -> None:
    with messages.raised(ValueError):
        returned(PREDICT, predictions=predictions)


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable], ids=["tf", "keras"])
def test_a_variable_as_a_prediction_is_its_value(kind: Any) -> None:
    spec = returned(PREDICT, predictions={"w": kind([[1.0], [2.0]]), "x": X})
    assert isinstance(spec.predictions["w"], tf.Tensor) and spec.predictions["x"] is X
    assert spec.predictions["w"].numpy().tolist() == [[1.0], [2.0]]


# --- keras.Model --------------------------------------------------------------------------------------------------


def built_model(*, compiled: bool) -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)], name="net")
    if compiled:
        model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return model


def test_compiled_model_becomes_a_spec() -> None:
    spec = called(lambda features, labels, mode: built_model(compiled=True), TRAIN)
    assert spec.loss.numpy() == pytest.approx((1.0 + 4.0) / 2)
    assert isinstance(spec.optimizer, keras.optimizers.SGD) and spec.train_op is None
    evaluated = called(lambda features, labels, mode: built_model(compiled=True), EVAL)
    assert list(evaluated.eval_metric_ops or ()) == ["mae"]
    assert (evaluated.eval_metric_ops or {})["mae"].result().numpy() == pytest.approx(1.5)


def test_sample_weights_are_for_the_loss_and_the_weighted_metrics_of_a_compiled_model() -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> keras.Model:
        model = built_model(compiled=False)
        model.compile(optimizer="sgd", loss="mse", metrics=["mae"], weighted_metrics=["mae"])
        return model

    weighted = WeightedLabels(Y, tf.constant([3.0, 1.0]))
    assert called(model_fn, TRAIN, labels=weighted).loss.numpy() == pytest.approx((3 * 1.0 + 4.0) / 2)
    spec = called(model_fn, EVAL, labels=weighted)
    found = {name: metric.result().numpy() for name, metric in (spec.eval_metric_ops or {}).items()}
    assert found == pytest.approx({"mae": 1.5, "weighted_mae": (3 * 1.0 + 2.0) / 4})
    assert called(model_fn, PREDICT, labels=weighted).predictions.shape == (2, 1)


def test_metrics_of_several_outputs_have_their_names_of_fit() -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> keras.Model:
        x = keras.Input((1,))
        outputs = {name: keras.layers.Dense(1, kernel_initializer="ones", name=name)(x) for name in ("one", "two")}
        model = keras.Model(x, outputs)
        model.compile(loss="mse", metrics={"one": ["mae"], "two": ["mae"]})
        return model

    metrics = called(model_fn, EVAL, labels={"one": Y, "two": 2 * Y}).eval_metric_ops or {}
    assert {name: metrics[name].result().numpy() for name in ("one_mae", "two_mae")} == {"one_mae": 1.5, "two_mae": 4.5}


def test_a_spec_gets_sample_weights_by_an_argument() -> None:
    def model_fn(features: Any, labels: Any, mode: str, sample_weight: Any) -> EstimatorSpec:
        losses = tf.square(features - labels)[:, 0]
        return EstimatorSpec(mode, loss=losses * sample_weight, loss_weight=sample_weight, train_op=losses)

    weighted = WeightedLabels(Y, tf.constant([3.0, 1.0]))
    for mode in (TRAIN, EVAL):
        spec = called(model_fn, mode, labels=weighted)
        assert spec.loss.numpy().tolist() == [3 * 1.0, 4.0] and spec.loss_weight.numpy().tolist() == [3.0, 1.0]
    unweighted = called(lambda features, labels, mode, sample_weight: EstimatorSpec(
        mode, loss=LOSS, train_op=LOSS, predictions=[] if sample_weight is None else [X]), TRAIN)  # fmt: skip
    assert unweighted.predictions == []


def test_sample_weights_for_a_spec_without_the_argument_are_refused(messages: Messages) -> None:
    weighted = WeightedLabels(Y, tf.ones([2]))
    spec = EstimatorSpec(TRAIN, loss=LOSS, train_op=LOSS)
    with messages.raised(ValueError):
        called(lambda features, labels, mode: spec, TRAIN, labels=weighted)


@pytest.mark.parametrize("mode", [TRAIN, EVAL])
def test_model_that_is_not_compiled_is_refused(mode: str, messages: Messages) -> None:
    with messages.raised(ValueError):
        called(lambda features, labels, mode: built_model(compiled=False), mode)


def test_model_that_is_not_compiled_can_predict() -> None:
    spec = called(lambda features, labels, mode: built_model(compiled=False), PREDICT)
    assert spec.predictions.numpy().tolist() == [[1.0], [2.0]]


def test_a_functional_model_gets_the_features_that_its_inputs_name() -> None:
    def model_fn(features, labels, mode):
        x = keras.Input((2,), name="x")
        model = keras.Model(x, keras.layers.Dense(1)(x))
        model.compile(optimizer="sgd", loss="mse")
        return model

    features = {"x": tf.ones([3, 2]), "id": tf.range(3)}
    spec = ModelFn(model_fn, Params({}), None)(features, None, ModeKeys.PREDICT)
    assert spec.predictions.shape == (3, 1)


def test_a_sequential_model_gets_the_feature_that_its_input_names() -> None:
    features = {"x": tf.ones([3, 2]), "id": tf.range(3)}

    def model_fn(features, labels, mode):
        return keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1)])

    spec = ModelFn(model_fn, Params({}), None)(features, None, ModeKeys.PREDICT)
    assert spec.predictions.shape == (3, 1)


# --- what the input does not give ---------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [lambda table: table["pixel"], lambda table: table.pop("pixel")], ids=["[]", "pop"])
def test_a_feature_that_is_missing_is_named_with_those_that_are_there(take: Any, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any) -> Any:
        return take(features)

    explained(messages, {"pixels": X, "a": Y}, model_fn, Y)


def test_the_key_error_of_another_table_is_left_as_it_is(messages: Messages) -> None:
    def model_fn(features: Any, labels: Any) -> Any:
        widths = {"small": features["pixels"]}
        return widths["large"]

    explained(messages, {"pixels": X}, model_fn, Y)


def notes_of(fn: Any, features: Any = X, kind: type[Exception] = TypeError) -> list[str]:
    """What is said beside the error of a model_fn that fails in TRAIN without labels."""
    with pytest.raises(kind) as caught:
        ModelFn(fn, Params(), RunConfig(model_dir="m"))(features, None, TRAIN)
    return getattr(caught.value, "__notes__", [])


def of_targets(logits: Any, targets: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)


LOSSES = {
    "a call": lambda labels: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, X),
    "several lines": lambda labels: tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels,
        logits=X,
    ),
    "a function of the user": lambda labels: of_targets(X, labels),
    "an item": lambda labels: labels["class"],
    "an attribute": lambda labels: labels.shape,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_an_error_of_missing_labels_is_the_users_with_a_remark(loss: Any, messages: Messages) -> None:
    def model_fn(features: Any, labels: Any) -> Any:
        return loss(labels)

    with pytest.raises(Exception) as caught:
        ModelFn(model_fn, Params(), RunConfig(model_dir="m"))(X, None, TRAIN)
    assert caught.value.__cause__ is None
    assert not str(caught.value).startswith("the input returns")
    for note in caught.value.__notes__:
        messages.same("note", note)


def test_an_error_that_does_not_use_labels_has_no_remark_about_them() -> None:
    def of_none(features: Any, labels: Any) -> Any:
        return "dense" in None  # type: ignore[operator]

    def in_a_function(features: Any, labels: Any) -> Any:
        def built(targets: Any) -> Any:
            return "dense" in None  # type: ignore[operator]

        return built(labels)

    def said_by_the_user(features: Any, labels: Any) -> Any:
        raise TypeError("labels are None")

    assert [notes_of(fn) for fn in (of_none, in_a_function, said_by_the_user)] == [[], [], []]


def test_an_autoencoder_has_errors_of_its_own(messages: Messages) -> None:
    def model_fn(features: Any, labels: Any) -> Any:
        raise ValueError("width must be even")

    explained(messages, X, model_fn)


# --- what is written in Python ------------------------------------------------------------------------------------


def test_params_are_made_of_names() -> None:
    params = Params({"width": 8, "deep": {"depth": 2}}, width=16, values=[1])
    assert params == {"width": 16, "deep": {"depth": 2}, "values": [1]}
    assert (params.width, params.deep.depth, params["values"]) == (16, 2, [1])
    assert Params(lr=0.1) == Params({"lr": 0.1})


def test_metrics_of_the_only_evaluation_are_found_by_their_names(messages: Messages) -> None:
    result = TrainingResult({"": {"accuracy": 0.5}}, 1, 8, 1.0, None)
    assert result.metrics["accuracy"] == result.metrics[""]["accuracy"] == 0.5
    assert result.metrics == {"": {"accuracy": 0.5}}, "names of evaluations are its only keys"
    with messages.raised(KeyError):
        result.metrics["acc"]
    several = TrainingResult({"": {"accuracy": 0.5}, "small": {"accuracy": 0.4}}, 1, 8, 1.0, None)
    with messages.raised(KeyError):
        several.metrics["accuracy"]
