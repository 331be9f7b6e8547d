"""Prediction on the devices, and the splitting of batches of predictions into examples."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.model_fn import ModeKeys
from runner.programs.program import (
    ModelToTrace,
    Program,
    TracedReplica,
    over_elements,
    replica_inputs,
    split_fetches,
)
from runner.system.suggestions import did_you_mean
from runner.tf_private.datasets import may_change_meanwhile
from runner.tracing.trace_step import Replica
from runner.types import ONLY_KEY, StepRequest


class Predicted(NamedTuple):
    """The predictions of some steps, as NumPy values.

    Attributes:
      batches: (number of examples, predictions `[examples, ...]`) of each replica batch that has examples, in input
        order.
      num_steps: number of steps taken.
      num_bytes: size of the predictions of all replicas, including those without examples.
      data_ended: the input has no further element.
    """

    batches: Sequence[tuple[int, Any]]
    num_steps: int
    num_bytes: int
    data_ended: bool


class PredictProgram(Program):
    """Prediction by one model_fn on inputs of one structure, traced once.

    Args:
      model: the model_fn and its variables.
      pipeline: the input.
      keys: names of what is computed, in this order; empty: all predictions.
      with_features: each key is the name of a prediction or a feature; False: of a prediction, and other names are
        ignored beside one, as in tf.estimator.

    Attributes:
      changes_model: a prediction may write to variables of the model, whose values are to be restored after it.

    Raises:
      ValueError: a key names neither, or both a prediction and another feature.
    """

    def __init__(
        self, model: ModelToTrace, pipeline: InputPipeline, keys: Sequence[str] = (), with_features: bool = False
    ) -> None:
        def replica_fn(replica: Replica) -> TracedReplica:
            with tf.summary.record_if(False):
                # As in tf.estimator, model_fn does not get labels in PREDICT.
                features, _ = replica_inputs(pipeline, replica)
                given: dict[str, Any] | None = None
                if with_features:
                    # A copy, because model_fn may remove entries.
                    given = dict(features) if isinstance(features, Mapping) else {}
                spec = model.call(features, None, ModeKeys.PREDICT)
                if keys:
                    spec = spec._replace(predictions=_choose(spec.predictions, given, keys))
                return TracedReplica(spec)

        super().__init__(model, pipeline, replica_fn)
        self._predictions = [output.spec.predictions for output in self.outputs]
        self.changes_model = self._may_write(self._predictions)
        # A partial, not a method; see EvalProgram.
        self._loop = tf.function(functools.partial(self._run_loop), autograph=False)

    def runs_in_loops(self, dataset: Any) -> bool:
        """Report whether one call of TensorFlow may take several steps on `dataset`.

        It may not if the next element can depend on the previous prediction. A service, for example, keeps one
        prediction open and passes each request to a Python generator. Sparse and ragged predictions are also made one
        step at a time.
        """
        is_dense = all(isinstance(tensor, tf.Tensor) for tensor in tf.nest.flatten(self._predictions))
        return is_dense and not may_change_meanwhile(dataset)

    def run(self, iterator: Any, first_step: int, max_steps: int) -> Predicted:
        """Predict up to `max_steps` further steps, after `first_step`, in one call of TensorFlow."""
        with self._pipeline.reading():
            num_steps, ended, packed = self._loop(iterator, tf.constant(first_step, tf.int64), tf.constant(max_steps))
        counts, *columns = [_split_steps(*parts) for parts in packed]
        tensors_per_replica = len(columns) // len(self._predictions)  # number of tensors of each replica
        packers = [_build_packer(predictions) for predictions in self._predictions]
        batches: list[tuple[int, Any]] = []
        for counts_of_step, *values in zip(counts, *columns, strict=True):
            for replica, (count, pack) in enumerate(zip(counts_of_step, packers, strict=True)):
                if count:
                    first = replica * tensors_per_replica
                    batches.append((int(count), pack(values[first : first + tensors_per_replica])))
        num_bytes = sum(_count_bytes(values) for values, _, _ in packed[1:])  # without the counts
        return Predicted(batches, int(num_steps), num_bytes, bool(ended))

    def run_one(self, iterator: Any, step: int, request: StepRequest) -> tuple[Predicted, list[Any]]:
        """Predict step number `step`, from 0, like `run`; also return the values of the tensors among the fetches of
        `request`.

        Raises:
          tf.errors.OutOfRangeError: there is no further batch.
        """

        def build() -> Callable[..., Any]:
            return functools.partial(self._run, self._build_function(request))

        counts, predictions, values = self._call(request.key, build, iterator, step, *request.values)
        batches: list[tuple[int, Any]] = []
        for count, of_replica in zip(counts.numpy(), predictions, strict=True):
            if count:
                on_host = tf.nest.map_structure(lambda tensor: tensor.numpy(), of_replica)
                batches.append((int(count), on_host))
        return Predicted(batches, 1, 0, data_ended=False), [value.numpy() for value in values]

    def _build_function(self, request: StepRequest) -> Callable[..., Any]:
        """Return the function of a step: (flat inputs, then the values of placeholders) -> (predictions, fetches)."""
        tensors, effects = split_fetches(request.fetches)
        effects += self.trace.writes_of_keras(metrics_only=True)
        return self.trace.function([self._predictions, tensors], effects, feeds=request.feeds)

    def _run(self, function: Callable[..., Any], iterator: Any, step: tf.Tensor, *fed: tf.Tensor) -> Any:
        _, inputs = self._read_batches(next(iterator), iterator, step)
        counts = inputs[-2]  # see `step_signature`
        return counts, *function(*inputs, *fed)

    def _run_loop(self, iterator: Any, first_step: tf.Tensor, max_steps: tf.Tensor) -> Any:
        """Predict up to `max_steps` steps after `first_step`.

        Returns:
          (steps taken, whether the data ended, numbers of examples and predictions of all steps as `_concat` returns
          them).
        """
        function = self._build_function(StepRequest())
        dtypes = [tf.int64, *(tensor.dtype for tensor in tf.nest.flatten(self._predictions))]

        def predict(element: Any, taken: tf.Tensor, lists: Sequence[Any]) -> Sequence[Any]:
            _, inputs = self._read_batches(element, iterator, first_step + tf.cast(taken, tf.int64))
            predictions, _ = function(*inputs)
            counts = inputs[-2]  # see `step_signature`
            outputs = [counts, *tf.nest.flatten(predictions)]
            return [_push(lists_of_output, output) for lists_of_output, output in zip(lists, outputs, strict=True)]

        empty = [(_empty_list(dtype), _empty_list(tf.int32)) for dtype in dtypes]
        taken, ended, lists = over_elements(iterator, max_steps, predict, empty)
        packed = [_concat(lists_of_output, dtype) for lists_of_output, dtype in zip(lists, dtypes, strict=True)]
        return taken, ended, packed


# --- tensors of several steps: batches may differ in size, so values are kept flat and shapes are kept beside them ---


def _empty_list(dtype: tf.DType) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.raw_ops.EmptyTensorList(element_shape=[-1], max_num_elements=-1, element_dtype=dtype)


def _push(lists: tuple[tf.Tensor, tf.Tensor], tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the lists of values and shapes with those of `tensor` appended."""
    of_values, of_shapes = lists
    with tf.device("CPU:0"):  # where the value is needed later
        values = tf.reshape(tensor, [-1])
        shape = tf.shape(tensor)
        of_values = tf.raw_ops.TensorListPushBack(input_handle=of_values, tensor=values)
        of_shapes = tf.raw_ops.TensorListPushBack(input_handle=of_shapes, tensor=shape)
    return of_values, of_shapes


def _concat(lists: tuple[tf.Tensor, tf.Tensor], dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return (all values, all shapes, the rank of each), three vectors."""
    of_values, of_shapes = lists
    concat = functools.partial(tf.raw_ops.TensorListConcatV2, element_shape=[-1], leading_dims=tf.zeros([0], tf.int64))
    with tf.device("CPU:0"):
        values, _ = concat(input_handle=of_values, element_dtype=dtype)
        shapes, ranks = concat(input_handle=of_shapes, element_dtype=tf.int32)
    return values, shapes, ranks


def _split_steps(all_values: tf.Tensor, all_shapes: tf.Tensor, ranks: tf.Tensor) -> list[Any]:
    """Return the value of each step, a view of the NumPy value of `all_values`; a scalar is a NumPy scalar."""
    values = all_values.numpy()
    sizes = iter(all_shapes.numpy().tolist())
    of_steps = []
    first = 0
    for rank in ranks.numpy().tolist():
        shape = list(itertools.islice(sizes, rank))
        last = first + math.prod(shape)
        of_steps.append(values[first:last].reshape(shape) if shape else values[first])
        first = last
    return of_steps


def _count_bytes(values: tf.Tensor) -> int:
    if values.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(values)))
    return values.dtype.size * int(values.shape[0])


def _build_packer(predictions: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that packs flat values into the structure of `predictions`."""
    if type(predictions) is dict and all(isinstance(tensor, tf.Tensor) for tensor in predictions.values()):
        flat = sorted(predictions)  # the order of tf.nest, which itself would take 10 us per batch
        order = [(name, flat.index(name)) for name in predictions]
        return lambda values: {name: values[index] for name, index in order}
    return lambda values: tf.nest.pack_sequence_as(predictions, values)


def _choose(predictions: Any, features: Mapping[str, Any] | None, keys: Sequence[str]) -> dict[str, Any]:
    """Return what `keys` name, as in `PredictProgram`; features are None if they are not known."""
    named = predictions if isinstance(predictions, Mapping) else {ONLY_KEY: predictions}
    if features is None:
        features = {}
        # A name of a prediction is enough, and others are ignored.
        of_predictions = [name for name in named if name in keys]
        if of_predictions:
            keys = of_predictions
    chosen: dict[str, Any] = {}
    for key in keys:
        reason = ""
        if key in named:
            chosen[key] = named[key]
            # If model_fn returned the feature itself as a prediction, both are the same value.
            if key in features and features[key] is not named[key]:
                reason = "names a prediction and also another feature; rename one."
        elif key in features:
            chosen[key] = features[key]
        else:
            reason = f"names no prediction and no feature.{did_you_mean(key, [*named, *features])}"
        if reason:
            raise ValueError(f"predict.keys: {key!r} {reason} There are: {', '.join({**named, **features})}.")
    return chosen


def num_examples(predictions: Any) -> int:
    """Return the number of examples in a batch of predictions, tensors `[batch, ...]`.

    Raises:
        ValueError: the predictions have different numbers of examples.
    """
    sizes: set[int] = set()
    for value in tf.nest.flatten(predictions):
        sizes.add(len(value) if np.ndim(value) else 0)
    if len(sizes) != 1:
        raise ValueError(
            f"predictions have {sorted(sizes)} examples in one batch. All must have the same number; "
            "or pass yield_single_examples=False."
        )
    return sizes.pop()


def single_examples(batch: Any) -> Iterator[Any]:
    """Yield the predictions of a batch one example at a time: `[...]` from `[batch, ...]`."""
    number = num_examples(batch)
    if type(batch) is dict and all(isinstance(values, np.ndarray) for values in batch.values()):
        if len(batch) == 1:
            ((name, rows),) = batch.items()
            return ({name: row} for row in rows)
        return (dict(zip(batch, rows, strict=True)) for rows in zip(*batch.values(), strict=True))
    if isinstance(batch, np.ndarray):
        return iter(batch)
    return (tf.nest.map_structure(operator.itemgetter(example), batch) for example in range(number))
