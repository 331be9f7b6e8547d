"""Import sources written for TensorFlow 1 so that their `import tensorflow as tf` means `tensorflow.compat.v1`.

`python -m runner.classic` starts scripts this way, and `python -m runner` imports user functions this way if they use
tf.estimator. A file is taken to be written for TensorFlow 1 if it uses a name that TensorFlow 2 does not have
(`tf.layers`, `tf.train.AdamOptimizer`, `tf.logging`), uses no name that only TensorFlow 2 has, and does not check the
version. A file that uses neither kind of name is treated like the started script. Installed packages are not changed.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

import runner
from runner.classic.compat import install, names
from runner.classic.compat.installed_names import Installed
from runner.classic.compat.old_modules import space_of
from runner.classic.compat.source import Use, uses
from runner.config.source_names import V1

_log = logging.getLogger(__name__)

_NOT_MOVED = frozenset({"compat", "contrib", "core", "examples", "keras", "python", "tools"})
"""Names in `tensorflow` that imports keep, instead of looking for them in `tensorflow.compat.v1`."""

_METHODS_OF_1 = frozenset({".make_one_shot_iterator", ".make_initializable_iterator"})
"""Methods that a tf.data.Dataset has only in TensorFlow 1."""

_VERSIONS = frozenset({"__version__", "VERSION"})
_PRINTING_FUNCTIONS = ("print", "debug", "info", "warning")

_KINDS_OF_FOLDERS = ("stdlib", "platstdlib", "purelib", "platlib")
_FOLDERS_OF_INSTALLED = tuple(
    os.path.join(path, "") for path in (*map(sysconfig.get_path, _KINDS_OF_FOLDERS), os.path.dirname(runner.__file__))
)


@dataclasses.dataclass(frozen=True)
class Signs:
    """The evidence for which TensorFlow a source was written.

    Attributes:
      first_use_of_1: the first use of a name that only TensorFlow 1 has; None: there is none.
      first_use_of_2: the first use of a name that only TensorFlow 2 has; None: there is none.
      checks_version: the source checks `tf.__version__`, so it supports several versions.
      has_dimensions: the source uses `.value` of elements of shapes, which TensorFlow 1 had.
    """

    first_use_of_1: Use | None = None
    first_use_of_2: Use | None = None
    checks_version: bool = False
    has_dimensions: bool = False

    @property
    def are_of_1(self) -> bool:
        """Whether the source was written for TensorFlow 1 only."""
        return self.first_use_of_1 is not None and self.first_use_of_2 is None and not self.checks_version


def signs(tree: ast.AST, installed: Installed) -> Signs:
    """Return the evidence in a source. If TensorFlow is not installed, both first uses are None."""
    used = uses(tree)
    fields: dict[str, Any] = {"checks_version": _checks_version(tree, used), "has_dimensions": _has_dimensions(tree)}
    names_version_1 = any(use.name.startswith(f"{V1}.") for use in used)
    try_statements = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    if not installed.is_there:
        return Signs(**fields)
    for use in used:
        if any(node.lineno <= use.line <= (node.end_lineno or 0) for node in try_statements):
            continue  # `except` handles versions without that name
        if use.name in _METHODS_OF_1 and not names_version_1:
            fields.setdefault("first_use_of_1", use)
        is_of_tensorflow = use.name.startswith("tensorflow.")
        if not is_of_tensorflow or use.name.startswith(f"{V1}.") or use.is_private:
            continue
        is_1 = _has(installed, f"{V1}.{use.api_name}")
        is_2 = _has(installed, use.name)
        if is_1 != is_2:
            fields.setdefault("first_use_of_1" if is_1 else "first_use_of_2", use)
    return Signs(**fields)


def _checks_version(tree: ast.AST, used: Sequence[Use]) -> bool:
    """Report whether `tf.__version__` is used for more than to print it or to assert a minimum."""
    uses_of_version = (use for use in used if _VERSIONS & set(use.name.split(".")))
    positions = {(use.line, use.column - 1) for use in uses_of_version}
    # After `version = tf.__version__`, uses of `version` count in place of that line.
    variables_with_version = set[str]()
    unvisited = [tree]
    while unvisited:
        node = unvisited.pop()
        if _prints(node) or isinstance(node, ast.Assert):
            continue
        if (
            isinstance(node, ast.Assign)
            and _position(node.value) in positions
            and isinstance(node.targets[0], ast.Name)
        ):
            variables_with_version.add(node.targets[0].id)
            unvisited = [tree]  # begin again, because nodes that were visited may use the variable
            positions -= {_position(node.value)}
            continue
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if _position(node) in positions or (is_read and node.id in variables_with_version):  # type: ignore[attr-defined]
            return True
        unvisited += ast.iter_child_nodes(node)
    return False


def _prints(node: ast.AST) -> bool:
    """Report whether a node is a call that prints or logs."""
    function = node.func if isinstance(node, ast.Call) else None
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name in _PRINTING_FUNCTIONS


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _has_dimensions(tree: ast.AST) -> bool:
    """Report whether the source has an expression such as `x.shape[-1].value` or `x.get_shape()[0].value`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr != "value" or not isinstance(node.value, ast.Subscript):
            continue
        shape = node.value.value
        if isinstance(shape, ast.Call):
            shape = shape.func
        if isinstance(shape, ast.Attribute) and shape.attr in ("shape", "get_shape"):
            return True
    return False


def _has(installed: Installed, name: str) -> bool:
    """Report whether TensorFlow has or once had `name`, which is `tensorflow.compat.v1.x` or `tensorflow.x`.

    Names of tf.estimator count as there, since the runner serves them.
    """
    space, rest = space_of(names.SPACES, name) or (None, "")
    if space is not None and rest:
        return space.serves(rest)
    return installed.has(name) or name.startswith(f"{V1}.contrib.")


def as_version_1(tree: ast.AST) -> None:
    """Change the imports in a syntax tree, in place, so that `tensorflow` means tensorflow.compat.v1."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, ())
            if isinstance(statements, list):
                changed: list[ast.stmt] = []
                for statement in statements:
                    changed += _as_imports_of_v1(statement)
                statements[:] = changed
    ast.fix_missing_locations(tree)


_DIMENSION = ast.parse("from runner.classic.compat.tf1_operators import dimension as _as_dimension").body[0]


def with_values_of_dimensions(tree: ast.Module) -> None:
    """Change `x.shape[0].value` in a syntax tree, in place, so that it also works if `x.shape[0]` is a number."""
    values = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_value_of_element(node)]
    for node in values:
        dimension = ast.Call(ast.Name("_as_dimension", ast.Load()), [node.value], [])
        node.value = ast.copy_location(dimension, node.value)
    if not values:
        return
    insert_at = 0
    for index, statement in enumerate(tree.body):  # only a docstring and __future__ imports may come before it
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not is_text and not is_future:
            break
        insert_at = index + 1
    tree.body.insert(insert_at, ast.copy_location(_DIMENSION, tree.body[0]))
    ast.fix_missing_locations(tree)


def _is_value_of_element(node: ast.Attribute) -> bool:
    return node.attr == "value" and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Subscript)


def _as_imports_of_v1(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements that replace an import, so that names of `tensorflow` come from tensorflow.compat.v1. Yield
    any other statement unchanged.

    Most imports are changed in place, and then yielded. `from tensorflow import keras, layers` becomes two statements.
    """
    if isinstance(statement, ast.Import):
        statement.names = [_as_name_of_v1(alias) for alias in statement.names]
        yield statement
    elif not isinstance(statement, ast.ImportFrom) or statement.level or not _is_of_tensorflow(statement.module or ""):
        yield statement
    elif statement.module == "tensorflow":
        not_moved = [alias for alias in statement.names if alias.name in _NOT_MOVED]
        moved = [alias for alias in statement.names if alias.name not in _NOT_MOVED]
        for module, aliases in ((V1, moved), ("tensorflow", not_moved)):
            if aliases:
                yield ast.copy_location(ast.ImportFrom(module, aliases, 0), statement)
    else:
        statement.module = _module_in_v1(statement.module or "")
        yield statement


def _as_name_of_v1(alias: ast.alias) -> ast.alias:
    """Return what replaces one module of `import a, b as c`.

    `import tensorflow` becomes `import tensorflow.compat.v1 as tensorflow`, and `import tensorflow.layers as layers`
    becomes `import tensorflow.compat.v1.layers as layers`. `import tensorflow.layers` stays, because it binds the
    name `tensorflow`, and not the module.
    """
    if alias.name == "tensorflow":
        return ast.copy_location(ast.alias(V1, alias.asname or "tensorflow"), alias)
    if alias.asname and _is_of_tensorflow(alias.name):
        return ast.copy_location(ast.alias(_module_in_v1(alias.name), alias.asname), alias)
    return alias


def _is_of_tensorflow(module: str) -> bool:
    return module.partition(".")[0] == "tensorflow"


_DATASETS = ("tensorflow.python.data", "tensorflow.python.data.ops.dataset_ops")
"""Private modules whose `Dataset` was that of TensorFlow 1."""


def _module_in_v1(module: str) -> str:
    """Return the module of tensorflow.compat.v1 for `tensorflow.x.y`; `module` itself if imports do not move it."""
    if module in _DATASETS:
        return f"{V1}.data"
    _, _, rest = module.partition(".")
    if rest.partition(".")[0] in _NOT_MOVED:
        return module
    return f"{V1}.{rest}"


def watch_imports(main: str = "__main__") -> Sources:
    """Install a `Sources` finder, which compiles modules that are imported from now on for their TensorFlow version,
    and return it.

    Args:
      main: as in Sources.
    """
    sources = Sources(Installed(), main)
    sys.meta_path.insert(0, sources)
    return sources


class Sources(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and compiles those written for TensorFlow 1 so that `tensorflow` means
    tensorflow.compat.v1.

    Args:
      installed: the names of the installed TensorFlow.
      main: name of the main module. A file that uses no name which only one version has is treated like it.
    """

    def __init__(self, installed: Installed, main: str) -> None:
        self._installed = installed
        self._main = main
        self._main_is_for_1 = False  # the main module was written for TensorFlow 1

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader = spec.loader if spec is not None else None
        if spec is None or type(loader) is not SourceFileLoader:
            return None
        if loader.path.startswith(_FOLDERS_OF_INSTALLED) or "site-packages" in loader.path.split(os.sep):
            return None
        spec.loader = _Loader(fullname, loader.path, self)
        return spec

    def script(self, path: str) -> Any:
        """Return the compiled code of the script `path`, which is the main module."""
        return _Loader("__main__", path, self).get_code("__main__")

    def compiled(self, text: bytes, path: str, name: str) -> Any:
        """Return the compiled code of the module `name`, whose source is `text`."""
        tree = ast.parse(text, path)
        if b"tensorflow" in text:
            version_signs = signs(tree, self._installed)
            if name.removesuffix(".__main__") == self._main:
                self._main_is_for_1 = version_signs.are_of_1
            if version_signs.are_of_1:
                assert version_signs.first_use_of_1 is not None
                _log.warning(
                    "%s, line %d: %s is a name of TensorFlow 1, so `tensorflow` means tensorflow.compat.v1 in this "
                    "file.",
                    os.path.relpath(path), version_signs.first_use_of_1.line, version_signs.first_use_of_1.as_written,
                )  # fmt: skip
            # A file without signs of either version is treated like the main module.
            is_for_1 = version_signs.are_of_1 or (
                self._main_is_for_1 and version_signs.first_use_of_2 is None and not version_signs.checks_version
            )
            if is_for_1 or version_signs.has_dimensions:
                install.called.update(install.SHAPES)
                with_values_of_dimensions(tree)
            if is_for_1:
                as_version_1(tree)
        # Without dont_inherit, the __future__ import of this file would apply to the user's source.
        return compile(tree, path, "exec", dont_inherit=True)


class _Loader(SourceFileLoader):
    """Always compiles the source, because the bytecode that Python cached has the original imports."""

    def __init__(self, fullname: str, path: str, sources: Sources) -> None:
        super().__init__(fullname, path)
        self._sources = sources

    def get_code(self, fullname: str) -> Any:
        return self._sources.compiled(self.get_data(self.path), self.path, fullname)
