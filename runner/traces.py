"""Session semantics: a step is traced once, and what runs is decided afterwards by what is fetched.

`tf.function` runs every assignment that a function merely builds. A model_fn written for tf.estimator builds
`minimize` before it looks at `mode`, and hands back in EstimatorSpec what is to run. So the step is traced by
`tf.compat.v1.wrap_function`, with `strategy.run` inside it, and pruned to its fetches. What pruning leaves is ordered
as the program was written, variable by variable, where a v1 session would have raced.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from runner import bridge
from runner.gradients import Reductions, ReplicaWeights, local_replica
from runner.keras_bridge import keras_trace
from runner.operations import needed
from runner.randomness import Stream, drawing_from, moment, stateless_random_ops
from runner.seeds import seeded
from runner.traced import Trace
from runner.variable_bridge import initial_values_from_checkpoints
from runner.variable_spec import VariableSpec
from runner.variables import GLOBAL_STEP, Served, VariableStore

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Replica:
    """What the function of one replica is traced with.

    Attributes:
      index: among the replicas of this process.
      inputs: the flat inputs of the step, of all local replicas.
      weights: how much each replica counts.
      reductions: sums over replicas.
      served: the variables that have been asked for so far.
      global_step: as this trace may use it.
      initial_value: of the variable of that name, computed anew; on the eager level.
    """

    index: int
    inputs: Sequence[tf.Tensor]
    weights: ReplicaWeights
    reductions: Reductions
    served: Served
    global_step: tf.Variable
    initial_value: Callable[[str], tf.Tensor]

    @property
    def num_local(self) -> int:
        """Replicas of this process."""
        return int(self.weights.counts.shape[0])


ReplicaFunction = Callable[[Replica], Any]


@dataclasses.dataclass
class _Box:
    """Opaque to tf.nest, so that strategy.run hands back Python objects unflattened."""

    value: Any


def trace_step(
    store: VariableStore,
    replica_fn: ReplicaFunction,
    signature: Sequence[tf.TensorSpec],
    *,
    training: bool,
    on_workers: bool = False,
) -> Trace:
    """Traces one step with session semantics, creating the variables it asks for.

    Args:
      signature: flat specs of the inputs; the last two are the weights (counts, global count).
      training: whether random state of Keras advances for good, or is evaluation's own.
      on_workers: of a coordinator; a step that does not train runs there as well as here, and its own variables
        (metrics) are here.
    """
    on_one_device = store.strategy is None or (store.has_one_copy and not training)
    discovery, new = _discover(store, replica_fn, signature, training=training, on_one_device=on_one_device)
    if store.strategy is None:
        return discovery
    if not on_one_device or on_workers:
        return _serve(store, store.strategy, replica_fn, signature, training=training)
    if any(not spec.local for spec in new):  # it saw twins, which have real variables only now
        discovery, _ = _discover(store, replica_fn, signature, training=training, on_one_device=True)
    return discovery


def _discover(
    store: VariableStore,
    replica_fn: ReplicaFunction,
    signature: Sequence[tf.TensorSpec],
    *,
    training: bool,
    on_one_device: bool,
) -> tuple[Trace, Sequence[VariableSpec]]:
    """Traces one replica under the default strategy and creates every variable it asks for that is new.

    Returns: the trace, and the specs of the variables that were new.
    """
    served = Served()
    outputs: list[Any] = []
    found: dict[str, Any] = {}

    def traced(*inputs: tf.Tensor) -> None:
        weights = ReplicaWeights(inputs[-2], inputs[-1])
        bridge.program_order_in_branches(v1.get_default_graph())
        with (
            bridge.fresh_collections(),
            bridge.fresh_thread_collections(),
            keras_trace(v1.get_default_graph()) as keras,
            store.discovering(keras, served, training=training) as new,
            store.placement.tracing(),
            stateless_random_ops(),
            initial_values_from_checkpoints(),
        ):
            reductions, step = Reductions(_default(), weights), store.twin(GLOBAL_STEP)
            replica = Replica(0, inputs[:-2], weights, reductions, served, step, store.initial_value)
            clock = _Clock(replica.global_step, training=training)
            with drawing_from(clock.stream(store.seed)):
                outputs.append(replica_fn(replica))
            found.update(new=new, collections=_all_collections(), keras=keras, clocks=[clock])

    with seeded(store.seed):
        wrapped = v1.wrap_function(traced, list(signature))

    def evaluate(initial: Any) -> Any:
        if callable(initial):
            with wrapped.graph.as_default():
                initial = tf.convert_to_tensor(initial())
        running = needed(wrapped.graph, [initial.op])
        return bridge.function_of_part(wrapped.graph, running, [], [initial], [])()[0]

    store.materialise(found["new"], evaluate, on_one_device=on_one_device)
    trace = Trace(
        wrapped,
        _inputs(wrapped),
        outputs,
        found["collections"],
        served,
        found["keras"].written,
        batch_counts=[clock.count for clock in found["clocks"]],
        parts=[clock.part for clock in found["clocks"]],
        table_initializers=_table_initializers([found["collections"]]),
    )
    return trace, found["new"]


def _serve(
    store: VariableStore,
    strategy: tf.distribute.Strategy,
    replica_fn: ReplicaFunction,
    signature: Sequence[tf.TensorSpec],
    *,
    training: bool,
) -> Trace:
    """Traces every local replica in strategy.run, with the variables that the store holds."""
    served = Served()
    outputs: list[Any] = []
    found: dict[str, Any] = {}
    # Only the first replica makes summaries, and the model_fn of each merges them.
    shared: dict[Any, list[Any]] = {v1.GraphKeys.SUMMARIES: []}

    def traced(*inputs: tf.Tensor) -> None:
        weights = ReplicaWeights(inputs[-2], inputs[-1])
        bridge.program_order_in_branches(v1.get_default_graph())
        found["late"] = bridge.collect_call_time_values(v1.get_default_graph())
        with (
            bridge.fresh_collections(),
            strategy.scope(),
            _weighted(strategy, weights) as (reductions, keras),
            store.placement.tracing(),
            stateless_random_ops(),
            initial_values_from_checkpoints(),
        ):
            serving = store.serving(keras, served, training=training)

            def run() -> _Box:
                with bridge.fresh_thread_collections(shared), serving():
                    step = store[GLOBAL_STEP]
                    replica = Replica(
                        local_replica(), inputs[:-2], weights, reductions, served, step, store.initial_value
                    )
                    clock = _Clock(replica.global_step, training=training)
                    with drawing_from(clock.stream(store.seed)):
                        output = replica_fn(replica)
                    return _Box((output, _all_collections(), clock))

            with serving(), _explaining_merge_call():
                boxes = strategy.experimental_local_results(strategy.run(run))
        outputs.extend(box.value[0] for box in boxes)
        found.update(collections=[box.value[1] for box in boxes], clocks=[box.value[2] for box in boxes], keras=keras)

    with seeded(store.seed):
        wrapped = v1.wrap_function(traced, list(signature))
    return Trace(
        wrapped,
        _inputs(wrapped),
        outputs,
        found["collections"][0],
        served,
        found["keras"].written,
        found["late"],
        [clock.count for clock in found["clocks"]],
        [clock.part for clock in found["clocks"]],
        _table_initializers(found["collections"]),
    )


@contextlib.contextmanager
def _weighted(strategy: tf.distribute.Strategy, weights: ReplicaWeights) -> Iterator[tuple[Any, Any]]:
    """Yields (the reductions of this trace, what Keras does in it)."""
    reductions = Reductions(strategy, weights)
    single = strategy.num_replicas_in_sync == 1
    reduce = None if single else reductions.all_reduce
    with keras_trace(v1.get_default_graph(), reduce) as keras, reductions.entered():
        yield reductions, keras


class _Clock:
    """The time that random operations of one replica go by: the global step, else the batches since the start.

    Attributes:
      count: counts this batch; None when nobody asked for the time, or it is the global step.
      part: placeholder for the number of the part of the update, with 0 by default; None when nobody asked.
    """

    def __init__(self, global_step: tf.Variable, *, training: bool) -> None:
        self.count: tf.Operation | None = None
        self.part: tf.Tensor | None = None
        self._global_step, self._training = global_step, training

    def stream(self, seed: int) -> Stream:
        context = tf.distribute.get_replica_context()
        replica = tf.get_static_value(context.replica_id_in_sync_group)
        mode = "train" if self._training else "evaluation"
        return Stream(v1.get_default_graph(), f"{seed}/{mode}/{replica}", self._read)

    def _read(self) -> tf.Tensor:
        if self._training:
            self.part = v1.placeholder_with_default(tf.constant(0, tf.int64), [], "part")
            return moment(self._global_step.read_value(), self.part)
        batches = v1.Variable(
            tf.constant(0, tf.int64),
            name="batches",
            trainable=False,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        now = batches.read_value()
        with tf.control_dependencies([now]):
            self.count = batches.assign_add(1, read_value=False)
        return now


def _default() -> tf.distribute.Strategy:
    return tf.distribute.get_strategy()


def _inputs(wrapped: Any) -> list[tf.Tensor]:
    return wrapped.inputs[: len(wrapped.inputs) - len(wrapped.captured_inputs)]


def _all_collections() -> dict[Any, list[Any]]:
    return {key: list(v1.get_collection(key)) for key in v1.get_default_graph().get_all_collection_keys()}


@contextlib.contextmanager
def _explaining_merge_call() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "merge_call" in str(error):
            error.add_note(
                "Under a strategy with several replicas nothing inside tf.cond, tf.while_loop or a nested tf.function "
                "may write to a variable of the model: not Keras optimizers with gradient_accumulation_steps, "
                "ema_overwrite_frequency or loss scaling, and not BatchNormalization or Dropout in a branch. "
                "Take it out of the branch, or train on one replica."
            )
        raise


def _table_initializers(collections_: Iterable[dict[Any, list[Any]]]) -> list[Any]:
    members = [one for each in collections_ for one in each.get(v1.GraphKeys.TABLE_INITIALIZERS, ())]
    return [one for one in members if one is not None]  # None: the table was made, and filled, under init_scope
