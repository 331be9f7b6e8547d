"""Installs a list of packages into an environment, and shows that it moves. For the Makefile.

<python> .ci/install.py <environment> <list> <what to expect> [--with-this]

The Python that runs this makes the environment, if there is none. uv installs where it is found (the variable UV has
its path), else pip: both take the same versions, and refuse a file whose hash is not in the list. uv shows itself what
it is doing. pip is silent for minutes while it unpacks, so its lines are counted here, and how far it is is told every
ten seconds, on a terminal every second. An environment in which an installation was cut off is made anew: pip takes a
package that was half unpacked for installed. `--with-this` installs this repository, too, in such a way that an edit
needs no installation.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Is in an environment as long as something is being installed into it.
UNFINISHED = ".unfinished"
# "Downloading a-1.0.whl.metadata" is no package.
A_FILE = re.compile(
    r"\s*(?:Downloading|Using cached|Processing) \S*?([^/\s]+?)-\d\S*(?:\.whl|\.tar\.gz|\.zip)(?: \((.+)\))?$"
)


class Progress:
    """How far pip is, from the lines that it prints.

    Args:
      environment: the folder of the environment.
      total: how many packages the list has.
    """

    def __init__(self, environment: Path, total: int) -> None:
        self._environment = environment
        self._total = total
        self._before = self._unpacked()
        self._files = 0
        self._newest = ""
        self._unpacks = False

    def read(self, line: str) -> None:
        """Take in a line of pip."""
        if found := A_FILE.match(line):
            self._files += 1
            size = f", {found[2]}" if found[2] else ""
            self._newest = f" ({found[1]}{size})"
        elif line.startswith("Ignoring "):  # a package for another Python or system
            self._total -= 1
        elif line.startswith("Installing collected packages"):
            self._unpacks = True

    def __str__(self) -> str:
        if self._unpacks:
            return f"unpacking {min(self._unpacked() - self._before, self._total)} of {self._total}"
        return f"downloading {self._files} of {self._total}{self._newest}"

    def _unpacked(self) -> int:
        return len(list(self._environment.glob("lib/python*/site-packages/*.dist-info")))


def run_pip(command: list[str], progress: Progress) -> int:
    """Run pip, show how far it is, and return its exit code. Its errors go to the screen as they come."""
    begun = time.monotonic()
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", cwd=ROOT)
    assert pip.stdout is not None
    lines = iter(pip.stdout)
    reader = threading.Thread(target=lambda: [progress.read(line.rstrip()) for line in lines], daemon=True)
    reader.start()
    on_a_terminal = sys.stdout.isatty()
    reader.join(timeout=1)
    while reader.is_alive():
        line = f"  {time.monotonic() - begun:.0f} s: {progress}"
        if on_a_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="", flush=True)
        else:
            print(line, flush=True)
        reader.join(timeout=1 if on_a_terminal else 10)
    if on_a_terminal:
        print()
    return pip.wait()


def make_environment(environment: Path, command: list[str]) -> Path:
    """Make an environment, unless there is a finished one.

    Args:
      environment: its folder, or a link to it.
      command: makes it.

    Returns: a file in it that says that it is unfinished, to be removed once all is installed.
    """
    folder = environment.resolve()
    unfinished = folder / UNFINISHED
    if unfinished.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    if not os.access(folder / "bin" / "python", os.X_OK):
        subprocess.run(command, check=True)
    return unfinished


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("environment", type=Path)
    parser.add_argument("packages", type=Path)
    parser.add_argument("expect")
    parser.add_argument("--with-this", action="store_true")
    arguments = parser.parse_args()
    environment, packages = arguments.environment, arguments.packages
    python = environment / "bin" / "python"
    listed = packages.read_text()
    total = len(re.findall(r"(?m)^[\w.-]+==", listed))
    uv = shutil.which(os.environ.get("UV", "uv"))
    name = "uv" if uv else "pip"
    print(f"Setting up {environment}: {name} installs {total} packages of {packages}, {arguments.expect}.", flush=True)
    begun = time.monotonic()
    if uv:
        make = [uv, "venv", "--quiet", "--seed", "--allow-existing", "--python", sys.executable, str(environment)]
        # Importing TensorFlow without cached bytecode takes 10 s instead of 4. pip writes it unasked.
        install = [uv, "pip", "install", "--compile-bytecode", "--python", python]
    else:
        make = [sys.executable, "-m", "venv", str(environment)]
        install = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    unfinished = make_environment(environment, make)
    hashes = ["--require-hashes"] if "--hash=" in listed else []
    command = [*map(str, install), *hashes, "-r", str(packages)]
    code = subprocess.run(command, cwd=ROOT).returncode if uv else run_pip(command, Progress(environment, total))
    if code == 0 and arguments.with_this:
        code = subprocess.run(
            [*install, "--quiet", "--no-deps", "--no-build-isolation", "-e", "."], cwd=ROOT
        ).returncode
    # Also if it failed: then pip has put back what it replaced. A negative code is the signal that ended it.
    if code >= 0:
        unfinished.unlink()
    if code == 0:
        print(f"{environment} is ready after {time.monotonic() - begun:.0f} s.", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
