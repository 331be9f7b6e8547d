"""Give variables in a model_fn what those of a TensorFlow 1 graph had by name: `graph.get_tensor_by_name("w:0")`,
`graph.as_graph_element("w:0")`, `variable.handle.op` and `variable.to_proto()`.

In TensorFlow 2 a variable is an object beside the graph that is traced. The graph has an operation for a variable only
after its first use, under a name of its own.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from runner.classic.compat import install
from runner.tf_private import variables
from runner.tf_private.replaced import EnteredOnce, all_replaced

v1 = tf.compat.v1

_AS_REFERENCES = frozenset({*install.SHAPES, "disable_resource_variables"})
"""Switches after which a tensor `w:0` was the value of a variable. Without them it was the variable's resource."""

_READ = "Read/ReadVariableOp:0"


@contextlib.contextmanager
def by_name() -> Iterator[None]:
    """Let the variables of the graph that is traced be found by name inside this context, and have `to_proto` and a
    handle with `op`, `name` and `graph`.
    """
    graph = v1.get_default_graph()
    if not getattr(graph, "building_function", False):  # a graph of a session, as for an export, has them itself
        yield
        return
    _find_variables_in(graph)
    with _attributes():
        yield


@EnteredOnce
@contextlib.contextmanager
def _attributes() -> Iterator[None]:
    """Replace attributes of the classes of eager tensors and of variables."""
    # Neither class is public. The eager tensor's own attributes are in its base class, and raise AttributeError.
    with tf.init_scope():
        eager = _owner_of("op", type(tf.constant(0)))
    variable = _owner_of("to_proto", variables.UninitializedVariable)
    own_proto = variable.to_proto
    of_protos = _owner_of("from_proto", v1.Variable)
    made_of_proto = of_protos.from_proto

    def from_proto(variable_def: Any, import_scope: str | None = None) -> Any:
        found = None
        if not tf.executing_eagerly() and not import_scope:
            found = _variable_named(variable_def.variable_name.removesuffix(":0"))
        if found is not None:
            return found
        return made_of_proto(variable_def, import_scope)

    of_handles = []
    for name in ("op", "name", "graph", "value_index"):
        of_handles.append((eager, name, _attribute_of_handles(name, getattr(eager, name))))
    with all_replaced(
        *of_handles,
        (of_protos, "from_proto", from_proto),  # no staticmethod: it is read from the class, and then compared
        (variable, "to_proto", lambda self, export_scope=None: _to_proto(self, export_scope, own_proto)),
    ):
        yield


def _owner_of(name: str, kind: type) -> Any:
    """Return the class, of a class and its bases, that defines the attribute `name`."""
    return next(base for base in kind.__mro__ if name in vars(base))


# --- names of a graph -------------------------------------------------------------------------------------------------


def _find_variables_in(graph: Any) -> None:
    """Let the methods of this graph that look for a name find variables where the graph has no such name."""
    if getattr(graph, "finds_variables", False):
        return
    graph.finds_variables = True
    graph.get_tensor_by_name = _with_variables(graph, graph.get_tensor_by_name, _tensor)
    graph.get_operation_by_name = _with_variables(graph, graph.get_operation_by_name, _operation)
    graph.as_graph_element = _with_variables(graph, graph.as_graph_element, _element)


def _with_variables(graph: Any, own: Callable[..., Any], find: Callable[[Any, str], Any]) -> Callable[..., Any]:
    def looked_for(name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(name, *args, **kwargs)
        except KeyError:
            found = find(graph, name) if isinstance(name, str) else None
            if found is None:
                raise
            return found

    return looked_for


def _tensor(graph: Any, name: str) -> Any:
    """Return the tensor of a variable with this name: `w:0`, or `w/Read/ReadVariableOp:0` and `w/read:0`, its value.

    None: no variable has it.
    """
    variable = _variable_named(name.removesuffix(":0"))
    if variable is not None and name.endswith(":0"):
        if _AS_REFERENCES & install.called:
            return variable.value()
        return graph.capture(variable.handle)
    for end in (f"/{_READ}", "/read:0"):
        if not name.endswith(end):
            continue
        variable = _variable_named(name.removesuffix(end))
        if variable is not None:
            return variable.value()
    return None


def _operation(graph: Any, name: str) -> Any:
    """Return the operation `w` of a variable, or its initializer `w/Assign`; None: no variable has it."""
    variable = _variable_named(name)
    if variable is not None:
        return variable.op
    if not name.endswith("/Assign"):
        return None
    variable = _variable_named(name.removesuffix("/Assign"))
    return None if variable is None else variable.initializer


def _element(graph: Any, name: str) -> Any:
    return _tensor(graph, name) if ":" in name else _operation(graph, name)


def _variables() -> list[Any]:
    """Return the variables of the graph that is traced: those of this replica."""
    found: list[Any] = []
    for variable in (*v1.global_variables(), *v1.local_variables()):
        found += [copy for copy in variables.copies_of(variable) if hasattr(copy, "op")]
    return found


def _variable_named(name: str) -> Any:
    return next((variable for variable in _variables() if variable.op.name == name), None)


# --- attributes of handles and variables ------------------------------------------------------------------------------


def _attribute_of_handles(name: str, own: Any) -> property:
    """Return a property of eager tensors that has a value for the handles of variables, and else is `own`."""

    def read(self: Any) -> Any:
        operation = _operation_of(self)
        if operation is None:
            return own.fget(self)
        if name == "op":
            return operation
        return {"name": f"{operation.name}:0", "graph": operation.graph, "value_index": 0}[name]

    return property(read)


def _operation_of(tensor: Any) -> Any:
    """Return the operation of the variable whose handle the tensor is; None: it is no handle, or nothing is traced."""
    if tensor.dtype != tf.resource or tf.executing_eagerly():
        return None
    return next((variable.op for variable in _variables() if variable.handle is tensor), None)


@functools.cache
def _kind_of_proto() -> Any:
    """Return the class VariableDef, which has no public name."""
    with tf.Graph().as_default():
        return type(v1.Variable(0).to_proto())


def _to_proto(variable: Any, export_scope: str | None, own: Callable[..., Any]) -> Any:
    """Return what a graph's variable has in a MetaGraph; None: it is not within `export_scope`."""
    if tf.executing_eagerly() or tf.is_symbolic_tensor(variable.handle):  # of a tf.Graph of the user's own
        return own(variable, export_scope)
    name = variable.op.name
    if export_scope is not None:
        if not f"{name}:0".startswith(export_scope):
            return None
        name = re.sub(rf"^{re.escape(export_scope)}[/]*", "", name)
    return _kind_of_proto()(
        variable_name=f"{name}:0",
        initializer_name=f"{name}/Assign",
        snapshot_name=f"{name}/{_READ}",
        is_resource=True,
        trainable=variable.trainable,
        synchronization=variable.synchronization.value,
        aggregation=variable.aggregation.value,
    )
