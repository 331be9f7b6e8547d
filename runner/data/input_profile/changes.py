"""The changes that are worth a try for the stages of an input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner.data.input_profile import timing
from runner.data.input_profile.reading import Speed
from runner.data.input_profile.recorder import Call, Change, Recorder
from runner.data.input_profile.stages import Stage
from runner.tf_private import datasets

MIN_SHARE = 0.1
"""Smallest share of the work of a stage for which a change is tried."""

MAX_TRIALS = 6
"""Largest number of changes that are tried: those of the stages with the most work."""

_MANY = 10**9
"""More elements than a cache holds: a range of this size counts, and is no data."""


def list_changes(stages: Sequence[Stage], recorder: Recorder, speed: Speed, *, waits: bool) -> list[Change]:
    """Return the changes that are worth a try, those of the stages with the most work first.

    Args:
      speed: of the input as it is.
      waits: the cores are not busy with the input.
    """
    num_filling = max(1, int(speed.elements / speed.secs * timing.FILL_SECS))
    num_in_pass = _num_in_pass(stages)
    if num_in_pass is not None:
        num_filling = min(num_filling, num_in_pass)
    found = []
    for stage in sorted(stages, key=lambda stage: stage.share, reverse=True):
        call = stage.call
        if call is None or not call.is_own or stage.share < MIN_SHARE:
            continue
        num_cached = max(1, int(stage.elements * num_filling))
        for kind in _list_kinds(stage, call, recorder, waits=waits):
            found.append(Change(kind, call, num_cached, num_filling))
    return list(dict.fromkeys(found))[:MAX_TRIALS]


def _num_in_pass(stages: Sequence[Stage]) -> int | None:
    """Return how many elements the whole pipeline makes in one pass over its data; None: that is not known.

    With `.repeat()` before a map, more than a pass would go into the cache that is tried: a larger one than the user's,
    which the processor reads more slowly.
    """
    passes = []
    for stage in stages:
        if stage.cut is None or not stage.elements:
            continue
        cardinality = int(stage.cut.cardinality())
        if 0 <= cardinality < _MANY:
            passes.append(math.ceil(cardinality / stage.elements))
    return max(passes, default=None)


def _list_kinds(stage: Stage, call: Call, recorder: Recorder, *, waits: bool) -> Iterator[str]:
    """Yield the kinds of change that a stage allows."""
    if call.method in ("map", "interleave", "batch") and not call.is_parallel:
        yield "parallel"
    if call.method == "map" and waits:
        yield "many"
    if stage.cut is None:
        return
    given = datasets.inputs_of(stage.cut)
    if call.method == "flat_map" and given and _are_names(given[0].element_spec):
        yield "interleave"
    later_calls = recorder.calls[call.number + 1 :]
    if call.method == "map" and any(later.method == "batch" for later in later_calls):
        yield "batch_first"
    if call.method in ("map", "interleave", "flat_map") and _may_be_cached(stage.cut):
        yield "cache"


def _are_names(spec: Any) -> bool:
    if not isinstance(spec, tf.TensorSpec):
        return False
    return bool(spec.dtype == tf.string and spec.shape.rank == 0)


def _may_be_cached(dataset: Any) -> bool:
    """Report whether each pass has the same elements, in any order, of which there are not endlessly many."""
    sources = [stage for stage in datasets.stages(dataset) if not datasets.inputs_of(stage)]
    is_finite = all(int(source.cardinality()) < _MANY for source in sources)
    has_infinite = any(int(source.cardinality()) == tf.data.INFINITE_CARDINALITY for source in sources)
    return is_finite and not has_infinite and not datasets.may_draw_values(dataset)
