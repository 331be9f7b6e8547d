"""Checkpoints that are written while training goes on: what they hold, who waits for them, what a failed one leaves."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, EvalSpec, Hook, RunConfig, TrainSpec, train_and_evaluate
from runner.checkpoint.async_saver import Saver
from runner.checkpoint.integrity import find_damage
from runner.checkpoint.reader import Reader
from runner.checkpoint.snapshot import Snapshot, SnapshotMemory
from runner.checkpoint.writer import CheckpointWriter, DiskFullError
from runner.checkpoint_files.layout import SCRATCH, latest_checkpoint
from runner.tf_private import tensor_bundle
from tests.support import jobs
from tests.support.checkpoints import list_checkpoints
from tests.support.journal import events_in, journal_of
from tests.support.line import line, points
from tests.support.messages import Messages

v1 = tf.compat.v1
MEASURED = r"(?<=of its input )[\d.,]+ \w+|[\d.,]+ \w+(?= were free)"


class Gate:
    """Holds back writes of bundles until it is opened; `step` tells which checkpoint is held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, closed_at: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        original = tensor_bundle.write_bundle

        def write(path: Path, tensors: Any) -> None:
            if path.name == f"model.ckpt-{closed_at}":
                self.reached.set()
                assert self.opened.wait(60)
            original(path, tensors)

        monkeypatch.setattr(tensor_bundle, "write_bundle", write)


@pytest.fixture
def gate_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Gate]]:
    gates: list[Gate] = []

    def build(step: int) -> Gate:
        gates.append(Gate(monkeypatch, step))
        return gates[-1]

    yield build
    for gate in gates:
        gate.opened.set()


class Calls(Hook):
    """Calls a function after each step."""

    def __init__(self, call: Callable[[Any, int], None]) -> None:
        self._call = call

    def after_step(self, run: Any, result: Any) -> None:
        self._call(run, result.last_step)


def embedding(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Dense and sparse updates: a table of which each step writes some rows, in place where TensorFlow can."""
    table = v1.get_variable("table", [50, 3], initializer=v1.ones_initializer(), dtype=tf.float64)
    kernel = v1.get_variable("kernel", [3, 1], initializer=v1.ones_initializer(), dtype=tf.float64)
    rows = tf.gather(table, tf.cast(features, tf.int32))
    loss = tf.reduce_mean(tf.square(rows @ kernel - tf.cast(labels[:, None], tf.float64)))
    optimizer = v1.train.AdamOptimizer(0.1)
    return EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, v1.train.get_global_step()))


def values_of(path: str) -> dict[str, np.ndarray]:
    return Reader(path).get_many(Reader(path).names())


def config(**settings: Any) -> RunConfig:
    return RunConfig(steps_per_loop=1, tensorboard=False, **{"save_checkpoints_steps": 2, **settings})


# --- what is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["assign", "scatter", "add"])
def test_a_copy_does_not_follow_its_variable(update: str) -> None:
    variable = tf.Variable(np.arange(12.0).reshape(4, 3))
    rows = tf.IndexedSlices(tf.ones([1, 3], tf.float64), tf.constant([2]), tf.constant([4, 3]))
    changes = {
        "assign": lambda: variable.assign(variable * 2),
        "scatter": lambda: variable.scatter_add(rows),
        "add": lambda: variable.assign_add(tf.ones([4, 3], tf.float64)),
    }
    memory = SnapshotMemory()
    for _ in range(3):  # a first copy, and two into the same buffers
        expected = variable.numpy()
        copy = memory.copy(Snapshot(1, {"v": variable.read_value()})).tensors["v"]
        changes[update]()
        np.testing.assert_array_equal(copy, expected)
        assert not np.array_equal(variable, expected)


def test_every_dtype_is_copied_and_buffers_are_used_again() -> None:
    memory = SnapshotMemory()
    for factor in (1, 2):
        values = {
            name: tf.cast(tf.constant([0, 1, 2]) * factor, name)
            for name in ("bool", "int8", "int64", "float16", "bfloat16", "float64", "complex64")
        }
        values |= {"text": tf.constant(["a", "b"] * factor), "scalar": np.float32(factor), "none": tf.zeros([0, 3])}
        copies = memory.copy(Snapshot(1, {**values, "parts": (values["int64"], values["int8"])})).tensors
        for name, value in values.items():
            np.testing.assert_array_equal(copies[name], value)
        np.testing.assert_array_equal(copies["parts"][1], values["int8"])
    again = memory.copy(Snapshot(1, {"float64": values["float64"]})).tensors["float64"]
    assert again is copies["float64"]


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    tmp_path: Path, gate_at: Callable[[int], Gate]
) -> None:
    straight = Estimator(embedding, tmp_path / "straight", config(save_checkpoints_asynchronously=False))
    straight.train(points(repeat=True), max_steps=4)
    gate = gate_at(4)
    latest: list[str | None] = []

    def watch(run: Any, step: int) -> None:
        if step == 7:  # the write of step 4 began three steps ago
            assert gate.reached.wait(60)
            latest.append(latest_checkpoint(tmp_path / "run"))
            gate.opened.set()

    trainer = Estimator(embedding, tmp_path / "run", config(save_checkpoints_steps=4))
    trainer.train(points(repeat=True), hooks=[Calls(watch)], max_steps=7)
    assert latest == [f"{tmp_path}/run/model.ckpt-0"], "latest moves when the checkpoint is durable"
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [0, 4, 7]
    written, expected = values_of(f"{tmp_path}/run/model.ckpt-4"), values_of(f"{tmp_path}/straight/model.ckpt-4")
    assert sorted(written) == sorted(expected) and "table/Adam" in written
    for name, value in expected.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
    assert any(
        not np.array_equal(value, expected[name]) for name, value in values_of(f"{tmp_path}/run/model.ckpt-7").items()
    )


# --- who waits --------------------------------------------------------------------------------------------------


def test_a_further_save_waits_for_the_one_under_way_and_says_so(
    tmp_path: Path, gate_at: Callable[[int], Gate], caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    gate = gate_at(2)

    class Opener(logging.Handler):
        """Lets the write go on when somebody has been told that he waits for it."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("Waiting for "):
                gate.opened.set()

    opener = Opener()
    logging.getLogger("runner").addHandler(opener)
    try:
        with caplog.at_level(logging.INFO, logger="runner"):
            Estimator(line, tmp_path, config()).train(points(repeat=True), max_steps=4)
    finally:
        logging.getLogger("runner").removeHandler(opener)
    waiting = next(text for text in caplog.messages if text.startswith("Waiting"))
    messages.same("INFO", waiting)
    assert [info.step for info in list_checkpoints(tmp_path)] == [0, 2, 4]


def test_an_evaluation_waits_for_its_checkpoint(tmp_path: Path, gate_at: Callable[[int], Gate]) -> None:
    gate = gate_at(2)
    threading.Timer(0.3, gate.opened.set).start()
    there: list[list[int]] = []

    class Evaluated(Hook):
        def begin(self, run: Any) -> None:
            there.append([info.step for info in list_checkpoints(tmp_path)])

    spec = EvalSpec(points(), hooks=[Evaluated()])
    result = train_and_evaluate(Estimator(line, tmp_path, config()), TrainSpec(points(repeat=True), 4), spec)
    assert there == [[0, 2], [0, 2, 4]] and result.global_step == 4


def test_listeners_are_told_after_the_checkpoint_is_durable(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []

    class Listener(v1.train.CheckpointSaverListener):  # type: ignore[name-defined]
        def after_save(self, session: Any, global_step_value: int) -> None:
            told.append((int(global_step_value), os.path.basename(str(latest_checkpoint(tmp_path)))))

    Estimator(line, tmp_path, config()).train(points(repeat=True), max_steps=4, saving_listeners=[Listener()])
    assert told == [(step, f"model.ckpt-{step}") for step in (0, 2, 4)]


def test_an_error_in_training_lets_the_checkpoint_become_durable(
    tmp_path: Path, gate_at: Callable[[int], Gate]
) -> None:
    gate = gate_at(2)

    def fail(run: Any, step: int) -> None:
        if step == 3:
            threading.Timer(0.2, gate.opened.set).start()
            raise OSError("the hook broke")

    with pytest.raises(OSError, match="the hook broke"):
        Estimator(line, tmp_path, config()).train(points(repeat=True), hooks=[Calls(fail)], max_steps=9)
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/model.ckpt-2"


def test_who_asks_for_a_checkpoint_gets_a_durable_one(tmp_path: Path) -> None:
    saved: list[tuple[str, str | None]] = []

    def save(run: Any, step: int) -> None:
        if step == 3:
            saved.append((run.save(), latest_checkpoint(tmp_path)))

    Estimator(line, tmp_path, config()).train(points(repeat=True), hooks=[Calls(save)], max_steps=4)
    assert saved == [(f"{tmp_path}/model.ckpt-3", f"{tmp_path}/model.ckpt-3")]


def test_what_a_checkpoint_cost_is_in_the_journal(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "journal.jsonl")
    Estimator(line, tmp_path / "run", config(), journal=journal).train(points(repeat=True), max_steps=4)
    events = events_in(tmp_path / "journal.jsonl", "checkpoint")
    assert [(one["step"], one["path"], one["asynchronous"]) for one in events] == [
        (2, f"{tmp_path}/run/model.ckpt-2", True), (4, f"{tmp_path}/run/model.ckpt-4", False),
    ]  # fmt: skip
    for one in events:
        assert one["bytes"] > 0 and one["write_secs"] > 0
        assert all(one[name] >= 0 for name in ("copy_secs", "input_secs", "waited_secs"))


def test_a_stop_waits_for_the_checkpoint_under_way_and_saves_its_own(
    tmp_path: Path, gate_at: Callable[[int], Gate]
) -> None:
    gate = gate_at(2)

    def stop(run: Any, step: int) -> None:
        if step == 3:
            threading.Timer(0.2, gate.opened.set).start()
            run.interrupt("SIGTERM")

    Estimator(line, tmp_path, config()).train(points(repeat=True), hooks=[Calls(stop)], max_steps=9)
    assert [(info.step, find_damage(info.path)) for info in list_checkpoints(tmp_path)] == [
        (0, None), (2, None), (3, None),
    ]  # fmt: skip
    assert latest_checkpoint(tmp_path) == f"{tmp_path}/model.ckpt-3"


# --- what a failed write leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_said_with_sizes_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, messages: Messages
) -> None:
    original = tensor_bundle.write_bundle

    def full(path: Path, tensors: Any) -> None:
        original(path, tensors)
        if path.name == "model.ckpt-4":
            raise tf.errors.ResourceExhaustedError(None, None, f"{path}.data; No space left on device")

    expected = Estimator(line, tmp_path / "straight", config()).train(points(repeat=True), max_steps=8)
    trainer = Estimator(line, tmp_path / "run", config(save_checkpoints_asynchronously=asynchronous))
    with monkeypatch.context() as patch:
        patch.setattr(tensor_bundle, "write_bundle", full)
        with messages.raised(DiskFullError, hide=MEASURED):
            trainer.train(points(repeat=True), max_steps=8)
    assert not [name for name in os.listdir(tmp_path / "run") if "ckpt-4" in name or name == SCRATCH]
    assert [(info.step, find_damage(info.path)) for info in list_checkpoints(tmp_path / "run")] == [
        (0, None),
        (2, None),
    ]
    resumed = Estimator(line, tmp_path / "run", config()).train(points(repeat=True), max_steps=8)
    assert resumed.get_variable_value("weight") == expected.get_variable_value("weight")


def test_a_run_that_finds_no_space_fails_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    original = tensor_bundle.write_bundle

    def full(path: Path, tensors: Any) -> None:
        if path.name == "model.ckpt-2":
            raise OSError(28, "No space left on device")
        original(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_bundle, "write_bundle", full)
        assert jobs.run(tmp_path, "checkpoint.save_steps=2") == 1
    said = capsys.readouterr().err
    messages.same("stderr", "runner: " + said.partition("runner: ")[2], hide=MEASURED)
    assert "Traceback" not in said
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [0]
    assert jobs.run(tmp_path, "checkpoint.save_steps=2") == 0
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [0, 2, 4]


@pytest.mark.parametrize("anew", [False, True])
def test_a_run_whose_folder_is_deleted_fails_with_one_message(
    tmp_path: Path, anew: bool, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    folder = tmp_path / "run"
    training = ("input.train.fn=tests.support.jobs.deleting", f"+input.train.params.folder={folder}")
    assert jobs.run(tmp_path, *training, f"+input.train.params.anew={anew}", "train.max_steps=10") == 1
    said = capsys.readouterr().err
    messages.same("stderr", "runner: " + said.partition("runner: ")[2])
    assert "Traceback" not in said
    assert not list(tmp_path.glob("run/model.ckpt*"))  # nothing that looks like a whole run


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_run_whose_folder_is_moved_says_where_it_is_and_makes_none_anew(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    moving = (
        f"input.{mode}.fn=tests.support.jobs.deleting", f"+input.{mode}.params.folder={tmp_path / 'run'}",
        f"+input.{mode}.params.moved_to={tmp_path / 'moved'}",
    )  # fmt: skip
    assert jobs.run(tmp_path, *moving, "train.max_steps=10", "eval.steps=8") == 1
    said = capsys.readouterr().err
    messages.same("stderr", "runner: " + said.partition("runner: ")[2])
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    assert list_checkpoints(tmp_path / "moved")


def test_a_disk_that_is_really_full(small_disk: Path, messages: Messages) -> None:
    saver = Saver(CheckpointWriter(small_disk, 5))
    saver.begin(Snapshot(1, {"w": tf.zeros([300_000])}), {}, asynchronous=True)
    saver.wait()
    for step, asynchronous in ((2, True), (3, False)):
        saver.begin(Snapshot(step, {"w": tf.ones([1_000_000])}), {}, asynchronous=asynchronous)
        with messages.raised(DiskFullError, hide=r"\d\.\d(?= MB were free)"):
            saver.wait()
    assert [(info.step, find_damage(info.path)) for info in list_checkpoints(small_disk)] == [(1, None)]
    assert not (small_disk / SCRATCH).exists()
    saver.begin(Snapshot(4, {"w": tf.ones([300_000])}), {}, asynchronous=True)
    saved = saver.wait()
    assert saved is not None and find_damage(saved.path) is None
