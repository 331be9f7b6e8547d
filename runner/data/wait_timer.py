"""How much of training's time steps wait for their input: measured in some of the steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from runner.data.iterators import iterate
from runner.tf_private.datasets import timed

FIRST_SECS, EVERY_SECS = 3.0, 10.0
"""Seconds of training before the first sample, and from the end of one to the next. The first one needs a dataset of
its own, which takes some milliseconds."""

SAMPLE_STEPS, SAMPLE_SECS = 500, 0.5
"""A sample ends with the loop that reaches either. To time a step takes 40 us: 0.2 % of ten seconds for so many."""


class WaitTimer:
    """Times how long steps wait for `get_next` of their iterator, in samples of some hundred steps.

    A loop on the devices is given another iterator for a sample: one over a dataset whose elements are those of the
    loop's own iterator, with the time that each of them took. It holds no element, so the own iterator stands where it
    would without it; and its elements have the same spec, so no program is traced for it. Loops that are not sampled
    have nothing of it.

    The iterations of a `tf.while_loop` around a step follow each other (TensorFlow 2.21): the next element is asked for
    when the step before has ended, so all of that time is time that training waits.

    Attributes:
      share: of the time of all sampled steps that they waited for their input; None: there was no sample yet.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        self._due_secs = FIRST_SECS
        self._steps, self._secs = 0, 0.0  # of the sample that is being taken
        self._waited, self._total = 0.0, 0.0  # of all samples
        self._timed: tuple[Any, Any] = (None, None)

    def steps_to_sample(self, secs: float) -> int:
        """Return how many steps the next loop may have, all of which are sampled; 0: it is not sampled.

        Args:
          secs: of training so far.
        """
        return SAMPLE_STEPS - self._steps if secs >= self._due_secs else 0

    def timed(self, iterator: tf.data.Iterator) -> tf.data.Iterator:
        """Return what gives the elements of `iterator`, and times it; neither reads ahead of the other."""
        if self._timed[0] is not iterator:
            with tf.device("CPU:0"):
                self._secs_waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="secs_waited")
                self._timed = (iterator, iterate(timed(iterator, self._secs_waited)))
        return self._timed[1]

    def took(self, num_steps: int, secs: float, secs_of_training: float) -> float | None:
        """Note a loop that was sampled. Returns: the share of the sample that it ends; None: the sample goes on.

        Args:
          secs: of the loop.
          secs_of_training: so far, this loop included.
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
