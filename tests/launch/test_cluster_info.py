"""command=cluster_info says what a run would be part of, without TensorFlow, functions or a model_dir."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]
TF_CONFIG = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})


def cluster_info(tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", "command=cluster_info", *words]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=150)


def facts(output: str) -> dict[str, str]:
    lines = output.partition("\n\n")[0].splitlines()
    return {line[:11].strip(): line[13:] for line in lines[2:]}


def rows(output: str) -> list[list[str]]:
    return [line.split(maxsplit=3) for line in output.split("\n\n")[1].splitlines()[2:]]


def test_it_says_who_this_process_is_and_leaves_nothing(tmp_path: Path, messages: Messages) -> None:
    result = cluster_info(tmp_path, "strategy=multi_worker", "model_dir=nowhere", "model=custom", TF_CONFIG=TF_CONFIG)
    assert (result.returncode, result.stderr) == (0, "")
    for name, said in facts(result.stdout).items():
        messages.same(name, said)
    assert rows(result.stdout) == [["chief", "0", "a:1"], ["worker", "0", "b:1", "this process"]]
    last = result.stdout.splitlines()[-1]
    assert json.loads(last.removeprefix("TF_CONFIG of this task: ")) == {
        "cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0},
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_very_large_cluster_is_told_of_at_once_and_one_beyond_all_bounds_refused(
    tmp_path: Path, messages: Messages
) -> None:
    started = time.monotonic()
    result = cluster_info(tmp_path, "strategy=multi_worker", "cluster.num_workers=10000")
    assert (result.returncode, len(rows(result.stdout))) == (0, 10000)
    assert time.monotonic() - started < 30  # 1,000 of them took 14 s
    nodes = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1-99999999]"}
    refused = cluster_info(tmp_path, "strategy=multi_worker", **nodes)
    messages.same(f"exit {refused.returncode}", refused.stderr)


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        (["strategy=mirrored"], ["chief 0 -"]),
        (
            ["strategy=parameter_server", "cluster.evaluator=true"],
            [
                "chief 0 127.0.0.1:<free port>", "worker 0 127.0.0.1:<free port>", "worker 1 127.0.0.1:<free port>",
                "ps 0 127.0.0.1:<free port>", "evaluator 0 -",
            ],
        ),
    ],
    ids=["mirrored", "parameter_server"],
)  # fmt: skip
def test_without_a_cluster_around_it_says_what_the_run_would_start(
    words: list[str], tasks: list[str], tmp_path: Path, messages: Messages
) -> None:
    result = cluster_info(tmp_path, *words, TF_CONFIG="")
    assert result.returncode == 0, result.stderr
    known = facts(result.stdout)
    for name in ("source", "this is", "starts here"):
        messages.same(name, known[name])
    assert [" ".join(row) for row in rows(result.stdout)] == tasks


def test_a_wrong_environment_is_one_message_and_exit_code_2(tmp_path: Path, messages: Messages) -> None:
    result = cluster_info(tmp_path, "strategy=multi_worker", TF_CONFIG='{"cluster": {"worker": ["a"]}}')
    assert result.stdout == ""
    messages.same(f"exit {result.returncode}", result.stderr)


def test_a_run_in_an_environment_that_its_strategy_cannot_use_is_refused_too(
    tmp_path: Path, messages: Messages
) -> None:
    command = [sys.executable, "-m", "runner", "strategy=mirrored", "model_dir=run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": TF_CONFIG}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert not (tmp_path / "run").exists()


def test_it_says_which_folders_a_managed_job_offers_and_that_those_of_the_command_line_win(tmp_path: Path) -> None:
    vertex = {"AIP_CHECKPOINT_DIR": "gs://b/job/checkpoints", "AIP_MODEL_DIR": "gs://b/job/model"}
    job = {**vertex, "CLOUD_ML_JOB_ID": "17", "TF_CONFIG": ""}
    told = facts(cluster_info(tmp_path, "model_dir=s3://mine/run", **job).stdout)
    assert (told["model_dir"], told["export.dir"]) == ("s3://mine/run (the config)", "gs://b/job/model (AIP_MODEL_DIR)")
    assert not facts(cluster_info(tmp_path, **vertex, TF_CONFIG="").stdout).keys() & {"model_dir", "export.dir"}
    hosts = {"TRAINING_JOB_NAME": "digits", "SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    done = cluster_info(tmp_path, "strategy=multi_worker", **hosts, SM_MODEL_DIR="/opt/ml/model", TF_CONFIG="")
    told = facts(done.stdout)
    assert (told["this is"], told["export.dir"]) == ("worker:0", "/opt/ml/model (SM_MODEL_DIR)")
    assert told["source"].startswith("sagemaker") and "model_dir" not in told
    assert rows(done.stdout) == [["chief", "0", "algo-1:2222"], ["worker", "0", "algo-2:2222", "this process"]]
    assert list(tmp_path.iterdir()) == []
