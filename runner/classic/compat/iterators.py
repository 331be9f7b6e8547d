"""Find iterators, views and ranges of Python 3 where a program needs a list: what was a list in Python 2 (`map`, `zip`,
`d.keys()`), and generators.

A value is followed through variables that are assigned once, `self.x`, arguments and results of the file's functions,
and the dict `params` of an Estimator. It is found where a list is needed: `x[0]`, `len(x)`, arguments of TensorFlow and
NumPy, and where an iterator that is empty after its first use is used again.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard

from runner.classic.compat.installed_names import name_bound_by
from runner.config.source_names import Uses

Found = tuple[ast.expr, str, str]
"""(expression, name of what made the value such as `map` or `.keys`, text of the finding)."""

ITERATOR = "an iterator"
VIEW = "a view"
RANGE = "a range"
_ALL = frozenset({ITERATOR, VIEW, RANGE})
_NO_RANGES = _ALL - {RANGE}
_ITERATORS = frozenset({ITERATOR})


class Origin(NamedTuple):
    """Where a value that is no list comes from.

    Attributes:
      maker: what made it, as users write it: `map`, `.keys`, or _GENERATOR.
      kind: ITERATOR, VIEW or RANGE.
    """

    maker: str
    kind: str


_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("map", "filter", "zip", "enumerate", "reversed", "iter"), ITERATOR),
    "range": RANGE,
}
_GENERATOR = "a generator"
_LISTS_BEFORE = ("map", "filter", "zip")
_READ_AGAIN = (*_LISTS_BEFORE, _GENERATOR)
"""What makes iterators that programs read a second time; `iter` and the like say that they make iterators."""

_VIEWS = ("keys", "values", "items")
_LIST_METHODS = ("append", "extend", "insert", "pop", "remove", "reverse", "sort")
_LIST_METHODS_OF_RANGES = ("count", "index")

_FUNCTIONS_OF_LISTS: Mapping[tuple[str, frozenset[str]], str] = {
    ("tensorflow", _NO_RANGES): """
        Variable clip_by_global_norm concat constant convert_to_tensor feature_column.bucketized_column gather
        reduce_max reduce_mean reduce_min reduce_prod reduce_sum reshape split stack tile transpose
    """,
    ("tensorflow", _ITERATORS): """
        contrib.lookup.index_table_from_tensor data.Dataset.from_tensor_slices data.Dataset.from_tensors
        data.FixedLengthRecordDataset data.TFRecordDataset data.TextLineDataset
        feature_column.categorical_column_with_vocabulary_list feature_column.crossed_column gradients
    """,
    ("numpy", _NO_RANGES): """
        argmax argmin argsort array asarray average column_stack concatenate cumsum dot hstack max mean median min
        percentile random.choice random.permutation stack std unique vstack
    """,
    ("numpy", _ALL): "random.shuffle",
    ("random", _NO_RANGES): "choice sample",
    ("random", _ALL): "shuffle",
    ("json", _ALL): "dump dumps",
}
"""(Package, kinds of values) -> functions that refuse these values as arguments, and in tuples and dicts of them."""

_REFUSED_BY: Mapping[str, frozenset[str]] = {
    f"{package}.{function}": kinds
    for (package, kinds), functions in _FUNCTIONS_OF_LISTS.items()
    for function in functions.split()
}

_PREMADE = ("Classifier", "Regressor", "Estimator")
_LIST_KEYWORDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("feature_columns", "linear_feature_columns", "dnn_feature_columns"), _ITERATORS),
    **dict.fromkeys(("hidden_units", "dnn_hidden_units", "names"), _ITERATORS),
    **dict.fromkeys(("label_vocabulary", "exporters"), _NO_RANGES),
}
"""Argument of tf.estimator's classes and of `pandas.read_csv` -> kinds of values that they refuse."""

_NOT_READ = ("isinstance", "type", "id", "print", "iter", "next", "callable", "hasattr", "repr")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def used_as_lists(tree: ast.AST) -> Iterator[Found]:
    """Yield each place of a module where such a value is used as a list, in any order."""
    return _Values(tree).found()


@dataclasses.dataclass
class _Scope:
    """A function, class or module.

    Attributes:
      node: the node of the syntax tree.
      outer: the scope around it; None: this is the module.
      stored: variable -> number of places that bind it.
      origins: variable that is bound once -> what made its value.
    """

    node: ast.AST
    outer: _Scope | None
    stored: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)


class _Values:
    """Follows the values of one module."""

    def __init__(self, tree: ast.AST) -> None:
        shared = ast.expr_context | ast.operator | ast.unaryop | ast.boolop | ast.cmpop  # one object serves all places
        self._nodes = [node for node in ast.walk(tree) if not isinstance(node, shared)]  # outer nodes come first
        self._parents: dict[ast.AST, ast.AST] = {}
        for node in self._nodes:
            self._parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
        self._names = Uses("tensorflow", "numpy", "random", "json", "pandas", "itertools")
        self._names.visit(tree)
        self._rebound = {name_bound_by(node) for node in self._nodes} - _same_as_builtins(self._nodes)
        self._scopes: dict[ast.AST, _Scope] = {}  # of each node: the scope it is in; of a scope: itself
        self._classes: dict[ast.AST, ast.AST | None] = {}  # the class around each node
        self._inside: dict[ast.AST, list[ast.AST]] = collections.defaultdict(list)  # scope -> its nodes
        self._assigned: dict[object, list[ast.expr]] = collections.defaultdict(list)  # name or attribute -> values
        for node in self._nodes:
            self._record_node(node)
        self._functions = self._functions_by_name()
        self._returned: dict[str, Origin] = {}
        self._attributes: dict[tuple[ast.AST | None, str], Origin] = {}
        self._params: dict[str, Origin] = {}
        for _ in range(4):  # each time, values are followed one function further
            self._follow()

    # --- what a value is ------------------------------------------------------------------------------------------

    def _record_node(self, node: ast.AST) -> None:
        """Store the scope and class of a node, and the name and values that it binds. Its parent must come first."""
        parent = self._parents.get(node)
        outer = None if parent is None else self._scopes[parent]
        if isinstance(node, _SCOPES) or outer is None:
            self._scopes[node] = _Scope(node, outer)
        else:
            self._scopes[node] = outer
        class_around = None if parent is None else self._classes[parent]
        self._classes[node] = node if isinstance(node, ast.ClassDef) else class_around
        if outer is not None:
            self._inside[outer.node].append(node)
            name = name_bound_by(node)
            if name:
                outer.stored[name] += 1
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._assigned[target.id].append(node.value)
                elif _is_of_self(target):
                    self._assigned[self._classes[node], target.attr].append(node.value)

    def _functions_by_name(self) -> dict[str, ast.FunctionDef]:
        """Return the undecorated functions of the module, without methods, whose name is bound once."""
        functions = [node for node in self._nodes if isinstance(node, ast.FunctionDef) and not node.decorator_list]
        counts = collections.Counter(name_bound_by(node) for node in self._nodes)
        return {
            node.name: node
            for node in functions
            if counts[node.name] == 1 and not isinstance(self._parents[node], ast.ClassDef)
        }

    def _follow(self) -> None:
        """Find what made the values of variables, attributes, arguments, results and params, from what is known so far.

        A value that goes through several functions is found only after several calls.
        """
        for node in self._nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                origin = self._origin_of(node.value)
                if origin is not None:
                    self._assign(node.targets[0], origin)
            elif isinstance(node, ast.Call):
                self._pass_arguments(node)
                for keyword in node.keywords:
                    if keyword.arg == "params":
                        self._params |= dict(self._origins_in_dict(keyword.value))
        for name, function in self._functions.items():
            origin = self._origin_of_result(function)
            if origin is not None:
                self._returned[name] = origin

    def _assign(self, target: ast.expr, origin: Origin) -> None:
        """Store what made the value of a variable or `self.x`, unless it is assigned in several places."""
        if isinstance(target, ast.Name):
            scope = self._scopes[target]
            if scope.stored[target.id] == 1:
                scope.origins[target.id] = origin
        elif _is_of_self(target):
            class_around = self._classes[target]
            if class_around is not None and len(self._assigned[class_around, target.attr]) == 1:
                self._attributes[class_around, target.attr] = origin

    def _pass_arguments(self, call: ast.Call) -> None:
        """Follow the arguments of a call of one of the module's functions."""
        function = self._functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if function is None:
            return
        scope = self._scopes[function]
        names = [argument.arg for argument in function.args.args]
        given = [*zip(names, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
        for name, value in given:
            origin = self._origin_of(value)
            if name is not None and origin is not None and scope.stored[name] == 1:
                scope.origins[name] = origin

    def _origin_of_result(self, function: ast.FunctionDef) -> Origin | None:
        """Return what made the function's result, by its first `return`; None if another may return a list."""
        inside = self._inside[function]
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in inside):
            return Origin(_GENERATOR, ITERATOR)
        returned = [node.value for node in inside if isinstance(node, ast.Return) and node.value is not None]
        results = [self._origin_of(value) for value in returned]
        return results[0] if results and None not in results else None

    def _origins_in_dict(self, value: ast.AST) -> Iterator[tuple[str, Origin]]:
        """Yield (key, what made its value) of a dict that is written out, or of a variable with one."""
        if isinstance(value, ast.Name):
            assigned = self._assigned[value.id]
            if len(assigned) == 1:
                value = assigned[0]
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(value, ast.Dict):
            pairs = [
                (str(key.value), item)
                for key, item in zip(value.keys, value.values, strict=True)
                if isinstance(key, ast.Constant)
            ]
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
            pairs = [(str(keyword.arg), keyword.value) for keyword in value.keywords]
        for key, item in pairs:
            origin = self._origin_of(item)
            if origin is not None:
                yield key, origin

    def _origin_of(self, value: ast.AST) -> Origin | None:
        """Return what made the value of an expression; None if it may be a list, or anything else."""
        if isinstance(value, ast.GeneratorExp):
            return Origin(_GENERATOR, ITERATOR)
        if isinstance(value, ast.Name):
            scope = self._resolved(value)
            return scope.origins.get(value.id) if scope is not None else None
        if _is_of_self(value):
            return self._attributes.get((self._classes[value], value.attr))
        key = _key_of_params(value)
        if key:
            return self._params.get(key)
        if not isinstance(value, ast.Call):
            return None
        if isinstance(value.func, ast.Name):
            name = value.func.id
            if name in _KINDS and name not in self._rebound:
                return Origin(name, _KINDS[name])
            return self._returned.get(name)
        if isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWS and not value.args:
            return Origin(f".{value.func.attr}", VIEW)
        name = self._names.dotted(value.func) or ""
        return Origin(name, ITERATOR) if name.startswith("itertools.") else None

    def _resolved(self, name: ast.Name) -> _Scope | None:
        """Return the scope whose variable a name is; None: it is no variable of this module."""
        scope: _Scope | None = self._scopes[name]
        innermost = scope
        # As in Python, functions in a class do not see the variables of the class.
        while scope is not None:
            is_visible = scope is innermost or not isinstance(scope.node, ast.ClassDef)
            if is_visible and scope.stored[name.id]:
                return scope
            scope = scope.outer
        return None

    # --- where it must be a list ----------------------------------------------------------------------------------

    def found(self) -> Iterator[Found]:
        """Yield each finding."""
        refused: set[ast.AST] = set()
        for node in self._nodes:
            for value, kinds in self._must_be_lists(node):
                origin = self._origin_of(value)
                if origin is not None and origin.kind in kinds:
                    refused.add(value)
                    yield value, origin.maker, _as_list(value, origin)
            if isinstance(node, ast.Call):
                yield from self._copied_params(node)
        yield from self._read_again(refused)

    def _must_be_lists(self, node: ast.AST) -> Iterator[tuple[ast.expr, frozenset[str]]]:
        """Yield (part of the expression `node` that must be a list, the kinds of values that it must not be)."""
        if isinstance(node, ast.Subscript):
            is_read = isinstance(node.ctx, ast.Load)
            yield node.value, _NO_RANGES if is_read else _ALL
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield node.left, _ALL
            yield node.right, _ALL
        elif isinstance(node, ast.Call):
            yield from self._arguments_of_lists(node)

    def _arguments_of_lists(self, call: ast.Call) -> Iterator[tuple[ast.expr, frozenset[str]]]:
        """Yield (object or argument of the call that must be a list, the kinds of values that it must not be)."""
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr in (*_LIST_METHODS, *_LIST_METHODS_OF_RANGES):
            yield function.value, _ALL if function.attr in _LIST_METHODS else _NO_RANGES
        if isinstance(function, ast.Name) and function.id in ("len", "reversed") and call.args:
            yield call.args[0], _ITERATORS
        name = (self._names.dotted(function) or "").replace("tensorflow.compat.v1.", "tensorflow.")
        if name in _REFUSED_BY:
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                yield from ((part, _REFUSED_BY[name]) for part in _parts(argument))
        if ".estimator." in name or name == "pandas.read_csv":
            yield from _arguments_of_estimators(call, name)

    def _copied_params(self, call: ast.Call) -> Iterator[Found]:
        """Yield the views and generators in the `params` of an Estimator: it copies params, but these have no copy."""
        name = self._names.dotted(call.func) or ""
        for keyword in call.keywords:
            if keyword.arg != "params" or not name.endswith(_PREMADE):
                continue
            for key, origin in self._origins_in_dict(keyword.value):
                if origin.kind == VIEW or origin.maker == _GENERATOR:
                    text = f"params are copied for each call, and {origin.maker} cannot be copied: write list(...)"
                    yield keyword.value, origin.maker, f"params[{key!r}]: {text}"

    # --- where it is read a second time ---------------------------------------------------------------------------

    def _read_again(self, refused: set[ast.AST]) -> Iterator[Found]:
        """Yield the first use of each iterator that is read more than once.

        `refused` are the uses that are findings already.
        """
        reads: dict[object, list[ast.expr]] = collections.defaultdict(list)
        for node in self._nodes:
            variable = self._variable(node)
            if variable is not None and isinstance(node, ast.expr) and node not in refused:
                reads[variable].append(node)
        for variable, nodes in reads.items():
            if any(self._is_argument_of(node, ("next",)) for node in nodes):
                continue  # a program that calls `next` takes the elements one by one
            nodes = [node for node in nodes if not self._is_argument_of(node, _NOT_READ) and self._is_read(node)]
            # A use that may be repeated counts as two.
            times = sum(2 if self._is_read_often(node, variable) else 1 for node in nodes)
            if times > 1 and not self._exclude_each_other(nodes, variable):
                origin = self._origin_of(nodes[0])
                assert origin is not None
                text = "an iterator is empty after its first use, and this one is used more than once"
                yield nodes[0], origin.maker, f"{text}: write list(...) where {ast.unparse(nodes[0])} is made"

    def _variable(self, node: ast.AST) -> object | None:
        """Return which variable, attribute or key of params is loaded here, if it holds an iterator; else None."""
        is_loaded = isinstance(getattr(node, "ctx", None), ast.Load) or bool(_key_of_params(node))
        origin = self._origin_of(node) if is_loaded else None
        if origin is None or origin.maker not in _READ_AGAIN:
            return None
        if isinstance(node, ast.Name):
            scope = self._resolved(node)
            return None if scope is None else (scope.node, node.id)
        if _is_of_self(node):
            return self._classes[node], f"self.{node.attr}"
        return self._scopes[node].node, f"params {_key_of_params(node)}"

    def _is_argument_of(self, node: ast.AST, functions: Sequence[str]) -> bool:
        call = self._parents.get(node)
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions

    def _is_read(self, node: ast.AST) -> bool:
        """Report whether this use may read the iterator: it is not compared, tested or given another name."""
        parent = self._parents[node]
        if isinstance(parent, ast.Compare):
            # `x in values` reads the iterator `values`; other comparisons do not.
            return node in parent.comparators and isinstance(parent.ops[0], ast.In | ast.NotIn)
        if isinstance(parent, ast.If | ast.IfExp | ast.BoolOp | ast.UnaryOp):
            return False
        if isinstance(parent, ast.keyword) and parent.arg == "params":
            return False
        # A variable in a dict that is a keyword argument, such as params={...}, is copied there, and not read.
        if isinstance(parent, ast.Dict):
            return not (isinstance(node, ast.Name) and self._is_copied(parent))
        return not isinstance(parent, ast.Assign)

    def _is_copied(self, display: ast.Dict) -> bool:
        return isinstance(self._parents.get(display), ast.keyword)

    def _is_read_often(self, node: ast.AST, variable: object) -> bool:
        """Report whether this use may be executed more than once while the variable holds the same iterator.

        Args:
          node: the use.
          variable: (function, class or module that has the variable, its name), as from `_variable`.
        """
        assert isinstance(variable, tuple)
        home, name = variable
        # A loop around the assignment makes a new iterator each time.
        around_assignment = self._nodes_around_assignment(home, name)
        child = node
        parent = self._parents[node]
        while parent is not home:
            is_condition = isinstance(parent, ast.comprehension) and child in parent.ifs
            is_loop = isinstance(parent, _LOOPS) and not _is_source_of_loop(child, parent)
            if is_condition or (is_loop and parent not in around_assignment):
                return True
            if isinstance(parent, _FUNCTIONS) and not isinstance(home, ast.ClassDef) and self._is_called_often(parent):
                return True
            # An Estimator may call a method that is its model_fn or input_fn more than once.
            is_for_estimator = isinstance(parent, ast.FunctionDef) and parent.name.endswith(("model_fn", "input_fn"))
            if isinstance(home, ast.ClassDef) and is_for_estimator:
                return True
            if parent not in self._parents:
                return False
            child = parent
            parent = self._parents[parent]
        return False

    def _nodes_around_assignment(self, home: ast.AST, name: str) -> set[ast.AST]:
        """Return the nodes around the place where a variable of the function, class or module `home` is assigned."""
        assigned_name = (home, name.removeprefix("self.")) if isinstance(home, ast.ClassDef) else name
        around: set[ast.AST] = set()
        for value in self._assigned[assigned_name]:
            if isinstance(home, ast.ClassDef) or self._scopes[value].node is home:
                node: ast.AST = value
                while node in self._parents:
                    node = self._parents[node]
                    around.add(node)
        return around

    def _is_called_often(self, function: ast.AST) -> bool:
        """Report whether a function may be called more than once.

        It is called once if its name is used only in one call, which is outside of loops, and in no function that may
        itself be called more than once. `main` is called once.
        """
        if not isinstance(function, ast.FunctionDef) or function.name not in self._functions:
            return True
        uses = [node for node in self._nodes if isinstance(node, ast.Name) and node.id == function.name]
        parents_of_uses = [self._parents[node] for node in uses]
        if function.name == "main":
            return False
        if (
            len(parents_of_uses) != 1
            or not isinstance(parents_of_uses[0], ast.Call)
            or parents_of_uses[0].func is not uses[0]
        ):
            return True
        child: ast.AST = parents_of_uses[0]
        parent = self._parents[child]
        while not isinstance(parent, ast.Module):
            if isinstance(parent, _LOOPS) and not _is_source_of_loop(child, parent):
                return True
            if isinstance(parent, _FUNCTIONS) and self._is_called_often(parent):
                return True
            child = parent
            parent = self._parents[child]
        return False

    def _exclude_each_other(self, nodes: Sequence[ast.AST], variable: object) -> bool:
        """Report whether no two of the uses are executed in one pass: they are in different branches of an `if`."""
        if any(self._is_read_often(node, variable) for node in nodes):
            return False
        branches = [self._branches(node) for node in nodes]
        for index, branches_of_node in enumerate(branches):
            for branches_of_other in branches[index + 1 :]:
                if not any(branches_of_other.get(test, branch) != branch for test, branch in branches_of_node.items()):
                    return False
        return True

    def _branches(self, node: ast.AST) -> dict[ast.AST, str]:
        """Return the `if` statements around a node, each with the branch that it is in."""
        found: dict[ast.AST, str] = {}
        child = node
        parent = self._parents.get(node)
        while parent is not None:
            if isinstance(parent, ast.If):
                found[parent] = "body" if child in parent.body else "orelse"
            elif isinstance(parent, ast.IfExp):
                found[parent] = "body" if child is parent.body else "orelse"
            child = parent
            parent = self._parents.get(parent)
        return found


def _as_list(value: ast.expr, origin: Origin) -> str:
    """Return the text of the finding about a value that must be a list."""
    if origin.maker in (_GENERATOR, "range") or (origin.kind == ITERATOR and origin.maker not in _LISTS_BEFORE):
        return f"it is {origin.kind}, and a list is needed: write list({ast.unparse(value)})"
    return f"Python 3 returns {origin.kind} instead of a list: write list({ast.unparse(value)})"


def _same_as_builtins(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that imports bind to what Python 3 has under them: `from six.moves import zip`."""
    modules = ("six.moves", "builtins", "future.builtins", "future_builtins")
    return {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
        if alias.asname in (None, alias.name)
    }


def _is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _key_of_params(node: ast.AST) -> str:
    """Return the key of `params["key"]` and `params.get("key")`; "" for other expressions."""
    owner: ast.AST | None = None
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript):
        owner = node.value
        key = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        owner = node.func.value
        key = node.args[0]
    is_params = isinstance(owner, ast.Name) and owner.id == "params"
    return str(key.value) if is_params and isinstance(key, ast.Constant) else ""


def _is_source_of_loop(child: ast.AST, loop: ast.AST) -> bool:
    """Report whether `child` of a loop is what the loop goes through, which is evaluated once."""
    if isinstance(loop, ast.For):
        return child is loop.iter or child in loop.orelse
    generators = getattr(loop, "generators", [])
    return bool(generators) and child is generators[0]


def _arguments_of_estimators(call: ast.Call, name: str) -> Iterator[tuple[ast.expr, frozenset[str]]]:
    """Yield (argument that must be a list, refused kinds) of a call of a class of tf.estimator, or of read_csv."""
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg in _LIST_KEYWORDS:
            yield keyword.value, _LIST_KEYWORDS[keyword.arg]
    is_premade = name.endswith(_PREMADE) and not name.endswith(".Estimator")
    for argument in call.args if is_premade else ():
        yield argument, _ITERATORS


def _parts(argument: ast.expr) -> Iterator[ast.expr]:
    """Yield an argument, and the parts of one that is a tuple, list or dict."""
    waiting = [argument]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, ast.Tuple | ast.List):
            waiting += part.elts
        elif isinstance(part, ast.Dict):
            waiting += part.values
