"""The training program: the trace of one step, and the parts of the trace that a step runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline, step_devices
from runner.data.replica_batches import ReplicaBatch
from runner.distribute.collectives import collectives_of
from runner.distribute.gradient_calls import calls_of_model_fn
from runner.distribute.reductions import spans_processes
from runner.model_fn import ModeKeys
from runner.model_log import LoggedValues, logging_to
from runner.programs import ema, learning_rate, support_checks
from runner.programs.batch_losses import GlobalRows, PartOfStep, PartOfUpdate, WholeBatch, model_fn_has
from runner.programs.gradient_accumulation import AccumulatedStep, GradientCut, trace_cut
from runner.programs.mixed_precision import LossScale
from runner.programs.optimizer_step import Update, advance, apply_update, gradients_of, objective, sum_over_replicas
from runner.programs.program import ModelToTrace, Program, TracedReplica, replica_inputs, split_fetches, step_inputs
from runner.programs.train_loop import TIMES, TIMES_SPEC, Loop, Outputs, SplitLoop, Step, now_after
from runner.programs.train_scalars import Fetched, ReplicaScalars, StepScalars, StepSummaries, replica_scalars
from runner.tf_private.optimizers import variables_of
from runner.tf_private.summaries import Collector, SummaryImage, SummaryScalar, collecting, summaries_noted
from runner.tracing import xla
from runner.tracing.graph_operations import needed, operations, sent_first
from runner.tracing.metric_states import KeptMetrics, is_pair
from runner.tracing.numeric_checks import NumericChecks
from runner.tracing.trace_step import Replica
from runner.types import StepRequest

v1 = tf.compat.v1
_log = logging.getLogger(__name__)
_NOTHING = StepRequest()

# Operation that writes a summary -> index of the input that is its name.
_INPUT_OF_NAME = {"ScalarSummary": 0, "WriteSummary": 3}


@dataclasses.dataclass(frozen=True)
class TrainedReplica(TracedReplica):
    """The outputs of one replica's trace of model_fn in TRAIN; all tensors belong to the traced graph.

    Attributes:
      loss: scalar, the replica's part of the loss of the step; the parts sum to the mean over the global batch.
      loss_is_sum: the loss was recognised as a sum over the examples of the global batch; it is no mean then.
      v2_summaries: operations of `tf.summary`.
      summaries: scalars that model_fn summarizes.
      images: images that model_fn summarizes with `tf.summary`.
      scalars: sums of those scalars, of metrics and of values that model_fn logs.
      made: the update, with the values that it reports; None with a train_op.
      others: with a train_op: what each step also runs. That is the update of the moving averages of the weights, and
        sums over losses to which other processes contribute, even if nothing in this process needs them: if only one
        process (the chief, for its summaries or hooks) fetched them, it would wait for the others forever.
      advance: with a train_op: operations that count the step if the train_op does not.
      cut: the two programs of the step, if gradients and update are separate programs; else None.
      totals: of the scaling of its losses; empty without `cut`.
    """

    loss: tf.Tensor
    loss_is_sum: bool
    v2_summaries: Sequence[tf.Operation]
    summaries: Sequence[SummaryScalar]
    images: Sequence[SummaryImage]
    scalars: ReplicaScalars
    made: Update | None = None
    others: Sequence[tf.Tensor | tf.Operation] = ()
    advance: Sequence[tf.Operation] = ()
    cut: GradientCut | None = None
    totals: Sequence[tuple[tf.Tensor, tf.Tensor]] = ()


class TrainProgram(Program):
    """Training of one model_fn on inputs of one structure, traced once.

    Args:
      model: the model_fn and its variables.
      pipeline: the training input.
      summary_writer: writer for `tf.summary` inside model_fn; None: summaries are not written.
      stop_at_nan: a loop ends after the first step whose loss is not finite.
      loop_type: makes the loop, called like Loop; None: Loop.

    Raises:
      ValueError: the config asks for something that this model_fn does not support.
    """

    outputs: Sequence[TrainedReplica]

    def __init__(
        self,
        model: ModelToTrace,
        pipeline: InputPipeline,
        *,
        summary_writer: Any,
        stop_at_nan: bool,
        loop_type: Callable[..., Any] | None = None,
    ) -> None:
        config, num_replicas = model.config, model.store.num_replicas
        self._config = config
        self._loops: dict[Any, Any] = {}
        self.loss_scale = LossScale(model.store) if config.precision == "mixed_float16" else None

        with summaries_noted():
            replica_fn = functools.partial(self._trace_replica, model, pipeline, summary_writer)
            super().__init__(model, pipeline, replica_fn, training=True, is_common=True)
        if config.check_numerics:
            # Before a part of the step is made a function: `Trace.function` adds the checks to it.
            self.trace.checks = NumericChecks(self.trace.graph, self.trace.inputs, pipeline.replica_spec)
        self.is_native = self.spec.optimizer is not None
        """Report whether the runner owns the gradients (`optimizer=`)."""
        self.loss_is_sum = self.outputs[0].loss_is_sum
        """Report whether the loss of a step is a sum over its examples, and no mean."""
        self.summaries = self._found_summaries()
        scalars, values = [output.scalars for output in self.outputs], self._values_of_step()
        self.scalars = StepScalars(scalars, self.summaries.scalars, values, may_lack=self.loss_scale is not None)
        """The numbers of each step: its metrics, and the scalars of summaries in a step that writes summaries."""
        self.kept_metrics = self._metrics_with_state()
        """The metrics of TRAIN that are reported and keep state in variables."""
        if self.outputs[0].advance:
            _log.warning(
                "train_op does not advance the global step, so the runner does: each run of train_op is one step. To "
                "count steps yourself, use optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())."
            )
        support_checks.check_training(self.spec, config, num_replicas, self.trace.graph)
        meets_others = num_replicas > pipeline.num_replicas
        # Not with several workers: they must make the same collectives in the same order, and the chief's program with
        # summaries may differ from theirs.
        self.records_in_loops = bool(self.summaries) and loop_type is None and not meets_others and not self._is_cut
        """Report whether steps with summaries are taken inside loops, not between loops."""
        self.loops_in_graph = loop_type is None
        """Report whether a loop reads its iterator in a graph of this process."""
        # A step of several programs (train.gradient_accumulation, precision, jit) begins with collectives of its own.
        self._times_steps = meets_others and self.loops_in_graph and not self._is_cut
        self._loop_type = loop_type or functools.partial(Loop, meets_others=meets_others)
        self.has_local_losses = meets_others and not self.is_native
        """Report whether the losses of a loop are this worker's parts, to be summed over the workers."""
        # With `optimizer=` the loss is summed together with the gradients. With train_op= the user's optimizer sends
        # only gradients, so the loss is summed after the loop. Until then a worker knows only its own part of the loss,
        # and must not leave the loop because of it: all workers must leave at the same step.
        self._stop_at_nan = stop_at_nan and not self.has_local_losses
        self._gradients = self.trace.function
        if config.jit:
            gradients = xla.Gradients([output.cut.sums for output in self.outputs if output.cut is not None])
            self._gradients = functools.partial(self.trace.function, build=gradients.function_of_part)

    def _trace_replica(
        self, model: ModelToTrace, pipeline: InputPipeline, summary_writer: Any, replica: Replica
    ) -> TrainedReplica:
        nothing = contextlib.nullcontext(Collector(None))
        collects = collecting(summary_writer) if model.config.tensorboard else nothing
        with _summaries(summary_writer, replica), collects as collected:
            return train_replica(model, pipeline, replica, collected)

    def _found_summaries(self) -> StepSummaries:
        """Return the summaries of a step. Other workers than the chief compute the scalars that the chief asks for."""
        own = getattr(self.spec.scaffold, "summary_op", None)
        protos = _unmerged([own] if own is not None else self.trace.collections.get(v1.GraphKeys.SUMMARIES, []))
        scalars, is_chief = self.outputs[0].summaries, collectives_of(self._store.strategy).is_chief
        if is_chief:
            of_v1 = {one.op for one in protos}
            scalars = [one for one in scalars if one.operation is not None and (one.metadata or one.operation in of_v1)]
        merged = {one.operation for one in scalars}
        self._merged_v2 = {write for one in scalars if one.metadata for write in _writes_of(one.operation)}
        others = [one for output in self.outputs for one in output.v2_summaries if one not in self._merged_v2]
        named = [one for one in self.trace.graph.get_operations() if one.type in _INPUT_OF_NAME]
        names = [tf.get_static_value(one.inputs[_INPUT_OF_NAME[one.type]]) for one in named]
        return StepSummaries(
            scalars,
            [one for one in protos if one.op not in merged],
            self.outputs[0].images if is_chief else (),
            has_others=bool(others),
            names={np.asarray(name).item().decode() for name in names if name is not None},
        )

    def loop(
        self,
        request: StepRequest = _NOTHING,
        *,
        records: bool = False,
        in_groups: bool = False,
        splits: bool = False,
    ) -> Any:
        """Return the loop over steps: a Loop, or an object that is called like one.

        Args:
          request: the tensors that the last step fetches; the loop is called with the values of its feeds.
          records: the loop has steps that write summaries: those of its schedule if `records_in_loops`, else the last.
          in_groups: the loop fetches batches in groups, but for a last step with fetches; only if `can_group`.
          splits: the last step is a call of its own in any case, because it is one on another worker.

        Raises:
          ValueError: a placeholder is not fed, or the step consists of several programs and cannot be fed.
        """
        key = (records, in_groups, splits, request.key)
        if key not in self._loops:
            self._loops[key] = self._build_loop(request, records=records, in_groups=in_groups, splits=splits)
        return self._loops[key]

    def _build_loop(self, request: StepRequest, *, records: bool, in_groups: bool, splits: bool) -> Any:
        build = functools.partial(self._loop_type, pipeline=self._pipeline, stop_at_nan=self._stop_at_nan)
        in_graph = records and self.records_in_loops and not request and not splits
        if in_graph or not (records or request or splits):
            more: dict[str, Any] = {"in_groups": True} if in_groups else {}
            more |= {"recorded": self._step(_NOTHING, summaries=True)} if in_graph else {}
            return build(self._step(_NOTHING, summaries=False), **more)
        # The last step is taken alone, so that the other steps do not pay for its fetches.
        last = build(self._step(request, summaries=records)) if records or request else self.loop()
        others = functools.partial(self.loop, in_groups=in_groups)
        return SplitLoop(others, last, stop_at_nan=self._stop_at_nan)

    def part(self, request: StepRequest) -> Loop:
        """Return the loop over operations that a hook runs on batches between steps, without the rest of a step.

        Args:
          request: the operations and tensors.

        Raises:
          ValueError: a part of a step cannot run alone with these settings, or a placeholder is not fed.
        """
        key = "part", request.key
        if key not in self._loops:
            tensors, effects = split_fetches(request.fetches)
            support_checks.check_part(
                request.fetches, self._config, self._store.num_replicas > self._pipeline.num_replicas
            )
            train_ops = [output.spec.train_op for output in self.outputs]
            if any(one is train_op for one in request.fetches for train_op in train_ops):
                effects += [*train_ops, *self.trace.writes_of_keras()]
            function = self.trace.function(tensors, effects, feeds=request.feeds)

            def take(batches: Sequence[ReplicaBatch], global_count: tf.Tensor, values: Sequence[tf.Tensor]) -> Outputs:
                return {"loss": tf.constant(0.0), "fetches": function(*step_inputs(batches, global_count), *values)}

            of_fetches = [tf.TensorSpec(one.shape, one.dtype) for one in tensors]
            specs = {"loss": tf.TensorSpec([], tf.float32), "fetches": of_fetches}
            self._loops[key] = Loop(Step(take, specs), self._pipeline, stop_at_nan=False)
        return self._loops[key]

    @property
    def can_group(self) -> bool:
        """Report whether loops may fetch their batches in groups.

        They may if all replicas belong to one process and are on CPUs. They may not if a kernel draws random numbers:
        each loop has its own kernels, which start their random numbers from the seed. They may not with XLA, which
        takes longer to compile one more loop than grouping saves.
        """
        is_one = self.loops_in_graph and self._store.num_replicas == self._pipeline.num_replicas
        is_on_cpu = all("CPU" in device for device in step_devices(self._config.train_distribute))
        return is_one and is_on_cpu and not self._config.jit and not self.trace.kernel_random_ops()

    @property
    def _is_cut(self) -> bool:
        return self.outputs[0].cut is not None

    def _step(self, request: StepRequest, *, summaries: bool) -> Step:
        tensors, effects = split_fetches(request.fetches)
        examples = self._examples(request.names)
        fetched = Fetched(self.scalars, self.summaries if summaries else None, tensors, examples)
        losses = [output.loss for output in self.outputs]
        specs = {"loss": tf.TensorSpec([], losses[0].dtype), **fetched.specs}
        effects = [*self._effects(summaries=summaries), *effects]
        if self._is_cut:
            support_checks.check_feeds(request.feeds)
            extra, update = tf.nest.flatten(fetched.tensors), self.outputs[0].made
            of_update = [] if update is None else list(update.values.values())
            places = [number for number, tensor in enumerate(extra) if any(tensor is one for one in of_update)]
            others = [number for number in range(len(extra)) if number not in places]
            step = self._accumulated_step(effects, [extra[number] for number in others], [extra[n] for n in places])

            def take_parts(*arguments: Any) -> Outputs:
                loss, *values = step.take(*arguments)
                by_place = dict(zip([*others, *places], values, strict=True))
                values = tf.nest.pack_sequence_as(fetched.tensors, [by_place[n] for n in range(len(extra))])
                return {"loss": loss, **fetched.packed(values)}

            return Step(take_parts, specs)
        sent_at = self._sent_at([losses, fetched.tensors, effects])
        if sent_at:
            specs[TIMES] = TIMES_SPEC
        function = self._kept(self.trace.function([losses, fetched.tensors, sent_at], effects, feeds=request.feeds))

        def take(batches: Sequence[ReplicaBatch], global_count: tf.Tensor, values: Sequence[tf.Tensor]) -> Outputs:
            began = [now_after(global_count)] if sent_at else []
            losses, extra, ended = function(*step_inputs(batches, global_count), *values)
            outputs = {"loss": tf.add_n(losses), **fetched.packed(extra)}
            if sent_at:
                outputs[TIMES] = ended[0] - began[0]
            return outputs

        return Step(take, specs)

    def _sent_at(self, fetches: Sequence[Any]) -> list[tf.Tensor]:
        """Return the time at which a step has computed all that it sends first, a scalar of the trace; [] if that is
        not measured.
        """
        sent = sent_first(needed(self.trace.graph, operations(fetches))) if self._times_steps else []
        if not sent:
            return []
        with self.trace.graph.as_default(), tf.control_dependencies(sent):
            return [tf.timestamp()]

    def _examples(self, names: Sequence[str]) -> list[tf.Tensor]:
        """Return the tensors that native hooks fetch: the number of examples of each replica of this process, and then
        the named values of each.
        """
        if not names:
            return []
        tensors = [self.trace.inputs[-2]]  # the counts; see `step_signature`
        for replica in range(len(self.outputs)):
            tensors += self.tensors_named(names, replica)
        return tensors

    def _kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` of a step, which counts no stand-in example in the state of a metric."""
        may_be_idle = self._store.num_replicas > 1 or self._pipeline.num_micro_batches > 1
        if not may_be_idle:
            return function
        place_of_counts = len(self.trace.inputs) - 2  # see `step_signature`
        return self.kept_metrics.keeping(function, operator.itemgetter(place_of_counts))

    def _effects(self, *, summaries: bool) -> list[Any]:
        v2 = [operation for output in self.outputs for operation in output.v2_summaries]
        if self.is_native:
            if summaries:
                return [op for op in self.trace.all_effects() if op not in self._merged_v2]
            # The writer of tf.summary flushes on exit; with parameter servers this flush would call the coordinator.
            return [op for op in self.trace.all_effects() if op not in v2 and op.type != "FlushSummaryWriter"]
        effects: list[Any] = [output.spec.train_op for output in self.outputs] + self.trace.writes_of_keras()
        effects += [one for output in self.outputs for one in (*output.others, *output.advance)]
        effects += [one[1] for output in self.outputs for one in output.scalars.metrics.values() if is_pair(one)]
        return effects + ([op for op in v2 if op not in self._merged_v2] if summaries else [])

    def _values_of_step(self) -> dict[str, tf.Tensor]:
        """Return name -> scalar of what the runner itself reports of a step: learning rates, the gradient norm."""
        update = self.outputs[0].made
        self._rates: dict[str, Any] = {}
        values = dict(update.values) if update is not None else {}
        if not self._config.log_step_count_steps or "learning_rate" in values:
            return values
        if update is not None and update.rate is not None:
            self._rates = {"learning_rate": update.rate}
            return values
        updating = self.trace.all_effects() if self.is_native else [output.spec.train_op for output in self.outputs]
        running = needed(self.trace.graph, operations(updating))
        rates = learning_rate.rates_of_updates(self.trace.updates_of(0, running))
        self._rates = {name: rate for name, rate in rates.items() if isinstance(rate, float)}
        return {**values, **{name: rate for name, rate in rates.items() if name not in self._rates}}

    @property
    def averages(self) -> Mapping[str, str]:
        """Name of a weight in a checkpoint -> name there of the moving average that the optimizer keeps of it."""
        update = self.outputs[0].made
        if update is None or not update.averages:
            return {}
        names = self._store.names_in_checkpoint()
        return {names[weight]: names[average] for weight, average in update.averages.items()}

    @property
    def weights(self) -> Mapping[str, bool] | None:
        """Name -> whether it is trained, of the model's variables that are not the optimizer's, in the order in which
        model_fn made them; None with a train_op, whose optimizer the runner does not know.
        """
        if self.spec.optimizer is None or isinstance(self.spec.optimizer, v1.train.Optimizer):
            return None
        of_optimizer = {id(variable) for variable in variables_of(self.spec.optimizer)}
        whole_of = self._store.names_in_checkpoint()
        trained = {whole_of[name] for name in self.trace.requested.trainable}
        found: dict[str, bool] = {}
        for name, (variable, owner) in self.trace.requested.requests.items():
            is_of_optimizer = id(variable) in of_optimizer or id(owner) in of_optimizer
            whole = whole_of.get(name)  # None: a metric's, which is in no checkpoint
            is_counter = whole == v1.GraphKeys.GLOBAL_STEP or self._store.specs[name].is_random_state
            if whole is not None and not is_of_optimizer and not is_counter:
                found[whole] = whole in trained
        return found

    @property
    def rate_variable(self) -> str:
        """The name of the variable in which the optimizer keeps its learning rate.

        Raises:
          ValueError: the optimizer keeps it elsewhere; the message says what to write instead.
        """
        update = self.outputs[0].made
        if update is None or update.rate is None:
            raise ValueError(learning_rate.why_not_settable(self.spec.optimizer))
        return update.rate

    def rates(self) -> dict[str, float]:
        """Return name -> current value of the learning rates that a step does not return: constants and variables."""
        own = {**self.outputs[0].scalars.metrics, **self.outputs[0].scalars.logged_sums}
        return {
            name: float(self._store[one].numpy()) if isinstance(one, str) else one
            for name, one in self._rates.items()
            if name not in own
        }

    @property
    def reported_names(self) -> set[str]:
        """Return all names that a step reports as train/<name>, except those of summaries."""
        return {*self.outputs[0].scalars.metrics, *self.scalars.metrics, *self._rates}

    def _metrics_with_state(self) -> KeptMetrics:
        metrics: dict[str, Any] = {}
        for name, what in self.outputs[0].scalars.left_out.items():
            _log.warning("%s is not reported in training: the runner itself reports train/%s. Rename it.", what, name)
        for name, metric in self.outputs[0].scalars.metrics.items():
            try:
                keeper = KeptMetrics(self.trace, self._store, {name: metric})
            except ValueError as error:
                _log.warning("Not reported in training: %s", error)
                continue
            if keeper.unmerged and self._store.num_replicas > 1:
                _log.warning(
                    "Not reported in training: metric %r, because the runner cannot merge its state over %d replicas. "
                    "Evaluations report it, by one replica.",
                    name,
                    self._store.num_replicas,
                )
            elif keeper:
                metrics[name] = metric
        return KeptMetrics(self.trace, self._store, metrics)

    def _accumulated_step(
        self, effects: Sequence[Any], extra: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> AccumulatedStep:
        """Return the step that computes gradients micro-batch by micro-batch and then updates the model.

        Args:
          effects: operations that run with the gradients of the last micro-batch.
          extra: tensors fetched with the gradients of the last micro-batch.
          values: tensors fetched with the update.
        """
        cuts = [output.cut for output in self.outputs if output.cut is not None]
        scales = [cut.scale for cut in cuts if cut.scale is not None]
        updates = set(self.trace.operations[cuts[0].first_of_update :])
        sums = [list(cut.sums) for cut in cuts]
        own = [[tensor for tensor, _ in output.totals] for output in self.outputs]
        fed = [placeholder for output in self.outputs for _, placeholder in output.totals]

        def gradients(fetched: Sequence[tf.Tensor], running: Sequence[Any]) -> Callable[..., Any]:
            before_update = [op for op in running if op not in updates]
            return self._kept(self._gradients([sums, list(fetched)], before_update, feeds=[*scales, *fed]))

        update = self.trace.function(
            ([cut.made.loss for cut in cuts], list(values)),
            [op for op in self.trace.all_effects() if op in updates],
            with_inputs=False,
            feeds=[*(tensor for cut in cuts for tensor in cut.fed), *scales],
        )
        return AccumulatedStep(
            cuts,
            micro_batch=gradients([], self._effects(summaries=False)),
            last=gradients(extra, effects),
            update=update,
            totals=self.trace.function(own) if fed else None,
            value_types=[one.dtype for one in values],
            num_micro_batches=self._pipeline.num_micro_batches,
            loss_scale=self.loss_scale,
            collectives=collectives_of(self._store.strategy),
        )


def train_replica(
    model: ModelToTrace, pipeline: InputPipeline, replica: Replica, collected: Collector
) -> TrainedReplica:
    """Call model_fn for one replica and update the model: the step, in a graph or eagerly.

    Args:
      model: the model_fn and its variables.
      pipeline: the training input.
      replica: the replica.
      collected: collects the summaries of model_fn.
    """
    config = model.config
    features, labels = replica_inputs(pipeline, replica)
    is_cut = config.gradient_accumulation > 1 or config.precision == "mixed_float16" or config.jit
    tape, part, logged = tf.GradientTape(persistent=False), _part(replica, pipeline, is_cut=is_cut), LoggedValues()
    with tape, model_fn_has(part), logging_to(logged), calls_of_model_fn(replica.gradient_calls):
        spec = model.call(features, labels, ModeKeys.TRAIN)
        # Inside of the tape, which must record the scaling, too.
        loss = spec.loss if is_cut and spec.optimizer is not None else objective(spec, replica)
    v1.add_to_collection(v1.GraphKeys.LOSSES, spec.loss)  # where tf.estimator's hooks look for it
    # An operation runs only if it is fetched. With optimizer=, everything that changes a variable is fetched.
    is_logged = bool(config.log_step_count_steps)
    is_reported = is_logged and (spec.optimizer is not None or config.train_metrics)
    metrics = spec.eval_metric_ops if is_reported else None
    scalars = replica_scalars(collected.scalars, metrics, logged if is_logged else None, replica)
    v2 = [write for one in operations(v1.summary.all_v2_summary_ops() or []) for write in _writes_of(one)]
    of_model_fn = (part.has_sum, v2, tuple(collected.scalars), tuple(collected.images), scalars)
    if spec.optimizer is None:
        # After model_fn: operations on a variable run in program order, so the averages follow the new weights.
        moved = ema.update(replica, config.ema_decay)
        counted = advance(replica, spec.train_op)
        together = part.sums if spans_processes(tf.distribute.get_strategy()) else ()
        return TrainedReplica(spec, loss, *of_model_fn, None, [*moved, *together], counted)
    if not is_cut:
        update = apply_update(spec, gradients_of(tape, loss, spec.optimizer, replica), loss, replica, config)
        return TrainedReplica(spec, update.loss, *of_model_fn, update)
    cut = trace_cut(tape, spec, replica, config)
    return TrainedReplica(spec, cut.made.loss, *of_model_fn, cut.made, cut=cut, totals=part.totals)


def _part(replica: Replica, pipeline: InputPipeline, *, is_cut: bool) -> WholeBatch:
    """Return the scaling for the losses of a replica in a step of training."""
    if replica.num_replicas == 1 and pipeline.num_micro_batches == 1:
        return WholeBatch()
    # If cut, the gradients of each replica are a program of their own, perhaps for one micro-batch only.
    kind, over_replicas = PartOfUpdate if is_cut else PartOfStep, functools.partial(sum_over_replicas, replica)
    rows = GlobalRows(replica.weights, replica.index, replica.reductions)
    all_reduce = replica.reductions.all_reduce
    return kind(replica.weights, replica.index, v1.get_default_graph(), over_replicas, all_reduce, rows)


def _writes_of(operation: tf.Operation) -> list[tf.Operation]:
    """Return the operations that write a summary of `tf.summary`, given the operation in TensorFlow's collection.

    That is a constant with a control dependency on the write (and on whatever else model_fn put before it), or the
    output of a branch if the writer records conditionally.
    """
    branches = [tensor.op for tensor in operation.inputs if tensor.op.type.endswith("If")]
    return [operation, *branches, *(one for one in operation.control_inputs if one.type.startswith("Write"))]


def _unmerged(protos: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the summaries in `protos` (string scalars), with `merge` and `merge_all` replaced by their inputs."""
    return [
        part
        for proto in protos
        for part in (_unmerged(list(proto.op.inputs)) if proto.op.type == "MergeSummary" else [proto])
    ]


@contextlib.contextmanager
def _summaries(writer: Any, replica: Replica) -> Iterator[None]:
    """Let `tf.summary` inside model_fn write at the current step; only the first replica writes."""
    if writer is None or replica.index > 0:
        with tf.summary.record_if(False):
            yield
    else:
        with tf.name_scope("runner/"):  # otherwise this takes the name `add` from model_fn, and hooks may fetch by name
            step = replica.global_step + 1
        with writer.as_default(step=step):
            yield
