"""Training whose model_fn runs eagerly, step by step (`run.eager`): print and a debugger see values.

The variables, their names and initial values, the random numbers and the update are those of a traced step, and so are
the numbers, but for what TensorFlow computes in another way once it sees a whole graph (fused operations): 1e-6.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline
from runner.data.iterators import iterate
from runner.distribute.reductions import Reductions, ReplicaWeights
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.programs.batch_losses import WholeBatch, losses_over_batches, model_fn_has
from runner.programs.optimizer_step import apply_update, gradients_of, objective
from runner.programs.program import ModelToTrace, read_step, replica_inputs
from runner.programs.train import TrainedReplica, TrainProgram
from runner.programs.train_loop import LoopResult, Step
from runner.programs.train_scalars import ReplicaScalars
from runner.tf_private import graphs
from runner.tf_private.keras3 import keras_trace
from runner.tf_private.variables import initial_values_from_checkpoints
from runner.tracing.random_state import EagerStream, drawing_from, moment, seeded, stateless_random_ops
from runner.tracing.trace_step import Replica
from runner.tracing.variable_store import GLOBAL_STEP, RequestedVariables, VariableStore

v1 = tf.compat.v1

_NEEDS_OPTIMIZER = (
    "run.eager=true needs EstimatorSpec(optimizer=...): a train_op is an operation of a graph. To look into that: "
    "tf.print in model_fn, and run.debug=nan."
)


class EagerStep:
    """One update of a model, eagerly, on one device.

    Attributes:
      spec: what model_fn returned last.
      requested: the variables that it asked for last.
    """

    spec: EstimatorSpec
    requested: RequestedVariables

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline) -> None:
        self._model, self._pipeline = model, pipeline

    def __call__(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Update the model by the flat inputs of a step; return its loss.

        Raises: ValueError: model_fn returned train_op=.
        """
        store, config = self._model.store, self._model.config
        with seeded(store.seed), _as_traced(store) as self.requested:
            weights = ReplicaWeights(inputs[-2], inputs[-1])
            reductions = Reductions(tf.distribute.get_strategy(), weights)
            replica = Replica(0, inputs[:-2], weights, reductions, self.requested, store, store[GLOBAL_STEP])
            time = moment(replica.global_step.read_value(), tf.constant(0, tf.int64))
            with drawing_from(EagerStream(f"{store.seed}/train/0", time)):
                features, labels = replica_inputs(self._pipeline, replica)
                with tf.GradientTape() as tape, model_fn_has(WholeBatch()), _explained():
                    self.spec = self._model.call(features, labels, ModeKeys.TRAIN)
                    if self.spec.optimizer is None:
                        raise ValueError(_NEEDS_OPTIMIZER)
                    loss = objective(self.spec, replica)
                return apply_update(self.spec, gradients_of(tape, loss, replica), loss, replica, config).loss

    def discover(self) -> None:
        """Make the variables by a step on the first batch, after which all have the values that they had before."""
        store = self._model.store
        before = {name: store[name].numpy() for name in store.specs}
        iterator = iterate(self._pipeline.dataset)
        _, inputs = read_step(self._pipeline, next(iterator), iterator)
        self(inputs)
        for name in store.specs:
            store[name].assign(before[name] if name in before else store.initial_value(name))


class EagerLoop:
    """Steps one after the other, in Python; called as a `train_loop.Loop` is."""

    def __init__(
        self, eager_step: EagerStep, step: Step, pipeline: InputPipeline, *, stop_at_nan: bool, **_: Any
    ) -> None:
        if len(step.specs) > 1:  # step is of the empty trace
            raise ValueError(
                "a SessionRunHook fetches values, and run.eager=true has no graph to fetch them from. Leave the hook "
                "out, or use a runner.Hook."
            )
        self._step, self._pipeline, self._stop_at_nan = eager_step, pipeline, stop_at_nan

    def __call__(self, iterator: Any, num_steps: int, *, may_end: bool, values: Sequence[tf.Tensor] = ()) -> LoopResult:
        losses: list[Any] = []
        examples, ended = 0, False
        while len(losses) < num_steps and not ended:
            with self._pipeline.reading():
                element = iterator.get_next_as_optional()
                ended = not bool(element.has_value())
                inputs = [] if ended else read_step(self._pipeline, element.get_value(), iterator)[1]
            if ended:
                break
            losses.append(self._step(inputs).numpy())
            examples += int(inputs[-1])
            if self._stop_at_nan and not np.isfinite(losses[-1]):
                break
        return LoopResult(len(losses), np.array(losses), examples, [], data_ended=ended)

    def trace(self, iterator: Any) -> None:
        """Do nothing: there is no graph to build."""


class EagerTrainProgram(TrainProgram):
    """Training of one model_fn that runs eagerly; its trace is empty, but for what is known of the model.

    Metrics and summaries of TRAIN are left out.

    Raises: ValueError: model_fn returns train_op=.
    """

    def __init__(self, model: ModelToTrace, pipeline: InputPipeline, *, summary_writer: Any, stop_at_nan: bool) -> None:
        self._eager_step = EagerStep(model, pipeline)
        self._eager_step.discover()
        loop_type = functools.partial(EagerLoop, self._eager_step)
        super().__init__(model, pipeline, summary_writer=summary_writer, stop_at_nan=stop_at_nan, loop_type=loop_type)
        self.trace.requested = self._eager_step.requested

    def _trace_replica(
        self, model: ModelToTrace, pipeline: InputPipeline, summary_writer: Any, replica: Replica
    ) -> TrainedReplica:
        replica_inputs(pipeline, replica)  # for the global step, which hooks look for
        spec = self._eager_step.spec
        return TrainedReplica(spec, tf.zeros([], spec.loss.dtype), (), (), (), ReplicaScalars())


@contextlib.contextmanager
def _as_traced(store: VariableStore) -> Iterator[RequestedVariables]:
    """What surrounds model_fn in a trace: names from nothing, its variables by name, Keras and losses as there."""
    with (
        graphs.fresh_collections(),
        store.placement.tracing(),
        stateless_random_ops(),
        initial_values_from_checkpoints(),
        losses_over_batches(),
        tf.summary.record_if(False),
        graphs.fresh_thread_collections(),
        keras_trace(v1.get_default_graph()) as keras,
    ):
        requested = RequestedVariables(keras, training=True)
        with store.making(requested):
            yield requested


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what to do where model_fn uses what TensorFlow has in graphs only: `minimize`, v1 metrics."""
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        if "eager" in str(error):
            error.add_note(_NEEDS_OPTIMIZER)
        raise
