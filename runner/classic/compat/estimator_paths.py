"""The modules of the package tensorflow_estimator 2.15, public or not, and which names each of them has here.

Releases before 2.0 had them below `tensorflow.python.estimator`. Here each has all public names of tf.estimator, those
of its own folder first, so that `tensorflow.python.estimator.model_fn.ModeKeys` and the like can be imported. Its other
names are those of 2.15's own source if the extra `tf-estimator` is installed: the source is executed when such a name
is used, and all that it imports is what these tables say. To add a path, add a word to _TREE.
"""

from __future__ import annotations

import functools
import os
import re
import types
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from runner.classic.compat import names
from runner.classic.compat.installed_names import defined_in
from runner.classic.compat.old_modules import MODULE, SOURCE, NotServed, Space, load, text_of, within
from runner.system.suggestions import did_you_mean
from runner.tf_private.replaced import Overlay

_ROOT = "tensorflow_estimator.python.estimator"
_TREE = """
    : api canned early_stopping estimator estimator_export estimator_lib export exporter extenders gc head hooks
    : inputs keras keras_lib mode_keys model_fn run_config tools tpu training util
    canned: baseline dnn dnn_linear_combined dnn_testing_utils head kmeans linear linear_testing_utils metric_keys
    canned: optimizers parsing_utils prediction_keys rnn saved_model_estimator timeseries v1 v1.dnn_testing_utils_v1
    canned: v1.linear_testing_utils_v1 linear_optimizer linear_optimizer.python linear_optimizer.python.utils
    canned.linear_optimizer.python.utils: sdca_ops sharded_mutable_dense_hashtable
    canned.timeseries: ar_model estimators feature_keys head math_utils model model_utils saved_model_utils
    canned.timeseries: state_management
    export: export export_lib export_output function
    head: base_head binary_class_head head_utils multi_class_head multi_head multi_label_head regression_head
    head: sequential_head
    hooks: basic_session_run_hooks fake_summary_writer hooks session_run_hook
    inputs: inputs numpy_io pandas_io queues queues.feeding_functions queues.feeding_queue_runner
    tools: analytics checkpoint_converter
    tpu: _tpu_estimator_embedding error_handling iteration_count_estimator tpu_config tpu_context tpu_estimator util
"""


def _modules_in(tree: str) -> frozenset[str]:
    modules = {""}
    for line in tree.strip().splitlines():
        folder, _, inside = line.strip().partition(":")
        modules.update(f"{folder}.{name}".strip(".") for name in inside.split())
    return frozenset(modules)


_MODULES = _modules_in(_TREE)
"""The modules, below `tensorflow_estimator.python.estimator`; "" is that itself."""

_PUBLIC: Mapping[str, str] = {**names.V1_NAMES, **names.KERAS_NAMES}
_BY_LAST: Mapping[str, str] = {
    # Of several names with the same last part, such as `tpu.RunConfig`, the one without a module counts.
    **{name.rpartition(".")[2]: _PUBLIC[name] for name in sorted(_PUBLIC, key=lambda name: "." not in name)},
    **{f"{name}V2": place for name, place in names.NAMES.items() if "." not in name},
    "MetricKeys": "runner.classic.keys:MetricKeys",
    "PredictionKeys": "runner.classic.keys:PredictionKeys",
    "get_optimizer_instance": "runner.classic.optimizers:v1_optimizer_of",
    "get_optimizer_instance_v2": "runner.classic.optimizers:optimizer_of",
    "estimator_export": f"{__name__}:exported",
    "_Head": "builtins:object",  # an abstract class without code
}


_NOT_SERVED: Mapping[str, str] = {
    "canned.kmeans": names.GONE["experimental.KMeans"],
    "canned.linear.LinearSDCA": names.GONE["experimental.LinearSDCA"],
    "canned.saved_model_estimator": "load the model with tf.saved_model.load in a model_fn",
    "canned.timeseries": "use the package tensorflow_probability: tfp.sts",
    "training._TrainingExecutor": "use tf.estimator.train_and_evaluate",
}
"""Module, or name in one, whose source cannot do here what it did -> what to do instead."""

_NEEDS_KERAS_2 = (
    "this model needs Keras 2 as tf.keras: pip install 'estimator-runner[classic,tf-estimator]', import runner.classic "
    "before TensorFlow, and do not set TF_USE_LEGACY_KERAS=0"
)

_HEADS: Mapping[str, str] = {"canned.head": "_Head", "head.sequential_head": "SequentialHeadWrapper"}
"""Module -> the class in its source that makes the EstimatorSpec of heads."""


def exported(*names: str, v1: Any = None) -> Callable[[Any], Any]:
    """Return a decorator without effect, in place of the one that put 2.15's names on TensorFlow."""
    return lambda symbol: symbol


def _source_of(module: str) -> Path:
    """Return the file of a module, which may not exist."""
    package = names.package() or Path(os.devnull)
    return package.joinpath("python/estimator", *module.split(".")).with_suffix(".py")


def _execute(module: types.ModuleType, below: str) -> None:
    """Execute the source of 2.15's module in `module`, and replace the names that the runner has or refuses.

    Args:
      module: the module, in which the names are set.
      below: its name below `tensorflow_estimator.python.estimator`.

    Raises:
      NotServed: the source cannot be executed with the installed Keras; `module` is then as before.
    """
    before = dict(vars(module))
    try:
        SourceFileLoader(module.__name__, str(_source_of(below))).exec_module(module)
    except (AttributeError, ImportError) as error:
        vars(module).clear()
        vars(module).update(before)
        raise NotServed(f"{module.__name__}: 2.15's own code cannot run here, with this Keras: {error}") from error
    # The base class of models that cannot work: that of Keras 3, which has no `experimental`.
    keras_3: Any = ()
    tf = vars(module).get("tf")
    if tf:
        if not hasattr(tf.keras, "experimental"):
            keras_3 = tf.keras.Model
        vars(module)["tf"] = _without_replicas(tf)
    if below in _HEADS:
        head_class = vars(module)[_HEADS[below]]
        head_class.create_estimator_spec = _with_exact_losses(head_class.create_estimator_spec)
    for name, value in list(vars(module).items()):
        place_of_ours = _find(f"{below}.{name}")
        instead = _NOT_SERVED.get(f"{below}.{name}")
        if isinstance(value, type) and issubclass(value, keras_3):
            instead = _NEEDS_KERAS_2
        if instead:
            text = f"{module.__name__}.{name} is not available: {instead}."
            value.__new__ = staticmethod(functools.partial(_refuse, text))
        elif place_of_ours not in (None, MODULE, SOURCE) and not name.startswith("__"):
            setattr(module, name, load(str(place_of_ours), name))


def _without_replicas(tf: Any) -> Any:
    """Return TensorFlow with strategies that say that they have one replica.

    The source would divide a loss by the number of replicas, and the runner weights gradients itself.
    """

    def get_strategy() -> Any:
        return Overlay(tf.distribute.get_strategy(), num_replicas_in_sync=1)

    return Overlay(tf, distribute=Overlay(tf.distribute, get_strategy=get_strategy))


def _refuse(text: str, *args: Any, **kwargs: Any) -> None:
    raise NotServed(text)


def _with_exact_losses(create_estimator_spec: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method like `create_estimator_spec` of one of _HEADS, which treats losses as the runner's heads do.

    In an evaluation each batch has the same weight if its loss is a sum. In training with several replicas, a mean
    over the steps of sequences raises ValueError, since the number of steps in the global batch is not known. The mean
    over examples is that of `tf.losses`, which the runner computes over the global batch.
    """

    @functools.wraps(create_estimator_spec)
    def create_spec(head: Any, features: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        from runner.classic.heads import checks
        from runner.programs.batch_losses import batch_part

        reduction = getattr(head, "_loss_reduction", None) or head.loss_reduction
        is_mean = not checks.is_sum(reduction) and not checks.is_weighted_mean(reduction)
        # Only the sequential head, which wraps another one, has no `_loss_reduction` of its own.
        is_mean_over_steps = is_mean and not hasattr(head, "_loss_reduction")
        if mode == "train" and is_mean_over_steps and not batch_part().is_whole:
            raise ValueError(
                f"SequentialHeadWrapper(static_head), whose loss_reduction={reduction!r}: with several replicas each "
                "would divide by its own steps. Give static_head loss_reduction=tf.compat.v1.losses.Reduction.MEAN."
            )
        spec = create_estimator_spec(head, features, mode, *args, **kwargs)
        if mode == "eval" and checks.is_sum(reduction):
            spec.loss_weight = 1.0
        return spec

    return create_spec


def _find(name: str) -> str | None:
    """Return the place of a name below `tensorflow_estimator.python.estimator`: MODULE, SOURCE, or
    "module:attribute" of the runner; None: the name is not served.
    """
    if name in _MODULES:
        return MODULE
    module, _, last = name.rpartition(".")
    if module not in _MODULES:
        return None
    part = module.partition(".")[0]
    place_of_ours = _PUBLIC.get(f"{part}.{last}", _BY_LAST.get(last))  # `export.X` goes before X of another module
    if place_of_ours:
        return place_of_ours
    file = _source_of(module)
    is_in_source = file.exists() and last in defined_in(file)
    return SOURCE if is_in_source and not text_of(_NOT_SERVED, module) else None


def is_of_source(name: str) -> bool:
    """Report whether 2.15's own source has the dotted `name`, or the object that it is an attribute of."""
    below = re.sub(r"^tensorflow(_estimator)?\.python\.estimator\.", "", name)
    is_public = name.removeprefix("tensorflow.estimator.") in names.OF_PACKAGE
    return is_public or SOURCE in (_find(below), _find(below.rpartition(".")[0]))


def _find_old(name: str) -> str | None:
    """Return the place of a name below `tensorflow.python.estimator`.

    A source is executed only once, in the module of `tensorflow_estimator`, and the name is taken from there.
    """
    place = _find(name)
    if place != SOURCE:
        return place
    module, _, last = f"{_ROOT}.{name}".rpartition(".")
    return f"{module}:{last}"


def _reason(name: str, shown: str) -> str:
    instead = text_of(_NOT_SERVED, name)
    if not instead and not names.package():
        instead = names.NEEDS_PACKAGE
    hint = did_you_mean(name.rpartition(".")[2], _BY_LAST)
    if instead:
        return f"{shown} is not available: {instead}.{hint}"
    return f"{shown} does not exist.{hint}"


_SPACE = Space(
    _find,
    _reason,
    lambda module: sorted({*_BY_LAST, *within(_MODULES - {""}, module)}),
    is_refused_late=True,
    execute=_execute,
)
_API_NAME = re.compile(r"(?:_api\.)?(?:_?(v[12])\.)?(?:v[12]\.)?(estimator\b.*)")
_API_MODULE = re.compile(r"|python(\.estimator)?|_api|(_api\.)?_?v[12](\.v[12])?")


def _find_api(name: str) -> str | None:
    """Return the place of a name below `tensorflow_estimator`, such as `_api.v1.estimator.Estimator`.

    Names of tf.estimator are those of tf.compat.v1 unless the name says v2; `estimator.inputs` is only in v1. The
    modules above them are MODULE.
    """
    match = _API_NAME.fullmatch(name)
    if match:
        is_of_1 = match[1] != "v2" or match[2].startswith("estimator.inputs")
        version = "v1" if is_of_1 else "v2"
        return f"tensorflow:compat.{version}.{match[2]}"
    return MODULE if _API_MODULE.fullmatch(name) else None


_API = Space(_find_api, lambda name, shown: f"there is no {shown}.", lambda module: ["estimator"])
_GONE_FROM_TENSORFLOW = """
    distribute.estimator_training tpu.session_support tpu.tpu_embedding tpu.tpu_embedding_gradient
"""
SPACES: Mapping[str, Space] = {
    _ROOT: _SPACE,
    "tensorflow.python.estimator": _SPACE._replace(find=_find_old),
    "tensorflow_estimator": _API,  # not only its modules `_api.v1`, `_api.v2`: it has the names of `_api.v1` itself
    f"{_ROOT}.api": _API,
    # What the sources import is refused where they use it.
    **{
        f"tensorflow.python.{name}": Space(
            lambda name: None, lambda name, shown: f"TensorFlow no longer has {shown}.", lambda name: [], True
        )
        for name in _GONE_FROM_TENSORFLOW.split()
    },
}
"""Dotted name of a package -> what is below it."""
