"""Variable scopes: reuse, custom getters, averages of what is trained, variables that start from others."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.regression(mode)


def tower(inputs, reuse=None, getter=None):
    with tf.variable_scope("tower", reuse=reuse, custom_getter=getter):
        with tf.variable_scope("hidden", initializer=tf.glorot_uniform_initializer()):
            kernel = tf.get_variable("kernel", [4, 5], regularizer=lambda weights: 0.01 * tf.reduce_sum(weights**2))
            bias = tf.get_variable("bias", [5], initializer=tf.zeros_initializer())
        hidden = tf.tanh(tf.nn.bias_add(tf.matmul(inputs, kernel), bias))
        return tf.layers.dense(hidden, 1, name="out")


def within(value):
    """It would leave this range within a few steps."""
    return tf.clip_by_value(value, 0.2, 0.3)


def halved(getter, name, *args, **kwargs):
    """What model_fn sees of these variables is half of what is trained."""
    return getter(name, *args, **kwargs) * 0.5


def model_fn(features, labels, mode):
    step = tf.train.get_or_create_global_step()
    averages = tf.train.ExponentialMovingAverage(0.8, num_updates=step)

    def averaged(getter, name, *args, **kwargs):
        variable = getter(name, *args, **kwargs)
        return averages.average(variable)

    first = tower(features)
    second = tower(features * 0.5, reuse=True)
    shared = []
    for value in (features[:, :2], features[:, 2:]):
        with tf.variable_scope("shared", reuse=tf.AUTO_REUSE):
            shared.append(tf.matmul(value, tf.get_variable("kernel", [2, 1])))
    with tf.variable_scope("halved", custom_getter=halved):
        scale = tf.get_variable("scale", [1], initializer=tf.constant_initializer(1.5))
    base = tf.get_variable("base", initializer=tf.constant([0.25]), constraint=within)
    follower = tf.Variable(base.initial_value * 2.0, name="follower")
    lazy = tf.Variable(lambda: tf.fill([1], 0.125), name="lazy")
    count = tf.Variable(0, name="counted", trainable=False)
    predictions = (first + second + tf.add_n(shared)) * scale + base + follower + lazy
    tf.losses.mean_squared_error(labels, predictions)
    tf.losses.add_loss(0.001 * tf.reduce_sum(tf.square(follower)))
    loss = tf.losses.get_total_loss()
    assert [variable.op.name for variable in tf.trainable_variables("tower/hidden")] == [
        "tower/hidden/kernel",
        "tower/hidden/bias",
    ]
    means = [tf.reduce_mean(variable) for variable in tf.trainable_variables()]
    for variable, mean in zip(tf.trainable_variables(), means, strict=True):
        tf.summary.scalar("mean/" + variable.op.name, mean)
    # A session runs summaries beside train_op: without this order a third of 2.15's runs had a mean of after the step.
    with tf.control_dependencies(means), tf.variable_scope("training"):
        trained = tf.train.AdamOptimizer(0.05).minimize(loss, step, var_list=tf.trainable_variables())
    with tf.control_dependencies([trained]), tf.name_scope("averaging"):
        averaging = averages.apply(tf.trainable_variables())
    train_op = tf.group(averaging, tf.assign_add(count, 2))
    smooth = tower(features, reuse=True, getter=averaged)
    metrics = {
        "smooth": tf.metrics.mean_squared_error(labels, smooth),
        "raw": tf.metrics.mean_squared_error(labels, first),
        "count": tf.metrics.mean(count),
    }
    return tf.estimator.EstimatorSpec(mode, {"smooth": smooth}, loss, train_op, metrics)
