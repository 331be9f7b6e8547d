"""Make gradients the mean over the global batch, for every optimizer.

TensorFlow sums gradients over replicas or takes their mean, depending on the optimizer's family and on the call. Here
each replica's gradient is first weighted by its share of the global batch, and then summed. So batches of different
sizes and replicas without examples are handled correctly, and every family gets the same gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.gradient_calls import is_computed_by_model_fn
from runner.distribute.replica_values import Kind, ReplicaValues
from runner.tf_private import cluster
from runner.tf_private.replaced import replaced

v1 = tf.compat.v1
_SUM = tf.distribute.ReduceOp.SUM

_GATHERED_BYTES = 1 << 18
"""Largest size in bytes of gradients that two workers send to each other whole; each worker then adds them itself.

This takes one message per worker. TensorFlow's sum over a ring takes two, one after the other (RingReducer sends parts
of the sum, then the sums). A sum of two numbers has the same bits in either order; with more workers it would not.
"""

_SIZES = [(4 + step % 4) << (4 + step // 4) for step in range(116)]
"""Sizes of the messages by which rows travel: 64 numbers and more, in four steps to the next power of two."""


@dataclasses.dataclass(frozen=True)
class ReplicaWeights:
    """The weights of the local replicas in one step, as graph tensors.

    Attributes:
      counts: int64 `[local replicas]`, real examples of each replica; 0 marks a placeholder example.
      global_count: int64 scalar >= 1, real examples of the step over all replicas of all workers.
    """

    counts: tf.Tensor
    global_count: tf.Tensor

    def share(self, replica: int, dtype: tf.DType) -> tf.Tensor:
        """Return the replica's share of the global batch, a scalar of `dtype`; the shares of all replicas sum to 1."""
        return tf.cast(self.counts[replica] / self.global_count, dtype)

    def share_in_gradient(self, replica: int, dtype: tf.DType) -> tf.Tensor:
        """Return by what the gradient of the replica's loss, which is being computed, will be multiplied: its share if
        model_fn computes it; 1 if the runner does (`optimizer=`), whose loss has been multiplied by it.
        """
        if is_computed_by_model_fn():
            return self.share(replica, dtype)
        return tf.ones([], dtype)

    def presence(self, replica: int, dtype: tf.DType) -> tf.Tensor:
        """Return a scalar of `dtype`: 1 if the replica has an example, 0 if it has a placeholder."""
        return tf.cast(self.counts[replica] > 0, dtype)

    def of_examples(self, gradient: Any, replica: int) -> Any:
        """Return a replica's gradient without rows that only a placeholder example looked up: they are not touched."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        rows = tf.where(self.counts[replica] > 0, tf.shape(gradient.indices)[0], 0)
        return tf.IndexedSlices(gradient.values[:rows], gradient.indices[:rows], gradient.dense_shape)


def scale(gradient: Any, factor: tf.Tensor) -> Any:
    """Return `gradient * factor` for a tensor or IndexedSlices of any shape; None stays None. `factor` is a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def without_duplicates(gradient: Any) -> Any:
    """Return IndexedSlices with the rows for the same row of the variable added; a tensor stays as it is."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def all_reduce(values: Sequence[Any]) -> list[Any]:
    """Return each of `values` summed over all replicas. Must be called in replica context.

    IndexedSlices stay IndexedSlices.

    Args:
      values: tensors of any shape, or IndexedSlices.
    """
    return list(tf.distribute.get_replica_context().all_reduce(_SUM, list(values)))


def _are_few_numbers(values: Sequence[Any]) -> bool:
    """Report whether `values` are dense and so small that the number of messages matters more than their size."""
    if not all(isinstance(one, tf.Tensor) and one.shape.is_fully_defined() for one in values):
        return False
    size = sum(one.shape.num_elements() * one.dtype.size for one in values)
    return values[0].dtype in (tf.float32, tf.float64) and 0 < size <= _GATHERED_BYTES


def _packed(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the values of `tensors`, which have one dtype, as one vector."""
    flat = [one if one.shape.rank == 1 else tf.reshape(one, [-1]) for one in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def _unpacked(values: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors of the shapes of `like`, cut from a vector that `_packed` returned."""
    parts = [values] if len(like) == 1 else tf.split(values, [one.shape.num_elements() for one in like])
    return [part if one.shape.rank == 1 else tf.reshape(part, one.shape) for part, one in zip(parts, like, strict=True)]


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    """Report whether some replicas of `strategy` are in other processes."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return bool(strategy.num_replicas_in_sync > len(strategy.extended.worker_devices))


def _collectable(value: Any) -> Any:
    """Return `value` in a form that a collective inside a loop can sum: IndexedSlices become dense tensors.

    A collective keeps the shape that it had in the loop's first step (TensorFlow 2.21), but the number of rows of
    IndexedSlices differs between steps. A last column counts how often each row was looked up, so that their sum tells
    which rows are touched: a row whose gradient is 0 is, one that nobody looked up is not.
    """
    if not isinstance(value, tf.IndexedSlices):
        return value
    width = value.values.shape[1:].num_elements()
    counted = tf.pad(tf.reshape(value.values, [-1, width]), [[0, 0], [0, 1]], constant_values=1)
    return tf.math.unsorted_segment_sum(counted, value.indices, value.dense_shape[0])


def _as_before(total: Any, value: Any) -> Any:
    """Return `total`, the sum of what `_collectable` made of `value` and others, with its touched rows alone."""
    if not isinstance(value, tf.IndexedSlices):
        return total
    rows = tf.where(total[:, -1] > 0)[:, 0]
    values = tf.reshape(tf.gather(total, rows)[:, :-1], [-1, *value.values.shape[1:]])
    return tf.IndexedSlices(values, tf.cast(rows, value.indices.dtype), value.dense_shape)


def _travels_by_rows(value: Any) -> bool:
    """Report whether the rows of a sparse gradient travel instead of the whole: if that is too large to be sent whole.

    The answer must be the same on all workers, so it depends on the variable alone: the numbers of ids may differ.
    """
    if not isinstance(value, tf.IndexedSlices):
        return False
    size = value.shape.num_elements()
    return size is None or size * value.dtype.size > _GATHERED_BYTES


def _gathered_rows(
    values: Sequence[tf.IndexedSlices], num_replicas: int, replica: cluster.Collectives, options: Any
) -> list[tf.IndexedSlices]:
    """Return sparse gradients of one dtype summed over all replicas, each row once.

    The replicas tell each other how many rows they have, and then send them in one message, padded to a size that is
    the same for all. Rows are added first in a replica, and then in the order of the replicas. In a step whose rows
    are so many that the whole tables are less to send, these are summed instead.

    Args:
      values: the gradients of one replica.
      num_replicas: the number of all replicas.
      replica: the collectives of the replica.
      options: CommunicationOptions.
    """
    own = [without_duplicates(value) for value in values]
    # The index of a row travels as bits in front of its values.
    bits = 8 // own[0].dtype.size
    shapes = [value.values.shape[1:] for value in own]
    sizes = [bits + int(shape.num_elements()) for shape in shapes]
    counts = replica.gather(tf.stack([tf.size(value.indices, tf.int64) for value in own]), options)
    ends = tf.cumsum(tf.reshape(counts, [num_replicas, -1]) * tf.constant(sizes, tf.int64), 1)
    number = tf.searchsorted(tf.constant(_SIZES, tf.int64), tf.reduce_max(ends)[None])[0]
    size = tf.gather(tf.constant(_SIZES, tf.int64), number)

    def by_rows() -> list[tuple[tf.Tensor, tf.Tensor]]:
        rows = []
        for value, shape in zip(own, shapes, strict=True):
            index = tf.reshape(tf.bitcast(tf.cast(value.indices, tf.int64), value.dtype), [-1, bits])
            rows.append(tf.reshape(tf.concat([index, tf.reshape(value.values, [-1, shape.num_elements()])], 1), [-1]))
        vector = tf.concat(rows, 0)
        padded = tf.pad(vector, [[0, size - tf.size(vector, tf.int64)]])
        everything = tf.reshape(replica.gather(padded, options, number), [num_replicas, -1])
        begins = tf.pad(ends, [[0, 0], [1, 0]])
        sums = []
        for place, (value, shape) in enumerate(zip(own, shapes, strict=True)):
            parts = [everything[one, begins[one, place] : ends[one, place]] for one in range(num_replicas)]
            together = tf.reshape(tf.concat(parts, 0), [-1, sizes[place]])
            index = tf.reshape(together[:, :bits], [-1, bits] if bits > 1 else [-1])
            indices = tf.cast(tf.bitcast(index, tf.int64), value.indices.dtype)
            of_all = tf.IndexedSlices(tf.reshape(together[:, bits:], [-1, *shape]), indices, value.dense_shape)
            total = without_duplicates(of_all)
            sums.append((total.values, total.indices))
        return sums

    def whole() -> list[tuple[tf.Tensor, tf.Tensor]]:
        totals = [_as_before(replica.all_reduce(_collectable(value), None, options), value) for value in own]
        return [(total.values, total.indices) for total in totals]

    # In a ring, a replica sends its message N - 1 times, and 2 (N - 1) / N times a tensor that is summed. All replicas
    # know the same counts, so they decide alike. Two replicas never send more than 1.25 times the tables, so rows are
    # always right there; so they are where the number of rows of a table is not known before a step.
    tables = [value.shape.num_elements() for value in own]
    if num_replicas > 2 and None not in tables:
        sums = tf.cond(size * num_replicas > 2 * sum(tables), whole, by_rows)
    else:
        sums = by_rows()
    return [tf.IndexedSlices(*total, value.dense_shape) for total, value in zip(sums, own, strict=True)]


def _sum_by_dtype(
    values: Sequence[Any], dtype_of: Callable[[Any], tf.DType], reduce: Callable[[list[Any]], Sequence[Any]]
) -> list[Any]:
    """Reduce the values of each dtype together, because a collective packs its arguments into one tensor."""
    places: dict[tf.DType, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(dtype_of(value), []).append(place)
    sums: list[Any] = [None] * len(values)
    for some in places.values():
        for place, value in zip(some, reduce([values[place] for place in some]), strict=True):
            sums[place] = value
    return sums


def _reduced_in_order(
    pairs: Sequence[tuple[Any, Any]],
    is_total: Callable[[Any], bool],
    reduce: Callable[[list[tuple[Any, Any]]], list[Any]],
) -> list[Any]:
    """Return the gradient of each (gradient, variable) pair, reduced over the replicas unless it is a total already.

    They travel in the order of the variables' names (in Keras, paths), because a user's list may have another order in
    each process.

    Args:
      reduce: returns the reduced gradients of some pairs.
    """
    reduced = [gradient for gradient, _ in pairs]
    places = [place for place, gradient in enumerate(reduced) if not is_total(gradient)]
    places.sort(key=lambda place: getattr(pairs[place][1], "path", pairs[place][1].name))
    if places:
        for place, total in zip(places, reduce([pairs[place] for place in places]), strict=True):
            reduced[place] = total
    return reduced


def local_replica() -> int:
    """Return the index of the current replica among those of this process, in a trace of strategy.run.

    Replicas are numbered over all workers, which have the same number of replicas each.
    """
    context = tf.distribute.get_replica_context()
    replica_id = tf.get_static_value(context.replica_id_in_sync_group)
    return int(replica_id) % len(context.strategy.extended.worker_devices)


class Reductions:
    """Weighted reductions over replicas during one trace.

    Inside its context:
    - `v1.train.Optimizer.apply_gradients` and Keras 3 optimizers, if *model_fn* calls them, get each gradient
      multiplied by the replica's share of the global batch. Their sum is then the mean over examples.
    - a MEAN (moving averages of BatchNorm) becomes the mean weighted by examples.
    - a SUM inside layers (synchronized BatchNorm) leaves out replicas without examples, whose batch is a placeholder.
    Inside `as_is` nothing is weighted, and optimizers get global gradients (`optimizer=`).

    Known limit: the backward pass of synchronized BatchNorm sums over replicas before the gradients are weighted, so
    a classic `train_op` with replicas of different sizes is inexact. `optimizer=` is exact.

    Args:
      strategy: the strategy.
      weights: the weights of its local replicas.
      discovers: the trace is that of discovery, in which one replica of several runs alone.
      values: what is known of the tensors of the trace; None: nothing.
      has_global_gradients: some gradients are summed over the replicas where model_fn computes them.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        weights: ReplicaWeights,
        *,
        discovers: bool = False,
        values: ReplicaValues | None = None,
        has_global_gradients: bool = False,
    ) -> None:
        self._strategy = strategy
        self._weights = weights
        self._values = values
        self._has_global_gradients = has_global_gradients
        self._is_one = discovers or weights.counts.shape[0] == strategy.num_replicas_in_sync == 1
        # Shared by the replica threads, which pass every merge_call, and so enter and leave, together.
        self._as_is = False

    @contextlib.contextmanager
    def as_is(self) -> Iterator[None]:
        """Reduce without weights inside this context: values are weighted already, and optimizers get the global
        gradient.
        """
        self._as_is = True
        try:
            yield
        finally:
            self._as_is = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[Reductions]:
        if self._is_one:
            yield self
            return
        extended, per_replica = self._strategy.extended, type(self._per_replica([0] * self._weights.counts.shape[0]))
        is_alone = self._weights.counts.shape[0] == 1
        batch_reduce_to, reduce_to = self._in_loops(extended.batch_reduce_to), extended.reduce_to
        apply_gradients = v1.train.Optimizer.apply_gradients

        def sum_of_gradients(op: Any, pairs: Sequence[tuple[Any, Any]], options: Any) -> list[Any]:
            def reduce(differing: list[tuple[Any, Any]]) -> list[Any]:
                return list(batch_reduce_to(op, differing, options))

            return _reduced_in_order(pairs, self._is_same, reduce)

        def weighted_batch_reduce_to(op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None) -> Any:
            gradients = all(isinstance(destination, tf.Variable) for _, destination in pairs)
            if self._as_is and gradients:
                return [value for value, _ in pairs]
            if gradients:  # weighted in replica context, unless they are those of the global batch already
                return self._noted(sum_of_gradients(op, pairs, options))
            if self._as_is:
                return self._noted(batch_reduce_to(op, pairs, options))
            weighted = [(self._weighted(op, value), where) for value, where in pairs]
            return self._noted(batch_reduce_to(_SUM, weighted, options))

        def weighted_reduce_to(op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
            # The only replica of a process has a tensor in place of values of replicas.
            is_of_replicas = isinstance(value, per_replica) or (is_alone and isinstance(value, tf.Tensor))
            if self._as_is or not is_of_replicas:
                return self._noted(reduce_to(op, value, destinations, options))
            return self._noted(reduce_to(_SUM, self._weighted(op, value), destinations, options))

        def weighted_apply_gradients(optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            return apply_gradients(optimizer, self._weighted_gradients(grads_and_vars), *args, **kwargs)

        with (
            replaced(extended, "batch_reduce_to", weighted_batch_reduce_to),
            replaced(extended, "reduce_to", weighted_reduce_to),
            replaced(v1.train.Optimizer, "apply_gradients", weighted_apply_gradients),
        ):
            yield self

    def sum_over_replicas(self, values: Sequence[Any]) -> list[Any]:
        """Return `values`, tensors or IndexedSlices, summed over all replicas as they are. In replica context."""
        if self._is_one:
            return list(values)
        with self.as_is():
            return all_reduce(values)

    def over_replicas(self, op: Any, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a mean or sum over the global batch, given those over the batches of the local replicas.

        Must be called in cross-replica context.

        Args:
          op: MEAN or SUM.
          values: tensors of one shape, one per local replica.
        """
        value = self._per_replica(values)
        total = self._strategy.extended.reduce_to(op, value, value)
        return self._strategy.experimental_local_results(total)[0]

    def are_own(self, values: Any) -> None:
        """Note that the tensors in `values` are known to their replica alone, although nothing in the graph says so."""
        if self._values is not None:
            self._values.are_own(values)

    def _is_same(self, value: Any) -> bool:
        """Report whether a value is known to be the same on all replicas."""
        return all(self._is_of_all(one) for one in self._strategy.experimental_local_results(value))

    def _noted(self, reduced: Any) -> Any:
        """Return the result of a reduction, which is the same on all replicas."""
        if self._values is not None:
            for one in tf.nest.flatten([reduced]):
                self._values.are_same(self._strategy.experimental_local_results(one))
        return reduced

    def _in_loops(self, batch_reduce_to: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for `batch_reduce_to` that works inside a loop.

        Over several processes, dense tensors of one dtype are reduced together.

        A MirroredStrategy by default reduces by collectives, which are replaced (TensorFlow 2.21): a collective keeps
        the shape of a loop's first step, so sparse gradients would abort the run at a batch with another number of
        rows; and two strategies in one process would use the same collective keys. On CPUs, collectives also take 1.5x
        as long as a sum on one device.
        """
        if spans_processes(self._strategy):
            return functools.partial(self._reduce_between_processes, batch_reduce_to)
        if not isinstance(self._strategy, tf.distribute.MirroredStrategy):
            return batch_reduce_to
        on_one_device = tf.distribute.ReductionToOneDevice()
        chosen = cluster.chosen_cross_device_ops(self._strategy)
        if chosen is not None and not type(chosen).__module__.startswith("tensorflow."):
            return batch_reduce_to  # the user's own
        on_cpu = all("CPU" in device.upper() for device in self._strategy.extended.worker_devices)
        # A copy was explicitly configured; nccl does not run on CPUs.
        on_cpu = on_cpu and not isinstance(chosen, tf.distribute.HierarchicalCopyAllReduce)

        def reduce(op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None) -> list[Any]:
            locals_of = self._strategy.experimental_local_results
            aside = [on_cpu or isinstance(locals_of(value)[0], tf.IndexedSlices) for value, _ in pairs]
            ours = [pair for pair, is_ours in zip(pairs, aside, strict=True) if is_ours]
            others = [pair for pair, is_ours in zip(pairs, aside, strict=True) if not is_ours]
            our_sums = iter(on_one_device.batch_reduce(op, ours) if ours else ())
            their_sums = iter(batch_reduce_to(op, others, options) if others else ())
            return [next(our_sums) if is_ours else next(their_sums) for is_ours in aside]

        return reduce

    def _reduce_between_processes(
        self, batch_reduce_to: Callable[..., Any], op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        firsts = [self._strategy.experimental_local_results(value)[0] for value, _ in pairs]
        collectives = cluster.collectives(self._strategy) if op == _SUM else []
        by_rows = [bool(collectives) and _travels_by_rows(first) for first in firsts]
        many = [value for (value, _), is_one in zip(pairs, by_rows, strict=True) if is_one]
        rows = iter(_sum_by_dtype(many, self._dtype, functools.partial(self._sum_rows, collectives, options)))
        dense = [
            (self._each(_collectable, value) if isinstance(first, tf.IndexedSlices) else value, destination)
            for (value, destination), first, is_one in zip(pairs, firsts, by_rows, strict=True)
            if not is_one
        ]

        def reduce(some: list[tuple[Any, Any]]) -> Sequence[Any]:
            values = [value for value, _ in some]
            is_one_of_two = len(collectives) == 1 and self._strategy.num_replicas_in_sync == 2
            if not is_one_of_two or collectives[0].in_packs or not _are_few_numbers(values):
                return batch_reduce_to(op, some, options)
            with tf.device(self._strategy.extended.worker_devices[0]):
                first, second = tf.split(collectives[0].gather(_packed(values), options), 2)
                return _unpacked(first + second, values)

        sums = iter(_sum_by_dtype(dense, lambda pair: self._dtype(pair[0]), reduce))
        found = []
        for first, is_one in zip(firsts, by_rows, strict=True):
            total = next(rows) if is_one else next(sums)
            of_whole = isinstance(first, tf.IndexedSlices) and not is_one
            found.append(self._each(functools.partial(_as_before, value=first), total) if of_whole else total)
        return found

    def _dtype(self, value: Any) -> tf.DType:
        return self._strategy.experimental_local_results(value)[0].dtype

    def _sum_rows(self, collectives: Sequence[cluster.Collectives], options: Any, values: Sequence[Any]) -> list[Any]:
        """Return IndexedSlices of one dtype, each of all local replicas, summed over the replicas of all workers."""
        of_replicas = zip(*(self._strategy.experimental_local_results(value) for value in values), strict=True)
        sums = []
        for device, own, replica in zip(self._strategy.extended.worker_devices, of_replicas, collectives, strict=True):
            with tf.device(device):
                sums.append(_gathered_rows(own, self._strategy.num_replicas_in_sync, replica, options))
        return [self._per_replica(one) if len(one) > 1 else one[0] for one in zip(*sums, strict=True)]

    def _each(self, function: Callable[[Any], Any], value: Any) -> Any:
        """Return `value` with `function` applied to the value of each local replica."""
        parts = []
        for local in self._strategy.experimental_local_results(value):
            with tf.device(local.device):
                parts.append(function(local))
        return self._per_replica(parts) if len(parts) > 1 else parts[0]

    def all_reduce(self, grads_and_vars: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Sum (gradient, variable) pairs over replicas, and their rows; optimizers of Keras 3 and tf_keras call it."""
        if self._as_is:
            return grads_and_vars
        pairs = grads_and_vars if self._is_one else self._weighted_gradients(grads_and_vars)

        def is_total(gradient: Any) -> bool:
            return gradient is None or self._is_one or self._is_of_all(gradient)

        def reduce(differing: list[tuple[Any, Any]]) -> list[Any]:
            return all_reduce([gradient for gradient, _ in differing])

        reduced = _reduced_in_order(pairs, is_total, reduce)
        variables = [variable for _, variable in pairs]
        return list(zip(map(without_duplicates, reduced), variables, strict=True))

    def _weighted_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        if self._as_is or tf.distribute.in_cross_replica_context():
            return pairs
        replica = local_replica()

        def weighted(gradient: Any) -> Any:
            if gradient is None or self._is_of_all(gradient):
                return gradient
            return self._weights.of_examples(scale(gradient, self._weights.share(replica, gradient.dtype)), replica)

        return [(weighted(gradient), variable) for gradient, variable in pairs]

    def _is_of_all(self, gradient: Any) -> bool:
        """Report whether a replica's gradient is that of the global batch already."""
        if self._values is None or not self._has_global_gradients:
            return False
        return self._values.kind(gradient) is Kind.SAME

    def _weighted(self, op: Any, value: Any) -> tf.distribute.DistributedValues:
        """Return values whose SUM over replicas is the weighted mean (op MEAN), or the sum without placeholders (op
        SUM).
        """
        replicas = range(self._weights.counts.shape[0])
        values = self._strategy.experimental_local_results(value)
        if len(values) == 1:
            values = values * len(replicas)
        weight = self._weights.presence if op == _SUM else self._weights.share
        weighted = []
        for replica, local in zip(replicas, values, strict=True):
            with tf.device(local.device):
                weighted.append(scale(local, weight(replica, local.dtype)))
        return self._per_replica(weighted)

    def _per_replica(self, values: Sequence[Any]) -> tf.distribute.DistributedValues:
        """Return one value per local replica in the form that the strategy reduces."""
        # Replicas are numbered over all workers, which have the same number of replicas each.
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group % len(values)]
        )
