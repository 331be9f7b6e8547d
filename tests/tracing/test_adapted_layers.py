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
from runner.checkpoint.vocabulary import Vocabulary
from runner.run_config import WarmStart
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


# --- a warm start ---------------------------------------------------------------------------------------------------


def with_vectors(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Params: words: what the layer learns from; bins: it learns bounds instead; name: its name."""
    name = params.get("name", "word")
    if "bins" in params:
        layer = layers.Discretization(num_bins=3, name=name)
        layer.adapt(params["bins"])
        rows = layer(features["number"])
    else:
        layer = layers.StringLookup(name=name)
        layer.adapt(params["words"])
        rows = layer(features["word"])
    predictions = layers.Dense(1, name="out")(layers.Embedding(3, 8, name="vectors")(rows))
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"y": predictions})
    loss = tf.square(predictions - labels)[:, 0]
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))


def begun_with(source: Estimator, folder: Path, *, eager: bool = False, warm: Any = None, **params: Any) -> Estimator:
    """An Estimator whose model begins with the values of `source`."""
    warm_start = WarmStart(str(source.model_dir), **(warm or {}))
    config = RunConfig(str(folder), warm_start=warm_start, tf_random_seed=2, eager=eager)
    return Estimator(with_vectors, params=params, config=config)


def source_in(folder: Path, **params: Any) -> Estimator:
    """An Estimator that has trained for one step."""
    config = RunConfig(str(folder), tf_random_seed=1)
    return Estimator(with_vectors, params=params, config=config).train(batches(4), max_steps=1)


ANT_BEE = ["ant", "ant", "bee"]
BEE_ANT = ["bee", "bee", "ant"]


@pytest.mark.parametrize(
    ("there", "here", "eager"),
    [
        ({"words": ANT_BEE}, {"words": BEE_ANT}, False),
        ({"words": ANT_BEE}, {"words": BEE_ANT}, True),
        ({"words": ANT_BEE}, {"words": ["ant"]}, False),
        ({"bins": [0.0, 1.0, 2.0]}, {"bins": [3.0, 4.0, 5.0]}, False),
    ],
    ids=["words", "eager", "fewer", "bins"],
)
def test_a_warm_start_with_rows_of_other_words_is_refused(
    there: Any, here: Any, eager: bool, tmp_path: Path, messages: Messages
) -> None:
    source = source_in(tmp_path / "old", **there)
    with messages.raised(ValueError):
        begun_with(source, tmp_path / "new", eager=eager, **here).train(batches(4), max_steps=1)


def test_an_export_of_a_warm_start_with_rows_of_other_words_is_refused(tmp_path: Path, messages: Messages) -> None:
    source = source_in(tmp_path / "old", words=ANT_BEE)
    new = begun_with(source, tmp_path / "new", words=BEE_ANT)

    def receiver() -> ServingInputReceiver:
        features = {"word": tf.compat.v1.placeholder(tf.string, [None])}
        return ServingInputReceiver(features, features)

    with messages.raised(ValueError):
        new.export_saved_model(tmp_path / "served", receiver)


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({}, {"words": ANT_BEE}),
        ({"include": ["out/bias"]}, {"words": BEE_ANT}),  # smaller than the words are many
        ({}, {"words": BEE_ANT, "name": "other"}),
    ],
    ids=["same words", "no rows", "another name"],
)
def test_a_warm_start_takes_what_cannot_be_of_other_words(settings: Any, params: Any, tmp_path: Path) -> None:
    source = source_in(tmp_path / "old", words=ANT_BEE)
    new = begun_with(source, tmp_path / "new", warm=settings, **params).train(batches(4), max_steps=1)
    assert new.get_variable_value("global_step") == 1


def test_a_warm_start_with_vocabularies_gives_each_word_its_row(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("[UNK]\nant\nbee\n")
    (tmp_path / "new.txt").write_text("[UNK]\nbee\nant\n")
    source = source_in(tmp_path / "old", words=ANT_BEE)
    vocabulary = Vocabulary(str(tmp_path / "new.txt"), str(tmp_path / "old.txt"))
    settings = {"vocabularies": {"vectors/embeddings": vocabulary}}
    new = begun_with(source, tmp_path / "new", warm=settings, words=BEE_ANT)
    new.train(batches(4), max_steps=1)
    before = Estimator(with_vectors, params={"words": BEE_ANT}, config=RunConfig(str(tmp_path / "new")))
    path = str(tmp_path / "new" / "model.ckpt-0")
    predicted = [one["y"] for one in before.predict(batches(4), checkpoint_path=path)]
    np.testing.assert_allclose(predicted, [one["y"] for one in source.predict(batches(4))], rtol=1e-6)


# --- names that Keras gives -----------------------------------------------------------------------------------------


def of_two_scales(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Params: first: the modes that make the layer of large numbers; names: those of the layers, large and small."""
    # Layers of bins: the tables of words clash with those of other models of the process, by the names of operations.
    large_name, small_name = params.get("names", (None, None))
    if mode in params["first"]:
        large = layers.Discretization(num_bins=3, name=large_name)
        large.adapt(NUMBERS + 100)
    small = layers.Discretization(num_bins=3, output_mode="one_hot", name=small_name)
    small.adapt(NUMBERS)
    row = small(features["number"])
    predictions = layers.Dense(1, name="out")(row)
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"y": predictions, "row": row})
    loss = tf.square(predictions - labels)[:, 0]
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))


def of_scales(folder: Path, first: str, **params: Any) -> Estimator:
    return Estimator(of_two_scales, folder, params={"first": first.split(), **params})


def served_number() -> ServingInputReceiver:
    features = {"number": tf.compat.v1.placeholder(tf.float32, [None])}
    return ServingInputReceiver(features, features)


def check_bins(trainer: Estimator) -> None:
    """Check that the predictions have numbers in each bin: all are in the first one by the bounds of large numbers."""
    rows = np.array([one["row"] for one in trainer.predict(batches(4))])
    assert rows.sum(0).all()


def test_a_layer_that_gets_the_name_of_another_in_prediction_is_refused(tmp_path: Path, messages: Messages) -> None:
    trainer = of_scales(tmp_path / "run", "train eval").train(batches(4))
    trainer.evaluate(batches(4))
    with messages.raised(ValueError):
        next(iter(trainer.predict(batches(4))))
    with messages.raised(ValueError):
        trainer.export_saved_model(tmp_path / "served", served_number)


def test_the_names_under_which_layers_learnt_tell_them_apart(tmp_path: Path) -> None:
    of_scales(tmp_path / "run", "train eval").train(batches(4))
    named = of_scales(tmp_path / "run", "train eval", names=("discretization", "discretization_1"))
    check_bins(named)
    named.export_saved_model(tmp_path / "served", served_number)


def test_layers_with_names_may_be_left_out(tmp_path: Path) -> None:
    check_bins(of_scales(tmp_path, "train eval", names=("large", "small")).train(batches(4)))


def test_all_layers_without_names_may_be_adapted_in_each_mode(tmp_path: Path) -> None:
    trainer = of_scales(tmp_path, "train eval infer").train(batches(4))
    trainer.evaluate(batches(4))
    check_bins(trainer)


def test_a_layer_that_only_evaluation_makes_is_refused_and_training_goes_on(tmp_path: Path, messages: Messages) -> None:
    trainer = of_scales(tmp_path, "eval").train(batches(4), max_steps=3)
    with messages.raised(ValueError):
        trainer.evaluate(batches(4))
    trainer.train(batches(4), max_steps=5)
    resumed = of_scales(tmp_path, "eval").train(batches(4), max_steps=7)
    assert resumed.get_variable_value("global_step") == 7


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


def test_a_name_given_twice_is_refused_in_eager_steps(tmp_path: Path, messages: Messages) -> None:
    trainer = Estimator(adapting(twice_a_name), config=RunConfig(str(tmp_path), eager=True))
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
