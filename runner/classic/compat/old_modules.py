"""Modules that TensorFlow no longer has: one finder and one kind of module, which read tables of names.

A `Space` says what is below one dotted name, such as `tensorflow.contrib`: for each name, that it is a module, the
place where the object is today, or the reason why there is none. Nothing is imported before a name is used.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.abc
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from runner.tf_private import tf_estimator

MODULE = ""
"""The place of a name that is a module of its space."""


SOURCE = "<source>"
"""The place of a name that its module has once Space.execute has executed the module's source."""


class NotServed(AttributeError):
    """Raised for a name that the runner does not support. The message says what to use instead."""


class Space(NamedTuple):
    """What is below a dotted name.

    Attributes:
      find: name below it ("" for itself) -> MODULE, SOURCE, "module:attribute", or None if there is no such name.
      reason: (name below it, the name as users write it) -> the message about a name that does not exist.
      listed: module below it -> the names in that module.
      execute: called with a module and its name below the space, when a name is used that is in the module's source.
      is_refused_late: an import of a name that does not exist succeeds, and the use of the name raises NotServed.
    """

    find: Callable[[str], str | None]
    reason: Callable[[str, str], str]
    listed: Callable[[str], list[str]]
    is_refused_late: bool = False
    execute: Callable[[types.ModuleType, str], None] | None = None

    def serves(self, name: str) -> bool:
        """Report whether `name` is an object, an attribute of one, or a module that is not empty."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            if self.find(".".join(parts[:end])):
                return True
        return self.find(name) == MODULE and bool(self.listed(name))


_ROW = re.compile(r"^([^\s#].*) @ (\S+):(.*(?:\n .*)*)", re.MULTILINE)


def places_in(table: str) -> dict[str, str]:
    """Return dotted name -> its place, "module:attribute", from a table of text.

    A row is `modules @ place: names`, and goes on in indented lines: each of the modules has these names ("." is the
    root), and they are at the place, "module" or "module:attribute". `a=b` stands for the name `a`, which the place
    calls `b`. Lines that begin with `#` are comments.
    """
    found: dict[str, str] = {}
    for modules, place, names in _ROW.findall(table):
        prefix = f"{place}." if ":" in place else f"{place}:"
        for pair in names.split():
            name, _, name_at_place = pair.partition("=")
            for module in modules.split():
                found[f"{module}.{name}".lstrip(".")] = prefix + (name_at_place or name)
    return found


def modules_of(names: Iterable[str]) -> frozenset[str]:
    """Return the modules of dotted names: "" and `export` for `export.ExportOutput`."""
    modules: set[str] = set()
    for name in names:
        parts = name.split(".")
        modules.update(".".join(parts[:end]) for end in range(len(parts)))
    return frozenset(modules)


def within(names: Iterable[str], module: str) -> list[str]:
    """Return what `module` contains of dotted `names`, sorted."""
    prefix = f"{module}." if module else ""
    return sorted({name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)})


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return name -> its text, from a table of names separated by blanks -> the text of each of them."""
    texts: dict[str, str] = {}
    for names, text in table.items():
        texts.update(dict.fromkeys(names.split(), text))
    return texts


def nearest(names: Iterable[str], name: str) -> str | None:
    """Return the longest of dotted `names` that is `name` itself or that `name` is below; None: there is none."""
    above = (other for other in names if f"{name}.".startswith(f"{other}."))
    return max(above, key=len, default=None)


def text_of(table: Mapping[str, str], name: str) -> str:
    """Return the text about the dotted `name` in a table name -> text, by the name nearest to it; "": there is none."""
    return table.get(nearest(table, name) or "", "")


def all_of(place: str, root: str = MODULE) -> Space:
    """Return the space of all names of the object at `place`, "module:attribute" or a module.

    Args:
      place: the place.
      root: the place of the space itself. MODULE: a module that imports nothing before a name in it is used.
    """
    prefix = f"{place}." if ":" in place else f"{place}:"
    return Space(
        find=lambda name: f"{prefix}{name}" if name else root,
        reason=lambda name, shown: f"there is no {shown}.",
        listed=lambda below: [name for name in dir(load(place, place)) if not name.startswith("_")],
    )


def space_of(spaces: Mapping[str, Space], name: str) -> tuple[Space, str] | None:
    """Return (the smallest of the spaces that has the dotted `name`, the name below it); None: no space has it."""
    root = nearest(spaces, name)
    return None if root is None else (spaces[root], name.removeprefix(root).removeprefix("."))


def load(place: str, shown: str) -> Any:
    """Return the object at `place`, "module:attribute" or a module.

    Raises:
      ImportError: a package of the extra `classic` is not installed; the message has `shown`, the name as users write
        it.
    """
    module, _, attribute = place.partition(":")
    try:
        if module.partition(".")[0] == "tf_slim":
            tf_estimator.prepare_slim()
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("tf_slim", "tf_keras"):
            raise
        raise ImportError(f"{shown} needs the package {package}: pip install 'estimator-runner[classic]'") from None
    if not attribute:
        return loaded
    return functools.reduce(getattr, attribute.split("."), loaded)


def _shown(name: str) -> str:
    if not name.startswith("tensorflow."):
        return name
    return name.replace("tensorflow.", "tf.", 1)


class OldModule(types.ModuleType):
    """A module of a space. Its names are looked up when they are used."""

    def __init__(self, name: str, space: Space, below: str) -> None:
        super().__init__(name, "A module of an older TensorFlow, on the runner.")
        self.__path__: list[str] = []  # or Python would refuse to import modules in it
        self._space = space
        self._name_in_space = below

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return dir(self)
        if name.startswith("__"):  # libraries look for `__file__` and the like in every module
            raise AttributeError(name)
        name_in_space = f"{self._name_in_space}.{name}".removeprefix(".")
        full_name = f"{self.__name__}.{name}"
        place = self._space.find(name_in_space)
        if place == MODULE:
            return importlib.import_module(full_name)
        if place is None:
            # The frame that reads the attribute: the import system's for `from module import name`.
            if sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
                # An import statement in a `try` must raise, and not find the Refused that an earlier import of this
                # name left in sys.modules.
                sys.modules.pop(full_name, None)
            raise NotServed(self._space.reason(name_in_space, _shown(full_name)))
        if place == SOURCE:
            assert self._space.execute is not None
            self._space.execute(self, self._name_in_space)
            return self.__getattribute__(name)
        value = load(place, _shown(full_name))
        setattr(self, name, value)  # later uses read it without `__getattr__`
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets an imported submodule on its parent. Do not set a Refused, so that `learn.Experiment` raises.
        # `from tensorflow.contrib.learn import Experiment` finds the Refused in sys.modules.
        if not isinstance(value, Refused):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return self._space.listed(self._name_in_space)


class Refused(OldModule):
    """The result of importing a name that does not exist. It raises NotServed when it is used, not when it is imported,
    since scripts have many unused imports.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise self._refusal()

    def __mro_entries__(self, bases: Any) -> Any:
        raise self._refusal()

    def _refusal(self) -> NotServed:
        return NotServed(self._space.reason(self._name_in_space, _shown(self.__name__)))


class OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of spaces.

    Args:
      spaces: dotted name -> what is below it.
    """

    def __init__(self, spaces: Mapping[str, Space]) -> None:
        self._spaces = spaces
        self._modules: dict[str, OldModule] = {}

    def module(self, name: str) -> OldModule:
        """Return the module `name` of a space, always the same one. This imports neither it nor its parents."""
        if name not in self._modules:
            found = space_of(self._spaces, name)
            assert found is not None
            space, below = found
            kind = OldModule if space.find(below) == MODULE else Refused
            self._modules[name] = kind(name, space, below)
        return self._modules[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        space, name = space_of(self._spaces, fullname) or (None, "")
        if space is None:
            return None
        place = space.find(name)
        # (a module that exists under another name, its spec); Python will use the module for `fullname`, too.
        existing: tuple[types.ModuleType, ModuleSpec | None] | None = None
        if place and place != SOURCE:
            with contextlib.suppress(AttributeError):  # a space of all names also finds those that do not exist
                value = load(place, _shown(fullname))
                if isinstance(value, types.ModuleType):
                    existing = (value, value.__spec__)
        if place != MODULE and existing is None:
            if not space.is_refused_late:
                return None
            # An import in a `try` must fail, so that `except` takes the program's other way. The error is no
            # ModuleNotFoundError, whose message `from tensorflow.contrib import gan` would replace.
            if _is_import_in_try():
                raise ImportError(space.reason(name, _shown(fullname)), name=fullname)
        return ModuleSpec(fullname, self, loader_state=existing, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return spec.loader_state[0] if spec.loader_state else self.module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the spec of a module that exists elsewhere, which Python has replaced. There is nothing to execute:
        names are looked up when they are used, and the other module's own loader has executed it.
        """
        assert module.__spec__ is not None
        if module.__spec__.loader_state:
            module.__spec__ = module.__spec__.loader_state[1]


def _is_import_in_try() -> bool:
    """Report whether the import statement that is running is in a `try` with `except`, which handles import errors."""
    files_of_imports = (__file__, importlib.__file__, "<frozen importlib")
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(files_of_imports):
        frame = frame.f_back
    return frame is not None and frame.f_lineno in _lines_in_try(frame.f_code.co_filename)


@functools.lru_cache(maxsize=64)
def _lines_in_try(file: str) -> frozenset[int]:
    """Return the line numbers of a source file that are in the body of a `try` with `except`."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # written for another Python version
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try) or not node.handlers:
            continue
        for statement in node.body:
            last = statement.end_lineno or statement.lineno
            lines.update(range(statement.lineno, last + 1))
    return frozenset(lines)
