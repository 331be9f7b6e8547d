"""`python -m runner`: the main job, experiments, interruptions, the user's mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_gallery import PROMISES
from tests.support.command_line import CommandLine
from tests.support.journal import recorded
from tests.support.messages import Messages
from tests.support.screen import line_of
from tests.support.tiers import slow_but

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted({path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")} - {*PROMISES})
REPLICAS: Mapping[str, list[str]] = {
    "default": [],
    "one_device": [],
    "mirrored": ["strategy.virtual_devices=2"],
    "central_storage": ["strategy.virtual_devices=2"],
}
"""Strategy -> what makes two replicas of it on this machine, if anything."""
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=240)


def summary_in(model_dir: Path) -> dict[str, Any]:
    return json.loads((model_dir / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_the_main_job_reaches_its_accuracy(strategy: str, tmp_path: Path, command_line: CommandLine) -> None:
    summary, result = trained(strategy, tmp_path, command_line)
    assert summary["global_step"] == 1000
    assert summary["metrics"]["eval/accuracy"] >= 0.97
    assert "step 1000/1000  loss " in result.stderr and " steps/s  " in result.stderr and " examples/s" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "central_storage"])  # the same numbers: tests/exactness
def test_a_job_has_the_replicas_of_its_strategy(strategy: str, tmp_path: Path, command_line: CommandLine) -> None:
    summary, _ = trained(strategy, tmp_path, command_line, "model.params.network=mlp", "train.max_steps=20")
    assert summary["global_step"] == 20


def trained(
    strategy: str, folder: Path, command_line: CommandLine, *settings: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Train the main job under a strategy. Return its summary, and what it said."""
    overrides = [f"strategy={strategy}", *REPLICAS[strategy], "tracking=none", "model_dir=run"]
    result = command_line(*overrides, *settings, cwd=folder)
    replicas = 2 if REPLICAS[strategy] else 1
    assert result.returncode == 0, result.stderr
    summary = summary_in(folder / "run")
    assert summary["status"] == "finished"
    assert summary["strategy"] == strategy
    assert summary["num_replicas"] == replicas
    assert summary["steps_per_sec"] > 0
    assert f"{replicas} replica" in result.stdout
    return summary, result


@pytest.mark.parametrize("experiment", slow_but(EXPERIMENTS, "wide_deep"))
def test_an_experiment_that_is_not_in_the_gallery_takes_two_steps(
    experiment: str, tmp_path: Path, command_line: CommandLine
) -> None:
    overrides = [f"experiment={experiment}", "train.max_steps=2", "tracking=none", "model_dir=run"]
    result = command_line(*overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert summary_in(tmp_path / "run")["global_step"] == 2


@pytest.mark.slow
def test_train_then_evaluate_are_the_two_halves(tmp_path: Path, command_line: CommandLine) -> None:
    small = ["model.params.network=mlp", "tracking=none", "model_dir=run", "train.max_steps=30"]
    trained = command_line("command=train", *small, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert summary_in(tmp_path / "run")["metrics"] == {}
    evaluated = command_line("command=evaluate", *small, cwd=tmp_path)
    assert evaluated.returncode == 0, evaluated.stderr
    summary = summary_in(tmp_path / "run")
    assert summary["global_step"] == 30
    assert set(summary["metrics"]) == {"eval/accuracy", "eval/loss"}


def test_evaluating_what_was_never_trained_says_so(
    tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    result = command_line("command=evaluate", "tracking=none", "model_dir=run", cwd=tmp_path)
    messages.same(f"exit {result.returncode}", result.stderr)
    (tmp_path / "run").mkdir()
    result = command_line("command=evaluate", "tracking=none", "model_dir=run", cwd=tmp_path)
    messages.same(f"exit {result.returncode}", result.stderr)
    assert "Traceback" not in result.stderr


def start_long_run(tmp_path: Path, **overrides: str) -> subprocess.Popen[str]:
    """A run that would take minutes, once it has taken steps."""
    command = [sys.executable, "-m", "runner", "model_dir=run", "model.params.network=mlp", "train.max_steps=1000000"]
    process = subprocess.Popen(
        [*command, "tracking=none"], cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not any(line.get("step", 0) >= 100 for line in recorded(tmp_path / "run")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def test_sigterm_saves_and_the_next_run_goes_on(tmp_path: Path, command_line: CommandLine) -> None:
    process = start_long_run(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 3, said
    assert "oneDNN" not in said and "WARNING" not in said  # none of TensorFlow's start-up noise
    interrupted = summary_in(tmp_path / "run")
    step = interrupted["global_step"]
    assert interrupted["status"] == "interrupted" and step >= 100
    assert Path(interrupted["checkpoint"] + ".index").exists()

    resumed = command_line(
        "model_dir=run", "model.params.network=mlp", f"train.max_steps={step + 5}", "tracking=none", cwd=tmp_path
    )
    assert resumed.returncode == 0, resumed.stderr
    assert summary_in(tmp_path / "run")["global_step"] == step + 5
    first_after = [line["step"] for line in recorded(tmp_path / "run") if "step" in line]
    assert step + 1 in first_after  # went on, did not begin anew


ENDS_ITSELF = """
import os, signal
import runner

class Kill(runner.Hook):
    def after_step(self, run, result):
        if result.last_step >= 20:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # tests/launch/test_status.py: a script in the place of the task
def test_a_task_that_is_killed_is_reported(tmp_path: Path, command_line: CommandLine, messages: Messages) -> None:
    (tmp_path / "mine.py").write_text(ENDS_ITSELF)
    words = ["model_dir=run", "model.params.network=mlp", "train.hooks=[{fn: mine.Kill}]", "tracking=none"]
    result = command_line(*words, cwd=tmp_path)
    messages.same(f"exit {result.returncode}", line_of(result.stdout, "error: "))
    assert summary_in(tmp_path / "run")["status"] == "failed"


def test_too_small_an_address_space_is_no_mistake_and_the_folder_stays(tmp_path: Path) -> None:
    command = "ulimit -v 1500000; exec $PYTHON -m runner train.max_steps=4 model_dir=run tracking=none"
    env = {**ENV, "PYTHON": sys.executable}
    result = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 1
    assert "failed to map segment" in result.stderr and "Traceback" not in result.stderr
    assert summary_in(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize(
    ("body", "inline"),
    [
        ("raise ValueError('width is odd')", False),
        ("return features['imgae']", False),
        pytest.param("raise ValueError('x')", True, marks=pytest.mark.slow),
        pytest.param("return None", False, marks=pytest.mark.slow),
        ("raise RuntimeError('out of luck')", False),
    ],
    ids=["ValueError", "missing feature", "inline", "returns None", "RuntimeError"],
)
def test_an_error_in_model_fn_is_named_with_its_line(
    body: str, inline: bool, tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    mine = tmp_path / "model_fns" / "mine.py"
    mine.parent.mkdir()
    mine.write_text(f"def model_fn(features, labels, mode):\n    {body}\n")
    custom = ("model=custom", "model.fn=model_fns.mine", "tracking=none", "model_dir=run")
    start = run if inline else command_line
    result = start(*custom, f"run.inline={inline}", cwd=tmp_path)
    said = result.stderr[result.stderr.index("runner: ") :]
    messages.same(f"exit {result.returncode}", said)
    # What it returned is wrong at no line of it: the place of the function itself is named.
    assert re.findall(r"mine\.py, line (\d+)", said) == ["1" if body == "return None" else "2"]
    assert "Traceback" not in result.stderr
    assert "status: failed\n" in result.stdout
    assert not (tmp_path / "run").exists(), "it never took its first step"


@pytest.mark.slow
def test_inline_a_debugger_reaches_model_fn(tmp_path: Path) -> None:
    mine = tmp_path / "model_fns" / "mine.py"
    mine.parent.mkdir()
    mine.write_text(
        "import os\nfrom model_fns import digits\n\n"
        "def model_fn(features, labels, mode, params):\n"
        "    if mode == 'train':\n        breakpoint()\n"
        "    return digits.model_fn(features, labels, mode, params)\n"
    )
    command = [sys.executable, "-m", "runner", "run.inline=true", "model.fn=model_fns.mine", "model.params.network=mlp"]
    result = subprocess.run(
        [*command, "train.max_steps=2", "tracking=none", "model_dir=run"],
        cwd=tmp_path, env=ENV, input="p 'batch', features['image'].shape\np os.getppid()\nc\n",
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "('batch', TensorShape([None, 8, 8, 1]))" in result.stdout
    assert f"(Pdb) {os.getpid()}\n" in result.stdout  # the command's own process, not a child of it
    summary = summary_in(tmp_path / "run")
    assert (summary["status"], summary["global_step"]) == ("finished", 2)


def test_inline_is_refused_in_a_sweep(tmp_path: Path, command_line: CommandLine, messages: Messages) -> None:
    result = command_line("-m", "run.inline=true", "train.max_steps=1,2", "tracking=none", cwd=tmp_path)
    messages.same(f"exit {result.returncode}", result.stderr)
