"""What a model begins with: a checkpoint of another model, and Scaffold's init_fn and saver."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.regression(mode)


def model_fn(features, labels, mode, params):
    with tf.variable_scope("mine"):
        kernel = tf.get_variable("kernel", [4, 5])
        bias = tf.get_variable("bias", [5])
    net = tf.tanh(tf.matmul(features, kernel) + bias)
    predictions = tf.layers.dense(net, 1, kernel_initializer=tf.ones_initializer(), name="out")
    offset = tf.get_variable("offset", [1], initializer=tf.zeros_initializer())
    moved = tf.get_variable("moved", [1], initializer=tf.zeros_initializer())
    predictions += offset + moved
    loss = tf.losses.mean_squared_error(labels, predictions)
    tf.train.init_from_checkpoint(params["checkpoint"], {"tower/hidden/": "mine/", "lazy": offset})
    with tf.name_scope("update"):
        train_op = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    assignment = tf.assign(moved, [0.75])
    scaffold = tf.train.Scaffold(
        init_fn=lambda scaffold, session: session.run(assignment), saver=tf.train.Saver(max_to_keep=7)
    )
    metrics = {"error": tf.metrics.mean_absolute_error(labels, predictions)}
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, metrics, scaffold=scaffold)
