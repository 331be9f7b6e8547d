"""How much memory a save and a restore take beside the variables; when a save makes no copy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.checkpoint import async_saver
from runner.tf_private import tensor_bundle
from runner.tracing import partitioned_variable
from runner.tracing.partitioned_variable import PartitionedVariable, UnreadableVariableError, restore, value_of
from tests.support.journal import events_in, journal_of
from tests.support.line import line, points
from tests.support.messages import Messages

LARGE = [600, 512]  # 1.2 MB


def address(value: Any) -> int:
    return int(np.asarray(memoryview(value)).ctypes.data)


def test_a_variable_that_was_looked_up_is_saved_without_a_copy_and_what_was_read_stays() -> None:
    variable = tf.Variable(tf.ones(LARGE))
    variable.scatter_sub(tf.IndexedSlices(tf.ones([1, 512]), tf.constant([0])))
    assert address(variable.read_value()) != address(variable.read_value()), "TensorFlow copies, or this shows nothing"
    read = value_of(variable)
    assert address(read) == address(value_of(variable))
    variable.scatter_sub(tf.IndexedSlices(tf.ones([1, 512]), tf.constant([1])))
    assert read.numpy()[:3, 0].tolist() == [0.0, 1.0, 1.0]
    assert variable.numpy()[:3, 0].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("strategy", [None, "mirrored"])
def test_a_restore_holds_one_part_at_a_time(
    strategy: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_bundle, "PART_BYTES", 3 * 40)
    values = {f"v{i}": tf.range(10.0 * i, 10.0 * i + 10) for i in range(8)}
    values["large"] = tf.range(100.0)
    values["other_type"] = tf.constant([0.5, 1.5], tf.float64)
    tensor_bundle.write_bundle(tmp_path / "model", values)
    scope = tf.distribute.MirroredStrategy(["CPU:0"]).scope() if strategy else tf.device("CPU:0")
    with scope:
        variables: dict[str, Any] = {
            name: tf.Variable(tf.zeros(value.shape), name=name) for name, value in values.items() if name != "v0"
        }
        halves = {f"v0/part_{i}": tf.Variable(tf.zeros([5])) for i in range(2)}
        variables["v0"] = PartitionedVariable(halves)
        asked: list[int] = []
        read_entries = tensor_bundle.read_entries

        def counted(path: str, place: str, entries: Any) -> Any:
            asked.append(sum(tf.size(values[key]).numpy() * values[key].dtype.size for key, _, _ in entries))
            return read_entries(path, place, entries)

        monkeypatch.setattr(tensor_bundle, "read_entries", counted)
        restore(str(tmp_path / "model"), variables, lambda name: (name, values[name].dtype))
    assert sum(asked) == 8 * 40 + 400 + 16
    assert sorted(asked)[-2:] == [120, 400]
    for name, variable in variables.items():
        found = np.concatenate([half.numpy() for half in halves.values()]) if name == "v0" else variable.numpy()
        np.testing.assert_array_equal(found, values[name].numpy())
        assert found.dtype == np.float32


def test_a_large_variable_is_let_go_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setattr(tensor_bundle, "PART_BYTES", 100)
    tensor_bundle.write_bundle(tmp_path / "model", {"v": tf.range(100.0)})
    variable, read_entries, held = tf.Variable(tf.ones([100])), tensor_bundle.read_entries, []

    def read(*arguments: Any) -> Any:
        held.append(int(tf.size(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32))))
        return read_entries(*arguments)

    monkeypatch.setattr(tensor_bundle, "read_entries", read)
    restore(str(tmp_path / "model"), {"v": variable}, lambda name: (name, tf.float32))
    assert held == [0]
    assert variable.numpy()[99] == 99.0
    with messages.raised(UnreadableVariableError, hide=r"(?<=NotFoundError: ).*?(?=\. It was)"):
        restore(str(tmp_path / "model"), {"v": variable}, lambda name: ("missing", tf.float32))
    assert variable.numpy().tolist() == [0.0] * 100
    variable.assign(tf.ones([100]))
    assert partitioned_variable.size_of(variable) == 400


def trained(tmp_path: Path, steps: int, asynchronous: Any) -> list[bool]:
    """Train, saving every 2 steps. Returns: for each save that is told of, whether training went on meanwhile."""
    config = RunConfig(
        tf_random_seed=1, save_checkpoints_steps=2, steps_per_loop=1, save_checkpoints_asynchronously=asynchronous
    )
    journal = journal_of(tmp_path / "journal.jsonl")
    Estimator(line, tmp_path, config, journal=journal).train(points(repeat=True), max_steps=steps)
    return [one["asynchronous"] for one in events_in(tmp_path / "journal.jsonl", "checkpoint")]


def test_auto_saves_at_once_where_the_copy_does_not_fit_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    with caplog.at_level(logging.WARNING, logger="runner"):
        monkeypatch.setattr(async_saver, "free_memory", lambda: 20)  # the variables take 16
        monkeypatch.setattr(async_saver, "peak_beyond_now", lambda: 10)
        tight = trained(tmp_path / "tight", 7, "auto")
        messages.logged(caplog, "checkpoint.asynchronous")
        monkeypatch.setattr(async_saver, "free_memory", lambda: 1 << 30)
        wide = trained(tmp_path / "wide", 7, "auto")
    assert tight == [False] * 4
    assert wide == [True, True, True, False]  # nobody trains beside the last one
    for step in (2, 7):
        paths = [tmp_path / name / f"model.ckpt-{step}.data-00000-of-00001" for name in ("tight", "wide")]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_another_word_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        RunConfig(save_checkpoints_asynchronously="maybe")


def test_what_a_large_variable_began_with_is_let_go(tmp_path: Path) -> None:
    """It would be in memory beside the variable from its first update on; who asks later gets what it holds now."""

    def model(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        values = {
            "of_tensor": tf.Variable(tf.zeros(LARGE), name="of_tensor"),
            "of_array": tf.Variable(np.ones(LARGE, np.float32), name="of_array"),
            "small": tf.Variable(tf.ones([2]), name="small"),
        }
        loss = tf.reduce_mean(features) + tf.add_n([tf.reduce_sum(value) for value in values.values()])
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        return EstimatorSpec(mode, loss, loss, optimizer.minimize(loss, tf.compat.v1.train.get_global_step()))

    estimator = Estimator(model, tmp_path, RunConfig(save_checkpoints_asynchronously=False))
    estimator.train(points(repeat=True), max_steps=2)
    store = estimator._models.for_training.store
    held = {name for name, spec in store.specs.items() if tf.is_tensor(spec.initial)}
    assert held == {"small", "global_step"}
    for name, begins in (("of_tensor", 0.0), ("of_array", 1.0)):
        assert estimator.get_variable_value(name)[3, 3] == begins - 1.0
        assert store.initial_value(name)[3, 3] == begins - 1.0
    assert store.initial_value("small").numpy().tolist() == [1.0, 1.0]
