"""The public names of the TensorFlow that is installed, read from its files: importing it takes seconds."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import symtable
from pathlib import Path

from runner.config.source_names import V1, canonical

_LEGACY = "tf_keras/api/_v1/keras/__internal__/legacy"
_KERAS_2, _KERAS_3 = "tf_keras/api/_v2/keras", "keras/_tf_keras/keras"

# Where TensorFlow 2.21 loads a module from another package; the longest name that fits counts. `import runner.classic`
# has it load Keras 2 where tf_keras is installed.
_ELSEWHERE = {
    f"{V1}.layers": f"{_LEGACY}/layers",
    f"{V1}.nn.rnn_cell": f"{_LEGACY}/rnn_cell",
    f"{V1}.keras": "tf_keras/api/_v1/keras",
    "tensorflow.keras": _KERAS_2,
    **{f"tensorflow.{name}": f"{_KERAS_2}/{name}" for name in ("losses", "metrics", "optimizers", "initializers")},
}

OF_EVERY_MODULE = frozenset({"__dict__", "__doc__", "__file__", "__loader__", "__name__", "__path__", "__spec__"})
"""`tf.__file__` and the like."""


class Installed:
    """Public names of the installed TensorFlow and of the Keras it loads.

    Attributes:
      is_there: there is a TensorFlow to ask.
    """

    def __init__(self) -> None:
        origin = getattr(importlib.util.find_spec("tensorflow"), "origin", None)
        self.is_there = origin is not None
        self._root = Path(origin).parent.parent if origin else Path(os.devnull)  # which has no files in it

    def has(self, name: str) -> bool:
        """Whether the dotted name `name` leads to something public: a module, or an object in one.

        What comes after an object (`tf.estimator.ModeKeys.TRAIN`) is not looked at.
        """
        parts = canonical(name).split(".")
        for end in range(2, len(parts) + 1):
            module, last = ".".join(parts[: end - 1]), parts[end - 1]
            if last in OF_EVERY_MODULE:
                return True
            if last not in self._names(module):
                return False
            if not self.is_module(".".join(parts[:end])):
                return True
        return self.is_module(".".join(parts))

    def is_module(self, name: str) -> bool:
        return bool(self._files(name))

    def has_private(self, name: str) -> bool:
        """Whether `tensorflow.python.x.y` is a module, or an object that a module defines at its top level."""
        path = self._root.joinpath(*name.split("."))
        if path.is_dir() or path.with_suffix(".py").exists():
            return True
        source = path.parent.with_suffix(".py")
        return source.exists() and path.name in _defined(source)

    def _files(self, name: str) -> list[Path]:
        own = f"tensorflow/_api/v2/{name.removeprefix('tensorflow.').replace('.', '/')}"
        folders = ["tensorflow" if name == "tensorflow" else own]
        fits = [module for module in _ELSEWHERE if name == module or name.startswith(f"{module}.")]
        if fits:
            module = max(fits, key=len)
            there = _ELSEWHERE[module] + name.removeprefix(module).replace(".", "/")
            has_keras_2 = (self._root / "tf_keras").exists()
            folders.append(there if has_keras_2 else there.replace(_KERAS_2, _KERAS_3))
        found = [self._root / folder / "__init__.py" for folder in folders]
        return [path for path in found if path.exists()]

    @functools.cache  # noqa: B019  # one object a process
    def _names(self, module: str) -> frozenset[str]:
        found: set[str] = set().union(*(_defined(path) for path in self._files(module)))
        parent, _, last = module.rpartition(".")
        for path in self._files(parent) if parent else ():  # tf.app.flags is put there from outside
            found |= set(re.findall(rf"^_current_module\.{last}\.(\w+) = ", path.read_text(), re.MULTILINE))
        children = (name.removeprefix(f"{module}.") for name in _ELSEWHERE if name.startswith(f"{module}."))
        return frozenset(found | {name for name in children if "." not in name})


@functools.cache
def _defined(path: Path) -> frozenset[str]:
    """Return the names that a source file has at its top level in the end, and those that it sets on itself."""
    text = path.read_text()
    symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    names = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
    names -= set(re.findall(r"^ *del (\w+)", text, re.MULTILINE))  # as symtable sees it, that assigns
    names |= set(re.findall(r'setattr\(_current_module, "(\w+)"', text))
    return frozenset(names | set(re.findall(r"^_current_module\.(\w+) = ", text, re.MULTILINE)))
