"""The next TensorFlow and Hydra: installs them, and says which private names have moved. For `make canary`.

python .ci/canary.py install              the newest pre-releases of NEWEST, and all else that tests need
python .ci/canary.py names                the private names of the bridge that are gone

The tests themselves are run by pytest, as ever.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEWEST = ("tensorflow", "keras", "hydra-core", "omegaconf")
PINNED = ("tensorflow-serving-api", "tf-keras")
"""They demand the TensorFlow of our lock, but work with the next one: installed as locked, without dependencies."""


def requirements() -> list[str]:
    """Return what we, our extras and our tests depend on, with the newest of NEWEST, without PINNED."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(one for name in ("classic", "optuna", "test") for one in extras[name])]
    names = {re.split(r"[\[<>=~!; ]", one)[0]: one for one in listed}
    # pip takes pre-releases only of a package whose specifier names one.
    return [
        f"{name}>=0.dev0" if name in NEWEST else one
        for name, one in names.items()
        if name not in (*PINNED, project["name"])
    ]


def locked() -> list[str]:
    """Return PINNED with the versions of requirements.lock."""
    lines = re.findall(r"(?m)^[\w-]+==\S+", (ROOT / "requirements.lock").read_text())
    return [line for line in lines if line.partition("==")[0] in PINNED]


def install() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", *requirements()], check=True)
    subprocess.run([*pip, "--no-deps", *locked()], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def private_names() -> list[str]:
    """Return PRIVATE_NAMES of the bridge's test, read and not imported: that fails where one has moved."""
    tree = ast.parse((ROOT / "tests" / "tf_private" / "test_private_names.py").read_text())
    return next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRIVATE_NAMES"
    )


def exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        target = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return False
    return True


def print_names() -> None:
    """Print the versions and the private names that are gone. The tests fail for these names, not this command."""
    print(", ".join(f"{name} {metadata.version(name)}" for name in NEWEST), f"on Python {sys.version.split()[0]}")
    names = private_names()
    gone = [name for name in names if not exists(name)]
    print(f"{len(gone)} of {len(names)} private names have moved" + ":" * bool(gone))
    for name in gone:
        print(f"  {name}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    actions = {"install": install, "names": print_names}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(__doc__)
    actions[sys.argv[1]]()
