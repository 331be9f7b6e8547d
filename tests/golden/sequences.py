"""tf.keras: SequenceFeatures with every column of sequences, DenseFeatures, and layers with updates.

On TensorFlow 2.21 `tf.keras` is Keras 2 only with TF_USE_LEGACY_KERAS=1, which the runner sets for such a task.
"""

from __future__ import annotations

import numpy as np
import tensorflow
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


def shared_embeddings():
    """In the way of TensorFlow 2."""
    columns = [
        tf.feature_column.categorical_column_with_vocabulary_list(key, WORDS, num_oov_buckets=1)
        for key in ("word", "city")
    ]
    return tensorflow.feature_column.shared_embeddings(columns, 2)


def model_of_keras(width):
    """A functional model around a sequential one."""
    inputs = tf.keras.Input([width])
    inner = tf.keras.Sequential([tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(3, activation="tanh")])
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inner(inputs)))


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
    outputs, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(3), inputs, sequence_length=lengths, dtype=tf.float32)
    dense = tf.keras.layers.DenseFeatures(shared_embeddings())(features)
    net = tf.concat([tf.reduce_sum(outputs, 1), dense], 1)
    normalizer = tf.keras.layers.BatchNormalization(momentum=0.8)
    # Neither shift nor scale: BatchNormalization takes them away, so their gradients would be rounding alone, different
    # on each CPU, and Adam makes whole steps of them.
    net = tf.keras.layers.LayerNormalization(center=False, scale=False)(net)
    normal = normalizer(net, training=mode == tf.estimator.ModeKeys.TRAIN)
    hidden = tf.keras.layers.Dense(4, activation="tanh", kernel_regularizer=tf.keras.regularizers.l2(0.01))
    net = hidden(normal)
    top = model_of_keras(4)
    predictions = top(net, training=mode == tf.estimator.ModeKeys.TRAIN)
    loss = tf.losses.mean_squared_error(labels, predictions) + tf.add_n(hidden.losses)
    updates = normalizer.updates + top.get_updates_for(net) + top.get_updates_for(None)
    with tf.control_dependencies(updates):
        train_op = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    metrics = {"error": tf.metrics.mean_absolute_error(labels, predictions)}
    return tf.estimator.EstimatorSpec(mode, {"y": predictions}, loss, train_op, metrics)
