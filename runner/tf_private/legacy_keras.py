"""Keras 2 (the package tf_keras): whether `tf.keras` is Keras 2, and how it treats the graph of a trace."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from runner.tf_private.replaced import Overlay, all_replaced

VARIABLE = "TF_USE_LEGACY_KERAS"


def is_asked_for(env: Mapping[str, str]) -> bool:
    """Report whether `tf.keras` is Keras 2 with these environment variables, as TensorFlow 2.21 reads them at
    import.
    """
    return env.get(VARIABLE) in ("1", "true", "True")


def is_installed() -> bool:
    return importlib.util.find_spec("tf_keras") is not None


def tf_keras_of_graphs(*, is_eager_outside: bool) -> contextlib.AbstractContextManager[None]:
    """Control what tf_keras assumes about the graph of a trace, inside this context; does nothing without tf_keras.

    It recognizes graphs of wrap_function by name, and would mix its behavior for eager programs and for graphs until it
    fails with a RecursionError.

    Args:
      is_eager_outside: assume an eager program around the graph. False: assume a TensorFlow 1 graph, as in
        tf.estimator: `keras.Input` is a placeholder, and model_fn can build models from layers. As always with such
        graphs, tf_keras models that were made outside of model_fn cannot be used afterwards.

    Private, in tf_keras 2.21: `tf` and `tf1` of `base_layer_utils`, whose `executing_eagerly_outside_functions` it
    calls; `_UNSAFE_GRAPH_OP_LAYER_CREATION`, which uses constants between layers without evaluating them in a session;
    `tf` of `legacy_tf_layers.base` and `metrics.base_metric`. When they move: see what `backend.placeholder` checks.
    """
    if "tf_keras" not in sys.modules and not (is_asked_for(os.environ) and is_installed()):
        return contextlib.nullcontext()
    from tf_keras.src.engine import base_layer_utils

    name = "executing_eagerly_outside_functions"
    modules = {id(module): module for module in (base_layer_utils.tf1, base_layer_utils.tf.compat.v1)}
    # Otherwise tf.layers with a regularizer expects variables of a v1 graph.
    layers: Any = importlib.import_module("tf_keras.src.legacy_tf_layers.base")
    v1 = Overlay(layers.tf.compat.v1, executing_eagerly_outside_functions=lambda: True)
    # In such a graph the update of a user's metric would be a tf.function, whose writes cannot be seen from outside.
    metrics: Any = importlib.import_module("tf_keras.src.metrics.base_metric")
    return all_replaced(
        *((module, name, lambda: is_eager_outside) for module in modules.values()),
        (base_layer_utils, "_UNSAFE_GRAPH_OP_LAYER_CREATION", True),
        (layers, "tf", Overlay(layers.tf, compat=Overlay(layers.tf.compat, v1=v1))),
        (metrics, "tf", Overlay(metrics.tf, function=lambda update: update)),
    )
