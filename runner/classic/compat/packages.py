"""Find packages that a source imports but that are not installed, and files of the user that shadow TensorFlow."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.classic.compat.python2 import MODULES as OF_PYTHON_2

_NO_PACKAGES = ("tensorflow", "tensorflow_estimator")
"""Packages that are not looked for here, because `check` judges each of their names."""

_PIP_NAMES: Mapping[str, str] = {
    "Image": "Pillow",
    "PIL": "Pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "google.cloud.storage": "google-cloud-storage",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "tf_keras": "'estimator-runner[classic]'",
    "tf_slim": "'estimator-runner[classic]'",
    "yaml": "PyYAML",
}
_ENDED: Mapping[str, str] = {
    "tensorflow_addons": "its development ended with TensorFlow 2.15: copy the parts you use into your project",
}


def missing(tree: ast.AST, file: Path) -> Iterator[tuple[ast.stmt, str, str]]:
    """Yield (statement, package, text of the finding) for each imported package that is not installed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported = [node.module or ""]
        else:
            continue
        for package in dict.fromkeys(name.partition(".")[0] for name in imported):
            if package in _NO_PACKAGES or _is_installed(package) or _is_beside(package, file):
                continue
            if package in OF_PYTHON_2:
                yield node, package, f"Python 3 has no {package}: import {OF_PYTHON_2[package]}"
            elif package in _ENDED:
                yield node, package, f"the package is not installed; {_ENDED[package]}"
            else:
                name = _PIP_NAMES.get(package, package.replace("_", "-"))
                do = f"pip install {name}; or, if the package is your own, put its folder beside the script"
                yield node, package, f"the package is not installed, and is not part of TensorFlow: {do}"


@functools.cache
def _is_installed(package: str) -> bool:
    if package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a module without a spec, such as `__main__`
        return package in sys.modules


def _is_beside(package: str, file: Path) -> bool:
    """Report whether there is a module `package` in the folder of `file`, or in a parent folder, from which `python -m`
    may be started.
    """
    sources = (f"{package}.py", f"{package}/*.py", f"{package}/*/*.py")  # a folder such as /run is no package
    for folder in file.absolute().parents:
        for source in sources:
            if next(folder.glob(source), None) is not None:
                return True
    return False


def in_place_of_tensorflow(file: Path) -> Path | None:
    """Return the file or folder beside `file` that Python would import as `tensorflow`; None if there is none."""
    package = file.absolute().parent / "tensorflow"
    if (package / "__init__.py").exists():
        return package
    module = package.with_suffix(".py")
    return module if module.exists() else None


def of_the_users_own(name: str, file: Path) -> Path | None:
    """Return the file or folder of the user that the name `tensorflow.x.y` probably means; None if there is none.

    Python does not import it, because the installed TensorFlow comes first.
    """
    inside = Path(*name.split(".")[:2])
    if inside.parts[0] != "tensorflow":  # a method
        return None
    for folder in file.absolute().parents:
        for path in (folder / inside, (folder / inside).with_suffix(".py")):
            if path.exists() and not (folder / "tensorflow" / "_api").exists():
                return path
    return None
