"""Report whether `tf.keras` is Keras 2, the package tf_keras: the environment says it when TensorFlow is imported."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from runner.tf_private.replaced import Overlay, replaced

VARIABLE = "TF_USE_LEGACY_KERAS"


def is_asked_for(env: Mapping[str, str]) -> bool:
    """Report whether TensorFlow 2.21 would make it Keras 2 in this environment."""
    return env.get(VARIABLE) in ("1", "true", "True")


def is_installed() -> bool:
    return importlib.util.find_spec("tf_keras") is not None


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
    if "tf_keras" not in sys.modules and not (is_asked_for(os.environ) and is_installed()):
        yield
        return
    from tf_keras.src.engine import base_layer_utils

    name = "executing_eagerly_outside_functions"
    modules = {id(module): module for module in (base_layer_utils.tf1, base_layer_utils.tf.compat.v1)}
    with contextlib.ExitStack() as stack:
        for module in modules.values():
            stack.enter_context(replaced(module, name, lambda: is_eager_outside))
        stack.enter_context(replaced(base_layer_utils, "_UNSAFE_GRAPH_OP_LAYER_CREATION", True))
        # tf.layers with a regularizer would look for variables of a v1 graph, and there are none.
        layers: Any = importlib.import_module("tf_keras.src.legacy_tf_layers.base")
        v1 = Overlay(layers.tf.compat.v1, executing_eagerly_outside_functions=lambda: True)
        stack.enter_context(replaced(layers, "tf", Overlay(layers.tf, compat=Overlay(layers.tf.compat, v1=v1))))
        yield
