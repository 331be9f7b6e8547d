"""Builds a release in dist/ and tries it as a stranger would. For `make release`.

python .ci/release.py <python> ...    the wheel is installed with each of these Pythons

1. The version of pyproject.toml has a section in CHANGELOG.md, and nothing waits under [Unreleased]. The repository has
   a public address. Everything is committed.
2. `build` makes the source distribution, and the wheel from that. Each of their files is in git. `twine check --strict`
   reads both.
3. pip installs the wheel with all that it depends on, from an empty cache, into a fresh environment of each Python;
   there `pip check`, `python -m runner --version` and `--help` answer, and `command=new` writes a project.
4. The tests of the wheel (tests/integration/test_wheel.py) run on this very file.

Nothing is uploaded from here: .github/workflows/publish.yml does that, once it is switched on ("Releases" in
CONTRIBUTING.md).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
ENV = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def call(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Run a command and return what it printed. Ends this process, with what it said, where it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env={**ENV, **env}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def version() -> str:
    return str(pyproject()["project"]["version"])


def check_changelog(text: str, version: str) -> list[str]:
    """Return what is wrong with the changelog of a release."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    found = {section.partition("\n")[0].split(" ")[0].strip("[]"): section for section in sections}
    wrong = []
    if version not in found:
        wrong.append(f"CHANGELOG.md has no section `## [{version}] - <date>`.")
    elif not re.match(r"\[[^]]+\] - \d{4}-\d\d-\d\d\n", found[version]):
        wrong.append(f"CHANGELOG.md: the section [{version}] has no date: `## [{version}] - 2026-01-31`.")
    waiting = len(re.findall(r"^- ", found.get("Unreleased", ""), flags=re.MULTILINE))
    if waiting:
        wrong.append(f"CHANGELOG.md: {waiting} lines wait under [Unreleased]. Move them to [{version}].")
    return wrong


def check_addresses(project: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the addresses of a release: `project` is that table of pyproject.toml."""
    missing = [name for name in ("Repository", "Issues") if not project.get("urls", {}).get(name)]
    if not missing:
        return []
    return [
        f"pyproject.toml: [project.urls] has no {' and no '.join(missing)}. Whoever finds the package on PyPI looks "
        "there for its source and for the place to report a problem. Fill in the public address of the repository:\n"
        '  Repository = "https://..."\n  Issues = "https://.../issues"\n'
        "and name it in CITATION.cff (repository-code) and mkdocs.yml (repo_url), too."
    ]


def check_committed(root: Path = ROOT) -> list[str]:
    """Return what is wrong if files are changed or new: the release would differ from every commit."""
    changed = call("git", "status", "--porcelain", cwd=root).splitlines()
    listed = "".join(f"\n  {line}" for line in changed)
    return [f"Commit, remove or ignore these files first (git status --porcelain):{listed}"] if changed else []


def source_of(name: str, folders: Mapping[str, str]) -> str:
    """Return the path in git of a file of the wheel. `folders` is package-dir of setuptools."""
    for package, folder in folders.items():
        prefix = package.replace(".", "/") + "/"
        if name.startswith(prefix):
            return f"{folder}/{name.removeprefix(prefix)}"
    return name


def check_files(source: Path, wheel: Path, tracked: Collection[str], folders: Mapping[str, str]) -> list[str]:
    """Return what is wrong if the source distribution or the wheel has a file that is not in git.

    git status does not list ignored files, but setuptools packs each .py file that lies in the folder of a package.
    """
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    stray = {wheel.name: sorted(name for name in packed if source_of(name, folders) not in tracked)}
    with tarfile.open(source) as archive_of_source:
        members = {one.name.partition("/")[2] for one in archive_of_source.getmembers() if one.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    stray[source.name] = sorted(name for name in members - made if ".egg-info/" not in name and name not in tracked)
    return [f"{file} has files that are not in git: {', '.join(names)}" for file, names in stray.items() if names]


def build() -> tuple[Path, Path]:
    """Make dist/ anew. Return the source distribution and the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    call(sys.executable, "-m", "build", "--outdir", DIST)
    (source,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return source, wheel


def make_environment(python: str | Path, home: Path) -> Path:
    """Make a fresh environment of `python` in `home`. Return its Python."""
    if Path(python).resolve() == Path(sys.executable).resolve():
        venv.create(home, with_pip=True)
    else:
        call(python, "-m", "venv", home)
    return home / "bin" / "python"


def check_metadata(files: Sequence[Path], folder: Path) -> None:
    """Have twine look at the files as PyPI would."""
    python = make_environment(sys.executable, folder / "twine")
    call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "twine")
    print(call(python, "-m", "twine", "check", "--strict", *files).strip())


def try_wheel(wheel: Path, base: str, folder: Path) -> None:
    """Install the wheel as a stranger would, with nothing at hand, and ask it."""
    python = make_environment(base, folder / "venv")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "--no-cache-dir", "install", "--quiet", wheel, cwd=folder)
    call(*pip, "check", cwd=folder)
    said = call(python, "-m", "runner", "--version", cwd=folder).strip()
    if not said.startswith(f"estimator-runner {version()} "):
        sys.exit(f"python -m runner --version says {said!r}, not {version()}")
    if "command=train_and_evaluate (default)" not in call(python, "-m", "runner", "--help", cwd=folder):
        sys.exit("python -m runner --help does not name the commands")
    call(folder / "venv" / "bin" / "runner", "command=new", "new.path=made", cwd=folder)
    if not (folder / "made" / "conf" / "experiment").is_dir():
        sys.exit("command=new wrote no project: its template is not in the wheel")
    print(said, flush=True)


def stop_if(wrong: Sequence[str]) -> None:
    """End this process with what is wrong, if anything is."""
    if wrong:
        sys.exit("\n".join(wrong))


def main(pythons: Sequence[str]) -> None:
    wrong = check_changelog((ROOT / "CHANGELOG.md").read_text(), version())
    stop_if(wrong + check_addresses(pyproject()["project"]) + check_committed())
    if not pythons:
        sys.exit("No Python that is supported was found, to try the wheel with.")
    source, wheel = build()
    tracked = set(call("git", "ls-files").splitlines())
    stop_if(check_files(source, wheel, tracked, pyproject()["tool"]["setuptools"]["package-dir"]))
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        check_metadata((source, wheel), Path(name))
    for base in pythons:  # one after the other: each environment has 2 GB
        with tempfile.TemporaryDirectory(prefix="release-") as name:
            try_wheel(wheel, base, Path(name))
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "tests/integration/test_wheel.py"]
    subprocess.run(tests, cwd=ROOT, env={**ENV, "RUNNER_WHEEL": str(wheel)}, check=True)
    print(f"\nIn dist/: {source.name}, {wheel.name}. Nothing is uploaded: see Releases in CONTRIBUTING.md.")


if __name__ == "__main__":
    main(sys.argv[1:])
