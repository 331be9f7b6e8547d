"""The requests of a coordinator to its workers, for ranges of batches: strategy=parameter_server."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.data.ps_ranges import RangeIterator
from runner.distribute.errors import PeerLost
from runner.tf_private import parameter_server

_log = logging.getLogger(__name__)

# A request costs about 2 ms; what is asked for at once should take long against that.
_SHORTEST_SECS = 0.1
_REQUESTS_PER_WORKER = 4


class Coordinator:
    """The workers of a ParameterServerStrategy, and what they are asked to do.

    Attributes:
      repeated: which of the last requests were made once more, as a worker was lost with them.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.workers = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
        self.num_workers = len(parameter_server.tasks_of(strategy)["worker"])
        self.repeated: Sequence[int] = ()
        self._put_back = parameter_server.repeated_requests(self.workers)
        parameter_server.say_losses_in_a_line(_log)

    def run(self, function: Callable[..., Any], all_arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return what `function` (a tf.function) gives for each of `all_arguments`, in order. Host values.

        A request whose worker is lost is made once more, of whichever worker.

        Raises:
          PeerLost: a parameter server is gone, and with it the variables.
        """
        self._put_back.clear()
        try:
            results = [self.workers.schedule(function, args=arguments) for arguments in all_arguments]
            self.workers.join()
            found = [result.fetch() for result in results]
        except tf.errors.UnavailableError as error:
            named = re.search(r"/job:ps/replica:\d+/task:(\d+)", error.message)
            which = f" (ps:{named[1]})" if named else ""
            raise PeerLost(f"a parameter server was lost{which}, and with it the variables that it held") from error
        lost = {id(arguments) for arguments in self._put_back}
        self.repeated = [index for index, arguments in enumerate(all_arguments) if id(arguments) in lost]
        return found


class Requests:
    """Ranges of batches that workers are asked for, each of them once.

    Args:
      of_range: what a worker does: called in graph with an iterator over (number, element), the number of the first
        element (negative: whatever comes next) and how many; see `over_range`, whose facts it returns among others.
      of_element: the same for one element that is sent with the request: called with it and its number.
    """

    def __init__(
        self, coordinator: Coordinator, of_range: Callable[..., dict[str, Any]], of_element: Callable[..., Any]
    ) -> None:
        self._coordinator = coordinator
        self._of_range = tf.function(of_range, autograph=False)
        self._of_element = tf.function(of_element, autograph=False)
        self._step_secs = 0.0  # of one worker
        self.repeated_steps = 0
        """Steps of the last `take` that were asked for once more, as a worker was lost with them."""

    def trace(self, element_spec: Any) -> None:
        """Builds what a worker does with an element, without doing it."""
        self._of_element.get_concrete_function(element_spec, tf.TensorSpec([], tf.int64))

    def take(self, iterator: RangeIterator, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
        """Return what workers make of the next `num_steps` batches, or of those that are left.

        Returns: (the results of the ranges, in the order of the data; whether there is no further batch).
        """
        started = time.perf_counter()
        self.repeated_steps = 0
        if iterator.workers is None:
            first, elements = iterator.elements(num_steps)
            results, ended = self._hand_over(elements, first), len(elements) < num_steps
        elif iterator.spread.is_divided:
            results, ended = self._from_their_own(iterator, num_steps)
        else:
            results, ended = self._in_ranges(iterator, num_steps)
        taken = sum(int(result["taken"]) for result in results)
        if taken:
            self._step_secs = (time.perf_counter() - started) * self._coordinator.num_workers / taken
        return results, ended

    def _in_ranges(self, iterator: RangeIterator, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
        ranges = iterator.take(num_steps, self._length(num_steps))
        found = self._ask(iterator, ranges)
        iterator.end = max(iterator.end, *(int(result["end"]) for result in found))
        results: list[dict[str, Any]] = []
        ended = False
        for (first, count), result in zip(ranges, found, strict=True):
            results.append(result)
            taken = int(result["taken"])
            if taken == count or result["stopped"]:
                continue
            if result["ended"] and first + taken >= iterator.end:
                ended = True
                continue
            # Its worker was lost, and whom it was given to was further on, perhaps at the end.
            elements = iterator.read_again(first + taken, count - taken)
            results += self._hand_over(elements, first + taken)
            ended |= len(elements) < count - taken
        return results, ended

    def _from_their_own(self, iterator: RangeIterator, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
        """Steps on data of whichever worker has time and data left."""
        results: list[dict[str, Any]] = []
        while (left := num_steps - sum(int(result["taken"]) for result in results)) > 0:
            if len(iterator.ended) == self._coordinator.num_workers:
                break
            asked = [(-1, count) for _, count in iterator.take(left, self._length(left))]
            results += self._ask(iterator, asked)
            iterator.ended |= {int(result["worker"]) for result in results if result["ended"]}
            if any(result["stopped"] for result in results):
                break
        return results, len(iterator.ended) == self._coordinator.num_workers

    def _ask(self, iterator: RangeIterator, ranges: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        asked = [(iterator.workers, tf.constant(first, tf.int64), tf.constant(count)) for first, count in ranges]
        results = self._coordinator.run(self._of_range, asked)
        self.repeated_steps += sum(ranges[index][1] for index in self._coordinator.repeated)
        return results

    def _hand_over(self, elements: Sequence[Any], first: int) -> list[dict[str, Any]]:
        """One request for each batch, which is sent with it."""
        asked = [(element, tf.constant(first + number, tf.int64)) for number, element in enumerate(elements)]
        results = self._coordinator.run(self._of_element, asked)
        self.repeated_steps += len(self._coordinator.repeated)
        return results

    def _length(self, num_steps: int) -> int:
        """Steps of one request: several for each worker, so that a slow one holds up nobody, but none too short."""
        workers = self._coordinator.num_workers
        several = math.ceil(num_steps / (workers * _REQUESTS_PER_WORKER))
        long_enough = math.ceil(_SHORTEST_SECS / self._step_secs) if self._step_secs else 1
        return max(1, min(max(several, long_enough), math.ceil(num_steps / workers)))


def over_range(
    iterator: Any,
    first: tf.Tensor,
    count: tf.Tensor,
    step: Callable[..., tuple[tf.Tensor, Sequence[Any]]],
    state: Sequence[Any],
) -> tuple[list[Any], dict[str, tf.Tensor]]:
    """Up to `count` steps on the elements from number `first` on. In graph, on a worker.

    Args:
      iterator: over (number, element).
      first: negative: whatever comes next.
      step: called with an element, the steps before it and the state; gives (whether to go on, the new state).

    Returns: (the state, facts: `taken` steps, none where the iterator has passed the first element; `ended`: it has no
      further one; `end`: the number after the last one that was seen now; `stopped` by a step; which `worker` it was).
    """
    found, end = tf.while_loop(
        lambda found, _: _is_before(first, found),
        lambda found, _: (iterator.get_next_as_optional(), found.get_value()[0] + 1),
        (iterator.get_next_as_optional(), tf.constant(0, tf.int64)),
    )
    passed = (first >= 0) & found.has_value() & ~_is_before(first + 1, found)

    def running(taken: tf.Tensor, end: tf.Tensor, found: Any, goes_on: tf.Tensor, *_: Any) -> tf.Tensor:
        return (taken < count) & goes_on & found.has_value() & ~passed

    def body(taken: tf.Tensor, _: tf.Tensor, found: Any, goes_on: tf.Tensor, *state: Any) -> Any:
        number, element = found.get_value()
        goes_on, new = step(element, taken, *state)
        more = tf.cond(taken + 1 < count, iterator.get_next_as_optional, lambda: found)
        return (taken + 1, number + 1, more, goes_on, *new)

    start = (tf.constant(0), end, found, tf.constant(True), *state)
    taken, end, found, goes_on, *last = tf.while_loop(running, body, start)
    worker = tf.distribute.coordinator.experimental_get_current_worker_index()
    return last, {"taken": taken, "end": end, "ended": ~found.has_value(), "stopped": ~goes_on, "worker": worker}


def of_one_element() -> dict[str, tf.Tensor]:
    """The facts of `over_range` where one element was sent."""
    return {"taken": tf.constant(1), "stopped": tf.constant(False)}


def _is_before(first: tf.Tensor, found: Any) -> tf.Tensor:
    return tf.cond(found.has_value(), lambda: found.get_value()[0] < first, lambda: tf.constant(False))
