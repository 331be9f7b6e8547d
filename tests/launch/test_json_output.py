"""run.output=json: a command's answer is one object on stdout, and all else is on stderr."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.launch.environment import doctor
from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL
from tests.support.messages import Messages

TALKING = """
import os
from tests.support.line import line

print("said on import")

def model_fn(features, labels, mode, params):
    os.write(1, b"said by a library\\n")
    print("said in model_fn")
    return line(features, labels, mode, params)
"""
RUN = (*SMALL, "model.fn=talking", "model_dir=run", "run.output=json")

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, command_line: CommandLine) -> Path:
    """A folder with a run, whose command was to answer with an object."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "talking.py").write_text(TALKING)
    done = command_line(*RUN, "checkpoint.save_steps=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "said.json").write_text(done.stdout)
    return folder


@pytest.fixture
def ask(trained: Path, command_line: CommandLine) -> Run:
    """Runs a command, and returns what it answers; `code` is the exit code, `said` is stderr."""

    def run(*words: str) -> dict[str, Any]:
        return answered(command_line(*words, "run.output=json", cwd=trained))

    return run


def answered(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {**json.loads(done.stdout), "code": done.returncode, "said": done.stderr}


def test_a_run_answers_with_its_summary_and_its_folder(trained: Path) -> None:
    found = json.loads((trained / "said.json").read_text())
    assert found.pop("model_dir") == str(trained / "run")
    assert found["status"] == "finished" and found["global_step"] == 4 and found["metrics"]["eval/mae"] > 0
    of_file = json.loads((trained / "run" / "summary.json").read_text())
    assert {name: found[name] for name in of_file} == of_file


def test_what_users_and_libraries_print_is_on_stderr(ask: Run) -> None:
    said = ask("command=evaluate", "model_dir=run")["said"]
    assert all(text in said for text in ("said on import", "said in model_fn", "said by a library", "status: finished"))


def test_evaluate_answers_with_its_metrics(ask: Run) -> None:
    found = ask("command=evaluate", "model_dir=run", "eval.checkpoint=2")
    assert found["code"] == 0 and found["command"] == "evaluate" and found["global_step"] == 2
    assert set(found["metrics"]) == {"eval/loss", "eval/mae"}


def test_inspect_answers_with_checkpoints_and_variables_as_numbers(trained: Path, ask: Run) -> None:
    found = ask("command=inspect", "model_dir=run")
    assert found["status"] == "finished" and found["run"]["global_step"] == 4
    steps = {one["step"]: one for one in found["checkpoints"]}
    assert {2, 4} <= set(steps) and found["newest"] == steps[4]["path"] == str(trained / "run" / "model.ckpt-4")
    assert steps[4]["damage"] is None and steps[4]["variable_bytes"] > 0 and steps[4]["metrics"]["eval/mae"] > 0
    assert {"name": "weight", "shape": [], "dtype": "float32", "values": 1} in found["variables"]
    assert "variables of model.ckpt-4" in found["said"]


def test_a_dry_run_answers_with_what_would_be_trained(ask: Run) -> None:
    found = ask(*RUN[:-2], "command=dry_run")
    assert found["code"] == 0 and found["run"]["strategy"].startswith("default") and "starts_from" in found["run"]
    assert found["inputs"][0]["function"] == "tests.support.jobs.endless"
    assert {"input": "train", "name": "labels", "dtype": "float32", "shape": [None]} in found["data"]
    (weight,) = [one for one in found["variables"] if one["name"] == "weight"]
    assert weight["trainable"] is True and weight["values"] == 1
    assert [one["name"] for one in found["outputs"] if one["output"] == "metric"] == ["eval/loss", "eval/mae"]


INPUTS = """
import time
import tensorflow as tf
from runner.data.input_profile import timing

# This process is the command's own, and is not to take half a minute.
for name in ("WARM_UP_SECS", "ROUND_SECS", "CUT_SECS", "SETTLE_SECS", "DRAIN_SECS", "FILL_SECS"):
    setattr(timing, name, 0.1)

def wait(value):
    time.sleep(0.003)
    return value

def waiting(value):
    waited = tf.py_function(wait, [value], tf.int64)
    waited.set_shape([])
    return waited

def slow(params):
    return tf.data.Dataset.range(64).repeat().map(waiting).batch(2)

def raising(params):
    raise RuntimeError("my own mistake")

def damaged(params):
    return tf.data.Dataset.from_tensors("1,x").map(lambda line: tf.io.decode_csv(line, [[0], [0]])[1]).batch(2)
"""


def test_a_profile_of_the_input_answers_with_what_to_try_and_what_was_tried(trained: Path, ask: Run) -> None:
    (trained / "slow_inputs.py").write_text(INPUTS)
    before = set(trained.iterdir())
    words = (*SMALL, "command=profile_input", "model_dir=profiled")
    found = ask(*words, "input.train.fn=slow_inputs.slow")
    assert found["code"] == 0 and found["status"] == "finished" and found["error"] is None
    assert found["input"]["examples_per_element"] == 2 and found["autotune"] is not None
    assert "waiting" in [stage["function"] for stage in found["stages"]]
    first = found["advice"][0]
    assert first["function"] == "waiting" and first["gain_min"] <= first["gain"] <= first["gain_max"]
    assert first["rounds_faster"] >= 6 and first["rounds"] == 7 and first["gain"] >= 1.2
    (left,) = [one for one in found["not_tried"] if one["change"] == "batch_first"]
    assert left["reason"].startswith("ValueError: ") and "in user code" not in left["reason"]
    assert isinstance(found["no_clear_gain"], list)
    for name in ("raising", "damaged"):
        found = ask(*words, f"input.train.fn=slow_inputs.{name}")
        assert (found["code"], found["status"]) == (2, "failed") and found["error"]
    assert set(trained.iterdir()) - before <= {trained / "__pycache__"}


def test_cluster_info_answers_with_the_tasks(ask: Run) -> None:
    found = ask("command=cluster_info", "strategy=multi_worker", "cluster.num_workers=2")
    assert found["strategy"] == "multi_worker" and "tf_config" not in found
    assert [(one["role"], one["index"]) for one in found["tasks"]] == [("chief", 0), ("worker", 0)]


def test_cluster_info_answers_with_tf_config_where_there_is_one(trained: Path, command_line: CommandLine) -> None:
    tf_config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}
    words = ("command=cluster_info", "strategy=multi_worker", "run.output=json")
    found = answered(command_line(*words, cwd=trained, TF_CONFIG=json.dumps(tf_config)))
    assert found["tf_config"]["task"] == tf_config["task"]


@pytest.mark.parametrize("can_start", [True, False])
def test_doctor_answers_with_its_findings_and_problems(
    can_start: bool, ask: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = doctor.Section("tensorflow", [("TensorFlow", "none")], [doctor.Problem("broken", "mend it", is_fatal=True)])
    good = doctor.Section("tensorflow", [("TensorFlow", "2.21")])
    monkeypatch.setattr(doctor, "run_probe", lambda env: None)
    monkeypatch.setattr(doctor, "check_tensorflow", lambda probe, env: good if can_start else bad)
    found = ask("command=doctor", "tracking=none")
    assert found["code"] == (0 if can_start else 1) and found["can_start"] is can_start
    assert found["tensorflow"] == {"TensorFlow": "2.21" if can_start else "none"} and "Python" in found["python"]
    assert ({"what": "broken", "do": "mend it", "is_fatal": True} in found["problems"]) is not can_start


def test_a_new_project_answers_with_its_folder(ask: Run) -> None:
    assert ask("command=new", "new.path=mine")["path"] == "mine"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("command=inspect", "model_dir=nowhere"), 2),
        (("command=inspect", "model_dri=run"), 2),
        (("command=dry_run", *RUN[:-2], "model.fn=nowhere.model_fn"), 2),
        (("command=dry_run", *RUN[:-2], "model.fn=tests.task.test_error_report.of_wrong_shape"), 2),
    ],
    ids=["folder", "key", "function", "model"],
)
def test_a_mistake_is_an_object_with_its_message(words: tuple[str, ...], code: int, ask: Run) -> None:
    found = ask(*words)
    assert (found["code"], found["status"]) == (code, "failed")
    assert found["error"].splitlines()[0] in found["said"]


def test_a_sweep_has_no_one_object(trained: Path, command_line: CommandLine, messages: Messages) -> None:
    done = command_line(*RUN[:-2], "-m", "run.seed=1,2", "run.output=json", cwd=trained)
    assert done.returncode == 2 and "{" not in done.stdout
    messages.same("line", next(line for line in done.stderr.splitlines() if "run.output" in line))
