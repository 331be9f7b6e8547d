"""Find each use of TensorFlow in a source file, with its place and arguments."""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Collection
from typing import Any

from runner.config import source_names

_ROOTS = ("tensorflow", "tensorflow_estimator", "tensorflow_addons", "tf_slim")

MODEL_FN = "model_fn"
INPUT_FN = "input_fn"
HOOK = "hook"
SCRIPT = "script"
ELSEWHERE = "elsewhere"
"""The places where a name is used.

MODEL_FN: a function named so, or with arguments `features` and `mode`. INPUT_FN: a function named so, but not a
receiver function. HOOK: a class that inherits from a hook or listener of TensorFlow. SCRIPT: the top level of the file,
`main` and functions that only these call, outside of graphs. ELSEWHERE: any other function or graph.
"""


@dataclasses.dataclass(frozen=True)
class Use(source_names.Use):
    """One use of a TensorFlow name, or of a method of an estimator or dataset.

    Attributes:
      name: the full name; for the method of an object, ".method".
      keywords: for a call: keyword -> whether its value is None.
      num_arguments: for a call: number of positional arguments; else -1.
      place: MODEL_FN, INPUT_FN, HOOK, SCRIPT or ELSEWHERE.
      is_base: the name is a base of a class.
      is_of_dataset: a method of a value that is a tf.data.Dataset for sure.
    """

    keywords: dict[str, bool] = dataclasses.field(default_factory=dict)
    num_arguments: int = -1
    place: str = ELSEWHERE
    is_base: bool = False
    is_of_dataset: bool = False

    @property
    def as_written(self) -> str:
        """The name as users write it: `tf.train.AdamOptimizer`, `tf.compat.v1.train.AdamOptimizer`, `.predict`."""
        if self.name.startswith("tensorflow.") and not self.is_private:
            return f"tf.{self.name.removeprefix('tensorflow.')}"
        return self.name

    @property
    def is_private(self) -> bool:
        """Whether the name is in a private module of TensorFlow."""
        return self.name.startswith(("tensorflow.python", "tensorflow.core", "tensorflow.tools"))


def uses(tree: ast.AST) -> list[Use]:
    """Return all uses of TensorFlow in a module in the order of lines, including methods of estimators and datasets."""
    visitor = _Uses(*_ROOTS, functions_of_script=_functions_of_the_script(tree))
    visitor.visit(tree)
    return sorted(visitor.found, key=lambda use: (use.line, use.column))


_ASSIGNMENTS = frozenset({"assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update"})
"""Methods of variables."""

_NO_DATASETS = frozenset(
    {"cardinality", "element_spec", "get_single_element", "options", "output_classes", "output_shapes", "output_types",
     "reduce"}
)  # fmt: skip
"""Methods of a dataset that do not return one; nor do those whose name begins with `make_` or `as_`."""

ARGUMENTS_OF_CONTRIB = frozenset({"num_threads", "output_buffer_size"})
"""Arguments that `map` had in `tf.contrib.data`, up to TensorFlow 1.3; no other `map` has them."""


class _Uses(source_names.Uses):
    """Finds uses. It keeps track of the functions, classes and `with` blocks around them, and of the variables that
    hold estimators or sessions.
    """

    def __init__(self, *roots: str, functions_of_script: frozenset[str]) -> None:
        super().__init__(*roots)
        self._functions_of_script = functions_of_script
        self._estimators: set[str] = set()
        self._sessions: set[str] = set()  # variables that hold sessions made in eager mode
        self._datasets: set[str] = set()  # variables that hold datasets
        self._functions: list[str] = []  # names of the functions around the node that is visited
        self._depths: collections.Counter[str] = collections.Counter()  # MODEL_FN, INPUT_FN or HOOK -> depth
        self._num_graphs = 0  # number of `with` blocks around it that make a graph the default

    def use(self, line: int, column: int, name: str, **facts: Any) -> Use:
        return Use(line, column, name, place=self._place, **facts)

    @property
    def _place(self) -> str:
        for place in (MODEL_FN, INPUT_FN, HOOK):
            if self._depths[place]:
                return place
        in_script = not self._functions or (
            len(self._functions) == 1 and self._functions[0] in self._functions_of_script
        )
        return SCRIPT if in_script and not self._num_graphs else ELSEWHERE

    # --- scopes ----------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        is_model_fn = {"features", "mode"} <= arguments or node.name.endswith("model_fn")
        self._functions.append(node.name)
        # An argument with the name of an outer variable holds another value.
        datasets = self._datasets
        self._datasets = datasets - arguments
        # A `serving_input_fn` or ServingInputReceiver describes requests, and returns no data.
        is_input_fn = node.name.endswith("input_fn") and "erving" not in ast.unparse(node)
        self._depths[MODEL_FN] += is_model_fn
        self._depths[INPUT_FN] += is_input_fn
        self.generic_visit(node)
        self._depths[MODEL_FN] -= is_model_fn
        self._depths[INPUT_FN] -= is_input_fn
        self._datasets = datasets
        self._functions.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._functions.append("lambda")
        self.generic_visit(node)
        self._functions.pop()

    def visit_With(self, node: ast.With) -> None:
        before = self._num_graphs
        for item in node.items:
            self.visit(item)
            self._num_graphs += _makes_a_graph_default(item.context_expr, self._sessions)
        for child in node.body:
            self.visit(child)
        self._num_graphs = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [(base, self.dotted(base)) for base in node.bases]
        for base, name in bases:
            if name is not None:
                self.add(base, name, is_base=True)
        is_hook = any(name is not None and name.endswith(("Hook", "Listener")) for _, name in bases)
        is_optimizer = any(name is not None and name.endswith("Optimizer") for _, name in bases)
        self._depths[HOOK] += is_hook
        self._depths[MODEL_FN] += is_optimizer  # a model_fn calls its methods
        for child in [*node.decorator_list, *node.keywords, *node.body]:
            self.visit(child)
        self._depths[HOOK] -= is_hook
        self._depths[MODEL_FN] -= is_optimizer

    # --- calls -----------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note which variables hold TensorFlow names, datasets, estimators and sessions."""
        super().visit_Assign(node)
        targets = {ast.unparse(target) for target in node.targets if isinstance(target, ast.Name | ast.Attribute)}
        for target in node.targets:
            self._assign(target, node.value)
        if self._makes_dataset(node.value):
            self._datasets |= targets
        else:
            self._datasets -= targets  # the variable may hold anything from here on
        if self._makes_estimator(node.value):
            self._estimators |= targets
        if self._place == SCRIPT and self._makes_session(node.value):
            self._sessions |= targets

    def visit_Call(self, node: ast.Call) -> None:
        """Record the call of a TensorFlow name, or of a method that may be a finding, and visit the arguments."""
        name = self.dotted(node.func)
        keywords = {keyword.arg: _is_none(keyword.value) for keyword in node.keywords if keyword.arg}
        if name is not None:
            self.add(node.func, name, keywords=keywords, num_arguments=len(node.args))
        else:
            is_of_dataset = isinstance(node.func, ast.Attribute) and self._makes_dataset(node.func.value)
            if isinstance(node.func, ast.Attribute) and (is_of_dataset or self._is_method(node, node.func, keywords)):
                self.add(
                    node.func,
                    f".{node.func.attr}",
                    keywords=keywords,
                    num_arguments=len(node.args),
                    is_of_dataset=is_of_dataset,
                )
            self.visit(node.func)
        for child in [*node.args, *node.keywords]:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._assign(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Remember the TensorFlow name that is assigned to a variable or to an attribute such as `self.layers`, also as
        a part of `a, b = tf.layers, tf.nn`.
        """
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, value_of_part in zip(target.elts, value.elts, strict=True):
                self._assign(part, value_of_part)
        elif isinstance(target, ast.Name | ast.Attribute):
            name = self.dotted(value)
            if name is not None:
                self._bind(ast.unparse(target), name)

    def visit_arguments(self, node: ast.arguments) -> None:
        self.generic_visit(node)
        positional = [*node.posonlyargs, *node.args]
        with_default = positional[len(positional) - len(node.defaults) :]
        for argument, default in zip(with_default, node.defaults, strict=True):
            name = self.dotted(default)
            if name is not None:
                self._bind(argument.arg, name)

    def dotted(self, node: ast.AST) -> str | None:
        """Return the full name that an expression stands for; None if it stands for no name of the followed packages.

        The expression is a chain of attributes (`tf.layers.dense`). The chain may begin with a variable, or an
        attribute such as `self.layers`, to which a name was assigned, with `getattr(tf, "contrib")`, or with
        `importlib.import_module("tensorflow.contrib")`.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            assigned_name = self._bound.get(ast.unparse(node)) if _is_plain(node) else None
            if assigned_name is not None:
                return source_names.canonical(".".join([assigned_name, *reversed(parts)]))
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            beginning = self._bound.get(node.id)
        elif isinstance(node, ast.Call):
            beginning = self._imported_by_call(node)
        else:
            beginning = None
        return None if beginning is None else source_names.canonical(".".join([beginning, *reversed(parts)]))

    def _imported_by_call(self, call: ast.Call) -> str | None:
        """Return the name that `getattr(module, "name")` or `import_module("name")` returns; None for other calls."""
        function = getattr(call.func, "attr", getattr(call.func, "id", ""))
        texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        if function == "getattr" and len(call.args) == 2 and len(texts) == 1:
            owner = self.dotted(call.args[0])
            return f"{owner}.{texts[0]!s}" if owner is not None else None
        if function == "import_module" and len(texts) == 1 and str(texts[0]).partition(".")[0] in _ROOTS:
            return str(texts[0])
        return None

    def _makes_dataset(self, value: ast.AST) -> bool:
        """Report whether an expression is a tf.data.Dataset for sure.

        That is a call of a dataset's constructor, a variable with a dataset, or either with calls of methods behind it.
        """
        while isinstance(value, ast.Call):
            name = self.dotted(value.func) or ""
            if name:
                public = name.replace(f"{source_names.V1}.", "tensorflow.").replace(".contrib.", ".")
                is_constructor = public.startswith("tensorflow.data.") and public.endswith("Dataset")
                return is_constructor or public.startswith("tensorflow.data.Dataset.")
            if not isinstance(value.func, ast.Attribute):
                return False
            method = value.func.attr
            if method in _NO_DATASETS or method.startswith(("make_", "as_", "_")):
                return False
            value = value.func.value
        return isinstance(value, ast.Name | ast.Attribute) and ast.unparse(value) in self._datasets

    def _makes_estimator(self, value: ast.AST) -> bool:
        name = self.dotted(value.func) if isinstance(value, ast.Call) else None
        ends = ("Estimator", "Classifier", "Regressor", "model_to_estimator")
        return name is not None and "estimator" in name.lower() and name.endswith(ends)

    def _makes_session(self, value: ast.AST) -> bool:
        """Report whether the expression makes a session without the argument `graph`."""
        name = self.dotted(value.func) if isinstance(value, ast.Call) else None
        has_graph = isinstance(value, ast.Call) and any(keyword.arg == "graph" for keyword in value.keywords)
        return name is not None and name.endswith((".Session", ".InteractiveSession")) and not has_graph

    def _is_method(self, call: ast.Call, function: ast.Attribute, keywords: dict[str, bool]) -> bool:
        """Report whether a call of a method is a use to report, by the method's name and the place of the call."""
        if function.attr in ("make_one_shot_iterator", "make_initializable_iterator"):
            return True
        if function.attr == "map" and ARGUMENTS_OF_CONTRIB & {*keywords}:
            return True
        if function.attr in _ASSIGNMENTS:
            return self._place == MODEL_FN
        if function.attr == "run" and self._depths[HOOK]:  # `session.run` works in a hook, but not with a feed_dict
            return "feed_dict" in keywords or len(call.args) > 1
        if function.attr == "run" and self._place == SCRIPT:
            return ast.unparse(function.value) in self._sessions
        if function.attr == "eval" and self._place == SCRIPT:
            return not call.args and not {*keywords} - {"session"}
        return ast.unparse(function.value) in self._estimators or "input_fn" in keywords


def _functions_of_the_script(tree: ast.AST) -> frozenset[str]:
    """Return the names of the functions of a module that run in eager mode: `main`, and functions that are called only
    by such functions or at the top level.

    A function that is passed as a value (`input_fn=read`), or called by such a function, may run in a graph.
    """
    functions = {node.name for node in ast.iter_child_nodes(tree) if isinstance(node, ast.FunctionDef)}
    calls, used_as_values = _calls(tree)
    in_script = functions - used_as_values | {"main"} & functions
    # Remove functions that are called from elsewhere, until all callers of those that are left are among them, too.
    callers = {name: {caller for called, caller in calls if called == name} for name in functions}
    while called_elsewhere := {
        name for name in in_script - {"main"} if not callers[name] or not callers[name] <= {"", *in_script}
    }:
        in_script -= called_elsewhere
    return frozenset(in_script)


def _calls(tree: ast.AST) -> tuple[set[tuple[str, str]], set[str]]:
    """Return (a set of (function, caller) for each call by name, the names that are used in other ways).

    A caller is a function of the module, "" for the module itself, or "?" if the call may run in a graph.
    """
    calls: set[tuple[str, str]] = set()
    used_as_values: set[str] = set()
    unvisited: list[tuple[ast.AST, str]] = [(tree, "")]
    while unvisited:
        node, caller = unvisited.pop()
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Name):
            used_as_values.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            calls.add((node.func.id, caller))
            children.remove(node.func)
        elif isinstance(node, ast.FunctionDef):
            caller = "?" if caller else node.name
        elif isinstance(node, ast.Lambda | ast.ClassDef):
            caller = "?"
        elif isinstance(node, ast.With) and any(_makes_a_graph_default(item.context_expr) for item in node.items):
            caller = "?"
        unvisited += [(child, caller) for child in children]
    return calls, used_as_values


def _makes_a_graph_default(context: ast.AST, sessions: Collection[str] = ()) -> bool:
    """Report whether the body of `with context:` runs in a graph, even in TensorFlow 2.

    `with tf.Session():` and `with graph.as_default():` make a graph the default. `with session.as_default():` does not,
    where `session` is one of `sessions`, the variables with sessions that were made in eager mode.
    """
    call = context.func if isinstance(context, ast.Call) else None
    may_make_graph_default = isinstance(call, ast.Attribute) and call.attr in ("as_default", "Session")
    return may_make_graph_default and isinstance(call, ast.Attribute) and ast.unparse(call.value) not in sessions


def _is_plain(node: ast.Attribute) -> bool:
    """Report whether an expression is an attribute of a variable: `self.layers`."""
    return isinstance(node.value, ast.Name)


def _is_none(value: ast.AST) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
