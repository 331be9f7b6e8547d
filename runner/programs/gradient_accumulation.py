"""A training step as two programs made from one trace: one computes gradients, the other applies the update.

So the gradients of an update can be computed micro-batch by micro-batch, with the memory of one micro-batch
(`train.gradient_accumulation`). An update can also be skipped (`train.precision=mixed_float16`) without a branch in the
model's own graph; replicas could not communicate inside such a branch.

The error of a step that runs out of memory says which number of micro-batches may help.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.config.strategy_validation import next_accumulation
from runner.data.inputs import comes_from_input
from runner.data.replica_batches import ReplicaBatch, micro_batch_counts, micro_batch_of, num_rows
from runner.data.train_input import TrainInput
from runner.distribute.collectives import Collectives
from runner.distribute.reductions import scale
from runner.model_fn import EstimatorSpec
from runner.programs.mixed_precision import LossScale
from runner.programs.optimizer_step import Pair, Update, apply_update, gradients_of, loss_sum, sum_over_replicas
from runner.programs.program import step_inputs
from runner.run_config import RunConfig
from runner.system.exit_codes import CAN_SPLIT
from runner.tracing.trace_step import Replica

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class GradientCut:
    """The two programs of one replica's step, and the tensors that pass between them; all belong to the traced graph.

    Attributes:
      sums: results of the first program, which are added up over micro-batches: the loss, its denominator, then the
        gradients. The values and indices of IndexedSlices are concatenated instead of added.
      fed: placeholders of the second program, one for each of `sums`, from which the update is computed.
      is_sparse: for each of `sums`, whether it belongs to IndexedSlices.
      scale: placeholder of the loss scale, a scalar; None: no loss scale.
      update: the update.
      first_of_update: position, in the graph's list of operations, of the first operation of the update; for the first
        replica only.
    """

    sums: Sequence[tf.Tensor]
    fed: Sequence[tf.Tensor]
    is_sparse: Sequence[bool]
    scale: tf.Tensor | None
    update: Update
    first_of_update: int | None


def trace_cut(tape: tf.GradientTape, spec: EstimatorSpec, replica: Replica, config: RunConfig) -> GradientCut:
    """Trace gradients and update of one replica, with placeholders in between."""
    # The tape was left after model_fn; entered again, it goes on recording.
    with tape:
        loss_sum_of_replica, denominator = loss_sum(spec, replica)
        loss_scale: tf.Tensor | None = None
        scaled_loss_sum = loss_sum_of_replica
        if config.precision == "mixed_float16":
            loss_scale = v1.placeholder(tf.float32, [], "loss_scale")
            scaled_loss_sum = loss_sum_of_replica * tf.cast(loss_scale, loss_sum_of_replica.dtype)
    # With a loss scale, the optimizer's own `loss_scale_factor` is not applied as well.
    optimizer = spec.optimizer if loss_scale is None else None
    pairs = gradients_of(tape, scaled_loss_sum, optimizer, replica)
    sums = [loss_sum_of_replica, denominator]
    is_sparse = [False, False]
    for gradient, variable, _ in pairs:
        if isinstance(gradient, tf.IndexedSlices):
            sums += [gradient.values, gradient.indices]
            is_sparse += [True, True]
        else:
            gradient.set_shape(variable.shape)
            sums.append(gradient)
            is_sparse.append(False)
    fed: list[tf.Tensor] = []
    for tensor, sparse in zip(sums, is_sparse, strict=True):
        fed.append(v1.placeholder(tensor.dtype, _shape_of_sum(tensor, sparse)))
    # A placeholder looks like the same value on all replicas, and these are not.
    replica.reductions.are_own(fed)
    firsts: list[int] = []

    def mark_update(_: tf.distribute.Strategy) -> None:
        firsts.append(len(v1.get_default_graph().get_operations()))

    # merge_call synchronizes the replicas: operations made so far compute gradients, later ones the update. It calls
    # only the function of the first replica, so `firsts` of the others stays empty.
    tf.distribute.get_replica_context().merge_call(mark_update)
    # The first two of `fed` are the loss and its denominator, as in `sums`.
    total_weight = sum_over_replicas(replica, fed[1])
    factor = tf.math.divide_no_nan(tf.ones_like(total_weight), total_weight)
    loss = fed[0] * factor
    if loss_scale is not None:
        factor /= tf.cast(loss_scale, factor.dtype)
    update = apply_update(spec, _scale_fed(pairs, fed[2:], factor), loss, replica, config)
    first_of_update = firsts[0] if firsts else None
    return GradientCut(sums, fed, is_sparse, loss_scale, update, first_of_update)


def _shape_of_sum(tensor: tf.Tensor, sparse: bool) -> tf.TensorShape:
    """Return the static shape of the sum of such tensors; those of IndexedSlices are concatenated."""
    if not sparse:
        return tensor.shape
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def _scale_fed(pairs: Sequence[Pair], fed: Sequence[tf.Tensor], factor: tf.Tensor) -> list[Pair]:
    """Return `pairs` with each gradient replaced by the placeholder in `fed` for it, multiplied by `factor`."""
    tensors = iter(fed)
    scaled: list[Pair] = []
    for gradient, variable, owner in pairs:
        new: Any = next(tensors)
        if isinstance(gradient, tf.IndexedSlices):
            indices = next(tensors)
            new = tf.IndexedSlices(new, indices, tf.constant(variable.shape.as_list(), indices.dtype))
        scaled.append((scale(new, tf.cast(factor, new.dtype)), variable, owner))
    return scaled


MicroBatchProgram = Callable[..., tuple[Sequence[Sequence[tf.Tensor]], Sequence[tf.Tensor]]]
"""(flat inputs, then loss scales and sums of `denominators`, if any) -> (sums of each replica, fetches)."""


@dataclasses.dataclass(frozen=True)
class AccumulatedStep:
    """A step that computes gradients micro-batch by micro-batch and then updates the model once.

    Summaries and fetches are those of the last micro-batch. A micro-batch that has no examples on any replica is
    skipped.

    Attributes:
      micro_batch, last: programs that compute gradients: `last` also computes fetches, `micro_batch` does not.
      update: (sums of all replicas, loss scale of each replica if any) -> (loss of each replica, values of the update).
      denominators: (flat inputs) -> float64 scalars of each replica. Losses are divided by the sums of these scalars
        over all replicas and micro-batches of the update. None: no loss is.
      value_types: dtypes of the values of the update, which are scalars.
      collectives: communication between the workers, which run micro-batches and updates in lockstep.
    """

    cuts: Sequence[GradientCut]
    micro_batch: MicroBatchProgram
    last: MicroBatchProgram
    update: Callable[..., tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]]
    denominators: Callable[..., Sequence[Sequence[tf.Tensor]]] | None
    value_types: Sequence[tf.DType]
    num_micro_batches: int
    loss_scale: LossScale | None
    collectives: Collectives

    def take(
        self, batches: Sequence[ReplicaBatch], global_count: tf.Tensor, values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return [loss, fetches, values of the update], in the graph."""
        assert not values  # see support_checks.check_feeds
        scales: list[tf.Tensor] = []
        if self.loss_scale is not None:
            scales = [self.loss_scale.value()] * len(self.cuts)
        fed = [*scales, *self._sum_denominators(batches, global_count) * len(self.cuts)]
        if self.num_micro_batches == 1:
            sums_of_replicas, extra = self.last(*step_inputs(batches, global_count), *fed)
            totals = _flatten(sums_of_replicas)
        else:
            totals, extra = self._accumulate(batches, fed)
        if self.loss_scale is None:
            losses, values = self.update(*totals)
            loss = tf.add_n(losses)
        else:
            loss, *values = self._scaled_update(totals, scales)
        return [loss, *extra, *values]

    def _scaled_update(self, totals: Sequence[tf.Tensor], scales: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Update the model unless a gradient is not finite, and adjust the loss scale.

        Returns:
          The loss, then the values of the update; these values are NaN if the update was skipped.
        """
        loss_scale = self.loss_scale
        assert loss_scale is not None
        width = len(self.cuts[0].sums)  # number of tensors of each replica; the first two are its loss and denominator
        are_finite: list[tf.Tensor] = []
        for number, total in enumerate(totals):
            is_gradient = number % width > 1
            if is_gradient and total.dtype.is_floating:  # not the indices of IndexedSlices
                are_finite.append(tf.reduce_all(tf.math.is_finite(total)))
        all_finite = tf.reduce_all(are_finite)
        # Over all workers, because either all of them update or none: they communicate in an update.
        num_not_finite = self.collectives.sum_in_graph(tf.cast(~all_finite, tf.int64))

        def update() -> list[tf.Tensor]:
            losses, values = self.update(*totals, *scales)
            loss_scale.grow()
            return [tf.add_n(losses), *values]

        def skip() -> list[tf.Tensor]:
            loss_scale.shrink()
            own_total = tf.add_n(totals[::width])
            own_weight = tf.add_n(totals[1::width])
            over_workers = self.collectives.sum_in_graph(tf.stack([own_total, own_weight]))
            total, weight = tf.unstack(over_workers)
            nan_values = [tf.constant(math.nan, dtype) for dtype in self.value_types]
            return [tf.math.divide_no_nan(total, weight), *nan_values]

        loss_and_values = tf.cond(num_not_finite == 0, update, skip)
        if isinstance(loss_and_values, list | tuple):
            return list(loss_and_values)
        return [loss_and_values]  # tf.cond unpacks a list of one

    def _sum_denominators(self, batches: Sequence[ReplicaBatch], global_count: tf.Tensor) -> list[tf.Tensor]:
        """Return the sums of `denominators` over all micro-batches, replicas and workers, in the graph."""
        program = self.denominators
        if program is None:
            return []

        def of_micro_batch(index: tf.Tensor) -> tf.Tensor:
            inputs = step_inputs(self._micro_batches(batches, index), global_count, index)
            of_replicas = program(*inputs)
            return tf.add_n([tf.stack(of_replica) for of_replica in of_replicas])

        def add_next(index: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return index + 1, sums + of_micro_batch(index)

        first = tf.constant(0, tf.int64)
        start = [first + 1, of_micro_batch(first)]
        _, sums = tf.while_loop(lambda index, _: index < self.num_micro_batches, add_next, start)
        return tf.unstack(self.collectives.sum_in_graph(sums))

    def _micro_batches(self, batches: Sequence[ReplicaBatch], index: tf.Tensor) -> list[ReplicaBatch]:
        return [micro_batch_of(batch, index, self.num_micro_batches) for batch in batches]

    def _accumulate(self, batches: Sequence[ReplicaBatch], fed: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        """Return (sums over all micro-batches of each replica, fetches of the last micro-batch).

        Args:
          batches: the batches of the replicas.
          fed: what the programs are fed beside their inputs.
        """
        # Larger micro-batches come first, so micro-batches without examples are the last ones.
        num_micro_batches = tf.constant(self.num_micro_batches, tf.int64)
        if self.collectives.num_workers == 1:  # another worker may need more micro-batches than this one
            max_count = tf.reduce_max(tf.stack([batch.count for batch in batches]))
            num_micro_batches = tf.minimum(num_micro_batches, max_count)

        # One collective for all micro-batches, before their loop. Inside of that loop a collective never found its peer
        # if the step itself is in a branch, as it is where the input may end (TensorFlow 2.21): all workers hung.
        own_counts = tf.add_n([micro_batch_counts(batch, self.num_micro_batches) for batch in batches])
        counts = tf.maximum(self.collectives.sum_in_graph(own_counts), 1)

        def run(
            program: MicroBatchProgram, index: tf.Tensor, before: Sequence[tf.Tensor]
        ) -> tuple[list[tf.Tensor], Any]:
            inputs = step_inputs(self._micro_batches(batches, index), counts[index], index)
            sums_of_replicas, extra = program(*inputs, *fed)
            return self._add(before, _flatten(sums_of_replicas)), extra

        def is_not_last(index: tf.Tensor, *sums: tf.Tensor) -> tf.Tensor:
            del sums
            return index < num_micro_batches - 1

        def run_next(index: tf.Tensor, *before: tf.Tensor) -> tuple[tf.Tensor, ...]:
            sums, _ = run(self.micro_batch, index, before)
            return (index + 1, *sums)

        zeros = self._zeros()
        shapes = [tf.TensorShape([])]
        for cut in self.cuts:
            shapes += [placeholder.shape for placeholder in cut.fed]
        index, *sums = tf.while_loop(
            is_not_last,
            run_next,
            [tf.constant(0, tf.int64), *zeros],
            shape_invariants=shapes,
            parallel_iterations=1,  # one micro-batch at a time, so that the memory of one is enough
        )
        # The last program needs nothing of the loop until its sums are added, and would run beside it.
        with tf.control_dependencies(sums):
            return run(self.last, tf.identity(index), sums)

    def _zeros(self) -> list[tf.Tensor]:
        """Return the sums of all replicas before the first micro-batch."""
        zeros: list[tf.Tensor] = []
        for cut in self.cuts:
            for placeholder, sparse in zip(cut.fed, cut.is_sparse, strict=True):
                shape = [0, *placeholder.shape[1:]] if sparse else placeholder.shape
                zeros.append(tf.zeros(shape, placeholder.dtype))
        return zeros

    def _add(self, before: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of all replicas after a micro-batch whose own are `sums`."""
        is_sparse: list[bool] = []
        for cut in self.cuts:
            is_sparse += cut.is_sparse
        after: list[tf.Tensor] = []
        for so_far, more, sparse in zip(before, sums, is_sparse, strict=True):
            if sparse:
                after.append(tf.concat([so_far, more], 0))
                continue
            total = so_far + more
            total.set_shape(so_far.shape)  # pruning loses the static shape
            after.append(total)
        return after


def _flatten(sums_of_replicas: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Return the sums of all replicas as one list."""
    in_a_row: list[tf.Tensor] = []
    for sums in sums_of_replicas:
        in_a_row += sums
    return in_a_row


@contextlib.contextmanager
def explaining_memory(
    config: RunConfig, spec: EstimatorSpec, train_input: TrainInput, examples_before: float
) -> Iterator[None]:
    """Add to the error of a step that runs out of memory inside this context what may help, and mark it with CAN_SPLIT.

    Args:
      config: the RunConfig.
      spec: what model_fn returned.
      train_input: the input of the steps.
      examples_before: mean number of examples of a replica in earlier steps; 0: there were none.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if not comes_from_input(error):  # an input reads whole batches however they are split
            number = _find_larger_accumulation(config, train_input, examples_before)
            _add_remedy(error, config, spec, number)
        raise


def _find_larger_accumulation(config: RunConfig, train_input: TrainInput, examples_before: float) -> int | None:
    """Return a number of micro-batches that are smaller than those of a step which failed; None: there is none."""
    current = config.gradient_accumulation
    batch_size = train_input.pipeline.global_batch_size
    larger = next_accumulation(current, batch_size, config.num_replicas_in_sync)
    if batch_size is not None:
        return larger
    # `next_accumulation` knows no limit then. A batch cannot be split further than into single examples.
    examples = _count_examples_of_next(train_input.iterator) or examples_before
    return larger if current < examples else None


def _count_examples_of_next(iterator: Any) -> int | None:
    """Return how many examples the next element of the input has; None: not known.

    This takes the element from the iterator, which nobody reads any more after the failed step.
    """
    if isinstance(iterator, tf.data.Iterator):  # else workers of parameter servers read the data
        with contextlib.suppress(tf.errors.OpError, StopIteration):
            return int(num_rows(next(iterator)))
    return None


def _add_remedy(error: Any, config: RunConfig, spec: EstimatorSpec, number: int | None) -> None:
    """Add to an error what may help, and mark it with CAN_SPLIT: whether smaller micro-batches may.

    Args:
      error: the ResourceExhaustedError of a step.
      config: the RunConfig.
      spec: what model_fn returned.
      number: a number of smaller micro-batches to try; None: there is none.
    """
    refused = ""
    if spec.optimizer is None:
        refused = "with train_op=. Return EstimatorSpec(optimizer=...)"
    elif config.eager:
        refused = "in eager steps. Set run.eager=false"
    error.is_clear = True  # where in a step the memory ran out says nothing
    setattr(error, CAN_SPLIT, number is not None and not refused)
    what_happened = "A step of training ran out of memory."
    written = f"train.gradient_accumulation={number}, in a script RunConfig(gradient_accumulation={number}),"
    if number is None:
        error.add_note(
            f"{what_happened} With train.gradient_accumulation={config.gradient_accumulation}, a micro-batch has one "
            "example: with more, it would be empty."
        )
    elif refused:
        error.add_note(f"{what_happened} {written} would need less, but does not work {refused}.")
    else:
        error.add_note(
            f"{what_happened} {written} makes the same update, with the memory of a part of the batch; "
            "train.gradient_accumulation=auto finds the number."
        )
