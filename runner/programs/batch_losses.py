"""A replica's share of losses that are not means over examples: sums, and weighted means.

The loss of a step is the mean of the replicas' losses, weighted by their numbers of examples. For a loss that is a sum
over examples, or a mean by weights, the functions here scale the replica's value so that this weighted mean equals the
sum, or the weighted mean, over the global batch. The loss is then the same on every strategy.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.reductions import ReplicaWeights
from runner.tf_private.v1 import weighted_losses_by

v1 = tf.compat.v1


class WholeBatch:
    """The part of a replica that has the whole batch."""

    is_whole = True
    sums: Sequence[tf.Tensor] = ()
    """The sums over all replicas, in the order of the requests."""

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Return the replica's share of the batch's examples: a scalar of `dtype` from 0 to 1."""
        return tf.ones([], dtype)

    def of_sum(self, total: tf.Tensor) -> tf.Tensor:
        """Return the replica's value for the sum over the batch; `total` is the scalar sum over the replica's
        examples.
        """
        return total

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Return the replica's value for the weighted mean over the batch, a scalar; 0 if the weights sum to zero.

        Args:
          total: scalar, the sum of weight times value over the replica's examples.
          weight: scalar, the sum of their weights.
        """
        return tf.math.divide_no_nan(total, weight)


@dataclasses.dataclass(frozen=True)
class PartOfBatch(WholeBatch):
    """Some of the examples of a batch, without communication: `of_mean` is the mean over the replica's own examples.

    Args:
      replica: the replica in this process.
    """

    weights: ReplicaWeights
    replica: int
    is_whole = False

    def share(self, dtype: tf.DType) -> tf.Tensor:
        return self.weights.share(self.replica, dtype)

    def of_sum(self, total: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(total, self.share(total.dtype))


@dataclasses.dataclass(frozen=True)
class PartOfStep(PartOfBatch):
    """Some of the examples of a step in which all replicas communicate.

    Args:
      graph: the graph of the step. Inside a branch or loop of it, replicas cannot communicate.
      sum_over_replicas: sums a scalar over all replicas.
    """

    graph: tf.Graph
    sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        if v1.get_default_graph() is not self.graph:
            return super().of_mean(total, weight)
        return self.of_sum(tf.math.divide_no_nan(total, self._over_all(weight)))

    def _over_all(self, weight: tf.Tensor) -> tf.Tensor:
        """Return the weight of the whole batch, a scalar, with a gradient for models that learn weights."""
        share, presence = self.share(weight.dtype), self.weights.presence(self.replica, weight.dtype)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # The incoming gradient is that of this replica's loss, already weighted by its share, and so is the result.
            return tf.math.divide_no_nan(self.sum_over_replicas(upstream * share), share)

        @tf.custom_gradient
        def over_all(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            self.sums.append(self.sum_over_replicas(own * presence))
            return self.sums[-1], gradient

        return over_all(weight)


_part: contextvars.ContextVar[WholeBatch] = contextvars.ContextVar("batch_part")
_WHOLE = WholeBatch()


def batch_part() -> WholeBatch:
    """Return the part of the batch that the running model_fn has; by default the whole batch."""
    return _part.get(_WHOLE)


@contextlib.contextmanager
def model_fn_has(part: WholeBatch) -> Iterator[None]:
    """Declare the part of the batch that model_fn has, inside this context and thread."""
    token = _part.set(part)
    try:
        yield
    finally:
        _part.reset(token)


_Reduction = v1.losses.Reduction


def losses_over_batches() -> contextlib.AbstractContextManager[None]:
    """Scale each loss inside this context, so that the replicas' mean, weighted by examples, is the loss of the global
    batch.

    A mean over the elements of the losses needs no scaling if each example has the same number of elements.
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
