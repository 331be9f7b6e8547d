"""What a run was made of: writes the code and the packages of a start into its folder, beside its training.

The chief names the modules that it has imported in its journal, with its first step. A thread of the supervisor then
asks git how they, and the composed config files, differ from the commit. `code_of_folder` is the same of a folder as it
is now, to compare with a run. `runner.tracking.provenance` reads what is written here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

import runner
from runner.system.files import RUNNER_FILES, write_atomically, write_json
from runner.system.redaction import mask_text
from runner.system.standard_streams import say
from runner.tracking.journal import read_journal
from runner.tracking.provenance import (
    IGNORED,
    RunCode,
    commit_in,
    file_of,
    git,
    packages_in,
    project_of,
    read_code,
)
from runner.tracking.run_record import RunRecord

MAX_BYTES = 1_000_000
"""Largest number of bytes of the patch of a start, and of a file in it."""
MAX_NAMED = 5
"""Largest number of files that are named in a message."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast as PyYAML's own, where it was built with LibYAML."""

_IS_CODE = re.compile(r".*\.(py|yaml|yml)")
_HAS_VARIABLES = re.compile(r"\.env(\..+)?|.+\.env|\.envrc")

# Lines of a file follow a space, a plus or a minus; these are git's own.
_IS_SUBMODULE = re.compile(rb"^(?:index \S+|(?:new|deleted) file mode|(?:old|new) mode) 160000$", re.MULTILINE)
_IS_BINARY = re.compile(rb"^Binary files ", re.MULTILINE)

_LATER = "it was changed after the start"
_BINARY = "it is no text"
_SECRET = "it has what looks like a secret"
_VARIABLES = "it holds variables of the environment"
_LARGE = "it is larger than 1 MB"
_TOO_MUCH = "all files together are larger than 1 MB"
_SUBMODULE = "it is a submodule"
_UNKNOWN = "git did not say how it differs from the commit"


# --- recording --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class CodeRecorder:
    """Records the code of a run beside its training: inside its context, in a thread, when the chief has taken its
    first step, and again when its tasks were started anew.

    Attributes:
      run: counts the starts, of tasks too, in its `generation`.
      journal: the chief's.
      command, composed, secrets: as in `RunCode`, `composed_files` and `Patch`.
      began: since when this process may have imported what it runs, in seconds since 1970; None: the task does, from
        its own beginning.
      is_quiet: do not say what is not recorded.
    """

    model_dir: Path
    run: RunRecord
    journal: Path
    command: str
    hydra_notes: str = ""
    secrets: Collection[str] = ()
    began: float | None = None
    is_quiet: bool = False
    _over: threading.Event = dataclasses.field(default_factory=threading.Event, init=False)
    _is_given_up: bool = dataclasses.field(default=False, init=False)

    LOOK_SECS = 0.2
    """Seconds between two looks at the journal, before the first step."""
    LATER_SECS = 2.0
    """The same after it."""
    END_SECS = 10.0
    """Seconds that the end of a run waits for git."""

    def __enter__(self) -> CodeRecorder:
        self._offset = 0
        if self.journal.exists():
            self._offset = self.journal.stat().st_size
        self._folder = Path.cwd()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="code of the run")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(self.END_SECS)
        if self._thread.is_alive():
            self._is_given_up = True
            self._say("git does not answer")

    def _watch(self) -> None:
        try:
            self._record_starts()
        except Exception as error:  # a run is more important than the record of its code
            self._say(mask_text(f"{type(error).__name__}: {error}", self.secrets))

    def _say(self, why: str) -> None:
        if not self.is_quiet:
            say(f"run.code: the code of this run is not recorded: {why}")

    def _record_starts(self) -> None:
        """Read the chief's journal until the run ends, and record the code of each start at its first step."""
        project = project_of(self._folder)
        # Asked before the task imports anything: it does not run a commit that is made or checked out later.
        commit = commit_in(project)
        began = self.began
        look_secs = self.LOOK_SECS
        is_over = False
        while not is_over:
            is_over = self._over.wait(look_secs)  # at the end of the run, the journal is read once more
            lines, self._offset = read_journal(self.journal, self._offset, containing=b'"event"')
            for line in lines:
                if line.get("event") == "started" and self.began is None:
                    began = float(line["time"])
                elif line.get("event") == "first_step":
                    look_secs = self.LATER_SECS
                    self._record(project, commit, line, began or 0.0)

    def _record(self, project: Path, commit: str | None, line: Mapping[str, Any], began: float) -> None:
        """Record the code of a start.

        Args:
          project: the top of the project.
          commit: the commit of the project when the command began.
          line: the chief's line about its first step.
          began: as in `Patch`.
        """
        imported = [Path(name) for name in line.get("files", ())]
        named = [*imported, *composed_files(self.hydra_notes)]
        has_git = (project / ".git").exists()
        patch = Patch(project, began)
        problem = ""
        try:
            base = commit
            if has_git and base is None:  # a repository without a commit
                base = _name_of_no_files(project)
            patch = _build_patch(project, base, named, began, self.secrets)
        except GitError:
            problem = f"git does not answer in {project}"
        code = RunCode(
            start=self.run.generation,
            step=line["step"],
            commit=commit,
            folder=_path_below(self._folder, project),
            files=patch.files,
            left_out=patch.left_out,
            problem=problem,
            command=self.command,
            python=platform.python_version(),
        )
        requirements = _requirements()
        if self._is_given_up:  # the run has ended, and another may have the folder
            return
        _write_files(self.model_dir, code, patch.data, requirements)
        self._say_left_out(code)

    def _say_left_out(self, code: RunCode) -> None:
        """Print why the code is not recorded, or which files of it are not."""
        if code.problem:
            self._say(code.problem)
        # Files that git ignores are usually built from others, so they are not reported at each start.
        names = [name for name, why in code.left_out.items() if why != IGNORED]
        if not names or self.is_quiet:
            return
        # Files with secrets come first: their user may want to change something.
        names.sort(key=lambda name: code.left_out[name] != _SECRET)
        num_others = len(names) - MAX_NAMED
        shown = [f"{name} ({code.left_out[name]})" for name in names[:MAX_NAMED]]
        if num_others > 0:
            shown.append(f"and {num_others} more")
        say(f"run.code: not recorded: {', '.join(shown)}")


def _write_files(model_dir: Path, code: RunCode, patch: bytes, requirements: str) -> None:
    """Write the files with the code of a start. If the start before it ran the same code, write the files of that
    start again instead.
    """
    before = next(reversed(read_code(model_dir)), None)
    if before is not None and _is_same_code(model_dir, before, code, patch, requirements):
        code = dataclasses.replace(code, start=before.start, step=before.step)
    (model_dir / RUNNER_FILES).mkdir(exist_ok=True)  # not its parents: a deleted model_dir is not made again
    of_patch = file_of(model_dir, code.start, "patch")
    if patch:
        write_atomically(of_patch, patch)
    else:
        of_patch.unlink(missing_ok=True)
    write_atomically(file_of(model_dir, code.start, "requirements.txt"), requirements)
    facts = dataclasses.asdict(code)
    del facts["packages"]
    # The last file, because readers look for it and then expect the others.
    write_json(file_of(model_dir, code.start, "json"), facts)


def _is_same_code(model_dir: Path, before: RunCode, code: RunCode, patch: bytes, requirements: str) -> bool:
    """Report whether a start ran the code of the one before it."""
    patch_before = _read_or_nothing(file_of(model_dir, before.start, "patch"))
    requirements_before = _read_or_nothing(file_of(model_dir, before.start, "requirements.txt"))
    has_same_files = patch_before == patch and requirements_before == requirements.encode()
    return has_same_files and _code_alone(before) == _code_alone(code)


def _read_or_nothing(file: Path) -> bytes:
    if not file.exists():
        return b""
    return file.read_bytes()


def _code_alone(code: RunCode) -> RunCode:
    """Return the code alone, without when and how it ran."""
    return dataclasses.replace(code, start=0, step=0, command="", packages={})


def code_of_folder(folder: Path, run: RunCode) -> RunCode:
    """Return the code in the project of `folder` as it is now, and the packages of this process, to compare with those
    of a run. Nothing is written.

    Args:
      folder: a folder of the project.
      run: the code of the run, from `read_code`. Files count that differ from its commit, if this repository has it,
        and those that it recorded.
    """
    project = project_of(folder.absolute())
    commit = commit_in(project)
    base = run.commit
    # The run may be of another repository, or of a commit that is not fetched.
    if base and git(project, "cat-file", "-e", f"{base}^{{commit}}") is None:
        base = commit
    problem = ""
    names = {*run.files}
    if base:
        changed = _changed_since(base, project)
        if changed is None:
            problem = _UNKNOWN
        else:
            names.update(changed)
    files = {name: _digest_of(project / name) for name in sorted(names)}
    packages = packages_in(_requirements())
    place = _path_below(folder.absolute(), project)
    python = platform.python_version()
    return RunCode(commit=commit, folder=place, files=files, problem=problem, python=python, packages=packages)


# --- the config -------------------------------------------------------------------------------------------------------


def composed_files(hydra_notes: str) -> list[Path]:
    """Return the user's config files that were composed.

    Args:
      hydra_notes: Hydra's own settings, as in `.hydra/hydra.yaml`.
    """
    try:
        settings = yaml.load(hydra_notes, _LOADER)["hydra"]
        sources = settings["runtime"]["config_sources"]
        choices = dict(settings["runtime"]["choices"])
        names_to_find = [str(settings["job"]["config_name"])]
    except (KeyError, TypeError, ValueError, yaml.YAMLError):  # the notes are of another version of Hydra
        return []
    for group, option in choices.items():  # the group may have a package: db@model.params
        names_to_find.append(f"{group.partition('@')[0]}/{option}")
    folders = [Path(source["path"]) for source in sources if source["schema"] in ("file", "conf")]
    found: dict[str, Path] = {}
    while names_to_find:
        name = names_to_find.pop().removesuffix(".yaml")
        candidates = [folder / f"{name}.yaml" for folder in folders]
        files = [file for file in candidates if file.is_file()]
        if files and name not in found:
            found[name] = files[0]  # the first takes precedence
            names_to_find += _defaults_in(files[0], name.rpartition("/")[0])
    return list(found.values())


def _defaults_in(file: Path, group: str) -> Iterator[str]:
    """Yield the files that a config file has in its list of defaults; options of groups are known from the choices."""
    tree: Any = None
    with suppress(OSError, ValueError, yaml.YAMLError):
        tree = yaml.load(file.read_text(encoding="utf-8-sig"), _LOADER)
    defaults: Any = None
    if isinstance(tree, dict):
        defaults = tree.get("defaults")
    if not isinstance(defaults, list):
        return
    for entry in defaults:
        if isinstance(entry, str) and entry.startswith("/"):
            yield entry.lstrip("/")
        elif isinstance(entry, str):
            yield f"{group}/{entry}".lstrip("/")


# --- the patch --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Patch:
    """The files of a project that differ from its commit, as text for `git apply`. What must not be in it, or cannot,
    is left out by name.

    Args:
      project: the top of the project.
      began: files that were changed later, in seconds since 1970, may not be those that were imported.
      secrets: known secrets.

    Attributes:
      files, left_out: as in `RunCode`.
    """

    project: Path
    began: float
    secrets: Collection[str] = ()
    files: dict[str, str | None] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    _parts: list[bytes] = dataclasses.field(default_factory=list)
    _size: int = 0

    @property
    def data(self) -> bytes:
        return b"".join(self._parts)

    def leave_out(self, names: Iterable[str], why: str) -> None:
        self.left_out.update(dict.fromkeys(sorted(names), why))

    def add(self, parts: Mapping[str, bytes]) -> None:
        """Add files, code first: there may not be room for all.

        Args:
          parts: name of a file -> its part of the patch.
        """
        code = [name for name in sorted(parts) if _IS_CODE.fullmatch(name)]
        others = [name for name in sorted(parts) if not _IS_CODE.fullmatch(name)]
        for name in [*code, *others]:
            part = parts[name]
            why = self._why_not(name, part)
            if why:
                self.left_out[name] = why
                continue
            self.files[name] = _digest_of(self.project / name)
            self._parts.append(part)
            self._size += len(part)

    def _why_not(self, name: str, part: bytes) -> str:
        """Return why a file is left out; '': it is not."""
        path = self.project / name
        if _HAS_VARIABLES.fullmatch(path.name):
            return _VARIABLES
        if _IS_SUBMODULE.search(part):
            return _SUBMODULE
        if max(len(part), _size_of(path)) > MAX_BYTES:
            return _LARGE
        if b"\0" in part or _IS_BINARY.search(part):
            return _BINARY
        if self._size + len(part) > MAX_BYTES:
            return _TOO_MUCH
        with suppress(FileNotFoundError):
            if path.lstat().st_mtime > self.began:
                return _LATER
        text = re.sub(r"^[-+ ]", "", part.decode(errors="replace"), flags=re.MULTILINE)
        if mask_text(text, self.secrets) != text:
            return _SECRET
        return ""


def _build_patch(
    project: Path, base: str | None, named: Collection[Path], began: float, secrets: Collection[str]
) -> Patch:
    """Return the patch of a project.

    Args:
      project: its top.
      base: the commit with which it is compared, or git's name of no files; None: the project is no repository.
      named: the files that were imported and composed.
      began, secrets: as in `Patch`.

    Raises:
      GitError: git does not answer.
    """
    patch = Patch(project, began, secrets)
    names = {_path_below(path, project) for path in named} - {""}
    if base is None:
        # Without the runner's own files, which are those of an installed version or of a checkout.
        own = Path(runner.__file__).parent
        of_user = [name for name in names if not (project / name).is_relative_to(own)]
        patch.add(_parts_of_new(project, of_user))
        return patch
    changed = _changed_since(base, project)
    if changed is None:
        raise GitError
    # Git is not asked for the differences of large files, because it would read them whole.
    large = {name for name in changed if _size_of(project / name) > MAX_BYTES}
    kept = [name for name in changed if name not in large]
    parts = _parts_of_changed(base, project, kept, large)
    # What was imported or composed and has not changed: files that git tracks are those of the commit, files that it
    # ignores are left out, and the rest is new.
    others = names.difference(changed)
    others -= _list_files(project, others, "--cached")
    new = _list_files(project, others, "--others", "--exclude-standard")
    patch.leave_out(large, _LARGE)
    patch.leave_out({*kept}.difference(parts), _UNKNOWN)
    patch.leave_out(others - new, IGNORED)
    # In one call, so that code comes before other files, whether changed or new.
    patch.add({**parts, **_parts_of_new(project, new)})
    return patch


def _parts_of_changed(base: str, project: Path, names: Sequence[str], excluded: Iterable[str]) -> dict[str, bytes]:
    """Return name -> its part of git's patch; {} if git gives none, or one of other files.

    Args:
      base: the commit.
      project: the top of the repository.
      names: the files that differ from it, in git's order.
      excluded: other files that do.
    """
    if not names:
        return {}
    # The settings of a user must not change the form of the patch.
    settings = (
        "-U3",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        "--full-index",
        "--src-prefix=a/",
        "--dst-prefix=b/",
    )
    without = [f":(top,exclude,literal){name}" for name in excluded]
    answer = git(project, "diff", *settings, *_DIFF, base, "--", ":(top)", *without)
    # Git writes a part for each file, in the order of `names`. What is before the first is empty.
    parts = re.split(rb"^(?=diff --git )", answer or b"", flags=re.MULTILINE)[1:]
    if len(parts) != len(names):
        return {}
    part_of = dict(zip(names, parts, strict=True))
    # For a file in the middle of a merge, git also writes a line that `git apply` refuses.
    of_merges = re.compile(rb"^\* Unmerged path .*\n", re.MULTILINE)
    return {name: of_merges.sub(b"", part) for name, part in part_of.items()}


_DIFF = ("--no-renames", "--no-relative", "--ignore-submodules=untracked")


def _changed_since(base: str, project: Path) -> list[str] | None:
    """Return the files in git that differ from a commit, in git's order; None if git does not say it."""
    answer = git(project, "diff", "--name-only", "-z", *_DIFF, base)
    if answer is None:
        return None
    return _names_in(answer)


def _list_files(project: Path, names: Collection[str], *which: str) -> set[str]:
    """Return those of the files `names` that `git ls-files` lists.

    Args:
      which: options of `git ls-files` that say which files it lists.

    Raises:
      GitError: git does not answer.
    """
    if not names:
        return set()
    answer = git(project, "--literal-pathspecs", "ls-files", "-z", *which, "--", *names)
    if answer is None:
        raise GitError
    return {*_names_in(answer)} & {*names}


def _names_in(answer: bytes) -> list[str]:
    return [os.fsdecode(name) for name in answer.split(b"\0") if name]


def _parts_of_new(project: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return name -> the part of a patch that makes the file, as git writes it."""
    parts = {}
    for name in names:
        path = project / name
        with suppress(OSError), path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
            parts[name] = _part_of_new(name, data, is_executable=os.access(path, os.X_OK))
    return parts


def _part_of_new(name: str, data: bytes, *, is_executable: bool) -> bytes:
    """Return the part of a patch that makes the file `name` with the contents `data`."""
    before = _quote(f"a/{name}")
    after = _quote(f"b/{name}")
    mode = "100755" if is_executable else "100644"
    head = f"diff --git {before} {after}\nnew file mode {mode}\n"
    if not data:
        # An empty file has no lines; git writes its object's name instead.
        return os.fsencode(f"{head}index 0000000..e69de29\n")
    lines = data.removesuffix(b"\n").split(b"\n")
    # Git writes a tab after a name that has a space, so that its end is clear.
    if " " in name:
        after += "\t"
    head += f"--- /dev/null\n+++ {after}\n@@ -0,0 +1,{len(lines)} @@\n"
    body = b"".join(b"+" + line + b"\n" for line in lines)
    if not data.endswith(b"\n"):
        body += b"\\ No newline at end of file\n"
    return os.fsencode(head) + body


def _quote(name: str) -> str:
    """Return a name as git has it in a patch."""
    if re.search(r'["\\\x00-\x1f]', name):
        return json.dumps(name, ensure_ascii=False)
    return name


def _path_below(path: Path, project: Path) -> str:
    """Return a path below the top of a project; '' if it is the top, or elsewhere."""
    real = Path(os.path.realpath(path))
    top = Path(os.path.realpath(project))
    if real == top or not real.is_relative_to(top):
        return ""
    return real.relative_to(top).as_posix()


def _size_of(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def _digest_of(path: Path) -> str | None:
    """Return the digest of what a file holds, of a link where it leads; None if there is no file."""
    with suppress(OSError):
        if path.is_symlink():
            data = os.fsencode(os.readlink(path))
        else:
            data = path.read_bytes()
        return hashlib.sha256(data).hexdigest()
    return None


class GitError(RuntimeError):
    """Git is not installed, refuses the repository, or took too long."""


def _name_of_no_files(project: Path) -> str:
    """Return git's name of no files, from which a repository without a commit differs.

    Raises:
      GitError: git does not answer.
    """
    answer = git(project, "hash-object", "-t", "tree", os.devnull)
    if not answer:
        raise GitError
    return answer.decode().strip()


# --- packages ---------------------------------------------------------------------------------------------------------


def _requirements() -> str:
    """Return the installed packages as pip takes them. What no index has is a comment."""
    lines: dict[str, str] = {}
    for entry in sys.path:
        # The names of these folders have name and version of each package; reading their files takes 0.2 s.
        for folder in Path(entry or ".").glob("*.dist-info"):
            written, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
            name = _normalize(written)
            # Of a package that is there twice, Python imports the first on the path.
            lines.setdefault(name, _requirement_of(name, version, folder))
    lines.pop("pip", None)
    head = f"# Python {platform.python_version()}"
    ordered = [lines[name] for name in sorted(lines)]
    return "\n".join([head, *ordered, ""])


def _requirement_of(name: str, version: str, folder: Path) -> str:
    """Return the line of a package for pip, with the commit if it was installed from a repository.

    The line is a comment if pip could not use it: the source is on this machine, or has a secret in its URL.
    """
    line = f"{name}=={version}"
    origin = folder / "direct_url.json"
    if not origin.exists():
        return line
    source: Any = {}
    with suppress(OSError, ValueError):
        source = json.loads(origin.read_text())
    url = str(source.get("url"))
    is_on_this_machine = url.startswith("file:")
    repository = source.get("vcs_info")
    if repository:
        url = f"{repository.get('vcs')}+{url}@{repository.get('commit_id')}"
    shown = mask_text(url, ())
    if is_on_this_machine or shown != url:
        return f"# {line}  # from {shown}"
    return f"{name} @ {url}"


def _normalize(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
