"""The share of training time that steps wait for their input, measured in samples."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from runner.data.iterators import iterate
from runner.tf_private.datasets import timed

FIRST_SECS = 3.0
"""Seconds of training before the first sample. Each sampled iterator is built once, in a few milliseconds."""

EVERY_SECS = 10.0
"""Seconds of training between two samples."""

SAMPLE_STEPS = 500
SAMPLE_SECS = 0.5
"""A sample ends after the loop that reaches either limit. Timing costs 40 us per step: 20 ms per sample, about 0.2 % of
the ten seconds between samples."""

SHORT_STEP_SECS = 0.002
"""Timing slows shorter steps by more than 2 %, so the speed of their samples is not that of the run."""


class WaitTimer:
    """Times how long steps wait for `get_next` of their iterator, in samples of a few hundred steps.

    During a sample, the loop of steps reads from a timing iterator, which passes on the elements of the run's own
    iterator and adds up the time that each took. The timing iterator keeps no element, so the run's own iterator is
    always at the same position as without it. Both have the same element spec, so nothing is traced again. Loops
    outside of samples read from the run's own iterator.

    A `tf.while_loop` takes one step after the other and requests the next element when the previous step has ended
    (TensorFlow 2.21). Training therefore waits for all of the time that is measured.

    Args:
      is_on: False: nothing is ever timed, as for input that cannot be timed, and on workers other than the chief.

    Attributes:
      share: seconds waited / seconds of all sampled steps, from 0 to 1; None: no sample has been completed.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.share: float | None = None
        self._due_secs = FIRST_SECS if is_on else math.inf
        # Of the current sample.
        self._steps = 0
        self._secs = 0.0
        # Of all samples.
        self._waited = 0.0
        self._total = 0.0
        # The run's own iterator, and the timing iterator that reads from it.
        self._timed_pair: tuple[Any, Any] = (None, None)

    def steps_to_sample(self, secs: float) -> int:
        """Return the number of steps to sample in the next loop; 0: do not sample.

        Args:
          secs: seconds of training so far.
        """
        if secs < self._due_secs:
            return 0
        return SAMPLE_STEPS - self._steps

    def timed(self, iterator: tf.data.Iterator) -> tf.data.Iterator:
        """Return an iterator over the elements of `iterator` that measures how long each took, without reading ahead.

        The same iterator gets the same timing iterator each time.
        """
        if self._timed_pair[0] is not iterator:
            with tf.device("CPU:0"):
                self._secs_waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="secs_waited")
                timing = iterate(timed(iterator, self._secs_waited))
                self._timed_pair = (iterator, timing)
        return self._timed_pair[1]

    def took(self, num_steps: int, secs: float, secs_of_training: float) -> float | None:
        """Add the times of a sampled loop to the current sample.

        Args:
          num_steps: number of steps of the loop.
          secs: duration of the loop in seconds.
          secs_of_training: duration of the training so far in seconds, including this loop.

        Returns:
          If the loop completes the sample, the share of the sample's time spent waiting, from 0 to 1; else None.
        """
        self._steps += num_steps
        self._secs += secs
        if self._steps < SAMPLE_STEPS and self._secs < SAMPLE_SECS:
            return None
        waited = float(self._secs_waited.numpy())
        share_of_sample = min(1.0, waited / self._secs)
        self._waited += waited
        self._total += self._secs
        self.share = min(1.0, self._waited / self._total)
        # The next sample begins at zero.
        self._secs_waited.assign(0.0)
        self._steps = 0
        self._secs = 0.0
        self._due_secs = secs_of_training + EVERY_SECS
        return share_of_sample
