"""A step in two programs of one trace: gradients, then the update.

So the gradients of an update can be taken part by part, one part after the other, with the memory of one part
(`train.gradient_accumulation`), and an update can be left out (`train.precision=mixed_float16`) without a branch in
the model's own graph, where replicas could not meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.agreement import Agreement
from runner.gradients import scale
from runner.inputs import Share
from runner.model_fn import EstimatorSpec
from runner.precision import LossScale
from runner.run_config import RunConfig
from runner.sharding import part_of
from runner.traces import Replica
from runner.updates import Pair, apply_update, gradients_of, loss_sum, sum_over_replicas

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where the trace of one replica is cut. Tensors of the traced graph.

    Attributes:
      sums: what a part adds up to: the loss, its denominator, then the gradients. Those of IndexedSlices are two
        tensors, which are not added but put one after the other.
      fed: placeholders like `sums`, from which the update is made.
      is_sparse: of each of `sums`: whether it is one of those two.
      scale: placeholder of the loss scale; None without one.
      loss: of the step: this replica's part.
      first_of_update: number of the graph's first operation of the update; of the first replica alone.
    """

    sums: Sequence[tf.Tensor]
    fed: Sequence[tf.Tensor]
    is_sparse: Sequence[bool]
    scale: tf.Tensor | None
    loss: tf.Tensor
    first_of_update: int | None


def trace_cut(
    tape: tf.GradientTape, spec: EstimatorSpec, replica: Replica, num_replicas: int, config: RunConfig
) -> Cut:
    """Traces gradients and update of one replica, with placeholders between."""
    with tape:
        total, weight = loss_sum(spec, replica)
        loss_scale = v1.placeholder(tf.float32, [], "loss_scale") if config.precision == "mixed_float16" else None
        target = total if loss_scale is None else total * tf.cast(loss_scale, total.dtype)
    pairs = gradients_of(tape, target, replica)
    sums, is_sparse = [total, weight], [False, False]
    for one in sums:
        one.set_shape([])  # the sum of a tensor of unknown rank does not know that it is a scalar
    for gradient, variable, _ in pairs:
        sparse = isinstance(gradient, tf.IndexedSlices)
        if not sparse:
            gradient.set_shape(variable.shape)
        sums += [gradient.values, gradient.indices] if sparse else [gradient]
        is_sparse += [True, True] if sparse else [False]
    fed = [v1.placeholder(one.dtype, _shape(one, sparse)) for one, sparse in zip(sums, is_sparse, strict=True)]
    first: list[int] = []
    # All replicas meet here: what is in the graph by now are the gradients, what comes is the update.
    tf.distribute.get_replica_context().merge_call(lambda _: first.append(len(v1.get_default_graph().get_operations())))
    total_weight = sum_over_replicas(replica, fed[1], num_replicas)
    factor = tf.math.divide_no_nan(tf.ones_like(total_weight), total_weight)
    loss = fed[0] * factor
    if loss_scale is not None:
        factor /= tf.cast(loss_scale, factor.dtype)
    loss = apply_update(spec, _scaled(pairs, fed[2:], factor), loss, replica, num_replicas, config)
    return Cut(sums, fed, is_sparse, loss_scale, loss, first[0] if first else None)


def _shape(tensor: tf.Tensor, sparse: bool) -> tf.TensorShape:
    return tf.TensorShape([None]).concatenate(tensor.shape[1:]) if sparse else tensor.shape


def _scaled(pairs: Sequence[Pair], fed: Sequence[tf.Tensor], factor: tf.Tensor) -> list[Pair]:
    """`pairs` with the gradients that are in `fed`."""
    tensors = iter(fed)
    result: list[Pair] = []
    for gradient, variable, owner in pairs:
        new: Any = next(tensors)
        if isinstance(gradient, tf.IndexedSlices):
            indices = next(tensors)
            new = tf.IndexedSlices(new, indices, tf.constant(variable.shape.as_list(), indices.dtype))
        result.append((scale(new, tf.cast(factor, new.dtype)), variable, owner))
    return result


Part = Callable[..., tuple[Sequence[Sequence[tf.Tensor]], Sequence[tf.Tensor]]]
"""(flat inputs, loss scale if any, number of the part) -> (what the part of each replica adds up to, what was fetched
with it)."""


class PartedStep:
    """One step as a function of its shares: the gradients part by part, then the update.

    The last part is the one whose summaries and fetches are returned; parts without an example on any replica are left
    out.

    Args:
      part, last: programs of the gradients, without and with what was fetched.
      update: (sums of all replicas, loss scale if any) -> the loss of each replica.
      flat: makes the flat inputs of a program of the shares of one part.
      context: to be in when variables are assigned.
      agreement: of the workers, whose parts and updates go together.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        part: Part,
        last: Part,
        update: Callable[..., Sequence[tf.Tensor]],
        flat: Callable[[Sequence[Share], tf.Tensor], list[tf.Tensor]],
        *,
        num_parts: int,
        loss_scale: LossScale | None,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        agreement: Agreement,
    ) -> None:
        self._cuts, self._part, self._last, self._update, self._flat = cuts, part, last, update, flat
        self._num_parts, self._loss_scale, self._context = num_parts, loss_scale, context
        self._agreement = agreement
        self._is_sparse = [one for cut in cuts for one in cut.is_sparse]
        self._width = len(cuts[0].sums)

    def __call__(self, shares: Sequence[Share], global_count: tf.Tensor) -> list[tf.Tensor]:
        """[the loss, what was fetched]. In graph."""
        scales = [] if self._loss_scale is None else [self._loss_scale.value()]
        if self._num_parts == 1:
            sums, extra = self._last(*self._flat(shares, global_count), *scales, tf.constant(0, tf.int64))
            totals = [tensor for each in sums for tensor in each]
        else:
            totals, extra = self._accumulated(shares, scales)
        if self._loss_scale is None:
            losses = self._update(*totals)
            return [tf.add_n(losses), *extra]
        gradients = [one for number, one in enumerate(totals) if number % self._width > 1 and one.dtype.is_floating]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(one)) for one in gradients])
        not_finite = self._agreement.sum_in_graph(tf.cast(~finite, tf.int64))
        loss = tf.cond(not_finite == 0, lambda: self._updated(totals, scales), lambda: self._skipped(totals))
        return [loss, *extra]

    def _accumulated(self, shares: Sequence[Share], scales: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        # Rows are divided with the longer parts first, so a part without an example is one of the last.
        num_parts = tf.constant(self._num_parts, tf.int64)
        if self._agreement.num_workers == 1:  # else others may have more
            num_parts = tf.minimum(num_parts, tf.reduce_max(tf.stack([share.count for share in shares])))

        def run(program: Part, index: tf.Tensor, before: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
            parts = [part_of(share, index, self._num_parts) for share in shares]
            count = self._agreement.sum_in_graph(tf.add_n([part.count for part in parts]))
            sums, extra = program(*self._flat(parts, tf.maximum(count, 1)), *scales, index)
            return self._added(before, [tensor for each in sums for tensor in each]), extra

        zeros = [
            tf.zeros([0, *tensor.shape[1:]] if sparse else tensor.shape, tensor.dtype)
            for tensor, sparse in zip((one for cut in self._cuts for one in cut.fed), self._is_sparse, strict=True)
        ]
        shapes = [tf.TensorShape([])] + [one.shape for cut in self._cuts for one in cut.fed]
        index, *sums = tf.while_loop(
            lambda index, *_: index < num_parts - 1,
            lambda index, *sums: (index + 1, *run(self._part, index, sums)[0]),
            [tf.constant(0, tf.int64), *zeros],
            shape_invariants=shapes,
            parallel_iterations=1,  # one part after the other: memory for one is the point
        )
        with tf.control_dependencies(sums):
            return run(self._last, tf.identity(index), sums)

    def _added(self, before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        after = []
        for one, other, sparse in zip(before, sums, self._is_sparse, strict=True):
            after.append(tf.concat([one, other], 0) if sparse else one + other)
            if not sparse:
                after[-1].set_shape(one.shape)  # pruning loses what the trace was told of it
        return after

    def _updated(self, totals: Sequence[tf.Tensor], scales: Sequence[tf.Tensor]) -> tf.Tensor:
        assert self._loss_scale is not None
        losses = self._update(*totals, *scales)
        with self._context():
            self._loss_scale.grow()
        return tf.add_n(losses)

    def _skipped(self, totals: Sequence[tf.Tensor]) -> tf.Tensor:
        assert self._loss_scale is not None
        with self._context():
            self._loss_scale.shrink()
        parts = tf.stack([tf.add_n(totals[:: self._width]), tf.add_n(totals[1 :: self._width])])
        total, weight = tf.unstack(self._agreement.sum_in_graph(parts))
        return tf.math.divide_no_nan(total, weight)
