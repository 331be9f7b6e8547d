"""The stages of a pipeline: the work of each, from tf.data's own model, and the call that made it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from runner.data.input_profile import timing
from runner.data.input_profile.reading import Reading
from runner.data.input_profile.recorder import METHODS, Call, Recorder
from runner.tf_private import datasets

_StageKey = tuple[Any, ...]
"""The place of a stage: (slot, tf.data's name) of each stage on the way from the end of the pipeline to it. The slot is
the stage's number among the inputs of the stage that reads it. () is the root, which TensorFlow adds behind the end."""


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
      elements_per_output: the number of its elements that one element of the whole pipeline takes.
      dataset: the dataset that ends with this stage; None: not known.
      secs_up_to: seconds per element of the whole pipeline if the pipeline ended here; None: not measured.
    """

    name: str
    depth: int
    call: Call | None
    secs: float
    share: float
    elements_per_output: float
    dataset: Any = None
    secs_up_to: float | None = None


@dataclasses.dataclass
class _Node:
    """A stage in tf.data's model of an iterator, with all iterators that it has had.

    Attributes:
      name: tf.data's name.
      counts: id -> (elements, nanoseconds) when the id was last seen.
      counts_at_start: the counts when counting began.
    """

    name: str
    counts: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    counts_at_start: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def num_elements(self) -> int:
        total = sum(number for number, _ in self.counts.values())
        return total - sum(number for number, _ in self.counts_at_start.values())

    @property
    def nanosecs(self) -> int:
        total = sum(nanosecs for _, nanosecs in self.counts.values())
        return total - sum(nanosecs for _, nanosecs in self.counts_at_start.values())


class _Model:
    """The elements and times of each stage, from tf.data's model of an iterator.

    The model forgets the iterators that have ended, such as those of an interleave's files, so it is read often.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.nodes: dict[_StageKey, _Node] = {}

    def start_counting(self) -> None:
        """Count from here on."""
        self.update()
        for node in self.nodes.values():
            node.counts_at_start = dict(node.counts)

    def update(self) -> None:
        """Read the model again."""
        model = tf.data.experimental.get_model_proto(self._iterator)
        if model.output in model.nodes:
            self._add(model.nodes, model.output, ())

    def _add(self, nodes: Any, node_id: int, key: _StageKey) -> None:
        """Store the counts of a node of the model, which belongs to the stage `key`, and of all nodes before it."""
        node_proto = nodes[node_id]
        node = self.nodes.setdefault(key, _Node(node_proto.name))
        node.counts[node_id] = (node_proto.num_elements, node_proto.processing_time)
        inputs = sorted(input_id for input_id in node_proto.inputs if input_id in nodes)
        for slot, input_id in enumerate(inputs):
            if _makes_datasets(node_proto.name):
                # The first input is the dataset itself, the others are those that its function makes.
                slot = min(slot, 1)
            self._add(nodes, input_id, (*key, (slot, nodes[input_id].name)))


def measure_stages(dataset: tf.data.Dataset, recorder: Recorder, check: Callable[[], None]) -> list[Stage]:
    """Read a dataset and return its stages, from the source to the end; `measure_up_to` tells their `secs_up_to`.

    Args:
      dataset: the dataset.
      recorder: the recorder of the calls that made it.
      check: called often; raises an exception if the work is to end.
    """
    options = tf.data.Options()
    options.autotune.enabled = True  # without it, TensorFlow keeps no model
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    reading = Reading(dataset.with_options(options), check)
    model = _Model(reading.iterator)
    reading.read(timing.WARM_UP_SECS / 2)
    model.start_counting()
    for _ in range(10):
        reading.read(timing.WARM_UP_SECS / 10)
        model.update()
    root = model.nodes.get(())
    if root is None or not root.num_elements:
        return []
    elements_per_output = _count_elements_per_output(model.nodes)
    work = {}
    for key, node in model.nodes.items():
        secs_per_element = node.nanosecs / max(1, node.num_elements) / 1e9
        work[key] = secs_per_element * elements_per_output[key]
    total = sum(work.values())
    datasets_and_calls = _pair_with_calls(dataset, model.nodes, recorder)
    stages = []
    for key in sorted(model.nodes, key=_order_from_source):
        if key == ():  # TensorFlow's own
            continue
        stage_dataset, call = datasets_and_calls.get(key, (None, None))
        share = work[key] / total if total else 0.0
        name = model.nodes[key].name
        stages.append(
            Stage(name, _depth_of(key, model), call, work[key], share, elements_per_output[key], stage_dataset)
        )
    return stages


def _depth_of(key: _StageKey, model: _Model) -> int:
    """Return in how many functions of other stages a stage is made."""
    depth = 0
    for length, (slot, _) in enumerate(key):
        parent = model.nodes[key[:length]]
        if _makes_datasets(parent.name):
            depth += slot  # 1 for what the parent's function makes, 0 for the parent's input
    return depth


def _makes_datasets(name: str) -> bool:
    """Report whether a stage of this name has a function that makes datasets."""
    return "FlatMap" in name or "Interleave" in name


def _order_from_source(key: _StageKey) -> tuple[Any, ...]:
    """Return a key that sorts stages from the source to the end: what a function makes comes before its stage."""
    # The last pair sorts a stage behind those that it reads, whose keys go on with a slot there.
    return (*((slot, name) for slot, name in key), (math.inf, ""))


def _count_elements_per_output(nodes: Mapping[_StageKey, _Node]) -> dict[_StageKey, float]:
    """Return how many elements of each stage one element of the whole pipeline takes."""
    per_output: dict[_StageKey, float] = {(): 1.0}
    for key in sorted(nodes, key=len):
        if key == ():
            continue
        parent = nodes[key[:-1]]
        slot, _ = key[-1]
        is_inner = slot == 1 and _makes_datasets(parent.name)
        # A repeat, or a stage whose function makes datasets, passes on each element of these. Their elements cannot be
        # counted: they have a new iterator for each pass or file, and the model forgets those that have ended.
        has_equal_counts = is_inner or "Repeat" in parent.name
        ratio = 1.0
        if not has_equal_counts and parent.num_elements:
            ratio = nodes[key].num_elements / parent.num_elements
        per_output[key] = per_output[key[:-1]] * ratio
    return per_output


def _pair_with_calls(
    dataset: Any, nodes: Mapping[_StageKey, _Node], recorder: Recorder
) -> dict[_StageKey, tuple[Any, Call | None]]:
    """Return stage -> (its dataset, the call that made it), as far as they are known.

    The dataset of a stage that a function of another stage makes is None: it exists only inside that function. The call
    is None if the user's code did not make the dataset by a method of METHODS.
    """
    pairs: dict[_StageKey, tuple[Any, Call | None]] = {}
    to_visit: list[tuple[Any, _StageKey]] = [(dataset, key) for key in nodes if len(key) == 1]
    while to_visit:
        end, key = to_visit.pop()
        stage = _find_first_of_kind(end, nodes[key].name)
        children = [other for other in nodes if other[:-1] == key]
        if stage is None:  # TensorFlow's own stage, or that of a `Reading`: the dataset belongs to the stage before it
            to_visit += [(end, child) for child in children if child[-1][0] == 0]
            continue
        call = recorder.call_of(stage)
        pairs[key] = (stage, call)
        inputs = datasets.inputs_of(stage)
        for child in children:
            slot, _ = child[-1]
            if slot == 1 and _makes_datasets(nodes[key].name):
                if call is not None:
                    pairs.update(_pair_inner(child, nodes, call, recorder))
            elif slot < len(inputs):
                to_visit.append((inputs[slot], child))
    return pairs


def _pair_inner(
    top: _StageKey, nodes: Mapping[_StageKey, _Node], outer: Call, recorder: Recorder
) -> dict[_StageKey, tuple[Any, Call | None]]:
    """Return stage -> (None, its call) of the stages that the function of the call `outer` makes.

    There are no datasets by which to find their calls, so stages and calls of the same method are paired in order.

    Args:
      top: the last of these stages.
      nodes: all stages.
      outer: the call whose function makes them.
      recorder: the recorder of all calls.
    """
    pairs: dict[_StageKey, tuple[Any, Call | None]] = {}
    inner = [key for key in nodes if key[: len(top)] == top]
    inner_calls = [call for call in recorder.calls if call.parent == outer.number]
    for method in METHODS:
        keys_of_method = [key for key in inner if _is_of_kind(method.replace("_", ""), nodes[key].name)]
        calls_of_method = [call for call in inner_calls if call.method == method]
        if len(keys_of_method) == len(calls_of_method):
            keys_of_method.sort(key=len, reverse=True)  # from the source on, in the order of the calls
            for key, call in zip(keys_of_method, calls_of_method, strict=True):
                pairs[key] = (None, call)
    return pairs


def _find_first_of_kind(dataset: Any, name: str) -> Any:
    """Go from the end of `dataset` to its source and return the first stage that can be the one which TensorFlow calls
    `name`; None: there is none.
    """
    while True:
        class_name = type(dataset).__name__.strip("_").partition("Dataset")[0]
        if _is_of_kind(class_name, name):
            return dataset
        inputs = datasets.inputs_of(dataset)
        if len(inputs) != 1:
            return None
        (dataset,) = inputs


def _is_of_kind(kind: str, name: str) -> bool:
    """Report whether a stage can be of a kind.

    Args:
      kind: the name of a class or method of tf.data, without "Dataset" and underscores: ParallelMap, repeat.
      name: the name that TensorFlow gives to the stage: ParallelMapV2, ForeverRepeat.
    """
    plain_name = name.removeprefix("Parallel").removeprefix("Forever").removeprefix("Finite").removeprefix("Memory")
    return plain_name.lower().startswith(kind.removeprefix("Parallel").lower())


def measure_up_to(stage: Stage, options: tf.data.Options, check: Callable[[], None]) -> float | None:
    """Read the pipeline up to `stage`, and return the seconds per element of the whole pipeline; None: the dataset of
    the stage is not known, or cannot be read.
    """
    if stage.dataset is None:
        return None
    try:
        reading = Reading(stage.dataset.with_options(options), check, counts_elements_only=True)
        reading.read(timing.CUT_SECS / 2)
        speed = reading.read(timing.CUT_SECS)
    except (tf.errors.OpError, TypeError, ValueError):  # its elements are datasets, or the like
        return None
    secs = max(0.0, speed.secs / speed.elements - _measure_overhead())
    return secs * stage.elements_per_output


@functools.cache
def _measure_overhead() -> float:
    """Return what a `Reading` itself takes for an element, in seconds: 10 to 30 us, as much as a small example."""
    reading = Reading(tf.data.Dataset.range(tf.int64.max), lambda: None, counts_elements_only=True)
    reading.read(timing.CUT_SECS / 2)
    speed = reading.read(timing.CUT_SECS)
    return speed.secs / speed.elements
