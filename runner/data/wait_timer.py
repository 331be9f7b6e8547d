"""The share of training time that steps wait for their input, measured in samples."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner.data.iterators import iterate
from runner.tf_private.datasets import timed

FIRST_SECS, EVERY_SECS = 3.0, 10.0
"""Seconds of training before the first sample, and between two samples. The first sample builds a separate dataset,
which takes a few milliseconds."""

SAMPLE_STEPS, SAMPLE_SECS = 500, 0.5
"""A sample ends with the loop that reaches either limit. Timing costs 40 us per step, about 0.2 % of ten seconds."""


class WaitTimer:
    """Times how long steps wait for `get_next` of their iterator, in samples of a few hundred steps.

    For a sample, the loop on the devices gets another iterator: it returns the elements of the loop's own iterator and
    notes the time that each took. It keeps no element, so the loop's own iterator is where it would be without it. Its
    elements have the same spec, so no program is traced anew. Loops that are not sampled are unchanged.

    A `tf.while_loop` runs the iterations around a step one after the other (TensorFlow 2.21): the next element is asked
    for when the previous step has ended. All of that time is therefore time in which training waits.

    Attributes:
      share: the waiting share of the time of all sampled steps, from 0 to 1; None: there was no sample yet.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        self._due_secs = FIRST_SECS
        self._steps, self._secs = 0, 0.0  # of the current sample
        self._waited, self._total = 0.0, 0.0  # of all samples
        self._timed: tuple[Any, Any] = (None, None)

    def steps_to_sample(self, secs: float) -> int:
        """Return the number of steps of the next loop, all of which are sampled; 0: do not sample.

        Args:
          secs: seconds of training so far.
        """
        return SAMPLE_STEPS - self._steps if secs >= self._due_secs else 0

    def timed(self, iterator: tf.data.Iterator) -> tf.data.Iterator:
        """Return an iterator that returns the elements of `iterator` and times it; neither reads ahead."""
        if self._timed[0] is not iterator:
            with tf.device("CPU:0"):
                self._secs_waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="secs_waited")
                self._timed = (iterator, iterate(timed(iterator, self._secs_waited)))
        return self._timed[1]

    def took(self, num_steps: int, secs: float, secs_of_training: float) -> float | None:
        """Add the times of a sampled loop, and return the share of the sample that it completes; None: the sample
        continues.

        Args:
          num_steps: number of steps of the loop.
          secs: duration of the loop in seconds.
          secs_of_training: duration of the training so far in seconds, this loop included.
        """
        self._steps, self._secs = self._steps + num_steps, self._secs + secs
        if self._steps < SAMPLE_STEPS and self._secs < SAMPLE_SECS:
            return None
        waited, of_sample = float(self._secs_waited.numpy()), self._secs
        self._secs_waited.assign(0.0)
        self._waited, self._total = self._waited + waited, self._total + of_sample
        self.share = min(1.0, self._waited / self._total)
        self._steps, self._secs, self._due_secs = 0, 0.0, secs_of_training + EVERY_SECS
        return min(1.0, waited / of_sample)


class NullWaitTimer:
    """Times nothing: input that cannot be timed, and workers other than the chief."""

    share: float | None = None

    def steps_to_sample(self, secs: float) -> int:
        return 0

    def timed(self, iterator: tf.data.Iterator) -> tf.data.Iterator:
        return iterator

    def took(self, num_steps: int, secs: float, secs_of_training: float) -> float | None:
        return None
