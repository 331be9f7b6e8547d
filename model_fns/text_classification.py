"""A small Transformer that classifies texts."""

from __future__ import annotations

import keras
import tensorflow as tf

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
