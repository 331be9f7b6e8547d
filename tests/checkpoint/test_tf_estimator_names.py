"""A model_dir of tf.estimator in which a variable has a number, as an operation of the input had its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.checkpoint.snapshot import Snapshot
from runner.checkpoint.writer import CheckpointWriter
from runner.export.receivers import receiver_fn_of_spec
from tests.support.messages import Messages

v1 = tf.compat.v1
OTHERS = r"(?<=a model with: ).*?(?=\. )"
"""The variables of a checkpoint, in no order."""

# What 2.15.1 leaves of `model_fn` after dataset.repeat(3), whose number of times is an operation "count".
OF_2_15: dict[str, Any] = {
    "count_1": 3.0, "count_1/Adam": 0.5, "count_1/Adam_1": 0.25, "other": 2.0, "other/Adam": 0.0, "other/Adam_1": 0.0,
    "beta1_power": 0.9, "beta2_power": 0.999,
}  # fmt: skip


def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    count = v1.Variable(0.0, name="count")
    other = v1.get_variable("other", [], initializer=v1.zeros_initializer())
    loss = 0.0 * tf.reduce_sum(features * count * other)
    train_op = v1.train.AdamOptimizer(0.0).minimize(loss, v1.train.get_global_step())
    return EstimatorSpec(mode, predictions=features * count, loss=loss, train_op=train_op)


def old(folder: Path, tensors: dict[str, Any], **extra: Any) -> Path:
    values = {name: np.float32(value) for name, value in tensors.items()}
    CheckpointWriter(folder, 5).save(Snapshot(7, {**values, "global_step": np.int64(7)}, extra))
    return folder


def ones() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(np.ones([1], np.float32)).repeat(3)


def test_it_is_continued_exported_and_saved_under_the_name_of_the_variable(tmp_path: Path) -> None:
    estimator = Estimator(model_fn, old(tmp_path / "old", OF_2_15), RunConfig(tensorboard=False))
    receiver = receiver_fn_of_spec(tf.TensorSpec([None], tf.float32))
    path = estimator.export_saved_model(tmp_path / "export", receiver).decode()
    output = tf.saved_model.load(path).signatures["serving_default"](tf.constant([1.0]))
    assert float(next(iter(output.values()))[0]) == 3.0
    estimator.train(ones, steps=1)
    assert estimator.get_variable_value("global_step") == 8
    assert estimator.get_variable_value("count") == 3.0
    assert estimator.get_variable_value("count/Adam") == pytest.approx(0.45), "the moment of 2.15, once decayed"
    assert not [name for name in estimator.get_variable_names() if name.startswith("count_1")]


@pytest.mark.parametrize("there", [{"count_2": 3.0}, {"count_1": [3.0, 3.0]}], ids=str)
def test_another_number_or_shape_is_another_variable(there: dict[str, Any], tmp_path: Path, messages: Messages) -> None:
    folder = old(tmp_path, {**there, "other": 2.0})
    with messages.raised(ValueError, hide=OTHERS):
        Estimator(model_fn, folder, RunConfig(tensorboard=False)).train(ones, steps=1)


def test_what_a_run_of_ours_wrote_is_another_variable(tmp_path: Path, messages: Messages) -> None:
    folder = old(tmp_path, OF_2_15, rollbacks=0)
    with messages.raised(ValueError, hide=OTHERS):
        Estimator(model_fn, folder, RunConfig(tensorboard=False)).train(ones, steps=1)
