"""The private modules of tf.estimator 2.15, and which names each of them has here.

They were below `tensorflow_estimator.python.estimator` and, in older releases, `tensorflow.python.estimator`. Here each
has all public names of tf.estimator, so that `tensorflow.python.estimator.model_fn.ModeKeys` and the like can be
imported. To add a path, add a word to _IN_ROOT.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.classic.compat import names
from runner.classic.compat.old_modules import MODULE, Space, within

_ROOT = "python.estimator"
_IN_ROOT = """
    canned canned.baseline canned.dnn canned.dnn_linear_combined canned.head canned.linear canned.metric_keys
    canned.optimizers canned.parsing_utils canned.prediction_keys early_stopping estimator estimator_lib export
    export.export export.export_lib export.export_output exporter extenders head head.base_head head.binary_class_head
    head.multi_class_head head.multi_head head.multi_label_head head.regression_head hooks hooks.basic_session_run_hooks
    hooks.hooks hooks.session_run_hook inputs inputs.inputs inputs.numpy_io inputs.pandas_io keras keras_lib mode_keys
    model_fn run_config tpu tpu.tpu_config tpu.tpu_estimator training
""".split()
_MODULES = frozenset({"", "python", _ROOT, *(f"{_ROOT}.{name}" for name in _IN_ROOT)})
"""The modules, below `tensorflow_estimator`."""

_PUBLIC: Mapping[str, str] = {**names.V1_NAMES, **names.KERAS_NAMES}
_BY_LAST: Mapping[str, str] = {
    # Of several names with the same last part, such as `tpu.RunConfig`, the one without a module counts.
    **{name.rpartition(".")[2]: _PUBLIC[name] for name in sorted(_PUBLIC, key=lambda name: "." not in name)},
    **{f"{name}V2": place for name, place in names.NAMES.items() if "." not in name},
    "MetricKeys": "runner.classic.keys:MetricKeys",
    "PredictionKeys": "runner.classic.keys:PredictionKeys",
    "get_optimizer_instance": "runner.classic.optimizers:v1_optimizer_of",
    "estimator": "tensorflow:estimator",  # tensorflow_estimator.estimator
    "_Head": "builtins:object",  # an abstract class without code
}


def _find(name: str) -> str | None:
    if name in _MODULES:
        return MODULE
    module, _, last = name.rpartition(".")
    if module not in _MODULES:
        return None
    part = module.removeprefix(f"{_ROOT}.").partition(".")[0]
    return _PUBLIC.get(f"{part}.{last}", _BY_LAST.get(last))  # a module's own names win


_SPACE = Space(
    _find,
    lambda name, shown: names.reason(_BY_LAST, name.rpartition(".")[2], shown),
    lambda module: sorted({*_BY_LAST, *within(_MODULES - {""}, module)}),
)
SPACES: Mapping[str, Space] = {
    "tensorflow_estimator": _SPACE,
    "tensorflow.python.estimator": Space(
        lambda name: _find(f"{_ROOT}.{name}".removesuffix(".")),
        _SPACE.reason,
        lambda module: _SPACE.listed(f"{_ROOT}.{module}".removesuffix(".")),
    ),
}
"""Dotted name of a package -> what is below it."""
