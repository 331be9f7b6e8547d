"""Any strategy reads any checkpoint: those of every other one, and the name-based ones of TF1 and tf.estimator."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, Input, ModeKeys, RunConfig
from runner.checkpoint.reader import Reader
from runner.run_config import WarmStart
from tests.support.line import line
from tests.support.models import STYLES, data, eval_input, strategies, train_input
from tests.support.tiers import slow_but

v1 = tf.compat.v1

STRATEGIES = strategies()


def estimator(model_fn: Any, model_dir: Path, strategy: str) -> Estimator:
    config = RunConfig(train_distribute=STRATEGIES[strategy], tensorboard=False, save_summary_steps=None)
    return Estimator(model_fn, model_dir, config)


def values_of(path: str | None) -> dict[str, np.ndarray]:
    reader = Reader(str(path))
    return reader.get_many(reader.names())


def inputs() -> Input:
    """Its last batch is uneven."""
    return train_input(8, num_examples=20, dtype="float64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restore")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str, str, int], Estimator]:
    """Return a function of (style, strategy, steps) that trains: once, for all strategies that read it."""

    @functools.cache
    def train(style: str, strategy: str, steps: int) -> Estimator:
        return estimator(STYLES[style], folder / f"{style}_{strategy}_{steps}", strategy).train(
            inputs(), max_steps=steps
        )

    return train


PAIRS = [(writes, reads) for writes in STRATEGIES for reads in STRATEGIES if writes != reads]


@pytest.mark.parametrize(
    ("style", "writes", "reads"),
    slow_but(
        [("classic", *pair) for pair in PAIRS]
        + [("native", *pair) for pair in PAIRS if pair[0] in ("default", "mirrored") and pair[1] != "one_device"],
        ("classic", "central_storage", "mirrored"), ("native", "mirrored", "default"),
    ),
)  # fmt: skip
def test_a_run_goes_on_under_any_other_strategy(
    tmp_path: Path, trained: Callable[[str, str, int], Estimator], writes: str, reads: str, style: str
) -> None:
    """3 + 3 steps under one strategy and then another come to what 6 under the first do."""
    straight = trained(style, writes, 6)
    shutil.copytree(trained(style, writes, 3).model_dir, tmp_path / "run")
    resumed = estimator(STYLES[style], tmp_path / "run", reads).train(inputs(), max_steps=6)
    expected, values = values_of(straight.latest_checkpoint()), values_of(resumed.latest_checkpoint())
    assert sorted(values) == sorted(expected) and values["global_step"] == 6
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-10, err_msg=name)
    evaluated = resumed.evaluate(eval_input(5, dtype="float64"))
    again = estimator(STYLES[style], tmp_path / "run", writes).evaluate(eval_input(5, dtype="float64"))
    assert evaluated["loss"] == pytest.approx(again["loss"], abs=1e-10)


# --- what TF1 and tf.estimator left -------------------------------------------------------------------------------


def tf1_model(features: Any, labels: Any, mode: str = ModeKeys.TRAIN) -> EstimatorSpec:
    """What a user of tf.estimator wrote; called inside a plain v1 graph, too."""
    with v1.variable_scope("dense", dtype=tf.float64):
        kernel = v1.get_variable("kernel", [4, 1], initializer=v1.ones_initializer())
        bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
    predictions = features @ kernel + bias
    loss = tf.reduce_mean(tf.square(predictions - labels))
    train_op = v1.train.AdamOptimizer(0.05).minimize(loss, v1.train.get_or_create_global_step())
    return EstimatorSpec(mode, predictions, loss, train_op)


def in_order() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data(50, "float64")).batch(10).repeat()


@pytest.fixture(scope="module")
def of_tf1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `old`, checkpoints of the steps 4 and 7, and `straight`, one of step 12."""
    folder = tmp_path_factory.mktemp("of_tf1")
    train_in_tf1(folder / "straight", 12)
    train_in_tf1(folder / "old", 4, 7)
    return folder


def train_in_tf1(model_dir: Path, *saved_at: int) -> None:
    """A v1 graph, a session, a Saver: as tf.estimator trained."""
    with tf.Graph().as_default(), v1.Session() as session:
        spec = tf1_model(*v1.data.make_one_shot_iterator(in_order()).get_next())
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver()
        for step in range(1, max(saved_at) + 1):
            session.run(spec.train_op)
            if step in saved_at:
                saver.save(session, str(model_dir / "model.ckpt"), global_step=step)


def skipping(steps: int) -> Input:
    """TF1 kept no position of the input: one that goes on where it stopped."""
    return Input(lambda: in_order().skip(steps), batch_size=10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_of_tf1_is_continued_with_its_step_and_slots(of_tf1: Path, tmp_path: Path, strategy: str) -> None:
    expected = values_of(f"{of_tf1}/straight/model.ckpt-12")
    shutil.copytree(of_tf1 / "old", tmp_path / "old")
    assert not list((tmp_path / "old").rglob("*.manifest.json"))
    resumed = estimator(tf1_model, tmp_path / "old", strategy).train(skipping(7), max_steps=12)
    values = values_of(resumed.latest_checkpoint())
    assert sorted(values) == sorted(expected) == [
        "beta1_power", "beta2_power", "dense/bias", "dense/bias/Adam", "dense/bias/Adam_1",
        "dense/kernel", "dense/kernel/Adam", "dense/kernel/Adam_1", "global_step",
    ]  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-10, err_msg=name)
    assert values["global_step"] == 12


def test_a_model_of_tf1_is_evaluated_and_predicts(of_tf1: Path, tmp_path: Path) -> None:
    values = values_of(f"{of_tf1}/old/model.ckpt-7")
    shutil.copytree(of_tf1 / "old", tmp_path, dirs_exist_ok=True)
    reader = estimator(tf1_model, tmp_path, "default")
    features, labels = data(50, "float64")
    predicted = features @ values["dense/kernel"] + values["dense/bias"]
    result = reader.evaluate(lambda: tf.data.Dataset.from_tensor_slices((features, labels)).batch(10))
    assert result["global_step"] == 7
    assert result["loss"] == pytest.approx(np.mean((predicted - labels) ** 2), abs=1e-10)
    assert reader.get_variable_value("beta1_power") == pytest.approx(0.9**8)


@pytest.mark.parametrize("folder", ["run[1]", "run\\1", "run*?"])
def test_a_folder_with_the_signs_of_a_pattern_is_read_as_it_is_called(folder: str, tmp_path: Path) -> None:
    """TensorFlow looks for a checkpoint to read by a pattern, and a run ended with "no matching files"."""
    (tmp_path / "run1").mkdir()  # what the first would match
    settings = RunConfig(model_dir=str(tmp_path / folder), save_summary_steps=None)
    first = Estimator(line, config=settings)
    first.train(batches, max_steps=2)
    second = Estimator(line, config=settings)
    second.train(batches, max_steps=4)
    assert second.evaluate(batches, steps=1)["global_step"] == 4
    assert second.get_variable_value("weight") != 0
    begun = RunConfig(model_dir=str(tmp_path / "begun"), warm_start=WarmStart(str(tmp_path / folder)))
    new = Estimator(line, config=begun, params={"learning_rate": 0.0})
    new.train(batches, max_steps=1)
    assert new.get_variable_value("weight") == second.get_variable_value("weight")
    assert not list((tmp_path / "run1").iterdir())


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([1.0, 2.0], [2.0, 4.0])).repeat()
