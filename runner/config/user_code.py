"""Find the user's functions by their dotted names: first in the source without running it, then by import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from runner.config.mistakes import ConfigError
from runner.system.suggestions import did_you_mean

_MAIN = "__main__"
"""The module of a notebook's cells, and of a script. Each process has another one."""

_FILES = {"model_fn": "model_fns.mine", "input_fn": "input_fns.mine"}
"""Default name of a function -> the module in which a user would put it."""


class UserCodeError(ConfigError):
    """A dotted name in the config to which no object belongs; the message says what was looked for, and where."""


@dataclass(frozen=True)
class Location:
    """The place of an object that a dotted name refers to.

    Attributes:
      module: the module's dotted name.
      attribute: the object in it, possibly dotted (`Class.method`).
      file: the source file; None if there is none (built in, compiled, a zip).
    """

    module: str
    attribute: str
    file: Path | None


def add_to_path(directory: Path) -> None:
    """Put `directory` first on sys.path, so that a user's ./model_fns and ./input_fns are found."""
    entry = str(directory)
    if entry not in (os.path.abspath(existing) for existing in sys.path):
        sys.path.insert(0, entry)


def locate(key: str, name: str, default: str) -> Location:
    """Return the place of `name` without importing the user's code, which may import TensorFlow and so take 4 seconds.

    Args:
      key: the config key that holds the name, for messages.
      name: `package.module` or `package.module.function`.
      default: the function that is meant if `name` is that of a module: `model_fn`, `input_fn`.

    Raises:
      UserCodeError: there is no such module, or its source has no such function.
    """
    if name.partition(".")[0] == _MAIN:
        return _locate_in_main(key, name, default)
    spec, remaining_parts, submodule_folders = _deepest_module(key, name)
    attribute = ".".join(remaining_parts) or default
    file: Path | None = None
    if spec.origin and spec.origin.endswith(".py"):
        file = Path(spec.origin)
    lacks_init_file = spec.origin is None and bool(submodule_folders)
    defined: set[str] | None = None
    if lacks_init_file:
        defined = set()  # a package without __init__.py defines no names itself
    elif file is not None:
        defined = _top_level_names(file)
    first = attribute.split(".")[0]
    if defined is not None and first not in defined:
        # In a package, the name is that of a module that is not there, rather than of a function.
        if lacks_init_file or (remaining_parts and submodule_folders):
            raise UserCodeError(
                _missing_module(f"{key}={name}", spec.name, remaining_parts, submodule_folders, defined)
            )
        hint = did_you_mean(first, defined)
        raise UserCodeError(f"{key}={name}: {file} does not define {first!r}.{hint} Use {spec.name}.<function>.")
    return Location(spec.name, attribute, file)


def check_importable(key: str, name: str, default: str, hint: str = "") -> None:
    """Raise UserCodeError if `name` is that of a cell's or script's object, which only this process has.

    Args:
      key, name, default: as in `locate`.
      hint: what else the user can do, for the message.
    """
    module, _, attribute = name.partition(".")
    if module != _MAIN:
        return
    home = _FILES.get(default, "mine")
    suffix = "" if attribute in ("", default) else f".{attribute}"
    raise UserCodeError(
        f"{key}={name} is defined in a notebook or script, which the processes of a run cannot import. Begin its cell "
        f"with `%%writefile {home.replace('.', '/')}.py` and set {key}={home}{suffix}.{hint}"
    )


def _locate_in_main(key: str, name: str, default: str) -> Location:
    """Return the place of an object of this process's main module, as `locate` does."""
    main = sys.modules[_MAIN]
    attribute = name.partition(".")[2] or default
    first = attribute.split(".")[0]
    if not hasattr(main, first):
        hint = did_you_mean(first, [other for other in dir(main) if not other.startswith("_")])
        raise UserCodeError(f"{key}={name}: this notebook or script has no {first!r}.{hint} Run the cell that has it.")
    path = getattr(main, "__file__", None)  # a notebook has none
    file = Path(path) if path else None
    return Location(_MAIN, attribute, file)


def load(key: str, name: str, default: str) -> Callable[..., Any]:
    """Import and return the object that `name` refers to.

    Args:
      key, name, default: as in `locate`.

    Raises:
      UserCodeError: the object does not exist or cannot be called. Errors from importing the user's module pass
        through.
    """
    location = locate(key, name, default)
    found: Any = importlib.import_module(location.module)
    for part in location.attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            hint = did_you_mean(part, [other for other in dir(found) if not other.startswith("_")])
            raise UserCodeError(f"{key}={name}: {location.module} has no {location.attribute!r}.{hint}") from None
    if not callable(found):
        said = f"{key}={name} is a {type(found).__name__}, which cannot be called."
        raise UserCodeError(f"{said} Name a function or class.")
    function: Callable[..., Any] = found
    return function


def _deepest_module(key: str, name: str) -> tuple[ModuleSpec, list[str], list[str]]:
    """Find the longest prefix of `name` that is a module.

    Returns:
      (the module's spec, the remaining parts of `name`, the folders of the module's submodules).
    """
    parts = name.split(".")
    if not _is_dotted_name(name):
        # The user may have written a path, or module:function.
        likely = name.replace(".py", "").replace("/", ".").replace(":", ".")
        hint = f" Did you mean {likely!r}?" if _is_dotted_name(likely) else ""
        raise UserCodeError(f"{key}={name} is not a dotted name.{hint} Use package.module or package.module.function.")
    spec = _find_spec(parts[0], None)
    if spec is None:
        names = [module.name for module in pkgutil.iter_modules() if not module.name.startswith("_")]
        names += [entry.name for entry in Path.cwd().iterdir() if entry.is_dir()]  # packages without __init__.py
        hint = did_you_mean(parts[0], names)
        raise UserCodeError(
            f"{key}={name}: no module {parts[0]!r} in {os.getcwd()} or among the installed packages.{hint}"
        )
    num_used = 1
    folders = list(spec.submodule_search_locations or ())
    while num_used < len(parts) and folders:
        deeper = _find_spec(".".join(parts[: num_used + 1]), folders)
        if deeper is None:
            break
        spec = deeper
        num_used += 1
        folders = list(deeper.submodule_search_locations or ())
    return spec, parts[num_used:], folders


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _find_spec(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of a module like importlib.util.find_spec, but without importing the package that contains it."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(fullname, path)
        except KeyError:
            # A folder without __init__.py inside a package: its loader would look for the package in sys.modules, where
            # it is missing because it was not imported.
            spec = ModuleSpec(fullname, None, is_package=True)
            entries = [os.path.join(entry, fullname.rpartition(".")[2]) for entry in path or ()]
            spec.submodule_search_locations = [entry for entry in entries if os.path.isdir(entry)]
        if spec is not None:
            return spec
    return None


def _missing_module(written: str, package: str, parts: list[str], folders: list[str], defined: Iterable[str]) -> str:
    """Return the message for a dotted name of which `package` exists and the remaining parts do not.

    Args:
      written: the setting as the user wrote it.
      package: the part of the name that exists.
      parts: the remaining parts of the name.
      folders: the folders of the package's modules.
      defined: names that the package itself defines.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_"))
    searched = ", ".join(entry for entry in folders if os.path.isdir(entry))
    if not parts:
        return f"{written} is a package. Name a module in it: {', '.join(names) or 'it has none'}."
    hint = did_you_mean(parts[0], [*names, *defined])
    return f"{written}: no {parts[0]!r} in {package} ({searched}).{hint} There are: {', '.join(names) or 'none'}."


def _top_level_names(file: Path) -> set[str] | None:
    """Return the names that a source file defines at its top level; None if only running it can tell."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # importing the file gives a better message
    names: set[str] = set()
    for node in ast.walk(tree):
        # Look at every depth, because `if`, `try` and `with` at the top level define names, too. This also accepts a
        # name that only a function defines; loading the module then reports it.
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    if "*" in names or "__getattr__" in names:
        return None
    return names
