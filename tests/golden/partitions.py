"""Variables in parts: a fixed number of them, by size, and along another axis; slots and averages of them."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    ids = (data.numbers(data.EXAMPLES, 3) * 1000).astype("int32") % 10
    labels = (ids.sum(1, keepdims=True) / 10.0 - 1.0).astype("float32")
    return data.dataset(ids, labels, mode)


def model_fn(features, labels, mode):
    step = tf.train.get_global_step()
    with tf.variable_scope("embedding", partitioner=tf.fixed_size_partitioner(3)):
        table = tf.get_variable("table", [10, 4])
    embedded = tf.nn.embedding_lookup(table, features, partition_strategy="div")
    net = tf.reshape(embedded, [-1, 12])
    with tf.variable_scope("wide", partitioner=tf.min_max_variable_partitioner(max_partitions=2, min_slice_size=64)):
        kernel = tf.get_variable("kernel", [12, 6])
        small = tf.get_variable("small", [6], initializer=tf.zeros_initializer())
    net = tf.tanh(tf.matmul(net, kernel) + small)
    columns = tf.get_variable("columns", [6, 4], partitioner=tf.fixed_size_partitioner(2, axis=1))
    sized = tf.get_variable("sized", [4, 1], partitioner=tf.variable_axis_size_partitioner(8))
    predictions = tf.matmul(tf.tanh(tf.matmul(net, columns)), sized)
    loss = tf.losses.mean_squared_error(labels, predictions)
    averages = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([tf.train.AdagradOptimizer(0.1).minimize(loss, step)]):
        train_op = averages.apply(list(table))
    metrics = {
        "error": tf.metrics.mean_absolute_error(labels, predictions),
        "average": tf.metrics.mean(tf.concat([averages.average(part) for part in table], 0)),
    }
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, metrics)
