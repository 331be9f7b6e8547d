"""`run.eager`: training whose model_fn runs eagerly, step by step, so that print and a debugger show values.

Variables, their names and initial values, random numbers and updates are those of a traced step. The results differ
only where TensorFlow fuses operations of a graph: by about 1e-6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.data.iterators import iterate
from runner.data.replica_batches import ReplicaBatch
from runner.distribute.collectives import SINGLE_PROCESS
from runner.distribute.reductions import Reductions, ReplicaWeights
from runner.hooks import fetches
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.programs.batch_losses import losses_over_batches
from runner.programs.mixed_precision import ModelCall
from runner.programs.program import ModelToTrace, named_values, replica_inputs, step_inputs
from runner.programs.train import TrainedReplica, TrainProgram, train_replica
from runner.programs.train_loop import LoopResult, Outputs, Step, Steps
from runner.programs.train_scalars import StepSummaries
from runner.tf_private import graphs
from runner.tf_private.keras3 import keras_trace
from runner.tf_private.summaries import Collector, collecting_eagerly
from runner.tf_private.v1 import rate_of_v1, summaries_of_v1
from runner.tf_private.variables import initial_values_from_checkpoints
from runner.tracing.adapted_layers import adapting_once
from runner.tracing.metric_states import KeptMetrics, is_pair
from runner.tracing.random_state import Stream, drawing_from, moment, seeded, stateless_random_ops
from runner.tracing.trace_step import Replica
from runner.tracing.variable_store import GLOBAL_STEP, RequestedVariables, VariableStore
from runner.types import StepRequest

v1 = tf.compat.v1
_log = logging.getLogger(__name__)

_NEEDS_OPTIMIZER = (
    "run.eager=true needs EstimatorSpec(optimizer=...): a train_op is an operation of a graph. To see the values of "
    "such a model, use tf.print in model_fn, or run.debug=nan."
)


_NO_SUM = (0.0, 0.0)  # (sum, weight) of a number that a step does not have

Taken = tuple[TrainedReplica, Collector]
"""The results of one eager step, with values instead of graph tensors; its summaries, if it collects them."""


class EagerStep:
    """One eager update of a model, on one device.

    Args:
      model: the model_fn and its variables.
      pipeline: the training input.
      summary_writer: writer for `tf.summary` inside model_fn.

    Attributes:
      first: the result of the step that created the variables. It contains all summaries, none of them written.
      requested: the variables that the last call of model_fn requested.
    """

    first: Taken
    requested: RequestedVariables

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline, summary_writer: Any) -> None:
        self._model = dataclasses.replace(model, call=functools.partial(_call_with_optimizer, model.call))
        self._pipeline = pipeline
        self._writer = summary_writer

    def __call__(self, inputs: Sequence[tf.Tensor], *, summaries: bool = False, discovers: bool = False) -> Taken:
        """Take one step: update the model with one batch.

        Args:
          inputs: flat tensors of the step, in the order of `step_signature`.
          summaries: write summaries.
          discovers: collect the summaries without writing them, to find out which there are.

        Raises:
          ValueError: model_fn returned train_op=.
        """
        store = self._model.store
        config = self._model.config
        with seeded(store.seed), _as_traced(store) as self.requested:
            # The last three inputs are the part of the step, the counts of examples, and their sum: `step_signature`.
            weights = ReplicaWeights(inputs[-2], inputs[-1])
            reductions = Reductions(tf.distribute.get_strategy(), weights)
            replica = Replica(0, inputs[:-3], weights, reductions, self.requested, store, store[GLOBAL_STEP])
            time = moment(replica.global_step.read_value(), tf.constant(0, tf.int64))
            collected: Any = contextlib.nullcontext(Collector(None))
            if (summaries or discovers) and config.tensorboard:
                collected = _summarising(self._writer, replica, writes=summaries)
            stream = Stream(None, f"{store.seed}/train/0", lambda: time)
            with drawing_from(stream), collected as summarised, _explaining_errors():
                taken = train_replica(self._model, self._pipeline, replica, summarised)
            # A Keras optimizer's rate is among the values of the update already. That of a v1 optimizer is found in the
            # graph of a traced step, which is missing here.
            rate: tf.Tensor | None = None
            if isinstance(taken.spec.optimizer, v1.train.Optimizer):
                rate = rate_of_v1(taken.spec.optimizer)
            if rate is not None and config.log_step_count_steps:
                taken = _with_rate(taken, rate)
            return taken, summarised

    def discover(self) -> None:
        """Create the variables by taking a step on the first batch, and then undo the changes of that step."""
        store = self._model.store
        before = {name: store[name].numpy() for name in store.specs}
        # An iterator of its own, so that the iterator of training stays at the first batch.
        iterator = iterate(self._pipeline.dataset)
        inputs = step_inputs(*self._pipeline.division.replica_batches(next(iterator), iterator))
        self.first = self(inputs, discovers=True)
        for name in store.specs:
            value = before[name] if name in before else store.initial_value(name)
            store[name].assign(value)


def _with_rate(taken: TrainedReplica, rate: tf.Tensor) -> TrainedReplica:
    """Return the results of a step with the learning rate among the values that its update reports."""
    if taken.update is None:
        return taken
    update = dataclasses.replace(taken.update, values={**taken.update.values, "learning_rate": rate})
    return dataclasses.replace(taken, update=update)


class EagerLoop:
    """A loop of eager steps in Python; it is called like a `train_loop.Loop`."""

    def __init__(self, step: Step, pipeline: InputPipeline, *, stop_at_nan: bool) -> None:
        self._step = step
        self._pipeline = pipeline
        self._stop_at_nan = stop_at_nan

    def __call__(self, iterator: Any, plan: Steps) -> LoopResult:
        """Take the steps of `plan`, fewer if the data ends or a loss is not finite, and stack their outputs."""
        outputs: list[Outputs] = []
        examples: list[int] = []
        ended = False
        is_fine = True
        while len(outputs) < plan.number and is_fine:
            with self._pipeline.reading():
                element = iterator.get_next_as_optional()
                ended = not bool(element.has_value())
                if ended:
                    break
                batches, count = self._pipeline.division.replica_batches(element.get_value(), iterator)
            outputs.append(self._step.take(batches, count, plan.values))
            examples.append(int(count))
            is_fine = not self._stop_at_nan or bool(np.isfinite(outputs[-1]["loss"]))
        steps: dict[str, Any] = {"loss": np.zeros(0)}
        if outputs:
            steps = tf.nest.map_structure(lambda *each: np.stack(each), *outputs)
        losses = steps.pop("loss")
        return LoopResult(len(outputs), losses, np.array(examples, np.int64), steps, data_ended=ended)


class EagerTrainProgram(TrainProgram):
    """Training of one model_fn that runs eagerly. Its trace holds no graph, only names and shapes known of the model.

    The first step creates the variables, and determines which values are reported. If a Python branch of model_fn lets
    a later step report a further value, that value is left out with a warning.

    Raises:
      ValueError: model_fn returns train_op=.
    """

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline, *, summary_writer: Any, stop_at_nan: bool) -> None:
        self._eager_step = EagerStep(model, pipeline, summary_writer)
        self._eager_step.discover()
        self._unreported_names: set[str] = set()  # of which a warning has been written
        first, _ = self._eager_step.first
        self._first = dataclasses.replace(first, loss=tf.zeros([], first.spec.loss.dtype))
        self._metrics_of_last_step = dict(first.scalars.metrics)
        super().__init__(model, pipeline, summary_writer=summary_writer, stop_at_nan=stop_at_nan, loop_type=EagerLoop)

    def _find_summaries(self) -> StepSummaries:
        _, collected = self._eager_step.first
        names = {scalar.tag for scalar in collected.scalars}
        return StepSummaries(collected.scalars, collected.protos, collected.images, collected.has_others, names)

    def _build_step(self, request: StepRequest, *, summaries: bool) -> Step:
        if request.fetches:
            raise ValueError(
                "A SessionRunHook fetches values, but run.eager=true has no graph to fetch them from. Remove the "
                "hook, or use a runner.Hook."
            )

        def take(batches: Sequence[ReplicaBatch], global_count: tf.Tensor, values: Sequence[tf.Tensor]) -> Outputs:
            inputs = step_inputs(batches, global_count)
            taken, collected = self._eager_step(inputs, summaries=summaries)
            # A later step may lack a metric of the first, which is then reported as it was.
            self._metrics_of_last_step.update(taken.scalars.metrics)
            outputs = self._pack_outputs(taken, collected if summaries else None)
            if not request.names:
                return outputs
            return {**outputs, "examples": self._read_values(request.names, taken, inputs)}

        return Step(take, {})

    def _read_values(self, names: Sequence[str], taken: TrainedReplica, inputs: Sequence[tf.Tensor]) -> list[Any]:
        """Return what native hooks fetch of a step, in the order of `TrainProgram._example_tensors`: the number of
        examples, and then the named values.

        Raises:
          ValueError: a value is not there, or is no tensor `[batch, ...]`.
        """
        available = named_values(self._pipeline, inputs, 0, taken.spec.predictions)
        values = [inputs[-2].numpy()]  # the counts; see `step_signature`
        for name in names:
            # Once more: a Python branch of model_fn may predict other names in a later step.
            fetches.check(f"A hook fetches {name!r}", name, available, ModeKeys.TRAIN)
            values.append(available[name].numpy())
        return values

    def _pack_outputs(self, taken: TrainedReplica, collected: Collector | None) -> Outputs:
        """Return the outputs of a step, in the form of `train_loop.Outputs`, as arrays.

        `metrics` is one vector: all sums, then all weights, in the order of `scalars.metrics`.

        Args:
          taken: the results of the step.
          collected: its summaries; None: the step writes none.
        """
        sums: dict[str, tuple[Any, Any]] = {}  # name -> (sum, weight)
        if taken.update is not None:
            for name, value in taken.update.values.items():
                sums[name] = (value, 1.0)
        sums.update(taken.scalars.step_sums)
        self._warn_of_new_names(sums)
        outputs: dict[str, Any] = {"loss": taken.loss.numpy()}
        pairs = [sums.get(name, _NO_SUM) for name in self.scalars.metrics]
        if pairs:
            outputs["metrics"] = _concatenate(zip(*pairs, strict=True))
        if collected is not None:
            outputs.update(self._pack_summaries(taken, collected))
        return outputs

    def _warn_of_new_names(self, names: Iterable[str]) -> None:
        """Warn, once for each name, of values that are not reported because the first step did not have them."""
        new_names = set(names) - set(self.scalars.metrics) - self._unreported_names
        if new_names:
            self._unreported_names |= new_names
            _log.warning(
                "run.eager=true: %s is not reported, because model_fn did not report it in the first step. Report the "
                "same names in each step.",
                ", ".join(sorted(new_names)),
            )

    def _pack_summaries(self, taken: TrainedReplica, collected: Collector) -> dict[str, Any]:
        """Return `scalars`, `protos` and `images` of a step, in the form of `train_loop.Outputs`, as arrays.

        `scalars` is one vector: the sums of all scalars of the first step, then their weights, then whether each is
        written, then the step that each names (-1: none).
        """
        outputs: dict[str, Any] = {}
        summary_of_key = {scalar.key: scalar for scalar in collected.scalars}
        rows = []
        for key in self.scalars.summaries:
            total, weight = taken.scalars.summary_sums.get(key, _NO_SUM)
            summary = summary_of_key.get(key)
            is_written = False
            at_step: Any = -1
            if summary is not None:
                is_written = summary.condition is None or bool(summary.condition)
                if summary.step is not None:
                    at_step = summary.step
            rows.append((total, weight, is_written, at_step))
        if rows:
            outputs["scalars"] = _concatenate(zip(*rows, strict=True))
        # A step may collect other summaries than the first one did. The outputs always have those of the first, with
        # b"" in place of what is missing.
        num_protos = len(self.summaries.protos)
        protos = [proto.numpy() for proto in collected.protos]
        protos += [b""] * (num_protos - len(protos))
        images = {image.tag: image.value.numpy() for image in collected.images}
        # Of dtype object, because NumPy's own strings of bytes lose zeros at their end.
        outputs["protos"] = [np.array(proto, object) for proto in protos[:num_protos]]
        outputs["images"] = [np.array(images.get(image.tag, b""), object) for image in self.summaries.images]
        return outputs

    def _trace_replica(
        self, model: ModelToTrace, pipeline: InputPipeline, summary_writer: Any, replica: Replica
    ) -> TrainedReplica:
        replica_inputs(pipeline, replica)  # called for its effect: hooks then find the global step
        return self._first

    def _find_metrics_with_state(self) -> KeptMetrics:
        self.trace.requested = self._eager_step.requested  # includes the variables of the metrics
        return super()._find_metrics_with_state()

    def _keep(self, metrics: Mapping[str, Any]) -> KeptMetrics:
        """No graph could compute a pair's value once more, so it is the one that the last step returned."""

        def values_of_last_step() -> dict[str, tf.Tensor]:
            pairs: dict[str, tf.Tensor] = {}
            for name in metrics:
                metric = self._metrics_of_last_step[name]
                if is_pair(metric):
                    pairs[name], _ = metric
            return pairs

        return KeptMetrics(self.trace, self._store, metrics, values_of_last_step)


def _concatenate(columns: Iterable[Sequence[Any]]) -> np.ndarray:
    """Return the numbers of all columns as one vector, one column after the other."""
    numbers: list[float] = []
    for column in columns:
        numbers += [float(value) for value in column]
    return np.array(numbers, np.float64)


@contextlib.contextmanager
def _summarising(writer: Any, replica: Replica, *, writes: bool) -> Iterator[Collector]:
    """Let `tf.summary` inside model_fn write, at the current step."""
    in_step = writer.as_default(step=replica.global_step.read_value() + 1)
    with tf.summary.record_if(True), in_step, collecting_eagerly(writer, writes=writes) as collected:
        yield collected


@contextlib.contextmanager
def _as_traced(store: VariableStore) -> Iterator[RequestedVariables]:
    """Enter the context that model_fn has in a trace: fresh names, variables found by name, Keras and loss scaling."""
    with (
        graphs.fresh_collections(),
        stateless_random_ops(),
        initial_values_from_checkpoints(),
        losses_over_batches(),
        summaries_of_v1(),
        tf.summary.record_if(False),
        graphs.fresh_thread_collections(),  # replaces what `fresh_collections` has made
        adapting_once(None, store.adapted, SINGLE_PROCESS),
        keras_trace(v1.get_default_graph()) as keras,
    ):
        requested = RequestedVariables(keras, training=True)
        with store.making(requested):
            yield requested


def _call_with_optimizer(model_call: ModelCall, features: Any, labels: Any, mode: str) -> EstimatorSpec:
    spec = model_call(features, labels, mode)
    if spec.optimizer is None:
        raise ValueError(_NEEDS_OPTIMIZER)
    return spec


@contextlib.contextmanager
def _explaining_errors() -> Iterator[None]:
    """Add a remedy to the errors of functions that need a graph, such as `minimize` and v1 metrics."""
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        if "eager" in str(error):
            error.add_note(_NEEDS_OPTIMIZER)
        raise
