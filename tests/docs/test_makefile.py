"""`make help` shows what most people need, CONTRIBUTING.md all targets, and a set-up says how far it is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = {
    name
    for line in re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in line.split()
}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_help_shows_six_targets_a_line_each_and_how_long_they_take() -> None:
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("make ")}
    assert list(lines) == ["run", "check", "test", "docs", "bench", "release"]
    assert [name for name, line in lines.items() if not re.search(r"minute|second|hour", line)] == []
    assert max(map(len, text.splitlines())) < 120


def test_contributing_describes_each_target() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {name for name in TARGETS - {"help"} if not re.search(rf"`?make {name}(?![\w-])", text)} == set()


def test_a_set_up_by_pip_says_how_far_it_is(install: ModuleType, tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "pip-24.0.dist-info").mkdir(parents=True)
    progress = install.Progress(tmp_path, 4)
    for line in (
        "Ignoring colorama: markers \"sys_platform == 'win32'\" don't match your environment",
        "Collecting absl-py==2.5.1 (from -r requirements/dev.lock (line 3))",
        "  Downloading absl_py-2.5.1-py3-none-any.whl.metadata (3.3 kB)",
        "  Using cached absl_py-2.5.1-py3-none-any.whl (135 kB)",
        "  Downloading tensorflow-2.21.0-cp311-cp311-manylinux_2_27_x86_64.whl (572.4 MB)",
    ):
        progress.read(line)
    assert str(progress) == "downloading 2 of 3 (tensorflow, 572.4 MB)"
    progress.read("Installing collected packages: absl-py, tensorflow")
    (packages / "absl_py-2.5.1.dist-info").mkdir()
    assert str(progress) == "unpacking 1 of 3"


def test_an_environment_whose_installation_was_cut_off_is_made_anew(install: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    link = tmp_path / "link"
    link.symlink_to(folder)
    python = tmp_path / "made" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    command = ["cp", "--recursive", str(python.parent), str(link)]
    unfinished = install.make_environment(link, command)
    half_unpacked = folder / "tensorflow"
    half_unpacked.touch()
    assert install.make_environment(link, command) == unfinished  # cut off, and begun again
    assert not half_unpacked.exists() and (folder / "bin" / "python").exists()
    unfinished.unlink()
    half_unpacked.touch()
    install.make_environment(link, ["false"])
    assert half_unpacked.exists()
