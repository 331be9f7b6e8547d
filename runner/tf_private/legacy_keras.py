"""Keras 2 (the package tf_keras, and `tensorflow.python.keras`): whether `tf.keras` is Keras 2, and how it treats the
graph of a trace. Also the modules of Keras 3 that are imported only when they are used.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
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


def installation() -> str:
    """Return the command that installs tf_keras, and what it does to a TensorFlow that is newer than any tf_keras."""
    command = "pip install 'estimator-runner[classic]'"
    try:
        version = metadata.version("tensorflow")
    except metadata.PackageNotFoundError:
        return command
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) <= (2, 21):
        return command
    return f"{command}, in another environment: it takes TensorFlow {version} back to 2.21"


def keras_2_of_graphs(*, is_eager_outside: bool) -> contextlib.AbstractContextManager[None]:
    """Control what tf_keras and the copy of Keras 2 in TensorFlow assume about the graph of a trace, inside this
    context.

    They recognize graphs of wrap_function by name, and would mix their behavior for eager programs and for graphs until
    they fail with a RecursionError.

    Args:
      is_eager_outside: assume an eager program around the graph. False: assume a TensorFlow 1 graph, as in
        tf.estimator: `keras.Input` is a placeholder, and model_fn can build models from layers. As always with such
        graphs, tf_keras models that were made outside of model_fn cannot be used afterwards.

    Private, in tf_keras 2.21: `tf` and `tf1` of `base_layer_utils`, whose `executing_eagerly_outside_functions` it
    calls; `_UNSAFE_GRAPH_OP_LAYER_CREATION`, which uses constants between layers without evaluating them in a session;
    `tf` of `legacy_tf_layers.base` and `metrics.base_metric`. When they move: see what `backend.placeholder` checks. In
    TensorFlow 2.21: `tensorflow.python.keras`, whose modules call the same function by their `ops`.
    """
    in_tensorflow = _in_tensorflow(is_eager_outside)
    if "tf_keras" not in sys.modules and not (is_asked_for(os.environ) and is_installed()):
        return all_replaced(*in_tensorflow)
    from tf_keras.src.engine import base_layer_utils

    name = "executing_eagerly_outside_functions"
    modules = {id(module): module for module in (base_layer_utils.tf1, base_layer_utils.tf.compat.v1)}
    # Otherwise tf.layers with a regularizer expects variables of a v1 graph.
    layers: Any = importlib.import_module("tf_keras.src.legacy_tf_layers.base")
    v1 = Overlay(layers.tf.compat.v1, executing_eagerly_outside_functions=lambda: True)
    # In such a graph the update of a user's metric would be a tf.function, whose writes cannot be seen from outside.
    metrics: Any = importlib.import_module("tf_keras.src.metrics.base_metric")
    replacements: list[tuple[Any, str, Any]] = [*in_tensorflow]
    replacements += [(module, name, lambda: is_eager_outside) for module in modules.values()]
    replacements.append((base_layer_utils, "_UNSAFE_GRAPH_OP_LAYER_CREATION", True))
    replacements.append((layers, "tf", Overlay(layers.tf, compat=Overlay(layers.tf.compat, v1=v1))))
    replacements.append((metrics, "tf", Overlay(metrics.tf, function=lambda update: update)))
    return all_replaced(*replacements)


def _in_tensorflow(is_eager_outside: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace in the modules of `tensorflow.python.keras`, which TensorFlow imports itself."""
    from tensorflow.python.framework import ops

    ops_seen = Overlay(ops, executing_eagerly_outside_functions=lambda: is_eager_outside)
    # A list of the names alone, not of (name, module) pairs: at each trace, thousands of pairs would set off searches
    # for garbage.
    names = [name for name in list(sys.modules) if name.startswith("tensorflow.python.keras.")]
    for name in names:
        module = sys.modules.get(name)
        # Not those of tf.layers, which tf_slim uses: as above, they would expect variables of a v1 graph.
        is_of_layers = name.startswith("tensorflow.python.keras.legacy_tf_layers.")
        if not is_of_layers and getattr(module, "ops", None) is ops:
            yield module, "ops", ops_seen
        if name == "tensorflow.python.keras.engine.base_layer_utils":
            yield module, "_UNSAFE_GRAPH_OP_LAYER_CREATION", True


# --- Keras 3: modules that most programs never use

KERAS_WRAPPERS = ("keras.wrappers", "keras._tf_keras.keras.wrappers")
"""The modules because of which `import keras` imports scikit-learn and SciPy, a sixth of the CPU time of the import of
TensorFlow (Keras 3.15). When they move: nothing is deferred."""


class DeferredImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder for `sys.meta_path` that executes the modules `names` when a program first uses one of their names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            self._loaders[fullname] = found.loader
            found.loader = self
        return found

    def exec_module(self, module: types.ModuleType) -> None:
        lock = threading.RLock()
        loader = self._loaders[module.__name__]

        def load(name: str) -> Any:
            # Tools such as `inspect` ask every module for names like __wrapped__.
            if name.startswith("__") and name != "__all__":
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            with lock:
                if vars(module).pop("__getattr__", None) is not None:
                    loader.exec_module(module)
            return getattr(module, name)

        module.__getattr__ = load  # type: ignore[method-assign]
