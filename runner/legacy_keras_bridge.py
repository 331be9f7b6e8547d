"""What tf_keras (Keras 2) takes for granted during a trace: the part of `runner.bridge` that touches its private names.

Written against tf_keras 2.21. `tests/test_bridge.py` fails first, and by name, when one moves.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_MODULES = (
    "tf_keras.src.backend",
    "tf_keras.src.engine.functional",
    "tf_keras.src.engine.input_layer",
    "tf_keras.src.engine.node",
    "tf_keras.src.engine.sequential",
)
_LAYERS = "tf_keras.src.legacy_tf_layers.base"


@contextlib.contextmanager
def models_of_graph() -> Iterator[None]:
    """While a step is traced, `tf_keras.Input` is a placeholder of its graph and a model has its updates, as in 2.15.

    tf_keras takes the graph of wrap_function for one of v1 when it chooses the class of a layer or model, and for one
    of v2 when it makes an Input; calling the first on the second never ends (RecursionError).
    Private: the modules above, which ask `tf.compat.v1.executing_eagerly_outside_functions`; tf_keras knows the graph
    by its name. When they move: leave this out; models of tf_keras are then made outside of model_fn.
    Does nothing unless tf_keras is there, or is what `tf.keras` stands for.
    """
    if "tf_keras" not in sys.modules and not _is_tf_keras():
        yield
        return
    modules: list[Any] = [importlib.import_module(name) for name in _MODULES]
    own = modules[0].tf

    def executing_eagerly_outside_functions() -> bool:
        graph = tf.compat.v1.get_default_graph()
        is_traced = getattr(graph, "name", "").startswith("wrapped_function") and not tf.executing_eagerly()
        return not is_traced and own.compat.v1.executing_eagerly_outside_functions()

    for module in modules:
        module.tf = _answering(own, executing_eagerly_outside_functions)
    # tf.layers with a regularizer look for variables of a v1 graph otherwise, and there are none.
    layers: Any = importlib.import_module(_LAYERS)
    layers.tf = _answering(own, lambda: True)
    try:
        yield
    finally:
        for module in (*modules, layers):
            module.tf = own


def _answering(module: Any, executing_eagerly_outside_functions: Callable[[], bool]) -> Any:
    """TensorFlow, with an answer of its own."""
    v1 = _Seen(module.compat.v1, executing_eagerly_outside_functions=executing_eagerly_outside_functions)
    return _Seen(module, compat=_Seen(module.compat, v1=v1))


class _Seen:
    """A module with some names of its own."""

    def __init__(self, module: Any, **own: Any) -> None:
        self._module = module
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _is_tf_keras() -> bool:
    chosen = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
    return chosen and importlib.util.find_spec("tf_keras") is not None
