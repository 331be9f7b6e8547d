"""A release is described: the changelog has its version, and CI runs what the Makefile has."""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
GITHUB: dict[str, Any] = {
    str(path.relative_to(ROOT / ".github")): yaml.safe_load(path.read_text())
    for path in (ROOT / ".github").rglob("*.yml")
}
WORKFLOW: dict[str, Any] = GITHUB["workflows/ci.yml"]
PYTHONS = ["3.11", "3.12", "3.13"]


def test_the_changelog_has_a_dated_section_of_this_version(release: ModuleType) -> None:
    released = re.sub(r"(?s)## \[Unreleased\].*?(?=## \[)", "## [Unreleased]\n\n", CHANGELOG)
    assert release.check_changelog(released, PROJECT["version"]) == []
    for section in re.split(r"(?m)^## ", CHANGELOG)[1:]:
        groups = re.findall(r"(?m)^### (.*)$", section)
        order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
        assert groups == [one for one in order if one in groups], section[:40]


def test_a_release_is_refused_while_lines_wait(release: ModuleType, messages: Messages) -> None:
    text = "## [Unreleased]\n\n### Added\n\n- One\n- Two\n\n## [1.2.3]\n\n- Old\n"
    for changelog, version in ((text, "1.2.3"), ("## [1.2.3] - 2026-01-31\n", "1.2.4")):
        for problem in release.check_changelog(changelog, version):
            messages.same(version, problem)


def test_a_release_is_refused_while_the_repository_has_no_address(release: ModuleType, messages: Messages) -> None:
    for urls in ({}, {"Repository": "https://example.com/a"}):
        (problem,) = release.check_addresses({"urls": urls})
        messages.same(str(len(urls)), problem)
    addresses = {"Repository": "https://example.com/a", "Issues": "https://example.com/a/issues"}
    assert release.check_addresses({"urls": addresses}) == []


def test_a_release_is_refused_while_files_are_not_committed(
    release: ModuleType, tmp_path: Path, messages: Messages
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert release.check_committed(tmp_path) == []
    (tmp_path / "new.py").touch()
    (problem,) = release.check_committed(tmp_path)
    messages.same("problem", problem)


def test_a_release_is_refused_with_files_that_are_not_in_git(
    release: ModuleType, tmp_path: Path, messages: Messages
) -> None:
    packed = {"runner/__init__.py": "runner/__init__.py", "runner/conf/a.yaml": "conf/a.yaml", "runner/x.py": "x.py"}
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel, tarfile.open(tmp_path / "a.tar.gz", "w:gz") as source:
        for in_wheel, in_source in (*packed.items(), ("a.dist-info/RECORD", "PKG-INFO")):
            wheel.writestr(in_wheel, "")
            source.addfile(tarfile.TarInfo(f"a-1/{in_source}"))
    files, folders = (tmp_path / "a.tar.gz", tmp_path / "a.whl"), {"runner.conf": "conf"}
    assert release.check_files(*files, {"runner/__init__.py", "conf/a.yaml", "runner/x.py", "x.py"}, folders) == []
    for problem in release.check_files(*files, {"runner/__init__.py"}, folders):
        messages.same("problem", problem)


def test_the_citation_has_the_version_and_its_day() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (day,) = re.findall(rf"(?m)^## \[{re.escape(PROJECT['version'])}\] - (.*)$", CHANGELOG)
    assert (citation["version"], citation["date-released"]) == (PROJECT["version"], day)
    assert citation["title"] == PROJECT["name"] and citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"] and citation["keywords"] == PROJECT["keywords"]


def test_forms_for_issues_ask_for_what_doctor_says() -> None:
    forms = {name: form for name, form in GITHUB.items() if name.startswith("ISSUE_TEMPLATE/") and "body" in form}
    assert len(forms) == 2
    for form in forms.values():
        assert form["name"] and form["description"]
        (doctor,) = (field for field in form["body"] if field.get("id") == "doctor")
        assert "python -m runner command=doctor run.output=json" in doctor["attributes"]["description"]
        for field in form["body"]:
            assert field["type"] in ("markdown", "textarea", "input")
            assert field["attributes"]["value" if field["type"] == "markdown" else "label"]


def test_dependabot_looks_into_folders_that_have_what_it_reads() -> None:
    updates = {one["package-ecosystem"]: one for one in GITHUB["dependabot.yml"]["updates"]}
    assert {name: one["directory"] for name, one in updates.items()} == {
        "pip": "/", "docker": "/deploy", "github-actions": "/"
    }  # fmt: skip
    assert (ROOT / "deploy" / "Dockerfile").exists()
    assert all((ROOT / path).exists() for path in updates["pip"]["exclude-paths"])


def test_publishing_is_off_until_a_variable_of_the_repository_switches_it_on() -> None:
    workflow = GITHUB["workflows/publish.yml"]
    # YAML 1.1 reads the key `on` as true.
    assert set(workflow[True]) == {"push", "workflow_dispatch"} and set(workflow[True]["push"]) == {"tags"}
    assert "vars.PUBLISH_TO_PYPI == 'true'" in workflow["jobs"]["build"]["if"]
    publish = workflow["jobs"]["publish"]
    assert publish["needs"] == "build" and "if" not in publish  # a job is skipped with what it needs
    assert publish["permissions"] == {"id-token": "write"}
    assert [step for step in publish["steps"] if "run" in step] == []  # nothing of ours runs beside the token
    assert publish["steps"][-1]["with"] == {"attestations": True}


def commands() -> dict[str, list[str]]:
    """The commands of each job of the workflow."""
    return {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in WORKFLOW["jobs"].items()}


def test_the_workflow_runs_lint_tiers_docs_and_canary_with_each_python_and_the_lowest_versions() -> None:
    ran = {name: {line.split()[1] for line in lines} for name, lines in commands().items()}
    assert ran["check"] == {"lint", "fast"}
    assert ran["test"] >= {"test"} and ran["slow"] >= {"test-slow"}
    assert (ran["docs"], ran["canary"], ran["lowest"]) == ({"docs"}, {"canary"}, {"lowest"})
    for name in ("check", "test", "canary"):
        assert WORKFLOW["jobs"][name]["strategy"]["matrix"]["python"] == PYTHONS
    assert [f"Programming Language :: Python :: {one}" in PROJECT["classifiers"] for one in PYTHONS] == [True] * 3


def test_a_push_does_not_end_the_run_of_an_earlier_commit_of_main() -> None:
    assert WORKFLOW["concurrency"]["cancel-in-progress"] == "${{ github.event_name == 'pull_request' }}"
    assert {"github.ref", "github.event_name"} <= set(re.findall(r"github\.\w+", WORKFLOW["concurrency"]["group"]))


def test_the_workflow_calls_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([\w -]+):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    called = {line.split()[1] for lines in commands().values() for line in lines if line.startswith("make ")}
    assert called <= targets
    assert all(line.startswith("make ") for lines in commands().values() for line in lines)


def test_the_extra_all_has_every_extra_of_users_but_gpu() -> None:
    extras = dict(PROJECT["optional-dependencies"])
    (everything,) = extras.pop("all")
    assert everything == f"estimator-runner[{','.join(sorted(extras.keys() - {'gpu', 'test', 'dev'}))}]"


def test_nvidias_libraries_are_an_extra_and_in_no_lock() -> None:
    (tensorflow,) = (one for one in PROJECT["dependencies"] if one.startswith("tensorflow>="))
    cuda = tensorflow.replace("tensorflow", "tensorflow[and-cuda]")
    assert PROJECT["optional-dependencies"]["gpu"] == [cuda, "nvidia-ml-py>=12"]
    for lock in ("requirements/dev.lock", "deploy/requirements.lock"):
        assert "\nnvidia-" not in (ROOT / lock).read_text(), lock
    assert "--all-extras" not in (ROOT / "Makefile").read_text()


def test_the_wheel_has_each_package() -> None:
    folders = [file.parent.relative_to(ROOT) for file in (ROOT / "runner").rglob("__init__.py")]
    packages = {".".join(folder.parts) for folder in folders}
    assert packages <= set(PYPROJECT["tool"]["setuptools"]["packages"])
