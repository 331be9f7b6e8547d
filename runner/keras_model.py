"""A compiled `keras.Model` that a model_fn returned: its loss and its metrics, as in Keras's own `test_step`."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

_log = logging.getLogger(__name__)

_STEPS = (
    "train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function",
)  # fmt: skip
_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


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
    # A task of keras-hub defines fit, evaluate and predict only to call its preprocessor. If that is None, they do what
    # Keras's do. (A model that is no such task has no attribute `preprocessor`.)
    is_task_alone = getattr(model, "preprocessor", model) is None
    not_called = _STEPS if is_task_alone else (*_STEPS, *_LOOPS)
    defined = [name for name in not_called if _defines(model, name)]
    if not defined:
        return
    owner = type(model)
    for kind in type(model).__mro__:
        if defined[0] in vars(kind):
            owner = kind
            break
    raise ValueError(
        f"model_fn returned a keras.Model, and its class {owner.__module__}.{owner.__qualname__} defines "
        f"{', '.join(defined)}, which the runner does not call: it computes the gradients of compute_loss and applies "
        "them with the compiled optimizer. Define compute_loss(x, y, y_pred, sample_weight) in the class instead; or "
        "call the model in model_fn, and return an EstimatorSpec with the loss that the method computes."
    )


@functools.cache
def _say_once(text: str) -> None:
    """Warn of a setting of `compile`; model_fn is called for each replica and each trace."""
    _log.warning("%s", text)


def say_what_has_no_effect(model: Any) -> None:
    """Warn of settings of `compile` that say how Keras takes its steps, which the runner takes itself."""
    if model.run_eagerly:
        _say_once("compile(run_eagerly=True) has no effect here. run.eager=true runs the step eagerly.")
    if model.steps_per_execution != 1:
        _say_once(
            f"compile(steps_per_execution={model.steps_per_execution}) has no effect here: the runner chooses how many "
            "steps a call of TensorFlow takes (train.steps_per_loop)."
        )


def _defines(model: Any, name: str) -> bool:
    """Report whether the model, or a class below `keras.Model`, defines the method `name`."""
    own = getattr(getattr(model, name), "__func__", None)
    return own is not getattr(sys.modules["keras"].Model, name)


def features_for_inputs(model: Any, features: Any) -> Any:
    """Return the entries of a dict of features that the model's inputs name, in the structure of these inputs.

    Any other features, and the features of a model that is not functional, are returned unchanged.
    """
    if not isinstance(features, Mapping) or not getattr(model, "inputs", None):
        return features
    # A Sequential that has not been called has no `input`, but one entry in `inputs`.
    inputs = model.input if hasattr(model, "input") else model.inputs[0]
    if isinstance(inputs, Mapping):
        names = list(inputs)
    else:
        names = [tensor.name for tensor in model.inputs]
    if not set(names) <= set(features):
        return features
    if isinstance(inputs, Mapping):
        return {name: features[name] for name in names}
    return tf.nest.map_structure(lambda tensor: features[tensor.name], inputs)


def loss_of(model: Any, batch: Batch, *, training: bool) -> Any:
    """Return the loss that the model computes of a batch, a scalar.

    Raises:
      ValueError: the model asks for the end of training.
    """
    arguments = inspect.signature(model.compute_loss).parameters
    if "training" in arguments:  # since Keras 3.3
        loss = model.compute_loss(*batch, training=training)
    else:
        loss = model.compute_loss(*batch)
    if model.stop_training:
        raise ValueError(
            f"{type(model).__name__}.compute_loss sets stop_training, and the runner does not stop by it. Use "
            "train.early_stopping, or a hook that calls run.request_stop(reason)."
        )
    return loss


def loss_and_metrics(model: Any, batch: Batch, *, training: bool) -> tuple[Any, dict[str, Any]]:
    """Return (loss, name -> metric). A metric is a Keras metric or (value, update), as in `eval_metric_ops`.

    A model that computes its metrics itself is called here as `fit` would call it.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    loss = loss_of(model, batch, training=training)
    returns_its_own = _defines(model, "compute_metrics") or _defines(model, "get_metrics_result")
    if not returns_its_own:
        model.compute_metrics(*batch)
        return loss, _compiled_metrics(model)
    if type(model).metrics is sys.modules["keras"].Model.metrics:
        # The first metric is Keras's own mean of the loss, which `fit` updates before it calls compute_metrics: a
        # perplexity may be computed from it. It counts each example of the batch.
        mean_loss, *_ = model.metrics
        first_feature, *_ = [feature for feature in tf.nest.flatten(batch.features) if feature is not None]
        mean_loss.update_state(loss, sample_weight=tf.shape(first_feature)[0])
    returned = model.compute_metrics(*batch)
    # The values are functions of the metrics' variables. What was made above writes these variables: the operations
    # without outputs.
    made = graph.get_operations()[before:]
    writes = [operation for operation in made if not operation.outputs]
    update = tf.group(*writes)
    pairs: dict[str, Any] = {}
    for name, value in returned.items():
        pairs[name] = tf.convert_to_tensor(value), update
    return loss, pairs


def _compiled_metrics(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in model.metrics:
        if not hasattr(metric, "metrics"):
            found[metric.name] = metric
        elif metric.metrics:
            # Those given to `compile` are in a metric of their own, whose results have the names of `fit`.
            found.update(zip(metric.result(), metric.metrics, strict=True))
    return found
