"""All optimizers of tf.train, each with variables of its own."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.regression(mode)


def optimizers(step):
    return {
        "adadelta": tf.train.AdadeltaOptimizer(0.5),
        "adagrad": tf.train.AdagradOptimizer(0.1),
        "dual_averaging": tf.train.AdagradDAOptimizer(0.1, step, l1_regularization_strength=0.001),
        "adam": tf.train.AdamOptimizer(0.02),
        "ftrl": tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01),
        "descent": tf.train.GradientDescentOptimizer(0.1),
        "momentum": tf.train.MomentumOptimizer(0.05, 0.9),
        "nesterov": tf.train.MomentumOptimizer(0.05, 0.9, use_nesterov=True),
        "proximal_adagrad": tf.train.ProximalAdagradOptimizer(0.1, l1_regularization_strength=0.01),
        "proximal": tf.train.ProximalGradientDescentOptimizer(0.1, l2_regularization_strength=0.01),
        "rmsprop": tf.train.RMSPropOptimizer(0.01, momentum=0.5),
        "centered": tf.train.RMSPropOptimizer(0.01, centered=True),
    }


def model_fn(features, labels, mode):
    step = tf.train.get_global_step()
    rows = tf.cast(tf.abs(features[:, 0]) * 5, tf.int32)
    losses, updates, metrics = [], [], {}
    for name, optimizer in optimizers(step).items():
        with tf.variable_scope(name):
            weights = tf.get_variable("weights", [4, 1])
            table = tf.get_variable("table", [6, 1])  # its gradients are sparse
            predictions = tf.matmul(features, weights) + tf.nn.embedding_lookup(table, rows)
            losses.append(tf.reduce_mean(tf.square(predictions - labels)))
            updates.append(optimizer.minimize(losses[-1], var_list=[weights, table]))
            metrics[name] = tf.metrics.mean_squared_error(labels, predictions)
    with tf.control_dependencies(updates):
        train_op = tf.assign_add(step, 1)
    return tf.estimator.EstimatorSpec(mode, {"y": predictions}, tf.add_n(losses), train_op, metrics)
