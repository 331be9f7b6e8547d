"""The wheel of this repository, built and installed as a user would, for tests outside of the repository's sight."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "runner",
    "conf",
    "docs",
    "model_fns",
    "input_fns",
    "project_template",
)
ENV = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def call(*command: str | Path, cwd: Path, env: Mapping[str, str] = ENV) -> str:
    """Run a command outside of the repository. Return what it printed."""
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel in `folder`, from a copy: a build leaves directories behind in its source."""
    source, out = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=source)
    (built,) = out.glob("*.whl")
    return built


def install(wheel: Path, home: Path, commands: Sequence[str] = ()) -> Path:
    """Install `wheel` into a fresh environment. Return its bin directory.

    Its dependencies are those of this environment: TensorFlow is 2 GB.

    Args:
      commands: distributions of these dependencies whose commands are wanted, too.
    """
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site_packages,) = home.glob("lib/python*/site-packages")
    # A directory that a .pth adds is searched, but its own .pth files (an editable install of ours) are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    for point in (one for name in commands for one in metadata.distribution(name).entry_points):
        if point.group == "console_scripts":
            script = home / "bin" / point.name
            script.write_text(
                f"#!{python}\nimport sys\nfrom {point.module} import {point.attr}\nsys.exit({point.attr}())\n"
            )
            script.chmod(0o755)
    return home / "bin"
