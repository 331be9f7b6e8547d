"""The graph of a step as tf.estimator wrote it beside checkpoints: with variables, a Saver and collections."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from runner.tf_private.variables import same_slice
from runner.tracing.partitioned_variable import PartitionedVariable
from runner.tracing.trace import Trace
from runner.tracing.variable_request import VariableSpec
from runner.tracing.variable_store import GLOBAL_STEP, VariableStore

v1 = tf.compat.v1
_KEYS = v1.GraphKeys


def meta_graph(
    trace: Trace, store: VariableStore, keys: Mapping[str, str], train_op: tf.Operation | None = None
) -> Any:
    """Return the step as a MetaGraphDef, which `tf.compat.v1.train.import_meta_graph` imports for a session.

    In a trace a placeholder stands for the handle of each variable, which lives outside of the graph. Here the node
    becomes a variable of the graph, which begins with zeros. The inputs of the step are placeholders; devices are left
    out.

    Args:
      trace: the trace of one replica.
      store: the variables.
      keys: variable name -> its key in the checkpoint, where that is not its name.
      train_op: the operation that takes a step; None: a step is not one operation.
    """
    definition, made = trace.graph.as_graph_def(), {}
    counter = v1.train.get_global_step(trace.graph)  # no request of model_fn
    handles = {inner.op.name: GLOBAL_STEP for outer, inner in trace.graph.captures if outer is counter.handle}
    handles |= {inner.op.name: name for inner, name in trace.handles(0)}
    nodes = _made_variables(definition, {node: store.specs[name] for node, name in handles.items()})
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
        for name, node in nodes.items():
            spec = store.specs[name]
            made[name] = _variable_of(graph.get_tensor_by_name(f"{node}:0"), spec)
            same_slice(made[name], trace.requested.requests.get(name, [None])[0])
            of_model = [_KEYS.GLOBAL_VARIABLES, *([_KEYS.TRAINABLE_VARIABLES] if spec.trainable else [])]
            graph.add_to_collections([_KEYS.LOCAL_VARIABLES] if spec.local else of_model, made[name])
        if GLOBAL_STEP in made:  # else the step does not count itself
            graph.add_to_collection(_KEYS.GLOBAL_STEP, made[GLOBAL_STEP])
        else:
            made[GLOBAL_STEP] = v1.train.create_global_step()
        for key, members in {**trace.collections, _KEYS.TRAIN_OP: [train_op]}.items():
            for member in members:
                if isinstance(member, tf.Tensor | tf.Operation) and member.graph is trace.graph:
                    graph.add_to_collection(key, graph.as_graph_element(member.name))
        in_checkpoint = {}
        for name, one in store.saved.items():
            names = one.names if isinstance(one, PartitionedVariable) else (name,)
            if made.keys() >= set(names):
                parts = [made[part] for part in names]
                in_checkpoint[keys.get(name, name)] = parts if isinstance(one, PartitionedVariable) else parts[0]
        saver = v1.train.Saver(in_checkpoint, sharded=True, allow_empty=True)
        return v1.train.export_meta_graph(graph=graph, saver_def=saver.saver_def, clear_devices=True)


def _made_variables(definition: Any, handles: Mapping[str, VariableSpec]) -> dict[str, str]:
    """Make variables of placeholders of a GraphDef, and give them the names of the variables.

    Args:
      definition: the GraphDef.
      handles: name of a placeholder -> spec of the variable for whose handle it stands.

    Returns:
      name of the variable -> name of its node, which ends in a number if another node has the variable's name.
    """
    taken, new = {node.name for node in definition.node}, {}
    for node, spec in handles.items():
        numbered = itertools.chain([spec.name], (f"{spec.name}_{number}" for number in itertools.count(1)))
        new[node] = next(name for name in numbered if name not in taken)
        taken.add(new[node])
    for node in definition.node:
        # Colocations name nodes by their old names. An operation that uses a handle is placed with it anyway.
        node.attr.pop("_class", None)
        for place, text in enumerate(node.input):
            source, colon, output = text.removeprefix("^").partition(":")
            node.input[place] = f"{text[: text.startswith('^')]}{new.get(source, source)}{colon}{output}"
        if node.name in handles:
            spec, name = handles[node.name], new[node.name]
            node.Clear()
            node.name, node.op = name, "VarHandleOp"
            node.attr["dtype"].type, node.attr["shared_name"].s = spec.dtype.as_datatype_enum, spec.name.encode()
            node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
    return {spec.name: new[node] for node, spec in handles.items()}


def _variable_of(handle: tf.Tensor, spec: VariableSpec) -> Any:
    """Return the variable whose handle is a tensor of the default graph, with new operations that read and begin it."""
    with v1.name_scope(f"{handle.op.name}/"):
        zeros = tf.zeros([size or 0 for size in spec.shape] if spec.shape.rank else [], spec.dtype, name="Initializer")
        assign = tf.raw_ops.AssignVariableOp(resource=handle, value=zeros, name="Assign")
        # By this name convert_variables_to_constants finds it.
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype, name="Read/ReadVariableOp")
    with tf.Graph().as_default():
        of_graphs = tf.Variable(0.0)  # for its class and that of its proto, which have no public names
    proto = of_graphs.to_proto()
    proto.variable_name, proto.initializer_name = handle.name, assign.name
    proto.initial_value_name, proto.snapshot_name, proto.trainable = zeros.name, read.name, spec.trainable
    return type(of_graphs).from_proto(proto)
