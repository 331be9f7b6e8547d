"""Params that nobody declares are refused on the command line; those that nobody reads are named."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.messages import Messages
from tests.support.screen import line_of

NET = """
import tensorflow as tf
from runner import EstimatorSpec

def model_fn(features, labels, mode, params):
    weight = tf.compat.v1.get_variable("weight", [])
    loss = tf.reduce_mean(tf.square(features * weight - labels))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(params["lr"])
    return EstimatorSpec(mode, features * weight, loss, optimizer=optimizer)

def input_fn(params):
    data = tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [2.0, 4.0]))
    return data.repeat(params.get("times", 1)).batch(2)
"""
GROUP = "fn: net\nparams:\n  lr: 0.1\n  layers: {width: 3}\n  tables: {a: {rows: 1}}\n"
RUN = ("model=mine", "input=custom", "input.train.fn=net", "input.eval.fn=net", "tracking=none", "model_dir=run")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(GROUP)
    return tmp_path


@pytest.fixture
def run(command_line: CommandLine, project: Path) -> Run:
    return functools.partial(command_line, cwd=project)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.params.lrr=0.5"],
        ["model.params={lrr: 0.5}"],
        ["model.params.layers.wdth=2"],
        ["model.params.db_password=hunter22"],
        ["input=digits", "input.eval.params.flt=1"],
    ],
    ids=" ".join,
)
def test_a_param_that_is_not_declared_is_refused(
    overrides: list[str], project: Path, run: Run, messages: Messages
) -> None:
    given = RUN if "input=digits" not in overrides else ("model=mine", "model_dir=run")
    result = run(*given, *overrides)
    messages.same(f"exit {result.returncode}", line_of(result.stderr, "runner:"))
    assert "hunter22" not in result.stderr
    assert not (project / "run").exists()


@pytest.mark.slow
def test_what_is_open_stays_open_and_what_nobody_reads_is_named_once(
    project: Path, run: Run, messages: Messages
) -> None:
    """`+` adds; names in a table, params of an empty group and of a function on the command line are the user's."""
    opened = ["+model.params.lrr=0.5", "model.params.lrr=0.6", "model.params.tables.b.rows=2", "train.max_steps=2"]
    result = run(*RUN, *opened, "input.train.params.times=9", "input.eval.params.tmies=1")
    assert result.returncode == 0, result.stderr
    messages.same("stderr", line_of(result.stderr, "input_fn"))
    unread = ["model.params.layers", "model.params.tables", "model.params.lrr", "input.eval.params.tmies"]
    assert json.loads((project / "run" / "summary.json").read_text())["unread_params"] == unread

    evaluate = ["command=evaluate", "model_dir=run", "tracking=none"]
    refused = run(*evaluate, "model.params.lrrr=1")
    messages.same(f"exit {refused.returncode}", line_of(refused.stderr, "runner: "))
    read = run(*evaluate, "model.params.lrr=1", "+input.eval.params.times=2", "eval.name=other")
    assert read.returncode == 0, read.stderr
    assert "input_fn" not in read.stderr  # who only evaluates asks for less
    other = run("model.fn=net", *RUN[1:5], "model_dir=other", "model.params.lr=0.1", "command=dry_run")
    assert other.returncode == 0, other.stderr


@pytest.mark.slow
def test_a_sweep_over_a_param_that_nobody_reads_says_so_in_its_table(run: Run, messages: Messages) -> None:
    result = run("-m", *RUN[:5], "+model.params.lrr=0.5,0.1", "train.max_steps=1")
    assert result.returncode == 0, result.stderr
    table = result.stdout[result.stdout.index("sweep outputs/sweeps/") :]
    for job in sorted(re.findall(r"lrr=\S+ \(.*?\)", table)):
        messages.same("job", job)
