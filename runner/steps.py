"""Training on the devices: one step, traced, and what of it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner import averages, compiled, refusals
from runner.agreement import agreement_of
from runner.batch_part import PartOfBatch, PartOfStep, WholeBatch, model_fn_has
from runner.global_step import advance, collect
from runner.gradients import spans_processes
from runner.inputs import Feed, Share
from runner.losses import losses_over_batches
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.operations import operations
from runner.parts import Cut, PartedStep, trace_cut
from runner.precision import LossScale, ModelCall
from runner.run_config import RunConfig
from runner.step_loop import Loop
from runner.traces import Replica, trace_step
from runner.types import StepRequest
from runner.updates import apply_update, gradients_of, objective, sum_over_replicas
from runner.v1_bridge import gradients_in_loops, summaries_of_v1
from runner.variables import VariableStore

v1 = tf.compat.v1
_log = logging.getLogger(__name__)
_NOTHING = StepRequest()


@dataclasses.dataclass(frozen=True)
class ReplicaOutput:
    """What one replica's trace of model_fn left behind. Tensors of the traced graph.

    Attributes:
      loss: in TRAIN the replica's part of the loss of the step (the parts add up to the mean over the global batch);
        in EVAL the sum of the losses.
      weight: what `loss` is to be divided by in EVAL: the examples, or the sum of `loss_weight`.
      sums: EVAL: name -> (sum over the replica's examples, their number) of per-example metrics.
      values: EVAL: name -> value tensor of `(value, update)` metrics.
      v2_summaries: operations of `tf.summary`.
      together: sums of a model_fn's losses in which other processes take part, and that each step computes: what is
        fetched by one process alone (summaries, hooks of the chief) would wait for the others.
      averages: of a train_op: what moves the averages of the weights.
      advance: of a train_op: what counts the step, where the train_op does not.
      cut: where gradients and update are two programs.
    """

    spec: EstimatorSpec
    loss: Any = None
    weight: Any = None
    sums: Mapping[str, tuple[tf.Tensor, tf.Tensor]] = dataclasses.field(default_factory=dict)
    values: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    v2_summaries: Sequence[tf.Operation] = ()
    together: Sequence[tf.Tensor] = ()
    averages: Sequence[tf.Operation] = ()
    advance: Sequence[tf.Operation] = ()
    cut: Cut | None = None


def step_signature(feed: Feed) -> list[tf.TensorSpec]:
    """Flat specs of a step's inputs: each replica's features and labels, then the weights of the replicas."""
    one = [spec for spec in tf.nest.flatten(feed.replica_spec, expand_composites=True) if spec is not None]
    return [
        *(tf.TensorSpec(spec.shape, spec.dtype) for _ in range(feed.num_replicas) for spec in one),
        tf.TensorSpec([feed.num_replicas], tf.int64, name="runner/counts"),
        tf.TensorSpec([], tf.int64, name="runner/global_count"),
    ]


def step_inputs(shares: Sequence[Share], global_count: tf.Tensor) -> list[tf.Tensor]:
    """The shares of all local replicas, flat, in the order of `step_signature`."""
    flat = [
        tensor
        for share in shares
        for tensor in tf.nest.flatten((share.features, share.labels), expand_composites=True)
        if tensor is not None
    ]
    return [*flat, tf.stack([share.count for share in shares]), global_count]


def replica_inputs(feed: Feed, replica: Replica) -> tuple[Any, Any]:
    """(features, labels) of one replica, out of the flat inputs of the step."""
    features_spec, labels_spec = feed.replica_spec
    sizes = [len(tf.nest.flatten(spec, expand_composites=True)) for spec in (features_spec, labels_spec)]
    num_features, num_labels = sizes[0], 0 if labels_spec is None else sizes[1]
    start = replica.index * (num_features + num_labels)
    flat = list(replica.inputs[start : start + num_features + num_labels])
    features = tf.nest.pack_sequence_as(features_spec, flat[:num_features], expand_composites=True)
    if labels_spec is None:
        return features, None
    labels = tf.nest.pack_sequence_as(labels_spec, flat[num_features:], expand_composites=True)
    return features, labels


# --- training -------------------------------------------------------------------------------------------------


class TrainProgram:
    """Training of one model_fn on inputs of one structure, traced once.

    Args:
      config: what happens between gradients and variables.
      stop_at_nan: a loop ends with the first step whose loss is not finite.
      loop_type: what takes the steps, called as Loop; None: Loop.

    Raises:
      ValueError: `config` asks for what this model_fn cannot do.
    """

    def __init__(
        self,
        store: VariableStore,
        model_call: ModelCall,
        feed: Feed,
        config: RunConfig,
        *,
        summary_writer: Any,
        stop_at_nan: bool,
        loop_type: Callable[..., Any] | None = None,
    ) -> None:
        self._store, self._feed = store, feed
        self._loops: dict[Any, Loop] = {}
        self.loss_scale = LossScale(store) if config.precision == "mixed_float16" else None
        num_replicas = 1 if store.strategy is None else store.strategy.num_replicas_in_sync

        def replica_fn(replica: Replica) -> ReplicaOutput:
            with _summaries(summary_writer, replica):
                return _train_replica(model_call, feed, replica, num_replicas, config)

        with summaries_of_v1(), losses_over_batches(), gradients_in_loops():
            self.trace = trace_step(store, replica_fn, step_signature(feed), training=True)
        self.spec: EstimatorSpec = self.trace.outputs[0].spec
        if self.trace.outputs[0].advance:
            _log.warning(
                "train_op does not advance the global step, so the runner does: a step is one run of train_op. "
                "optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step()) says the same."
            )
        refusals.check_training(self.spec, config, num_replicas, self.trace.graph)
        meets_others = num_replicas > feed.num_replicas
        self._loop_type = loop_type or functools.partial(Loop, meets_others=meets_others)
        self.has_local_losses = meets_others and not self.is_native
        """Whether the losses of a loop are this worker's parts, to be summed over the workers."""
        self._stop_at_nan = stop_at_nan and not self.has_local_losses  # all workers leave a loop at the same step
        self._gradients = self.trace.function
        if config.jit:
            gradients = compiled.Gradients([output.cut.sums for output in self.trace.outputs])
            self._gradients = functools.partial(self.trace.function, build=gradients.function_of_part)

    @property
    def is_native(self) -> bool:
        """Whether the runner owns the gradients (`optimizer=`)."""
        return self.spec.optimizer is not None

    @property
    def num_summary_protos(self) -> int:
        """How many values of a step with summaries are serialised `tf.compat.v1.Summary`; they come first."""
        return len(self._protos)

    @property
    def has_summaries(self) -> bool:
        """Whether model_fn makes any."""
        return bool(self._protos or any(output.v2_summaries for output in self.trace.outputs))

    @property
    def summary_names(self) -> set[str]:
        """Names of the scalars that model_fn summarises, as far as they are constants."""
        inputs = [
            operation.inputs[{"ScalarSummary": 0, "WriteSummary": 3}[operation.type]]
            for operation in self.trace.graph.get_operations()
            if operation.type in ("ScalarSummary", "WriteSummary")
        ]
        names = [tf.get_static_value(name) for name in inputs]
        return {name.item().decode() if hasattr(name, "item") else name.decode() for name in names if name is not None}

    @property
    def _protos(self) -> list[tf.Tensor]:
        own = getattr(self.spec.scaffold, "summary_op", None)
        return [own] if own is not None else list(self.trace.collections.get(v1.GraphKeys.SUMMARIES, []))

    def loop(self, request: StepRequest = _NOTHING, *, summaries: bool = False) -> Loop:
        """The loop over steps that also do what is asked for, and write summaries.

        Args:
          request: the values of the tensors among its fetches are returned, in order; the loop is called with its
            values.
          summaries: write those of `tf.summary`, return the serialised v1 ones before the fetches.

        Raises: ValueError: a placeholder is fed by nobody, or the step is several programs, and cannot be fed.
        """
        key = (summaries, request.key)
        if key not in self._loops:
            step = self._step(request, summaries=summaries)
            self._loops[key] = self._loop_type(step, self._feed, stop_at_nan=self._stop_at_nan)
        return self._loops[key]

    def _step(self, request: StepRequest, *, summaries: bool) -> _Step | _Parts:
        outputs: Sequence[ReplicaOutput] = self.trace.outputs
        tensors = [fetch for fetch in request.fetches if not isinstance(fetch, tf.Operation)]
        extra = [*(self._protos if summaries else []), *tensors]
        specs = [tf.TensorSpec([], outputs[0].loss.dtype), *(tf.TensorSpec(one.shape, one.dtype) for one in extra)]
        effects = self._effects(summaries=summaries)
        effects += [fetch for fetch in request.fetches if isinstance(fetch, tf.Operation)]
        if outputs[0].cut is not None:
            refusals.check_feeds(request.feeds)
            return _Parts(self._parted(effects, extra), specs)
        losses = [output.loss for output in outputs]
        return _Step(self.trace.function([losses, extra], effects, feeds=request.feeds), specs)

    def _effects(self, *, summaries: bool) -> list[Any]:
        outputs: Sequence[ReplicaOutput] = self.trace.outputs
        v2 = [operation for output in outputs for operation in output.v2_summaries]
        if self.is_native:
            if summaries:
                return self.trace.all_effects()
            # The flush is where tf.summary's writer is left; with parameter servers it would call the coordinator.
            return [op for op in self.trace.all_effects() if op not in v2 and op.type != "FlushSummaryWriter"]
        effects: list[Any] = [output.spec.train_op for output in outputs] + self.trace.writes_of_keras()
        effects += [operation for output in outputs for operation in (*output.averages, *output.advance)]
        effects += [total for output in outputs for total in output.together]
        return effects + (v2 if summaries else [])

    def _parted(self, effects: Sequence[Any], extra: Sequence[tf.Tensor]) -> PartedStep:
        """The step as programs of gradients (those of the last part with `extra`) and of the update."""
        cuts: list[Cut] = [output.cut for output in self.trace.outputs]
        scales = [cut.scale for cut in cuts if cut.scale is not None]
        updates = set(self.trace.operations[cuts[0].first_of_update :])
        sums = [list(cut.sums) for cut in cuts]
        plain = [op for op in self._effects(summaries=False) if op not in updates]
        numbers = [part for part in self.trace.parts if part is not None]
        fed = [*scales, *numbers]
        part = self._gradients([sums, []], plain, feeds=fed)
        last = self._gradients([sums, list(extra)], [op for op in effects if op not in updates], feeds=fed)
        update = self.trace.function(
            [cut.loss for cut in cuts],
            [op for op in self.trace.all_effects() if op in updates],
            with_inputs=False,
            feeds=[*(tensor for cut in cuts for tensor in cut.fed), *scales],
        )

        def with_scales(program: Callable[..., Any]) -> Callable[..., Any]:
            """One loss scale for the placeholders of all replicas."""
            if not scales:
                return program
            return lambda *inputs: program(*inputs[:-1], *[inputs[-1]] * len(scales))

        def of_part(program: Callable[..., Any]) -> Callable[..., Any]:
            """As `with_scales`, and one number of the part for the random operations of all replicas."""
            return lambda *inputs: with_scales(lambda *rest: program(*rest, *[inputs[-1]] * len(numbers)))(*inputs[:-1])

        strategy = self._store.strategy
        return PartedStep(
            cuts,
            of_part(part),
            of_part(last),
            with_scales(update),
            step_inputs,
            num_parts=self._feed.num_parts,
            loss_scale=self.loss_scale,
            context=contextlib.nullcontext if strategy is None else strategy.scope,
            agreement=agreement_of(strategy),
        )


def _train_replica(
    model_call: ModelCall, feed: Feed, replica: Replica, num_replicas: int, config: RunConfig
) -> ReplicaOutput:
    collect(replica)
    features, labels = replica_inputs(feed, replica)
    is_cut = config.gradient_accumulation > 1 or config.precision == "mixed_float16" or config.jit
    tape, part = tf.GradientTape(persistent=False), _part(replica, num_replicas, is_cut=is_cut)
    with tape, model_fn_has(part):
        spec = model_call(features, labels, ModeKeys.TRAIN)
        loss = spec.loss if is_cut and spec.optimizer is not None else objective(spec, replica, num_replicas)
    v1.add_to_collection(v1.GraphKeys.LOSSES, spec.loss)  # as in tf.estimator, whose hooks look here
    summaries = _v2_summaries()
    if spec.optimizer is None:
        moved = averages.update(replica, config.ema_decay)
        counted = advance(replica, spec.train_op)
        together = part.sums if spans_processes(tf.distribute.get_strategy()) else ()
        return ReplicaOutput(spec, loss, v2_summaries=summaries, together=together, averages=moved, advance=counted)
    if not is_cut:
        loss = apply_update(spec, gradients_of(tape, loss, replica), loss, replica, num_replicas, config)
        return ReplicaOutput(spec, loss=loss, v2_summaries=summaries)
    cut = trace_cut(tape, spec, replica, num_replicas, config)
    return ReplicaOutput(spec, loss=cut.loss, v2_summaries=summaries, cut=cut)


def _part(replica: Replica, num_replicas: int, *, is_cut: bool) -> WholeBatch:
    """What the replica has of the examples of a step."""
    if num_replicas == 1:
        return WholeBatch()
    if is_cut:  # gradients are a program of each replica's own, perhaps of a part of its examples
        return PartOfBatch(replica.weights, replica.index)
    over_replicas = functools.partial(sum_over_replicas, replica, num_replicas=num_replicas)
    return PartOfStep(replica.weights, replica.index, v1.get_default_graph(), over_replicas)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step as a function of its flat inputs: the loss, then everything that was fetched with it.

    Attributes:
      specs: of what a call returns.
    """

    function: Callable[..., Any]
    specs: Sequence[tf.TensorSpec]

    def __call__(
        self, shares: Sequence[Share], global_count: tf.Tensor, values: Sequence[tf.Tensor] = ()
    ) -> list[tf.Tensor]:
        losses, extra = self.function(*step_inputs(shares, global_count), *values)
        loss = tf.add_n(losses) if len(losses) > 1 else losses[0]
        loss.set_shape([])  # the mean of a tensor of unknown rank does not know that it is a scalar
        return [loss, *extra]


@dataclasses.dataclass(frozen=True)
class _Parts:
    """As _Step, for a step that is several programs."""

    function: PartedStep
    specs: Sequence[tf.TensorSpec]

    def __call__(
        self, shares: Sequence[Share], global_count: tf.Tensor, values: Sequence[tf.Tensor] = ()
    ) -> list[tf.Tensor]:
        assert not values  # refused
        loss, *extra = self.function(shares, global_count)
        loss.set_shape([])
        return [loss, *extra]


def _v2_summaries() -> list[tf.Operation]:
    """The operations of `tf.summary` in this replica. The graph lists what comes out of them: a constant that waits
    for the write, or a branch where the recording is conditional."""
    listed = operations(v1.summary.all_v2_summary_ops() or [])
    behind = [tensor.op for operation in listed for tensor in operation.inputs if tensor.op.type.endswith("If")]
    return [*listed, *behind, *(write for operation in listed for write in operation.control_inputs)]


@contextlib.contextmanager
def _summaries(writer: Any, replica: Replica) -> Iterator[None]:
    """`tf.summary` inside model_fn writes for the first replica, at the step that is being taken."""
    if writer is None or replica.index > 0:
        with tf.summary.record_if(False):
            yield
    else:
        with tf.name_scope("runner/"):  # an `add` of model_fn's is the first of that name, for hooks that ask for it
            step = replica.global_step + 1
        with writer.as_default(step=step):
            yield
