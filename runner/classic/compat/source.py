"""What of TensorFlow a source file uses, where, and how: for whoever has to say what will become of it."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from runner.config import source_names

_ROOTS = ("tensorflow", "tensorflow_estimator", "tensorflow_addons", "tf_slim")

MODEL_FN, HOOK, SCRIPT, ELSEWHERE = "model_fn", "hook", "script", "elsewhere"
"""Where something is used: in a model_fn (a function with arguments `features` and `mode`, or so named); in a class
that inherits from a hook or listener of TensorFlow; at the top of the file or in its `main`, under no `with` that makes
a graph the default; in any other function or graph."""


@dataclasses.dataclass(frozen=True)
class Use(source_names.Use):
    """One place where a name of TensorFlow, or a method of an estimator, is used.

    Attributes:
      name: the whole name; of a method of an object ".method".
      keywords: of the call, if it is one: name -> whether it says None.
      num_arguments: given by position, if it is a call; else -1.
      place: MODEL_FN, HOOK, SCRIPT or ELSEWHERE.
      is_base: whether a class inherits from it.
    """

    keywords: dict[str, bool] = dataclasses.field(default_factory=dict)
    num_arguments: int = -1
    place: str = ELSEWHERE
    is_base: bool = False

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
    walk = _Uses(*_ROOTS)
    walk.visit(tree)
    return sorted(walk.found, key=lambda use: (use.line, use.column))


class _Uses(source_names.Uses):
    """Knows besides which function, class, call and `with` a use is in, and what is an estimator."""

    def __init__(self, *roots: str) -> None:
        super().__init__(*roots)
        self._estimators: set[str] = set()
        self._functions: list[str] = []
        self._model_fns = 0
        self._hooks = 0
        self._graphs = 0

    def use(self, line: int, column: int, name: str, **facts: Any) -> Use:
        return Use(line, column, name, place=self._place, **facts)

    @property
    def _place(self) -> str:
        if self._model_fns:
            return MODEL_FN
        if self._hooks:
            return HOOK
        return ELSEWHERE if self._graphs or self._functions not in ([], ["main"]) else SCRIPT

    # --- what surrounds it -----------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        is_model_fn = {"features", "mode"} <= arguments or node.name.endswith("model_fn")
        self._functions.append(node.name)
        self._model_fns += is_model_fn
        self.generic_visit(node)
        self._model_fns -= is_model_fn
        self._functions.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._functions.append("lambda")
        self.generic_visit(node)
        self._functions.pop()

    def visit_With(self, node: ast.With) -> None:
        before = self._graphs
        for item in node.items:
            self.visit(item)
            self._graphs += _makes_a_graph_default(item.context_expr)
        for child in node.body:
            self.visit(child)
        self._graphs = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [(base, self.dotted(base)) for base in node.bases]
        for base, name in bases:
            if name is not None:
                self.add(base, name, is_base=True)
        is_hook = any(name is not None and name.endswith(("Hook", "Listener")) for _, name in bases)
        self._hooks += is_hook
        for child in [*node.decorator_list, *node.keywords, *node.body]:
            self.visit(child)
        self._hooks -= is_hook

    # --- what is called --------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        super().visit_Assign(node)
        if self._makes_estimator(node.value):
            targets = (one for one in node.targets if isinstance(one, ast.Name | ast.Attribute))
            self._estimators |= {ast.unparse(target) for target in targets}

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        keywords = {one.arg: _is_none(one.value) for one in node.keywords if one.arg}
        if name is not None:
            self.add(node.func, name, keywords=keywords, num_arguments=len(node.args))
        else:
            if isinstance(node.func, ast.Attribute) and self._is_method(node, node.func, keywords):
                self.add(node.func, f".{node.func.attr}", keywords=keywords, num_arguments=len(node.args))
            self.visit(node.func)
        for child in [*node.args, *node.keywords]:
            self.visit(child)

    def _makes_estimator(self, value: ast.AST) -> bool:
        name = self.dotted(value.func) if isinstance(value, ast.Call) else None
        ends = ("Estimator", "Classifier", "Regressor", "model_to_estimator")
        return name is not None and "estimator" in name.lower() and name.endswith(ends)

    def _is_method(self, call: ast.Call, function: ast.Attribute, keywords: dict[str, bool]) -> bool:
        """Whether something is to be said of a method; of `session.run` in a hook, where it feeds."""
        if function.attr in ("make_one_shot_iterator", "make_initializable_iterator"):
            return True
        if function.attr == "run" and self._hooks:
            return "feed_dict" in keywords or len(call.args) > 1
        return ast.unparse(function.value) in self._estimators or "input_fn" in keywords


def _makes_a_graph_default(context: ast.AST) -> bool:
    """Whether all is a graph inside of `with context:`, in TensorFlow 2 too. A session's own becomes the default."""
    call = context.func if isinstance(context, ast.Call) else None
    return isinstance(call, ast.Attribute) and call.attr in ("as_default", "Session")


def _is_none(value: ast.AST) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
