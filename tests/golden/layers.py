"""tf.layers: what they create, what they add to UPDATE_OPS, and their regularizers; tf.summary."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    images = data.numbers(data.EXAMPLES, 8, 8, 1)
    labels = (images.mean((1, 2, 3)) > 0).astype("int32") + (images[:, 0, 0, 0] > 0.5).astype("int32")
    return data.dataset(images, labels, mode)


def in_other_dimensions(images):
    """The layers of sequences and of volumes."""
    net = tf.layers.conv1d(images[:, :, :, 0], 3, 2, activation=tf.nn.tanh)
    net = tf.layers.max_pooling1d(tf.layers.separable_conv1d(net, 3, 2), 2, 1)
    rows = tf.layers.flatten(tf.layers.average_pooling1d(net, 2, 2))
    net = tf.layers.conv3d(tf.reshape(images, [-1, 4, 4, 4, 1]), 2, 2, activation=tf.nn.tanh)
    net = tf.layers.conv3d_transpose(tf.layers.max_pooling3d(net, 2, 1), 2, 2, activation=tf.nn.tanh)
    return tf.concat([rows, tf.layers.flatten(tf.layers.average_pooling3d(net, 2, 1))], 1)


def model_fn(features, labels, mode):
    training = mode == tf.estimator.ModeKeys.TRAIN

    def regularizer(weights):
        return 0.01 * tf.nn.l2_loss(weights)

    net = tf.layers.conv2d(features, 4, 3, padding="same", use_bias=False, kernel_regularizer=regularizer)
    net = tf.layers.batch_normalization(net, momentum=0.9, training=training)
    net = tf.nn.relu(net)
    net = tf.layers.max_pooling2d(net, 2, 2)
    normalizer = tf.layers.BatchNormalization(momentum=0.5, scale=False)
    net = tf.nn.relu(normalizer(tf.layers.conv2d(net, 4, 3, use_bias=False, name="second"), training=training))
    net = tf.layers.average_pooling2d(net, 2, 1)
    net = tf.layers.separable_conv2d(net, 3, 2, padding="same", activation=tf.nn.tanh)
    net = tf.layers.conv2d_transpose(net, 3, 2, strides=2, activation=tf.nn.tanh)
    net = tf.concat([tf.layers.flatten(net), in_other_dimensions(features)], 1)
    net = tf.layers.dropout(net, 0.0, training=training)
    net = tf.layers.dense(net, 6, activation=tf.nn.tanh, kernel_regularizer=regularizer)
    logits = tf.layers.Dense(3, name="logits", kernel_constraint=lambda weights: weights * 0.9)(net)
    predictions = {"classes": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions)
    tf.losses.sparse_softmax_cross_entropy(labels, logits)
    loss = tf.losses.get_total_loss()
    tf.summary.scalar("regularization", tf.losses.get_regularization_loss())
    tf.summary.histogram("logits_seen", logits)
    tf.summary.image("first", features, max_outputs=1)
    metrics = {"accuracy": tf.metrics.accuracy(labels, predictions["classes"])}
    tf.summary.scalar("accuracy_so_far", metrics["accuracy"][1])
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train_op = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op)
