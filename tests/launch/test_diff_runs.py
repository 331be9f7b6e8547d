"""command=diff shows how runs differ, and leaves out what is the same."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.schema import Config, DiffConfig, save
from runner.launch.environment import diff_runs
from tests.support.command_line import CommandLine
from tests.support.journal import Lines, note_start
from tests.support.messages import Messages


def write_run(folder: Path, losses: dict[int, float], digest: str = "ab12", tags: Any = None, **changes: Any) -> None:
    """Write a run: its config with `changes` to keys, the losses of its evaluations, and the digest of its data."""
    folder.mkdir(parents=True)
    save(Config(), folder / "config.yaml")
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in changes.items():
        *groups, name = key.split("__")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    tree["model_dir"] = str(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    note_start(folder, tags=tags or {})
    journal = Lines(folder)
    journal.event("dataset", context="train", name="digits", digest=digest, source={}, profile={})
    for step, loss in losses.items():
        journal.metrics(step, {"eval/loss": loss, "train/loss": loss})
    last = list(losses)[-1]
    summary = {"command": "train", "status": "finished", "global_step": last, "metrics": {"eval/loss": losses[last]}}
    (folder / "summary.json").write_text(json.dumps({**summary, "strategy": "default", "seed": 1}))


def differences(*runs: Path | str) -> dict[str, Any]:
    return diff_runs.show(Config(command="diff", diff=DiffConfig(runs=[str(run) for run in runs])), {})


def test_it_shows_settings_data_and_results_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"version.tensorflow": "2.20.0", "mlflow.source.git.commit": "aaa", "git.dirty": "false"}
    new = {"version.tensorflow": "2.21.0", "mlflow.source.git.commit": "aaa", "git.dirty": "true"}
    write_run(tmp_path / "a", {10: 0.5, 20: 0.25, 30: 0.375}, tags=old)
    write_run(tmp_path / "b", {10: 0.5, 20: 0.125}, "cd34", tags=new, train__max_steps=20, model__params={"width": 3})
    answer = differences(tmp_path / "a", tmp_path / "b")
    assert answer["settings"]["train.max_steps"] == [Config().train.max_steps, 20]
    assert answer["settings"]["model.params.width"] == [None, 3]
    assert set(answer["settings"]) <= {"train.max_steps", "model.params.width", "model.params"}
    assert answer["code"] == {"tensorflow": ["2.20.0", "2.21.0"], "uncommitted changes": ["false", "true"]}
    assert answer["packages"] == {}, "neither has recorded them"
    assert answer["data"] == {"train": ["digits (ab12)", "digits (cd34)"]}
    assert answer["results"] == {
        "global_step": [30, 20], "eval/loss": [0.375, 0.125], "best eval/loss": [0.25, 0.125],
    }  # fmt: skip
    table = capsys.readouterr().out
    assert "train.max_steps" in table
    assert "strategy" not in table, "the same in both"


def test_equal_runs_have_no_differences(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_run(tmp_path / name, {10: float("nan")})
    answer = differences(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert answer == {"runs": answer["runs"], **{section: {} for section in diff_runs.SECTIONS}}


def test_a_best_value_is_a_number(tmp_path: Path) -> None:
    for name, losses in (("a", {10: float("nan"), 20: 0.25}), ("b", {10: 0.5, 20: float("nan")})):
        write_run(tmp_path / name, losses)
    results = differences(tmp_path / "a", tmp_path / "b")["results"]
    assert results["best eval/loss"] == [0.25, 0.5]


def test_secrets_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", {10: 0.5}, model__params={"db_password": "swordfish"})
    write_run(tmp_path / "b", {10: 0.5}, model__params={"token_for_it": "hunter22"}, run__secrets=["token_for_it"])
    answer = differences(tmp_path / "a", tmp_path / "b")
    said = json.dumps(answer) + capsys.readouterr().out
    assert "db_password" in said
    assert "swordfish" not in said
    assert "hunter22" not in said


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
def test_two_real_runs_and_the_project_of_now(tmp_path: Path, command_line: CommandLine) -> None:
    run = functools.partial(command_line, cwd=tmp_path)
    assert run("command=new", "new.path=.").returncode == 0
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    words = ("experiment=wine", "train.max_steps=4", "tracking=none")
    assert run(*words, "model_dir=outputs/a").returncode == 0
    file = tmp_path / "model_fns" / "classifier.py"
    before = file.read_text()
    file.write_text(before.replace('"relu"', '"tanh"'))
    assert run(*words, "model_dir=outputs/b", "model.params.learning_rate=0.5").returncode == 0
    answer = json.loads(run("command=diff", "diff.runs=[outputs/a,outputs/b]", "run.output=json").stdout)
    assert list(answer["settings"]) == ["model.params.learning_rate"]
    assert list(answer["code"]) == ["model_fns/classifier.py"]
    assert answer["packages"] == {}
    now = json.loads(run("command=diff", "diff.runs=[outputs/b,.]", "run.output=json").stdout)
    assert (now["code"], now["settings"], now["results"]) == ({}, {}, {}), "nothing has changed since b"
    file.write_text(before)
    now = json.loads(run("command=diff", "diff.runs=[outputs/b,.]", "run.output=json").stdout)
    assert list(now["code"]) == ["model_fns/classifier.py"]


@pytest.mark.parametrize("words", [
    ["command=diff"],
    ["command=diff", "diff.runs=[outputs/a]"],
    ["command=diff", "diff.runs=[outputs/a,outputs/nowhere]"],
    ["command=diff", "diff.runs=[outputs/rate=0.1,outputs/b]"],
    ["command=list", "diff.runs=[outputs/a,outputs/b]"],
], ids=["none", "one", "no run", "unquoted", "no effect"])  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    words: list[str], tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    write_run(tmp_path / "outputs" / "a", {10: 0.5})
    result = command_line(*words, cwd=tmp_path)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert "Traceback" not in result.stderr
