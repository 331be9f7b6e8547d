"""Private names of TensorFlow and tf_keras that the classic API needs; no other file of this package has any.

Written against TensorFlow 2.21 and tf_keras 2.21. tests/classic/compat/test_classic_names.py fails first, and by name,
when one moves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from runner.tf_private.replaced import EnteredOnce

_LEGACY = "tf_keras.api._v1.keras.__internal__.legacy"


def legacy_keras(part: str) -> Any:
    """The module of tf_keras that TensorFlow serves as `tf.compat.v1.layers` ("layers") or `tf.nn.rnn_cell`
    ("rnn_cell"), but only with TF_USE_LEGACY_KERAS=1.

    When it moves: `tensorflow/_api/v2/compat/v1/__init__.py` names the new place.
    Raises: ModuleNotFoundError: tf_keras is not installed.
    """
    return importlib.import_module(f"{_LEGACY}.{part}")


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Has what runs in it be eager in a script's own `with tf.Graph().as_default():`, too: tf.estimator made another
    graph for each call. Also a decorator.

    Private: `context.eager_mode`, unchanged since TF 1.5; `tf.init_scope` stays in a graph that is no function's. When
    it moves: run it in a new thread, which begins eagerly.
    """
    from tensorflow.python.eager import context

    with contextlib.nullcontext() if context.executing_eagerly() else context.eager_mode():
        yield


def put_on_keras(module: Any, name: str, value: Any) -> None:
    """Makes `<module>.keras.<name>` be `value`, and does not load Keras for that.

    Private: `LazyLoader._load`, which loads Keras when it is first used and puts the module in its own place.
    When it moves: `tf.keras.<name> = value` loads Keras at once, which takes a second.
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
    """Has `_get_non_slot_variable(name, graph)` of an optimizer of the user's own find what it made, as in a session.

    Private: `Optimizer._get_non_slot_variable` and `_non_slot_dict`, whose keys have no graph where TensorFlow is
    eager outside of functions; such optimizers ask with the graph of model_fn, since `tf.executing_eagerly()` is False
    in it. Unchanged since 1.7. When it moves: an optimizer with `graph = None` works.
    """
    find = optimizer._get_non_slot_variable

    def found(self: Any, name: str, graph: Any = None) -> Any:
        variable = find(self, name, graph)
        return find(self, name) if variable is None else variable

    optimizer._get_non_slot_variable = found


# By mock, which imports TensorFlow late, and puts back what was there also where model_fn has set it to something else.
_SHAPES = "tensorflow.python.framework.tensor_shape"
_by_identity = EnteredOnce(lambda: mock.patch("tensorflow.Tensor._USE_EQUALITY", False))
_with_dimensions = EnteredOnce(lambda: mock.patch(f"{_SHAPES}._TENSORSHAPE_V2_OVERRIDE", False))


def connect_the_coordinator_alone(strategy: Any, fitted: Callable[[Any], Any], keeping: Callable[[Any], Any]) -> None:
    """Has `strategy`, the class ParameterServerStrategy, be made in every task of a cluster, as other strategies are.

    TensorFlow's takes each process that makes one for the coordinator: a worker then listens at the chief's address,
    or waits for itself.
    Private: `_connect_to_cluster`, called by the constructor. When it moves: the constructor of any other task is to
    say that the strategy is made by the chief alone.

    Args:
      fitted: makes of a cluster resolver the one for the strategy.
      keeping: makes of that a context manager for the connection.
    """
    made = strategy.__init__

    @functools.wraps(made)
    def make(self: Any, cluster_resolver: Any, variable_partitioner: Any = None) -> None:
        resolver = fitted(cluster_resolver)
        if resolver.task_type in ("worker", "ps", "evaluator"):
            self._connect_to_cluster = lambda coordinator_name: None
            made(self, resolver, variable_partitioner)
        else:
            with keeping(resolver):
                made(self, resolver, variable_partitioner)

    strategy.__init__ = make


def dimensions_of_tf1() -> contextlib.AbstractContextManager[Any]:
    """Meanwhile the elements of a shape have a `value`, as `operators_of_tf1` says."""
    return _with_dimensions()


@contextlib.contextmanager
def operators_of_tf1(*, dimensions: bool) -> Iterator[None]:
    """Meanwhile `==` compares tensors and variables by identity, so that they can be keys; with `dimensions` the
    elements of a shape have a `value`.

    Private: `Tensor._USE_EQUALITY` and `_TENSORSHAPE_V2_OVERRIDE`, which `tf.compat.v1.disable_tensor_equality` and
    `disable_v2_tensorshape` set, and which nothing public reads. When they move: call these two and their opposites.
    """
    with _by_identity(), dimensions_of_tf1() if dimensions else contextlib.nullcontext():
        yield


# --- tf.contrib -------------------------------------------------------------------------------------------------------


def lookup_tables() -> Any:
    """Return the module with the functions of tf.contrib.lookup: index_table_from_file, IdTableWithHashBuckets.

    Private: `tensorflow.python.ops.lookup_ops`, where they have been since TF 1.8 under no public name. When it moves:
    tf.compat.v1.lookup has StaticHashTable and StaticVocabularyTable, which they are made of.
    """
    return importlib.import_module("tensorflow.python.ops.lookup_ops")


class _ArgStack(threading.local):
    """The argument scopes of a thread: replicas run model_fn at the same time, each with its own."""

    def __init__(self) -> None:
        self.stack: list[dict[Any, Any]] = [{}]


class _WithMoved(types.ModuleType):
    """A module of TensorFlow with names that it has no more."""

    def __init__(self, module: types.ModuleType, moved: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(moved)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@functools.cache
def prepare_slim() -> None:
    """Import tf_slim 1.1.0, and make its modules alone find names that TensorFlow has moved since.

    Private: `tensorflow.python.layers.normalization` loads `tf_keras.legacy_tf_layers.normalization`, which tf_keras
    2.21 has as `tf_keras.src.legacy_tf_layers.normalization`; `tf_slim.ops.arg_scope._get_arg_stack`, one stack for
    all threads. tf_slim has its last release: it moves no more. When a module of `moved` has its name again, drop it.
    Raises: ModuleNotFoundError: tf_slim or tf_keras is not installed.
    """
    from tensorflow.python.layers import normalization

    normalization.normalization = importlib.import_module("tf_keras.src.legacy_tf_layers.normalization")
    slim, v1 = importlib.import_module("tf_slim"), importlib.import_module("tensorflow.compat.v1")
    for found in pkgutil.walk_packages(slim.__path__, "tf_slim."):
        if not found.name.endswith(("_test", "test_utils")):
            importlib.import_module(found.name)
    moved = {
        "tensorflow.python.framework.ops": ("Tensor", "IndexedSlices"),
        "tensorflow.python.ops.array_ops": ("stack", "unstack"),
        "tensorflow.python.ops.control_flow_ops": ("Assert", "case", "cond", "while_loop"),
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tf_slim":
            for key, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value.__name__ in moved:
                    setattr(module, key, _WithMoved(value, {one: getattr(v1, one) for one in moved[value.__name__]}))
                elif isinstance(value, types.ModuleType) and value.__name__ == "tensorflow.python.ops.variable_scope":
                    setattr(module, key, _WithMoved(value, {"variable": v1.Variable}))
    arg_stack = _ArgStack()
    sys.modules["tf_slim.ops.arg_scope"].__dict__["_get_arg_stack"] = lambda: arg_stack.stack
