"""The public names of the installed TensorFlow, read from its files because importing it takes seconds."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.classic.compat.old_modules import nearest
from runner.config.source_names import V1, canonical

_LEGACY = "tf_keras/api/_v1/keras/__internal__/legacy"
_KERAS_2 = "tf_keras/api/_v2/keras"
_KERAS_3 = "keras/_tf_keras/keras"

# Module of TensorFlow 2.21 -> folder of the other package that TensorFlow loads it from; the longest prefix counts.
# `import runner.classic` makes TensorFlow load Keras 2 if tf_keras is installed.
_ELSEWHERE = {
    f"{V1}.layers": f"{_LEGACY}/layers",
    f"{V1}.nn.rnn_cell": f"{_LEGACY}/rnn_cell",
    f"{V1}.keras": "tf_keras/api/_v1/keras",
    "tensorflow.keras": _KERAS_2,
    **{f"tensorflow.{name}": f"{_KERAS_2}/{name}" for name in ("losses", "metrics", "optimizers", "initializers")},
}

OF_EVERY_MODULE = frozenset({"__dict__", "__doc__", "__file__", "__loader__", "__name__", "__path__", "__spec__"})
"""Names that every module has, such as `tf.__file__`."""


class Installed:
    """Finds the names of the installed TensorFlow, and of the Keras that it loads, in their files.

    Attributes:
      is_there: TensorFlow is installed.
    """

    def __init__(self) -> None:
        # importlib could find a folder `tensorflow` of the user instead.
        roots = [Path(folder) for folder in sys.path]
        root = next((folder for folder in roots if (folder / "tensorflow" / "_api").is_dir()), None)
        self.is_there = root is not None
        self._root = root or Path(os.devnull)  # a folder without files

    def has(self, name: str) -> bool:
        """Report whether the dotted name `name` is a public module, or a public object in one.

        Attributes of an object (`tf.estimator.ModeKeys.TRAIN`) are not checked.
        """
        parts = canonical(name).split(".")
        for end in range(2, len(parts) + 1):
            module = ".".join(parts[: end - 1])
            last = parts[end - 1]
            if last in OF_EVERY_MODULE:
                return True
            if last not in self._names(module):
                return False
            if not self.is_module(".".join(parts[:end])):
                return True
        return self.is_module(".".join(parts))

    def lacks_keras_2(self, name: str) -> bool:
        """Report whether the dotted name is one that TensorFlow loads from tf_keras, which is not installed."""
        if (self._root / "tf_keras").exists():
            return False
        of_keras_2 = [f"{module}." for module, folder in _ELSEWHERE.items() if folder.startswith("tf_keras")]
        return name.startswith(tuple(of_keras_2))

    def is_module(self, name: str) -> bool:
        return bool(self._files(name))

    def has_private(self, name: str) -> bool:
        """Report whether `tensorflow.python.x.y` is a module, or an object at the top level of one.

        Attributes of an object (`rewriter_config_pb2.RewriterConfig.OFF`) are not checked.
        """
        path = self._root
        source: Path | None = Path(os.devnull)  # of the module or package that the parts so far name
        for part in name.split("."):
            path = path / part
            package = source
            source = source_at(path)
            if source is None:  # neither a module nor a package
                is_compiled = path.with_suffix(".so").exists() and part == name.rpartition(".")[2]
                return is_compiled or self._defines(package, part)
        return True

    @functools.cache  # noqa: B019  # there is one object per process
    def methods_of_datasets(self) -> Mapping[str, frozenset[str] | None]:
        """Return method of tf.data.Dataset -> its arguments; None instead of these: it takes any keyword."""
        source = self._root / "tensorflow/python/data/ops/dataset_ops.py"
        found: dict[str, frozenset[str] | None] = {}
        if not source.exists():
            return found
        # A method that both classes have gets the arguments of both: the program may have a dataset of either version.
        for node in ast.parse(source.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name not in ("DatasetV1", "DatasetV2"):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    arguments = method.args
                    names = {
                        argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                    }
                    inherited = found.get(method.name, frozenset())
                    takes_any_keyword = arguments.kwarg is not None or inherited is None
                    found[method.name] = None if takes_any_keyword else frozenset(names | (inherited or frozenset()))
        return found

    def _defines(self, source: Path | None, name: str) -> bool:
        """Report whether the module with the file `source` defines `name`, or gets it by `from ... import *`."""
        if source is None or not source.is_file():
            return False
        if name in defined_in(source):
            return True
        return any(self.has_private(f"{module}.{name}") for module in _star_imports(source))

    def _files(self, name: str) -> list[Path]:
        """Return the `__init__.py` files that define the module `name`: TensorFlow's, and that of Keras if TensorFlow
        loads the module from there. Empty: there is no such module.
        """
        own_folder = f"tensorflow/_api/v2/{name.removeprefix('tensorflow.').replace('.', '/')}"
        folders = ["tensorflow" if name == "tensorflow" else own_folder]
        module = nearest(_ELSEWHERE, name)
        if module:
            keras_folder = _ELSEWHERE[module] + name.removeprefix(module).replace(".", "/")
            has_keras_2 = (self._root / "tf_keras").exists()
            folders.append(keras_folder if has_keras_2 else keras_folder.replace(_KERAS_2, _KERAS_3))
        files = [self._root / folder / "__init__.py" for folder in folders]
        return [path for path in files if path.exists()]

    @functools.cache  # noqa: B019  # there is one object per process
    def _names(self, module: str) -> frozenset[str]:
        """Return the names that a module has; none if there is no such module."""
        names: set[str] = set().union(*(defined_in(path) for path in self._files(module)))
        parent, _, last = module.rpartition(".")
        if parent:
            for path in self._files(parent):  # the names of tf.app.flags, for one, are set by its parent
                names |= set(re.findall(rf"^_current_module\.{last}\.(\w+) = ", path.read_text(), re.MULTILINE))
        for name in _ELSEWHERE:
            parent_of_name, _, child = name.rpartition(".")
            if parent_of_name == module:
                names.add(child)
        return frozenset(names)


def source_at(path: Path) -> Path | None:
    """Return the file of the package or module at `path`, which has no suffix; None: there is none."""
    for source in (path / "__init__.py", path.with_suffix(".py")):
        if source.exists():
            return source
    return None


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    """Return the names that a module has after its import: those that its file defines and does not delete again."""
    text = path.read_text()
    tree = ast.parse(text)
    names = set(_bound_at_top_level(tree)) - set(re.findall(r"^ *del (\w+)", text, re.MULTILINE))
    names |= set(re.findall(r'setattr\(_current_module, "(\w+)"', text))
    names |= set(re.findall(r"^_current_module\.(\w+) = ", text, re.MULTILINE))
    if path.stem.endswith("_pb2"):
        names |= _names_of_messages(tree)
    return frozenset(names)


@functools.cache
def _star_imports(path: Path) -> tuple[str, ...]:
    """Return the modules from which a source file imports `*`."""
    imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return tuple(node.module for node in imports if node.module and node.names[0].name == "*")


def name_bound_by(node: ast.AST) -> str:
    """Return the name that a node of a syntax tree itself binds; "" if it binds none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.alias):
        return node.asname or node.name.partition(".")[0]
    return node.arg if isinstance(node, ast.arg) else ""


def _bound_at_top_level(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds at its top level.

    Python's `symtable` cannot be used: in Python 3.12 it includes the variables of comprehensions.
    """
    unvisited = list[ast.AST](tree.body)
    while unvisited:
        node = unvisited.pop()
        name = name_bound_by(node)
        if name:  # what is below a function or class is bound in its own scope
            yield name
        elif not isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
            unvisited += ast.iter_child_nodes(node)


def _names_of_messages(tree: ast.Module) -> set[str]:
    """Return the names of messages, enums, values, services and extensions in a module that protoc generated. Its
    source only has them in a serialized form.
    """
    from google.protobuf import descriptor_pb2

    found: set[str] = set()
    for node in ast.walk(tree):
        called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called == "AddSerializedFile" and isinstance(node.args[0], ast.Constant):
            file = descriptor_pb2.FileDescriptorProto.FromString(node.args[0].value)
            declared = (*file.message_type, *file.enum_type, *file.service, *file.extension)
            found |= {declaration.name for declaration in declared}
            for enum in file.enum_type:
                found |= {value.name for value in enum.value}
    return found
