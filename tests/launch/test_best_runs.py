"""command=best says which run is best, of those in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]


def write_run(folder: Path, *typed: str, status: str = "finished", **metrics: float | str) -> None:
    """Write what a run leaves of its end."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([*typed, f"model_dir={folder.name}"]))
    named = {f"eval/{name}": value for name, value in metrics.items()}
    (folder / "summary.json").write_text(json.dumps({"status": status, "global_step": 100, "metrics": named}))


def best(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", "command=best", *words]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=home, env=given, capture_output=True, text=True, timeout=150)


def test_it_ranks_the_runs_of_a_folder_and_shows_how_their_settings_differ(tmp_path: Path) -> None:
    same = "train.max_steps=100"
    write_run(tmp_path / "outputs/one", same, "model.params.rate=0.1", accuracy=0.5, loss=0.1)
    write_run(tmp_path / "outputs/two", same, "model.params.password=swordfish", accuracy=0.75, loss=0.3)
    write_run(tmp_path / "outputs/sweeps/a/b", same, "model.params.rate=0.2", accuracy=0.625, loss=0.2, status="failed")
    write_run(tmp_path / "outputs/diverged", same, accuracy="nan", loss="nan")
    write_run(tmp_path / "outputs/other", same, rmse=1.0)
    write_run(tmp_path / "outputs/one/.unsent", same, accuracy=0.875, loss=0.05)  # no run of its own
    (tmp_path / "outputs/stopped").mkdir()
    (tmp_path / "outputs/stopped/summary.json").write_text(json.dumps({"status": "interrupted", "global_step": 7}))
    result = best(tmp_path, "sweep.metric=eval/accuracy")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1][2:4] == ["eval/accuracy", "eval/loss"]
    assert lines[2:5] == [
        ["1", "outputs/two", "0.75", "0.3", "100", "finished", "model.params.password=***"],
        ["2", "outputs/sweeps/a/b", "0.625", "0.2", "100", "failed", "model.params.rate=0.2"],
        ["3", "outputs/one", "0.5", "0.1", "100", "finished", "model.params.rate=0.1"],
    ]
    assert lines[7:] == [
        ["outputs/diverged", "finished", "100"],
        ["outputs/other", "finished", "100"],
        ["outputs/stopped", "interrupted", "7"],
    ]
    answer = json.loads(best(tmp_path, "sweep.metric=eval/accuracy", "run.output=json").stdout)
    assert [(run["rank"], run["model_dir"], run["eval/accuracy"], run["step"]) for run in answer["runs"]] == [
        (1, "outputs/two", 0.75, 100), (2, "outputs/sweeps/a/b", 0.625, 100), (3, "outputs/one", 0.5, 100),
    ]  # fmt: skip
    assert [run["model_dir"] for run in answer["without"]] == [
        "outputs/diverged", "outputs/other", "outputs/stopped",
    ]  # fmt: skip
    by_loss = best(tmp_path, "model_dir=outputs/sweeps")
    assert [line.split()[:3] for line in by_loss.stdout.splitlines()[2:]] == [["1", "outputs/sweeps/a/b", "0.2"]]


def test_each_experiment_has_a_ranking_of_its_own_and_up_to_three_metrics(tmp_path: Path) -> None:
    for name, experiment, auc in (("a", "churn", 0.5), ("b", "churn", 0.7), ("c", "null", 0.6)):
        write_run(tmp_path / "outputs" / name, auc=auc, loss=1 - auc, mae=0.1, rmse=0.2)
        config = f"command: train\ntracking:\n  backend: mlflow\n  experiment: {experiment}\n  tags: {{}}\n"
        (tmp_path / "outputs" / name / "config.yaml").write_text(config)
    answer = json.loads(best(tmp_path, "sweep.metric=eval/auc", "run.output=json").stdout)
    assert [(run["experiment"], run["rank"], run["model_dir"]) for run in answer["runs"]] == [
        ("churn", 1, "outputs/b"), ("churn", 2, "outputs/a"), ("runner", 1, "outputs/c"),
    ]  # fmt: skip
    assert answer["without"] == []
    first = answer["runs"][0]
    assert (first["eval/auc"], first["eval/loss"], first["eval/mae"]) == (0.7, pytest.approx(0.3), 0.1)
    assert "eval/rmse" not in first
    titles = [line for line in best(tmp_path, "sweep.metric=eval/auc").stdout.splitlines() if "best first" in line]
    assert [title.partition(":")[0] for title in titles] == ["experiment churn", "experiment runner"]


def test_a_metric_that_no_run_has_is_named_with_those_that_there_are(tmp_path: Path, messages: Messages) -> None:
    write_run(tmp_path / "outputs/one", accuracy=0.5, loss=0.1)
    for words in (["sweep.metric=eval/acuracy"], ["model_dir=nowhere"]):
        result = best(tmp_path, *words)
        messages.same(f"exit {result.returncode}", result.stderr)
