"""Private names of TensorFlow and tf_keras that only the classic API needs.

Written for TensorFlow 2.21 and tf_keras 2.21. When a name moves, tests/classic/compat/test_classic_names.py fails with
that name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from runner.tf_private.replaced import EnteredOnce, Overlay

LEGACY = "tf_keras.api._v1.keras.__internal__.legacy"
"""The package of tf_keras with the modules of `legacy_keras`."""


def legacy_keras(part: str) -> Any:
    """Return the module of tf_keras that TensorFlow provides as `tf.compat.v1.layers` ("layers") or `tf.nn.rnn_cell`
    ("rnn_cell"), but only with TF_USE_LEGACY_KERAS=1.

    When it moves: `tensorflow/_api/v2/compat/v1/__init__.py` has the new name.

    Raises:
      ModuleNotFoundError: tf_keras is not installed.
    """
    return importlib.import_module(f"{LEGACY}.{part}")


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run code eagerly inside this context, also within a script's `with tf.Graph().as_default():`. Also a decorator.

    Scripts may call an Estimator there, since tf.estimator made a new graph for each call.

    Private: `context.eager_mode`, unchanged since TF 1.5; `tf.init_scope` would stay in the script's graph. When it
    moves: run the code in a new thread, which starts eagerly.
    """
    from tensorflow.python.eager import context

    mode = contextlib.nullcontext() if context.executing_eagerly() else context.eager_mode()
    with mode:
        yield


def put_on_keras(module: Any, name: str, value: Any) -> None:
    """Set `<module>.keras.<name>` to `value` without importing Keras.

    Private: `LazyLoader._load`, which imports Keras at its first use and replaces the module object. When it moves:
    `tf.keras.<name> = value`, which imports Keras at once and takes a second.
    """
    keras = module.keras

    def load_and_put() -> Any:
        loaded = type(keras)._load(keras)
        setattr(loaded, name, value)
        keras.__dict__[name] = value
        return loaded

    if hasattr(type(keras), "_load"):
        keras.__dict__.update({"_load": load_and_put, name: value})
    else:
        setattr(keras, name, value)


def state_without_a_graph(optimizer: Any) -> None:
    """Make `_get_non_slot_variable(name, graph)` work in user-defined optimizers, as in a session.

    Private: `Optimizer._get_non_slot_variable` and `_non_slot_dict`. Keys of the dict have no graph if TensorFlow is
    eager outside of functions, but such optimizers pass the graph of model_fn, since `tf.executing_eagerly()` is False
    in it. Unchanged since 1.7. When it moves: an optimizer must pass `graph=None`.
    """
    find = optimizer._get_non_slot_variable

    def found(self: Any, name: str, graph: Any = None) -> Any:
        variable = find(self, name, graph)
        if variable is None:
            return find(self, name)
        return variable

    optimizer._get_non_slot_variable = found


# By mock.patch: it imports TensorFlow late, and restores the old value even if model_fn has changed the new one.
_SHAPES = "tensorflow.python.framework.tensor_shape"
_by_identity = EnteredOnce(lambda: mock.patch("tensorflow.Tensor._USE_EQUALITY", False))
dimensions_of_tf1 = EnteredOnce(lambda: mock.patch(f"{_SHAPES}._TENSORSHAPE_V2_OVERRIDE", False))
"""Gives each dimension of a TensorShape the attribute `value` inside this context, as in TensorFlow 1."""
dimensions_of_tf2 = EnteredOnce(lambda: mock.patch(f"{_SHAPES}._TENSORSHAPE_V2_OVERRIDE", True))
"""Makes each dimension of a TensorShape a number or None inside this context, also within `dimensions_of_tf1`."""


def static_size(value: Any, axis: int) -> int | None:
    """Return the size of an axis of a tensor or shape, in a source for either TensorFlow; None: it is not known before
    a step.
    """
    shape = getattr(value, "shape", value)
    if shape.rank is None:
        return None
    size = shape[axis]
    found: int | None = getattr(size, "value", size)
    return found


def size_of(tensor: Any, axis: int) -> Any:
    """Return the size of an axis of a tensor: a number, or an int32 scalar if it is not known before a step."""
    size = static_size(tensor, axis)
    if size is not None:
        return size
    import tensorflow as tf

    return tf.shape(tensor)[axis]


def connect_the_coordinator_alone(strategy: Any, fitted: Callable[[Any], Any], keeping: Callable[[Any], Any]) -> None:
    """Make the class `strategy`, ParameterServerStrategy, constructible in every task of a cluster, like other
    strategies.

    TensorFlow takes every process that constructs one for the coordinator, so a worker would listen at the chief's
    address or wait for itself.

    Private: `_connect_to_cluster`, called by the constructor. When it moves: refuse the strategy in tasks other than
    the chief.

    Args:
      strategy: the class, which is changed.
      fitted: cluster resolver -> the resolver to use.
      keeping: that resolver -> context manager around the connection.
    """
    own_init = strategy.__init__

    @functools.wraps(own_init)
    def init(self: Any, cluster_resolver: Any, variable_partitioner: Any = None) -> None:
        resolver = fitted(cluster_resolver)
        if resolver.task_type in ("worker", "ps", "evaluator"):
            self._connect_to_cluster = lambda coordinator_name: None
            own_init(self, resolver, variable_partitioner)
        else:
            with keeping(resolver):
                own_init(self, resolver, variable_partitioner)

    strategy.__init__ = init


@contextlib.contextmanager
def operators_of_tf1(*, dimensions: bool) -> Iterator[None]:
    """Make `==` compare tensors and variables by identity, so that they can be dict keys, inside this context.

    Args:
      dimensions: each dimension of a TensorShape has the attribute `value`, too.

    Private: `Tensor._USE_EQUALITY` and `_TENSORSHAPE_V2_OVERRIDE`, set by `tf.compat.v1.disable_tensor_equality` and
    `disable_v2_tensorshape`; nothing public reads them. When they move: call these functions and their opposites.
    """
    shapes = dimensions_of_tf1() if dimensions else contextlib.nullcontext()
    with _by_identity(), shapes:
        yield


# --- tf.contrib -------------------------------------------------------------------------------------------------------


class _ArgStack(threading.local):
    """The argument scopes of a thread. Replicas run model_fn at the same time, so each thread needs its own."""

    def __init__(self) -> None:
        self.stack: list[dict[Any, Any]] = [{}]


@functools.cache
def prepare_slim() -> None:
    """Import tf_slim 1.1.0, which was written for TensorFlow 2.3, and give its modules the names that TensorFlow has
    moved.

    Only tf_slim's modules see these names.

    Private: `tensorflow.python.layers.normalization` loads `tf_keras.legacy_tf_layers.normalization`, which is
    `tf_keras.src.legacy_tf_layers.normalization` in tf_keras 2.21; `tf_slim.ops.arg_scope._get_arg_stack`, one stack
    for all threads. This is tf_slim's last release. When a module in `_MOVED` has its name again: remove the entry.

    Raises:
      ModuleNotFoundError: tf_slim or tf_keras is not installed.
    """
    from tensorflow.python.layers import normalization

    normalization.normalization = importlib.import_module("tf_keras.src.legacy_tf_layers.normalization")
    slim = importlib.import_module("tf_slim")
    for part in pkgutil.walk_packages(slim.__path__, "tf_slim."):
        if not part.name.endswith(("_test", "test_utils")):
            importlib.import_module(part.name)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tf_slim":
            _give_moved_names(module)
    arg_stack = _ArgStack()
    sys.modules["tf_slim.ops.arg_scope"].__dict__["_get_arg_stack"] = lambda: arg_stack.stack


_MOVED = {
    "tensorflow.python.framework.ops": ("Tensor", "IndexedSlices"),
    "tensorflow.python.ops.array_ops": ("stack", "unstack"),
    "tensorflow.python.ops.control_flow_ops": ("Assert", "case", "cond", "while_loop"),
}
"""Module of TensorFlow 2.3 -> its names that tf_slim uses, and that are elsewhere now; tf.compat.v1 has them."""


def _give_moved_names(module: types.ModuleType) -> None:
    """Let a module of tf_slim find in the modules of TensorFlow that it uses what they had in TensorFlow 2.3."""
    v1 = importlib.import_module("tensorflow.compat.v1")
    for key, value in list(vars(module).items()):
        if not isinstance(value, types.ModuleType):
            continue
        if value.__name__ in _MOVED:
            names = {name: getattr(v1, name) for name in _MOVED[value.__name__]}
            setattr(module, key, Overlay(value, **names))
        elif value.__name__ == "tensorflow.python.ops.variable_scope":
            setattr(module, key, Overlay(value, variable=v1.Variable))
