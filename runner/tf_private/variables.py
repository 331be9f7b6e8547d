"""Variables without a value, and the attributes of v1 graph variables that eager ones lack."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# DistributedVariable, embedding_ops: see `lookups_of_rows`.
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.ops import embedding_ops

# UninitializedVariable: a tf.Variable with a handle but no value, so that discovery allocates nothing.
# When it moves: create tf.Variable(tf.zeros(shape)) instead; discovery then holds a second copy of the model.
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

# checkpoint_utils: see `initial_values_from_checkpoints`; optimizer: see `_key_by_name`.
from tensorflow.python.training import checkpoint_utils, optimizer

from runner.tf_private import tensor_bundle
from runner.tf_private.replaced import Overlay, all_replaced, replaced

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class VariablePart:
    """A part of a partitioned variable.

    Attributes:
      whole: name of the whole variable.
      number: offset along the axis, by which parts are ordered.
      axis: the axis along which the variable is partitioned.
    """

    whole: str
    number: int
    axis: int = 0


class _VariableOp:
    """Replaces `variable.op` of a v1 graph: an operation without inputs, whose output is the variable's handle.

    Two are equal if their names are, which are the same in all replicas. What is not here is that of the operation that
    stands for the handle in the graph that is traced.
    """

    type = "VarHandleOp"
    inputs: tuple[tf.Tensor, ...] = ()
    control_inputs: tuple[tf.Operation, ...] = ()
    traceback: tuple[Any, ...] = ()
    device = ""

    def __init__(self, name: str, variable: Any) -> None:
        self.name = name
        self._variable = variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _VariableOp) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def graph(self) -> Any:
        """The graph that is traced; None: none is."""
        return _traced_graph()

    @property
    def outputs(self) -> list[tf.Tensor]:
        graph = self.graph
        handle = self._variable.handle
        if graph is not None:
            handle = graph.capture(handle)
        return [handle]

    def values(self) -> tuple[tf.Tensor, ...]:
        return tuple(self.outputs)

    def colocation_groups(self) -> list[bytes]:
        return [f"loc:@{self.name}".encode()]

    @property
    def node_def(self) -> Any:
        return v1.NodeDef(name=self.name, op=self.type)

    def get_attr(self, name: str) -> Any:
        """Return an attribute of the operation.

        Raises:
          ValueError: it has none of that name.
        """
        shared_name = self.name.encode()
        known = {"dtype": self._variable.dtype, "shape": self._variable.shape, "shared_name": shared_name}
        known |= {"container": b"", "allowed_devices": [], "debug_name": shared_name}
        if name not in known:
            raise ValueError(f"Operation {self.name!r} has no attr named {name!r}.")
        return known[name]

    def _as_graph_element(self) -> Any:
        return self.outputs[0].op

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self.graph is None:
            raise AttributeError(f"The op of variable {self.name!r} has no attribute {name!r} here.")
        return getattr(self.outputs[0].op, name)


def _traced_graph() -> Any:
    """Return the graph that is traced, around all bodies of `tf.cond` and `tf.while_loop`; None: operations are eager,
    or those of a session.
    """
    graph = v1.get_default_graph()
    if tf.executing_eagerly() or not graph.building_function:
        return None
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def _key_by_name(own: Callable[[Any], Any], variable: Any) -> Any:
    """Return the key by which v1 optimizers find the slots of a variable: its name alone.

    They make slots eagerly, and look for them in the graph that is traced, also in hooks: the graph of the variable's
    `op` differs.

    Private: `optimizer._var_key`, (graph, name) of the `op`, here `own`; since TF 1.5. It is replaced once and for all,
    for our variables alone. When it moves: the `op` has no graph.
    """
    # Checkpoints ask for the slots of any object.
    first = variable
    if isinstance(variable, DistributedVariable):
        first = copies_of(variable)[0]
    op = getattr(first, "op", None)
    if isinstance(op, _VariableOp):
        return None, op.name
    return own(variable)


optimizer._var_key = functools.partial(_key_by_name, optimizer._var_key)


def load(variable: Any, value: Any, session: Any = None) -> None:
    """Assign a value of the variable's shape in the session of a hook."""
    if session is None:
        session = v1.get_default_session()
    if hasattr(session, "begin_to_write"):  # the session of hooks
        session.begin_to_write()
    with tf.init_scope():
        variable.assign(value)


class _Named:
    """A variable with `op` and `initial_value`, which eager variables do not have.

    v1 optimizers identify a variable by the name of its `op`, in a graph and eagerly, so all variables of a model need
    one, the same on all replicas.

    Attributes:
      initial: computes the initial value, from which v1 moving averages and other variables start as well.
      keras_variable: the `keras.Variable` of Keras 3 that it belongs to; None: none.
      requested_constraint: the constraint of the last request for the variable; None: none.
    """

    initial: Callable[[], Any]
    keras_variable: Any = None
    requested_constraint: Callable[[tf.Variable], Any] | None = None

    @property
    def constraint(self) -> Any:
        """The constraint that optimizers of `tf.compat.v1.train` and tf_keras apply after an update.

        Keras 3 keeps the constraint of a layer on its own variable, where only its own optimizers look.
        """
        return self.requested_constraint or getattr(self.keras_variable, "constraint", None)

    def eval(self, session: Any = None) -> Any:
        """Return the value in a session, such as a hook's."""
        if session is None:
            session = v1.get_default_session()
        if session is None:
            raise ValueError(f"{self.op.name}.eval(): there is no default session. Give one: eval(session=session).")
        return session.run(self)

    load = load

    @property
    def op(self) -> _VariableOp:
        name: str = self.name  # type: ignore[attr-defined]
        return _VariableOp(re.sub(r"(/replica_\d+)?:0$", "", name), self)

    @property
    def graph(self) -> Any:
        """The graph that is traced; where operations are eager, the variable has none."""
        graph = _traced_graph()
        if graph is not None:
            return graph
        return super().graph  # type: ignore[misc]

    @property
    def initializer(self) -> Any:
        """An operation without effect, as of `variables_initializer`: the runner sets the values."""
        if _traced_graph() is None:
            return None
        with v1.name_scope(None):
            return tf.no_op(f"{self.op.name}/Assign")

    create = initializer

    def _as_graph_element(self) -> Any:
        if _traced_graph() is not None:
            return tf.convert_to_tensor(self)
        return super()._as_graph_element()  # type: ignore[misc]

    @property
    def initial_value(self) -> Any:
        return self.initial()

    def initialized_value(self) -> Any:
        return tf.convert_to_tensor(self.initial())


def loadable(variable: tf.Variable) -> tf.Variable:
    """Give a variable of a strategy the method `load`, as in TF 1, and return it; its copies get theirs from
    `named`.
    """
    variable.load = functools.partial(load, variable)
    return variable


class _DiscoveryVariable(_Named, UninitializedVariable):
    """A variable without a value that knows its initial value.

    Attributes:
      is_given: the initial value comes from a checkpoint or file, not from the initializer.
    """

    is_given = False


def uninitialized_variable(
    name: str,
    shape: tf.TensorShape,
    dtype: tf.DType,
    trainable: bool,
    initial: Callable[[], Any] | None = None,
    device: str | None = None,
) -> tf.Variable:
    """Return an eager variable without a value; `assign` gives it one and allocates memory.

    Args:
      name, shape, dtype, trainable: as in tf.Variable.
      initial: computes the initial value, for code that reads it earlier; None: zeros.
      device: its device; None: TensorFlow's default.
    """
    with tf.init_scope(), tf.device(device), v1.name_scope(None):
        variable = _DiscoveryVariable(name=name, shape=shape, dtype=dtype, trainable=trainable)
    variable.initial = initial or (lambda: tf.zeros(shape, dtype))
    return variable


def created_under(variable: tf.Variable, strategy: tf.distribute.Strategy) -> tf.Variable:
    """Return the variable, which from now on belongs to a strategy; it stays a plain variable.

    Private: `_distribute_strategy`, which `strategy.extended.variable_created_in_scope` reads, and tf_keras refuses
    metrics by it; since TF 1.14. When it moves: compiled models of tf_keras with metrics fail on several replicas.
    """
    variable._distribute_strategy = strategy
    return variable


def named(variable: tf.Variable, initial: Callable[[], Any]) -> tf.Variable:
    """Return the variable, changed to have an `op` with its name, as in a v1 graph.

    Private: none; TensorFlow's own optimizers identify a variable that has an `op` by its name.

    Args:
      variable: the variable.
      initial: computes the initial value.
    """
    kind = type(variable)
    variable.__class__ = type(kind.__name__, (_Named, kind), {"initial": staticmethod(initial)})
    return variable


def constrain(variable: Any, constraint: Callable[[tf.Variable], Any] | None) -> None:
    """Make v1 optimizers apply `constraint` to the variable and each of its copies after updates, as in a v1 graph."""
    for copy in copies_of(variable):
        copy.requested_constraint = constraint


def belongs_to(variable: Any, owner: Any) -> None:
    """Set the `keras.Variable` that requested the variable, on each of its copies."""
    for copy in copies_of(variable):
        copy.keras_variable = owner


def share_on_read(variable: Any) -> None:
    """Make the next read of a variable, and of each of its copies, share its buffer instead of copying it.

    After a lookup or a sparse update, TensorFlow copies the variable at each read: a checkpoint of an embedding would
    need its size in memory once more. The next such update copies the buffer if a reader still holds it.
    `tf.train.Checkpoint` does the same before it reads.
    """
    for copy in copies_of(variable):
        tf.raw_ops.DisableCopyOnRead(resource=copy.handle)


def lookups_of_rows() -> contextlib.AbstractContextManager[None]:
    """Make lookups, and so feature columns, read only the rows that they look up, while a step is traced.

    A variable with sparse updates is copied by each read of the whole, in every step of training and every batch of an
    evaluation after it: 64 MB for a million rows of 16. TensorFlow 2.21 reads the whole in two cases:
    - of a variable that has a copy on each replica, it reads the copy;
    - Grappler (SimplifyEmbeddingLookupStage) joins Unique, ResourceGather and SparseSegmentSum of a lookup of sparse
      ids. It knows no UniqueWithCounts, which returns the same two tensors before the counts.

    Private: `DistributedVariable` and its `_get`, the copy of the current replica. Its `sparse_read` and `gather_nd`,
    which tf.gather calls, are those of tf.Variable and raise AttributeError. `_embedding_lookup_and_transform`, which
    all of `tf.nn.embedding_lookup*` call, asks for the type of a plain variable; `compat.forward_compatible` there
    chooses a fused lookup of sparse ids where ids and variable have one device; it takes the whole copy, but of a plain
    variable it is cheap. `embedding_ops.array_ops`, with which the lookup calls `unique`. When they move: leave this
    out; lookups are slower, and copy their tables.
    """
    lookup = embedding_ops._embedding_lookup_and_transform
    forward_compatible = embedding_ops.compat.forward_compatible

    def is_fused(*date: int) -> bool:
        is_one_replica = tf.distribute.get_strategy().num_replicas_in_sync == 1
        return is_one_replica and bool(forward_compatible(*date))

    def in_copy(method: str) -> Callable[..., tf.Tensor]:
        return lambda self, *args, **kwargs: getattr(self._get(), method)(*args, **kwargs)

    def lookup_in_copies(params: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(params, list | tuple):
            return lookup([_copy_of_replica(table) for table in params], *args, **kwargs)
        return lookup(_copy_of_replica(params), *args, **kwargs)

    def unique(x: Any, *args: Any, **kwargs: Any) -> Any:
        return tf.unique_with_counts(x, *args, **kwargs)[:2]

    return all_replaced(
        (embedding_ops, "array_ops", Overlay(embedding_ops.array_ops, unique=unique)),
        (embedding_ops, "_embedding_lookup_and_transform", lookup_in_copies),
        (embedding_ops, "compat", Overlay(embedding_ops.compat, forward_compatible=is_fused)),
        *((DistributedVariable, name, in_copy(name)) for name in ("sparse_read", "gather_nd")),
    )


def _copy_of_replica(table: Any) -> Any:
    """Return the current replica's copy of a variable that has one on each; what is none is returned as it is."""
    if isinstance(table, DistributedVariable):
        return table._get()
    return table


def refill(variable: Any, read: Callable[[], list[tf.Tensor]]) -> None:
    """Assign the one value that `read` returns to all copies of a variable, after freeing the old value.

    For variables so large that both values do not fit into memory. If `read` fails, the variable becomes zeros.
    """
    copies = copies_of(variable)

    def fill(value: tf.Tensor) -> None:
        for copy in copies:
            with tf.device(copy.device):  # raw, since `assign` refuses values of another shape
                tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value)

    fill(tf.zeros([0], variable.dtype))
    try:
        (value,) = read()
    except Exception:
        fill(tf.zeros(variable.shape, variable.dtype))
        raise
    fill(value)


def copies_of(variable: Any) -> list[Any]:
    """Return the variables that hold a variable: one for each replica or part, or only itself."""
    copies = getattr(variable, "values", None) or getattr(variable, "variables", None) or [variable]
    return [getattr(copy, "_v", copy) for copy in copies]


def slices_of(variables: Mapping[str, tf.Variable]) -> dict[str, VariablePart]:
    """Return name -> part for those of `variables` that are parts made by a v1 partitioner, including slots and moving
    averages of parts.

    Private: `_save_slice_info`, by which a v1 Saver writes parts under one name, since TF 1.
    """
    infos = {name: getattr(variable, "_save_slice_info", None) for name, variable in variables.items()}
    return {name: _part(info) for name, info in infos.items() if info is not None}


def same_slice(variable: tf.Variable, as_of: tf.Variable) -> None:
    """Make `variable` the same part as `as_of`, which it replaces.

    Private: as in `slices_of`.
    """
    info = getattr(as_of, "_save_slice_info", None)
    if info is not None:
        variable._set_save_slice_info(info)


def _part(info: Any) -> VariablePart:
    sizes = zip(info.full_shape, info.var_shape, strict=True)
    axis = next((axis for axis, (whole, part) in enumerate(sizes) if whole != part), 0)
    return VariablePart(info.full_name, info.var_offset[axis], axis)


def initial_values_from_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Make `init_from_checkpoint` change the initial values of variables without a value, while a step is traced.

    Private: `checkpoint_utils._set_checkpoint_initializer`, which it calls for each variable, and which makes an
    operation of a v1 graph. When it moves: read the tensor `initial_value` that it sets on a variable.
    """

    def set_initial(variable: Any, checkpoint: str, name: str, rows: str, *_: Any, **__: Any) -> None:
        if isinstance(variable, _DiscoveryVariable):  # other variables have values already
            entry = (name, rows, variable.dtype)
            variable.initial = lambda: tensor_bundle.read_entries(checkpoint, "CPU:0", [entry])[0]
            variable.is_given = True

    return replaced(checkpoint_utils, "_set_checkpoint_initializer", set_initial)


def begin_with(variable: Any, value: np.ndarray) -> None:
    """Set the initial value of a variable, an array of its shape; ignored if it has a value, or if one was set
    before.
    """
    first = 0  # of the rows that the next part gets
    for part in getattr(variable, "variables", [variable]):  # the row partitions of a variable on parameter servers
        rows = value
        if part is not variable:
            rows = value[first : first + part.shape[0]]
            first += len(rows)
        if isinstance(part, _DiscoveryVariable) and not part.is_given:
            part.initial = functools.partial(tf.constant, rows, part.dtype)
            part.is_given = True


def is_without_value(value: Any) -> bool:
    """Report whether `value` is a variable of a trace that has no value yet, but an initial one."""
    return isinstance(value, _DiscoveryVariable)


def initial_of(variable: tf.Variable) -> Callable[[], Any] | None:
    """Return the function that computes the initial value set by `init_from_checkpoint` or `begin_with`; None: there
    is none.
    """
    if not getattr(variable, "is_given", False):
        return None
    return variable.initial
