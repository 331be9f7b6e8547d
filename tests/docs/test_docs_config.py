"""docs/how_to/config.md and several_evaluations.md tell the truth: table, files and commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = ("config.md", "several_evaluations.md")
TEXT = "\n".join((ROOT / "docs" / "how_to" / page).read_text() for page in PAGES)

ANSWER_ALL = """
import contextlib, io, json, sys
from unittest import mock
from runner.config import help, schema
from runner.launch import app
from runner.tracking.summary import Outcome

configs = []

def run(given, *arguments, **settings):
    configs.append(schema.to_tree(given))
    return Outcome(0, "finished")

results = []
for arguments in json.load(sys.stdin):
    configs.clear()
    sys.argv = ["runner", *arguments]
    said = io.StringIO()
    with (
        mock.patch("runner.launch.supervisor.run", run),
        # It starts TensorFlow: tests/launch/test_doctor.py.
        mock.patch("runner.launch.environment.doctor.show", lambda *arguments: {}),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            told = help.answer(arguments)
            said.write(told)
            code = 0 if told else app.run_command_line()
        except SystemExit as end:  # --help and its like
            code = end.code or 0
    results.append((code, said.getvalue(), list(configs)))
json.dump(results, sys.stdout)
"""


def commands() -> list[list[str]]:
    """The arguments of each command of the document."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    text = "".join(block for language, block in blocks if not language).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    assert all(words[:3] == ["python", "-m", "runner"] for words in lines)
    return [words[3:] for words in lines]


COMMANDS = commands()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, list[dict[str, Any]]]]:
    """(exit code, output, configs that would be run) of each command, in a project with the document's files."""
    project = tmp_path_factory.mktemp("project")
    files = re.findall(r"`\./(conf/\w+/\w+\.yaml)`(?:(?!\./conf/|```).)*```yaml\n(.*?)```", TEXT, re.DOTALL)
    names = ["model/mine", "input/mine", "experiment/mine", "experiment/elsewhere"]
    assert [name for name, _ in files] == [f"conf/{name}.yaml" for name in names]
    files += [("model_fns/mine.py", "def model_fn(): ..."), ("input_fns/mine.py", "def input_fn(): ...")]
    files += [("outputs/mine/checkpoint", "")]
    for name, content in files:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(content)
    # What runs would be recorded is not of interest here, and a sweep would open a run of its own.
    cases = [[*words, "tracking=none"] if "=" in words[-1] else words for words in COMMANDS]
    result = subprocess.run(
        [sys.executable, "-c", ANSWER_ALL], cwd=project, input=json.dumps(cases), capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return [tuple(case) for case in json.loads(result.stdout.splitlines()[-1])]


@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=[" ".join(words) for words in COMMANDS])
def test_a_command_of_the_document_is_accepted(number: int, answers: list[Any]) -> None:
    words, (code, said, configs) = COMMANDS[number], answers[number]
    assert code == 0, said
    if words[0].startswith("--"):
        assert (
            words[0] in ("--info", "--version") or "strategy" in said or "train" in said
        )  # Hydra logs what --info tells
        return
    assert len(configs) == (4 if "-m" in words else 1)
    for override in words if "-m" not in words else ():
        key, _, value = override.lstrip("+").partition("=")
        if "." in key and "${" not in value:
            assert (value_at(configs[0], key) or None) == yaml.safe_load(value)  # no evaluations: null, or {}


def value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def config_of(answers: list[Any], *words: str) -> dict[str, Any]:
    (config,) = answers[COMMANDS.index(list(words))][2]
    return dict(config)


@pytest.mark.processes
def test_values_of_a_users_own_are_taken_where_they_are_named(answers: list[Any]) -> None:
    for words, folder in (
        (["experiment=elsewhere"], "data"),
        (["experiment=elsewhere", "vars.data_dir=/mnt/churn"], "/mnt/churn"),
    ):
        config = config_of(answers, *words)
        assert config["input"]["train"]["params"]["path"] == f"{folder}/train"
        assert config["input"]["eval"]["params"]["path"] == f"{folder}/held_out"
        assert config["vars"] == {"data_dir": folder}
        assert config["train"]["max_steps"] == 200


@pytest.mark.processes
def test_the_users_own_files_are_options_beside_ours(answers: list[Any]) -> None:
    config = config_of(answers, "model=mine", "input=mine")
    assert config["model"]["fn"] == "model_fns.mine"
    assert config["model"]["params"] == {"width": 32, "learning_rate": 0.01}
    assert config["input"]["train"]["fn"] == "input_fns.mine"
    assert config["input"]["eval"]["params"] == {"path": "data/held_out"}
    assert config["input"]["predict"]["fn"] is None  # of custom, which mine begins with


@pytest.mark.processes
def test_an_experiment_counts_more_than_a_group_and_less_than_what_is_typed(answers: list[Any]) -> None:
    config = config_of(answers, "experiment=mine")
    assert (config["strategy"]["name"], config["strategy"]["virtual_devices"]) == ("mirrored", 2)
    assert (config["train"]["max_steps"], config["tracking"]["experiment"]) == (200, "mine")
    typed = config_of(answers, "experiment=mine", "train.max_steps=50", "model.params.width=64")
    assert (typed["train"]["max_steps"], typed["model"]["params"]["width"]) == (50, 64)


@pytest.mark.processes
def test_each_named_evaluation_has_the_settings_beside_it(answers: list[Any]) -> None:
    (number,) = (i for i, words in enumerate(COMMANDS) if words[0] == "input=npz")
    evals = answers[number][2][0]["input"]["eval"]
    assert [block["params"]["files"] for block in evals.values()] == ["val.npz", "test.npz"]
    assert [block["params"]["label"] for block in evals.values()] == ["y", "y"]
    assert [block["batch_size"] for block in evals.values()] == [256, 64]


def test_the_table_names_every_group() -> None:
    rows = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
    named = {group for row in rows for group in re.findall(r"`(\w+)`", row)}
    assert named == {path.parent.name for path in (ROOT / "conf").glob("[!_.]*/*.yaml")}
