"""Make gradients the mean over the global batch, for every optimizer.

TensorFlow sums gradients over replicas or takes their mean, depending on the optimizer's family and on the call. Here
each replica's gradient is first weighted by its share of the global batch, and then summed. So batches of different
sizes and replicas without examples are handled correctly, and every family gets the same gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
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

_MESSAGE_SIZES = [(4 + step % 4) << (4 + step // 4) for step in range(116)]
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
        """Return the factor, a scalar of `dtype`, by which the gradient that is being computed will be multiplied
        later.

        It is the replica's share if model_fn computes the gradient. It is 1 if the runner does (`optimizer=`), because
        the loss has been multiplied by the share already.
        """
        if is_computed_by_model_fn():
            return self.share(replica, dtype)
        return tf.ones([], dtype)

    def presence(self, replica: int, dtype: tf.DType) -> tf.Tensor:
        """Return a scalar of `dtype`: 1 if the replica has an example, 0 if it has a placeholder."""
        return tf.cast(self.counts[replica] > 0, dtype)

    def without_placeholder_rows(self, gradient: Any, replica: int) -> Any:
        """Return a replica's gradient; without rows, if it is sparse and the replica has a placeholder example: rows
        that only such an example looked up must not be updated.
        """
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
    if not all(isinstance(value, tf.Tensor) and value.shape.is_fully_defined() for value in values):
        return False
    num_bytes = sum(value.shape.num_elements() * value.dtype.size for value in values)
    return values[0].dtype in (tf.float32, tf.float64) and 0 < num_bytes <= _GATHERED_BYTES


def _pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the values of `tensors`, which have one dtype, as one vector."""
    vectors = []
    for tensor in tensors:
        if tensor.shape.rank != 1:
            tensor = tf.reshape(tensor, [-1])
        vectors.append(tensor)
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)


def _unpack(values: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors of the shapes of `like`, cut from a vector that `_pack` returned."""
    parts = [values]
    if len(like) > 1:
        parts = tf.split(values, [tensor.shape.num_elements() for tensor in like])
    unpacked = []
    for part, tensor in zip(parts, like, strict=True):
        if tensor.shape.rank != 1:
            part = tf.reshape(part, tensor.shape)
        unpacked.append(part)
    return unpacked


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    """Report whether some replicas of `strategy` are in other processes."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return bool(strategy.num_replicas_in_sync > len(strategy.extended.worker_devices))


def _dense_with_counts(value: Any) -> Any:
    """Return `value` in a form that a collective inside a loop can sum: IndexedSlices become dense tensors.

    A collective keeps the shape that it had in the loop's first step (TensorFlow 2.21), but the number of rows of
    IndexedSlices differs between steps. The last column of the dense tensor counts how often each row was looked up.
    The sum of these counts over the replicas tells a row that was looked up, whose gradient may be 0, from one that was
    not: only the former is updated.
    """
    if not isinstance(value, tf.IndexedSlices):
        return value
    width = value.values.shape[1:].num_elements()
    rows = tf.reshape(value.values, [-1, width])
    counted = tf.pad(rows, [[0, 0], [0, 1]], constant_values=1)
    return tf.math.unsorted_segment_sum(counted, value.indices, value.dense_shape[0])


def _looked_up_rows(total: Any, value: Any) -> Any:
    """Return the gradient of all replicas, with the rows that any of them looked up.

    Args:
      total: the sum over the replicas of what `_dense_with_counts` returned.
      value: the gradient of one replica; if it is dense, `total` is the gradient.
    """
    if not isinstance(value, tf.IndexedSlices):
        return total
    counts = total[:, -1]
    touched = tf.where(counts > 0)[:, 0]
    rows = tf.gather(total, touched)[:, :-1]
    values = tf.reshape(rows, [-1, *value.values.shape[1:]])
    return tf.IndexedSlices(values, tf.cast(touched, value.indices.dtype), value.dense_shape)


def _travels_by_rows(value: Any) -> bool:
    """Report whether the rows of a sparse gradient travel instead of the whole: if that is too large to be sent whole.

    The answer must be the same on all workers, so it depends on the variable alone: the numbers of ids may differ.
    """
    if not isinstance(value, tf.IndexedSlices):
        return False
    size = value.shape.num_elements()
    return size is None or size * value.dtype.size > _GATHERED_BYTES


def _add_gathered_rows(
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
    widths = [_row_width(value) for value in own]
    own_counts = tf.stack([tf.size(value.indices, tf.int64) for value in own])
    counts = replica.gather(own_counts, options)
    # Where in a replica's message the rows of each gradient end, `[replicas, gradients]`.
    ends = tf.cumsum(tf.reshape(counts, [num_replicas, -1]) * tf.constant(widths, tf.int64), 1)
    size_number = tf.searchsorted(tf.constant(_MESSAGE_SIZES, tf.int64), tf.reduce_max(ends)[None])[0]
    size = tf.gather(tf.constant(_MESSAGE_SIZES, tf.int64), size_number)

    def by_rows() -> list[tuple[tf.Tensor, tf.Tensor]]:
        vector = tf.concat([_rows_to_vector(value) for value in own], 0)
        padded = tf.pad(vector, [[0, size - tf.size(vector, tf.int64)]])
        messages = tf.reshape(replica.gather(padded, options, size_number), [num_replicas, -1])
        begins = tf.pad(ends, [[0, 0], [1, 0]])
        sums = []
        for place, value in enumerate(own):
            parts = [messages[index, begins[index, place] : ends[index, place]] for index in range(num_replicas)]
            of_all = _rows_from_vector(tf.concat(parts, 0), value)
            total = without_duplicates(of_all)
            sums.append((total.values, total.indices))
        return sums

    def by_whole_tables() -> list[tuple[tf.Tensor, tf.Tensor]]:
        sums = []
        for value in own:
            dense = replica.all_reduce(_dense_with_counts(value), None, options)
            total = _looked_up_rows(dense, value)
            sums.append((total.values, total.indices))
        return sums

    # In a ring, a replica sends its message N - 1 times, and 2 (N - 1) / N times a tensor that is summed. All replicas
    # know the same counts, so they decide alike. Two replicas never send more than 1.25 times the tables, so rows are
    # always right there; so they are where the number of rows of a table is not known before a step.
    tables = [value.shape.num_elements() for value in own]
    if num_replicas > 2 and None not in tables:
        sums = tf.cond(size * num_replicas > 2 * sum(tables), by_whole_tables, by_rows)
    else:
        sums = by_rows()
    return [tf.IndexedSlices(*total, value.dense_shape) for total, value in zip(sums, own, strict=True)]


def _numbers_per_index(dtype: tf.DType) -> int:
    """Return how many numbers of `dtype`, float32 or float64, have the bits of an index, which is an int64."""
    return int(tf.int64.size // dtype.size)


def _row_width(gradient: tf.IndexedSlices) -> int:
    """Return how many numbers a row takes in a message: its index travels as bits in front of its values."""
    return _numbers_per_index(gradient.dtype) + int(gradient.values.shape[1:].num_elements())


def _rows_to_vector(gradient: tf.IndexedSlices) -> tf.Tensor:
    """Return the rows one after the other, as they travel."""
    indices = tf.bitcast(tf.cast(gradient.indices, tf.int64), gradient.dtype)
    indices = tf.reshape(indices, [-1, _numbers_per_index(gradient.dtype)])
    values = tf.reshape(gradient.values, [-1, gradient.values.shape[1:].num_elements()])
    return tf.reshape(tf.concat([indices, values], 1), [-1])


def _rows_from_vector(vector: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the rows in a vector of what `_rows_to_vector` has returned for gradients of the variable of `like`."""
    per_index = _numbers_per_index(like.dtype)
    rows = tf.reshape(vector, [-1, _row_width(like)])
    # tf.bitcast joins numbers along a last axis; one number of 64 bits has no such axis.
    of_index = [-1, per_index] if per_index > 1 else [-1]
    indices = tf.bitcast(tf.reshape(rows[:, :per_index], of_index), tf.int64)
    indices = tf.cast(indices, like.indices.dtype)
    values = tf.reshape(rows[:, per_index:], [-1, *like.values.shape[1:]])
    return tf.IndexedSlices(values, indices, like.dense_shape)


def _set_at(values: list[Any], places: Iterable[int], new: Iterable[Any]) -> None:
    """Set the values at `places`, in their order, to `new`."""
    for place, value in zip(places, new, strict=True):
        values[place] = value


def _reduce_by_dtype(
    values: Sequence[Any], dtype_of: Callable[[Any], tf.DType], reduce: Callable[[list[Any]], Sequence[Any]]
) -> list[Any]:
    """Reduce the values of each dtype together, because a collective packs its arguments into one tensor."""
    places_of: dict[tf.DType, list[int]] = {}
    for place, value in enumerate(values):
        places_of.setdefault(dtype_of(value), []).append(place)
    reduced: list[Any] = [None] * len(values)
    for places in places_of.values():
        _set_at(reduced, places, reduce([values[place] for place in places]))
    return reduced


def _reduce_in_order(
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

    def name_at(place: int) -> str:
        _, variable = pairs[place]
        name: str = getattr(variable, "path", variable.name)
        return name

    reduced = [gradient for gradient, _ in pairs]
    places = [place for place, gradient in enumerate(reduced) if not is_total(gradient)]
    places.sort(key=name_at)
    if places:
        _set_at(reduced, places, reduce([pairs[place] for place in places]))
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
    Inside `without_weights` nothing is weighted, and optimizers get global gradients (`optimizer=`).

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
        self._is_only_replica = discovers or weights.counts.shape[0] == strategy.num_replicas_in_sync == 1
        # Shared by the replica threads, which pass every merge_call, and so enter and leave, together.
        self._is_without_weights = False

    @contextlib.contextmanager
    def without_weights(self) -> Iterator[None]:
        """Reduce without weights inside this context, whose values are weighted already. What optimizers apply inside
        it is the global gradient, which is not summed again.
        """
        self._is_without_weights = True
        try:
            yield
        finally:
            self._is_without_weights = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[Reductions]:
        """Weight the reductions of the strategy inside this context, as the class says.

        This replaces methods of the strategy's `extended`, through which TensorFlow and Keras reduce values of
        replicas, and `v1.train.Optimizer.apply_gradients`.
        """
        if self._is_only_replica:
            yield self
            return
        extended = self._strategy.extended
        num_local_replicas = self._weights.counts.shape[0]
        per_replica = type(self._per_replica([0] * num_local_replicas))
        batch_reduce_to = self._in_loops(extended.batch_reduce_to)
        reduce_to = extended.reduce_to
        apply_gradients = v1.train.Optimizer.apply_gradients

        # Each of `pairs` is (value of the replicas, destination); the destination of a gradient is its variable.
        def sum_of_gradients(op: Any, pairs: Sequence[tuple[Any, Any]], options: Any) -> list[Any]:
            def reduce(differing: list[tuple[Any, Any]]) -> list[Any]:
                return list(batch_reduce_to(op, differing, options))

            return _reduce_in_order(pairs, self._is_same_on_all, reduce)

        def weighted_batch_reduce_to(op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None) -> Any:
            are_gradients = all(isinstance(destination, tf.Variable) for _, destination in pairs)
            if are_gradients and self._is_without_weights:  # global gradients already
                return [value for value, _ in pairs]
            if are_gradients:  # weighted in replica context already, or global gradients, which stay as they are
                return self._note_as_same(sum_of_gradients(op, pairs, options))
            if self._is_without_weights:
                return self._note_as_same(batch_reduce_to(op, pairs, options))
            weighted = [(self._weigh(op, value), destination) for value, destination in pairs]
            return self._note_as_same(batch_reduce_to(_SUM, weighted, options))

        def weighted_reduce_to(op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
            # Where a process has one replica, its value is a tensor, and not an object that holds values of replicas.
            is_of_only_one = num_local_replicas == 1 and isinstance(value, tf.Tensor)
            is_of_replicas = is_of_only_one or isinstance(value, per_replica)
            if self._is_without_weights or not is_of_replicas:
                return self._note_as_same(reduce_to(op, value, destinations, options))
            return self._note_as_same(reduce_to(_SUM, self._weigh(op, value), destinations, options))

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
        if self._is_only_replica:
            return list(values)
        with self.without_weights():
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

    def _is_same_on_all(self, value: Any) -> bool:
        """Report whether a value is known to be the same on all replicas."""
        return all(self._is_global_gradient(local) for local in self._strategy.experimental_local_results(value))

    def _note_as_same(self, reduced: Any) -> Any:
        """Note that the result of a reduction is the same on all replicas, and return it."""
        if self._values is not None:
            for value in tf.nest.flatten([reduced]):
                self._values.are_same(self._strategy.experimental_local_results(value))
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
        is_of_user = chosen is not None and not type(chosen).__module__.startswith("tensorflow.")
        if is_of_user:
            return batch_reduce_to
        are_cpus = all("CPU" in device.upper() for device in self._strategy.extended.worker_devices)
        # HierarchicalCopyAllReduce was configured explicitly, so it is used. The choice cannot be nccl: it runs on no
        # CPU.
        is_copy = isinstance(chosen, tf.distribute.HierarchicalCopyAllReduce)
        all_on_one_device = are_cpus and not is_copy

        def reduce(op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None) -> list[Any]:
            on_one = []
            by_strategy = []
            for place, (value, _) in enumerate(pairs):
                if all_on_one_device or isinstance(self._first_local(value), tf.IndexedSlices):
                    on_one.append(place)
                else:
                    by_strategy.append(place)
            reduced: list[Any] = [None] * len(pairs)
            if on_one:
                _set_at(reduced, on_one, on_one_device.batch_reduce(op, [pairs[place] for place in on_one]))
            if by_strategy:
                _set_at(reduced, by_strategy, batch_reduce_to(op, [pairs[place] for place in by_strategy], options))
            return reduced

        return reduce

    def _reduce_between_processes(
        self, batch_reduce_to: Callable[..., Any], op: Any, pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """Return the values of (value, destination) pairs, reduced over the replicas of all workers.

        Large sparse gradients are sent by rows, and all else as dense tensors, those of one dtype together.

        Args:
          batch_reduce_to: the strategy's own method, which works on dense tensors.
          op: SUM or MEAN.
          pairs: as in `batch_reduce_to`.
          options: CommunicationOptions.
        """
        firsts = [self._first_local(value) for value, _ in pairs]
        # One object for each local replica; without any, only the strategy's own method is used.
        collectives = cluster.collectives(self._strategy) if op == _SUM else []
        by_rows = []
        whole = []
        for place, first in enumerate(firsts):
            if collectives and _travels_by_rows(first):
                by_rows.append(place)
            else:
                whole.append(place)
        reduced: list[Any] = [None] * len(pairs)
        sum_rows = functools.partial(self._sum_rows, collectives, options)
        sparse = [pairs[place][0] for place in by_rows]
        _set_at(reduced, by_rows, _reduce_by_dtype(sparse, self._dtype, sum_rows))
        dense = []
        for place in whole:
            value, destination = pairs[place]
            if isinstance(firsts[place], tf.IndexedSlices):
                value = self._map_locals(_dense_with_counts, value)
            dense.append((value, destination))

        def reduce(of_dtype: list[tuple[Any, Any]]) -> Sequence[Any]:
            values = [value for value, _ in of_dtype]
            is_one_of_two = len(collectives) == 1 and self._strategy.num_replicas_in_sync == 2
            # See _GATHERED_BYTES.
            if not is_one_of_two or collectives[0].in_packs or not _are_few_numbers(values):
                return batch_reduce_to(op, of_dtype, options)
            with tf.device(self._strategy.extended.worker_devices[0]):
                gathered = collectives[0].gather(_pack(values), options)
                first, second = tf.split(gathered, 2)
                return _unpack(first + second, values)

        totals = _reduce_by_dtype(dense, lambda pair: self._dtype(pair[0]), reduce)
        for place, total in zip(whole, totals, strict=True):
            first = firsts[place]
            if isinstance(first, tf.IndexedSlices):
                total = self._map_locals(functools.partial(_looked_up_rows, value=first), total)
            reduced[place] = total
        return reduced

    def _first_local(self, value: Any) -> Any:
        """Return the value of the first local replica."""
        return self._strategy.experimental_local_results(value)[0]

    def _dtype(self, value: Any) -> tf.DType:
        return self._first_local(value).dtype

    def _sum_rows(self, collectives: Sequence[cluster.Collectives], options: Any, values: Sequence[Any]) -> list[Any]:
        """Return IndexedSlices of one dtype, each of all local replicas, summed over the replicas of all workers."""
        devices = self._strategy.extended.worker_devices
        locals_of_values = [self._strategy.experimental_local_results(value) for value in values]
        of_replicas = zip(*locals_of_values, strict=True)
        sums = []
        for device, own, replica in zip(devices, of_replicas, collectives, strict=True):
            with tf.device(device):
                sums.append(_add_gathered_rows(own, self._strategy.num_replicas_in_sync, replica, options))
        return [self._join(of_value) for of_value in zip(*sums, strict=True)]

    def _map_locals(self, function: Callable[[Any], Any], value: Any) -> Any:
        """Return `value` with `function` applied to the value of each local replica."""
        parts = []
        for local in self._strategy.experimental_local_results(value):
            with tf.device(local.device):
                parts.append(function(local))
        return self._join(parts)

    def _join(self, values: Sequence[Any]) -> Any:
        """Return the values of the local replicas as the strategy has them; that of an only one as it is."""
        return self._per_replica(values) if len(values) > 1 else values[0]

    def all_reduce(self, grads_and_vars: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) pairs whose gradients are summed over the replicas, and have each row once.

        Optimizers of Keras 3 and tf_keras that model_fn calls get their gradients from here. Inside `without_weights`
        the pairs stay as they are.
        """
        if self._is_without_weights:
            return grads_and_vars
        pairs = grads_and_vars if self._is_only_replica else self._weighted_gradients(grads_and_vars)

        def is_total(gradient: Any) -> bool:
            return gradient is None or self._is_only_replica or self._is_global_gradient(gradient)

        def reduce(differing: list[tuple[Any, Any]]) -> list[Any]:
            return all_reduce([gradient for gradient, _ in differing])

        reduced = _reduce_in_order(pairs, is_total, reduce)
        totals = [without_duplicates(gradient) for gradient in reduced]
        variables = [variable for _, variable in pairs]
        return list(zip(totals, variables, strict=True))

    def _weighted_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) pairs of this replica, multiplied by its share of the global batch."""
        pairs = list(grads_and_vars)
        if self._is_without_weights or tf.distribute.in_cross_replica_context():
            return pairs
        replica = local_replica()

        def weighted(gradient: Any) -> Any:
            if gradient is None or self._is_global_gradient(gradient):
                return gradient
            share = self._weights.share(replica, gradient.dtype)
            return self._weights.without_placeholder_rows(scale(gradient, share), replica)

        return [(weighted(gradient), variable) for gradient, variable in pairs]

    def _is_global_gradient(self, gradient: Any) -> bool:
        """Report whether a replica's gradient is that of the global batch already."""
        if self._values is None or not self._has_global_gradients:
            return False
        return self._values.kind(gradient) is Kind.SAME

    def _weigh(self, op: Any, value: Any) -> tf.distribute.DistributedValues:
        """Return values whose SUM over replicas is the weighted mean (op MEAN), or the sum without placeholders (op
        SUM).
        """
        replicas = range(self._weights.counts.shape[0])
        values = self._strategy.experimental_local_results(value)
        if len(values) == 1:  # one value that all local replicas have
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
