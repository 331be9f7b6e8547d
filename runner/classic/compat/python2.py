"""Find what Python 3 can parse but fails when it runs: idioms of Python 2, and what NumPy 2 and pandas removed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from runner.classic.compat import iterators
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
    "as_matrix": ("today's pandas", 0, "df.values"),
    "itemset": ("NumPy 2's array", 2, "x[index] = value"),
    "ptp": ("NumPy 2's array", 0, "numpy.ptp(x)"),
    "tostring": ("NumPy 2's array", 0, "x.tobytes()"),
}
"""Method that is gone -> (what had it, number of its arguments, what to write)."""

MODULES = _pairs("""
    BaseHTTPServer=http.server ConfigParser=configparser HTMLParser=html.parser Queue=queue SocketServer=socketserver
    StringIO=io Tkinter=tkinter __builtin__=builtins cPickle=pickle cStringIO=io commands=subprocess
    cookielib=http.cookiejar copy_reg=copyreg httplib=http.client md5=hashlib sets=set thread=_thread
    urllib2=urllib.request urlparse=urllib.parse
""")
"""Module of Python 2 -> its name in Python 3."""

_NO_CMP = "Python 3 sorts by a key: write key=functools.cmp_to_key(...)"
_ATTRIBUTES = _pairs("""
    func_closure=__closure__ func_code=__code__ func_defaults=__defaults__ func_dict=__dict__ func_globals=__globals__
    func_name=__name__ im_class=__self__.__class__ im_func=__func__ im_self=__self__
""")
_FILES: Mapping[tuple[str, str], tuple[bool, int]] = {
    **{("csv", name): (False, 0) for name in ("reader", "writer", "DictReader", "DictWriter")},
    **{(module, "load"): (True, 0) for module in ("pickle", "cPickle")},
    **{(module, "dump"): (True, 1) for module in ("pickle", "cPickle")},
}
"""(Module, function) -> (it needs a binary file, the position of the file among its arguments)."""

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
    for node, shown, text in _idioms_in(tree):
        yield node.lineno, node.col_offset + 1, shown, text


def _idioms_in(tree: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield (expression, idiom such as `print >>`, text of the finding) for all but names in modules."""
    names_of_program = {name_bound_by(node) for node in ast.walk(tree)} - {""}  # which the program binds in any scope
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _NAMES and node.id not in names_of_program:
            yield node, node.id, f"Python 3 has no {node.id}: write {_NAMES[node.id]}"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift) and ast.unparse(node.left) == "print":
            yield node, "print >>", "Python 3's print is a function: write print(..., file=f)"
        elif isinstance(node, ast.ExceptHandler) and _is_except_with_a_comma(node):
            assert node.type is not None
            yield node.type, "except", "Python 3 takes the second for an error, too: write `except Error as error:`"
        elif isinstance(node, ast.Call):
            yield from _idioms_of_call(node, functions)
    yield from _renamed_attributes(tree)
    yield from _removed_from_pandas(tree)
    yield from iterators.used_as_lists(tree)


def _is_except_with_a_comma(handler: ast.ExceptHandler) -> bool:
    """Report whether a handler is `except Error, error:`, which Python 3.14 can parse again: as two errors to catch."""
    caught = handler.type
    if not isinstance(caught, ast.Tuple) or len(caught.elts) != 2 or handler.name is not None:
        return False
    first, last = caught.elts
    has_parentheses = caught.col_offset != first.col_offset
    is_a_variable = isinstance(last, ast.Name) and last.id.islower()  # not a class of errors
    return is_a_variable and not has_parentheses


def _idioms_of_call(node: ast.Call, functions: set[str]) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield the idioms of one call. `functions` are those that the program defines: it may call a method of its own."""
    function = node.func
    if isinstance(function, ast.Attribute):
        if function.attr not in functions:
            yield from _idioms_of_method(node, function)
        yield from _calls_with_wrong_file_mode(node, function)
    if "cmp" in {keyword.arg for keyword in node.keywords} and ast.unparse(function).endswith(("sorted", ".sort")):
        yield node, "cmp", _NO_CMP
    if isinstance(function, ast.Name) and function.id == "range":
        if any(isinstance(argument, ast.BinOp) and isinstance(argument.op, ast.Div) for argument in node.args):
            yield node, "range", "in Python 3, / gives a float, which range does not accept: write //"


def _idioms_of_method(node: ast.Call, function: ast.Attribute) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield calls of methods that are gone, or that took a function which compares two elements."""
    owner, num_arguments, instead = _METHODS.get(function.attr, ("", 0, ""))
    if owner and len(node.args) == num_arguments and not node.keywords:
        yield node, f".{function.attr}", f"{owner} has no {function.attr}: write {instead}"
    if function.attr == "sort" and len(node.args) == 1 and _takes_two(node.args[0]):
        yield node, ".sort", _NO_CMP
    is_text = isinstance(function.value, ast.Constant) and isinstance(function.value.value, str)
    if function.attr == "decode" and is_text:
        yield node, ".decode", "Python 3's str has no decode: remove it"


def _removed_from_pandas(tree: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield `df.ix[...]` and `df.append(other, ignore_index=True)`, which the pandas of today does not have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "ix":
            yield node, ".ix", "today's pandas has no ix: write df.loc or df.iloc"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            if "ignore_index" in {keyword.arg for keyword in node.keywords}:
                yield node, ".append", "today's pandas has no append: write pandas.concat([df, other])"


def _takes_two(function: ast.expr) -> bool:
    return isinstance(function, ast.Lambda) and len(function.args.args) == 2


def _calls_with_wrong_file_mode(node: ast.Call, function: ast.Attribute) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield calls of csv with a binary file, and of pickle with a text file: `pickle.load(open(path))`."""
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if (module, function.attr) not in _FILES:
        return
    needs_binary, position = _FILES[module, function.attr]
    file = node.args[position] if len(node.args) > position else None
    if not isinstance(file, ast.Call) or ast.unparse(file.func) != "open":
        return
    mode = file.args[1] if len(file.args) > 1 else ast.Constant("r")
    if isinstance(mode, ast.Constant) and ("b" in str(mode.value)) != needs_binary:
        kind = "binary" if needs_binary else "text"
        yield node, f"{module}.{function.attr}", f"in Python 3 it needs a {kind} file: change the mode of open()"


def _renamed_attributes(tree: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """Yield attributes of functions that have another name now, and classes whose iterators have only `next`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in _ATTRIBUTES:
            yield node, f".{node.attr}", f"Python 3 calls it {_ATTRIBUTES[node.attr]}"
        elif isinstance(node, ast.ClassDef):
            methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
            if "next" in methods and "__iter__" in methods and "__next__" not in methods:
                # If __iter__ returns another object, that one is the iterator.
                inside = ast.walk(methods["__iter__"])
                if any(isinstance(part, ast.Return) and ast.unparse(part) == "return self" for part in inside):
                    position = ast.copy_location(ast.Name("next"), methods["next"])
                    yield position, "next", "Python 3 calls __next__: write __next__ = next below it"
