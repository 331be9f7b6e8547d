"""Scaling of a replica's losses that are sums over examples or weighted means.

The loss of a step is the mean of the replicas' losses, weighted by their numbers of examples. The functions here scale
a replica's sum, or weighted mean, so that this mean over the replicas equals the sum, or weighted mean, over the global
batch. The loss is then the same on every strategy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.reductions import ReplicaWeights, without_duplicates
from runner.tf_private.keras3 import reduced_losses_by
from runner.tf_private.replaced import replaced
from runner.tf_private.v1 import weighted_losses_by

v1 = tf.compat.v1


class WholeBatch:
    """The scaling for a model_fn that sees the whole batch: losses stay as they are."""

    is_whole = True
    sums: Sequence[tf.Tensor] = ()
    """The sums over all replicas that `of_mean` computed, in the order of its calls."""
    totals: Sequence[tuple[tf.Tensor, tf.Tensor]] = ()
    """(float64 scalar of this replica and micro-batch, placeholder for its sum over the update), for each use."""

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Return the replica's share of the global batch's examples: a scalar of `dtype` from 0 to 1."""
        return tf.ones([], dtype)

    def of_sum(self, total: tf.Tensor) -> tf.Tensor:
        """Return the replica's loss, scaled so that the step's loss is the sum over the global batch.

        Args:
          total: scalar, the sum over the replica's examples.
        """
        return total

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Return the replica's loss, scaled so that the step's loss is the weighted mean over the global batch.

        The result is a scalar; 0 if the weights sum to zero.

        Args:
          total: scalar, the sum of weight times value over the replica's examples.
          weight: scalar, the sum of the weights of the replica's examples.
        """
        return tf.math.divide_no_nan(total, weight)

    def global_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Return the gradients of the global batch, given (gradient of the replica's examples, variable) pairs. For
        what must be the same on all replicas, such as the norm by which an optimizer clips.
        """
        return [without_duplicates(gradient) for gradient, _ in grads_and_vars]


@dataclasses.dataclass(frozen=True)
class PartOfStep(WholeBatch):
    """The scaling for a replica that sees a part of the batch, in a step in which all replicas communicate.

    Args:
      weights: the numbers of examples of all replicas.
      replica: index of the replica in this process.
      graph: the graph of the step. Replicas cannot communicate inside a branch or loop of this graph, so a weighted
        mean is there the mean over the replica's own examples.
      sum_over_replicas: sums a scalar over all replicas.
      all_reduce: weights (gradient, variable) pairs by the replica's share of the global batch, and sums them over all
        replicas.
    """

    weights: ReplicaWeights
    replica: int
    graph: tf.Graph
    sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]
    all_reduce: Callable[[list[tuple[Any, Any]]], list[tuple[Any, Any]]]
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)
    is_whole = False

    def share(self, dtype: tf.DType) -> tf.Tensor:
        return self.weights.share(self.replica, dtype)

    def of_sum(self, total: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(total, self.share(total.dtype))

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        if v1.get_default_graph() is not self.graph:
            return super().of_mean(total, weight)
        return self.of_sum(tf.math.divide_no_nan(total, self._over_all(weight)))

    def global_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> list[Any]:
        return [gradient for gradient, _ in self.all_reduce(list(grads_and_vars))]

    def _over_all(self, weight: tf.Tensor) -> tf.Tensor:
        """Return the sum of the weights over the global batch, a scalar with a gradient (a model may learn weights)."""
        share, presence = self.share(weight.dtype), self.weights.presence(self.replica, weight.dtype)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # The incoming gradient is of this replica's loss, already weighted by its share. So is the returned one.
            return tf.math.divide_no_nan(self.sum_over_replicas(upstream * share), share)

        @tf.custom_gradient
        def over_all(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            self.sums.append(self.sum_over_replicas(own * presence))
            return self.sums[-1], gradient

        return over_all(weight)


@dataclasses.dataclass(frozen=True)
class PartOfUpdate(PartOfStep):
    """The scaling for a replica that sees a micro-batch, in a program that does not communicate.

    What losses divide by is fed: another program adds it up over all micro-batches and replicas of the update
    beforehand (`totals`). A weight that depends on variables has no gradient through such a sum.
    """

    totals: list[tuple[tf.Tensor, tf.Tensor]] = dataclasses.field(default_factory=list)

    def of_sum(self, total: tf.Tensor) -> tf.Tensor:
        with self.graph.as_default():  # a loss in a branch has a graph of its own, in which nothing can be fed
            own = tf.cast(self.weights.counts[self.replica], tf.float64)
            factor = tf.math.divide_no_nan(self._over_all(own), own)
        return total * tf.cast(factor, total.dtype)

    def _over_all(self, weight: tf.Tensor) -> tf.Tensor:
        own = tf.cast(weight * self.weights.presence(self.replica, weight.dtype), tf.float64)
        self.totals.append((own, v1.placeholder(tf.float64, [])))
        return tf.cast(self.totals[-1][1], weight.dtype)


class _OfThread(threading.local):
    part = WholeBatch()


_of_thread = _OfThread()


def batch_part() -> WholeBatch:
    """Return the scaling for the model_fn that is running; by default that for the whole batch."""
    return _of_thread.part


def model_fn_has(part: WholeBatch) -> contextlib.AbstractContextManager[None]:
    """Use `part` as the scaling for a model_fn that runs inside this context, in this thread."""
    return replaced(_of_thread, "part", part)


_Reduction = v1.losses.Reduction


@contextlib.contextmanager
def losses_over_batches() -> Iterator[None]:
    """Scale each loss of `tf.compat.v1.losses` and Keras inside this context, so that the replicas' mean, weighted by
    examples, is the loss of the global batch.

    A mean over the elements of the losses needs no scaling if each example has the same number of elements.
    """
    with weighted_losses_by(_weighted_loss), reduced_losses_by(_reduced):
        yield


def _reduced(own: Callable[..., tf.Tensor], values: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Return the loss of Keras for losses that are already multiplied by their weights."""
    arguments = inspect.signature(own).bind(values, *args, **kwargs).arguments
    part, loss, weights = batch_part(), own(values, *args, **kwargs), arguments.get("sample_weight")
    if part.is_whole or values.shape.rank == 0:  # a loss that is a scalar already is what its author made of the batch
        return loss
    if arguments.get("reduction") == "mean_with_sample_weight" and weights is not None:
        return part.of_mean(tf.reduce_sum(values), tf.reduce_sum(weights))
    return part.of_sum(loss) if arguments.get("reduction") == "sum" else loss


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
    # Into no collection: the scaled loss is added to it below.
    each = own(losses, weights, scope, None, _Reduction.NONE)
    total = tf.reduce_sum(tf.cast(each, tf.float32))
    if is_sum:
        loss = part.of_sum(total)
    else:
        of_each = tf.cast(weights, tf.float32) * tf.ones_like(each, tf.float32)
        if reduction != _Reduction.MEAN:
            of_each = tf.cast(tf.not_equal(of_each, 0), tf.float32)  # a mean over the weights that are not 0
        loss = part.of_mean(total, tf.reduce_sum(of_each))
    loss = tf.cast(loss, each.dtype)
    v1.losses.add_loss(loss, loss_collection)
    return loss
