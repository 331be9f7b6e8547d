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

_TOO_MANY_TO_CACHE = 10**9
"""Number of elements from which on a stage is not cached: a range of this size only counts, and is no data."""


def list_changes(stages: Sequence[Stage], recorder: Recorder, speed: Speed, *, has_idle_cores: bool) -> list[Change]:
    """Return the changes that are worth a try, those of the stages with the most work first.

    Args:
      stages: the stages of the input as it is.
      recorder: the recorder of the calls that made these stages.
      speed: the speed of the input as it is.
      has_idle_cores: the input leaves cores idle, so that more parallel calls than cores may help.
    """
    num_read_to_fill_cache = _count_read_to_fill_cache(stages, speed)
    found = []
    for stage in sorted(stages, key=lambda stage: stage.share, reverse=True):
        call = stage.call
        if call is None or not call.is_own or stage.share < MIN_SHARE:
            continue
        num_cached = max(1, int(stage.elements_per_output * num_read_to_fill_cache))
        for kind in _list_kinds(stage, call, recorder, has_idle_cores=has_idle_cores):
            found.append(Change(kind, call, num_cached, num_read_to_fill_cache))
    # Two stages have the same call where a dataset is used twice, as in a zip.
    return list(dict.fromkeys(found))[:MAX_TRIALS]


def _count_read_to_fill_cache(stages: Sequence[Stage], speed: Speed) -> int:
    """Return how many elements of the whole pipeline are read to fill a cache that is tried.

    They are what the input as it is makes in FILL_SECS, and not more than one pass over its data.
    """
    number = max(1, int(speed.elements / speed.secs * timing.FILL_SECS))
    num_in_pass = _num_in_pass(stages)
    if num_in_pass is None:
        return number
    return min(number, num_in_pass)


def _num_in_pass(stages: Sequence[Stage]) -> int | None:
    """Return how many elements the whole pipeline makes in one pass over its data; None: that is not known.

    Each stage of known size gives an estimate, and the largest is returned. With `.repeat()` before a map, more than a
    pass would go into the cache that is tried: a larger one than the user's, which the processor reads more slowly.
    """
    outputs_per_pass = []
    for stage in stages:
        if stage.dataset is None or not stage.elements_per_output:
            continue
        cardinality = int(stage.dataset.cardinality())
        if 0 <= cardinality < _TOO_MANY_TO_CACHE:  # negative: infinite, or not known
            outputs_per_pass.append(math.ceil(cardinality / stage.elements_per_output))
    return max(outputs_per_pass, default=None)


def _list_kinds(stage: Stage, call: Call, recorder: Recorder, *, has_idle_cores: bool) -> Iterator[str]:
    """Yield the kinds of change (`Change.kind`) that a stage allows."""
    if call.method in ("map", "interleave", "batch") and not call.is_parallel:
        yield "parallel"
    if call.method == "map" and has_idle_cores:
        yield "many"
    if stage.dataset is None:
        return
    inputs = datasets.inputs_of(stage.dataset)
    if call.method == "flat_map" and inputs and _is_one_text(inputs[0].element_spec):
        yield "interleave"
    later_calls = recorder.calls[call.number + 1 :]
    # Whether the batch follows the map directly is found when the change is made.
    if call.method == "map" and any(later.method == "batch" for later in later_calls):
        yield "batch_first"
    if call.method in ("map", "interleave", "flat_map") and _may_be_cached(stage.dataset):
        yield "cache"


def _is_one_text(spec: Any) -> bool:
    """Report whether an element is one text, as where a flat_map goes over the names of files."""
    if not isinstance(spec, tf.TensorSpec):
        return False
    return bool(spec.dtype == tf.string and spec.shape.rank == 0)


def _may_be_cached(dataset: Any) -> bool:
    """Report whether each pass has the same elements, in any order, of which there are not endlessly many."""
    sources = [stage for stage in datasets.stages(dataset) if not datasets.inputs_of(stage)]
    is_finite = all(int(source.cardinality()) < _TOO_MANY_TO_CACHE for source in sources)
    has_infinite = any(int(source.cardinality()) == tf.data.INFINITE_CARDINALITY for source in sources)
    return is_finite and not has_infinite and not datasets.may_draw_values(dataset)
