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

# UninitializedVariable: a tf.Variable with a handle but no value, so that discovery allocates nothing.
# When it moves: create tf.Variable(tf.zeros(shape)) instead; discovery then holds a second copy of the model.
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

# checkpoint_utils: see `initial_values_from_checkpoints`.
from tensorflow.python.training import checkpoint_utils

from runner.tf_private import tensor_bundle
from runner.tf_private.replaced import replaced

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class VariablePart:
    """The place of a part in its variable.

    Attributes:
      whole: name of the variable.
      number: parts are in the order of their numbers.
      axis: along which the variable is partitioned.
    """

    whole: str
    number: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class _VariableOp:
    """Replaces `variable.op` of a v1 graph, for code that reads its name. The same on all replicas."""

    name: str
    type: str = "VarHandleOp"
    graph: Any = None
    traceback: tuple[Any, ...] = ()


class _Named:
    """A variable that can be asked for its `op` and what it begins with, which an eager one refuses.

    Attributes:
      initial: computes its initial value: v1 moving averages, and other variables, begin with it, too.
      keras_variable: the `keras.Variable` of Keras 3 that it is the value of, if it is.
    """

    initial: Callable[[], Any]
    keras_variable: Any = None

    @property
    def constraint(self) -> Any:
        """The constraint that optimizers of `tf.compat.v1.train` and tf_keras apply after an update.

        Keras 3 keeps the constraint of a layer on its own variable, where only its own optimizers look.
        """
        own = super().constraint  # type: ignore[misc]
        return own if own is not None else getattr(self.keras_variable, "constraint", None)

    def eval(self, session: Any = None) -> Any:
        """Return its value in a session, such as a hook's."""
        session = v1.get_default_session() if session is None else session
        if session is None:
            raise ValueError(f"{self.op.name}.eval(): there is no default session. Give one: eval(session=session).")
        return session.run(self)

    def load(self, value: Any, session: Any = None) -> None:
        """Assign a value (of its shape) in the session of a hook."""
        _load(self, value, session)

    @property
    def op(self) -> _VariableOp:
        name: str = self.name  # type: ignore[attr-defined]
        return _VariableOp(re.sub(r"(/replica_\d+)?:0$", "", name))

    @property
    def initial_value(self) -> Any:
        return self.initial()

    def initialized_value(self) -> Any:
        return tf.convert_to_tensor(self.initial())


def _load(variable: Any, value: Any, session: Any = None) -> None:
    del session
    with tf.init_scope():
        variable.assign(value)


def loadable(variable: tf.Variable) -> tf.Variable:
    """Return a variable of a strategy, which has `load` from now on, as in TF 1. Its copies are `named`."""
    variable.load = functools.partial(_load, variable)
    return variable


class _DiscoveryVariable(_Named, UninitializedVariable):
    """A variable without a value that knows its initial value.

    Attributes:
      is_given: that is another one than its initializer's.
    """

    is_given = False


def uninitialized_variable(
    name: str, shape: tf.TensorShape, dtype: tf.DType, trainable: bool, initial: Callable[[], Any] | None = None
) -> tf.Variable:
    """An eager variable without a value; `assign` gives it one and allocates it.

    Args:
      initial: computes its initial value, for those who ask before it has one.
    """
    with tf.init_scope(), v1.name_scope(None):
        variable = _DiscoveryVariable(name=name, shape=shape, dtype=dtype, trainable=trainable)
    variable.initial = initial or (lambda: tf.zeros(shape, dtype))
    return variable


def named(variable: tf.Variable, initial: Callable[[], Any]) -> tf.Variable:
    """The variable, whose `op.name` is its name from now on, as in a v1 graph.

    Private: none; but TensorFlow's own optimizers know a variable that has an `op` by the name of that.

    Args:
      initial: computes its initial value.
    """
    kind = type(variable)
    variable.__class__ = type(kind.__name__, (_Named, kind), {"initial": staticmethod(initial)})
    return variable


def constrain(variable: Any, constraint: Callable[[tf.Variable], Any] | None) -> None:
    """Has optimizers keep the variable, and each of its copies, to what `constraint` gives of it, as a v1 graph did.

    Private: `BaseResourceVariable._constraint`, which `constraint` reads, since TF 1. When it moves: give it to the
    constructor; it is then that of the first call of model_fn.
    """
    for copy in _copies(variable):
        copy._constraint = constraint


def belongs_to(variable: Any, owner: Any) -> None:
    """Has the variable, and each of its copies, know the `keras.Variable` that asked for it."""
    for copy in _copies(variable):
        copy.keras_variable = owner


def share_on_read(variable: Any) -> None:
    """Have the next read of a variable, of each of its copies, share its buffer.

    A lookup or a sparse update makes a variable give a copy to whoever reads it, from then on: a checkpoint of an
    embedding would take its size in memory once more. The next of them gives the variable a buffer of its own again
    where somebody still holds the one that was shared. As `tf.train.Checkpoint` does it before it reads.
    """
    for copy in _copies(variable):
        tf.raw_ops.DisableCopyOnRead(resource=copy.handle)


def refill(variable: Any, read: Callable[[], list[tf.Tensor]]) -> None:
    """Give a variable, each of its copies, the one value that `read` gives; the one that it had is gone by then.

    For what is so large that both are not to be in memory. Where `read` fails, the variable holds zeros.
    """
    copies = _copies(variable)

    def fill(value: tf.Tensor) -> None:
        for copy in copies:
            with tf.device(copy.device):  # `assign` refuses a value of another shape than the last one
                tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value)

    fill(tf.zeros([0], variable.dtype))
    try:
        (value,) = read()
    except Exception:
        fill(tf.zeros(variable.shape, variable.dtype))
        raise
    fill(value)


def _copies(variable: Any) -> list[Any]:
    copies = getattr(variable, "values", None) or getattr(variable, "variables", None) or [variable]
    return [getattr(copy, "_v", copy) for copy in copies]


def slices_of(variables: Mapping[str, tf.Variable]) -> dict[str, VariablePart]:
    """Those of `variables` that a v1 partitioner, or an optimizer or a moving average of its parts, made as parts.

    Private: `_save_slice_info`, by which a v1 Saver writes parts under one name; there since TF 1.
    """
    infos = {name: getattr(variable, "_save_slice_info", None) for name, variable in variables.items()}
    return {name: _part(info) for name, info in infos.items() if info is not None}


def same_slice(variable: tf.Variable, as_of: tf.Variable) -> None:
    """Has `variable` be the part that `as_of`, whose place it takes, was made as. Private: as `slices_of`."""
    info = getattr(as_of, "_save_slice_info", None)
    if info is not None:
        variable._set_save_slice_info(info)


def _part(info: Any) -> VariablePart:
    sizes = zip(info.full_shape, info.var_shape, strict=True)
    axis = next((axis for axis, (whole, part) in enumerate(sizes) if whole != part), 0)
    return VariablePart(info.full_name, info.var_offset[axis], axis)


def initial_values_from_checkpoints() -> contextlib.AbstractContextManager[None]:
    """While a step is traced, `init_from_checkpoint` changes what variables without a value will start from.

    Private: `checkpoint_utils._set_checkpoint_initializer`, which it calls for each variable, and which makes an
    operation of a v1 graph. When it moves: what it hands a variable is the tensor of its `initial_value`.
    """

    def set_initial(variable: Any, checkpoint: str, name: str, rows: str, *_: Any, **__: Any) -> None:
        if isinstance(variable, _DiscoveryVariable):  # others have their values
            entry = (name, rows, variable.dtype)
            variable.initial = lambda: tensor_bundle.read_entries(checkpoint, "CPU:0", [entry])[0]
            variable.is_given = True

    return replaced(checkpoint_utils, "_set_checkpoint_initializer", set_initial)


def begin_with(variable: Any, value: np.ndarray) -> None:
    """Have a variable begin with `value`. One that has a value already, of an earlier trace or step, keeps it."""
    first = 0
    for part in getattr(variable, "variables", [variable]):  # of one that is divided by rows over parameter servers
        rows = value if part is variable else value[first : first + part.shape[0]]
        first += len(rows) if rows.ndim else 0
        if isinstance(part, _DiscoveryVariable) and not part.is_given:
            part.initial, part.is_given = functools.partial(tf.constant, rows, part.dtype), True


def initial_of(variable: tf.Variable) -> Callable[[], Any] | None:
    """Return what gives the value that `init_from_checkpoint` or `begin_with` found; None: neither was called."""
    return variable.initial if getattr(variable, "is_given", False) else None
