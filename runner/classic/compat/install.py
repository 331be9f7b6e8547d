"""Set the classic names on TensorFlow as soon as it is imported."""

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
"""TF 1's switches to graph mode."""

SHAPES = ("disable_v2_behavior", "disable_v2_tensorshape")
"""TF 1's switches that give the dimensions of a shape a `value`."""

SWITCHES = (
    *SHAPES, "disable_eager_execution", "disable_control_flow_v2", "disable_resource_variables",
    "disable_tensor_equality",
)  # fmt: skip
"""Switches that TF 1 scripts call first. They have no effect here, because the runner cannot run under them."""

called: set[str] = set()
"""The switches that were called; those of SHAPES also if a source is recognized as TensorFlow 1."""

_warned: set[str] = set()
"""The switch that was logged; only the first one is."""

_INITIALIZERS = (
    "global_variables_initializer", "initialize_all_variables", "initialize_local_variables", "initialize_variables",
    "local_variables_initializer", "variables_initializer",
)  # fmt: skip
"""Initializers for a Scaffold. They do nothing in model_fn, since the runner gives variables their values itself."""

_PLACEHOLDERS = ("placeholder", "sparse_placeholder")
"""Functions that scripts call outside of graphs, for `build_raw_serving_input_receiver_fn`."""


importing_tensorflow: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
"""Returns a context that is entered while TensorFlow is imported."""


def install() -> None:
    """Set the names on TensorFlow: now on modules that are imported already, on others when they are imported."""
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
    """Make `tf.compat.v1.compat.v1`, a separate module in TensorFlow, and all below it the same as `tf.compat.v1`.

    Code that imported such a module earlier sees the names as well.
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
    """Replace TF 1's strategies, which need its graphs and share keys of collectives, by today's; the arguments are
    the same.
    """
    old.MirroredStrategy, old.OneDeviceStrategy = new.MirroredStrategy, new.OneDeviceStrategy
    old.experimental.CentralStorageStrategy = new.experimental.CentralStorageStrategy
    old.experimental.MultiWorkerMirroredStrategy = new.experimental.MultiWorkerMirroredStrategy


def _place(resolver: Any) -> Cluster:
    """Return the task of this process according to a cluster resolver, without the evaluator, which serves no
    requests.
    """
    tasks = {kind: listed for kind, listed in resolver.cluster_spec().as_dict().items() if kind != "evaluator"}
    return Cluster(resolver.task_type, int(resolver.task_id or 0), tasks)


def _with_coordinator(resolver: Any) -> Any:
    """Return a resolver for the same cluster in which worker 0 is the coordinator if there is no chief.

    A resolver without a task type is returned unchanged: its process is outside of the cluster and coordinates it.
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
    """Return `opt` unchanged: the runner sums the gradients of replicas itself."""
    return opt


def profiler_hook(*args: Any, **kwargs: Any) -> Any:
    """Return a `runner.classic.hooks.ProfilerHook`; TensorFlow's cannot be made without a session's graph."""
    return names.lookup(names.NAMES, "ProfilerHook", "tf.train.ProfilerHook")(*args, **kwargs)


def _where_sessions_are(initializer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an initializer of variables so that it does nothing in a graph that the runner traces."""

    @functools.wraps(initializer)
    def made(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        traced = getattr(tf.compat.v1.get_default_graph(), "building_function", False)
        return tf.no_op() if traced else initializer(*args, **kwargs)

    return made


def _as_in_a_graph(placeholder: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a placeholder function so that, after a switch to graph mode, it can be called outside of graphs: it makes
    its own.

    Input functions are not affected; the runner calls one in a graph if it needs one.
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
        if not _warned:  # once is enough: every second file of such code calls it
            _warned.add(name)
            _log.warning(
                "tf.%s() has no effect outside of model_fn, which is traced as a TensorFlow 1 graph anyway: everything "
                "else is eager. There, build graphs under `with tf.Graph().as_default():`.",
                name,
            )

    return said


class Names(types.ModuleType):
    """A module that looks its names up in a table when they are used.

    Args:
      shown: the module's name as users write it.
      table: name -> "module:attribute"; a dot in a name makes a module inside.
      prefix: of the table's names that belong to this module.
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
        """Return the names of the modules in it."""
        own = (name.removeprefix(self._prefix) for name in (*self._table, *names.GONE) if name.startswith(self._prefix))
        return {name.partition(".")[0] for name in own if "." in name}

    def __dir__(self) -> list[str]:
        own = [name.removeprefix(self._prefix) for name in self._table if name.startswith(self._prefix)]
        return sorted({name.partition(".")[0] for name in own})


class LegacyKeras(types.ModuleType):
    """A module of tf_keras that TensorFlow itself provides only with TF_USE_LEGACY_KERAS=1."""

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
    """Sets the names on modules when they are imported.

    Args:
      puts: module name -> function to call with the module after its import.
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
    """Execute the module with its own loader, and then set the names on it."""
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
