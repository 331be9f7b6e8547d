"""What tf_keras (Keras 2) takes for granted during a trace: the part of `runner.bridge` that touches its private names.

Written against tf_keras 2.21. `tests/test_bridge.py` fails first, and by name, when one moves.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from runner import legacy_keras


@contextlib.contextmanager
def tf_keras_of_graphs(*, is_eager_outside: bool) -> Iterator[None]:
    """What tf_keras is told of the graph of a trace, where it has been imported or `tf.keras` would import it.

    Without `is_eager_outside` it takes it for a graph of TensorFlow 1, as tf.estimator's were: `keras.Input` is a
    placeholder, and models of layers can be made in a model_fn. Otherwise it would make half of what it makes in eager
    programs, since it knows graphs of wrap_function by their name, and fail with a RecursionError. As ever with such
    graphs, models of tf_keras that were made before, outside of model_fn, are of no use afterwards.
    Private, in tf_keras 2.21: the modules `tf` and `tf1` of `base_layer_utils`, which it asks for
    `executing_eagerly_outside_functions`; `_UNSAFE_GRAPH_OP_LAYER_CREATION`: constants between layers are taken as they
    are, and not evaluated in a session; `tf` of `legacy_tf_layers.base`. When they move: it is what
    `backend.placeholder` looks at.
    """
    if "tf_keras" not in sys.modules and not _is_tf_keras():
        yield
        return
    from tf_keras.src.engine import base_layer_utils

    name = "executing_eagerly_outside_functions"
    modules = {id(module): module for module in (base_layer_utils.tf1, base_layer_utils.tf.compat.v1)}
    with contextlib.ExitStack() as stack:
        for module in modules.values():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, lambda: is_eager_outside)
        flag = "_UNSAFE_GRAPH_OP_LAYER_CREATION"
        stack.callback(setattr, base_layer_utils, flag, getattr(base_layer_utils, flag))
        setattr(base_layer_utils, flag, True)
        # tf.layers with a regularizer would look for variables of a v1 graph, and there are none.
        layers: Any = importlib.import_module("tf_keras.src.legacy_tf_layers.base")
        stack.callback(setattr, layers, "tf", layers.tf)
        v1 = _Seen(layers.tf.compat.v1, executing_eagerly_outside_functions=lambda: True)
        layers.tf = _Seen(layers.tf, compat=_Seen(layers.tf.compat, v1=v1))
        yield


class _Seen:
    """A module with some names of its own."""

    def __init__(self, module: Any, **own: Any) -> None:
        self._module = module
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _is_tf_keras() -> bool:
    return legacy_keras.is_asked_for(os.environ) and legacy_keras.is_installed()
