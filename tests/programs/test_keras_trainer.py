"""Compiled models of Keras 3, row by row: the numbers of `fit`, the same on several replicas, or refused by name."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, RunConfig, keras_model
from tests.support.keras_rows import CLASS_WEIGHTS, ROWS, TABLES, Row, batches, compiled, in_page, network, table
from tests.support.messages import Messages

BATCH, EPOCHS = 12, 3
ON_THREE = [row for rows in TABLES.values() for row in rows if row.replicas == 3][::2]
"""Not all optimizers once more: how gradients are added up is the same for each. Of the others every second row, since
all of them are kept on two replicas."""


def weighted(features: Any, labels: Any) -> tuple[Any, Any, Any]:
    return features, labels, tf.gather(list(CLASS_WEIGHTS.values()), labels)


def trained(row: Row, num_replicas: int, folder: Path) -> tuple[dict[str, Any], Any]:
    """The metrics and the predictions of a run."""
    strategy = None
    if num_replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(num_replicas)])
    config = RunConfig(str(folder), train_distribute=strategy, tf_random_seed=1)
    trainer = Estimator(lambda features, labels, mode: row.build(), config=config)

    def train_input() -> tf.data.Dataset:
        found = batches(row, BATCH // num_replicas, EPOCHS)
        return found.map(weighted) if "class_weight" in row.fit else found

    trainer.train(train_input)
    found = trainer.evaluate(lambda: batches(row, BATCH))
    predictions = list(trainer.predict(lambda: batches(row, BATCH).map(lambda features, *_: features)))
    return found, tf.nest.map_structure(lambda *each: np.stack(each), *predictions)


def fitted(row: Row) -> tuple[dict[str, Any], Any]:
    """The metrics and the predictions after Keras's `fit`."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = row.build()
    model.fit(batches(row, BATCH), epochs=EPOCHS, shuffle=False, verbose=0, **row.fit)
    return model.evaluate(batches(row, BATCH), verbose=0, return_dict=True), model.predict(row.data[0], verbose=0)


def check_equal(one: tuple[dict[str, Any], Any], other: tuple[dict[str, Any], Any], bound: float) -> None:
    for name, value in one[0].items():
        np.testing.assert_allclose(other[0][name], value, rtol=bound, atol=bound, err_msg=name)
    for mine, theirs in zip(tf.nest.flatten(one[1]), tf.nest.flatten(other[1]), strict=True):
        np.testing.assert_allclose(np.reshape(mine, theirs.shape), theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("row", [row for row in ROWS if row.replicas], ids=lambda row: row.id)
def test_what_fit_promises_is_kept(row: Row, tmp_path: Path, messages: Messages) -> None:
    alone = trained(row, 1, tmp_path / "1")
    check_equal(fitted(row), alone, 1e-6)
    if row.replicas > 1:
        check_equal(alone, trained(row, 2, tmp_path / "2"), row.bound)
    else:
        with messages.raised(ValueError):
            trained(row, 2, tmp_path / "2")


@pytest.mark.slow
@pytest.mark.processes
def test_it_is_kept_on_three_replicas() -> None:
    """In a process of its own: this one has two devices."""
    told = subprocess.run([sys.executable, "-m", "tests.programs.test_keras_trainer"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.split() == [str(len(ON_THREE))]


@pytest.mark.parametrize("row", [row for row in ROWS if not row.replicas], ids=lambda row: row.id)
def test_what_is_not_kept_is_refused_by_name(row: Row, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        trained(row, 1, tmp_path)


@pytest.mark.parametrize("setting", [{"run_eagerly": True}, {"steps_per_execution": 4}], ids=str)
def test_what_has_no_effect_is_said(
    setting: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    keras_model._say_once.cache_clear()
    row = Row("", "", lambda: compiled(network(), **setting))
    trained(row, 2, tmp_path)
    messages.logged(caplog, "has no effect here")


def test_the_page_has_the_table() -> None:
    assert in_page() == table(), "python -m tests.support.keras_rows"


def check_three_replicas() -> None:
    """Compare all rows with one replica, and print their number."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    checked = 0
    for row in ON_THREE:
        with tempfile.TemporaryDirectory() as folder:
            one, three = (trained(row, number, Path(folder, str(number))) for number in (1, 3))
        check_equal(one, three, row.bound)
        checked += 1
    print(checked)


if __name__ == "__main__":
    check_three_replicas()
