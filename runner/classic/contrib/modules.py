"""The modules `tensorflow.contrib.*`, which import the objects of their names when they are first used."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import linecache
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from runner.classic.contrib import names

ROOT = "tensorflow.contrib"


class NotServed(AttributeError):
    """Raised for a name of tf.contrib that the runner does not support. The message says what to use instead."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `tensorflow.contrib` and its supported modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        name = names.public(fullname.removeprefix(ROOT).removeprefix("."))
        if fullname != ROOT and "tensorflow" in sys.modules:
            # After `import tensorflow.contrib.slim`, scripts use `tensorflow.contrib`. Do not set it earlier: libraries
            # test for it and would take this for TensorFlow 1.
            sys.modules["tensorflow"].contrib = root()  # type: ignore[attr-defined]
        if not names.is_module(name) and _is_tried():
            # `from tensorflow.contrib import gan` would replace the message of a ModuleNotFoundError.
            raise ImportError(_reason(name, fullname), name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        name = names.public(spec.name.removeprefix(ROOT).removeprefix("."))
        return _Module(spec.name) if names.is_module(name) else _Refused(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: names are looked up when they are used."""


class _Module(types.ModuleType):
    """A module of tf.contrib. A private module, `<part>.python...`, has all public names of the part."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "A part of tf.contrib 1.15, on the runner.")
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        module = self.__dict__["__name__"]
        public = names.public(f"{module}.{name}".removeprefix(f"{ROOT}."))
        shown = f"tf.contrib.{public}" if ".python" not in module else f"{module}.{name}"
        if names.is_module(public):
            return importlib.import_module(f"{module}.{name}")
        place = names.place_of(public)
        if place is None:
            if sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
                # An import statement asks for the name. If it is in a `try`, it must raise, and not find the _Refused
                # that an earlier import left in sys.modules.
                sys.modules.pop(f"{module}.{name}", None)
            raise NotServed(_reason(public, shown))
        found = _load(place, shown)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets an imported submodule on its parent. Do not set a _Refused, so that `learn.Experiment` raises.
        # `from tensorflow.contrib.learn import Experiment` finds the _Refused in sys.modules.
        if not isinstance(value, _Refused):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return names.within(names.public(self.__name__.removeprefix(ROOT).removeprefix(".")))


class _Refused(types.ModuleType):
    """The result of importing an unsupported name. It raises NotServed when it is used, not when it is imported, since
    scripts have many unused imports.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "A name of tf.contrib 1.15 that is not supported.")
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise self._refusal()

    def __mro_entries__(self, bases: Any) -> Any:
        raise self._refusal()

    def _refusal(self) -> NotServed:
        name = self.__dict__["__name__"]
        return NotServed(_reason(names.public(name.removeprefix(f"{ROOT}.")), name))


def _is_tried() -> bool:
    """Report whether the import statement that is running is in a `try` with `except`, which handles import errors."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(
        (__file__, importlib.__file__, "<frozen importlib")
    ):
        frame = frame.f_back
    return frame is not None and frame.f_lineno in _tried_lines(frame.f_code.co_filename)


@functools.lru_cache(maxsize=64)
def _tried_lines(file: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # written for another Python version
        return frozenset()
    tried = (node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers)
    statements = (statement for node in tried for statement in node.body)
    return frozenset(line for one in statements for line in range(one.lineno, (one.end_lineno or one.lineno) + 1))


def _reason(name: str, shown: str) -> str:
    instead = names.instead_of(name)
    return f"{shown} is not available: {instead.removesuffix('.')}{'' if instead.endswith('?') else '.'}"


def _load(place: str, shown: str) -> Any:
    module, _, attribute = place.partition(":")
    if module.partition(".")[0] == "tf_slim":
        from runner.tf_private import tf_estimator

        try:
            tf_estimator.prepare_slim()
        except ModuleNotFoundError as error:
            if error.name not in ("tf_slim", "tf_keras"):
                raise
            raise ImportError(
                f"{shown} needs the packages tf-slim and tf-keras: pip install 'tf-runner[classic]'"
            ) from None
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def install() -> None:
    """Make Python find these modules for `import tensorflow.contrib.layers` and the like."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def root() -> types.ModuleType:
    """Return the module `tensorflow.contrib`, which is also `tf.contrib`, without importing TensorFlow."""
    module = sys.modules.get(ROOT)
    if module is None:
        module = sys.modules[ROOT] = _Module(ROOT)
    return module
