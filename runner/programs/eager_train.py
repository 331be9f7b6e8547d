"""`run.eager`: training whose model_fn runs eagerly, step by step, so that print and a debugger show values.

Variables, their names and initial values, random numbers and updates are those of a traced step. The results differ
only where TensorFlow fuses operations of a graph: by about 1e-6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.data.iterators import iterate
from runner.distribute.reductions import Reductions, ReplicaWeights
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.model_log import logging_values
from runner.programs.batch_losses import WholeBatch, losses_over_batches, model_fn_has
from runner.programs.optimizer_step import Update, apply_update, gradients_of, objective
from runner.programs.program import ModelToTrace, replica_inputs, step_inputs
from runner.programs.train import TrainedReplica, TrainProgram
from runner.programs.train_loop import LoopResult
from runner.programs.train_scalars import ReplicaScalars, StepScalars, replica_scalars
from runner.tf_private import graphs
from runner.tf_private.keras3 import keras_trace
from runner.tf_private.summaries import EagerCollector, SummaryScalar, collecting_eagerly
from runner.tf_private.v1 import rate_of_v1, summaries_of_v1
from runner.tf_private.variables import initial_values_from_checkpoints
from runner.tracing.metric_states import KeptMetrics
from runner.tracing.random_state import EagerStream, drawing_from, moment, seeded, stateless_random_ops
from runner.tracing.trace_step import Replica
from runner.tracing.variable_store import GLOBAL_STEP, RequestedVariables, VariableStore
from runner.types import StepRequest

v1 = tf.compat.v1
_log = logging.getLogger(__name__)
_NOTHING = StepRequest()

_NEEDS_OPTIMIZER = (
    "run.eager=true needs EstimatorSpec(optimizer=...): a train_op is an operation of a graph. To see the values of "
    "such a model, use tf.print in model_fn, or run.debug=nan."
)


@dataclasses.dataclass(frozen=True)
class Taken:
    """The results of one eager step: like TrainedReplica, but with values instead of graph tensors.

    Attributes:
      spec: the return value of model_fn.
      made: the update and the values that it reports.
      scalars: the numbers that the step reports beside its loss.
      summaries: the step's summaries; None if the step collects none.
    """

    spec: EstimatorSpec
    made: Update
    scalars: ReplicaScalars
    summaries: EagerCollector | None


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
        self._model, self._pipeline, self._writer = model, pipeline, summary_writer

    def __call__(self, inputs: Sequence[tf.Tensor], *, summaries: bool = False, discovers: bool = False) -> Taken:
        """Take one step: update the model with one batch.

        Args:
          inputs: flat tensors of the step, in the order of `step_signature`.
          summaries: write summaries.
          discovers: collect the summaries without writing them, to find out which there are.

        Raises:
          ValueError: model_fn returned train_op=.
        """
        store, config = self._model.store, self._model.config
        with seeded(store.seed), _as_traced(store) as self.requested:
            weights = ReplicaWeights(inputs[-2], inputs[-1])
            reductions = Reductions(tf.distribute.get_strategy(), weights)
            replica = Replica(0, inputs[:-3], weights, reductions, self.requested, store, store[GLOBAL_STEP])
            time = moment(replica.global_step.read_value(), tf.constant(0, tf.int64))
            with drawing_from(EagerStream(f"{store.seed}/train/0", time)):
                features, labels = replica_inputs(self._pipeline, replica)
                has_summaries = (summaries or discovers) and config.tensorboard
                with (
                    _summarising(self._writer, replica, writes=summaries)
                    if has_summaries
                    else contextlib.nullcontext() as collected,
                    tf.GradientTape() as tape,
                    model_fn_has(WholeBatch()),
                    logging_values() as logged,
                    _explained(),
                ):
                    spec = self._model.call(features, labels, ModeKeys.TRAIN)
                    if spec.optimizer is None:
                        raise ValueError(_NEEDS_OPTIMIZER)
                    loss = objective(spec, replica)
                is_logged = bool(config.log_step_count_steps)
                noted = () if collected is None else collected.scalars
                metrics, own = (spec.eval_metric_ops, logged) if is_logged else (None, None)
                scalars = replica_scalars(noted, metrics, own, replica)
                made = apply_update(spec, gradients_of(tape, loss, spec.optimizer, replica), loss, replica, config)
                rate = rate_of_v1(spec.optimizer) if isinstance(spec.optimizer, v1.train.Optimizer) else None
                if is_logged and rate is not None:
                    made = dataclasses.replace(made, values={**made.values, "learning_rate": rate})
                return Taken(spec, made, scalars, collected)

    def discover(self) -> None:
        """Create the variables by taking a step on the first batch, and then undo the changes of that step."""
        store = self._model.store
        before = {name: store[name].numpy() for name in store.specs}
        iterator = iterate(self._pipeline.dataset)
        inputs = step_inputs(*self._pipeline.division.replica_batches(next(iterator), iterator))
        self.first = self(inputs, discovers=True)
        for name in store.specs:
            store[name].assign(before[name] if name in before else store.initial_value(name))


class EagerLoop:
    """A loop of eager steps in Python; it is called like a `train_loop.Loop`.

    Args:
      step: takes one step.
      pipeline: the training input.
      values_of: returns the values that a step reports beside its loss.
      stop_at_nan: stop after the first step whose loss is not finite.
      summaries: each step writes summaries.
    """

    def __init__(
        self,
        step: EagerStep,
        pipeline: InputPipeline,
        values_of: Callable[[Taken], list[Any]],
        *,
        stop_at_nan: bool,
        summaries: bool,
    ) -> None:
        self._step, self._pipeline, self._values_of = step, pipeline, values_of
        self._stop_at_nan, self._summaries = stop_at_nan, summaries

    def __call__(self, iterator: Any, num_steps: int, *, may_end: bool, values: Sequence[tf.Tensor] = ()) -> LoopResult:
        losses: list[Any] = []
        found: list[list[Any]] = []
        examples, ended = 0, False
        while len(losses) < num_steps and not ended:
            with self._pipeline.reading():
                element = iterator.get_next_as_optional()
                ended = not bool(element.has_value())
                if ended:
                    break
                inputs = step_inputs(*self._pipeline.division.replica_batches(element.get_value(), iterator))
            taken = self._step(inputs, summaries=self._summaries)
            losses.append(taken.made.loss.numpy())
            found.append(self._values_of(taken))
            examples += int(inputs[-1])
            if self._stop_at_nan and not np.isfinite(losses[-1]):
                break
        stacked = [np.stack(value) for value in zip(*found, strict=True)]
        return LoopResult(len(losses), np.array(losses), examples, stacked, data_ended=ended)

    def trace(self, iterator: Any) -> None:
        """Do nothing: there is no graph to build."""


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
        self._left_out: set[str] = set()
        self._summaries = self._eager_step.first.summaries
        super().__init__(model, pipeline, summary_writer=summary_writer, stop_at_nan=stop_at_nan, loop_type=EagerLoop)
        if self._summaries is not None:
            values = self._values_of_step()
            self.scalars = StepScalars([self.outputs[0].scalars], self._summaries.scalars, values)
            self.summary_protos, self.images = self._summaries.protos, self._summaries.images

    @property
    def has_summaries(self) -> bool:
        return super().has_summaries or (self._summaries is not None and self._summaries.has_others)

    @property
    def summary_names(self) -> set[str]:
        return set() if self._summaries is None else {one.tag for one in self._summaries.scalars}

    def loop(self, request: StepRequest = _NOTHING, *, summaries: bool = False) -> Any:
        """Return the loop over steps.

        Args:
          request: must be empty, because an eager step has no graph tensors that hooks could fetch.
          summaries: each step writes summaries.

        Raises:
          ValueError: a hook requests the values of graph tensors.
        """
        if request.fetches:
            raise ValueError(
                "A SessionRunHook fetches values, but run.eager=true has no graph to fetch them from. Remove the "
                "hook, or use a runner.Hook."
            )
        values_of = functools.partial(self._values_of, summaries=summaries)
        return EagerLoop(
            self._eager_step, self._pipeline, values_of, stop_at_nan=self._stop_at_nan, summaries=summaries
        )

    def _values_of(self, taken: Taken, *, summaries: bool) -> list[Any]:
        """Return the values of a step beside its loss, packed in the order that `Fetched` declares."""
        zero = (0.0, 0.0)
        of_step = {name: (value, 1.0) for name, value in taken.made.values.items()}
        sums = {**of_step, **taken.scalars.metric_sums, **taken.scalars.logged_sums}
        left_out = set(sums) - set(self.scalars.metrics) - self._left_out
        if left_out:
            self._left_out |= left_out
            _log.warning(
                "run.eager=true: %s is not reported, because model_fn did not report it in the first step. Report the "
                "same names in each step.",
                ", ".join(sorted(left_out)),
            )
        pairs = [sums.get(name, zero) for name in self.scalars.metrics]
        found = [_in_turn(zip(*pairs, strict=True))] if pairs else []
        if not summaries or taken.summaries is None:
            return found
        scalars: dict[str, SummaryScalar] = {one.key: one for one in taken.summaries.scalars}
        rows = []
        for key in self.scalars.summaries:
            there = scalars.get(key)
            is_written = there is not None and (there.condition is None or bool(there.condition))
            own_step = -1 if there is None or there.step is None else there.step
            rows.append((*taken.scalars.summary_sums.get(key, zero), is_written, own_step))
        images = {one.tag: one.value.numpy() for one in taken.summaries.images}
        protos = [proto.numpy() for proto in taken.summaries.protos]
        protos += [b""] * (len(self.summary_protos) - len(protos))
        return [
            *found,
            *([_in_turn(zip(*rows, strict=True))] if rows else []),
            *(np.array(proto, object) for proto in protos[: len(self.summary_protos)]),
            *(np.array(images.get(one.tag, b""), object) for one in self.images),
        ]

    def _trace_replica(
        self, model: ModelToTrace, pipeline: InputPipeline, summary_writer: Any, replica: Replica
    ) -> TrainedReplica:
        replica_inputs(pipeline, replica)  # called for its effect: hooks then find the global step
        first = self._eager_step.first
        loss = tf.zeros([], first.spec.loss.dtype)
        return TrainedReplica(first.spec, loss, (), (), (), first.scalars, first.made)

    def _metrics_with_state(self) -> KeptMetrics:
        self.trace.requested = self._eager_step.requested  # includes the variables of the metrics
        return super()._metrics_with_state()


def _in_turn(columns: Iterable[Sequence[Any]]) -> np.ndarray:
    """Return the numbers of all columns as one vector, one column after the other."""
    return np.array([float(value) for column in columns for value in column], np.float64)


@contextlib.contextmanager
def _summarising(writer: Any, replica: Replica, *, writes: bool) -> Iterator[EagerCollector]:
    """Let `tf.summary` inside model_fn write, at the current step."""
    with tf.summary.record_if(True), writer.as_default(step=replica.global_step.read_value() + 1):
        with collecting_eagerly(writer, writes=writes) as collected:
            yield collected


@contextlib.contextmanager
def _as_traced(store: VariableStore) -> Iterator[RequestedVariables]:
    """Enter the context that model_fn has in a trace: fresh names, variables found by name, Keras and loss scaling."""
    with (
        graphs.fresh_collections(),
        store.placement.tracing(),
        stateless_random_ops(),
        initial_values_from_checkpoints(),
        losses_over_batches(),
        summaries_of_v1(),
        tf.summary.record_if(False),
        graphs.fresh_thread_collections(),
        keras_trace(v1.get_default_graph()) as keras,
    ):
        requested = RequestedVariables(keras, training=True)
        with store.making(requested):
            yield requested


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add a remedy to the errors of functions that need a graph, such as `minimize` and v1 metrics."""
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        if "eager" in str(error):
            error.add_note(_NEEDS_OPTIMIZER)
        raise
