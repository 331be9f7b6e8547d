"""Summaries of layers and losses, as tf.estimator wrote them: in training, of the first replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

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
    """The runner gives a writer and a step where summaries are written; elsewhere TensorFlow warns that it has none."""
    return tf.summary.experimental.get_step() is not None
