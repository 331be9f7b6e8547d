"""What Python operators meant in the graph of TF 1, for as long as code that was written for it is called."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from runner.classic.compat import install
from runner.tf_private import tf_estimator


def as_classic(model_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`model_fn`, which is called with tensors and variables that can be keys of a dict, and are equal to themselves
    only, as they were in the graph of an Estimator. Its hooks are called so, too.

    After `tf.disable_v2_behavior()` the dimensions of shapes have a `value`, too.
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
    """Return `input_fn` with elements of shapes that have a `value` after `tf.disable_v2_behavior()`, also in its
    datasets' functions.
    """
    if install.called.isdisjoint(install.SHAPES):
        return input_fn

    def called(*args: Any, **kwargs: Any) -> Any:
        with tf_estimator.dimensions_of_tf1():
            return input_fn(*args, **kwargs)

    called.__signature__ = inspect.signature(input_fn)  # type: ignore[attr-defined]
    return functools.wraps(getattr(input_fn, "func", input_fn))(called)


def value_of(element: Any) -> Any:
    """`element.value`: of a shape's element in a file of TensorFlow 1, which is a number or None where all is eager."""
    return element if element is None or type(element) is int else element.value


def _operators() -> contextlib.AbstractContextManager[None]:
    return tf_estimator.operators_of_tf1(dimensions=not install.called.isdisjoint(install.SHAPES))
