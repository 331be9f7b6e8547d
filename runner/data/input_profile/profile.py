"""How fast an input is by itself: its speed, the work of each stage, and what a change of one stage gains.

A gain is measured, not computed: the input function is called once more with that one change made in its calls of
tf.data's methods, and both inputs are read in turn.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.data.input_profile import timing
from runner.data.input_profile.changes import list_changes
from runner.data.input_profile.reading import READ_ERRORS, Reading, Speed
from runner.data.input_profile.recorder import Change, num_cores, recording
from runner.data.input_profile.stages import Stage, measure_stages, measure_up_to

MAX_SLOWER = 1
"""A gain is clear if the changed input was the fastest of the three in all rounds but so many.

Of three reads that differ by chance alone, the one in the middle is the fastest in 1 of 3 rounds, and in 6 or 7 of 7
rounds with a chance of 15 in 2187, 0.7 %. Of `MAX_TRIALS` changes that gain nothing, one gets there in 4 % of all
commands, and then has to reach `MIN_GAIN` too."""

MIN_GAIN = 1.2
"""Smallest median gain that is clear. A smaller one is rarely worth the work, and a model that needs the same cores may
take it away."""

MAX_BUSY = 0.6
"""Largest share of busy cores with which more parallel calls than cores are tried."""

Build = Callable[[], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class Round:
    """Examples per second of a changed input, and of the input as it is directly before and after."""

    before: float
    changed: float
    after: float

    @property
    def gain(self) -> float:
        return self.changed / statistics.mean([self.before, self.after])

    @property
    def is_faster(self) -> bool:
        return self.changed > max(self.before, self.after)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A change that was tried."""

    change: Change
    rounds: Sequence[Round]

    @property
    def gain(self) -> float:
        """The median of the rounds' gains."""
        return statistics.median(turn.gain for turn in self.rounds)

    @property
    def num_faster(self) -> int:
        """The number of rounds in which it was faster than the input as it is, before and after."""
        return sum(turn.is_faster for turn in self.rounds)

    @property
    def is_clear(self) -> bool:
        """The change makes the input faster; see `MAX_SLOWER`."""
        num_slower = len(self.rounds) - self.num_faster
        return self.gain >= MIN_GAIN and num_slower <= MAX_SLOWER


@dataclasses.dataclass(frozen=True)
class Untried:
    """A change that could not be tried.

    Attributes:
      error: what the changed input raised, or a CannotTryError, whose text says why.
    """

    change: Change
    error: Exception


@dataclasses.dataclass(frozen=True)
class InputProfile:
    """What was measured of an input.

    Attributes:
      speed: what was read of the input as it is.
      cpu: share of this machine's cores that were busy with it, 0 to 1.
      stages: from the source to the end.
      tuned: (stage, parameter, value) of each value that AUTOTUNE has chosen.
      trials: the changes that were tried, those that gain most first.
      untried: those that could not be tried.
    """

    speed: Speed
    cpu: float
    stages: Sequence[Stage]
    tuned: Sequence[tuple[str, str, float]]
    trials: Sequence[Trial]
    untried: Sequence[Untried]


def profile(build: Build, check: Callable[[], None]) -> InputProfile:
    """Measure an input.

    Args:
      build: calls the input function and returns the dataset as a run reads it; called once more for each change.
      check: called often; raises an exception if the work is to end.

    Raises:
      OutOfRangeError: the input is empty. Errors of the input function pass through.
    """
    with recording() as recorder:
        dataset = build()
    reading = Reading(dataset, check)
    has_cache = any(call.method == "cache" for call in recorder.calls)
    warm_up_secs = timing.CACHE_SECS if has_cache else timing.WARM_UP_SECS
    reading.read(warm_up_secs)
    cpu_before = time.process_time()
    began = time.perf_counter()
    speed = reading.read(timing.ROUND_SECS)
    cpu_secs = time.process_time() - cpu_before
    secs = time.perf_counter() - began
    cpu = cpu_secs / secs / num_cores()
    stages = measure_stages(dataset, recorder, check)
    options = dataset.options()
    stages = [dataclasses.replace(stage, secs_up_to=measure_up_to(stage, options, check)) for stage in stages]
    tried: dict[Change, Reading] = {}
    untried: dict[Change, Exception] = {}
    for change in list_changes(stages, recorder, speed, has_idle_cores=cpu < MAX_BUSY):
        try:
            changed = _open_changed(change, build, dataset, check)
            _warm_up(changed, change, warm_up_secs)
        except CannotTryError as error:
            untried[change] = error
        except _InputError as error:
            untried[change] = error.original_error
        else:
            tried[change] = changed
    speeds, rounds = _read_in_turn(reading, tried, untried)
    trials = [Trial(change, turns) for change, turns in rounds.items() if change not in untried]
    trials.sort(key=lambda trial: trial.gain, reverse=True)
    not_tried = [Untried(change, error) for change, error in untried.items()]
    return InputProfile(_median_speed(speeds), min(1.0, cpu), stages, reading.tuned(), trials, not_tried)


def _read_in_turn(
    reading: Reading, tried: Mapping[Change, Reading], untried: dict[Change, Exception]
) -> tuple[list[Speed], dict[Change, list[Round]]]:
    """Read the input as it is and with each change, in several rounds.

    In each round, every changed input is read between two reads of the input as it is.

    Args:
      reading: the input as it is.
      tried: the inputs with a change.
      untried: gets the changes whose input fails, and why.

    Returns:
      What was read of the input as it is, and the rounds of each change.
    """
    unchanged = []
    rounds: dict[Change, list[Round]] = {change: [] for change in tried}
    for number in range(timing.ROUNDS):
        order = [change for change in tried if change not in untried]
        if number % 2:
            order.reverse()  # so that no change is always read after the same other one
        unchanged.append(_take_turn(reading))
        for change in order:
            try:
                changed = _take_turn(tried[change])
            except READ_ERRORS as error:
                untried[change] = error
                continue
            before = unchanged[-1]
            after = _take_turn(reading)
            unchanged.append(after)
            speeds = [_examples_per_sec(speed) for speed in (before, changed, after)]
            rounds[change].append(Round(*speeds))
    return unchanged, rounds


def _take_turn(reading: Reading) -> Speed:
    _wait_until_idle()
    reading.read(timing.DRAIN_SECS)
    return reading.read(timing.ROUND_SECS)


def _wait_until_idle() -> None:
    """Wait until this process computes nothing, but not longer than timing.SETTLE_SECS."""
    last = time.monotonic() + timing.SETTLE_SECS
    is_busy = True
    while is_busy and time.monotonic() < last:
        before = time.process_time()
        time.sleep(0.02)
        is_busy = time.process_time() - before > 0.002  # a tenth of one core


def _median_speed(speeds: Sequence[Speed]) -> Speed:
    ordered = sorted(speeds, key=_examples_per_sec)
    return ordered[len(ordered) // 2]


def _examples_per_sec(speed: Speed) -> float:
    return speed.examples / speed.secs


class CannotTryError(Exception):
    """A change cannot be tried; its text says why."""


class _InputError(Exception):
    """An input with a change raised `original_error`."""

    def __init__(self, original_error: Exception) -> None:
        super().__init__()
        self.original_error = original_error


def _open_changed(change: Change, build: Build, dataset: tf.data.Dataset, check: Callable[[], None]) -> Reading:
    """Call the input function with a change, and return its input, of which nothing is read yet.

    Raises:
      CannotTryError: the change cannot be made.
      _InputError: the input function failed with it.
    """
    try:
        with recording(change) as recorder:
            changed = build()
        reading = Reading(changed, check)
    except Exception as error:  # of the user's function, which was not written for the change
        raise _InputError(error) from error
    if not recorder.was_changed and change.kind == "batch_first":
        raise CannotTryError("no .batch follows the map directly")
    if not recorder.was_changed:
        raise CannotTryError("the input function did not make this call when it was called again")
    if not _are_alike(changed.element_spec, dataset.element_spec):
        raise CannotTryError("the elements would have other names or types")
    return reading


def _warm_up(reading: Reading, change: Change, secs: float) -> None:
    """Read an input with a change for `secs` seconds; if the change is a cache, first read until it is full.

    Raises:
      CannotTryError: the cache was not full in time.
      _InputError: the input cannot be read.
    """
    try:
        if change.kind == "cache":
            _fill_cache(reading, change.num_read_to_fill_cache)
        reading.read(secs)
    except READ_ERRORS as error:
        raise _InputError(error) from error


def _fill_cache(reading: Reading, number: int) -> None:
    """Read `number` elements, which fill the cache: until it is full, the input is as slow as without a cache.

    Raises:
      CannotTryError: it takes longer than MAX_FILL_SECS.
    """
    began = time.monotonic()
    num_read = 0
    while num_read < number:
        num_read += reading.read(timing.ROUND_SECS / 2).elements
        took = time.monotonic() - began
        if num_read < number and took > timing.MAX_FILL_SECS:
            raise CannotTryError(f"only {num_read} of {number} elements for its cache came in {took:.0f} s")


def _are_alike(spec: Any, other: Any) -> bool:
    """Report whether two element specs have the same structure and dtypes. Their shapes may differ."""
    try:
        tf.nest.assert_same_structure(spec, other, expand_composites=True)
    except (TypeError, ValueError):
        return False
    dtypes = [leaf.dtype for leaf in tf.nest.flatten(spec)]
    return dtypes == [leaf.dtype for leaf in tf.nest.flatten(other)]
