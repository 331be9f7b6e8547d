"""Training steps on the workers of a coordinator: the loop of strategy=parameter_server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.coordinator import Coordinator, Requests, of_one_element, over_range
from runner.inputs import Feed
from runner.spread import Ranges
from runner.step_loop import LoopResult


class RangeLoop:
    """As steps.Loop, for workers that each take some of the steps.

    Each is given a range of batches, which it finds in its own copy of the data; results are in the order of the data.
    """

    def __init__(self, step: Any, feed: Feed, coordinator: Coordinator, *, stop_at_nan: bool) -> None:
        self._step, self._feed, self._stop_at_nan = step, feed, stop_at_nan
        self._requests = Requests(coordinator, self._range, self._element)

    def __call__(
        self, iterator: Ranges, num_steps: int, *, may_end: bool, values: Sequence[tf.Tensor] = ()
    ) -> LoopResult:
        """Takes up to `num_steps` steps, and returns when all of them are done.

        Raises: ValueError: they are to be fed `values`.
        """
        del may_end  # each range tells
        if values:
            raise ValueError(
                "SessionRunArgs(feed_dict=...) of a hook: with parameter servers steps are taken by other processes, "
                "which no hook can feed. Give the values through input_fn."
            )
        results, ended = self._requests.take(iterator, num_steps)
        losses, *fetched = _joined(results, self._step.specs)
        if self._stop_at_nan:
            losses = _finite_first(losses)
        examples = sum(int(result["examples"]) for result in results)
        return LoopResult(len(losses), losses, examples, fetched, ended, self._requests.repeated_steps)

    def trace(self, iterator: Ranges) -> None:
        """Builds the loop, without a step."""
        self._requests.trace(iterator.spread.element_spec)

    # --- what a worker does ---------------------------------------------------------------------------------------

    def _element(self, element: Any, number: tf.Tensor) -> dict[str, Any]:
        del number
        shares = self._feed.shares(element, None)
        outputs = self._step(shares, self._feed.global_count(element, shares))
        return {**of_one_element(), "examples": shares[0].count, "stacked": [value[None] for value in outputs]}

    def _range(self, iterator: Any, first: tf.Tensor, count: tf.Tensor) -> dict[str, Any]:
        """Up to `count` steps from batch `first` on; none where the iterator has passed it, or there is none."""
        arrays = tuple(tf.TensorArray(spec.dtype, count, element_shape=spec.shape) for spec in self._step.specs)

        def step(element: Any, taken: tf.Tensor, examples: tf.Tensor, *arrays: Any) -> Any:
            shares = self._feed.shares(element, iterator)
            outputs = self._step(shares, self._feed.global_count(element, shares))
            fine = tf.math.is_finite(outputs[0]) if self._stop_at_nan else tf.constant(True)
            written = [array.write(taken, value) for array, value in zip(arrays, outputs, strict=True)]
            return fine, (examples + shares[0].count, *written)

        (examples, *written), facts = over_range(iterator, first, count, step, (tf.constant(0, tf.int64), *arrays))
        return {**facts, "examples": examples, "stacked": [array.stack() for array in written]}


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
