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

_SWITCHES_TO_REFERENCES = frozenset({*install.SHAPES, "disable_resource_variables"})
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
        eager_tensor = _owner_of("op", type(tf.constant(0)))
    variable = _owner_of("to_proto", variables.UninitializedVariable)
    original_to_proto = variable.to_proto
    proto_reader = _owner_of("from_proto", v1.Variable)
    original_from_proto = proto_reader.from_proto

    def from_proto(variable_def: Any, import_scope: str | None = None) -> Any:
        found = None
        # In an `import_scope` the variable would have another name.
        if not tf.executing_eagerly() and not import_scope:
            found = _variable_named(variable_def.variable_name.removesuffix(":0"))
        if found is not None:
            return found
        return original_from_proto(variable_def, import_scope)

    replaced_attributes = []
    for name in ("op", "name", "graph", "value_index"):
        replaced_attributes.append((eager_tensor, name, _attribute_of_handles(name, getattr(eager_tensor, name))))
    with all_replaced(
        *replaced_attributes,
        (proto_reader, "from_proto", from_proto),  # no staticmethod: it is read from the class, and then compared
        (variable, "to_proto", lambda self, export_scope=None: _to_proto(self, export_scope, original_to_proto)),
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


def _with_variables(
    graph: Any, find_own: Callable[..., Any], find_variable: Callable[[Any, str], Any]
) -> Callable[..., Any]:
    """Return a method like `find_own` of the graph, which calls `find` for a name that the graph does not have."""

    def find_name(name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return find_own(name, *args, **kwargs)
        except KeyError:
            found = find_variable(graph, name) if isinstance(name, str) else None
            if found is None:
                raise
            return found

    return find_name


def _tensor(graph: Any, name: str) -> Any:
    """Return the tensor with this name that a variable `w` had in a TensorFlow 1 graph; None: no variable had it.

    `w:0` is the variable's handle, or its value after `disable_resource_variables` and the other switches of
    `_SWITCHES_TO_REFERENCES`. `w/Read/ReadVariableOp:0` and `w/read:0` are its value.
    """
    variable = _variable_named(name.removesuffix(":0"))
    if variable is not None and name.endswith(":0"):
        had_reference_variables = bool(_SWITCHES_TO_REFERENCES & install.called)
        if had_reference_variables:
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
    """Return the VariableDef that a variable of a TensorFlow 1 graph has in a MetaGraph; None: the variable is not
    within `export_scope`.

    `own` is TensorFlow's method, for variables of other graphs.
    """
    if tf.executing_eagerly() or tf.is_symbolic_tensor(variable.handle):  # a variable of a tf.Graph that the user made
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
