"""The calls of tf.data's methods that an input function makes, and a change in one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.system.user_frames import Frame, name_of, user_frames
from runner.tf_private import datasets
from runner.tf_private.replaced import all_replaced

METHODS = (
    "batch", "cache", "filter", "flat_map", "interleave", "map", "padded_batch", "prefetch", "ragged_batch", "repeat",
    "shard", "shuffle", "skip", "snapshot", "take", "unbatch",
)  # fmt: skip
"""Methods of tf.data.Dataset whose calls are noted."""


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
      num_read_to_fill_cache: the number of elements of the whole pipeline that are read until that cache is full.
    """

    kind: str
    call: Call
    num_cached: int = 0
    num_read_to_fill_cache: int = 0


class _MovedMap(NamedTuple):
    """A map that is left out where the input function calls it, and made behind the batch that follows.

    Attributes:
      with_map: the dataset that the input function got.
      without_map: the same dataset without the map.
      original, arguments, options: the method `map` and the arguments of its call.
    """

    with_map: Any
    without_map: Any
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
        # id of a dataset -> (the dataset, the call that returned it). It is kept, so that no other dataset gets its id.
        self._calls_by_id: dict[int, tuple[Any, Call]] = {}
        self._running_calls: list[int] = []  # numbers of the calls that have not returned
        self._moved_map: _MovedMap | None = None

    def call_of(self, dataset: Any) -> Call | None:
        """Return the call that returned `dataset`; None: it is not known."""
        _, call = self._calls_by_id.get(id(dataset), (None, None))
        return call

    def recorded(self, method: str) -> Callable[..., Any]:
        """Return a function in place of a method of tf.data.Dataset: it notes each call and may change it."""
        original = getattr(tf.data.Dataset, method)

        @functools.wraps(original)
        def record(dataset: Any, *arguments: Any, **options: Any) -> Any:
            call = self._note(method, arguments, options)
            self._running_calls.append(call.number)
            try:
                dataset_made = self._run_call(call, original, dataset, arguments, options)
            finally:
                self._running_calls.pop()
            self._calls_by_id[id(dataset_made)] = (dataset_made, call)
            return dataset_made

        return record

    def _note(self, method: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Call:
        """Add a call to `calls`, with the line of the user's code that made it, and return it."""
        stack = traceback.extract_stack()[:-2]  # without this method and `record`
        frame = next(reversed(user_frames(stack)), None)
        caller = (stack[-1].filename, stack[-1].lineno)
        is_own = frame is not None and frame[:2] == caller
        function = _function_name([*arguments, *options.values()])
        parent = next(reversed(self._running_calls), None)
        is_parallel = _is_parallel(method, arguments, options)
        call = Call(len(self.calls), method, function, frame, is_own, is_parallel, parent)
        self.calls.append(call)
        return call

    def _run_call(self, call: Call, original: Any, dataset: Any, arguments: Any, options: Any) -> Any:
        """Return what a call of a method of tf.data.Dataset returns, with the change if it concerns this call.

        Args:
          call: the call.
          original: the method.
          dataset, arguments, options: its arguments.
        """
        if call.method == "cache":
            return original(dataset)  # in memory: this command writes no files
        if call.method == "snapshot":
            return dataset  # without the snapshot, which would be written to files
        moved_map = self._moved_map
        if moved_map is not None and dataset is moved_map.with_map:
            if call.method == "batch":
                return self._batch_before_map(moved_map, original, arguments, options)
            if call.method in ("repeat", "prefetch"):  # the map may come after them as well
                result = original(dataset, *arguments, **options)
                without_map = original(moved_map.without_map, *arguments, **options)
                self._moved_map = moved_map._replace(with_map=result, without_map=without_map)
                return result
        if self._change is None or call.number != self._change.call.number:
            return original(dataset, *arguments, **options)
        kind = self._change.kind
        if kind == "batch_first":
            # `_batch_before_map` makes the change at the batch, and nobody does if none follows the map directly.
            result = original(dataset, *arguments, **options)
            self._moved_map = _MovedMap(result, dataset, original, arguments, options)
            return result
        self.was_changed = True
        if kind == "cache":
            # A few elements stand for all: filling the cache with all of them may take hours.
            result = original(dataset.take(self._change.num_cached), *arguments, **options).cache()
            # The advice is to shuffle behind the cache. A shuffle before it takes no time once the cache is full.
            for buffer in datasets.shuffle_buffers(dataset):
                result = result.shuffle(buffer)
            return result.repeat()  # what follows may read more than these few elements
        if kind == "interleave":
            return dataset.interleave(arguments[0], num_parallel_calls=tf.data.AUTOTUNE)
        num_calls = many_calls() if kind == "many" else tf.data.AUTOTUNE
        options = {**options, "num_parallel_calls": num_calls}
        if call.method == "map":
            arguments = arguments[:1]  # num_parallel_calls may be the second
        return original(dataset, *arguments, **options)

    def _batch_before_map(self, moved_map: _MovedMap, batch: Any, arguments: Any, options: Any) -> Any:
        """Return the dataset of a batch and, behind it, the map that came before it, with a function of whole batches.

        Args:
          moved_map: the map.
          batch: the method `batch`.
          arguments, options: the arguments of its call.
        """
        function = moved_map.arguments[0]
        self.was_changed = True

        def map_batch(*element: Any) -> Any:
            if len(element) == 1:
                return tf.vectorized_map(function, element[0], fallback_to_while_loop=False)
            return tf.vectorized_map(lambda parts: function(*parts), element, fallback_to_while_loop=False)

        batched = batch(moved_map.without_map, *arguments, **options)
        return moved_map.original(batched, map_batch, *moved_map.arguments[1:], **moved_map.options)


@contextlib.contextmanager
def recording(change: Change | None = None) -> Iterator[Recorder]:
    """Note the calls of tf.data's methods inside this context, and make `change` in one of them."""
    recorder = Recorder(change)
    replacements = [(tf.data.Dataset, method, recorder.recorded(method)) for method in METHODS]
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
