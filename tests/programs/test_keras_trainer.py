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
from tests.support.keras_rows import (
    CLASS_WEIGHTS,
    MEETING,
    OPTIMIZER,
    OTHERS,
    ROWS,
    Row,
    batches,
    compiled,
    in_page,
    network,
    table,
)
from tests.support.messages import Messages

BATCH, EPOCHS = 12, 3
BY_VARIABLES = {row.id for row in (*OPTIMIZER, *OTHERS) if "ema" not in row.id}
"""Variables and predictions tell all that these do; an evaluation would say it once more."""


def weighted(features: Any, labels: Any) -> tuple[Any, Any, Any]:
    return features, labels, tf.gather(list(CLASS_WEIGHTS.values()), labels)


def train(row: Row, num_replicas: int, folder: Path) -> Estimator:
    strategy = None
    if num_replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(num_replicas)])
    config = RunConfig(str(folder), train_distribute=strategy, tf_random_seed=1)
    trainer = Estimator(lambda features, labels, mode: row.build(), config=config)

    def train_input() -> tf.data.Dataset:
        found = batches(row, BATCH // num_replicas, EPOCHS)
        return found.map(weighted) if "class_weight" in row.fit else found

    return trainer.train(train_input)


def evaluated(row: Row, trainer: Estimator) -> dict[str, Any]:
    return {} if row.id in BY_VARIABLES else trainer.evaluate(lambda: batches(row, BATCH))


def predicted(row: Row, trainer: Estimator) -> Any:
    predictions = trainer.predict(lambda: batches(row, BATCH).map(lambda features, *_: features))
    return tf.nest.map_structure(lambda *each: np.stack(each), *predictions)


def fitted(row: Row) -> tuple[dict[str, Any], Any]:
    """The metrics and the predictions after Keras's `fit`."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = row.build()
    model.fit(batches(row, BATCH), epochs=EPOCHS, shuffle=False, verbose=0, **row.fit)
    if row.id in BY_VARIABLES:
        return {}, model(row.data[0], training=False)  # traces nothing
    found = model.evaluate(batches(row, BATCH), verbose=0, return_dict=True)
    return found, model.predict(row.data[0], verbose=0)


def check_close(found: Any, expected: Any, bound: float, what: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=bound, atol=bound, err_msg=what)


def check_same(row: Row, one: Estimator, of_one: dict[str, Any], several: Estimator) -> None:
    """Compare the variables, those of the optimizer included, and the metrics; `of_one`: those of `one`."""
    names = one.get_variable_names()
    assert several.get_variable_names() == names
    for name in names:
        check_close(several.get_variable_value(name), one.get_variable_value(name), row.bound, name)
    metrics = evaluated(row, several)
    for name, value in of_one.items():
        check_close(metrics[name], value, row.bound, name)


@pytest.mark.parametrize("row", [row for row in ROWS if row.replicas], ids=lambda row: row.id)
def test_what_fit_promises_is_kept(row: Row, tmp_path: Path, messages: Messages) -> None:
    alone = train(row, 1, tmp_path / "1")
    metrics, predictions = fitted(row)
    found = evaluated(row, alone)
    for name, value in metrics.items():
        check_close(found[name], value, 1e-6, name)
    of_outputs = zip(tf.nest.flatten(predicted(row, alone)), tf.nest.flatten(predictions), strict=True)
    for number, (mine, theirs) in enumerate(of_outputs):
        check_close(np.reshape(mine, theirs.shape), theirs, 1e-6, f"output {number}")
    if row.replicas > 1:
        check_same(row, alone, found, train(row, 2, tmp_path / "2"))
    else:
        with messages.raised(ValueError):
            train(row, 2, tmp_path / "2")


@pytest.mark.slow
@pytest.mark.processes
def test_it_is_kept_on_three_replicas() -> None:
    """In a process of its own: this one has two devices."""
    told = subprocess.run([sys.executable, "-m", "tests.programs.test_keras_trainer"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.split() == [str(len(MEETING))]


@pytest.mark.parametrize("row", [row for row in ROWS if not row.replicas], ids=lambda row: row.id)
def test_what_is_not_kept_is_refused_by_name(row: Row, tmp_path: Path, messages: Messages) -> None:
    with messages.raised(ValueError):
        evaluated(row, train(row, 1, tmp_path))


@pytest.mark.parametrize("setting", [{"run_eagerly": True}, {"steps_per_execution": 4}], ids=str)
def test_what_has_no_effect_is_said(
    setting: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    keras_model._say_once.cache_clear()
    row = Row("", "", lambda: compiled(network(), **setting))
    train(row, 2, tmp_path)
    messages.logged(caplog, "has no effect here")


def test_the_page_has_the_table() -> None:
    assert in_page() == table(), "python -m tests.support.keras_rows"


def check_three_replicas() -> None:
    """Compare all of MEETING with one replica, and print their number."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    checked = 0
    for row in MEETING:
        with tempfile.TemporaryDirectory() as folder:
            one, three = (train(row, number, Path(folder, str(number))) for number in (1, 3))
            check_same(row, one, evaluated(row, one), three)
        checked += 1
    print(checked)


if __name__ == "__main__":
    check_three_replicas()
