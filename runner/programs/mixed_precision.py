"""The precision in which layers compute, and the loss scale that keeps float16 gradients from underflow to zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.model_fn import EstimatorSpec
from runner.tracing.variable_store import VariableStore

ModelCall = Callable[[Any, Any, str], EstimatorSpec]
"""model_fn with params and config bound: (features, labels, mode) -> spec."""

HALF = (tf.bfloat16, tf.float16)


def with_precision(model_call: ModelCall, precision: str) -> ModelCall:
    """Return a `model_call` that runs under Keras 3's dtype policy `precision` and casts its results to float32.

    Keras keeps the policy per thread, and it is restored after the call, so no other code sees it.

    Args:
      model_call: (features, labels, mode) -> spec.
      precision: a Keras dtype policy; "float32" changes nothing.
    """
    if precision == "float32":
        return model_call
    import keras  # import Keras before the trace, which checks whether it is loaded

    def call(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(precision)
        try:
            spec = model_call(features, labels, mode)
        finally:
            keras.config.set_dtype_policy(before)
        loss = in_float32(spec.loss)
        predictions = tf.nest.map_structure(in_float32, spec.predictions)
        return dataclasses.replace(spec, loss=loss, predictions=predictions)

    return call


def in_float32(value: Any) -> Any:
    """Return a half-precision tensor as float32, anything else unchanged."""
    if tf.is_tensor(value) and value.dtype in HALF:
        return tf.cast(value, tf.float32)
    return value


def computes_in(graph: tf.Graph, dtypes: Sequence[tf.DType]) -> bool:
    """Report whether any operation in `graph` computes in one of `dtypes`."""
    for operation in graph.get_operations():
        if any(tensor.dtype in dtypes for tensor in operation.outputs):
            return True
    return False


class LossScale:
    """The dynamic loss scale of mixed_float16, by the rules of Keras's LossScaleOptimizer.

    The scale starts at 2^15, doubles after 2000 successive updates, and halves when a gradient is not finite. A step
    with such a gradient is skipped: neither the global step nor the optimizer counts it. Checkpoints contain the
    scale's state.
    """

    INITIAL = 2.0**15
    GROWTH_STEPS = 2000
    SMALLEST = 2.0**-40
    SCALE = "loss_scale/dynamic_scale"
    COUNTER = "loss_scale/step_counter"
    NAMES = (SCALE, COUNTER)

    def __init__(self, store: VariableStore) -> None:
        self._store = store
        store.declare(self.SCALE, tf.constant(self.INITIAL))
        store.declare(self.COUNTER, tf.constant(0, tf.int64))

    def value(self) -> tf.Tensor:
        """Return the scale of this step, a float32 scalar, in the graph."""
        return self._store[self.SCALE].read_value()

    def grow(self) -> None:
        """Note, in the graph, that a step updated the model: count it, and double the scale when 2000 are reached."""
        with self._store.scope():
            counter = self._store[self.COUNTER].read_value() + 1
            grows = counter >= self.GROWTH_STEPS
            scale = self.value()
            self._store[self.SCALE].assign(tf.where(grows, scale * 2, scale))
            self._store[self.COUNTER].assign(tf.where(grows, tf.zeros_like(counter), counter))

    def shrink(self) -> None:
        """Note, in the graph, that a step had gradients that were not finite: halve the scale."""
        with self._store.scope():
            self._store[self.SCALE].assign(self.value() / 2)
            self._store[self.COUNTER].assign(tf.constant(0, tf.int64))

    @property
    def is_exhausted(self) -> bool:
        """Report whether the scale has become so small that gradients cannot be expected to become finite."""
        return float(self._store[self.SCALE].numpy()) < self.SMALLEST
