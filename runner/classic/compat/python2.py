"""Find what Python 3 can parse but fails when it runs: idioms of Python 2, and names that NumPy 2 removed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from runner.classic.compat.installed_names import name_bound_by
from runner.config.source_names import Uses


def _pairs(text: str) -> dict[str, str]:
    """Return old name -> what to write, from `old=new` for each."""
    return dict(pair.split("=", 1) for pair in text.split())


_NAMES: Mapping[str, str] = {
    **_pairs("""
        basestring=str execfile=exec(open(path).read()) file=open intern=sys.intern long=int raw_input=input
        reduce=functools.reduce reload=importlib.reload unichr=chr unicode=str xrange=range
    """),
    "cmp": "(a > b) - (a < b)",
}
_OF_MODULES = _pairs("""
    itertools.ifilter=filter itertools.imap=map itertools.izip=zip itertools.izip_longest=itertools.zip_longest
    os.getcwdu=os.getcwd string.join=separator.join(strings) string.letters=string.ascii_letters
    string.lowercase=string.ascii_lowercase string.maketrans=str.maketrans string.uppercase=string.ascii_uppercase
    sys.maxint=sys.maxsize urllib.quote=urllib.parse.quote urllib.unquote=urllib.parse.unquote
    urllib.urlencode=urllib.parse.urlencode urllib.urlopen=urllib.request.urlopen
    urllib.urlretrieve=urllib.request.urlretrieve

    numpy.Inf=numpy.inf numpy.NaN=numpy.nan numpy.PINF=numpy.inf numpy.NINF=-numpy.inf numpy.infty=numpy.inf
    numpy.float=float numpy.int=int numpy.complex=complex numpy.object=object numpy.str=str numpy.unicode=str
    numpy.float_=numpy.float64 numpy.complex_=numpy.complex128 numpy.string_=numpy.bytes_ numpy.unicode_=numpy.str_
    numpy.alltrue=numpy.all numpy.sometrue=numpy.any numpy.product=numpy.prod numpy.cumproduct=numpy.cumprod
    numpy.asfarray=numpy.asarray(x,dtype=float) numpy.asscalar=x.item() numpy.in1d=numpy.isin numpy.mat=numpy.asmatrix
    numpy.rank=numpy.ndim numpy.round_=numpy.round numpy.trapz=numpy.trapezoid
""")
_VIEWS = ("keys", "values", "items")
_METHODS: Mapping[str, tuple[str, int, str]] = {
    "has_key": ("Python 3's dict", 1, "key in d"),
    "next": ("Python 3's iterator", 0, "next(iterator)"),
    **{f"{of}{what}": ("Python 3's dict", 0, f"d.{what}()") for of in ("iter", "view") for what in _VIEWS},
    "itemset": ("NumPy 2's array", 2, "x[index] = value"),
    "ptp": ("NumPy 2's array", 0, "numpy.ptp(x)"),
    "tostring": ("NumPy 2's array", 0, "x.tobytes()"),
}
"""Method that is gone -> (what had it, number of its arguments, what to write)."""

_LAZY = ("map", "filter", "zip")
_LIST_METHODS = ("append", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort")

MODULES = _pairs("""
    BaseHTTPServer=http.server ConfigParser=configparser HTMLParser=html.parser Queue=queue SocketServer=socketserver
    StringIO=io Tkinter=tkinter __builtin__=builtins cPickle=pickle cStringIO=io commands=subprocess
    cookielib=http.cookiejar copy_reg=copyreg httplib=http.client md5=hashlib sets=set thread=_thread
    urllib2=urllib.request urlparse=urllib.parse
""")
"""Module of Python 2 -> its name in Python 3."""

Found = tuple[int, int, str, str]
"""(line, column from 1, name of the idiom such as `.iteritems` or `print >>`, text of the finding)."""


def fix_of_syntax(error: SyntaxError) -> str:
    """Return a hint on how to fix a source that is not valid Python 3. It is printed after Python's own message."""
    message = error.msg or ""
    if "print" in message:
        return "Python 2: write print(...)"
    if "multiple exception types" in message:
        return "Python 2: write `except Error as error:`"
    if "exec" in message:
        return "Python 2: write exec(...)"
    if "octal" in message or "leading zeros" in message:
        return "Python 2: write 0o644"
    return "if this is Python 2, convert it with 2to3, which Python has up to 3.12"


def idioms(tree: ast.AST) -> Iterator[Found]:
    """Yield each use of what is gone, in any order."""
    modules = Uses(*{name.partition(".")[0] for name in _OF_MODULES})
    modules.visit(tree)
    for use in modules.found:
        if use.name in _OF_MODULES:
            gone_from = "NumPy 2" if use.name.startswith("numpy.") else "Python 3"
            text = f"{gone_from} has no {use.name}: write {_OF_MODULES[use.name]}"
            yield use.line, use.column, use.name, text
    for node, shown, text in _of_nodes(tree):
        yield node.lineno, node.col_offset + 1, shown, text


def _of_nodes(tree: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    bound = {name_bound_by(node) for node in ast.walk(tree)} - {""}  # in any scope
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _NAMES and node.id not in bound:
            yield node, node.id, f"Python 3 has no {node.id}: write {_NAMES[node.id]}"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift) and ast.unparse(node.left) == "print":
            yield node, "print >>", "Python 3's print is a function: write print(..., file=f)"
        elif isinstance(node, ast.ExceptHandler) and _is_except_with_a_comma(node):
            assert node.type is not None
            yield node.type, "except", "Python 3 takes the second for an error, too: write `except Error as error:`"
        elif isinstance(node, ast.Call):
            yield from _of_call(node, functions)
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module | ast.FunctionDef | ast.Lambda):
            yield from _used_as_lists(scope, bound)


def _is_except_with_a_comma(handler: ast.ExceptHandler) -> bool:
    """Report whether a handler is `except Error, error:`, which Python 3.14 can parse again: as two errors to catch."""
    caught = handler.type
    if not isinstance(caught, ast.Tuple) or len(caught.elts) != 2 or handler.name is not None:
        return False
    first, last = caught.elts
    has_parentheses = caught.col_offset != first.col_offset
    is_a_variable = isinstance(last, ast.Name) and last.id.islower()  # not a class of errors
    return is_a_variable and not has_parentheses


def _of_call(node: ast.Call, functions: set[str]) -> Iterator[tuple[ast.expr, str, str]]:
    function = node.func
    if isinstance(function, ast.Attribute):
        owner, takes, instead = _METHODS.get(function.attr, ("", 0, ""))
        if owner and len(node.args) == takes and not node.keywords and function.attr not in functions:
            yield node, f".{function.attr}", f"{owner} has no {function.attr}: write {instead}"
    elif isinstance(function, ast.Name) and function.id == "range":
        if any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div) for one in node.args):
            yield node, "range", "in Python 3, / gives a float, which range does not accept: write //"


def _used_as_lists(
    scope: ast.Module | ast.FunctionDef | ast.Lambda, bound: set[str]
) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield uses of `map(...)`, `d.keys()` and the like as lists, directly or through a variable that is assigned
    once.
    """
    body = scope.body if isinstance(scope.body, list) else [scope.body]
    inside = list(_in_scope(body))
    stored = [node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    lazy: dict[str, str] = {}
    for node in inside:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, made = node.targets[0].id, _lazy(node.value)
            if made not in ("", *bound) and stored.count(name) == 1:
                lazy[name] = made

    def made_by(value: ast.expr) -> str:
        return lazy.get(value.id, "") if isinstance(value, ast.Name) else _lazy(value)

    for node in inside:
        for value in _as_a_list(node):
            made = made_by(value)
            if made not in ("", *bound):
                kind = "a view" if made.startswith(".") else "an iterator"
                yield value, made, f"Python 3 returns {kind} instead of a list: write list({ast.unparse(value)})"


def _in_scope(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those inside of nested functions.

    The walk is not recursive, because a sum of a thousand terms is a thousand levels deep.
    """
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _lazy(value: ast.AST) -> str:
    """Return the name of the function or method that makes `value`, if its result was a list in Python 2; else ""."""
    if not isinstance(value, ast.Call):
        return ""
    if isinstance(value.func, ast.Name) and value.func.id in _LAZY:
        return value.func.id
    is_view = isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWS and not value.args
    return f".{value.func.attr}" if is_view and isinstance(value.func, ast.Attribute) else ""


def _as_a_list(node: ast.AST) -> Iterator[ast.expr]:
    """Yield those parts of the expression `node` that must be a list (or have a length): `x` in `x[0]` or `len(x)`."""
    if isinstance(node, ast.Subscript):
        yield node.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LIST_METHODS:
        yield node.func.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
        if not _lazy(node.args[0]).startswith("."):  # views have a length
            yield node.args[0]
