"""Scaffolds with savers: averages are evaluated, predicted and exported; checkpoints have the keys of another model."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.regression(mode)


def receiver():
    features = tf.placeholder(tf.float32, [None, 4])
    return tf.estimator.export.TensorServingInputReceiver(features, {"x": features})


def model_fn(features, labels, mode):
    with tf.variable_scope("net"):
        kernel = tf.get_variable("kernel", [4, 1])
        bias = tf.get_variable("bias", [1], initializer=tf.zeros_initializer())
    shift = tf.get_variable("shift", [1], initializer=tf.ones_initializer(), trainable=False)
    gain = tf.get_variable("gain", [], initializer=tf.ones_initializer(), trainable=False)
    predictions = gain * (tf.matmul(features, kernel) + bias + shift)
    averages = tf.train.ExponentialMovingAverage(0.9)
    if mode != tf.estimator.ModeKeys.TRAIN:
        names = averages.variables_to_restore()
        names["before/shift"] = names.pop("shift")
        scaffold = tf.train.Scaffold(
            saver=tf.train.Saver(names),
            local_init_op=tf.group(tf.assign(gain, 2.0), tf.tables_initializer()),
            ready_op=tf.report_uninitialized_variables(),
        )
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"y": predictions}, scaffold=scaffold)
    loss = tf.losses.mean_squared_error(labels, predictions)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"kernel": tf.metrics.mean(kernel), "error": tf.metrics.mean_absolute_error(labels, predictions)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics, scaffold=scaffold)
    with tf.name_scope("update"):
        step = tf.train.AdamOptimizer(0.05).minimize(loss, tf.train.get_global_step())
    with tf.control_dependencies([step]):
        train_op = tf.group(averages.apply([kernel, bias]), tf.assign_add(shift, [0.25]))
    names = {variable.op.name: variable for variable in tf.global_variables()}
    names["before/shift"] = names.pop("shift")
    # As the swapping saver of contrib: the kernel's key has its average.
    average = averages.average(bias)
    names[average.op.name], names[bias.op.name] = names[bias.op.name], names[average.op.name]
    scaffold = tf.train.Scaffold(saver=tf.train.Saver(names, max_to_keep=7))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, scaffold=scaffold)
