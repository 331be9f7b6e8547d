"""A `tf.train.Checkpoint` as the saver of a Scaffold: 2.15 and the runner write its objects, and read each other's."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.regression(mode)


class Net(tf.Module):
    """Two variables, which are attributes of an object."""

    def __init__(self):
        super().__init__(name="net")
        self.kernel = tf.get_variable("net/kernel", [4, 1])
        self.bias = tf.get_variable("net/bias", [1], initializer=tf.zeros_initializer())

    def __call__(self, inputs):
        return tf.matmul(inputs, self.kernel) + self.bias


def model_fn(features, labels, mode):
    net, step, optimizer = Net(), tf.train.get_or_create_global_step(), tf.train.AdamOptimizer(0.05)
    predictions = net(features)
    loss = tf.losses.mean_squared_error(labels, predictions)
    metrics = {"error": tf.metrics.mean_absolute_error(labels, predictions)}
    if mode == tf.estimator.ModeKeys.EVAL:
        scaffold = tf.train.Scaffold(saver=tf.compat.v2.train.Checkpoint(net=net, step=step))
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics, scaffold=scaffold)
    train_op = optimizer.minimize(loss, step)
    scaffold = tf.train.Scaffold(saver=tf.compat.v2.train.Checkpoint(net=net, step=step, optimizer=optimizer))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, scaffold=scaffold)
