"""Summaries of layers and losses, as tf.estimator wrote them: in training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner.tf_private.summaries import is_collecting

v1 = tf.compat.v1


def scalar(name: str, value: Any) -> None:
    """A number, under `name` in the current name scope."""
    if _somebody_writes():
        v1.summary.scalar(name, value)


def histogram(name: str, values: Any) -> None:
    """A distribution, under `name` in the current name scope."""
    if _somebody_writes():
        v1.summary.histogram(name, values)


def _somebody_writes() -> bool:
    """The runner gives a writer and a step where summaries are written; elsewhere TensorFlow warns that it has none.

    Scalars are those of all replicas, which have no writer, and are noted there.
    """
    return is_collecting() or tf.summary.experimental.get_step() is not None
