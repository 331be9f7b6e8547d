"""Find uses of names that Python's standard library, NumPy, pandas, SciPy or scikit-learn no longer has."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.classic.compat.installed_names import OF_EVERY_MODULE, defined_in, name_bound_by, source_at
from runner.config.source_names import Uses

Found = tuple[int, int, str, str]
"""(line, column from 1, name such as `collections.Mapping`, text of the finding)."""

Version = tuple[int, int]

_REMOVED_IN: Mapping[Version, str] = {
    (3, 12): """
        asynchat asyncore distutils imp smtpd configparser.SafeConfigParser locale.format pkgutil.ImpImporter
        pkgutil.ImpLoader ssl.match_hostname ssl.wrap_socket
    """,
    (3, 13): """
        aifc audioop cgi cgitb chunk crypt imghdr lib2to3 mailcap msilib nis nntplib ossaudiodev pipes sndhdr spwd sunau
        telnetlib uu xdrlib locale.resetlocale re.TEMPLATE re.template tempfile.template typing.io typing.re
        unittest.findTestCases unittest.getTestCaseNames unittest.makeSuite webbrowser.MacOSX
    """,
    (3, 14): """
        ast.Bytes ast.Ellipsis ast.NameConstant ast.Num ast.Str importlib.abc.ResourceReader importlib.abc.Traversable
        importlib.abc.TraversableResources pkgutil.find_loader pkgutil.get_loader pty.master_open pty.slave_open
        sqlite3.version sqlite3.version_info
    """,
}
"""Python version -> modules of the standard library, and names in modules, that it no longer has.

What a version up to the running one removed is found without this table, in the standard library itself.
"""

_METHODS_REMOVED_IN: Mapping[str, tuple[Version, str]] = {
    "readfp": ((3, 12), "read_file"),
    "assert_": ((3, 12), "assertTrue"),
    "assertAlmostEquals": ((3, 12), "assertAlmostEqual"),
    "assertDictContainsSubset": ((3, 12), "assertLessEqual of the items"),
    "assertEquals": ((3, 12), "assertEqual"),
    "assertNotAlmostEquals": ((3, 12), "assertNotAlmostEqual"),
    "assertNotEquals": ((3, 12), "assertNotEqual"),
    "assertNotRegexpMatches": ((3, 12), "assertNotRegex"),
    "assertRaisesRegexp": ((3, 12), "assertRaisesRegex"),
    "assertRegexpMatches": ((3, 12), "assertRegex"),
    "failIf": ((3, 12), "assertFalse"),
    "failUnless": ((3, 12), "assertTrue"),
    "failUnlessEqual": ((3, 12), "assertEqual"),
    "failUnlessRaises": ((3, 12), "assertRaises"),
    "getchildren": ((3, 9), "list(element)"),
    "getiterator": ((3, 9), "iter"),
    "isAlive": ((3, 9), "is_alive"),
}
"""Method of the standard library -> (version that no longer has it, what to write)."""

_INSTEAD: Mapping[str, str] = {
    "base64.decodestring": "write base64.decodebytes",
    "base64.encodestring": "write base64.encodebytes",
    "cgi.escape": "write html.escape",
    "configparser.SafeConfigParser": "write configparser.ConfigParser",
    "distutils": "pip install setuptools, which brings it; packaging.version replaces distutils.version",
    "fractions.gcd": "write math.gcd",
    "imp": "use importlib: imp.reload is importlib.reload, imp.load_source is importlib.util.spec_from_file_location",
    "inspect.getargspec": "write inspect.getfullargspec",
    "locale.format": "write locale.format_string",
    "os.errno": "write `import errno`",
    "pipes": "use shlex: pipes.quote is shlex.quote",
    "platform.dist": "use the package distro",
    "platform.linux_distribution": "use the package distro",
    "string.atof": "write float",
    "string.atoi": "write int",
    "string.atol": "write int",
    "sys.exc_clear": "remove it: Python 3 clears the error after each `except`",
    "sys.setdefaultencoding": "remove it: Python 3's strings are Unicode, and its encoding is UTF-8",
    "time.clock": "write time.perf_counter",
    "types.StringType": "write str",
    "unittest.makeSuite": "write unittest.defaultTestLoader.loadTestsFromTestCase",
    "xml.etree.cElementTree": "write xml.etree.ElementTree",
}
_OF_STRINGS = "capitalize count expandtabs find ljust lower lstrip replace rjust rstrip split splitfields strip upper"
_TYPES = "BooleanType=bool DictType=dict FloatType=float IntType=int ListType=list LongType=int TupleType=tuple"

_NEVER_IMPORTED = frozenset(
    {"__main__", "antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle", "turtledemo"}
)
"""Modules of the standard library that do something when they are imported, or that a system may leave out."""

_OF_WINDOWS = (
    "winreg", "winsound", "msvcrt", "ctypes.WinError", "ctypes.windll", "ctypes.wintypes", "os.O_BINARY",
    "os.startfile", "signal.CTRL_", "subprocess.CREATE_", "subprocess.STARTUPINFO", "sys.getwindowsversion",
)  # fmt: skip
_SET_LATER = frozenset({"sys.last_exc", "sys.last_traceback", "sys.last_type", "sys.last_value", "sys.ps1", "sys.ps2"})

_PACKAGES: Mapping[str, str] = {"numpy": "NumPy", "pandas": "pandas", "scipy": "SciPy", "sklearn": "scikit-learn"}
"""Package that is looked into -> its name in messages."""

_INSTEAD_IN_PACKAGES: Mapping[str, str] = {
    "numpy.bool8": "write numpy.bool_",
    "numpy.cast": "write numpy.asarray(x, dtype)",
    "numpy.find_common_type": "write numpy.result_type",
    "numpy.issubclass_": "write issubclass",
    "numpy.longfloat": "write numpy.longdouble",
    "numpy.msort": "write numpy.sort(x, axis=0)",
    "numpy.recfromcsv": "write numpy.genfromtxt with delimiter=','",
    "numpy.safe_eval": "write ast.literal_eval",
    "numpy.sctypes": "write the types themselves",
    "pandas.Panel": "use a DataFrame with a MultiIndex",
    "pandas.datetime": "write datetime.datetime",
    "pandas.np": "write `import numpy`",
    "pandas.rolling_mean": "write df.rolling(n).mean()",
    "pandas.tools": "use pandas.plotting, pandas.concat and others",
    "scipy.misc": "use imageio or PIL for images, scipy.special for comb, factorial and logsumexp",
    "sklearn.cross_validation": "write sklearn.model_selection",
    "sklearn.datasets.fetch_mldata": "write sklearn.datasets.fetch_openml",
    "sklearn.datasets.load_boston": "write sklearn.datasets.fetch_openml or fetch_california_housing",
    "sklearn.externals": "joblib and six are packages of their own",
    "sklearn.grid_search": "write sklearn.model_selection",
    "sklearn.learning_curve": "write sklearn.model_selection",
    "sklearn.preprocessing.Imputer": "write sklearn.impute.SimpleImputer",
}
_OF_PLATFORMS = frozenset({"numpy.complex256", "numpy.float128", "numpy.complex192", "numpy.float96"})
"""Names that a compiled module sets, where the platform has them."""


def gone(tree: ast.AST) -> Iterator[Found]:
    """Yield each use of a name that neither this Python nor the installed packages have, in any order."""
    python = _version_text(sys.version_info[:2])
    for line, column, name in _uses_of_packages(tree):
        top = name.partition(".")[0]
        if top in _PACKAGES:
            missing = _missing_in_package(name)
            if missing:
                hint = _hint(_INSTEAD_IN_PACKAGES, missing)
                yield line, column, missing, f"the installed {_PACKAGES[top]} has no {missing}{hint}"
        else:
            missing = _missing_in_library(name)
            if missing:
                yield line, column, missing, f"Python {python} has no {missing}{_instead(missing)}"
    for line, column, method, version, instead in _removed_methods(tree):
        if sys.version_info >= version:
            yield (
                line,
                column,
                f".{method}",
                f"since Python {_version_text(version)} there is no {method}: write {instead}",
            )


def gone_later(tree: ast.AST) -> Iterator[Found]:
    """Yield each use of a name that this Python has and that a later one removes, in any order."""
    for line, column, name in _uses_of_packages(tree):
        parts = name.split(".")
        # A table may have the name itself or a module above it.
        beginnings = [".".join(parts[: end + 1]) for end in range(len(parts))]
        for version, names in _REMOVED_IN.items():
            removed = next((beginning for beginning in beginnings if beginning in names.split()), None)
            if removed is not None and sys.version_info < version:
                yield line, column, removed, f"Python {_version_text(version)} does not have it{_instead(removed)}"
    for line, column, method, version, instead in _removed_methods(tree):
        if sys.version_info < version:
            yield line, column, f".{method}", f"Python {_version_text(version)} does not have it: write {instead}"


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _instead(name: str) -> str:
    """Return what to write instead of a name of the standard library, after a colon; "" if nothing is known."""
    module, _, last = name.rpartition(".")
    if module == "string" and last in _OF_STRINGS.split():
        return f": write text.{last}(...)"
    if module == "types":
        types = dict(pair.split("=") for pair in _TYPES.split())
        return f": write {types[last]}" if last in types else ""
    if module == "collections":
        is_abstract = hasattr(importlib.import_module("collections.abc"), last)
        return f": write collections.abc.{last}" if is_abstract else ""
    return _hint(_INSTEAD, name)


def _hint(table: Mapping[str, str], name: str) -> str:
    """Return what `table` says of `name` or of the nearest module above it, after a colon; "" if it says nothing."""
    while name:
        if name in table:
            return f": {table[name]}"
        name = name.rpartition(".")[0]
    return ""


def _uses_of_packages(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """Yield (line, column, full name) of each use of the standard library and of the packages that are looked into."""
    roots: set[str] = set()
    for node in ast.walk(tree):
        roots.update(name.partition(".")[0] for name in _imported(node))
    library = {root for root in roots if root in sys.stdlib_module_names} - _NEVER_IMPORTED
    # Modules that this Python no longer has are in this table, and not in sys.stdlib_module_names.
    removed_later = set(" ".join(_REMOVED_IN.values()).split())
    rebound = {name_bound_by(node) for node in ast.walk(tree) if not isinstance(node, ast.alias)}
    visitor = _Library(*library, *(roots & {*_PACKAGES, *removed_later}), rebound=frozenset(rebound))
    visitor.visit(tree)
    set_by_program = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_set(node)}
    for use in visitor.found:
        is_of_windows = use.name.startswith(_OF_WINDOWS)  # a program calls these on Windows only
        if use.name.rpartition(".")[2] not in set_by_program and not is_of_windows:
            yield use.line, use.column, use.name


class _Library(Uses):
    """Finds uses of modules and of what they contain.

    Args:
      *roots: the packages.
      rebound: names that the program also binds to something else, such as an argument `json`.
    """

    def __init__(self, *roots: str, rebound: frozenset[str]) -> None:
        super().__init__(*roots)
        self._rebound = rebound
        self._tries = 0

    def dotted(self, node: ast.AST) -> str | None:
        begin = node
        while isinstance(begin, ast.Attribute):
            begin = begin.value
        is_other = isinstance(begin, ast.Name) and begin.id in self._rebound
        return None if is_other else super().dotted(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Find nothing: a name without a module was found where it was imported."""

    def visit_Try(self, node: ast.Try) -> None:
        self._tries += bool(node.handlers)
        self.generic_visit(node)
        self._tries -= bool(node.handlers)

    def _bind(self, local: str, name: str) -> None:
        if not self._tries:  # `except` may bind the name to another module
            super()._bind(local, name)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _is_set(node: ast.Attribute) -> bool:
    """Report whether the program itself sets this attribute (`numpy.float = float`)."""
    return isinstance(node.ctx, ast.Store)


def _removed_methods(tree: ast.AST) -> Iterator[tuple[int, int, str, Version, str]]:
    """Yield (line, column, method, Python version that removed it, what to write) for each call of a removed method.
    Methods with the name of a function of the program are left out.
    """
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr not in own:
            version, instead = _METHODS_REMOVED_IN.get(node.func.attr, ((0, 0), ""))
            if instead:
                yield node.lineno, node.col_offset + 1, node.func.attr, version, instead


# --- whether a name is there ------------------------------------------------------------------------------------------


def _missing_in_library(name: str) -> str:
    """Return the first part of a dotted name that Python's standard library does not have; "" if it has all of it.

    Attributes of objects in modules are not looked at.
    """
    parts = name.split(".")
    module = _module(parts[0])
    if module is None:
        return parts[0]
    if name in _SET_LATER:
        return ""
    for end in range(1, len(parts)):
        dotted = ".".join(parts[: end + 1])
        if hasattr(module, parts[end]):
            value = getattr(module, parts[end])
            if not isinstance(value, type(ast)):  # no module: what follows are attributes of an object
                return ""
            module = value
            continue
        module = _module(dotted) if hasattr(module, "__path__") else None
        if module is None:
            return dotted
    return ""


def _module(name: str) -> object | None:
    """Return the module of the standard library; None if this Python does not have it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(name)
    except ImportError:
        return None


def _missing_in_package(name: str) -> str:
    """Return the first part of a dotted name that the installed package does not have; "" if it has all of it, or if
    that cannot be told from its files.
    """
    parts = name.split(".")
    spec = importlib.util.find_spec(parts[0])
    if spec is None or spec.origin is None or name in _OF_PLATFORMS:
        return ""
    source = Path(spec.origin)
    for end in range(1, len(parts)):
        part = parts[end]
        if _may_define(source, part, package=parts[0]):  # and what follows is not looked at
            return ""
        is_package = source.name == "__init__.py"
        found = source_at(source.parent / part) if is_package else None
        if found is None:
            is_compiled = is_package and any(source.parent.glob(f"{part}.*"))
            cannot_be_told = is_compiled or part.startswith("__")
            return "" if cannot_be_told else ".".join(parts[: end + 1])
        source = found
    return ""


def _may_define(source: Path, name: str, *, package: str) -> bool:
    """Report whether a module has a name, as far as its file tells."""
    defined = defined_in(source)
    if "*" in defined or name in defined or name in OF_EVERY_MODULE:
        return True
    # The `__getattr__` of a module of pandas has the names that it serves in quotes.
    return package == "pandas" and "__getattr__" in defined and f'"{name}"' in source.read_text()
