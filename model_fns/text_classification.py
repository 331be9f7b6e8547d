"""A small Transformer that classifies texts, and a hook that draws the confusion matrix of each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import runner
from runner import EstimatorSpec, ModeKeys, Params


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Classify texts.

    Args:
      features: `text` string `[batch]`. The model splits it into words, so that a served model accepts plain text.
      labels: int64 `[batch]`, indices into params.packages.
      mode: one of ModeKeys.
      params: packages (the names of the classes), vocabulary, length, width, heads, blocks, dropout, word_dropout,
        learning_rate.
    """
    tokens = _tokens(features["text"], params.vocabulary, params.length)
    if mode == ModeKeys.TRAIN:  # drop random words, so that no text looks the same twice
        tokens *= tf.cast(tf.random.uniform(tf.shape(tokens)) > params.word_dropout, tokens.dtype)
    logits = _transformer(tokens, params, training=mode == ModeKeys.TRAIN)
    classes = tf.argmax(logits, axis=1)
    packages = list(params.packages)
    predictions = {"package": tf.gather(packages, classes), "probabilities": tf.nn.softmax(logits)}
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=predictions)

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # per example
    return EstimatorSpec(
        mode,
        predictions=predictions,
        loss=losses,
        optimizer=keras.optimizers.Adam(params.learning_rate) if mode == ModeKeys.TRAIN else None,
        eval_metric_ops={"accuracy": tf.cast(tf.equal(classes, labels), tf.float32)},
        evaluation_hooks=[ConfusionMatrix(labels, classes, packages)],
    )


def _tokens(texts: tf.Tensor, vocabulary: int, length: int) -> tf.Tensor:
    """Return the first `length` words of each text as numbers, int64 `[batch, length]`; 0 is padding.

    A word's number is its hash, so that no vocabulary is needed; some words share a number.

    Args:
      texts: string `[batch]`.
      vocabulary: how many numbers there are.
      length: words per text.
    """
    words = tf.strings.split(tf.strings.regex_replace(tf.strings.lower(texts), "[^a-z]+", " "))
    return (tf.strings.to_hash_bucket_fast(words, vocabulary - 1) + 1).to_tensor(shape=[None, length])


def _transformer(tokens: tf.Tensor, params: Params, training: bool) -> tf.Tensor:
    """Return logits `[batch, classes]` for int64 `[batch, length]`. Each block normalizes its input first, as in
    GPT-2.
    """
    is_word = tf.not_equal(tokens, 0)
    x = keras.layers.Embedding(params.vocabulary, params.width, name="words")(tokens)
    x += keras.layers.Embedding(params.length, params.width, name="places")(tf.range(params.length))
    for i in range(params.blocks):
        y = keras.layers.LayerNormalization(name=f"norm_attention{i}")(x)
        attention = keras.layers.MultiHeadAttention(params.heads, params.width // params.heads, name=f"attention{i}")
        y = attention(y, y, attention_mask=is_word[:, None, :], training=training)
        x += keras.layers.Dropout(params.dropout)(y, training=training)
        y = keras.layers.LayerNormalization(name=f"norm_dense{i}")(x)
        y = keras.layers.Dense(4 * params.width, activation="gelu", name=f"wide{i}")(y)
        y = keras.layers.Dense(params.width, name=f"narrow{i}")(y)
        x += keras.layers.Dropout(params.dropout)(y, training=training)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.GlobalAveragePooling1D()(x, mask=is_word)
    return keras.layers.Dense(len(params.packages), name="logits")(x)


class ConfusionMatrix(tf.compat.v1.train.SessionRunHook):
    """Draws the confusion matrix of each evaluation, and saves the figure in the run's folder and MLflow.

    With several replicas it shows the examples of the first one.

    Args:
      labels, classes: int64 `[batch]`, the true and the predicted class.
      names: of the classes.
      what: a class is, for the axis.
    """

    def __init__(self, labels: tf.Tensor, classes: tf.Tensor, names: Sequence[str], what: str = "package") -> None:
        self._tensors, self._names, self._what = (labels, classes), names, what
        self._counts = np.zeros([len(names), len(names)], int)

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._tensors)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        np.add.at(self._counts, tuple(run_values.results), 1)

    def end(self, session: Any) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 5.4), layout="constrained")
        axes = figure.subplots()
        shares = self._counts / np.maximum(self._counts.sum(axis=1, keepdims=True), 1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for (row, column), count in np.ndenumerate(self._counts):
            axes.text(column, row, count, ha="center", va="center", color="white" if shares[row, column] > 0.5 else "k")
        places = range(len(self._names))
        axes.set(xticks=places, yticks=places, yticklabels=self._names, xlabel="model says", ylabel=self._what)
        axes.set_xticks(places, self._names, rotation=40, ha="right")
        runner.log_figure(figure, "confusion_matrix")
        self._counts[:] = 0
