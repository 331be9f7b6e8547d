"""The stages of a pipeline: the work of each, from tf.data's own model, and the call that made it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from runner.data.input_profile import timing
from runner.data.input_profile.reading import Reading
from runner.data.input_profile.recorder import METHODS, Call, Recorder
from runner.tf_private import datasets

_Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a pipeline, as TensorFlow runs it without fusing stages.

    Attributes:
      name: tf.data's name of it, "ParallelMapV2".
      depth: 0 of the pipeline itself; more of a stage in a function of flat_map or interleave.
      call: the call that made it; None: not known.
      secs: the work per element of the whole pipeline, without that of the stages before it: seconds of all threads
        together.
      share: its part of the work of all stages, 0 to 1.
      elements: the number of its elements that one element of the whole pipeline takes.
      cut: the dataset that ends here; None: not known.
      secs_up_to: seconds per element of the whole pipeline if the pipeline ended here; None: not measured.
    """

    name: str
    depth: int
    call: Call | None
    secs: float
    share: float
    elements: float
    cut: Any = None
    secs_up_to: float | None = None


@dataclasses.dataclass
class _Node:
    """A stage in tf.data's model of an iterator, with all iterators that it has had.

    Attributes:
      name: tf.data's name.
      counts: id -> (elements, nanoseconds) when the id was last seen.
      before: the same when counting began.
    """

    name: str
    counts: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    before: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def elements(self) -> int:
        now = sum(elements for elements, _ in self.counts.values())
        return now - sum(elements for elements, _ in self.before.values())

    @property
    def nanosecs(self) -> int:
        now = sum(nanosecs for _, nanosecs in self.counts.values())
        return now - sum(nanosecs for _, nanosecs in self.before.values())


class _Model:
    """What tf.data's model of an iterator says, seen several times: it forgets the iterators that have ended, such as
    those of an interleave's files.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.nodes: dict[_Key, _Node] = {}

    def begin(self) -> None:
        """Count from here on."""
        self.look()
        for node in self.nodes.values():
            node.before = dict(node.counts)

    def look(self) -> None:
        model = tf.data.experimental.get_model_proto(self._iterator)
        if model.output in model.nodes:
            self._add(model.nodes, model.output, ())

    def _add(self, nodes: Any, number: int, key: _Key) -> None:
        given = nodes[number]
        node = self.nodes.setdefault(key, _Node(given.name))
        node.counts[number] = (given.num_elements, given.processing_time)
        inputs = sorted(input_number for input_number in given.inputs if input_number in nodes)
        for slot, input_number in enumerate(inputs):
            if _makes_datasets(given.name):
                # The first input is the dataset itself, the others are those that its function makes.
                slot = min(slot, 1)
            self._add(nodes, input_number, (*key, (slot, nodes[input_number].name)))


def measure_stages(dataset: tf.data.Dataset, recorder: Recorder, check: Callable[[], None]) -> list[Stage]:
    """Return the stages of a dataset, from the source to the end, without `secs_up_to`."""
    options = tf.data.Options()
    options.autotune.enabled = True  # without it, TensorFlow keeps no model
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    reading = Reading(dataset.with_options(options), check)
    model = _Model(reading.iterator)
    reading.read(timing.WARM_UP_SECS / 2)
    model.begin()
    for _ in range(10):
        reading.read(timing.WARM_UP_SECS / 10)
        model.look()
    root = model.nodes.get(())
    if root is None or not root.elements:
        return []
    per_output = _count_per_output(model.nodes)
    work = {}
    for key, node in model.nodes.items():
        secs_per_element = node.nanosecs / max(1, node.elements) / 1e9
        work[key] = secs_per_element * per_output[key]
    total = sum(work.values())
    pairs = _pair_with_calls(dataset, model.nodes, recorder)
    stages = []
    for key in sorted(model.nodes, key=_order_from_source):
        if key == ():
            continue
        cut, call = pairs.get(key, (None, None))
        share = work[key] / total if total else 0.0
        name = model.nodes[key].name
        stages.append(Stage(name, _depth_of(key, model), call, work[key], share, per_output[key], cut))
    return stages


def _depth_of(key: _Key, model: _Model) -> int:
    """Return in how many functions of other stages a stage is made."""
    depth = 0
    for length, (slot, _) in enumerate(key):
        parent = model.nodes[key[:length]]
        if _makes_datasets(parent.name):
            depth += slot
    return depth


def _makes_datasets(name: str) -> bool:
    """Report whether a stage of this name has a function that makes datasets."""
    return "FlatMap" in name or "Interleave" in name


def _order_from_source(key: _Key) -> tuple[Any, ...]:
    """Return a key that sorts stages from the source to the end: what a function makes comes before its stage."""
    return (*((slot, name) for slot, name in key), (9, ""))


def _count_per_output(nodes: Mapping[_Key, _Node]) -> dict[_Key, float]:
    """Return how many elements of each stage one element of the whole pipeline takes."""
    found: dict[_Key, float] = {(): 1.0}
    for key in sorted(nodes, key=len):
        if key == ():
            continue
        parent = nodes[key[:-1]]
        slot, _ = key[-1]
        is_inner = slot == 1 and _makes_datasets(parent.name)
        # Their iterators are made anew for each pass or file, and the model forgets those that have ended.
        passes_on = is_inner or "Repeat" in parent.name
        ratio = 1.0
        if not passes_on and parent.elements:
            ratio = nodes[key].elements / parent.elements
        found[key] = found[key[:-1]] * ratio
    return found


def _pair_with_calls(
    dataset: Any, nodes: Mapping[_Key, _Node], recorder: Recorder
) -> dict[_Key, tuple[Any, Call | None]]:
    """Return the dataset and the call of stages; those whose dataset is not known are left out."""
    found: dict[_Key, tuple[Any, Call | None]] = {}
    waiting: list[tuple[Any, _Key]] = [(dataset, key) for key in nodes if len(key) == 1]
    while waiting:
        given, key = waiting.pop()
        stage = _find_first_of_kind(given, nodes[key].name)
        children = [other for other in nodes if other[:-1] == key]
        if stage is None:
            waiting += [(given, child) for child in children if child[-1][0] == 0]
            continue
        call = recorder.call_of(stage)
        found[key] = (stage, call)
        inputs = datasets.inputs_of(stage)
        for child in children:
            slot, _ = child[-1]
            if slot == 1 and _makes_datasets(nodes[key].name):
                if call is not None:
                    found.update(_pair_inner(child, nodes, call, recorder))
            elif slot < len(inputs):
                waiting.append((inputs[slot], child))
    return found


def _pair_inner(
    top: _Key, nodes: Mapping[_Key, _Node], outer: Call, recorder: Recorder
) -> dict[_Key, tuple[Any, Call | None]]:
    """Return the calls of stages that the function of `outer` makes, of which there is no dataset here: by their order
    among those of the same method.
    """
    found: dict[_Key, tuple[Any, Call | None]] = {}
    inner = [key for key in nodes if key[: len(top)] == top]
    inner_calls = [call for call in recorder.calls if call.parent == outer.number]
    for method in METHODS:
        of_method = [key for key in inner if _is_of_kind(method.replace("_", ""), nodes[key].name)]
        calls = [call for call in inner_calls if call.method == method]
        if len(of_method) == len(calls):
            of_method.sort(key=len, reverse=True)
            for key, call in zip(of_method, calls, strict=True):
                found[key] = (None, call)
    return found


def _find_first_of_kind(dataset: Any, name: str) -> Any:
    """Return the first stage of `dataset`, from its end, that can be the one that TensorFlow calls `name`; None: there
    is none.
    """
    while True:
        kind = type(dataset).__name__.strip("_").partition("Dataset")[0]
        if _is_of_kind(kind, name):
            return dataset
        inputs = datasets.inputs_of(dataset)
        if len(inputs) != 1:
            return None
        (dataset,) = inputs


def _is_of_kind(kind: str, name: str) -> bool:
    plain = name.removeprefix("Parallel").removeprefix("Forever").removeprefix("Finite").removeprefix("Memory")
    return plain.lower().startswith(kind.removeprefix("Parallel").lower())


def measure_up_to(stage: Stage, options: tf.data.Options, check: Callable[[], None]) -> float | None:
    """Return the seconds per element of the whole pipeline if it ended with `stage`; None: its dataset is not known."""
    if stage.cut is None:
        return None
    try:
        reading = Reading(stage.cut.with_options(options), check, counts_elements_only=True)
        reading.read(timing.CUT_SECS / 2)
        speed = reading.read(timing.CUT_SECS)
    except (tf.errors.OpError, TypeError, ValueError):  # its elements are datasets, or the like
        return None
    secs = max(0.0, speed.secs / speed.elements - _measure_loop())
    return secs * stage.elements


@functools.cache
def _measure_loop() -> float:
    """Return what a `Reading` itself takes for an element, in seconds: 10 to 30 us, as much as a small example."""
    reading = Reading(tf.data.Dataset.range(tf.int64.max), lambda: None, counts_elements_only=True)
    reading.read(timing.CUT_SECS / 2)
    speed = reading.read(timing.CUT_SECS)
    return speed.secs / speed.elements
