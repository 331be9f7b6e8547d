"""A compiled `keras.Model` that a model_fn returned: its loss and its metrics, as in Keras's own `test_step`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

_NOT_CALLED = (
    "train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function",
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
)  # fmt: skip


class Batch(NamedTuple):
    """The arguments of `compute_loss` and `compute_metrics`, in their order."""

    features: Any
    labels: Any
    predictions: Any
    sample_weight: Any


def check_methods(model: Any) -> None:
    """Check that the model's class defines nothing that `fit`, `evaluate` or `predict` would call and the runner does
    not.

    Raises:
      ValueError: it does; the message names the method and its class.
    """
    own = [name for name in _NOT_CALLED if _defines(model, name)]
    if not own:
        return
    owner = next((kind for kind in type(model).__mro__ if own[0] in vars(kind)), type(model))
    raise ValueError(
        f"model_fn returned a keras.Model, and its class {owner.__module__}.{owner.__qualname__} defines "
        f"{', '.join(own)}, which the runner does not call: it computes the gradients of compute_loss and applies "
        "them with the compiled optimizer. Define compute_loss(x, y, y_pred, sample_weight) in the class instead; or "
        "call the model in model_fn, and return an EstimatorSpec with the loss that the method computes."
    )


def _defines(model: Any, *names: str) -> bool:
    """Report whether the model, or a class below `keras.Model`, defines one of these methods."""
    base = sys.modules["keras"].Model
    return any(getattr(getattr(model, name), "__func__", None) is not getattr(base, name) for name in names)


def named_by_inputs(model: Any, features: Any) -> Any:
    """Return the entries of a dict of features that the model's inputs name, in the structure of these inputs.

    Any other features, and the features of a model that is not functional, are returned unchanged.
    """
    if not isinstance(features, Mapping) or not getattr(model, "inputs", None):
        return features
    # A Sequential that has not been called has no `input`, but one entry in `inputs`.
    inputs = model.input if hasattr(model, "input") else model.inputs[0]
    if isinstance(inputs, Mapping):
        return {key: features[key] for key in inputs} if set(inputs) <= set(features) else features
    names = [tensor.name for tensor in model.inputs]
    if not set(names) <= set(features):
        return features
    return tf.nest.map_structure(lambda tensor: features[tensor.name], inputs)


def loss_of(model: Any, batch: Batch, *, training: bool) -> Any:
    """Return the loss that the model computes of a batch, a scalar.

    Raises:
      ValueError: the model asks for the end of training.
    """
    takes_training = "training" in inspect.signature(model.compute_loss).parameters  # it is an argument since Keras 3.3
    loss = model.compute_loss(*batch, **({"training": training} if takes_training else {}))
    if model.stop_training:
        raise ValueError(
            f"{type(model).__name__}.compute_loss sets stop_training, and the runner does not stop by it. Use "
            "train.early_stopping, or a hook that calls run.request_stop(reason)."
        )
    return loss


def loss_and_metrics(model: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """Return (loss, name -> metric), the metrics in a form of `eval_metric_ops`."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    loss = loss_of(model, batch, training=False)
    if not _defines(model, "compute_metrics", "get_metrics_result"):
        model.compute_metrics(*batch)
        return loss, _compiled_metrics(model)
    if type(model).metrics is sys.modules["keras"].Model.metrics:
        # Keras's own mean of the loss, from which a perplexity may be computed.
        mean_loss, *_ = model.metrics
        size = next(tf.shape(one)[0] for one in tf.nest.flatten(batch.features) if one is not None)
        mean_loss.update_state(loss, sample_weight=size)
    returned = model.compute_metrics(*batch)
    # A (value, update) pair of each: the values are functions of the metrics' variables, which all these updates write.
    writes = [one for one in graph.get_operations()[before:] if not one.outputs]
    update = tf.group(*writes)
    return loss, {name: (tf.convert_to_tensor(value), update) for name, value in returned.items()}


def _compiled_metrics(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)
        # Those given to `compile` are in a metric of their own, whose results have the names of `fit`.
        found |= {metric.name: metric} if inner is None else zip(metric.result() if inner else (), inner, strict=True)
    return found
