"""The next TensorFlow: installs it, says which private names have moved, and runs tests on it. For `make canary`.

python .ci/canary.py install              the newest pre-release of TensorFlow and Keras, and what else we depend on
python .ci/canary.py names                the private names of the bridge that are gone
python .ci/canary.py test [of pytest]     tests; skips those that need a package which demands an older TensorFlow
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEWEST = ("tensorflow", "keras")
PINNED = ("tf-runner", "tensorflow-serving-api", "tf-keras")  # they demand the TensorFlow of our lock
MODULES = ("tf_keras", "tensorflow_serving")
"""What PINNED would have installed."""


def requirements() -> list[str]:
    """Return what we and our tests depend on, with the newest TensorFlow and Keras, pre-releases among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[\[<>=~!; ]", one)[0]: one for one in listed}
    # pip takes pre-releases only of a package whose specifier names one.
    return [f"{name}>=0.dev0" if name in NEWEST else one for name, one in names.items() if name not in PINNED]


def install() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", *requirements()], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def private_names() -> list[str]:
    """Return PRIVATE_NAMES of the bridge's test, read and not imported: that fails where one has moved."""
    tree = ast.parse((ROOT / "tests" / "tf_private" / "test_private_names.py").read_text())
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRIVATE_NAMES"
    )


def is_there(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        target = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return False
    return True


def say_names() -> None:
    """Print the versions, and the private names that are gone. It is the tests that fail for them."""
    print(", ".join(f"{name} {metadata.version(name)}" for name in NEWEST), f"on Python {sys.version.split()[0]}")
    names = [name for name in private_names() if name.partition(".")[0] not in MODULES]
    gone = [name for name in names if not is_there(name)]
    print(f"{len(gone)} of {len(names)} private names have moved" + ":" * bool(gone))
    for name in gone:
        print(f"  {name}")


def _imports_at_once(path: Path) -> bool:
    """Report whether a test file imports one of MODULES before any of its tests runs."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] in MODULES for name in names):
            return True
    return False


def test(arguments: list[str]) -> int:
    import pytest  # `install` runs before it is there

    if importlib.util.find_spec("tf_keras") is None:
        absent = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _imports_at_once(path)]
        print(f"Left out, as they import {' or '.join(MODULES)}: {', '.join(path.name for path in absent) or 'none'}")
        arguments = [*arguments, *(f"--ignore={path}" for path in absent)]
    return int(pytest.main(["-q", "-p", "canary_skips", *arguments]))  # workers of pytest-xdist load it, too


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    action = sys.argv[1] if len(sys.argv) > 1 else ""
    if action == "install":
        install()
    elif action == "names":
        say_names()
    elif action == "test":
        sys.exit(test(sys.argv[2:]))
    else:
        sys.exit(__doc__)
