"""The TensorFlow names that a source file uses, followed from its imports without running it."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

V1 = "tensorflow.compat.v1"


def canonical(name: str) -> str:
    """Return the canonical form of a dotted name: `tensorflow.compat.v2.x` is `tensorflow.x`."""
    # The last `compat` decides: each of these modules has both of them.
    found = re.match(r"tensorflow(?:\.compat\.(v[12])(?=\.|$))+", name)
    if found is None:
        return name
    module = V1 if found[1] == "v1" else "tensorflow"
    return module + name[found.end() :]


@dataclasses.dataclass(frozen=True)
class Use:
    """A place where a TensorFlow name is used.

    Attributes:
      line, column: where it begins, from 1.
      name: the full name: `tensorflow.compat.v1.train.AdamOptimizer`.
    """

    line: int
    column: int
    name: str

    @property
    def api_name(self) -> str:
        """The name without its module: `train.AdamOptimizer`."""
        for prefix in (f"{V1}.", "tensorflow."):
            if self.name.startswith(prefix):
                return self.name.removeprefix(prefix)
        return self.name


class Uses(ast.NodeVisitor):
    """Finds the uses of packages in a source file, following names from their import.

    Names are followed through `import ... as`, `from ... import`, and assignments such as `tf = tf.compat.v1`.
    """

    def __init__(self, *roots: str) -> None:
        self.found: list[Any] = []
        self._roots = roots
        self._bound: dict[str, str] = {}
        self._num_except_around = 0

    def use(self, line: int, column: int, name: str, **facts: Any) -> Any:
        """Return the record of a place where `name` is used; subclasses store `facts` in it, too."""
        return Use(line, column, name)

    def add(self, node: Any, name: str, **facts: Any) -> None:
        """Record a use of `name`, unless that is TensorFlow itself."""
        if canonical(name) not in ("tensorflow", V1):
            self.found.append(self.use(node.lineno, node.col_offset + 1, canonical(name), **facts))

    def dotted(self, node: ast.AST) -> str | None:
        """Return the full name of a chain of attributes that begins with a followed name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._bound:
            return None
        return canonical(".".join([self._bound[node.id], *reversed(parts)]))

    # --- what a name stands for -----------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.split(".")[0]
            if root in self._roots:
                name = alias.name if alias.asname else root  # `import a.b` binds a, `import a.b as c` binds a.b
                self._bind(alias.asname or name, name)
                self.add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module and node.module.split(".")[0] in self._roots:
            for alias in node.names:
                name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                self._bind(alias.asname or alias.name, name)
                self.add(node, name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        name = self.dotted(node.value)
        if name is None:
            return
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._bind(target.id, name)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._num_except_around += 1  # imports in `try` are followed; the substitutes that `except` imports are not
        self.generic_visit(node)
        self._num_except_around -= 1

    def _bind(self, local: str, name: str) -> None:
        """Note that `local` stands for the dotted name `name`, unless this is a substitute in an `except`."""
        if not self._num_except_around or local not in self._bound:
            self._bound[local] = canonical(name)

    # --- where it is used ------------------------------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.add(node, name)

    def visit_Name(self, node: ast.Name) -> None:
        name = self._bound.get(node.id)
        if name is not None and isinstance(node.ctx, ast.Load):
            self.add(node, name)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left: ast.expr = node
        terms: list[ast.expr] = []
        while isinstance(left, ast.BinOp):  # not recursive: a sum of a thousand terms is a tree of a thousand levels
            terms.append(left.right)
            left = left.left
        for term in (left, *reversed(terms)):
            self.visit(term)


def imported_files(tree: ast.AST, file: Path, folders: Iterable[Path]) -> list[Path]:
    """Return the files in `folders`, where Python looks for modules, that the source `file` imports."""
    found = []
    for folder in folders:
        package: tuple[str, ...] = ()
        if file.is_relative_to(folder):
            package = file.parent.relative_to(folder).parts
        for name in _imported_names(tree, package):
            module = folder.joinpath(*name.split("."))
            found += [module.with_suffix(".py"), module / "__init__.py"]
    return [path for path in found if path.is_file()]


def _imported_names(tree: ast.AST, package: tuple[str, ...]) -> list[str]:
    """Return the dotted names of the modules that a source may import; `from a import b` means a, and perhaps a.b.

    Args:
      tree: the source.
      package: the parts of the name of the package that it is in, from which relative imports count.
    """
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts: list[str] = []
            if node.level:
                parts += package[: len(package) - node.level + 1]
            if node.module:
                parts.append(node.module)
            module = ".".join(parts)
            names.append(module)
            names += [f"{module}.{alias.name}" for alias in node.names]
    return [name for name in names if name]


def uses(tree: ast.AST, root: str = "tensorflow") -> list[Use]:
    """Return every use of the package `root` in a module, in order."""
    walk = Uses(root)
    walk.visit(tree)
    return sorted(walk.found, key=lambda use: (use.line, use.column))
