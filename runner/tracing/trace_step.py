"""Session semantics: trace a step once, and decide afterwards, by what is fetched, which part of it runs.

`tf.function` runs every assignment that a function builds. A model_fn written for tf.estimator calls `minimize` before
it looks at `mode`, and returns in EstimatorSpec what is to run. Therefore the step is traced by
`tf.compat.v1.wrap_function`, with `strategy.run` inside it, and pruned to its fetches. The remaining operations run in
program order for each variable; a v1 session would run them in any order.

A model_fn that returns `optimizer=` is traced the same way, with every effect fetched. That does the same as
`tf.function`, needs one trace of the model instead of two, and lets v1 hooks fetch from it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.distribute.collectives import SINGLE_PROCESS, Collectives, collectives_of
from runner.distribute.gradient_calls import FoundCalls, GradientCalls, SummedCalls, gradients_given_to_calls, writes_in
from runner.distribute.reductions import Reductions, ReplicaWeights, local_replica
from runner.distribute.replica_values import ReplicaValues
from runner.tf_private import graphs
from runner.tf_private.cluster import replicas_in_sync, strategy_seen
from runner.tf_private.keras3 import keras_trace
from runner.tf_private.variables import initial_values_from_checkpoints, lookups_of_rows
from runner.tracing.adapted_layers import adapting_once
from runner.tracing.graph_operations import captured, handles, needed
from runner.tracing.random_state import Stream, drawing_from, moment, next_seed, seeded, stateless_random_ops
from runner.tracing.replica_writes import ReplicaWrites, check_variables_of_others
from runner.tracing.same_model import GraphVariable, check_same_messages, check_same_model, messages_of, uses_of
from runner.tracing.trace import ReplicaCall, Trace
from runner.tracing.variable_request import VariableSpec
from runner.tracing.variable_store import GLOBAL_STEP, LocalVariable, NotFed, RequestedVariables, VariableStore

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Replica:
    """The arguments with which the function of one replica is traced.

    Attributes:
      index: index among the replicas of this process.
      inputs: flat input tensors of the step, of all local replicas.
      weights: weights of the replicas.
      reductions: sums over replicas.
      requested: the variables requested so far.
      store: holds the variables, and can compute their initial values.
      global_step: the global step for this trace, an int64 scalar variable.
      gradient_calls: gets the gradients that model_fn computes.
    """

    index: int
    inputs: Sequence[tf.Tensor]
    weights: ReplicaWeights
    reductions: Reductions
    requested: RequestedVariables
    store: VariableStore
    global_step: tf.Variable
    gradient_calls: GradientCalls = GradientCalls()

    @property
    def num_replicas(self) -> int:
        """The number of replicas that take part in one update, over all workers."""
        return self.store.num_replicas

    @property
    def num_local(self) -> int:
        """The number of replicas of this process."""
        return int(self.weights.counts.shape[0])


ReplicaFunction = Callable[[Replica], Any]


def trace_step(
    store: VariableStore,
    replica_fn: ReplicaFunction,
    signature: Sequence[tf.TensorSpec],
    *,
    training: bool,
    on_workers: bool = False,
    is_common: bool = False,
) -> Trace:
    """Trace one step with session semantics, and create the variables it requests.

    Args:
      store: the variables of the model.
      replica_fn: the function of one replica, called with a Replica.
      signature: flat TensorSpecs of the inputs; the last three are the part of the step and the weights (counts, global
        count). The part is an int64 scalar: in TRAIN the index of the micro-batch, else the number of the first
        replica's batch in the whole input. Random operations draw by it.
      training: Keras' random state is the model's and advances; False: it is evaluation's own.
      on_workers: a step that does not train also runs on the workers of a ClusterCoordinator, not only in this process.
        Its local variables (metrics) are in this process.
      is_common: all workers that train together make this trace, at the same time.

    Raises:
      WorkersDifferError: it is common, and other workers have traced another model.
    """
    # With one copy of each variable, evaluation and prediction need no strategy: the trace of discovery itself runs.
    on_one_device = store.strategy is None or (store.has_one_copy and not training)
    workers = collectives_of(store.strategy) if is_common else SINGLE_PROCESS
    step = _Step(store, replica_fn, signature, training, workers)
    discovery = _discover(step, on_one_device=on_one_device)
    if store.strategy is None:
        return discovery.trace
    if not on_one_device or on_workers:
        trace = _trace_replicas(step, store.strategy, discovery.global_calls)
        trace.one_replica = discovery.trace
        return trace
    new_of_model = [spec for spec in discovery.new if not spec.local]
    if new_of_model:  # the trace used discovery variables, and the real ones exist only now
        discovery = _discover(step, on_one_device=True)
    return discovery.trace


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step to be traced; see `trace_step`.

    Attributes:
      workers: those that make the same trace at the same time.
    """

    store: VariableStore
    replica_fn: ReplicaFunction
    signature: Sequence[tf.TensorSpec]
    training: bool
    workers: Collectives

    @property
    def seeds(self) -> Callable[[], tf.Tensor] | None:
        """What replaces the state of Keras' seed generators: outside of training, the step's own random numbers."""
        return None if self.training else next_seed

    def wrap(self, run: Callable[[Sequence[tf.Tensor], tf.Tensor, ReplicaWeights], None]) -> Any:
        """Return the graph that `run` traces when called with the flat inputs, the part of the step and the weights of
        the replicas.
        """

        def traced(*arguments: tf.Tensor) -> None:
            graph = v1.get_default_graph()
            inputs = arguments[:-3]
            part, counts, global_count = arguments[-3:]
            graphs.program_order_in_branches(graph)
            with (
                graphs.fresh_collections(),
                self.store.placement.tracing(),
                stateless_random_ops(),
                initial_values_from_checkpoints(),
                lookups_of_rows(),
                gradients_given_to_calls(),
                adapting_once(graph, self.store.adapted, self.workers),
            ):
                run(inputs, part, ReplicaWeights(counts, global_count))

        with seeded(self.store.seed), graphs.no_name_scope_in_branches():
            return v1.wrap_function(traced, list(self.signature))

    def call(self, replica: Replica, part: tf.Tensor) -> ReplicaCall:
        """Call the function of a replica in its thread."""
        with drawing_from(self._stream(replica, part)):
            output = self.replica_fn(replica)
        # In the thread of the replica, because inside `fresh_collections` each thread has collections of its own.
        keys = [*v1.get_default_graph().get_all_collection_keys(), graphs.VARIABLES_BY_NAME]
        collections = {key: list(v1.get_collection(key)) for key in keys}
        return ReplicaCall(output, collections)

    def _stream(self, replica: Replica, part: tf.Tensor) -> Stream:
        """Return the random numbers of a replica.

        In TRAIN each replica draws its own, at each global step and micro-batch. Else each batch of the whole input
        draws its own, whichever replica gets it.
        """
        seed = self.store.seed
        graph = v1.get_default_graph()
        if not self.training:
            return Stream(graph, f"{seed}/evaluation/0", lambda: part + replica.index)
        number = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return Stream(graph, f"{seed}/train/{number}", lambda: moment(replica.global_step.read_value(), part))


class _Discovery(NamedTuple):
    """The trace of one replica, and what it has found.

    Attributes:
      new: specs of the variables that no earlier trace requested.
      global_calls: numbers of the calls for gradients that must be those of the global batch.
    """

    trace: Trace
    new: Sequence[VariableSpec]
    global_calls: frozenset[int]


def _discover(step: _Step, *, on_one_device: bool) -> _Discovery:
    """Trace one replica under the default strategy and create every new variable that it requests. Workers that train
    together check that they have traced the same model.

    Args:
      on_one_device: this trace is the one that runs; False: a trace of all replicas follows.
    """
    store = step.store
    calls: list[ReplicaCall] = []
    traced: dict[str, Any] = {}  # what `run` leaves here while TensorFlow traces it
    # Only then must some gradients be those of the global batch; this trace finds out which.
    precedes_several_replicas = step.training and not on_one_device and store.num_replicas > 1

    def run(inputs: Sequence[tf.Tensor], part: tf.Tensor, weights: ReplicaWeights) -> None:
        reductions = Reductions(tf.distribute.get_strategy(), weights, discovers=True)
        graph = v1.get_default_graph()
        traced["part"] = part
        found = FoundCalls(graph) if precedes_several_replicas else GradientCalls()
        traced["found"] = found

        def reduce(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
            return reductions.all_reduce(found.given_to_optimizer(pairs))

        watched = found.watching_optimizers()
        with graphs.fresh_thread_collections(), keras_trace(graph, reduce, step.seeds) as keras, watched:
            requested = RequestedVariables(keras, step.training)
            traced["requested"] = requested
            with store.discovering(requested) as traced["new"]:
                global_step = store.discovery_variable(GLOBAL_STEP)
                replica = Replica(0, inputs, weights, reductions, requested, store, global_step, found)
                calls.append(step.call(replica, part))

    # A value that model_fn computes from the number of replicas, such as a learning rate, may be an initial value.
    num_replicas = 1 if on_one_device or store.strategy is None else store.strategy.num_replicas_in_sync
    has_strategy = store.strategy is not None
    with replicas_in_sync(num_replicas), strategy_seen(has_strategy):
        wrapped = step.wrap(run)

    graph = wrapped.graph
    part = traced["part"]
    requested = traced["requested"]
    new = traced["new"]
    feeds = getattr(calls[0].output, "initial_feeds", None) or {}
    inputs = {tensor.op for tensor in wrapped.inputs}

    def evaluate(initial: Any) -> Any:
        if callable(initial):
            with graph.as_default(), replicas_in_sync(num_replicas), strategy_seen(has_strategy):
                initial = tf.convert_to_tensor(initial())
        running = needed(graph, [initial.op])
        fed: list[tf.Tensor] = []
        values: list[tf.Tensor] = []
        for operation in running:
            is_of_model_fn = operation.type == "Placeholder" and operation not in inputs
            if is_of_model_fn:
                (placeholder,) = operation.outputs
                fed.append(placeholder)
                values.append(_find_fed_value(graph, placeholder, feeds))
        if part.op in running:  # a random initial value, which is drawn by the part of the step
            fed.append(part)
            values.append(tf.constant(0, tf.int64))
        function = graphs.function_of_part(graphs.Part(graph, running, fed, [initial]))
        return function(*values)[0]

    writes = list(writes_in(graph.get_operations(), captured(graph, requested.variables)))
    global_calls = traced["found"].reaching(writes)
    if step.workers.num_workers > 1:
        inputs_of_step = wrapped.inputs[: len(step.signature)]
        variables = _variables_in(graph, step, requested)
        # Before the variables are made, for which the workers wait for each other.
        check_same_model(uses_of(graph, inputs_of_step, variables, writes), step.workers)
    store.materialise(new, evaluate, on_one_device=on_one_device)
    return _Discovery(Trace(wrapped, calls, requested), new, global_calls)


def _variables_in(graph: Any, step: _Step, requested: RequestedVariables) -> list[GraphVariable]:
    """Return the variables that a step requests, in order of request.

    In training, variables are left out of which each replica has its own value, such as the state of a metric.
    """
    # Id of a handle -> names of the placeholders that stand for it in the graph.
    handles_in_graph: dict[int, list[str]] = collections.defaultdict(list)
    for external, internal in graph.captures:
        handles_in_graph[id(external)].append(internal.name)
    trainable = requested.trainable
    variables = []
    for name, (variable, _) in requested.requests.items():
        spec = step.store.specs[name]
        if spec.is_of_replica and step.training:
            continue
        names: list[str] = []
        copies = variable.values if isinstance(variable, LocalVariable) else [variable]
        for copy in copies:
            for handle in handles(copy):
                names += handles_in_graph[id(handle)]
        described = f"{name!r} ({spec.shape}, {spec.dtype.name})"
        variables.append(GraphVariable(described, name in trainable, names))
    return variables


def _find_fed_value(graph: Any, placeholder: tf.Tensor, feeds: Mapping[Any, Any]) -> tf.Tensor:
    """Return the value fed for `placeholder`.

    Raises:
      NotFed: nothing is fed.
    """
    for key, value in feeds.items():
        element = graph.as_graph_element(key) if isinstance(key, str) else key
        if element is placeholder or element is placeholder.op:
            return tf.constant(value, placeholder.dtype)
    raise NotFed(placeholder)


def _trace_replicas(step: _Step, strategy: tf.distribute.Strategy, global_calls: frozenset[int]) -> Trace:
    """Trace every local replica in strategy.run with the store's variables. Workers that train together check that
    their steps have the same messages.

    Args:
      global_calls: as in `_Discovery`.
    """
    store = step.store
    calls: list[ReplicaCall] = []
    traced: dict[str, Any] = {}  # what `run` leaves here while TensorFlow traces it
    # Only the first replica makes summaries, but each replica's model_fn merges them.
    shared: dict[Any, list[Any]] = {v1.GraphKeys.SUMMARIES: []}

    def run(inputs: Sequence[tf.Tensor], part: tf.Tensor, weights: ReplicaWeights) -> None:
        graph = v1.get_default_graph()
        values = ReplicaValues(inputs, weights.counts, store.own_states())
        reductions = Reductions(strategy, weights, values=values, has_global_gradients=bool(global_calls))
        writes = ReplicaWrites(strategy, reductions, values, store.says_how_to_aggregate, graph)
        # Before model_fn is called: only later captures are collected.
        traced["call_time_values"] = graphs.collect_call_time_values(graph)
        with strategy.scope(), keras_trace(graph, reductions.all_reduce, step.seeds) as keras, reductions.entered():
            requested = RequestedVariables(keras, step.training)
            traced["requested"] = requested
            serving = store.serving(requested)

            def run_replica() -> ReplicaCall:
                with graphs.fresh_thread_collections(shared), serving():
                    index = local_replica()
                    gradients = SummedCalls(graph, global_calls, reductions.all_reduce)
                    counter = store[GLOBAL_STEP]
                    replica = Replica(index, inputs, weights, reductions, requested, store, counter, gradients)
                    return step.call(replica, part)

            with serving(), _explaining_merge_call(), _writing_alike(step, writes, requested, graph):
                calls.extend(strategy.experimental_local_results(strategy.run(run_replica)))

    wrapped = step.wrap(run)
    requested = traced["requested"]
    if step.training and step.workers.num_workers > 1:
        variables = _variables_in(wrapped.graph, step, requested)
        inputs = wrapped.inputs[: len(step.signature)]
        check_same_messages(messages_of(wrapped.graph, inputs, variables), step.workers)
    trace = Trace(wrapped, calls, requested, traced["call_time_values"])
    if step.training and store.num_replicas > 1:
        check_variables_of_others(trace.graph, trace.variables_of_others(store))
    return trace


@contextlib.contextmanager
def _writing_alike(step: _Step, writes: ReplicaWrites, requested: RequestedVariables, graph: Any) -> Iterator[None]:
    """Let all replicas write the same to the variables of the model inside this context, and check that they did."""
    if not step.training or step.store.num_replicas == 1:
        yield
        return
    with writes.entered():
        yield
    names: dict[str, str] = {}
    for name, (variable, _) in requested.requests.items():
        if not step.store.specs[name].is_of_replica:
            names.update(dict.fromkeys(captured(graph, [variable]), name))
    writes.check(names, has_one_copy=step.store.has_one_copy)


@contextlib.contextmanager
def _explaining_merge_call() -> Iterator[None]:
    """Add what to do to TensorFlow's error about `merge_call` in a branch or loop."""
    try:
        yield
    except RuntimeError as error:
        if "merge_call" in str(error):
            error.add_note(
                "With several replicas, what is written to a variable of the model inside tf.cond or tf.while_loop "
                "must be the same on all of them, as far as the graph tells, and a nested tf.function may write "
                "nothing. This excludes Keras optimizers in a branch, also those with loss scaling, and "
                "BatchNormalization or Dropout in a branch. Move it out of the branch, or train on one replica. To "
                "accumulate gradients over n steps, return EstimatorSpec(optimizer=...) and set "
                "train.gradient_accumulation=n (RunConfig(gradient_accumulation=n)) with batches n times as large."
            )
        raise
