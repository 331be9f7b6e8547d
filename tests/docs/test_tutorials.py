"""The tutorials and some how-to pages tell the truth: each is followed once, in an empty folder or after the pages
before it, and prints what it shows.

A block with a title is a file; `bash` and `python` blocks are run in order; a `text` block is what the block before it
prints (numbers may differ, `...` stands for other lines); `sh` blocks are not run, and `NOT_RUN` says why.
tests/integration/test_wheel.py follows those `FROM_THE_WHEEL`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorial"
HOW_TO = tuple(
    f"../how_to/{page}"
    for page in ("predict", "keras_model", "image_folders", "plots", "notebooks", "tensorboard", "compare", "repeat")
)
PAGES = ("own_data", "two_machines")
FROM_THE_WHEEL = ("first_model", "compare_runs", "sweep")
"""They go on from each other in one folder."""
ELSEWHERE = {"from_tf_estimator": "tests/docs/test_docs_migrating.py", "index": "has no commands"}
NOT_RUN = {
    "pip install": "installs from the network; tests/integration/test_wheel.py installs the wheel",
    "python -m venv": "the same",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "a server without end; tests/integration/test_browser.py opens its pages",
    "tensorboard --logdir": "a server without end",
    "tensorflow_model_server": "needs TensorFlow Serving, which is no Python package",
    "git checkout 5f0c": "an example of the lines, whose commit is made up; the block after it follows real ones",
    "# on host0": "needs two machines; the block before it is the same on one",
}
"""The beginning of a block that no test runs -> the reason."""

BLOCK = re.compile(r'^```(\w*)(?: title="(.+?)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (language, title, text) of each block of a page."""
    return BLOCK.findall((TUTORIALS / f"{page}.md").read_text())


def ran(argv: list[str], folder: Path, env: Mapping[str, str]) -> str:
    """Return what a command printed, which must succeed."""
    result = subprocess.run(
        argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def plain(text: str) -> str:
    """Return a text without its numbers and with single spaces."""
    return re.sub(r"\d[\d,.]*", "#", re.sub(r"[^\S\n]+", " ", text))


def follow(page: str, folder: Path, bin_folder: Path, env: Mapping[str, str]) -> None:
    """Do in `folder` what a page says, with the Python of `bin_folder`; it must print what the page shows."""
    env = {**env, "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{bin_folder}:{env['PATH']}"}
    printed, commands = "", 0
    for language, title, text in blocks(page):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(text)
        elif language == "bash":
            printed = ran(["bash", "-ec", text], folder, env)
            commands += 1
        elif language == "python":
            printed = ran([str(bin_folder / "python"), "-c", text], folder, env)
            commands += 1
        elif language == "text":
            for line in text.splitlines():
                assert line == "..." or plain(line).strip() in plain(printed), f"{line!r} is not in:\n{printed}"
        else:
            assert language == "sh", f"a block of {page}.md that nobody runs: {text}"
    assert commands


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES + HOW_TO)
def test_a_page_can_be_followed(page: str, tmp_path: Path, empty_mlflow_database: Path) -> None:
    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    follow(page, tmp_path, Path(sys.executable).parent, {**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("page", PAGES + FROM_THE_WHEEL + HOW_TO)
def test_a_block_that_is_not_run_has_a_reason(page: str) -> None:
    for language, _, text in blocks(page):
        assert language != "sh" or text.startswith(tuple(NOT_RUN)), text


def test_every_tutorial_is_followed_by_a_test() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == {*PAGES, *FROM_THE_WHEEL, *ELSEWHERE}
    assert all((ROOT / file).exists() for file in ELSEWHERE.values() if file.endswith(".py"))
