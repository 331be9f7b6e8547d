"""A token that a vocabulary file has twice is named with its file and lines, whoever reads the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from runner import Estimator, EstimatorSpec, RunConfig
from runner.checkpoint.vocabulary import Vocabulary
from tests.support.messages import Messages

v1 = tf.compat.v1


def by_column(file: str, words: tf.Tensor) -> tf.Tensor:
    column = tf.feature_column.categorical_column_with_vocabulary_file("words", file)
    return v1.feature_column.input_layer({"words": words}, [tf.feature_column.indicator_column(column)])


def by_table(file: str, words: tf.Tensor) -> tf.Tensor:
    index = tf.lookup.TextFileIndex
    lines = tf.lookup.TextFileInitializer(file, tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER)
    return tf.lookup.StaticHashTable(lines, -1).lookup(words)


def by_layer(file: str, words: tf.Tensor) -> tf.Tensor:
    return keras.layers.StringLookup(vocabulary=file)(words)


@pytest.mark.parametrize("look_up", [by_column, by_table, by_layer])
def test_a_token_that_fills_a_table_twice_is_named_with_its_lines(
    look_up: Any, tmp_path: Path, messages: Messages
) -> None:
    file = tmp_path / "words.txt"
    file.write_text("a\nb\nc\nb\n")

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        loss = tf.reduce_mean(tf.cast(look_up(str(file), features["words"]), tf.float32))
        return EstimatorSpec(mode, loss=loss, train_op=v1.train.get_global_step().assign_add(1))

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors({"words": [["a"], ["b"]]})

    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        Estimator(model_fn, tmp_path / "run", RunConfig()).train(input_fn, max_steps=1)
    (note,) = (note for note in caught.value.__notes__ if "words.txt" in note)
    messages.same("note", note)


def test_a_token_that_begins_two_rows_is_named_with_its_lines(tmp_path: Path, messages: Messages) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.write_text("a\nb\n")
    twice.write_text("a\nb\na\n")
    with messages.raised(ValueError):
        Vocabulary(str(once), str(twice)).places("table", [2, 1], [3, 1])
