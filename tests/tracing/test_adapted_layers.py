"""`adapt` inside model_fn: learnt once, kept in the checkpoint, the same in each mode, process and worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from runner import Estimator, EstimatorSpec, RunConfig, ServingInputReceiver
from tests.support.adapted_models import COLUMNS, INTEGERS, LABELS, NUMBERS, TEXTS, WORDS, batches, model_fn
from tests.support.messages import Messages
from tests.support.models import strategies

STRATEGIES = strategies()
OTHER_WORDS = np.array(["emu", "emu", "ant", "fox", "gnu"])  # as many words, so no shape tells them apart


def estimator(folder: Path, strategy: str = "default", **params: Any) -> Estimator:
    config = RunConfig(str(folder), train_distribute=STRATEGIES[strategy], tf_random_seed=1)
    return Estimator(model_fn, params=params, config=config)


def fitted(epochs: int) -> np.ndarray:
    """The predictions of a Keras model that was trained on what the layers make of the columns outside of a model."""
    made = [
        (layers.StringLookup(output_mode="one_hot"), WORDS),
        (layers.IntegerLookup(output_mode="one_hot"), INTEGERS),
        (layers.TextVectorization(output_mode="multi_hot"), TEXTS),
        (layers.Discretization(num_bins=4, output_mode="one_hot"), NUMBERS),
        (layers.Normalization(axis=None), NUMBERS),
    ]
    columns = []
    for layer, column in made:
        layer.adapt(column)
        columns.append(np.reshape(layer(column), [len(column), -1]).astype(np.float32))
    model = keras.Sequential([layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    inner = np.concatenate(columns, 1)
    model.fit(inner, LABELS, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model.predict(inner, verbose=0)


@pytest.mark.parametrize("in_init_scope", [False, True])
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_what_layers_learn_is_what_keras_learns(strategy: str, in_init_scope: bool, tmp_path: Path) -> None:
    trainer = estimator(tmp_path, strategy, in_init_scope=in_init_scope)
    trainer.train(batches(4 if strategy == "default" else 2, epochs=3))
    predicted = [one["y"] for one in trainer.predict(batches(4))]
    np.testing.assert_allclose(predicted, fitted(3), rtol=1e-5, atol=1e-6)


def test_what_was_learnt_is_that_of_the_checkpoint_whatever_the_data_are_later(tmp_path: Path) -> None:
    first = estimator(tmp_path / "run").train(batches(4))
    loss = first.evaluate(batches(4))["loss"]
    predicted = [one["y"] for one in first.predict(batches(4))]
    later = estimator(tmp_path / "run", words=OTHER_WORDS)  # as another process that finds other data
    assert later.evaluate(batches(4))["loss"] == loss
    np.testing.assert_array_equal([one["y"] for one in later.predict(batches(4))], predicted)

    def receiver() -> ServingInputReceiver:
        features = {
            name: tf.compat.v1.placeholder(tf.string if column.dtype.kind == "U" else column.dtype, [None], name)
            for name, column in COLUMNS.items()
        }
        return ServingInputReceiver(features, features)

    served = tf.saved_model.load(os.fsdecode(later.export_saved_model(tmp_path / "served", receiver)))
    answered = served.signatures["serving_default"](**{name: tf.constant(one) for name, one in COLUMNS.items()})
    np.testing.assert_allclose(answered["y"], predicted, rtol=1e-6)
    later.train(batches(4))
    whole = estimator(tmp_path / "whole").train(batches(4, epochs=2))
    for name in whole.get_variable_names():
        np.testing.assert_array_equal(later.get_variable_value(name), whole.get_variable_value(name), err_msg=name)


def test_a_checkpoint_of_another_run_brings_its_own_words(tmp_path: Path) -> None:
    one = estimator(tmp_path / "one").train(batches(4))
    other = estimator(tmp_path / "other", words=OTHER_WORDS).train(batches(4))
    losses = {trainer: trainer.evaluate(batches(4))["loss"] for trainer in (one, other)}
    assert losses[one] != losses[other]
    third = estimator(tmp_path / "one")
    for trainer in (one, other, one):  # one Estimator evaluates the checkpoints of both runs
        path = trainer.latest_checkpoint()
        assert third.evaluate(batches(4), checkpoint_path=path)["loss"] == losses[trainer]


# --- what cannot be learnt ------------------------------------------------------------------------------------------


def adapting(adapt: Callable[[Any], None]) -> Any:
    def model(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        adapt(features)
        weight = tf.Variable(1.0)
        return EstimatorSpec(mode, loss=weight * tf.ones_like(labels)[:, 0], optimizer=keras.optimizers.SGD(0.1))

    return model


def of_the_step(features: Any) -> None:
    layers.StringLookup().adapt(features["word"])


def of_a_dataset_of_the_step(features: Any) -> None:
    layers.Discretization(num_bins=3).adapt(tf.data.Dataset.from_tensor_slices(NUMBERS).batch(7))


def with_frequencies(features: Any) -> None:
    layers.TextVectorization(output_mode="tf_idf").adapt(TEXTS)


def twice_a_name(features: Any) -> None:
    layers.StringLookup(name="words").adapt(WORDS)
    layers.StringLookup(name="words").adapt(OTHER_WORDS)


@pytest.mark.parametrize("adapt", [of_the_step, of_a_dataset_of_the_step, with_frequencies, twice_a_name])
def test_what_cannot_be_learnt_says_what_to_give(
    adapt: Callable[[Any], None], tmp_path: Path, messages: Messages
) -> None:
    trainer = Estimator(adapting(adapt), tmp_path)
    with messages.raised(ValueError):
        trainer.train(batches(4))


def test_a_dataset_made_outside_of_model_fn_is_learnt_from(tmp_path: Path) -> None:
    words = tf.data.Dataset.from_tensor_slices(WORDS).batch(5)
    found = []

    def adapt(features: Any) -> None:
        layer = layers.StringLookup()
        layer.adapt(words)
        found.append(layer.vocabulary_size())

    Estimator(adapting(adapt), tmp_path).train(batches(4))
    assert set(found) == {5}
