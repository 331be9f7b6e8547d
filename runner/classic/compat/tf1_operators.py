"""Give tensors the operators of a TensorFlow 1 graph while a model_fn or input_fn of tf.estimator is called."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from runner.classic.compat import install
from runner.tf_private import tf_estimator


def as_classic(model_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `model_fn` during whose calls tensors have TensorFlow 1's operators: tensors and variables
    are hashable, and `==` compares identity.

    The model's hooks are called with these operators, too. After `tf.disable_v2_behavior()`, the dimensions of shapes
    also have a `value`.
    """
    if isinstance(model_fn, functools.partial):
        return functools.partial(as_classic(model_fn.func), *model_fn.args, **model_fn.keywords)

    @functools.wraps(model_fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _operators():
            return model_fn(*args, **kwargs)

    called.operators = _operators  # type: ignore[attr-defined]
    return called


def as_classic_input(input_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `input_fn` during whose calls the dimensions of shapes have a `value`, also in functions
    of its datasets. If `tf.disable_v2_behavior()` was not called, return `input_fn` itself.
    """
    if install.called.isdisjoint(install.SHAPES):
        return input_fn

    def called(*args: Any, **kwargs: Any) -> Any:
        with tf_estimator.dimensions_of_tf1():
            return input_fn(*args, **kwargs)

    called.__signature__ = inspect.signature(input_fn)  # type: ignore[attr-defined]
    return functools.wraps(getattr(input_fn, "func", input_fn))(called)


def dimension(element: Any) -> Any:
    """Return an element of a shape as in TensorFlow 1, with the attribute `value`. In TensorFlow 2 an element is a
    number or None.
    """
    return types.SimpleNamespace(value=element) if element is None or type(element) is int else element


@contextlib.contextmanager
def _operators() -> Iterator[None]:
    from runner.classic.compat import graph_variables  # imports TensorFlow

    has_dimensions = not install.called.isdisjoint(install.SHAPES)
    with tf_estimator.operators_of_tf1(dimensions=has_dimensions), graph_variables.by_name():
        yield
