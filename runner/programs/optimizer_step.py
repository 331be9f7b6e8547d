"""Compute the gradients of a step and update the variables by them, for `optimizer=`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.distribute.reductions import all_reduce, scale, without_duplicates
from runner.model_fn import EstimatorSpec
from runner.programs import ema, learning_rate, support_checks
from runner.run_config import RunConfig
from runner.tracing.graph_operations import may_write, operations
from runner.tracing.trace_step import Replica

v1 = tf.compat.v1
_SUM = tf.distribute.ReduceOp.SUM

Pair = tuple[Any, tf.Variable, Any]
"""(gradient, variable, the `keras.Variable` that owns it or None)."""


def objective(spec: EstimatorSpec, replica: Replica) -> tf.Tensor:
    """Return the replica's part of the step's loss, a scalar; the parts sum to the mean over the global batch."""
    loss = spec.loss
    if spec.loss_weight is None:
        if replica.num_replicas == 1:
            return tf.reduce_mean(loss)
        if loss.shape.rank == 0:  # a mean over the replica's examples
            return loss * replica.weights.share(replica.index, loss.dtype)
        global_count = tf.cast(replica.weights.global_count, loss.dtype)
        return _sum_of_examples(loss, replica) / global_count
    weight = _loss_weight(spec, replica)
    total_weight = sum_over_replicas(replica, weight)
    # All weights of a global batch may be 0.
    if loss.shape.rank == 0:
        return loss * tf.math.divide_no_nan(weight, total_weight)
    return tf.math.divide_no_nan(_sum_of_examples(loss, replica), total_weight)


def loss_sum(spec: EstimatorSpec, replica: Replica) -> tuple[tf.Tensor, tf.Tensor]:
    """Return (sum of the losses of the replica's examples, their denominator), scalars.

    The mean over the global batch is the sum of the first over all replicas, divided by the sum of the second.
    """
    loss = spec.loss
    if spec.loss_weight is None:
        weight = tf.cast(replica.weights.counts[replica.index], loss.dtype)
    else:
        weight = _loss_weight(spec, replica)
    if loss.shape.rank == 0:
        return loss * weight, weight
    return _sum_of_examples(loss, replica), weight


def _sum_of_examples(loss: tf.Tensor, replica: Replica) -> tf.Tensor:
    """Return the sum of a loss `[batch]`, 0 for a batch that is a placeholder."""
    return tf.reduce_sum(loss) * replica.weights.presence(replica.index, loss.dtype)


def sum_over_replicas(replica: Replica, value: Any) -> Any:
    """Return `value` (a tensor of any shape, or a list) summed over all replicas."""
    if replica.num_replicas == 1:
        return value
    with replica.reductions.without_weights():
        return tf.distribute.get_replica_context().all_reduce(_SUM, value)


def gradients_of(tape: tf.GradientTape, loss: tf.Tensor, optimizer: Any, replica: Replica) -> list[Pair]:
    """Return (gradient, variable, owner) for each trainable variable on which `loss` depends.

    A gradient has the shape of its variable. A `loss_scale_factor` of a Keras optimizer multiplies the numbers of the
    backward pass, and the gradients are divided by it at the end. Rows of a sparse gradient that only a placeholder
    example looked up are left out.

    Args:
      tape: the tape that recorded the loss.
      loss: float scalar.
      optimizer: the optimizer of the EstimatorSpec; None: the loss has a scale already.
      replica: the replica.

    Raises:
      ValueError: the loss depends on no trainable variable.
    """
    trainable = replica.requested.trainable.values()
    scale_factor = getattr(_unwrap(optimizer), "loss_scale_factor", None)
    upstream = None if scale_factor is None else tf.constant(scale_factor, loss.dtype)
    gradients = tape.gradient(loss, [variable for variable, _ in trainable], upstream)
    if scale_factor is not None:
        gradients = [_divide(gradient, scale_factor) for gradient in gradients]
    if replica.num_replicas > 1:
        gradients = [replica.weights.without_placeholder_rows(gradient, replica.index) for gradient in gradients]
    pairs: list[Pair] = []
    for gradient, (variable, owner) in zip(gradients, trainable, strict=True):
        if gradient is not None:
            pairs.append((gradient, variable, owner))
    if not pairs:
        names = ", ".join(replica.requested.requests) or "none"
        raise ValueError(
            f"The loss depends on no trainable variable, so there is nothing to train. Trainable variables: {names}."
        )
    return pairs


def _divide(gradient: Any, factor: float) -> Any:
    """Return a gradient divided by `factor`; None, of a variable on which the loss does not depend, stays None."""
    if gradient is None:
        return None
    return scale(gradient, tf.constant(1 / factor, gradient.dtype))


@dataclasses.dataclass(frozen=True)
class Update:
    """One replica's update of the model; the tensors belong to the traced graph.

    Attributes:
      loss: scalar, this replica's part of the loss of the step. The parts of the replicas of a process sum to that
        loss.
      values: name -> scalar to report, the same on all replicas: the learning rate if it is computed, and the gradient
        norm.
      rate: name of the variable in which the optimizer keeps its learning rate; None: the rate is in no variable.
      averages: name of a weight -> name of the moving average that the optimizer keeps of it.
    """

    loss: tf.Tensor
    values: Mapping[str, tf.Tensor]
    rate: str | None
    averages: Mapping[str, str]


def apply_update(
    spec: EstimatorSpec, pairs: Sequence[Pair], loss: tf.Tensor, replica: Replica, config: RunConfig
) -> Update:
    """Update the model once: sum gradients over replicas, clip, apply, update moving averages, count the step.

    All replicas must call this together.

    Args:
      spec: the return value of model_fn on this replica.
      pairs: (gradient, variable, owner) of this replica. Summed over the replicas, they are the gradient of the global
        batch.
      loss: scalar, this replica's part of the loss of the step.
      replica: the replica.
      config: the RunConfig.
    """
    values: dict[str, tf.Tensor] = {}
    optimizer = _unwrap(spec.optimizer)
    owners = [owner for _, _, owner in pairs]
    # The gradients are weighted already: their sum over the replicas is the gradient of the global batch.
    with replica.reductions.without_weights():
        summed, loss = _sum_gradients(pairs, loss, replica)
        support_checks.check_update(optimizer, owners, config, replica.num_replicas)
        clipped, norm = _clipped(summed, optimizer, config)
        if norm is not None and config.log_gradient_norm:
            values["gradient_norm"] = norm
        global_pairs: list[Pair] = []
        for gradient, (_, variable, owner) in zip(clipped, pairs, strict=True):
            global_pairs.append((gradient, variable, owner))
        rate, rate_name = _apply_at_rate(optimizer, global_pairs, replica, config)
        if rate is not None:
            values["learning_rate"] = rate
        averages = ema.of_optimizer(optimizer, config.ema_decay, replica)
        ema.update(replica, config.ema_decay)  # after the update: the averages follow the new weights
        replica.global_step.assign_add(1, read_value=False)  # last: `_apply_at_rate` reads the step before
    return Update(loss, values, rate_name, averages)


def _sum_gradients(pairs: Sequence[Pair], loss: tf.Tensor, replica: Replica) -> tuple[Sequence[Any], tf.Tensor]:
    """Return (gradients summed over all replicas, this replica's part of the loss)."""
    gradients: Sequence[Any] = [gradient for gradient, _, _ in pairs]
    if replica.num_replicas > replica.num_local:
        # The loss is sent together with the gradients, and so costs no message of its own.
        *gradients, total = all_reduce([*gradients, loss])
        # A process adds up the losses of its replicas, so only the first has the total.
        loss = total if replica.index == 0 else tf.zeros_like(total)
    elif replica.num_replicas > 1:
        gradients = all_reduce(gradients)
    return gradients, loss


def _clipped(gradients: Sequence[Any], optimizer: Any, config: RunConfig) -> tuple[Sequence[Any], tf.Tensor | None]:
    """Return (the gradients that the optimizer gets, their global norm before they are clipped).

    The norm is None if the config neither clips nor reports it. It is that of gradients without duplicate rows: with
    them, it would be the norm of no gradient.

    Args:
      gradients: the gradients of the global batch.
      optimizer: the optimizer that will apply them.
      config: the RunConfig.
    """
    without_duplicate_rows = [without_duplicates(gradient) for gradient in gradients]
    given = gradients if adds_duplicate_rows(optimizer) else without_duplicate_rows
    norm: tf.Tensor | None = None
    if config.clip_global_norm is not None or config.log_gradient_norm:
        norm = global_norm(without_duplicate_rows)
        if config.clip_global_norm is not None:
            given = scaled_down(without_duplicate_rows, norm, config.clip_global_norm)
    return given, norm


def _apply_at_rate(
    optimizer: Any, pairs: Sequence[Pair], replica: Replica, config: RunConfig
) -> tuple[tf.Tensor | None, str | None]:
    """Apply (gradient of the global batch, variable, owner) at the learning rate of this update.

    Returns:
      (the rate, if it is computed and reported; the name of the variable in which the optimizer keeps it, if any).
    """
    computed: tf.Tensor | None = None
    name: str | None = None
    factor = learning_rate.factor(config, replica.global_step)
    with learning_rate.scaled(optimizer, factor):
        if config.log_step_count_steps:
            # Inside of `scaled`: this is then the rate with which the update is made.
            rate = learning_rate.rate_of(optimizer)
            name = learning_rate.name_of(rate, replica)
            if name is None and isinstance(rate, tf.Tensor):
                computed = rate
        apply_gradients(optimizer, pairs)
    # Outside of `scaled`, where the rate is again the optimizer's own variable and no product.
    if factor is not None or not config.log_step_count_steps:
        name = learning_rate.name_of(learning_rate.rate_of(optimizer), replica)
    return computed, name


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the norm of all gradients together, a float32 or float64 scalar.

    Args:
      gradients: tensors, or IndexedSlices in which no row of a variable occurs twice.
    """
    values: list[tf.Tensor] = []
    dtype = tf.float32
    for gradient in gradients:
        value = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        values.append(value)
        if value.dtype == tf.float64:
            dtype = tf.float64
    sums: list[tf.Tensor] = []
    for value in values:
        squares = tf.square(tf.cast(value, dtype))
        sums.append(tf.reduce_sum(squares))
    return tf.sqrt(tf.add_n(sums))


def scaled_down(gradients: Sequence[Any], norm: tf.Tensor, max_norm: float) -> list[Any]:
    """Return `gradients`, whose global norm is `norm`, scaled to a norm of at most `max_norm`."""
    limit = tf.constant(max_norm, norm.dtype)
    # The difference makes the factor NaN if the norm is not finite, as in tf.clip_by_global_norm.
    factor = limit / tf.maximum(norm, limit) + (norm - norm)
    return [scale(gradient, tf.cast(factor, gradient.dtype)) for gradient in gradients]


def _loss_weight(spec: EstimatorSpec, replica: Replica) -> tf.Tensor:
    dtype = spec.loss.dtype
    weight = tf.reduce_sum(tf.cast(spec.loss_weight, dtype))
    weight.set_shape([])  # TensorFlow does not know that the sum of a tensor of unknown rank is a scalar
    return tf.stop_gradient(weight * replica.weights.presence(replica.index, dtype))


def _unwrap(optimizer: Any) -> Any:
    """Return the optimizer without the LossScaleOptimizer of Keras's `compile`: the runner scales the loss itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def adds_duplicate_rows(optimizer: Any) -> bool:
    """Report whether an optimizer may get a sparse gradient (IndexedSlices) with several rows for one row of a
    variable.

    V1 optimizers add such rows themselves, and for plain gradient descent it makes no difference. All others must get
    one row: Adam of Keras 3 would square each of several by itself, and `clipnorm` would see a norm that is no
    gradient's.
    """
    if isinstance(optimizer, v1.train.Optimizer):
        return True
    keras_sgd = [sys.modules[name].optimizers.SGD for name in ("keras", "tf_keras") if name in sys.modules]
    per_row_settings = ("momentum", "clipnorm", "global_clipnorm", "clipvalue")
    return type(optimizer) in keras_sgd and not any(getattr(optimizer, name) for name in per_row_settings)


def apply_gradients(optimizer: Any, pairs: Sequence[Pair]) -> None:
    """Apply (gradient of the global batch, variable, owner) by the rules of the optimizer's family.

    Raises:
      ValueError: it is not a Keras 3, tf_keras or v1 optimizer.
    """
    if isinstance(optimizer, v1.train.Optimizer):
        optimizer.apply_gradients([(gradient, variable) for gradient, variable, _ in pairs])
    elif hasattr(optimizer, "apply") and hasattr(optimizer, "update_step"):  # Keras 3, which updates `keras.Variable`s
        gradients = []
        variables = []
        for gradient, variable, owner in pairs:
            gradients.append(gradient)
            variables.append(variable if owner is None else owner)
        # These are gradients of the loss itself. Keras's own LossScaleOptimizer does the same to its inner optimizer.
        optimizer.loss_scale_factor = None
        optimizer.apply(gradients, variables)
    elif hasattr(optimizer, "apply_gradients"):  # tf_keras, its legacy optimizers included
        accepted = inspect.signature(optimizer.apply_gradients).parameters
        # The optimizer must not sum the gradients over the replicas again. A legacy optimizer has the second argument,
        # which means the opposite of the first.
        no_second_sum = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}
        settings = {name: value for name, value in no_second_sum.items() if name in accepted}
        optimizer.apply_gradients([(gradient, variable) for gradient, variable, _ in pairs], **settings)
    else:
        raise ValueError(
            f"EstimatorSpec(optimizer={optimizer!r}): expected an optimizer object of Keras 3, tf_keras or "
            "tf.compat.v1.train, such as keras.optimizers.Adam()."
        )


def advance(replica: Replica, train_op: Any) -> Sequence[tf.Operation]:
    """Advance the global step by one if no replica's train_op does so itself.

    In tf.estimator, `optimizer.minimize(loss)` without `global_step` left the global step unchanged. Each checkpoint
    then overwrote the previous one, and only the end of the data ended training.

    Args:
      replica: the replica.
      train_op: the train_op of this replica.

    Returns:
      The operations, for callers that must fetch them; empty if `train_op` advances the step.
    """

    def add_one(step: Any) -> Any:
        return step.assign_add(1, read_value=False)

    def add_unless_counted(strategy: tf.distribute.Strategy, counts_itself: Any) -> list[Any]:
        if any(strategy.experimental_local_results(counts_itself)):
            return []
        added = strategy.extended.update(replica.global_step, add_one, group=False)
        return list(strategy.experimental_local_results(added))

    counts_itself = may_write(v1.get_default_graph(), [replica.global_step], [train_op])
    return operations(tf.distribute.get_replica_context().merge_call(add_unless_counted, args=(counts_itself,)))
