"""Training steps that a coordinator asks workers to take: the loop of strategy=parameter_server."""

from __future__ import annotations

import functools
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner import ps_bridge
from runner.errors import PeerLost
from runner.inputs import Feed
from runner.spread import Ranges
from runner.steps import LoopResult

_log = logging.getLogger(__name__)

# A request costs about 2 ms; what is asked for at once should take long against that.
_SHORTEST_SECS = 0.1
_REQUESTS_PER_WORKER = 4


class Coordinator:
    """The workers of a ParameterServerStrategy, and what they are asked to do."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.workers = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
        self.num_workers = len(ps_bridge.tasks_of(strategy)["worker"])

    def run(self, function: Callable[..., Any], all_arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What `function` (a tf.function) gives for each of `all_arguments`, in order, whichever worker; host values.

        A request whose worker is lost is done again by another one.

        Raises:
          PeerLost: a parameter server is gone, and with it the variables.
        """
        try:
            results = [self.workers.schedule(function, args=arguments) for arguments in all_arguments]
            self.workers.join()
            return [result.fetch() for result in results]
        except tf.errors.UnavailableError as error:
            named = re.search(r"/job:ps/replica:\d+/task:(\d+)", error.message)
            which = f" (ps:{named[1]})" if named else ""
            raise PeerLost(f"a parameter server was lost{which}, and with it the variables that it held") from error


class RangeLoop:
    """As steps.Loop, for workers that each take some of the steps.

    Each is given a range of batches, which it finds in its own copy of the data; results are in the order of the data.
    """

    def __init__(self, step: Any, feed: Feed, coordinator: Coordinator, *, stop_at_nan: bool) -> None:
        self._step, self._feed, self._coordinator, self._stop_at_nan = step, feed, coordinator, stop_at_nan
        self._run_range = tf.function(self._range, autograph=False)
        self._run_element = tf.function(self._element, autograph=False)
        self._step_secs = 0.0  # of one worker

    def __call__(self, iterator: Ranges, num_steps: int, *, may_end: bool) -> LoopResult:
        """Takes up to `num_steps` steps, and returns when all of them are done."""
        del may_end  # each range tells
        started = time.perf_counter()
        if iterator.workers is None:
            results = self._hand_over(iterator.elements(num_steps))
            ended = len(results) < num_steps
        elif iterator.spread.is_divided:
            results = self._from_their_own(iterator, num_steps)
            ended = len(iterator.ended) == self._coordinator.num_workers
        else:
            results = self._in_ranges(iterator, num_steps)
            ended = any(result["ended"] for result in results)
        taken = sum(int(result["taken"]) for result in results)
        if taken:
            self._step_secs = (time.perf_counter() - started) * self._coordinator.num_workers / taken
        losses, *values = _joined(results, self._step.specs)
        if self._stop_at_nan:
            losses = _finite_first(losses)
        return LoopResult(taken, losses, sum(int(result["examples"]) for result in results), values, ended)

    def trace(self, iterator: Ranges) -> None:
        """Builds the loop, without a step."""
        self._run_element.get_concrete_function(iterator.spread.element_spec)

    def _in_ranges(self, iterator: Ranges, num_steps: int) -> list[dict[str, Any]]:
        ranges = iterator.take(num_steps, self._length(num_steps))
        results = self._coordinator.run(self._run_range, [_range(iterator, *each) for each in ranges])
        for number, result in enumerate(results):
            if result["passed"]:
                first, count = ranges[number]
                _log.warning(
                    "A worker was lost, and batches %d to %d with it. The coordinator reads them again; some may have "
                    "been trained on already.", first, first + count - 1,
                )  # fmt: skip
                results[number] = self._summed(self._hand_over(iterator.read_again(first, count)), count)
        return results

    def _from_their_own(self, iterator: Ranges, num_steps: int) -> list[dict[str, Any]]:
        """Steps on data of whichever worker has time and data left."""
        results: list[dict[str, Any]] = []
        while (left := num_steps - sum(int(result["taken"]) for result in results)) > 0:
            if len(iterator.ended) == self._coordinator.num_workers:
                break
            ranges = iterator.take(left, self._length(left))
            asked = [_range(iterator, -1, count) for _, count in ranges]
            results += self._coordinator.run(self._run_range, asked)
            iterator.ended |= {int(result["worker"]) for result in results if result["ended"]}
            if self._stop_at_nan and not all(np.all(np.isfinite(result["stacked"][0])) for result in results):
                break
        return results

    def _summed(self, results: list[dict[str, Any]], count: int) -> dict[str, Any]:
        """The results of single batches, as the result of one range of `count`."""
        examples = sum(int(one["examples"]) for one in results)
        stacked = _joined(results, self._step.specs)
        return {"taken": len(results), "examples": examples, "ended": len(results) < count, "stacked": stacked}

    def _length(self, num_steps: int) -> int:
        """Steps of one request: several for each worker, so that a slow one holds up nobody, but none too short."""
        workers = self._coordinator.num_workers
        several = math.ceil(num_steps / (workers * _REQUESTS_PER_WORKER))
        long_enough = math.ceil(_SHORTEST_SECS / self._step_secs) if self._step_secs else 1
        return max(1, min(max(several, long_enough), math.ceil(num_steps / workers)))

    def _hand_over(self, elements: Sequence[Any]) -> list[dict[str, Any]]:
        """One request for each batch, which is sent with it."""
        return self._coordinator.run(self._run_element, [(element,) for element in elements])

    # --- what a worker does ---------------------------------------------------------------------------------------

    def _element(self, element: Any) -> dict[str, Any]:
        shares = self._feed.shares(element, None)
        outputs = self._step(shares, self._feed.global_count(element, shares))
        return {
            "taken": tf.constant(1), "examples": shares[0].count, "ended": tf.constant(False),
            "stacked": [value[None] for value in outputs],
        }  # fmt: skip

    def _range(self, iterator: Any, first: tf.Tensor, count: tf.Tensor) -> dict[str, Any]:
        """Up to `count` steps from batch `first` on; none where the iterator has passed it, or there is none.

        Args:
          first: negative: whatever comes next.
        """
        arrays = tuple(tf.TensorArray(spec.dtype, count, element_shape=spec.shape) for spec in self._step.specs)
        found = tf.while_loop(
            functools.partial(_is_before, first),
            lambda _: (iterator.get_next_as_optional(),),
            (iterator.get_next_as_optional(),),
        )[0]
        passed = (first >= 0) & found.has_value() & ~_is_before(first + 1, found)

        def running(taken: tf.Tensor, found: Any, fine: tf.Tensor, *_: Any) -> tf.Tensor:
            return (taken < count) & fine & found.has_value() & ~passed

        def body(taken: tf.Tensor, found: Any, fine: tf.Tensor, examples: tf.Tensor, *arrays: Any) -> Any:
            _, element = found.get_value()
            shares = self._feed.shares(element, iterator)
            outputs = self._step(shares, self._feed.global_count(element, shares))
            fine = tf.math.is_finite(outputs[0]) if self._stop_at_nan else tf.constant(True)
            written = [array.write(taken, value) for array, value in zip(arrays, outputs, strict=True)]
            more = tf.cond(taken + 1 < count, iterator.get_next_as_optional, lambda: found)
            return (taken + 1, more, fine, examples + shares[0].count, *written)

        start = (tf.constant(0), found, tf.constant(True), tf.constant(0, tf.int64), *arrays)
        taken, found, _, examples, *arrays = tf.while_loop(running, body, start)
        return {
            "taken": taken, "examples": examples, "passed": passed, "ended": ~found.has_value(),
            "worker": tf.distribute.coordinator.experimental_get_current_worker_index(),
            "stacked": [array.stack() for array in arrays],
        }  # fmt: skip


def _range(iterator: Ranges, first: int, count: int) -> tuple[Any, ...]:
    return iterator.workers, tf.constant(first, tf.int64), tf.constant(count)


def _is_before(first: tf.Tensor, found: Any) -> tf.Tensor:
    return tf.cond(found.has_value(), lambda: found.get_value()[0] < first, lambda: tf.constant(False))


def _joined(results: Sequence[dict[str, Any]], specs: Sequence[tf.TensorSpec]) -> list[np.ndarray]:
    """What the steps returned, stacked over all of them."""
    if not results:
        return [np.zeros([0, *spec.shape], spec.dtype.as_numpy_dtype) for spec in specs]
    taken = [int(result["taken"]) for result in results]
    return [
        np.concatenate(
            [np.asarray(result["stacked"][number])[:steps] for result, steps in zip(results, taken, strict=True)]
        )
        for number in range(len(specs))
    ]


def _finite_first(losses: np.ndarray) -> np.ndarray:
    """A loss that is not finite ended its range, and is to end the loop: it is the last one."""
    return losses[np.argsort(~np.isfinite(losses), kind="stable")]
