"""Commands of the pages: each is accepted, refused as the FAQ shows it, or listed with the reason why it is not run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.test_docs_config import ANSWER_ALL

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FAQ = (DOCS / "faq.md").read_text()
REFUSED = re.findall(r"^```\n(python -m runner .*?)\n```\n\n```text\n(.*?)\n```$", FAQ, re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)(?: title=\"(?:.+?)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_ELSEWHERE = {
    "how_to/config.md": "test_docs_config.py", "how_to/several_evaluations.md": "test_docs_config.py",
    "how_to/clusters.md": "test_docs_clusters.py", "how_to/export.md": "test_docs_export.py",
    "how_to/hooks.md": "test_docs_hooks.py", "how_to/migrating.md": "test_docs_migrating.py",
    "how_to/premade.md": "test_docs_premade.py", "how_to/evaluator.md": "../integration/test_roles.py",
    "how_to/slurm.md": "../integration/test_slurm.py",
    "how_to/mlflow_team.md": "../integration/test_mlflow_team.py",
    "how_to/object_store.md": "../integration/test_object_store.py",
    "how_to/managed_jobs.md": "../integration/test_managed_jobs.py",
    "tutorial/from_tf_estimator.md": "test_docs_migrating.py", "faq.md": "test_docs_commands.py",
    **{f"tutorial/{page}.md": "test_tutorials.py" for page in (
        "first_model", "own_data", "compare_runs", "sweep", "two_machines")},
    **{f"how_to/{page}.md": "test_tutorials.py" for page in (
        "predict", "keras_model", "image_folders", "plots", "notebooks", "tabular_data", "tensorboard")},
}  # fmt: skip
"""Page -> the test that runs its commands."""
NOT_RUN = {
    "pip install": "installs from the network",
    "tensorboard": "a server that does not end",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "a server without end; tests/integration/test_browser.py opens its pages",
    "pd.read_csv": "a line of Python; tests/tracking/test_csv_tracker.py reads these files",
    "config = runner.RunConfig": "a line of Python; tests/estimator/test_script_record.py records scripts",
    "TF_CONFIG": "two terminals; the tutorial two_machines.md does the same in one",
    "tracking:": "a message", "runner:": "a message", "model.ckpt": "names of files",
}  # fmt: skip
"""The beginning of a line in a block without a language that is no command for this test -> the reason."""


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of each line in a block without a language, on the pages that no other test follows."""
    found = []
    for path in sorted(DOCS.glob("**/*.md")):
        page = str(path.relative_to(DOCS))
        if page in RUN_ELSEWHERE or page.startswith(("reference/config/", "explanation/")):
            continue
        for language, text in BLOCK.findall(re.sub(r"^ {4}(?=```|python)", "", path.read_text(), flags=re.MULTILINE)):
            if not language:
                found += [(page, line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(page, line) for page, line in found if line.startswith("python -m runner") or page.startswith("how_to/")]


COMMANDS = [(page, line) for page, line in commands() if line.startswith("python -m runner")]


def answers(given: Sequence[str], project: Path) -> dict[str, tuple[int, str]]:
    """Return (exit code, output) of each command, in a project with a run in outputs/mine, none of which trains."""
    for name in ("outputs/mine/checkpoint", "outputs/old/checkpoint", "old.txt", "new.txt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    (project / "nets").mkdir()
    given = list(dict.fromkeys(given))
    # What runs would be recorded is not of interest here, and a sweep would open a run of its own.
    cases = [[*shlex.split(line, comments=True)[3:], "tracking=none"] for line in given]
    for case in cases:
        if "hydra/sweeper=optuna" in case:
            case.append("hydra.sweeper.n_trials=2")  # each is composed
    result = subprocess.run(
        [sys.executable, "-c", ANSWER_ALL], cwd=project, input=json.dumps(cases), capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return dict(zip(given, ((code, said) for code, said, _ in json.loads(result.stdout.splitlines()[-1])), strict=True))


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    return answers([line for _, line in COMMANDS], tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    return answers([command for command, _ in REFUSED], tmp_path_factory.mktemp("refused"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line.removeprefix("python -m ") for _, line in COMMANDS])
def test_a_command_is_accepted(page: str, line: str, accepted: dict[str, tuple[int, str]]) -> None:
    code, said = accepted[line]
    assert code == 0, f"{page}: {said}"


@pytest.mark.processes
@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[message[8:48] for _, message in REFUSED])
def test_a_message_of_the_faq_is_the_one_that_is_printed(
    command: str, message: str, refused: dict[str, tuple[int, str]]
) -> None:
    code, said = refused[command]
    assert code == 2
    assert said.startswith(message), said


def test_a_line_that_is_no_command_of_ours_has_a_reason() -> None:
    for page, line in commands():
        known = line.startswith(("python -m runner", *NOT_RUN))
        assert known or line[0] in " ⠸│┃┏┡└" or "=" not in line.split()[0], f"{page}: {line}"


def test_the_tests_that_follow_a_page_exist() -> None:
    assert all((Path(__file__).parent / file).exists() for file in RUN_ELSEWHERE.values())
    assert all((DOCS / page).exists() for page in RUN_ELSEWHERE)
