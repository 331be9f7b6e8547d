"""The learning rate on several replicas: scaled with their number, with a warm-up."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from runner.run_config import RunConfig
from runner.tf_private.optimizers import begin_update, schedule_of
from runner.tf_private.v1 import scale_rate_of_v1
from runner.tracing.trace_step import Replica

v1 = tf.compat.v1


def scaling(config: RunConfig) -> float:
    """Return the factor by which the learning rate is multiplied after the warm-up."""
    replicas = config.num_replicas_in_sync
    factors = {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}
    return factors[config.learning_rate_scaling]


def factor(config: RunConfig, global_step: tf.Variable) -> tf.Tensor | None:
    """Return the factor of this update's learning rate, a float64 scalar; None: the rate is unchanged.

    With `learning_rate_scaling`, the warm-up goes from the rate that model_fn sets (first update) to the scaled rate
    (update `warmup_steps` + 1). Without scaling, it goes from 1 / warmup_steps of the rate that model_fn sets (first
    update) to all of it (update `warmup_steps`).

    Args:
      config: the RunConfig.
      global_step: int64 scalar.
    """
    steps = config.warmup_steps
    target = scaling(config)
    is_unscaled = config.learning_rate_scaling == "none"
    if target == 1.0 and (steps == 0 or not is_unscaled):
        return None
    if steps == 0:
        return tf.constant(target, tf.float64)
    step = tf.cast(global_step.read_value(), tf.float64)
    if is_unscaled:
        return tf.minimum((step + 1) / steps, 1)
    return 1 + (target - 1) * tf.minimum(step / steps, 1)


def rate_of(optimizer: Any) -> Any:
    """Return a Keras optimizer's learning rate in this update, a variable or a scalar tensor; None: the rate is no
    attribute.

    This is so for optimizers of TensorFlow 1 and for legacy optimizers of tf_keras. `rates_of_updates` finds the rate
    in the operations that they make.
    """
    if isinstance(optimizer, v1.train.Optimizer) or hasattr(optimizer, "_decayed_lr"):
        return None
    rate = begin_update(optimizer)
    # The rate of a schedule is a number of this update, even where tf_keras keeps it in a variable.
    return rate if schedule_of(optimizer) is None else tf.convert_to_tensor(rate)


def name_of(rate: Any, replica: Replica) -> str | None:
    """Return the name of the variable that is the rate; None: it is not a variable of the model."""
    if rate is None:
        return None
    for name, (variable, owner) in replica.requested.requests.items():
        if rate is owner or rate is variable:
            return name
    return None


def why_not_settable(optimizer: Any) -> str:
    """Return why the learning rate cannot be set (no variable of the model holds it), and what to write instead.

    Args:
      optimizer: the optimizer of the EstimatorSpec; None: model_fn returned a train_op.
    """
    write = "Return EstimatorSpec(optimizer=keras.optimizers.Adam(learning_rate=0.001)), or another Keras optimizer"
    if optimizer is None:
        return f"model_fn returned train_op=, which contains its learning rate. {write}, instead of train_op=."
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kind = type(inner).__name__
    if isinstance(inner, v1.train.Optimizer):
        return f"{kind} of tf.compat.v1 keeps its learning rate in the graph. {write}."
    schedule = schedule_of(inner)
    if schedule is None:
        return f"{kind} keeps its learning rate where the runner does not find it. {write}."
    return (
        f"the learning rate of {kind} is a schedule ({type(schedule).__name__}), which nothing else may change. Give "
        f"the optimizer a number, {kind}(learning_rate=0.001), or remove this key."
    )


def rates_of_updates(updates: Iterable[tf.Operation]) -> dict[str, float | tf.Tensor]:
    """Return the learning rates that v1 optimizers pass to the operations that update variables, such as
    ResourceApplyAdam: name -> the value of a rate that never changes, or a scalar tensor of the traced graph.

    The name is learning_rate; with several rates in the model, learning_rate_1 and so on.

    Args:
      updates: the operations of one replica that a step runs.
    """
    rates: dict[Any, Any] = {}  # by value, or by the id of the tensor: one rate may be used in many updates
    for operation in updates:
        if not re.fullmatch(r"Resource(Sparse)?Apply\w+", operation.type):
            continue
        for argument, tensor in zip(operation.op_def.input_arg, operation.inputs, strict=True):
            if argument.name not in ("lr", "alpha"):
                continue
            # The optimizer casts the rate to the dtype of each variable.
            rate = tensor.op.inputs[0] if tensor.op.type == "Cast" else tensor
            value = tf.get_static_value(rate)
            if value is None:
                rates[id(rate)] = rate
            else:
                number = float(value)
                rates[number] = number
    if len(rates) == 1:
        (only,) = rates.values()
        return {"learning_rate": only}
    return {f"learning_rate_{number}": rate for number, rate in enumerate(rates.values(), 1)}


def in_words(config: RunConfig) -> str | None:
    """Return a sentence about the changes to the learning rate; None if the config asks for none."""
    way = config.learning_rate_scaling
    steps = config.warmup_steps
    target = scaling(config)
    if way == "none":
        if not steps:
            return None
        return f"The learning rate rises to its full value over the first {steps} steps."
    setting = f"train.learning_rate_scaling={way}"
    if target == 1.0:
        also = f", and train.warmup_steps={steps} has no effect" if steps else ""
        return f"{setting} has no effect on one replica{also}."
    changes = f"is multiplied by {target:g}"
    if steps:
        changes = f"rises to {target:g} times its value over the first {steps} steps"
    return f"{setting} on {config.num_replicas_in_sync} replicas: the learning rate {changes}."


@contextlib.contextmanager
def scaled(optimizer: Any, by: tf.Tensor | None) -> Iterator[None]:
    """Multiply the learning rate with which `optimizer` applies gradients, inside this context.

    Args:
      optimizer: a Keras 3, tf_keras or v1 optimizer.
      by: float scalar; None: no change.

    Raises:
      ValueError: the runner does not know where this optimizer keeps its rate.
    """
    if by is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for part in getattr(optimizer, "optimizers", [optimizer]):  # it may be several, one for each part of a model
            if hasattr(part, "scale_rate"):
                part.scale_rate(by)
            elif isinstance(part, v1.train.Optimizer):
                if not scale_rate_of_v1(part, by):
                    raise _refusal(part, "the runner does not know where it keeps its learning rate")
            elif hasattr(type(part), "learning_rate") and not hasattr(part, "_decayed_lr"):
                stack.enter_context(_with_scaled_rate(part, by))
            else:
                raise _refusal(part, "it has no property 'learning_rate'")
        yield


@contextlib.contextmanager
def _with_scaled_rate(optimizer: Any, by: tf.Tensor) -> Iterator[None]:
    """Replace the property `learning_rate`, which Keras 3 and tf_keras read in each update for a float, variable or
    schedule.
    """
    kind = type(optimizer)

    def rate(self: Any) -> Any:
        value = tf.convert_to_tensor(kind.learning_rate.fget(self))
        return value * tf.cast(by, value.dtype)

    # Python looks a property up in the class, so this one optimizer gets a class of its own.
    optimizer.__class__ = type(kind.__name__, (kind,), {"learning_rate": property(rate)})
    try:
        yield
    finally:
        optimizer.__class__ = kind


def _refusal(optimizer: Any, reason: str) -> ValueError:
    return ValueError(
        f"train.learning_rate_scaling and train.warmup_steps do not work with {type(optimizer).__name__}: {reason}. "
        "Set them to none and 0 and scale the rate in model_fn (config.num_replicas_in_sync), or use another "
        "optimizer."
    )
