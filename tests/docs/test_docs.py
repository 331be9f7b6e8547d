"""The documents tell the truth: links lead somewhere, and the README's example runs as it stands there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine

ROOT = Path(__file__).parents[2]
GROUPS = {path.parent.name for path in (ROOT / "conf").glob("*/*.yaml")}
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("deploy/*.md")]
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith(("http:", "https:")):
            path = (document.parent / target).resolve()
            # A page for each group of the config, which docs/make_config_reference.py writes when the site is built.
            is_made = path.parent == ROOT / "docs" / "reference" / "config" and path.stem in ("index", *GROUPS)
            assert is_made or path.exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    ours = "runner|tests|benchmarks|conf|docs|deploy|requirements"
    for name in re.findall(rf"`((?:{ours})/[\w./]+\.\w+)`", document.read_text()):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


FOLDERS = (
    ".ci", ".github", "benchmarks", "conf", "deploy", "docs", "input_fns", "model_fns", "project_template",
    "requirements", "runner", "tests",
)  # fmt: skip

# `tests/docs/test_docs_<page>.py` is no path, and neither is its beginning.
A_PATH = re.compile(rf"(?<![\w/.$}}>~\\-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*+(?![<{{$])")
A_TEST = re.compile(r"(?<![\w/.*-])test_[\w*]+\.py\b")

NO_PATHS = {
    "model_fns/mine.py": "the reader's own, as the two below",
    "model_fns/line.py": "",
    "input_fns/line.py": "",
    "docs/reference/config/": "made when the site is built",
}


def readable_files() -> list[Path]:
    """The files of the repository with comments or text; the pages of docs/ have tests of their own."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.yml"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    for folder in FOLDERS:
        for suffix in ("py", "yaml", "yml", "sh", "sbatch"):
            files += (ROOT / folder).rglob(f"*.{suffix}")
    return [*files, *(ROOT / "deploy").glob("Dockerfile*"), *(ROOT / "requirements").glob("*.txt")]


def prose(path: Path) -> Iterator[str]:
    """Yield the comments and docstrings of a Python file; the whole text of another."""
    text = path.read_text()
    names_none = not A_PATH.search(text) and not A_TEST.search(text)  # most files: reading their tokens takes 4 s
    if path.suffix != ".py" or names_none:
        yield text
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def dead_paths(path: Path) -> Iterator[str]:
    """Yield the paths into the repository that a file names and that are not there; `*` stands for any characters."""
    # A new project has its files in folders of the same names.
    roots = [ROOT / "project_template", ROOT] if ROOT / "project_template" in path.parents else [ROOT]
    for text in prose(path):
        for found in A_PATH.findall(text):
            name = found.rstrip(".")
            if name not in NO_PATHS and not any(any(root.glob(name)) for root in roots):
                yield name
        for name in A_TEST.findall(text):
            if not any((ROOT / "tests").rglob(name)):
                yield name


def test_paths_in_comments_docstrings_and_lists_exist() -> None:
    dead = [f"{path.relative_to(ROOT)} names {name}" for path in readable_files() for name in dead_paths(path)]
    assert dead == []


@pytest.mark.parametrize("document", ["docs/explanation/architecture.md", "CONTRIBUTING.md"])
def test_files_of_rooms_that_are_named_exist(document: str) -> None:
    packages = "|".join(path.name for path in (ROOT / "runner").iterdir() if path.is_dir())
    named = re.findall(rf"(?<![\w/])(?:{packages})/\w+\.py", (ROOT / document).read_text())
    assert [name for name in named if not (ROOT / "runner" / name).exists()] == []


@pytest.mark.processes
def test_the_readmes_compiled_keras_model_trains(tmp_path: Path, command_line: CommandLine) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(
        r"`model_fns/mine\.py`:\n\n```python\n(.*?)```\n\n```\npython -m runner (.*?)\n```", text, re.DOTALL
    )
    assert found is not None and len(found[1].splitlines()) == 6
    (tmp_path / "model_fns").mkdir()
    (tmp_path / "model_fns" / "mine.py").write_text(found[1])
    result = command_line(*shlex.split(found[2]), "tracking=none", "model_dir=run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["eval/accuracy"] > 0.8


@pytest.mark.processes
def test_the_readmes_own_model_trains(tmp_path: Path, command_line: CommandLine) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"`((?:model|input)_fns/line\.py)`.*?```python\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == ["model_fns/line.py", "input_fns/line.py"]
    for name, code in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    command = re.search(r"```\n(python -m runner model=custom model.fn=model_fns.line.*?)```", text, re.DOTALL)
    assert command is not None
    _, _, _, *arguments = shlex.split(command[1].replace("\\\n", " "))  # after `python -m runner`
    result = command_line(*arguments, "tracking=none", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (model_dir,) = (tmp_path / "outputs").iterdir()
    summary = json.loads((model_dir / "summary.json").read_text())
    assert summary["global_step"] == 300
    assert summary["metrics"]["eval/loss"] < 0.01
