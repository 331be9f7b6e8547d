"""What a run was made of, in real git repositories: the patch that makes its code of a clone, what is left out by name,
and how a run differs from another or from a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from runner.config.hydra import config_flags
from runner.launch.environment import run_code
from runner.launch.environment.run_code import CodeRecorder, code_of_folder, composed_files
from runner.tracking import provenance
from runner.tracking.journal import RUN_STARTED, Journal, journal_path, note_of_run, starts_and_ends
from runner.tracking.provenance import RunCode, compare, read_code, repeat_lines
from runner.tracking.run_end import settle
from runner.tracking.run_record import RunRecord
from runner.tracking.summary import write_summary

SECRET = "correct-horse-battery"
TOKEN = "hf_" + "a1B2" * 10


class Project:
    """A user's project, a git repository or none, and the folder of a run elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model_dir = folder / "project", folder / "run"
        self.folder.mkdir()
        self.model_dir.mkdir()
        self.run = RunRecord()
        self._put = 0

    def write(self, **files: str | bytes) -> None:
        """Write files, before any start: `a__b_py` is a/b.py."""
        for name, text in files.items():
            self.put(name.replace("__", "/").replace("_py", ".py").replace("_yaml", ".yaml"), text)

    def put(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        # Each at another second, by which git sees that it was changed.
        self._put += 1
        written_at = int(time.time()) - 1000 + self._put
        os.utime(path, (written_at, written_at))
        return path

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "protocol.file.allow=always")
        done = subprocess.run(["git", *identity, *words], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self) -> str:
        if not (self.folder / ".git").exists():
            self.git("init", "-q", ".")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "a commit")
        return self.git("rev-parse", "HEAD")

    def record(self, *imported: str, began: float | None = None, **facts: Any) -> RunCode:
        """Let a start record what it is made of; return that."""
        with self.recorder(**facts):
            self.start(*imported, began=began)
        return read_code(self.model_dir)[-1]

    def recorder(self, **facts: Any) -> CodeRecorder:
        self.run.generation += 1
        command = facts.pop("command", "python -m runner")
        return CodeRecorder(self.model_dir, self.run, journal_path(self.model_dir), command, **facts)

    def start(self, *imported: str, began: float | None = None, step: int = 1) -> None:
        """Write into the journal what a chief does that has imported files."""
        clock = time.time if began is None else iter([began, began, time.time()]).__next__
        journal = Journal(journal_path(self.model_dir), clock)
        journal.event("started")
        journal.event("first_step", step=step, files=[str(self.folder / name) for name in imported])
        journal.close()

    def patch(self, start: int = 1) -> Path:
        return provenance.file_of(self.model_dir, start, "patch")

    def written(self) -> str:
        """Return all that was written of the run, as text."""
        files = [path for path in self.model_dir.rglob("*") if path.is_file() and path != journal_path(self.model_dir)]
        return "\n".join(path.read_text() for path in files)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    # Neither the settings of this machine nor a repository around the folder.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    made = Project(tmp_path)
    monkeypatch.chdir(made.folder)
    return made


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return name -> (what it holds, whether it may be executed) of the files in a folder, without git's."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode & stat.S_IXUSR) for path in files}


def made_of(project: Project, folder: Path, code: RunCode) -> dict[str, tuple[bytes, int]]:
    """Return what the lines of a run make in `folder`, but for the packages and the run itself."""
    if code.commit:
        subprocess.run(["git", "clone", "-q", str(project.folder), str(folder)], check=True)
    folder.mkdir(exist_ok=True)
    lines = [line for line in repeat_lines(project.model_dir) if line.startswith("git ")]
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=folder, check=True, capture_output=True)
    return contents(folder)


# --- the patch --------------------------------------------------------------------------------------------------------

SETTINGS = {
    "none": "",
    "form": "[diff]\nnoprefix = true\ncontext = 0\n[color]\nui = always\n[core]\nquotePath = true\n",
    "names": "[diff]\nmnemonicPrefix = true\nrenames = copies\nrelative = true\nexternal = false\n",
}
NEW = {
    "new.py": "a = 1\n", "deep/er/new.py": "b = 2", "empty.py": "", "with space.py": "c = 3\n\n",
    "größe.py": "d = 'ü'\n", 'qu"ote.py': "e = 5\n", "dos.py": "f = 6\r\ng = 7\r\n",
    "form.py": "h = '\x0c'\n\x0c\ni = '\u2028'\n",
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_patch_makes_the_code_of_the_run_of_a_clone(project: Project, tmp_path: Path, settings: str) -> None:
    (tmp_path / "gitconfig").write_text(SETTINGS[settings])
    kept = {
        "model_fns/net.py": "x = 1\ny = 2\nz = 3\n", "gone.py": "old = 1\n", "tool.sh": "echo\n", "ends.py": "no end",
        "moved.py": "one\ntwo\nthree\n", "spa ced.txt": "1\n",
    }  # fmt: skip
    for name, text in kept.items():
        project.put(name, text)
    commit = project.commit()
    project.put("model_fns/net.py", "x = 1\ny = 20\nz = 3\n")
    project.put("ends.py", "no end either")
    project.put("spa ced.txt", "diff --git a/x b/x\n")
    (project.folder / "gone.py").unlink()
    (project.folder / "moved.py").rename(project.folder / "elsewhere.py")
    project.git("add", "-N", "elsewhere.py")
    (project.folder / "tool.sh").chmod(0o755)
    os.utime(project.folder / "tool.sh", (0, 0))
    for name, text in NEW.items():
        project.put(name, text)
    (project.folder / "new.py").chmod(0o755)
    project.put("not_imported.py", "y = 1\n")
    now = contents(project.folder)
    del now["not_imported.py"]

    code = project.record("model_fns/net.py", *NEW)

    assert code.commit == commit and not code.left_out and not code.problem
    changed = {"model_fns/net.py", "gone.py", "tool.sh", "ends.py", "moved.py", "elsewhere.py", "spa ced.txt"}
    assert set(code.files) == {*changed, *NEW} and code.files["gone.py"] is None
    assert made_of(project, tmp_path / "clone", code) == now


def test_a_project_without_git_is_made_of_an_empty_folder(project: Project, tmp_path: Path) -> None:
    project.write(model__net_py="x = 1\n", conf__mine_yaml="a: 1\n", data_yaml="not composed")
    now = contents(project.folder)
    del now["data.yaml"]
    code = project.record("model/net.py", "conf/mine.yaml")
    assert code.commit is None and set(code.files) == {"model/net.py", "conf/mine.yaml"}
    assert made_of(project, tmp_path / "empty", code) == now


def test_a_repository_without_a_commit_is_made_of_an_empty_folder(project: Project, tmp_path: Path) -> None:
    project.write(added_py="x = 1\n", imported_py="y = 1\n", other_py="z = 1\n")
    project.git("init", "-q", ".")
    project.git("add", "added.py")
    code = project.record("imported.py")
    assert code.commit is None and set(code.files) == {"added.py", "imported.py"}
    assert set(made_of(project, tmp_path / "empty", code)) == {"added.py", "imported.py"}


def test_a_command_below_the_top_is_repeated_there(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(lib__net_py="x = 1\n", jobs__here_py="z = 1\n")
    project.commit()
    project.write(lib__net_py="x = 2\n", lib__new_py="y = 1\n")
    monkeypatch.chdir(project.folder / "jobs")
    code = project.record("lib/new.py")
    assert code.folder == "jobs" and set(code.files) == {"lib/net.py", "lib/new.py"}
    assert made_of(project, tmp_path / "clone", code) == contents(project.folder)
    assert repeat_lines(project.model_dir)[-2:] == ["cd jobs", "python -m runner"]


# --- what is left out -------------------------------------------------------------------------------------------------


def test_what_must_not_be_recorded_is_named_and_nowhere(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    noise = bytes(range(256)) * 10
    large = "x = 1\n" * 200_000
    for name in ("plain.py", ".env", "local.env", "token.py", "known.py", "large.csv", "deleted.csv", "picture.py"):
        project.put(name, "old = 1\n")
    project.put(".gitignore", "ignored.py\n")
    project.commit()
    project.put("plain.py", "new = 1\n")
    for name in (".env", "local.env"):
        project.put(name, "HARMLESS=visible-in-the-file\n")
    project.put("token.py", f"login({TOKEN!r})\n")
    project.put("known.py", f"# {SECRET}\n")
    project.put("large.csv", large)
    project.put("picture.py", noise)
    project.put("imported.py", f'api_key = "{SECRET}"\n')
    project.put("untracked_large.py", large)
    project.put("ignored.py", "visible = 'what git ignores'\n")
    project.put("conf/mine.yaml", "# a comment\ndatabase:\n  password: open-sesame\n")

    code = project.record(
        "plain.py", "imported.py", "untracked_large.py", "ignored.py", "conf/mine.yaml", secrets={SECRET}
    )

    assert set(code.files) == {"plain.py"}
    left_out = {
        ".env", "local.env", "token.py", "known.py", "large.csv", "picture.py", "imported.py", "untracked_large.py",
        "ignored.py", "conf/mine.yaml",
    }  # fmt: skip
    assert set(code.left_out) == left_out
    for text in (SECRET, TOKEN, "visible", "open-sesame", "x = 1"):
        assert text not in project.written()
    comments = [line for line in repeat_lines(project.model_dir) if line.startswith("#")]
    assert len(comments) == len(left_out)
    said = capfd.readouterr().err
    assert "run.code" in said and "token.py" in said and "ignored.py" not in said


def test_a_file_that_git_deleted_with_a_secret_is_left_out(project: Project) -> None:
    project.write(gone_py=f"key = {TOKEN!r}\n", other_py="x = 1\n")
    project.commit()
    (project.folder / "gone.py").unlink()
    project.write(other_py="x = 2\n")
    code = project.record("other.py")
    assert set(code.files) == {"other.py"} and set(code.left_out) == {"gone.py"}
    assert TOKEN not in project.written()


def test_code_comes_first_where_there_is_no_room_for_all(project: Project) -> None:
    for name in ("a.txt", "b.txt", "z.py"):
        project.put(name, "\n")
    project.commit()
    for name in ("a.txt", "b.txt", "z.py"):
        project.put(name, f"{name}\n" * 70_000)
    code = project.record("z.py")
    assert set(code.files) == {"a.txt", "z.py"} and set(code.left_out) == {"b.txt"}
    assert project.patch().stat().st_size <= run_code.MAX_BYTES


def test_a_submodule_of_another_commit_is_left_out(project: Project, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    library = Project(tmp_path / "library")
    library.write(a_py="# Subproject commit\n")
    library.commit()
    project.write(net_py="x = 1\n")
    project.commit()
    project.git("submodule", "add", "-q", str(library.folder), "lib")
    project.commit()
    project.write(net_py="Subproject commit 1\n")
    subprocess.run(
        ["git", "-c", "user.name=me", "-c", "user.email=m@e", "commit", "-q", "--allow-empty", "-m", "next"],
        cwd=project.folder / "lib", check=True,
    )  # fmt: skip
    code = project.record("net.py")
    assert set(code.files) == {"net.py"} and set(code.left_out) == {"lib"}


def test_what_changed_after_the_start_is_left_out_since_nobody_knows_which_of_both_ran(project: Project) -> None:
    project.write(tracked_py="x = 1\n", same_py="y = 1\n")
    project.commit()
    project.write(same_py="y = 2\n", new_py="z = 1\n", newer_py="z = 2\n")
    began = time.time() - 30
    for name in ("tracked.py", "newer.py"):
        (project.folder / name).write_text("a later text\n")
    code = project.record("new.py", "newer.py", began=began)
    assert set(code.files) == {"same.py", "new.py"} and set(code.left_out) == {"tracked.py", "newer.py"}
    assert "a later text" not in project.written()


def test_a_commit_after_the_start_is_not_what_ran(project: Project, tmp_path: Path) -> None:
    project.write(net_py="x = 1\n")
    commit = project.commit()
    project.write(net_py="x = 2\n", new_py="y = 1\n")
    now = contents(project.folder)
    with project.recorder():
        time.sleep(0.2)  # the thread looks for the commit at once
        project.commit()
        project.start("net.py", "new.py")
    (code,) = read_code(project.model_dir)
    assert code.commit == commit and set(code.files) == {"net.py", "new.py"}
    assert made_of(project, tmp_path / "clone", code) == now


# --- git --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_without_the_program_git_a_repository_is_not_recorded_for_nobody_knows_what_it_ignores(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write(net_py="x = 1\n")
    project.commit()
    project.write(net_py="x = 2\n", new_py="y = 1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    code = project.record("net.py", "new.py")
    assert code.problem and not code.files and not project.patch().exists()
    assert code.packages and "run.code" in capfd.readouterr().err
    assert any(line.startswith("pip install") for line in repeat_lines(project.model_dir))


def test_without_the_program_git_a_plain_folder_is_recorded(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project.write(net_py="x = 1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(project.record("net.py").files) == {"net.py"}


@pytest.mark.parametrize("does", ["exec sleep 100", "exec yes"])
def test_a_git_that_hangs_or_says_too_much_is_ended(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str
) -> None:
    project.write(net_py="x = 1\n")
    project.commit()
    git = shutil.which("git")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "git"
    program.write_text(f'#!/bin/sh\ncase "$*" in *diff*) {does};; *) exec {git} "$@";; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "GIT_SECS", 0.5)
    began = time.monotonic()
    code = project.record("net.py")
    assert time.monotonic() - began < 5
    assert code.commit and code.problem and not code.files


def test_the_end_of_a_run_does_not_wait_for_git_and_nothing_comes_after_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write(net_py="x = 1\n")
    ends = threading.Event()
    monkeypatch.setattr(run_code, "_requirements", lambda: ends.wait(20) and "")
    monkeypatch.setattr(CodeRecorder, "END_SECS", 0.1)
    recorder = project.recorder()
    with recorder:
        project.start("net.py")
    assert "run.code" in capfd.readouterr().err
    ends.set()
    recorder._thread.join()
    assert read_code(project.model_dir) == []


def test_a_folder_that_cannot_be_written_is_said_and_ends_nothing(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    project.write(net_py="x = 1\n")
    (project.model_dir / "runner_files").write_text("a file")
    with project.recorder():
        project.start("net.py")
    assert "run.code" in capfd.readouterr().err


# --- several starts ---------------------------------------------------------------------------------------------------


def test_a_start_with_the_same_code_changes_the_command_alone(project: Project) -> None:
    project.write(net_py="x = 1\n")
    project.commit()
    project.write(net_py="x = 2\n")
    first = project.record("net.py", command="python -m runner train.max_steps=10")
    second = project.record("net.py", command="python -m runner train.max_steps=20")
    assert second == replace(first, command="python -m runner train.max_steps=20")
    assert len(read_code(project.model_dir)) == 1
    assert repeat_lines(project.model_dir)[-1] == "python -m runner train.max_steps=20"


def test_a_start_with_other_code_has_files_of_its_own(project: Project, tmp_path: Path) -> None:
    project.write(net_py="x = 1\n")
    commit = project.commit()
    project.record("net.py")
    project.write(net_py="x = 2\n")
    with project.recorder():
        project.start("net.py", step=11)
    first, second = read_code(project.model_dir)
    assert (first.start, first.step, second.start, second.step) == (1, 1, 2, 11)
    assert not project.patch(1).exists() and project.patch(2).exists()
    assert repeat_lines(project.model_dir).count(f"git checkout {commit}") == 2
    for start in (1, 2):
        assert any(line.startswith(f"# start {start},") for line in repeat_lines(project.model_dir))


def test_code_that_changed_before_tasks_started_anew_is_recorded_too(project: Project) -> None:
    project.write(net_py="x = 1\n")
    project.commit()
    with project.recorder():
        project.start("net.py")
        while not read_code(project.model_dir):
            time.sleep(0.05)
        project.write(net_py="x = 2\n")
        project.run.generation += 1
        project.start("net.py", step=5)
    first, second = read_code(project.model_dir)
    assert (first.files, set(second.files), second.step) == ({}, {"net.py"}, 5)


def test_the_end_of_a_run_that_was_killed_has_its_code_too(project: Project) -> None:
    project.write(net_py="x = 1\n")
    project.record("net.py")
    write_summary(project.model_dir, {"command": "train", "status": "running"})
    note_of_run(project.model_dir, RUN_STARTED, command="train", name="x", params={}, tags={})
    settle(project.model_dir)
    _, end = starts_and_ends(project.model_dir)
    of_code = {f"runner_files/code.1.{kind}" for kind in ("patch", "requirements.txt", "json")}
    assert of_code <= set(end["files"]) and end["status"] == "interrupted"
    assert all(line in end["description"].splitlines() for line in repeat_lines(project.model_dir))


def test_a_name_with_a_line_break_ends_no_line_that_a_shell_reads(project: Project) -> None:
    project.write(net_py="x = 1\n")
    project.commit()
    project.put("a\nrm -rf x.py", f"key = {TOKEN!r}\n")
    project.record("net.py", "a\nrm -rf x.py")
    comments = [line for line in repeat_lines(project.model_dir) if "rm -rf" in line]
    assert comments and all(line.startswith("#") and "\n" not in line for line in comments)


def test_a_damaged_record_is_set_aside(project: Project) -> None:
    project.write(net_py="x = 1\n")
    project.record("net.py")
    provenance.file_of(project.model_dir, 1, "json").write_text("{")
    assert read_code(project.model_dir) == [] and repeat_lines(project.model_dir) == []


# --- how two differ ---------------------------------------------------------------------------------------------------


@pytest.fixture
def made(project: Project) -> Iterator[Project]:
    """A project whose run has one changed, one deleted and one new file, and one as in the commit."""
    project.write(net_py="x = 1\n", gone_py="y = 1\n", same_py="z = 1\n")
    project.commit()
    project.write(net_py="x = 2\n", new_py="w = 1\n")
    (project.folder / "gone.py").unlink()
    project.record("net.py", "same.py", "new.py")
    yield project


def differences_now(project: Project) -> provenance.CodeDifferences:
    (code,) = read_code(project.model_dir)
    return compare(code, code_of_folder(project.folder, code))


def test_a_folder_in_which_nothing_changed_is_that_of_the_run(made: Project) -> None:
    made.put("not_of_the_run.py", "v = 1\n")
    assert not differences_now(made)


def test_a_folder_differs_by_name_of_each_file(made: Project) -> None:
    made.git("checkout", "net.py", "gone.py")
    made.write(same_py="z = 2\n")
    (made.folder / "new.py").unlink()
    found = differences_now(made)
    assert set(found.files) == {"net.py", "gone.py", "same.py", "new.py"}
    assert found.commits is None and not found.packages and found


def test_what_the_run_had_not_committed_and_is_committed_now_is_the_same_code(made: Project) -> None:
    (code,) = read_code(made.model_dir)
    now = made.commit()
    found = differences_now(made)
    assert found.commits == (code.commit, now) and not found.files


def test_a_clone_without_the_commit_of_the_run_compares_what_it_recorded(made: Project, tmp_path: Path) -> None:
    (code,) = read_code(made.model_dir)
    unknown = replace(code, commit="0" * 40)
    found = compare(unknown, code_of_folder(made.folder, unknown))
    assert found.commits is not None and not found.files
    made.write(new_py="w = 2\n")
    assert set(compare(unknown, code_of_folder(made.folder, unknown)).files) == {"new.py"}


def test_two_runs_differ_in_files_packages_and_python(made: Project) -> None:
    first = made.record("net.py", "same.py", "new.py")
    made.write(new_py="w = 2\n", same_py="z = 2\n")
    second = made.record("net.py", "same.py", "new.py")
    second = replace(second, packages={**second.packages, "numpy": "==0.1", "extra": "==1"}, python="3.99")
    found = compare(first, second)
    assert set(found.files) == {"new.py", "same.py"}
    assert found.packages == {"numpy": (f"=={metadata.version('numpy')}", "==0.1"), "extra": (None, "==1")}
    assert found.pythons == (first.python, "3.99")


def test_what_was_not_recorded_is_not_called_the_same(project: Project) -> None:
    project.write(net_py="x = 1\n", key_py="y = 1\n")
    project.commit()
    project.put("key.py", f"key = {TOKEN!r}\n")
    code = project.record("net.py")
    assert set(compare(code, code_of_folder(project.folder, code)).files) == {"key.py"}


# --- packages, modules, config files ----------------------------------------------------------------------------------


def test_the_packages_are_those_of_this_environment(project: Project) -> None:
    code = project.record()
    installed: dict[str, str] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        installed.setdefault(name, f"=={one.version}")
    del installed["pip"]
    assert code.packages == installed


def test_packages_that_no_index_has_are_told_by_their_origin(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    origins: dict[str, Any] = {
        "from_git": {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
        "editable": {"url": "file:///home/me/lib", "dir_info": {"editable": True}},
        "secret": {"url": f"https://me:{SECRET}@example.org/b.whl", "archive_info": {}},
        "wheel": {"url": "https://example.org/c.whl", "archive_info": {}},
        "Plain.Name_x": None,
    }
    for name, origin in origins.items():
        folder = tmp_path / "site" / f"{name}-1.5.dist-info"
        folder.mkdir(parents=True)
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    code = project.record()
    lines = provenance.file_of(project.model_dir, 1, "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "from-git @ git+https://example.org/a.git@abc", "plain-name-x==1.5", "wheel @ https://example.org/c.whl",
    ]  # fmt: skip
    assert set(code.packages) == {"from-git", "editable", "secret", "wheel", "plain-name-x"}
    assert SECRET not in project.written()


def test_the_modules_of_a_task_are_those_of_its_project_and_none_is_imported_by_asking(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy:
        def __getattr__(self, name: str) -> str:
            raise AssertionError(f"{name} was asked for")

    project.write(net_py="", lib__other_py="")
    project.git("init", "-q", ".")
    (project.folder / "lib").mkdir(exist_ok=True)
    monkeypatch.chdir(project.folder / "lib")
    module = type(json)("net_of_the_test")
    module.__file__ = str(project.folder / "net.py")
    monkeypatch.setitem(sys.modules, "net_of_the_test", module)
    monkeypatch.setitem(sys.modules, "lazy_of_the_test", Lazy())
    assert provenance.imported_files() == [str(project.folder / "net.py")]


def test_config_files_are_those_of_the_choices_and_of_lists_of_defaults(tmp_path: Path) -> None:
    for name in (
        "mine/runner",
        "mine/model/net",
        "mine/model/base",
        "conf/model/net",
        "conf/train/long",
        "conf/shared",
    ):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a: 1\n")
    (tmp_path / "mine/model/net.yaml").write_text("defaults: [base, /shared, _self_, {override /train: long}]\n")
    (tmp_path / "mine/model/base.yaml").write_text("defaults: [net]\n")
    sources = [
        {"path": str(tmp_path / "mine"), "schema": "conf", "provider": "--config-dir"},
        {"path": str(tmp_path / "conf"), "schema": "file", "provider": "main"},
        {"path": "hydra.conf", "schema": "pkg", "provider": "hydra"},
    ]
    choices = {"model": "net", "train": "long", "hydra/launcher": "basic", "experiment": None}
    settings = {"job": {"config_name": "runner"}, "runtime": {"config_sources": sources, "choices": choices}}
    found = {str(path.relative_to(tmp_path)) for path in composed_files(json.dumps({"hydra": settings}))}
    names = ("mine/runner", "mine/model/net", "mine/model/base", "conf/train/long", "conf/shared")
    assert found == {f"{name}.yaml" for name in names}
    assert composed_files("") == [] and composed_files("hydra: 1") == [] and composed_files("[") == []


def test_the_record_of_a_command_has_the_flags_of_its_config_files() -> None:
    words = ["--config-dir", "mine", "-m", "a=1", "--config-name=other", "--cfg", "job"]
    assert config_flags(words) == ["--config-name=other", "--config-dir=mine"]
    assert config_flags(["a=1"]) == []
