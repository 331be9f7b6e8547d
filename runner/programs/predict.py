"""Prediction on the devices, and its examples one by one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.programs.mixed_precision import ModelCall
from runner.programs.step_inputs import read_step, replica_inputs, split_fetches, step_signature
from runner.tf_private.v1 import gradients_in_loops, summaries_of_v1
from runner.tracing.trace_step import Replica, trace_step
from runner.tracing.variable_store import VariableStore
from runner.types import StepRequest


class BatchObserver(Protocol):
    """Looks at batches as they are computed: the session hooks of a prediction."""

    def request(self, step: int) -> StepRequest: ...

    def after_run(self, values: Sequence[Any]) -> None: ...


class PredictProgram:
    """Prediction by one model_fn on inputs of one structure, traced once."""

    def __init__(self, store: VariableStore, model_call: ModelCall, pipeline: InputPipeline) -> None:
        self._store, self._pipeline = store, pipeline

        def replica_fn(replica: Replica) -> EstimatorSpec:
            with tf.summary.record_if(False):
                features, _ = replica_inputs(pipeline, replica)  # as in tf.estimator, it does not see the labels
                return model_call(features, None, ModeKeys.PREDICT)

        with summaries_of_v1(), gradients_in_loops():
            self.trace = trace_step(store, replica_fn, step_signature(pipeline), training=False)
        self._predictions = [spec.predictions for spec in self.trace.outputs]
        self._fetching: dict[Any, Callable[..., Any]] = {}

    @property
    def spec(self) -> EstimatorSpec:
        spec: EstimatorSpec = self.trace.outputs[0]
        return spec

    def reset(self) -> None:
        """Before each prediction: random state starts from the seed."""
        self._store.reset_local(self.trace.requested.requests)

    def batches(self, iterator: Any, observer: BatchObserver) -> Iterator[tuple[int, Any]]:
        """Yields (examples, predictions) of one replica's batch at a time, in the order of the input. NumPy values.

        Args:
          observer: is asked before each batch what to do with it, and handed the values of the tensors it fetches.
        """
        for step in itertools.count(1):
            try:
                request = observer.request(step)
                counts, predictions, values = self._next(request)(iterator, tuple(request.values))
            except tf.errors.OutOfRangeError:
                return
            observer.after_run([value.numpy() for value in values])
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
