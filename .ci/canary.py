"""The next TensorFlow, Keras, MLflow, Optuna and Hydra: which names of theirs have moved. For `make canary`.

python .ci/canary.py install              the newest pre-releases of NEWEST, and all else that tests need
python .ci/canary.py names                the names that we use and that are gone there
python .ci/canary.py alone                the same for each of NEWEST by itself, beside the versions of our lock

The tests themselves are run by pytest, as ever.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "canary"
NEWEST = ("tensorflow", "keras", "mlflow", "optuna", "hydra-core", "omegaconf")
PRE_RELEASES = {"keras": "keras-nightly"}
"""Distributions that have the pre-releases of others, in the same folder."""
PINNED = ("tensorflow-serving-api", "tf-keras")
"""They demand the TensorFlow of our lock, but work with the next one: installed as locked, without dependencies."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")


def requirements() -> list[str]:
    """Return what we, our extras and our tests depend on, with the newest of NEWEST, without PINNED."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = next(one for one in extras["test"] if one.startswith(project["name"]))  # with the other extras: `name[a,b]`
    names_of_extras = "test", *re.split(r"[\[\],]", ours)[1:-1]
    listed = [*project["dependencies"], *(one for name in names_of_extras for one in extras[name])]
    names = {re.split(r"[\[<>=~!; ]", one)[0]: one for one in listed}
    return [
        newest(name) if name in NEWEST else one for name, one in names.items() if name not in (*PINNED, project["name"])
    ]


def newest(name: str) -> str:
    """Return the requirement of the newest: pip takes pre-releases only of a package whose specifier names one."""
    return f"{name}>=0.dev0"


def locked() -> list[str]:
    """Return PINNED with the versions of requirements/dev.lock."""
    lines = re.findall(r"(?m)^[\w-]+==\S+", (ROOT / "requirements/dev.lock").read_text())
    return [line for line in lines if line.partition("==")[0] in PINNED]


def install() -> None:
    subprocess.run([*PIP, "--upgrade", *requirements()], check=True)
    last = [*locked(), *map(newest, PRE_RELEASES.values())]
    # Both would stay in one folder, files of the older one among those of the newer.
    subprocess.run([*PIP[:-2], "uninstall", "--quiet", "--yes", *PRE_RELEASES, *PRE_RELEASES.values()], check=True)
    subprocess.run([*PIP, "--no-deps", "--force-reinstall", *last], check=True)
    subprocess.run([*PIP, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def alone() -> None:
    """Print, for each of NEWEST, which names are gone with it and what it brings, in the environment of this Python.

    That stays as it is: what is newer is in a folder of its own, which comes first on the path.
    """
    command = [sys.executable, __file__, "gone"]
    before = set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    for name in NEWEST:
        wanted = [*PIP, "--dry-run", "--report", "-", "--upgrade", newest(name)]
        if name in PRE_RELEASES:
            wanted += ["--no-deps", newest(PRE_RELEASES[name])]
        report = json.loads(subprocess.run(wanted, check=True, stdout=subprocess.PIPE, text=True).stdout)
        brought = [f"{one['metadata']['name']}=={one['metadata']['version']}" for one in report["install"]]
        print(f"{name}: {', '.join(brought) or 'the lock has the newest'}", flush=True)
        if not brought:
            continue
        folder = FOLDER / name
        subprocess.run([*PIP, "--no-deps", "--upgrade", "--target", str(folder), *brought], check=True)
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder)})
        if ran.returncode:
            print(f"  does not work beside the lock: {ran.stderr.strip().splitlines()[-1]}")
        else:
            show(sorted(set(json.loads(ran.stdout)) - before))


def show(names: list[str]) -> None:
    print(f"  {len(names)} of {len(used_names())} names have moved" + ":" * bool(names))
    for name in names:
        print(f"    {name}")


def used_names() -> set[str]:
    """Return the names `module:path` of the packages that we use: private ones, and what is written in `runner/`."""
    packages = {one.partition("-")[0] for one in NEWEST} | {"tf_keras"}
    found = set(private_names())
    for path in (ROOT / "runner").rglob("*.py"):
        tree = ast.parse(path.read_text())
        aliases: dict[str, str] = {}  # in order: `import tensorflow as tf`, then `v1 = tf.compat.v1`
        for node in tree.body:
            aliases |= dict(bound(node, aliases))
        for node in ast.walk(tree):
            aliases |= dict(bound(node, aliases)) if isinstance(node, ast.Import | ast.ImportFrom) else {}
        found |= {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)  # not what we set
            if (name := resolved(node, aliases))
            if name.partition(":")[0].partition(".")[0] in packages
        }
    return found


def bound(node: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, what it is, as `module:path`) of an import or of `name = a.b.c`."""
    if isinstance(node, ast.Import):
        for one in node.names:
            yield one.asname or one.name.partition(".")[0], f"{one.name if one.asname else one.name.partition('.')[0]}:"
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for one in node.names:
            yield one.asname or one.name, f"{node.module}:{one.name}"
    elif (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (it := resolved(node.value, aliases))
    ):
        yield node.targets[0].id, it


def resolved(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Return `module:path` of a chain of attributes that begins with a name in `aliases`."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    before = resolved(node.value, aliases) if isinstance(node, ast.Attribute) else None
    return before and f"{before}{'' if before.endswith(':') else '.'}{node.attr}"  # type: ignore[attr-defined]


def private_names() -> list[str]:
    """Return the names of the table of `runner/tf_private/`; `a or b` is one that a newer version has at `b`."""
    table = (ROOT / "runner" / "tf_private" / "README.md").read_text()
    return [one.replace("`", "") for one in re.findall(r"(?m)^\| (`[\w.:]+`(?: or `[\w.:]+`)*) \|", table)]


def exists(name: str) -> bool:
    """Report whether a name is there: an attribute, or a module that can be imported."""
    module, _, path = name.partition(":")
    try:
        target = importlib.import_module(module)
        at = module
        for part in filter(None, path.split(".")):
            at = f"{at}.{part}"
            target = getattr(target, part) if hasattr(target, part) else importlib.import_module(at)
    except (ImportError, AttributeError):
        return False
    return True


def gone() -> list[str]:
    return sorted(name for name in used_names() if not any(map(exists, name.split(" or "))))


def print_names() -> None:
    """Print the versions and the names that are gone. The tests fail for these names, not this command."""
    versions = {name: metadata.version(name) for name in (PRE_RELEASES.get(one, one) for one in NEWEST)}
    print(", ".join(map(" ".join, versions.items())), f"on Python {sys.version.split()[0]}")
    show(gone())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    actions = {"install": install, "names": print_names, "alone": alone, "gone": lambda: print(json.dumps(gone()))}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(__doc__)
    actions[sys.argv[1]]()
