"""Set the classic API's names, such as `tf.estimator` and `tf.contrib`, on TensorFlow as soon as it is imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from runner.classic.compat import module_paths, names
from runner.classic.contrib import modules as contrib
from runner.distribute.cluster import Cluster
from runner.tf_private import legacy_keras, tf_estimator

_log = logging.getLogger(__name__)

_OUT_OF_EAGER = frozenset({"disable_v2_behavior", "disable_eager_execution"})
"""Functions of TensorFlow with which a script switches to graph mode."""

SHAPES = ("disable_v2_behavior", "disable_v2_tensorshape")
"""Functions of TensorFlow after which the dimensions of a shape have a `value`, as in TensorFlow 1."""

SWITCHES = (
    *SHAPES, "disable_eager_execution", "disable_control_flow_v2", "disable_resource_variables",
    "disable_tensor_equality",
)  # fmt: skip
"""Functions that scripts for TensorFlow 1 call first. They have no effect here, because the engine needs the behavior
of TensorFlow 2."""

called: set[str] = set()
"""The SWITCHES that were called. Those of SHAPES are added if a source is recognized as TensorFlow 1, too."""

_warned: set[str] = set()
"""The first of SWITCHES that was called; a warning is logged only for this one."""

_INITIALIZERS = (
    "global_variables_initializer", "initialize_all_variables", "initialize_local_variables", "initialize_variables",
    "local_variables_initializer", "variables_initializer",
)  # fmt: skip
"""Functions whose operations initialize variables. In model_fn they return a no-op: the runner sets the values."""

_PLACEHOLDERS = ("placeholder", "sparse_placeholder")
"""Functions that scripts call outside of graphs, to describe requests for `build_raw_serving_input_receiver_fn`."""


importing_tensorflow: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
"""Returns a context manager that is entered while TensorFlow is imported."""


def install() -> None:
    """Set the classic API's names on TensorFlow's modules: at once if a module is already imported, else on import."""
    if "tensorflow" not in sys.modules and legacy_keras.is_installed():
        os.environ.setdefault(legacy_keras.VARIABLE, "1")
    later = {}
    for name, put in _PUTS.items():
        if name in sys.modules:
            put(sys.modules[name])
        else:
            later[name] = put
    for kind in (module_paths.ModulePaths, module_paths.NestedCompat):
        if not any(isinstance(finder, kind) for finder in sys.meta_path):
            sys.meta_path.insert(0, kind())
    contrib.install()
    if later and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(later))


def _put_on_tensorflow(tf: Any) -> None:
    tf_estimator.connect_the_coordinator_alone(tf.distribute.ParameterServerStrategy, _with_coordinator, _kept_local)
    _put_on_v2(tf)
    _put_on_v2(tf.compat.v2)
    _put_on_v1(tf.compat.v1)
    _put_on_nested(tf.compat)
    for at in ("tensorflow.estimator", "tensorflow.compat.v2.estimator"):
        _make_importable(at, _V2)


def _put_on_v2(v2: Any) -> None:
    v2.estimator = _V2
    tf_estimator.put_on_keras(v2, "estimator", _KERAS)


def _put_on_v1(v1: Any) -> None:
    v1.estimator = _V1
    v1.contrib = contrib.root()
    _make_importable("tensorflow.compat.v1.estimator", _V1)
    tf_estimator.put_on_keras(v1, "estimator", _KERAS)
    v1.layers = LegacyKeras("layers", "tf.layers")
    v1.nn.rnn_cell = LegacyKeras("rnn_cell", "tf.nn.rnn_cell")
    v1.tpu.CrossShardOptimizer = cross_shard_optimizer
    v1.train.ProfilerHook = profiler_hook
    tf_estimator.state_without_a_graph(v1.train.Optimizer)
    _put_strategies(v1.distribute, sys.modules["tensorflow"].distribute)
    for name in _INITIALIZERS:
        setattr(v1, name, _where_sessions_are(getattr(v1, name)))
    for name in _PLACEHOLDERS:
        setattr(v1, name, _as_in_a_graph(getattr(v1, name)))
    for name in SWITCHES:
        setattr(v1, name, _without_effect(name))
    for name in ("distribute", "nn", "tpu", "train"):  # or importing them would replace them by another copy
        sys.modules.setdefault(f"tensorflow.compat.v1.{name}", getattr(v1, name))


def _put_on_nested(compat: Any) -> None:
    """Replace nested modules such as `tf.compat.v1.compat.v2`, which TensorFlow loads as separate modules, by
    `tf.compat.v1` and `tf.compat.v2`.

    The classic API's names are also set on the separate modules, for code that has already imported them.
    """
    for name, nested in list(sys.modules.items()):
        inner = module_paths.NESTED_PRIVATE.fullmatch(name)
        if inner is None:
            continue
        if inner["version"] is None:
            for version in ("v1", "v2"):
                setattr(nested, version, getattr(compat, version))
        else:
            _PUTS[f"tensorflow.compat.{inner['version']}"](nested)
            sys.modules[name] = getattr(compat, inner["version"])


def _make_importable(at: str, module: Names) -> None:
    """Make `from tensorflow.estimator import ...` and `from tensorflow.estimator.export import ...` work."""
    sys.modules[at] = module
    for name in module.modules():
        _make_importable(f"{at}.{name}", getattr(module, name))


def _put_strategies(old: Any, new: Any) -> None:
    """Replace the strategies of tf.compat.v1, which need TensorFlow 1's graphs and share keys of collectives, by those
    of TensorFlow 2 with the same arguments.
    """
    old.MirroredStrategy, old.OneDeviceStrategy = new.MirroredStrategy, new.OneDeviceStrategy
    old.experimental.CentralStorageStrategy = new.experimental.CentralStorageStrategy
    old.experimental.MultiWorkerMirroredStrategy = new.experimental.MultiWorkerMirroredStrategy


def _place(resolver: Any) -> Cluster:
    """Return the cluster and task of this process from a resolver, without the evaluator, which has no server."""
    tasks = {kind: listed for kind, listed in resolver.cluster_spec().as_dict().items() if kind != "evaluator"}
    return Cluster(resolver.task_type, int(resolver.task_id or 0), tasks)


def _with_coordinator(resolver: Any) -> Any:
    """Return a resolver for the same cluster; if that has no chief, worker 0 becomes the chief.

    A resolver without a task type is returned unchanged: it belongs to a coordinator outside of the cluster.
    """
    from tensorflow import distribute, train

    if not resolver.task_type:
        return resolver
    place = _place(resolver).with_chief()
    return distribute.cluster_resolver.SimpleClusterResolver(
        train.ClusterSpec({kind: list(listed) for kind, listed in place.tasks.items()}),
        task_type=place.task_type,
        task_id=place.task_index,
        rpc_layer=resolver.rpc_layer or "grpc",
    )


def _kept_local(resolver: Any) -> contextlib.AbstractContextManager[None]:
    from runner.distribute.grpc_server import kept_local

    return kept_local(_place(resolver))


def cross_shard_optimizer(opt: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `opt` unchanged, because the runner itself sums the gradients of replicas."""
    return opt


def profiler_hook(*args: Any, **kwargs: Any) -> Any:
    """Return a `runner.classic.hooks.ProfilerHook`. TensorFlow's own cannot be made outside of a graph."""
    return names.lookup(names.NAMES, "ProfilerHook", "tf.train.ProfilerHook")(*args, **kwargs)


def _where_sessions_are(initializer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `initializer` that returns a no-op in a graph that the runner traces."""

    @functools.wraps(initializer)
    def made(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        traced = getattr(tf.compat.v1.get_default_graph(), "building_function", False)
        return tf.no_op() if traced else initializer(*args, **kwargs)

    return made


def _as_in_a_graph(placeholder: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `placeholder` that can be called outside of graphs after a switch to graph mode: it then
    makes the placeholder in a new graph.

    In input functions nothing changes: the runner calls an input function in a graph if it makes placeholders.
    """

    @functools.wraps(placeholder)
    def made(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        from runner.data.dataset_adapter import calls_input_fn

        outside = tf.executing_eagerly() and not called.isdisjoint(_OUT_OF_EAGER) and not calls_input_fn()
        with tf.Graph().as_default() if outside else contextlib.nullcontext():
            return placeholder(*args, **kwargs)

    return made


def _without_effect(name: str) -> Callable[[], None]:
    def said() -> None:
        called.add(name)
        if not _warned:  # scripts call several of these functions in several files: warn once
            _warned.add(name)
            _log.warning(
                "tf.%s() has no effect: model_fn is traced as a TensorFlow 1 graph anyway, and everything else is "
                "eager. Build other graphs under `with tf.Graph().as_default():`.",
                name,
            )

    return said


class Names(types.ModuleType):
    """A module that imports the objects of its names when they are first used.

    Args:
      shown: the module's name as users write it.
      table: name -> "module:attribute"; `export.ExportOutput` is a name in the submodule `export`.
      prefix: prefix of those names in the table that belong to this module, such as `export.`.
    """

    def __init__(self, shown: str, table: Mapping[str, str], prefix: str = "") -> None:
        super().__init__(shown, f"{shown} of TensorFlow 2.15, on the runner.")
        self._table, self._prefix = table, prefix
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self._prefix}{name}"
        shown = f"{self.__name__}.{name}"
        if name in self.modules():
            found: Any = Names(shown, self._table, f"{full}.")
        else:
            found = names.lookup(self._table, full, shown)
        setattr(self, name, found)
        return found

    def modules(self) -> set[str]:
        """Return the names of its submodules."""
        own = (name.removeprefix(self._prefix) for name in (*self._table, *names.GONE) if name.startswith(self._prefix))
        return {name.partition(".")[0] for name in own if "." in name}

    def __dir__(self) -> list[str]:
        own = [name.removeprefix(self._prefix) for name in self._table if name.startswith(self._prefix)]
        return sorted({name.partition(".")[0] for name in own})


class LegacyKeras(types.ModuleType):
    """`tf.layers` or `tf.nn.rnn_cell`, from tf_keras. TensorFlow itself has it only with TF_USE_LEGACY_KERAS=1."""

    def __init__(self, part: str, shown: str) -> None:
        super().__init__(shown)
        self._part = part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        return getattr(self._module(), name)

    def __dir__(self) -> list[str]:
        return dir(self._module())

    def _module(self) -> Any:
        try:
            return tf_estimator.legacy_keras(self._part)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "tf_keras":
                raise
            raise ImportError(
                f"{self.__name__} is part of Keras 2, the package tf_keras: pip install 'tf-runner[classic]'"
            ) from None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions for modules after their import, to set the classic API's names on them.

    Args:
      puts: module name -> function that is called with the module.
    """

    def __init__(self, puts: Mapping[str, Callable[[Any], None]]) -> None:
        self._puts = dict(puts)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        put = self._puts.get(fullname)  # finding a spec does not import the module
        if put is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module, put)  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[types.ModuleType], None], put: Callable[[Any], None], module: types.ModuleType) -> None:
    """Execute a module with `execute`, its loader's function; then set the classic API's names on it with `put`."""
    with importing_tensorflow():
        execute(module)
    put(sys.modules[module.__name__])  # TensorFlow replaces the module while it is imported


_V2 = Names("tf.estimator", names.NAMES)
_V1 = Names("tf.compat.v1.estimator", names.V1_NAMES)
_KERAS = Names("tf.keras.estimator", names.KERAS_NAMES)

# TensorFlow 2.21: `import tensorflow.compat.v1` loads the file of `tf.compat.v1` again, as a second module.
_PUTS: Mapping[str, Callable[[Any], None]] = {
    "tensorflow": _put_on_tensorflow,
    "tensorflow.compat.v1": _put_on_v1,
    "tensorflow.compat.v2": _put_on_v2,
}
