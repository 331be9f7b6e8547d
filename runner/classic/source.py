"""What of TensorFlow a source file uses, and where: found in its text, which is never run."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from runner.classic.installed import V1, canonical

_ROOTS = ("tensorflow", "tensorflow_estimator", "tensorflow_addons", "tf_slim")


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a name of TensorFlow is used.

    Attributes:
      line, column: where it begins, from 1.
      name: the whole name: `tensorflow.compat.v1.train.AdamOptimizer`. Of a method of an object ".method".
      keywords: of the call, if it is one: name -> whether it says None.
      num_arguments: given by position, if it is a call; else -1.
      in_model_fn: whether it is in a model_fn: a function with arguments `features` and `mode`, or so named.
      is_base: whether a class inherits from it.
    """

    line: int
    column: int
    name: str
    keywords: dict[str, bool] = dataclasses.field(default_factory=dict)
    num_arguments: int = -1
    in_model_fn: bool = False
    is_base: bool = False

    @property
    def api_name(self) -> str:
        """Without the module that brings it: `train.AdamOptimizer`."""
        for prefix in (f"{V1}.", "tensorflow."):
            if self.name.startswith(prefix):
                return self.name.removeprefix(prefix)
        return self.name

    @property
    def said(self) -> str:
        """As people write it: `tf.train.AdamOptimizer`, `tf.compat.v1.train.AdamOptimizer`, `.predict`."""
        if self.name.startswith("tensorflow.") and not self.is_private:
            return f"tf.{self.name.removeprefix('tensorflow.')}"
        return self.name

    @property
    def is_private(self) -> bool:
        """Whether it is in a module of TensorFlow that is no part of what it promises."""
        return self.name.startswith(("tensorflow.python", "tensorflow.core", "tensorflow.tools"))


def uses(tree: ast.AST) -> list[Use]:
    """Every use of TensorFlow in a module, in order; methods of estimators and datasets among them."""
    walk = _Walk()
    walk.visit(tree)
    return sorted(walk.found, key=lambda use: (use.line, use.column))


class _Walk(ast.NodeVisitor):
    """Follows names from their import: `import ... as`, `from ... import`, and `tf = tf.compat.v1`."""

    def __init__(self) -> None:
        self.found: list[Use] = []
        self._bound: dict[str, str] = {}
        self._estimators: set[str] = set()
        self._model_fns = 0
        self._handlers = 0

    # --- what a name stands for -----------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in _ROOTS:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self._bind(alias.asname or name, name)
                self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module and node.module.split(".")[0] in _ROOTS:
            for alias in node.names:
                name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                self._bind(alias.asname or alias.name, name)
                self._add(node, name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        name = self._dotted(node.value)
        for target in node.targets:
            if not isinstance(target, ast.Name | ast.Attribute):
                continue
            written = ast.unparse(target)
            if name is not None and isinstance(target, ast.Name):
                self._bind(target.id, name)
            elif self._makes_estimator(node.value):
                self._estimators.add(written)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._handlers += 1  # what the body of `try` imported counts, not what stands in for it
        self.generic_visit(node)
        self._handlers -= 1

    def _bind(self, local: str, name: str) -> None:
        if not self._handlers or local not in self._bound:
            self._bound[local] = canonical(name)

    def _makes_estimator(self, value: ast.AST) -> bool:
        name = self._dotted(value.func) if isinstance(value, ast.Call) else None
        ends = ("Estimator", "Classifier", "Regressor", "model_to_estimator")
        return name is not None and "estimator" in name.lower() and name.endswith(ends)

    def _dotted(self, node: ast.AST) -> str | None:
        """The whole name of a chain of attributes that begins with a name of TensorFlow."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._bound:
            return None
        return canonical(".".join([self._bound[node.id], *reversed(parts)]))

    # --- where it is used ------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = {one.arg for one in _arguments(node.args)}
        is_model_fn = {"features", "mode"} <= arguments or node.name.endswith("model_fn")
        self._model_fns += is_model_fn
        self.generic_visit(node)
        self._model_fns -= is_model_fn

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            name = self._dotted(base)
            if name is not None:
                self._add(base, name, is_base=True)
        for child in [*node.decorator_list, *node.keywords, *node.body]:
            self.visit(child)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func)
        keywords = {one.arg: _is_none(one.value) for one in node.keywords if one.arg}
        if name is not None:
            self._add(node.func, name, keywords=keywords, num_arguments=len(node.args))
        else:
            if isinstance(node.func, ast.Attribute) and self._is_method(node.func, keywords):
                self._add(node.func, f".{node.func.attr}", keywords=keywords, num_arguments=len(node.args))
            self.visit(node.func)
        for child in [*node.args, *node.keywords]:
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._dotted(node)
        if name is None:
            self.generic_visit(node)
        else:
            self._add(node, name)

    def visit_Name(self, node: ast.Name) -> None:
        name = self._bound.get(node.id)
        if name is not None and isinstance(node.ctx, ast.Load):
            self._add(node, name)

    def _is_method(self, function: ast.Attribute, keywords: dict[str, bool]) -> bool:
        if function.attr in ("make_one_shot_iterator", "make_initializable_iterator"):
            return True
        return ast.unparse(function.value) in self._estimators or "input_fn" in keywords

    def _add(self, node: Any, name: str, **facts: Any) -> None:
        if canonical(name) in ("tensorflow", V1):
            return  # the module itself
        in_model_fn = self._model_fns > 0
        self.found.append(Use(node.lineno, node.col_offset + 1, canonical(name), in_model_fn=in_model_fn, **facts))


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)


def _is_none(value: ast.AST) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
