"""Evaluation and prediction on the devices: one step, and the loop around it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from runner.batch_part import PartOfBatch, WholeBatch, model_fn_has
from runner.global_step import collect
from runner.inputs import Feed
from runner.iterators import iterate
from runner.losses import losses_over_batches
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.operations import needed, operations
from runner.steps import ModelCall, ReplicaOutput, replica_inputs, step_inputs, step_signature
from runner.traces import Replica, trace_step
from runner.types import StepRequest
from runner.v1_bridge import gradients_in_loops, summaries_of_v1
from runner.variables import VariableStore

v1 = tf.compat.v1


Sums = Mapping[str, tuple[float, float]]
"""Name -> (sum over examples, their weight)."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """What one call of an evaluation loop came to. Host values.

    Attributes:
      sums: name -> (sum over examples, their weight) in float64, `loss` among them; those of earlier calls included.
      examples: examples counted by this call.
      data_ended: the input has no further element.
    """

    sums: Sums
    examples: int
    data_ended: bool


class EvalProgram:
    """Evaluation of one model_fn on inputs of one structure, traced once.

    There is no collective in a step: each replica counts its own examples, and a replica without one does nothing.
    """

    def __init__(self, store: VariableStore, model_call: ModelCall, feed: Feed, *, on_workers: bool = False) -> None:
        self._store, self._feed = store, feed

        def replica_fn(replica: Replica) -> ReplicaOutput:
            with tf.summary.record_if(False):
                return _eval_replica(model_call, feed, replica)

        with summaries_of_v1(), losses_over_batches(), gradients_in_loops():
            self.trace = trace_step(store, replica_fn, step_signature(feed), training=False, on_workers=on_workers)
        self.outputs: Sequence[ReplicaOutput] = self.trace.outputs
        self._values = self._value_function()
        self._loop = tf.function(self._run, autograph=False)
        self._fetching: dict[Any, Callable[..., Any]] = {}

    @property
    def spec(self) -> EstimatorSpec:
        return self.outputs[0].spec

    @property
    def sum_names(self) -> list[str]:
        """Names of the sums of an EvalResult."""
        return ["loss", *self.outputs[0].sums]

    @functools.cached_property
    def _functions(self) -> list[Callable[..., Any]]:
        """Of each replica, the sums of a batch. Not made before they are needed: a hook may have to feed the model."""
        return [self._replica_function(index) for index in range(len(self.outputs))]

    def reset(self) -> None:
        """Before each evaluation: metrics start from nothing, random state from the seed."""
        self._store.reset_local(self.trace.served.requests)

    def iterate(self, dataset: tf.data.Dataset, *, in_loops: bool) -> Any:
        """What `run`, or `run_one` where it is not `in_loops`, takes the batches of `dataset` from."""
        del in_loops
        return iterate(dataset)

    def run(self, iterator: Any, max_steps: int, sums: Sums) -> EvalResult:
        """Evaluates up to `max_steps` further batches.

        Args:
          sums: of the batches before. They are gone on with, so that no bit depends on the length of loops.
        """
        before = {name: tuple(map(_float64, sums.get(name, (0.0, 0.0)))) for name in self.sum_names}
        result = self._loop(iterator, tf.constant(max_steps), before)
        return EvalResult(on_host(result["sums"]), examples=int(result["examples"]), data_ended=bool(result["ended"]))

    def run_one(self, iterator: Any, request: StepRequest, before: Sums) -> tuple[EvalResult, list[Any]]:
        """As `run` for one batch; also the values of the tensors among the fetches of `request`."""
        if request.key not in self._fetching:
            others = range(1, len(self.outputs))
            functions = [
                self._replica_function(0, request.fetches, feeds=request.feeds),
                *(self._replica_function(index, feeds=request.feeds) for index in others),
            ]
            self._fetching[request.key] = tf.function(functools.partial(self._run_one, functions), autograph=False)
        try:
            sums, examples, values = self._fetching[request.key](iterator, tuple(request.values))
        except tf.errors.OutOfRangeError:
            return EvalResult(before, 0, data_ended=True), []
        total = added(before, on_host(sums))
        return EvalResult(total, int(examples), data_ended=False), [value.numpy() for value in values]

    def _run_one(self, functions: Sequence[Callable[..., Any]], iterator: Any, fed: Sequence[tf.Tensor]) -> Any:
        element = next(iterator)
        shares = self._feed.shares(element, iterator)
        inputs = [*step_inputs(shares, self._feed.global_count(element, shares)), *fed]
        sums, values = functions[0](*inputs)
        sums = in_float64(sums)
        zeros = tf.nest.map_structure(tf.zeros_like, sums)
        for share, function in zip(shares[1:], functions[1:], strict=True):
            more = tf.cond(share.count > 0, lambda function=function: in_float64(function(*inputs)), lambda: zeros)
            sums = tf.nest.map_structure(tf.add, sums, more)
        return sums, tf.add_n([share.count for share in shares]), values

    def values(self) -> dict[str, Any]:
        """Values of the accumulated metrics, those of per-example tensors excepted. NumPy values."""
        values = tf.nest.map_structure(lambda tensor: tensor.numpy(), self._values())
        scope = self._store.strategy.scope() if self._store.strategy is not None else contextlib.nullcontext()
        with scope:
            for name, metric in (self.spec.eval_metric_ops or {}).items():
                if _is_keras_metric(metric):
                    values[name] = tf.nest.map_structure(lambda value: value.numpy(), metric.result())
                elif _is_pair(metric) and isinstance(metric[0], tf.Variable):
                    values[name] = metric[0].read_value().numpy()
        return values

    def _value_function(self) -> Callable[[], dict[str, Any]]:
        values = dict(self.outputs[0].values)
        for name, value in values.items():
            if self.trace.needs_inputs(value):
                raise ValueError(
                    f"eval_metric_ops[{name!r}]: its value depends on one batch. A (value, update) pair keeps state "
                    "in variables, as those of tf.compat.v1.metrics do; for a mean over examples give a [batch] tensor."
                )
        return self.trace.function(values, with_inputs=False) if values else dict

    def _replica_function(
        self, index: int, extra: Sequence[Any] | None = None, feeds: Sequence[tf.Tensor] = ()
    ) -> Callable[..., Any]:
        """The sums of one replica's batch; with `extra` (tensors and operations) also the values of those tensors."""
        fetches, updates = self._fetched(index)
        if extra is None:
            self._check_no_collective([*updates, *tf.nest.flatten(fetches)])
            return self.trace.function(fetches, updates, feeds=feeds)
        self._check_no_collective([*updates, *extra])
        effects = [one for one in extra if isinstance(one, tf.Operation)]
        tensors = [one for one in extra if not isinstance(one, tf.Operation)]
        return self.trace.function([fetches, tensors], [*updates, *effects], feeds=feeds)

    def _fetched(self, index: int) -> tuple[dict[str, Any], list[Any]]:
        """(the sums of one replica's batch, what updates metrics with it). Tensors of the traced graph."""
        output = self.outputs[index]
        updates = [metric[1] for metric in (output.spec.eval_metric_ops or {}).values() if _is_pair(metric)]
        writes = self.trace.writes_of_keras(metrics_only=True, replica=index)
        return {"loss": (output.loss, output.weight), **output.sums}, [*updates, *writes]

    def _check_no_collective(self, values: Sequence[Any]) -> None:
        """Workers evaluate different numbers of batches: they cannot meet within one."""
        found = [one for one in needed(self.trace.graph, operations(values)) if one.type.startswith("Collective")]
        if found:
            raise ValueError(
                f"evaluating a batch would wait for the other workers, at {found[0].name}: they may have fewer "
                "batches, and would never come. Synchronized BatchNormalization with training=True does that, and a "
                "hook that fetches the value of a metric. Leave it out, or evaluate in one process: "
                "eval_strategy=default."
            )

    def _run(self, iterator: Any, max_steps: tf.Tensor, before: Any) -> dict[str, Any]:
        zeros = tf.nest.map_structure(tf.zeros_like, before)

        def running(taken: tf.Tensor, ended: tf.Tensor, *_: Any) -> tf.Tensor:
            return (taken < max_steps) & ~ended

        def evaluate(element: Any, taken: tf.Tensor, examples: tf.Tensor, sums: Any) -> Any:
            shares = self._feed.shares(element, iterator)
            inputs = step_inputs(shares, self._feed.global_count(element, shares))
            for share, function in zip(shares, self._functions, strict=True):

                def present(function: Any = function) -> Any:
                    return in_float64(function(*inputs))

                batch = present() if len(shares) == 1 else tf.cond(share.count > 0, present, lambda: zeros)
                sums = tf.nest.map_structure(tf.add, sums, batch)
                examples += share.count
            return taken + 1, tf.constant(False), examples, sums

        def body(taken: tf.Tensor, ended: tf.Tensor, examples: tf.Tensor, sums: Any) -> Any:
            element = iterator.get_next_as_optional()
            return tf.cond(
                element.has_value(),
                lambda: evaluate(element.get_value(), taken, examples, sums),
                lambda: (taken, tf.constant(True), examples, sums),
            )

        initial = (tf.constant(0), tf.constant(False), tf.constant(0, tf.int64), before)
        _, ended, examples, sums = tf.while_loop(running, body, initial)
        return {"ended": ended, "examples": examples, "sums": sums}


def added(sums: Sums, more: Sums) -> dict[str, tuple[float, float]]:
    """`sums` with `more` added."""
    zero = (0.0, 0.0)
    return {name: (sums.get(name, zero)[0] + one[0], sums.get(name, zero)[1] + one[1]) for name, one in more.items()}


def _float64(value: float) -> tf.Tensor:
    return tf.constant(value, tf.float64)


def on_host(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Sums that are tensors, as numbers."""
    return {name: (float(total), float(weight)) for name, (total, weight) in sums.items()}


def in_float64(sums: Any) -> Any:
    """The sums of a batch as float64 scalars. In graph."""

    def scalar(value: tf.Tensor) -> tf.Tensor:
        value = tf.cast(value, tf.float64)
        value.set_shape([])  # the sum of a tensor of unknown rank does not know that it is a scalar
        return value

    return tf.nest.map_structure(scalar, sums)


def _eval_replica(model_call: ModelCall, feed: Feed, replica: Replica) -> ReplicaOutput:
    collect(replica)
    features, labels = replica_inputs(feed, replica)
    part = PartOfBatch(replica.weights, replica.index) if feed.division.divides_batches else WholeBatch()
    with model_fn_has(part):
        spec = model_call(features, labels, ModeKeys.EVAL)
    count = tf.cast(replica.weights.counts[replica.index], spec.loss.dtype)
    weight = count if spec.loss_weight is None else tf.reduce_sum(tf.cast(spec.loss_weight, spec.loss.dtype))
    metrics = spec.eval_metric_ops or {}
    return ReplicaOutput(
        spec,
        loss=tf.reduce_sum(spec.loss) if spec.loss.shape.rank == 1 else spec.loss * weight,
        weight=weight,
        sums={name: _sum(metric, count) for name, metric in metrics.items() if tf.is_tensor(metric)},
        values={
            name: metric[0]
            for name, metric in metrics.items()
            if _is_pair(metric) and not isinstance(metric[0], tf.Variable)
        },
    )


def _sum(metric: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(sum, weight) of a per-example metric; a scalar is the mean of its batch, and counts for its examples."""
    metric = tf.cast(metric, tf.float64)  # before the sum: bytes overflow, and a bool has none
    if metric.shape.rank == 0:
        count = tf.cast(count, tf.float64)
        return metric * count, count
    return tf.reduce_sum(metric), tf.size(metric)


def _is_pair(metric: Any) -> bool:
    return isinstance(metric, tuple | list)


def _is_keras_metric(metric: Any) -> bool:
    return hasattr(metric, "result") and hasattr(metric, "update_state")


class BatchObserver(Protocol):
    """Who looks at batches as they are computed: the session hooks of a prediction."""

    def request(self, step: int) -> StepRequest: ...

    def after_run(self, values: Sequence[Any]) -> None: ...


class PredictProgram:
    """Prediction by one model_fn on inputs of one structure, traced once."""

    def __init__(self, store: VariableStore, model_call: ModelCall, feed: Feed) -> None:
        self._store, self._feed = store, feed

        def replica_fn(replica: Replica) -> ReplicaOutput:
            collect(replica)
            with tf.summary.record_if(False):
                features, _ = replica_inputs(feed, replica)  # the labels are not for it to see, as in tf.estimator
                return ReplicaOutput(model_call(features, None, ModeKeys.PREDICT))

        with summaries_of_v1(), gradients_in_loops():
            self.trace = trace_step(store, replica_fn, step_signature(feed), training=False)
        predictions = [output.spec.predictions for output in self.trace.outputs]
        self._predictions = predictions
        self._fetching: dict[Any, Callable[..., Any]] = {}

    @property
    def spec(self) -> EstimatorSpec:
        spec: EstimatorSpec = self.trace.outputs[0].spec
        return spec

    def reset(self) -> None:
        """Before each prediction: random state starts from the seed."""
        self._store.reset_local(self.trace.served.requests)

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
            tensors = [one for one in request.fetches if not isinstance(one, tf.Operation)]
            effects = [one for one in request.fetches if isinstance(one, tf.Operation)]
            effects += self.trace.writes_of_keras(metrics_only=True)
            function = self.trace.function([self._predictions, tensors], effects, feeds=request.feeds)
            self._fetching[request.key] = tf.function(functools.partial(self._run, function), autograph=False)
        return self._fetching[request.key]

    def _run(self, function: Callable[..., Any], iterator: Any, fed: Sequence[tf.Tensor]) -> Any:
        element = next(iterator)
        shares = self._feed.shares(element, iterator)
        inputs = step_inputs(shares, self._feed.global_count(element, shares))
        return inputs[-2], *function(*inputs, *fed)


def chosen(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    """Of a dict of predictions only `keys`; None or empty: all. Raises: ValueError: no dict, or none of them."""
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
    """Examples in a batch of predictions. Raises: ValueError: its parts differ in that."""
    sizes = {len(value) if np.ndim(value) else 0 for value in tf.nest.flatten(predictions)}
    if len(sizes) != 1:
        raise ValueError(
            f"predictions have {sorted(sizes)} examples in one batch. All must have the same number; "
            "or pass yield_single_examples=False."
        )
    return sizes.pop()


def single_examples(batch: Any) -> Iterator[Any]:
    """The predictions of a batch, one example at a time."""
    examples = range(num_examples(batch))
    if type(batch) is dict and all(isinstance(values, np.ndarray) for values in batch.values()):
        for example in examples:  # as below, which takes 5 us more for each
            yield {name: values[example] for name, values in batch.items()}
        return
    for example in examples:
        yield tf.nest.map_structure(lambda values: values[example], batch)  # noqa: B023
