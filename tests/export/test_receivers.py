"""What an exported model is fed and gives: receivers, outputs, and the signatures that are made of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from runner import (
    ClassificationOutput,
    PredictOutput,
    RegressionOutput,
    ServingInputReceiver,
    SupervisedInputReceiver,
    TensorServingInputReceiver,
    build_parsing_serving_input_receiver_fn,
    build_raw_serving_input_receiver_fn,
    build_raw_supervised_input_receiver_fn,
)
from runner.export.outputs import EvalOutput, TrainOutput, outputs_of, signatures_of
from runner.export.receivers import receiver_fn_of_spec
from tests.support.messages import Messages

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def in_a_graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield


def floats(name: str = "x") -> tf.Tensor:
    return v1.placeholder(tf.float32, [None], name)


def strings(name: str = "s") -> tf.Tensor:
    return v1.placeholder(tf.string, [None], name)


def wrong(value: Any) -> Any:
    return value


def names(signature: Any) -> tuple[dict[str, str], dict[str, str], str]:
    inputs, outputs = (
        {key: info.name for key, info in sorted(part.items())} for part in (signature.inputs, signature.outputs)
    )
    return inputs, outputs, signature.method_name


def test_predictions_have_the_signature_that_serving_predicts_with() -> None:
    signature = PredictOutput({"a": floats(), ("b", "c"): floats("y")}).as_signature_def({"in": floats("in")})
    assert names(signature) == ({"in": "in:0"}, {"a": "x:0", "b/c": "y:0"}, "tensorflow/serving/predict")
    assert dict(PredictOutput(floats("z")).outputs).keys() == {"output"}


def test_classifications_and_regressions_take_serialised_examples(messages: Messages) -> None:
    request = {"examples": strings()}
    both = ClassificationOutput(floats("scores"), strings("classes")).as_signature_def(request)
    assert names(both) == (
        {"inputs": "s:0"}, {"classes": "classes:0", "scores": "scores:0"}, "tensorflow/serving/classify",
    )  # fmt: skip
    assert set(ClassificationOutput(scores=floats()).as_signature_def(request).outputs) == {"scores"}
    value = RegressionOutput(floats("value")).as_signature_def(request)
    assert names(value) == ({"inputs": "s:0"}, {"outputs": "value:0"}, "tensorflow/serving/regress")
    with messages.raised(ValueError):
        ClassificationOutput(scores=floats()).as_signature_def({"x": floats()})


def test_supervised_outputs_prefix_what_they_hold() -> None:
    pair = (floats("v"), floats("u"))
    signature = EvalOutput(floats("l"), {"p": floats("p")}, {"m": pair}).as_signature_def({"in": floats("in")})
    assert set(signature.outputs) == {"loss", "predictions/p", "metrics/m/value", "metrics/m/update_op"}
    assert signature.method_name == "tensorflow/supervised/eval"
    trained = TrainOutput(floats("l2"), floats("p2")).as_signature_def({"in": floats("in2")})
    assert set(trained.outputs) == {"loss", "predictions"}
    # As in 2.15, a name that begins with its prefix stays as it is.
    metrics = {"metrics_at_5": pair, "auc": (floats("v2"), tf.no_op())}
    losses = {"loss": floats("l3"), "l2": floats("l4")}
    named = EvalOutput(losses, {"predictions_b": floats("p3")}, metrics).as_signature_def({"in": floats("in3")})
    of_metrics = {f"{name}/{what}" for name in ("metrics_at_5", "metrics/auc") for what in ("value", "update_op")}
    assert set(named.outputs) == {"loss", "loss/l2", "predictions_b"} | of_metrics
    assert named.outputs["metrics/auc/update_op"].name.startswith("metric_op_wrapper")
    assert trained.method_name == "tensorflow/supervised/training"


MISTAKES: dict[str, Callable[[], Any]] = {
    "neither scores nor classes": lambda: ClassificationOutput(),
    "scores of text": lambda: ClassificationOutput(scores=strings()),
    "classes of numbers": lambda: ClassificationOutput(classes=floats()),
    "a value of text": lambda: RegressionOutput(strings()),
    "an output named 1": lambda: PredictOutput({1: floats()}),
    "an output that is 1": lambda: PredictOutput({"a": 1}),
    "no features": lambda: ServingInputReceiver(None, floats()),
    "a feature that is 1": lambda: ServingInputReceiver({"a": 1}, floats()),
    "a feature named 2.5": lambda: ServingInputReceiver({2.5: floats()}, floats()),
    "no receiver tensors": lambda: ServingInputReceiver(floats(), None),
    "receiver tensors named 1": lambda: ServingInputReceiver(floats(), {1: floats()}),
    "alternatives named 1": lambda: ServingInputReceiver(floats(), floats(), {"a": {1: floats()}}),
    "alternatives in a list": lambda: ServingInputReceiver(floats(), floats(), wrong([floats()])),
    "a dict for a tensor": lambda: TensorServingInputReceiver({"a": floats()}, floats()),
    "one name twice": lambda: build_raw_supervised_input_receiver_fn({"a": floats()}, {"a": floats()}),
    "tensors without names": lambda: receiver_fn_of_spec((floats(), floats()))(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str, messages: Messages) -> None:
    with messages.raised(ValueError, hide=r"<tf\.Tensor.*?>"):
        MISTAKES[mistake]()


def test_receivers_name_what_has_no_name() -> None:
    receiver = ServingInputReceiver(floats(), floats("r"), {"other": strings()})
    assert set(receiver.features) == {"feature"} and set(receiver.receiver_tensors) == {"input"}
    assert receiver.receiver_tensors_alternatives is not None
    assert set(receiver.receiver_tensors_alternatives["other"]) == {"input"}
    assert set(ServingInputReceiver({1: floats("i")}, {"a": floats("j")}).features) == {1}
    assert tf.is_tensor(TensorServingInputReceiver(floats("t"), floats("u")).features)
    assert tf.is_tensor(SupervisedInputReceiver(floats("f"), floats("l"), floats("q")).labels)


def test_receivers_are_tuples_as_they_were() -> None:
    features, receivers, alternatives = ServingInputReceiver({"a": floats()}, {"b": floats("b")})
    assert (set(features), set(receivers), alternatives) == ({"a"}, {"b"}, None)
    receiver = TensorServingInputReceiver(floats("t"), floats("u"))._replace(features=features)
    assert receiver.features is features and set(receiver.receiver_tensors) == {"input"}


def test_built_receivers_ask_for_any_number_of_examples() -> None:
    parsing = build_parsing_serving_input_receiver_fn({"x": tf.io.FixedLenFeature([3], tf.float32)})()
    (name,) = parsing.receiver_tensors
    assert name == "examples" and parsing.receiver_tensors[name].dtype == tf.string
    assert parsing.features["x"].shape.as_list() == [None, 3]
    specs = {"d": tf.TensorSpec([8, 2]), "s": tf.SparseTensorSpec([8, 5], tf.int64), 7: tf.TensorSpec([8])}
    raw = build_raw_serving_input_receiver_fn(specs)()
    assert raw.features["d"].shape.as_list() == [None, 2]
    assert raw.features["s"].shape.as_list() == [None, 5]
    assert set(raw.receiver_tensors) == {"d", "s", "7"} and set(raw.features) == {"d", "s", 7}
    assert build_raw_serving_input_receiver_fn(specs, 4)().features["d"].shape.as_list() == [4, 2]
    scalar = build_raw_serving_input_receiver_fn({"x": tf.constant(3.0)})()
    assert scalar.features["x"].shape.as_list() == [None]  # as in tf.estimator 2.15
    supervised = build_raw_supervised_input_receiver_fn(tf.TensorSpec([8, 2]), {"y": tf.TensorSpec([8])})()
    assert set(supervised.receiver_tensors) == {"input", "y"} and set(supervised.labels) == {"y"}
    assert receiver_fn_of_spec(tf.TensorSpec([8, 2]))().features.shape.as_list() == [None, 2]


def test_the_only_output_is_the_default_and_of_several_one_must_be(messages: Messages) -> None:
    predictions = floats("p")
    assert set(outputs_of(predictions, None)) == {"serving_default"}
    assert set(outputs_of(predictions, {"mine": PredictOutput(floats("a"))})) == {"serving_default", "mine"}
    with messages.raised(ValueError):
        outputs_of(predictions, {name: PredictOutput(floats(name)) for name in ("b", "c")})
    with messages.raised(ValueError, hide=r"(?<=is a )\w*Tensor"):
        outputs_of(predictions, {"d": floats("d")})


def test_an_output_that_the_inputs_cannot_have_is_left_out(
    caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    outputs = {"serving_default": RegressionOutput(floats("v")), "predict": PredictOutput(floats("p"))}
    caplog.set_level("INFO")
    found = signatures_of(outputs, {"x": floats()}, {"ex": {"input": strings()}}, PredictOutput(floats("q")))
    assert set(found) == {"serving_default", "predict", "ex:serving_default", "ex:predict"}
    assert found["serving_default"].method_name == "tensorflow/serving/predict"
    assert found["ex:serving_default"].method_name == "tensorflow/serving/regress"
    (record,) = (record for record in caplog.records if "serving_default" in record.getMessage())
    messages.same(record.levelname, record.getMessage())
    with messages.raised(ValueError):
        signatures_of({"a": RegressionOutput(floats("w"))}, {"x": floats("x2")}, {})
