"""Prediction on the devices, and its examples one by one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.hooks.session_hooks import SessionHooks
from runner.model_fn import ModeKeys
from runner.programs.program import ModelToTrace, Program, TracedReplica, read_step, replica_inputs, split_fetches
from runner.tracing.trace_step import Replica
from runner.types import StepRequest


class PredictProgram(Program):
    """Prediction by one model_fn on inputs of one structure, traced once."""

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline) -> None:
        def replica_fn(replica: Replica) -> TracedReplica:
            with tf.summary.record_if(False):
                features, _ = replica_inputs(pipeline, replica)  # as in tf.estimator, it does not see the labels
                return TracedReplica(model.call(features, None, ModeKeys.PREDICT))

        super().__init__(model, pipeline, replica_fn)
        self._predictions = [output.spec.predictions for output in self.outputs]
        self._fetching: dict[Any, Callable[..., Any]] = {}

    def batches(self, iterator: Any, session_hooks: SessionHooks) -> Iterator[tuple[int, Any]]:
        """Yield (examples, predictions) of one replica's batch at a time, in the order of the input. NumPy values.

        Args:
          session_hooks: are asked before each batch what to fetch with it, and given the values.
        """
        for step in itertools.count(1):
            try:
                request = session_hooks.request(step)
                with self._pipeline.reading():
                    counts, predictions, values = self._next(request)(iterator, tuple(request.values))
            except tf.errors.OutOfRangeError:
                return
            session_hooks.after_run([value.numpy() for value in values])
            for count, replica_predictions in zip(counts.numpy(), predictions, strict=True):
                if count:
                    yield int(count), tf.nest.map_structure(lambda tensor: tensor.numpy(), replica_predictions)

    def _next(self, request: StepRequest) -> Callable[..., Any]:
        if request.key not in self._fetching:
            tensors, effects = split_fetches(request.fetches)
            effects += self.trace.writes_of_keras(metrics_only=True)
            function = self.trace.function([self._predictions, tensors], effects, feeds=request.feeds)
            self._fetching[request.key] = tf.function(functools.partial(self._run, function), autograph=False)
        return self._fetching[request.key]

    def _run(self, function: Callable[..., Any], iterator: Any, fed: Sequence[tf.Tensor]) -> Any:
        _, inputs = read_step(self._pipeline, next(iterator), iterator)
        return inputs[-2], *function(*inputs, *fed)


def chosen(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    """Return only `keys` of a dict of predictions; None or empty: all.

    Raises: ValueError: the predictions are no dict, or have none of the keys.
    """
    if not keys:
        return predictions
    keys = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, Mapping):
        raise ValueError(f"predict_keys={keys}: the predictions of model_fn are one tensor, not a dict.")
    chosen = {key: value for key, value in predictions.items() if key in keys}
    if not chosen:
        raise ValueError(f"predict_keys={keys} names no prediction. There are: {', '.join(predictions)}.")
    return chosen


def num_examples(predictions: Any) -> int:
    """Return the number of examples in a batch of predictions. Raises: ValueError: its parts differ in that."""
    sizes = {len(value) if np.ndim(value) else 0 for value in tf.nest.flatten(predictions)}
    if len(sizes) != 1:
        raise ValueError(
            f"predictions have {sorted(sizes)} examples in one batch. All must have the same number; "
            "or pass yield_single_examples=False."
        )
    return sizes.pop()


def single_examples(batch: Any) -> Iterator[Any]:
    """Yield the predictions of a batch, one example at a time."""
    examples = range(num_examples(batch))
    if type(batch) is dict and all(isinstance(values, np.ndarray) for values in batch.values()):
        for example in examples:  # as below, which takes 5 us more for each
            yield {name: values[example] for name, values in batch.items()}
        return
    for example in examples:
        yield tf.nest.map_structure(lambda values: values[example], batch)  # noqa: B023
