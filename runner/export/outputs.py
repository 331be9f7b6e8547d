"""The outputs of an exported model's signatures, under the names that TensorFlow Serving expects."""

from __future__ import annotations

import abc
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from runner.tf_private.v1 import export_outputs as of_tensorflow

_log = logging.getLogger(__name__)

saved_model = tf.compat.v1.saved_model

DEFAULT = "serving_default"
"""Name of the signature that TensorFlow Serving runs by default."""

SINGLE_RECEIVER = "input"
"""Name of the input if `receiver_tensors` is one tensor instead of a dict."""


class ExportOutput(of_tensorflow.ExportOutput, abc.ABC):
    """Base class: the outputs of one signature of an exported model.

    It and its subclasses are subclasses of TensorFlow's own, which tf.estimator had under their names.
    """

    @abc.abstractmethod
    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        """Return the SignatureDef with the given inputs and these outputs.

        Args:
          receiver_tensors: name -> input placeholder.

        Raises:
          ValueError: TensorFlow Serving does not allow these inputs for this kind of output.
        """


class PredictOutput(ExportOutput, of_tensorflow.PredictOutput):
    """Outputs that may be any tensors.

    Args:
      outputs: a dict of tensors, or one tensor, which is then named `output`. A key may be a tuple of strings, joined
        by `/`.

    Raises:
      ValueError: a key is not a string, or a value is not a tensor.
    """

    outputs: Any = None

    def __init__(self, outputs: Any) -> None:
        self.outputs = _name_outputs(outputs, "output", "PredictOutput(outputs)")

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        return _signature(receiver_tensors, self.outputs, saved_model.signature_constants.PREDICT_METHOD_NAME)


@dataclasses.dataclass(eq=False)
class ClassificationOutput(ExportOutput, of_tensorflow.ClassificationOutput):
    """Outputs of a classifier: scores and names of classes; one of them may be left out.

    Args:
      scores: float, `[batch, classes]`.
      classes: string, `[batch, classes]` or `[classes]`.

    Raises:
      ValueError: both are None, or one has another dtype.
    """

    scores: Any = None
    classes: Any = None

    def __post_init__(self) -> None:
        scores = self.scores
        classes = self.classes
        if scores is None and classes is None:
            raise ValueError("ClassificationOutput(): scores, classes or both are required.")
        if scores is not None and not (tf.is_tensor(scores) and scores.dtype.is_floating):
            raise ValueError(f"ClassificationOutput(scores={scores!r}): scores must be a float tensor.")
        if classes is not None and not (tf.is_tensor(classes) and classes.dtype == tf.string):
            raise ValueError(
                f"ClassificationOutput(classes={classes!r}): classes must be a string tensor; convert numbers with "
                "tf.as_string."
            )

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        examples = _single_string(receiver_tensors, "classification")
        return saved_model.classification_signature_def(examples, self.classes, self.scores)


class RegressionOutput(ExportOutput, of_tensorflow.RegressionOutput):
    """Output of a regressor: one number per example.

    Args:
      value: float, `[batch]` or `[batch, 1]`.

    Raises:
      ValueError: `value` is not a float tensor.
    """

    value: Any = None

    def __init__(self, value: Any) -> None:
        if not (tf.is_tensor(value) and value.dtype.is_floating):
            raise ValueError(f"RegressionOutput(value={value!r}): value must be a float tensor.")
        self.value = value

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        examples = _single_string(receiver_tensors, "regression")
        return saved_model.regression_signature_def(examples, self.value)


class _SupervisedOutput(ExportOutput):
    """Outputs of a model with labels: `loss`, `predictions/<name>`, `metrics/<name>/value`, `metrics/<name>/update_op`.

    Args:
      loss: scalar; None: no loss.
      predictions: a tensor or a dict of tensors; None: no predictions.
      metrics: name -> (value, update) tensors, or an operation as the update; None: no metrics.
    """

    method_name = ""
    loss: Any = None
    predictions: Any = None
    metrics: Any = None

    def __init__(self, loss: Any = None, predictions: Any = None, metrics: Mapping[str, Any] | None = None) -> None:
        self.loss = {} if loss is None else _name_with_prefix("loss", loss, f"{type(self).__name__}(loss)")
        self.predictions = {} if predictions is None else _name_with_prefix("predictions", predictions, "predictions")
        self.metrics = {}
        for name, (value, update) in (metrics or {}).items():
            if isinstance(update, tf.Operation):  # a signature has only tensors, so one that runs the operation
                with tf.control_dependencies([update]):
                    update = tf.constant([], name="metric_op_wrapper")
            prefixed = _with_prefix("metrics", _checked_name(name, "metrics"))
            self.metrics[f"{prefixed}/value"] = value
            self.metrics[f"{prefixed}/update_op"] = update

    def as_signature_def(self, receiver_tensors: Mapping[str, Any]) -> Any:
        outputs = {**self.loss, **self.predictions, **self.metrics}
        return _signature(receiver_tensors, outputs, self.method_name)


class TrainOutput(_SupervisedOutput, of_tensorflow.TrainOutput):
    """Outputs of the signature of the TRAIN graph: loss, predictions and metrics."""

    method_name = "tensorflow/supervised/training"


class EvalOutput(_SupervisedOutput, of_tensorflow.EvalOutput):
    """Outputs of the signature of the EVAL graph: loss, predictions and metrics."""

    method_name = "tensorflow/supervised/eval"


def outputs_of(predictions: Any, export_outputs: Mapping[str, Any] | None) -> dict[str, ExportOutput]:
    """Return signature name -> outputs for the fields of an EstimatorSpec of PREDICT: its `export_outputs`, else its
    predictions.

    If there is only one signature, it is also `serving_default`.

    Raises:
      ValueError: a value of export_outputs is not an ExportOutput, or none of several is named `serving_default`.
    """
    outputs: dict[str, ExportOutput] = dict(export_outputs or {})
    if not outputs:
        outputs[DEFAULT] = PredictOutput(predictions)
    for name, output in outputs.items():
        if not isinstance(output, of_tensorflow.ExportOutput):
            raise ValueError(
                f"export_outputs[{name!r}] is a {type(output).__name__}. It must be a PredictOutput, "
                "ClassificationOutput or RegressionOutput."
            )
    if len(outputs) == 1:
        (only,) = outputs.values()
        outputs.setdefault(DEFAULT, only)
    if DEFAULT not in outputs:
        raise ValueError(
            f"export_outputs has {', '.join(map(repr, outputs))}, but no {DEFAULT!r}. Give one this name: "
            "TensorFlow Serving runs it by default."
        )
    return outputs


def signatures_of(
    outputs: Mapping[str, ExportOutput],
    receiver_tensors: Mapping[str, Any],
    alternatives: Mapping[str, Mapping[str, Any]],
    default_output: ExportOutput | None = None,
) -> dict[str, Any]:
    """Return signature name -> SignatureDef.

    Each output gives a signature `<name>` with the inputs `receiver_tensors`, and `<alternative>:<name>` with each of
    the `alternatives`. A combination that TensorFlow Serving does not allow is left out, and the log says why.

    Args:
      outputs: signature name -> output.
      receiver_tensors: name -> input placeholder.
      alternatives: name of the alternative -> other inputs, each name -> placeholder.
      default_output: the output of `serving_default` if that one is left out; None: there is then no such signature.

    Raises:
      ValueError: all signatures are left out.
    """
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    inputs = {"": receiver_tensors}  # beginning of the names of signatures -> their inputs
    for name, tensors in alternatives.items():
        inputs[f"{name}:"] = tensors
    for prefix, tensors in inputs.items():
        for name, output in outputs.items():
            try:
                found[prefix + name] = output.as_signature_def(tensors)
            except ValueError as error:
                left_out[prefix + name] = str(error)
    if DEFAULT not in found and default_output is not None:
        found[DEFAULT] = default_output.as_signature_def(receiver_tensors)
    if not found:
        reasons = "; ".join(f"{name!r}: {why}" for name, why in left_out.items())
        raise ValueError(
            f"no signature can be exported: {reasons} Add a PredictOutput to export_outputs, or use "
            "build_parsing_serving_input_receiver_fn."
        )
    for name, why in left_out.items():
        is_replaced = name == DEFAULT and DEFAULT in found
        instead = " It has the predictions as outputs instead." if is_replaced else ""
        _log.info("Signature %r is left out: %s%s", name, why, instead)
    return found


def _single_string(receiver_tensors: Mapping[str, Any], what: str) -> Any:
    """Return the only input of a signature that takes serialized tf.Examples; ValueError if it is not such a one."""
    found = list(receiver_tensors.values())
    if len(found) != 1 or not tf.is_tensor(found[0]) or found[0].dtype != tf.string:
        kinds = [f"{name} ({tf.as_dtype(tensor.dtype).name})" for name, tensor in receiver_tensors.items()]
        shown = ", ".join(kinds[:3])
        if len(kinds) > 3:
            shown += f" and {len(kinds) - 3} more"
        raise ValueError(
            f"A {what} signature needs exactly one input, a string tensor of serialized tf.Examples, but the inputs "
            f"are {shown}."
        )
    return found[0]


def _signature(inputs: Mapping[str, Any], outputs: Mapping[str, Any], method_name: str) -> Any:
    input_infos = {str(name): saved_model.build_tensor_info(tensor) for name, tensor in inputs.items()}
    output_infos = {name: saved_model.build_tensor_info(tensor) for name, tensor in outputs.items()}
    return saved_model.build_signature_def(input_infos, output_infos, method_name)


def _name_outputs(outputs: Any, default: str, what: str) -> dict[str, Any]:
    """Return name -> tensor of outputs, and check them.

    Args:
      outputs: a dict, whose keys may be tuples of strings, or one tensor.
      default: the name of one tensor.
      what: the argument that has the outputs, for messages.
    """
    if not isinstance(outputs, Mapping):
        outputs = {default: outputs}
    named: dict[str, Any] = {}
    for key, value in outputs.items():
        name = _checked_name(key, what)
        if not tf.is_tensor(value):
            raise ValueError(f"{what}[{name!r}] must be a tensor, not {type(value).__name__}.")
        named[name] = value
    return named


def _checked_name(key: Any, what: str) -> str:
    """Return the name of an output that a user gave as `key`, a string or a tuple of strings."""
    if isinstance(key, tuple):
        key = "/".join(map(str, key))
    if not isinstance(key, str):
        raise ValueError(f"{what} has the key {key!r}. Names of outputs must be strings.")
    return key


def _name_with_prefix(prefix: str, outputs: Any, what: str) -> dict[str, Any]:
    """Return name -> tensor of outputs, whose names begin with `prefix`. One tensor is named `prefix`."""
    named = _name_outputs(outputs, prefix, what)
    return {_with_prefix(prefix, name): value for name, value in named.items()}


def _with_prefix(prefix: str, name: str) -> str:
    """Return the name of an output after its kind. As in tf.estimator, a name that begins so stays as it is:
    `metrics_at_5`, not `metrics/metrics_at_5`.
    """
    return name if name.startswith(prefix) else f"{prefix}/{name}"
