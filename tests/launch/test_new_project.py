"""command=new writes a project that is whole, and never into what is there. tests/integration/test_wheel.py runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from runner.config.help import shipped
from runner.config.schema import ConfigError
from runner.config.user_code import locate
from runner.launch.environment.new_project import PURPOSES, write_project
from tests.support.command_line import CommandLine
from tests.support.messages import Messages

FILES = {
    ".gitignore",
    "README.md",
    "conf/experiment/wine.yaml",
    "input_fns/wine.py",
    "model_fns/classifier.py",
    "tests/test_wine.py",
    *(f"conf/schema/{path.name}" for path in (shipped("conf") / "schema").glob("*.json")),
}


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_a_project_and_says_what_to_type(tmp_path: Path, command_line: CommandLine) -> None:
    result = command_line("command=new", "new.path=my project", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    project = tmp_path / "my project"
    assert files_in(tmp_path) == {f"my project/{name}" for name in FILES}, "and nothing beside it"
    assert result.stdout.endswith(
        "  cd 'my project'\n  python -m runner experiment=wine\n  pip install pytest\n  python -m pytest\n"
    )
    assert (project / "README.md").read_text().startswith("# my project\n")
    assert set(PURPOSES) <= FILES
    untold = {name for name in FILES - {*PURPOSES} if not name.startswith("conf/schema/")}
    assert untold == {".gitignore"}


def test_what_it_writes_belongs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path / "made")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "made"), *sys.path])
    experiment = yaml.safe_load((tmp_path / "made/conf/experiment/wine.yaml").read_text())
    functions = [(experiment["model"]["fn"], "model_fn")]
    functions += [(block["fn"], "input_fn") for block in experiment["input"].values()]
    for name, default in functions:
        assert (tmp_path / "made" / f"{name.replace('.', '/')}.py").is_file()
        assert locate("key", name, default).attribute == default


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert set(write_project(tmp_path)) == FILES


def test_a_folder_that_holds_something_is_refused_and_left(
    tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("mine")
    result = command_line("command=new", "new.path=mine", cwd=tmp_path)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert files_in(tmp_path) == {"mine/train.py"}


def test_a_file_and_a_place_that_cannot_be_written_are_refused(tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "file").write_text("")
    with messages.raised(ConfigError):
        write_project(tmp_path / "file")
    with messages.raised(ConfigError):
        write_project(tmp_path / "file" / "in")


@pytest.mark.parametrize(
    "words",
    [
        ["command=new"],
        ["command=new", "new.path=s3://bucket/x"],
        ["new.path=mine"],
        ["-m", "command=new", "new.path=a,b"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    result = command_line(*words, cwd=tmp_path)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert not any((tmp_path / name).exists() for name in ("mine", "a", "b", "s3:"))


def test_it_needs_neither_tensorflow_nor_mlflow(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['runner', 'command=new', 'new.path=made']\n"
        "try:\n    runpy.run_module('runner', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} & {'tensorflow', 'keras', 'mlflow', 'numpy', 'pydantic'}))"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert files_in(tmp_path / "made") == FILES


def test_the_template_is_what_the_wheel_holds() -> None:
    """pyproject.toml names the kinds of files of the template that are packaged."""
    kinds = {"gitignore", "README.md", "__init__.py"}
    others = {name for name in files_in(shipped("project_template")) if "__pycache__" not in name and name not in kinds}
    assert {Path(name).suffix for name in others} == {".py", ".yaml"}
