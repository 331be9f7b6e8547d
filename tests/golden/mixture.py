"""What files of 1.13 to 1.15 mix: `tf.compat.v1` inside of TensorFlow 1, an optimizer in `tf.cond`, a constraint."""

from __future__ import annotations

import keras
import tensorflow.compat.v1 as tf

from tests.golden import data

EVERY = 3


def input_fn(mode):
    return tf.compat.v1.data.make_one_shot_iterator(data.regression(mode)).get_next()


def model_fn(features, labels, mode):
    step = tf.compat.v1.train.get_or_create_global_step()
    with tf.compat.v1.variable_scope("net"):
        hidden = tf.layers.dense(features, 5, activation=tf.compat.v2.nn.tanh, name="hidden")
    layer = keras.layers.Dense(1, kernel_constraint=keras.constraints.NonNeg(), name="out")
    predictions = layer(hidden)
    loss = tf.compat.v1.losses.mean_squared_error(labels, predictions)
    if mode == tf.compat.v1.estimator.ModeKeys.EVAL:
        metrics = {"error": tf.compat.v1.metrics.mean_absolute_error(labels, predictions)}
        return tf.compat.v1.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
    variables = tf.compat.v1.trainable_variables()
    sums = [
        tf.get_variable(one.op.name + "/sum", one.shape, initializer=tf.zeros_initializer(), trainable=False)
        for one in variables
    ]
    gradients = tf.gradients(loss, variables)
    added = [tf.assign_add(total, gradient) for total, gradient in zip(sums, gradients, strict=True)]

    def update():
        pairs = [(total / EVERY, one) for total, one in zip(sums, variables, strict=True)]
        with tf.control_dependencies([optimizer.apply_gradients(pairs)]):
            return tf.group(*[tf.assign(total, tf.zeros_like(total)) for total in sums])

    with tf.control_dependencies(added):
        updated = tf.cond(tf.equal(step % EVERY, EVERY - 1), update, tf.no_op)
    with tf.control_dependencies([updated]):
        train_op = tf.assign_add(step, 1)
    tensors = [loss, tf.reduce_mean(predictions)]
    hooks = [tf.train.LoggingTensorHook(tensors, every_n_iter=10), Keys({loss: loss, 1: tensors[1], "s": (step,)})]
    return tf.compat.v1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)


class Keys(tf.compat.v1.train.SessionRunHook):
    """Fetches with keys of several kinds, which come back as they are."""

    def __init__(self, fetches):
        self.fetches = fetches

    def before_run(self, run_context):
        return tf.compat.v1.train.SessionRunArgs(self.fetches)

    def after_run(self, run_context, run_values):
        assert list(run_values.results) == list(self.fetches)
        loss, mean, (step,) = run_values.results.values()
        assert loss.shape == mean.shape == () and step >= 0
