"""What a replica has of a batch, for losses of a model_fn that are no means over examples: sums, and weighted means.

A scalar loss counts as much as its replica has examples: a step comes to the mean over the replicas, weighted so. A sum
over a replica's examples, or a mean by their weights, becomes here the number of which that mean is the sum, or the
weighted mean, over the whole batch. So it is the same under every strategy.
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
    """A replica that has all of a batch to itself."""

    is_whole = True
    sums: Sequence[tf.Tensor] = ()
    """Over all replicas, as they were asked for."""

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """The replica's part of the examples of the batch."""
        return tf.ones([], dtype)

    def of_sum(self, total: tf.Tensor) -> tf.Tensor:
        """Return what stands for the sum over the batch. Args: total: over the replica's examples."""
        return total

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Return what stands for the weighted mean over the batch; 0 where nothing has a weight.

        Args:
          total: of weight times value, over the replica's examples.
          weight: the sum of their weights.
        """
        return tf.math.divide_no_nan(total, weight)


@dataclasses.dataclass(frozen=True)
class PartOfBatch(WholeBatch):
    """Some of the examples of a batch. The replicas do not meet: `of_mean` is that of the replica's own examples.

    Args:
      replica: among those of this process.
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
    """Some of the examples of a step in which all replicas meet.

    Args:
      graph: of the step. Inside a branch or a loop of it they cannot meet.
      sum_over_replicas: of a scalar, as it is.
    """

    graph: tf.Graph
    sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        if v1.get_default_graph() is not self.graph:
            return super().of_mean(total, weight)
        return self.of_sum(tf.math.divide_no_nan(total, self._over_all(weight)))

    def _over_all(self, weight: tf.Tensor) -> tf.Tensor:
        """The weight of the whole batch; with a gradient for those who learn weights."""
        share, presence = self.share(weight.dtype), self.weights.presence(self.replica, weight.dtype)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # What comes is of this replica's loss, which counts by its share, and so will what is returned.
            return tf.math.divide_no_nan(self.sum_over_replicas(upstream * share), share)

        @tf.custom_gradient
        def over_all(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            self.sums.append(self.sum_over_replicas(own * presence))
            return self.sums[-1], gradient

        return over_all(weight)


_part: contextvars.ContextVar[WholeBatch] = contextvars.ContextVar("batch_part")
_WHOLE = WholeBatch()


def batch_part() -> WholeBatch:
    """Return what the model_fn that is being called has of its batch; all of it by default."""
    return _part.get(_WHOLE)


@contextlib.contextmanager
def model_fn_has(part: WholeBatch) -> Iterator[None]:
    """While model_fn is called, in this thread."""
    token = _part.set(part)
    try:
        yield
    finally:
        _part.reset(token)


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
