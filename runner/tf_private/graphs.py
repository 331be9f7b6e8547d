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

# TrackableObjectGraph: maps keys of a tf.train.Checkpoint to variables. When it moves: there is no other way; only
# checkpoints whose keys are variable names can then be read.
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

# Lists the operations that have XLA kernels.
from tensorflow.python.framework import func_graph, kernels, ops

from runner.tf_private.replaced import Overlay, all_replaced, replaced

try:  # Makes functions from graphs; see `function_of_part`.
    from tensorflow.python.eager.polymorphic_function import atomic_function
except ImportError:  # it moved: `_pruned_part` does the same, more slowly
    atomic_function = None

v1 = tf.compat.v1

_numbers = itertools.count()
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
"""End of the keys of tf.train.Checkpoint, after the path of an object."""

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


def kernels_kept() -> contextlib.AbstractContextManager[None]:
    """Keep the kernels of eager operations when `tf.random.set_seed` is called inside this context.

    TensorFlow drops them, because random kernels keep the state of their generator. Making them again for each variable
    takes two thirds of the time of initializing variables. Use this only if no seed is repeated, and set a seed
    afterwards.

    Private: `Context._set_global_seed`, replaced on the context object, and what it sets: `_seed`, `_rng`. When they
    move: kernels are not kept, which is slower; the numbers are the same.
    """
    eager = context.context()
    if not hasattr(eager, "_set_global_seed"):
        return contextlib.nullcontext()

    def set_seed(seed: int) -> None:
        eager._seed = seed
        eager._rng = random.Random(seed)

    return replaced(eager, "_set_global_seed", set_seed)


def drop_kernels() -> None:
    """Drop the kernels of eager operations, even while they are kept, so that a repeated seed draws the same numbers.

    Private: as in `kernels_kept`.
    """
    eager = context.context()
    if hasattr(context.Context, "_set_global_seed"):  # otherwise they were not kept
        context.Context._set_global_seed(eager, eager._seed)


def drop_scalars() -> None:
    """Drop the tensors that TensorFlow keeps of Python numbers given to eager operations.

    TensorFlow 2.21 keeps one of each distinct number for the life of the process, 0.7 KB each: the step of every event,
    the range of every call of a parameter server, the numbers of user code. A process that trains for a week would
    grow by gigabytes. Making a tensor again takes 10 us.

    Private: `pywrap_tfe.TFE_ClearScalarCache`. When it moves: the process grows.
    """
    clear = getattr(pywrap_tfe, "TFE_ClearScalarCache", None)
    if clear is not None:
        clear()


# --- graphs ---------------------------------------------------------------------------------------------------


# The collection in which `tf.compat.v1.get_variable` looks for a variable that it has made.
# Private: `variable_scope._VARSTORE_KEY`, unchanged since TF 1.0. When it changes: hooks cannot get the variables of
# model_fn by `get_variable` with reuse.
VARIABLES_BY_NAME = ("__variable_store",)


class _ThreadCollections(threading.local, collections.UserDict[Any, Any]):
    """Graph collections, one set per thread: `threading.local` runs the constructor in each.

    Replica threads take turns at every merge_call and must not see each other's variable store, scope counters,
    UPDATE_OPS or global step.
    """

    def __init__(self) -> None:
        self.data = _no_collections()


class _ByIdentity(list[Any]):
    """A list in which `in` compares by identity, because `==` of tensors is elementwise."""

    def __contains__(self, element: object) -> bool:
        return any(element is other for other in self)


def _no_collections() -> dict[Any, Any]:
    """Return empty collections.

    TensorFlow 2.21: with several replicas, a v1 optimizer searches TRAIN_OP for its operation. The list may contain a
    tensor, the global step updated by another optimizer, and comparing a tensor with an operation fails.
    """
    return {v1.GraphKeys.TRAIN_OP: _ByIdentity()}


def fresh_collections() -> contextlib.AbstractContextManager[None]:
    """Use empty graph collections for one trace, in the graph being traced and at the eager level.

    Also at the eager level because v1 optimizers and moving averages make their slots under `init_scope`, in *its*
    variable store; a second trace would fail with "already exists".

    Private: `Graph._collections`, a plain dict since TF 1. When it changes: copy the public `get_collection_ref` lists
    out and back. That misses `__variable_store`, which is not among the public keys.
    """
    with tf.init_scope():
        eager = v1.get_default_graph()
    return all_replaced(
        (v1.get_default_graph(), "_collections", _ThreadCollections()),
        (eager, "_collections", _ThreadCollections()),
    )


def fresh_thread_collections(
    shared: Mapping[Any, list[Any]] = MappingProxyType({}),
) -> contextlib.AbstractContextManager[None]:
    """Use empty collections for this thread only: for one replica's call of model_fn within `fresh_collections`.

    Args:
      shared: name -> collection that this thread shares with others.
    """
    return replaced(v1.get_default_graph()._collections, "data", {**_no_collections(), **shared})


@contextlib.contextmanager
def creator_scope(creator: Callable[..., Any]) -> Iterator[None]:
    """Enter a `tf.variable_creator_scope` that also applies inside `tf.init_scope`, where v1 slots are made.

    The stack of creators belongs to the current graph, so it is also entered at the eager level.
    """
    traced = v1.get_default_graph()
    with contextlib.ExitStack() as stack:
        with tf.init_scope():
            if v1.get_default_graph() is not traced:
                stack.enter_context(tf.variable_creator_scope(creator))
        stack.enter_context(tf.variable_creator_scope(creator))
        yield


def control_inputs(edges: Mapping[tf.Operation, list[tf.Operation]]) -> contextlib.AbstractContextManager[None]:
    """Make each key run after its values, for functions that are pruned from the graph inside this context.

    The edges are removed on leaving: functions pruned later would otherwise include the operations that this one waits
    for.
    """
    wanted = {operation: [*operation.control_inputs, *before] for operation, before in edges.items()}
    return _waiting_for(wanted)


def control_inputs_within(running: Collection[tf.Operation]) -> contextlib.AbstractContextManager[None]:
    """Make these operations wait only for each other inside this context, for a function that contains only them."""
    there = set(running)
    wanted = {}
    for operation in running:
        before = operation.control_inputs
        if not there.issuperset(before):
            wanted[operation] = [other for other in before if other in there]
    return _waiting_for(wanted)


@contextlib.contextmanager
def _waiting_for(wanted: Mapping[tf.Operation, Sequence[tf.Operation]]) -> Iterator[None]:
    """Inside this context, let each operation of `wanted` wait for the operations that it maps to, and for no others.

    Private: `Operation._add_control_inputs` and `_remove_all_control_inputs`; tf.control_dependencies can only order
    operations before they are made.
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
    """Run all effects in bodies of `tf.cond` and `tf.while_loop` in `graph` in program order, as in tf.function.

    Private: `FuncGraph._add_control_dependencies`, which control flow inherits from the outer graph and which
    wrap_function turns off. The graph itself is pruned and ordered by `runner.tracing.trace_step`.
    """
    graph._add_control_dependencies = True


class GraphFromHere(contextlib.ExitStack):
    """A context in which running code switches from eager execution to a graph at the first call of `placeholders`.

    The code may leave after the switch a context of TensorFlow that it entered before: each context remembers what it
    set.

    Private: `func_graph.FuncGraph`, a function's graph, which can capture eager tensors; public functions only trace
    whole functions. When it moves: call the code a second time in `tf.function`.

    Attributes:
      graph: None before the switch.
      inputs: all placeholders, flat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph: Any = None
        self.inputs: list[tf.Tensor] = []

    def begin(self) -> None:
        """Switch to the graph, if not done yet."""
        if self.graph is None:
            self.graph = func_graph.FuncGraph("input_fn")
            self.enter_context(self.graph.as_default())

    def placeholders(self, spec: Any) -> Any:
        """Switch to the graph, and return a placeholder for each tensor in a nest of specs."""
        self.begin()
        tensors = tf.nest.flatten(spec, expand_composites=True)
        flat = [v1.placeholder(tensor.dtype, tensor.shape) for tensor in tensors]
        self.inputs += flat
        return tf.nest.pack_sequence_as(spec, flat, expand_composites=True)


def no_name_scope_in_branches() -> contextlib.AbstractContextManager[None]:
    """Start bodies of `tf.cond` and `tf.while_loop` without a name scope, as in a TensorFlow 1 graph.

    An optimizer's variable in a branch is then named `beta1_power`, as in checkpoints of tf.estimator, and not
    `cond/beta1_power`.

    Private: `func_graph.override_func_graph_name_scope`, which control flow calls for its graphs when the outermost
    level is eager; since TF 2.4. When it moves: such variables keep the name of the scope.
    """
    return replaced(func_graph, "override_func_graph_name_scope", lambda *_: None)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a graph, to be made into a function that computes the values of `fetches` from those of `feeds`.

    Attributes:
      graph: the graph.
      running: all operations of the part, in program order.
      feeds: placeholders; one of them may replace a tensor that the graph captured.
      fetches: the tensors that the function returns.
      effects: those of `running` that must run even if their values are not used.
    """

    graph: Any
    running: Sequence[tf.Operation]
    feeds: Sequence[tf.Tensor]
    fetches: Sequence[tf.Tensor]
    effects: Sequence[tf.Operation] = ()


def function_of_part(part: Part, *, by_xla: bool = False) -> Callable[..., list[tf.Tensor]]:
    """Return the part as a function.

    Equivalent to `WrappedFunction.prune`, which first copies the operations into a new graph: for a model of 120 layers
    the copy took a fifth of the time to the first step. Gradients cannot be taken through the function.

    Args:
      part: the part.
      by_xla: compile it with XLA when it is first called, once per input shape.

    Raises:
      ValueError: the part depends on a placeholder that is not fed.

    Private: `atomic_function.from_func_graph`, which takes operations, inputs and outputs from the given graph;
    `_XlaMustCompile` is the attribute that tf.function(jit_compile=True) sets. When they move: `_pruned_part`.
    """
    graph = part.graph
    fetches = list(part.fetches)
    running = set(part.running)
    fed = {tensor.op for tensor in part.feeds}
    inputs = list(part.feeds)
    handles = []  # what the graph captures from outside (variables, tables): further arguments of the function
    for external, internal in graph.captures:
        if internal.op in running and internal.op not in fed:
            inputs.append(internal)
            handles.append(external)
    given = {tensor.op for tensor in inputs}
    unfed = [op.name for op in running - given if op.type == "Placeholder"]
    if unfed:
        raise ValueError(f"A value outside the step depends on the input of the step: {', '.join(sorted(unfed))}.")
    # Including reads: callers wait only for these operations, and a later write must not overtake a read.
    reads = [op for op in part.running if op.type in _READS]
    waited_for = list(dict.fromkeys([*part.effects, *reads]))
    if atomic_function is None:
        pruned = _pruned_part(graph, inputs, fetches, waited_for, by_xla=by_xla)
        return lambda *values: pruned(*values, *handles)
    cut = Overlay(
        graph, get_operations=lambda: list(part.running), inputs=inputs, outputs=fetches, control_outputs=waited_for
    )
    attributes = {"_XlaMustCompile": True} if by_xla else {}
    atomic = atomic_function.from_func_graph(f"part_of_{graph.name}_{next(_numbers)}", cut, attributes)
    # call_flat returns None if there are no fetches
    return lambda *values: list(atomic.call_flat(*values, *handles) or ())


def _pruned_part(
    graph: Any, inputs: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor], effects: Sequence[tf.Operation], by_xla: bool
) -> Callable[..., list[tf.Tensor]]:
    """Like `function_of_part`, using `WrappedFunction.prune`. Values of captured inputs are arguments as well.

    Private: the attributes of a WrappedFunction that `prune` reads. Its captures are hidden, so that `prune` feeds all
    inputs.
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
    """Return the types of operations that XLA can compile for device type "CPU" or "GPU".

    Private: `kernels.get_all_registered_kernels`; XLA's kernels are registered when it first compiles something. When
    it moves: skip the check; the first step then fails with XLA's own message.
    """
    tf.function(lambda: tf.zeros([]), jit_compile=True)()
    there = kernels.get_all_registered_kernels().kernel
    return frozenset(kernel.op for kernel in there if kernel.device_type == f"XLA_{device_type}_JIT")


@dataclasses.dataclass(frozen=True)
class CallTimeValue:
    """A value that must be computed again at each call of a graph, such as the instance keys of collectives."""

    placeholder: tf.Tensor
    closure: Callable[[], Any]
    spec: Any

    def capture(self) -> tf.Tensor:
        """Return the value as a tensor of `spec`.

        Eagerly, it is computed now. In a graph, the tensor is computed anew at each call of the graph.
        """
        graph = v1.get_default_graph()
        if tf.executing_eagerly():
            return self.closure()
        # As TensorFlow does for its own collectives: control flow bodies cannot capture at call time.
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        return graph.capture_call_time_value(self.closure, self.spec)


def collect_call_time_values(graph: Any) -> list[CallTimeValue]:
    """Replace later call-time captures of `graph` by placeholders, and return the list that collects them.

    Collectives capture their instance key at call time, which `WrappedFunction.prune` cannot lift (UnliftableError); it
    can lift placeholders. The caller then captures the values again. In a loop body all iterations share a key; the
    ordering token keeps them apart.

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
    """Turn eager tensors into constants when they are used in a session's graph, inside this context.

    Raises ValueError for handles of variables and tables, with the fix.

    Private: `ops._EagerTensorBase.__tf_tensor__`, by which an eager tensor enters a graph. When it moves: leave this
    out; a model_fn that uses a tensor made outside of it then fails to export with TensorFlow's own message.
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
    """Optimize the graphs of functions that are first called inside this context in one round instead of two.

    In the loop of a model of 120 layers the second round changed one of 9,400 nodes, and took 1.4 of 5.5 s. The speed
    of steps is the same (measured with a tiny MLP and a small CNN).

    Private: `Context.function_call_options`, whose config Grappler reads; tf.config.optimizer has no option for rounds.
    When it moves: there are two rounds, and the first call of a large loop takes longer.
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
    """Return variable name (its op's or Keras path) -> key, from the object graph that tf.train.Checkpoint saves.

    Variables that share a name are listed by their keys instead.
    """
    graph = TrackableObjectGraph()
    graph.ParseFromString(serialized)
    variables: list[Any] = []
    for node in graph.nodes:
        variables += [attribute for attribute in node.attributes if attribute.name == "VARIABLE_VALUE"]
    count = collections.Counter(variable.full_name for variable in variables if variable.full_name)
    keys = {}
    for variable in variables:
        is_unique = count[variable.full_name] == 1
        name = variable.full_name if is_unique else variable.checkpoint_key
        keys[name] = variable.checkpoint_key
    return keys


def object_graph_of(root: Any, name_of: Callable[[Any], str | None]) -> tuple[bytes, dict[str, str]]:
    """Return (serialized object graph of the objects below `root`, variable name -> its key in such a checkpoint).

    With both in a checkpoint, `tf.train.Checkpoint.restore` finds its variables by object.

    Private: `ObjectGraphView`, `objects_ids_and_slot_variables_and_paths` and `_fill_object_graph_proto`, which find
    the objects and optimizer slots, and describe them. When they move: `tf.train.TrackableView` finds objects without
    slots, and TrackableObjectGraph must be filled by hand.

    Args:
      root: the root object, such as a model.
      name_of: returns the name of a variable of the model; None for other objects.
    """
    from tensorflow.python.checkpoint import graph_view, save_util_v1, util

    view = graph_view.ObjectGraphView(root)
    objects, _, ids, slots, paths = util.objects_ids_and_slot_variables_and_paths(view)
    described = save_util_v1._fill_object_graph_proto(view, objects, ids, slots)
    keys = {}
    for trackable, node in zip(objects, described.nodes, strict=True):
        name = name_of(trackable)
        if name is not None:
            keys[name] = f"{paths[trackable]}{VALUE}"
            node.attributes.add(name="VARIABLE_VALUE", full_name=name, checkpoint_key=keys[name])
    util.add_checkpoint_values_check(described)
    return described.SerializeToString(), keys


def is_assignment(kind: str) -> bool:
    """Report whether operations of this type are an `assign`, of a slice too, or a `scatter_*`; the updates of
    optimizers are not.
    """
    is_assign = kind.startswith("Assign") and kind.endswith("VariableOp")
    return (
        is_assign or kind.startswith("ResourceScatter") or kind in ("ResourceStridedSliceAssign", "ResourceCountUpTo")
    )


def is_optimizer_update(kind: str) -> bool:
    """Report whether operations of this type are an update of an optimizer, such as ResourceApplyAdam."""
    return kind.startswith(("ResourceApply", "ResourceSparseApply"))


def nodes_called_by(operation: tf.Operation) -> list[Any]:
    """Return the nodes of all functions that an operation calls, at any depth; empty: it calls none.

    Private: `Graph._get_function`, and `cached_definition` of what it returns. When it moves: look the names up in
    `graph.as_graph_def().library`, which copies all constants of the graph.
    """
    names = _functions_in(operation.node_def)
    nodes = []
    for name in names:  # the list grows meanwhile, by the functions that these functions call
        function = operation.graph._get_function(name)
        if function is None:
            continue
        for node in function.cached_definition.node_def:
            nodes.append(node)
            names += [called for called in _functions_in(node) if called not in names]
    return nodes


def _functions_in(node: Any) -> list[str]:
    """Return the names of the functions that a node calls; Case calls a list of them."""
    attributes = node.attr.values()
    names = [attribute.func.name for attribute in attributes if attribute.HasField("func")]
    for attribute in attributes:
        names += [function.name for function in attribute.list.func]
    return names
