"""Write the training summaries of premade estimators and heads, like tf.estimator."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner.tf_private.summaries import is_collecting

v1 = tf.compat.v1


def scalar(name: str, value: Any) -> None:
    """Write a scalar summary; `name` is extended by the current name scope."""
    if _can_be_written():
        v1.summary.scalar(name, value)


def histogram(name: str, values: Any) -> None:
    """Write a histogram summary of values of any shape; `name` is extended by the current name scope."""
    if _can_be_written():
        v1.summary.histogram(name, values)


def _can_be_written() -> bool:
    """Report whether a summary can be written here. Without a default step, TensorFlow would log a warning instead.

    Replicas other than the first do not write summaries, but the runner collects their scalars for the mean.
    """
    return is_collecting() or is_of_session() or tf.summary.experimental.get_step() is not None


def is_of_session() -> bool:
    """Report whether the graph is one that a program runs in a session of its own, without the runner."""
    return not v1.executing_eagerly_outside_functions()
