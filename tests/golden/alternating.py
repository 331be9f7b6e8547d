"""Two networks trained in turn by hooks, as a GAN: `train_op` only counts, each run of a hook takes a batch."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tests.golden import data


def input_fn(mode):
    return data.regression(mode)


class RunTrainOps(tf.train.SessionRunHook):
    """Runs the train_op of one network several times before each step, with what it is fed."""

    def __init__(self, train_op, times, feed_dict=None):
        self.train_op, self.times, self.feed_dict = train_op, times, feed_dict

    def before_run(self, run_context):
        for _ in range(self.times):
            run_context.session.run([self.train_op], self.feed_dict)


class Corrects(tf.train.SessionRunHook):
    """Takes a batch of its own before each step and assigns by it, and looks at another one after the step."""

    def __init__(self, error, offset):
        self.error, self.value = error, tf.placeholder(tf.float32, [])
        self.assign = tf.assign(offset, self.value)

    def before_run(self, run_context):
        error = run_context.session.run(self.error)
        run_context.session.run(self.assign, {self.value: 0.1 * error})

    def after_run(self, run_context, run_values):
        assert run_context.session.run({"error": self.error})["error"].shape == ()


def model_fn(features, labels, mode):
    with tf.variable_scope("generator"):
        generated = tf.layers.dense(tf.layers.dense(features, 3, tf.nn.tanh, name="hidden"), 1, name="out")
    with tf.variable_scope("discriminator", reuse=tf.AUTO_REUSE):

        def judged(values):
            return tf.layers.dense(tf.layers.dense(values, 4, tf.nn.tanh, name="hidden"), 1, name="out")

        real, fake = judged(labels), judged(generated)
    offset = tf.get_variable("offset", [], initializer=tf.zeros_initializer(), trainable=False)
    generator_loss = tf.losses.mean_squared_error(tf.ones_like(fake), fake + offset)
    discriminator_loss = tf.reduce_mean(tf.square(real - 1) + tf.square(fake))
    loss = generator_loss + tf.reduce_mean(tf.square(generated - labels))
    metrics = {"error": tf.metrics.mean_absolute_error(labels, generated)}
    rate = tf.placeholder_with_default(0.05, [], name="rate")

    def update(loss, optimizer, scope):
        return optimizer.minimize(loss, var_list=tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, scope))

    with tf.name_scope("update"):
        generator = update(loss, tf.train.AdamOptimizer(0.02), "generator")
        discriminator = update(discriminator_loss, tf.train.GradientDescentOptimizer(rate), "discriminator")
    hooks = [RunTrainOps(generator, 1), RunTrainOps(discriminator, 2, {rate: 0.1})]
    hooks.append(Corrects(tf.reduce_mean(generated - labels), offset))
    train_op = tf.train.get_or_create_global_step().assign_add(1)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics, training_hooks=hooks)
