"""The part that training, evaluation and prediction programs share: the trace, and the flat inputs of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from runner.data.dataset_adapter import as_given
from runner.data.inputs import InputPipeline
from runner.data.replica_batches import ReplicaBatch, RoundRobin
from runner.hooks import fetches
from runner.model_fn import EstimatorSpec
from runner.programs.batch_losses import losses_over_batches
from runner.programs.mixed_precision import ModelCall
from runner.run_config import RunConfig
from runner.tf_private.v1 import gradients_in_loops, metrics_of_replica, summaries_of_v1
from runner.tracing.trace_step import Replica, trace_step
from runner.tracing.variable_store import VariableStore
from runner.types import StepRequest, WeightedLabels

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class ModelToTrace:
    """A model_fn and its variables, before model_fn is traced.

    Attributes:
      call: model_fn with params and config bound, in the precision of the run.
      config: the run's settings; those for the step from gradients to variables are used.
      store: the variables.
    """

    store: VariableStore
    call: ModelCall
    config: RunConfig


@dataclasses.dataclass(frozen=True)
class TracedReplica:
    """Base class: the result of one replica's trace of model_fn, with tensors of the traced graph."""

    spec: EstimatorSpec

    @property
    def initial_feeds(self) -> Mapping[Any, Any]:
        """Placeholder -> value, for the placeholders that variables' initial values need: a Scaffold's
        `init_feed_dict`.
        """
        return getattr(self.spec.scaffold, "init_feed_dict", None) or {}


class Program:
    """One model_fn in one mode on inputs of one structure, traced once.

    Args:
      model: the model_fn and its variables.
      pipeline: the input.
      replica_fn: calls model_fn for one replica.
      training, on_workers, is_common: as in `trace_step`.

    Attributes:
      outputs: the result of `replica_fn` for each local replica.
      spec: the return value of model_fn for the first replica.
    """

    def __init__(
        self,
        model: ModelToTrace,
        pipeline: InputPipeline,
        replica_fn: Callable[[Replica], TracedReplica],
        *,
        training: bool = False,
        on_workers: bool = False,
        is_common: bool = False,
    ) -> None:
        self._store = model.store
        self._pipeline = pipeline
        self._division = cast(RoundRobin, pipeline.division)  # used in EVAL and PREDICT, where it is one
        self._fetching: dict[Any, Callable[..., Any]] = {}  # key -> graph function, of requests of hooks
        with summaries_of_v1(), losses_over_batches(), gradients_in_loops(), metrics_of_replica():
            self.trace = trace_step(
                model.store,
                replica_fn,
                step_signature(pipeline),
                training=training,
                on_workers=on_workers,
                is_common=is_common,
            )
        if not (training and model.config.checkpoint_save_graph_def):
            self.trace.one_replica = self.trace  # frees the memory of the other
        self.outputs: Sequence[Any] = self.trace.outputs
        self.spec: EstimatorSpec = self.outputs[0].spec

    def _may_write(self, computed: Any) -> bool:
        """Report whether variables may change when a step of EVAL or PREDICT computes these tensors."""
        # Writes inside branches, such as those of BatchNorm, cannot be pruned. Others run if these tensors need them.
        return self.trace.may_write_in_branches or self.trace.changes_variables([computed])

    def named_values(self, replica: int) -> dict[str, Any]:
        """Return name -> tensor of the traced graph: what hooks can fetch of the examples of a local replica."""
        predictions = self.outputs[replica].spec.predictions
        return named_values(self._pipeline, self.trace.inputs, replica, predictions)

    def tensors_named(self, names: Sequence[str], replica: int) -> list[tf.Tensor]:
        """Return those of `named_values` that `names` name."""
        if not names:
            return []
        there = self.named_values(replica)
        return [there[name] for name in names]

    def check_fetches(self, hooks: Sequence[Any]) -> None:
        """Check that the step has what native hooks fetch of each example.

        Raises:
          ValueError: it lacks a name, or a value is no tensor `[batch, ...]`.
        """
        for hook in hooks:
            for name in fetches.fetches_of(hook):
                written = f"{type(hook).__name__} fetches {name!r}"
                fetches.check(written, name, self.named_values(0), self.spec.mode)

    def reset(self) -> None:
        """Reset metrics, and restart random numbers from the seed; called before each evaluation or prediction."""
        self._store.reset_local(self.trace.requested.requests)

    def fetch(self, iterator: Any, step: int, request: StepRequest) -> list[Any]:
        """Run what a hook requests in EVAL or PREDICT on the batches of step number `step`, and nothing else of a step.

        Returns:
          The values of the tensors among the fetches.

        Raises:
          tf.errors.OutOfRangeError: there is no further batch.
        """

        def build() -> Callable[..., Any]:
            function = self.trace.function(*split_fetches(request.fetches), feeds=request.feeds)

            def run(iterator: Any, step: tf.Tensor, *fed: tf.Tensor) -> Any:
                _, inputs = self._read_batches(next(iterator), iterator, step)
                return function(*inputs, *fed)

            return run

        values = self._call(("alone", request.key), build, iterator, step, *request.values)
        return [value.numpy() for value in values]

    def _call(
        self, key: Any, build: Callable[[], Callable[..., Any]], iterator: Any, step: int, *arguments: Any
    ) -> Any:
        """Call a function of (iterator, step, further arguments) in the graph; it is built and traced on first use.

        Args:
          key: identifies the function.
          build: returns it.
          iterator: an iterator over the batches.
          step: the number of the step, from 0.
          arguments: tensors, or structures of them.
        """
        if key not in self._fetching:
            # A partial, not a method; see EvalProgram.
            self._fetching[key] = tf.function(functools.partial(build()), autograph=False)
        with self._pipeline.reading():
            return self._fetching[key](iterator, tf.constant(step, tf.int64), *arguments)

    def _read_batches(
        self, element: Any, iterator: Any, step: tf.Tensor
    ) -> tuple[Sequence[ReplicaBatch], list[tf.Tensor]]:
        """Return the input of one step of EVAL or PREDICT, in the graph: (batches of the replicas that take part, the
        flat inputs of all local replicas).

        Args:
          element: the first element of the step, tensors `[batch, ...]`.
          iterator: returns further elements, for steps that take several; None: a step takes one element.
          step: int64 scalar, the number of steps since the evaluation or prediction began.
        """
        batches, global_count = self._division.replica_batches(element, iterator)
        # The trace has inputs for all replicas, so those that take no part get a placeholder: a batch with count 0.
        stand_in = batches[0]._replace(count=tf.constant(0, tf.int64))
        others = [stand_in] * (len(self.outputs) - len(batches))
        inputs = step_inputs([*batches, *others], global_count, self._division.first_batch(step))
        return batches, inputs


def step_signature(pipeline: InputPipeline) -> list[tf.TensorSpec]:
    """Return the flat TensorSpecs of a step's inputs: features and labels of each replica, then the part of the step
    (as in `trace_step`) and the weights of the replicas.
    """
    flat = tf.nest.flatten(pipeline.replica_spec, expand_composites=True)
    of_replica = [tf.TensorSpec(spec.shape, spec.dtype) for spec in flat if spec is not None]
    return [
        *of_replica * pipeline.num_replicas,
        tf.TensorSpec([], tf.int64, name="runner/part"),
        tf.TensorSpec([pipeline.num_replicas], tf.int64, name="runner/counts"),
        tf.TensorSpec([], tf.int64, name="runner/global_count"),
    ]


def step_inputs(
    batches: Sequence[ReplicaBatch], global_count: tf.Tensor, part: tf.Tensor | None = None
) -> list[tf.Tensor]:
    """Return the flat batches of all local replicas, in the order of `step_signature`.

    Args:
      batches: the local replicas' batches.
      global_count: int64 scalar, the number of examples over all replicas.
      part: int64 scalar, as in `trace_step`; None: 0.
    """
    inputs: list[tf.Tensor] = []
    for batch in batches:
        flat = tf.nest.flatten((batch.features, batch.labels), expand_composites=True)
        inputs += [tensor for tensor in flat if tensor is not None]
    if part is None:
        part = tf.constant(0, tf.int64)
    counts = tf.stack([batch.count for batch in batches])
    return [*inputs, part, counts, global_count]


def over_elements(
    iterator: Any, max_steps: tf.Tensor, step: Callable[[Any, tf.Tensor, Any], Any], state: Any
) -> tuple[tf.Tensor, tf.Tensor, Any]:
    """Apply `state = step(element, number of steps before, state)` to one element after another, in the graph.

    The step is not inside a tf.cond. Each variable that the step reads would be an input of both branches, which took
    0.1 s to trace for 120 layers and added a switch per variable to each step.

    Args:
      iterator: the iterator over the elements.
      max_steps: int64 scalar, the largest number of steps.
      step: one step; it may read further elements.
      state: the initial state, a structure of tensors.

    Returns:
      (number of steps taken: int64 scalar, whether the data ended before `max_steps`: bool scalar, the last state).
    """
    none = tf.experimental.Optional.empty(iterator.element_spec)

    def running(taken: tf.Tensor, element: Any, state: Any) -> tf.Tensor:
        return (taken < max_steps) & element.has_value()

    def body(taken: tf.Tensor, element: Any, state: Any) -> Any:
        state = step(element.get_value(), taken, state)
        # The next element is read after the step, because the step may itself read from the iterator. It is not read
        # after the last step, because the element would be lost.
        following = tf.cond(taken + 1 < max_steps, iterator.get_next_as_optional, lambda: none)
        return taken + 1, following, state

    start = (tf.constant(0), iterator.get_next_as_optional(), state)
    taken, _, state = tf.while_loop(running, body, start)
    return taken, taken < max_steps, state


def replica_inputs(pipeline: InputPipeline, replica: Replica) -> tuple[Any, Any]:
    """Return (features, labels) of one replica from the flat inputs of the step.

    The global step is made available to model_fn as its first variable, because tf.estimator made it first.
    """
    for name in (v1.GraphKeys.GLOBAL_STEP, v1.GraphKeys.GLOBAL_VARIABLES):
        v1.add_to_collection(name, replica.global_step)
    return _pack_inputs(pipeline, replica.inputs, replica.index)


def named_values(pipeline: InputPipeline, inputs: Sequence[tf.Tensor], index: int, predictions: Any) -> dict[str, Any]:
    """Return name -> value: what hooks can fetch of a replica's examples.

    Args:
      pipeline: the input.
      inputs: the flat inputs of the step, in the order of `step_signature`.
      index: the replica's index in this process.
      predictions: what its model_fn predicts.
    """
    # Not those that model_fn got: it may have removed some.
    features, labels = _pack_inputs(pipeline, inputs[:-3], index)
    if isinstance(labels, WeightedLabels):
        labels = labels.labels
    return fetches.named(predictions=predictions, labels=labels, features=features)


def _pack_inputs(pipeline: InputPipeline, inputs: Sequence[tf.Tensor], index: int) -> tuple[Any, Any]:
    """Return (features, labels) of the replica `index` of this process, given the flat tensors of all of them."""
    first = (len(inputs) // pipeline.num_replicas) * index
    parts: list[Any] = []
    for spec in pipeline.replica_spec:
        if spec is None:
            parts.append(as_given(None))
            continue
        size = len(tf.nest.flatten(spec, expand_composites=True))
        flat = list(inputs[first : first + size])
        parts.append(as_given(tf.nest.pack_sequence_as(spec, flat, expand_composites=True)))
        first += size
    return parts[0], parts[1]


def split_fetches(fetches: Sequence[Any]) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Split a hook's fetches into (tensors, whose values are returned; operations, which only run)."""
    tensors: list[tf.Tensor] = []
    effects: list[tf.Operation] = []
    for fetch in fetches:
        if isinstance(fetch, tf.Operation):
            effects.append(fetch)
        else:
            tensors.append(fetch)
    return tensors, effects
