"""`train.gradient_accumulation=auto`: a run whose steps run out of memory goes on with smaller micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, Input, RunConfig
from runner.checkpoint_files.layout import latest_checkpoint
from runner.config import schema
from runner.system.exit_codes import FAILED, FINISHED
from runner.tracking.run_record import RunRecord
from tests.support import memory_limits
from tests.support.command_line import CommandLine
from tests.support.journal import events_in, metrics_of_steps
from tests.support.memory_limits import SETTINGS
from tests.support.messages import Messages
from tests.support.screen import line_of
from tests.support.tiers import slow_but

AUTO = "train.gradient_accumulation=auto"
STRATEGIES = {
    "default": ["+model.params.limit=4"],
    "mirrored": ["strategy=mirrored", "strategy.virtual_devices=2", "+model.params.limit=3"],
    # Only the second worker runs out: the chief sees no more than a lost peer.
    "multi_worker": ["strategy=multi_worker", "cluster.max_restarts=0", "+model.params.limit=[12,3]"],
}


def values_in(checkpoint: Path) -> dict[str, Any]:
    """Return the bytes of each variable of a checkpoint: weights, slots, state of random numbers."""
    reader = tf.train.load_checkpoint(str(checkpoint))
    values = {name: np.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}
    return {name: value.tobytes() for name, value in values.items() if value.dtype != object}


def summary_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.processes
@pytest.mark.parametrize("strategy", slow_but(STRATEGIES, "default"))
def test_a_run_that_ran_out_of_memory_comes_to_the_bits_of_accumulation_by_hand(
    strategy: str, tmp_path: Path, command_line: CommandLine
) -> None:
    job = (*SETTINGS, *STRATEGIES[strategy], "+model.params.from_step=5")
    found = command_line(*job, AUTO, "model_dir=auto", cwd=tmp_path)
    assert found.returncode == FINISHED, found.stderr
    number = RunRecord.read(tmp_path / "auto").gradient_accumulation
    restarts = events_in(tmp_path / "auto", "restart", "supervisor")
    assert restarts[-1]["gradient_accumulation"] == number == {"default": 4}.get(strategy, 2)
    assert {restart["step"] for restart in restarts} == {4}, "the newest checkpoint before the step that has no memory"
    assert {restart["task"] for restart in restarts} == {"worker:0" if strategy == "multi_worker" else "chief"}
    # By hand: whole batches up to that checkpoint, and from there on the number that was found.
    for settings in (["train.max_steps=4"], [f"train.gradient_accumulation={number}"]):
        by_hand = command_line(*job, "model_dir=by_hand", *settings, cwd=tmp_path)
        assert by_hand.returncode == FINISHED, by_hand.stderr
    for step in (4, 6, 8):
        expected = values_in(tmp_path / "by_hand" / f"model.ckpt-{step}")
        assert len(expected) > 5
        assert values_in(tmp_path / "auto" / f"model.ckpt-{step}") == expected
    assert summary_in(tmp_path / "auto")["gradient_accumulation"] == number
    assert summary_in(tmp_path / "by_hand")["gradient_accumulation"] == number


def test_the_number_is_recorded_and_a_resumed_run_begins_with_it(
    tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    run = tmp_path / "run"
    job = (*SETTINGS, "+model.params.limit=4", "model_dir=run", "cluster.max_restarts=0")
    found = command_line(*job, AUTO, cwd=tmp_path)
    assert found.returncode == FINISHED
    assert "train.gradient_accumulation: 4" in found.stdout.splitlines()
    messages.same("screen", line_of(found.stderr, "train.gradient_accumulation=2"))
    assert "gradient_accumulation: auto" in (run / "config.yaml").read_text(), "the number belongs to a start"
    restarts = events_in(run, "restart", "supervisor")
    assert [(each["step"], each["gradient_accumulation"]) for each in restarts] == [(0, 2), (0, 4)]
    metrics = [values for _, values in metrics_of_steps(run, "supervisor")]
    assert metrics == [
        {"run/restarts": 1.0, "run/gradient_accumulation": 2.0},
        {"run/restarts": 2.0, "run/gradient_accumulation": 4.0},
    ]
    assert len(events_in(run, "out_of_memory")) == 2
    assert (summary_in(run)["restarts"], summary_in(run)["gradient_accumulation"]) == (2, 4)

    assert command_line(*job, AUTO, "train.max_steps=10", cwd=tmp_path).returncode == FINISHED
    assert (summary_in(run)["restarts"], summary_in(run)["global_step"]) == (0, 10)
    assert RunRecord.read(run).gradient_accumulation == 4

    # Whole batches again: of other batches, the number says nothing.
    other = command_line(*job, AUTO, "train.max_steps=12", "input.train.batch_size=4", cwd=tmp_path)
    assert other.returncode == FINISHED
    assert RunRecord.read(run).gradient_accumulation == 1
    assert (
        command_line(*job, "train.gradient_accumulation=6", "train.max_steps=14", cwd=tmp_path).returncode == FINISHED
    )
    assert RunRecord.read(run).gradient_accumulation is None
    assert summary_in(run)["gradient_accumulation"] == 6


@pytest.mark.parametrize(
    ("batches", "tried"),
    [
        (["input.train.batch_size=3"], "1, 3"),
        (["input.train.batch_size=null", "+input.train.params.rows=3"], "1, 2, 4"),
    ],
)
def test_a_run_ends_where_a_micro_batch_would_be_empty(
    batches: list[str], tried: str, tmp_path: Path, command_line: CommandLine
) -> None:
    failed = command_line(*SETTINGS, *batches, AUTO, "+model.params.limit=0", "model_dir=run", cwd=tmp_path)
    assert failed.returncode == FAILED
    summary = summary_in(tmp_path / "run")
    assert summary["status"] == "failed"
    assert f"(tried train.gradient_accumulation={tried})" in summary["error"]
    assert f"train.gradient_accumulation={summary['gradient_accumulation']}, a micro-batch has one" in failed.stderr
    assert summary["restarts"] == tried.count(",")


def test_without_auto_the_error_names_the_key_and_the_value_to_try(
    tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    job = (*SETTINGS, "+model.params.limit=4", "model_dir=run")
    for number, larger in ((1, 2), (2, 4)):
        failed = command_line(*job, f"train.gradient_accumulation={number}", cwd=tmp_path)
        assert failed.returncode == FAILED
        assert (
            f"train.gradient_accumulation={larger}, in a script RunConfig(gradient_accumulation={larger}),"
            in failed.stderr
        )
        assert "Traceback" not in failed.stderr
    messages.same("stderr", line_of(failed.stderr, "A step of training"))
    assert summary_in(tmp_path / "run")["restarts"] == 0
    assert RunRecord.read(tmp_path / "run").gradient_accumulation is None


def test_a_script_gets_the_error_with_what_to_try(tmp_path: Path) -> None:
    trainer = Estimator(memory_limits.model_fn, tmp_path, RunConfig(gradient_accumulation=3), {"limit": 2})
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        trainer.train(Input(memory_limits.input_fn, batch_size=24), max_steps=2)
    assert "RunConfig(gradient_accumulation=6)" in caught.value.__notes__[-1]
    with pytest.raises(ValueError, match=r"RunConfig\(gradient_accumulation='auto'\)"):
        RunConfig(gradient_accumulation="auto")  # type: ignore[arg-type]
    found = Estimator(memory_limits.model_fn, tmp_path, RunConfig(gradient_accumulation=12), {"limit": 2})
    found.train(Input(memory_limits.input_fn, batch_size=24), max_steps=2)
    assert str(latest_checkpoint(tmp_path)) == str(tmp_path / "model.ckpt-2")


@pytest.mark.parametrize(
    "why",
    ["+model.params.trains_itself=true +model.params.limit=4", "+input.train.params.read_limit=4"],
    ids=["train_op", "input"],
)
def test_nothing_is_started_again_where_smaller_micro_batches_do_not_help(
    why: str, tmp_path: Path, command_line: CommandLine, messages: Messages
) -> None:
    failed = command_line(*SETTINGS, *why.split(), AUTO, "model_dir=run", cwd=tmp_path)
    assert failed.returncode == FAILED
    messages.same("error", summary_in(tmp_path / "run")["error"])
    summary = summary_in(tmp_path / "run")
    assert (summary["restarts"], summary["gradient_accumulation"]) == (0, 1)
    assert ("EstimatorSpec(optimizer=...)" in failed.stderr) == ("trains_itself" in why)


@pytest.mark.slow
def test_each_job_of_a_sweep_finds_its_own_number(tmp_path: Path, command_line: CommandLine) -> None:
    job = (*SETTINGS, AUTO, "+model.params.limit=4,12", "sweep.dir=jobs")
    done = command_line("-m", *job, cwd=tmp_path)
    assert done.returncode == FINISHED, done.stderr
    runs = [file.parent for file in (tmp_path / "jobs").rglob("run.json")]
    limits = {schema.read(run / "config.yaml")["model"]["params"]["limit"]: run for run in runs}
    numbers = {limit: summary_in(run)["gradient_accumulation"] for limit, run in limits.items()}
    assert numbers == {4: 4, 12: 1}


@pytest.mark.slow
def test_the_coordinator_of_parameter_servers_finds_the_number(tmp_path: Path, command_line: CommandLine) -> None:
    job = (*SETTINGS, AUTO, "strategy=parameter_server", "+model.params.limit=4", "cluster.max_restarts=0")
    done = command_line(*job, "model_dir=run", cwd=tmp_path)
    assert done.returncode == FINISHED, done.stderr
    assert summary_in(tmp_path / "run")["gradient_accumulation"] == 4
