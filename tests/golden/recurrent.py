"""Cells of tf.nn.rnn_cell, alone and stacked, and the loops that run them."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    series = data.numbers(data.EXAMPLES, 5, 3)
    lengths = (np.arange(data.EXAMPLES) % 4 + 2).astype("int32")
    labels = series.sum((1, 2))[:, None] / 4.0
    return data.dataset({"series": series, "lengths": lengths}, labels.astype("float32"), mode)


def model_fn(features, labels, mode):
    series, lengths = features["series"], features["lengths"]
    layers = [
        tf.nn.rnn_cell.LSTMCell(4, use_peepholes=True, num_proj=3),
        tf.nn.rnn_cell.ResidualWrapper(tf.nn.rnn_cell.GRUCell(3)),
        tf.nn.rnn_cell.DropoutWrapper(tf.nn.rnn_cell.BasicLSTMCell(4), output_keep_prob=1.0),
    ]
    outputs, states = tf.nn.dynamic_rnn(
        tf.nn.rnn_cell.MultiRNNCell(layers), series, sequence_length=lengths, dtype=tf.float32, scope="stack"
    )
    (forward, backward), _ = tf.nn.bidirectional_dynamic_rnn(
        tf.nn.rnn_cell.GRUCell(3), tf.nn.rnn_cell.LSTMCell(2), outputs, sequence_length=lengths, dtype=tf.float32
    )
    _, last = tf.nn.static_rnn(
        tf.nn.rnn_cell.BasicRNNCell(3), tf.unstack(series, axis=1), dtype=tf.float32, scope="unrolled"
    )
    states_of_stack = [states[0].h, states[1], states[2].c]
    net = tf.concat([tf.reduce_mean(forward, 1), tf.reduce_mean(backward, 1), last, *states_of_stack], 1)
    predictions = tf.layers.dense(net, 1)
    loss = tf.losses.mean_squared_error(labels, predictions)
    metrics = {"error": tf.metrics.root_mean_squared_error(labels, predictions)}
    train_op = tf.train.RMSPropOptimizer(0.01).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, metrics)
