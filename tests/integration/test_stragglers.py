"""`python -m runner strategy=multi_worker` with one worker that is slower than the other: which, and for what."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import runner
from runner.distribute.tf_config import read_tf_config
from tests.support import jobs
from tests.support.command_line import CommandLine
from tests.support.jobs import SMALL
from tests.support.journal import events_in
from tests.support.line import line, native_line

RUN = [*SMALL, "strategy=multi_worker", "command=train", "model_dir=run"]
WORKER = "worker:0"
SLOW_SECS = 6.0


def is_worker() -> bool:
    return not read_tf_config(os.environ["TF_CONFIG"]).is_chief


def opened_slowly(params: Any) -> tf.data.Dataset:
    """As `jobs.endless`; the worker takes its time to open it."""
    time.sleep(SLOW_SECS if is_worker() else 0.0)
    return jobs.endless(params)


STEP_SECS = 0.02
STEPS = [*RUN, "train.max_steps=40", "train.log_steps=10"]


def slept(value: tf.Tensor) -> tf.Tensor:
    """Return `value`, on the worker after a while; the graph is the same everywhere."""

    def sleep() -> None:
        time.sleep(STEP_SECS if is_worker() else 0.0)

    with tf.control_dependencies([value]):
        pause = tf.py_function(sleep, [], [])
    with tf.control_dependencies([pause]):
        return tf.identity(value)


def read_slowly(params: Any) -> tf.data.Dataset:
    return jobs.endless(params).map(lambda x, y: (slept(x), y))


def slow_native(features: Any, labels: Any, mode: str, params: Any) -> runner.EstimatorSpec:
    return native_line(slept(features), labels, mode, params)


def slow_classic(features: Any, labels: Any, mode: str, params: Any) -> runner.EstimatorSpec:
    return line(slept(features), labels, mode, params)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def test_the_start_of_each_worker_is_told_by_phase_and_the_slowest_is_named(
    tmp_path: Path, command_line: CommandLine
) -> None:
    done = command_line(*RUN, f"input.train.fn={__name__}.opened_slowly", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    starts = summary["starts"]
    assert set(starts) == {"chief", WORKER}
    for start in starts.values():
        assert {"launch", "import", "rendezvous", "build", "input", "trace", "first_step"} <= set(start["phases"])
        assert abs(sum(start["phases"].values()) - start["secs"]) < 0.1
    assert starts[WORKER]["phases"]["input"] >= SLOW_SECS
    # The other did nothing meanwhile.
    assert starts["chief"]["phases"]["waiting"] > SLOW_SECS / 2 and starts["chief"]["phases"]["input"] < SLOW_SECS / 2
    slowest = summary["slowest_start"]
    assert (slowest["task"], slowest["phase"]) == (WORKER, "input")
    for role in ("chief", "worker"):
        (first,) = events_in(tmp_path / "run", "first_step", role)
        assert first["secs"] > 0


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (["input.train.fn={0}.read_slowly"], "input"),
        (["model.fn={0}.slow_native"], "compute"),
        (["model.fn={0}.slow_classic"], "compute"),
    ],
)
def test_the_worker_that_slows_the_steps_is_named_with_the_cause(
    changes: list[str], cause: str, tmp_path: Path, command_line: CommandLine
) -> None:
    words = [change.format(__name__) for change in changes]
    done = command_line(*STEPS, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    times = summary_of(tmp_path)["step_times"]
    assert set(times["workers"]) == {"chief", WORKER}
    slowest = times["slowest"]
    assert (slowest["task"], slowest["cause"]) == (WORKER, cause)
    assert slowest["is_told"] and slowest["secs"] > STEP_SECS / 4  # tf.data reads a little ahead
    assert times["max"] == slowest["secs"] > times["min"]
    for role in ("chief", "worker"):
        noted = events_in(tmp_path / "run", "step_times", role)
        assert noted[-1]["step"] == 40 and sum(line["steps"] for line in noted) == 39  # the first loop was one step


def test_a_run_that_does_not_measure_its_workers_says_so(tmp_path: Path, command_line: CommandLine) -> None:
    cut = ["model.fn=tests.support.line.native_line", "input.train.batch_size=4", "train.gradient_accumulation=2"]
    done = command_line(*RUN, *cut, "train.log_steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count("with train.jit, train.gradient_accumulation") == 1
    assert summary_of(tmp_path)["step_times"] is None


def test_the_steps_of_each_worker_of_parameter_servers_are_counted(tmp_path: Path, command_line: CommandLine) -> None:
    places = ["strategy=parameter_server", "cluster.num_workers=2", "cluster.num_ps=1", "command=train"]
    words = [*SMALL, *places, "model_dir=run", "train.max_steps=40", "train.log_steps=10", "train.steps_per_loop=10"]
    done = command_line(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path)
    steps = summary["worker_steps"]
    assert set(steps) <= {"worker:0", "worker:1"} and sum(steps.values()) == 40
    assert summary["step_times"] is None
    assert set(summary["starts"]) == {"chief", "worker:0", "worker:1", "ps:0"}
