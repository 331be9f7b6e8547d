"""Evaluation on the devices: one step, and the loop around it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.data.iterators import iterate
from runner.model_fn import ModeKeys
from runner.programs.batch_losses import PartOfBatch, WholeBatch, model_fn_has
from runner.programs.mixed_precision import ModelCall
from runner.programs.program import (
    ModelToTrace,
    Program,
    TracedReplica,
    over_elements,
    read_step,
    replica_inputs,
    split_fetches,
)
from runner.tracing.graph_operations import needed, operations
from runner.tracing.trace import Trace
from runner.tracing.trace_step import Replica
from runner.tracing.variable_store import VariableStore
from runner.types import StepRequest

Sums = Mapping[str, tuple[float, float]]
"""Name -> (sum over examples, their weight)."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The result of one call of an evaluation loop, as Python numbers.

    Attributes:
      sums: name -> (sum over examples, their weight) in float64, `loss` included; the sums of earlier calls are
        included.
      examples: number of examples counted by this call.
      data_ended: the input has no further element.
    """

    sums: Sums
    examples: int
    data_ended: bool


@dataclasses.dataclass(frozen=True)
class EvaluatedReplica(TracedReplica):
    """The outputs of one replica's trace of model_fn in EVAL; all are tensors of the traced graph.

    Attributes:
      loss: scalar, the sum of the losses of the replica's examples.
      weight: scalar, the denominator of `loss`: the number of examples, or the sum of `loss_weight`.
      sums: name -> (sum over the replica's examples, their number), two scalars, for each metric that model_fn
        returned as a tensor with one value per example.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    sums: Mapping[str, tuple[tf.Tensor, tf.Tensor]]


class EvalProgram(Program):
    """Evaluation by one model_fn on inputs of one structure, traced once.

    A step has no collectives: each replica sums over its own examples, and a replica without examples skips the step.
    """

    outputs: Sequence[EvaluatedReplica]

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline, *, on_workers: bool = False) -> None:
        def replica_fn(replica: Replica) -> EvaluatedReplica:
            with tf.summary.record_if(False):
                return _eval_replica(model.call, pipeline, replica)

        super().__init__(model, pipeline, replica_fn, on_workers=on_workers)
        self.sum_names = ["loss", *self.outputs[0].sums]
        """Names of the sums of an EvalResult."""
        self._kept = KeptMetrics(self.trace, self._store, self.spec.eval_metric_ops or {})
        # A partial, not a method: TensorFlow 2.21 counts the traces of a method over all objects of its class, and
        # would warn of retracing from the fifth Estimator of a process on.
        self._loop = tf.function(functools.partial(self._run), autograph=False)
        self._fetching: dict[Any, Callable[..., Any]] = {}

    @functools.cached_property
    def _functions(self) -> list[Callable[..., Any]]:
        """The step function of each replica. Built on first use, because a hook may have to feed the model before."""
        return [self._replica_function(index) for index in range(len(self.outputs))]

    def iterate(self, dataset: tf.data.Dataset, *, in_loops: bool) -> Any:
        """Return an iterator over `dataset` for `run`, or for `run_one` if not `in_loops`."""
        del in_loops
        return iterate(dataset)

    def run(self, iterator: Any, max_steps: int, sums: Sums) -> EvalResult:
        """Evaluate up to `max_steps` further batches.

        Args:
          iterator: an iterator that `iterate` returned.
          max_steps: number of batches.
          sums: the sums over earlier batches, to which these batches are added. Adding in one sequence makes the result
            independent, to the last bit, of how many batches each call evaluates.
        """
        zero = (0.0, 0.0)
        before = {name: tuple(tf.constant(one, tf.float64) for one in sums.get(name, zero)) for name in self.sum_names}
        with self._pipeline.reading():
            result = self._loop(iterator, tf.constant(max_steps), before)
        return EvalResult(on_host(result["sums"]), examples=int(result["examples"]), data_ended=bool(result["ended"]))

    def run_one(self, iterator: Any, request: StepRequest, before: Sums) -> tuple[EvalResult, list[Any]]:
        """Evaluate one batch like `run`; also return the values of the tensors among the fetches of `request`."""
        if request.key not in self._fetching:
            functions = [
                self._replica_function(index, () if index else request.fetches, request.feeds)
                for index in range(len(self.outputs))
            ]
            self._fetching[request.key] = tf.function(functools.partial(self._run_one, functions), autograph=False)
        try:
            with self._pipeline.reading():
                sums, examples, values = self._fetching[request.key](iterator, tuple(request.values))
        except tf.errors.OutOfRangeError:
            return EvalResult(before, 0, data_ended=True), []
        total = added(before, on_host(sums))
        return EvalResult(total, int(examples), data_ended=False), [value.numpy() for value in values]

    def _run_one(self, functions: Sequence[Callable[..., Any]], iterator: Any, fed: Sequence[tf.Tensor]) -> Any:
        zero = tf.constant(0, tf.float64)
        start = (tf.constant(0, tf.int64), {name: (zero, zero) for name in self.sum_names})
        (examples, sums), values = self._add_step(functions, iterator, next(iterator), start, fed=fed)
        return sums, examples, values

    def _add_step(
        self,
        functions: Sequence[Callable[..., Any]],
        iterator: Any,
        element: Any,
        before: tuple[tf.Tensor, Any],
        *,
        fed: Sequence[tf.Tensor] | None = None,
    ) -> tuple[tuple[tf.Tensor, Any], list[tf.Tensor]]:
        """Return ((examples, sums), fetches of the first replica) after adding the batches of all replicas of this
        step.

        Args:
          before: (examples, sums) before this step.
          fed: values of placeholders, for a step that hooks take part in; its first replica then runs even without
            examples. None: no hook takes part, and a replica without examples skips the step.
        """
        examples, sums = before
        zeros = tf.nest.map_structure(tf.zeros_like, sums)
        batches, inputs = read_step(self._pipeline, element, iterator)
        fetched: list[tf.Tensor] = []
        for batch, function in zip(batches, functions, strict=True):

            def present(function: Any = function) -> Any:
                more, values = function(*inputs, *(fed or ()))
                fetched.extend(values)  # fetches of the first replica only
                return in_float64(more)

            always = len(batches) == 1 or (fed is not None and batch is batches[0])
            more = present() if always else tf.cond(batch.count > 0, present, lambda: zeros)
            sums = tf.nest.map_structure(tf.add, sums, more)
            examples += batch.count
        return (examples, sums), fetched

    def values(self) -> dict[str, Any]:
        """Return name -> NumPy value of the metrics that keep state in variables; the other metrics are in the sums."""
        return self._kept.values()

    def _replica_function(
        self, index: int, fetches: Sequence[Any] = (), feeds: Sequence[tf.Tensor] = ()
    ) -> Callable[..., Any]:
        """Return the step function of one replica: it returns (sums of its batch, values of tensors in `fetches`)."""
        sums, updates = self._fetched(index)
        tensors, effects = split_fetches(fetches)
        self._check_no_collective([*updates, *tf.nest.flatten(sums), *fetches])
        return self.trace.function([sums, tensors], [*updates, *effects], feeds=feeds)

    def _fetched(self, index: int) -> tuple[dict[str, Any], list[Any]]:
        """Return (sums of one replica's batch, operations that update its metrics), from the traced graph."""
        output = self.outputs[index]
        updates = [metric[1] for metric in (output.spec.eval_metric_ops or {}).values() if is_pair(metric)]
        writes = self.trace.writes_of_keras(metrics_only=True, replica=index)
        return {"loss": (output.loss, output.weight), **output.sums}, [*updates, *writes]

    def _check_no_collective(self, values: Sequence[Any]) -> None:
        """Raise ValueError if a batch has collectives: workers evaluate different numbers of batches and would hang."""
        found = [one for one in needed(self.trace.graph, operations(values)) if one.type.startswith("Collective")]
        if found:
            raise ValueError(
                f"Evaluating a batch would wait for the other workers, at {found[0].name}, and hang if they have "
                "fewer batches. Causes are synchronized BatchNormalization with training=True, and a hook that "
                "fetches the value of a metric. Remove the cause, or evaluate in one process: eval_strategy=default."
            )

    def _run(self, iterator: Any, max_steps: tf.Tensor, before: Any) -> dict[str, Any]:
        def evaluate(element: Any, counted: tuple[tf.Tensor, Any]) -> tuple[tf.Tensor, Any]:
            return self._add_step(self._functions, iterator, element, counted)[0]

        start = (tf.constant(0, tf.int64), before)
        _, ended, (examples, sums) = over_elements(iterator, max_steps, evaluate, start)
        return {"ended": ended, "examples": examples, "sums": sums}


class KeptMetrics:
    """The metrics that keep their sums in variables: (value, update) pairs and Keras metrics.

    Args:
      trace: the trace of model_fn.
      store: the variables.
      metrics: name -> metric, as returned by the trace's first replica; metrics of other kinds are ignored.

    Raises:
      ValueError: the value of a (value, update) pair depends on one batch.
    """

    def __init__(self, trace: Trace, store: VariableStore, metrics: Mapping[str, Any]) -> None:
        self._store = store
        self._variables = [name for name in trace.requested.requests if store.specs[name].local]
        self._metrics = {name: one for name, one in metrics.items() if is_pair(one) or is_keras_metric(one)}
        values = {
            name: metric[0]
            for name, metric in self._metrics.items()
            if is_pair(metric) and not isinstance(metric[0], tf.Variable)
        }
        for name, value in values.items():
            if trace.needs_inputs(value):
                raise ValueError(
                    f"eval_metric_ops[{name!r}]: its value depends on one batch. A (value, update) pair must keep its "
                    "state in variables, like tf.compat.v1.metrics; for a mean over examples return a [batch] tensor."
                )
        self._values: Callable[[], dict[str, Any]] = trace.function(values, with_inputs=False) if values else dict

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def values(self) -> dict[str, Any]:
        """Return name -> NumPy value over all replicas and workers; all workers must call this together."""
        values = tf.nest.map_structure(lambda tensor: tensor.numpy(), self._values())
        with self._store.scope():  # where reading a metric's variable, which is ON_READ, sums its copies
            for name, metric in self._metrics.items():
                if is_keras_metric(metric):
                    values[name] = tf.nest.map_structure(lambda value: value.numpy(), metric.result())
                elif isinstance(metric[0], tf.Variable):
                    values[name] = metric[0].read_value().numpy()
        return values

    def reset(self) -> None:
        """Reset the metrics."""
        self._store.reset_local(self._variables)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Restore the metrics' state at the end of this context, in which an evaluation uses variables of the same
        names.
        """
        # The state is restored copy by copy: a sum of integers over replicas could not be divided among them again.
        variables = [self._store[name] for name in self._variables if self._metrics]
        copies = [copy for one in variables for copy in getattr(one, "values", None) or [one]]
        values = [copy.read_value() for copy in copies]
        yield
        for copy, value in zip(copies, values, strict=True):
            copy.assign(value)


def added(sums: Sums, more: Sums) -> dict[str, tuple[float, float]]:
    """Return `sums` with `more` added."""
    zero = (0.0, 0.0)
    return {name: (sums.get(name, zero)[0] + one[0], sums.get(name, zero)[1] + one[1]) for name, one in more.items()}


def on_host(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Return `sums`, whose values are scalar tensors, as Python floats."""
    return {name: (float(total), float(weight)) for name, (total, weight) in sums.items()}


def in_float64(sums: Any) -> Any:
    """Return the sums of a batch as float64 scalars, in the graph."""

    def scalar(value: tf.Tensor) -> tf.Tensor:
        value = tf.cast(value, tf.float64)
        value.set_shape([])  # the sum of a tensor of unknown rank has no static shape
        return value

    return tf.nest.map_structure(scalar, sums)


def _eval_replica(model_call: ModelCall, pipeline: InputPipeline, replica: Replica) -> EvaluatedReplica:
    features, labels = replica_inputs(pipeline, replica)
    part = PartOfBatch(replica.weights, replica.index) if pipeline.division.divides_batches else WholeBatch()
    with model_fn_has(part):
        spec = model_call(features, labels, ModeKeys.EVAL)
    count = tf.cast(replica.weights.counts[replica.index], spec.loss.dtype)
    weight = count if spec.loss_weight is None else tf.reduce_sum(tf.cast(spec.loss_weight, spec.loss.dtype))
    metrics = spec.eval_metric_ops or {}
    return EvaluatedReplica(
        spec,
        loss=tf.reduce_sum(spec.loss) if spec.loss.shape.rank == 1 else spec.loss * weight,
        weight=weight,
        sums={name: sum_and_weight(metric, count) for name, metric in metrics.items() if tf.is_tensor(metric)},
    )


def sum_and_weight(metric: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return (sum, weight), two scalars, of a metric `[batch]`.

    A scalar metric counts as the mean of its batch, weighted by `count`.
    """
    metric = tf.cast(metric, tf.float64)  # cast before summing: uint8 would overflow, and bool cannot be summed
    if metric.shape.rank == 0:
        count = tf.cast(count, tf.float64)
        return metric * count, count
    return tf.reduce_sum(metric), tf.size(metric)


def is_pair(metric: Any) -> bool:
    """Report whether a metric is (value, update)."""
    return isinstance(metric, tuple | list)


def is_keras_metric(metric: Any) -> bool:
    """Report whether a metric is one of Keras."""
    return hasattr(metric, "result") and hasattr(metric, "update_state")
