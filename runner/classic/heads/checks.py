"""Checks of logits, labels and weights: while model_fn is traced if the shapes are known by then, else in each step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.programs.batch_losses import WholeBatch
from runner.tf_private.feature_columns import dense_tensor
from runner.tf_private.tf_estimator import static_size

v1 = tf.compat.v1
_WHOLE = WholeBatch()

_REDUCTIONS = {
    "auto": "batch",
    "sum_over_batch_size": "batch",
    "weighted_sum_over_batch_size": "batch",
    "sum": "sum",
    "weighted_sum": "sum",
    "weighted_mean": "weights",
    "weighted_sum_by_nonzero_weights": "nonzero",
}
"""Value of tf.keras.losses.Reduction or tf.compat.v1.losses.Reduction -> what the sum of losses is divided by: "batch":
the number of losses; "sum": nothing; "weights": the sum of weights; "nonzero": the number of weights that are not 0."""

_LOSS_FN_ARGUMENTS = ("labels", "logits", "features", "loss_reduction")


def check_reduction(loss_reduction: str) -> None:
    """Check that `loss_reduction` is a value of tf.keras.losses.Reduction or tf.compat.v1.losses.Reduction, not NONE.

    Raises:
      ValueError: it is not.
    """
    if loss_reduction not in _REDUCTIONS:
        raise ValueError(f"loss_reduction={loss_reduction!r} is not one of: {', '.join(_REDUCTIONS)}.")


def is_sum(loss_reduction: str) -> bool:
    """Report whether the losses are summed, without a division."""
    return _REDUCTIONS.get(loss_reduction) == "sum"


def is_weighted_mean(loss_reduction: str) -> bool:
    """Report whether the sum of losses is divided by a number that depends on the weights."""
    return _REDUCTIONS[loss_reduction] in ("weights", "nonzero")


def arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function takes."""
    return list(inspect.signature(function).parameters)


def check_loss_fn(loss_fn: Callable[..., Any] | None) -> None:
    """Check the arguments of a user's loss_fn.

    Raises:
      ValueError: it does not take labels or logits, or takes an argument that heads do not pass.
    """
    if loss_fn is None:
        return
    names = arguments(loss_fn)
    missing = [name for name in ("labels", "logits") if name not in names]
    unknown = [name for name in names if name not in _LOSS_FN_ARGUMENTS]
    if missing or unknown:
        raise ValueError(
            f"loss_fn has the arguments ({', '.join(names)}). It must take labels and logits, and may take features; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
        )


def check_thresholds(thresholds: Sequence[float] | None) -> tuple[float, ...]:
    """Return the thresholds as a tuple.

    Raises:
      ValueError: one is not between 0 and 1.
    """
    given = tuple(thresholds or ())
    wrong = [threshold for threshold in given if not 0 < threshold < 1]
    if wrong:
        raise ValueError(f"thresholds={list(given)}: each must be between 0 and 1, unlike {wrong}.")
    return given


def check_vocabulary(label_vocabulary: Sequence[Any] | None, num_classes: int) -> None:
    """Check that a vocabulary has one entry for each class.

    Raises:
      ValueError: it is not a list, or has another length.
    """
    if label_vocabulary is None:
        return
    if not isinstance(label_vocabulary, (list, tuple)):
        raise ValueError(f"label_vocabulary must be a list or tuple, not {type(label_vocabulary).__name__}.")
    if len(label_vocabulary) != num_classes:
        raise ValueError(
            f"label_vocabulary={label_vocabulary} has {len(label_vocabulary)} entries, but there are {num_classes} "
            "classes."
        )


def checked_logits(logits: Any, dimension: int) -> tf.Tensor:
    """Return `logits` as a float32 or float64 tensor `[batch, ..., dimension]`.

    Raises:
      ValueError: they have another shape. If the shape is known only in a step, the step fails.
    """
    logits = tf.convert_to_tensor(logits)
    if logits.dtype != tf.float64:
        logits = tf.cast(logits, tf.float32)
    rank = logits.shape.rank
    size = static_size(logits, -1)
    if rank is not None and (rank < 2 or size not in (None, dimension)):
        raise ValueError(
            f"logits have the shape {logits.shape}; this head takes [batch, ..., {dimension}] (its logits_dimension)."
        )
    if size is not None:
        return logits
    has_dimension = tf.equal(tf.shape(logits)[-1], dimension)
    message = f"this head takes logits of the shape [batch, ..., {dimension}], but got:"
    return after(tf.debugging.Assert(has_dimension, [message, tf.shape(logits)]), logits)


def checked_labels(labels: Any, logits: tf.Tensor, dimension: int) -> tf.Tensor:
    """Return `labels` as a dense tensor with the shape of `logits`, but with `dimension` as the size of the last axis.
    Labels `[batch]` become `[batch, 1]`.

    Raises:
      ValueError: labels are None or sparse, or have another shape. If the shape is known only in a step, the step
        fails.
    """
    if labels is None:
        raise ValueError(
            "the head got labels=None. TRAIN and EVAL need labels: let the input function return (features, labels)."
        )
    if isinstance(labels, tf.sparse.SparseTensor):
        raise ValueError(
            f"labels are a SparseTensor; this head takes a dense tensor [batch, ..., {dimension}]. "
            "Use tf.sparse.to_dense in the input function."
        )
    labels = tf.convert_to_tensor(labels)
    if _lacks_last_axis(labels, logits):
        labels = tf.expand_dims(labels, -1)
    expected = logits.shape[:-1].concatenate(dimension)
    if not labels.shape.is_compatible_with(expected):
        raise ValueError(
            f"labels have the shape {labels.shape}; with logits {logits.shape} this head takes {expected}. Check "
            "n_classes or label_dimension; convert one-hot labels to classes with tf.argmax(labels, -1)."
        )
    labels = _with_checked_shape(labels, "labels", logits, [dimension], least_rank=2)
    labels.set_shape(expected)  # so that losses and metrics know the rank of labels of an unknown shape
    return labels


def checked_range(labels: tf.Tensor, num_classes: int, what: str = "labels") -> tf.Tensor:
    """Return `labels` (numbers of any shape). A step fails if one is not from 0 to num_classes - 1.

    Args:
      labels: the labels.
      num_classes: number of classes.
      what: the name of the labels, for the message.
    """
    are_in_range = tf.logical_and(labels >= 0, labels <= num_classes - 1)
    message = f"{what} must be from 0 to {num_classes - 1}; these are not:"
    wrong = tf.gather_nd(labels, tf.where(tf.logical_not(are_in_range)))
    return after(tf.debugging.Assert(tf.reduce_all(are_in_range), [message, wrong], summarize=10), labels)


def checked_losses(losses: Any, logits: tf.Tensor, dimension: int) -> tf.Tensor:
    """Return `losses`, the result of a loss_fn, as a tensor `[batch, ..., dimension]`.

    Raises:
      ValueError: it has another shape; in a graph the step fails instead, as in tf.estimator.
    """
    return _with_checked_shape(tf.convert_to_tensor(losses), "the losses of loss_fn", logits, [dimension])


def example_weights(
    features: Any, weight_column: Any, logits: tf.Tensor, *, one_each_logit: bool = False
) -> tf.Tensor | None:
    """Return the weights of the examples, `[batch, ..., 1]` in the dtype of the logits; None without a weight column.

    Args:
      features: name -> tensor `[batch, ...]`.
      weight_column: a key of `features`, or a `tf.feature_column.numeric_column`.
      logits: float `[batch, ..., logits_dimension]`.
      one_each_logit: weights may also have the shape of the logits.

    Raises:
      ValueError: there is no such feature, or it has another shape; in a graph the step then fails, as in tf.estimator.
      TypeError: weight_column is neither a key nor a numeric_column.
    """
    if weight_column is None:
        return None
    if isinstance(weight_column, str):
        if not isinstance(features, Mapping) or weight_column not in features:
            features_given = ", ".join(map(str, features)) if isinstance(features, Mapping) else "not a dict"
            raise ValueError(f"weight_column={weight_column!r} is not a feature. The features are: {features_given}.")
        weight_column = tf.feature_column.numeric_column(weight_column)
    elif not hasattr(weight_column, "normalizer_fn"):
        raise TypeError(
            f"weight_column must be the key of a feature or a numeric_column, not {type(weight_column).__name__}."
        )
    weights = dense_tensor(weight_column, features)
    weights = tf.cast(weights, logits.dtype)
    if _lacks_last_axis(weights, logits):
        weights = tf.expand_dims(weights, -1)
    dimensions = [1, None] if one_each_logit else [1]
    return _with_checked_shape(weights, "weights", logits, dimensions)


def _lacks_last_axis(values: tf.Tensor, logits: tf.Tensor) -> bool:
    """Report whether it is known that `values` have one axis less than `logits`."""
    rank = values.shape.rank
    rank_of_logits = logits.shape.rank
    are_known = rank is not None and rank_of_logits is not None
    return are_known and rank == rank_of_logits - 1


def _with_checked_shape(
    values: tf.Tensor, what: str, logits: tf.Tensor, dimensions: Sequence[int | None], least_rank: int = 0
) -> tf.Tensor:
    """Return `values` if they have the shape of the logits, up to the size of the last axis.

    In a graph the returned tensor has the check as a control dependency, so that a step fails. As in tf.estimator, the
    sizes are compared there by broadcasting: `[2]` is taken for `[2, 2]`.

    Args:
      values: the tensor to check.
      what: name of the values, for messages.
      logits: float `[batch, ..., logits_dimension]`.
      dimensions: the sizes allowed for the last axis; None stands for the size that the logits have.
      least_rank: the smallest rank that is allowed.

    Raises:
      ValueError: in eager mode, the shape is not allowed.
    """
    message = f"{what} have a wrong shape; their shape, that of the logits, and the sizes allowed for the last axis:"
    if tf.executing_eagerly():
        shapes = []
        for size in dimensions:
            shapes.append(logits.shape if size is None else [*logits.shape[:-1], size])
        if values.shape not in shapes:
            raise ValueError(f"{message} {values.shape}, {logits.shape}, {dimensions}.")
        return values
    shape = tf.shape(values)
    shape_of_logits = tf.shape(logits)
    equal = []
    for size in dimensions:
        allowed = shape_of_logits if size is None else tf.concat([shape_of_logits[:-1], [size]], axis=0)
        equal.append(tf.reduce_all(tf.equal(shape, allowed)))
    fits = tf.logical_and(tf.reduce_any(equal), tf.rank(values) >= least_rank)
    return after(tf.debugging.Assert(fits, [message, shape, shape_of_logits, str(dimensions)]), values)


def reduced(losses: tf.Tensor, weights: tf.Tensor | None, loss_reduction: str, part: WholeBatch = _WHOLE) -> tf.Tensor:
    """Return the losses of a batch, weighted and reduced to a float scalar.

    As in tf.estimator, SUM_OVER_BATCH_SIZE divides by the number of losses, not by the sum of weights.

    Args:
      losses: float `[batch, ...]`.
      weights: float, of a shape that broadcasts to `losses`; None: all 1.
      loss_reduction: a key of _REDUCTIONS.
      part: this replica's part of the global batch, which makes sums and weighted means those of the global batch.
    """
    total = tf.reduce_sum(losses * broadcast_weights(losses, weights))
    if is_sum(loss_reduction):
        return part.of_sum(total)
    if is_weighted_mean(loss_reduction):
        return part.of_mean(total, divisor(losses, weights, loss_reduction))
    return total / tf.cast(tf.size(losses), losses.dtype)


def divisor(losses: tf.Tensor, weights: tf.Tensor | None, loss_reduction: str) -> tf.Tensor:
    """Return the float scalar by which a weighted mean divides the sum of the weighted losses."""
    weight_of_each = broadcast_weights(losses, weights)
    if _REDUCTIONS[loss_reduction] == "nonzero":
        weight_of_each = tf.cast(tf.not_equal(weight_of_each, 0), weight_of_each.dtype)
    return tf.reduce_sum(weight_of_each)


def broadcast_weights(values: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """Return the weights broadcast to the shape of `values`, in their dtype; None: ones.

    Weights with one axis more than `values`, such as `[batch, 1]` for `[batch]`, lose their last axis, as in Keras.
    """
    if weights is None:
        return tf.ones_like(values)
    if _lacks_last_axis(values, weights):
        weights = tf.squeeze(weights, -1)
    return tf.cast(weights, values.dtype) * tf.ones_like(values)


def after(check: Any, value: tf.Tensor) -> tf.Tensor:
    """Return `value` (of any shape), computed only after `check` has passed."""
    with tf.control_dependencies([check]):
        return tf.identity(value)
