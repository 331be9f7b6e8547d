"""Evaluation on the devices: one step, and the loop around it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.data.iterators import iterate
from runner.data.replica_batches import RoundRobin
from runner.distribute.collectives import Collectives
from runner.hooks.fetches import joined
from runner.model_fn import ModeKeys
from runner.programs.optimizer_step import loss_sum
from runner.programs.program import (
    ModelToTrace,
    Program,
    TracedReplica,
    over_elements,
    replica_inputs,
    split_fetches,
)
from runner.tracing.graph_operations import needed, operations
from runner.tracing.metric_states import KeptMetrics, is_pair
from runner.tracing.trace_step import Replica
from runner.types import StepRequest

Sums = Mapping[str, tuple[float, float]]
"""Name -> (sum over examples, their weight)."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation so far, as Python numbers.

    Attributes:
      sums: name -> (sum over examples, their weight) in float64, `loss` included.
      examples: number of examples counted.
      data_ended: the input has no further element.
      num_bytes: the size of what a loop returns, which does not grow with its steps.
      fetched: name -> rows of the examples of the last step in this process, if hooks have fetched them.
    """

    num_bytes: ClassVar[int] = 0

    sums: Sums = dataclasses.field(default_factory=dict)
    examples: int = 0
    data_ended: bool = False
    fetched: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Return name -> mean over the counted examples; NaN if their weights sum to zero."""
        means: dict[str, float] = {}
        for name, (total, weight) in self.sums.items():
            means[name] = total / weight if weight else math.nan
        return means

    def over(self, collectives: Collectives, names: Sequence[str]) -> EvalResult:
        """Return the result over all workers, each of which has counted its own examples. All workers must call this
        together.

        Args:
          collectives: communication between the workers.
          names: names of the sums; a worker without examples may have none of these sums.
        """
        own_sums: list[float] = []
        in_order = sorted(names)  # those of a set have another order in each process
        for name in in_order:
            own_sums += self.sums.get(name, (0.0, 0.0))
        examples, *numbers = collectives.sum([self.examples, *own_sums])
        totals = numbers[::2]
        weights = numbers[1::2]
        sums = dict(zip(in_order, zip(totals, weights, strict=True), strict=True))
        return EvalResult({name: sums[name] for name in names}, int(examples), data_ended=True)


@dataclasses.dataclass(frozen=True)
class EvaluatedReplica(TracedReplica):
    """The outputs of one replica's trace of model_fn in EVAL; all are tensors of the traced graph.

    Attributes:
      sums: name -> (sum over the replica's examples, its denominator), two scalars: `loss`, and each metric that
        model_fn returned as a tensor with one value per example. The denominator is the number of examples; that of
        `loss` may be the sum of `loss_weight`.
    """

    sums: Mapping[str, tuple[tf.Tensor, tf.Tensor]]


class EvalProgram(Program):
    """Evaluation by one model_fn on inputs of one structure, traced once.

    A step has no collectives: each replica sums over its own batches, and a replica without a batch skips the step.

    Attributes:
      sum_names: names of the sums of an EvalResult.
      why_one_replica: why only one replica may evaluate, as a clause for a log line; None: any number may. It is then
        the first replica of the chief.
      changes_model: an evaluation may write to variables of the model, whose values are to be restored after it.
    """

    outputs: Sequence[EvaluatedReplica]

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline, *, on_workers: bool = False) -> None:
        def replica_fn(replica: Replica) -> EvaluatedReplica:
            with tf.summary.record_if(False):
                features, labels = replica_inputs(pipeline, replica)
                spec = model.call(features, labels, ModeKeys.EVAL)
                count = replica.weights.counts[replica.index]
                sums: dict[str, tuple[tf.Tensor, tf.Tensor]] = {}
                for name, metric in (spec.eval_metric_ops or {}).items():
                    if tf.is_tensor(metric):
                        sums[name] = sum_and_weight(metric, count)
                return EvaluatedReplica(spec, {"loss": loss_sum(spec, replica), **sums})

        super().__init__(model, pipeline, replica_fn, on_workers=on_workers, is_common=True)
        self.sum_names = list(self.outputs[0].sums)
        self._kept_metrics = KeptMetrics(self.trace, self._store, self.spec.eval_metric_ops or {})
        self.changes_model = self._kept_metrics.changes_model or self._may_write(
            [output.sums for output in self.outputs]
        )
        self.why_one_replica: str | None = None
        if self._kept_metrics.unmerged:
            names = ", ".join(map(repr, self._kept_metrics.unmerged))
            self.why_one_replica = f"the runner cannot merge the state of metric {names}"
            self._division = RoundRobin(0, 1, 1)  # all batches go to the first replica
        # A partial, not a method: TensorFlow 2.21 counts the traces of a method over all objects of its class, and
        # would warn of retracing from the fifth Estimator of a process on.
        self._loop = tf.function(functools.partial(self._run), autograph=False)
        self._zero_result = EvalResult({name: (0.0, 0.0) for name in self.sum_names})
        self._so_far = self._zero_result

    @functools.cached_property
    def _functions(self) -> list[Callable[..., Any]]:
        """The step function of each replica. Built on first use, because a hook may have to feed the model before."""
        return [self._build_replica_function(index) for index in range(len(self.outputs))]

    def iterate(self, dataset: tf.data.Dataset, *, in_loops: bool) -> Any:
        """Return an iterator over `dataset` for `run`, or for `run_one` if not `in_loops`."""
        del in_loops
        return iterate(dataset)

    def reset(self) -> None:
        super().reset()
        self._so_far = self._zero_result

    def run(self, iterator: Any, first_step: int, max_steps: int) -> EvalResult:
        """Evaluate up to `max_steps` further batches on each replica.

        Args:
          iterator: an iterator that `iterate` returned.
          first_step: number of steps before.
          max_steps: number of steps.
        """
        first = tf.constant(first_step, tf.int64)
        most = tf.constant(max_steps)
        with self._pipeline.reading():
            (examples, sums), ended = self._loop(iterator, first, most, self._start_from(self._so_far))
        return self._update_result(on_host(sums), int(examples), bool(ended))

    def run_one(self, iterator: Any, step: int, request: StepRequest) -> tuple[EvalResult, list[Any]]:
        """Take step number `step`, from 0, like `run`; also return the values of the tensors among the fetches of
        `request`. The result has those of its names.

        Raises:
          tf.errors.OutOfRangeError: there is no further batch; nothing has been added to the state of a metric.
          ValueError: a value that `request` names has not a row for each example.
        """

        def build() -> Callable[..., Any]:
            functions = []
            named: list[tf.Tensor] = []  # in the end those of the last replica, for their dtypes and ranks
            for index in range(len(self.outputs)):
                named = self.tensors_named(request.names, index)
                of_session = request.fetches if index == 0 else ()
                functions.append(self._build_replica_function(index, [*of_session, *named], request.feeds))

            def take(iterator: Any, *arguments: Any) -> Any:
                return self._add_step(functions, iterator, next(iterator), *arguments, named=named)

            return take

        start = self._start_from(self._so_far)
        (examples, sums), fetched = self._call(request.key, build, iterator, step, start, *request.values)
        counts = [int(count) for count in fetched.counts]
        values = [value.numpy() for value in fetched.values]
        # First what session hooks fetch, and then the named values of each replica.
        num_of_session = len(values) - len(request.names) * len(counts)
        rows = joined(request.names, counts, values[num_of_session:])
        result = self._update_result(on_host(sums), int(examples), data_ended=False)
        return dataclasses.replace(result, fetched=rows), values[:num_of_session]

    def fetch(self, iterator: Any, step: int, request: StepRequest) -> list[Any]:
        self._check_no_collective(request.fetches)
        return super().fetch(iterator, step, request)

    def _start_from(self, before: EvalResult) -> tuple[tf.Tensor, Any]:
        """Return (0 examples, the sums of `before`), to which a call of TensorFlow adds.

        Adding to the sums of earlier calls, in one sequence, makes the result independent, to the last bit, of how many
        batches each call evaluates.
        """
        no_examples = tf.constant(0, tf.int64)
        return no_examples, tf.nest.map_structure(lambda number: tf.constant(number, tf.float64), before.sums)

    def _update_result(self, sums: Sums, examples: int, data_ended: bool) -> EvalResult:
        """Return the result of the evaluation so far: the sums, and `examples` more than before."""
        self._so_far = EvalResult(sums, self._so_far.examples + examples, data_ended)
        return self._so_far

    def _add_step(
        self,
        functions: Sequence[Callable[..., Any]],
        iterator: Any,
        element: Any,
        step: tf.Tensor,
        before: tuple[tf.Tensor, Any],
        *fed: tf.Tensor,
        named: Sequence[tf.Tensor] = (),
    ) -> tuple[tuple[tf.Tensor, Any], _Fetched]:
        """Return ((examples, sums), what was fetched) after adding the batches of all replicas of this step.

        Args:
          step: int64 scalar, the number of steps before.
          before: (examples, sums) before this step.
          fed: values of placeholders.
          named: tensors with the dtypes and ranks of what each function fetches last, for native hooks: a replica
            without a batch gives tensors without rows in their place.
        """
        examples, sums = before
        zeros = tf.nest.map_structure(tf.zeros_like, sums)
        batches, inputs = self._read_batches(element, iterator, step)
        fetched = _Fetched([], [])
        for batch, function in zip(batches, functions, strict=False):  # one batch, if one replica evaluates

            def present(function: Any = function) -> Any:
                batch_sums, values = function(*inputs, *fed)
                return in_float64(batch_sums), values

            def absent() -> Any:
                return zeros, [_without_rows(tensor) for tensor in named]

            # Batches are dealt in turn, so the first replica has one in each step, and needs no branch.
            if batch is batches[0]:
                batch_sums, values = present()
            else:
                batch_sums, values = tf.cond(batch.count > 0, present, absent)
            sums = tf.nest.map_structure(tf.add, sums, batch_sums)
            examples += batch.count
            fetched.counts.append(batch.count)
            fetched.values.extend(values)
        return (examples, sums), fetched

    def values(self) -> dict[str, Any]:
        """Return name -> NumPy value of the metrics that keep state in variables; the other metrics are in the sums."""
        return self._kept_metrics.values(of_one_replica=self.why_one_replica is not None)

    def _build_replica_function(
        self, index: int, fetches: Sequence[Any] = (), feeds: Sequence[tf.Tensor] = ()
    ) -> Callable[..., Any]:
        """Return the step function of one replica: it returns (sums of its batch, values of tensors in `fetches`)."""
        sums, updates = self._sums_and_updates(index)
        tensors, effects = split_fetches(fetches)
        self._check_no_collective([*updates, *tf.nest.flatten(sums), *fetches])
        return self.trace.function([sums, tensors], [*updates, *effects], feeds=feeds)

    def _sums_and_updates(self, index: int) -> tuple[dict[str, Any], list[Any]]:
        """Return (sums of one replica's batch, operations that update its metrics), from the traced graph."""
        output = self.outputs[index]
        metrics = output.spec.eval_metric_ops or {}
        updates = [metric[1] for metric in metrics.values() if is_pair(metric)]
        writes = self.trace.writes_of_keras(metrics_only=True, replica=index)
        return dict(output.sums), [*updates, *writes]

    def _check_no_collective(self, values: Sequence[Any]) -> None:
        """Raise ValueError if a batch has collectives: workers evaluate different numbers of batches and would hang."""
        for operation in needed(self.trace.graph, operations(values)):
            if operation.type.startswith("Collective"):
                raise ValueError(
                    f"Evaluating a batch would wait for the other workers, at {operation.name}, and hang if they have "
                    "fewer batches. Causes are synchronized BatchNormalization with training=True, and a hook that "
                    "fetches the value of a metric. Remove the cause, or evaluate in one process: "
                    "eval_strategy=default."
                )

    def _run(self, iterator: Any, first_step: tf.Tensor, max_steps: tf.Tensor, start: Any) -> tuple[Any, tf.Tensor]:
        def evaluate(element: Any, taken: tf.Tensor, before: tuple[tf.Tensor, Any]) -> tuple[tf.Tensor, Any]:
            step = first_step + tf.cast(taken, tf.int64)
            counted, _ = self._add_step(self._functions, iterator, element, step, before)
            return counted

        _, ended, counted = over_elements(iterator, max_steps, evaluate, start)
        return counted, ended


class _Fetched(NamedTuple):
    """What hooks fetch of one step, tensors.

    Attributes:
      counts: the number of examples of each replica.
      values: fetches of session hooks from the first replica; then what native hooks fetch, of each replica.
    """

    counts: list[tf.Tensor]
    values: list[tf.Tensor]


def _without_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor of the same dtype and rank without elements."""
    rank = tensor.shape.rank or 1
    return tf.zeros([0] * rank, tensor.dtype)


def on_host(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Return `sums`, whose values are scalar tensors, as Python floats."""
    return {name: (float(total), float(weight)) for name, (total, weight) in sums.items()}


def in_float64(sums: Any) -> Any:
    """Return scalars, such as the sums of a batch, as float64 scalars, in the graph."""

    def scalar(value: tf.Tensor) -> tf.Tensor:
        value = tf.cast(value, tf.float64)
        value.set_shape([])  # a sum of a tensor of unknown rank has no static shape, and pruning the graph loses it
        return value

    return tf.nest.map_structure(scalar, sums)


def sum_and_weight(metric: tf.Tensor, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return (sum, weight), two scalars, of a metric `[batch]`.

    A scalar metric counts as the mean of its batch, weighted by `count`.
    """
    metric = tf.cast(metric, tf.float64)  # cast before summing: uint8 would overflow, and bool cannot be summed
    if metric.shape.rank == 0:
        count = tf.cast(count, tf.float64)
        return metric * count, count
    return tf.reduce_sum(metric), tf.size(metric)
