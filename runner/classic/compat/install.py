"""Set the classic API's names, such as `tf.estimator` and `tf.contrib`, on TensorFlow as soon as it is imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from runner.classic.compat import estimator_paths, names, old_modules
from runner.classic.contrib import names as contrib
from runner.distribute.cluster import Cluster
from runner.tf_private import legacy_keras, tf_estimator

_log = logging.getLogger(__name__)

_SWITCHES_TO_GRAPH_MODE = frozenset({"disable_v2_behavior", "disable_eager_execution"})
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
"""The first of SWITCHES that was called, or empty. A warning is logged only for this one."""

_INITIALIZERS = (
    "global_variables_initializer", "initialize_all_variables", "initialize_local_variables", "initialize_variables",
    "local_variables_initializer", "variables_initializer",
)  # fmt: skip
"""Functions whose operations initialize variables. In model_fn they return a no-op: the runner sets the values."""

_PLACEHOLDERS = ("placeholder", "sparse_placeholder")
"""Functions that scripts call outside of graphs, to describe requests for `build_raw_serving_input_receiver_fn`."""


PRODUCERS = (
    "input_producer",
    "limit_epochs",
    "match_filenames_once",
    "range_input_producer",
    "slice_input_producer",
    "start_queue_runners",
    "string_input_producer",
)
BATCHES = (
    "batch",
    "batch_join",
    "maybe_batch",
    "maybe_batch_join",
    "maybe_shuffle_batch",
    "maybe_shuffle_batch_join",
    "shuffle_batch",
    "shuffle_batch_join",
)
"""Functions of `tf.train` that make queues."""

READERS = {
    "FixedLengthRecordReader": "fixed_length_record_reader",
    "IdentityReader": "identity_reader",
    "TFRecordReader": "tf_record_reader",
    "TextLineReader": "text_line_reader",
    "WholeFileReader": "whole_file_reader",
}
"""Classes that read from queues -> the functions of `runner.classic.compat.tf1_queues` for them."""  # fmt: skip

importing_tensorflow: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
"""Returns a context manager that is entered while TensorFlow is imported."""


def install() -> None:
    """Set the classic API's names on TensorFlow's modules: at once if a module is already imported, else on import."""
    if "tensorflow" not in sys.modules and legacy_keras.is_installed():
        # TensorFlow reads it when it is imported.
        os.environ.setdefault(legacy_keras.VARIABLE, "1")
    sys.meta_path.insert(0, legacy_keras.DeferredImports(legacy_keras.KERAS_WRAPPERS))
    sys.meta_path.insert(0, _finder)
    if "tensorflow" in sys.modules:
        _put_on_tensorflow(sys.modules["tensorflow"])
    else:
        sys.meta_path.insert(0, _AfterImport())


_VERSIONS = re.compile(r"tensorflow(\._api\.v2)?\.compat\.(v[12]\.compat\.)*(?P<version>v[12])")
"""Matches the names that `tf.compat.v1` and `tf.compat.v2` have in `sys.modules`, and their copies, such as
`tf.compat.v1.compat.v1`, which TensorFlow loads as modules of their own."""


def _put_on_tensorflow(tf: Any) -> None:
    """Set the classic API's names on the module `tensorflow`, and on all loaded copies of tf.compat.v1 and v2."""
    tf_estimator.connect_the_coordinator_alone(tf.distribute.ParameterServerStrategy, _with_coordinator, _kept_local)
    _put_on_v2(tf)
    tf_estimator.state_without_a_graph(tf.compat.v1.train.Optimizer)
    # The root logger's handlers, such as absl's since `app.run`, show TensorFlow's lines, too. If there are any besides
    # log files, TensorFlow's own handler shows nothing, or each line would appear twice.
    for handler in tf.get_logger().handlers:
        handler.addFilter(lambda record: all(isinstance(other, logging.FileHandler) for other in logging.root.handlers))
    for name in list(sys.modules):
        if match := _VERSIONS.fullmatch(name):
            version: Any = sys.modules[name]
            (_put_on_v1 if match["version"] == "v1" else _put_on_v2)(version)
            version.compat = tf.compat  # the copies that code has already imported must not lead to other copies


def _put_on_v2(v2: Any) -> None:
    v2.estimator = _finder.module("tensorflow.estimator")
    tf_estimator.put_on_keras(v2, "estimator", _finder.module("tensorflow.keras.estimator"))


def _put_on_v1(v1: Any) -> None:
    """Set the classic API's names on tf.compat.v1, and replace its functions that cannot do here what they did
    in TensorFlow 1.
    """
    v1.estimator = _finder.module(f"{_V1}.estimator")
    v1.contrib = _finder.module(contrib.ROOT)  # not tf.contrib: libraries would take this for TensorFlow 1
    tf_estimator.put_on_keras(v1, "estimator", _finder.module("tensorflow.keras.estimator"))
    v1.layers = _finder.module(f"{_V1}.layers")
    v1.nn.rnn_cell = _finder.module(f"{_V1}.nn.rnn_cell")
    v1.tpu.CrossShardOptimizer = cross_shard_optimizer
    v1.train.ProfilerHook = profiler_hook
    _put_strategies(v1.distribute, sys.modules["tensorflow"].distribute)
    for name in _INITIALIZERS:
        setattr(v1, name, _without_effect_in_traced_graphs(getattr(v1, name)))
    for name in _PLACEHOLDERS:
        setattr(v1, name, _in_new_graph_outside_of_graphs(getattr(v1, name)))
    for name in SWITCHES:
        setattr(v1, name, _as_switch_without_effect(name))
    _put_queues(v1)


def _put_queues(v1: Any) -> None:
    for name in PRODUCERS:
        setattr(v1.train, name, _in_input_fn(getattr(v1.train, name), name))
    for name in BATCHES:
        setattr(v1.train, name, _in_input_fn(getattr(v1.train, name), name, are_batches=True))
    for name, function in READERS.items():
        setattr(v1, name, _in_input_fn(getattr(v1, name), function))
    v1.train.QueueRunner.__init__ = _refused_where_runner_traces(v1.train.QueueRunner.__init__)


def _put_strategies(old: Any, new: Any) -> None:
    """Replace the strategies of tf.compat.v1, which need TensorFlow 1's graphs and share keys of collectives, by those
    of TensorFlow 2 with the same arguments.
    """
    old.MirroredStrategy = new.MirroredStrategy
    old.OneDeviceStrategy = new.OneDeviceStrategy
    old.experimental.CentralStorageStrategy = new.experimental.CentralStorageStrategy
    old.experimental.MultiWorkerMirroredStrategy = new.experimental.MultiWorkerMirroredStrategy


def _cluster_of(resolver: Any) -> Cluster:
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
    cluster = _cluster_of(resolver).with_chief()
    return distribute.cluster_resolver.SimpleClusterResolver(
        train.ClusterSpec({kind: list(listed) for kind, listed in cluster.tasks.items()}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer=resolver.rpc_layer or "grpc",
    )


def _kept_local(resolver: Any) -> contextlib.AbstractContextManager[None]:
    from runner.distribute.grpc_server import kept_local

    return kept_local(_cluster_of(resolver))


def cross_shard_optimizer(opt: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `opt` unchanged, because the runner itself sums the gradients of replicas."""
    return opt


def profiler_hook(*args: Any, **kwargs: Any) -> Any:
    """Return a `runner.classic.hooks.ProfilerHook`. TensorFlow's own cannot be made outside of a graph."""
    return old_modules.load(names.NAMES["ProfilerHook"], "tf.train.ProfilerHook")(*args, **kwargs)


def _without_effect_in_traced_graphs(initializer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `initializer` that returns a no-op in a graph that the runner traces."""

    @functools.wraps(initializer)
    def make_initializer(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        traced = getattr(tf.compat.v1.get_default_graph(), "building_function", False)
        return tf.no_op() if traced else initializer(*args, **kwargs)

    return make_initializer


def _in_new_graph_outside_of_graphs(placeholder: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `placeholder` that can be called outside of graphs after a switch to graph mode: it then
    makes the placeholder in a new graph.

    In input functions nothing changes: the runner calls an input function in a graph if it makes placeholders.
    """

    @functools.wraps(placeholder)
    def make_placeholder(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        from runner.data.dataset_adapter import calls_input_fn

        needs_new_graph = (
            tf.executing_eagerly() and not called.isdisjoint(_SWITCHES_TO_GRAPH_MODE) and not calls_input_fn()
        )
        with tf.Graph().as_default() if needs_new_graph else contextlib.nullcontext():
            return placeholder(*args, **kwargs)

    return make_placeholder


def _in_input_fn(function: Callable[..., Any], name: str, *, are_batches: bool = False) -> Callable[..., Any]:
    """Return a function like `function` that calls that of `runner.classic.compat.tf1_queues` in an input function.

    Args:
      function: TensorFlow's own function, for other graphs.
      name: the name of the function in `runner.classic.compat.tf1_queues`. With `are_batches`, the name in tf.train,
        which `tf1_queues.batches` takes.
      are_batches: the function makes batches.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from runner.classic.compat import tf1_queues

        if not _is_of_input_fn():
            return function(*args, **kwargs)
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        if are_batches:
            return tf1_queues.batches(name, bound.arguments)
        return getattr(tf1_queues, name)(bound.arguments)

    return call


def _is_of_input_fn() -> bool:
    """Report whether operations that are made here belong to an input function that is called as in a session.

    Inside an input function this is false under `with tf.Graph().as_default():`.
    """
    import tensorflow as tf

    from runner.data.dataset_adapter import calls_input_fn

    is_graph_of_user = not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function
    return calls_input_fn(in_session=True) and not is_graph_of_user


def _refused_where_runner_traces(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor like `initialize`, that of QueueRunner, which raises ValueError in input functions and model
    functions.
    """

    @functools.wraps(initialize)
    def refused(self: Any, queue: Any = None, *args: Any, **kwargs: Any) -> None:
        import tensorflow as tf

        is_traced = getattr(tf.compat.v1.get_default_graph(), "building_function", False)
        if is_traced or _is_of_input_fn():
            raise ValueError(
                f"tf.train.QueueRunner({type(queue).__name__}): threads that fill a queue do not run here, so a step "
                "would wait for ever. In input_fn, use tf.train.slice_input_producer, string_input_producer and "
                "tf.train.batch, which are datasets here, or return a tf.data.Dataset."
            )
        initialize(self, queue, *args, **kwargs)

    return refused


def _as_switch_without_effect(name: str) -> Callable[[], None]:
    def switch() -> None:
        called.add(name)
        if not _warned:  # scripts call several of these functions in several files: warn once
            _warned.add(name)
            _log.warning(
                "tf.%s() has no effect: model_fn is traced as a TensorFlow 1 graph anyway, and everything else is "
                "eager. Build other graphs under `with tf.Graph().as_default():`.",
                name,
            )

    return switch


class _AfterImport(importlib.abc.MetaPathFinder):
    """Sets the classic API's names on TensorFlow after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "tensorflow":  # finding a spec does not import the module
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_import_and_set_names, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _import_and_set_names(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    """Execute the module `tensorflow` with `execute`, its loader's function; then set the classic API's names on it."""
    with importing_tensorflow():
        execute(module)
    _put_on_tensorflow(sys.modules[module.__name__])  # TensorFlow replaces the module while it is imported


_V1 = "tensorflow.compat.v1"
_finder = old_modules.OldModules(
    {
        **names.SPACES,
        **estimator_paths.SPACES,
        contrib.ROOT: contrib.SPACE,
        f"{_V1}.layers": old_modules.all_of(f"{tf_estimator.LEGACY}.layers"),
        f"{_V1}.nn.rnn_cell": old_modules.all_of(f"{tf_estimator.LEGACY}.rnn_cell"),
        # TensorFlow 2.21 loads the file of `tf.compat.v1` again, as a second module, for `import tensorflow.compat.v1`.
        # With this space, each import below `tensorflow.compat` gives what `tf.compat` has under the name.
        "tensorflow.compat": old_modules.all_of("tensorflow:compat", root="tensorflow:compat"),
    }
)
