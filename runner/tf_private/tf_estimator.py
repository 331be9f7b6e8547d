"""Private names of TensorFlow and tf_keras that the classic API needs; no other file of this package has any.

Written against TensorFlow 2.21 and tf_keras 2.21. tests/classic/compat/test_classic_names.py fails first, and by name,
when one moves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
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
