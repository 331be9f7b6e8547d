"""Scaling of a replica's losses that are sums over examples or weighted means.

The loss of a step is the mean of the replicas' losses, weighted by their numbers of examples. The functions here scale
a replica's sum, or weighted mean, so that this mean over the replicas equals the sum, or weighted mean, over the global
batch. The loss is then the same on every strategy. A loss that couples the examples of a batch gets those of all
replicas (`all_gather`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.reductions import Reductions, ReplicaWeights, without_duplicates
from runner.tf_private.keras3 import losses_by
from runner.tf_private.replaced import replaced
from runner.tf_private.v1 import weighted_losses_by

v1 = tf.compat.v1


class GlobalRows:
    """The rows of all replicas, as one replica gets them in a trace of all.

    Args:
      weights: the numbers of examples of all replicas.
      replica: index of the replica in this process.
      reductions: sums over replicas.
    """

    def __init__(self, weights: ReplicaWeights, replica: int, reductions: Reductions) -> None:
        self._weights = weights
        self._replica = replica
        self._reductions = reductions

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of `tensor` of all replicas, in their order, with a gradient.

        Args:
          tensor: `[rows, ...]` of a dtype of numbers, or bool. Rows of a placeholder example are left out.
        """
        if tensor.dtype == tf.bool:
            return tf.cast(self.gather(tf.cast(tensor, tf.int32)), tf.bool)

        def gradient(upstream: Any) -> tf.Tensor:
            """Return the gradient of this replica's rows, on which the losses of all replicas depend.

            The result will be multiplied by this replica's share. But the loss of another replica counts by the share
            of that replica. So each upstream gradient is multiplied by its own replica's share before the sum, and the
            result is divided by this replica's share.
            """
            share = self._weights.share_in_gradient(self._replica, tensor.dtype)
            summed = self._sum(tf.convert_to_tensor(upstream) * share, tf.range(total), total)
            own_gradient = summed[first : first + num_own]
            num_placeholders = tf.shape(tensor, tf.int64)[0] - num_own
            no_padding = [[0, 0]] * (tensor.shape.rank - 1)  # of the dimensions after the rows
            padded = tf.pad(own_gradient, [[0, num_placeholders], *no_padding])
            return tf.math.divide_no_nan(padded, share)

        num_own = self._num_present_rows(tf.shape(tensor, tf.int64)[0])
        first, total = self._first_and_total(num_own)

        @tf.custom_gradient
        def gathered(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
            return self._sum(rows[:num_own], first + tf.range(num_own), total), gradient

        return gathered(tensor)

    def offset(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the place of this replica's first row among those of all; each replica has `rows` rows, a scalar."""
        num_own = self._num_present_rows(tf.cast(rows, tf.int64))
        first, total = self._first_and_total(num_own)
        # A placeholder example gets the place of a row that is there, so that nothing is out of range.
        return tf.cast(tf.minimum(first, tf.maximum(total - 1, 0)), rows.dtype)

    def _num_present_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Return `rows`, the number of rows of this replica; 0 if they are those of a placeholder example."""
        return rows * self._weights.presence(self._replica, tf.int64)

    def _first_and_total(self, num_own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return (place of this replica's first row, number of rows of all), int64 scalars."""
        context = tf.distribute.get_replica_context()
        count = context.num_replicas_in_sync
        replica = context.replica_id_in_sync_group
        own_at_place = tf.one_hot(replica, count, dtype=tf.int64) * num_own
        numbers = self._reductions.sum_over_replicas([own_at_place])[0]
        return tf.cumsum(numbers, exclusive=True)[replica], tf.reduce_sum(numbers)

    def _sum(self, rows: tf.Tensor, places: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        """Return `[total, ...]`: the rows of all replicas at their places, added up."""
        # Sparse, because the number of rows differs between steps: see `reductions._dense_with_counts`.
        of_all = self._reductions.sum_over_replicas([tf.IndexedSlices(rows, places)])[0]
        return tf.math.unsorted_segment_sum(of_all.values, of_all.indices, total)


class WholeBatch:
    """The scaling for a model_fn that sees the whole batch: losses stay as they are.

    Attributes:
      has_sum: a loss was recognised as a sum over examples. The loss of a step is then no mean.
    """

    is_whole = True
    has_sum = False
    sums: Sequence[tf.Tensor] = ()
    """The sums over all replicas that `of_mean` computed, in the order of its calls."""
    denominators: Sequence[tuple[tf.Tensor, tf.Tensor]] = ()
    """The sums by which losses are divided, one for each use: (float64 scalar of this replica and micro-batch,
    placeholder that is fed its sum over all replicas and micro-batches of the update)."""

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Return the replica's share of the global batch's examples: a scalar of `dtype` from 0 to 1."""
        return tf.ones([], dtype)

    def of_sum(self, total: tf.Tensor) -> tf.Tensor:
        """Return the replica's loss, scaled so that the step's loss is the sum over the global batch.

        Args:
          total: scalar, the sum over the replica's examples.
        """
        self.has_sum = True
        return self._as_share(total)

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Return the replica's loss, scaled so that the step's loss is the weighted mean over the global batch.

        The result is a scalar; 0 if the weights sum to zero.

        Args:
          total: scalar, the sum of weight times value over the replica's examples.
          weight: scalar, the sum of the weights of the replica's examples.
        """
        return tf.math.divide_no_nan(total, weight)

    def _as_share(self, part: tf.Tensor) -> tf.Tensor:
        """Return the replica's loss whose share in the step's loss is `part`."""
        return part

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of `tensor` (`[rows, ...]`) of all replicas."""
        return tensor

    def offset(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the place of the replica's first row among those of all replicas, which have `rows` rows each."""
        return tf.zeros_like(rows)

    def global_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Return the gradients of the global batch, given (gradient of the replica's examples, variable) pairs. For
        what must be the same on all replicas, such as the norm by which an optimizer clips.
        """
        return [without_duplicates(gradient) for gradient, _ in grads_and_vars]


@dataclasses.dataclass(eq=False)
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
      rows: the rows of all replicas.
    """

    weights: ReplicaWeights
    replica: int
    graph: tf.Graph
    sum_over_replicas: Callable[[tf.Tensor], tf.Tensor]
    all_reduce: Callable[[list[tuple[Any, Any]]], list[tuple[Any, Any]]]
    rows: GlobalRows
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)
    is_whole = False

    def share(self, dtype: tf.DType) -> tf.Tensor:
        return self.weights.share(self.replica, dtype)

    def _as_share(self, part: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(part, self.share(part.dtype))

    def of_mean(self, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        is_in_branch_or_loop = v1.get_default_graph() is not self.graph
        if is_in_branch_or_loop:
            return super().of_mean(total, weight)
        return self._as_share(tf.math.divide_no_nan(total, self._over_all(weight)))

    def global_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> list[Any]:
        return [gradient for gradient, _ in self.all_reduce(list(grads_and_vars))]

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return self.rows.gather(tensor)

    def offset(self, rows: tf.Tensor) -> tf.Tensor:
        return self.rows.offset(rows)

    def _over_all(self, weight: tf.Tensor) -> tf.Tensor:
        """Return the sum of the weights over the global batch, a scalar with a gradient (a model may learn weights)."""
        presence = self.weights.presence(self.replica, weight.dtype)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            share = self.weights.share_in_gradient(self.replica, weight.dtype)
            # The weight of a placeholder example is not in the sum.
            return presence * tf.math.divide_no_nan(self.sum_over_replicas(upstream * share), share)

        @tf.custom_gradient
        def over_all(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            self.sums.append(self.sum_over_replicas(own * presence))
            return self.sums[-1], gradient

        return over_all(weight)


_NOT_IN_PARTS = (
    "model_fn calls runner.all_gather or runner.replica_offset, which need the whole batch of a step at once. They do "
    "not work with train.gradient_accumulation, nor on several replicas with train.precision=mixed_float16 or "
    "train.jit=true, which compute gradients without communication. Unset it."
)


@dataclasses.dataclass(eq=False)
class PartOfUpdate(PartOfStep):
    """The scaling for a replica that sees a micro-batch, in a program that does not communicate.

    The sums by which losses are divided are fed: another program adds them up beforehand, over all micro-batches and
    replicas of the update (`denominators`). A weight that depends on variables has no gradient through such a sum.
    """

    denominators: list[tuple[tf.Tensor, tf.Tensor]] = dataclasses.field(default_factory=list)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        raise ValueError(_NOT_IN_PARTS)

    def offset(self, rows: tf.Tensor) -> tf.Tensor:
        raise ValueError(_NOT_IN_PARTS)

    def _as_share(self, part: tf.Tensor) -> tf.Tensor:
        with self.graph.as_default():  # a loss in a branch has a graph of its own, in which nothing can be fed
            own = tf.cast(self.weights.counts[self.replica], tf.float64)
            # 1 / the share of this micro-batch in the examples of the update.
            factor = tf.math.divide_no_nan(self._over_all(own), own)
        return part * tf.cast(factor, part.dtype)

    def _over_all(self, weight: tf.Tensor) -> tf.Tensor:
        own = tf.cast(weight * self.weights.presence(self.replica, weight.dtype), tf.float64)
        fed_sum = v1.placeholder(tf.float64, [])
        self.denominators.append((own, fed_sum))
        return tf.cast(fed_sum, weight.dtype)


class _OfThread(threading.local):
    part = WholeBatch()


_of_thread = _OfThread()


def batch_part() -> WholeBatch:
    """Return the scaling for the model_fn that is running; by default that for the whole batch."""
    return _of_thread.part


def model_fn_has(part: WholeBatch) -> contextlib.AbstractContextManager[None]:
    """Use `part` as the scaling for a model_fn that runs inside this context, in this thread."""
    return replaced(_of_thread, "part", part)


def all_gather(tensor: Any) -> tf.Tensor:
    """Return the rows of the global batch, for a loss that couples the examples of a batch: in-batch negatives, pairs.

    Called by model_fn. On one replica, in EVAL and in PREDICT, where a replica has whole batches, this is the tensor
    itself. In TRAIN on several replicas and workers it has the rows of all, in the order of one process, and a
    gradient. Let each replica take the mean over its own examples: the runner weights that by their number.

        scores = tf.matmul(queries, runner.all_gather(answers), transpose_b=True)
        labels = runner.replica_offset(tf.shape(queries)[0]) + tf.range(tf.shape(queries)[0])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)

    Args:
      tensor: `[rows, ...]`, numbers or bool, of a static shape but for the rows.

    Raises:
      ValueError: the tensor has no rows or is text, or a step is computed in parts that cannot communicate:
        train.gradient_accumulation, and on several replicas mixed_float16 and XLA.
    """
    tensor = tf.convert_to_tensor(tensor)
    has_rows = bool(tensor.shape.rank) and tensor.shape[1:].is_fully_defined()
    if not has_rows or tensor.dtype == tf.string:
        raise ValueError(
            f"runner.all_gather({tensor.name}): a {tensor.dtype.name} of shape {tensor.shape}. It must be [rows, ...] "
            "of numbers or booleans, and all sizes but the first be known before the step."
        )
    return batch_part().all_gather(tensor)


def replica_offset(rows: Any) -> tf.Tensor:
    """Return the place of this replica's first row in what `all_gather` returns: 0 on one replica.

    Args:
      rows: how many rows this replica has, an integer or an integer scalar.

    Returns:
      An integer scalar of the dtype of `rows`, for an int int32.

    Raises:
      ValueError: as `all_gather`.
    """
    return batch_part().offset(tf.convert_to_tensor(rows))


_Reduction = v1.losses.Reduction


@contextlib.contextmanager
def losses_over_batches() -> Iterator[None]:
    """Scale each loss of `tf.compat.v1.losses` and Keras inside this context, so that the replicas' mean, weighted by
    examples, is the loss of the global batch.

    A mean over the elements of the losses needs no scaling if each example has the same number of elements.
    """
    with weighted_losses_by(_reduce_loss_of_v1), losses_by(_reduce_loss_of_keras, _mask_weights_of_keras):
        yield


def _reduce_loss_of_keras(own: Callable[..., tf.Tensor], values: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Return the reduced loss of Keras, scaled for the global batch.

    Args:
      own: Keras's own function, and then its arguments.
      values: the losses, which are multiplied by their weights already.
    """
    arguments = inspect.signature(own).bind(values, *args, **kwargs).arguments
    weights = arguments.get("sample_weight")
    reduction = arguments.get("reduction")
    part = batch_part()
    loss = own(values, *args, **kwargs)
    if values.shape.rank == 0:  # a loss that is a scalar already is what its author made of the batch
        return loss
    if reduction == "sum":
        return part.of_sum(loss)
    is_weighted_mean = reduction == "mean_with_sample_weight" and weights is not None
    if is_weighted_mean and not part.is_whole:
        return part.of_mean(tf.reduce_sum(values), tf.reduce_sum(weights))
    return loss


_MEANS = ("sum_over_batch_size", "mean", "auto")
"""The reductions of Keras 3 and tf_keras that are a mean over what is not masked."""


def _mask_weights_of_keras(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the weights of Keras for losses with a mask, for a mean over the valid elements of all replicas.

    Keras makes weights for a mean over the valid elements of this replica alone.

    Args:
      own: Keras's own function, and then its arguments.
    """
    arguments = inspect.signature(own).bind(*args, **kwargs).arguments
    part = batch_part()
    weights = own(*args, **kwargs)
    mask = arguments["mask"]
    if part.is_whole or mask is None or arguments["reduction"] not in _MEANS:
        return weights
    valid = tf.reduce_sum(tf.cast(mask, weights.dtype))
    return weights * part.of_mean(valid, valid)


def _reduce_loss_of_v1(
    own: Callable[..., tf.Tensor],
    losses: Any,
    weights: Any = 1.0,
    scope: str | None = None,
    loss_collection: str | None = v1.GraphKeys.LOSSES,
    reduction: str = _Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> tf.Tensor:
    """Return the reduced loss of `tf.compat.v1.losses`, scaled for the global batch, and add it to `loss_collection`.

    Args:
      own: TensorFlow's own `compute_weighted_loss`, whose arguments the others are.
    """
    part = batch_part()
    is_sum = reduction == _Reduction.SUM
    # With the same weight for all elements, a mean over the replicas' means is right as it is.
    has_weights = not isinstance(weights, int | float)
    is_weighted_mean = has_weights and reduction in (_Reduction.MEAN, _Reduction.SUM_BY_NONZERO_WEIGHTS)
    if part.is_whole:
        loss = own(losses, weights, scope, loss_collection, reduction)
        return part.of_sum(loss) if is_sum else loss
    if not (is_sum or is_weighted_mean):
        return own(losses, weights, scope, loss_collection, reduction)
    # Into no collection: the scaled loss is added to it below.
    weighted_losses = own(losses, weights, scope, None, _Reduction.NONE)
    total = tf.reduce_sum(tf.cast(weighted_losses, tf.float32))
    if is_sum:
        loss = part.of_sum(total)
    else:
        weights_of_losses = tf.cast(weights, tf.float32) * tf.ones_like(weighted_losses, tf.float32)
        if reduction != _Reduction.MEAN:  # a mean over the losses whose weights are not 0
            weights_of_losses = tf.cast(tf.not_equal(weights_of_losses, 0), tf.float32)
        loss = part.of_mean(total, tf.reduce_sum(weights_of_losses))
    loss = tf.cast(loss, weighted_losses.dtype)
    v1.losses.add_loss(loss, loss_collection)
    return loss
