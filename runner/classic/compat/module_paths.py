"""Import modules under names that TensorFlow no longer has: tf.estimator's private modules, and nested `compat`
modules.

TensorFlow 2.15 had tf.estimator's private modules under `tensorflow.python.estimator` and under
`tensorflow_estimator.python.estimator`. Here, each of these modules has all public names of tf.estimator, so that
`tensorflow.python.estimator.model_fn.ModeKeys` and the like can be imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import re
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from runner.classic.compat import names

_ROOTS = ("tensorflow_estimator.python.estimator", "tensorflow.python.estimator")
_IN_ROOTS = """
    canned canned.baseline canned.dnn canned.dnn_linear_combined canned.head canned.linear canned.metric_keys
    canned.optimizers canned.parsing_utils canned.prediction_keys early_stopping estimator estimator_lib export
    export.export export.export_lib export.export_output exporter extenders head head.base_head head.binary_class_head
    head.multi_class_head head.multi_head head.multi_label_head head.regression_head hooks hooks.basic_session_run_hooks
    hooks.hooks hooks.session_run_hook inputs inputs.inputs inputs.numpy_io inputs.pandas_io keras keras_lib mode_keys
    model_fn run_config tpu tpu.tpu_config tpu.tpu_estimator training
""".split()
_MODULES = frozenset(
    {
        *("tensorflow_estimator", "tensorflow_estimator.python", *_ROOTS),
        *(f"{root}.{name}" for root in _ROOTS for name in _IN_ROOTS),
    }
)
_OTHERS = {
    "MetricKeys": "runner.classic.keys:MetricKeys",
    "PredictionKeys": "runner.classic.keys:PredictionKeys",
    "get_optimizer_instance": "runner.classic.optimizers:v1_optimizer_of",
    "estimator": "runner.classic.compat.install:_V2",  # tensorflow_estimator.estimator
    "_Head": "builtins:object",  # an abstract class without code
}


def leads_to(name: str) -> bool:
    """Report whether the dotted `name` is a private module of tf.estimator that can be imported here, or a name in one.

    Attributes of an object in a module are not checked.
    """
    parts = name.split(".")
    modules = [end for end in range(1, len(parts) + 1) if ".".join(parts[:end]) in _MODULES]
    return bool(modules) and (
        modules[-1] == len(parts) or parts[modules[-1]] in table_of(".".join(parts[: modules[-1]]))
    )


def table_of(module: str) -> dict[str, str]:
    """Return name -> "module:attribute" for a private module of tf.estimator: all public names, and some others."""
    own = f"{module.partition('.estimator.')[2].partition('.')[0]}."
    public = {**names.V1_NAMES, **names.KERAS_NAMES}
    in_order = sorted(public, key=lambda name: (name.startswith(own), "." not in name))  # the module's own names win
    return {
        **{name.rpartition(".")[2]: public[name] for name in in_order},
        **{f"{name}V2": place for name, place in names.NAMES.items()},
        **_OTHERS,
    }


NESTED_PRIVATE = re.compile(r"tensorflow\._api\.v2\.compat(\.v[12]\.compat)+(\.(?P<version>v[12]))?")
"""Matches the names that `tf.compat.v1.compat`, and `v1` and `v2` in it, have in `sys.modules`."""

_NESTED = re.compile(r"tensorflow\.compat\.v[12](?:\.compat\.v[12])*\.compat(?P<rest>(?:\.v[12](?:\..+)?)?)")


class NestedCompat(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `tensorflow.compat.v1.x` for the name `tensorflow.compat.v1.compat.v1.x`, at any depth of `compat`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _NESTED.fullmatch(fullname) else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        found = _NESTED.fullmatch(spec.name)
        assert found is not None
        module = importlib.import_module(f"tensorflow.compat{found['rest']}")
        spec.loader_state = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the module's own spec, which Python has replaced. Its own loader has executed the module before."""
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


class ModulePaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports tf.estimator's private modules, as modules whose names are looked up when they are used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in _MODULES else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: names are looked up when they are used."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__dict__["__name__"]
        if f"{module}.{name}" in _MODULES:
            return importlib.import_module(f"{module}.{name}")
        return names.lookup(table_of(module), name, f"{module}.{name}")
