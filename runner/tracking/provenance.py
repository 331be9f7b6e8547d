"""Where a run came from: the tags of its start, and its code and packages, from which it can be repeated.

A run's folder has, for each start that ran other code than the start before it, in RUNNER_FILES:

    code.<start>.json               `RunCode`: the commit, the files that differ from it, what is left out and why
    code.<start>.patch              these files, for `git apply`
    code.<start>.requirements.txt   the installed packages, for `pip install -r`

The supervisor writes them (`runner.launch.environment.run_code`). Here they are read: `repeat_lines` are what a shell
needs to repeat the run, and `compare` says how the code of two runs differs.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.system.files import RUNNER_FILES, read_dataclass
from runner.system.redaction import NO_LIST, SecretList, mask_text, masked_override
from runner.system.secret_texts import MASK
from runner.tracking.run_lock import LOCK_FILE

GIT_SECS = 10.0
"""Seconds that git may take for an answer: a repository may be huge, or on a disk that hangs."""
START_SECS = 5.0
"""The same at the start of a run, which waits for it."""
GIT_BYTES = 20_000_000
"""Largest number of bytes of an answer."""
IGNORED = "git ignores it"
"""Why a file is left out that is made, or that is of this machine alone."""


# --- tags -------------------------------------------------------------------------------------------------------------


PACKAGES = ("tensorflow", "keras", "mlflow", "estimator-runner")
"""Packages whose versions are tags of each run."""


def tags_of_this_process(
    directory: Path, argv: Sequence[str], url: str | None = None, listed: SecretList = NO_LIST
) -> dict[str, str]:
    """Return the tags of a run in `directory` (that of `url`) that was started by `argv`, with secrets masked.

    MLflow does not set them for runs that are created by MlflowClient. The tags `host` and `lock` let another process
    find out whether this one is alive.

    Args:
      listed: what the config of the run lists as secret.
    """
    command = shlex.join(masked_override(argument, listed) for argument in argv)
    tags = {
        "mlflow.source.name": "runner",
        "mlflow.source.type": "LOCAL",
        "command": mask_text(command, listed.values),  # once more, because a script may have `--password x`
        "model_dir": url or str(directory),
        "host": platform.node(),
        "lock": str(directory / LOCK_FILE),
        "version.python": platform.python_version(),
    }
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            tags[f"version.{package}"] = metadata.version(package)
    commit = commit_in(Path.cwd(), START_SECS)
    if commit:
        tags["mlflow.source.git.commit"] = commit
        changes = git(Path.cwd(), "status", "--porcelain", "--untracked-files=no", secs=START_SECS)
        if changes is not None:
            tags["git.dirty"] = str(bool(changes)).lower()
    return tags


# --- what a run was made of -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunCode:
    """The code and the packages of a start of a run, and of those after it that ran the same.

    Attributes:
      start: number of the start.
      step: the first global step that was taken with this code.
      commit: the commit from which the files differ; None: the project has none, and `files` are all of its files.
      folder: where the command ran, below the top of the project; '': there.
      files: file that differs from the commit -> digest of what it holds; None: it was deleted.
      left_out: file that differs, or that git ignores, and is not recorded -> why.
      problem: why it is not known which files differ; '': it is known.
      command: the words that start the run again, without secrets and without its folder.
      python: version of Python.
      packages: package -> how pip installs it: `==1.2`, or `@ ` and a URL.
    """

    start: int = 0
    step: int = 0
    commit: str | None = None
    folder: str = ""
    files: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problem: str = ""
    command: str = ""
    python: str = ""
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_code(model_dir: Path) -> list[RunCode]:
    """Return what the run in `model_dir` was made of, the first start first; [] if that was not recorded."""
    files = (model_dir / RUNNER_FILES).glob("code.*.json")
    read = [read_dataclass(RunCode, file) for file in files]
    codes = []
    undamaged = [code for code in read if code.start]  # a damaged file gives the default, start 0
    for code in sorted(undamaged, key=lambda code: code.start):
        file = file_of(model_dir, code.start, "requirements.txt")
        packages = packages_in(file.read_text()) if file.exists() else {}
        codes.append(dataclasses.replace(code, packages=packages))
    return codes


def packages_in(requirements: str) -> dict[str, str]:
    """Return package -> how it was installed, from the lines of `code.<start>.requirements.txt`."""
    packages = {}
    for line in requirements.splitlines():
        found = re.match(r"(?:# )?([a-z0-9-]+)(==\S+| @ \S+)", line)
        if found:
            packages[found[1]] = found[2].strip()
    return packages


def repeat_lines(model_dir: Path) -> list[str]:
    """Return the lines of a shell that repeat the run in `model_dir` in a clone of its project; [] if its code was not
    recorded. What they lack stands in them as comments.
    """
    lines = []
    codes = read_code(model_dir)
    for code in codes:
        if len(codes) > 1:
            lines.append(f"# start {code.start}, from step {code.step} on:")
        lines += _repeat_lines_of(code, model_dir)
    # The name of a file may have a line break, after which a shell would read a command.
    return [re.sub(r"[\x00-\x1f]", "?", line) for line in lines]


def repeat_text(model_dir: Path) -> str | None:
    """Return these lines as Markdown, for the page of a run; None: there are none."""
    lines = "\n".join(repeat_lines(model_dir))
    if not lines:
        return None
    return f"### Repeat this run\n\n```\n{lines}\n```\n"


def code_files(model_dir: Path) -> list[str]:
    """Return the files that say what the run in `model_dir` was made of, as paths below it."""
    files = sorted((model_dir / RUNNER_FILES).glob("code.*"))
    return [str(file.relative_to(model_dir)) for file in files]


def _repeat_lines_of(code: RunCode, model_dir: Path) -> Iterator[str]:
    """Yield the lines of a shell that repeat what was started with this code."""
    patch = file_of(model_dir, code.start, "patch")
    requirements = file_of(model_dir, code.start, "requirements.txt")
    if code.problem:
        yield f"# the code is not recorded: {code.problem}"
    for name, why in code.left_out.items():
        yield f"# not recorded: {name} ({why})"
    if code.commit:
        yield f"git checkout {shlex.quote(code.commit)}"
    if patch.exists():
        yield f"git apply {shlex.quote(str(patch))}"
    yield f"pip install -r {shlex.quote(str(requirements))}"
    if code.folder:
        yield f"cd {shlex.quote(code.folder)}"
    if MASK in code.command:
        yield f"# {MASK} stands for a secret: write it"
    yield code.command


def file_of(model_dir: Path, start: int, kind: str) -> Path:
    """Return the path of a file of a start: its json, patch or requirements.txt."""
    return model_dir / RUNNER_FILES / f"code.{start}.{kind}"


# --- how two differ ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CodeDifferences:
    """How the code and packages of two runs differ, or of a run and a folder.

    Attributes:
      commits: both commits; None: it is the same.
      files: file -> how it differs, in words. Files that differ because the commits of two runs do are not among them.
      packages: package -> as in the first and the second; None: it is not installed there.
      pythons: both versions of Python; None: it is the same.
    """

    commits: tuple[str | None, str | None] | None = None
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: Mapping[str, tuple[str | None, str | None]] = dataclasses.field(default_factory=dict)
    pythons: tuple[str, str] | None = None

    def __bool__(self) -> bool:
        return bool(self.commits or self.files or self.packages or self.pythons)


def compare(first: RunCode, second: RunCode) -> CodeDifferences:
    """Return how the second differs from the first."""
    files = {}
    for name in sorted({*first.files, *second.files, *first.left_out, *second.left_out}):
        how = _how_differs(name, first, second)
        if how:
            files[name] = how
    packages = {}
    for name in sorted({*first.packages, *second.packages}):
        versions = (first.packages.get(name), second.packages.get(name))
        if versions[0] != versions[1]:
            packages[name] = versions
    differences = CodeDifferences(files=files, packages=packages)
    if first.commit != second.commit:
        differences = dataclasses.replace(differences, commits=(first.commit, second.commit))
    if first.python != second.python:
        differences = dataclasses.replace(differences, pythons=(first.python, second.python))
    return differences


def _how_differs(name: str, first: RunCode, second: RunCode) -> str:
    """Return how a file that differs from its commit in one of the two differs between them; '': it is the same."""
    why_not = first.left_out.get(name) or second.left_out.get(name)
    if why_not == IGNORED:  # such a file differs between machines, whatever the code
        return ""
    if why_not:
        return f"not recorded: {why_not}"
    if name not in first.files:
        return "changed in the second only"
    if name not in second.files:
        return "changed in the first only"
    before = first.files[name]
    after = second.files[name]
    if before == after:
        return ""
    if before is None:
        return "not in the first"
    if after is None:
        return "not in the second"
    return "differs"


# --- the modules of a task --------------------------------------------------------------------------------------------


def imported_files() -> list[str]:
    """Return the source files, below the top of the project of this directory, that this process has imported; without
    installed packages.
    """
    project = os.path.join(project_of(Path.cwd()), "")
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed = tuple(os.path.join(path, "") for path in paths)
    found = set()
    for module in tuple(sys.modules.values()):
        file = _file_of_module(module)
        if file.startswith(project) and file.endswith(".py") and not file.startswith(installed):
            found.add(file)
    return sorted(found)


def _file_of_module(module: Any) -> str:
    # Not `module.__file__`: asking a module that is imported at its first use would import it.
    with suppress(AttributeError, TypeError):
        file = object.__getattribute__(module, "__dict__").get("__file__")
        if isinstance(file, str):
            # Making a path absolute takes 5 us, and there are 5,000 modules: only where it is none.
            return file if file.startswith("/") else os.path.abspath(file)
    return ""


def project_of(folder: Path) -> Path:
    """Return the top of the project of a folder: that of its git repository, or without one the folder."""
    for above in (folder, *folder.parents):
        if (above / ".git").exists():
            return above
    return folder


# --- git --------------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str, secs: float | None = None) -> bytes | None:
    """Return the output of a git command in `folder`; None without git or outside of a repository, or if the answer
    takes too long or is too large.

    Args:
      secs: seconds that it may take; None: GIT_SECS.
    """
    # Without locks: another git command of the user must not fail because of this one.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with suppress(OSError), subprocess.Popen(command, **streams) as process:
        assert process.stdout is not None
        limit = threading.Timer(secs or GIT_SECS, process.kill)
        limit.daemon = True
        limit.start()
        try:
            answer: bytes = process.stdout.read(GIT_BYTES + 1)
            if len(answer) > GIT_BYTES:
                process.kill()
        finally:
            limit.cancel()
        if process.wait() == 0:
            return answer
    return None


def commit_in(folder: Path, secs: float | None = None) -> str | None:
    """Return the commit of the repository that has `folder`; None: it has none. Args: secs: as of `git`."""
    answer = git(folder, "rev-parse", "--verify", "--quiet", "HEAD", secs=secs)
    return answer.decode().strip() if answer else None
