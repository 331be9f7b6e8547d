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
from typing import Any, NamedTuple

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
"""In each round the input is read as it is, with a change, and as it is again, each for so long: other work on the
machine slows all three."""

MAX_SLOWER = 1
"""A gain is clear if the changed input was the fastest of the three in all rounds but so many.

Of three reads that differ by chance alone, the one in the middle is the fastest in 1 of 3 rounds, and in 6 or 7 of 7
rounds with a chance of 15 in 2187, 0.7 %. Of `MAX_TRIALS` changes that gain nothing, one gets there in 4 % of all
commands, and then has to reach `MIN_GAIN` too."""

MIN_GAIN = 1.2
"""Smallest median gain that is clear. A smaller one is rarely worth the work, and a model that needs the same cores may
take it away."""

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

MAX_FILL_SECS = 15.0
"""The longest time to wait until they are in the cache: the machine may do other work meanwhile."""

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
      num_filling: the number of elements of the whole pipeline that are read until it is full.
    """

    kind: str
    call: Call
    num_cached: int = 0
    num_filling: int = 0


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
    warm_up_secs = CACHE_SECS if has_cache else WARM_UP_SECS
    reading.read(warm_up_secs)
    cpu_before = time.process_time()
    began = time.perf_counter()
    speed = reading.read(ROUND_SECS)
    cpu_secs = time.process_time() - cpu_before
    secs = time.perf_counter() - began
    cpu = cpu_secs / secs / num_cores()
    stages = _measure_stages(dataset, recorder, check)
    options = dataset.options()
    stages = [dataclasses.replace(stage, secs_up_to=_measure_up_to(stage, options, check)) for stage in stages]
    tried: dict[Change, Reading] = {}
    untried: dict[Change, Exception] = {}
    for change in _list_changes(stages, recorder, speed, waits=cpu < MAX_BUSY):
        try:
            changed = _open_changed(change, build, dataset, check)
            _warm_up(changed, change, warm_up_secs)
        except CannotTryError as error:
            untried[change] = error
        except _InputError as error:
            untried[change] = error.of_input
        else:
            tried[change] = changed
    speeds, rounds = _read_in_turn(reading, tried, untried)
    trials = [Trial(change, turns) for change, turns in rounds.items() if change not in untried]
    trials.sort(key=lambda trial: trial.gain, reverse=True)
    left = [Untried(change, error) for change, error in untried.items()]
    return InputProfile(_median_speed(speeds), min(1.0, cpu), stages, reading.tuned(), trials, left)


def _read_in_turn(
    reading: Reading, tried: Mapping[Change, Reading], untried: dict[Change, Exception]
) -> tuple[list[Speed], dict[Change, list[Round]]]:
    """Read the input as it is, and with each change.

    Args:
      reading: the input as it is.
      tried: the inputs with a change.
      untried: gets the changes whose input fails, and why.

    Returns:
      What was read of the input as it is, and the rounds of each change.
    """
    unchanged = []
    rounds: dict[Change, list[Round]] = {change: [] for change in tried}
    for number in range(ROUNDS):
        order = [change for change in tried if change not in untried]
        if number % 2:
            order.reverse()  # none is always the first after another one
        unchanged.append(_take_turn(reading))
        for change in order:
            try:
                changed = _take_turn(tried[change])
            except _READ_ERRORS as error:
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
    reading.read(DRAIN_SECS)
    return reading.read(ROUND_SECS)


def _wait_until_idle() -> None:
    """Wait until this process computes nothing, but not longer than SETTLE_SECS."""
    last = time.monotonic() + SETTLE_SECS
    is_busy = True
    while is_busy and time.monotonic() < last:
        before = time.process_time()
        time.sleep(0.02)
        is_busy = time.process_time() - before > 0.002


def _median_speed(speeds: Sequence[Speed]) -> Speed:
    ordered = sorted(speeds, key=_examples_per_sec)
    return ordered[len(ordered) // 2]


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
        self._read = _build_reader(self.iterator, counts_elements_only)

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


def _build_reader(iterator: Any, counts_elements_only: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that reads a number of elements, and returns (elements, examples, bytes), int64 `[3]`."""

    def read_one(left: tf.Tensor, total: tf.Tensor) -> Any:
        element = iterator.get_next()
        counted = tf.constant([1, 0, 0], tf.int64)
        if not counts_elements_only:
            counted = tf.stack([tf.constant(1, tf.int64), num_rows(element), _num_bytes(element)])
        return left - 1, total + counted

    def is_any_left(left: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return left > 0

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
    def read(number: tf.Tensor) -> tf.Tensor:
        start = (number, tf.zeros([3], tf.int64))
        # One element after the other, as the loop of steps reads them.
        _, total = tf.while_loop(is_any_left, read_one, start, parallel_iterations=1)
        return total

    return read


def _num_bytes(element: Any) -> tf.Tensor:
    sizes = [tf.constant(0, tf.int64)]
    for leaf in tf.nest.flatten(element, expand_composites=True):
        if leaf is None or leaf.dtype == tf.variant:
            continue
        if leaf.dtype == tf.string:
            lengths = tf.cast(tf.strings.length(leaf), tf.int64)
            sizes.append(tf.reduce_sum(lengths))
        else:
            sizes.append(tf.size(leaf, tf.int64) * leaf.dtype.size)
    return tf.add_n(sizes)


# --- the calls of an input function -----------------------------------------------------------------------------------


class _WaitingMap(NamedTuple):
    """A map that is to come after the batch that follows it.

    Attributes:
      made: the dataset that the input function has: the map is before its batch there.
      given: the same without the map.
      original, arguments, options: the call of the map.
    """

    made: Any
    given: Any
    original: Any
    arguments: Any
    options: Any


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
        self._waiting: _WaitingMap | None = None

    def call_of(self, dataset: Any) -> Call | None:
        """Return the call that returned `dataset`; None: it is not known."""
        _, call = self._made.get(id(dataset), (None, None))
        return call

    def recorded(self, method: str) -> Callable[..., Any]:
        """Return a function in place of a method of tf.data.Dataset."""
        original = getattr(tf.data.Dataset, method)

        @functools.wraps(original)
        def record(dataset: Any, *arguments: Any, **options: Any) -> Any:
            call = self._note(method, arguments, options)
            self._under_way.append(call.number)
            try:
                made = self._call(call, original, dataset, arguments, options)
            finally:
                self._under_way.pop()
            self._made[id(made)] = (made, call)
            return made

        return record

    def _note(self, method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Call:
        stack = traceback.extract_stack()[:-2]  # without this method and `record`
        frame = next(reversed(user_frames(stack)), None)
        caller = (stack[-1].filename, stack[-1].lineno)
        is_own = frame is not None and frame[:2] == caller
        function = _function_name([*arguments, *options.values()])
        parent = next(reversed(self._under_way), None)
        is_parallel = _is_parallel(method, arguments, options)
        call = Call(len(self.calls), method, function, frame, is_own, is_parallel, parent)
        self.calls.append(call)
        return call

    def _call(self, call: Call, original: Any, dataset: Any, arguments: Any, options: Any) -> Any:
        """Call `original`, with the change if it is one of this call."""
        if call.method == "cache":
            return original(dataset)  # in memory: this command writes no files
        if call.method == "snapshot":
            return dataset
        waiting = self._waiting
        if waiting is not None and dataset is waiting.made:
            if call.method == "batch":
                return self._batch_first(waiting, original, arguments, options)
            if call.method in ("repeat", "prefetch"):  # the map may come after them as well
                made = original(dataset, *arguments, **options)
                given = original(waiting.given, *arguments, **options)
                self._waiting = waiting._replace(made=made, given=given)
                return made
        if self._change is None or call.number != self._change.call.number:
            return original(dataset, *arguments, **options)
        kind = self._change.kind
        if kind == "batch_first":
            made = original(dataset, *arguments, **options)
            self._waiting = _WaitingMap(made, dataset, original, arguments, options)
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
        num_calls = many_calls() if kind == "many" else tf.data.AUTOTUNE
        options = {**options, "num_parallel_calls": num_calls}
        if call.method == "map":
            arguments = arguments[:1]  # num_parallel_calls may be the second
        return original(dataset, *arguments, **options)

    def _batch_first(self, waiting: _WaitingMap, batch: Any, arguments: Any, options: Any) -> Any:
        """Call `batch`, and then the map before it with a function of whole batches."""
        function = waiting.arguments[0]
        self.was_changed = True

        def of_batch(*element: Any) -> Any:
            if len(element) == 1:
                return tf.vectorized_map(function, element[0], fallback_to_while_loop=False)
            return tf.vectorized_map(lambda parts: function(*parts), element, fallback_to_while_loop=False)

        batched = batch(waiting.given, *arguments, **options)
        return waiting.original(batched, of_batch, *waiting.arguments[1:], **waiting.options)


@contextlib.contextmanager
def recording(change: Change | None = None) -> Iterator[Recorder]:
    """Note the calls of tf.data's methods inside this context, and make `change` in one of them."""
    recorder = Recorder(change)
    replacements = [(tf.data.Dataset, method, recorder.recorded(method)) for method in _METHODS]
    with all_replaced(*replacements):
        yield recorder


def _function_name(arguments: Sequence[Any]) -> str:
    """Return the short name of the first function among `arguments`, "" if there is none."""
    for value in arguments:
        if callable(value):
            return name_of(value).rpartition(".")[2]
    return ""


def _is_parallel(method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Report whether a call has num_parallel_calls=AUTOTUNE."""
    number = options.get("num_parallel_calls")
    if method == "map" and len(arguments) > 1:
        number = arguments[1]
    return isinstance(number, int | np.integer) and bool(number == tf.data.AUTOTUNE)


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


def _measure_stages(dataset: tf.data.Dataset, recorder: Recorder, check: Callable[[], None]) -> list[Stage]:
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
    for method in _METHODS:
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


def _measure_up_to(stage: Stage, options: tf.data.Options, check: Callable[[], None]) -> float | None:
    """Return the seconds per element of the whole pipeline if it ended with `stage`; None: its dataset is not known."""
    if stage.cut is None:
        return None
    try:
        reading = Reading(stage.cut.with_options(options), check, counts_elements_only=True)
        reading.read(CUT_SECS / 2)
        speed = reading.read(CUT_SECS)
    except (tf.errors.OpError, TypeError, ValueError):  # its elements are datasets, or the like
        return None
    secs = max(0.0, speed.secs / speed.elements - _measure_loop())
    return secs * stage.elements


@functools.cache
def _measure_loop() -> float:
    """Return what a `Reading` itself takes for an element, in seconds: 10 to 30 us, as much as a small example."""
    reading = Reading(tf.data.Dataset.range(_MANY), lambda: None, counts_elements_only=True)
    reading.read(CUT_SECS / 2)
    speed = reading.read(CUT_SECS)
    return speed.secs / speed.elements


# --- the changes ------------------------------------------------------------------------------------------------------


def _list_changes(stages: Sequence[Stage], recorder: Recorder, speed: Speed, *, waits: bool) -> list[Change]:
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
        num_filling = max(1, int(speed.elements / speed.secs * FILL_SECS))
        num_cached = max(1, int(stage.elements * num_filling))
        for kind in _list_kinds(stage, call, recorder, waits=waits):
            found.append(Change(kind, call, num_cached, num_filling))
    return list(dict.fromkeys(found))[:MAX_TRIALS]


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


class CannotTryError(Exception):
    """A change cannot be tried; its text says why."""


class _InputError(Exception):
    """An input with a change raised `of_input`."""

    def __init__(self, of_input: Exception) -> None:
        super().__init__()
        self.of_input = of_input


_READ_ERRORS = (tf.errors.OpError, TypeError, ValueError)
"""What reading an input raises, when it is traced or when it runs. `check` raises other ones."""


def _open_changed(change: Change, build: Build, dataset: tf.data.Dataset, check: Callable[[], None]) -> Reading:
    """Return the input with a change.

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
    """Read an input with a change until the cache of the change is full, and then for so many seconds.

    Raises:
      CannotTryError: the cache was not full in time.
      _InputError: the input cannot be read.
    """
    try:
        if change.kind == "cache":
            _fill_cache(reading, change.num_filling)
        reading.read(secs)
    except _READ_ERRORS as error:
        raise _InputError(error) from error


def _fill_cache(reading: Reading, number: int) -> None:
    """Read `number` elements. Before its cache is full an input is as slow as without, or slower."""
    began = time.monotonic()
    num_read = 0
    while num_read < number:
        num_read += reading.read(ROUND_SECS / 2).elements
        took = time.monotonic() - began
        if num_read < number and took > MAX_FILL_SECS:
            raise CannotTryError(f"only {num_read} of {number} elements for its cache came in {took:.0f} s")


def _are_alike(spec: Any, other: Any) -> bool:
    try:
        tf.nest.assert_same_structure(spec, other, expand_composites=True)
    except (TypeError, ValueError):
        return False
    dtypes = [leaf.dtype for leaf in tf.nest.flatten(spec)]
    return dtypes == [leaf.dtype for leaf in tf.nest.flatten(other)]
