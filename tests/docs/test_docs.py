"""The documents tell the truth: links lead somewhere, and the README's example runs as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine

ROOT = Path(__file__).parents[2]
GROUPS = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
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
    for name in re.findall(r"`((?:runner|tests|benchmarks|conf|docs|deploy)/[\w./]+\.\w+)`", document.read_text()):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


@pytest.mark.parametrize("document", ["docs/explanation/architecture.md", "CONTRIBUTING.md"])
def test_files_of_rooms_that_are_named_exist(document: str) -> None:
    rooms = "|".join(path.name for path in (ROOT / "runner").iterdir() if path.is_dir())
    named = re.findall(rf"(?<![\w/])(?:{rooms})/\w+\.py", (ROOT / document).read_text())
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
