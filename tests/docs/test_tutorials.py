"""The tutorials and some how-to pages tell the truth: each is followed once, in an empty folder or after the pages
before it, and prints what it shows.

A block with a title is a file; `bash` and `python` blocks are run in order; a `text` block is what the block before it
prints (numbers may differ, `...` stands for other lines); `sh` blocks are not run, and `NOT_RUN` says why. The `python`
blocks of a page are cells of one session, each with names of its own.

Most pages are followed with a `python` whose `-m runner` is a call of the fixture `command_line`: a command costs 1 CPU
second in place of 9. The commands of PAGES and of the page about tables are given `tracking=none`, too: MLflow is not
their subject. What sets TF_CONFIG is run as it stands, in processes, and so is the page FROM_THE_WHEEL, which
tests/integration/test_wheel.py follows.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support.command_line import CommandLine

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorial"
HOW_TO = tuple(
    f"../how_to/{page}"
    for page in ("predict", "keras_model", "image_folders", "plots", "notebooks", "tensorboard", "compare", "repeat")
)
PAGES = ("own_data", "two_machines", *HOW_TO)
SWEEPS = ("compare_runs", "sweep")
"""They go on from each other in one folder."""
FROM_THE_WHEEL = "first_model"
ALL = (*PAGES, *SWEEPS, FROM_THE_WHEEL, "../how_to/tabular_data")
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


Shell = Callable[[str, Path, Mapping[str, str]], str]
"""(text of bash, folder, environment) -> what it printed."""


def in_processes(text: str, folder: Path, env: Mapping[str, str]) -> str:
    """Run a text of bash, as it stands."""
    return ran(["bash", "-ec", text], folder, env)


CELLS = """
import json, os, sys, types

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(json.loads(line), "a block of the page", "exec"), vars(sys.modules["__main__"]))
    sys.stdout.flush()
    print("done", file=answers, flush=True)
"""


class Session:
    """A session of Python, started by its first cell."""

    def __init__(self, python: Path, folder: Path, env: Mapping[str, str]) -> None:
        self._python, self._folder, self._env = python, folder, env
        self._said = tempfile.TemporaryFile("w+")  # also by processes that it starts
        self._process: subprocess.Popen[str] | None = None

    def run(self, cell: str) -> str:
        """Return what a cell printed, which must succeed."""
        if self._process is None:
            self._process = subprocess.Popen(
                [self._python, "-c", CELLS], cwd=self._folder, env=self._env, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        before = self._said.tell()
        print(json.dumps(cell), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        self._said.seek(before)
        printed = self._said.read()
        assert answer == "done\n", printed
        return printed

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
        self._said.close()


def plain(text: str) -> str:
    """Return a text without its numbers and with single spaces."""
    return re.sub(r"\d[\d,.]*", "#", re.sub(r"[^\S\n]+", " ", text))


def follow(page: str, folder: Path, bin_folder: Path, env: Mapping[str, str], shell: Shell = in_processes) -> None:
    """Do in `folder` what a page says, with the Python of `bin_folder`; it must print what the page shows."""
    env = {**env, "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{bin_folder}:{env['PATH']}"}
    printed, commands = "", 0
    with contextlib.closing(Session(bin_folder / "python", folder, env)) as session:
        for language, title, text in blocks(page):
            if title:
                (folder / title).parent.mkdir(parents=True, exist_ok=True)
                (folder / title).write_text(text)
            elif language == "bash":
                printed = shell(text, folder, env)
                commands += 1
            elif language == "python":
                printed = session.run(text)
                commands += 1
            elif language == "text":
                for line in text.splitlines():
                    assert line == "..." or plain(line).strip() in plain(printed), f"{line!r} is not in:\n{printed}"
            else:
                assert language == "sh", f"a block of {page}.md that nobody runs: {text}"
    assert commands


def follow_here(page: str, folder: Path, shell: Shell) -> None:
    """Follow a page with the Python of the tests."""
    follow(page, folder, Path(sys.executable).parent, {**os.environ, "PYTHONPATH": str(ROOT)}, shell)


@pytest.fixture
def untracked(command_line: CommandLine) -> Shell:
    def run(text: str, folder: Path, env: Mapping[str, str]) -> str:
        if "TF_CONFIG=" in text:  # a call of `command_line` would not have it
            return in_processes(text, folder, env)
        return command_line.run_shell(text, folder, env, also="tracking=none")

    return run


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("mlflow_database")  # for what is recorded all the same
@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: str, tmp_path: Path, untracked: Shell) -> None:
    follow_here(page, tmp_path, untracked)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("mlflow_database")
def test_the_tutorial_leads_to_sweeps_that_are_compared_in_mlflow(tmp_path: Path, command_line: CommandLine) -> None:
    for page in SWEEPS:
        follow_here(page, tmp_path, command_line.run_shell)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("runner").experiment_id], max_results=100)
    by_name = {run.info.run_name: run for run in runs}
    assert {"slow", "fast"} <= set(by_name)
    assert {run.info.status for run in runs} == {"FINISHED"}
    sweeps = sorted(tmp_path.glob("outputs/sweeps/*/sweep.json"))
    rankings = [json.loads(path.read_text())["jobs"] for path in sweeps]
    assert [len(ranked) for ranked in rankings] == [4, 6, 4]  # the grid, the one with seeds, and Optuna's
    for ranked in rankings:
        accuracies = [job["metrics"]["eval/accuracy"] for job in ranked]
        assert accuracies == sorted(accuracies, reverse=True) or len(ranked) == 6  # jobs of a setting stand together
        for job in ranked:  # each is a run in MLflow with the numbers of the ranking, beside the others of its sweep
            found = [run for run in runs if run.info.run_name == job["name"] and "mlflow.parentRunId" in run.data.tags]
            assert job["metrics"]["eval/accuracy"] in [run.data.metrics["eval/accuracy"] for run in found]
    children = [run.data.tags["mlflow.parentRunId"] for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(children) == 14 and len(set(children)) == 3


SERVE = """
import json, sys
import tensorflow as tf

model = tf.saved_model.load(sys.argv[1])
features = {"island": ["Biscoe", "Dream"], "sex": ["male", ""], "bill_length_mm": [50.0, 39.5],
            "bill_depth_mm": [15.2, float("nan")], "flipper_length_mm": [221.0, 186.0], "body_mass_g": [5200.0, 3500.0]}
signature = model.signatures["serving_default"]
wanted = signature.structured_input_signature[1]
given = {name: tf.constant(features.get(name, [1, 2]), spec.dtype) for name, spec in wanted.items()}
print(json.dumps([name.decode() for name in signature(**given)["species"].numpy().tolist()]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_day_with_a_table_from_csv_files_to_plain_tensorflow(
    tmp_path: Path, untracked: Shell, command_line: CommandLine
) -> None:
    """CSV files with missing values and categories, in an empty folder, as the how-to says, and all around it."""
    # It trains with class weights, and predicts new.csv with ids.
    follow_here("../how_to/tabular_data", tmp_path, untracked)
    header, first, *_ = (tmp_path / "data" / "train.csv").read_text().splitlines()
    (tmp_path / "data" / "worse.csv").write_text("\n".join([header, first, f"x{first}", *[first] * 60]))
    for wrong, said in {
        "model.params.train_file=data/worse.csv": ("data/worse.csv line 3", "column id"),
        "input.train.params.columns.island=float32": ("data/test.csv line 2", "column island is "),
    }.items():
        refused = command_line("experiment=birds", "command=dry_run", wrong, cwd=tmp_path)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
        assert not [text for text in said if text not in refused.stderr], refused.stderr

    def answered(*words: str) -> str:
        done = command_line(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    answered("-m", "experiment=birds", "tracking=none", "model.params.class_weights=[1.0,1.0,1.0],[0.75,1.7,0.92]")
    best = json.loads(answered("command=best", "sweep.metric=eval/accuracy", "run.output=json"))
    accuracies = [run["eval/accuracy"] for run in best["runs"]]
    assert len(accuracies) == 3 and accuracies == sorted(accuracies, reverse=True) and accuracies[0] > 0.9

    with open(tmp_path / "data" / "new.csv") as given, open(tmp_path / "new.csv") as predicted:
        ids, rows = [row["id"] for row in csv.DictReader(given)], list(csv.DictReader(predicted))
    assert [row["id"] for row in rows] == ids and len(ids) == 94
    with open(tmp_path / "data" / "test.csv") as file:
        right = [row["species"] == truth["species"] for row, truth in zip(rows, csv.DictReader(file), strict=True)]
    summary = json.loads((tmp_path / "outputs" / "birds" / "summary.json").read_text())
    assert sum(right) / len(right) == pytest.approx(summary["metrics"]["eval/accuracy"], abs=1e-6)

    answered("command=export", f"model_dir={best['runs'][0]['model_dir']}", "export.dir=served")
    (exported,) = (path.parent for path in (tmp_path / "served").rglob("saved_model.pb"))
    served = ran([sys.executable, "-c", SERVE, str(exported)], tmp_path, os.environ)
    assert json.loads(served.splitlines()[-1]) == ["Gentoo", "Adelie"]


@pytest.mark.parametrize("page", ALL)
def test_a_block_that_is_not_run_has_a_reason(page: str) -> None:
    for language, _, text in blocks(page):
        assert language != "sh" or text.startswith(tuple(NOT_RUN)), text


def test_every_tutorial_is_followed_by_a_test() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == {page for page in ALL if "/" not in page} | {*ELSEWHERE}
    assert all((ROOT / file).exists() for file in ELSEWHERE.values() if file.endswith(".py"))
