"""Inputs of an exported model: placeholders that requests fill, and the features computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import tensorflow as tf

from runner.export.outputs import SINGLE_RECEIVER

v1 = tf.compat.v1

_SINGLE_FEATURE = "feature"
_SINGLE_LABEL = "label"


class _ServingInputReceiver(NamedTuple):
    features: Any
    receiver_tensors: Any
    receiver_tensors_alternatives: Any


class ServingInputReceiver(_ServingInputReceiver):
    """The result of a `serving_input_receiver_fn`: placeholders that requests fill, and the features for model_fn.

    Args:
      features: a dict of dense, sparse or ragged tensors `[batch, ...]`, with strings or ints as keys; one tensor
        becomes `{"feature": tensor}`.
      receiver_tensors: input name of the signatures -> placeholder; one tensor becomes `{"input": tensor}`.
      receiver_tensors_alternatives: name -> other tensors that requests may fill instead. Each adds signatures
        `<name>:<signature>`.

    Raises:
      ValueError: features or receiver_tensors are None, a feature's key is neither a string nor an int, another key is
        no string, or a value is not a tensor.
    """

    def __new__(
        cls, features: Any, receiver_tensors: Any, receiver_tensors_alternatives: Mapping[str, Any] | None = None
    ) -> Self:
        if receiver_tensors_alternatives is not None and not isinstance(receiver_tensors_alternatives, Mapping):
            raise ValueError(
                f"receiver_tensors_alternatives is a {type(receiver_tensors_alternatives).__name__}. It must be a "
                "dict: name -> tensors."
            )
        alternatives: dict[str, Any] | None = None
        if receiver_tensors_alternatives is not None:
            alternatives = {}
            for name, tensors in receiver_tensors_alternatives.items():
                what = f"receiver_tensors_alternatives[{name!r}]"
                alternatives[name] = _check_tensors(tensors, SINGLE_RECEIVER, what, str)
        receivers = _check_tensors(receiver_tensors, SINGLE_RECEIVER, "receiver_tensors", str)
        return super().__new__(cls, cls._checked_features(features), receivers, alternatives)

    labels: Any = None
    asks_for_all = True
    """Whether signatures have inputs, and the SavedModel trainable variables, on which no output depends, as in
    tf.estimator.
    """

    @classmethod
    def _checked_features(cls, features: Any) -> Any:
        return _check_tensors(features, _SINGLE_FEATURE, "features")


class _OfInput(ServingInputReceiver):
    """A receiver with a placeholder for each feature of an input function. Signatures have only those that the model
    uses.
    """

    asks_for_all = False


class TensorServingInputReceiver(ServingInputReceiver):
    """A ServingInputReceiver whose `features` are one tensor, which model_fn gets without a dict around it.

    Raises:
      ValueError: as in ServingInputReceiver, or `features` is not a tensor.
    """

    @classmethod
    def _checked_features(cls, features: Any) -> Any:
        if not _is_tensor(features):
            raise ValueError(
                f"TensorServingInputReceiver(features=...) must be one tensor, but is a {type(features).__name__}. Use "
                "ServingInputReceiver for several tensors."
            )
        return features


class _SupervisedInputReceiver(NamedTuple):
    features: Any
    labels: Any
    receiver_tensors: Any


class SupervisedInputReceiver(_SupervisedInputReceiver):
    """The result of a receiver function for TRAIN and EVAL: placeholders, and the features and labels for model_fn.

    Args:
      features: a tensor or a dict of tensors, each `[batch, ...]`.
      labels: a tensor or a dict of tensors, each `[batch, ...]`.
      receiver_tensors: as in ServingInputReceiver.

    Raises:
      ValueError: as in ServingInputReceiver.
    """

    receiver_tensors_alternatives: Mapping[str, Any] | None = None
    asks_for_all = True

    def __new__(cls, features: Any, labels: Any, receiver_tensors: Any) -> Self:
        if not _is_tensor(features):
            features = _check_tensors(features, _SINGLE_FEATURE, "features")
        if not _is_tensor(labels):
            labels = _check_tensors(labels, _SINGLE_LABEL, "labels")
        receivers = _check_tensors(receiver_tensors, SINGLE_RECEIVER, "receiver_tensors", str)
        return super().__new__(cls, features, labels, receivers)


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a receiver function for requests of serialized `tf.train.Example`s.

    The signatures have one input, a string tensor `[batch]` named `examples`.

    Args:
      feature_spec: feature name -> tf.io.FixedLenFeature, VarLenFeature, ...
      default_batch_size: number of examples per request; None: any number.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        serialized = v1.placeholder(tf.string, [default_batch_size], "input_example_tensor")
        return ServingInputReceiver(tf.io.parse_example(serialized, feature_spec), {"examples": serialized})

    return serving_input_receiver_fn


def build_raw_serving_input_receiver_fn(
    features: Any, default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Return a receiver function for requests that hold the features as tensors, without parsing.

    Args:
      features: feature name -> tensor or TensorSpec `[batch, ...]`, whose shape and dtype the placeholder gets; or one
        of them, which is named `feature`. A scalar gets the shape `[batch]`.
      default_batch_size: size of the first dimension; None: any number of examples.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        placeholders = _placeholders(_with_batch_axis(features), default_batch_size, _SINGLE_FEATURE)
        return ServingInputReceiver(placeholders, _with_text_names(placeholders))

    return serving_input_receiver_fn


def build_raw_supervised_input_receiver_fn(
    features: Any, labels: Any, default_batch_size: int | None = None
) -> Callable[[], SupervisedInputReceiver]:
    """Return a receiver function for TRAIN and EVAL, for requests that hold features and labels as tensors.

    Args:
      features: as in `build_raw_serving_input_receiver_fn`, but one tensor is named `input`.
      labels: like features; one tensor is named `label`.
      default_batch_size: size of the first dimension; None: any number of examples.

    Raises:
      ValueError: features or labels are None, or a feature and a label have the same name.
    """
    if features is None or labels is None:
        raise ValueError("build_raw_supervised_input_receiver_fn: features and labels are both required.")
    in_both = set(_by_name(features, SINGLE_RECEIVER)) & set(_by_name(labels, _SINGLE_LABEL))
    if in_both:
        names = ", ".join(map(repr, sorted(in_both)))
        raise ValueError(
            f"{names}: a feature and a label have the same name. Each input of a signature needs a name of its own."
        )

    def supervised_input_receiver_fn() -> SupervisedInputReceiver:
        of_features = _placeholders(_with_batch_axis(features), default_batch_size, SINGLE_RECEIVER)
        of_labels = _placeholders(_with_batch_axis(labels), default_batch_size, _SINGLE_LABEL)
        for_model_fn = of_features if isinstance(features, Mapping) else of_features[SINGLE_RECEIVER]
        labels_for_model_fn = of_labels if isinstance(labels, Mapping) else of_labels[_SINGLE_LABEL]
        return SupervisedInputReceiver(
            for_model_fn, labels_for_model_fn, _with_text_names({**of_features, **of_labels})
        )

    return supervised_input_receiver_fn


def receiver_fn_of_spec(features: Any) -> Callable[[], ServingInputReceiver]:
    """Return a receiver function for requests with the features of an input function.

    Requests hold any number of examples, and only the features that the model uses.

    Args:
      features: feature name -> TensorSpec `[batch, ...]` of a batch; or one TensorSpec, for an input named `input`.

    Returns:
      The function. It raises ValueError if `features` is another structure.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        if isinstance(features, Mapping):
            placeholders = _placeholders(features, None, _SINGLE_FEATURE)
            return _OfInput(placeholders, _with_text_names(placeholders))
        if tf.nest.is_nested(features):
            raise ValueError(
                f"the features of the input are a {type(features).__name__}, so its tensors have no names that a "
                "request could use. Return a dict of features from the input function, or set export.receiver_fn."
            )
        placeholder = _placeholders(features, None, SINGLE_RECEIVER)[SINGLE_RECEIVER]
        return TensorServingInputReceiver(placeholder, {SINGLE_RECEIVER: placeholder})

    return serving_input_receiver_fn


def _with_text_names(placeholders: Mapping[Any, Any]) -> dict[str, Any]:
    """Return `placeholders` with names of a signature's inputs: strings, where those of features may be ints."""
    return {str(name): placeholder for name, placeholder in placeholders.items()}


def _with_batch_axis(specs: Any) -> Any:
    """Return `specs` with a batch dimension added to each scalar, as in tf.estimator."""
    if isinstance(specs, Mapping):
        return {name: _with_batch_axis(spec) for name, spec in specs.items()}
    is_scalar = tf.TensorShape(getattr(specs, "shape", None)).rank == 0
    return tf.TensorSpec([None], specs.dtype) if is_scalar else specs


def _placeholders(specs: Any, batch_size: int | None, single: str) -> dict[str, Any]:
    return {name: _placeholder(name, spec, batch_size) for name, spec in _by_name(specs, single).items()}


def _by_name(specs: Any, single: str) -> Mapping[Any, Any]:
    return specs if isinstance(specs, Mapping) else {single: specs}


def _placeholder(name: Any, spec: Any, batch_size: int | None) -> Any:
    """Return a placeholder like `spec` (a tensor or TensorSpec `[batch, ...]`) for `batch_size` examples."""
    if isinstance(spec, Mapping):
        raise ValueError(
            f"feature {name!r} is a dict, but each input of a signature must be a tensor. Flatten the dict."
        )
    if isinstance(spec, tf.RaggedTensor | tf.RaggedTensorSpec):
        rank = spec.ragged_rank
        return v1.ragged.placeholder(spec.dtype, rank, list(spec.shape[rank + 1 :]), name=_op_name(name))
    shape = tf.TensorShape(spec.shape)
    if shape.rank:
        shape = tf.TensorShape([batch_size]).concatenate(shape[1:])
    if isinstance(spec, tf.SparseTensor | tf.SparseTensorSpec):
        sizes = shape.as_list() if shape.rank else None
        return v1.sparse_placeholder(spec.dtype, sizes, name=_op_name(name))
    # As in tf.estimator, a tensor of a graph gives its name.
    op_name = spec.op.name if hasattr(spec, "op") else _op_name(name)
    return v1.placeholder(spec.dtype, shape, op_name)


def _op_name(name: Any) -> str | None:
    """Return the name of the placeholder of a feature; None, so that TensorFlow names it: its name cannot be one."""
    text = str(name)
    is_valid = text[:1].isalnum() and all(part.isalnum() for part in text.split("_"))
    return text if is_valid else None


def _is_tensor(value: Any) -> bool:
    # A labeled tensor, which TensorFlow converts, has the tensor as an attribute.
    return isinstance(value, tf.Tensor | tf.SparseTensor | tf.RaggedTensor) or hasattr(value, "tensor")


def _check_tensors(tensors: Any, single: str, what: str, kinds: Any = str | int) -> dict[Any, Any]:
    """Return a dict name -> tensor, and check it.

    Args:
      tensors: the dict, or one tensor.
      single: the name that one tensor gets.
      what: the argument that has the tensors, for messages.
      kinds: the type, or types, that a name may have.

    Raises:
      ValueError: there is none, or a name or a value has another type.
    """
    if tensors is None:
        raise ValueError(f"{what}=None: {what} are required.")
    tensors = _by_name(tensors, single)
    for name, tensor in tensors.items():
        if not isinstance(name, kinds):
            allowed = "a string" if kinds is str else "a string or an int"
            raise ValueError(f"{what} has the key {name!r}. A name must be {allowed}.")
        if not _is_tensor(tensor):
            raise ValueError(f"{what}[{name!r}] must be a tensor, not {type(tensor).__name__}.")
    return dict(tensors)
