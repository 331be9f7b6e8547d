"""tf.estimator's EstimatorSpec: a tuple with the checks of TensorFlow 2.15, converted to an EstimatorSpec of the
runner.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner import model_fn
from runner.classic.run_config import fits
from runner.export.outputs import outputs_of
from runner.hooks.builtin_hooks import checked
from runner.model_fn import ModeKeys, runs
from runner.tf_private.v1 import export_outputs

_Fields = collections.namedtuple(
    "_Fields",
    "mode predictions loss train_op eval_metric_ops export_outputs training_chief_hooks training_hooks scaffold "
    "evaluation_hooks prediction_hooks",
    defaults=[None] * 10,  # type: ignore[misc]
)
_TENSOR = (tf.Tensor, tf.Variable)
_REQUIRED_FIELDS = {ModeKeys.TRAIN: ("train_op", "loss"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}


def _is_metric(value: Any) -> bool:
    if isinstance(value, _TENSOR):  # one value per example
        return value.shape.rank != 0
    if isinstance(value, tuple):
        return len(value) == 2
    is_keras = hasattr(value, "result") and hasattr(value, "update_state")
    return is_keras and not isinstance(value, type)


def _is_of_default_graph(value: Any) -> bool:
    """Report whether `value` belongs to the default graph. Variables and eager values belong to any."""
    if isinstance(value, tf.Variable) or tf.executing_eagerly():
        return True
    default_graph = tf.compat.v1.get_default_graph()
    return getattr(value, "graph", default_graph) is default_graph


def _as_one_part(value: Any) -> list[Any]:
    return [value]


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _tensors_of_pairs(metrics: Mapping[str, Any]) -> list[Any]:
    return tf.nest.flatten([metric for metric in metrics.values() if isinstance(metric, tuple)])


_OF_GRAPH = "it must be of the graph in which model_fn was called; make it inside model_fn, anew in each call"
_PAIRS = "each must be a (value, update) tuple, a Keras metric, or a tensor with one value per example"
_OUTPUTS = "each must be a PredictOutput, ClassificationOutput or RegressionOutput"

_CHECKS: Sequence[tuple[str, Callable[[Any], list[Any]], Any, type[Exception], str]] = (
    ("train_op", _as_one_part, runs, TypeError, "it must be an Operation or a Tensor"),
    ("train_op", _as_one_part, _is_of_default_graph, ValueError, _OF_GRAPH),
    ("loss", _as_one_part, _TENSOR, TypeError, "it must be a Tensor"),
    ("loss", _as_one_part, _is_of_default_graph, ValueError, _OF_GRAPH),
    ("predictions", _values, _TENSOR, TypeError, "it must be a Tensor, or a dict of Tensors"),
    ("predictions", _values, _is_of_default_graph, ValueError, _OF_GRAPH),
    ("export_outputs", _as_one_part, dict, TypeError, "it must be a dict"),
    ("export_outputs", _values, export_outputs.ExportOutput, TypeError, _OUTPUTS),
    ("eval_metric_ops", _as_one_part, dict, TypeError, "it must be a dict"),
    ("eval_metric_ops", _values, _is_metric, TypeError, _PAIRS),
    ("eval_metric_ops", _tensors_of_pairs, runs, TypeError, _PAIRS),
    ("eval_metric_ops", _tensors_of_pairs, _is_of_default_graph, ValueError, _OF_GRAPH),
    ("scaffold", _as_one_part, tf.compat.v1.train.Scaffold, TypeError, "it must be a tf.compat.v1.train.Scaffold"),
)
"""The checks in their order in TensorFlow 2.15: (field, function that returns the parts to check of a value other than
None, what `fits` allows for a part, type of the exception if it does not fit, text of what is allowed)."""


class EstimatorSpec(_Fields):
    """What a model_fn returns, as in TensorFlow 2.15: a tuple of these fields, checked when it is made.

    Attributes:
      mode: the mode that model_fn was called with.
      predictions: a tensor or a dict of tensors, each `[batch, ...]`; {}: not given. Required in PREDICT.
      loss: a float scalar; with `optimizer`, and in EVAL, also one loss per example, `[batch]`. Required in TRAIN and
        EVAL.
      train_op: an operation or tensor that updates the model. Required in TRAIN, unless `optimizer` is given.
      eval_metric_ops: name -> (value, update), Keras metric, or tensor `[batch]` with one value per example.
      export_outputs: signature name -> ExportOutput. In PREDICT, None becomes one PredictOutput of the predictions, and
        a single output is also `serving_default`.
      training_chief_hooks, training_hooks, evaluation_hooks, prediction_hooks: tuples of hooks.
      scaffold: a `tf.compat.v1.train.Scaffold`; None becomes a new one.
      optimizer, loss_weight: as in `runner.EstimatorSpec`; they are no part of the tuple.

    Raises:
      ValueError: what the mode requires is missing, the loss is not a scalar, a tensor belongs to another graph, or
        none of several export_outputs is `serving_default`.
      TypeError: a field has another type.
    """

    optimizer: Any = None
    loss_weight: Any = None
    _has_own_outputs = True

    def __new__(cls, *args: Any, optimizer: Any = None, loss_weight: Any = None, **fields: Any) -> EstimatorSpec:
        given = _Fields(*args, **fields)._asdict()
        mode = given["mode"]
        given["scaffold"] = given["scaffold"] or tf.compat.v1.train.Scaffold()
        _check_required(given, optimizer)
        _check_types(given)
        for name in given:
            if name.endswith("_hooks"):
                given[name] = tuple(checked("hook", given[name]))
        if given["loss"] is not None:
            may_be_per_example = mode == ModeKeys.EVAL or (mode == ModeKeys.TRAIN and optimizer is not None)
            given["loss"] = _as_scalar(given["loss"], may_be_per_example=may_be_per_example)
        # Noted before the default takes its place: `as_runner_spec` then passes none to the runner.
        has_own_outputs = given["export_outputs"] is not None
        if mode == ModeKeys.PREDICT and given["export_outputs"] != {}:
            given["export_outputs"] = outputs_of(given["predictions"], given["export_outputs"])
        for name in ("predictions", "eval_metric_ops"):
            if given[name] is None:
                given[name] = {}
        spec = super().__new__(cls, **given)
        spec.optimizer = optimizer
        spec.loss_weight = loss_weight
        spec._has_own_outputs = has_own_outputs
        return spec

    def _replace(self, **changes: Any) -> EstimatorSpec:
        """Return a checked copy with `changes`; as in TensorFlow 2.15, names that are no fields are ignored.

        Raises:
          ValueError, TypeError: as in the constructor; or `changes` contain another `mode`.
        """
        if changes.get("mode", self.mode) != self.mode:
            raise ValueError(f"EstimatorSpec._replace(mode={changes['mode']!r}): the mode of a spec may not change.")
        fields = {**self._asdict(), "optimizer": self.optimizer, "loss_weight": self.loss_weight}
        return EstimatorSpec(**{name: changes.get(name, value) for name, value in fields.items()})

    def as_runner_spec(self, mode: str) -> model_fn.EstimatorSpec:
        """Return the equivalent EstimatorSpec of the runner. The runner calls it for what model_fn returns.

        Args:
          mode: the mode that model_fn was called with. As in tf.estimator, it counts, not that of the spec.
        """
        fields = {**self._asdict(), **vars(self), "mode": mode}
        # The runner itself makes the default outputs, of the predictions that it exports.
        if not fields.pop("_has_own_outputs", True):
            fields["export_outputs"] = None
        return model_fn.EstimatorSpec(**fields)


def _check_required(given: Mapping[str, Any], optimizer: Any) -> None:
    for name in _REQUIRED_FIELDS.get(str(given["mode"]), ()):
        is_made_by_optimizer = name == "train_op" and optimizer is not None
        if given[name] is None and not is_made_by_optimizer:
            raise ValueError(f"EstimatorSpec(mode={given['mode']!r}, {name}=None): {name} is required in this mode.")


def _check_types(given: Mapping[str, Any]) -> None:
    for name, parts, allowed, error, text in _CHECKS:
        # As in TensorFlow 2.15, export_outputs of other modes are not looked at.
        is_read = name != "export_outputs" or given["mode"] == ModeKeys.PREDICT
        if given[name] is None or not is_read:
            continue
        for part in parts(given[name]):
            if not fits(part, allowed):
                raise error(f"EstimatorSpec({name}=...): {text}, but got {part!r}.")


def _as_scalar(loss: Any, *, may_be_per_example: bool) -> Any:
    """Return the loss as a scalar.

    Args:
      loss: a tensor.
      may_be_per_example: it may also be `[batch]`, one loss per example. A batch of unknown size is always allowed.

    Raises:
      ValueError: it has another number of elements than one.
    """
    shape = loss.shape
    if shape.rank == 1 and shape != [1] and (may_be_per_example or shape.num_elements() is None):
        return loss
    if shape.num_elements() not in (None, 1):
        raise ValueError(
            f"EstimatorSpec(loss=...): it must be a scalar, but has the shape {shape}. Use tf.reduce_mean(loss); only "
            "in EVAL, and with optimizer= instead of train_op=, may it also be one loss per example, [batch]."
        )
    return loss if shape.is_compatible_with([]) else tf.reshape(loss, [])
