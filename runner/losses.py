"""`tf.compat.v1.losses` of a batch that several replicas share: their sums and weighted means are of all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from runner.batch_part import batch_part
from runner.v1_bridge import weighted_losses_by

v1 = tf.compat.v1
_Reduction = v1.losses.Reduction


def losses_over_batches() -> contextlib.AbstractContextManager[None]:
    """While model_fn is called: each loss is a number whose mean over the replicas, weighted by their examples, is the
    loss of the whole batch.

    A mean over the elements of the losses is that already, where each example has as many of them.
    """
    return weighted_losses_by(_weighted_loss)


def _weighted_loss(
    own: Callable[..., tf.Tensor],
    losses: Any,
    weights: Any = 1.0,
    scope: str | None = None,
    loss_collection: str | None = v1.GraphKeys.LOSSES,
    reduction: str = _Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
    part = batch_part()
    is_sum = reduction == _Reduction.SUM
    is_mean = reduction in (_Reduction.MEAN, _Reduction.SUM_BY_NONZERO_WEIGHTS) and not isinstance(weights, int | float)
    if part.is_whole or not (is_sum or is_mean):
        return own(losses, weights, scope, loss_collection, reduction)
    each = own(losses, weights, scope, None, _Reduction.NONE)
    total = tf.reduce_sum(tf.cast(each, tf.float32))
    if is_sum:
        loss = part.of_sum(total)
    else:
        of_each = tf.cast(weights, tf.float32) * tf.ones_like(each, tf.float32)
        if reduction != _Reduction.MEAN:
            of_each = tf.cast(tf.not_equal(of_each, 0), tf.float32)
        loss = part.of_mean(total, tf.reduce_sum(of_each))
    loss = tf.cast(loss, each.dtype)
    v1.losses.add_loss(loss, loss_collection)
    return loss
