"""The summaries of layers and losses that tf.estimator wrote in training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner.tf_private.summaries import is_collecting

v1 = tf.compat.v1


def scalar(name: str, value: Any) -> None:
    """Write a scalar summary; `name` is extended by the current name scope."""
    if _somebody_writes():
        v1.summary.scalar(name, value)


def histogram(name: str, values: Any) -> None:
    """Write a histogram summary of values of any shape; `name` is extended by the current name scope."""
    if _somebody_writes():
        v1.summary.histogram(name, values)


def _somebody_writes() -> bool:
    """Report whether a summary can be written here; elsewhere TensorFlow would warn that it has no step.

    Replicas other than the first have no writer, but their scalars are collected for the mean.
    """
    return is_collecting() or tf.summary.experimental.get_step() is not None
