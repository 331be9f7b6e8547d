"""How long an input is read for each number. Looked up at each use, so that a test can make them short."""

from __future__ import annotations

WARM_UP_SECS = 1.5
"""Seconds for which an input is read before it is timed: AUTOTUNE chooses its values meanwhile."""

ROUNDS = 7

ROUND_SECS = 0.4
"""In each round the input is read as it is, with a change, and as it is again, each for so long: other work on the
machine slows all three."""

DRAIN_SECS = 0.15
"""What an input has read ahead since its last turn is read, and not counted, for so long before its turn."""

SETTLE_SECS = 0.6
"""The longest time to wait for the input whose turn has ended: it fills its buffers, 0.4 s of work for the 512 batches
of a prefetch, and would slow the next one."""

CUT_SECS = 0.3
"""Seconds for which the pipeline up to one stage is read, and half as long before that."""

FILL_SECS = 3.0
"""A cache is tried with the elements that its stage makes in so many seconds; they stand for all. Fewer would stay in
the processor's cache, and be read faster than all of them."""

MAX_FILL_SECS = 15.0
"""The longest time to wait until they are in the cache: the machine may do other work meanwhile."""

CACHE_SECS = 20.0
"""Seconds for which an input with a cache is read before it is timed: its first pass fills the cache."""

CALL_SECS = 0.05
"""About how long one call of TensorFlow reads, so that the way from Python costs nothing that can be measured."""
