"""The training program: the trace of one step, and the parts of the trace that a step runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from runner.data.inputs import InputPipeline, step_devices
from runner.data.replica_batches import ReplicaBatch
from runner.distribute.collectives import collectives_of
from runner.distribute.gradient_calls import calls_of_model_fn
from runner.distribute.reductions import spans_processes
from runner.model_fn import EstimatorSpec, ModeKeys
from runner.model_log import LoggedValues, logging_to
from runner.programs import ema, learning_rate, support_checks
from runner.programs.batch_losses import GlobalRows, PartOfStep, PartOfUpdate, WholeBatch, model_fn_has
from runner.programs.gradient_accumulation import AccumulatedStep, GradientCut, trace_cut
from runner.programs.mixed_precision import LossScale
from runner.programs.optimizer_step import Update, advance, apply_update, gradients_of, objective, sum_over_replicas
from runner.programs.program import ModelToTrace, Program, TracedReplica, replica_inputs, split_fetches, step_inputs
from runner.programs.train_loop import TIMES, TIMES_SPEC, Loop, Outputs, SplitLoop, Step
from runner.programs.train_scalars import Fetched, ReplicaScalars, StepScalars, StepSummaries, replica_scalars
from runner.run_config import RunConfig
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
      update: the update, with the values that it reports; None with a train_op.
      also_run: with a train_op: what each step also runs. That is the update of the moving averages of the weights, and
        sums over losses to which other processes contribute, even if nothing in this process needs them: if only one
        process (the chief, for its summaries or hooks) fetched them, it would wait for the others forever.
      advance: with a train_op: operations that count the step if the train_op does not.
      cut: the two programs of the step, if gradients and update are separate programs; else None.
      denominators: the sums by which the losses are divided, as in `batch_losses.WholeBatch`; empty without `cut`.
    """

    loss: tf.Tensor
    loss_is_sum: bool
    v2_summaries: Sequence[tf.Operation]
    summaries: Sequence[SummaryScalar]
    images: Sequence[SummaryImage]
    scalars: ReplicaScalars
    update: Update | None = None
    also_run: Sequence[tf.Tensor | tf.Operation] = ()
    advance: Sequence[tf.Operation] = ()
    cut: GradientCut | None = None
    denominators: Sequence[tuple[tf.Tensor, tf.Tensor]] = ()


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
        config = model.config
        num_replicas = model.store.num_replicas
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
        self.summaries = self._find_summaries()
        scalars = [output.scalars for output in self.outputs]
        values = self._values_of_step()
        self.scalars = StepScalars(
            scalars, self.summaries.scalars, values, nan_means_missing=self.loss_scale is not None
        )
        """The numbers of each step: its metrics, and the scalars of summaries in a step that writes summaries."""
        self.kept_metrics = self._find_metrics_with_state()
        """The metrics of TRAIN that are reported and keep state in variables."""
        if self.outputs[0].advance:
            _log.warning(
                "train_op does not advance the global step, so the runner does: each run of train_op is one step. To "
                "count steps yourself, use optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())."
            )
        support_checks.check_training(self.spec, config, num_replicas, self.trace.graph)
        # A step has collectives with other processes.
        meets_others = num_replicas > pipeline.num_replicas
        # Not with several workers: they must make the same collectives in the same order, and the chief's program with
        # summaries may differ from theirs.
        can_record_in_loops = loop_type is None and not meets_others and not self._is_cut
        self.records_in_loops = can_record_in_loops and bool(self.summaries)
        """Report whether steps with summaries are taken inside loops, not between loops."""
        self.loops_in_graph = loop_type is None
        """Report whether a loop reads its iterator in a graph of this process."""
        # Not for a step of several programs (train.gradient_accumulation, precision, jit): it begins with collectives
        # of its own, so what this process does up to its first collective is not its part of the step.
        self._times_steps = meets_others and self.loops_in_graph and not self._is_cut
        self.hides_stragglers = meets_others and not self._times_steps
        """Report whether workers wait for each other, and none measures what its own part of a step takes."""
        self._loop_type = loop_type or functools.partial(Loop, meets_others=meets_others)
        self.has_local_losses = meets_others and not self.is_native
        """Report whether the losses of a loop are this worker's parts, to be summed over the workers."""
        # With `optimizer=` the loss is summed together with the gradients. With train_op= the user's optimizer sends
        # only gradients, so the loss is summed after the loop. Until then a worker knows only its own part of the loss,
        # and must not leave the loop because of it: all workers must leave at the same step.
        self._stop_at_nan = stop_at_nan and not self.has_local_losses
        self._build_gradients = self._gradient_builder()

    def _gradient_builder(self) -> Callable[..., Callable[..., Any]]:
        """Return `Trace.function` for the program that computes gradients."""
        if not self._config.jit:
            return self.trace.function
        gradients = xla.Gradients([cut.sums for cut in self._cuts])
        return functools.partial(self.trace.function, build=gradients.function_of_part)

    def _trace_replica(
        self, model: ModelToTrace, pipeline: InputPipeline, summary_writer: Any, replica: Replica
    ) -> TrainedReplica:
        collects: contextlib.AbstractContextManager[Collector] = contextlib.nullcontext(Collector(None))
        if model.config.tensorboard:
            collects = collecting(summary_writer)
        with _writing_summaries(summary_writer, replica), collects as collected:
            return train_replica(model, pipeline, replica, collected)

    def _find_summaries(self) -> StepSummaries:
        """Return the summaries of a step. Other workers than the chief compute the scalars that the chief asks for."""
        summary_op = getattr(self.spec.scaffold, "summary_op", None)
        if summary_op is None:
            protos = _without_merges(self.trace.collections.get(v1.GraphKeys.SUMMARIES, []))
        else:
            protos = _without_merges([summary_op])
        scalars = self.outputs[0].summaries
        images: Sequence[SummaryImage] = ()
        if collectives_of(self._store.strategy).is_chief:
            proto_operations = {proto.op for proto in protos}
            scalars = [scalar for scalar in scalars if _is_written(scalar, proto_operations)]
            images = self.outputs[0].images
        scalar_operations = {scalar.operation for scalar in scalars}
        self._writes_of_scalars: set[tf.Operation] = set()
        """The operations of `tf.summary` in whose place the runner writes the scalars."""
        for scalar in scalars:
            if scalar.metadata:
                self._writes_of_scalars.update(_writes_of(scalar.operation))
        other_protos = [proto for proto in protos if proto.op not in scalar_operations]
        has_others = any(write not in self._writes_of_scalars for write in self._v2_writes)
        names = _names_of_summaries(self.trace.graph)
        return StepSummaries(scalars, other_protos, images, has_others, names)

    @property
    def _v2_writes(self) -> list[tf.Operation]:
        """The operations of `tf.summary` of all replicas."""
        writes: list[tf.Operation] = []
        for output in self.outputs:
            writes += output.v2_summaries
        return writes

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
        """Return a new loop, given the arguments of `loop`. It is a SplitLoop if only the last step writes summaries,
        has fetches or must be a call of its own.
        """
        build = functools.partial(self._loop_type, pipeline=self._pipeline, stop_at_nan=self._stop_at_nan)
        is_last_apart = bool(request) or splits
        records_inside = records and self.records_in_loops and not is_last_apart
        if records_inside or not (records or is_last_apart):
            settings: dict[str, Any] = {}
            if in_groups:
                settings["in_groups"] = True
            if records_inside:
                settings["recorded"] = self._build_step(_NOTHING, summaries=True)
            return build(self._build_step(_NOTHING, summaries=False), **settings)
        # The last step is taken alone, so that the other steps do not pay for its fetches.
        if records or request:
            last = build(self._build_step(request, summaries=records))
        else:
            last = self.loop()
        others = functools.partial(self.loop, in_groups=in_groups)
        return SplitLoop(others, last, stop_at_nan=self._stop_at_nan)

    def part(self, request: StepRequest) -> Loop:
        """Return the loop over operations that a hook runs on batches between steps, without the rest of a step.

        Args:
          request: the operations and tensors.

        Raises:
          ValueError: a part of a step cannot run alone with these settings, or a placeholder is not fed.
        """
        key = ("part", request.key)
        if key not in self._loops:
            self._loops[key] = self._build_part(request)
        return self._loops[key]

    def _build_part(self, request: StepRequest) -> Loop:
        """Return a new loop, as `part` describes it."""
        tensors, effects = split_fetches(request.fetches)
        meets_others = self._store.num_replicas > self._pipeline.num_replicas
        support_checks.check_part(request.fetches, self._config, meets_others)
        train_ops = [output.spec.train_op for output in self.outputs]
        fetched = {id(fetch) for fetch in request.fetches}
        if any(id(train_op) in fetched for train_op in train_ops):
            # The train_op of one replica means that of all, with what Keras writes in a step.
            effects += [*train_ops, *self.trace.writes_of_keras()]
        function = self.trace.function(tensors, effects, feeds=request.feeds)

        def take(batches: Sequence[ReplicaBatch], global_count: tf.Tensor, values: Sequence[tf.Tensor]) -> Outputs:
            inputs = step_inputs(batches, global_count)
            # A Loop expects a loss of each step, which is not read here.
            return {"loss": tf.constant(0.0), "fetches": function(*inputs, *values)}

        fetch_specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        specs = {"loss": tf.TensorSpec([], tf.float32), "fetches": fetch_specs}
        return Loop(Step(take, specs), self._pipeline, stop_at_nan=False)

    @property
    def can_group(self) -> bool:
        """Report whether loops may fetch their batches in groups.

        They may if all replicas belong to one process and are on CPUs. They may not if a kernel draws random numbers:
        each loop has its own kernels, which start their random numbers from the seed. They may not with XLA, which
        takes longer to compile one more loop than grouping saves.
        """
        is_in_one_process = self.loops_in_graph and self._store.num_replicas == self._pipeline.num_replicas
        is_on_cpu = all("CPU" in device for device in step_devices(self._config.train_distribute))
        if not is_in_one_process or not is_on_cpu or self._config.jit:
            return False
        return not self.trace.kernel_random_ops()

    @property
    def _is_cut(self) -> bool:
        return self.outputs[0].cut is not None

    @property
    def _cuts(self) -> list[GradientCut]:
        """The programs of the step of each replica; empty if a step is one program."""
        return [output.cut for output in self.outputs if output.cut is not None]

    def _build_step(self, request: StepRequest, *, summaries: bool) -> Step:
        """Return a step that fetches what `request` names, and writes summaries if `summaries`."""
        tensors, effects = split_fetches(request.fetches)
        examples = self._example_tensors(request.names)
        fetched = Fetched(self.scalars, self.summaries if summaries else None, tensors, examples)
        losses = [output.loss for output in self.outputs]
        specs = {"loss": tf.TensorSpec([], losses[0].dtype), **fetched.specs}
        effects = [*self._effects(summaries=summaries), *effects]
        if self._is_cut:
            support_checks.check_feeds(request.feeds)
            return Step(self._build_take_of_parts(effects, fetched), specs)
        # A list of one tensor, or none: a loop adds its own times only to those of a step that has one.
        sent_at = self._measure_sent_at([losses, fetched.tensors, effects])
        if sent_at:
            specs[TIMES] = TIMES_SPEC
        function = self.trace.function([losses, fetched.tensors, sent_at], effects, feeds=request.feeds)
        function = self._keep_metrics(function)

        def take(batches: Sequence[ReplicaBatch], global_count: tf.Tensor, values: Sequence[tf.Tensor]) -> Outputs:
            losses, extra, sent = function(*step_inputs(batches, global_count), *values)
            outputs = {"loss": tf.add_n(losses), **fetched.packed(extra)}
            if sent:
                outputs[TIMES] = sent[0]
            return outputs

        return Step(take, specs)

    def _build_take_of_parts(self, effects: Sequence[Any], fetched: Fetched) -> Callable[..., Outputs]:
        """Return the `take` of a step that consists of several programs.

        Args:
          effects: operations that run with the gradients of the last micro-batch.
          fetched: the outputs beside the loss. Those that the update computes are fetched with it, the others with the
            last gradients.
        """
        update = self.outputs[0].update
        of_update: set[int] = set()
        if update is not None:
            of_update = {id(value) for value in update.values.values()}
        extra = tf.nest.flatten(fetched.tensors)
        places_of_update = [place for place, tensor in enumerate(extra) if id(tensor) in of_update]
        places_of_others = [place for place, tensor in enumerate(extra) if id(tensor) not in of_update]
        with_update = [extra[place] for place in places_of_update]
        with_gradients = [extra[place] for place in places_of_others]
        step = self._build_accumulated_step(effects, with_gradients, with_update)
        places = [*places_of_others, *places_of_update]  # of what the step returns after its loss

        def take(*arguments: Any) -> Outputs:
            loss, *values = step.take(*arguments)
            in_order: list[Any] = [None] * len(places)
            for place, value in zip(places, values, strict=True):
                in_order[place] = value
            fetched_values = tf.nest.pack_sequence_as(fetched.tensors, in_order)
            return {"loss": loss, **fetched.packed(fetched_values)}

        return take

    def _measure_sent_at(self, fetches: Sequence[Any]) -> list[tf.Tensor]:
        """Return the time at which a step has computed all that its first collectives send, as a list of one float64
        scalar of the trace; [] if that is not measured, or if the step sends nothing.

        Args:
          fetches: all that the step computes, tensors and operations.
        """
        if not self._times_steps:
            return []
        sent = sent_first(needed(self.trace.graph, operations(fetches)))
        if not sent:
            return []
        with self.trace.graph.as_default(), tf.control_dependencies(sent):
            return [tf.timestamp()]

    def _example_tensors(self, names: Sequence[str]) -> list[tf.Tensor]:
        """Return the tensors that native hooks fetch: the number of examples of each replica of this process, and then
        the named values of each.
        """
        if not names:
            return []
        tensors = [self.trace.inputs[-2]]  # the counts; see `step_signature`
        for replica in range(len(self.outputs)):
            tensors += self.tensors_named(names, replica)
        return tensors

    def _keep_metrics(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the graph function of a step so that it counts no placeholder example in the state of a metric."""
        may_have_placeholders = self._store.num_replicas > 1 or self._pipeline.num_micro_batches > 1
        if not may_have_placeholders:
            return function
        place_of_counts = len(self.trace.inputs) - 2  # see `step_signature`
        return self.kept_metrics.keeping(function, operator.itemgetter(place_of_counts))

    def _effects(self, *, summaries: bool) -> list[Any]:
        """Return the operations that run in a step beside what it fetches."""
        v2_writes = self._v2_writes
        if self.is_native:
            if summaries:
                return [op for op in self.trace.all_effects() if op not in self._writes_of_scalars]
            # The writer of tf.summary flushes on exit; with parameter servers this flush would call the coordinator.
            return [op for op in self.trace.all_effects() if op not in v2_writes and op.type != "FlushSummaryWriter"]
        effects: list[Any] = [output.spec.train_op for output in self.outputs]
        effects += self.trace.writes_of_keras()
        for output in self.outputs:
            effects += output.also_run
            effects += output.advance
        for output in self.outputs:
            # A metric of `tf.compat.v1.metrics` is a pair (value, update).
            effects += [metric[1] for metric in output.scalars.metrics.values() if is_pair(metric)]
        if summaries:
            effects += [op for op in v2_writes if op not in self._writes_of_scalars]
        return effects

    def _values_of_step(self) -> dict[str, tf.Tensor]:
        """Return name -> scalar of what the runner itself reports of a step: learning rates, the gradient norm.

        Also sets `_rates`: name -> a learning rate that no step returns, a number or the name of its variable.
        """
        update = self.outputs[0].update
        self._rates: dict[str, Any] = {}
        values: dict[str, tf.Tensor] = {}
        if update is not None:
            values.update(update.values)
        if not self._config.log_step_count_steps or "learning_rate" in values:
            return values
        if update is not None and update.rate is not None:
            self._rates = {"learning_rate": update.rate}
            return values
        if self.is_native:
            updating = self.trace.all_effects()
        else:
            updating = [output.spec.train_op for output in self.outputs]
        running = needed(self.trace.graph, operations(updating))
        rates = learning_rate.rates_of_updates(self.trace.updates_of(0, running))
        for name, rate in rates.items():
            if isinstance(rate, float):
                self._rates[name] = rate
            else:
                values[name] = rate
        return values

    @property
    def averages(self) -> Mapping[str, str]:
        """Name of a weight in a checkpoint -> name there of the moving average that the optimizer keeps of it."""
        update = self.outputs[0].update
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
        optimizer_variables = {id(variable) for variable in variables_of(self.spec.optimizer)}
        checkpoint_names = self._store.names_in_checkpoint()
        trained = {checkpoint_names[name] for name in self.trace.requested.trainable}
        found: dict[str, bool] = {}
        for name, (variable, owner) in self.trace.requested.requests.items():
            is_of_optimizer = id(variable) in optimizer_variables or id(owner) in optimizer_variables
            checkpoint_name = checkpoint_names.get(name)  # None: a metric's, which is in no checkpoint
            is_counter = checkpoint_name == v1.GraphKeys.GLOBAL_STEP or self._store.specs[name].is_random_state
            if checkpoint_name is not None and not is_of_optimizer and not is_counter:
                found[checkpoint_name] = checkpoint_name in trained
        return found

    @property
    def rate_variable(self) -> str:
        """The name of the variable in which the optimizer keeps its learning rate.

        Raises:
          ValueError: the optimizer keeps it elsewhere; the message says what to write instead.
        """
        update = self.outputs[0].update
        if update is None or update.rate is None:
            raise ValueError(learning_rate.why_not_settable(self.spec.optimizer))
        return update.rate

    def rates(self) -> dict[str, float]:
        """Return name -> current value of the learning rates that a step does not return: constants and variables."""
        of_model_fn = {**self.outputs[0].scalars.metrics, **self.outputs[0].scalars.logged_sums}
        rates: dict[str, float] = {}
        for name, rate in self._rates.items():
            if name in of_model_fn:
                continue
            if isinstance(rate, str):  # the name of a variable
                rate = float(self._store[rate].numpy())
            rates[name] = rate
        return rates

    @property
    def reported_names(self) -> set[str]:
        """Return all names that a step reports as train/<name>, except those of summaries."""
        return {*self.outputs[0].scalars.metrics, *self.scalars.metrics, *self._rates}

    def _find_metrics_with_state(self) -> KeptMetrics:
        """Return the metrics of TRAIN that are reported and keep state, and warn of those that are not reported."""
        metrics: dict[str, Any] = {}
        for name, what in self.outputs[0].scalars.left_out.items():
            _log.warning("%s is not reported in training: the runner itself reports train/%s. Rename it.", what, name)
        # Each metric by itself, so that one that cannot be reported does not keep out the others.
        for name, metric in self.outputs[0].scalars.metrics.items():
            try:
                keeper = self._keep({name: metric})
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
        return self._keep(metrics)

    def _keep(self, metrics: Mapping[str, Any]) -> KeptMetrics:
        return KeptMetrics(self.trace, self._store, metrics)

    def _build_accumulated_step(
        self, effects: Sequence[Any], extra: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> AccumulatedStep:
        """Return the step that computes gradients micro-batch by micro-batch and then updates the model.

        Args:
          effects: operations that run with the gradients of the last micro-batch.
          extra: tensors fetched with the gradients of the last micro-batch.
          values: tensors fetched with the update.
        """
        cuts = self._cuts
        fed_scales = [cut.scale for cut in cuts if cut.scale is not None]
        update_operations = set(self.trace.operations[cuts[0].first_of_update :])
        sums = [list(cut.sums) for cut in cuts]
        own_denominators: list[list[tf.Tensor]] = []
        fed_denominators: list[tf.Tensor] = []
        for output in self.outputs:
            own_denominators.append([denominator for denominator, _ in output.denominators])
            fed_denominators += [placeholder for _, placeholder in output.denominators]

        def build_gradients(fetched: Sequence[tf.Tensor], running: Sequence[Any]) -> Callable[..., Any]:
            before_update = [op for op in running if op not in update_operations]
            gradients = self._build_gradients(
                [sums, list(fetched)], before_update, feeds=[*fed_scales, *fed_denominators]
            )
            return self._keep_metrics(gradients)

        # The orders of `feeds` are those in which AccumulatedStep passes the values.
        losses = [cut.update.loss for cut in cuts]
        in_update = [op for op in self.trace.all_effects() if op in update_operations]
        fed_sums: list[tf.Tensor] = []
        for cut in cuts:
            fed_sums += cut.fed
        update = self.trace.function(
            (losses, list(values)), in_update, with_inputs=False, feeds=[*fed_sums, *fed_scales]
        )
        micro_batch = build_gradients([], self._effects(summaries=False))
        last = build_gradients(extra, effects)
        denominators = self.trace.function(own_denominators) if fed_denominators else None
        return AccumulatedStep(
            cuts,
            micro_batch=micro_batch,
            last=last,
            update=update,
            denominators=denominators,
            value_types=[value.dtype for value in values],
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
    loss_scaling = _build_loss_scaling(replica, pipeline, is_cut=is_cut)
    tape = tf.GradientTape(persistent=False)
    logged = LoggedValues()
    with tape, model_fn_has(loss_scaling), logging_to(logged), calls_of_model_fn(replica.gradient_calls):
        spec = model.call(features, labels, ModeKeys.TRAIN)
        if is_cut and spec.optimizer is not None:
            loss = spec.loss  # `trace_cut` divides it, when the losses of all micro-batches have been added
        else:
            # Inside of the tape, which must record the scaling, too.
            loss = objective(spec, replica)
    v1.add_to_collection(v1.GraphKeys.LOSSES, spec.loss)  # where tf.estimator's hooks look for it
    scalars = _reported_scalars(config, spec, collected, logged, replica)
    v2_writes: list[tf.Operation] = []
    for operation in operations(v1.summary.all_v2_summary_ops() or []):
        v2_writes += _writes_of(operation)
    traced = TrainedReplica(
        spec, loss, loss_scaling.has_sum, v2_writes, tuple(collected.scalars), tuple(collected.images), scalars
    )
    if spec.optimizer is None:
        # After model_fn: operations on a variable run in program order, so the averages follow the new weights.
        average_updates = ema.update(replica, config.ema_decay)
        step_updates = advance(replica, spec.train_op)
        shared_sums = loss_scaling.sums if spans_processes(tf.distribute.get_strategy()) else ()
        return dataclasses.replace(traced, also_run=[*average_updates, *shared_sums], advance=step_updates)
    if not is_cut:
        pairs = gradients_of(tape, loss, spec.optimizer, replica)
        update = apply_update(spec, pairs, loss, replica, config)
        return dataclasses.replace(traced, loss=update.loss, update=update)
    cut = trace_cut(tape, spec, replica, config)
    return dataclasses.replace(
        traced, loss=cut.update.loss, update=cut.update, cut=cut, denominators=loss_scaling.denominators
    )


def _reported_scalars(
    config: RunConfig, spec: EstimatorSpec, collected: Collector, logged: LoggedValues, replica: Replica
) -> ReplicaScalars:
    """Return the numbers of the replica that the settings ask for."""
    is_logged = bool(config.log_step_count_steps)
    # An operation runs only if it is fetched. With optimizer=, everything that changes a variable is fetched.
    has_metrics = spec.optimizer is not None or config.train_metrics
    metrics = spec.eval_metric_ops if is_logged and has_metrics else None
    values = logged if is_logged else None
    return replica_scalars(collected.scalars, metrics, values, replica)


def _build_loss_scaling(replica: Replica, pipeline: InputPipeline, *, is_cut: bool) -> WholeBatch:
    """Return the scaling for the losses of a replica in a step of training."""
    if replica.num_replicas == 1 and pipeline.num_micro_batches == 1:
        return WholeBatch()
    # If cut, the gradients of each replica are a program of their own, perhaps for one micro-batch only.
    kind = PartOfUpdate if is_cut else PartOfStep
    return kind(
        replica.weights,
        replica.index,
        graph=v1.get_default_graph(),
        sum_over_replicas=functools.partial(sum_over_replicas, replica),
        all_reduce=replica.reductions.all_reduce,
        rows=GlobalRows(replica.weights, replica.index, replica.reductions),
    )


def _is_written(scalar: SummaryScalar, proto_operations: Set[tf.Operation]) -> bool:
    """Report whether a scalar is written: by `tf.summary`, or as one of the summaries that a step merges, whose
    operations are `proto_operations`.
    """
    if scalar.operation is None:
        return False
    return bool(scalar.metadata) or scalar.operation in proto_operations


def _names_of_summaries(graph: tf.Graph) -> set[str]:
    """Return the names with which summaries are written in a graph, as far as they are constants."""
    names: set[str] = set()
    for operation in graph.get_operations():
        if operation.type not in _INPUT_OF_NAME:
            continue
        name = tf.get_static_value(operation.inputs[_INPUT_OF_NAME[operation.type]])
        if name is not None:
            names.add(np.asarray(name).item().decode())
    return names


def _writes_of(operation: tf.Operation) -> list[tf.Operation]:
    """Return the operations that write a summary of `tf.summary`, given the operation in TensorFlow's collection.

    That is a constant with a control dependency on the write (and on whatever else model_fn put before it), or the
    output of a branch if the writer records conditionally.
    """
    branches = [tensor.op for tensor in operation.inputs if tensor.op.type.endswith("If")]
    writes = [before for before in operation.control_inputs if before.type.startswith("Write")]
    return [operation, *branches, *writes]


def _without_merges(protos: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the summaries in `protos` (string scalars), with `merge` and `merge_all` replaced by their inputs."""
    parts: list[tf.Tensor] = []
    for proto in protos:
        if proto.op.type == "MergeSummary":
            parts += _without_merges(list(proto.op.inputs))
        else:
            parts.append(proto)
    return parts


@contextlib.contextmanager
def _writing_summaries(writer: Any, replica: Replica) -> Iterator[None]:
    """Let `tf.summary` inside model_fn write at the current step; only the first replica writes."""
    if writer is None or replica.index > 0:
        with tf.summary.record_if(False):
            yield
    else:
        with tf.name_scope("runner/"):  # otherwise this takes the name `add` from model_fn, and hooks may fetch by name
            step = replica.global_step + 1
        with writer.as_default(step=step):
            yield
