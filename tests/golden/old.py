"""Code that turns TensorFlow 2 off, as files of its first years do: variables that start from others, a loop, hooks.

The last one of the models: from here on, TensorFlow 2.15 is as it was in 1.x.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data

tf.disable_v2_behavior()


def input_fn(mode):
    return data.regression(mode)


def model_fn(features, labels, mode):
    step = tf.train.get_or_create_global_step()
    weights = tf.get_variable("weights", [4, 1])
    scale = tf.Variable(tf.ones([1]) * 1.25, name="scale")
    twice = tf.Variable(scale.initialized_value() * 2.0, name="twice")
    largest = tf.get_variable("largest", [], initializer=tf.zeros_initializer(), trainable=False)
    predictions = tf.matmul(features, weights) * scale + twice

    def more(index, total):
        return index + 1, total + tf.reduce_mean(tf.square(predictions[:, 0] - labels[:, 0])) / 3.0

    _, loss = tf.while_loop(lambda index, total: index < 3, more, (tf.constant(0), tf.constant(0.0)))
    loss += tf.cond(step < 10, lambda: 0.01 * tf.reduce_sum(tf.square(weights)), lambda: tf.constant(0.0))
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"error": tf.metrics.mean_absolute_error(labels, predictions), "largest": tf.metrics.mean(largest)}
        return tf.estimator.EstimatorSpec(mode, {"y": predictions}, loss, eval_metric_ops=metrics)
    noted = tf.identity(tf.assign(largest, tf.maximum(largest, loss)), name="noted")
    train_op = tf.group(noted, tf.train.MomentumOptimizer(0.02, 0.5).minimize(loss, global_step=step))
    hook = tf.train.LoggingTensorHook({"largest": "noted:0"}, every_n_iter=10)
    return tf.estimator.EstimatorSpec(mode, {"y": predictions}, loss, train_op, training_hooks=[hook])
