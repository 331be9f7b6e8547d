"""command=new: write a first project, which trains and passes its test as it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config.help import shipped
from runner.config.schema import Config, ConfigError
from runner.system.console import print_table
from runner.system.files import write_atomically

EXPERIMENT = "wine"
"""The project's value for `experiment=`."""

RENAMED = {"gitignore": ".gitignore"}
"""Files with another name in the template, because wheels omit files whose names begin with a dot."""

PURPOSES = {
    "README.md": "the commands, and what to change where",
    "model_fns/classifier.py": "the model",
    "input_fns/wine.py": "the data",
    "conf/experiment/wine.yaml": "a complete named run",
    "conf/schema/config.json": "what an editor needs to complete and check keys",
    "tests/test_wine.py": "its test",
}


def project_files() -> dict[str, Path]:
    """Return the path of each file of a new project, relative to it, with the file that is copied there."""
    template = shipped("project_template")
    found = {}
    for path in sorted(template.rglob("*")):
        name = path.relative_to(template).as_posix()
        # Python writes __pycache__. An __init__.py makes the template a package only so that it is shipped.
        is_no_part = "__pycache__" in path.parts or name == "__init__.py"
        if path.is_file() and not is_no_part:
            found[RENAMED.get(name, name)] = path
    schemas = shipped("conf") / "schema"
    for path in sorted(schemas.glob("*.json")):
        found[f"conf/schema/{path.name}"] = path
    return found


def write_project(folder: Path) -> list[str]:
    """Write a new project into the new folder `folder`, and return the paths of its files relative to it.

    Raises:
      ConfigError: the folder is a file, is not empty, or cannot be written.
    """
    shown = f"new.path={folder}"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{shown} is a file. Choose a new or empty folder.")
    try:
        held = []
        if folder.is_dir():
            held = sorted(path.name for path in folder.iterdir())
        if held:
            names = ", ".join(held[:3])
            if len(held) > 3:
                names += ", ..."
            raise ConfigError(f"{shown} is not empty ({names}). Choose a new or empty folder.")
        files = project_files()
        for name, path in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            write_atomically(target, text.replace("{name}", folder.resolve().name))
    except OSError as error:
        raise ConfigError(f"{shown} cannot be written: {error}. Choose another folder.") from error
    return [*files]


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Write a new project, and print its files and the next commands.

    Raises:
      ConfigError: as in `write_project`.
    """
    path = Path(str(config.new.path))
    written = write_project(path)
    rows = [[name, PURPOSES[name]] for name in PURPOSES if name in written]
    print_table(f"A new project in {path}", ["file", "what it is"], rows)
    print(
        f"\nTrain it, then test it:\n  cd {shlex.quote(str(path))}\n  python -m runner experiment={EXPERIMENT}\n"
        "  pip install pytest\n  python -m pytest",
        flush=True,
    )
    return {"path": str(path)}
