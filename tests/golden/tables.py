"""Lookup tables of a list and of a file, into an embedding and back into words."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data

WORDS = ["red", "green", "blue", "grey"]
MORE = ["red", "violet", "blue"]


def input_fn(mode):
    chosen = [(WORDS + MORE)[number * number % 7] for number in range(data.EXAMPLES)]
    labels = [[float(len(word)) / 3.0] for word in chosen]
    return data.dataset({"word": chosen}, labels, mode)


def model_fn(features, labels, mode, params):
    word = features["word"]
    of_list = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(WORDS, list(range(4)), value_dtype=tf.int64), default_value=4
    )
    of_file = tf.lookup.StaticVocabularyTable(
        tf.lookup.TextFileInitializer(
            params["vocabulary"],
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        num_oov_buckets=2,
    )
    back = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(list(range(4)), WORDS, key_dtype=tf.int64), default_value="?"
    )
    ids = of_list.lookup(word)
    embedding = tf.get_variable("embedding", [5, 3])
    other = tf.get_variable("other", [5, 2])
    net = tf.concat([tf.nn.embedding_lookup(embedding, ids), tf.nn.embedding_lookup(other, of_file.lookup(word))], 1)
    predictions = tf.layers.dense(net, 1)
    loss = tf.losses.mean_squared_error(labels, predictions)
    known = tf.metrics.mean(tf.cast(tf.equal(back.lookup(ids), word), tf.float32))
    train_op = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, {"word": back.lookup(ids)}, loss, train_op, {"known": known})
