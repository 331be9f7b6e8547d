"""Graphs: collections, control inputs and creators, functions made from a part of a graph, and eager kernels."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

# TrackableObjectGraph: which key of a tf.train.Checkpoint is which variable. When it moves: nothing else tells; only
# checkpoints whose keys are names can then be read.
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph
from tensorflow.python.eager import context

# Which operations have kernels of XLA.
from tensorflow.python.framework import func_graph, kernels, ops

from runner.tf_private.replaced import Overlay, replaced

try:  # Functions made of a graph; see `function_of_part`.
    from tensorflow.core.function.polymorphism import function_type
    from tensorflow.python.eager.polymorphic_function import atomic_function
except ImportError:  # moved: `_pruned_part` does the same, more slowly
    atomic_function = function_type = None

v1 = tf.compat.v1

_numbers = itertools.count()
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


@contextlib.contextmanager
def kernels_kept() -> Iterator[None]:
    """Keep the kernels of eager operations when `tf.random.set_seed` is called inside this context.

    It throws them away, since one that draws random numbers goes on where it was; making them anew for each variable is
    two thirds of the time in which variables get their initial values. Use it only where no seed comes twice, and set
    one afterwards.
    Private: `Context._set_global_seed`, replaced on the one context, and what it sets: `_seed`, `_rng`. Where they
    have moved, nothing is kept: the same numbers, later.
    """
    eager = context.context()
    if not hasattr(eager, "_set_global_seed"):
        yield
        return

    def set_seed(seed: int) -> None:
        eager._seed, eager._rng = seed, random.Random(seed)

    with replaced(eager, "_set_global_seed", set_seed):
        yield


def drop_kernels() -> None:
    """Drop the kernels of eager operations, even while they are kept, so that a repeated seed draws the same numbers.

    Private: as in `kernels_kept`.
    """
    eager = context.context()
    if hasattr(context.Context, "_set_global_seed"):  # else nothing was kept
        context.Context._set_global_seed(eager, eager._seed)


# --- graphs ---------------------------------------------------------------------------------------------------


class _ThreadCollections(threading.local, collections.UserDict[Any, Any]):
    """Graph collections, one set per thread: `threading.local` runs the constructor in each.

    Replica threads take turns at every merge_call and must not see each other's variable store, scope counters,
    UPDATE_OPS or global step.
    """

    def __init__(self) -> None:
        self.data = _no_collections()


class _ByIdentity(list[Any]):
    """A list that holds what is the same object, whatever `==` of tensors says."""

    def __contains__(self, one: object) -> bool:
        return any(one is other for other in self)


def _no_collections() -> dict[Any, Any]:
    """Return empty collections.

    TensorFlow 2.21: on several replicas a v1 optimizer looks for its operation among TRAIN_OP, where another one may
    have left the updated global step: a tensor, which compares itself with an operation and fails.
    """
    return {v1.GraphKeys.TRAIN_OP: _ByIdentity()}


@contextlib.contextmanager
def fresh_collections() -> Iterator[None]:
    """Use empty graph collections for one trace, in the graph being traced and at the eager level.

    The eager level too, because v1 optimizers and moving averages make their slots under `init_scope`, in *its*
    variable store; a second trace would find them "already exists".
    Private: `Graph._collections`, which has been a plain dict since TF 1. When it changes, copy the public
    `get_collection_ref` lists out and back; `__variable_store` is not among the public keys, hence this.
    """
    with tf.init_scope():
        eager = v1.get_default_graph()
    with (
        replaced(v1.get_default_graph(), "_collections", _ThreadCollections()),
        replaced(eager, "_collections", _ThreadCollections()),
    ):
        yield


@contextlib.contextmanager
def fresh_thread_collections(shared: Mapping[Any, list[Any]] = MappingProxyType({})) -> Iterator[None]:
    """Use empty collections for this thread alone: one replica's call of model_fn within `fresh_collections`.

    Args:
      shared: those that this thread has in common with others.
    """
    with replaced(v1.get_default_graph()._collections, "data", {**_no_collections(), **shared}):
        yield


@contextlib.contextmanager
def creator_scope(creator: Callable[..., Any]) -> Iterator[None]:
    """Enter a `tf.variable_creator_scope` that also holds inside `tf.init_scope`, where v1 slots are made.

    The stack belongs to the current graph, so it is entered on the eager level as well. Private:
    `Graph._variable_creator_scope`, what tf.variable_creator_scope calls on the default graph.
    """
    with tf.init_scope():
        eager = v1.get_default_graph()
    with contextlib.ExitStack() as stack:
        if eager is not v1.get_default_graph():
            stack.enter_context(eager._variable_creator_scope(creator))
        stack.enter_context(tf.variable_creator_scope(creator))
        yield


def control_inputs(edges: Mapping[tf.Operation, list[tf.Operation]]) -> contextlib.AbstractContextManager[None]:
    """Make each key run after its values, for functions pruned from the graph inside this context.

    The edges are taken back: a function pruned later would pull in what an earlier one had to wait for.
    """
    return _waiting_for({one: [*one.control_inputs, *before] for one, before in edges.items()})


def control_inputs_within(running: Collection[tf.Operation]) -> contextlib.AbstractContextManager[None]:
    """Make these operations wait only for each other, for a function that contains no others."""
    there = set(running)
    cut = [one for one in running if not there.issuperset(one.control_inputs)]
    return _waiting_for({one: [before for before in one.control_inputs if before in there] for one in cut})


@contextlib.contextmanager
def _waiting_for(wanted: Mapping[tf.Operation, Sequence[tf.Operation]]) -> Iterator[None]:
    """Make each key wait for its values and nothing else, inside this context.

    Private: `Operation._add_control_inputs` and `_remove_all_control_inputs`; tf.control_dependencies can order
    only operations that are still to be made.
    """
    originals = {operation: list(operation.control_inputs) for operation in wanted}

    def rewire(edges: Mapping[tf.Operation, Sequence[tf.Operation]]) -> None:
        for operation, before in edges.items():
            operation._remove_all_control_inputs()
            operation._add_control_inputs(before)

    rewire(wanted)
    try:
        yield
    finally:
        rewire(originals)


def program_order_in_branches(graph: Any) -> None:
    """Run all effects of `tf.cond` and `tf.while_loop` bodies in `graph` in program order, as in tf.function.

    Private: `FuncGraph._add_control_dependencies`, which control flow takes over from the graph around it and
    wrap_function leaves off. The graph itself is pruned and ordered by `runner.tracing.trace_step`.
    """
    graph._add_control_dependencies = True


class GraphFromHere:
    """A graph in which running code continues, from the first `placeholders` to the end of this context.

    What it does until then is eager. A context that the code has entered before may end in the graph: those of
    TensorFlow remember what they set.

    Private: `func_graph.FuncGraph`, the graph of a function, which takes eager tensors in; public functions trace a
    whole function. When it moves: call the code once more in `tf.function`.

    Attributes:
      graph: None before the first placeholder.
      inputs: the placeholders, flat.
    """

    def __init__(self) -> None:
        self.graph: Any = None
        self.inputs: list[tf.Tensor] = []
        self._until_end = contextlib.ExitStack()

    def __enter__(self) -> GraphFromHere:
        return self

    def __exit__(self, *_: object) -> None:
        self._until_end.close()

    def begin(self) -> None:
        """Go on in the graph, if that is not done yet."""
        if self.graph is None:
            self.graph = func_graph.FuncGraph("input_fn")
            self._until_end.enter_context(self.graph.as_default())

    def placeholders(self, spec: Any) -> Any:
        """Return a placeholder for each tensor of a nest of specs."""
        self.begin()
        flat = [v1.placeholder(one.dtype, one.shape) for one in tf.nest.flatten(spec, expand_composites=True)]
        self.inputs += flat
        return tf.nest.pack_sequence_as(spec, flat, expand_composites=True)


def no_name_scope_in_branches() -> contextlib.AbstractContextManager[None]:
    """Start bodies of `tf.cond` and `tf.while_loop` without a name scope, as in a TensorFlow 1 graph.

    What an optimizer makes in a branch is then `beta1_power`, as in checkpoints of tf.estimator, and not
    `cond/beta1_power`.

    Private: `func_graph.override_func_graph_name_scope`, which control flow calls for its graphs where the outermost
    level is eager; since TF 2.4. When it moves: such variables keep the name of the scope.
    """
    return replaced(func_graph, "override_func_graph_name_scope", lambda *_: None)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a graph, to be made a function from values of `feeds` to values of `fetches`.

    Attributes:
      running: all operations that it takes, in program order.
      feeds: placeholders; one of what the graph has captured then stands for what it is called with.
      effects: those of them that run whether or not their value is used.
    """

    graph: Any
    running: Sequence[tf.Operation]
    feeds: Sequence[tf.Tensor]
    fetches: Sequence[tf.Tensor]
    effects: Sequence[tf.Operation] = ()


def function_of_part(part: Part, *, by_xla: bool = False) -> Callable[..., list[tf.Tensor]]:
    """Return the part as a function.

    What `WrappedFunction.prune` gives, which copies the operations into a graph of their own first: a fifth of the
    way to the first step of a model of 120 layers. No gradient passes through it.

    Args:
      by_xla: XLA compiles them, for each shape of the inputs that comes, when they first run.

    Private: `atomic_function.from_func_graph`, which takes operations, inputs and outputs from the graph it is given;
    `_XlaMustCompile` is what tf.function(jit_compile=True) makes of itself. Where they have moved: `_pruned_part`.
    """
    graph, fetches, there = part.graph, list(part.fetches), set(part.running)
    fed = {tensor.op for tensor in part.feeds}
    captures = [pair for pair in graph.captures if pair[1].op in there and pair[1].op not in fed]
    inputs = [*part.feeds, *(internal for _, internal in captures)]
    unfed = [op.name for op in there - {tensor.op for tensor in inputs} if op.type == "Placeholder"]
    if unfed:
        raise ValueError(f"A value outside the step depends on the input of the step: {', '.join(sorted(unfed))}.")
    # Reads, too: whoever waits for a function waits for these alone, and a write elsewhere must not come before a read.
    waited_for = list(dict.fromkeys([*part.effects, *(op for op in part.running if op.type in _READS)]))
    handles = [external for external, _ in captures]
    if atomic_function is None:
        pruned = _pruned_part(graph, inputs, fetches, waited_for, by_xla=by_xla)
        return lambda *values: pruned(*values, *handles)
    cut = Overlay(
        graph, get_operations=lambda: list(part.running), inputs=inputs, outputs=fetches, control_outputs=waited_for
    )
    kind = function_type.from_structured_signature(((), {}), fetches, {})
    attributes = {"_XlaMustCompile": True} if by_xla else {}
    atomic = atomic_function.from_func_graph(f"part_of_{graph.name}_{next(_numbers)}", cut, attributes, kind)
    return lambda *values: list(atomic.call_flat(*values, *handles) or ())  # None, where nothing is returned


def _pruned_part(
    graph: Any, inputs: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor], effects: Sequence[tf.Operation], by_xla: bool
) -> Callable[..., list[tf.Tensor]]:
    """Build what `function_of_part` builds by `WrappedFunction.prune`, with values for captured inputs as arguments.

    Private: the attributes of a WrappedFunction that `prune` reads. Given nothing captured, it takes every input as one
    to be fed.
    """
    wrapped = v1.wrap_function(lambda: None, [])
    uncaptured = types.SimpleNamespace(
        graph=Overlay(graph, captures=[], internal_captures=[]),
        _func_graph=graph,
        _variable_holder=wrapped._variable_holder,
    )
    pruned = type(wrapped).prune(uncaptured, list(inputs), [list(effects), list(fetches)])
    called = tf.function(pruned, jit_compile=True) if by_xla else pruned
    return lambda *values: list(called(*values)[1])


@functools.cache
def operations_of_xla(device_type: str) -> frozenset[str]:
    """Return the types of operations that XLA can compile for a "CPU" or a "GPU".

    Private: `kernels.get_all_registered_kernels`; those of XLA are there once it has compiled something.
    When it moves: leave the question out; the first step then fails with XLA's own message.
    """
    tf.function(lambda: tf.zeros([]), jit_compile=True)()
    there = kernels.get_all_registered_kernels().kernel
    return frozenset(kernel.op for kernel in there if kernel.device_type == f"XLA_{device_type}_JIT")


@dataclasses.dataclass(frozen=True)
class CallTimeValue:
    """A value that a graph needs anew at each call: the instance keys of collectives."""

    placeholder: tf.Tensor
    closure: Callable[[], Any]
    spec: Any

    def capture(self) -> tf.Tensor:
        """Return the value for one call, a tensor of its spec: computed now, or when the traced graph is called."""
        graph = v1.get_default_graph()
        if tf.executing_eagerly():
            return self.closure()
        # As TensorFlow does for its own collectives: control flow bodies cannot capture at call time.
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        return graph.capture_call_time_value(self.closure, self.spec)


def collect_call_time_values(graph: Any) -> list[CallTimeValue]:
    """Replace later call-time captures of `graph` by placeholders, and return the list that collects them.

    `WrappedFunction.prune` cannot lift a call-time capture (UnliftableError); a placeholder it can.
    Private: `FuncGraph.capture_call_time_value`, replaced on this one graph.
    """
    values: list[CallTimeValue] = []

    def capture(closure: Callable[[], Any], spec: Any, key: Any = None, default_value: Any = None, **_: Any) -> Any:
        with graph.as_default(), tf.device(None), v1.name_scope(None):
            placeholder = v1.placeholder(spec.dtype, spec.shape, "call_time_value")
        values.append(CallTimeValue(placeholder, closure, spec))
        return placeholder

    graph.capture_call_time_value = capture
    return values


def eager_values_as_constants() -> contextlib.AbstractContextManager[None]:
    """Turn an eager tensor that is used in a session's graph into a constant, inside this context.

    Anything that is no value, the handle of a variable or of a table, raises a ValueError that says what to do.
    Private: `ops._EagerTensorBase.__tf_tensor__`, by which an eager tensor enters a graph. When it moves, leave this
    out: a model_fn that uses a tensor made outside of it cannot be exported then, with TensorFlow's own message.
    """
    kind = ops._EagerTensorBase
    convert = kind.__tf_tensor__

    def as_constant(self: Any, dtype: Any = None, name: str | None = None) -> Any:
        if tf.executing_eagerly() or v1.get_default_graph().building_function:
            return convert(self, dtype, name)
        if self.dtype in (tf.resource, tf.variant):
            raise ValueError(
                "model_fn uses a variable, table or layer that was made outside of it, which cannot be exported. Make "
                "it inside model_fn."
            )
        with tf.init_scope():
            return tf.constant(self.numpy(), dtype, name=name or "value")

    return replaced(kind, "__tf_tensor__", as_constant)


@contextlib.contextmanager
def optimised_once() -> Iterator[None]:
    """Optimize the graphs of functions that are first called in this context in one round instead of two.

    The second round changed one node of 9,400 in the loop of a model of 120 layers, and took 1.4 of 5.5 s. Steps are as
    fast either way (a tiny MLP, native and classic; the digits CNN).
    Private: `Context.function_call_options`, whose config Grappler reads; tf.config.optimizer has no name for rounds.
    Where it has moved, there are two rounds: the first call of a large loop then takes longer, as it does elsewhere.
    """
    eager = context.context()
    if not hasattr(eager, "function_call_options"):
        yield
        return
    before = eager.function_call_options
    eager.function_call_options = _with_one_round(before.executor_type, before.config_proto_serialized)
    try:
        yield
    finally:
        eager.function_call_options = before


@functools.cache
def _with_one_round(executor_type: str | None, serialized: bytes) -> Any:
    config = v1.ConfigProto.FromString(serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.meta_optimizer_iterations = rewriting.meta_optimizer_iterations or rewriting.ONE
    return context.FunctionCallOptions(executor_type, config)


# --- checkpoints of tf.train.Checkpoint -------------------------------------------------------------------------------


def names_in_object_graph(serialized: bytes) -> dict[str, str]:
    """Name of a variable (its op's, a Keras path) -> its key, of the object graph that tf.train.Checkpoint saves.

    Variables that share a name go by their keys.
    """
    graph = TrackableObjectGraph()
    graph.ParseFromString(serialized)
    variables = [one for node in graph.nodes for one in node.attributes if one.name == "VARIABLE_VALUE"]
    count = collections.Counter(one.full_name for one in variables if one.full_name)
    return {one.full_name if count[one.full_name] == 1 else one.checkpoint_key: one.checkpoint_key for one in variables}


def object_graph_of(root: Any, name_of: Callable[[Any], str | None]) -> tuple[bytes, dict[str, str]]:
    """Return (what a checkpoint says of the objects below `root`, variable name -> its key in that checkpoint).

    `tf.train.Checkpoint.restore` of a checkpoint that has both finds its variables by their objects.

    Private: `ObjectGraphView`, `objects_ids_and_slot_variables_and_paths` and `_fill_object_graph_proto`, which find
    the objects and slots of optimizers, and describe them. When they move: `tf.train.TrackableView` finds objects
    without slots, and TrackableObjectGraph is filled by hand.

    Args:
      name_of: gives the name of a variable of the model; None of what is none.
    """
    from tensorflow.python.checkpoint import graph_view, save_util_v1, util

    view = graph_view.ObjectGraphView(root)
    objects, _, ids, slots, paths = util.objects_ids_and_slot_variables_and_paths(view)
    described = save_util_v1._fill_object_graph_proto(view, objects, ids, slots)
    keys = {}
    for one, node in zip(objects, described.nodes, strict=True):
        name = name_of(one)
        if name is not None:
            keys[name] = f"{paths[one]}/.ATTRIBUTES/VARIABLE_VALUE"
            node.attributes.add(name="VARIABLE_VALUE", full_name=name, checkpoint_key=keys[name])
    util.add_checkpoint_values_check(described)
    return described.SerializeToString(), keys
