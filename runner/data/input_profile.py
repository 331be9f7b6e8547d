"""How fast an input is by itself: its speed, the work of each stage, and what a change of one stage gains.

A gain is measured, not computed: the input function is called once more with that one change made in its calls of
tf.data's methods, and both inputs are read in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.iterators import iterate
from runner.data.replica_batches import num_rows
from runner.system.user_frames import Frame, name_of, user_frames
from runner.tf_private import datasets
from runner.tf_private.replaced import all_replaced

WARM_UP_SECS = 1.5
"""Seconds for which an input is read before it is timed: AUTOTUNE chooses its values meanwhile."""

ROUNDS = 7
ROUND_SECS = 0.4
"""The inputs that are compared are read in turn, each `ROUNDS` times, so that other work on the machine slows all."""

DRAIN_SECS = 0.15
"""What an input has read ahead since its last turn is read, and not counted, for so long before its turn."""

SETTLE_SECS = 0.6
"""The longest time to wait for the input whose turn has ended: it fills its buffers, 0.4 s of work for the 512 batches
of a prefetch, and would slow the next one."""

CUT_SECS = 0.3
"""Seconds for which the pipeline up to one stage is read, and half as long before that."""

MIN_SHARE = 0.1
"""Smallest share of the work of a stage for which a change is tried."""

MAX_TRIALS = 6
"""Largest number of changes that are tried: those of the stages with the most work."""

FILL_SECS = 3.0
"""A cache is tried with the elements that its stage makes in so many seconds; they stand for all. Fewer would stay in
the processor's cache, and be read faster than all of them."""

_CALL_SECS = 0.05
"""About how long one call of TensorFlow reads, so that the way from Python costs nothing that can be measured."""

_MANY = 10**9
"""More elements than a cache holds: a range of this size counts, and is no data."""

_METHODS = (
    "batch", "cache", "filter", "flat_map", "interleave", "map", "padded_batch", "prefetch", "ragged_batch", "repeat",
    "shard", "shuffle", "skip", "snapshot", "take", "unbatch",
)  # fmt: skip
"""Methods of tf.data.Dataset whose calls are noted."""

CACHE_SECS = 20.0
"""Seconds for which an input with a cache is read before it is timed: its first pass fills the cache."""

MAX_BUSY = 0.6
"""Largest share of busy cores with which more parallel calls than cores are tried."""

Build = Callable[[], tf.data.Dataset]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def many_calls() -> int:
    """Return a number of parallel calls for a function that waits: AUTOTUNE makes at most one for each core."""
    return 8 * num_cores()


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a method of tf.data.Dataset while an input function ran.

    Attributes:
      number: the number of calls before it. The same call has the same number whenever the function is called.
      method: "map".
      function: the name of the user's function that it was given, "" if it was given none.
      frame: the line of the user's that made the call, or that called the library which made it; None: the runner did.
      is_own: the user's line itself made the call, so that the user can change it.
      is_parallel: it has num_parallel_calls=AUTOTUNE.
      parent: number of the call whose function made this call; None: the input function itself made it.
    """

    number: int
    method: str
    function: str
    frame: Frame | None
    is_own: bool
    is_parallel: bool
    parent: int | None


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of one call.

    Attributes:
      kind: "parallel": num_parallel_calls=AUTOTUNE.
        "many": `many_calls()` parallel calls.
        "interleave": an interleave of several files at a time in place of a flat_map.
        "batch_first": the batch before the map, whose function then gets whole batches.
        "cache": a cache behind the call.
      num_cached: the number of elements in that cache.
    """

    kind: str
    call: Call
    num_cached: int = 0


@dataclasses.dataclass(frozen=True)
class Speed:
    """What was read in some seconds."""

    elements: int
    examples: int
    num_bytes: int
    secs: float


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


@dataclasses.dataclass(frozen=True)
class Trial:
    """A change that was tried.

    Attributes:
      gain: examples per second with the change, divided by those without.
      examples_per_sec: with the change.
    """

    change: Change
    gain: float
    examples_per_sec: float


@dataclasses.dataclass(frozen=True)
class InputProfile:
    """What was measured of an input.

    Attributes:
      speed: what was read of the input as it is.
      cpu: share of this machine's cores that were busy with it, 0 to 1.
      stages: from the source to the end.
      tuned: (stage, parameter, value) of each value that AUTOTUNE has chosen.
      trials: the changes that were tried, those that gain most first.
    """

    speed: Speed
    cpu: float
    stages: Sequence[Stage]
    tuned: Sequence[tuple[str, str, float]]
    trials: Sequence[Trial]


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
    reading.read(CACHE_SECS if has_cache else WARM_UP_SECS)
    cpu_before = time.process_time()
    began = time.perf_counter()
    speed = reading.read(ROUND_SECS)
    cpu = (time.process_time() - cpu_before) / (time.perf_counter() - began) / num_cores()
    stages = _stages(dataset, recorder, check)
    options = dataset.options()
    stages = [dataclasses.replace(stage, secs_up_to=_secs_up_to(stage, options, check)) for stage in stages]
    tried = []
    for change in _changes(stages, recorder, speed, waits=cpu < MAX_BUSY):
        check()
        changed = _changed_reading(change, build, dataset)
        if changed is not None:
            tried.append((change, changed))
    readings = [reading, *(changed for _, changed in tried)]
    rounds = _in_turn(readings)
    speeds = [_median_speed(speeds) for speeds in zip(*rounds, strict=True)]
    trials = []
    for place, (change, _) in enumerate(tried, start=1):
        # Of each round by itself: the machine may be slower in one round than in another.
        gain = statistics.median(_examples_per_sec(speeds[place]) / _examples_per_sec(speeds[0]) for speeds in rounds)
        trials.append(Trial(change, gain, gain * _examples_per_sec(speeds[0])))
    trials.sort(key=lambda trial: trial.gain, reverse=True)
    return InputProfile(speeds[0], min(1.0, cpu), stages, reading.tuned(), trials)


def _in_turn(readings: Sequence[Reading]) -> list[list[Speed]]:
    """Return what was read in each round, for each of `readings`."""
    rounds = []
    for number in range(ROUNDS):
        speeds = {}
        order = list(range(len(readings)))
        if number % 2:
            order.reverse()  # none is always the first after another one
        for place in order:
            _settle()
            readings[place].read(DRAIN_SECS)
            speeds[place] = readings[place].read(ROUND_SECS)
        rounds.append([speeds[place] for place in range(len(readings))])
    return rounds


def _settle() -> None:
    """Wait until this process computes nothing, but not longer than SETTLE_SECS."""
    last = time.monotonic() + SETTLE_SECS
    is_busy = True
    while is_busy and time.monotonic() < last:
        before = time.process_time()
        time.sleep(0.02)
        is_busy = time.process_time() - before > 0.002


def _median_speed(speeds: Sequence[Speed]) -> Speed:
    return sorted(speeds, key=_examples_per_sec)[len(speeds) // 2]


def _examples_per_sec(speed: Speed) -> float:
    return speed.examples / speed.secs


class Reading:
    """A dataset while it is read.

    Args:
      dataset: a dataset of batches, read again and again.
      check: as in `profile`.
      counts_elements_only: the elements may have any structure: neither examples nor bytes are counted.
    """

    def __init__(self, dataset: tf.data.Dataset, check: Callable[[], None], counts_elements_only: bool = False) -> None:
        if int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
            dataset = dataset.repeat()
        with tf.device("CPU:0"):
            self.iterator = iterate(dataset)
        self._check = check
        self._at_a_time = 1
        self._read = _reader(self.iterator, counts_elements_only)

    def read(self, secs: float) -> Speed:
        """Read for about `secs` seconds.

        Raises:
          OutOfRangeError: there are no elements.
        """
        total = np.zeros([3], np.int64)
        began = time.perf_counter()
        while True:
            self._check()
            before = time.perf_counter()
            total += self._read(tf.constant(self._at_a_time, tf.int64)).numpy()
            now = time.perf_counter()
            took = now - before
            if now - began >= secs:
                elements, examples, num_bytes = map(int, total)
                return Speed(elements, examples, num_bytes, now - began)
            if took < _CALL_SECS / 2:
                self._at_a_time *= 2
            elif took > _CALL_SECS * 2:
                self._at_a_time = max(1, self._at_a_time // 2)

    def tuned(self) -> list[tuple[str, str, float]]:
        """Return (stage, parameter, value) of each value that AUTOTUNE has chosen so far."""
        try:
            nodes = tf.data.experimental.get_model_proto(self.iterator).nodes
        except tf.errors.OpError:  # autotune.enabled=false
            return []
        found = []
        for number in sorted(nodes, reverse=True):
            for parameter in nodes[number].parameters:
                if parameter.tunable:
                    found.append((nodes[number].name, parameter.name, parameter.state_value))
        return list(dict.fromkeys(found))


def _reader(iterator: Any, counts_elements_only: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that reads a number of elements, and returns (elements, examples, bytes), int64 `[3]`."""

    def read_one(left: tf.Tensor, total: tf.Tensor) -> Any:
        element = iterator.get_next()
        counted = tf.constant([1, 0, 0], tf.int64)
        if not counts_elements_only:
            counted = tf.stack([tf.constant(1, tf.int64), num_rows(element), _num_bytes(element)])
        return left - 1, total + counted

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
    def read(number: tf.Tensor) -> tf.Tensor:
        start = (number, tf.zeros([3], tf.int64))
        # One element after the other, as the loop of steps reads them.
        _, total = tf.while_loop(lambda left, _: left > 0, read_one, start, parallel_iterations=1)
        return total

    return read


def _num_bytes(element: Any) -> tf.Tensor:
    sizes = [tf.constant(0, tf.int64)]
    for leaf in tf.nest.flatten(element, expand_composites=True):
        if leaf is None or leaf.dtype == tf.variant:
            continue
        if leaf.dtype == tf.string:
            sizes.append(tf.reduce_sum(tf.cast(tf.strings.length(leaf), tf.int64)))
        else:
            sizes.append(tf.size(leaf, tf.int64) * leaf.dtype.size)
    return tf.add_n(sizes)


# --- the calls of an input function -----------------------------------------------------------------------------------


class Recorder:
    """Notes the calls of tf.data's methods, and makes a change in one of them.

    Args:
      change: the change; None: none is made.

    Attributes:
      calls: all calls.
      was_changed: the change was made.
    """

    def __init__(self, change: Change | None = None) -> None:
        self.calls: list[Call] = []
        self.was_changed = False
        self._change = change
        self._made: dict[int, tuple[Any, Call]] = {}  # by the dataset's id; it is kept, so that no other gets its id
        self._under_way: list[int] = []
        self._mapped: tuple[Any, Any, Any] | None = None  # the map that is to come after its batch

    def call_of(self, dataset: Any) -> Call | None:
        """Return the call that returned `dataset`; None: it is not known."""
        _, call = self._made.get(id(dataset), (None, None))
        return call

    def recorded(self, method: str) -> Callable[..., Any]:
        """Return a function in place of a method of tf.data.Dataset."""
        original = getattr(tf.data.Dataset, method)

        @functools.wraps(original)
        def record(dataset: Any, *arguments: Any, **options: Any) -> Any:
            call = self._noted(method, arguments, options)
            self._under_way.append(call.number)
            try:
                made = self._called(call, original, dataset, arguments, options)
            finally:
                self._under_way.pop()
            self._made[id(made)] = (made, call)
            return made

        return record

    def _noted(self, method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Call:
        given = [value for value in (*arguments, *options.values()) if callable(value)]
        stack = traceback.extract_stack()[:-2]  # without this method and `record`
        frames = user_frames(stack)
        caller = (stack[-1].filename, stack[-1].lineno)
        parallel = options.get("num_parallel_calls", arguments[1] if method == "map" and len(arguments) > 1 else None)
        call = Call(
            number=len(self.calls),
            method=method,
            function=_short_name(given[0]) if given else "",
            frame=frames[-1] if frames else None,
            is_own=bool(frames) and frames[-1][:2] == caller,
            is_parallel=parallel is not None and not tf.is_tensor(parallel) and parallel == tf.data.AUTOTUNE,
            parent=self._under_way[-1] if self._under_way else None,
        )
        self.calls.append(call)
        return call

    def _called(self, call: Call, original: Any, dataset: Any, arguments: Any, options: Any) -> Any:
        """Call `original`, with the change if it is one of this call."""
        if call.method == "cache":
            return original(dataset)  # in memory: this command writes no files
        if call.method == "snapshot":
            return dataset
        if self._mapped is not None and dataset is self._mapped[0]:
            if call.method == "batch":
                return self._batched_first(original, arguments, options)
            if call.method in ("repeat", "prefetch"):  # the map may come after them as well
                made = original(dataset, *arguments, **options)
                self._mapped = (made, original(self._mapped[1], *arguments, **options), self._mapped[2])
                return made
        if self._change is None or call.number != self._change.call.number:
            return original(dataset, *arguments, **options)
        kind = self._change.kind
        if kind == "batch_first":
            made = original(dataset, *arguments, **options)
            self._mapped = (made, dataset, (original, arguments, options))
            return made
        self.was_changed = True
        if kind == "cache":
            # A few elements stand for all: filling the cache with all of them may take hours.
            made = original(dataset.take(self._change.num_cached), *arguments, **options).cache()
            for buffer in datasets.shuffle_buffers(dataset):  # which then comes behind the cache
                made = made.shuffle(buffer)
            return made.repeat()
        if kind == "interleave":
            return dataset.interleave(arguments[0], num_parallel_calls=tf.data.AUTOTUNE)
        options = {**options, "num_parallel_calls": many_calls() if kind == "many" else tf.data.AUTOTUNE}
        if call.method == "map":
            arguments = arguments[:1]  # num_parallel_calls may be the second
        return original(dataset, *arguments, **options)

    def _batched_first(self, batch: Any, arguments: Any, options: Any) -> Any:
        assert self._mapped is not None
        _, dataset, (original, given, more) = self._mapped
        function = given[0]
        self.was_changed = True

        def of_batch(*element: Any) -> Any:
            if len(element) == 1:
                return tf.vectorized_map(function, element[0], fallback_to_while_loop=False)
            return tf.vectorized_map(lambda parts: function(*parts), element, fallback_to_while_loop=False)

        return original(batch(dataset, *arguments, **options), of_batch, *given[1:], **more)


@contextlib.contextmanager
def recording(change: Change | None = None) -> Iterator[Recorder]:
    """Note the calls of tf.data's methods inside this context, and make `change` in one of them."""
    recorder = Recorder(change)
    replacements = [(tf.data.Dataset, method, recorder.recorded(method)) for method in _METHODS]
    with all_replaced(*replacements):
        yield recorder


def _short_name(function: Any) -> str:
    return name_of(function).rpartition(".")[2]


# --- the stages -------------------------------------------------------------------------------------------------------

_Key = tuple[Any, ...]


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
        return sum(count - self.before.get(number, (0, 0))[0] for number, (count, _) in self.counts.items())

    @property
    def nanosecs(self) -> int:
        return sum(took - self.before.get(number, (0, 0))[1] for number, (_, took) in self.counts.items())


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
        inputs = sorted(one for one in given.inputs if one in nodes)
        has_inner = "FlatMap" in given.name or "Interleave" in given.name
        for place, one in enumerate(inputs):
            # The first input is the dataset itself, the others are those that its function makes.
            slot = min(place, 1) if has_inner else place
            self._add(nodes, one, (*key, (slot, nodes[one].name)))


def _stages(dataset: tf.data.Dataset, recorder: Recorder, check: Callable[[], None]) -> list[Stage]:
    """Return the stages of a dataset, from the source to the end, without `secs_up_to`."""
    options = tf.data.Options()
    options.autotune.enabled = True  # without it, TensorFlow keeps no model
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    reading = Reading(dataset.with_options(options), check)
    model = _Model(reading.iterator)
    reading.read(WARM_UP_SECS / 2)
    model.begin()
    for _ in range(10):
        reading.read(WARM_UP_SECS / 10)
        model.look()
    root = model.nodes.get(())
    if root is None or not root.elements:
        return []
    per_output = _per_output(model.nodes)
    work = {}
    for key, node in model.nodes.items():
        work[key] = node.nanosecs / max(1, node.elements) / 1e9 * per_output[key]
    total = sum(work.values())
    pairs = _paired(dataset, model.nodes, recorder)
    stages = []
    for key in sorted(model.nodes, key=_from_the_source):
        if key == ():
            continue
        depth = sum(slot for (slot, _), parent in zip(key, _parents(key), strict=True) if _has_inner(parent, model))
        cut, call = pairs.get(key, (None, None))
        share = work[key] / total if total else 0.0
        stages.append(Stage(model.nodes[key].name, depth, call, work[key], share, per_output[key], cut))
    return stages


def _parents(key: _Key) -> list[_Key]:
    return [key[:length] for length in range(len(key))]


def _has_inner(key: _Key, model: _Model) -> bool:
    return "FlatMap" in model.nodes[key].name or "Interleave" in model.nodes[key].name


def _from_the_source(key: _Key) -> tuple[Any, ...]:
    """Return a key that sorts stages from the source to the end: what a function makes comes before its stage."""
    return (*((slot, name) for slot, name in key), (9, ""))


def _per_output(nodes: Mapping[_Key, _Node]) -> dict[_Key, float]:
    """Return how many elements of each stage one element of the whole pipeline takes."""
    found: dict[_Key, float] = {(): 1.0}
    for key in sorted(nodes, key=len):
        if key == ():
            continue
        parent = nodes[key[:-1]]
        is_inner = key[-1][0] == 1 and ("FlatMap" in parent.name or "Interleave" in parent.name)
        # Their iterators are made anew for each pass or file, and the model forgets those that have ended.
        passes_on = is_inner or "Repeat" in parent.name
        ratio = 1.0 if passes_on or not parent.elements else nodes[key].elements / parent.elements
        found[key] = found[key[:-1]] * ratio
    return found


def _paired(dataset: Any, nodes: Mapping[_Key, _Node], recorder: Recorder) -> dict[_Key, tuple[Any, Call | None]]:
    """Return the dataset and the call of stages; those whose dataset is not known are left out."""
    found: dict[_Key, tuple[Any, Call | None]] = {}
    waiting: list[tuple[Any, _Key]] = [(dataset, key) for key in nodes if len(key) == 1]
    while waiting:
        given, key = waiting.pop()
        stage = _first_of_kind(given, nodes[key].name)
        children = [other for other in nodes if other[:-1] == key]
        if stage is None:
            waiting += [(given, child) for child in children if child[-1][0] == 0]
            continue
        call = recorder.call_of(stage)
        found[key] = (stage, call)
        inputs = datasets.inputs_of(stage)
        for child in children:
            slot = child[-1][0]
            has_inner = "FlatMap" in nodes[key].name or "Interleave" in nodes[key].name
            if has_inner and slot == 1:
                if call is not None:
                    found.update(_inner_calls(child, nodes, call, recorder))
            elif slot < len(inputs):
                waiting.append((inputs[slot], child))
    return found


def _inner_calls(
    top: _Key, nodes: Mapping[_Key, _Node], outer: Call, recorder: Recorder
) -> dict[_Key, tuple[Any, Call | None]]:
    """Return the calls of stages that the function of `outer` makes, of which there is no dataset here: by their order
    among those of the same method.
    """
    found: dict[_Key, tuple[Any, Call | None]] = {}
    inner = [key for key in nodes if key[: len(top)] == top]
    for method in _METHODS:
        of_method = [key for key in inner if _is_of_kind(method.replace("_", ""), nodes[key].name)]
        calls = [call for call in recorder.calls if call.parent == outer.number and call.method == method]
        if len(of_method) == len(calls):
            of_method.sort(key=len, reverse=True)
            found.update({key: (None, call) for key, call in zip(of_method, calls, strict=True)})
    return found


def _first_of_kind(dataset: Any, name: str) -> Any:
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


def _secs_up_to(stage: Stage, options: tf.data.Options, check: Callable[[], None]) -> float | None:
    """Return the seconds per element of the whole pipeline if it ended with `stage`; None: its dataset is not known."""
    if stage.cut is None:
        return None
    try:
        reading = Reading(stage.cut.with_options(options), check, counts_elements_only=True)
        reading.read(CUT_SECS / 2)
        speed = reading.read(CUT_SECS)
    except (tf.errors.OpError, TypeError, ValueError):  # its elements are datasets, or the like
        return None
    secs = max(0.0, speed.secs / speed.elements - _loop_secs())
    return secs * stage.elements


@functools.cache
def _loop_secs() -> float:
    """Return what a `Reading` itself takes for an element, in seconds: 10 to 30 us, as much as a small example."""
    reading = Reading(tf.data.Dataset.range(_MANY), lambda: None, counts_elements_only=True)
    reading.read(CUT_SECS / 2)
    speed = reading.read(CUT_SECS)
    return speed.secs / speed.elements


# --- the changes ------------------------------------------------------------------------------------------------------


def _changes(stages: Sequence[Stage], recorder: Recorder, speed: Speed, *, waits: bool) -> list[Change]:
    """Return the changes that are worth a try, those of the stages with the most work first.

    Args:
      speed: of the input as it is.
      waits: the cores are not busy with the input.
    """
    found = []
    for stage in sorted(stages, key=lambda stage: stage.share, reverse=True):
        call = stage.call
        if call is None or not call.is_own or stage.share < MIN_SHARE:
            continue
        made_in_time = stage.elements * speed.elements / speed.secs * FILL_SECS
        num_cached = max(1, int(made_in_time))
        found += [Change(kind, call, num_cached) for kind in _kinds(stage, call, recorder, waits=waits)]
    return list(dict.fromkeys(found))[:MAX_TRIALS]


def _kinds(stage: Stage, call: Call, recorder: Recorder, *, waits: bool) -> Iterator[str]:
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
    if call.method == "map" and any(later.method == "batch" for later in recorder.calls[call.number + 1 :]):
        yield "batch_first"
    if call.method in ("map", "interleave", "flat_map") and _may_be_cached(stage.cut):
        yield "cache"


def _are_names(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.dtype == tf.string and spec.shape.rank == 0


def _may_be_cached(dataset: Any) -> bool:
    """Report whether each pass has the same elements, in any order, of which there are not endlessly many."""
    sources = [stage for stage in datasets.stages(dataset) if not datasets.inputs_of(stage)]
    is_finite = all(int(source.cardinality()) < _MANY for source in sources)
    has_infinite = any(int(source.cardinality()) == tf.data.INFINITE_CARDINALITY for source in sources)
    return is_finite and not has_infinite and not datasets.may_draw_values(dataset)


def _changed_reading(change: Change, build: Build, dataset: tf.data.Dataset) -> Reading | None:
    """Return the input with a change, warmed up; None: the change cannot be made."""
    with contextlib.suppress(Exception):  # of the user's function, which was not written for the change
        with recording(change) as recorder:
            changed = build()
        if not recorder.was_changed or not _are_alike(changed.element_spec, dataset.element_spec):
            return None
        reading = Reading(changed, lambda: None)
        reading.read(2 * FILL_SECS if change.kind == "cache" else WARM_UP_SECS)
        return reading
    return None


def _are_alike(spec: Any, other: Any) -> bool:
    try:
        tf.nest.assert_same_structure(spec, other, expand_composites=True)
    except (TypeError, ValueError):
        return False
    return [leaf.dtype for leaf in tf.nest.flatten(spec)] == [leaf.dtype for leaf in tf.nest.flatten(other)]
