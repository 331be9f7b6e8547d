"""The graph of a step as tf.estimator wrote it beside checkpoints: with variables, a Saver and collections.

All of it is written as protos: to make the operations in a graph took ten times as long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private import tensor_bundle
from runner.tracing.partitioned_variable import PartitionedVariable
from runner.tracing.trace import Trace
from runner.tracing.variable_request import VariableSpec
from runner.tracing.variable_store import GLOBAL_STEP, VariableStore

v1 = tf.compat.v1
_KEYS = v1.GraphKeys


def meta_graph(trace: Trace, store: VariableStore, keys: Mapping[str, str], train_op: Any = None) -> Any:
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
    meta = v1.MetaGraphDef(graph_def=trace.graph.as_graph_def())
    meta.meta_info_def.tensorflow_version = tf.__version__
    # This changes `meta.graph_def` in place, as `make_variable` and `add_saver` do below.
    nodes = _Nodes(meta.graph_def, _specs_of_handles(trace, store))
    if GLOBAL_STEP not in nodes.variables:  # the graph of the step may not use the counter of steps
        nodes.make_variable(nodes.definition.node.add(name=GLOBAL_STEP), store.specs[GLOBAL_STEP])
    slices = _slices_in_checkpoint(store, nodes.variables.keys(), keys)
    dtypes = [store.specs[name].dtype for name in slices]
    meta.saver_def.CopyFrom(nodes.add_saver(slices, dtypes))
    for name, proto in nodes.variables.items():
        for key in _collections_of(store.specs[name]):
            meta.collection_def[key].bytes_list.value.append(proto.SerializeToString())
    for key, members in {**trace.collections, _KEYS.TRAIN_OP: [train_op]}.items():
        names = _names_in_graph(members, trace.graph)
        if names:
            meta.collection_def[str(key)].node_list.value.extend(names)
    return meta


def _specs_of_handles(trace: Trace, store: VariableStore) -> dict[str, VariableSpec]:
    """Return name of a placeholder of the trace -> spec of the variable for whose handle it stands."""
    specs: dict[str, VariableSpec] = {}
    counter = v1.train.get_global_step(trace.graph)  # no request of model_fn
    for outer, inner in trace.graph.captures:
        if outer is counter.handle:
            specs[inner.op.name] = store.specs[GLOBAL_STEP]
    for inner, name in trace.handles(0):
        specs[inner.op.name] = store.specs[name]
    return specs


def _slices_in_checkpoint(
    store: VariableStore, names: Collection[str], keys: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return name of a variable -> (its key in the checkpoint, the slice of what is stored there).

    Args:
      store: the variables.
      names: the variables of the graph. What is saved, but not there in all its parts, is left out.
      keys: as in `meta_graph`.
    """
    slices: dict[str, tuple[str, str]] = {}
    for name, variable in store.saved.items():
        parts: Sequence[str] = (name,)
        rows = [""]
        if isinstance(variable, PartitionedVariable):
            parts = variable.names
            if len(parts) > 1:
                rows = tensor_bundle.slice_specs([part.shape for part in variable.parts], variable.axis)
        if set(parts).issubset(names):
            for part, row in zip(parts, rows, strict=True):
                slices[part] = (keys.get(name, name), row)
    return slices


def _collections_of(spec: VariableSpec) -> list[str]:
    if spec.local:
        return [_KEYS.LOCAL_VARIABLES]
    collections = [_KEYS.GLOBAL_VARIABLES]
    if spec.trainable:
        collections.append(_KEYS.TRAINABLE_VARIABLES)
    if spec.name == GLOBAL_STEP:
        collections.append(_KEYS.GLOBAL_STEP)
    return collections


def _names_in_graph(members: Iterable[Any], graph: Any) -> list[str]:
    """Return the names of those of `members` that are tensors or operations of the graph."""
    names = []
    for member in members:
        if isinstance(member, tf.Tensor | tf.Operation) and member.graph is graph:
            names.append(member.name)
    return names


class _Nodes:
    """The nodes of a GraphDef, whose placeholders for handles become variables with the variables' names.

    Args:
      definition: the GraphDef, which the constructor and all methods change in place.
      handles: name of a placeholder -> spec of the variable for whose handle it stands.

    Attributes:
      variables: name -> VariableDef.
    """

    def __init__(self, definition: Any, handles: Mapping[str, VariableSpec]) -> None:
        self.definition = definition
        self.variables: dict[str, Any] = {}
        self._taken = {node.name for node in definition.node}
        with tf.Graph().as_default():
            self._variable_def = type(tf.Variable(0.0).to_proto())  # VariableDef has no public name
        new_names = {node: self._take_unique(spec.name) for node, spec in handles.items()}
        nodes_of_handles = []
        for node in definition.node:
            node.device = ""
            # Colocations name nodes by their old names. An operation that uses a handle is placed with it anyway.
            node.attr.pop("_class", None)
            for number, text in enumerate(node.input):
                # "name", "name:output", or "^name" of a control dependency.
                source, colon, output = text.removeprefix("^").partition(":")
                if source in new_names:
                    caret = "^" if text.startswith("^") else ""
                    node.input[number] = f"{caret}{new_names[source]}{colon}{output}"
            if node.name in new_names:
                nodes_of_handles.append((node, handles[node.name]))
                node.name = new_names[node.name]
        # After the loop over `definition.node`, to which this adds nodes.
        for node, spec in nodes_of_handles:
            self.make_variable(node, spec)

    def make_variable(self, node: Any, spec: VariableSpec) -> None:
        """Make a node a variable, and add the nodes that begin and read it."""
        node.op = "VarHandleOp"
        node.attr.clear()
        node.attr["shared_name"].s = spec.name.encode()
        node.attr["dtype"].type = spec.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
        self._taken.add(node.name)
        zero_values = tf.make_tensor_proto([], spec.dtype)  # a TensorProto without values: all are zeros
        zero_values.tensor_shape.CopyFrom(tf.TensorShape(spec.smallest_shape).as_proto())
        zeros = self._add(f"{node.name}/Initializer/zeros", "Const", dtype=spec.dtype, value=zero_values)
        assign = self._add(f"{node.name}/Assign", "AssignVariableOp", node.name, zeros, dtype=spec.dtype)
        # By this name convert_variables_to_constants finds it.
        read = self._add(f"{node.name}/Read/ReadVariableOp", "ReadVariableOp", node.name, dtype=spec.dtype)
        self.variables[spec.name] = self._variable_def(
            variable_name=f"{node.name}:0",
            initializer_name=assign,
            initial_value_name=f"{zeros}:0",
            snapshot_name=f"{read}:0",
            is_resource=True,
            trainable=spec.trainable,
        )

    def add_saver(self, slices: Mapping[str, tuple[str, str]], dtypes: Sequence[tf.DType]) -> Any:
        """Add the nodes of a Saver, and return its SaverDef.

        Args:
          slices: name of a variable -> (its key in the checkpoint, the slice of what is stored there).
          dtypes: of these variables, in the same order.
        """
        path = self._add("save/Const", "Const", dtype=tf.string, value=tf.make_tensor_proto("model"))
        inputs = [path]
        for texts in zip(*slices.values(), strict=True):  # the keys, then the slices
            inputs.append(self._add("save/keys", "Const", dtype=tf.string, value=tf.make_tensor_proto(texts)))
        variables = [self.variables[name] for name in slices]
        values = [variable.snapshot_name for variable in variables]
        save = self._add("save/SaveV2", "SaveV2", *inputs, *values, dtypes=dtypes)
        saved = self._add("save/control_dependency", "Identity", path, f"^{save}", T=tf.string)
        restore = self._add("save/RestoreV2", "RestoreV2", *inputs, dtypes=dtypes)
        assigned = []
        for number, (variable, dtype) in enumerate(zip(variables, dtypes, strict=True)):
            handle = variable.variable_name.removesuffix(":0")
            value = f"{restore}:{number}"
            assigned.append(self._add(f"save/Assign_{number}", "AssignVariableOp", handle, value, dtype=dtype))
        all_restored = self._add("save/restore_all", "NoOp", *[f"^{name}" for name in assigned])
        return v1.train.SaverDef(
            filename_tensor_name=f"{path}:0",
            save_tensor_name=f"{saved}:0",
            restore_op_name=all_restored,
            max_to_keep=5,
            keep_checkpoint_every_n_hours=10000,
            version=v1.train.SaverDef.V2,
        )

    def _add(self, name: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return its name. Its attributes are a dtype, dtypes or a TensorProto."""
        node = self.definition.node.add(name=self._take_unique(name), op=op, input=inputs)
        for key, value in attributes.items():
            if isinstance(value, tf.DType):
                node.attr[key].type = value.as_datatype_enum
            elif isinstance(value, list):
                node.attr[key].list.type.extend(dtype.as_datatype_enum for dtype in value)
            else:
                node.attr[key].tensor.CopyFrom(value)
        return str(node.name)

    def _take_unique(self, name: str) -> str:
        """Take a name for a node: `name`, with `_1` at its end if another node has it."""
        while name in self._taken:
            name += "_1"
        self._taken.add(name)
        return name
