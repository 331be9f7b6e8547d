"""A checkpoint that is damaged or removed while it is read: the error, and what the process does afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Every, Hook, RunConfig
from runner.checkpoint.reader import Reader
from runner.task.error_report import report_error
from runner.tf_private import tensor_bundle
from runner.tracing.partitioned_variable import UnreadableVariableError
from runner.tracking.journal import NullJournal
from tests.support.line import points
from tests.support.messages import Messages

v1 = tf.compat.v1
REASON = r"(?<=DataLossError: ).*?(?=\. It was)"
"""The words of TensorFlow in a message."""


def model(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    """Two variables that are read in different parts."""
    first = v1.get_variable("a_first", [40], initializer=v1.zeros_initializer())
    last = v1.get_variable("z_last", [40], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean(tf.square(features * (first[0] + last[0]) - labels)) + tf.reduce_sum(first * 1e-3)
    train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, loss, loss, train_op)


@pytest.fixture
def estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    monkeypatch.setattr(tensor_bundle, "PART_BYTES", 200)
    config = RunConfig(tf_random_seed=1, save_checkpoints_steps=2, save_checkpoints_asynchronously=False)
    return Estimator(model, tmp_path / "model", config).train(points(repeat=True), max_steps=4)


def damage(path: str, name: str) -> None:
    """Change a byte of the value of a variable in a checkpoint."""
    value = np.asarray(Reader(path).get(name)).tobytes()
    file = Path(f"{path}.data-00000-of-00001")
    data = bytearray(file.read_bytes())
    data[data.index(value)] ^= 1
    file.write_bytes(bytes(data))


def test_the_error_names_the_checkpoint_and_the_variable_and_the_next_call_restores_all(
    estimator: Estimator, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    older = str(tmp_path / "model" / "model.ckpt-2")
    damage(older, "z_last")
    with messages.raised(UnreadableVariableError, hide=REASON) as raised:
        estimator.evaluate(points(2), checkpoint_path=older)
    assert "Checksum" in str(raised.value) and "a_first" not in str(raised.value)
    report_error(raised.value, NullJournal(), {}, set())
    messages.same("stderr", capsys.readouterr().err, hide=REASON)
    estimator.train(points(repeat=True), max_steps=6)
    straight = Estimator(model, tmp_path / "straight", RunConfig(tf_random_seed=1))
    straight.train(points(repeat=True), max_steps=6)
    for name in ("a_first", "z_last"):
        found, expected = (one.get_variable_value(name) for one in (estimator, straight))
        np.testing.assert_array_equal(found, expected)


def test_a_lack_of_memory_is_no_damage(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    """A checkpoint that does not fit is not passed over for an older one."""

    def read(*_: Any) -> Any:
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    again = Estimator(model, estimator.model_dir, estimator.config)
    monkeypatch.setattr(tensor_bundle, "read_entries", read)
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
        again.latest_checkpoint()
    messages.same("note", raised.value.__notes__[0])
    with pytest.raises(tf.errors.ResourceExhaustedError):
        estimator.evaluate(points(2), checkpoint_path=f"{estimator.model_dir}/model.ckpt-2")


class EvaluatesAnother(Hook):
    """Evaluates a checkpoint after each step of training, and goes on whatever comes of it."""

    every = Every(steps=1)

    def __init__(self, estimator: Estimator, path: str) -> None:
        self._estimator, self._path = estimator, path
        self.errors: list[Exception] = []

    def after_step(self, run: Any, result: Any) -> None:
        try:
            self._estimator.evaluate(points(2), checkpoint_path=self._path)
        except UnreadableVariableError as error:
            self.errors.append(error)


def test_training_goes_on_with_its_own_values_after_an_evaluation_that_could_not_read_its_checkpoint(
    estimator: Estimator, tmp_path: Path
) -> None:
    damage(str(tmp_path / "model" / "model.ckpt-2"), "z_last")
    hook = EvaluatesAnother(estimator, str(tmp_path / "model" / "model.ckpt-2"))
    estimator.train(points(repeat=True), max_steps=9, hooks=[hook])
    assert len(hook.errors) == 5
    straight = Estimator(model, tmp_path / "straight", RunConfig(tf_random_seed=1))
    straight.train(points(repeat=True), max_steps=9)
    for name in ("a_first", "z_last"):
        found, expected = (one.get_variable_value(name) for one in (estimator, straight))
        np.testing.assert_array_equal(found, expected)
