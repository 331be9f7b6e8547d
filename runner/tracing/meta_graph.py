"""The graph of a step as tf.estimator wrote it beside checkpoints: with variables, a Saver and collections.

All of it is written as protos: to make the operations in a graph took ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    counter = v1.train.get_global_step(trace.graph)  # no request of model_fn
    handles = {inner.op.name: GLOBAL_STEP for outer, inner in trace.graph.captures if outer is counter.handle}
    handles |= {inner.op.name: name for inner, name in trace.handles(0)}
    nodes = _Nodes(meta.graph_def, {node: store.specs[name] for node, name in handles.items()})
    if GLOBAL_STEP not in nodes.variables:  # the step does not count itself
        nodes.make_variable(nodes.definition.node.add(name=GLOBAL_STEP), store.specs[GLOBAL_STEP])
    slices: dict[str, tuple[str, str]] = {}
    for name, one in store.saved.items():
        parts = one.names if isinstance(one, PartitionedVariable) else (name,)
        rows = tensor_bundle.slice_specs([part.shape for part in one.parts], one.axis) if len(parts) > 1 else [""]
        if nodes.variables.keys() >= set(parts):
            slices |= {part: (keys.get(name, name), row) for part, row in zip(parts, rows, strict=True)}
    meta.saver_def.CopyFrom(nodes.add_saver(slices, [store.specs[name].dtype for name in slices]))
    for name, proto in nodes.variables.items():
        spec = store.specs[name]
        of_model = [_KEYS.GLOBAL_VARIABLES, *([_KEYS.TRAINABLE_VARIABLES] if spec.trainable else [])]
        of_model += [_KEYS.GLOBAL_STEP] if name == GLOBAL_STEP else []
        for key in [_KEYS.LOCAL_VARIABLES] if spec.local else of_model:
            meta.collection_def[key].bytes_list.value.append(proto.SerializeToString())
    for key, members in {**trace.collections, _KEYS.TRAIN_OP: [train_op]}.items():
        in_graph = [one for one in members if isinstance(one, tf.Tensor | tf.Operation) and one.graph is trace.graph]
        if in_graph:
            meta.collection_def[str(key)].node_list.value.extend(one.name for one in in_graph)
    return meta


class _Nodes:
    """The nodes of a GraphDef, whose placeholders for handles become variables with the variables' names.

    Args:
      definition: the GraphDef.
      handles: name of a placeholder -> spec of the variable for whose handle it stands.

    Attributes:
      variables: name -> VariableDef.
    """

    def __init__(self, definition: Any, handles: Mapping[str, VariableSpec]) -> None:
        self.definition, self.variables = definition, dict[str, Any]()
        self._taken = {node.name for node in definition.node}
        with tf.Graph().as_default():
            self._variable_def = type(tf.Variable(0.0).to_proto())  # VariableDef has no public name
        new = {node: self._unique(spec.name) for node, spec in handles.items()}
        made = []
        for node in definition.node:
            node.device = ""
            # Colocations name nodes by their old names. An operation that uses a handle is placed with it anyway.
            node.attr.pop("_class", None)
            for place, text in enumerate(node.input):
                source, colon, output = text.removeprefix("^").partition(":")
                if source in new:
                    node.input[place] = f"{text[: text.startswith('^')]}{new[source]}{colon}{output}"
            if node.name in new:
                made.append((node, handles[node.name]))
                node.name = new[node.name]
        for node, spec in made:
            self.make_variable(node, spec)

    def make_variable(self, node: Any, spec: VariableSpec) -> None:
        """Make a node a variable, and add the nodes that begin and read it."""
        node.op = "VarHandleOp"
        node.attr.clear()
        node.attr["shared_name"].s, node.attr["dtype"].type = spec.name.encode(), spec.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
        self._taken.add(node.name)
        shape = tf.TensorShape([size or 0 for size in spec.shape] if spec.shape.rank else [])
        nothing = tf.make_tensor_proto([], spec.dtype)  # without values, all of them are zeros
        nothing.tensor_shape.CopyFrom(shape.as_proto())
        zeros = self._add(f"{node.name}/Initializer/zeros", "Const", dtype=spec.dtype, value=nothing)
        assign = self._add(f"{node.name}/Assign", "AssignVariableOp", node.name, zeros, dtype=spec.dtype)
        # By this name convert_variables_to_constants finds it.
        read = self._add(f"{node.name}/Read/ReadVariableOp", "ReadVariableOp", node.name, dtype=spec.dtype)
        self.variables[spec.name] = self._variable_def(
            variable_name=f"{node.name}:0", initializer_name=assign, initial_value_name=f"{zeros}:0",
            snapshot_name=f"{read}:0", is_resource=True, trainable=spec.trainable,
        )  # fmt: skip

    def add_saver(self, slices: Mapping[str, tuple[str, str]], dtypes: Sequence[tf.DType]) -> Any:
        """Add the nodes of a Saver, and return its SaverDef.

        Args:
          slices: name of a variable -> (its key in the checkpoint, the slice of what is stored there).
          dtypes: of these variables, in the same order.
        """
        path = self._add("save/Const", "Const", dtype=tf.string, value=tf.make_tensor_proto("model"))
        texts = map(tf.make_tensor_proto, zip(*slices.values(), strict=True))
        keys = [self._add("save/keys", "Const", dtype=tf.string, value=one) for one in texts]
        variables = [self.variables[name] for name in slices]
        save = self._add("save/SaveV2", "SaveV2", path, *keys, *(one.snapshot_name for one in variables), dtypes=dtypes)
        saved = self._add("save/control_dependency", "Identity", path, f"^{save}", T=tf.string)
        restore = self._add("save/RestoreV2", "RestoreV2", path, *keys, dtypes=dtypes)
        assigned = [
            self._add(
                f"save/Assign_{place}", "AssignVariableOp", one.variable_name[:-2], f"{restore}:{place}", dtype=dtype
            )
            for place, (one, dtype) in enumerate(zip(variables, dtypes, strict=True))
        ]
        all_restored = self._add("save/restore_all", "NoOp", *(f"^{name}" for name in assigned))
        return v1.train.SaverDef(
            filename_tensor_name=f"{path}:0", save_tensor_name=f"{saved}:0", restore_op_name=all_restored,
            max_to_keep=5, keep_checkpoint_every_n_hours=10000, version=v1.train.SaverDef.V2,
        )  # fmt: skip

    def _add(self, name: str, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return its name. Its attributes are a dtype, dtypes or a TensorProto."""
        node = self.definition.node.add(name=self._unique(name), op=op, input=inputs)
        for key, value in attributes.items():
            if isinstance(value, tf.DType):
                node.attr[key].type = value.as_datatype_enum
            elif isinstance(value, list):
                node.attr[key].list.type.extend(one.as_datatype_enum for one in value)
            else:
                node.attr[key].tensor.CopyFrom(value)
        return str(node.name)

    def _unique(self, name: str) -> str:
        """Take a name for a node: `name`, with `_1` at its end if another node has it."""
        while name in self._taken:
            name += "_1"
        self._taken.add(name)
        return name
