"""Columns of sequences, read by tf.keras's SequenceFeatures, and layers of tf.keras.

On TensorFlow 2.21 `tf.keras` is Keras 2 only with TF_USE_LEGACY_KERAS=1.
"""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from tests.golden import data

WORDS = ["red", "green", "blue"]


def ragged(values, lengths):
    """The first so many of each row, as a sparse tensor."""
    indices = [[row, column] for row, length in enumerate(lengths) for column in range(length)]
    return tf.SparseTensor(indices, [values[row][column] for row, column in indices], [len(lengths), 4])


def input_fn(mode):
    lengths = np.arange(data.EXAMPLES) % 4 + 1
    numbers = data.numbers(data.EXAMPLES, 4)
    ids = [[(row * 3 + column) % 5 for column in range(4)] for row in range(data.EXAMPLES)]
    features = {
        "amount": ragged(numbers.tolist(), lengths),
        "kind": ragged(ids, lengths),
        "word": ragged([[[*WORDS, "pink"][one % 4] for one in row] for row in ids], lengths),
        "city": ragged([[["Bern", "Oslo", "Rome"][one % 3] for one in row] for row in ids], lengths),
        "code": ragged([[f"code-{one}" for one in row] for row in ids], lengths),
    }
    labels = (numbers[:, :1] * lengths[:, None] / 4.0).astype("float32")
    return data.dataset(features, labels, mode)


def model_fn(features, labels, mode, params):
    fc = tf.feature_column
    columns = [
        fc.sequence_numeric_column("amount"),
        fc.indicator_column(fc.sequence_categorical_column_with_identity("kind", 5)),
        fc.embedding_column(fc.sequence_categorical_column_with_vocabulary_list("word", WORDS, num_oov_buckets=1), 2),
        fc.embedding_column(
            fc.sequence_categorical_column_with_vocabulary_file("city", params["vocabulary"], 4, num_oov_buckets=1), 2
        ),
        fc.embedding_column(fc.sequence_categorical_column_with_hash_bucket("code", 7), 3),
    ]
    inputs, lengths = tf.keras.experimental.SequenceFeatures(columns)(features)
    inputs = tf.keras.layers.LayerNormalization()(inputs)
    outputs, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(3), inputs, sequence_length=lengths, dtype=tf.float32)
    predictions = tf.keras.layers.Dense(1)(tf.reduce_sum(outputs, 1))
    loss = tf.losses.mean_squared_error(labels, predictions)
    train_op = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    metrics = {"error": tf.metrics.mean_absolute_error(labels, predictions)}
    return tf.estimator.EstimatorSpec(mode, {"y": predictions}, loss, train_op, metrics)
